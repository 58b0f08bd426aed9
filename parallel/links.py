"""What the stages of a pipeline send each other: along which links, from which to which."""

from dataclasses import dataclass
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
        route = self.ticks.route(kind, link)
        return jax.tree.map(lambda a: lax.ppermute(a, PIPE_AXIS, route), x)

    def arrived(self, x: Any, old: Any, link: int) -> Any:
        """Return what arrived, `old` on a stage to which the table never sends (zeros arrive)."""
        if self.ticks.table.branches or link == 0:
            return x
        to = [there for _, there in self.ticks.route("F", link)]
        reached = jnp.asarray(np.isin(np.arange(self.ticks.table.stages), to))
        here = reached[self.stage]
        return jax.tree.map(lambda a, b: jnp.where(here, a, b), x, old)
