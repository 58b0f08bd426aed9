from hfjax import (
    checkpoint as checkpoint,
    data as data,
    images as images,
    models as models,
    run as run,
    testing as testing,
)
from hfjax.analysis.collectives import Collectives as Collectives, collectives as collectives
from hfjax.analysis.least_offload import least_offload as least_offload
from hfjax.analysis.stashes import stashes as stashes
from hfjax.analysis.transfers import Transfers as Transfers, transfers as transfers
from hfjax.base.mean import Mean as Mean
from hfjax.batches import (
    full as full,
    rows_of_process as rows_of_process,
    shard_batch as shard_batch,
)
from hfjax.checkpoint import (
    Checkpoints as Checkpoints,
    Keep as Keep,
    Restored as Restored,
    latest as latest,
    recorded as recorded,
    restore as restore,
    save as save,
)
from hfjax.deepspeed.from_file import from_deepspeed as from_deepspeed
from hfjax.evaluate import eval_step as eval_step, predict_step as predict_step
from hfjax.haiscale.partition import Partition as Partition, partition as partition
from hfjax.haiscale.pipe import (
    GPipe as GPipe,
    Interleaved1F1B as Interleaved1F1B,
    PipeDream as PipeDream,
)
from hfjax.initialise import init as init
from hfjax.optimizers.rates import rate as rate
from hfjax.optimizers.transforms import (
    adamw as adamw,
    averaged as averaged,
    by_path as by_path,
    ema as ema,
    master as master,
    matching as matching,
    scaled as scaled,
)
from hfjax.parallel.activation_offload import Offload as Offload
from hfjax.parallel.called.offload_block import offload as offload
from hfjax.parallel.engine.gather_rows import gather_rows as gather_rows
from hfjax.parallel.execution import Execution as Execution
from hfjax.parallel.in_parts.named_calls import own_rows as own_rows
from hfjax.parallel.make_mesh import cube as cube, grid_2d as grid_2d, make_mesh as make_mesh
from hfjax.parallel.precision.by_path import PrecisionByPath as PrecisionByPath
from hfjax.parallel.precision.dtypes import LossScale as LossScale, Precision as Precision
from hfjax.parallel.remat import Remat as Remat
from hfjax.parallel.schedules.named import Schedule as Schedule
from hfjax.parallel.settings import Context as Context
from hfjax.parallel.strategy import (
    CONTEXT as CONTEXT,
    DDP as DDP,
    EXPERT as EXPERT,
    FSDP as FSDP,
    GRID as GRID,
    HOST_OPTIMIZER as HOST_OPTIMIZER,
    HOST_PARAMETERS as HOST_PARAMETERS,
    HSDP as HSDP,
    PIPE as PIPE,
    SEQUENCE as SEQUENCE,
    TENSOR as TENSOR,
    ZERO1 as ZERO1,
    ZERO2 as ZERO2,
    ZERO3 as ZERO3,
    Strategy as Strategy,
)
from hfjax.parallel.wings.grid.costs import best_grid as best_grid
from hfjax.plan.layout import Layout as Layout, State as State, layout as layout
from hfjax.plan.rearrange import canonical as canonical
from hfjax.planner.make_plan import make_plan as make_plan
from hfjax.processes.distributed import init_distributed as init_distributed
from hfjax.run.sampling import generate as generate
from hfjax.target import target_devices as target_devices
from hfjax.train import module as module, train_step as train_step
from hfjax.weights.pretrained import export as export, pretrained as pretrained

__version__: str
