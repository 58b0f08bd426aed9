"""Mixtures of experts: memory and overlap on H200s, processor time on CPUs; a table of each.

    python -m benchmarks.experts memory     # compiled for 8 and 64 H200s, which are not here
    python -m benchmarks.experts speed      # 8 fake CPU devices: against a dense Llama, plain JAX

Tables go to benchmarks/results/experts_*.md. Compiling needs `make wheels`. Without a capacity the
products of experts are a loop whose turns depend on the data: what runs beside it counts one turn.
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import optax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

import hfjax  # noqa: E402
from benchmarks.long_sequences import FLASH, write  # noqa: E402
from benchmarks.plain_moe import Program, weights_of  # noqa: E402
from hfjax.analysis.flights import Flight, flights  # noqa: E402
from hfjax.base.tables import human  # noqa: E402
from hfjax.models.llama import Llama, LlamaConfig  # noqa: E402
from hfjax.models.loss import next_token_loss as dense_loss  # noqa: E402
from hfjax.models.moe import MoEConfig, MoELlama, Router, next_token_loss  # noqa: E402
from hfjax.parallel.wings.experts.dispatch import MixtureCall  # noqa: E402

LENGTH = 4096  # one row on each device
MESHES = {8: {"expert": 8}, 64: {"fsdp": 8, "expert": 8}}


def lowered(model: str, devices: int, capacity: float | None) -> tuple[jax.stages.Lowered, Any]:
    """Return a step lowered for H200s, and how its tokens get to experts."""
    config = MoEConfig.preset(model, length=LENGTH, capacity=capacity)
    mesh = hfjax.make_mesh(devices=hfjax.target_devices("h200", devices), **MESHES[devices])
    init = lambda rngs: MoELlama(config, rngs=rngs)
    layout = hfjax.layout(init, optax.adamw(1e-4), mesh, hfjax.FSDP | hfjax.EXPERT)
    how: dict[str, Any] = {"precision": "bf16", "remat": "full", "kernels": FLASH}
    step = hfjax.train_step(layout, next_token_loss, **how)
    program = step.lower({"tokens": jax.ShapeDtypeStruct((devices, LENGTH + 1), "int32")})
    assert step.experts is not None
    return program, step.experts.calls[0]


def of_dispatch(found: list[Flight], call: MixtureCall, way: str) -> list[Flight]:
    """Return the flights that bring tokens to experts and back: known by their size."""
    there = way == "all_to_all"
    rows = call.places if there else call.devices * call.tokens
    kinds = ("all-to-all",) if there else ("all-gather", "reduce-scatter")
    size = call.groups * (rows or 0) * call.width * call.itemsize
    return [f for f in found if f.kind in kinds and f.bytes == size]


def memory() -> Iterator[tuple]:
    """Yield what each model takes on each device, and what runs beside its dispatch."""
    for model in ("mixtral-8x7b", "deepseek-16b"):
        for devices in MESHES:
            for capacity in (1.25, None):
                yield measured(model, devices, capacity)


def measured(model: str, devices: int, capacity: float | None) -> tuple:
    """Return a row of the table: a step, compiled."""
    program, (call, way) = lowered(model, devices, capacity)
    program = program.compile()
    found, needs = flights(program), program.memory_analysis()
    assert needs is not None  # XLA's GPU compiler always tells
    state, temporary = needs.argument_size_in_bytes, needs.temp_size_in_bytes
    told = map(human, (state, temporary, state + temporary))
    mesh = " ".join(f"{axis}={n}" for axis, n in MESHES[devices].items())
    shares = (*beside(of_dispatch(found, call, way)), beside(found)[1])
    return model, mesh, capacity or "none", way, *told, *shares


def beside(found: list[Flight]) -> tuple[str, str, str]:
    """Return the bytes of flights, and the shares of it beside matmuls, and of time covered."""
    total, seconds = sum(f.total for f in found), sum(f.seconds * f.count for f in found)
    hidden = sum(f.hidden for f in found) / total
    covered = 1 - sum(f.exposed for f in found) / seconds
    return human(total), f"{hidden:.0%}", f"{covered:.0%}"


# -- processor time -----------------------------------------------------------------------------

SHAPE = {"vocab": 256, "length": 256, "layers": 4, "heads": 8, "kv_heads": 8, "embed": 256}
MLP, EXPERTS, ROUNDS, WARM = 512, 8, 14, 2
BATCH = {"tokens": np.random.default_rng(0).integers(0, 256, (8, 257), np.int32)}


def speed() -> Iterator[tuple]:
    """Yield the processor time of a step, and its ratio to that of others of equal flops."""
    for k in (1, 2):
        router = Router(balance_loss=0.01)
        how = {"experts": EXPERTS, "top_k": k, "capacity": 1.0, "router": router}
        config = MoEConfig(**SHAPE, mlp=MLP, **how)  # type: ignore[arg-type]
        dense = LlamaConfig(**SHAPE, mlp=k * MLP)  # type: ignore[arg-type]
        init = lambda rngs, config=config: MoELlama(config, rngs=rngs)
        spread = hfjax.DDP | hfjax.EXPERT
        whole = _hfjax(lambda rngs, config=dense: Llama(config, rngs=rngs), dense_loss)
        ours = _hfjax(init, next_token_loss, spread, {"expert": 8}, dispatch="all_to_all")
        steps = {"dense": whole, "hfjax": ours, "plain": _plain(config, init)}
        median = _medians(steps)
        ratios = (f"{median['hfjax'] / median[name]:.3f}" for name in ("dense", "plain"))
        yield k, *(f"{1e3 * median[name]:.0f} ms" for name in steps), *ratios


def _medians(steps: dict[str, Callable[[], float]]) -> dict[str, float]:
    """Return the median of the processor seconds of each, taken in turn."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    losses: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(ROUNDS):
        for name, step in steps.items():
            begin = time.process_time()
            losses[name].append(step())
            times[name].append(time.process_time() - begin)
    apart = max(abs(a - b) for a, b in zip(losses["hfjax"], losses["plain"], strict=True))
    if not apart < 1e-3:
        raise RuntimeError(f"losses differ by {apart}: {losses}")
    return {name: statistics.median(taken[WARM:]) for name, taken in times.items()}


