"""Rewords errors of JAX for a model that cannot run inside a step, to say what to do."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp

from hfjax.parallel.adapters.model_template import ModelTemplate
from hfjax.parallel.adapters.pytrees import TreeTemplate
from hfjax.parallel.engine.step_context import num_examples
from hfjax.parallel.jaxprs.model_mesh import ModelMesh
from hfjax.parallel.mesh import BATCH_AXES
from hfjax.parallel.spmd.partition_context import reuse_programs
from hfjax.sharding.layout import Layout

_BATCH_AXES = str(BATCH_AXES).replace("'", '"')
# What an error of JAX says -> what it means here.
_MEANINGS = (
    (
        r"unbound axis name:? ?(?P<name>\w*)",
        "the model or the loss names the axis {name!r}, and the mesh has none of that name. Rows "
        f"are split over {_BATCH_AXES}: name these, for instance jax.lax.pmean(x, {_BATCH_AXES}).",
    ),
    (
        r"lowering_platforms=",
        "the model computes an array's value while it is traced (jax.ensure_compile_time_eval), "
        "and places its arrays besides. Compute that value with NumPy.",
    ),
    (
        r"context mesh .* should match the aval mesh",
        "the model closes over an array that was made while a mesh was set (jax.set_mesh). Make it "
        "an array of the model, or a NumPy array.",
    ),
    (
        r"(Manual|Auto|Explicit).{0,80}(Auto|Explicit|Manual)|auto_axes|explicit_axes|reshard"
        r"|non-empty mesh|mesh context|set a mesh",
        "the model places its arrays (out_sharding=, jax.sharding.reshard, auto_axes, "
        "jax.shard_map) in a way that cannot run inside a step: there the layout places them, and "
        "axes of the model's mesh have size 1 (docs/any_model.md). Take it out of the model.",
    ),
)
_BY_KEY = r"indices must be integers or slices, not str|string indexing|__contains__.*'str'"
# Python says of a list that its "indices must be integers or slices, not str": no look-up of JAX.
_NOT_INTEGER = r"(Indexer|indices|Input type) must (have|be) (an |of )?integer(?!s\b)"
# NumPy takes a dictionary for the fields of a dtype, and says that its entries are none.
_NO_ARRAY = r"\bdict\b|entry not a 2- or 3- tuple"
_MISSING_ARGUMENTS = re.compile(r"__call__\(\) missing \d+ required positional")


@contextmanager
def explain_errors(
    layout: Layout, batch: Any, model_mesh: ModelMesh | None = None
) -> Iterator[None]:
    """Run what calls a model and a loss, and explain the errors that are known."""
    try:
        with layout.template.call_context(model_mesh), reuse_programs():
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
        explain = _explain_batch if _is_from_model(error) else _explain_call
        meaning = explain(error, layout, batch) or _explain_jax(error, layout.template, batch)
        if meaning is None:
            raise
        raise ValueError(meaning) from error


def _explain_batch(error: Exception, layout: Layout, batch: Any) -> str | None:
    """Return what an error says about a batch that the model or the loss reads in another way."""
    text, keys = str(error), list(batch) if isinstance(batch, Mapping) else None
    if isinstance(error, KeyError):
        return None if keys is None else _explain_key(error, keys)
    if keys is not None and re.search(_BY_KEY, text):
        return (
            f"what is read by key is no dictionary, and the batch is one, of "
            f"{', '.join(map(str, keys))}. A loss is called as loss(outputs, batch), forward= as "
            f"forward(model, batch): are the two swapped? Python says: {text[:300]}"
        )
    if re.search(_BY_KEY, text):
        kind = "an array" if hasattr(batch, "shape") else f"a {type(batch).__name__}"
        return (
            f"the model or the loss reads the batch by key, and this batch is {kind}. Give a "
            'dictionary, {"tokens": …}, or say what the model is given: hfjax.layout(…, '
            "forward=lambda model, batch: …)."
        )
    if re.search(_NOT_INTEGER, text) and (names := _float_arrays(batch)):
        return (
            "an embedding (or another look-up) is given floating-point numbers where whole ones "
            f"are expected. Of this batch are no whole numbers: {', '.join(names)}. Make tokens "
            "integers: x.astype(np.int32)."
        )
    if isinstance(layout.template.graphs["train"], TreeTemplate):
        return None  # the loss is given another tree, perhaps a dictionary too
    return (
        _explain_whole_batch(error, layout, batch) if keys and re.search(_NO_ARRAY, text) else None
    )


def _explain_call(error: Exception, layout: Layout, batch: Any) -> str | None:
    """Return what an error says about a model that takes more than the batch."""
    is_called_directly = layout.forward is None and not layout.template.is_layer_stack
    has_several = is_called_directly and isinstance(batch, Mapping | tuple | list)
    return (
        _explain_whole_batch(error, layout, batch)
        if has_several and _MISSING_ARGUMENTS.search(str(error))
        else None
    )


def _explain_key(error: KeyError, keys: list) -> str | None:
    key = error.args[0] if error.args else None
    if key in keys:
        return None
    return (
        f"the model or the loss asks for {key!r}, which this batch does not have. It has: "
        f"{', '.join(map(str, keys))}."
    )


def _explain_whole_batch(error: Exception, layout: Layout, batch: Any) -> str:
    """Return what to do where a whole batch is passed to what takes an array of it."""
    keys = list(batch) if isinstance(batch, Mapping) else None
    item = "batch[0]" if keys is None else 'batch["…"]'
    choices = f" with one of {', '.join(map(str, keys))}" if keys else ""
    batch_text = (
        f"a dictionary of {', '.join(map(str, keys))}" if keys else f"a {type(batch).__name__}"
    )
    advice = f"Take an array of it: {item}{choices}."
    if layout.forward is None and not layout.template.is_layer_stack:
        advice = (
            "Without forward= a model is called with the batch alone. Say what it is given: "
            f"hfjax.layout(…, forward=lambda model, batch: model({item})){choices}."
        )
    return (
        f"the model or the loss is given the whole batch, {batch_text}, and takes arrays of it. "
        f"{advice} Python says: {str(error)[:300]}"
    )


def _float_arrays(batch: Any) -> list[str]:
    """Return the names and dtypes of a batch's floating-point arrays."""
    leaves = jax.tree_util.tree_flatten_with_path(batch)[0]
    name_of = lambda keys: (
        jax.tree_util.keystr(keys, simple=True, separator="/") or "the batch itself"
    )
    is_float = lambda x: jnp.issubdtype(x.dtype, jnp.floating)
    return [f"{name_of(keys)} ({x.dtype})" for keys, x in leaves if is_float(x)]


