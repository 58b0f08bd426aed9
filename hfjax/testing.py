"""The equivalence kit: tests that every strategy trains your model as one device does."""

import logging
import math
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

from hfjax.checks.jax_errors import raising_module
from hfjax.distributed.consensus import speaks
from hfjax.parallel.adapters.forward_signature import call_model
from hfjax.parallel.engine.example_keys import derive_keys, is_random
from hfjax.parallel.jaxprs.model_mesh import call_or_trace, without_mesh
from hfjax.parallel.make_mesh import make_mesh
from hfjax.parallel.mesh import EXPERTS, describe_mesh
from hfjax.parallel.schedules.named import Schedule
from hfjax.parallel.spmd.interpreter import run_partitioned
from hfjax.parallel.spmd.placements import ONE_DEVICE
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
from hfjax.sharding.layout import Layout, layout
from hfjax.sharding.reorder_layers import to_model_order
from hfjax.step.batches import full_array
from hfjax.step.init_state import init
from hfjax.step.train_step import train_step
from hfjax.utils.mean import Mean, as_mean, mean_metrics
from hfjax.utils.paths import Flat, flatten, is_random_key, nest
from hfjax.utils.progress import show_progress

logger = logging.getLogger(__name__)

Sizes = Mapping[str, int]


def strategies(
    devices: int, tensor: bool = True, of_parts: Collection[str] = ()
) -> dict[str, tuple[Any, ...]]:
    """Return {name: (strategy, mesh sizes)}: each strategy and combination for this many devices.

    Args:
        devices: How many, for instance a power of two.
        tensor: Whether to include strategies that shard layers over tensor.
        of_parts: Which to include of those that require more of a model: "PIPE", "CONTEXT",
            "EXPERT", "GRID". PIPE comes with fields of its execution: (strategy, mesh sizes,
            fields).

    Example:
        >>> from hfjax.testing import strategies
        >>> strategies(2)["FSDP"][1]
        {'fsdp': 2}
    """
    half, four = devices // 2, 4 if devices % 4 == 0 else 2
    cases: dict[str, tuple[Any, ...]] = {"DDP": (DDP, {"data": devices})}
    if devices > 1:  # a single device has nothing to shard
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


ONE_F_ONE_B = {"schedule": Schedule("1f1b", microbatches=2), "gradient_accumulation_steps": 1}


class TrainResult(NamedTuple):
    """The results of a few steps, in host memory."""

    losses: list[float]
    gradients: dict[str, np.ndarray]  # of the first step
    parameters: dict[str, np.ndarray]  # after the last step
    variables: dict[str, np.ndarray]  # after each step, by path and step, except random keys
    metrics: dict[str, np.ndarray]  # of the loss, by name and step
    batch_comms: str = ""  # cross-example operations


@dataclass(frozen=True)
class Case:
    """What is trained, independent of the strategy."""

    model_init: Callable
    loss: Callable
    batch: Any
    optimizer: optax.GradientTransformation
    steps: int
    options: Mapping[str, Any]  # of `hfjax.layout`
    execution: Mapping[str, Any]

    @without_mesh
    def run(
        self, strategy: Strategy, sizes: Sizes, execution: Mapping[str, Any] | None = None
    ) -> TrainResult:
        """Return the results of training under a strategy; check the sharding of everything."""
        mesh = make_mesh(devices=jax.devices()[: math.prod(sizes.values())], **sizes)
        recording = optax.chain(record_gradients(), self.optimizer)
        case_layout = layout(self.model_init, recording, mesh, strategy, **self.options)
        fields = {"precision": "stored", **self.execution, **(execution or {})}
        step = train_step(case_layout, self.loss, **fields)
        state, gradients, metrics_log, variables = init(case_layout, seed=0), {}, [], {}
        for number in range(self.steps):
            state, metrics = step(state, self.batch)
            _check_placement(step.layout, state)
            metrics_log.append(metrics)
            if number == 0:
                gradients = flatten(full_array(to_model_order(case_layout, state).optimizer[0]))
            variables |= _host_variables(flatten(state.variables), number)
        losses = [float(metrics["loss"]) for metrics in metrics_log]
        parameters = flatten(full_array(to_model_order(case_layout, state).params))
        outcome = losses, gradients, parameters, variables, _metrics_by_step(metrics_log)
        return TrainResult(*outcome, batch_comms=str(step.batch_comms))

    @without_mesh
    def run_plain(self) -> TrainResult | None:
        """Return the results of a plain JAX and optax loop on one device, without an engine.

        None where `precision` rounds, and for a layer-stack model that cannot be called.
        """
        one_device = make_mesh(devices=jax.devices()[:1])
        case_layout = layout(self.model_init, self.optimizer, one_device, DDP, **self.options)
        model, forward = case_layout.template.abstract("train"), case_layout.forward
        has_only_parts = (
            case_layout.template.is_layer_stack and forward is None and not callable(model)
        )
        if "precision" in self.execution or has_only_parts:
            return None
        return train_plain(self, case_layout)


