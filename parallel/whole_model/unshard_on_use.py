"""A model's own program, in which each parameter is gathered where it is first used.

A model that is called as it is (not in three parts) is traced as one device would run it: its
parameters and its rows are whole arrays, and whatever it does with them is right. It may
differentiate with respect to parameters, add up their squares, scan over them. Then its program is
run equation by equation, on the rows of this device (parallel/in_parts). A parameter is gathered,
once, by the first equation that uses it; inside of a scan or of a rematerialised function it is
gathered there, again for each layer and each pass. (A model in three parts is gathered layer by
layer: layer_stack/run_layers.py.)
"""

import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import jax

from hfjax.parallel.engine.unshard import Stored
from hfjax.parallel.mesh import EXPERT_AXES
from hfjax.parallel.spmd.interpreter import run, scope_of, whole_shapes
from hfjax.parallel.spmd.partition_context import Join, Scope, is_recording, traced_whole
from hfjax.parallel.spmd.placements import Later, Side, is_value
from hfjax.parallel.spmd.rule_calls import NamedCall, named

ALONE = Side((), 1)


def gather_on_use(
    function: Callable,
    parameters: Mapping[str, Stored],
    *arguments: Any,
    side: Side = ALONE,
    told: list[Join] | None = None,
) -> Any:
    """Return `function({path: whole parameter}, *arguments)`, given stored parameters.

    Args:
        function: Of trees of whole arrays.
        parameters: As this device stores them.
        arguments: Trees of arrays, and of `Part`s where this device has some of the rows.
        side: The devices that have the others.
        told: Is given what joins rows.

    Returns:
        A tree of arrays, which all devices have whole, of `Part` and of `Sum`.
    """
    whole = {path: stored.full_shape for path, stored in parameters.items()}
    with _alone():
        shapes = whole_shapes(side, arguments)
        traced, result = traced_whole(side, function, whole, *shapes)
    pending = {path: _Parameter(stored) for path, stored in parameters.items()}
    values = jax.tree.leaves((pending, arguments), is_leaf=is_value)
    given = {"later": _Parameter, "watch": _tell_split}
    scope = scope_of(side, [] if told is None else told, values, **given)
    found = run(scope, traced.jaxpr, traced.consts, values)
    return jax.tree.unflatten(jax.tree.structure(result), list(map(scope.settled, found)))


def _alone() -> Any:
    """Return the context in which a model sees no mesh, unless the partitioner has part of it.

    Collectives over named axes work all the same, and the kind of device stays known.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if set(getattr(mesh, "manual_axes", ())) != set(mesh.axis_names):
        return nullcontext()
    device = getattr(mesh, "abstract_device", None)
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device))


class _Parameter(Later):
    """A parameter that is gathered when an equation uses it, once."""

    def __init__(self, stored: Stored) -> None:
        self.stored, self._whole = stored, None

    def whole(self) -> jax.Array:
        """Return the whole parameter."""
        if self._whole is None:
            self._whole = self.stored.fetch()
        return self._whole

    @property
    def slices(self) -> bool:
        """Whether its first dimension is whole on this device, so that a scan may slice it."""
        move, ndim = self.stored.movement, self.stored.value.ndim
        return all(leg.dim != -ndim for leg in (*move.gathers, *move.scatters))


def _tell_split(scanned: Iterable[Any]) -> None:
    """Warn of stacks that have to be whole in a scan, since the layers themselves are split.

    A stack of experts is none of layers.
    """
    of_experts = lambda move: any(set(leg.axes) & set(EXPERT_AXES) for leg in move.gathers)
    moves = [p.stored.movement for p in scanned if not p.slices]
    split = [move for move in moves if not of_experts(move)]
    if split:
        rest = lambda move: ", ".join(["None"] * (len(move.shape) - 1))
        names = ", ".join(f'"{move.path}": ("layers", {rest(move)})' for move in split)
        warnings.warn(
            f"{len(split)} stacked parameters are split along the dimension over which the model "
            "scans, so all layers are gathered before the scan. To gather them one by one, name "
            f"that dimension: hfjax.layout(…, axes={{{names}}}).",
            UserWarning,
            stacklevel=2,
        )


# -- calls that are wrapped when the program runs -----------------------------------------------


def wrapping(wrap: Callable, function: Callable) -> Callable:
    """Return `wrap(function)`, of a function of trees of arrays.

    In a model that is being traced it is wrapped only when the program runs: it is then given
    stored parameters, and gathers them when and as often as it wants.
    """
    return named(partial(_wrapped, wrap), function) if is_recording() else wrap(function)


def _wrapped(wrap: Callable, call: NamedCall, scope: Scope, body: Any, arguments: Any) -> Any:
    """Return what a wrapped call returns: the rule of `wrapping`."""
    is_stored = lambda x: isinstance(x, Stored) or is_value(x)

    def function(*arguments: Any) -> Any:
        inner = scope.inside()
        leaves = jax.tree.leaves(arguments, is_leaf=is_stored)
        here = [_Parameter(x) if isinstance(x, Stored) else x for x in leaves]
        found = inner.run(inner, *body, here)
        return call.results.unflatten(list(map(inner.settled, found)))

    leaves, form = jax.tree.flatten(arguments, is_leaf=is_value)
    stored = [v.stored if isinstance(v, _Parameter) else scope.settled(v) for v in leaves]
    return wrapping(wrap, function)(*form.unflatten(stored))  # again, if another program is traced
