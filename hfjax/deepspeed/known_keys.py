"""The table of DeepSpeed's keys, of version 0.19 and before: what becomes of each one.

A row is a key with DeepSpeed's default (or, where it has none, the type of its value). `taken` is
carried out by the other files here. `ignored` changes neither numbers nor memory. `refused` does
change them and is not here: only its default, by which it is off, is let through. What changes
numbers or memory is never ignored. `*` stands for any keys.
"""

from hfjax.deepspeed.key_rows import ignored, joined, refused, taken

# -- words that several rows share --------------------------------------------------------

SCHEDULED = "XLA schedules the program: buckets, buffers and prefetching have no counterpart"
LAYERS = "each layer is gathered before it is used, and dropped after"
NVME = "only offload to NVMe uses it, which is not here"
TOLD = "it only changes what is told; hfjax train has --log.every and --profile"
CHECKPOINTS = "checkpoints are hfjax's own (docs/checkpoints.md): each restores on any mesh"
WITH_ENABLED = "it only matters where the section is enabled"
NO_COMPRESSION = "hfjax compresses no model"
OF_RATES = "part of the rate"
COMPRESSES = "it compresses gradients, which changes numbers: use Adam or Lamb"

# -- optimizers and schedules, by type ------------------------------------------------------

# As DeepSpeed compares them, in small letters, and as the table writes them.
OPTIMIZERS = {
    name.lower(): name for name in ("Adam", "AdamW", "Lamb", "Lion", "Adagrad", "SGD", "Muon")
}
COMPRESSING = ("OneBitAdam", "ZeroOneAdam", "OneBitLamb")  # refused with all that they say
SCHEDULES = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest")

