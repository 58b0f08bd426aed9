"""How a step computes by a file: precision, clipping, remat and offload."""

from typing import Any

from hfjax.compat.deepspeed.config_file import Given
from hfjax.parallel.precision.dtypes import LossScale, Precision

MOST = 2.0**24  # of our scales; DeepSpeed's have no upper limit
STORED = "parameters are stored, and gradients added, in float32"
RULES = "; without ZeRO DeepSpeed has no hysteresis and no stop: ZeRO's rules are taken"
FLOAT16 = "float16 overflows in a sum over devices, which DeepSpeed divides first: write fp32"
TYPES = {"fp32": "float32", "bf16": "bfloat16"}


def computed(given: Given) -> dict[str, Any]:
    """Return the arguments of train_step that a file says, but for the microbatches."""
    clip = given.of("gradient_clipping") or None
    near = "" if clip is None else ": norms above it are divided by norm, there by norm + 1e-6"
    given.take("gradient_clipping", f"clip={clip}{near}")
    given.imply("gradient_clipping", f"clip={clip}, DeepSpeed's default{near}")
    return {"clip": clip, **_types(given), **_kept(given)}


def word_of(fields: dict[str, Any]) -> str:
    """Return how `--precision` calls the types of a step."""
    given = fields.get("precision", "stored")
    words = {"float16": "fp16", "bfloat16": "bf16", "None": "stored"}
    return given if isinstance(given, str) else words[str(given.compute)]


def _types(given: Given) -> dict[str, Any]:
    half, brain = given.of("fp16.enabled"), given.of("bf16.enabled")
    for section, on in {"fp16": half, "bf16": brain}.items():
        if half and brain:
            given.refuse(f"{section}.enabled", "fp16 and bf16 are both enabled: keep one")
        for path in (p for p in given.values if p.startswith(f"{section}.") and not on):
            given.ignore(path, f"{section}.enabled is not true")
    fields: dict[str, Any] = {"reduce": _reduced(given)}
    if half:
        fields |= {"compute": "float16", "scale": _scale(given)}
        rules = RULES * (not given.of("zero_optimization.stage"))
        given.take("fp16.enabled", f'Precision(compute="float16", scale=…); {STORED}{rules}')
    elif brain:
        fields["compute"] = "bfloat16"
        given.take("bf16.enabled", f'precision="bf16"; {STORED}')
    fields = {name: value for name, value in fields.items() if value is not None}
    if not fields:
        return {}
    precision = "bf16" if fields == {"compute": "bfloat16"} else Precision(**fields)
    skips = {"nonfinite": _nonfinite(given)} if brain and not half else {}
    return {"precision": precision, **skips}


def _reduced(given: Given) -> str | None:
    word, path = given.of("communication_data_type"), "communication_data_type"
    if word is None:
        return None
    if word.lower() == "fp16":
        given.refuse(path, FLOAT16)
    elif word.lower() not in TYPES:
        given.refuse(path, f"there are {', '.join(TYPES)}")
    given.take(path, f'Precision(reduce="{TYPES.get(word.lower())}")')
    return TYPES.get(word.lower())


def _nonfinite(given: Given) -> str:
    skips, path = given.of("bf16.check_grad_overflow"), "bf16.check_grad_overflow"
    given.take(path, 'nonfinite="skip"' if skips else 'nonfinite="stop": there it is applied')
    given.imply(path, f"nonfinite={'skip' if skips else 'stop'!r}, DeepSpeed's default")
    return "skip" if skips else "stop"


def _scale(given: Given) -> LossScale:
    """Return the scale as ZeRO has it; it moves unless `loss_scale` says a number."""
    of = lambda key: given.of(f"fp16.{key}")
    static, least = float(of("loss_scale")), float(of("min_loss_scale"))
    keys = ("initial_scale_power", "loss_scale_window", "hysteresis", "consecutive_hysteresis")
    if static and not 2.0**-126 <= static <= 2.0**126:
        given.refuse("fp16.loss_scale", "float32 holds scales from 2**-126 to 2**126")
        static = 1.0
    if static:
        for key in (*keys, "min_loss_scale"):
            given.ignore(f"fp16.{key}", "loss_scale says a scale that stays")
        given.take("fp16.loss_scale", f"LossScale({static}, window=None); ZeRO's rules")
        least = min(least or static, static)
        return LossScale(static, window=None, minimum=least, maximum=max(MOST, static))
    power, window, hysteresis, consecutive = map(of, keys)
    initial, most = 2.0 ** min(power, 126), max(MOST, 2.0 ** min(power, 126))
    for key in (key for key in keys[1:3] if of(key) < 1):
        given.refuse(f"fp16.{key}", "a number from 1 on is expected")
    if power > 126:
        given.refuse("fp16.initial_scale_power", "float32 holds scales up to 2**126")
    elif not 0 < least <= initial:
        given.refuse("fp16.min_loss_scale", f"it has to be above 0, at most 2**{power}, the first")
        least = 1.0
    for say in (given.take, given.imply):
        say("fp16.loss_scale", f"a scale that moves, at most {most:.0f} (DeepSpeed: no limit)")
    window, hysteresis = (max(int(n), 1) for n in (window, hysteresis))  # refused if they are less
    return LossScale(initial, window, hysteresis, least, most, bool(consecutive))


def _kept(given: Given) -> dict[str, Any]:
    """Return what is computed again, and what of the kept tensors waits on the host."""
    splits = "activation_checkpointing.partition_activations"
    if given.of(splits) and given.tensor > 1:
        given.refuse(splits, "SEQUENCE splits what is kept over tensor: give the strategy yourself")
    given.ignore(splits, "nothing that is kept is whole on several devices")
    path = "pipeline.activation_checkpoint_interval"
    layers = int(given.of(path))
    remat = {"remat": "full" if layers == 1 else f"group:{layers}"} if layers else {}
    given.take(path, f"remat={remat.get('remat', 'none')!r}")
    path = "activation_checkpointing.cpu_checkpointing"
    if given.of(path):
        given.take(path, 'remat="full", offload=1.0')
        return {"remat": "full", **remat, "offload": 1.0}
    given.ignore(path, "nothing waits on the host")
    return remat
