"""The table of DeepSpeed's keys, up to version 0.19, and how each is handled.

An entry is a key with DeepSpeed's default, `key=default`, or, without one, the type of its value,
`key:int`. Keys of `accept_keys` are applied by the other files here. Keys of `ignore_keys` change
neither numerics nor memory. Keys of `refuse_keys` do and are not supported: only their default,
which is off, is accepted. A key that changes numerics or memory is never ignored. `*` stands for
any keys.
"""

import re
from collections.abc import Collection

from hfjax.compat.deepspeed.key_entries import accept_keys, ignore_keys, merge, refuse_keys

# -- texts that several entries share -----------------------------------------------------

SCHEDULED = "XLA schedules the program: buckets, buffers and prefetching have no counterpart"
LAYERS = "each layer is gathered before it is used, and dropped after"
NVME = "only offload to NVMe uses it, which is not here"
TOLD = "it only changes what is told; hfjax train has --log.interval and --profile"
CHECKPOINTS = "checkpoints are hfjax's own (docs/checkpoints.md): each restores on any mesh"
DISABLED = "it only matters where the section is enabled"
COMPRESSES = "it compresses gradients, which changes numbers: use Adam or Lamb"
NO_COMPRESSION = "hfjax compresses no model"
FORM = "it says which code runs, not what it computes"
NO_NORM = 'it is no parameter of an optimizer: write "gradient_clipping", outside of the section'
NO_FORM = "it is not here: leave it out, or give your own optimizer"
ON_DEVICE = "the update runs on the device, part by part"
GRADIENTS = "gradients are added in float32, and their mean is the same wherever it is divided"
RATE = "| part of the rate"
FROM_ZERO = "a rate begins at update 0 here, and a run that goes on counts on"
COUNT = "@1..1e9"  # a number of updates: the sum of two fits int32

# -- optimizers and schedules, by type ------------------------------------------------------

# DeepSpeed compares them in lower case; the table spells them like this.
NAMES = ("Adam", "AdamW", "Lamb", "Lion", "Adagrad", "SGD", "Muon")
OPTIMIZERS = {x.lower(): x for x in NAMES}
COMPRESSING = ("OneBitAdam", "ZeroOneAdam", "OneBitLamb")  # refused with all their parameters
SCHEDULES = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest")

