"""What a step hands to the modules of a model and asks for itself, and what a trace tells it."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import jax

from hfjax.base.mean import Mean
from hfjax.parallel.activation_offload import Offloaded
from hfjax.parallel.engine.legs import Move, Sender

Names = tuple[str | None, ...]  # the logical axes of an activation


class Local(Protocol):
    """What a module asks of its step (`self.kernels`); `hfjax.models.parts.Plain` has no step.

    `parallel/for_models` has what answers; the composition of a step chooses it.
    """

    def attention(self, attend: Callable) -> Callable:
        """Return the attention that a layer runs."""
        ...

    def matmul(self, place: Any, between: Names, multiply: Callable) -> Callable:
        """Return the product of a linear map between two named dimensions."""
        ...

    def mean(self, x: jax.Array, name: str | None) -> jax.Array:
        """Return the mean over the whole of the last dimension."""
        ...

    def lookup(self, table_VD: jax.Array, tokens_BS: jax.Array) -> jax.Array:
        """Return the row of each token in a table."""
        ...

    def experts(self, mixture: Any, x_GTD: jax.Array, routed: Any) -> jax.Array:
        """Return what the experts of a layer make of tokens."""
        ...

    def positions(self, length: int, names: Names = ()) -> jax.Array | None:
        """Return the numbers, in whole rows, of the positions here; None: from 0 on."""
        ...

    def sender(self, move: Move) -> Sender | None:
        """Return what moves a parameter or a gradient in place of XLA, or None."""
        ...

    def check_told(self, metrics: Mapping[str, Any]) -> None:
        """Refuse a loss that has taken no part in what routers told."""
        ...

    def counted_once(self, mean: Mean) -> Mean:
        """Return the sums of a loss so that all devices together count them once."""
        ...


class Dealing(NamedTuple):
    """How the rows of a batch come to devices that share them, and their outputs together again."""

    # (context, variables without keys, keys or None, batch, joins) -> this device's part of the
    # batch; `joins`: outputs may be parts, since undealt joins them.
    dealt: Callable
    undealt: Callable  # (context, outputs of the parts) -> outputs of whole rows


@dataclass
class Traced:
    """Made with a step, and filled in while the step is traced."""

    kernels: Local  # which form each kernel takes, and why
    offloaded: Offloaded  # what layers keep for the backward pass, and what of it the host holds
    names: set[str] = field(default_factory=set)  # of tensors, where remat asks for names
    unread: set[str] = field(default_factory=set)  # parameters that nothing has read yet
    written: set[str] = field(default_factory=set)  # variables that the model writes to
    parts: list[dict[int, str]] = field(default_factory=list)  # of outputs on a grid: see Grid

    def begin(self, parameters: Iterable[str]) -> None:
        """Begin a trace: what JAX kept of an earlier one, it must not take for this one's."""
        self.unread, self.written = set(parameters), set()
