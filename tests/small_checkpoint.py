"""A layout small enough to be saved in milliseconds, and its state at any step."""

from dataclasses import replace

import jax
import numpy as np
import optax
from flax import nnx

import hfjax

EVERYTHING = hfjax.FSDP.edit(replicate_below=0)


class Two(nnx.Module):
    def __init__(self, rngs, wide=16, dtype=None):
        dtypes = {} if dtype is None else {"param_dtype": dtype}
        self.first = nnx.Linear(8, wide, rngs=rngs, **dtypes)
        self.second = nnx.Linear(wide, 4, rngs=rngs, **dtypes)


def small_layout(strategy=EVERYTHING, optimizer=None, model=Two, sizes=None, **changes):
    mesh = hfjax.make_mesh(devices=None, **(sizes or {"fsdp": 2}))
    init = lambda rngs: model(rngs, **changes)
    return hfjax.layout(init, optimizer or optax.adam(1e-3), mesh, strategy)


def state_at(layout, step, seed=0):
    state = hfjax.init(layout, seed)
    place = lambda x: jax.device_put(x, state.step.sharding)
    return replace(state, step=place(np.int32(step)))


def saved(directory, *steps, layout=None, **given):
    """Save a state under each of the steps, made of the step as its seed; return the layout."""
    layout = layout or small_layout()
    for step in steps:
        hfjax.save(directory, layout, state_at(layout, step, step), **given)
    return layout


def same(one, other):
    """Return whether two states have the same arrays, bit for bit."""
    bits = lambda x: np.asarray(jax.random.key_data(x) if "key" in str(x.dtype) else x).tobytes()
    leaves = [jax.tree.leaves(x) for x in (one, other)]
    return len(leaves[0]) == len(leaves[1]) and all(map(lambda a, b: bits(a) == bits(b), *leaves))
