"""flash_block beside cuDNN's attention: forward, and with the backward pass; causal."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.gpu_sections.cases import Case, Goal, run_cases, tunings
from benchmarks.gpu_sections.rows import Reporter
from hfjax.pallas_kernels.attention.block import (
    Mask,
    State,
    Tuning,
    attention,
    flash_block,
    reference,
    reference_attention,
    refuses,
)

KERNEL = "flash_block"
TOKENS, WIDTH = 16384, 1024  # of a batch; heads times their dimension
SHAPES = ((1024, 64), (1024, 128), (2048, 64), (4096, 64), (4096, 128), (8192, 128))  # S, D
TINY = ((64, 64),)
FORWARD, BOTH = 4, 14  # operations for a pair that sees each other and a dimension of a head
TILES: Mapping[str, tuple] = {  # consumers, rows of a tile, stages
    "forward": ((2, 64, 4), (2, 128, 3), (1, 128, 2), (3, 64, 4)),
    "queries": ((2, 128, 2),),
    "keys": ((2, 64, 3),),
}


def run(reporter: Reporter) -> None:
    """Measure every shape with the backward pass, then forward."""
    run_cases(reporter, cases)


def cases(smoke: bool) -> Iterator[Case]:
    """Yield cases, those of a training step first."""
    shapes = TINY if smoke else SHAPES
    for length, head in shapes:
        yield _both(length, head, smoke)
    for length, head in shapes:
        yield _forward(length, head, smoke)
    yield _of_a_ring(*shapes[-1], smoke)


def _forward(length: int, head: int, smoke: bool) -> Case:
    size = _size(length, head, smoke)
    return Case(
        KERNEL,
        f"forward, S={length} D={head}",
        operands=partial(_operands, size, 3),
        candidates=_candidates(size, ("forward",), smoke, lambda attend: attend),
        rivals=_rivals(smoke, lambda attend: attend),
        oracle=lambda *operands: _exact(*(_first(x) for x in operands)),
        flops=FORWARD * _pairs(size),
        bytes=4 * 2 * _numbers(size),
        shape={"S": length, "D": head},
        part=_first,
        goals=(Goal("ratio", 0.9),),
    )


def _both(length: int, head: int, smoke: bool) -> Case:
    size = _size(length, head, smoke)
    return Case(
        KERNEL,
        f"forward and backward, S={length} D={head}",
        operands=partial(_operands, size, 4),
        candidates=_candidates(size, ("queries", "keys"), smoke, _with_gradients),
        rivals=_rivals(smoke, _with_gradients),
        oracle=lambda *operands: _with_gradients(_exact)(*(_first(x) for x in operands)),
        flops=BOTH * _pairs(size),
        bytes=12 * 2 * _numbers(size),
        shape={"S": length, "D": head},
        part=lambda result: jax.tree.map(_first, result),
    )


def _of_a_ring(length: int, head: int, smoke: bool) -> Case:
    """Return a case of one block of a ring: all keys are seen, the state comes in and goes out."""
    size, mask = _size(length, head, smoke), Mask(causal=False)
    rows, length, heads, head = size
    block = lambda visit: lambda q, k, v, o, m, l: tuple(visit(q, k, v, State(o, m, l), mask=mask))
    plain = block(reference)
    return Case(
        f"{KERNEL}, state in and out",
        f"all seen, S={length} D={head}",
        operands=partial(_with_state, size),
        candidates={"reference": plain} if smoke else {"default": block(flash_block)},
        rivals={"plain JAX": plain},
        oracle=lambda *operands: plain(*(x.astype(jnp.float32) for x in operands)),
        flops=FORWARD * 2 * _pairs(size) * length / (length + 1),
        bytes=3 * 2 * _numbers(size) + 8 * rows * length * heads * (head + 2),
    )


def _with_state(size: tuple, seed: int) -> tuple:
    rows, length, heads, _ = size
    keys = jax.random.split(jax.random.key(seed), 6)
    o = jax.random.normal(keys[3], size)
    m = jax.random.normal(keys[4], (rows, heads, length))
    l = 1 + jax.random.uniform(keys[5], (rows, heads, length))
    return *_operands(size, 3, seed), o, m, l


def _size(length: int, head: int, smoke: bool) -> tuple[int, int, int, int]:
    """Return rows, tokens, heads and their dimension."""
    return (1, length, 2, head) if smoke else (TOKENS // length, length, WIDTH // head, head)


def _pairs(size: tuple[int, int, int, int]) -> float:
    rows, length, heads, head = size
    return rows * heads * head * length * (length + 1) / 2


def _numbers(size: tuple[int, int, int, int]) -> int:
    rows, length, heads, head = size
    return rows * length * heads * head


def _operands(size: tuple, count: int, seed: int) -> tuple:
    keys = jax.random.split(jax.random.key(seed), count)
    return tuple(jax.random.normal(key, size, jnp.bfloat16) for key in keys)


def _first(x: jax.Array) -> jax.Array:
    """Return the first row's first head: heads know nothing of each other."""
    return x[:1, :, :1]


def _exact(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    wide = (x.astype(jnp.float32) for x in (q, k, v))
    return jax.nn.dot_product_attention(*wide, is_causal=True, implementation="xla")


def _with_gradients(attend: Callable) -> Callable:
    """Return (q, k, v, gradient of the result) -> the result and the gradients of q, k, v."""

    def both(q: jax.Array, k: jax.Array, v: jax.Array, do: jax.Array) -> tuple:
        out, pull = jax.vjp(attend, q, k, v)
        return out, *pull(do.astype(out.dtype))

    return both


def _rivals(smoke: bool, of: Callable[[Callable], Callable]) -> dict[str, Callable]:
    how = {"XLA": "xla"} if smoke else {"cuDNN": "cudnn"}
    attend: Any = partial(jax.nn.dot_product_attention, is_causal=True)
    return {name: of(partial(attend, implementation=word)) for name, word in how.items()}


def _candidates(
    size: tuple, which: tuple[str, ...], smoke: bool, of: Callable
) -> dict[str, Callable]:
    """Return the kernel with the tunings that it accepts."""
    if smoke:
        return {"reference": of(reference_attention)}
    default, shape = Tuning(), jax.ShapeDtypeStruct(size, jnp.bfloat16)
    changes = [{name: _tile(default, name, t)} for name in which for t in TILES[name]]
    found = tunings(default, *changes)
    takes = lambda tuning: refuses(shape, shape, shape, tuning=tuning) is None
    kept = {name: tuning for name, tuning in found.items() if takes(tuning) or name == "default"}
    return {name: of(partial(attention, tuning=tuning)) for name, tuning in kept.items()}


def _tile(default: Any, name: str, numbers: tuple) -> Any:
    return type(getattr(default, name))(*numbers)