DECAYED = {"lr": (1e-3, "{}"), "weight_decay": (0.0, "{}")}
BETAS = {"betas": ((0.9, 0.999), "b1, b2 = {}")}
EPSILON = {"eps": (1e-8, "{}")}
FORM = "it says which code runs, not what it computes"
FORMS = {"fused": False, "foreach": bool, "capturable": False, "differentiable": False}
ADAM = joined(
    *(
        taken(f"optimizer({name}).params", **DECAYED, **BETAS, **EPSILON)
        | taken(f"optimizer({name}).params", adam_w_mode=(True, "{}"))
        | ignored(f"optimizer({name}).params", FORM, torch_adam=False, set_grad_none=True, **FORMS)
        | refused(
            f"optimizer({name}).params",
            "optax's adamw has no such form: leave it out, or give your own optimizer",
            **{"amsgrad": False, "bias_correction": True, "maximize": False},
            decoupled_weight_decay=False,
            fp32_optimizer_states=True,
        )
        for name in ("Adam", "AdamW")
    )
)
OTHERS = joined(
    taken("optimizer(Lamb).params", **DECAYED, **BETAS, **EPSILON),
    taken(
        "optimizer(Lamb).params",
        max_coeff=(10.0, "the greatest ratio of norms"),
        min_coeff=(0.01, "the least ratio of norms"),
        bias_correction=(True, "{}"),
        eps_inside_sqrt=(False, "{}"),
    ),
    refused("optimizer(Lamb).params", "there is none: use gradient_clipping", max_grad_norm=0.0),
    refused("optimizer(Lamb).params", "FusedLamb has none either", amsgrad=False),
    taken("optimizer(Lion).params", **DECAYED, **BETAS),
    ignored("optimizer(Lion).params", FORM, set_grad_none=True),
    taken("optimizer(Adagrad).params", lr=(1e-2, "{}"), weight_decay=(0.0, "{}")),
    taken(
        "optimizer(Adagrad).params",
        eps=(1e-10, "{}"),
        initial_accumulator_value=(0.0, "the squares at the start"),
    ),
    refused(
        "optimizer(Adagrad).params",
        "it is not here: leave it out, or give your own optimizer",
        **{"lr_decay": 0.0, "maximize": False, "amsgrad": False, "fp32_optimizer_states": True},
    ),
    ignored("optimizer(Adagrad).params", FORM, **FORMS),
    taken("optimizer(SGD).params", **DECAYED),
    taken("optimizer(SGD).params", momentum=(0.0, "{}"), nesterov=(False, "{}")),
    refused(
        "optimizer(SGD).params",
        "it is not here: leave it out, or give your own optimizer",
        **{"dampening": 0.0, "maximize": False},
    ),
    ignored("optimizer(SGD).params", FORM, **FORMS),
    taken("optimizer(Muon).params", **DECAYED, **BETAS, **EPSILON),
    taken("optimizer(Muon).params", momentum=(0.95, "{}"), ns_method=("gram", "{}")),
    taken("optimizer(Muon).params", muon_lr=(float, "{}"), adam_lr=(float, "{}")),
    *(ignored(f"optimizer({name}).params", COMPRESSES, **{"*": object}) for name in COMPRESSING),
)
WARMUP = {"warmup_num_steps": (1000, OF_RATES), "warmup_type": ("log", OF_RATES)}
RATES = joined(
    taken("scheduler(WarmupLR).params", warmup_max_lr=(float, OF_RATES)),
    taken("scheduler(WarmupLR).params", warmup_min_lr=(0.0, OF_RATES), **WARMUP),
    taken("scheduler(WarmupDecayLR).params", warmup_max_lr=(1e-3, OF_RATES)),
    taken("scheduler(WarmupDecayLR).params", warmup_min_lr=(0.0, OF_RATES), **WARMUP),
    taken("scheduler(WarmupDecayLR).params", total_num_steps=(int, OF_RATES)),
    taken("scheduler(WarmupCosineLR).params", total_num_steps=(int, OF_RATES), **WARMUP),
    taken(
        "scheduler(WarmupCosineLR).params",
        warmup_min_ratio=(0.0, OF_RATES),
        cos_min_ratio=(0.0001, OF_RATES),
    ),
    taken("scheduler(OneCycle).params", cycle_min_lr=(float, OF_RATES)),
    taken("scheduler(OneCycle).params", cycle_max_lr=(float, OF_RATES)),
    taken(
        "scheduler(OneCycle).params",
        cycle_first_step_size=(2000, OF_RATES),
        cycle_second_step_size=(int, OF_RATES),
        cycle_first_stair_count=(0, OF_RATES),
        cycle_second_stair_count=(int, OF_RATES),
        decay_step_size=(0, OF_RATES),
        decay_lr_rate=(0.0, OF_RATES),
        cycle_momentum=(True, "{}"),
    ),
    ignored(
        "scheduler(OneCycle).params",
        "the momentum is not cycled",
        **{"cycle_min_mom": 0.8, "cycle_max_mom": 0.9, "decay_mom_rate": 0.0},
    ),
    taken(
        "scheduler(LRRangeTest).params",
        lr_range_test_min_lr=(1e-3, OF_RATES),
        lr_range_test_step_size=(2000, OF_RATES),
        lr_range_test_step_rate=(1.0, OF_RATES),
        lr_range_test_staircase=(False, OF_RATES),
    ),
)

# -- batch, types, clipping -------------------------------------------------------------------