FORMS = "fused=false foreach:bool capturable=false differentiable=false set_grad_none=true"
DECAYED = "lr=0.001 weight_decay=0.0"
MOMENTS = f"{DECAYED} betas=[0.9,0.999] eps=1e-8"
ADAMS = [
    entries
    for section in ("optimizer(Adam).params", "optimizer(AdamW).params")
    for entries in (
        accept_keys(section, f"{MOMENTS} adam_w_mode=true bias_correction=true"),
        ignore_keys(section, FORM, f"torch_adam=false {FORMS}"),
        refuse_keys(section, NO_FORM, "amsgrad=false maximize=false"),
        refuse_keys(section, NO_FORM, "decoupled_weight_decay=false fp32_optimizer_states=true"),
    )
]
UPDATES = merge(
    *ADAMS,
    accept_keys("optimizer(Lamb).params", f"{MOMENTS} bias_correction=true eps_inside_sqrt=false"),
    accept_keys("optimizer(Lamb).params", "max_coeff=10.0 | the greatest ratio of norms"),
    accept_keys("optimizer(Lamb).params", "min_coeff=0.01 | the least ratio of norms"),
    refuse_keys("optimizer(Lamb).params", NO_FORM, "amsgrad=false"),
    accept_keys("optimizer(Lion).params", f"{DECAYED} betas=[0.9,0.999]"),
    ignore_keys("optimizer(Lion).params", FORM, "set_grad_none=true"),
    accept_keys("optimizer(Adagrad).params", "lr=0.01 weight_decay=0.0 eps=1e-10"),
    accept_keys(
        "optimizer(Adagrad).params", "initial_accumulator_value=0.0 | the squares at the start"
    ),
    refuse_keys("optimizer(Adagrad).params", NO_FORM, "lr_decay=0.0 maximize=false amsgrad=false"),
    refuse_keys("optimizer(Adagrad).params", NO_FORM, "fp32_optimizer_states=true"),
    ignore_keys("optimizer(Adagrad).params", FORM, FORMS),
    accept_keys("optimizer(SGD).params", f"{DECAYED} momentum=0.0 nesterov=false"),
    refuse_keys("optimizer(SGD).params", NO_FORM, "dampening=0.0 maximize=false"),
    ignore_keys("optimizer(SGD).params", FORM, FORMS),
    accept_keys("optimizer(Muon).params", f"{MOMENTS} momentum=0.95"),
    accept_keys("optimizer(Muon).params", 'ns_method="gram" muon_lr:float adam_lr:float'),
    *(ignore_keys(f"optimizer({name}).params", COMPRESSES, "*:any") for name in COMPRESSING),
    *(
        accept_keys(
            f"scheduler({name}).params", f'warmup_num_steps=1000{COUNT} warmup_type="log" {RATE}'
        )
        for name in SCHEDULES[:3]
    ),
    *(
        refuse_keys(f"scheduler({name}).params", FROM_ZERO, "last_batch_iteration=-1")
        for name in SCHEDULES
    ),
    accept_keys("scheduler(WarmupLR).params", f"warmup_min_lr=0.0 warmup_max_lr:float {RATE}"),
    accept_keys("scheduler(WarmupDecayLR).params", f"warmup_min_lr=0.0 warmup_max_lr=0.001 {RATE}"),
    accept_keys("scheduler(WarmupDecayLR).params", f"total_num_steps:int {RATE}"),
    accept_keys("scheduler(WarmupCosineLR).params", f"total_num_steps:int {RATE}"),
    accept_keys(
        "scheduler(WarmupCosineLR).params", f"warmup_min_ratio=0.0 cos_min_ratio=0.0001 {RATE}"
    ),
    accept_keys(
        "scheduler(OneCycle).params",
        f"cycle_min_lr:float cycle_max_lr:float cycle_first_step_size=2000{COUNT} "
        "cycle_second_step_size:int@0..1e9 "
        "cycle_first_stair_count=0@0..1e9 cycle_second_stair_count:int@0..1e9 "
        f"decay_step_size=0 decay_lr_rate=0.0 {RATE}",
    ),
    accept_keys("scheduler(OneCycle).params", "cycle_momentum=true"),
    ignore_keys(
        "scheduler(OneCycle).params",
        "the momentum is not cycled",
        "cycle_min_mom=0.8 cycle_max_mom=0.9 decay_mom_rate=0.0",
    ),
    accept_keys(
        "scheduler(LRRangeTest).params",
        f"lr_range_test_min_lr=0.001 lr_range_test_step_size=2000{COUNT} "
        f"lr_range_test_step_rate=1.0 lr_range_test_staircase=false {RATE}",
    ),
    *(refuse_keys(f"optimizer({name}).params", NO_NORM, "max_grad_norm:float") for name in NAMES),
)

# -- batch, types, clipping -----------------------------------------------------------------

