"""Configurations of before December 2026: read with the fields of today (`CONFIG_KEYS`).

`translate` is for YAML and for what checkpoints record; `old_modules` for Python files.
"""

import re
import sys
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from hfjax.parallel.offload.activations import parse_ratios
from hfjax.trainer.yaml_fields import Lined
from hfjax.utils.renamed import CONFIG_KEYS

# Word of --strategy -> the mesh axes that it used; in this order one without a size was -1.
STRATEGIES = {
    **dict.fromkeys(("fsdp", "zero3", "hsdp"), ("fsdp",)),
    **dict.fromkeys(("ddp", "zero1", "zero2"), ("data",)),
    **{"tensor": ("tensor",), "sequence": ("tensor",), "grid": ("tensor", "row")},
    **{"context": ("context",), "expert": ("expert",), "pipe": ("pipe",)},
    **{"host_optimizer": (), "host_parameters": ()},
}
AXES = ("fsdp", "data", "tensor", "row", "context", "expert", "pipe")
STATE_AXES = ("fsdp", "data")  # an axis of these without a size has the remaining devices, or 1
DATA_WORDS = ("ddp", "zero1", "zero2", "zero3", "fsdp", "hsdp")
# Fields and sections that only a configuration of today has.
TODAY = {
    *({*CONFIG_KEYS.values()} - CONFIG_KEYS.keys()),
    *("zero", "sequence_parallel", "eval", "lr_schedule", "checkpoint"),
    *("offload.optimizer", "offload.parameters"),
}


def translate(settings: Mapping[str, Any]) -> tuple[Any, dict[str, str]]:
    """Return a configuration with the fields of today, and the old fields: {old: new}.

    Args:
        settings: Nested fields, of before or of today.

    Raises:
        ValueError: It has fields of both.

    >>> translate({"batch": 8, "strategy": "fsdp", "optimizer": {"rate": 1.0}})[0]
    {'global_batch_size': 8, 'optimizer': {'learning_rate': 1.0}, 'mesh': {'fsdp': -1}}
    """
    lines, flat = dict(_lines(settings)), dict(_flatten(settings))
    renamed = {key: CONFIG_KEYS[key] for key in flat if key in CONFIG_KEYS}
    if words := _words(flat.get("strategy")):
        renamed["strategy"] = "mesh"
    if not renamed:
        return settings, {}
    at = lambda key: f"line {lines[key]}: " if key in lines else ""
    if dotted := [key for key in settings if "." in str(key)]:
        raise ValueError(f"{at(dotted[0])}{dotted[0]}: fields are nested, not joined by dots.")
    if today := [key for key in flat if key in TODAY or key.partition(".")[0] in TODAY]:
        old = next(iter(renamed))
        raise ValueError(
            f"{at(today[0])}{old} is now {renamed[old]}, and {today[0]} is of today: a file has "
            "old names or new ones."
        )
    flat = _today_values(flat)
    if ratios := parse_ratios(flat.get("offload")):  # each stage of a pipeline had its own
        flat["offload"] = f"{max(ratios):g}"
        renamed["offload"] += f" (the largest of its ratios, {max(ratios):g})"
    changes: dict[str, Any] = {}
    if "mesh" not in flat or not flat["mesh"]:  # else it is no mapping: whoever reads it says so
        sizes = {axis: flat.pop(f"mesh.{axis}", None) for axis in AXES}
        try:
            changes = _degrees(words, sizes, flat.get("reduction") == "hierarchical")
        except ValueError as wrong:
            raise ValueError(f"{at('strategy')}{wrong}") from None
    if words:
        del flat["strategy"]
    nested = Lined()
    for key, value in (flat | changes).items():
        new = CONFIG_KEYS.get(key, re.sub(r"^checkpoints\b", "checkpoint", key))
        _set(nested, new, value, lines.get(key))
    return nested, renamed


def _today_values(flat: dict[str, Any]) -> dict[str, Any]:
    """Return values that hfjax of today knows."""
    flat = dict(flat)
    if flat.get("pipeline.name") in ("1f1b-half", "interleaved-half"):
        flat["pipeline.name"] = flat["pipeline.name"].replace("half", "published")
    # A recorded dropout of 0 meant the preset's.
    complete = {"model.smoothing", "model.group_norms", "model.stored"} <= flat.keys()
    if (
        complete
        and "model.auxiliary_dropout" not in flat
        and flat.get("model.dropout") in ("0.0", 0)
    ):
        del flat["model.dropout"]
    return flat


def _is_size(value: Any) -> bool:
    """Return whether a value is a whole number, or none.

    >>> [_is_size(value) for value in (None, 4, "-1", "1.5", "two")]
    [True, True, True, False, False]
    """
    return value is None or bool(re.fullmatch(r"-?\d+", str(value)))


def _words(names: Any) -> tuple[str, ...]:
    """Return the strategies that a text joined, as `fsdp+tensor`; () if it is of today."""
    words = tuple(name.strip().lower() for name in str(names).replace("|", "+").split("+"))
    return words if all(word in STRATEGIES for word in words) else ()


