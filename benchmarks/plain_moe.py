"""The rival: a Llama of mixtures, expert-parallel by hand with `shard_map` and `lax.all_to_all`.

Without a toolkit. Every device has its own rows and experts; each row is a group, and an expert
takes at most [C] of its tokens, first come first served. Layers are unrolled, their parameters lie
in a list. Rows travel by gathers in both directions, with adjoints written by hand.
[B]atch, [S]equence, [D] embed, [H]eads, [E]xperts, [k] choices.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from benchmarks.plain_jax import _attend, _cross_entropy
from hfjax.models.moe import MoEConfig
from hfjax.utils.paths import flatten

AXIS = "expert"
NAMES = {  # of a layer: hfjax's path, the key here
    "norm1/scale": "norm1",
    "norm2/scale": "norm2",
    "attention/qkv/kernel": "qkv",
    "attention/out/kernel": "out",
    "mlp/router_kernel": "router",
    "mlp/each/gate_up": "up",
    "mlp/each/down": "down",
}
ENDS = {"tokens": "tokens", "norm/scale": "norm", "unembed/kernel": "unembed"}


def weights_of(params: Any, layers: int) -> dict[str, Any]:
    """Return hfjax's parameters as they are here: a list of layers."""
    flat: Mapping[str, Any] = {path: np.asarray(x) for path, x in flatten(params).items()}
    layer = lambda i: {name: flat[f"layers/{path}"][i] for path, name in NAMES.items()}
    ends = {name: flat[path] for path, name in ENDS.items() if path in flat}
    return ends | {"layers": [layer(i) for i in range(layers)]}


class Program:
    """The model, its loss and its jitted step."""

    def __init__(self, config: MoEConfig, optimizer: optax.GradientTransformation):
        self.config, self.mesh = config, Mesh(np.array(jax.devices()), (AXIS,))
        self.optimizer = optimizer
        self.batch = NamedSharding(self.mesh, P(AXIS))

    def specs(self, tree: Any) -> Any:
        """Return how each array is split: those of experts by expert."""
        of = lambda keys: getattr(keys[-1], "key", "") in ("up", "down")
        spec = lambda keys, _: P(AXIS) if of(keys) else P()
        return jax.tree_util.tree_map_with_path(spec, tree)

    def place(self, params: Any) -> tuple[Any, Any]:
        """Return (parameters, optimizer state) on their devices."""
        on = lambda tree: jax.tree.map(partial(NamedSharding, self.mesh), self.specs(tree))
        params = jax.device_put(params, on(params))
        moments = on(jax.eval_shape(self.optimizer.init, params))
        return params, jax.jit(self.optimizer.init, out_shardings=moments)(params)

    def step(self, state: tuple[Any, Any]) -> Callable:
        """Return the jitted (state, tokens) -> (state, loss), compiled for states like this one."""
        where = jax.tree.map(lambda x: x.sharding, state)
        out = (where, NamedSharding(self.mesh, P()))
        return jax.jit(
            self._step, in_shardings=(where, self.batch), out_shardings=out, donate_argnums=0
        )

    def _step(self, state: tuple[Any, Any], tokens: jax.Array):
        params, moments = state
        specs = self.specs(params)
        out = (P(), specs)
        graded = jax.shard_map(
            self._graded, mesh=self.mesh, in_specs=(specs, P(AXIS)), out_specs=out, check_vma=False
        )
        loss, gradients = graded(params, tokens)
        updates, moments = self.optimizer.update(gradients, moments, params)
        return (optax.apply_updates(params, updates), moments), loss

    def _graded(self, params: Any, tokens: jax.Array):
        loss, gradients = jax.value_and_grad(self.loss)(params, tokens)
        devices = self.mesh.size
        whole = lambda spec, g: g / devices if spec == P(AXIS) else lax.pmean(g, AXIS)
        is_spec = lambda x: isinstance(x, P)
        gradients = jax.tree.map(whole, self.specs(params), gradients, is_leaf=is_spec)
        return lax.pmean(loss, AXIS), gradients

    # -- the model --------------------------------------------------------------------------

    def loss(self, params: Any, tokens: jax.Array) -> jax.Array:
        """Return the mean cross entropy of each next token, and the loss of balance."""
        x, total = params["tokens"][tokens[:, :-1]], 0.0
        for p in params["layers"]:
            x = x + self._attention(p, _norm(p["norm1"], x))
            y, balance = self._mixture(p, _norm(p["norm2"], x))
            x, total = x + y, total + balance
        head = params["unembed"] if "unembed" in params else params["tokens"].T
        x = _norm(params["norm"], x)
        logits = (x.reshape(-1, x.shape[-1]) @ head).reshape(*x.shape[:2], -1)
        return _cross_entropy(logits, tokens[:, 1:]) + self.config.router.balance_loss * total

    def _attention(self, p: Any, x_BSD: jax.Array) -> jax.Array:
        _, heads, _, width = p["qkv"].shape
        qkv = _linear(x_BSD, p["qkv"].reshape(x_BSD.shape[-1], -1))
        qkv = qkv.reshape(*x_BSD.shape[:2], heads, 3, width)
        q, k = (_rotated(qkv[:, :, :, i], self.config.rotary.base) for i in range(2))
        y = _attend(q, k, qkv[:, :, :, 2]).reshape(*x_BSD.shape[:2], -1)
        return _linear(y, p["out"].reshape(-1, x_BSD.shape[-1]))

    def _mixture(self, p: Any, x_BSD: jax.Array) -> tuple[jax.Array, jax.Array]:
        config, (rows, tokens, width) = self.config, x_BSD.shape
        count, k = config.experts, config.top_k
        assert isinstance(count, int)
        assert config.capacity is not None
        size = math.ceil(tokens * k / count * config.capacity)
        scores = jax.nn.softmax(_linear(x_BSD, p["router"]))
        weights, experts = lax.top_k(scores, k)
        weights = weights / weights.sum(-1, keepdims=True)
        chosen = jax.nn.one_hot(experts.reshape(rows, -1), count, dtype=jnp.int32)
        rank = ((jnp.cumsum(chosen, 1) - chosen) * chosen).sum(-1).reshape(experts.shape)
        place = jnp.where(rank < size, experts * size + rank, count * size)
        at = jax.vmap(partial(_inverse, count * size))(place.reshape(rows, -1))
        sent = _there(x_BSD, place, at).reshape(rows, count, size, width).swapaxes(0, 1)
        sent = sent.reshape(count, rows * size, width)
        sent = lax.all_to_all(sent, AXIS, 0, 1, tiled=True)
        made = jax.vmap(_gated)(p["up"], p["down"], sent)
        made = lax.all_to_all(made, AXIS, 1, 0, tiled=True)
        made = made.reshape(count, rows, size, width).swapaxes(0, 1).reshape(rows, -1, width)
        share = lax.stop_gradient(chosen.mean(1, dtype=x_BSD.dtype))
        balance = count * (share * scores.mean(1)).sum(-1).mean()
        y: Any = _back(made, weights, place, at)
        return y, balance