STEP = joined(
    taken(
        "",
        train_batch_size=(int, "rows={}, of all devices"),
        train_micro_batch_size_per_gpu=(int, "rows of a device in a microbatch"),
        gradient_accumulation_steps=(int, "accumulate={}"),
        gradient_clipping=(1.0, "clip={}"),
        communication_data_type=(str, "the type of a reduction"),
    ),
    taken("optimizer", type=(str, "the optimizer")),
    taken("scheduler", type=(str, "the rate")),
    ignored("optimizer", FORM, legacy_fusion=False),
    refused(
        "",
        "one call of the step takes all microbatches and then updates",
        managed_gradient_accumulation=True,
    ),
    refused("", "hfjax takes the mean: multiply the loss yourself", gradient_allreduce_op="mean"),
    refused("", "gradients of embeddings are dense here", sparse_gradients=False),
    refused("", "new parameters are always gathered", disable_allgather=False),
    refused("", "CONTEXT sends as hfjax.Context says", seq_parallel_communication_data_type="fp32"),
    refused(
        "",
        "write hfjax.CONTEXT and make_mesh(context=…), docs/long_sequences.md",
        sequence_parallel_size=1,
    ),
    ignored(
        "",
        "gradients are added in float32, and the mean is the same wherever it is divided",
        **{"prescale_gradients": False, "gradient_predivide_factor": 1.0},
    ),
    taken(
        "fp16",
        enabled=(False, 'precision=Precision(compute="float16", scale=…)'),
        loss_scale=(0.0, "a scale that moves"),
        initial_scale_power=(16, "LossScale(initial=2**{})"),
        loss_scale_window=(1000, "LossScale(window={})"),
        hysteresis=(2, "LossScale(hysteresis={})"),
        consecutive_hysteresis=(False, "LossScale(consecutive={})"),
        min_loss_scale=(1.0, "LossScale(minimum={})"),
    ),
    refused("fp16", "cast the batch yourself: hfjax casts parameters", auto_cast=False),
    refused(
        "fp16",
        "parameters are stored in float32 here; hfjax.master(optimizer) stores less",
        **{"fp16_master_weights_and_grads": False},
    ),
    taken(
        "bf16",
        enabled=(False, 'precision="bf16"'),
        check_grad_overflow=(True, 'nonfinite="skip"'),
    ),
    ignored("bf16", "it says when, not what is added", immediate_grad_update=False),
    refused(
        "bf16",
        "master parameters, gradients and moments are float32 here; hfjax.adamw has mu_dtype",
        **{"bf16_master_weights_and_grads": False, "bf16_optimizer_states": False},
    ),
    refused("bfloat16", "the section is called bf16", **{"*": False}),
    refused("amp", "Apex's types by operation are not here: write bf16", enabled=False),
    ignored("amp", WITH_ENABLED, **{"*": object}),
    refused(
        "torch_autocast",
        "torch's types by operation are not here: write bf16 (norms, routers and the loss of "
        "hfjax's models stay in float32)",
        enabled=False,
    ),
    ignored(
        "torch_autocast",
        WITH_ENABLED,
        dtype="bfloat16",
        lower_precision_safe_modules=list,
    ),
    refused("data_types", "gradients are added in float32 here", grad_accum_dtype="fp32"),
    refused(
        "data_types",
        "parameters are stored in float32 here; hfjax.master(optimizer) stores bfloat16",
        param_dtype="fp32",
    ),
    refused("data_types", "variables keep the type that the model gives them", buffer_dtype=str),
    refused(
        "data_types", "a list of paths is a mapping of precisions here", keep_in_fp32_modules="auto"
    ),
)

# -- where everything lies --------------------------------------------------------------------

