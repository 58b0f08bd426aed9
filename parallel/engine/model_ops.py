"""What a step hands to the modules of a model and asks for itself, and what a trace tells it.

`Local` is the protocol. The class that answers is chosen once, in hfjax/step/build.py: plain JAX or
kernels in its place (wings/kernels), devices that share rows (wings/context), a grid (wings/grid).
None of them knows the others; a check that looks at a model hands it one of its own. What most of
them answer alike is here.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol

import jax
from jax import lax
from jax.extend import source_info_util
from jax.sharding import Mesh

from hfjax.parallel.engine.comm_plan import Move, Sender
from hfjax.parallel.execution import Execution
from hfjax.parallel.mesh import SAMPLE_AXES, in_use, row_axes, size_of
from hfjax.parallel.offload.activations import Offloaded
from hfjax.parallel.spmd.global_batch import OnRows
from hfjax.parallel.spmd.nested import InnerSides
from hfjax.parallel.spmd.partition_context import Join, is_recording
from hfjax.parallel.spmd.placements import Side
from hfjax.parallel.spmd.rule_calls import like_tokens
from hfjax.parallel.strategy import Axes
from hfjax.utils.head import logits_of

source_info_util.register_exclusion(__file__)  # the line of what is asked for is the user's

Names = tuple[str | None, ...]  # the logical axes of an activation


class Local(Protocol):
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

    def moments(self, x: jax.Array, axes: Any = None) -> tuple[jax.Array, jax.Array, int]:
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

    def told(self, outputs: Any, routed: Callable, needed: bool) -> Any:
        """Return outputs with what routers told, for a loss that takes it."""
        ...

    def check_told(self, metrics: Mapping[str, Any]) -> None:
        """Refuse a loss that has taken no part in what routers told."""
        ...

    def sender(self, move: Move) -> Sender | None:
        """Return what moves a parameter or a gradient in place of XLA, or None."""
        ...

    def dealt(self, prepared: Callable, batch: Any) -> Any:
        """Return the part of a batch of whole rows that this device computes with."""
        ...

    def inner_sides(self) -> tuple[Side, ...]:
        """Return the devices that have other parts of the rows here, along each side."""
        ...

    def named_sides(self) -> Mapping[str, str]:
        """Return which side has parts of a dimension of parameters, by its name."""
        ...

    def check_positions(self, joins: Sequence[Join], sent: int) -> None:
        """Refuse what devices that share rows send each other beyond a limit."""
        ...


# -- what those answer that have nothing to say: methods of their classes -------------------------


def by_position(
    function: Callable, given: Sequence[Any], named: Mapping[str, Any]
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return arguments by position, and those that can only be given by name."""
    if not named:
        return given, named
    try:
        bound = inspect.signature(function).bind(*given, **named)
    except (TypeError, ValueError):  # which the call itself will say
        return given, named
    return bound.args, bound.kwargs


def no_sides(self: Local) -> tuple[Side, ...]:
    """Return none: every device has whole rows."""
    return ()


def no_names(self: Local) -> Mapping[str, str]:
    """Return none: parameters are whole where a module reads them."""
    return {}


def none_joined(self: Local, joins: Sequence[Join], sent: int) -> None:
    """Check nothing: no positions are elsewhere."""


def sum_over_samples(self: Any, x: jax.Array) -> jax.Array:
    """Return sums of rows and positions, added over all devices of its mesh that have others."""
    axes = in_use(self.mesh, SAMPLE_AXES)
    return lax.psum(x, axes) if axes else x


def whole_batch(self: Local, prepared: Callable, batch: Any) -> Any:
    """Return the batch: its rows are whole."""
    return batch


def all_here(self: Local, length: int) -> int:
    """Return the length: all positions of a row are here, and follow each other."""
    return length


def rows_of_table(self: Local, table_VD: jax.Array, tokens_BS: jax.Array) -> jax.Array:
    """Return the row of each token in a table; XLA knows how the table is split."""
    return table_VD[tokens_BS]


def made_logits(
    self: "InStep",
    x_BSD: jax.Array,
    kernel_VD: jax.Array,
    vocab: int,
    logits: Callable | None = None,
) -> jax.Array:
    """Return logits, the model's own where it hands over a function that makes them."""
    return logits() if logits else logits_of(self.step.place, x_BSD, kernel_VD, vocab)


# -- what each of them needs of a step ------------------------------------------------------------

