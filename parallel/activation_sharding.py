"""Sharding of activations: the `place` that a layout gives to modules that ask for it.

`inject` (adapters/model_template.py) replaces a module's `no_constraint` (models/layers.py) by it.
"""

from dataclasses import dataclass
from functools import partial

import jax
from jax import lax
from jax.sharding import Mesh, PartitionSpec as P

from hfjax.parallel.mesh import auto_axes
from hfjax.parallel.param_specs import auto_part
from hfjax.parallel.strategy import Axes, Strategy

Names = tuple[str | None, ...]  # of an activation's dimensions


@dataclass(frozen=True, eq=False)
class Placer:
    """Constrains activations by the strategy's rules; one for each mesh and strategy."""

    mesh: Mesh
    strategy: Strategy

    def __call__(self, x: jax.Array, names: Names, gradient: Names | None = None) -> jax.Array:
        """Return x, constrained; `gradient` names its gradient's dimensions (None: those of x)."""
        return _constrain(self, names, gradient, x) if auto_axes(self.mesh) else x

    def axes(self, name: str | None) -> Axes:
        """Return the tensor axes that shard a named dimension of activations."""
        axes = self.strategy.activations.get(name or "", ())
        return tuple(axis for axis in auto_axes(self.mesh) if axis in axes)

    def constrain(self, x: jax.Array, names: Names) -> jax.Array:
        """Return x, constrained."""
        split = [self.strategy.activations.get(name or "", ()) for name in names]
        return lax.with_sharding_constraint(x, auto_part(P(*split)))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _constrain(placer: Placer, names: Names, gradient: Names | None, x: jax.Array) -> jax.Array:
    return placer.constrain(x, names)


def _forward(
    placer: Placer, names: Names, gradient: Names | None, x: jax.Array
) -> tuple[jax.Array, None]:
    return placer.constrain(x, names), None


def _backward(
    placer: Placer, names: Names, gradient: Names | None, _: None, dx: jax.Array
) -> tuple[jax.Array]:
    return (placer.constrain(dx, gradient or names),)


_constrain.defvjp(_forward, _backward)
