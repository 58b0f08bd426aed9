"""What a step hands to the modules of a model and asks for itself, and what a trace tells it.

`ModelOps` is the protocol. The class that answers is chosen once, in hfjax/step/build.py: plain JAX
or kernels in its place (wings/kernels), devices that share rows (wings/context), a grid
(wings/grid). None of them knows the others; a check that looks at a model hands it one of its own.
What most of them answer alike is here.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol

import jax
from jax import lax
from jax.extend import source_info_util
from jax.sharding import Mesh

from hfjax.parallel.engine.comm_plan import CollectiveKernel, CollectiveOp
from hfjax.parallel.execution import Execution
from hfjax.parallel.mesh import DATA_AXES, active_batch_axes, in_use, size_of
from hfjax.parallel.offload.activations import OffloadReport
from hfjax.parallel.spmd.global_batch import GlobalBatch
from hfjax.parallel.spmd.nested import InnerAxes
from hfjax.parallel.spmd.partition_context import CommEvent, is_recording
from hfjax.parallel.spmd.placements import AxisGroup
from hfjax.parallel.spmd.rule_calls import map_token_groups
from hfjax.parallel.strategy import Axes
from hfjax.utils.head import head_logits

source_info_util.register_exclusion(__file__)  # the line of what is asked for is the user's

Names = tuple[str | None, ...]  # the logical axes of an activation


class ModelOps(Protocol):
    """What a module asks of its step (`hfjax.models.layers.Plain`); then what a step asks."""

    def attention(self, attend: Callable) -> Callable:
        """Return the attention that a layer runs."""
        ...

    def run_length(self, length: int) -> int:
        """Return how many positions follow each other, of those here."""
        ...

    def sum_over_batch(self, x: jax.Array) -> jax.Array:
        """Return sums of rows and positions, added over all devices that have others."""
        ...

    def channel_stats(self, x: jax.Array, axes: Any = None) -> tuple[jax.Array, jax.Array, int]:
        """Return mean and variance of each channel over rows and positions, and their number."""
        ...

    def matmul(self, place: Any, between: Names, multiply: Callable) -> Callable:
        """Return the product of a linear map between two named dimensions."""
        ...

    def outputs(
        self, x_BSD: jax.Array, kernel_VD: jax.Array, vocab: int, logits: Callable | None = None
    ) -> Any:
        """Return what the loss is given: logits, or a projection that they are never made of."""
        ...

    def lookup(self, table_VD: jax.Array, tokens_BS: jax.Array) -> jax.Array:
        """Return the row of each token in a table."""
        ...

    def experts(self, mixture: Any, x_GTD: jax.Array, routed: Any) -> jax.Array:
        """Return what the experts of a layer make of tokens."""
        ...

    def record_metrics(self, outputs: Any, routed: Callable, needed: bool) -> Any:
        """Return outputs with what routers told, for a loss that takes it."""
        ...

    def check_router_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Refuse a loss that has taken no part in what routers told."""
        ...

    def choose_kernel(self, op: CollectiveOp) -> CollectiveKernel | None:
        """Return what moves a parameter or a gradient in place of XLA, or None."""
        ...

    def slice_sequence(self, prepare: Callable, batch: Any) -> Any:
        """Return the part of a batch of whole rows that this device computes with."""
        ...

    def inner_groups(self) -> tuple[AxisGroup, ...]:
        """Return the devices that have other parts of the rows here, along each side."""
        ...

    def named_groups(self) -> Mapping[str, str]:
        """Return which side has parts of a dimension of parameters, by its name."""
        ...

    def check_positions(self, comms: Sequence[CommEvent], sent_bytes: int) -> None:
        """Refuse what devices that share rows send each other beyond a limit."""
        ...


# -- what those answer that have nothing to say: methods of their classes -------------------------


