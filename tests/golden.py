"""What steps did before the code was rebuilt: losses to the last bit, collectives, bytes, text.

`python -m tests.golden` writes it down anew, into golden.json: do so only where a change of
these numbers is what is wanted, and say why. `python -m tests.golden NAME …` does so for these
cases only.
"""

import dataclasses
import hashlib
import json
import math
import platform
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

import hfjax
from hfjax import (
    CONTEXT,
    DDP,
    EXPERT,
    FSDP,
    GRID,
    HOST_OPTIMIZER,
    HOST_PARAMETERS,
    PIPE,
    SEQUENCE,
    TENSOR,
    ZERO1,
    ZERO2,
    Schedule,
)
from hfjax.models import moe
from hfjax.models.gpt import next_token_loss
from hfjax.models.llama import Llama, LlamaConfig
from hfjax.testing import strategies
from tests.small_gpt import gpt, mlps, tokens

FILE = Path(__file__).with_name("golden.json")
STEPS = 3


@dataclasses.dataclass(frozen=True)
class Case:
    """A step and what it is compiled for."""

    strategy: hfjax.Strategy
    sizes: Mapping[str, int]
    execution: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    model: Any = None
    optimizer: Any = None
    loss: Any = next_token_loss
    batch: Any = None
    run: Callable | None = None  # (case, layout, batch) -> numbers, program, state; None: training


class Called(nnx.Module):
    """A model that is called as it is: not in three parts."""

    def __init__(self, rngs: nnx.Rngs):
        self.tokens = nnx.Embed(64, 32, rngs=rngs)
        self.up, self.down = nnx.Linear(32, 64, rngs=rngs), nnx.Linear(64, 64, rngs=rngs)
        self.norm = nnx.BatchNorm(32, rngs=rngs)

    def __call__(self, batch: Any) -> jax.Array:
        return self.down(nnx.relu(self.up(self.norm(self.tokens(batch["tokens"][:, :-1])))))


def llama(rngs: nnx.Rngs) -> Llama:
    """Return a Llama of two layers."""
    shape = LlamaConfig.preset("tiny", vocab=64, length=24, layers=2, embed=32, heads=4)
    return Llama(shape, rngs=rngs)


def of_experts(rngs: nnx.Rngs) -> nnx.Module:
    """Return a mixture of eight experts."""
    shape: Any = {"vocab": 64, "length": 24, "layers": 2, "heads": 4, "kv_heads": 2, "embed": 32}
    return moe.MoELlama(moe.MoEConfig(**shape, mlp=16, min_capacity=1), rngs=rngs)


class Unlike(nnx.Module):
    """A model in three parts whose layers are a list of unlike ones."""

    def __init__(self, rngs: nnx.Rngs):
        up, down = nnx.Linear(8, 24, rngs=rngs), nnx.Linear(24, 6, rngs=rngs)
        self.layers = nnx.List([up, nnx.relu, jax.numpy.tanh, down])
        self.last = nnx.Linear(6, 5, rngs=rngs)

    def embed(self, batch: Any) -> jax.Array:
        return batch["x"]

    def head(self, x: jax.Array) -> jax.Array:
        return self.last(x)


def squares(outputs: jax.Array, batch: Any) -> jax.Array:
    """Return the mean of squared errors."""
    return jax.numpy.mean((outputs - batch["y"]) ** 2)


def numbers() -> dict[str, np.ndarray]:
    """Return a batch of rows of floats."""
    rng = np.random.default_rng(0)
    draw = lambda width: rng.normal(size=(16, width)).astype(np.float32)
    return {"x": draw(8), "y": draw(5)}


def piped(name: str, chunks: int = 1, strategy: Any = PIPE, **sizes: int) -> Case:
    """Return a case of a pipeline of two stages."""
    schedule = Schedule(name, 4, chunks) if chunks > 1 else Schedule(name, 4)
    return Case(strategy, {"pipe": 2, **sizes}, {"schedule": schedule}, gpt(layers=4, dropout=0.1))


