"""hfjax beside plain JAX (plain_jax.py, of mixtures plain_moe.py) and, asked for, eager torch.

All have the same model, weights and batch.

Both are compiled and warmed up, then take single steps in turn. Steps during which other processes
used the cores are dropped, and the ratio is the median over the pairs that are left.

    python -m benchmarks.against_plain_jax [--quick] [--torch]
"""

import argparse
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

import hfjax
from benchmarks import plain_moe
from benchmarks.plain_jax import SPLITS, Program
from hfjax.models.gpt import GPT, GPTConfig, next_token_loss
from hfjax.models.moe import MoEConfig, MoELlama, Router, next_token_loss as routed_loss
from hfjax.utils.paths import flatten

RESULT = Path(__file__).parent / "results" / "against_plain_jax.md"
FULL = GPTConfig(vocab=8192, length=256, layers=8, heads=8, embed=384)
SMALL = GPTConfig(vocab=512, length=64, layers=2, heads=8, embed=64)
_SHAPE = {"vocab": 256, "layers": 4, "heads": 8, "kv_heads": 8, "mlp": 512}
_ROUTING = {"experts": 8, "top_k": 2, "capacity": 1.0, "router": Router(balance_loss=0.01)}
MIXTURE = MoEConfig(length=256, embed=256, **_SHAPE, **_ROUTING)
SMALL_MIXTURE = MoEConfig(length=64, embed=64, **_SHAPE, **_ROUTING)
OVERHEAD = GPTConfig.tiny(layers=2, embed=32, length=8)
ROWS, RATE, DECAY, WARM = 8, 1e-3, 1e-4, 3
COMPARED = 5  # first losses; later ones drift apart by rounding
SAME = 1e-4  # by how much the losses of two programs may differ, relative to the loss
KEPT = {"reshard_after_forward": False}  # as plain JAX does: gather once, keep
STRATEGIES: dict[str, tuple[hfjax.Strategy, dict[str, Any], dict[str, Any]]] = {
    "one device": (hfjax.DDP, {}, {}),
    "DDP": (hfjax.DDP, {"data": 8}, {}),
    "FSDP": (hfjax.FSDP, {"fsdp": 8}, {}),
    "FSDP, kept": (hfjax.FSDP, {"fsdp": 8}, KEPT),
    "TENSOR": (hfjax.TENSOR, {"data": 2, "tensor": 4}, {}),
    "TENSOR|SEQUENCE": (hfjax.TENSOR | hfjax.SEQUENCE, {"data": 2, "tensor": 4}, {}),
}
MODELS: dict[type, tuple[Any, Any]] = {
    GPTConfig: (GPT, next_token_loss),
    MoEConfig: (MoELlama, routed_loss),
}
EXPERT = "EXPERT, a mixture"
SPREAD = (hfjax.DDP | hfjax.EXPERT, {"expert": 8}, {"dispatch": "all_to_all"})
NAMES = {  # of a layer: hfjax's path, plain_jax's key
    "attention/qkv/kernel": "qkv",
    "attention/qkv/bias": "qkv_bias",
    "attention/out/kernel": "out",
    "attention/out/bias": "out_bias",
    "mlp/up/kernel": "up",
    "mlp/up/bias": "up_bias",
    "mlp/down/kernel": "down",
    "mlp/down/bias": "down_bias",
}


@dataclass
class Runner:
    """One program: its step, its state, and what was seen of it."""

    name: str
    step: Callable[[Any, Any], tuple[Any, Any]]  # (state, batch) -> (state, loss)
    state: Any
    batch: Any
    compile_s: float = 0.0
    temp_mib: float = 0.0
    losses: list[float] = field(default_factory=list)

    def run(self) -> None:
        """Take one step and wait for it."""
        self.state, loss = self.step(self.state, self.batch)
        jax.block_until_ready(self.state)
        self.losses.append(float(loss))

    def measure(self, lower: Callable[[], jax.stages.Lowered]) -> "Runner":
        """Compile, and keep the time from Python to program and the temporary bytes per device."""
        start = time.perf_counter()
        compiled = lower().compile()
        self.compile_s = time.perf_counter() - start
        memory = compiled.memory_analysis()
        self.temp_mib = memory.temp_size_in_bytes / 2**20 if memory else float("nan")
        return self


