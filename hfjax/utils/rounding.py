"""Numbers that are rounded, and stay so where a program makes decisions by them."""

import jax
import jax.numpy as jnp
from jax import lax


def widen(x: jax.Array) -> jax.Array:
    """Return x in float32 or wider, with values that its own dtype can represent.

    XLA may omit a rounding before a number is widened, in one program and not in another. Decisions
    by such numbers, which expert or token is the best, would then depend on the mesh.

    >>> widen(jnp.bfloat16(1.01)).item()
    1.0078125
    """
    wide, own = x.astype(jnp.promote_types(x.dtype, jnp.float32)), jnp.finfo(x.dtype)
    return wide if wide.dtype == x.dtype else lax.reduce_precision(wide, own.nexp, own.nmant)
