"""13 billion parameters, AdamW, float32 master weights: what one H100 needs, and what eight do.

Nothing runs: the step is compiled for GPUs that are not here, and the compiler counts its memory.
That takes the wheels that compile for CUDA (hfjax says which), and some minutes.

    python examples/thirteen_billion.py
    python examples/thirteen_billion.py --layers 4   # the same, less deep
"""

import argparse
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # no GPU is asked for

import jax
import optax

import hfjax
from hfjax.models.gpt import GPT, GPTConfig, next_token_loss

GPU, GIGABYTE = "h100", 1e9
ON_HOST = hfjax.HOST_OPTIMIZER, hfjax.HOST_OPTIMIZER | hfjax.HOST_PARAMETERS
IN_BACKWARD = {"optimizer_in_backward": True}
CASES = [  # strategy, sizes of the mesh, how the step runs
    (hfjax.DDP, {"data": 1}, {}),
    (hfjax.DDP | ON_HOST[0], {"data": 1}, {}),
    (hfjax.DDP | ON_HOST[0], {"data": 1}, IN_BACKWARD),
    (hfjax.DDP | ON_HOST[1], {"data": 1}, IN_BACKWARD),
    (hfjax.FSDP, {"fsdp": 8}, {}),
    (hfjax.FSDP | ON_HOST[0], {"fsdp": 8}, {}),
    (hfjax.FSDP | ON_HOST[1], {"fsdp": 8}, IN_BACKWARD),
]


def compiled_memory(strategy, sizes, layers, options):
    """Return the layout and what the compiler says that a step needs on a device."""
    config = GPTConfig(vocab=50304, length=2048, layers=layers, embed=5120, heads=40)
    count = max(sizes.values())
    mesh = hfjax.make_mesh(devices=hfjax.analysis.target_devices(GPU, count), **sizes)
    optimizer = hfjax.optimizers.master_weights(optax.adamw(1e-4))
    layout = hfjax.layout(lambda rngs: GPT(config, rngs=rngs), optimizer, mesh, strategy)
    step = hfjax.train_step(layout, next_token_loss, precision="bf16", remat="full", **options)
    batch = {"tokens": jax.ShapeDtypeStruct((count, config.length + 1), "int32")}
    memory = step.lower(batch).compile().memory_analysis()
    assert memory is not None
    return layout, memory


def show(strategy, sizes, layers, options):
    """Print a line for a strategy."""
    layout, memory = compiled_memory(strategy, sizes, layers, options)
    device = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    host = memory.host_argument_size_in_bytes + memory.host_temp_size_in_bytes
    numbers = {
        "state": memory.argument_size_in_bytes,
        "gradients and temporaries": memory.temp_size_in_bytes,
        "device": device,
        "host": host,
    }
    told = ", ".join(f"{name} {size / GIGABYTE:.1f}" for name, size in numbers.items())
    where = f"{max(sizes.values())} x {GPU}"
    how = ", ".join([layout.strategy.name, *options])
    print(f"{where}, {how}: {told} GB per device", flush=True)


def main():
    parser = argparse.ArgumentParser(description="Compile 13 billion parameters.")
    parser.add_argument("--layers", type=int, default=40)
    layers = parser.parse_args().layers
    for strategy, sizes, options in CASES:
        show(strategy, sizes, layers, options)


if __name__ == "__main__":
    main()
