"""The equivalence kit: every strategy trains your model as one device does, or you learn where."""

import math
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec as P

from hfjax.checks.jax_errors import module_of
from hfjax.distributed.consensus import speaks
from hfjax.parallel.engine.example_keys import is_random, keys_for
from hfjax.parallel.make_mesh import make_mesh
from hfjax.parallel.mesh import EXPERTS, describe_mesh
from hfjax.parallel.schedules.named import Schedule
from hfjax.parallel.strategy import (
    CONTEXT,
    DDP,
    EXPERT,
    FSDP,
    GRID,
    HSDP,
    PIPE,
    SEQUENCE,
    TENSOR,
    ZERO1,
    ZERO2,
    Strategy,
)
from hfjax.parallel.whole_model.model import called
from hfjax.sharding.layout import Layout, layout
from hfjax.sharding.reorder_layers import canonical
from hfjax.step.batches import full
from hfjax.step.init_state import init
from hfjax.step.train_step import train_step
from hfjax.utils.mean import Mean, as_mean, metrics_of
from hfjax.utils.paths import Flat, flatten, is_key, nest
from hfjax.utils.progress import said_while

Sizes = Mapping[str, int]


def strategies(
    devices: int, tensor: bool = True, of_parts: Collection[str] = ()
) -> dict[str, tuple[Any, ...]]:
    """Return {name: (strategy, mesh sizes)}: each strategy and combination for so many devices.

    Args:
        devices: How many, for instance a power of two.
        tensor: Whether to include strategies that split layers over tensor.
        of_parts: Which to include of those that ask more of a model: "PIPE", "CONTEXT", "EXPERT",
            "GRID". PIPE comes with fields of its execution: (strategy, mesh sizes, fields).

    Example:
        >>> from hfjax.testing import strategies
        >>> strategies(2)["FSDP"][1]
        {'fsdp': 2}
    """
    half, four = devices // 2, 4 if devices % 4 == 0 else 2
    cases: dict[str, tuple[Any, ...]] = {"DDP": (DDP, {"data": devices})}
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
    further: dict[str, tuple[int, tuple[Any, ...]]] = {  # name -> fewest devices, case
        "PIPE": (2, (PIPE, {"pipe": 2, "data": half}, ONE_F_ONE_B)),
        "CONTEXT": (2, (CONTEXT, {"data": half, "context": 2})),
        "EXPERT": (2, (EXPERT, {"data": half, "expert": 2})),
        "GRID": (4, (GRID, {"data": devices // 4, "row": 2, "tensor": 2})),
    }
    more = {name: case for name, (fewest, case) in further.items() if devices >= fewest}
    return cases | {name: case for name, case in more.items() if name in of_parts}


ONE_F_ONE_B = {"schedule": Schedule("1f1b", microbatches=2), "accumulate": 1}


class Trained(NamedTuple):
    """What a few steps left behind, in host memory."""

    losses: list[float]
    gradients: dict[str, np.ndarray]  # of the first step
    parameters: dict[str, np.ndarray]  # after the last step
    variables: dict[str, np.ndarray]  # after each step, by path and step, but for random keys
    metrics: dict[str, np.ndarray]  # of the loss, by name and step
    rows: str = ""  # where rows meet


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
    ) -> Trained:
        """Return what training under a strategy leaves; checks where everything lies."""
        mesh = make_mesh(devices=jax.devices()[: math.prod(sizes.values())], **sizes)
        recording = optax.chain(recorded_gradients(), self.optimizer)
        plan = layout(self.model_init, recording, mesh, strategy, **self.options)
        step = train_step(plan, self.loss, **{**self.execution, **(execution or {})})
        state, gradients, told, variables = init(plan, seed=0), {}, [], {}
        for number in range(self.steps):
            state, metrics = step(state, self.batch)
            _check_placement(step.layout, state)
            told.append(metrics)
            if number == 0:
                gradients = flatten(full(canonical(plan, state).optimizer[0]))
            variables |= _variables_of(flatten(state.variables), number)
        losses = [float(metrics["loss"]) for metrics in told]
        parameters = flatten(full(canonical(plan, state).params))
        found = losses, gradients, parameters, variables, _metrics_by_step(told)
        return Trained(*found, rows=str(step.rows))

    def plain(self) -> Trained | None:
        """Return what a loop of plain JAX and optax leaves on one device: no data plane is in it.

        None where `precision` rounds, and for a model in three parts that cannot be called.
        """
        one = make_mesh(devices=jax.devices()[:1])
        plan = layout(self.model_init, self.optimizer, one, DDP, **self.options)
        model, forward = plan.blueprint.abstract("train"), plan.forward
        parts_alone = plan.blueprint.three_parts and forward is None and not callable(model)
        if "precision" in self.execution or parts_alone:
            return None
        return plain_run(self, plan)


def plain_run(case: Case, plan: Layout) -> Trained:
    """Return what a loop of plain JAX and optax leaves, from the parameters of `hfjax.init`.

    Random keys are those of a step on one device: the same masks.
    """
    state = init(plan, seed=0)
    variables: dict[str, Any] = flatten(state.variables)
    parameters: dict[str, Any] = flatten(state.params)
    kept, first, told, held = case.optimizer.init(state.params), {}, [], {}
    specs: dict[str, Any] = {"in_specs": P(), "out_specs": P(), "check_vma": False}
    # Axes that a model names are bound, each of one device.
    step = jax.jit(jax.shard_map(_PlainStep(case, plan), mesh=plan.mesh, **specs))
    for number in range(case.steps):
        given = parameters, variables, kept, np.int32(number)
        parameters, variables, kept, gradients, metrics = step(*given)
        first = first or gradients
        told.append(metrics)
        held |= _variables_of(variables, number)
    losses = [float(metrics["loss"]) for metrics in told]
    return Trained(losses, full(first), full(parameters), held, _metrics_by_step(told))


@dataclass(frozen=True)
class _PlainStep:
    """A step as one writes it for one device: microbatches, gradients, clipping, the optimizer."""

    case: Case
    plan: Layout

    def __call__(
        self, parameters: Flat, variables: Flat, kept: Any, number: jax.Array
    ) -> tuple[Flat, Flat, Any, Flat, Flat]:
        """Return parameters, variables, optimizer state; gradients and metrics of the step."""
        gradients, means = [], []
        for part in range(self.parts):
            differentiated = jax.grad(self._total, has_aux=True)
            found = differentiated(parameters, variables, number, part)
            gradient, (mean, weight, written) = found
            gradients.append({path: g * weight for path, g in gradient.items()})
            means.append(mean)
            put = partial(self._put, variables, part)
            variables = variables | {path: put(path, x) for path, x in written.items()}
        mean: Mean = jax.tree.map(lambda *x: sum(x[1:], x[0]), *means)
        summed = jax.tree.map(lambda *g: sum(g[1:], g[0]) / mean.weight, *gradients)
        summed = self._clipped(summed)
        updates, kept = self.case.optimizer.update(nest(summed), kept, nest(parameters))
        new: Any = optax.apply_updates(nest(parameters), updates)
        metrics = {"loss": mean.total / mean.weight} | metrics_of(mean)
        changed, metrics = self.plan.blueprint.after_step(variables, metrics)
        return flatten(new), variables | changed, kept, summed, metrics

    @property
    def parts(self) -> int:
        """How many microbatches a step has."""
        return self.case.execution.get("accumulate", 1)

    @property
    def rows(self) -> int:
        """How many rows a microbatch has."""
        return jax.tree.leaves(self.case.batch)[0].shape[0] // self.parts

    def _of(self, x: Any, part: int) -> Any:
        return x[part * self.rows : (part + 1) * self.rows]

    def _total(
        self, parameters: Flat, variables: Flat, number: jax.Array, part: int
    ) -> tuple[jax.Array, tuple[Mean, jax.Array, Flat]]:
        """Return the loss of a microbatch; its Mean, its weight, and what variables hold after."""
        blueprint = self.plan.blueprint
        batch = jax.tree.map(lambda x: self._of(x, part), self.case.batch)
        held = {path: self._held(path, x, number, part) for path, x in variables.items()}
        model = blueprint.merge(parameters, held, "train")
        with blueprint.around():
            outputs = called(self.plan.forward, model, held, batch, "train")
        mean = as_mean(self.case.loss(outputs, batch), self.rows)
        written = blueprint.variables_of(model).items()
        statistic = lambda path: path in held and not is_random(blueprint.variables[path])
        weight = jnp.where(mean.weight == 0, 1, mean.weight)
        seen = {path: x for path, x in written if statistic(path)}
        return mean.total / weight, (mean, weight, seen)

    def _held(self, path: str, x: jax.Array, number: jax.Array, part: int) -> jax.Array:
        """Return what a variable holds for a microbatch: its rows, or random keys of its own."""
        template = self.plan.blueprint.variables[path]
        if is_random(template):
            return keys_for(template, x, number, part * self.rows, self.rows, None)
        return self._of(x, part) if self.plan.blueprint.of_rows(path) else x

    def _put(self, variables: Flat, part: int, path: str, new: jax.Array) -> jax.Array:
        """Return a variable after a microbatch has written to it."""
        if not self.plan.blueprint.of_rows(path):
            return new
        return jax.lax.dynamic_update_slice_in_dim(variables[path], new, part * self.rows, 0)

    def _clipped(self, gradients: Flat) -> Flat:
        if (clip := self.case.execution.get("clip")) is None:
            return gradients
        norm = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in gradients.values()))
        return {path: g * jnp.minimum(1, clip / norm) for path, g in gradients.items()}


