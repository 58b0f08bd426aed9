"""Muon as one writes it without stacks: optax.contrib.muon for a model of separate 2-D matrices.

`take_apart` says by hand, path by path, which arrays a stacked parameter of our models consists
of; `train` is a loop of plain JAX and optax with these, without an engine and without hfjax's muon.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from optax.contrib import MuonDimensionNumbers

from hfjax.utils.paths import flatten, nest

MATRIX = MuonDimensionNumbers(reduction_axis=0, output_axis=1)


def pieces(path, x):
    """Return {name: array} of one layer of a parameter: its 2-D matrices, or itself."""
    if path.endswith("qkv/kernel"):  # [D, kv heads, queries + 2, d]
        embed = len(x)
        q, k, v = x[:, :, :-2], x[:, :, -2], x[:, :, -1]
        return {name: y.reshape(embed, -1) for name, y in {"q": q, "k": k, "v": v}.items()}
    if path.endswith("out/kernel"):  # [H, d, D]
        return {"out": x.reshape(-1, x.shape[-1])}
    if path.endswith("gate_up/kernel"):  # [D, mlp, 2]
        return {"gate": x[:, :, 0], "up": x[:, :, 1]}
    if path.endswith("each/gate_up"):  # [E, D, mlp, 2]
        return {f"{e} {i}": x[e, :, :, i] for e in range(len(x)) for i in (0, 1)}
    if path.endswith("each/down"):  # [E, mlp, D]
        return {f"{e}": x[e] for e in range(len(x))}
    return {"all": x}


def is_matrix(path):
    return bool(re.search(r"(qkv|out|gate_up|up|down)/kernel$|each/(gate_up|down)$", path))


def take_apart(flat):
    """Return {path, layer and name: array} of arrays by path."""
    apart = {}
    for path, x in flat.items():
        layers = dict(enumerate(x)) if path.startswith("layers/") else {"-": x}
        for layer, y in layers.items():
            apart |= {f"{path}|{layer}|{name}": z for name, z in pieces(path, y).items()}
    return apart


def muon(flat, rate, **options):
    """Return optax.contrib.muon for arrays taken apart, and its state."""
    numbers = {name: MATRIX if is_matrix(name.split("|")[0]) else None for name in take_apart(flat)}
    return optax.contrib.muon(rate, muon_weight_dimension_numbers=lambda _: numbers, **options)


def train(model, loss, batch, steps, rate, **options):
    """Return parameters by path after some steps."""
    graph, state, rest = nnx.split(model, nnx.Param, ...)
    params = flatten(nnx.to_pure_dict(state))
    optimizer = muon(params, rate, **options)

    def mean_loss(apart):
        # Parameters from their parts: the inverse of `take_apart` is its transposed derivative.
        zeros = jax.tree.map(jnp.zeros_like, params)
        flat = jax.linear_transpose(take_apart, zeros)(apart)[0]
        held = nnx.State(state)
        nnx.replace_by_pure_dict(held, nest(flat))
        found = loss(nnx.merge(graph, held, rest)(batch), batch)
        return found.total / found.weight

    @jax.jit
    def step(apart, kept):
        updates, kept = optimizer.update(jax.grad(mean_loss)(apart), kept, apart)
        return optax.apply_updates(apart, updates), kept

    apart = take_apart(params)
    kept = optimizer.init(apart)
    for _ in range(steps):
        apart, kept = step(apart, kept)
    return {name: np.asarray(x) for name, x in apart.items()}
