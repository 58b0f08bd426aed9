"""How the layers of a model run: what they recompute, and what of it the host keeps."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import jax

from hfjax.parallel.engine.model_ops import Traced
from hfjax.parallel.engine.unshard import is_stored
from hfjax.parallel.execution import Execution
from hfjax.parallel.jaxprs.program import Tensor
from hfjax.parallel.offload.activations import Share, share
from hfjax.parallel.offload.host_residuals import Choose, kept
from hfjax.parallel.remat import Remat
from hfjax.parallel.spmd.partition_context import is_recording


def offload_residuals(function: Callable, choose: Choose, barrier: bool = True) -> Callable:
    """Return `function(parameters, variables, x) -> (y, aux)` with some residuals on the host.

    `choose` selects them. Gradients are with respect to the slot of each `Stored`; its value is a
    constant.
    """

    def apply(parameters, variables, x):
        leaves, form = jax.tree.flatten(parameters, is_leaf=is_stored)
        weights = [p.slot if is_stored(p) else p for p in leaves]
        values = [replace(p, slot=None) if is_stored(p) else None for p in leaves]

        def run(known, weights, x):
            values, variables = known
            pairs = zip(values, weights, strict=True)
            joined = [w if v is None else replace(v, slot=w) for v, w in pairs]
            here = jax.tree.map(lambda x: x, variables)  # Variables that may change in this trace
            return function(form.unflatten(joined), here, x)

        return kept(run, choose, barrier)((values, variables), weights, x)

    return apply


def may_cut() -> bool:
    """Return whether a tensor can be cut without communication: on a device by itself."""
    mesh = jax.sharding.get_abstract_mesh()
    if (
        is_recording() and not mesh.axis_names
    ):  # which sees no mesh, and is on each device by itself
        return True
    manual = set(getattr(mesh, "manual_axes", ()))
    return bool(manual) and all(n == 1 for axis, n in mesh.shape.items() if axis not in manual)


@dataclass(frozen=True)
class LayerOptions:
    """How the layers of a model run in a training step, or in an evaluation."""

    execution: Execution
    gathers: bool  # parameters of layers are split: each layer gathers its own
    only_rows: bool  # the mesh has no axes but those of rows
    platform: str
    traced: Traced  # is told what layers keep, and what of it goes to the host

    @property
    def remat(self) -> Remat:
        """What layers compute again; what is named for the host is kept."""
        offload = self.execution.offload
        return self.execution.remat.keeping(*(offload.names if offload else ()))

    def policy(self, number: int = 0) -> Callable | None:
        """Return what layer `number` may save."""
        keep = self.gathers and not self.execution.reshard_after_forward
        views = self.gathers or self.tells_names
        return self.remat.policy(number, views, keep, self.traced.names)

    def offloading(self, function: Callable, name: str, times: int, barrier: bool) -> Callable:
        """Return (parameters, variables, x) -> (x, variables) that keeps a part on the host."""
        if self.keeps_all:
            return function
        choose = lambda tensors: self.choose(tensors, name, times)
        return offload_residuals(function, choose, barrier)

    @property
    def tells_names(self) -> bool:
        """Whether tensors are kept as layers name and make them, not in some view of them."""
        offload = self.execution.offload
        return offload is not None and offload.ratio is None

    @property
    def keeps_all(self) -> bool:
        """Whether everything that layers keep stays on the device."""
        return self.execution.offload is None or self.execution.offload.idle

    def choose(self, tensors: Sequence[Tensor], name: str, times: int) -> Share:
        """Return which tensors of layers go to the host, and tell it; there are `times` of them."""
        offload = self.execution.offload
        assert offload is not None
        chosen = share(offload, tensors, may_cut())
        self.traced.offloaded.add(name, times, tensors, chosen)
        return chosen
