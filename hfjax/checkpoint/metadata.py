"""The record beside the arrays of a step: versions, origin, config, position in the data."""

import json
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from hfjax.checkpoint.arrays import KEY
from hfjax.checkpoint.directory import is_hfjax_step
from hfjax.parallel.mesh import describe_mesh
from hfjax.sharding.layout import Layout
from hfjax.utils.read_files import (
    ANYTHING,
    TEXT,
    check_fields,
    integer,
    is_number,
    object_of,
    parse_json,
    read_text,
)
from hfjax.utils.tables import quote

FORMAT = 1
FILE = "meta/metadata"


def _is_dtype_and_shape(json_value: object) -> bool:
    """Return whether something is [dtype, shape]."""
    if not isinstance(json_value, list) or list(map(type, json_value)) != [str, list]:
        return False
    dtype, shape = json_value
    try:
        known = dtype.startswith(KEY) or jnp.dtype(dtype)
    except TypeError:
        return False
    return bool(known) and all(type(n) is int and n >= 0 for n in shape)


CHECKS = {
    "versions": object_of("texts", TEXT[1]),
    "strategy": TEXT,
    "mesh": TEXT,
    "processes": integer(1),
    "arrays": object_of("[dtype, shape]", _is_dtype_and_shape),
    "config": ANYTHING,
    "data": ANYTHING,
    "metrics": object_of("numbers", is_number),
}
PACKAGES = ("hfjax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that wrote a step."""
    return {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def make_record(
    layout: Layout, step: int, arrays: Mapping, config: Any, data: Any, metrics: Mapping
) -> dict:
    """Return the record to write beside the arrays, which are given as {path: [dtype, shape]}."""
    return {
        "format": FORMAT,
        "step": step,
        "versions": versions(),
        "strategy": layout.strategy.name,
        "mesh": describe_mesh(layout.mesh),
        "processes": jax.process_count(),
        "arrays": dict(arrays),
        "config": check_json("config", config),
        "data": check_json("data", data),
        "metrics": {name: float(value) for name, value in metrics.items()},
    }


def check_json(name: str, value: Any) -> Any:
    """Return a value that JSON preserves; refuse any other."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{name} is written as JSON, which {error}. Give it dicts, lists, strings, numbers, "
            "True, False and None."
        ) from error
    if (difference := _find_difference(value, json.loads(text), name)) is not None:
        path, original, back = difference
        raise ValueError(
            f"{path}: {original!r} would come back from JSON as {back!r}. Use lists for tuples and "
            "strings for the keys of dicts."
        )
    return value


def _find_difference(value: Any, back: Any, name: str) -> tuple[str, Any, Any] | None:
    """Return the first place where JSON gives back another type."""
    if isinstance(value, Mapping) and isinstance(back, dict):
        if sorted(map(repr, value)) != sorted(map(repr, back)):
            return name, value, back
        pairs = [(f"{name}[{key!r}]", value[key], back[key]) for key in back]
    elif isinstance(value, list):
        pairs = [(f"{name}[{i}]", *both) for i, both in enumerate(zip(value, back, strict=True))]
    else:
        return None if isinstance(value, type(back)) else (name, value, back)
    return next(
        (
            difference
            for pair in pairs
            if (difference := _find_difference(pair[1], pair[2], pair[0]))
        ),
        None,
    )


def read_record(step: Path) -> dict:
    """Return the record beside the arrays of a step."""
    try:
        meta = parse_json(read_text(step / FILE))
        if check_fields(meta, {"format": integer(1)})["format"] <= FORMAT:
            check_fields(
                {"step": 0, **meta}, CHECKS | {"step": integer(0)}
            )  # older records have none
    except OSError as error:
        raise ValueError(f"step {step.name}: {quote(step / FILE)}: {error.strerror}.") from error
    except ValueError as error:
        why = str(error).rstrip(".")
        raise ValueError(
            f"step {step.name}: {quote(step / FILE)} does not parse: {why}."
        ) from error
    check_format(step, meta["format"])
    _check_number(step, meta)
    return meta


def _check_number(step: Path, meta: dict) -> None:
    """Refuse a folder that is named after another step than the one in it."""
    if str(number := meta.get("step", step.name)) == step.name:
        return
    is_taken = (step.parent / str(number)).exists()
    target, source = quote(step.parent / str(number)), quote(step)
    first = f"mv {target} {target}.other && " if is_taken else ""
    raise ValueError(
        f"step {step.name} of {quote(step.parent)} is step {number}: its folder was renamed. Give "
        f"it its name again: {first}mv {source} {target}"
    )


def check_is_ours(step: Path) -> None:
    """Refuse a directory that hfjax has not written."""
    if not is_hfjax_step(step):
        names = ", ".join(sorted(quote(path.name) for path in step.iterdir())) or "nothing"
        raise ValueError(
            f"step {step.name} of {quote(step.parent)} was not written by hfjax: no manifest.json "
            f"and no meta in it, found {names}. Restore it with what wrote it, then hfjax.save it."
        )


def check_format(step: Path, number: int) -> None:
    """Refuse a step in a later format of hfjax than this one knows."""
    if number > FORMAT:
        raise ValueError(
            f"step {step.name} of {quote(step.parent)} is written in format {number}; this hfjax "
            f"({_version('hfjax')}) reads up to {FORMAT}. Update hfjax: pip install -U hfjax."
        )
