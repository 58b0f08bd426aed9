"""The optimizer and learning rate of a file: sections optimizer and scheduler."""

from collections.abc import Callable
from typing import Any, NamedTuple

import optax

from hfjax.compat.deepspeed.config_file import DeepSpeedConfig
from hfjax.compat.deepspeed.known_keys import COMPRESSES, COMPRESSING, OPTIMIZERS, SCHEDULES, TABLE
from hfjax.compat.deepspeed.lr_schedules import schedule
from hfjax.compat.deepspeed.torch_updates import adagrad, lamb, uncorrected_adam
from hfjax.utils.keywords import is_real, name_hint

Params = dict[str, Any]
LAMB = "DeepSpeed's lamb; its norms are of arrays as stored: stacked layers share one"
OTHER_MUON = (
    "hfjax has optax's muon, which corrects the bias of its momentum (DeepSpeed's does not) and "
    "iterates in the dtype of the update (DeepSpeed's in float16, on Gram matrices): leave the "
    "section out, and give hfjax.optimizers.muon(muon_lr or lr, beta=momentum, weight_decay=…, "
    "adam_weight_decay=…, adam_learning_rate=adam_lr or lr) yourself; on the command line "
    "--optimizer.name muon"
)
DECAYS = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
NEEDED = ("total_num_steps", "cycle_min_lr", "cycle_max_lr")


class NoFlagText(str):
    """A setting of a file that no flag of hfjax train can express."""


class OptimizerSetup(NamedTuple):
    """An optimizer and a rate, None if the file has none; `flags` are those of hfjax train."""

    optimizer: optax.GradientTransformation | None
    rate: Callable | None
    flags: dict[str, Any]


def parse_optimizer(config: DeepSpeedConfig) -> OptimizerSetup:
    """Return the optimizer and rate of a file; unsupported settings are refused."""
    kind = config.kind("optimizer")
    params = _optimizer_params(config, kind)
    rate = _make_schedule(config, params, kind)
    if params is None:
        return OptimizerSetup(None, rate, {} if rate is None else _rate_flags(config, {}))
    rate = optax.constant_schedule(params["lr"]) if rate is None else rate
    own = {"name": _flag_name(kind, params), "weight_decay": params["weight_decay"]}
    own |= {"factory": None, "no_decay": None}
    flags = {f"optimizer.{name}": value for name, value in own.items()}
    flags |= _rate_flags(config, params)
    return OptimizerSetup(_make_optimizer(config, kind, params, rate), rate, flags)


def _params(config: DeepSpeedConfig, section: str, kind: str) -> Params:
    """Return all parameters of an optimizer or schedule, DeepSpeed's defaults included."""
    inside = f"{section}({kind}).params."
    names = [key.removeprefix(inside) for key in TABLE if key.startswith(inside)]
    return {name: config.get(f"{section}.params.{name}") for name in names}


# -- the optimizer ------------------------------------------------------------------------


def _optimizer_params(config: DeepSpeedConfig, kind: str) -> Params | None:
    """Return the parameters of the optimizer, or None if there is none or it is refused."""
    known = ", ".join(name for name in OPTIMIZERS.values() if name != "Muon")
    if "optimizer.type" not in config.values:
        return None
    if kind in COMPRESSING:
        return config.refuse("optimizer.type", COMPRESSES)
    if kind == "Muon":
        return config.refuse("optimizer.type", OTHER_MUON)
    if kind not in OPTIMIZERS.values():
        near = name_hint(kind, OPTIMIZERS.values())
        return config.refuse("optimizer.type", f"there are {known}; give others yourself.{near}")
    params = _params(config, "optimizer", kind)
    _check_params(config, params)
    decays = "optimizer.params.weight_decay" in config.values
    if params.get("torch_adam") and not decays and not _adds_decay(kind, params):
        params["weight_decay"] = 1e-2  # torch's own default
    return params


def _check_params(config: DeepSpeedConfig, params: Params) -> None:
    """Refuse what torch refuses: betas of 1, Nesterov without momentum."""
    path, betas = "optimizer.params.betas", params.get("betas", (0, 0))
    if len(betas) != 2 or not all(is_real(beta, 0, 1) and beta < 1 for beta in betas):
        config.refuse(path, "two numbers from 0 to below 1 are expected")
        params["betas"] = TABLE[config.table_path(path)].default  # to report other problems too
    if params.get("nesterov") and not params["momentum"]:
        config.refuse("optimizer.params.nesterov", "it needs a momentum above 0: write that")
    if params.get("torch_adam") and not params["bias_correction"]:
        why = "torch's Adam has no such parameter: leave it or torch_adam out"
        config.refuse("optimizer.params.bias_correction", why)


def _adds_decay(kind: str, params: Params) -> bool:
    """Return whether Adam adds the decay to the gradient; else, by default, it is AdamW."""
    return kind == "Adam" and not params["adam_w_mode"]


