"""Trains on mesh axes that only a line in parallel/mesh.py knows; prints how far from one device.

`test_axes.py` runs it with a copy of the package whose table has four lines more.
"""

import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax

import hfjax
from hfjax import DDP, FSDP, PIPE, ZERO2, Schedule, Strategy
from hfjax.models.gpt import GPT, GPTConfig, next_token_loss
from hfjax.models.layers import stack_layers
from tests.small_gpt import MLPs

TOKENS = {"tokens": np.random.default_rng(0).integers(0, 64, (16, 17), np.int32)}
ROWS = dict(DDP.activations)
ALONE: dict[Any, Any] = {}  # what one device has


CONFIG = GPTConfig.tiny(vocab=64, length=16, layers=2, embed=32, heads=4, dropout=0.1)


def gpt(rngs: nnx.Rngs) -> GPT:
    return GPT(CONFIG, rngs=rngs)


def mlps(rngs: nnx.Rngs) -> GPT:
    return MLPs(CONFIG, rngs=rngs)


class Layer(nnx.Module):
    """A layer in which positions do not meet."""

    def __init__(self, rngs: nnx.Rngs):
        self.norm, self.map = nnx.LayerNorm(32, rngs=rngs), nnx.Linear(32, 32, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + nnx.gelu(self.map(self.norm(x)))


class Positionwise(nnx.Module):
    """A model of which each position is computed by itself."""

    def __init__(self, rngs: nnx.Rngs):
        self.tokens = nnx.Embed(64, 32, rngs=rngs)
        self.layers = stack_layers(2, lambda rngs: Layer(rngs), rngs)

    def embed(self, batch: Any) -> jax.Array:
        return self.tokens(batch["tokens"])

    def head(self, x: jax.Array) -> jax.Array:
        return x @ self.tokens.embedding[...].T


def next_of(logits: jax.Array, batch: Any) -> hfjax.Mean:
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["next"])
    return hfjax.Mean(losses.sum(), jnp.float32(losses.size))


class Specialists(nnx.Module):
    """A matrix before some others, of which the module takes the pieces here, or not."""

    def __init__(self, rngs: nnx.Rngs, pieces: bool):
        draw = lambda *shape: 0.1 * jax.random.normal(rngs.params(), shape)
        names = ("specialists", None, None)
        self.some = nnx.Param(draw(4, 8, 8), axes=names, keep_sharded=pieces)
        self.dense, self.pieces = nnx.Param(draw(8, 8)), pieces

    def __call__(self, x: jax.Array) -> jax.Array:
        return (meet if self.pieces else all_at_once)(self.some[...], self.dense[...], x)


def all_at_once(specialists: jax.Array, dense: jax.Array, x: jax.Array) -> jax.Array:
    """Return what all specialists make of x."""
    return jnp.einsum("bi,eij->bj", x @ dense, specialists)


@hfjax.per_device
def meet(specialists: jax.Array, dense: jax.Array, x: jax.Array) -> jax.Array:
    """Return the same; each device has some and is given the others."""
    return all_at_once(lax.all_gather(specialists, "specialist", axis=0, tiled=True), dense, x)


def trained(model: Callable, strategy: Strategy, sizes: dict, loss: Callable, batch: Any, **given):
    """Return losses and parameters after three steps."""
    execution = {
        name: given.pop(name)
        for name in ("schedule", "gradient_accumulation_steps", "gradient_reduction") & given.keys()
    }
    execution |= {"optimizer_in_backward": True} if given.pop("in_backward", False) else {}
    count = int(np.prod(list(sizes.values())))
    mesh = hfjax.make_mesh(devices=jax.devices()[:count], **sizes)
    layout = hfjax.layout(model, optax.adamw(1e-2), mesh, strategy.edit(replicate_below=0), **given)
    step = hfjax.train_step(layout, loss, **execution)
    state, losses = hfjax.init(layout, 0, execution.get("schedule")), []
    for _ in range(3):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses, hfjax.full_array(hfjax.to_model_order(layout, state).params)


def apart(*case: Any, **given: Any) -> float:
    """Return the greatest difference from one device, in losses and parameters."""
    model, _, _, loss, batch = case
    alone = {
        name: x
        for name, x in given.items()
        if name in ("forward", "axes", "gradient_accumulation_steps")
    }
    same = (model, loss, id(batch), str(alone))
    if same not in ALONE:
        ALONE[same] = trained(model, DDP, {"data": 1}, loss, batch, **alone)
    wanted = ALONE[same]
    found = trained(*case, **given)
    return max(
        float(np.abs(a - b).max())
        for a, b in zip(*map(jax.tree.leaves, (found, wanted)), strict=True)
    )


def cases() -> dict[str, Callable[[], float]]:
    """Return each case by its name."""
    dense = lambda model, strategy, **sizes: (
        lambda: apart(model, strategy, sizes, next_token_loss, TOKENS)
    )
    split = {"tokens": TOKENS["tokens"][:, :16], "next": TOKENS["tokens"][:, 1:]}
    in_positions = lambda s, **sizes: (
        lambda: apart(Positionwise, s.edit(activations={"seq": "positions"}), sizes, next_of, split)
    )
    grid = {"heads": "tensor", "mlp": "matrix", "vocab": ("tensor", "matrix")}
    matrix = Strategy("MATRIX", parameters=grid, activations={**grid, **ROWS})
    own = Strategy("OWN", parameters={"specialists": "specialist"}, activations=ROWS)
    x = np.random.default_rng(1).normal(size=(16, 8)).astype(np.float32)
    total = lambda y, _: (y**2).mean() + y.mean()
    stays = lambda strategy, pieces=True, **sizes: (
        lambda: apart(partial(Specialists, pieces=pieces), strategy, sizes, total, x)
    )
    return {
        "rows, FSDP": dense(mlps, FSDP, pretend_rows=2, data=2, fsdp=2),
        "rows, ZERO2": dense(gpt, ZERO2, pretend_rows=2, data=2, fsdp=2),
        "rows, two levels": lambda: apart(
            gpt,
            DDP,
            {"pretend_rows": 2, "data": 2, "fsdp": 2},
            next_token_loss,
            TOKENS,
            gradient_reduction="hierarchical",
            gradient_accumulation_steps=2,
        ),
        "rows, pipeline": lambda: apart(
            gpt,
            PIPE | FSDP,
            {"pipe": 2, "pretend_rows": 2, "fsdp": 2},
            next_token_loss,
            TOKENS,
            schedule=Schedule("1f1b", 4),
        ),
        "rows, in backward": lambda: apart(
            gpt, ZERO2, {"pretend_rows": 4, "fsdp": 2}, next_token_loss, TOKENS, in_backward=True
        ),
        "rows and stays": stays(own, specialist=4, data=2),
        "rows and stays, read as a whole": stays(own, False, specialist=4, data=2),
        "rows and stays, ZERO2": stays(own | ZERO2, specialist=2, data=2, fsdp=2),
        "sequence": in_positions(DDP, positions=4, data=2),
        "sequence, FSDP": in_positions(FSDP, positions=2, data=2, fsdp=2),
        "partitioner": dense(mlps, matrix, matrix=2, tensor=2, data=2),
        "partitioner, FSDP": dense(gpt, FSDP | matrix, matrix=2, fsdp=4),
    }


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    known, asked = cases(), sys.argv[1:]
    few = {name: known[name] for name in asked} or known
    print(json.dumps({name: run() for name, run in few.items()}))
