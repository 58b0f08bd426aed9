"""Experts without a capacity: a layer, and products over ragged groups, beside dense ones."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.gpu_sections.cases import Case, Goal, run_cases
from benchmarks.gpu_sections.rows import Reporter
from hfjax.models.moe.blocks import in_blocks


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
        rivals = {"dense": partial(_with_gradients, _dense)}
        if size.experts * flops < 1e15:
            rivals["lax.ragged_dot"] = partial(_with_gradients, _ragged)
        yield Case(
            "experts",
            f"{name}, forward and backward",
            operands=partial(_operands, size),
            candidates={
                f"loop over blocks of {rows}": partial(_with_gradients, partial(_loop, rows))
                for rows in BLOCKS
            },
            rivals=rivals,
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
    return in_blocks(apply, rows, (up, down), x, experts, weights)


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


def _products(smoke: bool) -> Iterator[Case]:
    """Yield JAX's own kernels beside a dense product of as many operations."""
    del smoke
    from jax.experimental.pallas.ops.gpu.ragged_dot_mgpu import ragged_dot
    from jax.experimental.pallas.ops.gpu.transposed_ragged_dot_mgpu import transposed_ragged_dot

    for name, size in SIZES.items():
        rows, wide = size.tokens * size.top_k, 2 * size.mlp
        shapes = {
            "x w": ((rows, size.embed), (size.experts, size.embed, wide)),
            "dy w^T": ((rows, wide), (size.experts, size.embed, wide)),
            "x^T dy": ((rows, size.embed), (rows, wide)),
        }
        for product, (one, two) in shapes.items():
            if product == "x^T dy":
                call = lambda tile, x, dy, sizes: transposed_ragged_dot(
                    x.T, dy, group_sizes=sizes, **_tile(tile)
                )
                dense = lambda x, dy, sizes: x.T @ dy + sizes[0].astype(x.dtype)
            elif product == "x w":
                call = lambda tile, x, w, sizes: ragged_dot(x, w, group_sizes=sizes, **_tile(tile))
                dense = lambda x, w, sizes: x @ w[0] + sizes[0].astype(x.dtype)
            else:
                call = lambda tile, dy, w, sizes: ragged_dot(
                    dy, w, group_sizes=sizes, transpose_rhs=True, **_tile(tile)
                )
                dense = lambda dy, w, sizes: dy @ w[0].T + sizes[0].astype(dy.dtype)
            tiles = TILES_DW if product == "x^T dy" else TILES
            yield Case(
                "JAX's ragged product",
                f"{name}, {product}",
                operands=partial(_groups, size, one, two),
                candidates={"x".join(map(str, tile)): partial(call, tile) for tile in tiles},
                rivals={"dense": dense},
                oracle=None,
                flops=2.0 * rows * size.embed * wide,
                bytes=0.0,
                rotate=False,
                shape=size._asdict(),
            )


def _tile(tile: tuple) -> dict[str, Any]:
    names = ("block_m", "block_n", "block_k", "max_concurrent_steps", "grid_block_n")
    return dict(zip(names, tile, strict=True))


def _groups(size: Size, one: tuple, two: tuple, seed: int) -> tuple:
    key = partial(jax.random.fold_in, jax.random.key(seed))
    chosen = jax.random.randint(key(2), (size.tokens * size.top_k,), 0, size.experts)
    sizes = jnp.bincount(chosen, length=size.experts).astype(jnp.int32)
    normal = lambda number, shape: jax.random.normal(key(number), shape, jnp.bfloat16)
    return normal(0, one), normal(1, two), sizes
