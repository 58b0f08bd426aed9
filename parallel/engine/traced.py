"""What the trace of a step finds: one record, which checks and reports read afterwards."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from hfjax.parallel.activation_offload import Offloaded
from hfjax.parallel.engine.kernels import Kernels


@dataclass
class Traced:
    """Made with a step, and filled in while the step is traced."""

    kernels: Kernels  # which form each kernel takes, and why
    offloaded: Offloaded  # what layers keep for the backward pass, and what of it the host holds
    names: set[str] = field(default_factory=set)  # of tensors, where remat asks for names
    unread: set[str] = field(default_factory=set)  # parameters that nothing has read yet
    written: set[str] = field(default_factory=set)  # variables that the model writes to

    def begin(self, parameters: Iterable[str]) -> None:
        """Begin a trace: what JAX kept of an earlier one, it must not take for this one's."""
        self.unread, self.written = set(parameters), set()
