"""What JAX says of a model that cannot run inside a step, in words that tell what to do."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from hfjax.parallel.engine.blueprint import Blueprint
from hfjax.parallel.engine.step_context import rows_of
from hfjax.parallel.mesh import BATCH_AXES

_ROWS = str(BATCH_AXES).replace("'", '"')
# What an error of JAX says -> what it means here.
_MEANINGS = (
    (
        r"unbound axis name:? ?(?P<name>\w*)",
        "the model or the loss names the axis {name!r}, and the mesh has none of that name. Rows "
        f"are split over {_ROWS}: name these, for instance jax.lax.pmean(x, {_ROWS}).",
    ),
    (
        r"(Manual|Auto|Explicit).{0,80}(Auto|Explicit|Manual)|auto_axes|explicit_axes|reshard"
        r"|non-empty mesh|mesh context",
        "the model places its arrays on a mesh of its own (out_sharding=, jax.sharding.reshard, "
        "auto_axes, jax.shard_map), and inside a step the layout does that. Leave it out of the "
        "model: names of axes in parameters' metadata are read (docs/any_model.md).",
    ),
)


@contextmanager
def calling(blueprint: Blueprint, batch: Any) -> Iterator[None]:
    """Run what calls a model and a loss: what is known of their errors is told in words."""
    try:
        with blueprint.around():
            yield
    except KeyError as error:
        asked = error.args[0] if error.args else None
        if isinstance(batch, Mapping) and asked not in batch and _of_a_model(error):
            raise ValueError(
                f"the model or the loss asks for {error.args[0]!r}, which this batch does not "
                f"have. It has: {', '.join(map(str, batch))}."
            ) from error
        raise
    # For one and the same mistake each version of JAX raises another of these kinds. An error is
    # replaced only where its text is known below; any other is raised again as it was.
    except (NameError, ValueError, TypeError, AssertionError, NotImplementedError) as error:
        for pattern, meaning in _MEANINGS:
            if found := re.search(pattern, str(error)):
                raise ValueError(
                    f"{meaning.format(**found.groupdict())} JAX says: {str(error)[:300]}"
                ) from error
        if "incompatible shapes" in str(error) and (rows := _as_many_rows(blueprint, batch)):
            path, shape = next(iter(rows.items()))
            raise ValueError(
                f"{path} {shape} has as many rows as the whole batch, and each device has some of "
                'them. Let them be split as the batch is: nnx.Variable(x, axes=("batch", '
                f"{', '.join(['None'] * (len(shape) - 1))})). JAX says: {str(error)[:300]}"
            ) from error
        raise


def _of_a_model(error: Exception) -> bool:
    """Return whether an error was raised by a model or a loss, and not by what calls them."""
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    name = "" if at is None else str(at.tb_frame.f_globals.get("__name__", ""))
    return not name.startswith("hfjax.") or name.startswith("hfjax.models")


def _as_many_rows(blueprint: Blueprint, batch: Any) -> dict[str, tuple[int, ...]]:
    """Return shapes of variables with a row for each of the whole batch that are not split so."""
    rows = rows_of(batch)
    known = {path: x for path, x in blueprint.variables.items() if not blueprint.of_rows(path)}
    return {path: tuple(x.shape) for path, x in known.items() if x.shape[:1] == (rows,)}