def _flag_name(kind: str, params: Params) -> str:
    """Return the value of `--optimizer.name` for an optimizer."""
    return "adamw" if "Adam" in kind and not _adds_decay(kind, params) else kind.lower()


def _make_optimizer(config: DeepSpeedConfig, kind: str, params: Params, rate: Callable) -> Any:
    name, decay = _flag_name(kind, params), params["weight_decay"]
    b1, b2 = params.get("betas", (0, 0))
    meaning = f"optax.{name}"
    if not params.get("bias_correction", True) and name != "lamb":
        optimizer = uncorrected_adam(rate, params, decoupled=name == "adamw")
        meaning += ", without correction of the bias"
    elif name in ("adamw", "lion"):
        eps: Params = {} if name == "lion" else {"eps": params["eps"]}
        optimizer = getattr(optax, name)(rate, b1, b2, **eps, weight_decay=decay)
    elif name == "lamb":
        optimizer, meaning = lamb(rate, params), LAMB
    else:
        optimizer = _base_optimizer(name, params, rate)
        optimizer = optax.chain(optax.add_decayed_weights(decay), optimizer) if decay else optimizer
        meaning += ", decay added to gradients" * bool(decay)
    config.take("optimizer.type", meaning)
    return optimizer


def _base_optimizer(name: str, params: Params, rate: Callable) -> Any:
    """Return an optimizer with weight decay added to the gradient before it."""
    if name == "adam":
        return optax.adam(rate, *params["betas"], eps=params["eps"])
    if name == "sgd":
        return optax.sgd(rate, params["momentum"] or None, params["nesterov"])
    return adagrad(rate, params["initial_accumulator_value"], params["eps"])


# -- the rate -----------------------------------------------------------------------------


def _make_schedule(
    config: DeepSpeedConfig, optimizer_params: Params | None, optimizer_kind: str
) -> Callable | None:
    """Return the schedule of the file; `optimizer_params` are those of its optimizer."""
    name = config.kind("scheduler")
    if "scheduler.type" not in config.values:
        return None
    if name not in SCHEDULES:
        near = name_hint(name, SCHEDULES)
        return config.refuse("scheduler.type", f"there are {', '.join(SCHEDULES)}.{near}")
    params = _params(config, "scheduler", name)
    refuse = lambda key, why: config.refuse(f"scheduler.params.{key}", why)
    if params.get("warmup_type", "log") not in ("log", "linear"):
        return refuse("warmup_type", "there are log and linear")
    if missing := [key for key in NEEDED if key in params and params[key] is None]:
        return config.refuse("scheduler.type", f"scheduler.params needs {' and '.join(missing)}")
    uses_optimizer_lr = name == "WarmupCosineLR" or params.get("warmup_max_lr", 0) is None
    if uses_optimizer_lr and optimizer_params is None:
        missing_key = "optimizer.params.lr" if name == "WarmupCosineLR" else "warmup_max_lr"
        return config.refuse(
            "scheduler.type", f"its highest rate is not in the file: write {missing_key}"
        )
    if params.get("cycle_momentum") and optimizer_kind not in ("SGD", "Adagrad"):
        return refuse("cycle_momentum", 'betas stay as they are: write "cycle_momentum": false')
    if not uses_optimizer_lr:
        config.ignore("optimizer.params.lr", f"{name} says the rate")
    config.take("scheduler.type", f"DeepSpeed's {name}, equal at every update")
    return schedule(name, params, optimizer_params["lr"] if optimizer_params else 0.0)


def _rate_flags(config: DeepSpeedConfig, optimizer_params: Params) -> dict[str, Any]:
    """Return the equivalent learning rate flags of hfjax train."""
    name = config.kind("scheduler")
    if name not in SCHEDULES:
        constant = {"warmup_steps": 0, "stable_steps": 0, "type": "constant"}
        return _learning_rate_flags(optimizer_params["lr"], constant)
    params, no_flag = _params(config, "scheduler", name), NoFlagText(f"as {name} does")
    peaks = (params.get(x) for x in ("warmup_max_lr", "cycle_max_lr", "lr_range_test_min_lr"))
    peak = next((peak for peak in peaks if peak is not None), optimizer_params.get("lr"))
    shape = {
        "warmup_steps": params.get("warmup_num_steps", no_flag),
        "type": DECAYS.get(name, no_flag),
        "stable_steps": no_flag,
        "final_fraction": no_flag,
    }
    return _learning_rate_flags(peak, shape)


def _learning_rate_flags(peak: Any, shape: dict[str, Any]) -> dict[str, Any]:
    schedule_flags = {f"lr_schedule.{name}": value for name, value in shape.items()}
    return {"optimizer.learning_rate": peak, **schedule_flags}