@dataclass(frozen=True)
class Timed:
    """One step: seconds on the clock, of this process on all cores, of other processes."""

    wall: float
    own: float
    others: float

    @property
    def quiet(self) -> bool:
        """Whether others used less than 5 % of the cores (and a tick of the clock per core)."""
        return self.others < (os.cpu_count() or 1) * (0.05 * self.wall + 0.01)


def timed(run: Callable[[], None]) -> Timed:
    """Return what one call took."""
    busy, own, start = _busy_seconds(), time.process_time(), time.perf_counter()
    run()
    wall, own = time.perf_counter() - start, time.process_time() - own
    return Timed(wall, own, _busy_seconds() - busy - own)


def _busy_seconds() -> float:
    """Return the seconds all cores have worked so far (where /proc tells, else our own)."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return time.process_time()
    user, nice, system, _, _, *interrupts = map(int, stat.read_text().split()[1:9])
    return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")


def in_turn(runners: list[Runner], rounds: int) -> tuple[list[list[Timed]], list[list[Timed]]]:
    """Return (all rounds, quiet rounds); a round is one step of each runner."""
    for runner in runners:
        for _ in range(WARM):
            runner.run()
    seen = [[timed(runner.run) for runner in runners] for _ in range(rounds)]
    return seen, [times for times in seen if all(t.quiet for t in times)]


# -- the programs -------------------------------------------------------------------------


def batch_of(config: GPTConfig | MoEConfig) -> dict[str, np.ndarray]:
    """Return the one batch of every program."""
    draw = np.random.default_rng(0)
    return {"tokens": draw.integers(0, config.vocab, (ROWS, config.length + 1), np.int32)}


def hfjax_runner(config: GPTConfig | MoEConfig, name: str) -> Runner:
    """Return hfjax's program, as a user writes it."""
    strategy, sizes, execution = STRATEGIES.get(name, SPREAD)
    module, loss = MODELS[type(config)]
    model, optimizer = lambda rngs: module(config, rngs=rngs), optax.adamw(RATE, weight_decay=DECAY)
    devices = jax.devices()[: math.prod(sizes.values())]
    layout = hfjax.layout(model, optimizer, hfjax.make_mesh(devices=devices, **sizes), strategy)
    fields = {"precision": "stored", **execution}  # as the rival computes
    step = hfjax.train_step(layout, loss, max_grad_norm=1.0, **fields)

    def run(state, batch):
        state, metrics = step(state, batch)
        return state, metrics["loss"]

    batch = hfjax.shard_batch(layout, batch_of(config))
    return Runner("hfjax", run, hfjax.init(layout), batch).measure(lambda: step.lower(batch))


def plain_runner(config: GPTConfig | MoEConfig, name: str, weights: Any) -> Runner:
    """Return plain JAX's program, started from these weights."""
    optimizer = optax.adamw(RATE, weight_decay=DECAY)
    if isinstance(config, MoEConfig):
        clipped = optax.chain(optax.clip_by_global_norm(1.0), optimizer)
        program = plain_moe.Program(config, clipped)
    else:
        program = Program(SPLITS[name.split(",")[0]], optimizer)
    tokens = jax.device_put(batch_of(config)["tokens"], program.batch)
    state = program.place(weights)
    step = program.step(state)
    return Runner("plain", step, state, tokens).measure(lambda: step.lower(state, tokens))  # pyright: ignore


