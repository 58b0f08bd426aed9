"""Merge adapters into the kernels that they change: W + s A B, in float32."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding

from hfjax.adapters.low_rank import A, Adapter, B
from hfjax.parallel.offload.host_memory import to_device
from hfjax.sharding.layout import Layout


class MergedParams(Mapping[str, Any]):
    """The parameters of a model without its adapters; a kernel is merged when it is asked for.

    So one merged kernel at a time is in memory, beside the parameters.

    Args:
        layout: The layout of the parameters.
        params: The parameters by path, in the model's order.
        adapters: All adapters.
    """

    def __init__(
        self, layout: Layout, params: Mapping[str, Any], adapters: Sequence[Adapter]
    ) -> None:
        self.layout, self.params = layout, params
        self.adapters: dict[str, list[Adapter]] = {}
        for adapter in adapters:
            self.adapters.setdefault(f"{adapter.map.path}/kernel", []).append(adapter)
        self.left_out = {f"{x.map.adapter_path}/{name}" for x in adapters for name in (A, B)}

    def __getitem__(self, path: str) -> Any:
        if path in self.left_out:
            raise KeyError(path)
        if path not in self.adapters:
            return self.params[path]
        adapters = self.adapters[path]
        low_rank = [
            (self.params[f"{x.map.adapter_path}/{A}"], self.params[f"{x.map.adapter_path}/{B}"])
            for x in adapters
        ]
        spec = self.layout.model_layout.param_specs[path].parameter
        run = jax.jit(
            partial(merge_kernel, adapters), out_shardings=NamedSharding(self.layout.mesh, spec)
        )
        return run(self.params[path], low_rank)

    def __iter__(self) -> Iterator[str]:
        return (path for path in self.params if path not in self.left_out)

    def __len__(self) -> int:
        return len(self.params) - len(self.left_out)


def merge_kernel(
    adapters: Sequence[Adapter], kernel: jax.Array, low_rank: Sequence[tuple[jax.Array, jax.Array]]
) -> jax.Array:
    """Return a kernel with the changes of its adapters added, in float32.

    Args:
        adapters: The adapters of the kernel.
        kernel: The kernel [*stack, *inputs, *outputs].
        low_rank: A [*stack, *inputs, rank] and B [*stack, rank, *outputs] of each.
    """
    kernel = to_device(kernel).astype(jnp.promote_types(kernel.dtype, jnp.float32))
    for adapter, (a, b) in zip(adapters, low_rank, strict=True):
        a, b = to_device(a).astype(kernel.dtype), to_device(b).astype(kernel.dtype)
        stack = tuple(range(kernel.ndim - len(adapter.map.shape)))
        dims = (((a.ndim - 1,), (len(stack),)), (stack, stack))
        change = adapter.scale * lax.dot_general(a, b, dims, precision=lax.Precision.HIGHEST)
        dim = len(stack) + adapter.map.inputs + 1
        kernel = (
            _add_at(kernel, change, adapter.map.start, dim)
            if adapter.map.part
            else (kernel + change)
        )
    return kernel


def _add_at(x: jax.Array, change: jax.Array, start: int, dim: int) -> jax.Array:
    """Return an array with a change added to a range of a dimension, which is not sharded."""
    count = change.shape[dim]
    block = lax.slice_in_dim(x, start, start + count, axis=dim)
    return lax.dynamic_update_slice_in_dim(x, block + change, start, axis=dim)