@without_mesh
def train_plain(case: Case, case_layout: Layout) -> TrainResult:
    """Return the results of a plain JAX and optax loop, from the parameters of `hfjax.init`.

    Random keys are those of a step on one device: the same masks.
    """
    state = init(case_layout, seed=0)
    variables: dict[str, Any] = flatten(state.variables)
    parameters: dict[str, Any] = flatten(state.params)
    optimizer_state, first_gradients, metrics_log, variable_log = (
        case_layout.optimizer.init(state.params),
        {},
        [],
        {},
    )
    specs: dict[str, Any] = {"in_specs": P(), "out_specs": P(), "check_vma": False}
    # Axes that a model names are bound, each with one device.
    step = jax.jit(jax.shard_map(PlainStep(case, case_layout), mesh=case_layout.mesh, **specs))
    for number in range(case.steps):
        inputs = parameters, variables, optimizer_state, np.int32(number)
        parameters, variables, optimizer_state, gradients, metrics = step(*inputs)
        first_gradients = first_gradients or gradients
        metrics_log.append(metrics)
        variable_log |= _host_variables(variables, number)
    losses = [float(metrics["loss"]) for metrics in metrics_log]
    return TrainResult(
        losses,
        full_array(first_gradients),
        full_array(parameters),
        variable_log,
        _metrics_by_step(metrics_log),
    )