ZERO = joined(
    taken(
        "zero_optimization",
        stage=(0, "the strategy"),
        zero_hpz_partition_size=(1, "HSDP"),
        mics_shard_size=(-1, "HSDP"),
        stage3_param_persistence_threshold=(100_000, "replicate_below={} of the strategy"),
        cpu_offload=(False, "HOST_OPTIMIZER"),
        cpu_offload_param=(False, "HOST_PARAMETERS"),
    ),
    taken(
        "zero_optimization.offload_optimizer",
        device=("none", "HOST_OPTIMIZER"),
        ratio=(1.0, 'memory={{"moments": {}}} of the strategy'),
    ),
    taken("zero_optimization.offload_param", device=("none", "HOST_PARAMETERS")),
    ignored(
        "zero_optimization",
        SCHEDULED,
        allgather_partitions=True,
        allgather_bucket_size=500_000_000,
        reduce_bucket_size=500_000_000,
        reduce_scatter=True,
        overlap_comm=bool,
        contiguous_gradients=True,
        use_multi_rank_bucket_allreduce=True,
        round_robin_gradients=False,
        grad_hooks=True,
        sub_group_size=1_000_000_000,
        parameter_alignment=False,
        stage3_prefetch_bucket_size=50_000_000,
        stage3_allgather_sequential=False,
        stage3_use_all_reduce_for_fetch_params=False,
        mics_hierarchical_params_gather=False,
    ),
    ignored(
        "zero_optimization",
        LAYERS,
        stage3_max_live_parameters=1_000_000_000,
        stage3_max_reuse_distance=1_000_000_000,
        stage3_module_granularity_threshold=0,
        memory_efficient_linear=True,
        override_module_apply=True,
        **{"leaf_module.*": list},
    ),
    ignored(
        "zero_optimization",
        CHECKPOINTS,
        load_from_fp32_weights=True,
        elastic_checkpoint=False,
        pipeline_loading_checkpoint=False,
        stage3_gather_16bit_weights_on_model_save=False,
        stage3_gather_fp16_weights_on_model_save=False,
    ),
    ignored("zero_optimization", "the norm is always told", compute_grad_norm=True),
    ignored(
        "zero_optimization",
        "the first step names parameters that the loss does not use",
        ignore_unused_parameters=True,
    ),
    ignored("zero_optimization", TOLD, log_trace_cache_warnings=False, enable_sanity_checks=False),
    ignored("zero_optimization", NVME, save_muon_momentum_buffer_in_memory=False),
    ignored(
        "zero_optimization",
        "host memory is always pinned",
        cpu_offload_use_pin_memory=bool,
        **{"offload_optimizer.pin_memory": True, "offload_param.pin_memory": True},
    ),
    ignored(
        "zero_optimization.offload_optimizer",
        NVME,
        nvme_path=str,
        buffer_count=4,
        pipeline_read=False,
        pipeline_write=False,
        fast_init=False,
    ),
    ignored(
        "zero_optimization.offload_param",
        NVME,
        nvme_path=str,
        buffer_count=5,
        buffer_size=100_000_000,
        max_in_cpu=1_000_000_000,
    ),
    ignored(
        "zero_optimization.offload_optimizer",
        "the update runs on the device, part by part",
        cpuadam_cores_perc=0.8,
    ),
    refused(
        "zero_optimization",
        "it rounds what is sent, which changes numbers",
        zero_quantized_weights=False,
        zero_quantized_nontrainable_weights=False,
        zero_quantized_gradients=False,
        **{"zeropp_loco_param.*": None},
    ),
    refused(
        "zero_optimization",
        "it updates with old gradients: write HOST_OPTIMIZER alone",
        **{"zenflow.*": None, "offload_optimizer.super_offload": False},
    ),
    refused(
        "zero_optimization",
        "what stays whole is said by stage3_param_persistence_threshold alone",
        stage3_model_persistence_threshold=9_223_372_036_854_775_807,
    ),
    refused("zero_optimization", "stage 1 has one form here", legacy_stage1=False),
    ignored("", "any optimizer of optax is taken", zero_allow_untested_optimizer=False),
    ignored("", "the update runs on the device, part by part", zero_force_ds_cpu_optimizer=True),
    ignored("aio", NVME, **{"*": object}),
)
AXES = joined(
    taken("tensor_parallel", autotp_size=(0, "TENSOR")),
    taken("tensor_parallel.tp", tp_size=(1, "TENSOR")),
    refused(
        "tensor_parallel",
        "write the rules of your layers into the strategy: docs/strategies.md",
        **{"partition_config.*": None, "partition_config": None, "injection_policy_tuple": None},
    ),
    ignored(
        "tensor_parallel",
        "the model names its dimensions, and TENSOR splits them by name",
        preset_model=str,
        tp_overlap_comm=False,
        vocab_parallel_lm_head=bool,
        vocab_parallel_ce_backend="torch",
        keep_module_on_host=False,
        kernel_inject=False,
        dtype=object,
        **{"tp.*": object},
    ),
    taken("expert_parallel", enabled=(False, "EXPERT"), autoep_size=(1, "EXPERT")),
    refused("expert_parallel", "DeepSpeed takes only 1 too", expert_tensor_parallel_size=1),
    refused(
        "expert_parallel",
        "routing is the model's: give it to the model (docs/experts.md)",
        score_func="auto",
        score_apply="auto",
        route_norm=None,
        route_scale=1.0,
        top_k="auto",
        routed_scaling_factor="auto",
        num_expert_groups=None,
        num_limited_groups=None,
        load_balance_coeff=None,
    ),
    ignored("expert_parallel", "the model's own modules say what experts are", **{"*": object}),
    taken(
        "pipeline",
        stages=("auto", "PIPE"),
        activation_checkpoint_interval=(0, "remat"),
    ),
    refused("pipeline", "stages are cut by Schedule(balance=…)", partition="best"),
    refused("pipeline", "layers draw by their own keys", seed_layers=False),
    ignored("pipeline", "TENSOR splits what stages send", pipe_partitioned=True),
    ignored("pipeline", "TENSOR splits what stages send", grad_partitioned=True),
    ignored("", "the mesh orders the devices", use_data_before_expert_parallelism=False),
    taken(
        "activation_checkpointing",
        cpu_checkpointing=(False, 'remat="full", offload=1.0'),
        partition_activations=(False, "SEQUENCE"),
    ),
    ignored(
        "activation_checkpointing",
        "it says how, not what is computed again: that is remat=",
        contiguous_memory_optimization=False,
        number_checkpoints=int,
        synchronize_checkpoint_boundary=False,
        profile=False,
    ),
)

