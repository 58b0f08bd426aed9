"""What a model does with parts on a grid, found by tracing it with a stand-in for the grid.

On a grid each device has a part of the residual stream's width and positions, and inside of
attention and MLP a part of the rows, of the heads and of the width. That is right if these entries
meet only in what goes through the step's `kernels`. So what contracts, sums or counts along such a
dimension is refused, with its line; and so is what is another program, or computes with other
numbers, when a part is longer.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Any, NoReturn

import jax
import jax.numpy as jnp

from hfjax.base.errors import module_of
from hfjax.base.paths import Flat
from hfjax.checks.grid_stand_in import BUILD, POSITIONS, ROWS, GridParts, LookAtGrid
from hfjax.checks.look import outputs_of_a_look
from hfjax.parallel.autodiff.kept_apart import constants_along, differences, mixes
from hfjax.parallel.autodiff.varying_state import differing
from hfjax.parallel.engine.blueprint import raw
from hfjax.parallel.engine.keys import differs_by_part
from hfjax.parallel.engine.step_context import StepContext
from hfjax.parallel.mesh import COLUMN_AXIS, ROW_AXIS
from hfjax.parallel.wings.grid.on_grid import OnGrid

LIBRARIES = ("jax", "jaxlib", "numpy", "opt_einsum", "flax")
WHOLE_ON_A_GRID = "on a grid each device has only a part, and this needs the whole"


def look_at_grid(
    grid: OnGrid, context: StepContext, variables: Flat, batch: Any, mode: str
) -> OnGrid:
    """Return the grid, told which outputs are parts; refuse a model that computes something else.

    Args:
        grid: What modules are handed.
        context: What is known of the step.
        variables: Those of the model, also those that hold random keys.
        batch: With the rows of this device.
        mode: "train", "eval" or "predict": then outputs may be parts, which are joined.
    """
    joins, mode = mode == "predict", "train" if mode == "train" else "eval"
    parts = _parts(context, grid, batch)
    stand_in = LookAtGrid(grid.step, grid, parts, tries=True)
    look = partial(_traced, context, variables, batch, mode)
    program, outputs = look(stand_in)
    found = [_parts_of(x, stand_in) for x in jax.tree.leaves(outputs)] if joins else []
    if not joins:
        _check_whole(outputs, parts)
    stream = stand_in.stream
    probe = (stream.rows, parts.size(POSITIONS, stream.length), stream.width)
    gradient, _ = look(LookAtGrid(grid.step, grid, parts), probe)
    for name, prime in parts.times.items():
        outer = name in parts.shortest
        for what, line in _meetings(program, int(prime), outer):
            _refuse(name, what, line)
        for what, line in mixes(gradient.jaxpr, int(prime), in_loss=False, outer=outer):
            if "scatter" not in what:  # what is picked from along another dimension
                _refuse(name, f"in a gradient {what}", line)
    _check_same(look, stand_in, program)
    _check_draws(context, program, variables, batch, mode, parts)
    return replace(grid, parts=tuple(found))


def _check_same(look: Callable, stand_in: LookAtGrid, program: Any) -> None:
    """Refuse a model that is another program on one device, or on parts as long as they are."""
    grid, parts = stand_in.grid, stand_in.parts

    def difference(times: Mapping[str, Fraction]) -> tuple[str, str] | None:
        longer = replace(parts, times={**parts.times, **times})
        other, _ = look(LookAtGrid(grid.step, grid, longer))
        pairs = [(parts.times[name], n) for name, n in times.items()]
        return next(differences(program, other, pairs), None)

    for whole in (True, False):
        real = parts.real(grid, stand_in.stream.rows, stand_in.stream.length, whole)
        if found := difference(real):
            alone = ((name, difference({name: n})) for name, n in real.items())
            apart = ((name, one) for name, one in alone if one)
            name, found = next(apart, (next(iter(real)), found))
            _refuse(name, *found)


def _refuse(name: str, what: str, line: str) -> NoReturn:
    where = name if " " in name else f"entries of {name}"
    raise ValueError(f"the model {what} {where} ({line}): {WHOLE_ON_A_GRID}. {BUILD}")


def _parts(context: StepContext, grid: OnGrid, batch: Any) -> GridParts:
    dims = [pair for p in context.placed.values() for pair in zip(p.axes, p.shape, strict=True)]
    held = [raw(x) for x in context.blueprint.variables.values()]
    sizes = [n for x in (*held, *jax.tree.leaves(batch)) for n in x.shape]
    return GridParts.of(grid, dims, sizes)


def _traced(
    context: StepContext,
    variables: Flat,
    batch: Any,
    mode: str,
    stand_in: LookAtGrid,
    probe: tuple[int, ...] = (),
) -> tuple[Any, Any]:
    """Return the program of the model with a stand-in for the grid, and its outputs.

    With the shape of a probe: the program of the gradient of what is added to each lookup, so that
    rules of derivatives are seen too. (Gradients of parameters are sums over rows and positions.)
    """
    parts = stand_in.parts
    context = replace(context, blueprint=context.blueprint.equipped(stand_in))
    compute = lambda x: context.execution.precision.of(x.dtype)[0]
    parameters = {
        path: jax.ShapeDtypeStruct(tuple(map(parts.size, p.axes, p.shape)), compute(p))
        for path, p in context.placed.items()
    }
    run = partial(outputs_of_a_look, context, mode)

    def gradient(*given: Any) -> Any:
        def of_probe(x: jax.Array) -> list[jax.Array]:
            stand_in.stream.probe = x
            made = jax.tree.leaves(run(*given))
            return [y for y in made if jnp.issubdtype(y.dtype, jnp.inexact)]

        made, pull = jax.vjp(of_probe, jnp.zeros(probe))
        return pull([jnp.ones_like(y) for y in made])

    program = jax.make_jaxpr(gradient if probe else run, return_shape=True)
    try:
        return program(parameters, variables, batch)
    except (AssertionError, TypeError, ValueError) as error:
        if module_of(error).split(".")[0] not in LIBRARIES:
            raise
        raise ValueError(
            "the model computes with arrays that are no parts of the residual stream, or of what "
            "is inside of attention and MLP (an array whose dimension has no name, a size of one "
            "device, a linear map that is not given what it leads from): "
            f"{WHOLE_ON_A_GRID}. {BUILD} "
            f"JAX says (of parts that are {', '.join(map(str, parts.times.values()))} "
            f"times as long): {str(error)[:300]}"
        ) from error


def _meetings(program: Any, prime: int, outer: bool) -> Iterator[tuple[str, str]]:
    """Yield (what, where) for what does not keep apart the entries along dimensions so long."""
    yield from mixes(program.jaxpr, prime, in_loss=False, outer=outer)
    for shape in constants_along(program, prime):
        yield "holds an array with a number for each of the", f"of {len(shape)} dimensions"


def _check_whole(outputs: Any, parts: GridParts) -> None:
    """Refuse outputs that are parts: of such a loss knows nothing."""
    for x in jax.tree.leaves(outputs):
        for name, prime in parts.times.items():
            if any(n and n % prime == 0 for n in x.shape):
                _refuse(name, "returns, in place of self.kernels.outputs(…),", "its head")


def _parts_of(x: Any, stand_in: LookAtGrid) -> dict[int, str]:
    """Return along which axis of the grid devices have parts of which dimension of an output."""
    grid, parts, found = stand_in.grid, stand_in.parts, dict[int, str]()
    axes = {POSITIONS: COLUMN_AXIS, ROWS: ROW_AXIS} | {n: grid.splits[n][0] for n in parts.shortest}
    plain = {
        POSITIONS: parts.size(POSITIONS, stand_in.stream.length),
        ROWS: parts.size(ROWS, stand_in.stream.rows),
    }
    for dim, size in enumerate(x.shape):
        names = [name for name, prime in parts.times.items() if size and size % prime == 0]
        if len(names) > 1 or any(size != plain.get(name, size) for name in names):
            raise ValueError(
                f"an output joins {' and '.join(names)} with something else in dimension {dim} of "
                f"{x.ndim}: {WHOLE_ON_A_GRID}. Return dimensions as they are: [B, S, …]."
            )
        if names:
            found[dim] = axes[names[0]]
    return found


def _check_draws(
    context: StepContext, program: Any, variables: Flat, batch: Any, mode: str, parts: GridParts
) -> None:
    """Refuse random numbers that all devices of a grid would draw alike for their own parts."""
    held = context.blueprint.variables
    own = {path: differs_by_part(held[path], mode == "train") for path in variables}
    same = jax.tree.leaves((own, jax.tree.map(lambda _: False, batch)))
    inputs = [False] * (len(program.jaxpr.invars) - len(same)) + same
    along = lambda shape: any(n and n % prime == 0 for n in shape for prime in parts.times.values())
    for line in differing(program.jaxpr, inputs, (), along).lines:
        raise ValueError(
            f"the model draws random numbers for a part of an array ({line}) from a key that is "
            "the same on all devices of a grid: they would draw the same for their own parts. "
            "Draw by hfjax.models.parts.Dropout, in the residual stream, or from the `key` that "
            "forward may ask for."
        )
