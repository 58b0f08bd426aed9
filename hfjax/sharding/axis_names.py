"""The names of dimensions that a layout is given: by path, by pattern, or "auto"."""

from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from hfjax.parallel.adapters.model_template import ModelTemplate
from hfjax.parallel.adapters.pytrees import TreeTemplate
from hfjax.parallel.mesh import size_of
from hfjax.utils.paths import match_patterns, suggest


def find_names(
    axes: Any, template: ModelTemplate, forward: Any, example: Any, mesh: Any, strategy: Any
) -> tuple[Mapping[str, tuple], ModelTemplate]:
    """Return the names that `axes=` gives, by path, and the template with notes on them.

    Any model's adapters get theirs from these, and are in the template from here on.
    """
    if axes != "auto":
        return template.with_adapters(
            _axes_by_path({} if axes is None else axes, template), forward
        )
    from hfjax.sharding.read_axes import read_axes

    _check_example(template, forward, example)
    divisor = lambda name: size_of(strategy.parameters.get(name, ()), mesh)
    read = read_axes(template, forward, example, divisor)
    return replace(template, notes=(*template.notes, *read.notes)).with_adapters(
        read.names, forward
    )


def _axes_by_path(axes: Any, template: ModelTemplate) -> dict[str, tuple]:
    """Return the axis names of `axes=` by path: a path's own, else those of its first pattern.

    Refuse a pattern that matches nothing or never counts, and names that do not fit an array. Those
    of adapters that are not in the template yet are checked when they are (`with_adapters`).
    """
    if not isinstance(axes, Mapping):
        raise ValueError(
            f"axes={axes!r}: {{path or pattern: names}} is expected, for instance "
            '{"*/up/kernel": ("embed", "mlp")}, or "auto".'
        )
    parameters = template.parameters
    later = {k: tuple(axes[k]) for k in axes if k not in parameters and template.is_adapter(str(k))}
    axes = {key: names for key, names in axes.items() if key not in later}
    for key in axes:
        if key not in parameters and not any(fnmatchcase(path, str(key)) for path in parameters):
            raise ValueError(f"axes: no parameter {key!r}. {suggest(str(key), parameters)}")
    pattern_of = match_patterns([key for key in axes if key not in parameters], parameters)
    pattern_of |= {key: key for key in axes if key in parameters}
    if unused := [key for key in axes if key not in pattern_of.values()]:
        raise ValueError(
            f"axes: {unused[0]!r} never counts, since entries before it match the same paths: "
            f"{list(axes)}. A path itself counts first, then the first pattern that matches."
        )
    for path, key in pattern_of.items():
        _check_names(path, key, axes[key], tuple(parameters[path].shape))
    return later | {path: tuple(axes[key]) for path, key in pattern_of.items()}


def _check_example(template: ModelTemplate, forward: Any, example: Any) -> None:
    """Refuse to read names of a model that cannot be traced."""
    if isinstance(template.graphs["train"], TreeTemplate) and forward is None:
        if not callable(template.abstract("train")):
            raise ValueError(
                'axes="auto" reads what the model computes, and that of a bare pytree is in the '
                "loss. Give forward=lambda params, batch: outputs, or names: axes={pattern: names}."
            )
    if example is None:
        raise ValueError(
            'axes="auto" traces the model: give a batch or its shapes, layout(…, axes="auto", '
            "example=batch), or names: axes={pattern: names}."
        )


def _check_names(path: str, key: str, names: Any, shape: tuple[int, ...]) -> None:
    is_name = lambda name: name is None or isinstance(name, str)
    if not isinstance(names, tuple | list) or not all(map(is_name, names)):
        raise ValueError(
            f"axes: {key!r}: {names!r}: a tuple with a name for each dimension is expected, None "
            'where it has no name, for instance ("embed", "mlp").'
        )
    if len(names) != len(shape):
        pattern = f" of {key!r}" * (key != path)
        raise ValueError(
            f"{path}: axes {tuple(names)}{pattern} name {len(names)} dimensions, the array has "
            f"shape {shape}. Name each dimension, None where it has no name."
        )
