"""What a model does along its sequence, found by tracing it once with a length of its own.

Each device that shares a row computes with a part of its positions. That is right if positions meet
in `kernels.attention` only. So the model is traced with rows of a length that divides no other
dimension: what contracts, shifts, sums or counts along such a dimension is refused, with its line.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hfjax.base.mean import as_mean
from hfjax.base.paths import Flat
from hfjax.checks.along_rows import AlongRows
from hfjax.checks.look import outputs_of_a_look
from hfjax.parallel.autodiff.kept_apart import (
    OTHER,
    a_length,
    constants_along,
    differences,
    mixes,
    numbers_in,
)
from hfjax.parallel.autodiff.varying_state import differing
from hfjax.parallel.engine.blueprint import raw
from hfjax.parallel.engine.keys import differs_by_part
from hfjax.parallel.engine.step_context import StepContext, rows_of
from hfjax.parallel.wings.context.forms import choose
from hfjax.parallel.wings.context.on_shared_rows import FoundAlongRows, OnSharedRows, dims_of


def look_along_rows(
    rows: OnSharedRows, context: StepContext, variables: Flat, batch: Any, mode: str
) -> OnSharedRows:
    """Return what modules are handed, told what the model does along its rows; refuse what mixes.

    Unchecked, and where no length can be told apart, it is traced at the real length alone.

    Args:
        rows: What modules are handed.
        context: What is known of the step.
        variables: Those of the model, also those that hold random keys.
        batch: With the rows of this device.
        mode: "train" or "eval"; "predict" is "eval" here.
    """
    mode = "train" if mode == "train" else "eval"
    whole = context.blueprint.prepared(batch)
    dims = dims_of(whole, rows.settings.sequence)
    real = _length(whole, dims)
    templates = context.blueprint.parameters
    sizes = {n for x in templates.values() for n in raw(x).shape} | {rows_of(whole)}
    apart = a_length(real, sizes) if rows.settings.check else None
    look_at = _Look(context, rows, variables, whole, dims, mode, apart or real)
    noted, model, loss, outputs = _first(look_at)
    if apart is not None:
        _check(look_at, noted, model, loss, outputs)
    choice = choose(rows.settings, rows.devices, noted.calls, rows.no_ring)
    choice.deal.check(real, "a batch")
    shapes = tuple(x.shape for x in jax.tree.leaves(outputs))
    found = FoundAlongRows(choice, real, dims, shapes, apart or real, apart is not None)
    return replace(rows, seen=found)


def _check(look_at: "_Look", noted: AlongRows, model: Any, loss: Any, outputs: Any) -> None:
    """Refuse a model, or a loss, in which positions meet."""
    rows, real, apart = look_at.rows, look_at.real, look_at.trial
    for part, found in (("the model", model), ("the loss", loss)):
        _check_apart(part, found, apart, real)
    _check_closed(noted.closed, apart, real)
    held, training = look_at.context.blueprint.variables, look_at.mode == "train"
    own = {path: differs_by_part(held[path], training) for path in look_at.variables}
    differs = jax.tree.leaves((own, jax.tree.map(lambda _: True, look_at.batch)))
    _check_draws(model, differs, rows, apart)
    for n in {real, real // rows.devices} - {1}:
        _, *again, _ = look_at.at(n, tries=False)
        _check_same("the model", model, again[0], (apart, n))
        _check_same("the loss", loss, again[1], (apart, n), numbers=False)
    _check_parts(look_at.context.loss, outputs, look_at.resized(apart), loss, apart)


def _length(batch: Any, dims: Any) -> int:
    """Return the number of positions of the rows of a batch."""
    found = {
        jax.tree_util.keystr(keys, simple=True, separator="/"): x.shape[dim]
        for (keys, x), dim in zip(
            jax.tree_util.tree_leaves_with_path(batch),
            jax.tree.leaves(dims, is_leaf=lambda x: x is None),
            strict=True,
        )
        if dim is not None
    }
    if len(set(found.values())) != 1:
        shown = ", ".join(f"{path} {size}" for path, size in found.items()) or "none"
        raise ValueError(
            f"the devices of context share rows, so that the arrays of a batch have one number of "
            f"positions; found {shown} (dimension 1). Which dimension is the sequence can be said: "
            'hfjax.Context(sequence={"tokens": 1, "image": None}).'
        )
    return next(iter(found.values()))


@dataclass(frozen=True)
class _Look:
    """What a look traces: the model and the loss, on rows of a batch."""

    context: StepContext
    rows: OnSharedRows
    variables: Flat
    batch: Any  # of whole rows
    dims: Any
    mode: str
    trial: int  # the length of rows with which it is traced first

    @property
    def real(self) -> int:
        """The number of positions of the rows."""
        return _length(self.batch, self.dims)

    @property
    def apart(self) -> bool:
        """Whether the trial's length divides no other dimension."""
        return self.trial != self.real

    def at(self, length: int, tries: bool) -> tuple[AlongRows, Any, Any, Any]:
        """Return what is noted, the programs of model and loss on rows of a length, and outputs.

        Where nothing is checked, the loss is not traced.
        """
        loss, given = self.context.loss, self.resized(length)
        handed = AlongRows(self.rows.step, self.rows, self.real, length, self.apart, tries)
        context = replace(self.context, blueprint=self.context.blueprint.equipped(handed))
        run = partial(outputs_of_a_look, context, self.mode, times=handed.counted)
        program = jax.make_jaxpr(run, return_shape=True)
        model, outputs = program(self._parameters, self.variables, given)
        of_loss = jax.make_jaxpr(loss)(outputs, given) if self.apart else None
        return handed, model, of_loss, outputs

    def resized(self, length: int) -> Any:
        """Return the shapes of the batch with rows of another length."""
        resize = lambda x, dim: x.shape if dim is None else _with(x.shape, dim, length)
        made = lambda dim, x: jax.ShapeDtypeStruct(resize(x, dim), x.dtype)
        return jax.tree.map(made, self.dims, self.batch, is_leaf=lambda x: x is None)

    @property
    def _parameters(self) -> Flat:
        compute = lambda x: self.context.execution.precision.of(x.dtype)[0]
        templates = self.context.blueprint.parameters
        made = lambda x: jax.ShapeDtypeStruct(x.shape, compute(x))
        return {path: made(raw(x)) for path, x in templates.items()}