LOAD = "expert_load"  # the metric that a loss has of what routers told
NOT_TOLD = (
    "the routers of this model add to the loss, or balance their loads, and the loss takes no part "
    "in it. Use hfjax.models.moe.next_token_loss; mark a loss of your own with "
    "hfjax.models.moe.takes_routing, let the model return hfjax.models.moe.Routed with what its "
    "mixtures told, and return hfjax.models.moe.with_routing(losses, weights, routed); or choose "
    "Router(balance_loss=0, z_loss=0, bias_rate=0)."
)


@dataclass(frozen=True)
class Asked:
    """What every `Local` is made of.

    Attributes:
        place: Where activations lie.
        spread: (mixture, tokens, routed) -> what experts make of them, on devices or here.
        loss: It may take what routers told.
        routers: Those that the loss needs, once the model is traced.
        mixtures: What each mixture of experts is given then, as shapes: tokens, where they go.
    """

    place: Callable
    spread: Callable
    loss: Callable
    routers: list[bool] = field(default_factory=list, compare=False)
    mixtures: list[Any] = field(default_factory=list, compare=False)


@dataclass(frozen=True)
class InStep:
    """The `Local` of a step, whatever devices share; the rest is its class's own."""

    step: Asked
    chooses_kernels: ClassVar[bool] = True  # a look at the model puts another in its place

    def experts(self, mixture: Any, x_GTD: jax.Array, routed: Any) -> jax.Array:
        """Return what the experts of a layer, spread over devices or not, make of tokens."""
        shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)
        self.step.mixtures.append(jax.tree.map(shape, (x_GTD, routed)))
        if mixture.tells:
            self.step.routers.append(True)
        if not is_recording():
            return self.step.spread(mixture, x_GTD, routed)
        here = lambda arrays: replace(mixture, arrays=arrays)
        spread = lambda arrays, x, routed: self.step.spread(here(arrays), x, routed)
        travels = mixture.here < mixture.experts  # tokens, from each device's own rows
        return like_tokens(spread, travels)(mixture.arrays, x_GTD, routed)

    def told(self, outputs: Any, routed: Callable, needed: bool) -> Any:
        """Return outputs with what routers told, for a loss that takes it."""
        if getattr(self.step.loss, "takes_routing", False):
            return routed(outputs)
        if needed:
            raise ValueError(NOT_TOLD)
        return outputs

    def check_told(self, metrics: Mapping[str, Any]) -> None:
        """Refuse a loss that has taken no part in what routers told: its metrics have no loads."""
        if self.step.routers and LOAD not in metrics:
            raise ValueError(NOT_TOLD)


@dataclass
class Traced:
    """Made with a step, and filled in while the step is traced."""

    kernels: Local
    rows: OnRows  # how parts of the model see the rows of all devices
    offloaded: Offloaded  # what layers keep for the backward pass, and what of it the host holds
    names: set[str] = field(default_factory=set)  # of tensors, where remat asks for names
    unread: set[str] = field(default_factory=set)  # parameters that nothing has read yet
    written: set[str] = field(default_factory=set)  # variables that the model writes to
    summed: dict[str, Axes] = field(default_factory=dict)  # gradients that are summed already
    seed: Any = 1.0  # the cotangent of the loss of a microbatch
    weighed: bool = False  # each microbatch's weight is summed before its backward pass

    @classmethod
    def of(cls, kernels: Local, run: Execution, mesh: Mesh, in_parts: Callable) -> "Traced":
        """Return what a trace of a step fills in; `in_parts` runs programs of all rows."""
        axes = () if run.rows == "own" else row_axes(mesh)
        sides = kernels.inner_sides()
        inner = InnerSides(sides, in_parts, kernels.named_sides()) if sides else None
        side, enters = Side(axes, size_of(axes, mesh)), getattr(run.precision, "enters", None)
        rows = OnRows(side, in_parts, inner, enters=enters)
        return cls(kernels, rows, Offloaded(run.offload))

    def begin(self, parameters: Iterable[str], seed: Any = 1.0) -> None:
        """Begin a trace: what JAX kept of an earlier one, it must not take for this one's."""
        self.seed, self.weighed = seed, False
        self.unread, self.written = set(parameters), set()
        self.names.clear()
        self.offloaded.rows.clear()
        self.rows.told.clear()
        self.rows.told_inner.clear()
