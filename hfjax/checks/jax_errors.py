"""What JAX says of a model that cannot run inside a step, in words that tell what to do."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp

from hfjax.parallel.adapters.model_template import Blueprint
from hfjax.parallel.adapters.pytrees import Tree
from hfjax.parallel.engine.step_context import rows_of
from hfjax.parallel.mesh import BATCH_AXES
from hfjax.sharding.layout import Layout

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
_BY_KEY = r"indices must be integers or slices, not str|string indexing|__contains__.*'str'"
# Python says of a list that its "indices must be integers or slices, not str": no look-up of JAX.
_NOT_WHOLE = r"(Indexer|indices|Input type) must (have|be) (an |of )?integer(?!s\b)"
# NumPy takes a dictionary for the fields of a dtype, and says that its entries are none.
_NO_ARRAY = r"\bdict\b|entry not a 2- or 3- tuple"
_MORE = re.compile(r"__call__\(\) missing \d+ required positional")


@contextmanager
def calling(layout: Layout, batch: Any) -> Iterator[None]:
    """Run what calls a model and a loss: what is known of their errors is told in words."""
    try:
        with layout.blueprint.around():
            yield
    # These kinds are caught, not raised: for one and the same mistake, versions of JAX and flax
    # raise different ones (NotImplementedError among them). An error is replaced only where its
    # text is known below; any other is raised again as it was.
    except (
        KeyError,
        NameError,
        AttributeError,
        AssertionError,
        NotImplementedError,
        TypeError,
        ValueError,
    ) as error:
        told = _of_batch if _of_a_model(error) else _of_call
        meaning = told(error, layout, batch) or _of_jax(error, layout.blueprint, batch)
        if meaning is None:
            raise
        raise ValueError(meaning) from error


def _of_batch(error: Exception, layout: Layout, batch: Any) -> str | None:
    """Return what an error says of a batch that the model or the loss reads in another way."""
    said, keys = str(error), list(batch) if isinstance(batch, Mapping) else None
    if isinstance(error, KeyError):
        return None if keys is None else _of_key(error, keys)
    if keys is not None and re.search(_BY_KEY, said):
        return (
            f"what is read by key is no dictionary, and the batch is one, of "
            f"{', '.join(map(str, keys))}. A loss is called as loss(outputs, batch), forward= as "
            f"forward(model, batch): are the two swapped? Python says: {said[:300]}"
        )
    if re.search(_BY_KEY, said):
        kind = "an array" if hasattr(batch, "shape") else f"a {type(batch).__name__}"
        return (
            f"the model or the loss reads the batch by key, and this batch is {kind}. Give a "
            'dictionary, {"tokens": …}, or say what the model is given: hfjax.layout(…, '
            "forward=lambda model, batch: …)."
        )
    if re.search(_NOT_WHOLE, said) and (found := _not_whole(batch)):
        return (
            "an embedding (or another look-up) is given floating-point numbers where whole ones "
            f"are expected. Of this batch are no whole numbers: {', '.join(found)}. Make tokens "
            "integers: x.astype(np.int32)."
        )
    if isinstance(layout.blueprint.graphs["train"], Tree):
        return None  # the loss is given another tree, perhaps a dictionary too
    return _of_whole(error, layout, batch) if keys and re.search(_NO_ARRAY, said) else None


def _of_call(error: Exception, layout: Layout, batch: Any) -> str | None:
    """Return what an error says of a model that takes more than the batch."""
    as_it_is = layout.forward is None and not layout.blueprint.three_parts
    several = as_it_is and isinstance(batch, Mapping | tuple | list)
    return _of_whole(error, layout, batch) if several and _MORE.search(str(error)) else None


def _of_key(error: KeyError, keys: list) -> str | None:
    asked = error.args[0] if error.args else None
    if asked in keys:
        return None
    return (
        f"the model or the loss asks for {asked!r}, which this batch does not have. It has: "
        f"{', '.join(map(str, keys))}."
    )


def _of_whole(error: Exception, layout: Layout, batch: Any) -> str:
    """Return what to do where a whole batch goes to what takes an array of it."""
    keys = list(batch) if isinstance(batch, Mapping) else None
    one = "batch[0]" if keys is None else 'batch["…"]'
    which = f" with one of {', '.join(map(str, keys))}" if keys else ""
    given = f"a dictionary of {', '.join(map(str, keys))}" if keys else f"a {type(batch).__name__}"
    how = f"Take an array of it: {one}{which}."
    if layout.forward is None and not layout.blueprint.three_parts:
        how = (
            "Without forward= a model is called with the batch alone. Say what it is given: "
            f"hfjax.layout(…, forward=lambda model, batch: model({one})){which}."
        )
    return (
        f"the model or the loss is given the whole batch, {given}, and takes arrays of it. {how} "
        f"Python says: {str(error)[:300]}"
    )


def _not_whole(batch: Any) -> list[str]:
    """Return the names and dtypes of a batch's floating-point arrays."""
    named = jax.tree_util.tree_flatten_with_path(batch)[0]
    name = lambda keys: jax.tree_util.keystr(keys, simple=True, separator="/") or "the batch itself"
    floating = lambda x: jnp.issubdtype(x.dtype, jnp.floating)
    return [f"{name(keys)} ({x.dtype})" for keys, x in named if floating(x)]


def _of_jax(error: Exception, blueprint: Blueprint, batch: Any) -> str | None:
    """Return what an error of JAX means inside a step."""
    said = str(error)
    for pattern, meaning in _MEANINGS:
        if found := re.search(pattern, said):
            return f"{meaning.format(**found.groupdict())} JAX says: {said[:300]}"
    unexplained = "incompatible shapes" in said and "JAX says" not in said
    if unexplained and (rows := _as_many_rows(blueprint, batch)):
        path, shape = next(iter(rows.items()))
        return (
            f"{path} {shape} has as many rows as the whole batch, and each device has some of "
            'them. Let them be split as the batch is: nnx.Variable(x, axes=("batch", '
            f"{', '.join(['None'] * (len(shape) - 1))})). JAX says: {said[:300]}"
        )
    return None


def _of_a_model(error: Exception) -> bool:
    """Return whether an error was raised by a model or a loss, and not by what calls them."""
    name = module_of(error)
    return not name.startswith("hfjax.") or name.startswith("hfjax.models")


def _as_many_rows(blueprint: Blueprint, batch: Any) -> dict[str, tuple[int, ...]]:
    """Return shapes of variables with a row for each of the whole batch that are not split so."""
    rows = rows_of(batch)
    known = {path: x for path, x in blueprint.variables.items() if not blueprint.of_rows(path)}
    return {path: tuple(x.shape) for path, x in known.items() if x.shape[:1] == (rows,)}


def module_of(error: Exception) -> str:
    """Return the name of the module whose line raised an error.

    >>> try:
    ...     int("a")
    ... except ValueError as error:
    ...     module_of(error).startswith("jax")
    False
    """
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    return "" if at is None else str(at.tb_frame.f_globals.get("__name__", ""))
