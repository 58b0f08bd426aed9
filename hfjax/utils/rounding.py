"""Numbers that are rounded, and stay so where a program decides by them."""

import jax
import jax.numpy as jnp
from jax import lax


def widen(x: jax.Array) -> jax.Array:
    """Return x in float32 or wider, with the numbers that its own dtype has.

    XLA may leave out a rounding after which a number is widened, in one program and not in another.
    What is then decided, which expert or token is the best, would depend on the mesh.

    >>> widen(jnp.bfloat16(1.01)).item()
    1.0078125
    """
    wide, own = x.astype(jnp.promote_types(x.dtype, jnp.float32)), jnp.finfo(x.dtype)
    return wide if wide.dtype == x.dtype else lax.reduce_precision(wide, own.nexp, own.nmant)
