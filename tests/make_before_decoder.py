"""Wrote tests/before/llama and mixture: checkpoints of the decoder before it was one for all.

They are of commit d45f8bf, after two steps on one device, with the losses of the two steps after
them. Not to be run again: files written by later code prove nothing.

`python -m tests.make_before_decoder` in a checkout of that commit makes them anew.
"""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

import hfjax
from hfjax.models.llama import Llama, LlamaConfig
from hfjax.models.moe import MoEConfig, MoELlama, next_token_loss

HERE = Path(__file__).with_name("before")
SHAPE: dict[str, Any] = {"vocab": 32, "length": 8, "layers": 2, "embed": 16, "mlp": 12}
SHAPE |= {"heads": 4, "kv_heads": 2}
MODELS: dict[str, Any] = {
    "llama": (Llama, LlamaConfig.tiny(**SHAPE)),
    "mixture": (MoELlama, MoEConfig.preset("mixtral-tiny", **SHAPE, experts=4)),
}


def layout_of(name: str, strategy: hfjax.Strategy, **sizes: int) -> hfjax.Layout:
    """Return the layout of a small model; everything is split, however small."""
    model, config = MODELS[name]
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    mesh = hfjax.make_mesh(devices=devices, **sizes)
    strategy = strategy.edit(replicate_below=0)
    return hfjax.layout(lambda rngs: model(config, rngs=rngs), optax.adam(1e-2), mesh, strategy)


def losses(layout: hfjax.Layout, state: hfjax.State, first: int) -> tuple[list[float], hfjax.State]:
    """Return the losses of two steps from one on, and the state then."""
    step, found = hfjax.train_step(layout, next_token_loss), []
    for number in (first, first + 1):
        row, column = np.indices((4, SHAPE["length"] + 1))
        tokens = ((row + 3) * (column + 5) * (number + 7) + column**2) % SHAPE["vocab"]
        state, metrics = step(state, {"tokens": tokens.astype(np.int32)})
        found.append(float(metrics["loss"]))
    return found, state


def main() -> None:
    """Write the checkpoints, and what came after."""
    told = {}
    for name in MODELS:
        layout = layout_of(name, hfjax.DDP, data=1)
        _, state = losses(layout, hfjax.init(layout), 0)
        hfjax.save(HERE / name, layout, state)
        told[name], _ = losses(layout, state, 2)
    (HERE / "decoder.json").write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
