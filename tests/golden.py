"""What steps did before the code was rebuilt: losses to the last bit, each collective, each byte.

`python -m tests.golden` writes it down anew, into golden.json: do so only where a change of
these numbers is what is wanted, and say why.
"""

import dataclasses
import json
import math
import platform
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

import hfjax
from hfjax import DDP, FSDP, HOST_OPTIMIZER, HOST_PARAMETERS, PIPE, TENSOR, ZERO1, ZERO2, Schedule
from hfjax.models.gpt import next_token_loss
from hfjax.models.llama import Llama, LlamaConfig
from hfjax.testing import strategies
from tests.small_gpt import gpt, tokens

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
    forward: Any = None


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


def piped(name: str, chunks: int = 1, strategy: Any = PIPE, **sizes: int) -> Case:
    """Return a case of a pipeline of two stages."""
    schedule = Schedule(name, 4, chunks) if chunks > 1 else Schedule(name, 4)
    return Case(strategy, {"pipe": 2, **sizes}, {"schedule": schedule}, gpt(layers=4, dropout=0.1))


def cases() -> dict[str, Case]:
    """Return each case by its name."""
    found = {
        name: Case(strategy, sizes, {"accumulate": 2, "clip": 0.5})
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
        "hierarchical": Case(DDP, two, {"reduction": "hierarchical", "accumulate": 2}),
        "remat and offload": Case(FSDP, two, {"remat": "dots", "offload": 0.5}),
        "offload in a pipeline": dataclasses.replace(
            piped("1f1b"), execution={"schedule": Schedule("1f1b", 4), "offload": 0.5}
        ),
        "optimizer on the host": Case(FSDP | HOST_OPTIMIZER, two, {"clip": 1.0}),
        "master weights": Case(ZERO1, two, optimizer=hfjax.master(optax.adamw(1e-3))),
        "in backward": Case(ZERO2, two, frugal),
        "all on the host": Case(FSDP | HOST_OPTIMIZER | HOST_PARAMETERS, two, frugal),
        "called as it is": Case(FSDP, eight, {"accumulate": 2}, Called),
        "called, ZERO2": Case(ZERO2, two, {}, Called),
        "llama": Case(FSDP | TENSOR, {"fsdp": 4, "tensor": 2}, {}, llama),
        "kernels' plain forms": Case(FSDP, eight, {"kernels": "reference"}),
        "in one pass": Case(FSDP, eight, {"kernels": "reference"}, None, hfjax.adamw(1e-3)),
    }


def told(case: Case) -> dict[str, Any]:
    """Return what a case does: losses, collectives of its program, bytes of its state."""
    devices = jax.devices()[: math.prod(case.sizes.values())]
    mesh = hfjax.make_mesh(devices=devices, **case.sizes)
    strategy = case.strategy.edit(replicate_below=0)
    optimizer = case.optimizer or optax.adamw(1e-3)
    layout = hfjax.layout(case.model or gpt(dropout=0.1), optimizer, mesh, strategy)
    step = hfjax.train_step(layout, next_token_loss, **case.execution)
    state = hfjax.init(layout, 0, case.execution.get("schedule"))
    losses, sent = [], step.lower(tokens())
    for _ in range(STEPS):
        state, metrics = step(state, tokens())
        losses.append(float(metrics["loss"]).hex())
    return {
        "losses": losses,
        "collectives": sorted(_lines(sent)),
        "bytes": sum(x.addressable_shards[0].data.nbytes for x in _arrays(state)),
    }


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
    flags = next((line for line in text.splitlines() if line.startswith("flags")), "")
    known = [name for name in ("avx2", "avx512f", "fma", "amx_tile") if name in flags.split()]
    packages = {name: __import__(name).__version__ for name in ("jax", "jaxlib", "flax", "optax")}
    return {"machine": platform.machine(), "instructions": " ".join(known), **packages}


def same(wanted: Mapping[str, Any], found: Mapping[str, Any], bits: bool) -> None:
    """Refuse what differs; losses to the last digits only where the machine is another."""
    assert found["collectives"] == wanted["collectives"]
    assert found["bytes"] == wanted["bytes"]
    losses = [[float.fromhex(x) for x in each["losses"]] for each in (found, wanted)]
    if bits:
        assert found["losses"] == wanted["losses"], losses
    np.testing.assert_allclose(*losses, rtol=1e-5)


if __name__ == "__main__":
    import conftest  # noqa: F401  (the devices and the compiler of the tests)

    known = {"here": here(), "cases": {name: told(case) for name, case in cases().items()}}
    FILE.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
