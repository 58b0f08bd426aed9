"""Experts without a capacity: a layer, and products over ragged groups, beside dense ones."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.gpu_sections.cases import Case, Goal, run_cases
from benchmarks.gpu_sections.rows import Reporter
from hfjax.models.moe.grouped import run_grouped


class Size(NamedTuple):
    """A layer of experts as one device sees it."""

    experts: int
    embed: int
    mlp: int
    top_k: int
    tokens: int


SIZES = {
    "Qwen3-30B-A3B": Size(128, 2048, 768, 8, 8192),
    "DeepSeek-V3 on 64 devices": Size(4, 7168, 2048, 1, 65536),
}
TINY = Size(4, 128, 64, 2, 64)
BLOCKS = (128, 512)  # rows of a product of the loop
TILES = ((128, 128, 64, 4, 8), (128, 192, 64, 4, 1), (64, 192, 64, 6, 4))
TILES_DW = ((128, 128, 64, 4, 8), (128, 128, 64, 4, 1), (64, 128, 64, 6, 4))


def run(reporter: Reporter) -> None:
    """Measure the layer with its gradients, then JAX's kernels for its products."""
    run_cases(reporter, _layers)
    if not reporter.smoke:
        run_cases(reporter, _products)


def _layers(smoke: bool) -> Iterator[Case]:
    for name, size in ({"tiny": TINY} if smoke else SIZES).items():
        flops = 18.0 * size.tokens * size.top_k * size.embed * size.mlp
        rivals = {"dense": _dense, "lax.ragged_dot": _ragged}
        yield Case(
            "experts",
            f"{name}, forward and backward",
            operands=partial(_operands, size),
            candidates={
                f"loop over blocks of {rows}": partial(_with_gradients, partial(_loop, rows))
                for rows in BLOCKS
            },
            rivals={name: partial(_with_gradients, layer) for name, layer in rivals.items()},
            oracle=None,
            flops=flops,
            bytes=0.0,
            rotate=False,
            goals=(Goal("ratio", 0.9),),
            shape=size._asdict(),
        )


def _operands(size: Size, seed: int) -> tuple:
    key = partial(jax.random.fold_in, jax.random.key(seed))
    bf16 = jnp.bfloat16
    x = jax.random.normal(key(0), (size.tokens, size.embed), bf16)
    up = 0.02 * jax.random.normal(key(1), (size.experts, size.embed, size.mlp, 2), bf16)
    down = 0.02 * jax.random.normal(key(2), (size.experts, size.mlp, size.embed), bf16)
    logits = jax.random.normal(key(3), (size.tokens, size.experts))
    weights, experts = lax.top_k(jax.nn.softmax(logits), size.top_k)
    return x, up, down, experts.astype(jnp.int32), weights.astype(jnp.float32)


def _with_gradients(layer: Callable, x, up, down, experts, weights) -> tuple:
    y, adjoint = jax.vjp(lambda *given: layer(*given, experts), x, up, down, weights)
    return y, adjoint(y)


def _swiglu(x_ND: jax.Array, up_DM2: jax.Array, down_MD: jax.Array) -> jax.Array:
    embed, mlp, _ = up_DM2.shape
    gate_up = (x_ND @ up_DM2.reshape(embed, -1)).reshape(-1, mlp, 2)
    return (jax.nn.silu(gate_up[..., 0]) * gate_up[..., 1]) @ down_MD


def _loop(rows: int, x, up, down, weights, experts) -> jax.Array:
    apply = lambda arrays, x: _swiglu(x, *arrays)
    return run_grouped(apply, rows, (up, down), x, experts, weights)


def _dense(x, up, down, weights, experts) -> jax.Array:
    """Return what one expert makes of as many rows: the same products, nothing sorted."""
    rows = jnp.tile(x, (experts.shape[1], 1))
    return _swiglu(rows, up[0], down[0]) + weights.sum().astype(x.dtype)


def _ragged(x, up, down, weights, experts) -> jax.Array:
    """Return what the layer does, with tokens sorted by expert and two ragged products."""
    count, top_k = up.shape[0], experts.shape[1]
    order = jnp.argsort(experts.reshape(-1))
    sizes = jnp.bincount(experts.reshape(-1), length=count).astype(jnp.int32)
    rows = x[order // top_k]
    gate_up = lax.ragged_dot(rows, up.reshape(count, up.shape[1], -1), sizes)
    gate_up = gate_up.reshape(len(rows), -1, 2)
    made = lax.ragged_dot(jax.nn.silu(gate_up[..., 0]) * gate_up[..., 1], down, sizes)
    made = made * weights.reshape(-1)[order][:, None].astype(made.dtype)
    return jnp.zeros_like(x).at[order // top_k].add(made)


class Product(NamedTuple):
    """One of the products of a layer and of its gradients."""

    operands: tuple[tuple[int, ...], tuple[int, ...]]  # their shapes
    ragged: Callable  # JAX's kernel
    dense: Callable
    tiles: Sequence[tuple[int, ...]]


def _products_of(size: Size) -> dict[str, Product]:
    """Return the products of the first matrix: JAX's own kernels, and dense ones as large."""
    from jax.experimental.pallas.ops.gpu.ragged_dot_mgpu import ragged_dot
    from jax.experimental.pallas.ops.gpu.transposed_ragged_dot_mgpu import transposed_ragged_dot

    rows, wide = size.tokens * size.top_k, 2 * size.mlp
    x, dy, w = (rows, size.embed), (rows, wide), (size.experts, size.embed, wide)
    backward = partial(ragged_dot, transpose_rhs=True)
    return {
        "x w": Product((x, w), ragged_dot, lambda x, w: x @ w[0], TILES),
        "dy w^T": Product((dy, w), backward, lambda dy, w: dy @ w[0].T, TILES),
        "x^T dy": Product((x, dy), transposed_ragged_dot, lambda x, dy: x.T @ dy, TILES_DW),
    }


def _products(smoke: bool) -> Iterator[Case]:
    del smoke
    for name, size in SIZES.items():
        for product, (operands, ragged, dense, tiles) in _products_of(size).items():
            yield Case(
                "JAX's ragged product",
                f"{name}, {product}",
                operands=partial(_groups, size, operands),
                candidates={
                    "x".join(map(str, tile)): partial(_of_groups, ragged, tile) for tile in tiles
                },
                rivals={"dense": partial(_of_one, dense)},
                oracle=None,
                flops=2.0 * size.tokens * size.top_k * size.embed * 2 * size.mlp,
                bytes=0.0,
                rotate=False,
                shape=size._asdict(),
            )


def _of_groups(ragged: Callable, tile: tuple[int, ...], one, two, sizes) -> jax.Array:
    names = ("block_m", "block_n", "block_k", "max_concurrent_steps", "grid_block_n")
    return ragged(one, two, group_sizes=sizes, **dict(zip(names, tile, strict=True)))


def _of_one(dense: Callable, one, two, sizes) -> jax.Array:
    """Return a dense product; `sizes` take part in it, so that all programs have one signature."""
    return dense(one, two) + sizes[0].astype(one.dtype)


def _groups(size: Size, shapes: tuple, seed: int) -> tuple:
    key = partial(jax.random.fold_in, jax.random.key(seed))
    chosen = jax.random.randint(key(2), (size.tokens * size.top_k,), 0, size.experts)
    sizes = jnp.bincount(chosen, length=size.experts).astype(jnp.int32)
    normal = lambda number, shape: jax.random.normal(key(number), shape, jnp.bfloat16)
    return normal(0, shapes[0]), normal(1, shapes[1]), sizes
