"""One training program in a process of its own, which says when it is ready and steps when told.

Started with a JSON of `Asked`; it prints one line of JSON when it has compiled, then one for each
line that it reads: `steps N` takes N steps, `end` ends. So programs compile beside each other, are
timed in turn, and the peak of memory is each one's own. Until its first step a program of hfjax
holds next to nothing of the device (models of images: their state, which is small); torch gives
back what it can after each block.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

RATE, DECAY, BETAS = 6e-4, 0.1, (0.9, 0.95)
BATCHES, WARM = 4, 3
DECAYED = ("*/kernel", "tokens", "positions")
VOCAB, REAL = 50304, 50257  # rows of the embedding; tokens that are drawn
TINY = {"layers": 2, "heads": 2, "embed": 64, "vocab": 256}


@dataclass(frozen=True)
class Asked:
    """What to train, and how."""

    program: str  # hfjax or torch
    preset: str
    rows: int
    length: int = 1024  # of a row of tokens; of an image the side
    execution: dict[str, Any] = field(default_factory=dict)  # fields of hfjax's Execution
    attention: str = "cudnn"
    tiny: bool = False
    images: bool = False  # what the model reads; else tokens

    def config(self) -> Any:
        """Return the shape of a model of tokens."""
        from hfjax.models.gpt import GPTConfig

        changes: dict[str, Any] = {"length": self.length, "vocab": VOCAB}
        return GPTConfig.preset(self.preset, **(changes | (TINY if self.tiny else {})))


class Task(NamedTuple):
    """What both programs of a model are made of."""

    layout: Any
    loss: Callable
    batch: Callable[[int], Any]  # of a number, on the host
    execution: dict[str, Any]  # fields that hfjax has if no others are asked for
    rival: Callable[[dict[str, Any]], Any]  # first parameters by path -> program of torch
    weights: Callable[[], dict[str, Any]] | None = None  # these; None: hfjax draws them, when asked


class Ready(NamedTuple):
    """A program that can step."""

    step: Callable[[int], Any]  # number of the batch -> loss, not waited for
    wait: Callable[[], None]
    peak: Callable[[], int | None]
    rest: Callable[[], None]  # give back what is not needed between blocks
    told: dict[str, Any]


def main() -> None:
    """Get ready, then do as standard input says."""
    say = _alone_on_stdout()
    try:
        _obey(Asked(**json.loads(sys.argv[1])), say)
    except Exception as wrong:
        say(failure=f"{type(wrong).__name__}: {' '.join(str(wrong).split())}"[:400])
        raise


def _obey(asked: Asked, say: Callable[..., None]) -> None:
    start = time.perf_counter()
    ready = {"hfjax": _hfjax, "torch": _torch}[asked.program](asked)
    say(ready_s=time.perf_counter() - start, **ready.told)
    losses: list[float] = []
    for line in sys.stdin:
        word, _, count = line.partition(" ")
        if word != "steps":
            break
        losses = losses or [float(ready.step(i)) for i in range(WARM)]
        say(ms=_timed(ready, int(count)), peak=ready.peak(), losses=losses)


def _alone_on_stdout() -> Callable[..., None]:
    """Return what prints a line of JSON; everything else that is printed goes to standard error."""
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return lambda **words: print(json.dumps(words), file=lines, flush=True)


def _timed(ready: Ready, count: int) -> float:
    """Return the milliseconds of a step, of so many queued ones."""
    ready.wait()
    start = time.perf_counter()
    for i in range(count):
        ready.step(i)
    ready.wait()
    seconds = time.perf_counter() - start
    ready.rest()
    return 1e3 * seconds / count


def _rows(asked: Asked, number: int) -> Any:
    import numpy as np

    most = TINY["vocab"] if asked.tiny else REAL
    draw = np.random.default_rng(number)
    return draw.integers(0, most, (asked.rows, asked.length + 1)).astype(np.int32)


def _optimizer() -> Any:
    import optax

    import hfjax

    b1, b2 = BETAS
    given: dict[str, Any] = {"b1": b1, "b2": b2, "weight_decay": DECAY}
    make: Any = getattr(hfjax, "adamw", optax.adamw)  # hfjax's own, where it has one
    return make(RATE, **given, mask=hfjax.optimizers.matching(*DECAYED))


def _task(asked: Asked) -> Task:
    """Return what is trained; only then are its modules loaded."""
    if asked.images:
        from benchmarks.gpu_sections.train_images import task_of

        return task_of(asked)
    return _tokens(asked)


def _tokens(asked: Asked) -> Task:
    from hfjax.models.gpt import next_token_loss

    def rival(flat: dict[str, Any]) -> Any:
        from benchmarks.torch_compiled import prepared

        again = asked.execution.get("checkpoint", False)
        return prepared(asked.config(), flat, RATE, DECAY, again)

    batch = lambda number: {"tokens": _rows(asked, number)}
    execution = {"precision": "bf16", "max_grad_norm": 1.0}
    return Task(_layout(asked), next_token_loss, batch, execution, rival)


def _layout(asked: Asked) -> Any:
    import jax

    import hfjax
    from hfjax.models import attention
    from hfjax.models.gpt import GPT

    changes = {} if asked.attention == "cudnn" else {"attention": attention.dot_product}
    config = asked.config()
    config = type(config)(**{f.name: getattr(config, f.name) for f in fields(config)} | changes)
    mesh = hfjax.make_mesh(devices=jax.devices()[:1], data=1)
    return hfjax.layout(lambda rngs: GPT(config, rngs=rngs), _optimizer(), mesh, hfjax.DDP)


def _hfjax(asked: Asked) -> Ready:
    import jax

    import hfjax

    task = _task(asked)
    layout = task.layout
    execution = {**task.execution, **asked.execution}
    if execution.pop("gathered", False):
        _as_if_gathered()
    step = hfjax.train_step(layout, task.loss, **execution)
    batches = [hfjax.shard_batch(layout, task.batch(i)) for i in range(BATCHES)]
    step._jitted = program = step.lower(batches[0]).compile()  # pyright: ignore
    first = task.weights and hfjax.init(layout, parameters=task.weights())
    held: dict[str, Any] = {"state": first}

    def one(number: int) -> Any:
        state = held.pop("state", None) or hfjax.init(layout)
        held["state"], metrics = step(state, batches[number % BATCHES])
        return metrics["loss"]

    def peak() -> int | None:
        return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")

    wait = lambda: jax.block_until_ready(held.get("state"))
    parameters = _count(layout.abstract_state().params)
    told = {"parameters": parameters, "kept": _kept(step), "compiled": _planned(program)}
    return Ready(one, wait, peak, lambda: None, told)


def _planned(program: Any) -> int | None:
    """Return the bytes that a compiled step takes: its arguments, temporaries and results."""
    seen = program.memory_analysis()
    if seen is None:
        return None
    results = seen.output_size_in_bytes - seen.alias_size_in_bytes
    return seen.argument_size_in_bytes + seen.temp_size_in_bytes + results


def _as_if_gathered() -> None:
    """Run layers as if they gathered their parameters, which one device does not."""
    from hfjax.parallel.engine.step_context import StepContext

    options: Any = StepContext.__dict__["options"].func
    as_if = property(lambda self: replace(options(self), gathers=True))
    StepContext.options = as_if  # pyright: ignore[reportAttributeAccessIssue]


def _count(params: Any) -> int:
    import jax

    return sum(x.size for x in jax.tree.leaves(params))


def _kept(step: Any) -> dict[str, int] | None:
    """Return the bytes that layers keep for the backward pass, and those that go to the host."""
    report = step.offloaded
    return {"total": report.total, "moved": report.moved} if report.rows else None


def _torch(asked: Asked) -> Ready:
    import jax
    import numpy as np

    jax.config.update("jax_platforms", "cpu")  # the same first weights, drawn on the host
    import hfjax
    from hfjax.utils.paths import flatten

    task = _task(asked)
    drawn = task.weights or (lambda: flatten(hfjax.init(task.layout).params))
    flat = {path: np.asarray(x) for path, x in drawn().items()}
    program = task.rival(flat)
    batches = [program.place(task.batch(i)) for i in range(BATCHES)]
    program.compile(batches[0])
    step = lambda i: program.step(batches[i % BATCHES])
    told = {"parameters": _count(flat)}
    return Ready(step, program.wait, program.peak, program.rest, told)


if __name__ == "__main__":
    main()