def _variables_of(variables: Flat, number: int) -> dict[str, np.ndarray]:
    """Return variables in host memory after a step, by path and step, but for random keys."""
    held = full({path: x for path, x in variables.items() if not is_key(x)})
    return {f"{path} after step {number}": x for path, x in held.items()}


def _metrics_by_step(told: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """Return the metrics of a loss, and its weight, by name and step."""
    own = lambda metrics: metrics.keys() - {"loss", "grad_norm", "finite", "step"}
    return {
        f"{name} of step {number}": np.asarray(metrics[name], np.float64)
        for number, metrics in enumerate(told)
        for name in sorted(own(metrics))
    }


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

    Compared are the losses and their metrics, the gradients of the first step, parameters after the
    last (both relative to the norm of the whole tree), variables after each step (whole numbers
    exactly), and the place of every array. Float64 parameters must agree to 1e-9, others to 1e-5.
    One device is compared with a loop of plain JAX and optax as well, to 1e-4, unless `precision`
    rounds or the model cannot be called.
    Standard error has a line for each strategy as it goes.

    Args:
        model_init: Function of rngs that returns the model, as `hfjax.layout` takes it.
        loss: Function of (outputs, batch), as `hfjax.train_step` takes it.
        batch: One batch, which every step is given.
        strategies: {name: (strategy, mesh sizes)}, or with fields of its own execution:
            {"1F1B": (PIPE, {"pipe": 4}, {"schedule": Schedule("1f1b", 8)})}. None: each that the
            model can have on the devices that are here, with every array split however small. What
            is left out then, and why, is printed.
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
    of_layout = {name: options.pop(name) for name in ("forward", "axes") if name in options}
    cases: Mapping[str, tuple] = strategies or default_cases(model_init, of_layout)
    chosen = optimizer or optax.adamw(1e-3, eps=1e-4)
    case = Case(model_init, loss, batch, chosen, steps, of_layout, options)
    with _told("one device", "trained"):
        wanted = case.run(DDP, {"data": 1})
        _check_reference(case, wanted)
    differences = {}
    for name, (strategy, sizes, *own) in cases.items():
        with _told(f"{name} on {' x '.join(f'{axis}={n}' for axis, n in sizes.items())}") as told:
            try:
                run = case.run(strategy, sizes, *own)
            except ValueError as error:
                if strategies or not _refused(error):
                    raise
                told.result = f"left out: {error}"
                continue
            who = f"{name} ({strategy.name} on {dict(sizes)})"
            differences[name] = assert_same_run(run, wanted, who)
    return differences


def _refused(error: ValueError) -> bool:
    """Return whether a check of hfjax raised it; what JAX says in hfjax's words is no refusal."""
    where = module_of(error)
    return where.startswith("hfjax.") and where != "hfjax.checks.jax_errors"


@dataclass
class _Line:
    """The end of a line on standard error."""

    result: str


@contextmanager
def _told(where: str, result: str = "equal") -> Iterator[_Line]:
    """Say on standard error what is trained, and at the end the result and how long it took."""
    line, began = _Line(result), time.monotonic()
    if not speaks():
        yield line
        return
    with said_while(f"{where}: compiling, training"):
        yield line
    print(f"{where}: {line.result}, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)


def assert_same_run(run: Trained, wanted: Trained, who: str) -> float:
    """Return the greatest relative difference; raise AssertionError if it is more than rounding."""
    wide = all(x.dtype == np.float64 for x in wanted.parameters.values())
    advice = f"{ADVICE} Rows meet in it here:\n{run.rows}" if run.rows else ADVICE
    return _compared(run, wanted, f"{who} differs from one device", 1e-9 if wide else 1e-5, advice)


ADVICE = (
    " What a program makes of its device's own rows depends on the mesh: hfjax.own_rows, and "
    "rows='own' (docs/any_model.md#where-rows-of-the-batch-meet)."
)


def _compared(run: Trained, wanted: Trained, who: str, tolerance: float, advice: str = "") -> float:
    found = {what: (apart, values) for what, apart, values in _differences(run, wanted)}
    greatest = float(np.max([apart for apart, _ in found.values()]))  # NaN if one is
    worst = max(found, key=lambda what: np.nan_to_num(found[what][0], nan=np.inf))
    if not greatest <= tolerance:
        apart, values = found[worst]
        raise AssertionError(
            f"{who}: {worst} by {apart:.1e}{values}, allowed {tolerance:.0e}.{advice}"
        )
    return greatest


def _check_reference(case: Case, found: Trained) -> None:
    """Raise unless one device agrees with plain JAX, wherever that computes the same."""
    if wanted := case.plain():
        _compared(found, wanted, "one device differs from plain JAX", 1e-4)


def default_cases(
    model_init: Callable, of_layout: Mapping[str, Any] | None = None
) -> dict[str, tuple[Any, ...]]:
    """Return the strategies that a model can have on the devices here; print what is left out.

    Args:
        model_init: Function of rngs that returns the model.
        of_layout: `forward` and `axes` of `hfjax.layout`.
    """
    one = make_mesh(devices=jax.devices()[:1])
    plan = layout(model_init, optax.identity(), one, DDP, **(of_layout or {}))
    pairs = [pair for x in plan.arrays.values() for pair in zip(x.axes, x.shape, strict=True)]
    named = {name for name, _ in pairs}
    experts = [size for name, size in pairs if name == EXPERTS]
    asked = {
        "PIPE": ("the model is not in three parts", plan.blueprint.three_parts),
        "CONTEXT": ("no dimension is named heads", "heads" in named),
        "EXPERT": (f"no dimension named {EXPERTS} divides by 2", any(n % 2 == 0 for n in experts)),
        "GRID": ("no dimensions are named embed and mlp", {"embed", "mlp"} <= named),
    }
    left_out = {name: why for name, (why, fits) in asked.items() if not fits}
    count = 2 ** (len(jax.devices()).bit_length() - 1)
    tensor = bool(named & TENSOR.parameters.keys())
    chosen = strategies(count, tensor, asked.keys() - left_out.keys())
    if speaks() and left_out:
        why = "; ".join(f"{name} ({reason})" for name, reason in left_out.items())
        print(f"left out: {why}", file=sys.stderr, flush=True)
    whole = lambda strategy, *more: (strategy.edit(replicate_below=0), *more)
    return {name: whole(*case) for name, case in chosen.items()}


def _differences(run: Trained, wanted: Trained) -> Iterator[tuple[str, float, str]]:
    """Yield what is compared, how far it is apart, and both values where they are numbers."""
    for number, pair in enumerate(zip(run.losses, wanted.losses, strict=True)):
        yield f"loss of step {number}", abs(pair[0] - pair[1]) / max(abs(pair[1]), 1e-30), ""
    for what, mine, theirs in (
        ("gradient", run.gradients, wanted.gradients),
        ("parameter", run.parameters, wanted.parameters),
    ):
        if theirs:
            yield *_tree_difference(what, mine, theirs), ""
    for what, mine, theirs in (
        ("variable", run.variables, wanted.variables),
        ("metric", run.metrics, wanted.metrics),
    ):
        for name in theirs:
            yield f"{what} {name}", *_apart(mine[name], theirs[name])


def _apart(found: np.ndarray, wanted: np.ndarray) -> tuple[float, str]:
    """Return how far two arrays are apart, relative to the norm of one, and what they are."""
    whole = np.issubdtype(wanted.dtype, np.integer)  # a count: it is the same, or it is not
    found, wanted = (np.asarray(x, np.float64) for x in (found, wanted))
    same = found == wanted  # infinities among them
    distance = float(np.linalg.norm(np.where(same, 0, found - np.where(same, 0, wanted))))
    norm = max(float(np.linalg.norm(np.where(np.isfinite(wanted), wanted, 0))), 1e-2)
    apart = distance if whole else distance / norm
    worst = np.unravel_index(np.argmax(np.abs(found - wanted)), found.shape) if found.size else ()
    return apart, f" ({found[worst]:.6g} for {wanted[worst]:.6g})" if found.size else ""


def _tree_difference(what: str, run: dict, wanted: dict) -> tuple[str, float]:
    """Return the most different leaf's name and the difference relative to the tree's norm."""
    norm = lambda arrays: float(
        np.sqrt(sum(np.sum(np.square(a, dtype=np.float64)) for a in arrays))
    )
    apart = {path: norm([run[path] - wanted[path]]) for path in wanted}
    worst = max(apart, key=lambda path: apart[path])
    total = norm(apart.values()) / max(norm(wanted.values()), 1e-30)
    return f"{what} {worst} {wanted[worst].shape}", total
