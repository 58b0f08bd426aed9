"""The rival: GPT-2 trained with `jax.jit` and sharding constraints, by hand and without a toolkit.

One program for each way to split it: one device, DDP, FSDP, TENSOR, TENSOR with SEQUENCE. Layers
are unrolled and their parameters lie in a list: on a CPU that beats a scan over stacked arrays.
[B]atch, [S]equence, [D] embed, [H]eads, head [d]imension, [V]ocabulary.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

BLOCKS = 4  # of queries: a block attends to the keys up to its own end


@dataclass(frozen=True)
class Split:
    """How the program is split: the mesh, where parameters lie, where activations lie."""

    data: int = 1
    tensor: int = 1
    parameters: Mapping[str, P] | None = None  # None: whole
    gather: bool = False  # FSDP: parameters are gathered where they are used
    sequence: P = P("data")  # the residual stream

    def mesh(self) -> Mesh:
        """Return the mesh of this program."""
        shape = (self.data, self.tensor)
        grid = np.array(jax.devices()[: self.data * self.tensor]).reshape(shape)
        return Mesh(grid, ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)


_FSDP = {
    "qkv": P("data"),
    "out": P("data"),
    "up": P("data"),
    "down": P("data"),
    "tokens": P("data"),
    "positions": P("data"),
}
_MEGATRON = {
    "qkv": P(None, "tensor"),
    "qkv_bias": P("tensor"),
    "out": P("tensor"),
    "up": P(None, "tensor"),
    "up_bias": P("tensor"),
    "down": P("tensor"),
    "tokens": P("tensor"),
}
SPLITS = {
    "one device": Split(),
    "DDP": Split(data=8),
    "FSDP": Split(data=8, parameters=_FSDP, gather=True),
    "TENSOR": Split(data=2, tensor=4, parameters=_MEGATRON),
    "TENSOR|SEQUENCE": Split(data=2, tensor=4, parameters=_MEGATRON, sequence=P("data", "tensor")),
}


class Program:
    """The model, its loss and its jitted step, split over a mesh."""

    def __init__(self, split: Split, optimizer: optax.GradientTransformation):
        self.split, self.grid = split, split.mesh()
        self.optimizer = optax.chain(optax.clip_by_global_norm(1.0), optimizer)
        self.batch = NamedSharding(self.grid, P("data"))

    def place(self, params: Any) -> tuple[Any, Any]:
        """Return (parameters, optimizer state) on their devices."""
        params = jax.tree.map(jax.device_put, params, self.shardings(params))
        moments = jax.eval_shape(self.optimizer.init, params)
        init = jax.jit(self.optimizer.init, out_shardings=self.shardings(moments))
        return params, init(params)

    def shardings(self, tree: Any) -> Any:
        """Return where each array lies, by the last name on its path."""
        specs = self.split.parameters or {}

        def on(keys, _):
            name = str(getattr(keys[-1], "key", ""))
            return NamedSharding(self.grid, specs.get(name, P()))

        return jax.tree_util.tree_map_with_path(on, tree)

    def step(self, state: tuple[Any, Any]) -> Callable:
        """Return the jitted (state, tokens) -> (state, loss), compiled for states like this one."""
        where = jax.tree.map(lambda x: x.sharding, state)
        return jax.jit(
            self._step,
            in_shardings=(where, self.batch),
            out_shardings=(where, NamedSharding(self.grid, P())),
            donate_argnums=0,
        )

    def _step(self, state: tuple[Any, Any], tokens: jax.Array):
        params, moments = state
        loss, gradients = jax.value_and_grad(self.loss)(params, tokens)
        gradients = lax.with_sharding_constraint(gradients, self.shardings(gradients))
        updates, moments = self.optimizer.update(gradients, moments, params)
        return (optax.apply_updates(params, updates), moments), loss

    # -- the model --------------------------------------------------------------------------

    def loss(self, params: Any, tokens: jax.Array) -> jax.Array:
        """Return the mean cross entropy of each next token."""
        params = self._gathered(params)
        x_BSD = params["tokens"][tokens[:, :-1]] + params["positions"][: tokens.shape[1] - 1]
        x_BSD = self._on(x_BSD, self.split.sequence)
        for layer in params["layers"]:
            x_BSD = self._layer(layer, x_BSD)
        x_BSD = self._on(_norm(params["norm"], x_BSD), P("data"))
        flat = x_BSD.reshape(-1, x_BSD.shape[-1]) @ params["tokens"].T
        logits = self._on(flat.reshape(*x_BSD.shape[:2], -1), P("data", None, "tensor"))
        return _cross_entropy(logits, tokens[:, 1:])

    def _layer(self, p: Any, x_BSD: jax.Array) -> jax.Array:
        h = self._on(_norm(p["norm1"], x_BSD), P("data"))
        x_BSD = x_BSD + self._on(self._attention(p, h), self.split.sequence)
        h = self._on(_norm(p["norm2"], x_BSD), P("data"))
        up = _linear(h, p["up"], p["up_bias"])
        up = jax.nn.gelu(self._on(up, P("data", None, "tensor")))
        down = _linear(up, p["down"], p["down_bias"])
        return x_BSD + self._on(down, self.split.sequence)

    def _attention(self, p: Any, x_BSD: jax.Array) -> jax.Array:
        heads, _, width = p["qkv_bias"].shape
        flat = _linear(x_BSD, p["qkv"].reshape(x_BSD.shape[-1], -1), p["qkv_bias"].reshape(-1))
        qkv = self._on(flat.reshape(*x_BSD.shape[:2], heads, 3, width), P("data", None, "tensor"))
        y = self._on(_attend(*(qkv[:, :, :, i] for i in range(3))), P("data", None, "tensor"))
        y = y.reshape(*x_BSD.shape[:2], -1)
        return _linear(y, p["out"].reshape(-1, x_BSD.shape[-1]), p["out_bias"])

    def _gathered(self, params: Any) -> Any:
        return jax.tree.map(lambda p: self._on(p, P()), params) if self.split.gather else params

    def _on(self, x: jax.Array, spec: P) -> jax.Array:
        return lax.with_sharding_constraint(x, NamedSharding(self.grid, spec))


def _linear(x: jax.Array, kernel: jax.Array, bias: jax.Array) -> jax.Array:
    """Rows are flattened: a weight gradient with two contracted dimensions is slow on a CPU."""
    y = x.reshape(-1, x.shape[-1]) @ kernel
    return y.reshape(*x.shape[:-1], -1) + bias


def _norm(p: Any, x: jax.Array) -> jax.Array:
    centred = x - x.mean(-1, keepdims=True)
    return centred * lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * p["scale"] + p["bias"]


def _attend(q_BSHd: jax.Array, k_BSHd: jax.Array, v_BSHd: jax.Array) -> jax.Array:
    size = q_BSHd.shape[1] // BLOCKS
    ends = [(i + 1) * size for i in range(BLOCKS)]
    parts = [_block(q_BSHd[:, e - size : e], k_BSHd[:, :e], v_BSHd[:, :e]) for e in ends]
    return jnp.concatenate(parts, axis=1)


def _block(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    queries, keys = q.shape[1], k.shape[1]
    scores = jnp.einsum("bqhd,bkhd->bhqk", q * q.shape[-1] ** -0.5, k)
    visible = jnp.arange(keys)[None] <= jnp.arange(queries)[:, None] + keys - queries
    weights = jax.nn.softmax(jnp.where(visible, scores, jnp.finfo(scores.dtype).min), axis=-1)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def _cross_entropy(logits_BSV: jax.Array, targets_BS: jax.Array) -> jax.Array:
    columns = lax.broadcasted_iota(targets_BS.dtype, logits_BSV.shape, 2)
    picked = jnp.where(columns == targets_BS[..., None], logits_BSV, 0).sum(-1)
    return (jax.nn.logsumexp(logits_BSV, axis=-1) - picked).mean()