def bind_positional(
    function: Callable, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return arguments by position, and those that can only be given by name."""
    if not kwargs:
        return args, kwargs
    try:
        bound = inspect.signature(function).bind(*args, **kwargs)
    except (TypeError, ValueError):  # which the call itself will say
        return args, kwargs
    return bound.args, bound.kwargs


def no_inner_groups(self: ModelOps) -> tuple[AxisGroup, ...]:
    """Return none: every device has whole rows."""
    return ()


def no_named_groups(self: ModelOps) -> Mapping[str, str]:
    """Return none: parameters are whole where a module reads them."""
    return {}


def skip_position_check(self: ModelOps, comms: Sequence[CommEvent], sent_bytes: int) -> None:
    """Check nothing: no positions are elsewhere."""


def sum_over_data(self: Any, x: jax.Array) -> jax.Array:
    """Return sums of rows and positions, added over all devices of its mesh that have others."""
    axes = in_use(self.mesh, DATA_AXES)
    return lax.psum(x, axes) if axes else x


def unsliced_batch(self: ModelOps, prepare: Callable, batch: Any) -> Any:
    """Return the batch: its rows are whole."""
    return batch


def full_length(self: ModelOps, length: int) -> int:
    """Return the length: all positions of a row are here, and follow each other."""
    return length


def lookup_table(self: ModelOps, table_VD: jax.Array, tokens_BS: jax.Array) -> jax.Array:
    """Return the row of each token in a table; XLA knows how the table is split."""
    return table_VD[tokens_BS]


def make_logits(
    self: "CommonOps",
    x_BSD: jax.Array,
    kernel_VD: jax.Array,
    vocab: int,
    logits: Callable | None = None,
) -> jax.Array:
    """Return logits, the model's own where it hands over a function that makes them."""
    return logits() if logits else head_logits(self.inputs.place, x_BSD, kernel_VD, vocab)


# -- what each of them needs of a step ------------------------------------------------------------

LOAD = "expert_load"  # the metric that a loss has of what routers told
NO_ROUTER_METRICS = (
    "the routers of this model add to the loss, or balance their loads, and the loss takes no part "
    "in it. Use hfjax.models.moe.next_token_loss; mark a loss of your own with "
    "hfjax.models.moe.uses_router_metrics, let the model return hfjax.models.moe.Routed with what "
    "its "
    "mixtures told, and return hfjax.models.moe.with_routing(losses, weights, routed); or choose "
    "Router(balance_loss=0, z_loss=0, bias_rate=0)."
)


@dataclass(frozen=True)
class OpsInputs:
    """What every `ModelOps` is made of.

    Attributes:
        place: Where activations lie.
        run_experts: (mixture, tokens, routed) -> what experts make of them, on devices or here.
        loss: It may take what routers told.
        routers: Those that the loss needs, once the model is traced.
        mixtures: What each mixture of experts is given then, as shapes: tokens, where they go.
    """

    place: Callable
    run_experts: Callable
    loss: Callable
    routers: list[bool] = field(default_factory=list, compare=False)
    mixtures: list[Any] = field(default_factory=list, compare=False)


@dataclass(frozen=True)
class CommonOps:
    """The `ModelOps` of a step, whatever devices share; the rest is its class's own."""

    inputs: OpsInputs
    chooses_kernels: ClassVar[bool] = True  # a look at the model puts another in its place

    def experts(self, mixture: Any, x_GTD: jax.Array, routed: Any) -> jax.Array:
        """Return what the experts of a layer, spread over devices or not, make of tokens."""
        shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)
        self.inputs.mixtures.append(jax.tree.map(shape, (x_GTD, routed)))
        if mixture.tells:
            self.inputs.routers.append(True)
        if not is_recording():
            return self.inputs.run_experts(mixture, x_GTD, routed)
        with_arrays = lambda arrays: replace(mixture, arrays=arrays)
        run = lambda arrays, x, routed: self.inputs.run_experts(with_arrays(arrays), x, routed)
        sends_tokens = mixture.num_local < mixture.experts  # tokens, from each device's own rows
        return map_token_groups(run, sends_tokens)(mixture.arrays, x_GTD, routed)

    def record_metrics(self, outputs: Any, routed: Callable, needed: bool) -> Any:
        """Return outputs with what routers told, for a loss that takes it."""
        if getattr(self.inputs.loss, "uses_router_metrics", False):
            return routed(outputs)
        if needed:
            raise ValueError(NO_ROUTER_METRICS)
        return outputs

    def check_router_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Refuse a loss that has taken no part in what routers told: its metrics have no loads."""
        if self.inputs.routers and LOAD not in metrics:
            raise ValueError(NO_ROUTER_METRICS)


@dataclass
class TraceRecord:
    """Made with a step, and filled in while the step is traced."""

    ops: ModelOps
    global_batch: GlobalBatch  # how parts of the model see the rows of all devices
    # What layers keep for the backward pass, and what of it the host holds.
    offloaded: OffloadReport
    names: set[str] = field(default_factory=set)  # of tensors, where remat asks for names
    unread: set[str] = field(default_factory=set)  # parameters that nothing has read yet
    written: set[str] = field(default_factory=set)  # variables that the model writes to
    summed: dict[str, Axes] = field(default_factory=dict)  # gradients that are summed already
    seed: Any = 1.0  # the cotangent of the loss of a microbatch
    weighted: bool = False  # each microbatch's weight is summed before its backward pass

    @classmethod
    def of(
        cls, ops: ModelOps, execution: Execution, mesh: Mesh, partition: Callable
    ) -> "TraceRecord":
        """Return what a trace of a step fills in; `partition` runs programs of all rows."""
        axes = () if execution.rows == "own" else active_batch_axes(mesh)
        groups = ops.inner_groups()
        inner = InnerAxes(groups, partition, ops.named_groups()) if groups else None
        group, entry_dtype = (
            AxisGroup(axes, size_of(axes, mesh)),
            getattr(execution.precision, "enters", None),
        )
        global_batch = GlobalBatch(group, partition, inner, input_dtype=entry_dtype)
        return cls(ops, global_batch, OffloadReport(execution.offload))

    def begin(self, parameters: Iterable[str], seed: Any = 1.0) -> None:
        """Begin a trace: what JAX kept of an earlier one, it must not take for this one's."""
        self.seed, self.weighted = seed, False
        self.unread, self.written = set(parameters), set()
        self.names.clear()
        self.offloaded.entries.clear()
        self.global_batch.component_comms.clear()
        self.global_batch.inner_component_comms.clear()
