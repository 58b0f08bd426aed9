"""How the layers of a model run: what they recompute, and what goes to host memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import jax

from hfjax.parallel.engine.model_ops import TraceRecord
from hfjax.parallel.engine.unshard import is_sharded_param
from hfjax.parallel.execution import Execution
from hfjax.parallel.jaxprs.saved_tensor import Tensor
from hfjax.parallel.offload.activations import Share, select_tensors
from hfjax.parallel.offload.host_residuals import ChooseTensors, save_residuals_on_host
from hfjax.parallel.remat import Remat
from hfjax.parallel.spmd.partition_context import is_recording


def offload_residuals(
    function: Callable, choose_tensors: ChooseTensors, barrier: bool = True
) -> Callable:
    """Return `function(parameters, variables, x) -> (y, aux)` with some residuals on the host.

    `choose_tensors` selects them. Gradients are with respect to the slot of each
    `ShardedParam`; its value is a constant.
    """

    def apply(parameters, variables, x):
        leaves, treedef = jax.tree.flatten(parameters, is_leaf=is_sharded_param)
        weights = [p.slot if is_sharded_param(p) else p for p in leaves]
        values = [replace(p, slot=None) if is_sharded_param(p) else None for p in leaves]

        def run(known, weights, x):
            values, variables = known
            pairs = zip(values, weights, strict=True)
            params = [w if v is None else replace(v, slot=w) for v, w in pairs]
            variables_copy = jax.tree.map(
                lambda x: x, variables
            )  # Variables that may change in this trace
            return function(treedef.unflatten(params), variables_copy, x)

        return save_residuals_on_host(run, choose_tensors, barrier)((values, variables), weights, x)

    return apply


def can_split_locally() -> bool:
    """Return whether a tensor can be split without communication: in per-device code."""
    mesh = jax.sharding.get_abstract_mesh()
    if (
        is_recording() and not mesh.axis_names
    ):  # a recorded program sees no mesh, and runs per device
        return True
    manual = set(getattr(mesh, "manual_axes", ()))
    return bool(manual) and all(n == 1 for axis, n in mesh.shape.items() if axis not in manual)


@dataclass(frozen=True)
class LayerOptions:
    """How the layers of a model run in a training step, or in an evaluation."""

    execution: Execution
    gathers: bool  # parameters of layers are sharded: each layer gathers its own
    only_batch_axes: bool  # the mesh has no axes but batch axes
    platform: str
    trace: TraceRecord  # records what layers save, and what of it goes to the host

    @property
    def remat(self) -> Remat:
        """What layers recompute; tensors named for the host are saved."""
        offload = self.execution.offload
        return self.execution.remat.keeping(*(offload.names if offload else ()))

    def policy(self, number: int = 0) -> Callable | None:
        """Return the checkpoint policy of layer `number`."""
        keep = self.gathers and not self.execution.reshard_after_forward
        views = self.gathers or self.offloads_by_name
        return self.remat.policy(number, views, keep, self.trace.names)

    def wrap_offload(self, function: Callable, name: str, times: int, barrier: bool) -> Callable:
        """Return (parameters, variables, x) -> (x, variables) with some residuals on the host."""
        if self.has_no_offload:
            return function
        choose_tensors = lambda tensors: self.choose_offload(tensors, name, times)
        return offload_residuals(function, choose_tensors, barrier)

    @property
    def offloads_by_name(self) -> bool:
        """Whether tensors are saved as layers name and make them, not in some view of them."""
        offload = self.execution.offload
        return offload is not None and offload.ratio is None

    @property
    def has_no_offload(self) -> bool:
        """Whether everything that layers save stays on the device."""
        return self.execution.offload is None or self.execution.offload.idle

    def choose_offload(self, tensors: Sequence[Tensor], name: str, times: int) -> Share:
        """Return which tensors of `times` layers go to the host, and record it."""
        offload = self.execution.offload
        assert offload is not None
        chosen = select_tensors(offload, tensors, can_split_locally())
        self.trace.offloaded.add(name, times, tensors, chosen)
        return chosen
