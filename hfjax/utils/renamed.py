"""Old names and what they are now, for errors, and modules that an old Python file may import."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

# Public names of before, and what they are now.
NAMES = {
    "Checkpoints": "hfjax.CheckpointManager",
    "Context": "hfjax.ContextParallel",
    "GPipe": "hfjax.compat.GPipe",
    "Interleaved1F1B": "hfjax.compat.Interleaved1F1B",
    "Keep": "hfjax.RetentionPolicy",
    "Partition": "hfjax.compat.Partition",
    "PipeDream": "hfjax.compat.PipeDream",
    "Restored": "hfjax.RestoredRun",
    "Transfers": "hfjax.analysis.Transfers",
    "averaged": "hfjax.optimizers.averaged",
    "by_path": "hfjax.optimizers.by_path",
    "canonical": "hfjax.to_model_order",
    "ema": "hfjax.optimizers.ema",
    "from_deepspeed": "hfjax.compat.from_deepspeed",
    "full": "hfjax.full_array",
    "gather_rows": "hfjax.gather_batch",
    "images": "hfjax.data.images",
    "latest": "hfjax.latest_step",
    "least_offload": "hfjax.analysis.least_offload",
    "master": "hfjax.optimizers.master_weights",
    "matching": "hfjax.optimizers.matching",
    "module": "hfjax.to_model",
    "own_rows": "hfjax.per_device",
    "partition": "hfjax.compat.partition",
    "rate": "hfjax.lr_schedule",
    "recorded": "hfjax.checkpoint_metadata",
    "rows_of_process": "hfjax.process_batch_slice",
    "run": "hfjax.trainer",
    "scaled": "hfjax.optimizers.scaled",
    "stashes": "hfjax.analysis.saved_residuals",
    "target_devices": "hfjax.analysis.target_devices",
    "transfers": "hfjax.analysis.host_transfers",
}
# Metadata of an nnx.Variable.
MARKS = {
    "chooses_branch": "layer_kind",
    "per_row": "per_example",
    "stays_split": "keep_sharded",
}
MODULES = {"hfjax.run": "hfjax.trainer", "hfjax.run.config": "hfjax.trainer.config"}


@contextmanager
def old_modules() -> Iterator[None]:
    """Make old names of modules importable while a user's file is read."""
    added = {old: import_module(new) for old, new in MODULES.items() if old not in sys.modules}
    sys.modules.update(added)
    try:
        yield
    finally:
        for old in added:
            sys.modules.pop(old, None)