def cases() -> dict[str, Case]:
    """Return each case by its name."""
    found = {
        name: Case(strategy, sizes, {"gradient_accumulation_steps": 2, "max_grad_norm": 0.5})
        for name, (strategy, sizes) in strategies(8).items()
    }
    layers = ("gpipe", "1f1b", "1f1b-published", "zb", "zb-h1")
    found |= {f"pipe {name}": piped(name) for name in layers}
    chunked = ("interleaved", "looped-bfs", "v", "zb-v", "v-zb", "dualpipe-v")
    found |= {f"pipe {name}": piped(name, 2) for name in chunked}
    two, eight = {"data": 2, "fsdp": 4}, {"fsdp": 8}
    frugal = {"optimizer_in_backward": True}
    return found | {
        "pipe ZERO1 TENSOR": piped("1f1b", 1, PIPE | ZERO1 | TENSOR, data=2, tensor=2),
        "pipe FSDP": piped("interleaved", 2, PIPE | FSDP, fsdp=2, data=2),
        "pipedream": Case(PIPE, {"pipe": 2}, {"schedule": Schedule("pipedream", 4)}),
        "2bw": Case(PIPE, {"pipe": 2}, {"schedule": Schedule("2bw", 4)}),
        "one microbatch": Case(FSDP, eight, {"precision": "bf16"}),
        "kept gathered": Case(FSDP, eight, {"reshard_after_forward": False, "remat": "dots"}),
        "hierarchical": Case(
            DDP, two, {"gradient_reduction": "hierarchical", "gradient_accumulation_steps": 2}
        ),
        "remat and offload": Case(FSDP, two, {"remat": "dots", "offload": 0.5}),
        "offload in a pipeline": dataclasses.replace(
            piped("1f1b"), execution={"schedule": Schedule("1f1b", 4), "offload": 0.5}
        ),
        "optimizer on the host": Case(FSDP | HOST_OPTIMIZER, two, {"max_grad_norm": 1.0}),
        "master weights": Case(
            ZERO1, two, optimizer=hfjax.optimizers.master_weights(optax.adamw(1e-3))
        ),
        "in backward": Case(ZERO2, two, frugal),
        "all on the host": Case(FSDP | HOST_OPTIMIZER | HOST_PARAMETERS, two, frugal),
        "called as it is": Case(FSDP, eight, {"gradient_accumulation_steps": 2}, Called),
        "called, ZERO2": Case(ZERO2, two, {}, Called),
        "llama": Case(FSDP | TENSOR, {"fsdp": 4, "tensor": 2}, {}, llama),
        "kernels' plain forms": Case(FSDP, eight, {"kernels": "reference"}),
        **extensions(),
    }


def extensions() -> dict[str, Case]:
    """Return cases of what the common core need not know of."""
    four, half = {"context": 4}, {"schedule": Schedule("1f1b", 4)}
    once = {"unroll": 1}
    documents = np.sort(np.random.default_rng(1).integers(0, 3, (16, 25)), 1).astype(np.int32)
    mixture: Any = {"model": of_experts, "loss": moe.next_token_loss}
    small = {"vocab": 64, "length": 24, "layers": 2, "embed": 32, "heads": 4}
    on_grid = Case(FSDP | GRID, {"fsdp": 2, "row": 2, "tensor": 2}, once, gpt(dropout=0.1, **small))
    ring = Case(CONTEXT, four | {"data": 2}, once, batch=tokens(documents=documents))
    gpts = {"model": gpt(dropout=0.1), "run": predicted}
    unlike: Any = {"model": Unlike, "loss": squares, "batch": numbers()}
    return {
        "context": ring,
        "context, Ulysses": Case(FSDP | CONTEXT, four | {"fsdp": 2}, {"context": "ulysses"}),
        "context in a pipeline": Case(
            PIPE | CONTEXT, {"pipe": 2, "context": 2}, half, gpt(layers=4, dropout=0.1)
        ),
        "experts": Case(
            EXPERT, {"expert": 4, "data": 2}, {"gradient_accumulation_steps": 2}, **mixture
        ),
        "experts gathered": Case(
            FSDP | EXPERT, {"expert": 2, "fsdp": 2}, {"dispatch": "gather"}, **mixture
        ),
        "grid": on_grid,
        "unlike layers": Case(PIPE | FSDP, {"pipe": 2, "fsdp": 2}, half, **unlike),
        "split rows": Case(
            TENSOR | SEQUENCE,
            {"data": 2, "tensor": 2},
            {"tensor_overlap_chunks": 2},
            mlps(dropout=0.1),
        ),
        "eval_step": Case(FSDP | TENSOR, {"fsdp": 4, "tensor": 2}, run=evaluated),
        "eval_step, context": dataclasses.replace(ring, run=evaluated),
        "eval_step, pipe": dataclasses.replace(piped("1f1b"), run=evaluated),
        "predict_step": Case(FSDP | TENSOR, {"fsdp": 4, "tensor": 2}, **gpts),
        "predict_step, experts": Case(
            EXPERT, {"expert": 4}, {}, run=predicted, **{"model": of_experts}
        ),
        "haiscale": Case(DDP, {"pipe": 2, "data": 2}, batch=numbers(), run=of_haiscale),
    }


def trained(case: Case, layout: Any, batch: Any) -> tuple[list[jax.Array], Any, Any]:
    """Return losses, the program and the state of a training step."""
    step = hfjax.train_step(layout, case.loss, **case.execution)
    state = hfjax.init(layout, 0, case.execution.get("schedule"))
    losses, program = [], step.lower(batch)
    for _ in range(STEPS):
        state, metrics = step(state, batch)
        losses.append(metrics["loss"])
    return losses, program, state


def evaluated(case: Case, layout: Any, batch: Any) -> tuple[list[jax.Array], Any, Any]:
    """Return the loss, the program and the state of `eval_step`."""
    schedule = case.execution.get("schedule")
    step, state = hfjax.eval_step(layout, case.loss, schedule=schedule), hfjax.init(layout, 0)
    return [step(state, batch)["loss"]], jax.jit(step).lower(state, batch), state


