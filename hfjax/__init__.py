"""hfjax: train a model on more than one device. A strategy is a table; the program follows it."""

from hfjax.adamw import adamw
from hfjax.batches import full, rows_of_process, shard_batch
from hfjax.checkpoint import Checkpoints, Keep, Restored, latest, recorded, restore, save
from hfjax.least import least_offload
from hfjax.mean import Mean
from hfjax.optimizers import averaged, by_path, ema, master, matching, scaled
from hfjax.parallel.execution import Execution, Precision
from hfjax.parallel.fetch import gather_rows
from hfjax.parallel.mesh import make_mesh
from hfjax.parallel.offload import Offload
from hfjax.parallel.offloading import offload
from hfjax.parallel.remat import Remat
from hfjax.parallel.schedules import Schedule
from hfjax.parallel.strategy import (
    DDP,
    FSDP,
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
from hfjax.partitions import Partition, partition
from hfjax.pipes import GPipe, Interleaved1F1B, PipeDream
from hfjax.plan import Layout, State, layout
from hfjax.processes.distributed import init_distributed
from hfjax.rates import rate
from hfjax.rearrange import canonical
from hfjax.stashes import stashes
from hfjax.target import target_devices
from hfjax.traffic import Collectives, collectives
from hfjax.train import eval_step, init, module, train_step
from hfjax.transfers import Transfers, transfers

__all__ = [
    "DDP",
    "FSDP",
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
    "ema",
    "eval_step",
    "full",
    "gather_rows",
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
