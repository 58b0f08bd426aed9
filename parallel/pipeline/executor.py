"""The pipeline executor: runs any table in one program, one scan over ticks per segment.

In a tick a stage receives what its neighbours sent in the tick before, then runs its forward slot
(and the head, on the last stage), its backward slot and its weights slot. Residuals wait in rings
whose slots the table's compiler has assigned, so neither the size of the program nor its memory
depends on the number of microbatches.

`Pipeline` is a stage: first the state that it holds, then `_tick`, what it does in a tick. What
may be done in more than one way is an object: `weights` (which parameters a pass uses, and when
they are updated) and `unit` (what of a layer is computed again).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from hfjax.parallel.jaxprs.program import packed
from hfjax.parallel.jaxprs.split_backward import Dissected, zeros_like
from hfjax.parallel.jaxprs.stage_fns import ModelParts
from hfjax.parallel.mesh import PIPE_AXIS
from hfjax.parallel.offload.activations import Share, of_part
from hfjax.parallel.pipeline.activation_checkpointing import EveryMicrobatch, ExceptLast, UnitPasses
from hfjax.parallel.pipeline.stage_params import FixedWeights, Weights
from hfjax.parallel.pipeline.stash_buffers import Ring, Slots, StageLinks
from hfjax.parallel.pipeline.tick import OUTSIDE, SegmentFacts, StageTick, State
from hfjax.parallel.schedules.compile import SIDES, Ticks
from hfjax.utils.paths import Flat, Index


@dataclass(frozen=True)
class Pipeline:
    """A table with the model that runs by it, on one stage: inside shard_map over `pipe`.

    First what the stage holds, then `run` and what it does in a tick.
    """

    ticks: Ticks
    model: ModelParts
    unroll: int | bool = 1
    choose: Callable | None = None  # (tensors, layers of a stage) -> which go to the host
    weights: Weights = FixedWeights()
    # Slots of a tick follow one another, though they are of different microbatches. XLA runs what
    # is independent in an order that differs by device, on CPUs, and a layer's collectives of one
    # microbatch then meet those of another.
    in_order: Callable[[], bool] = lambda: False  # asked once what came before is traced
    # Asked with what traces a layer: a `lax.cond` by which idle slots skip it, None where none may.
    branches: Callable[[Callable], Callable | None] = lambda program: None
    last: Any = None  # `LastTick`, if it sums gradients over devices

    @property
    def _trains(self) -> bool:
        return self.ticks.table.trains

    @property
    def _split(self) -> bool:
        return self.ticks.table.split

    @cached_property
    def stage(self) -> Index:
        return lax.axis_index(PIPE_AXIS) if self.ticks.table.stages > 1 else 0

    @cached_property
    def _links(self) -> StageLinks:
        return StageLinks(self.ticks, self.stage, keeps=self._either is None)

    @cached_property
    def _x(self) -> Any:
        """Zeros like what goes from layer to layer."""
        return zeros_like(jax.eval_shape(self.model.first, self.model.outside, jnp.int32(0)))

    @cached_property
    def chunks(self) -> Slots:
        _, chunks, units = self.model.order.shape
        return Slots(chunks, units, apart=self.unroll is True or units == 1)

    @cached_property
    def values(self) -> Any:
        return self.chunks.of(self.model.values)

    @cached_property
    def _layers(self) -> jax.Array:
        """The numbers of this stage's layers, [chunks, units]."""
        return jnp.asarray(self.model.order, jnp.int32)[self.stage]

    @cached_property
    def _padded(self) -> bool:
        return bool((self.model.order < 0).any())

    @cached_property
    def _passes(self) -> Dissected:
        return self._dissected(self.model.passes)

    @cached_property
    def _either(self) -> Callable | None:
        given = self._known_of_one, self._x
        return self.branches(partial(jax.make_jaxpr(self._passes.forward), *given))

    @cached_property
    def unit(self) -> UnitPasses:
        """How a layer runs in a tick."""
        if self.model.keep is None or not self._trains:
            return EveryMicrobatch(self._passes)
        keeping, last = self._dissected(self.model.keep), self.ticks.table.microbatches - 1
        return ExceptLast(self._passes, keeping, self.chunks, last)

    def _dissected(self, passes: Callable) -> Dissected:
        return passes(self._known_of_one, self._no_gradients, self._x, self._split)

    @property
    def _known_of_one(self) -> tuple:
        return self._known(self.chunks.get(self.values, 0, 0), 0, 0, jnp.int32(0))

    def _used(self, state: State, at: StageTick, kind: str, unit: Index) -> Flat:
        return self.weights.parameters(self, state, at, kind, unit)

    def _known(self, parameters: Flat, unit: Index, chunk: Index, m: Index) -> tuple:
        return parameters, jnp.maximum(self._layers[chunk, unit], 0), m

    @cached_property
    def _rings(self) -> dict[str, Ring]:
        """Ring buffers: `stash` are residuals that B reads, `late` those that W reads too.

        `cross` is what B computes for W.
        """
        passes, chunks = self._passes, self.chunks
        number, share = len(jax.tree.leaves(passes.stash)), self._share
        parts = {
            "stash": (passes.stash, of_part(share, 0, number)),
            "late": (passes.late, of_part(share, number, None)),
            "cross": (passes.cross if self._split else [], {}),
        }
        store = lambda name: Slots(self.ticks.depth[name], chunks.units, chunks.apart)
        return {name: Ring(like, store(name), gone) for name, (like, gone) in parts.items()}

    @property
    def _share(self) -> Share:
        """What of stash and late goes to the host."""
        if self.choose is None:
            return {}
        passes, (_, chunks, units) = self._passes, self.model.order.shape
        tensors = passes.tensors or packed(jax.tree.leaves((passes.stash, passes.late)))
        return self.choose(tensors, chunks * units)

    def queue(self, name: str) -> Slots:
        return Slots(self.ticks.depth[name], 1, True)

    def start(self) -> State:
        """Return the state before the first tick."""
        m, table = jnp.int32(0), self.ticks.table
        _, aux = jax.eval_shape(self.model.last, self.model.outside, self._x, m)
        tell = lambda a: jnp.zeros((table.microbatches, *a.shape), a.dtype)
        state: State = {"aux": jax.tree.map(tell, aux), "sent": {}}
        if self.ticks.depth["x"]:  # idle slots run layers too: on what layers are used to
            x = self.model.first(self.model.outside, m)
            state["x"] = self.queue("x").filled(x)
            state["sent"] = {link: x for kind, link in self.ticks.lines if "F" in kind}
        if not self._trains:
            return state
        state |= {"made": self._x, "dy": self.queue("dy").full(self._x)}
        state |= {name: ring.empty() for name, ring in self._rings.items()}
        state |= {"kept": self.unit.empty(), "gradients": self.chunks.full(self.model.slots)}
        wide = lambda a: jnp.zeros(a.shape, jnp.promote_types(a.dtype, jnp.float32))
        state["outside"] = jax.tree.map(wide, self.model.outside)
        return state | self.weights.start(self)

    def run(self) -> tuple[Any, Any, Any]:
        """Return the gradients of units [chunks * units, ...], all others, and aux [M, ...]."""
        state = self.run_ticks()
        if not self._trains:
            return None, None, state["aux"]
        return self.chunks.stacked(state["gradients"]), state["outside"], state["aux"]

    def run_ticks(self) -> State:
        """Return the state after the last tick."""
        facts = SegmentFacts(self.ticks, 0, self.ticks.table.ticks)
        columns = {name: jnp.asarray(column) for name, column in self.ticks.columns.items()}
        columns |= {name: jnp.asarray(facts.when[name]) for name in OUTSIDE}
        state = self.start()
        for start, end, kinds in self.ticks.segments:
            tick = partial(self._tick, kinds, SegmentFacts(self.ticks, start, end))
            rows = {name: column[start:end] for name, column in columns.items()}
            state, _ = lax.scan(tick, state, rows)
        return state

    # -- a tick -----------------------------------------------------------------------------

    def _tick(self, kinds: str, facts: SegmentFacts, state: State, row: dict) -> tuple[State, None]:
        """Run one tick of this stage: receive, F and the head, B, W; then update, if it does."""
        at = StageTick({name: column[self.stage] for name, column in row.items()}, facts)
        before, state = state, self._receive(dict(state), at)
        if "F" in kinds:
            state = self._forward(state, at)
            at = at.after(state) if self.in_order() else at
        if "B" in kinds:
            state = self._backward(state, at)
            at = at.after(state) if self.in_order() else at
        if self.ticks.shared:
            state = self._sent(state, "FB", state["made"], at)
        if "W" in kinds:
            state = self._weight_half(state, at)
        state = self.last.others(self.chunks, before, state, at) if self._closes(at) else state
        return self.weights.after_tick(self, kinds, before, state, at), None

    def _receive(self, state: State, at: StageTick) -> State:
        """Put what neighbours sent in the last tick into its slots.

        dx is sent here, so that it travels under the forward slot, unless it shares a permute.
        """
        for link in self.ticks.links["F"]:
            if at.facts.arriving("F", link):
                x, slot = state["sent"][link], at[f"x_{SIDES[link]}"]
                x = self._links.arrived(x, self.queue("x").get(state["x"], 0, slot), link)
                state["x"] = self.queue("x").put(state["x"], 0, slot, x)
        for link in self.ticks.links["B"]:
            if at.facts.arriving("B", link):
                send, slot = partial(self._links.send, state["made"]), at[f"dy_{SIDES[link]}"]
                dy = state["sent"][link] if self.ticks.shared else send("B", link)
                state["dy"] = self.queue("dy").put(state["dy"], 0, slot, dy)
        return state

    def _sent(self, state: State, kind: str, message: Any, at: StageTick) -> State:
        """Return the state with what arrives where this message is sent."""
        used = [link for kinds, link in self.ticks.lines if kinds == kind]
        used = [link for link in used if at.facts.arriving(kind, link, later=1)]
        new = {link: self._links.send(message, kind, link) for link in used}
        return state | {"sent": state["sent"] | new}

    # -- forward ----------------------------------------------------------------------------

    def _forward(self, state: State, at: StageTick) -> State:
        m, chunk = at.positive("F_microbatch"), at.positive("F_chunk")
        y, state = self._layers_forward(state, self._entering(state, at, m), at, m, chunk)
        state = state | {"made": y} if self.ticks.shared else self._sent(state, "F", y, at)
        return self._head(state, at, y, m)

    def _entering(self, state: State, at: StageTick, m: Index) -> Any:
        """Return what enters the chunk: from the neighbour, or from the batch."""
        embed = lambda: self.model.first(self.model.outside, m)
        if not self.ticks.depth["x"]:
            return embed()
        x = self.queue("x").get(state["x"], 0, at.positive("F_x"))
        return at.branch("first", embed, lambda: x)

    def _layers_forward(self, state: State, x: Any, at: StageTick, m: Index, chunk: Index) -> tuple:
        names = ("stash", "late") if self._trains else ()

        def step(carry: tuple, unit: Index) -> tuple:
            x, rings, kept = carry

            def run(x, kept) -> tuple[Any, dict[str, Any], Any]:
                known = self._known(self._used(state, at, "F", unit), unit, chunk, m)
                (y, *saved), kept = self.unit.forward(known, x, kept, at, unit)
                return y, dict(zip(names, saved, strict=False)), kept

            taken = lambda: {name: self._take(rings, name, unit, at, "F") for name in names}
            skip = lambda x, kept: (x, taken(), kept)
            y, saved, kept = self._at_work(("F", at, unit, chunk), run, skip, x, kept)
            rings = {name: self._put(rings, name, unit, at, "F", saved[name]) for name in names}
            return self._if_there(unit, chunk, y, x), rings, kept

        carry = x, {name: state[name] for name in names}, state.get("kept")
        y, rings, kept = self.chunks.loop(step, carry, unroll=int(self.unroll))
        return y, state | rings | ({"kept": kept} if "kept" in state else {})

    def _if_there(self, unit: Index, chunk: Index, new: Any, old: Any) -> Any:
        """Return `new` if there is a layer at this place, `old` where storage is only padded."""
        if not self._padded or self._either:
            return new
        there = self._layers[chunk, unit] >= 0
        return jax.tree.map(lambda a, b: jnp.where(there, a, b), new, old)

    def _at_work(self, slot: tuple, run: Callable, skip: Callable, *operands: Any) -> Any:
        """Return `run(*operands)`; with branches `skip(*operands)` where there is nothing to do.

        Neither rings nor messages pass through a branch: rings would be copied, and a permute
        would wait for stages that take the other.
        """
        kind, at, unit, chunk = slot
        if self._either is None or (at.facts.always(kind) and not self._padded):
            return run(*operands)
        there = at.active(kind)
        if self._padded:
            there &= self._layers[chunk, unit] >= 0
        return self._either(there, run, skip, *operands)

    def _head(self, state: State, at: StageTick, y: Any, m: Index) -> State:
        """On the last stage: tell the loss of this microbatch, and begin its backward pass."""
        tell = lambda aux, old: jax.tree.map(lambda a, x: a.at[m].set(x), old, aux)

        def evaluate(aux) -> Any:
            return tell(self.model.last(self.model.outside, y, m)[1], aux)

        if not self._trains:
            return state | {"aux": at.branch("last", evaluate, lambda aux: aux, state["aux"])}

        def run(aux, outside: Flat) -> tuple[Any, Flat, Any]:
            known = lambda told: (told, self.model.divisor(m))
            dy, gradients, told, divisor = self.model.head_pass(y, m, known)
            outside = _add(outside, gradients, divisor)
            return tell(told, aux), outside, dy

        def skip(aux, outside: Flat) -> tuple[Any, Flat, Any]:
            return aux, outside, self.queue("dy").get(state["dy"], 0, at.positive("H_dy"))

        aux, outside, dy = at.branch("last", run, skip, state["aux"], state["outside"])
        state |= {"aux": aux, "outside": outside}
        if at.facts.never("last"):
            return state
        return state | {"dy": self.queue("dy").put(state["dy"], 0, at.positive("H_dy"), dy)}

    # -- backward ---------------------------------------------------------------------------

    def _backward(self, state: State, at: StageTick) -> State:
        m, chunk = at.positive("B_microbatch"), at.positive("B_chunk")
        dy = self.queue("dy").get(state["dy"], 0, at.positive("B_dy"))
        half = self._input_half if self._split else self._both_halves
        dx, state = half(state, dy, at, m, chunk)
        state = self._embedding(state, at, dx, m)
        if self.ticks.shared:  # a stage that runs no B may have made a y
            dx = jax.tree.map(partial(jnp.where, at.active("B")), dx, state["made"])
        return state | {"made": dx}

    def _both_halves(self, state: State, dy: Any, at: StageTick, m: Index, chunk: Index) -> tuple:
        def step(carry: tuple, unit: Index) -> tuple:
            dy, gradients = carry

            def run(dy) -> tuple[Any, Flat]:
                stash = self._take(state, "stash", unit, at, "B")
                if self._closes(at):  # or XLA recomputes several layers at once
                    stash, dy = lax.optimization_barrier((stash, dy))
                known = self._known(self._used(state, at, "B", unit), unit, chunk, m)
                return self.unit.backward(known, stash, dy, state["kept"], at, unit)

            skip = lambda dy: (dy, self._no_gradients)
            dx, new = self._at_work(("B", at, unit, chunk), run, skip, dy)
            gradients = self._accumulate(gradients, new, unit, chunk, at, "B")
            return (self._if_there(unit, chunk, dx, dy), gradients)

        dx, gradients = self._units(step, (dy, state["gradients"]), at)
        return dx, state | {"gradients": gradients}

    def _input_half(self, state: State, dy: Any, at: StageTick, m: Index, chunk: Index) -> tuple:
        def step(carry: tuple, unit: Index) -> tuple:
            dy, cross = carry

            def run(dy) -> tuple:
                stash, late = (self._take(state, name, unit, at, "B") for name in ("stash", "late"))
                known = self._known(self._used(state, at, "B", unit), unit, chunk, m)
                return self._passes.input_backward(known, stash, late, dy)

            skip = lambda dy: (dy, self._take({"cross": cross}, "cross", unit, at, "B"))
            dx, crossing = self._at_work(("B", at, unit, chunk), run, skip, dy)
            cross = self._put({"cross": cross}, "cross", unit, at, "B", crossing)
            return (self._if_there(unit, chunk, dx, dy), cross)

        dx, cross = self._units(step, (dy, state["cross"]), at)
        return dx, state | {"cross": cross}

    def _weight_half(self, state: State, at: StageTick) -> State:
        m, chunk = at.positive("W_microbatch"), at.positive("W_chunk")

        def step(gradients, unit: Index):
            def run() -> Flat:
                late, cross = (self._take(state, name, unit, at, "W") for name in ("late", "cross"))
                known = self._known(self._used(state, at, "W", unit), unit, chunk, m)
                return self._passes.weight_backward(known, late, cross)

            new = self._at_work(("W", at, unit, chunk), run, lambda: self._no_gradients)
            return self._accumulate(gradients, new, unit, chunk, at, "W")

        return state | {"gradients": self._units(step, state["gradients"], at)}

    def _closes(self, at: StageTick) -> bool:
        return self.last is not None and at.facts.start == self.ticks.table.ticks - 1

    def _units(self, step: Callable, carry: Any, at: StageTick) -> Any:
        unroll = self._closes(at) or int(self.unroll)
        return self.chunks.loop(step, carry, reverse=True, unroll=unroll)

    @property
    def _no_gradients(self) -> Flat:
        return zeros_like(self.model.slots)

    def _take(self, rings: State, name: str, unit: Index, at: StageTick, kind: str) -> Any:
        return self._rings[name].get(rings[name], unit, at.positive(f"{kind}_{name}"))

    def _put(self, rings: State, name: str, unit: Index, at: StageTick, kind: str, new: Any) -> Any:
        return self._rings[name].put(rings[name], unit, at.positive(f"{kind}_{name}"), new)

    def _accumulate(
        self, gradients: Any, new: Flat, unit: Index, chunk: Index, at: StageTick, kind: str
    ) -> Any:
        """Add a layer's gradient, unless the slot is idle or there is no layer."""
        real = None if self._either or at.facts.always(kind) else at.active(kind)
        if self._padded and not self._either:
            there = self._layers[chunk, unit] >= 0
            real = there if real is None else real & there
        if real is not None:
            new = jax.tree.map(lambda a: jnp.where(real, a, jnp.zeros((), a.dtype)), new)
        divisor = self.model.divisor(at.positive(f"{kind}_microbatch"))
        total = _add(self.weights.sums(self, gradients, unit, chunk, at), new, divisor)
        total = self.last.sum(total) if self._closes(at) else total
        return self.chunks.put(gradients, unit, chunk, total)

    def _embedding(self, state: State, at: StageTick, dx: Any, m: Index) -> State:
        """On the first stage: the gradient of what came before the layers."""

        def run(outside: Flat) -> Flat:
            _, leave = self.model.embed_pass(m)
            return _add(outside, leave(dx), self.model.divisor(m))

        return state | {
            "outside": at.branch("first_backward", run, lambda outside: outside, state["outside"])
        }


def _add(sums: Flat, new: Flat, divisor: Any) -> Flat:
    """Return sums with new gradients, of total / divisor, made those of the total."""
    if isinstance(divisor, float):
        return jax.tree.map(lambda a, b: a + b.astype(a.dtype), sums, new)
    return jax.tree.map(lambda a, b: a + b.astype(a.dtype) * divisor.astype(a.dtype), sums, new)