def predicted(case: Case, layout: Any, batch: Any) -> tuple[list[jax.Array], Any, Any]:
    """Return sums of the outputs, the program and the state of `predict_step`."""
    step, state = hfjax.predict_step(layout), hfjax.init(layout, 0)
    outputs = jax.tree.leaves(step(state, batch))
    sums = [np.sum(np.square(hfjax.full_array(x), dtype=np.float64)) for x in outputs]
    return sums, jax.jit(step).lower(state, batch), state


def of_haiscale(case: Case, layout: Any, batch: Any) -> tuple[list[jax.Array], Any, Any]:
    """Return losses and outputs, the program and the gradients of a pipe as haiscale has it."""
    rngs = nnx.Rngs(0)
    layers = [nnx.Linear(8, 8, rngs=rngs) for _ in range(4)]
    pipe = hfjax.compat.PipeDream(hfjax.compat.partition(layers, stages=2), 4, mesh=layout.mesh)
    criterion = lambda outputs: jax.numpy.mean(outputs**2)
    losses, _ = pipe.forward_backward(batch["x"], criterion=criterion)
    found = [*losses, pipe.forward(batch["x"]).sum()]
    return found, pipe.lower(batch["x"], criterion=criterion), pipe.gradients


def told(case: Case) -> dict[str, Any]:
    """Return what a case does: losses, collectives and text of its program, bytes of its state."""
    devices = jax.devices()[: math.prod(case.sizes.values())]
    mesh = hfjax.make_mesh(devices=devices, **case.sizes)
    strategy = case.strategy.edit(replicate_below=0)
    optimizer = case.optimizer or optax.adamw(1e-3)
    layout = hfjax.layout(case.model or gpt(dropout=0.1), optimizer, mesh, strategy)
    losses, program, state = (case.run or trained)(case, layout, case.batch or tokens())
    return {
        "losses": [float(x).hex() for x in losses],
        "collectives": sorted(_lines(program)),
        "bytes": sum(x.addressable_shards[0].data.nbytes for x in _arrays(state)),
        "text": hashlib.sha256(plain_text(program).encode()).hexdigest()[:16],
    }


def plain_text(program: Any) -> str:
    """Return a lowered program, without locations and name, its functions named by their order."""
    text = re.sub(r"^module @\S+", "module", program.as_text())
    names = re.findall(r"func\.func .*?@([\w.$-]+)\(", text)
    number = {name: f"@function {i}" for i, name in enumerate(names)}
    return re.sub(r"@([\w.$-]+)", lambda m: number.get(m[1], m[0]), text)


def _lines(lowered: Any) -> Iterator[str]:
    """Yield a line for each kind of collective: what a device sends, how often."""
    for c in hfjax.collectives(lowered):
        yield f"{c.count} x {c.kind} {'+'.join(c.axes)} {c.dtype}{list(c.shape)} {c.bytes} B"


def _arrays(state: Any) -> list[jax.Array]:
    keys = lambda x: jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key)
    return [x for x in jax.tree.leaves(state) if not keys(x)]


def here() -> dict[str, str]:
    """Return on what the last bits of a loss depend besides the code."""
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    found = dict(re.findall(r"^(model name|flags)\s*: (.*)$", text, re.M))
    known = {"avx2", "avx512f", "fma", "amx_tile"} & {*found.get("flags", "").split()}
    cpu = {"cpu": found.get("model name", ""), "instructions": " ".join(sorted(known))}
    return {"machine": platform.machine(), **cpu, **packages()}


def packages() -> dict[str, str]:
    """Return on what the text of a program depends besides the code."""
    return {name: __import__(name).__version__ for name in ("jax", "jaxlib", "flax", "optax")}


def same(wanted: Mapping[str, Any], found: Mapping[str, Any], where: Mapping[str, str]) -> None:
    """Refuse what differs; the last digits and the text only where versions and machine allow it.

    Args:
        wanted: What is known of a case.
        found: What it does now.
        where: What `here` returned when that was written down.
    """
    assert found["collectives"] == wanted["collectives"]
    assert found["bytes"] == wanted["bytes"]
    losses = [[float.fromhex(x) for x in each["losses"]] for each in (found, wanted)]
    if here() == where:
        assert found["losses"] == wanted["losses"], losses
    np.testing.assert_allclose(*losses, rtol=1e-5)
    if packages().items() <= where.items():
        assert found["text"] == wanted["text"], "the lowered program is another"


def write(names: list[str]) -> None:
    """Write down what these cases do, or all of them, and print what of it is new."""
    before = json.loads(FILE.read_text(encoding="utf-8"))
    known = {}
    for name, case in cases().items():
        known[name] = old = before["cases"].get(name)
        if name in names or not names:
            known[name] = told(case)
            new = [field for field, value in known[name].items() if value != (old or {}).get(field)]
            print(f"{name}: {', '.join(new) or 'as it was'}", flush=True)
    where = before["here"] if names else here()
    FILE.write_text(json.dumps({"here": where, "cases": known}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    import conftest  # noqa: F401  (the devices and the compiler of the tests)

    write(sys.argv[1:])
