"""Old names and what they are now: for errors, and to read configurations of before.

`keywords` has those of keywords, since the core loads it.
"""


class OldNamesWarning(UserWarning):
    """A file has names of before, which are read."""


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
    "trainer.Train": "hfjax.trainer.TrainConfig",
    "transfers": "hfjax.analysis.host_transfers",
}
# Metadata of an nnx.Variable.
MARKS = {
    "chooses_branch": "layer_kind",
    "per_row": "per_example",
    "stays_split": "keep_sharded",
}
OLD_COMMANDS = {"import": "inspect"}
# Flags of other commands than train, and what they are now, in the first command that has one.
OLD_FLAGS = {
    "batch": ("batch-size",),
    "batches": ("max-batches",),
    "out": ("plot", "plan", "data-dir", "export-dir"),
    "rows": ("top",),
    "why": ("compare",),
}
# Fields of a configuration of before, which are flags too, and what they are now.
CONFIG_KEYS = {
    "accumulate": "gradient_accumulation_steps",
    "batch": "global_batch_size",
    "cache": "compilation_cache",
    "checkpoints.every": "checkpoint.interval",
    "checkpoints.keep": "checkpoint.keep_latest",
    "checkpoints.keep_best": "checkpoint.keep_best",
    "checkpoints.keep_every": "checkpoint.keep_period",
    "checkpoints.resume": "checkpoint.resume",
    "checkpoints.start": "checkpoint.init_from",
    "data.broken": "data.on_broken_image",
    "data.scale": "data.crop_scale",
    "data.size": "data.image_size",
    "log.every": "log.interval",
    "log.sample": "log.sample_tokens",
    "log.valid_batches": "eval.max_batches",
    "log.valid_every": "eval.interval",
    "minutes": "max_runtime",
    "model.capacity": "model.capacity_factor",
    "model.classes": "model.num_classes",
    "model.embed": "model.hidden_size",
    "model.experts": "model.num_experts",
    "model.frozen_norms": "model.freeze_batch_norm",
    "model.group_norms": "model.group_norm",
    "model.head": "model.head_dim",
    "model.heads": "model.num_heads",
    "model.kv_heads": "model.num_kv_heads",
    "model.layers": "model.num_layers",
    "model.length": "model.seq_len",
    "model.mlp": "model.intermediate_size",
    "model.own": "model.factory",
    "model.smoothing": "model.label_smoothing",
    "model.stored": "param_dtype",
    "nonfinite": "on_nonfinite",
    "offload": "offload.activations",
    "optimizer.clip": "optimizer.max_grad_norm",
    "optimizer.decay": "lr_schedule.type",
    "optimizer.end": "lr_schedule.final_fraction",
    "optimizer.hold": "lr_schedule.stable_steps",
    "optimizer.master": "master_weights",
    "optimizer.own": "optimizer.factory",
    "optimizer.rate": "optimizer.learning_rate",
    "optimizer.scale": "optimizer.lr_factors",
    "optimizer.warmup": "lr_schedule.warmup_steps",
    "out": "run_dir",
    "pipeline.name": "pipeline.schedule",
    "reduction": "gradient_reduction",
    "split_rows": "tensor_overlap_chunks",
    "timeout": "watchdog_timeout",
}