def _first(look_at: _Look) -> tuple[AlongRows, Any, Any, Any]:
    """Return what a look finds on rows of the trial's length.

    If it cannot be had, it is tried on rows of the real length: what then fails is the user's
    error, with the numbers that he knows.
    """
    trial, real = look_at.trial, look_at.real
    tries = look_at.rows.settings.check
    try:
        return look_at.at(trial, tries)
    except Exception as error:
        if trial == real:
            raise
        failed = error
    look_at.at(real, tries)
    raise ValueError(
        f"the model, or the loss, takes rows of {real} positions, but not of {trial}, with "
        "which hfjax traces it to see where positions meet. Dimension 1 of each array of the batch "
        "is taken for the sequence; which it is can be said: "
        'hfjax.Context(sequence={"image": None}). '
        f"If it takes some lengths only, switch the check off. {SWITCH} "
        f"{type(failed).__name__}: {str(failed)[:300]}"
    ) from failed


def _check_closed(closed: list[tuple[int, ...]], length: int, real: int) -> None:
    """Refuse an attention that closes over what has positions."""
    for shape in closed:
        raise ValueError(
            f"the attention that the model hands to kernels.attention closes over an array "
            f"{_real_shape(shape, length, real)} with positions of a row: {APART}, and "
            "Ulysses gives it whole rows. Make what it needs from q, k and v, or apply it to them "
            "before; one more array may be handed over beside them, of shape [B, S]. Parameters "
            "it may close over (docs/long_sequences.md)."
        )