STEP = merge(
    accept_keys("", "train_batch_size:int@1.. | global_batch_size={}"),
    accept_keys("", "train_micro_batch_size_per_gpu:int@1.. | rows of a device in a microbatch"),
    accept_keys("", "gradient_accumulation_steps:int@1.. | gradient_accumulation_steps={}"),
    accept_keys("", "gradient_clipping=1.0 | max_grad_norm={}"),
    accept_keys("", "communication_data_type:str | the type of a reduction"),
    accept_keys("", "optimizer.type:str | the optimizer"),
    accept_keys("", "scheduler.type:str | the rate"),
    ignore_keys("", FORM, "optimizer.legacy_fusion=false"),
    ignore_keys("", GRADIENTS, "prescale_gradients=false gradient_predivide_factor=1.0"),
    refuse_keys(
        "", "one call of the step takes all microbatches", "managed_gradient_accumulation=true"
    ),
    refuse_keys("", "hfjax takes the mean: multiply the loss", 'gradient_allreduce_op="mean"'),
    refuse_keys("", "gradients of embeddings are dense here", "sparse_gradients=false"),
    refuse_keys("", "new parameters are always gathered", "disable_allgather=false"),
    refuse_keys(
        "", "float32 is sent where it matters", 'seq_parallel_communication_data_type="fp32"'
    ),
    refuse_keys("", "write hfjax.CONTEXT, docs/long_sequences.md", "sequence_parallel_size=1"),
    accept_keys("fp16", "enabled=false | the types of a step"),
    accept_keys("fp16", "loss_scale=0.0 | the scale, or 0: one that moves"),
    accept_keys("fp16", "initial_scale_power=16 | LossScale(initial=2**{})"),
    accept_keys("fp16", "loss_scale_window=1000 | LossScale(window={})"),
    accept_keys("fp16", "hysteresis=2 | LossScale(hysteresis={})"),
    accept_keys("fp16", "consecutive_hysteresis=false | LossScale(consecutive={})"),
    accept_keys("fp16", "min_loss_scale=1.0 | LossScale(minimum={})"),
    ignore_keys("fp16", "floating-point inputs are cast here, as with true", "auto_cast=false"),
    refuse_keys(
        "fp16",
        "parameters are stored in float32 here; "
        "hfjax.optimizers.master_weights(optimizer) stores less",
        "fp16_master_weights_and_grads=false",
    ),
    accept_keys("bf16", "enabled=false | the types of a step"),
    accept_keys("bf16", "check_grad_overflow=true | on_nonfinite="),
    ignore_keys("bf16", "it says when, not what is added", "immediate_grad_update=false"),
    refuse_keys(
        "bf16",
        "master parameters, gradients and moments are float32 here; hfjax.adamw has mu_dtype",
        "bf16_master_weights_and_grads=false bf16_optimizer_states=false",
    ),
    refuse_keys("amp", "Apex's types by operation are not here: write bf16", "enabled=false"),
    ignore_keys("amp", DISABLED, "*:any"),
    refuse_keys(
        "torch_autocast",
        "torch's types by operation are not here: write bf16 (norms, routers and the loss of "
        "hfjax's models stay in float32)",
        "enabled=false",
    ),
    ignore_keys("torch_autocast", DISABLED, 'dtype="bfloat16" lower_precision_safe_modules:list'),
    refuse_keys("data_types", "gradients are added in float32 here", 'grad_accum_dtype="fp32"'),
    refuse_keys(
        "data_types",
        "parameters are stored in float32 here; "
        "hfjax.optimizers.master_weights(optimizer) stores bfloat16",
        'param_dtype="fp32"',
    ),
    refuse_keys(
        "data_types", "variables keep the type that the model gives them", "buffer_dtype:str"
    ),
    refuse_keys("data_types", "types by path are not in this file", 'keep_in_fp32_modules="auto"'),
)

# -- sharding and offload -------------------------------------------------------------------

