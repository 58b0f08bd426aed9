"""Placeholder for cuDNN attention in a program for a GPU, where nothing compiles cuDNN's.

It reads, writes and saves what cuDNN's does: of the forward pass its result and one number for each
query and head, never scores. It is a single call that cannot run: programs with it are read or
compiled to see their costs.
"""

import ctypes
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, PartitionSpec as P

from hfjax.models.attention import dot_product
from hfjax.parallel.extensions.kernel_dispatch.per_shard import ShardedFunction
from hfjax.parallel.mesh import AXES, COLUMN_AXIS

FORWARD, BACKWARD = "hfjax_fused_attention", "hfjax_fused_attention_backward"
WINDOW = "window"  # the attribute of a call: how many positions a query sees
NO_MESH = AbstractMesh((1,) * len(AXES), AXES)  # of models that are traced without a mesh
STATUS_RETURNING = 2  # of calls of which a compiler needs only the address


@cache
def _register_ffi_targets() -> None:
    """Register an address for the names, which GPU programs need and nothing here calls."""
    address = jax.ffi.pycapsule(ctypes.CDLL(None).abs)
    for name in (FORWARD, BACKWARD):
        jax.ffi.register_ffi_target(name, address, platform="CUDA", api_version=0)


def fused_attention(
    q_BSHD: jax.Array,
    k_BSGD: jax.Array,
    v_BSGD: jax.Array,
    documents_BS: Any = None,
    window: int | None = None,
) -> jax.Array:
    """Return an array shaped as causal attention's, by one call forward and one backward.

    cuDNN's supports half precision only: in float32 a step has XLA's, which saves scores.
    """
    if q_BSHD.dtype not in (jnp.bfloat16, jnp.float16):
        xla_attention = partial(dot_product, implementation="xla", window=window)
        return xla_attention(q_BSHD, k_BSGD, v_BSGD, documents_BS)
    heads, documents = P(None, None, COLUMN_AXIS), P()
    inputs: tuple[jax.Array, ...] = (q_BSHD, k_BSGD, v_BSGD)
    if documents_BS is not None:  # cuDNN takes a mask of pairs of positions
        inputs = (*inputs, (documents_BS[:, :, None] == documents_BS[:, None, :])[:, None])
    specs = (heads, heads, heads, documents)[: len(inputs)]
    mesh: Any = jax.sharding.get_abstract_mesh()
    mesh = NO_MESH if mesh.empty else mesh
    return ShardedFunction(mesh, *_passes(window), specs, heads, (heads, heads))(*inputs)


@cache
def _passes(window: int | None) -> tuple[Callable, Callable]:
    return partial(_forward, window), partial(_backward, window)


def _forward(window: int | None, q: jax.Array, k: jax.Array, v: jax.Array, *documents: Any) -> Any:
    out = jax.ShapeDtypeStruct((*q.shape[:3], v.shape[-1]), q.dtype)
    sums = jax.ShapeDtypeStruct(q.shape[:3], jnp.float32)
    out, sums = _call(FORWARD, window, (out, sums), q, k, v, *documents)
    return out, (out, sums)


def _backward(window: int | None, inputs: tuple, residuals: tuple, gradient: jax.Array) -> tuple:
    q, k, v, *documents = inputs
    shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k, v))
    grads = _call(BACKWARD, window, shapes, q, k, v, *residuals, gradient, *documents)
    none = [jnp.zeros(x.shape, jax.dtypes.float0) for x in documents]
    return (*grads, *none)


def _call(name: str, window: int | None, results: tuple, *operands: Any) -> Any:
    _register_ffi_targets()
    call = jax.ffi.ffi_call(name, results, custom_call_api_version=STATUS_RETURNING)
    return call(*operands, **({} if window is None else {WINDOW: np.int32(window)}))
