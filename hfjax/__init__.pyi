from hfjax import (
    adapters as adapters,
    analysis as analysis,
    checkpoint as checkpoint,
    compat as compat,
    data as data,
    models as models,
    optimizers as optimizers,
    testing as testing,
    trainer as trainer,
)
from hfjax.analysis.count_collectives import Collectives as Collectives, collectives as collectives
from hfjax.checkpoint import (
    CheckpointManager as CheckpointManager,
    RestoredRun as RestoredRun,
    RetentionPolicy as RetentionPolicy,
    checkpoint_metadata as checkpoint_metadata,
    latest_step as latest_step,
    restore as restore,
    save as save,
)
from hfjax.distributed.init import init_distributed as init_distributed
from hfjax.distributed.simulated_devices import simulate_devices as simulate_devices
from hfjax.optimizer_step.gradients import Gradients as Gradients
from hfjax.optimizers.rates import lr_schedule as lr_schedule
from hfjax.optimizers.transforms import (
    adamw as adamw,
)
from hfjax.parallel.engine.gather_batch import gather_batch as gather_batch
from hfjax.parallel.execution import Execution as Execution
from hfjax.parallel.extensions.tensor_grid.costs import best_grid as best_grid
from hfjax.parallel.make_mesh import cube as cube, grid_2d as grid_2d, make_mesh as make_mesh
from hfjax.parallel.offload.activations import Offload as Offload
from hfjax.parallel.precision.by_path import PrecisionByPath as PrecisionByPath
from hfjax.parallel.precision.dtypes import LossScale as LossScale, Precision as Precision
from hfjax.parallel.remat import Remat as Remat
from hfjax.parallel.schedules.named import Schedule as Schedule
from hfjax.parallel.settings import ContextParallel as ContextParallel
from hfjax.parallel.spmd.rule_calls import per_device as per_device
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
from hfjax.sharding.layout import Layout as Layout, layout as layout
from hfjax.sharding.reorder_layers import to_model_order as to_model_order
from hfjax.sharding.state import State as State
from hfjax.step.batches import (
    full_array as full_array,
    process_batch_slice as process_batch_slice,
    shard_batch as shard_batch,
)
from hfjax.step.eval_step import eval_step as eval_step, predict_step as predict_step
from hfjax.step.init_state import init as init
from hfjax.step.merge_model import merge as merge, to_model as to_model
from hfjax.step.train_step import train_step as train_step
from hfjax.trainer.sampling import generate as generate
from hfjax.utils.mean import Mean as Mean
from hfjax.weights.pretrained import export as export, pretrained as pretrained

__version__: str
