"""A step of a Llama with adapters beside the same by hand in plain JAX: processor time, memory.

Both alternate in one process, on one CPU device. By hand: `jax.grad` with respect to the adapters
of the same Flax module, and optax. Writes results/lora.md.

    python -m benchmarks.lora --rounds 12
"""

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import hfjax
from hfjax.models.gpt import next_token_loss
from hfjax.models.llama import Llama, LlamaConfig

RESULT = Path(__file__).parent / "results" / "lora.md"
CONFIG = LlamaConfig(vocab=8192, length=256, layers=8, heads=8, kv_heads=4, embed=512, mlp=1024)
OPTIMIZER = optax.adam(1e-4)


def with_hfjax(model: Any) -> tuple[Any, Any]:
    """Return hfjax's step and its first state."""
    mesh = hfjax.make_mesh(devices=jax.devices()[:1])
    layout = hfjax.layout(model, OPTIMIZER, mesh, hfjax.DDP)
    state = hfjax.init(layout)
    step = hfjax.train_step(layout, next_token_loss)
    return step, (state,)


def by_hand(model: Any) -> tuple[Any, Any]:
    """Return a step in plain JAX and its first state."""
    is_adapter = lambda path, _: "lora" in path
    graph, low_rank, rest = nnx.split(model(nnx.Rngs(0)), is_adapter, ...)

    def step(low_rank: Any, optimizer_state: Any, batch: Any) -> tuple:
        def loss(low_rank: Any) -> jax.Array:
            mean = next_token_loss(nnx.merge(graph, low_rank, rest)(batch), batch)
            return mean.total / mean.weight

        value, gradients = jax.value_and_grad(loss)(low_rank)
        updates, optimizer_state = OPTIMIZER.update(gradients, optimizer_state, low_rank)
        return optax.apply_updates(low_rank, updates), optimizer_state, value

    state = low_rank, OPTIMIZER.init(low_rank)
    return jax.jit(step, donate_argnums=(0, 1)), state


def measure(step: Callable, state: Any, batch: Any) -> tuple[Any, float]:
    """Return the next state, and the processor seconds of a step."""
    began = time.process_time()
    *state, _ = jax.block_until_ready(step(*state, batch))
    return state, time.process_time() - began


def main() -> None:
    """Measure, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    args = parser.parse_args()
    model = hfjax.adapters.lora(lambda rngs: Llama(CONFIG, rngs=rngs), rank=16, alpha=32)
    tokens = jax.random.randint(jax.random.key(0), (4, 257), 0, CONFIG.vocab)
    batch = {"tokens": jnp.asarray(tokens, jnp.int32)}
    steps = {"hfjax": with_hfjax(model), "by hand": by_hand(model)}
    states = {name: state for name, (_, state) in steps.items()}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(args.rounds + 2):  # the first two warm up
        for name, (step, _) in steps.items():
            states[name], taken = measure(step, states[name], batch)
            seconds[name].append(taken)
    medians = {name: statistics.median(times[2:]) for name, times in seconds.items()}
    compiled = {
        "hfjax": steps["hfjax"][0].lower(batch).compile(),
        "by hand": steps["by hand"][0].lower(*states["by hand"], batch).compile(),
    }
    sizes = {name: x.memory_analysis().temp_size_in_bytes / 2**20 for name, x in compiled.items()}
    count = sum(x.size for x in jax.tree.leaves(nnx.state(nnx.eval_shape(model, nnx.Rngs(0)))))
    rows = [f"| {name} | {medians[name]:.3f} | {sizes[name]:.1f} |" for name in steps]
    ratios = [medians["hfjax"] / medians["by hand"], sizes["hfjax"] / sizes["by hand"]]
    text = f"""# A step with adapters beside plain JAX

`python -m benchmarks.lora --rounds {args.rounds}` on {date.today().isoformat()}: a Llama of
{count / 1e6:.1f}M parameters with adapters of rank 16 on all linear maps, 4 sequences of 256
tokens, float32, one CPU device of {os.cpu_count()} cores ({platform.machine()}), jax
{jax.__version__}. Medians; both alternate.

| step | processor seconds | MiB of temporaries |
|---|---|---|
{chr(10).join(rows)}

hfjax takes {ratios[0]:.3f} of the processor time of plain JAX, and {ratios[1]:.3f} of its
temporaries.
"""
    RESULT.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