@dataclass(frozen=True)
class PlainStep:
    """A step as one writes it for one device: microbatches, gradients, clipping, the optimizer."""

    case: Case
    case_layout: Layout

    def __call__(
        self, parameters: Flat, variables: Flat, optimizer_state: Any, number: jax.Array
    ) -> tuple[Flat, Flat, Any, Flat, Flat]:
        """Return parameters, variables, optimizer state; gradients and metrics of the step."""
        gradients, means = [], []
        for microbatch in range(self.num_microbatches):
            grad = jax.grad(self._loss, has_aux=True)
            outs = grad(parameters, variables, number, microbatch)
            gradient, (mean, weight, new_variables) = outs
            gradients.append({path: g * weight for path, g in gradient.items()})
            means.append(mean)
            store = partial(self._store_variable, variables, microbatch)
            variables = variables | {path: store(path, x) for path, x in new_variables.items()}
        mean: Mean = jax.tree.map(lambda *x: sum(x[1:], x[0]), *means)
        mean_gradients = jax.tree.map(lambda *g: sum(g[1:], g[0]) / mean.weight, *gradients)
        mean_gradients = self._clip(mean_gradients)
        updates, optimizer_state = self.case_layout.optimizer.update(
            nest(mean_gradients), optimizer_state, nest(parameters)
        )
        new: Any = optax.apply_updates(nest(parameters), updates)
        metrics = {"loss": mean.total / mean.weight} | mean_metrics(mean)
        changed, metrics = self.case_layout.template.after_step(variables, metrics)
        return flatten(new), variables | changed, optimizer_state, mean_gradients, metrics

    @property
    def num_microbatches(self) -> int:
        """The number of microbatches of a step."""
        return self.case.execution.get("gradient_accumulation_steps", 1)

    @property
    def microbatch_size(self) -> int:
        """The number of examples of a microbatch."""
        return jax.tree.leaves(self.case.batch)[0].shape[0] // self.num_microbatches

    def _slice(self, x: Any, microbatch: int) -> Any:
        return x[microbatch * self.microbatch_size : (microbatch + 1) * self.microbatch_size]

    def _loss(
        self, parameters: Flat, variables: Flat, number: jax.Array, microbatch: int
    ) -> tuple[jax.Array, tuple[Mean, jax.Array, Flat]]:
        """Return the loss of a microbatch; its Mean, its weight, and the variables afterwards."""
        template = self.case_layout.template
        batch = jax.tree.map(lambda x: self._slice(x, microbatch), self.case.batch)
        values = {
            path: self._microbatch_variable(path, x, number, microbatch)
            for path, x in variables.items()
        }

        def compute(parameters: Flat, values: Flat, batch: Any) -> tuple[Mean, Flat]:
            model = template.merge(parameters, values, "train")
            outputs = call_model(self.case_layout.forward, model, values, batch, "train")
            mean = as_mean(self.case.loss(outputs, batch), self.microbatch_size)
            return mean, template.model_variables(model)

        run_traced = partial(run_partitioned, ONE_DEVICE, compute)
        with template.call_context():
            mean, now = call_or_trace(compute, run_traced, parameters, values, batch)
        new_variables = now.items()
        is_statistic = lambda path: path in values and not is_random(template.variables[path])
        weight = jnp.where(mean.weight == 0, 1, mean.weight)
        statistics = {path: x for path, x in new_variables if is_statistic(path)}
        return mean.total / weight, (mean, weight, statistics)

    def _microbatch_variable(
        self, path: str, x: jax.Array, number: jax.Array, microbatch: int
    ) -> jax.Array:
        """Return a variable for a microbatch: its examples, or random keys of its own."""
        variable = self.case_layout.template.variables[path]
        if is_random(variable):
            return derive_keys(
                variable, x, number, microbatch * self.microbatch_size, self.microbatch_size, None
            )
        return self._slice(x, microbatch) if self.case_layout.template.is_batched(path) else x

    def _store_variable(
        self, variables: Flat, microbatch: int, path: str, new: jax.Array
    ) -> jax.Array:
        """Return a variable after a microbatch has written to it."""
        if not self.case_layout.template.is_batched(path):
            return new
        return jax.lax.dynamic_update_slice_in_dim(
            variables[path], new, microbatch * self.microbatch_size, 0
        )

    def _clip(self, gradients: Flat) -> Flat:
        if (clip := self.case.execution.get("max_grad_norm")) is None:
            return gradients
        norm = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in gradients.values()))
        return {path: g * jnp.minimum(1, clip / norm) for path, g in gradients.items()}


def _host_variables(variables: Flat, number: int) -> dict[str, np.ndarray]:
    """Return variables in host memory after a step, by path and step, except random keys."""
    arrays = full_array({path: x for path, x in variables.items() if not is_random_key(x)})
    return {f"{path} after step {number}": x for path, x in arrays.items()}