def _hfjax(
    init: Any, loss: Any, strategy: Any = hfjax.DDP, sizes: Any = None, **execution: Any
) -> Callable[[], float]:
    axes: Any = sizes or {"data": 8}
    layout = hfjax.layout(init, optax.adamw(1e-3), hfjax.make_mesh(**axes), strategy)
    step, held = hfjax.train_step(layout, loss, clip=1.0, **execution), [hfjax.init(layout)]
    placed = hfjax.shard_batch(layout, BATCH)

    def run() -> float:
        held[0], metrics = step(held[0], placed)
        jax.block_until_ready(held[0])
        return float(metrics["loss"])

    return run


def _plain(config: MoEConfig, init: Any) -> Callable[[], float]:
    one = hfjax.make_mesh(devices=jax.devices()[:1])
    layout = hfjax.layout(init, optax.sgd(1.0), one, hfjax.DDP)
    program = Program(config, optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)))
    state = program.place(weights_of(hfjax.init(layout).params, config.layers))
    held, step = [state], program.step(state)
    tokens = jax.device_put(BATCH["tokens"], program.batch)

    def run() -> float:
        held[0], loss = step(held[0], tokens)
        jax.block_until_ready(held[0])
        return float(loss)

    return run


HIDDEN = "bfloat16, AdamW in float32, all recomputed, a row of 4,096 tokens on each"
TABLES = {
    "memory": (
        f"Experts, bytes per H200: {HIDDEN}",
        (
            *("model", "mesh", "capacity", "dispatch", "state", "temporary", "both"),
            *("dispatch", "beside matmuls", "time covered", "all: beside matmuls"),
        ),
        memory,
    ),
    "speed": (
        "Processor time of a step, experts on 8 fake CPU devices: dense Llama of equal flops, plain"
        " JAX",
        ("top_k", "dense", "hfjax", "plain", "hfjax / dense", "hfjax / plain"),
        speed,
    ),
}


if __name__ == "__main__":
    for name in sys.argv[1:] or TABLES:
        title, head, lines = TABLES[name]
        write(name, title, head, lines(), "experts")