PLACES = merge(
    accept_keys("zero_optimization", "stage=0 | the strategy"),
    accept_keys(
        "zero_optimization", "zero_hpz_partition_size=1 mics_shard_size=-1@-1.. | groups of devices"
    ),
    accept_keys(
        "zero_optimization", "stage3_param_persistence_threshold=100000 | replicate_below={}"
    ),
    accept_keys("zero_optimization", "cpu_offload=false | where the optimizer state lies"),
    accept_keys("zero_optimization", "cpu_offload_param=false | where parameters lie"),
    accept_keys(
        "zero_optimization", 'offload_optimizer.device="none" | where the optimizer state lies'
    ),
    accept_keys("zero_optimization", "offload_optimizer.ratio=1.0@0..1 | the fraction on the host"),
    accept_keys("zero_optimization", 'offload_param.device="none" | where parameters lie'),
    ignore_keys(
        "zero_optimization",
        SCHEDULED,
        "allgather_partitions=true allgather_bucket_size=500000000 reduce_bucket_size=500000000 "
        "reduce_scatter=true overlap_comm:bool contiguous_gradients=true grad_hooks=true "
        "use_multi_rank_bucket_allreduce=true round_robin_gradients=false "
        "parameter_alignment=false sub_group_size=1000000000 stage3_prefetch_bucket_size=50000000 "
        "stage3_allgather_sequential=false stage3_use_all_reduce_for_fetch_params=false "
        "mics_hierarchical_params_gather=false",
    ),
    ignore_keys(
        "zero_optimization",
        LAYERS,
        "stage3_max_live_parameters=1000000000 stage3_max_reuse_distance=1000000000 "
        "stage3_module_granularity_threshold=0 memory_efficient_linear=true "
        "override_module_apply=true leaf_module.*:list",
    ),
    ignore_keys(
        "zero_optimization",
        CHECKPOINTS,
        "load_from_fp32_weights=true elastic_checkpoint=false pipeline_loading_checkpoint=false "
        "stage3_gather_16bit_weights_on_model_save=false "
        "stage3_gather_fp16_weights_on_model_save=false",
    ),
    ignore_keys("zero_optimization", "the norm is always told", "compute_grad_norm=true"),
    ignore_keys("zero_optimization", "the first step names them", "ignore_unused_parameters=true"),
    ignore_keys(
        "zero_optimization", TOLD, "log_trace_cache_warnings=false enable_sanity_checks=false"
    ),
    ignore_keys(
        "zero_optimization",
        "host memory is always pinned",
        "cpu_offload_use_pin_memory:bool offload_optimizer.pin_memory=true "
        "offload_param.pin_memory=true",
    ),
    ignore_keys(
        "zero_optimization",
        NVME,
        "offload_optimizer.nvme_path:str offload_optimizer.buffer_count=4 "
        "offload_optimizer.pipeline_read=false offload_optimizer.pipeline_write=false "
        "offload_optimizer.fast_init=false offload_param.nvme_path:str "
        "offload_param.buffer_count=5 offload_param.buffer_size=100000000 "
        "offload_param.max_in_cpu=1000000000 save_muon_momentum_buffer_in_memory=false",
    ),
    refuse_keys(
        "zero_optimization",
        "it rounds what is sent, which changes numbers",
        "zero_quantized_weights=false zero_quantized_nontrainable_weights=false "
        "zero_quantized_gradients=false zeropp_loco_param.*=null",
    ),
    refuse_keys(
        "zero_optimization",
        'it updates with old gradients: write only "device": "cpu"',
        "zenflow.*=null offload_optimizer.super_offload=false",
    ),
    refuse_keys(
        "zero_optimization",
        "what stays whole is said by stage3_param_persistence_threshold alone",
        "stage3_model_persistence_threshold=9223372036854775807",
    ),
    refuse_keys("zero_optimization", "stage 1 has one form here", "legacy_stage1=false"),
    ignore_keys("zero_optimization", ON_DEVICE, "offload_optimizer.cpuadam_cores_perc=0.8"),
    ignore_keys("", ON_DEVICE, "zero_force_ds_cpu_optimizer=true"),
    ignore_keys("", "any optimizer of optax is taken", "zero_allow_untested_optimizer=false"),
    ignore_keys("", NVME, "aio.*:any"),
    accept_keys("tensor_parallel", "autotp_size=0 tp.tp_size=1 | how many devices split a layer"),
    refuse_keys(
        "tensor_parallel",
        "write the rules of your layers into the strategy: docs/strategies.md",
        "partition_config=null partition_config.*=null injection_policy_tuple=null",
    ),
    ignore_keys(
        "tensor_parallel",
        "the model names its dimensions, and TENSOR splits them by name",
        "preset_model:str tp_overlap_comm=false vocab_parallel_lm_head:bool dtype:any tp.*:any "
        'vocab_parallel_ce_backend="torch" keep_module_on_host=false kernel_inject=false',
    ),
    accept_keys("expert_parallel", "enabled=false autoep_size=1 | how many devices share experts"),
    refuse_keys(
        "expert_parallel",
        "routing is the model's: give it to the model (docs/experts.md)",
        'score_func="auto" score_apply="auto" top_k="auto" routed_scaling_factor="auto" '
        "route_norm=null route_scale=1.0 num_expert_groups=null num_limited_groups=null "
        "load_balance_coeff=null expert_tensor_parallel_size=1",
    ),
    ignore_keys("expert_parallel", "the model's own modules say what experts are", "*:any"),
    accept_keys("pipeline", 'stages="auto" | the stages of a pipeline'),
    accept_keys("pipeline", "activation_checkpoint_interval=0 | remat"),
    refuse_keys("pipeline", "stages are cut by Schedule(balance=…)", 'partition="best"'),
    refuse_keys("pipeline", "layers draw by their own keys", "seed_layers=false"),
    ignore_keys(
        "pipeline", "TENSOR splits what stages send", "pipe_partitioned=true grad_partitioned=true"
    ),
    ignore_keys("", "the mesh orders the devices", "use_data_before_expert_parallelism=false"),
    accept_keys("activation_checkpointing", "cpu_checkpointing=false | what waits on the host"),
    accept_keys("activation_checkpointing", "partition_activations=false | whether it is split"),
    ignore_keys(
        "activation_checkpointing",
        "it says how, not what is computed again: that is remat=",
        "contiguous_memory_optimization=false number_checkpoints:int profile=false "
        "synchronize_checkpoint_boundary=false",
    ),
)