def _degrees(
    words: tuple[str, ...], sizes: dict[str, Any], two_levels: bool = False
) -> dict[str, Any]:
    """Return the fields of today for the words of --strategy and the sizes of the mesh.

    >>> _degrees(("zero1", "tensor"), {"tensor": 2})
    {'mesh.tensor': 2, 'zero': 1, 'sequence_parallel': False}
    """
    words = words or ("ddp",)
    of_data = [word for word in words if word in DATA_WORDS]
    if len(of_data) > 1 or len({*words}) < len(words):
        raise ValueError(
            f"strategy {'+'.join(words)}: at most one of {', '.join(DATA_WORDS)}, and each once."
        )
    sizes = {axis: sizes.get(axis) for axis in AXES}
    used = [axis for axis in AXES if any(axis in STRATEGIES[word] for word in words)]
    free = next((axis for axis in used if sizes[axis] is None), "data")
    if free != "data" and "-1" not in map(str, sizes.values()):
        sizes[free] = -1
    if open_axes := [axis for axis in used if axis not in STATE_AXES and sizes[axis] is None]:
        raise ValueError(
            f"strategy {'+'.join(words)}: it splits over {open_axes[0]}, and mesh has no size of "
            f"it. Give mesh: {{{open_axes[0]}: 2}}."
        )
    sharded = bool({*words} & {"fsdp", "zero3", "hsdp"})
    stage = next((n for n in (1, 2) if f"zero{n}" in words), 0)
    is_second = not sharded and str(sizes["fsdp"]) not in ("None", "1")  # a second axis of data
    if is_second and not two_levels and all(map(_is_size, (sizes["data"], sizes["fsdp"]))):
        data, fsdp = sizes["data"], int(str(sizes.pop("fsdp")))
        if data is None and "-1" in map(str, sizes.values()):
            data = 1
        free_data = data is not None and -1 in (int(str(data)), fsdp)
        sizes["data"] = None if data is None else -1 if free_data else int(str(data)) * fsdp
    is_on = {axis: str(size) not in ("None", "1") for axis, size in sizes.items()}
    inside = sharded and not is_on["fsdp"] and (is_on["expert"] or is_on["context"])
    changes = {f"mesh.{axis}": size for axis, size in sizes.items() if size is not None}
    changes |= {"zero": 3} if inside else {}
    changes |= {"zero": stage} if stage or (is_second and two_levels) else {}
    plain = "tensor" in words and not {*words} & {"sequence", "grid"}
    changes |= {"sequence_parallel": False} if plain else {}
    changes |= {"offload.optimizer": True} if "host_optimizer" in words else {}
    return changes | ({"offload.parameters": True} if "host_parameters" in words else {})


def strategy_flags(names: str) -> str:
    """Return the flags of today for a text that --strategy once took; "" for any other.

    >>> strategy_flags("fsdp+tensor"), strategy_flags("mine.py:table")
    ('--mesh.fsdp -1 --mesh.tensor 2 --no-sequence-parallel', '')
    """
    if not (words := _words(names)):
        return ""
    axes = {axis for word in words for axis in STRATEGIES[word]}
    sizes = {axis: -1 if axis in ("data", "fsdp") else 2 for axis in AXES if axis in axes}
    sizes |= {"data": 2} if "hsdp" in words else {}
    flags = []
    for key, value in _degrees(words, {"data": 1, **sizes}).items():
        flag = f"--{key.replace('_', '-')}"
        if value is False:
            flag = flag.replace("--", "--no-", 1)
        if (key, value) != ("mesh.data", 1):
            flags.append(flag if isinstance(value, bool) else f"{flag} {value}")
    return " ".join(flags)


def _flatten(settings: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _lines(settings: Any, prefix: str = "") -> Iterator[tuple[str, int]]:
    """Yield the lines of fields that a file has."""
    for name, value in settings.items() if isinstance(settings, Lined) else ():
        yield f"{prefix}{name}", settings.lines[name]
        if isinstance(value, Mapping):
            yield from _lines(value, f"{prefix}{name}.")


def _set(nested: Lined, key: str, value: Any, line: int | None) -> None:
    *outer, last = key.split(".")
    for name in outer:
        nested = nested.setdefault(name, Lined())
    nested[last] = value
    if line is not None:
        nested.lines[last] = line


# -- Python files ---------------------------------------------------------------------------


class OldSettings(dict):
    """The fields that a Python file of before gave to a class; `translate` reads them."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(settings)


CLASSES = (
    *("Train", "Model", "Mesh", "ContextOptions", "PipelineOptions", "Data", "Optimizer"),
    *("CheckpointOptions", "Log"),
)
MODULES = ("hfjax.run", "hfjax.run.config")


@contextmanager
def old_modules() -> Iterator[None]:
    """Make the modules of before importable while a user's file is read."""
    added = {name: types.ModuleType(name) for name in MODULES if name not in sys.modules}
    for module in added.values():
        for name in CLASSES:
            setattr(module, name, type(name, (OldSettings,), {}))
    sys.modules.update(added)
    try:
        yield
    finally:
        for name in added:
            sys.modules.pop(name, None)
