"""hfjax: train a model on more than one device. A strategy is a table; the program follows it."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hfjax.analysis.collectives import Collectives, collectives
from hfjax.analysis.least_offload import least_offload
from hfjax.analysis.stashes import stashes
from hfjax.analysis.transfers import Transfers, transfers
from hfjax.base.keywords import nearest_of
from hfjax.base.mean import Mean
from hfjax.base.version import version as _version
from hfjax.batches import full, rows_of_process, shard_batch
from hfjax.checkpoint import Checkpoints, Keep, Restored, latest, recorded, restore, save
from hfjax.evaluate import eval_step, predict_step
from hfjax.haiscale.partition import Partition, partition
from hfjax.haiscale.pipe import GPipe, Interleaved1F1B, PipeDream
from hfjax.initialise import init
from hfjax.optimizers.fused_adamw import adamw
from hfjax.optimizers.rates import rate
from hfjax.optimizers.transforms import averaged, by_path, ema, master, matching, scaled
from hfjax.parallel.activation_offload import Offload
from hfjax.parallel.context.choice import Context
from hfjax.parallel.engine.fetch import gather_rows
from hfjax.parallel.engine.offload_block import offload
from hfjax.parallel.execution import Execution, Precision
from hfjax.parallel.mesh import cube, grid_2d, make_mesh
from hfjax.parallel.remat import Remat
from hfjax.parallel.schedules.named import Schedule
from hfjax.parallel.strategy import (
    CONTEXT,
    DDP,
    FSDP,
    GRID,
    HOST_OPTIMIZER,
    HOST_PARAMETERS,
    HSDP,
    PIPE,
    SEQUENCE,
    TENSOR,
    ZERO1,
    ZERO2,
    ZERO3,
    Strategy,
)
from hfjax.plan.layout import Layout, State, layout
from hfjax.plan.rearrange import canonical
from hfjax.processes.distributed import init_distributed
from hfjax.target import target_devices
from hfjax.train import module, train_step

if TYPE_CHECKING:
    from hfjax import data as data, models as models, run as run, testing as testing
    from hfjax.run.sampling import generate

_LATER = ("data", "models", "run", "testing")  # imported when they are first asked for
__version__ = _version()
__all__ = [
    "CONTEXT",
    "DDP",
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
    "Mean",
    "Offload",
    "Partition",
    "PipeDream",
    "Precision",
    "Remat",
    "Restored",
    "Schedule",
    "State",
    "Strategy",
    "Transfers",
    "adamw",
    "averaged",
    "by_path",
    "canonical",
    "collectives",
    "cube",
    "ema",
    "eval_step",
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
    "master",
    "matching",
    "module",
    "offload",
    "partition",
    "predict_step",
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
    if name == "generate":
        return import_module("hfjax.run.sampling").generate
    known = {*__all__, *_LATER}
    near = nearest_of(name, known) or nearest_of(name.upper(), known)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}.{near}")


def __dir__() -> list[str]:
    """Return what is there, and what would be imported."""
    return sorted({*globals(), *_LATER})