# -- logging, and other tools ---------------------------------------------------------------

ENABLED = {  # sections that are refused if enabled
    "autotuning": "it changes the batch: hfjax memory says what fits",
    "elasticity": "it changes the batch: write train_batch_size",
    "hybrid_engine": "hfjax.generate writes text with the same parameters",
    "data_efficiency": "it drops tokens and draws other rows",
    "curriculum_learning": "it shortens rows: give shorter batches",
    "progressive_layer_drop": "it drops layers",
    "eigenvalue": NO_COMPRESSION,
}
TOOLS = merge(
    *(refuse_keys(section, why, "enabled=false") for section, why in ENABLED.items()),
    *(ignore_keys(section, DISABLED, "*:any") for section in ENABLED),
    ignore_keys(
        "",
        TOLD,
        "steps_per_print:int wall_clock_breakdown=false memory_breakdown=false dump_state=false "
        "log_level:str vocabulary_size:int timers.*:any comms_logger.*:any flops_profiler.*:any",
    ),
    ignore_keys("", "hfjax train has --log.tensorboard", "tensorboard.*:any"),
    ignore_keys("", "hfjax train has --log.wandb PROJECT", "wandb.*:any"),
    ignore_keys("", "a run leaves metrics.jsonl", "comet.*:any csv_monitor.*:any"),
    ignore_keys(
        "", CHECKPOINTS, "checkpoint.*:any nebula.*:any datastates.*:any datastates_ckpt.*:any"
    ),
    ignore_keys("", "it frees no memory of devices", "disable_python_gc=false"),
    ignore_keys("", "batches come from your loader, or hfjax.data", "dataloader_drop_last=false"),
    refuse_keys("", "attention is the model's: give it there", "sparse_attention.*=null"),
    refuse_keys("", NO_COMPRESSION, "compression_training.*enabled=false"),
    ignore_keys("", DISABLED, "compression_training.*:any"),
    refuse_keys("", NO_COMPRESSION, "quantize_training.*=null weight_quantization.*=null"),
    refuse_keys(
        "compile", "DeepCompile's passes are not here: write remat= and offload=", "passes=null"
    ),
    refuse_keys(
        "compile",
        "write offload=, HOST_OPTIMIZER or HOST_PARAMETERS",
        "offload_activation=false offload_opt_states=false offload_parameters=false",
    ),
    ignore_keys("", "XLA compiles the step", "compile.*:any graph_harvesting=false"),
)

TABLE = merge(UPDATES, STEP, PLACES, TOOLS)

# -- other names ----------------------------------------------------------------------------

SECTIONS = {re.split(r"[.(]", key)[0] for key in TABLE}  # and keys outside of sections
SHORTER = """prefetch_bucket_size param_persistence_threshold model_persistence_threshold
max_live_parameters max_reuse_distance gather_16bit_weights_on_model_save
module_granularity_threshold use_all_reduce_for_fetch_params allgather_sequential""".split()
OTHER_NAMES = {  # aliases of keys and sections that DeepSpeed reads too
    **{f"zero_optimization.{name}": f"zero_optimization.stage3_{name}" for name in SHORTER},
    "tensor_parallel.tensor_parallel": "tensor_parallel.tp",
    "tensor_parallel.replace_with_kernel_inject": "tensor_parallel.kernel_inject",
    "bfloat16": "bf16",
}


def usual_name(path: str, others: Collection[str]) -> str:
    """Return a path as the table has it, unless `others` already contain that one.

    >>> usual_name("bfloat16.enabled", ["fp16.enabled"]), usual_name("bfloat16", ["bf16.enabled"])
    ('bf16.enabled', 'bfloat16')
    """
    is_in = lambda inner, outer: inner == outer or inner.startswith(f"{outer}.")
    old = next((name for name in OTHER_NAMES if is_in(path, name)), None)
    if old is None or any(is_in(other, OTHER_NAMES[old]) for other in others):
        return path
    return OTHER_NAMES[old] + path.removeprefix(old)
