"""The kernels of a step: handed to the modules and to the optimizer that have use for them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from jax.sharding import Mesh

from hfjax.pallas_kernels.choice import Choice, Wanted
from hfjax.rows import aligned


@dataclass(frozen=True)
class Kernels:
    """Chooses the form of each capability on a mesh, and remembers what was chosen: print it.

    Known once the step is traced: what nothing in the step asked for is not in it.
    """

    wanted: Wanted
    mesh: Mesh
    without_logits: bool = False  # the loss takes a Projection in place of logits
    choices: dict[str, Choice] = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, wanted: Wanted, mesh: Mesh, loss: Callable) -> "Kernels":
        """Return the kernels of a step with this loss."""
        return cls(wanted, mesh, getattr(loss, "takes_projection", False))

    def form(self, kernel: str, refusal: str | None = None) -> str:
        """Return the form to take: pallas, xla or reference."""
        choice = self.wanted.choose(kernel, self.mesh.devices.flat[0], refusal)
        self.choices[kernel] = choice
        return choice.form

    def attention(self, attend: Callable) -> Callable:
        """Return the attention that a layer runs."""
        return attend

    def outputs(self, x_BSD: Any, kernel_VD: Any, vocab: int, logits: Callable) -> Any:
        """Return what the loss is given."""
        return logits()

    def __str__(self) -> str:
        rows = [[c.kernel, c.form, c.why] for c in self.choices.values()]
        return "\n".join(aligned(rows)) if rows else "no kernel has a part in this step"
