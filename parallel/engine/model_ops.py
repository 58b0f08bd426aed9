"""The operations that a step gives to a model's modules, and the record of its trace.

`ModelOps` is the protocol. Its class is chosen once, in hfjax/step/build.py: plain JAX or kernels
(extensions/kernel_dispatch), context parallel (extensions/context_parallel), a grid
(extensions/tensor_grid). None of them knows the others; a check that inspects a model uses one of
its own. What most of them have in common is here.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, Protocol

import jax
from jax import lax
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr
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

source_info_util.register_exclusion(__file__)  # source lines are the user's

Names = tuple[str | None, ...]  # the logical axes of an activation


class Component(NamedTuple):
    """The program of a component of a model: all of it, its embed, a layer, its head."""

    program: ClosedJaxpr
    parameters: Sequence[str]  # the paths of its first inputs
    times: int = 1  # how many layers it stands for


class ModelOps(Protocol):
    """What modules call (`hfjax.models.layers.LocalOps` without a step); then what a step calls."""

    def attention(self, attend: Callable) -> Callable:
        """Return the attention that a layer runs."""
        ...

    def run_length(self, length: int) -> int:
        """Return how many of this device's positions are contiguous."""
        ...

    def sum_over_batch(self, x: jax.Array) -> jax.Array:
        """Return sums over examples and positions, added over devices that have others."""
        ...

    def channel_stats(self, x: jax.Array, axes: Any = None) -> tuple[jax.Array, jax.Array, int]:
        """Return mean and variance of each channel over examples and positions, and the count."""
        ...

    def matmul(self, place: Any, between: Names, multiply: Callable) -> Callable:
        """Return the matmul of a linear map between two named dimensions."""
        ...

    def outputs(
        self, x_BSD: jax.Array, kernel_VD: jax.Array, vocab: int, logits: Callable | None = None
    ) -> Any:
        """Return the loss's input: logits, or a projection that never becomes logits."""
        ...

    def lookup(self, table_VD: jax.Array, tokens_BS: jax.Array) -> jax.Array:
        """Return the embedding of each token from a table."""
        ...

    def experts(self, mixture: Any, x_GTD: jax.Array, routed: Any) -> jax.Array:
        """Return the output of a layer's experts on tokens."""
        ...

    def add_router_metrics(self, outputs: Any, add_metrics: Callable, require_metrics: bool) -> Any:
        """Return outputs with router metrics, for a loss that uses them."""
        ...

    def check_router_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Refuse a loss that has not used router metrics."""
        ...

    def choose_kernel(self, op: CollectiveOp) -> CollectiveKernel | None:
        """Return the kernel that sends a parameter or gradient in place of XLA, or None."""
        ...

    def local_sequence_batch(self, prepare: Callable, batch: Any) -> Any:
        """Return this device's positions of a batch of full sequences."""
        ...

    def inner_groups(self) -> tuple[AxisGroup, ...]:
        """Return the groups of devices that have other parts of these examples."""
        ...

    def named_groups(self) -> Mapping[str, str]:
        """Return which group shards a dimension of parameters, by its name."""
        ...

    def check_positions(self, comms: Sequence[CommEvent], sent_bytes: int) -> None:
        """Refuse what devices that share sequences send each other beyond a limit."""
        ...

    def reads_model(self) -> bool:
        """Return whether something depends on the model: `read_model` is called before it runs."""
        ...

    def read_model(self, batch: Any, batch_group: AxisGroup, trace: Callable) -> None:
        """Choose what depends on the model: `trace(batch, group)` yields its components."""
        ...

    def context_choice(self) -> Any:
        """Return how devices that share sequences attend; None: none do, or not chosen yet."""
        ...


# -- defaults, which classes use as methods -------------------------------------------------------


