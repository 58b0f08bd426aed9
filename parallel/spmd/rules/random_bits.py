"""Rules of random numbers: a device draws the part that it is asked for, the bits of one device."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn
from jax.extend.random import threefry2x32_p

from hfjax.parallel.spmd.partition_context import Scope, aval_of
from hfjax.parallel.spmd.placements import Cut, Made, Part
from hfjax.parallel.spmd.rules.pointwise import pointwise

Values = Sequence[Any]
_COUNTERS = 2**32  # beyond, a counter has a high word


def random_bits(scope: Scope, equation: JaxprEqn, values: Values) -> Values:
    """Return bits: of keys that are split, or bits that are drawn for the part asked for."""
    (keys,), out = values, aval_of(equation.outvars[0])
    alone = is_alone(aval_of(equation.invars[0]))
    if isinstance(keys, Part) and alone:
        return scope.parts(keys.cut, equation, [keys.x])
    ndim, whole = len(scope.shape(keys)), scope.whole(keys)
    bits, shape = equation.params["bit_width"], equation.params["shape"]
    if scope.cut_of(out.shape) is None:
        found = scope.bind(equation, [whole])
        scope.tell("draw", found[0])  # for the microbatch, by its number
        return found
    counts = math.prod(shape) < _COUNTERS and is_threefry(whole)

    def make(scope: Scope, cut: Cut | None) -> Any:
        if cut is not None and cut.dim < ndim and alone:
            return scope.bind(equation, [scope.part(whole, cut)])[0]
        if cut is None or not counts:
            found = scope.bind(equation, [whole])[0]
            scope.tell("draw", found)
            return found if cut is None else scope.taken(found, cut)
        found = _drawn(scope, whole, shape, cut, bits)
        scope.tell("draw", found)
        return found

    return [Made(out.shape, out.dtype, make)]


def is_alone(keys: Any) -> bool:
    """Return whether what each of several keys draws follows from that key.

    Those of rbg, and of unsafe_rbg, all draw from the first of them, in JAX too.
    """
    return str(keys.dtype) == "key<fry>"  # threefry2x32


def is_threefry(key: Any) -> bool:
    """Return whether the bits of an entry are those of its number, by the configuration of JAX."""
    by_counter = jax.config.jax_threefry_partitionable  # type: ignore[attr-defined]
    return is_alone(key) and by_counter


def _drawn(scope: Scope, key: Any, shape: tuple, cut: Cut, bits: int) -> jax.Array:
    """Return this device's part of the bits of threefry: entry i is that of counter i."""
    of_key = cut.moved(cut.dim - key.ndim)  # each key draws so
    local, number = scope.side.local(shape, of_key), jnp.uint32(0)
    for dim, size in enumerate(shape):
        here = lax.broadcasted_iota("uint32", local, dim)
        if dim == of_key.dim:
            numbers = scope.side.numbers(size, cut.outer, "uint32")
            here = lax.broadcast_in_dim(numbers, local, (dim,))
        number = number * jnp.uint32(size) + here
    words = jax.random.key_data(key)
    words = words.reshape(*key.shape, *[1] * len(shape), 2)
    first, second = words[..., 0], words[..., 1]
    number = number.reshape(*[1] * key.ndim, *local)
    zero = number * 0 + first * 0  # all operands vary alike: under vmap too
    number = number + zero
    high, low = threefry2x32_p.bind(first + zero, second + zero, zero, number)
    if bits == 64:
        return lax.shift_left(high.astype("uint64"), jnp.uint64(32)) | low.astype("uint64")
    return (high ^ low).astype(f"uint{bits}")


def of_keys(scope: Scope, equation: JaxprEqn, values: Values) -> Values | None:
    """Run on keys that are split: what is made of a key are further dimensions."""
    (keys,) = values
    if not isinstance(keys, Part):
        return None
    return scope.parts(keys.cut, equation, [keys.x])


def new_keys(scope: Scope, equation: JaxprEqn, values: Values) -> Values | None:
    """Make keys of keys, of each alone; of all at once under rbg, which draws from the first."""
    if is_alone(aval_of(equation.invars[0])):
        of_one = equation.primitive.name == "random_fold_in"
        return pointwise(scope, equation, values) if of_one else of_keys(scope, equation, values)
    found = scope.bind(equation, list(map(scope.whole, values)))
    scope.tell("draw", found[0])
    return found


def wrapped(scope: Scope, equation: JaxprEqn, values: Values) -> Values | None:
    """Take the words of keys for keys: they are the last dimension."""
    (words,) = values
    if not isinstance(words, Part) or words.cut.dim == words.x.ndim - 1:
        return None
    return scope.parts(words.cut, equation, [words.x])


RULES: dict[str, Callable] = {
    "random_bits": random_bits,
    "random_split": new_keys,
    "random_fold_in": new_keys,
    "random_unwrap": of_keys,
    "random_clone": of_keys,
    "random_seed": of_keys,
    "random_wrap": wrapped,
}