def _metrics_by_step(metrics_log: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """Return the metrics of a loss, and its weight, by name and step."""
    own_names = lambda metrics: metrics.keys() - {"loss", "grad_norm", "finite", "step"}
    return {
        f"{name} of step {number}": np.asarray(metrics[name], np.float64)
        for number, metrics in enumerate(metrics_log)
        for name in sorted(own_names(metrics))
    }


def record_gradients() -> optax.GradientTransformation:
    """Return a transformation whose state is the last gradient: sharded as optimizer state is."""
    zeros = lambda params: jax.tree.map(jnp.zeros_like, params)
    return optax.GradientTransformation(
        zeros, lambda updates, state, params=None: (updates, updates)
    )


def _check_placement(case_layout: Layout, state: Any) -> None:
    """Raise unless every array of the state is placed as the layout says."""

    def check(keys: tuple, x: jax.Array, sharding: NamedSharding) -> None:
        memory_kind, memory = x.sharding.memory_kind, sharding.memory_kind
        if not x.sharding.is_equivalent_to(sharding, x.ndim) or memory_kind != memory:
            raise AssertionError(
                f"{case_layout.strategy.name} on {describe_mesh(case_layout.mesh)}: "
                f"{jax.tree_util.keystr(keys)} {x.shape} lies as {x.sharding}, not {sharding.spec} "
                f"in {memory} memory."
            )

    jax.tree_util.tree_map_with_path(check, state, case_layout.shardings())


@without_mesh
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
    exactly), and the placement of every array. Float64 parameters must agree to 1e-9, others to
    1e-5. One device is also compared with a plain JAX and optax loop, to 1e-4, unless `precision`
    rounds or the model cannot be called.
    Each strategy is logged by `hfjax.testing`, at level INFO, or WARNING if it is left out.

    Args:
        model_init: Function of rngs that returns the model, as `hfjax.layout` takes it.
        loss: Function of (outputs, batch), as `hfjax.train_step` takes it.
        batch: One batch, used in every step.
        strategies: {name: (strategy, mesh sizes)}, or with fields of its own execution:
            {"1F1B": (PIPE, {"pipe": 4}, {"schedule": Schedule("1f1b", 8)})}. None: each that the
            model supports on the available devices, with every array sharded however small. What
            is left out then, and why, is logged as a warning.
        optimizer: Any optax transformation. None: AdamW with an eps of 1e-4; a smaller one
            amplifies rounding where a gradient is truly zero.
        steps: How many steps each takes.
        options: `forward` and `axes` of `hfjax.layout` ("auto" reads the names with this batch),
            and fields of `Execution` for all of them; precision is "stored" by default.

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
    of_layout |= {"example": batch} if of_layout.get("axes") == "auto" else {}
    cases: Mapping[str, tuple] = strategies or default_cases(model_init, of_layout)
    chosen = optimizer or optax.adamw(1e-3, eps=1e-4)
    case = Case(model_init, loss, batch, chosen, steps, of_layout, options)
    with _progress_line("one device", "trained"):
        reference = case.run(DDP, {"data": 1})
        _check_reference(case, reference)
    differences = {}
    for name, (strategy, sizes, *own) in cases.items():
        with _progress_line(
            f"{name} on {' x '.join(f'{axis}={n}' for axis, n in sizes.items())}"
        ) as line:
            try:
                run = case.run(strategy, sizes, *own)
            except ValueError as error:
                if strategies or not _is_refusal(error):
                    raise
                line.result = f"left out: {error}"
                continue
            who = f"{name} ({strategy.name} on {dict(sizes)})"
            differences[name] = assert_same_run(run, reference, who)
    return differences


def _is_refusal(error: ValueError) -> bool:
    """Return whether a check of hfjax raised it; an explained error of JAX is no refusal."""
    module_name = raising_module(error)
    return module_name.startswith("hfjax.") and module_name != "hfjax.checks.jax_errors"


@dataclass
class _Line:
    """The end of a line on standard error."""

    result: str


@contextmanager
def _progress_line(title: str, result: str = "equal") -> Iterator[_Line]:
    """Log what is trained, then the result and how long it took."""
    line, start = _Line(result), time.monotonic()
    if not speaks():
        yield line
        return
    with show_progress(f"{title}: compiling, training"):
        yield line
    level = logging.INFO if line.result == result else logging.WARNING
    logger.log(level, "%s: %s, %.0f s", title, line.result, time.monotonic() - start)


def assert_same_run(run: TrainResult, reference: TrainResult, who: str) -> float:
    """Return the greatest relative difference; raise AssertionError if it is more than rounding."""
    is_float64 = all(x.dtype == np.float64 for x in reference.parameters.values())
    advice = f"{ADVICE} Rows meet in it here:\n{run.batch_comms}" if run.batch_comms else ADVICE
    return _compare(
        run, reference, f"{who} differs from one device", 1e-9 if is_float64 else 1e-5, advice
    )


ADVICE = (
    " What a program makes of its device's own examples depends on the mesh: hfjax.per_device, and "
    "batch_view='local' (docs/any_model.md#where-rows-of-the-batch-meet)."
)


def _compare(
    run: TrainResult, reference: TrainResult, who: str, tolerance: float, advice: str = ""
) -> float:
    differences = {
        field: (difference, values) for field, difference, values in _compare_fields(run, reference)
    }
    greatest = float(
        np.max([difference for difference, _ in differences.values()])
    )  # NaN if one is
    worst = max(differences, key=lambda field: np.nan_to_num(differences[field][0], nan=np.inf))
    if not greatest <= tolerance:
        difference, values = differences[worst]
        raise AssertionError(
            f"{who}: {worst} by {difference:.1e}{values}, allowed {tolerance:.0e}.{advice}"
        )
    return greatest


