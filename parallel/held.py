"""What a stage of a pipeline holds while it runs: its layers, what waits in rings, what is summed.

The slots of the rings were assigned by the table's compiler; neither their number nor the size of
the program depends on how many microbatches there are.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from hfjax.parallel.dissect import Dissected
from hfjax.parallel.links import Links
from hfjax.parallel.mesh import PIPE_AXIS
from hfjax.parallel.model import Model
from hfjax.parallel.offload import Share, of_part
from hfjax.parallel.rings import Ring
from hfjax.parallel.store import Store
from hfjax.parallel.tensors import packed
from hfjax.parallel.tick import Row
from hfjax.parallel.ticks import Ticks

State = dict[str, Any]


@dataclass(frozen=True)
class StageHolds:
    """What one stage holds, inside shard_map over `pipe`."""

    ticks: Ticks
    model: Model
    unroll: int | bool = 1
    choose: Callable | None = None  # (tensors, stage) -> which of them go to the host

    @property
    def _trains(self) -> bool:
        return self.ticks.table.trains

    @property
    def _split(self) -> bool:
        return self.ticks.table.split

    @property
    def _branches(self) -> bool:
        return self.ticks.table.branches

    @property
    def _stages(self) -> int:
        return self.ticks.table.stages

    @cached_property
    def _stage(self) -> Any:
        return lax.axis_index(PIPE_AXIS) if self._stages > 1 else 0

    @cached_property
    def _links(self) -> Links:
        return Links(self.ticks, self._stage)

    @cached_property
    def _x(self) -> Any:
        """Zeros like what goes from layer to layer."""
        shape = jax.eval_shape(self.model.first, self.model.ends, jnp.int32(0))
        return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shape)

    @cached_property
    def _chunks(self) -> Store:
        _, chunks, units = self.model.order.shape
        return Store(chunks, units, apart=self.unroll is True or units == 1)

    @cached_property
    def _values(self) -> Any:
        return self._chunks.of(self.model.values)

    @cached_property
    def _layers(self) -> jax.Array:
        """The numbers of this stage's layers, [chunks, units]."""
        return jnp.asarray(self.model.order, jnp.int32)[self._stage]

    @cached_property
    def _padded(self) -> bool:
        return bool((self.model.order < 0).any())

    @cached_property
    def _passes(self) -> Dissected:
        return self._dissected(self.model.passes)

    @cached_property
    def _keeping(self) -> Dissected | None:
        """The passes of the last microbatch, if it keeps what others compute again."""
        keep = self.model.keep
        return self._dissected(keep) if keep is not None and self._trains else None

    def _dissected(self, passes: Callable) -> Dissected:
        zeros = lambda a: jnp.zeros(a.shape, a.dtype)
        slots, m = jax.tree.map(zeros, self.model.slots), jnp.int32(0)
        known = self._known(self._chunks.get(self._values, 0, 0), 0, 0, m)
        return passes(known, slots, self._x, self._split)

    def _parameters(self, state: State, at: Row, kind: str, unit: Any) -> Any:
        """Return the parameters of a layer that a slot of this kind uses."""
        return self._chunks.get(self._values, unit, at.positive(f"{kind}_chunk"))

    def _known(self, parameters: Any, unit: Any, chunk: Any, m: Any) -> Any:
        return parameters, jnp.maximum(self._layers[chunk, unit], 0), m

    def _ring(self, name: str) -> Ring:
        return self._rings[name]

    @cached_property
    def _rings(self) -> dict[str, Ring]:
        """What waits for backward passes: `late` also for the second half, `cross` only for it."""
        passes, chunks = self._passes, self._chunks
        number = len(jax.tree.leaves(passes.stash))
        shares = self._shares
        parts = {
            "stash": (passes.stash, [of_part(share, 0, number) for share in shares]),
            "late": (passes.late, [of_part(share, number, None) for share in shares]),
            "cross": (passes.cross if self._split else [], [{}] * self._stages),
        }
        ring = lambda name, like, shares: Ring(
            like, self.ticks.used(name), chunks.units, chunks.apart, shares, self._stage
        )
        return {name: ring(name, *part) for name, part in parts.items()}

    @cached_property
    def _shares(self) -> list[Share]:
        """What of stash and late goes to the host, by stage."""
        passes, stages = self._passes, range(self._stages)
        if self.choose is None:
            return [{} for _ in stages]
        tensors = passes.tensors or packed(jax.tree.leaves((passes.stash, passes.late)))
        return [self.choose(tensors, stage, self.model.order.shape[1:]) for stage in stages]

    def _queue(self, name: str) -> Store:
        return Store(self.ticks.depth[name], 1, True)

    def _start(self) -> State:
        """Return the state before the first tick."""
        shape = lambda tree: jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), tree)
        m, table = jnp.int32(0), self.ticks.table
        _, aux = jax.eval_shape(self.model.last, self.model.ends, self._x, m)
        tell = lambda a: jnp.zeros((table.microbatches, *a.shape), a.dtype)
        state: State = {"aux": jax.tree.map(tell, aux), "sent": {}}
        if self.ticks.depth["x"]:  # idle slots run layers too: on what layers are used to
            x = self.model.first(self.model.ends, m)
            state["x"] = self._queue("x").filled(x)
            state["sent"] = dict.fromkeys(self.ticks.links["F"], x)
        if not self._trains:
            return state
        state |= {"dx": self._x, "dy": self._queue("dy").full(self._x)}
        for name, ring in self._rings.items():
            state[name] = ring.empty()
        if self._keeping is not None:
            state["kept"] = self._chunks.full(self._keeping.stash)
        state["gradients"] = self._chunks.full(self.model.slots)
        wide = lambda a: jnp.zeros(a.shape, jnp.promote_types(a.dtype, jnp.float32))
        state["ends"] = jax.tree.map(wide, shape(self.model.ends))
        return state