def _real_shape(shape: tuple[int, ...], length: int, real: int) -> list[int]:
    return [n if n % length else n // length * real for n in shape]


def _check_apart(part: str, program: Any, length: int, real: int) -> None:
    """Refuse a program in which positions meet: traced with a length in place of the real one."""
    for shape in constants_along(program, length):
        shown = _real_shape(shape, length, real)
        raise ValueError(
            f"{part} holds an array {shown} with a number for each position: {APART}. {MEET_BY}"
        )
    for what, line in mixes(program.jaxpr, length, part == "the loss"):
        raise ValueError(f"{part} {what} positions of a row ({line}): {APART}. {MEET_BY}")


def _check_draws(program: Any, differs: list[bool], rows: OnSharedRows, length: int) -> None:
    """Refuse random numbers for positions that each device would have alike for its own.

    `differs` says which of the last inputs are others on each device that shares a row.
    """
    inputs = [False] * (len(program.jaxpr.invars) - len(differs)) + differs
    along = lambda shape: any(n and n % length == 0 for n in shape)
    for line in differing(program.jaxpr, inputs, rows.axes, along).lines:
        raise ValueError(
            f"the model draws random numbers for the positions of a row ({line}) from a key that "
            f"does not differ by position: {APART}, and would draw the same for its own. Draw by "
            "hfjax.models.parts.Dropout, or from the `key` that forward may ask for; what is to "
            "stay the same belongs into model_init, as numbers for all positions, of which the "
            f"model takes those of self.kernels.positions(length). {SWITCH}"
        )


def _check_same(
    part: str, one: Any, two: Any, lengths: tuple[int, int], numbers: bool = True
) -> None:
    """Refuse what is another program for the rows of a device than for those looked at."""
    for what, line in differences(one, two, [lengths]):
        if numbers or what == OTHER:
            raise ValueError(f"{part} {what} positions of a row ({line}): {APART}. {MEET_BY}")


def _check_parts(loss: Callable, outputs: Any, batch: Any, program: Any, length: int) -> None:
    """Refuse a loss of whole rows that is not the mean of the losses of their parts.

    It is tried on random numbers: floats of several ranges, integers among those that the loss
    itself names (-100, say), their neighbours, classes, and others.
    """
    like, draw, rows = (outputs, batch), np.random.default_rng(0), rows_of(batch)
    numbers = sum(x.size for x in jax.tree.leaves(outputs)) // (rows * length)
    half = 8 if numbers < 2**15 else 3  # positions

    def resized(x: Any) -> tuple[int, ...]:
        first, *others = x.shape or (0,)
        few = min(first, 4) if first == rows else first
        return (few, *(2 * half if n == length else n for n in others))[: x.ndim]

    def part(whole: Any, first: int) -> Any:
        at = lambda of: tuple(
            slice(first, first + half) if d and n == length else slice(None)
            for d, n in enumerate(of.shape)
        )
        return jax.tree.map(lambda x, of: x[at(of)], whole, like)

    @jax.jit
    def mean_of(*parts: Any) -> Any:
        found = [as_mean(loss(*p), rows_of(p[1])) for p in parts]
        return sum(m.total for m in found) / sum(m.weight for m in found)

    tried = 0
    for floats, integers in product(FLOATS, _integers(program, outputs)):
        made = partial(_drawn, draw, integers)
        whole = (
            jax.tree.map(lambda x: made(resized(x), x.dtype, floats), outputs),  # noqa: B023
            jax.tree.map(lambda x: made(resized(x), x.dtype, FLOATS[0]), batch),  # noqa: B023
        )
        try:
            with jax.ensure_compile_time_eval():
                one = float(mean_of(whole))
                two = float(mean_of(part(whole, 0), part(whole, half)))
        except Exception as error:  # it needs what is not there yet: a collective, other shapes
            return _warn_untried(f"{type(error).__name__}: {str(error)[:200]}")
        tried += np.isfinite(one) and np.isfinite(two)
        if abs(one - two) > 3e-5 * max(abs(one), 1e-3):
            raise ValueError(
                f"the loss of whole rows is not that of their parts together ({one:.4g} and "
                f"{two:.4g} for random outputs): {APART}. Return sums over positions: hfjax.Mean("
                "(losses * mask).sum(), mask.sum()), or the plain mean over all rows and "
                f"positions. {SWITCH}"
            )
    if not tried:
        _warn_untried("no numbers that were tried give a finite loss")
    return None


FLOATS: tuple[Callable[[Any], Any], ...] = (
    lambda u: 0.01 + 0.98 * u,  # probabilities
    lambda u: (0.2 + 1.8 * u) ** 3,
    lambda u: 4 * u - 1,
)  # of numbers from 0 to 1


def _integers(program: Any, outputs: Any) -> list[list[int]]:
    """Return lists from which integers are drawn for the trial of a loss."""
    named = {int(n) for n in numbers_in(program.jaxpr) if float(n).is_integer() and abs(n) < 2**15}
    classes = max((x.shape[-1] for x in jax.tree.leaves(outputs) if x.ndim), default=2)
    near = {m for n in named for m in (n - 1, n, n + 1)}
    alone = [[0, 1, n] for n in sorted(named)[:8]]  # beside others it may make a loss infinite
    return [*alone, [0, 1, *sorted(near)], [*range(classes)], [*range(-100, 1000)]]


def _drawn(draw: Any, integers: list[int], shape: Any, dtype: Any, floats: Callable) -> np.ndarray:
    if jnp.issubdtype(dtype, jnp.floating):
        return np.asarray(floats(draw.random(shape, np.float32))).astype(dtype)
    if jnp.issubdtype(dtype, jnp.bool_):
        return draw.random(shape) < 0.5
    return draw.choice(integers, shape).astype(dtype)


def _warn_untried(why: str) -> None:
    warnings.warn(
        f"hfjax could not try whether the loss of whole rows is that of their parts ({why}). It "
        "has to be a mean over rows and positions, or hfjax.Mean((losses * mask).sum(), "
        "mask.sum()): else it is wrong where devices share rows (docs/long_sequences.md).",
        UserWarning,
        stacklevel=2,
    )


APART = "the devices of the mesh axis context share each row, and each has only some positions"
SWITCH = "hfjax.Context(check=False) switches this check off, if you know better."
MEET_BY = (
    "Let positions meet in attention alone: attend through the step's kernels (self.kernels = "
    "hfjax.models.parts.plain; self.kernels.attention(attend)(q, k, v)), number positions by "
    "self.kernels.positions(length), and shift targets in a method prepare(batch) of the model, "
    f"which is given whole rows (docs/long_sequences.md). {SWITCH}"
)


def _with(shape: tuple[int, ...], dim: int, size: int) -> tuple[int, ...]:
    return (*shape[:dim], size, *shape[dim + 1 :])
