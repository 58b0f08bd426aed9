"""`python -m tests.grid_bytes 4,4,4 …`: what a device sends in a step on grids of these sides.

It lowers for as many fake CPU devices as that takes, and prints {sides: {axis: elements sent}}.
"""

import json
import math
import sys

import jax
import optax

import hfjax
from hfjax.models.gpt import next_token_loss
from hfjax.models.llama import Llama, LlamaConfig

LAYERS, WIDTH, WIDE, VOCAB, HEADS = 2, 288, 864, 288, 24
ROWS, LENGTH = 144, 24


def model(rngs):
    shape = {"embed": WIDTH, "mlp": WIDE, "heads": HEADS, "kv_heads": HEADS, "vocab": VOCAB}
    return Llama(LlamaConfig.tiny(layers=LAYERS, length=LENGTH, **shape), rngs=rngs)


def layout(sides):
    sizes = dict(zip(("fsdp", "row", "tensor"), sides, strict=True))
    mesh = hfjax.make_mesh(devices=jax.devices()[: math.prod(sides)], **sizes)
    strategy = hfjax.FSDP | hfjax.GRID if sides[0] > 1 else hfjax.GRID
    return hfjax.layout(model, optax.sgd(0.1), mesh, strategy.edit(replicate_below=WIDTH + 1))


def step(sides, **execution):
    return hfjax.train_step(layout(sides), next_token_loss, **execution)


def batch():
    return {"tokens": jax.ShapeDtypeStruct((ROWS, LENGTH + 1), "int32")}


def sent(sides):
    """Elements that a device sends in gathers and scatters along an axis, all-reduces apart."""
    found = hfjax.collectives(step(sides).lower(batch()))
    by: dict[str, float] = {"fsdp": 0, "row": 0, "tensor": 0, "sums over row": 0}
    for row in found:
        kind = row.kind in ("all-gather", "reduce-scatter")
        name = row.axes[0] if kind else f"sums over {'+'.join(row.axes)}"
        by[name] = by.get(name, 0) + row.bytes // 4 * row.count * (row.devices - 1) / row.devices
    return by


if __name__ == "__main__":
    every = [tuple(map(int, word.split(","))) for word in sys.argv[1:]]
    jax.config.update("jax_num_cpu_devices", max(map(math.prod, every)))
    print(json.dumps({",".join(map(str, sides)): sent(sides) for sides in every}))
