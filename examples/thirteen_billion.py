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
CASES = [  # strategy without the host, sizes of the mesh
    (hfjax.DDP, {"data": 1}),
    (hfjax.FSDP, {"fsdp": 8}),
]


def compiled_memory(strategy, sizes, layers):
    """Return the layout and what the compiler says that a step needs on a device."""
    config = GPTConfig(vocab=50304, length=2048, layers=layers, embed=5120, heads=40)
    count = max(sizes.values())
    mesh = hfjax.make_mesh(devices=hfjax.target_devices(GPU, count), **sizes)
    optimizer = hfjax.master(optax.adamw(1e-4))
    layout = hfjax.layout(lambda rngs: GPT(config, rngs=rngs), optimizer, mesh, strategy)
    step = hfjax.train_step(layout, next_token_loss, precision="bf16", remat="full")
    batch = {"tokens": jax.ShapeDtypeStruct((count, config.length + 1), "int32")}
    memory = step.lower(batch).compile().memory_analysis()
    assert memory is not None
    return layout, memory


def show(strategy, sizes, layers):
    """Print a line for a strategy."""
    layout, memory = compiled_memory(strategy, sizes, layers)
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
    print(f"{where}, {layout.strategy.name}: {told} GB per device", flush=True)


def main():
    parser = argparse.ArgumentParser(description="Compile 13 billion parameters.")
    parser.add_argument("--layers", type=int, default=40)
    layers = parser.parse_args().layers
    for strategy, sizes in CASES:
        show(strategy, sizes, layers)
        show(strategy | hfjax.HOST_OPTIMIZER, sizes, layers)


if __name__ == "__main__":
    main()
