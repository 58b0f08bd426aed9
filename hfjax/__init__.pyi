from hfjax import (
    checkpoint as checkpoint,
    data as data,
    models as models,
    testing as testing,
    trainer as trainer,
)
from hfjax.analysis.count_collectives import Collectives as Collectives, collectives as collectives
from hfjax.analysis.count_transfers import Transfers as Transfers, transfers as transfers
from hfjax.analysis.residuals import stashes as stashes
from hfjax.analysis.search_offload import least_offload as least_offload
from hfjax.analysis.targets import target_devices as target_devices
from hfjax.checkpoint import (
    Checkpoints as Checkpoints,
    Keep as Keep,
    Restored as Restored,
    latest as latest,
    recorded as recorded,
    restore as restore,
    save as save,
)
from hfjax.compat.deepspeed.convert import from_deepspeed as from_deepspeed
from hfjax.compat.haiscale.partition import Partition as Partition, partition as partition
from hfjax.compat.haiscale.pipe import (
    GPipe as GPipe,
    Interleaved1F1B as Interleaved1F1B,
    PipeDream as PipeDream,
)
from hfjax.distributed.init import init_distributed as init_distributed
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
from hfjax.parallel.engine.gather_batch import gather_rows as gather_rows
from hfjax.parallel.execution import Execution as Execution
from hfjax.parallel.extensions.tensor_grid.costs import best_grid as best_grid
from hfjax.parallel.make_mesh import cube as cube, grid_2d as grid_2d, make_mesh as make_mesh
from hfjax.parallel.offload.activations import Offload as Offload
from hfjax.parallel.precision.by_path import PrecisionByPath as PrecisionByPath
from hfjax.parallel.precision.dtypes import LossScale as LossScale, Precision as Precision
from hfjax.parallel.remat import Remat as Remat
from hfjax.parallel.schedules.named import Schedule as Schedule
from hfjax.parallel.settings import Context as Context
from hfjax.parallel.spmd.rule_calls import own_rows as own_rows
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
from hfjax.parallel.whole_model.offload_block import offload as offload
from hfjax.planner.make_plan import make_plan as make_plan
from hfjax.sharding.layout import Layout as Layout, State as State, layout as layout
from hfjax.sharding.reorder_layers import canonical as canonical
from hfjax.step.batches import (
    full as full,
    rows_of_process as rows_of_process,
    shard_batch as shard_batch,
)
from hfjax.step.eval_step import eval_step as eval_step, predict_step as predict_step
from hfjax.step.init_state import init as init
from hfjax.step.train_step import module as module, train_step as train_step
from hfjax.trainer.sampling import generate as generate
from hfjax.utils.mean import Mean as Mean
from hfjax.weights.pretrained import export as export, pretrained as pretrained

__version__: str
