"""The step arguments of a file: precision, clipping, remat and offload."""

from typing import Any

from hfjax.compat.deepspeed.config_file import DeepSpeedConfig
from hfjax.parallel.precision.dtypes import LossScale, Precision

MOST = 2.0**24  # limit of our loss scales; DeepSpeed's have none
STORED = "parameters are stored, and gradients added, in float32"
RULES = "; without ZeRO DeepSpeed has no hysteresis and no stop: ZeRO's rules are taken"
FLOAT16 = "float16 overflows in a sum over devices, which DeepSpeed divides first: write fp32"
TYPES = {"fp32": "float32", "bf16": "bfloat16"}


def parse_execution(config: DeepSpeedConfig) -> dict[str, Any]:
    """Return the arguments of train_step that a file sets, except for microbatches."""
    clip = config.get("gradient_clipping") or None
    remark = "" if clip is None else ": norms above are divided by norm, there + 1e-6"
    config.take("gradient_clipping", f"max_grad_norm={clip}{remark}")
    config.imply("gradient_clipping", f"max_grad_norm={clip}, DeepSpeed's default{remark}")
    return {"max_grad_norm": clip, **_precision_arguments(config), **_memory_arguments(config)}


def precision_name(fields: dict[str, Any]) -> str:
    """Return the value of `--precision` for the dtypes of a step."""
    precision = fields["precision"]
    names = {"float16": "fp16", "bfloat16": "bf16", "None": "stored"}
    return precision if isinstance(precision, str) else names[str(precision.compute)]


def _precision_arguments(config: DeepSpeedConfig) -> dict[str, Any]:
    is_fp16, is_bf16 = config.get("fp16.enabled"), config.get("bf16.enabled")
    for section, is_enabled in {"fp16": is_fp16, "bf16": is_bf16}.items():
        if is_fp16 and is_bf16:
            config.refuse(f"{section}.enabled", "fp16 and bf16 are both enabled: keep one")
        for path in (p for p in config.values if p.startswith(f"{section}.") and not is_enabled):
            config.ignore(path, f"{section}.enabled is not true")
    fields: dict[str, Any] = {"reduce": _reduce_dtype(config)}
    if is_fp16:
        fields |= {"compute": "float16", "scale": _loss_scale(config)}
        rules = RULES * (not config.get("zero_optimization.stage"))
        config.take("fp16.enabled", f'Precision(compute="float16", scale=…); {STORED}{rules}')
    elif is_bf16:
        fields["compute"] = "bfloat16"
        config.take("bf16.enabled", f'precision="bf16"; {STORED}')
    fields = {name: value for name, value in fields.items() if value is not None}
    if not fields:
        return {"precision": "stored"}
    precision = "bf16" if fields == {"compute": "bfloat16"} else Precision(**fields)
    skips = {"on_nonfinite": _bf16_nonfinite_policy(config)} if is_bf16 and not is_fp16 else {}
    return {"precision": precision, **skips}


def _reduce_dtype(config: DeepSpeedConfig) -> str | None:
    dtype, path = config.get("communication_data_type"), "communication_data_type"
    if dtype is None:
        return None
    if dtype.lower() == "fp16":
        config.refuse(path, FLOAT16)
    elif dtype.lower() not in TYPES:
        config.refuse(path, f"there are {', '.join(TYPES)}")
    config.take(path, f'Precision(reduce="{TYPES.get(dtype.lower())}")')
    return TYPES.get(dtype.lower())


def _bf16_nonfinite_policy(config: DeepSpeedConfig) -> str:
    is_skip, path = config.get("bf16.check_grad_overflow"), "bf16.check_grad_overflow"
    config.take(
        path, 'on_nonfinite="skip"' if is_skip else 'on_nonfinite="stop": there it is applied'
    )
    config.imply(path, f"on_nonfinite={'skip' if is_skip else 'stop'!r}, DeepSpeed's default")
    return "skip" if is_skip else "stop"


def _loss_scale(config: DeepSpeedConfig) -> LossScale:
    """Return the loss scale as in ZeRO; it is dynamic unless `loss_scale` gives a number."""
    get_fp16 = lambda key: config.get(f"fp16.{key}")
    static, least = float(get_fp16("loss_scale")), float(get_fp16("min_loss_scale"))
    keys = ("initial_scale_power", "loss_scale_window", "hysteresis", "consecutive_hysteresis")
    if static and not 2.0**-126 <= static <= 2.0**126:
        config.refuse("fp16.loss_scale", "float32 holds scales from 2**-126 to 2**126")
        static = 1.0
    if static:
        for key in (*keys, "min_loss_scale"):
            config.ignore(f"fp16.{key}", "loss_scale says a scale that stays")
        config.take("fp16.loss_scale", f"LossScale({static}, window=None); ZeRO's rules")
        least = min(least or static, static)
        return LossScale(static, window=None, minimum=least, maximum=max(MOST, static))
    power, window, hysteresis, consecutive = map(get_fp16, keys)
    initial, most = 2.0 ** min(power, 126), max(MOST, 2.0 ** min(power, 126))
    for key in (key for key in keys[1:3] if get_fp16(key) < 1):
        config.refuse(f"fp16.{key}", "a number from 1 on is expected")
    if power > 126:
        config.refuse("fp16.initial_scale_power", "float32 holds scales up to 2**126")
    elif not 0 < least <= initial:
        config.refuse("fp16.min_loss_scale", f"it has to be above 0, at most 2**{power}, the first")
        least = 1.0
    for say in (config.take, config.imply):
        say("fp16.loss_scale", f"a scale that moves, at most {most:.0f} (DeepSpeed: no limit)")
    window, hysteresis = (max(int(n), 1) for n in (window, hysteresis))  # smaller ones are refused
    return LossScale(initial, window, hysteresis, least, most, bool(consecutive))


def _memory_arguments(config: DeepSpeedConfig) -> dict[str, Any]:
    """Return the arguments for remat, and for the offload of saved residuals to host memory."""
    partition_path = "activation_checkpointing.partition_activations"
    if config.get(partition_path) and config.tensor_size > 1:
        config.refuse(
            partition_path, "SEQUENCE splits what is kept over tensor: give the strategy yourself"
        )
    config.ignore(partition_path, "nothing that is kept is whole on several devices")
    path = "pipeline.activation_checkpoint_interval"
    layers = int(config.get(path))
    remat = {"remat": "full" if layers == 1 else f"group:{layers}"} if layers else {}
    config.take(path, f"remat={remat.get('remat', 'none')!r}")
    path = "activation_checkpointing.cpu_checkpointing"
    if config.get(path):
        config.take(path, 'remat="full", offload=1.0')
        return {"remat": "full", **remat, "offload": 1.0}
    config.ignore(path, "nothing waits on the host")
    return remat
