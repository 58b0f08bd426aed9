"""The optimizer and the learning rate of a file: sections optimizer and scheduler."""

from collections.abc import Callable
from typing import Any, NamedTuple

import optax

from hfjax.compat.deepspeed.config_file import Given
from hfjax.compat.deepspeed.known_keys import COMPRESSES, COMPRESSING, OPTIMIZERS, SCHEDULES, TABLE
from hfjax.compat.deepspeed.lr_schedules import schedule
from hfjax.compat.deepspeed.torch_updates import adagrad, lamb, uncorrected_adam
from hfjax.utils.keywords import is_real, nearest_of

Params = dict[str, Any]
LAMB = "DeepSpeed's lamb; its norms are of arrays as stored: stacked layers share one"
DECAYS = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
NEEDED = ("total_num_steps", "cycle_min_lr", "cycle_max_lr")


class InWords(str):
    """What a file says and no flag of hfjax train could say."""


class Updates(NamedTuple):
    """An optimizer and a rate, None if the file has none; `flags` are those of hfjax train."""

    optimizer: optax.GradientTransformation | None
    rate: Callable | None
    flags: dict[str, Any]


def updates(given: Given) -> Updates:
    """Return what a file says of updates; what it says that is not here is refused."""
    kind = given.kind("optimizer")
    params = _optimizer_params(given, kind)
    rate = _rate(given, params, kind)
    if params is None:
        return Updates(None, rate, {} if rate is None else _rate_flags(given, {}))
    rate = optax.constant_schedule(params["lr"]) if rate is None else rate
    flags = {"name": _word(kind, params), "weight_decay": params["weight_decay"]}
    flags |= {"own": None, "no_decay": None, **_rate_flags(given, params)}
    return Updates(_optimizer(given, kind, params, rate), rate, flags)


def _params(given: Given, section: str, kind: str) -> Params:
    """Return every parameter of an optimizer or a schedule, DeepSpeed's defaults included."""
    inside = f"{section}({kind}).params."
    names = [key.removeprefix(inside) for key in TABLE if key.startswith(inside)]
    return {name: given.of(f"{section}.params.{name}") for name in names}


# -- the optimizer ------------------------------------------------------------------------


def _optimizer_params(given: Given, kind: str) -> Params | None:
    """Return the parameters of the optimizer; None: there is none, or it is refused."""
    known = ", ".join(name for name in OPTIMIZERS.values() if name != "Muon")
    if "optimizer.type" not in given.values:
        return None
    if kind in COMPRESSING:
        return given.refuse("optimizer.type", COMPRESSES)
    if kind == "Muon":
        return given.refuse("optimizer.type", f"hfjax has no muon yet; it has {known}")
    if kind not in OPTIMIZERS.values():
        near = nearest_of(kind, OPTIMIZERS.values())
        return given.refuse("optimizer.type", f"there are {known}; give others yourself.{near}")
    params = _params(given, "optimizer", kind)
    _refuse_params(given, params)
    decays = "optimizer.params.weight_decay" in given.values
    if params.get("torch_adam") and not decays and not _adds_decay(kind, params):
        params["weight_decay"] = 1e-2  # torch's own default
    return params


def _refuse_params(given: Given, params: Params) -> None:
    """Refuse what torch refuses: betas of 1, Nesterov without momentum."""
    path, betas = "optimizer.params.betas", params.get("betas", (0, 0))
    if len(betas) != 2 or not all(is_real(beta, 0, 1) and beta < 1 for beta in betas):
        given.refuse(path, "two numbers from 0 to below 1 are expected")
        params["betas"] = TABLE[given.typed(path)].default  # to say what else is wrong
    if params.get("nesterov") and not params["momentum"]:
        given.refuse("optimizer.params.nesterov", "it needs a momentum above 0: write that")
    if params.get("torch_adam") and not params["bias_correction"]:
        why = "torch's Adam has no such parameter: leave it or torch_adam out"
        given.refuse("optimizer.params.bias_correction", why)