def _check_reference(case: Case, one_device_run: TrainResult) -> None:
    """Raise unless one device agrees with plain JAX, wherever that computes the same."""
    if reference := case.run_plain():
        _compare(one_device_run, reference, "one device differs from plain JAX", 1e-4)


def default_cases(
    model_init: Callable, of_layout: Mapping[str, Any] | None = None
) -> dict[str, tuple[Any, ...]]:
    """Return the strategies that a model supports on the devices here; log what is left out.

    Args:
        model_init: Function of rngs that returns the model.
        of_layout: `forward` and `axes` of `hfjax.layout`.
    """
    one_device = make_mesh(devices=jax.devices()[:1])
    case_layout = layout(model_init, optax.identity(), one_device, DDP, **(of_layout or {}))
    pairs = [
        pair for x in case_layout.arrays.values() for pair in zip(x.axes, x.shape, strict=True)
    ]
    named = {name for name, _ in pairs}
    experts = [size for name, size in pairs if name == EXPERTS]
    requirements = {
        "PIPE": ("the model is not in three parts", case_layout.template.is_layer_stack),
        "CONTEXT": ("no dimension is named heads", "heads" in named),
        "EXPERT": (f"no dimension named {EXPERTS} divides by 2", any(n % 2 == 0 for n in experts)),
        "GRID": ("no dimensions are named embed and mlp", {"embed", "mlp"} <= named),
    }
    left_out = {name: why for name, (why, fits) in requirements.items() if not fits}
    count = 2 ** (len(jax.devices()).bit_length() - 1)
    tensor = bool(named & TENSOR.parameters.keys())
    chosen = strategies(count, tensor, requirements.keys() - left_out.keys())
    if speaks() and left_out:
        why = "; ".join(f"{name} ({reason})" for name, reason in left_out.items())
        logger.warning("left out: %s", why)
    split_all = lambda strategy, *more: (strategy.edit(replicate_below=0), *more)
    return {name: split_all(*case) for name, case in chosen.items()}


def _compare_fields(run: TrainResult, reference: TrainResult) -> Iterator[tuple[str, float, str]]:
    """Yield what is compared, the difference, and both values where they are numbers."""
    for number, pair in enumerate(zip(run.losses, reference.losses, strict=True)):
        yield f"loss of step {number}", abs(pair[0] - pair[1]) / max(abs(pair[1]), 1e-30), ""
    for kind, arrays, expected in (
        ("gradient", run.gradients, reference.gradients),
        ("parameter", run.parameters, reference.parameters),
    ):
        if expected:
            yield *_tree_difference(kind, arrays, expected), ""
    for kind, arrays, expected in (
        ("variable", run.variables, reference.variables),
        ("metric", run.metrics, reference.metrics),
    ):
        for name in expected:
            yield f"{kind} {name}", *_relative_norm_error(arrays[name], expected[name])


def _relative_norm_error(actual: np.ndarray, expected: np.ndarray) -> tuple[float, str]:
    """Return the difference of two arrays, relative to the norm of one, and their values."""
    is_integer = np.issubdtype(expected.dtype, np.integer)  # a count: it is equal or not
    actual, expected = (np.asarray(x, np.float64) for x in (actual, expected))
    is_equal = actual == expected  # infinities included
    distance = float(
        np.linalg.norm(np.where(is_equal, 0, actual - np.where(is_equal, 0, expected)))
    )
    norm = max(float(np.linalg.norm(np.where(np.isfinite(expected), expected, 0))), 1e-2)
    difference = distance if is_integer else distance / norm
    worst = (
        np.unravel_index(np.argmax(np.abs(actual - expected)), actual.shape) if actual.size else ()
    )
    return difference, f" ({actual[worst]:.6g} for {expected[worst]:.6g})" if actual.size else ""


def _tree_difference(kind: str, run: dict, reference: dict) -> tuple[str, float]:
    """Return the most different leaf's name and the difference relative to the tree's norm."""
    norm = lambda arrays: float(
        np.sqrt(sum(np.sum(np.square(a, dtype=np.float64)) for a in arrays))
    )
    differences = {path: norm([run[path] - reference[path]]) for path in reference}
    worst = max(differences, key=lambda path: differences[path])
    difference = norm(differences.values()) / max(norm(reference.values()), 1e-30)
    return f"{kind} {worst} {reference[worst].shape}", difference
