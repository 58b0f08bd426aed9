"""What `hfjax.layout` and `Layout.freeze` refuse."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from hfjax.base.paths import nearest
from hfjax.parallel.engine.blueprint import LAYERS, Blueprint
from hfjax.parallel.mesh import AXES, describe_mesh
from hfjax.parallel.placement import batch_devices
from hfjax.parallel.strategy import Strategy

PACKED_TOGETHER = (
    "a pipeline packs the layers of a list into one row",
    "Freeze what lies outside the layers, stack them (hfjax.models.parts.stacked), or use no "
    "pipeline.",
)


def check_frozen(frozen: set[str], plan: Blueprint, arrangement: Any) -> None:
    """Refuse to freeze everything, or a part of what a pipeline packs."""
    if len(frozen) == len(plan.parameters):
        raise ValueError("freeze: all parameters are, and nothing would train. Use eval_step.")
    packs = plan.listed and arrangement is not None
    if packs and (layers := sorted(path for path in frozen if path.startswith(LAYERS))):
        raise ValueError(
            f"freeze: {layers[0]} is in a list of layers: {'. '.join(PACKED_TOGETHER)}"
        )


def check_patterns(patterns: tuple) -> None:
    """Refuse what are no patterns of paths."""
    if not patterns or not all(isinstance(pattern, str) for pattern in patterns):
        raise ValueError(
            f"freeze{patterns}: patterns of paths are expected, at least one, for instance "
            'layout.freeze("tokens", "layers/*").'
        )


def first_layers(paths: set[str], first: Any, plan: Blueprint) -> set[str]:
    """Return those of these paths that belong to the first layers; refuse what belongs to none."""
    if outside := sorted(path for path in paths if not path.startswith(LAYERS)):
        raise ValueError(
            f"freeze(…, first={first!r}): {outside[0]} is in no layer. Freeze the first layers by "
            'themselves: layout.freeze("layers/*", first=2), of a model in three parts.'
        )
    count = plan.number_of_layers
    if not isinstance(first, int) or isinstance(first, bool) or not 0 < first < count:
        raise ValueError(
            f"freeze(…, first={first!r}): a number of layers from 1 to {count - 1} is expected; to "
            f"freeze all {count}, leave first away."
        )
    if not plan.listed:
        return paths
    return paths & {path for layer in plan.layers("train")[:first] for path in layer.paths}


def check_rows(plan: Blueprint, mesh: Mesh) -> None:
    """Refuse variables with a row for each row of a batch that does not split over the devices."""
    devices = batch_devices(mesh)
    for path, template in plan.variables.items():
        if plan.of_rows(path) and template.shape[0] % devices:
            raise ValueError(
                f"{path} {tuple(template.shape)} has a row for each row of the batch, and "
                f"{template.shape[0]} rows do not split over {devices} devices "
                f"({describe_mesh(mesh)}). Make the model for a multiple of {devices}."
            )


def check_paths(axes: Mapping[str, tuple], plan: Blueprint) -> None:
    """Refuse names of axes for what is no parameter."""
    for path in axes:
        if path not in plan.parameters:
            raise ValueError(f"axes: no parameter {path!r}. {nearest(path, plan.parameters)}")


def check_arguments(model_init: Any, optimizer: Any, mesh: Any, strategy: Any) -> None:
    """Refuse arguments of the wrong kind."""
    wanted = {
        "model_init, a function of rngs": not callable(model_init)
        or isinstance(model_init, nnx.Module),
        "an optax optimizer": not hasattr(optimizer, "update"),
        "a mesh of hfjax.make_mesh": not isinstance(mesh, Mesh) or mesh.axis_names != AXES,
        "a hfjax.Strategy": not isinstance(strategy, Strategy),
    }
    given = [type(x).__name__ for x in (model_init, optimizer, mesh, strategy)]
    for (what, wrong), found in zip(wanted.items(), given, strict=True):
        if wrong:
            raise ValueError(
                f"layout(model_init, optimizer, mesh, strategy): {what} is expected, found {found}."
            )


def check_dtypes(plan: Blueprint) -> None:
    """Refuse parameters that cannot be trained."""
    for path, template in plan.parameters.items():
        if not jnp.issubdtype(template.dtype, jnp.floating):
            raise ValueError(
                f"{path} {tuple(template.shape)} is {template.dtype}: a parameter is a real "
                "floating-point array. Keep what is not trained in another nnx.Variable, and a "
                "complex one as its real and imaginary part."
            )