def _inverse(count: int, place: jax.Array) -> jax.Array:
    """Return which choice is at each place; the number of choices where none is."""
    none = jnp.full(count, len(place), jnp.int32)
    return none.at[place].set(jnp.arange(len(place), dtype=jnp.int32), mode="drop")


def _rows(x: jax.Array, at: jax.Array) -> jax.Array:
    take = lambda x, at: x.at[at].get(mode="fill", fill_value=0)
    return jax.vmap(take)(x, at)


@jax.custom_vjp
def _there(x: jax.Array, place: jax.Array, at: jax.Array) -> jax.Array:
    return _rows(x, at // place.shape[2])


def _there_backward(saved: tuple, d: jax.Array):
    (place,) = saved
    return sum(_rows(d, place[..., j]) for j in range(place.shape[2])), None, None


_there.defvjp(lambda x, place, at: (_there(x, place, at), (place,)), _there_backward)


@jax.custom_vjp
def _back(made: jax.Array, weights: jax.Array, place: jax.Array, at: jax.Array) -> jax.Array:
    each = (weights[..., j, None] * _rows(made, place[..., j]) for j in range(place.shape[2]))
    return sum(each)  # pyright: ignore


def _back_backward(saved: tuple, dy: jax.Array):
    made, weights, place, at = saved
    k = place.shape[2]
    d_weights = [(dy * _rows(made, place[..., j])).sum(-1) for j in range(k)]
    weight = _rows(weights.reshape(len(weights), -1), at)[..., None]
    return weight * _rows(dy, at // k), jnp.stack(d_weights, -1), None, None


_back.defvjp(lambda *given: (_back(*given), given), _back_backward)


def _gated(up: jax.Array, down: jax.Array, x: jax.Array) -> jax.Array:
    made = (x @ up.reshape(x.shape[-1], -1)).reshape(len(x), -1, 2)
    return (jax.nn.silu(made[..., 0]) * made[..., 1]) @ down


def _linear(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Rows are flattened: a weight gradient with two contracted dimensions is slow on a CPU."""
    return (x.reshape(-1, x.shape[-1]) @ kernel).reshape(*x.shape[:-1], -1)


def _norm(scale: jax.Array, x: jax.Array) -> jax.Array:
    return x * lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-5) * scale


def _rotated(x_BSHd: jax.Array, base: float) -> jax.Array:
    half = x_BSHd.shape[-1] // 2
    angles = jnp.arange(x_BSHd.shape[1])[:, None] * base ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    a, b = x_BSHd[..., :half], x_BSHd[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)