def plain_weights(config: GPTConfig | MoEConfig, params: Any) -> dict[str, Any]:
    """Return hfjax's parameters as plain JAX has them: a list of layers."""
    if isinstance(config, MoEConfig):
        return plain_moe.weights_of(params, config.layers)
    flat = {path: np.asarray(x) for path, x in flatten(params).items()}

    def norm(path: str, index: Any = ...) -> dict[str, np.ndarray]:
        return {part: flat[f"{path}/{part}"][index] for part in ("scale", "bias")}

    def layer(i: int) -> dict[str, Any]:
        own = {name: flat[f"layers/{path}"][i] for path, name in NAMES.items()}
        return own | {part: norm(f"layers/{part}", i) for part in ("norm1", "norm2")}

    whole = {name: flat[name] for name in ("tokens", "positions")}
    return whole | {"norm": norm("norm"), "layers": [layer(i) for i in range(config.layers)]}


# -- the table ----------------------------------------------------------------------------


def compare(config: GPTConfig | MoEConfig, name: str, rounds: int, torch: bool) -> list[str]:
    """Return the row of one configuration, and torch's line if it is asked for."""
    hf = hfjax_runner(config, name)
    weights = plain_weights(config, hf.state.params)
    runners = [plain_runner(config, name, weights), hf]
    seen, quiet = in_turn(runners, rounds)
    difference = check_same(runners)
    row = _row(name, runners, seen, quiet or seen)
    row = f"{row} {difference:.0e} | {len(quiet)}/{rounds} |"
    return [row, _beside_torch(config, hf, weights, rounds)] if torch else [row]


def _beside_torch(config: GPTConfig | MoEConfig, hf: Runner, weights: Any, rounds: int) -> str:
    """Return torch's line; apart from the others, for its threads go on spinning."""
    from benchmarks.torch_gpt import torch_step

    step, tokens = torch_step(weights, batch_of(config)["tokens"], RATE, DECAY)
    seen, quiet = in_turn([hf, Runner("torch", step, None, tokens)], rounds)
    return _torch_line(quiet or seen)


def _row(name: str, runners: list[Runner], seen: list, used: list) -> str:
    plain, hf = runners[:2]
    cells = [
        name.replace("|", " + "),
        *(f"{milliseconds(used, i):.0f}" for i in range(2)),
        f"**{ratio(used, lambda t: t.wall, 1, 0):.3f}**",
        f"{ratio(seen, lambda t: t.own, 1, 0):.3f}",
        *(f"{r.compile_s:.1f}" for r in (plain, hf)),
        f"{hf.compile_s / plain.compile_s:.2f}",
        *(f"{r.temp_mib:.0f}" for r in (plain, hf)),
    ]
    return f"| {' | '.join(cells)} |"


def _torch_line(used: list[list[Timed]]) -> str:
    times = ratio(used, lambda t: t.wall, 0, 1)
    took = milliseconds(used, 1)
    return f"Eager torch, one device, same batch: {took:.0f} ms; hfjax / torch {times:.3f}."


def milliseconds(rounds: list[list[Timed]], which: int) -> float:
    return 1e3 * statistics.median(times[which].wall for times in rounds)


def ratio(rounds: list, of: Callable[[Timed], float], which: int, base: int) -> float:
    return statistics.median(of(times[which]) / of(times[base]) for times in rounds)


def check_same(runners: list[Runner]) -> float:
    """Return by how much the losses differ, relative; refuse two models that are not the same."""
    first, *others = (np.array(runner.losses[:COMPARED]) for runner in runners)
    worst = max(float(np.max(np.abs(losses - first) / first)) for losses in others)
    if worst > SAME:
        raise RuntimeError(f"losses differ by {worst:.1e}: {[r.losses[:3] for r in runners]}")
    return worst


def overhead_us(calls: int = 1000) -> float:
    """Return the microseconds of Python that `TrainStep.__call__` adds to the jitted function.

    The jitted function is replaced by one that returns at once what a real step returned, with
    a flag `finite` that nobody has read yet: what is left is the call's own work.
    """
    model = lambda rngs: GPT(OVERHEAD, rngs=rngs)
    layout = hfjax.layout(model, optax.adamw(RATE), hfjax.make_mesh(data=8), hfjax.DDP)
    step = hfjax.train_step(layout, next_token_loss, precision="stored")
    batch = hfjax.shard_batch(layout, batch_of(OVERHEAD))
    state, metrics = jax.block_until_ready(step(hfjax.init(layout), batch))
    step.check(state)
    flag = partial(jax.device_put, np.bool_(True), metrics["finite"].sharding)
    unread = iter([(state, metrics | {"finite": flag()}) for _ in range(2 * calls)])
    step._jitted = lambda state, batch: next(unread)  # pyright: ignore
    whole = _seconds(partial(step, state, batch), calls)
    return 1e6 * (whole - _seconds(partial(step._jitted, state, batch), calls))


