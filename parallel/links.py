"""What the stages of a pipeline send each other: along which links, from which to which."""

import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from hfjax.parallel.mesh import PIPE_AXIS
from hfjax.parallel.ticks import Ticks


@dataclass(frozen=True)
class Links:
    """The links of a table, seen from one stage."""

    ticks: Ticks
    stage: Any  # the number of this one

    def send(self, x: Any, kind: str, link: int) -> Any:
        """Return what arrives on this link: nothing is sent where the table never sends."""
        if link == 0:
            return x
        route = [pair for pair in self._routes[kind] if self._is_on(link, *pair)]
        return jax.tree.map(lambda a: lax.ppermute(a, PIPE_AXIS, route), x)

    def arrived(self, x: Any, old: Any, link: int) -> Any:
        """Return what arrived, `old` on a stage to which the table never sends (zeros arrive)."""
        if self.ticks.table.branches or link == 0:
            return x
        pairs = [there for here, there in self._routes["F"] if self._is_on(link, here, there)]
        reached = jnp.asarray(np.isin(np.arange(self.ticks.table.stages), pairs))
        here = reached[self.stage]
        return jax.tree.map(lambda a, b: jnp.where(here, a, b), x, old)

    def _is_on(self, link: int, here: int, there: int) -> bool:
        return (there - here - link) % self.ticks.table.stages == 0

    @cached_property
    def _routes(self) -> dict[str, list[tuple[int, int]]]:
        """Which stage ever sends to which: activations up the model, their gradients down."""
        stages = [stage for stage, _ in self.ticks.table.homes]
        up = sorted({pair for pair in itertools.pairwise(stages) if pair[0] != pair[1]})
        return {"F": up, "B": sorted((there, here) for here, there in up)}
