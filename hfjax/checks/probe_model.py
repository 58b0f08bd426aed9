"""What is looked for in a model before it is run: `look`.

Along rows that devices share: which attentions it asks for, and so their form.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax

from hfjax.checks.probe import looked, traced_look
from hfjax.checks.probe_ops import AlongRows
from hfjax.checks.upcasts import check_products
from hfjax.parallel.adapters.model_template import Blueprint
from hfjax.parallel.engine.gradient_engine import Plane
from hfjax.parallel.engine.model_ops import Local
from hfjax.parallel.engine.step_context import StepContext
from hfjax.parallel.extensions.context_parallel.comm_kinds import ContextChoice, choose
from hfjax.parallel.extensions.context_parallel.ops import FoundAlongRows, OnSharedRows, dims_of
from hfjax.parallel.precision.by_path import PrecisionByPath
from hfjax.parallel.spmd.placements import Side
from hfjax.utils.paths import Flat


def look_along_rows(
    rows: OnSharedRows, context: StepContext, variables: Flat, batch: Any, mode: str
) -> OnSharedRows:
    """Return what modules are handed, told which attentions the model asks for.

    Args:
        rows: What modules are handed.
        context: What is known of the step.
        variables: Those of the model, also those that hold random keys.
        batch: With the rows of this device.
        mode: "train" or "eval"; "predict" is "eval" here.
    """
    noted, dims = noted_along_rows(rows, context, variables, batch, mode)
    choice = choose(rows.settings, rows.devices, noted.calls, rows.no_ring)
    choice.deal.check(noted.length, "a batch")
    return replace(rows, seen=FoundAlongRows(choice, noted.length, dims))


def noted_along_rows(
    rows: OnSharedRows, context: StepContext, variables: Flat, batch: Any, mode: str
) -> tuple[AlongRows, Any]:
    """Return what a model asks for, and which dimension of each array of a batch is the sequence.

    The arguments are those of `look_along_rows`.
    """
    whole = context.blueprint.prepared(batch)
    dims = dims_of(whole, rows.settings.sequence)
    length = _length(whole, dims)
    noted = AlongRows(rows.step, rows, length, context.side.size)
    seen, side = replace(context, blueprint=context.blueprint.equipped(noted)), context.side
    others = Side((*side.axes, *rows.axes), side.size * rows.devices)
    traced_look(seen, variables, whole, mode, others, noted.counted)
    return noted, dims


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


def choice_along_rows(kernels: Local) -> ContextChoice | None:
    """Return how devices that share rows work together; None: none do, or no look has told."""
    seen = kernels.seen if isinstance(kernels, OnSharedRows) else None
    return seen and seen.choice


def look(
    plane: Plane, blueprint: Blueprint, variables: Flat, batch: Any, mode: str
) -> Local | None:
    """Look at a model: return what its modules are handed then; None: what they were.

    `blueprint` is the model as it was given, whose modules are handed nothing.
    """
    context, kernels = plane.context, plane.context.traced.kernels
    if isinstance(precision := context.execution.precision, PrecisionByPath):
        looked(context, variables, batch, mode, partial(check_products, precision, blueprint))
    see = partial(look_along_rows, kernels) if isinstance(kernels, OnSharedRows) else None
    return see and looked(context, variables, batch, mode, see)
