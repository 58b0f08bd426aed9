"""The equivalence kit: every strategy trains your model as one device does, or you learn where."""

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding

from hfjax.base.mean import as_mean
from hfjax.base.paths import flatten, path_of
from hfjax.base.progress import said_while
from hfjax.batches import full
from hfjax.initialise import init
from hfjax.parallel.engine.blueprint import asked_by, rngs_of
from hfjax.parallel.mesh import describe_mesh, make_mesh
from hfjax.parallel.strategy import (
    DDP,
    FSDP,
    HSDP,
    SEQUENCE,
    TENSOR,
    ZERO1,
    ZERO2,
    Strategy,
)
from hfjax.plan.layout import Layout, layout
from hfjax.plan.rearrange import canonical
from hfjax.processes.agreement import speaks
from hfjax.train import train_step

Sizes = Mapping[str, int]


def strategies(devices: int, tensor: bool = True) -> dict[str, tuple[Strategy, Sizes]]:
    """Return {name: (strategy, mesh sizes)}: each strategy and combination for so many devices.

    Args:
        devices: How many, for instance a power of two.
        tensor: Whether to include strategies that split layers over tensor.

    Example:
        >>> from hfjax.testing import strategies
        >>> strategies(2)["FSDP"][1]
        {'fsdp': 2}
    """
    half, four = devices // 2, 4 if devices % 4 == 0 else 2
    cases: dict[str, tuple[Strategy, Sizes]] = {"DDP": (DDP, {"data": devices})}
    if devices > 1:  # alone, a device has nothing to split
        cases["ZERO1"] = (ZERO1, {"data": devices})
        cases["ZERO2"] = (ZERO2, {"data": devices})
        cases["FSDP"] = (FSDP, {"fsdp": devices})
    if devices > 1 and tensor:
        cases["TENSOR"] = (TENSOR, {"data": half, "tensor": 2})
        cases["TENSOR+SEQUENCE"] = (TENSOR | SEQUENCE, {"data": devices // four, "tensor": four})
    if devices > 3 and tensor:
        cases["FSDP+TENSOR"] = (FSDP | TENSOR, {"fsdp": half, "tensor": 2})
        cases["ZERO1+TENSOR+SEQUENCE"] = (ZERO1 | TENSOR | SEQUENCE, {"data": half, "tensor": 2})
    if devices > 3:
        cases["HSDP"] = (HSDP, {"data": 2, "fsdp": half})
        cases["ZERO2 on two axes"] = (ZERO2, {"data": 2, "fsdp": half})
    if devices > 7 and tensor:
        three = {"data": 2, "fsdp": half // 2, "tensor": 2}
        cases["HSDP+TENSOR+SEQUENCE"] = (HSDP | TENSOR | SEQUENCE, three)
        cases["ZERO2+TENSOR"] = (ZERO2 | TENSOR, three)
    return cases


class Run(NamedTuple):
    """What a few steps left behind, in host memory."""

    losses: list[float]
    gradients: dict[str, np.ndarray]  # of the first step
    parameters: dict[str, np.ndarray]  # after the last step


@dataclass(frozen=True)
class Case:
    """What is trained, whatever the strategy."""

    model_init: Callable
    loss: Callable
    batch: Any
    optimizer: optax.GradientTransformation
    steps: int
    options: Mapping[str, Any]  # of layout
    execution: Mapping[str, Any]

    def run(
        self, strategy: Strategy, sizes: Sizes, execution: Mapping[str, Any] | None = None
    ) -> Run:
        """Return what training under a strategy leaves; checks where everything lies."""
        mesh = make_mesh(devices=jax.devices()[: math.prod(sizes.values())], **sizes)
        recording = optax.chain(recorded_gradients(), self.optimizer)
        plan = layout(self.model_init, recording, mesh, strategy, **self.options)
        step = train_step(plan, self.loss, **{**self.execution, **(execution or {})})
        state = init(plan, seed=0)
        losses, gradients = [], {}
        for number in range(self.steps):
            state, metrics = step(state, self.batch)
            _check_placement(step.layout, state)
            losses.append(float(metrics["loss"]))
            if number == 0:
                gradients = flatten(full(canonical(plan, state).optimizer[0]))
        return Run(losses, gradients, flatten(full(canonical(plan, state).params)))

    def plain(self) -> Run | None:
        """Return what plain `jax.grad` gives for the first step, no engine involved.

        None for a model with variables that are no parameters, or a forward that asks for keys: a
        step gives those their meaning.
        """
        if asked_by(self.options.get("forward")):
            return None
        with nnx.use_eager_sharding(False):
            model = self.model_init(rngs_of(0))
        if not isinstance(model, nnx.Module) or nnx.state(model, nnx.Not(nnx.Param)):
            return None
        graph, parameters = nnx.split(model)
        forward = self.options.get("forward") or (lambda model, batch: model(batch))
        rows = jax.tree.leaves(self.batch)[0].shape[0]

        def mean(parameters):
            outputs = forward(nnx.merge(graph, parameters), self.batch)
            value = as_mean(self.loss(outputs, self.batch), rows)
            return value.total / value.weight

        value, gradients = jax.jit(jax.value_and_grad(mean))(parameters)
        flat = {path_of(k): v.get_raw_value() for k, v in nnx.to_flat_state(gradients)}
        return Run([float(value)], jax.tree.map(np.asarray, flat), {})


def recorded_gradients() -> optax.GradientTransformation:
    """Return a transformation whose state is the last gradient: placed as any moment is."""
    zeros = lambda params: jax.tree.map(jnp.zeros_like, params)
    return optax.GradientTransformation(
        zeros, lambda updates, state, params=None: (updates, updates)
    )


def _check_placement(plan: Layout, state: Any) -> None:
    """Raise unless every array of the state lies where the layout says."""

    def check(keys: tuple, x: jax.Array, wanted: NamedSharding) -> None:
        there, memory = x.sharding.memory_kind, wanted.memory_kind
        if not x.sharding.is_equivalent_to(wanted, x.ndim) or there != memory:
            raise AssertionError(
                f"{plan.strategy.name} on {describe_mesh(plan.mesh)}: "
                f"{jax.tree_util.keystr(keys)} {x.shape} lies as {x.sharding}, not {wanted.spec} "
                f"in {memory} memory."
            )

    jax.tree_util.tree_map_with_path(check, state, plan.shardings())


def assert_strategies_agree(
    model_init: Callable,
    loss: Callable,
    batch: Any,
    strategies: Mapping[str, tuple] | None = None,
    *,
    optimizer: optax.GradientTransformation | None = None,
    steps: int = 3,
    **options: Any,
) -> dict[str, float]:
    """Train under each strategy and on one device; raise AssertionError where they differ.

    Compared are the losses, the gradients of the first step and the parameters after the last
    (relative to the norm of the whole tree), and the place of every array. Float64 parameters must
    agree to 1e-9, others to 1e-5. Standard error has a line for each strategy as it goes.

    Args:
        model_init: Function of rngs that returns the model, as `hfjax.layout` takes it.
        loss: Function of (outputs, batch), as `hfjax.train_step` takes it.
        batch: One batch, which every step is given.
        strategies: {name: (strategy, mesh sizes)}, or with fields of its own execution:
            {"1F1B": (PIPE, {"pipe": 4}, {"schedule": Schedule("1f1b", 8)})}. None: each that the
            model can have on the devices that are here, with every array split however small.
        optimizer: Any optax transformation. None: AdamW with an eps of 1e-4; a smaller one
            amplifies rounding where a gradient is truly zero.
        steps: How many steps each takes.
        options: `forward` and `axes` of `hfjax.layout`, and fields of `Execution` for all of them.

    Returns:
        The greatest relative difference by strategy.

    Example:
        >>> import hfjax, numpy as np
        >>> from flax import nnx
        >>> from hfjax.testing import assert_strategies_agree
        >>> model = lambda rngs: nnx.Linear(8, 8, rngs=rngs)
        >>> loss, batch = lambda outputs, batch: (outputs**2).mean(), np.ones((8, 8), np.float32)
        >>> cases = {"FSDP": (hfjax.FSDP.edit(replicate_below=0), {"fsdp": 8})}
        >>> assert_strategies_agree(model, loss, batch, cases, steps=1)["FSDP"] < 1e-5
        True
    """
    cases: Mapping[str, tuple] = strategies or default_cases(model_init)
    of_layout = {name: options.pop(name) for name in ("forward", "axes") if name in options}
    chosen = optimizer or optax.adamw(1e-3, eps=1e-4)
    case = Case(model_init, loss, batch, chosen, steps, of_layout, options)
    with _told("one device", "trained"):
        wanted = case.run(DDP, {"data": 1})
        _check_reference(case, wanted)
    differences = {}
    for name, (strategy, sizes, *own) in cases.items():
        with _told(f"{name} on {' x '.join(f'{axis}={n}' for axis, n in sizes.items())}"):
            run, who = case.run(strategy, sizes, *own), f"{name} ({strategy.name} on {dict(sizes)})"
            differences[name] = assert_same_run(run, wanted, who)
    return differences


@contextmanager
def _told(where: str, result: str = "equal") -> Iterator[None]:
    """Say on standard error what is trained, and at the end the result and how long it took."""
    if not speaks():
        yield
        return
    began = time.monotonic()
    with said_while(f"{where}: compiling, training"):
        yield
    print(f"{where}: {result}, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)


def assert_same_run(run: Run, wanted: Run, who: str) -> float:
    """Return the greatest relative difference; raise AssertionError if it is more than rounding."""
    found = dict(_differences(run, wanted))
    wide = all(x.dtype == np.float64 for x in wanted.parameters.values())
    tolerance = 1e-9 if wide else 1e-5
    greatest = float(np.max(list(found.values())))  # NaN if one is
    worst = max(found, key=lambda what: np.nan_to_num(found[what], nan=np.inf))
    if not greatest <= tolerance:
        raise AssertionError(
            f"{who} differs from one device: {worst} by "
            f"{found[worst]:.1e}, allowed {tolerance:.0e}. A loss that mixes rows needs "
            "hfjax.gather_rows; random masks need a key per row (hfjax.models.parts.Dropout)."
        )
    return greatest


def _check_reference(case: Case, found: Run) -> None:
    """Raise unless one device agrees with plain `jax.grad` of the model as it is written."""
    plain = None if case.execution.keys() & {"precision", "clip"} else case.plain()
    if plain is None:
        return
    found = Run(found.losses[:1], found.gradients, {})
    for what, apart in _differences(found, plain):
        if not apart <= 1e-4:
            raise AssertionError(f"one device differs from plain JAX: {what} by {apart:.1e}.")


def default_cases(model_init: Callable) -> dict[str, tuple[Strategy, Sizes]]:
    """Return the strategies that this model can have on the devices that are here."""
    one = make_mesh(devices=jax.devices()[:1])
    plan = layout(model_init, optax.identity(), one, DDP)
    named = {name for array in plan.arrays.values() for name in array.axes}
    count = 2 ** (len(jax.devices()).bit_length() - 1)
    chosen = strategies(count, tensor=bool(named & TENSOR.parameters.keys()))
    return {name: (strategy.edit(replicate_below=0), n) for name, (strategy, n) in chosen.items()}


def _differences(run: Run, wanted: Run) -> Iterator[tuple[str, float]]:
    for number, pair in enumerate(zip(run.losses, wanted.losses, strict=True)):
        yield f"loss of step {number}", abs(pair[0] - pair[1]) / max(abs(pair[1]), 1e-30)
    for what, mine, theirs in (
        ("gradient", run.gradients, wanted.gradients),
        ("parameter", run.parameters, wanted.parameters),
    ):
        if theirs:
            yield _tree_difference(what, mine, theirs)


def _tree_difference(what: str, run: dict, wanted: dict) -> tuple[str, float]:
    """Return the most different leaf's name and the difference relative to the tree's norm."""
    norm = lambda arrays: float(
        np.sqrt(sum(np.sum(np.square(a, dtype=np.float64)) for a in arrays))
    )
    apart = {path: norm([run[path] - wanted[path]]) for path in wanted}
    worst = max(apart, key=lambda path: apart[path])
    total = norm(apart.values()) / max(norm(wanted.values()), 1e-30)
    return f"{what} {worst} {wanted[worst].shape}", total
