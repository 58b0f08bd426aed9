"""hfjax: train a model on more than one device. A strategy is a table; the program follows it.

`train` has `hfjax.train_step`, `initialise` the state, `evaluate` losses and predictions; `compose`
is the recipe of a step. `batches` brings batches to devices, `watch` warns of what is told late,
`target` is GPUs to compile for, `testing` compares strategies with one device, `names` has what
`hfjax.` offers.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hfjax.base.keywords import nearest_of
from hfjax.base.version import version as _version

if TYPE_CHECKING:
    from hfjax import (
        data as data,
        images as images,
        models as models,
        run as run,
        testing as testing,
    )
    from hfjax.checkpoint import Checkpoints, Keep, Restored, latest, recorded, restore, save
    from hfjax.names import *  # noqa: F403
    from hfjax.planner.make_plan import make_plan
    from hfjax.run.sampling import generate
    from hfjax.weights.pretrained import export, pretrained

# Imported when they are first asked for, so that a launcher or `hfjax --version` needs no JAX:
# parts of hfjax, and names with where they are; all others are in hfjax/names.py.
_LATER = ("checkpoint", "data", "images", "models", "run", "testing")
_CHECKPOINTS = ("Checkpoints", "Keep", "Restored", "latest", "recorded", "restore", "save")
_WEIGHTS = ("export", "pretrained")
_FROM = {"generate": "hfjax.run.sampling", "make_plan": "hfjax.planner.make_plan"}
_FROM |= dict.fromkeys(_CHECKPOINTS, "hfjax.checkpoint")
_FROM |= dict.fromkeys(_WEIGHTS, "hfjax.weights.pretrained")
__version__ = _version()
__all__ = [
    "CONTEXT",
    "DDP",
    "EXPERT",
    "FSDP",
    "GRID",
    "HOST_OPTIMIZER",
    "HOST_PARAMETERS",
    "HSDP",
    "PIPE",
    "SEQUENCE",
    "TENSOR",
    "ZERO1",
    "ZERO2",
    "ZERO3",
    "Checkpoints",
    "Collectives",
    "Context",
    "Execution",
    "GPipe",
    "Interleaved1F1B",
    "Keep",
    "Layout",
    "LossScale",
    "Mean",
    "Offload",
    "Partition",
    "PipeDream",
    "Precision",
    "PrecisionByPath",
    "Remat",
    "Restored",
    "Schedule",
    "State",
    "Strategy",
    "Transfers",
    "adamw",
    "averaged",
    "best_grid",
    "by_path",
    "canonical",
    "collectives",
    "cube",
    "ema",
    "eval_step",
    "export",
    "from_deepspeed",
    "full",
    "gather_rows",
    "generate",
    "grid_2d",
    "init",
    "init_distributed",
    "latest",
    "layout",
    "least_offload",
    "make_mesh",
    "make_plan",
    "master",
    "matching",
    "module",
    "offload",
    "own_rows",
    "partition",
    "predict_step",
    "pretrained",
    "rate",
    "recorded",
    "restore",
    "rows_of_process",
    "save",
    "scaled",
    "shard_batch",
    "stashes",
    "target_devices",
    "train_step",
    "transfers",
]


def __getattr__(name: str) -> Any:
    """Return a part of hfjax that is imported only now: `hfjax.testing`, `hfjax.data` …"""
    if name in _LATER:
        return import_module(f"{__name__}.{name}")
    if name in __all__:
        return getattr(import_module(_FROM.get(name, "hfjax.names")), name)
    known = {*__all__, *_LATER}
    near = nearest_of(name, known) or nearest_of(name.upper(), known)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}.{near}")


def __dir__() -> list[str]:
    """Return what is there, and what would be imported."""
    return sorted({*globals(), *_LATER, *__all__})
