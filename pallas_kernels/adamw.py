"""A step of AdamW on one shard, in one pass and in place.

Loshchilov & Hutter, Decoupled Weight Decay Regularization (arXiv:1711.05101). The step stands
between the reduction of gradients and the gather of parameters: it scales the gradient (its mean,
clipped), updates the moments and the parameter, and casts the parameter for the gather.

    g = gradient * scale
    mean = (1 - b1) * g + b1 * mean                    variance = (1 - b2) * g * g + b2 * variance
    move = (mean / (1 - b1^t)) / (sqrt(variance / (1 - b2^t)) + eps) + weight_decay * parameter
    parameter = parameter - rate * move                          cast = parameter as it is stored

in float32 and in this order, which is that of `optax.adamw`. A step that does not count (its loss
or gradient is not finite) writes back what it read, to the bit.

The floor: every byte is read once and written once. With float32 parameter, moments and gradient
and a bfloat16 cast that is 16 bytes read and 14 written, 30 bytes of device memory a parameter
(26 without the cast and with a bfloat16 gradient: 14 + 12), about 20 flops, no byte on a link.
At 4.8 TB/s of an H200 30 bytes are 6.3 ms for a billion parameters. No array is allocated but the
cast: parameter and moments are updated in place, if the caller gives them up (donation).

Each block takes some vectors of 16 bytes a thread from every array, all loads before the first
store. What is left at the end is less than a block: it passes through shared memory in whole
pieces of 128 elements, since a copy need not stop where the array does. The rest, fewer than 128
elements, is updated in plain JAX.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from hfjax.pallas_kernels import mosaic, plgpu

VECTOR = 4  # elements that a thread takes at once: 16 bytes of float32
PIECE = 128  # elements of one copy after the last block: one for each thread
READ = ("parameter", "mean", "variance", "gradient")
MOST = 2**31 - 1  # elements that are counted in 32 bits


@dataclass(frozen=True)
class AdamW:
    """What a step of AdamW is, of one parameter: everything that no step changes."""

    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    cast: Any = None  # the dtype in which a copy of the parameter is wanted; None: no copy


@dataclass(frozen=True)
class Tuning:
    """How the work is cut up."""

    vectors: int = 2  # a thread's, of each array: so many loads of 16 bytes are in flight

    @property
    def elements(self) -> int:
        """Elements of a block."""
        return self.vectors * VECTOR * mosaic.WARPGROUP


class Updated(NamedTuple):
    """What a step makes of one shard."""

    parameter: jax.Array
    mean: jax.Array
    variance: jax.Array
    cast: jax.Array | None


def numbers(scale: Any, rate: Any, corrections: tuple[Any, Any], counts: Any = True) -> jax.Array:
    """Return the numbers of a step as one array: make it once for all shards.

    `scale` is the factor of the gradient, `corrections` are 1 - b1^t and 1 - b2^t; a step that
    does not count leaves everything as it was.
    """
    given = (scale, rate, *corrections, counts)
    return jnp.stack([jnp.asarray(x).astype(jnp.float32).reshape(()) for x in given])


def refuses(parameter: Any, mean: Any, variance: Any, gradient: Any) -> str | None:
    """Return why the kernel cannot update these arrays (or shapes with dtypes); None: it can."""
    if not 0 < parameter.size <= MOST:
        return (
            f"parameter has shape {list(parameter.shape)}: from 1 to {MOST} elements are updated "
            "at once. Split it over more devices, or use kernels='xla'."
        )
    return unlike(parameter, mean, variance, gradient)


def unlike(parameter: Any, mean: Any, variance: Any, gradient: Any) -> str | None:
    """Return why neither the kernel nor the reference can update these arrays; None: one can."""
    given = {"parameter": parameter, "mean": mean, "variance": variance, "gradient": gradient}
    narrow = {"mean", "gradient"}
    for name, x in given.items():
        allowed = ("float32", "bfloat16") if name in narrow else ("float32",)
        if jnp.dtype(x.dtype).name not in allowed:
            return (
                f"{name} is {x.dtype}{list(x.shape)}: the kernel takes {' or '.join(allowed)}. "
                "Keep it so (hfjax.master(…) keeps parameters in float32), or use kernels='xla'."
            )
        if x.shape != parameter.shape:
            return (
                f"{name} has shape {list(x.shape)}, parameter {list(parameter.shape)}: shards of "
                "one shape are expected. Place them alike."
            )
    return None


def reference(
    parameter: jax.Array,
    mean: jax.Array,
    variance: jax.Array,
    gradient: jax.Array,
    numbers: jax.Array,
    settings: AdamW = AdamW(),
) -> Updated:
    """Return the step in plain JAX; one fusion of XLA."""
    if why := unlike(parameter, mean, variance, gradient):
        raise ValueError(f"adamw_shard: {why}")
    return _step((parameter, mean, variance, gradient), tuple(numbers), settings)


def adamw_shard(
    parameter: jax.Array,
    mean: jax.Array,
    variance: jax.Array,
    gradient: jax.Array,
    numbers: jax.Array,
    settings: AdamW = AdamW(),
    tuning: Tuning = Tuning(),
) -> Updated:
    """Return the step of a shard of any shape; the first three arrays are updated in place."""
    if why := refuses(parameter, mean, variance, gradient):
        raise ValueError(f"adamw_shard: {why}")
    held = [jax.new_ref(x.reshape(-1)) for x in (parameter, mean, variance)]
    size, out, gradient = parameter.size, _cast_shape(parameter, settings), gradient.reshape(-1)
    copied = size - size % PIECE
    cast: Any = [jnp.zeros(one.shape, one.dtype) for one in out]
    if copied:
        body = partial(_adamw_shard, size=copied, settings=settings, tuning=tuning)
        scratch = _scratch(mean, gradient, settings) if copied % tuning.elements else {}
        run = mosaic.in_place(body, out, scratch, **_launch(copied, tuning))
        cast = run(*held, gradient, numbers)
    if copied < size:
        end = _step([x[copied:] for x in (*held, gradient)], tuple(numbers), settings)
        for ref, x in zip(held, end, strict=False):
            ref[copied:] = x
        cast = [x.at[copied:].set(end.cast) for x in cast]
    shaped = lambda x: x.reshape(parameter.shape)
    new = (shaped(jax.freeze(ref)) for ref in held)
    return Updated(*new, cast=shaped(cast[0]) if cast else None)


def _step(old: Any, numbers: tuple, settings: AdamW, root: Callable = jnp.sqrt) -> Updated:
    """Return what becomes of arrays of parameter, mean, variance and gradient."""
    (parameter, mean, variance, gradient), s = old, settings
    scale, rate, first, second, counts = numbers
    wide = lambda x: x.astype(jnp.float32)
    g = wide(gradient) * scale
    m = (1 - s.b1) * g + s.b1 * wide(mean)
    v = (1 - s.b2) * (g * g) + s.b2 * variance
    move = (m / first) / (root(v / second) + s.eps)
    if s.weight_decay:
        move = move + s.weight_decay * parameter
    taken = jnp.broadcast_to(counts, parameter.shape) != 0
    keep = lambda new, before: jnp.where(taken, new.astype(before.dtype), before)
    new = keep(parameter - rate * move, parameter)
    cast = None if s.cast is None else new.astype(s.cast)
    return Updated(new, keep(m, mean), keep(v, variance), cast)


def _cast_shape(parameter: jax.Array, settings: AdamW) -> tuple:
    if settings.cast is None:
        return ()
    return (jax.ShapeDtypeStruct((parameter.size,), settings.cast),)


def _launch(size: int, tuning: Tuning) -> dict[str, Any]:
    whole, rest = divmod(size, tuning.elements)
    blocks = whole + pl.cdiv(rest, PIECE)
    return {"grid": (blocks,), "grid_names": ("block",), "without_barriers": True}


def _scratch(mean: jax.Array, gradient: jax.Array, settings: AdamW) -> dict[str, Any]:
    read = (jnp.float32, mean.dtype, jnp.float32, gradient.dtype)
    dtypes = dict(zip(READ, read, strict=True))
    dtypes |= {} if settings.cast is None else {"cast": settings.cast}
    pieces = {name: plgpu.SMEM((PIECE,), dtype) for name, dtype in dtypes.items()}
    return pieces | {"arrived": plgpu.Barrier(num_arrivals=4)}


def _adamw_shard(*refs: Any, size: int, settings: AdamW, tuning: Tuning, **scratch: Any) -> None:
    """Update the elements of one block."""
    old, numbers, cast = refs[:4], refs[4], refs[5:]
    whole = size // tuning.elements
    block = lax.axis_index("block")
    known = tuple(numbers[i] for i in range(5))
    step = partial(_step, numbers=known, settings=settings, root=mosaic.root)

    @pl.when(block < whole)
    def _():
        at = pl.ds(block * tuning.elements, tuning.elements)
        layout = plgpu.Layout.WG_STRIDED((tuning.elements,), vec_size=VECTOR)
        new = step([plgpu.layout_cast(ref[at], layout) for ref in old])
        for ref, x in zip((*old[:3], *cast), new, strict=False):
            ref[at] = x

    if scratch:

        @pl.when(block >= whole)
        def _():
            start = whole * tuning.elements + (block - whole) * PIECE
            _end([ref.at[pl.ds(start, PIECE)] for ref in (*old, *cast)], step, **scratch)


def _end(refs: list, step: Any, arrived: Any, **pieces: Any) -> None:
    """Update a piece, by way of shared memory."""
    held = [pieces[name] for name in (*READ, "cast") if name in pieces]
    for ref, piece in zip(refs[:4], held[:4], strict=True):
        plgpu.copy_gmem_to_smem(ref, piece, arrived)
    plgpu.barrier_wait(arrived)
    layout = plgpu.Layout.WG_STRIDED((PIECE,), vec_size=1)
    new = step([plgpu.layout_cast(piece[...], layout) for piece in held[:4]])
    written = [0, 1, 2, *range(4, len(held))]
    for i, x in zip(written, new, strict=False):
        held[i][...] = x
    plgpu.commit_smem()
    for i in written:
        plgpu.copy_smem_to_gmem(held[i], refs[i])
    plgpu.wait_smem_to_gmem(0)