# -- what only tells, and what is another program ---------------------------------------------

TOOLS = joined(
    ignored(
        "",
        TOLD,
        steps_per_print=int,
        wall_clock_breakdown=False,
        memory_breakdown=False,
        dump_state=False,
        log_level=str,
        vocabulary_size=int,
        **{"timers.*": object, "comms_logger.*": object, "flops_profiler.*": object},
    ),
    ignored("", "it frees no memory of devices", disable_python_gc=False),
    ignored("", "batches come from your own loader, or hfjax.data", dataloader_drop_last=False),
    ignored("", "hfjax train has --log.tensorboard", **{"tensorboard.*": object}),
    ignored("", "hfjax train has --log.wandb PROJECT", **{"wandb.*": object}),
    ignored("", "a run leaves metrics.jsonl", **{"comet.*": object, "csv_monitor.*": object}),
    ignored("", CHECKPOINTS, **{"checkpoint.*": object, "nebula.*": object}),
    ignored("", CHECKPOINTS, **{"datastates.*": object, "datastates_ckpt.*": object}),
    refused("autotuning", "it changes the batch: hfjax memory says what fits", enabled=False),
    ignored("autotuning", WITH_ENABLED, **{"*": object}),
    refused("elasticity", "it changes the batch: write train_batch_size", enabled=False),
    ignored("elasticity", WITH_ENABLED, **{"*": object}),
    refused("hybrid_engine", "hfjax.generate writes text with the same parameters", enabled=False),
    ignored("hybrid_engine", WITH_ENABLED, **{"*": object}),
    refused("sparse_attention", "attention is the model's: give it there", **{"*": None}),
    refused("data_efficiency", "it drops tokens and draws other rows", enabled=False),
    ignored("data_efficiency", WITH_ENABLED, **{"*": object}),
    refused("curriculum_learning", "it shortens rows: give shorter batches", enabled=False),
    ignored("curriculum_learning", WITH_ENABLED, **{"*": object}),
    refused("progressive_layer_drop", "it drops layers", enabled=False),
    ignored("progressive_layer_drop", WITH_ENABLED, **{"*": object}),
    refused("eigenvalue", NO_COMPRESSION, enabled=False),
    ignored("eigenvalue", WITH_ENABLED, **{"*": object}),
    refused("", NO_COMPRESSION, **{"compression_training.*enabled": False}),
    ignored("compression_training", WITH_ENABLED, **{"*": object}),
    refused("", NO_COMPRESSION, **{"quantize_training.*": None, "weight_quantization.*": None}),
    refused("compile", "DeepCompile's passes are not here: write remat= and offload=", passes=None),
    refused(
        "compile",
        "write offload=, HOST_OPTIMIZER or HOST_PARAMETERS",
        **{"offload_activation": False, "offload_opt_states": False, "offload_parameters": False},
    ),
    ignored("compile", "XLA compiles the step", **{"*": object}),
    ignored("", "XLA compiles the step", graph_harvesting=False),
)

TABLE = joined(ADAM, OTHERS, RATES, STEP, ZERO, AXES, TOOLS)
