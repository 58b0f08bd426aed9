"""The pipeline executor: runs any table in one program, one scan over ticks per segment.

In a tick a stage receives what its neighbours sent in the tick before, then runs its forward slot
(and the head, on the last stage), its backward slot and its weights slot. Residuals wait in ring
buffers whose slots `compile_table` has assigned, so neither the size of the program nor its memory
depends on the number of microbatches.

`Pipeline` is a stage: first its state, then `_tick`, which runs one tick. Two things that vary are
objects: `stage_params` (which parameters a pass uses, and when they are updated) and
`layer_passes` (what a layer recomputes).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from hfjax.parallel.jaxprs.program import describe_packed
from hfjax.parallel.jaxprs.split_backward import SplitBackward, zeros_like
from hfjax.parallel.jaxprs.stage_fns import StageFns
from hfjax.parallel.mesh import PIPE_AXIS
from hfjax.parallel.offload.activations import Share, share_of_range
from hfjax.parallel.pipeline.activation_checkpointing import (
    LayerPasses,
    RematExceptLast,
    UniformRemat,
)
from hfjax.parallel.pipeline.stage_params import FixedParams, StageParams
from hfjax.parallel.pipeline.stash_buffers import Slots, StageLinks, StashBuffer
from hfjax.parallel.pipeline.tick import OUTER_TASKS, SegmentFacts, StageTick, State
from hfjax.parallel.schedules.compile import LINK_NAMES, Ticks
from hfjax.utils.paths import Flat, Index


@dataclass(frozen=True)
class Pipeline:
    """A table and the model that it runs, on one stage: inside shard_map over `pipe`.

    First the state of the stage, then `run` and the work of a tick.
    """

    ticks: Ticks
    model: StageFns
    unroll: int | bool = 1
    choose_offload: Callable | None = None  # (tensors, layers of a stage) -> which are offloaded
    stage_params: StageParams = FixedParams()
    # Whether the slots of a tick run one after another, though their microbatches are independent.
    # On CPUs XLA orders independent operations differently on each device, and a layer's
    # collectives of one microbatch would then pair up with those of another.
    in_order: Callable[[], bool] = lambda: False  # called after the preceding slot is traced
    # (function that traces a layer) -> a `lax.cond` with which idle slots skip it; None: no skip.
    branches: Callable[[Callable], Callable | None] = lambda program: None
    last_tick: Any = None  # `LastTick`, if it sums gradients over devices

    @property
    def _trains(self) -> bool:
        return self.ticks.table.trains

    @property
    def _splits_backward(self) -> bool:
        return self.ticks.table.splits_backward

    @cached_property
    def stage(self) -> Index:
        return lax.axis_index(PIPE_AXIS) if self.ticks.table.stages > 1 else 0

    @cached_property
    def _links(self) -> StageLinks:
        return StageLinks(self.ticks, self.stage, keeps_old=self._cond is None)

    @cached_property
    def _zero_x(self) -> Any:
        """Zeros like the activations between layers."""
        return zeros_like(jax.eval_shape(self.model.embed, self.model.outer_params, jnp.int32(0)))

    @cached_property
    def chunks(self) -> Slots:
        _, chunks, units = self.model.unit_order.shape
        return Slots(chunks, units, unstack_units=self.unroll is True or units == 1)

    @cached_property
    def chunk_params(self) -> Any:
        return self.chunks.from_stacked(self.model.stage_params)

    @cached_property
    def _layer_numbers(self) -> jax.Array:
        """The indices of this stage's layers, [chunks, units]."""
        return jnp.asarray(self.model.unit_order, jnp.int32)[self.stage]

    @cached_property
    def _is_padded(self) -> bool:
        return bool((self.model.unit_order < 0).any())

    @cached_property
    def _passes(self) -> SplitBackward:
        return self._make_passes(self.model.layer_passes)

    @cached_property
    def _cond(self) -> Callable | None:
        operands = self._first_known_values, self._zero_x
        return self.branches(partial(jax.make_jaxpr(self._passes.forward), *operands))

    @cached_property
    def layer_passes(self) -> LayerPasses:
        """How a layer runs in a tick."""
        if self.model.last_passes is None or not self._trains:
            return UniformRemat(self._passes)
        no_remat_passes, last_microbatch = (
            self._make_passes(self.model.last_passes),
            self.ticks.table.microbatches - 1,
        )
        return RematExceptLast(self._passes, no_remat_passes, self.chunks, last_microbatch)

    def _make_passes(self, passes: Callable) -> SplitBackward:
        return passes(
            self._first_known_values, self._zero_gradients, self._zero_x, self._splits_backward
        )

    @property
    def _first_known_values(self) -> tuple:
        return self._known_values(self.chunks.get(self.chunk_params, 0, 0), 0, 0, jnp.int32(0))

    def _params_of_layer(self, state: State, tick: StageTick, kind: str, unit: Index) -> Flat:
        return self.stage_params.layer_params(self, state, tick, kind, unit)

    def _known_values(self, parameters: Flat, unit: Index, chunk: Index, m: Index) -> tuple:
        return parameters, jnp.maximum(self._layer_numbers[chunk, unit], 0), m

    @cached_property
    def _stash_buffers(self) -> dict[str, StashBuffer]:
        """Ring buffers: `stash` has residuals that B reads, `w_residuals` those that W reads too.

        `b_to_w` has what B computes for W.
        """
        passes, chunks = self._passes, self.chunks
        num_stash, share = len(jax.tree.leaves(passes.stash)), self._host_share
        entries = {
            "stash": (passes.stash, share_of_range(share, 0, num_stash)),
            "w_residuals": (passes.w_residuals, share_of_range(share, num_stash, None)),
            "b_to_w": (passes.b_to_w if self._splits_backward else [], {}),
        }
        store = lambda name: Slots(self.ticks.depth[name], chunks.units, chunks.unstack_units)
        return {
            name: StashBuffer(like, store(name), host_share)
            for name, (like, host_share) in entries.items()
        }

    @property
    def _host_share(self) -> Share:
        """How much of stash and w_residuals is offloaded to the host."""
        if self.choose_offload is None:
            return {}
        passes, (_, chunks, units) = self._passes, self.model.unit_order.shape
        tensors = passes.tensors or describe_packed(
            jax.tree.leaves((passes.stash, passes.w_residuals))
        )
        return self.choose_offload(tensors, chunks * units)

    def queue(self, name: str) -> Slots:
        return Slots(self.ticks.depth[name], 1, True)

    def init_state(self) -> State:
        """Return the state before the first tick."""
        m, table = jnp.int32(0), self.ticks.table
        _, aux = jax.eval_shape(self.model.head, self.model.outer_params, self._zero_x, m)
        per_microbatch = lambda a: jnp.zeros((table.microbatches, *a.shape), a.dtype)
        state: State = {"aux": jax.tree.map(per_microbatch, aux), "sent": {}}
        if self.ticks.depth["x"]:  # idle slots run layers too: on valid activations
            x = self.model.embed(self.model.outer_params, m)
            state["x"] = self.queue("x").fill_slots(x)
            state["sent"] = {link: x for kind, link in self.ticks.messages if "F" in kind}
        if not self._trains:
            return state
        state |= {"made": self._zero_x, "dy": self.queue("dy").full(self._zero_x)}
        state |= {name: buffer.empty() for name, buffer in self._stash_buffers.items()}
        state |= {
            "kept": self.layer_passes.init_residuals(),
            "gradients": self.chunks.full(self.model.slots),
        }
        widen = lambda a: jnp.zeros(a.shape, jnp.promote_types(a.dtype, jnp.float32))
        state["outside"] = jax.tree.map(widen, self.model.outer_params)
        return state | self.stage_params.init_state(self)

    def run(self) -> tuple[Any, Any, Any]:
        """Return gradients of units [chunks * units, ...], other gradients, and aux [M, ...]."""
        state = self.run_ticks()
        if not self._trains:
            return None, None, state["aux"]
        return self.chunks.to_stacked(state["gradients"]), state["outside"], state["aux"]

    def run_ticks(self) -> State:
        """Return the state after the last tick."""
        facts = SegmentFacts(self.ticks, 0, self.ticks.table.ticks)
        columns = {name: jnp.asarray(column) for name, column in self.ticks.columns.items()}
        columns |= {name: jnp.asarray(facts.runs[name]) for name in OUTER_TASKS}
        state = self.init_state()
        for start, end, kinds in self.ticks.segments:
            tick = partial(self._tick, kinds, SegmentFacts(self.ticks, start, end))
            segment_columns = {name: column[start:end] for name, column in columns.items()}
            state, _ = lax.scan(tick, state, segment_columns)
        return state

    # -- a tick -----------------------------------------------------------------------------

    def _tick(
        self, kinds: str, facts: SegmentFacts, state: State, columns: dict
    ) -> tuple[State, None]:
        """Run one tick of this stage: receive, F and the head, B, W, then `after_tick`."""
        tick = StageTick({name: column[self.stage] for name, column in columns.items()}, facts)
        before, state = state, self._receive(dict(state), tick)
        if "F" in kinds:
            state = self._forward(state, tick)
            tick = tick.wait_for(state) if self.in_order() else tick
        if "B" in kinds:
            state = self._backward(state, tick)
            tick = tick.wait_for(state) if self.in_order() else tick
        if self.ticks.shares_permutes:
            state = self._send(state, "FB", state["made"], tick)
        if "W" in kinds:
            state = self._backward_weight(state, tick)
        state = (
            self.last_tick.reduce_idle_chunks(self.chunks, before, state, tick)
            if self._is_last_tick(tick)
            else state
        )
        return self.stage_params.after_tick(self, kinds, before, state, tick), None

    def _receive(self, state: State, tick: StageTick) -> State:
        """Store what neighbours sent in the last tick in its slots.

        dx is sent here, so that the send overlaps the forward slot, unless it shares a permute.
        """
        for link in self.ticks.links["F"]:
            if tick.facts.has_arrivals("F", link):
                x, slot = state["sent"][link], tick[f"x_{LINK_NAMES[link]}"]
                x = self._links.select_received(x, self.queue("x").get(state["x"], 0, slot), link)
                state["x"] = self.queue("x").put(state["x"], 0, slot, x)
        for link in self.ticks.links["B"]:
            if tick.facts.has_arrivals("B", link):
                send, slot = (
                    partial(self._links.send, state["made"]),
                    tick[f"dy_{LINK_NAMES[link]}"],
                )
                dy = state["sent"][link] if self.ticks.shares_permutes else send("B", link)
                state["dy"] = self.queue("dy").put(state["dy"], 0, slot, dy)
        return state

    def _send(self, state: State, kind: str, message: Any, tick: StageTick) -> State:
        """Send a message; return the state with what arrives by the same links."""
        links = [link for kinds, link in self.ticks.messages if kinds == kind]
        links = [link for link in links if tick.facts.has_arrivals(kind, link, later=1)]
        arrivals = {link: self._links.send(message, kind, link) for link in links}
        return state | {"sent": state["sent"] | arrivals}

    # -- forward ----------------------------------------------------------------------------

    def _forward(self, state: State, tick: StageTick) -> State:
        m, chunk = tick.index("F_microbatch"), tick.index("F_chunk")
        y, state = self._layers_forward(state, self._chunk_input(state, tick, m), tick, m, chunk)
        state = (
            state | {"made": y} if self.ticks.shares_permutes else self._send(state, "F", y, tick)
        )
        return self._run_head(state, tick, y, m)

    def _chunk_input(self, state: State, tick: StageTick, m: Index) -> Any:
        """Return what enters the chunk: from the neighbour, or from the batch."""
        embed = lambda: self.model.embed(self.model.outer_params, m)
        if not self.ticks.depth["x"]:
            return embed()
        x = self.queue("x").get(state["x"], 0, tick.index("F_x"))
        return tick.branch("first", embed, lambda: x)

    def _layers_forward(
        self, state: State, x: Any, tick: StageTick, m: Index, chunk: Index
    ) -> tuple:
        names = ("stash", "w_residuals") if self._trains else ()

        def step(carry: tuple, unit: Index) -> tuple:
            def run(x, buffers: State, last_microbatch_residuals) -> tuple[Any, State, Any]:
                known = self._known_values(
                    self._params_of_layer(state, tick, "F", unit), unit, chunk, m
                )
                (y, *residuals), last_microbatch_residuals = self.layer_passes.forward(
                    known, x, last_microbatch_residuals, tick, unit
                )
                for name, new in zip(names, residuals, strict=False):
                    written = self._write_stash(buffers, name, unit, tick, "F", new)
                    buffers = buffers | {name: written}
                return y, buffers, last_microbatch_residuals

            y, *buffers = self._run_or_skip(("F", tick, unit, chunk), run, *carry)
            return self._where_layer(unit, chunk, y, carry[0]), *buffers

        carry = x, {name: state[name] for name in names}, state.get("kept")
        y, buffers, last_microbatch_residuals = self.chunks.loop(
            step, carry, unroll=int(self.unroll)
        )
        return y, state | buffers | ({"kept": last_microbatch_residuals} if "kept" in state else {})

    def _where_layer(self, unit: Index, chunk: Index, new: Any, old: Any) -> Any:
        """Return `new` if this unit is a layer, `old` if it is padding."""
        if not self._is_padded or self._cond:
            return new
        is_layer = self._layer_numbers[chunk, unit] >= 0
        return jax.tree.map(lambda a, b: jnp.where(is_layer, a, b), new, old)

    def _run_or_skip(self, slot: tuple, run: Callable, *operands: Any) -> tuple:
        """Return `run(*operands)`; with branches `operands` in an idle slot.

        The branch writes its residuals and gradients in place, so an idle slot writes nothing. No
        message is sent in a branch: a permute would wait for stages that take the other one.
        """
        kind, tick, unit, chunk = slot
        if self._cond is None or (tick.facts.always_runs(kind) and not self._is_padded):
            return run(*operands)
        is_active = tick.is_active(kind)
        if self._is_padded:
            is_active &= self._layer_numbers[chunk, unit] >= 0
        return self._cond(is_active, run, lambda *operands: operands, *operands)

    def _run_head(self, state: State, tick: StageTick, y: Any, m: Index) -> State:
        """On the last stage: store the loss of this microbatch, and start its backward pass."""
        store_aux = lambda aux, old: jax.tree.map(lambda a, x: a.at[m].set(x), old, aux)

        def evaluate(aux) -> Any:
            return store_aux(self.model.head(self.model.outer_params, y, m)[1], aux)

        if not self._trains:
            return state | {"aux": tick.branch("last", evaluate, lambda aux: aux, state["aux"])}

        def run(aux, outside: Flat) -> tuple[Any, Flat, Any]:
            known = lambda with_divisor: (with_divisor, self.model.divisor(m))
            dy, gradients, with_divisor, divisor = self.model.head_pass(y, m, known)
            outside = _add_gradients(outside, gradients, divisor)
            return store_aux(with_divisor, aux), outside, dy

        def skip(aux, outside: Flat) -> tuple[Any, Flat, Any]:
            return aux, outside, self.queue("dy").get(state["dy"], 0, tick.index("H_dy"))

        aux, outside, dy = tick.branch("last", run, skip, state["aux"], state["outside"])
        state |= {"aux": aux, "outside": outside}
        if tick.facts.never_runs("last"):
            return state
        return state | {"dy": self.queue("dy").put(state["dy"], 0, tick.index("H_dy"), dy)}

    # -- backward ---------------------------------------------------------------------------

    def _backward(self, state: State, tick: StageTick) -> State:
        m, chunk = tick.index("B_microbatch"), tick.index("B_chunk")
        dy = self.queue("dy").get(state["dy"], 0, tick.index("B_dy"))
        backward = self._backward_input if self._splits_backward else self._backward_full
        dx, state = backward(state, dy, tick, m, chunk)
        state = self._backward_embed(state, tick, dx, m)
        if self.ticks.shares_permutes:  # a stage that runs no B may have computed a y
            dx = jax.tree.map(partial(jnp.where, tick.is_active("B")), dx, state["made"])
        return state | {"made": dx}

    def _backward_full(
        self, state: State, dy: Any, tick: StageTick, m: Index, chunk: Index
    ) -> tuple:
        def step(carry: tuple, unit: Index) -> tuple:
            def run(dy, gradients) -> tuple:
                stash = self._read_stash(state, "stash", unit, tick, "B")
                if self._is_last_tick(tick):  # or XLA recomputes several layers at once
                    stash, dy = lax.optimization_barrier((stash, dy))
                known = self._known_values(
                    self._params_of_layer(state, tick, "B", unit), unit, chunk, m
                )
                dx, new = self.layer_passes.backward(known, stash, dy, state["kept"], tick, unit)
                return dx, self._accumulate(gradients, new, unit, chunk, tick, "B")

            dx, gradients = self._run_or_skip(("B", tick, unit, chunk), run, *carry)
            gradients = self._reduce_in_last_tick(gradients, unit, chunk, tick)
            return self._where_layer(unit, chunk, dx, carry[0]), gradients

        dx, gradients = self._loop_units(step, (dy, state["gradients"]), tick)
        return dx, state | {"gradients": gradients}

    def _backward_input(
        self, state: State, dy: Any, tick: StageTick, m: Index, chunk: Index
    ) -> tuple:
        def step(carry: tuple, unit: Index) -> tuple:
            def run(dy, b_to_w) -> tuple:
                stash, w_residuals = (
                    self._read_stash(state, name, unit, tick, "B")
                    for name in ("stash", "w_residuals")
                )
                known = self._known_values(
                    self._params_of_layer(state, tick, "B", unit), unit, chunk, m
                )
                dx, new = self._passes.input_backward(known, stash, w_residuals, dy)
                return dx, self._write_stash({"b_to_w": b_to_w}, "b_to_w", unit, tick, "B", new)

            dx, b_to_w = self._run_or_skip(("B", tick, unit, chunk), run, *carry)
            return self._where_layer(unit, chunk, dx, carry[0]), b_to_w

        dx, b_to_w = self._loop_units(step, (dy, state["b_to_w"]), tick)
        return dx, state | {"b_to_w": b_to_w}

    def _backward_weight(self, state: State, tick: StageTick) -> State:
        m, chunk = tick.index("W_microbatch"), tick.index("W_chunk")

        def step(gradients, unit: Index):
            def run(gradients) -> tuple:
                w_residuals, b_to_w = (
                    self._read_stash(state, name, unit, tick, "W")
                    for name in ("w_residuals", "b_to_w")
                )
                known = self._known_values(
                    self._params_of_layer(state, tick, "W", unit), unit, chunk, m
                )
                new = self._passes.weight_backward(known, w_residuals, b_to_w)
                return (self._accumulate(gradients, new, unit, chunk, tick, "W"),)

            (gradients,) = self._run_or_skip(("W", tick, unit, chunk), run, gradients)
            return self._reduce_in_last_tick(gradients, unit, chunk, tick)

        return state | {"gradients": self._loop_units(step, state["gradients"], tick)}

    def _is_last_tick(self, tick: StageTick) -> bool:
        return self.last_tick is not None and tick.facts.start == self.ticks.table.ticks - 1

    def _loop_units(self, step: Callable, carry: Any, tick: StageTick) -> Any:
        unroll = self._is_last_tick(tick) or int(self.unroll)
        return self.chunks.loop(step, carry, reverse=True, unroll=unroll)

    @property
    def _zero_gradients(self) -> Flat:
        return zeros_like(self.model.slots)

    def _read_stash(
        self, buffers: State, name: str, unit: Index, tick: StageTick, kind: str
    ) -> Any:
        return self._stash_buffers[name].get(buffers[name], unit, tick.index(f"{kind}_{name}"))

    def _write_stash(
        self, buffers: State, name: str, unit: Index, tick: StageTick, kind: str, new: Any
    ) -> Any:
        return self._stash_buffers[name].put(buffers[name], unit, tick.index(f"{kind}_{name}"), new)

    def _accumulate(
        self, gradients: Any, new: Flat, unit: Index, chunk: Index, tick: StageTick, kind: str
    ) -> Any:
        """Add a layer's gradient, unless the slot is idle or the unit is padding."""
        is_real = None if self._cond or tick.facts.always_runs(kind) else tick.is_active(kind)
        if self._is_padded and not self._cond:
            is_layer = self._layer_numbers[chunk, unit] >= 0
            is_real = is_layer if is_real is None else is_real & is_layer
        if is_real is not None:
            new = jax.tree.map(lambda a: jnp.where(is_real, a, jnp.zeros((), a.dtype)), new)
        divisor = self.model.divisor(tick.index(f"{kind}_microbatch"))
        grad_sum = _add_gradients(
            self.stage_params.grad_sums(self, gradients, unit, chunk, tick), new, divisor
        )
        return self.chunks.put(gradients, unit, chunk, grad_sum)

    def _reduce_in_last_tick(
        self, gradients: Any, unit: Index, chunk: Index, tick: StageTick
    ) -> Any:
        """In the last tick, sum a layer's gradient over devices: also where the slot is idle."""
        if not self._is_last_tick(tick):
            return gradients
        grad_sum = self.last_tick.reduce_layer(self.chunks.get(gradients, unit, chunk))
        return self.chunks.put(gradients, unit, chunk, grad_sum)

    def _backward_embed(self, state: State, tick: StageTick, dx: Any, m: Index) -> State:
        """On the first stage: add the gradients of what precedes the layers."""

        def run(outside: Flat) -> Flat:
            _, pull_back = self.model.embed_pass(m)
            return _add_gradients(outside, pull_back(dx), self.model.divisor(m))

        return state | {
            "outside": tick.branch("first_backward", run, lambda outside: outside, state["outside"])
        }


def _add_gradients(sums: Flat, new: Flat, divisor: Any) -> Flat:
    """Return the sums plus new gradients (of total / divisor), scaled to those of the total."""
    if isinstance(divisor, float):
        return jax.tree.map(lambda a, b: a + b.astype(a.dtype), sums, new)
    return jax.tree.map(lambda a, b: a + b.astype(a.dtype) * divisor.astype(a.dtype), sums, new)
