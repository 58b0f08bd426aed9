"""The control: GPipe as it is mostly written, `jax.grad` through a scan over ticks with `ppermute`.

Autodiff keeps what every tick saved until the backward pass: memory grows with the microbatches.
The layer is a plain function of a dict of arrays, so that other programs can run the very same.
[B]atch, [S]equence, [D] embed, [H]eads, head [d]imension.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P


@dataclass(frozen=True)
class Shape:
    """A model with tiny ends, and one of its microbatches."""

    embed: int = 256
    heads: int = 4
    layers: int = 8
    vocab: int = 64
    rows: int = 4
    length: int = 64

    def layer(self, normal: Callable, ones: Callable, zeros: Callable) -> dict[str, Any]:
        """Return the parameters of a layer, made by functions of a shape."""
        D = self.embed
        return {
            "norm1": ones((D,)),
            "qkv": normal((D, 3 * D)),
            "out": normal((D, D)),
            "norm2": ones((D,)),
            "up": normal((D, 4 * D)),
            "bias": zeros((4 * D,)),
            "down": normal((4 * D, D)),
        }

    def ends(self, normal: Callable) -> dict[str, Any]:
        """Return the parameters before and after the layers."""
        return {
            "tokens": normal((self.vocab, self.embed)),
            "unembed": normal((self.embed, self.vocab)),
        }


def block(heads: int, p: dict[str, jax.Array], x_BSD: jax.Array) -> jax.Array:
    """Return one transformer layer."""
    B, S, D = x_BSD.shape
    qkv = (_norm(x_BSD, p["norm1"]) @ p["qkv"]).reshape(B, S, 3, heads, D // heads)
    q, k, v = (qkv[:, :, i] for i in range(3))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(D // heads).astype(x_BSD.dtype)
    visible = jnp.tril(jnp.ones((S, S), bool))[None, None]
    weights = jax.nn.softmax(jnp.where(visible, scores, -1e9), axis=-1)
    x_BSD = x_BSD + jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(B, S, D) @ p["out"]
    up = _norm(x_BSD, p["norm2"]) @ p["up"] + p["bias"].reshape(1, 1, -1)
    return x_BSD + jax.nn.gelu(up) @ p["down"]


def _norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    centred = x - x.mean(-1, keepdims=True)
    unit = centred * lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    return unit * scale.reshape(1, 1, -1)


def embed(p: dict[str, jax.Array], tokens: jax.Array) -> jax.Array:
    """Return what enters the first layer."""
    return p["tokens"][tokens]


def loss(p: dict[str, jax.Array], x: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the mean cross entropy of one microbatch."""
    logits = x @ p["unembed"]
    picked = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return (jax.nn.logsumexp(logits, axis=-1) - picked).mean()


POLICIES = {
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
}


def lowered(shape: Shape, stages: int, microbatches: int, remat: str) -> jax.stages.Lowered:
    """Return the program of the gradients; nothing is allocated."""
    mesh = Mesh(np.array(jax.devices()[:stages]), ("pipe",), axis_types=(AxisType.Auto,))
    layer = partial(block, shape.heads)
    layer = layer if remat == "none" else jax.checkpoint(layer, policy=POLICIES[remat])
    specs = (P("pipe"), P(), P(), P())
    body = partial(_total, layer, stages, microbatches)
    total = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P())
    on = lambda spec: (
        lambda s: jax.ShapeDtypeStruct(s, jnp.float32, sharding=NamedSharding(mesh, spec))
    )
    stacked = lambda s: on(P("pipe"))((shape.layers, *s))
    layers, ends = shape.layer(stacked, stacked, stacked), shape.ends(on(P()))
    tokens = jax.ShapeDtypeStruct((microbatches, shape.rows, shape.length), jnp.int32)
    return jax.jit(jax.value_and_grad(total, argnums=(0, 1))).lower(layers, ends, tokens, tokens)


def _total(layer: Callable, stages: int, microbatches: int, layers, ends, tokens, labels):
    """Return the mean loss: on each device, its layers on microbatch after microbatch."""
    stage = lax.axis_index("pipe")
    vary = lambda x: lax.pcast(x, ("pipe",), to="varying")
    route = [(i, (i + 1) % stages) for i in range(stages)]
    entering = vary(embed(ends, tokens))

    def tick(x, t):
        x = jnp.where(stage == 0, entering[jnp.minimum(t, microbatches - 1)], x)
        y, _ = lax.scan(lambda x, p: (layer(p, x), None), x, layers)
        return lax.ppermute(y, "pipe", route), y

    ticks = jnp.arange(microbatches + stages - 1)
    _, leaving = lax.scan(tick, jnp.zeros_like(entering[0]), ticks)
    add = lambda sums, m: (sums + loss(ends, *m), None)
    sums, _ = lax.scan(add, vary(jnp.zeros(())), (leaving[stages - 1 :], labels))
    return lax.psum(jnp.where(stage == stages - 1, sums / microbatches, 0.0), "pipe")