def bind_positional(
    function: Callable, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return arguments by position, and those that can only be given by name."""
    if not kwargs:
        return args, kwargs
    try:
        bound = inspect.signature(function).bind(*args, **kwargs)
    except (TypeError, ValueError):  # the call itself will raise it
        return args, kwargs
    return bound.args, bound.kwargs


def no_inner_groups(self: ModelOps) -> tuple[AxisGroup, ...]:
    """Return none: every device has full examples."""
    return ()


def no_named_groups(self: ModelOps) -> Mapping[str, str]:
    """Return none: parameters are unsharded where a module reads them."""
    return {}


def skip_position_check(self: ModelOps, comms: Sequence[CommEvent], sent_bytes: int) -> None:
    """Check nothing: no positions are on other devices."""


def reads_nothing(self: ModelOps) -> bool:
    """Return that nothing depends on the model."""
    return False


def read_nothing(self: ModelOps, batch: Any, batch_group: AxisGroup, trace: Callable) -> None:
    """Choose nothing."""


def no_choice(self: ModelOps) -> None:
    """Return that no devices share sequences."""


def sum_over_data(self: Any, x: jax.Array) -> jax.Array:
    """Return sums over examples and positions, added over devices of its mesh that have others."""
    axes = in_use(self.mesh, DATA_AXES)
    return lax.psum(x, axes) if axes else x


def unsliced_batch(self: ModelOps, prepare: Callable, batch: Any) -> Any:
    """Return the batch: its sequences are full."""
    return batch


def full_length(self: ModelOps, length: int) -> int:
    """Return the length: all positions of a sequence are here, contiguous."""
    return length


def lookup_table(self: ModelOps, table_VD: jax.Array, tokens_BS: jax.Array) -> jax.Array:
    """Return the embedding of each token from a table; XLA knows how the table is sharded."""
    return table_VD[tokens_BS]


def make_logits(
    self: "CommonOps",
    x_BSD: jax.Array,
    kernel_VD: jax.Array,
    vocab: int,
    logits: Callable | None = None,
) -> jax.Array:
    """Return logits, the model's own if it gives a function that makes them."""
    return logits() if logits else head_logits(self.inputs.place, x_BSD, kernel_VD, vocab)


# -- what they have in common ---------------------------------------------------------------------

LOAD = "expert_load"  # the metric of routers' loads in a loss
NO_ROUTER_METRICS = (
    "the routers of this model add to the loss, or balance their loads, and the loss takes no part "
    "in it. Use hfjax.models.moe.next_token_loss; mark a loss of your own with "
    "hfjax.models.moe.uses_router_metrics, let the model return hfjax.models.moe.RoutedOutputs "
    "with what its mixtures told, and return hfjax.models.moe.with_routing(losses, weights, "
    "routed); or choose Router(balance_loss=0, z_loss=0, bias_rate=0)."
)


@dataclass(frozen=True)
class OpsInputs:
    """What every `ModelOps` is built from.

    Attributes:
        place: Constrains activations.
        run_experts: (mixture, tokens, routed) -> output of the experts, on all devices or this one.
        loss: It may use router metrics.
        routers: One entry per router that the loss needs, once the model is traced.
        mixtures: The inputs of each mixture of experts then, as shapes: tokens, routing.
    """

    place: Callable
    run_experts: Callable
    loss: Callable
    routers: list[bool] = field(default_factory=list, compare=False)
    mixtures: list[Any] = field(default_factory=list, compare=False)


@dataclass(frozen=True, eq=False)
class CommonOps:
    """What all `ModelOps` of a step have in common; the rest is their own."""

    inputs: OpsInputs
    chooses_kernels: ClassVar[bool] = True  # a check of the model replaces it by another

    def experts(self, mixture: Any, x_GTD: jax.Array, routed: Any) -> jax.Array:
        """Return the output of a layer's experts, spread over devices or not, on tokens."""
        shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)
        self.inputs.mixtures.append(jax.tree.map(shape, (x_GTD, routed)))
        if mixture.tells:
            self.inputs.routers.append(True)
        if not is_recording():
            return self.inputs.run_experts(mixture, x_GTD, routed)
        with_arrays = lambda arrays: replace(mixture, arrays=arrays)
        run = lambda arrays, x, routed: self.inputs.run_experts(with_arrays(arrays), x, routed)
        sends_tokens = mixture.num_local < mixture.experts  # from each device's own examples
        return map_token_groups(run, sends_tokens)(mixture.arrays, x_GTD, routed)

    def add_router_metrics(self, outputs: Any, add_metrics: Callable, require_metrics: bool) -> Any:
        """Return outputs with router metrics, for a loss that uses them."""
        if getattr(self.inputs.loss, "uses_router_metrics", False):
            return add_metrics(outputs)
        if require_metrics:
            raise ValueError(NO_ROUTER_METRICS)
        return outputs

    def check_router_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Refuse a loss that has not used router metrics: its own metrics have no loads."""
        if self.inputs.routers and LOAD not in metrics:
            raise ValueError(NO_ROUTER_METRICS)


@dataclass
class TraceRecord:
    """Created with a step, and filled in while the step is traced."""

    ops: ModelOps
    global_batch: GlobalBatch  # how parts of the model see the global batch
    # What layers save for the backward pass, and what of it is on the host.
    offloaded: OffloadReport
    names: set[str] = field(default_factory=set)  # of tensors, where remat asks for names
    unread: set[str] = field(default_factory=set)  # parameters that nothing has read yet
    written: set[str] = field(default_factory=set)  # variables that the model writes to
    summed: dict[str, Axes] = field(default_factory=dict)  # gradients that are summed already
    seed: Any = 1.0  # the cotangent of the loss of a microbatch
    weighted: bool = False  # each microbatch's weight is summed before its backward pass
    extra: Any = None  # `Extra`: arrays that `forward` and the loss ask for by name

    @classmethod
    def of(
        cls, ops: ModelOps, execution: Execution, mesh: Mesh, partition: Callable
    ) -> "TraceRecord":
        """Return an empty record; `partition` runs programs of the global batch."""
        axes = () if execution.batch_view == "local" else active_batch_axes(mesh)
        group, entry_dtype = (
            AxisGroup(axes, size_of(axes, mesh)),
            getattr(execution.precision, "enters", None),
        )
        global_batch = GlobalBatch(group, partition, input_dtype=entry_dtype)
        record = cls(ops, global_batch, OffloadReport(execution.offload))
        record.set_inner_groups()
        return record

    def set_inner_groups(self) -> None:
        """Partition functions over the positions and widths that devices share, too."""
        groups, partition = self.ops.inner_groups(), self.global_batch.run_partitioned
        inner = InnerAxes(groups, partition, self.ops.named_groups()) if groups else None
        self.global_batch = replace(self.global_batch, inner=inner)

    def begin(
        self,
        parameters: Iterable[str],
        seed: Any = 1.0,
        weighted: bool = False,
        extra: Any = None,
    ) -> None:
        """Begin a trace with new sets: JAX must not reuse what it cached in an earlier one."""
        self.seed, self.weighted, self.extra = seed, weighted, extra
        self.unread, self.written = set(parameters), set()
        self.names.clear()
        self.offloaded.entries.clear()
        self.global_batch.component_comms.clear()
        self.global_batch.inner_component_comms.clear()