def _adds_decay(kind: str, params: Params) -> bool:
    """Whether Adam adds the decay to the gradient; otherwise, as by default, it is AdamW."""
    return kind == "Adam" and not params["adam_w_mode"]


def _word(kind: str, params: Params) -> str:
    """Return how `--optimizer.name` calls it."""
    return "adamw" if "Adam" in kind and not _adds_decay(kind, params) else kind.lower()


def _optimizer(given: Given, kind: str, params: Params, rate: Callable) -> Any:
    word, decay = _word(kind, params), params["weight_decay"]
    b1, b2 = params.get("betas", (0, 0))
    words = f"optax.{word}"
    if not params.get("bias_correction", True) and word != "lamb":
        made = uncorrected_adam(rate, params, decoupled=word == "adamw")
        words += ", without correction of the bias"
    elif word in ("adamw", "lion"):
        eps: Params = {} if word == "lion" else {"eps": params["eps"]}
        made = getattr(optax, word)(rate, b1, b2, **eps, weight_decay=decay)
    elif word == "lamb":
        made, words = lamb(rate, params), LAMB
    else:
        made = _of_gradients(word, params, rate)
        made = optax.chain(optax.add_decayed_weights(decay), made) if decay else made
        words += ", decay added to gradients" * bool(decay)
    given.take("optimizer.type", words)
    return made


def _of_gradients(word: str, params: Params, rate: Callable) -> Any:
    """Return an optimizer whose decay is added to the gradient before it."""
    if word == "adam":
        return optax.adam(rate, *params["betas"], eps=params["eps"])
    if word == "sgd":
        return optax.sgd(rate, params["momentum"] or None, params["nesterov"])
    return adagrad(rate, params["initial_accumulator_value"], params["eps"])


# -- the rate -----------------------------------------------------------------------------


def _rate(given: Given, of: Params | None, kind: str) -> Callable | None:
    """Return the schedule of the file; `of` are the parameters of its optimizer."""
    name = given.kind("scheduler")
    if "scheduler.type" not in given.values:
        return None
    if name not in SCHEDULES:
        near = nearest_of(name, SCHEDULES)
        return given.refuse("scheduler.type", f"there are {', '.join(SCHEDULES)}.{near}")
    params = _params(given, "scheduler", name)
    refuse = lambda key, why: given.refuse(f"scheduler.params.{key}", why)
    if params.get("warmup_type", "log") not in ("log", "linear"):
        return refuse("warmup_type", "there are log and linear")
    if missing := [key for key in NEEDED if key in params and params[key] is None]:
        return given.refuse("scheduler.type", f"scheduler.params needs {' and '.join(missing)}")
    ours = name == "WarmupCosineLR" or params.get("warmup_max_lr", 0) is None
    if ours and of is None:
        word = "optimizer.params.lr" if name == "WarmupCosineLR" else "warmup_max_lr"
        return given.refuse("scheduler.type", f"its highest rate is not in the file: write {word}")
    if params.get("cycle_momentum") and kind not in ("SGD", "Adagrad"):
        return refuse("cycle_momentum", 'betas stay as they are: write "cycle_momentum": false')
    if not ours:
        given.ignore("optimizer.params.lr", f"{name} says the rate")
    given.take("scheduler.type", f"DeepSpeed's {name}, equal at every update")
    return schedule(name, params, of["lr"] if of else 0.0)


def _rate_flags(given: Given, of: Params) -> dict[str, Any]:
    """Return what the flags of hfjax train would say of the rate."""
    name = given.kind("scheduler")
    if name not in SCHEDULES:
        return {"rate": of["lr"], "warmup": 0, "hold": 0, "decay": "constant"}
    params, own = _params(given, "scheduler", name), InWords(f"as {name} does")
    peaks = (params.get(x) for x in ("warmup_max_lr", "cycle_max_lr", "lr_range_test_min_lr"))
    peak = next((peak for peak in peaks if peak is not None), of.get("lr"))
    warmup = params.get("warmup_num_steps", own)
    return {"rate": peak, "warmup": warmup, "decay": DECAYS.get(name, own), "hold": own, "end": own}