def _explain_jax(error: Exception, template: ModelTemplate, batch: Any) -> str | None:
    """Return what an error of JAX means inside a step."""
    text = str(error)
    for pattern, meaning in _MEANINGS:
        if match := re.search(pattern, text):
            return f"{meaning.format(**match.groupdict())} JAX says: {text[:300]}"
    unexplained = "incompatible shapes" in text and "JAX says" not in text
    if unexplained and (shapes := _batch_sized_variables(template, batch)):
        path, shape = next(iter(shapes.items()))
        return (
            f"{path} {shape} has as many examples as the whole batch, and each device has some of "
            'them. Let them be split as the batch is: nnx.Variable(x, axes=("batch", '
            f"{', '.join(['None'] * (len(shape) - 1))})). JAX says: {text[:300]}"
        )
    return None


def _is_from_model(error: Exception) -> bool:
    """Return whether an error was raised by a model or a loss, and not by what calls them."""
    name = raising_module(error)
    return not name.startswith("hfjax.") or name.startswith("hfjax.models")


def _batch_sized_variables(template: ModelTemplate, batch: Any) -> dict[str, tuple[int, ...]]:
    """Return shapes of variables with an entry per example that are not sharded with the batch."""
    batch_size = num_examples(batch)
    variables = {path: x for path, x in template.variables.items() if not template.is_batched(path)}
    return {path: tuple(x.shape) for path, x in variables.items() if x.shape[:1] == (batch_size,)}


def raising_module(error: Exception) -> str:
    """Return the name of the module whose line raised an error.

    >>> try:
    ...     int("a")
    ... except ValueError as error:
    ...     raising_module(error).startswith("jax")
    False
    """
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    return "" if traceback is None else str(traceback.tb_frame.f_globals.get("__name__", ""))
