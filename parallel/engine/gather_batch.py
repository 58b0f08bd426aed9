"""The global batch, for losses that ask for it."""

from typing import Any

import jax
from jax import lax

from hfjax.parallel.mesh import BATCH_AXES
from hfjax.parallel.spmd.axes import axis_size_or_one


def gather_batch(x: Any) -> Any:
    """Return the examples of all devices, for a loss across examples (contrastive, ranking).

    A loss sees the global batch, as on one device, so this returns `x` itself. It is kept for
    programs that were written when a loss had to ask for it.

    Args:
        x: Pytree of arrays whose first dimension is the batch dimension.

    Example:
        >>> import hfjax, jax.numpy as jnp, numpy as np, optax
        >>> model = lambda rngs: {"w": jnp.ones((2, 2))}
        >>> layout = hfjax.layout(model, optax.sgd(0.1), hfjax.make_mesh(data=8), hfjax.DDP)
        >>> def loss(params, x):  # of 16 rows, whatever the mesh
        ...     return hfjax.Mean(*map(jnp.float32, (0, 1)), {"size": len(hfjax.gather_batch(x))})
        >>> step = hfjax.eval_step(layout, loss)
        >>> int(step(hfjax.init(layout), np.ones((16, 2), np.float32))["size"])
        16
    """
    axes = tuple(axis for axis in BATCH_AXES if axis_size_or_one(axis) > 1)
    if not axes:
        return x
    return jax.tree.map(lambda leaf: lax.all_gather(leaf, axes, axis=0, tiled=True), x)