def _seconds(call: Callable[[], Any], calls: int) -> float:
    def once() -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    return statistics.median(once() for _ in range(calls))


COLUMNS = (
    "configuration",
    "plain ms",
    "hfjax ms",
    "hfjax/plain",
    "CPU time",
    "compile plain s",
    "hfjax s",
    "ratio",
    "temp plain MiB",
    "hfjax MiB",
    "losses differ",
    "quiet",
)
HEAD = f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|"
NOTES = """Ratios are medians over pairs of steps taken in turn in one process; "quiet" counts the \
pairs during which no other process used the cores: the times are theirs (all pairs, if none was \
quiet). "CPU time" is the ratio of processor seconds over all pairs. Plain JAX is \
benchmarks/plain_jax.py: no toolkit, layers unrolled, and no guard against a step that is not \
finite (hfjax has one). Compile is from Python to program; temp is the compiler's count of \
temporary bytes per device. The mixture (plain_moe.py) is a Llama of 4 layers, embed 256, 8 \
experts of 512, top_k 2, vocab 256. Fake devices share the cores: they tell work, bytes and \
overhead, not scaling. Below 3 % is noise."""


def report(config: GPTConfig, rows: list[str], torch: list[str], overhead: float) -> str:
    """Return the page of results."""
    versions = ", ".join(f"{m} {sys.modules[m].__version__}" for m in _modules(bool(torch)))
    size = sum(x.size for x in jax.tree.leaves(_shapes(config)))
    return "\n".join(
        [
            "# hfjax against plain JAX\n",
            f"{date.today()}, {os.cpu_count()}-core CPU, {jax.device_count()} fake devices, "
            f"Python {platform.python_version()}, {versions}.",
            f"`python -m benchmarks.against_plain_jax {' '.join(sys.argv[1:])}`".replace(" `", "`"),
            f"\nGPT-2 of {size / 1e6:.1f}M parameters ({config.layers} layers, embed "
            f"{config.embed}, {config.heads} heads, vocab {config.vocab}), {ROWS} rows of "
            f"{config.length} tokens, float32, AdamW, clipped to norm 1.\n",
            HEAD,
            *rows,
            "",
            *torch,
            f"hfjax's own Python per step: {overhead:.0f} us (goal: below 100).\n",
            NOTES,
            "",
        ]
    )


def _modules(torch: bool) -> list[str]:
    return ["jax", "optax", *(["torch"] if torch else [])]


def _shapes(config: GPTConfig) -> Any:
    one = hfjax.make_mesh(devices=jax.devices()[:1])
    layout = hfjax.layout(lambda rngs: GPT(config, rngs=rngs), optax.sgd(RATE), one, hfjax.DDP)
    return layout.abstract_state().params


def main() -> None:
    parser = argparse.ArgumentParser(description="hfjax beside plain JAX")
    parser.add_argument("--quick", action="store_true", help="a small model; writes no result")
    parser.add_argument("--torch", action="store_true", help="eager torch beside one device")
    given = parser.parse_args()
    config, mixture, rounds = (SMALL, SMALL_MIXTURE, 4) if given.quick else (FULL, MIXTURE, 10)
    overhead = overhead_us()
    rows, torch = [], []
    for name in (*STRATEGIES, EXPERT):
        shape = mixture if name == EXPERT else config
        row, *line = compare(shape, name, rounds, given.torch and name == "one device")
        print(row, flush=True)
        rows.append(row)
        torch += line
    page = report(config, rows, torch, overhead)
    print(f"\n{page}")
    if not given.quick:
        RESULT.write_text(page)


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    main()
