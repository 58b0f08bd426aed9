"""The optimizer of a configuration: one of optax, or the user's own."""

import inspect
from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatchcase
from types import BuiltinFunctionType
from typing import Any

import jax
import jax.numpy as jnp
import optax

import hfjax
from hfjax.optimizers.transforms import MasterWeights, bind_axes, scaled
from hfjax.parallel.param_specs import Array
from hfjax.trainer.config import OptimizerConfig, TrainConfig
from hfjax.trainer.config_io import load_function
from hfjax.utils.paths import Tree, flatten, match_patterns, nest

NO_DECAY = ("*/bias", "*norm*", "norm*")
MASKS = ("mask", "weight_decay_mask")  # optax's names for it


def sgd(
    learning_rate: Callable,
    momentum: float | None = None,
    weight_decay: float = 0.0,
    mask: Any = None,
) -> Any:
    """Return optax's sgd; weight decay is added to gradients before the momentum, as in torch."""
    plain = optax.sgd(learning_rate, momentum)
    return (
        optax.chain(optax.add_decayed_weights(weight_decay, mask), plain) if weight_decay else plain
    )


def muon(
    learning_rate: Callable,
    momentum: float = 0.95,
    weight_decay: float = 0.0,
    mask: Any = None,
    adam_learning_rate: Callable | None = None,
) -> Any:
    """Return hfjax's muon; AdamW, which has all other parameters, decays them as much."""
    return hfjax.optimizers.muon(
        learning_rate,
        beta=momentum,
        weight_decay=weight_decay,
        weight_decay_mask=mask,
        adam_weight_decay=weight_decay,
        adam_learning_rate=adam_learning_rate,
    )


HFJAX_OPTIMIZERS = {"adamw": hfjax.adamw, "sgd": sgd, "muon": muon}
DEFAULT_DECAYS = {"sgd": 0.0}  # default weight decay by optimizer; DECAY for the others
DECAY = 0.1


def make_lr_schedule(config: TrainConfig) -> Callable:
    """Return the learning-rate schedule of a configuration, by the number of updates."""
    opts, steps = config.lr_schedule, config.steps
    if opts.warmup_steps is None:
        opts = replace(opts, warmup_steps=min(20, steps // 4))
    try:
        return hfjax.lr_schedule(config.optimizer.learning_rate, steps=steps, **vars(opts))
    except ValueError as wrong:
        text = str(wrong).removeprefix("lr_schedule: ")
        if "nothing to decay" in text:
            text = (
                f"{text.partition('. Give')[0]}. Give more --steps, fewer "
                "--lr-schedule.warmup-steps or --lr-schedule.stable-steps, or --lr-schedule.type "
                "constant."
            )
        raise ValueError(f"--lr-schedule: {text}") from None


def build_optimizer(config: TrainConfig, rate: Callable, optimizer: Any = None) -> Any:
    """Return the optimizer of a configuration; `optimizer` replaces the one that it names."""
    opts = config.optimizer
    if optimizer is None:
        optimizer = (
            _optax_optimizer(opts, rate) if opts.factory is None else _user_optimizer(opts, rate)
        )
    optimizer = scaled(optimizer, dict(map(_parse_factor, opts.lr_factors)))
    optimizer = optimizer if opts.ema is None else hfjax.optimizers.ema(optimizer, opts.ema)
    return hfjax.optimizers.master_weights(optimizer) if config.master_weights else optimizer


def stateless_optimizer(config: TrainConfig) -> Any:
    """Return a stateless optimizer, whose parameters are stored as those of the run."""
    plain = optax.with_extra_args_support(optax.identity())
    if not config.master_weights:
        return plain
    wrapper = MasterWeights(plain.init, plain.update)
    wrapper.param_dtype, wrapper.inner = hfjax.optimizers.master_weights(plain).param_dtype, plain
    return wrapper


def _user_optimizer(opts: OptimizerConfig, rate: Callable) -> Any:
    for name in ("weight_decay", "no_decay", "momentum", "adam_learning_rate"):
        if getattr(opts, name) is not None:
            flag = name.replace("_", "-")
            raise ValueError(
                f"--optimizer.{flag} beside --optimizer.factory {opts.factory}: say it in that "
                "function."
            )
    make = load_function(str(opts.factory), "--optimizer.factory")
    if isinstance(make, BuiltinFunctionType) or len(inspect.signature(make).parameters) != 1:
        raise ValueError(
            f"--optimizer.factory {opts.factory}: a function of the learning rate is expected, "
            f"which returns an optax transformation; found {inspect.signature(make)}."
        )
    return make(rate)


def _optax_optimizer(opts: OptimizerConfig, rate: Callable) -> Any:
    """Return an optax optimizer, tried out on a small matrix."""
    known = HFJAX_OPTIMIZERS.get(opts.name) or getattr(optax, opts.name, None)
    make: Any = known or getattr(optax.contrib, opts.name, None)
    names = list(inspect.signature(make).parameters) if callable(make) else []
    if names[:1] != ["learning_rate"] or opts.name.startswith("scale"):
        raise ValueError(
            f"--optimizer.name {opts.name}: optax has no optimizer of a learning rate by this "
            "name. For instance adamw, muon, lion, sgd, adafactor; or --optimizer.factory "
            "file.py:function."
        )
    fields = _decay_kwargs(opts, names) | _momentum_kwargs(opts, names)
    fields |= _adam_kwargs(opts, names, rate)
    try:
        plain: Any = make(learning_rate=rate)
        matrix = {"matrix": jnp.zeros((2, 2))}
        trial = bind_axes(plain, {"matrix": Array("matrix", (2, 2), ("embed", "mlp"))}, "")
        jax.eval_shape(lambda x: trial.update(x, trial.init(x), x), matrix)
        return make(learning_rate=rate, **fields)
    except Exception as wrong:
        why = next(iter(str(wrong).splitlines()), type(wrong).__name__)
        raise ValueError(
            f"--optimizer.name {opts.name} cannot be used here: it needs more than gradients and "
            f"a schedule of learning rates ({why}). Use another, or give "
            "it what it needs: --optimizer.factory file.py:function."
        ) from wrong


def _decay_kwargs(opts: OptimizerConfig, names: list[str]) -> dict[str, Any]:
    """Return the weight-decay arguments of an optimizer."""
    mask = next((name for name in MASKS if name in names), None)
    for name, is_accepted in (
        ("weight_decay", "weight_decay" in names),
        ("no_decay", mask is not None),
    ):
        if getattr(opts, name) is not None and not is_accepted:
            flag = name.replace("_", "-")
            raise ValueError(
                f"--optimizer.{flag}: optax's {opts.name} cannot be told. Use adamw or lion, or "
                "leave it out."
            )
    if mask is None or "weight_decay" not in names:
        return {} if opts.weight_decay is None else {"weight_decay": opts.weight_decay}
    default = DEFAULT_DECAYS.get(opts.name, DECAY)
    decay = default if opts.weight_decay is None else opts.weight_decay
    return {"weight_decay": decay, mask: _decay_mask(opts.no_decay)}


def _momentum_kwargs(opts: OptimizerConfig, names: list[str]) -> dict[str, Any]:
    """Return the momentum argument of an optimizer, if it is set."""
    if opts.momentum is None:
        return {}
    if "momentum" not in names:
        raise ValueError(
            f"--optimizer.momentum {opts.momentum}: optax's {opts.name} cannot be told. Use sgd "
            "or muon, or leave it out."
        )
    return {"momentum": opts.momentum}


def _adam_kwargs(opts: OptimizerConfig, names: list[str], rate: Callable) -> dict[str, Any]:
    """Return the rate of the AdamW beside muon, if it is set: it follows muon's schedule."""
    peak = opts.adam_learning_rate
    if peak is None:
        return {}
    if "adam_learning_rate" not in names:
        raise ValueError(
            f"--optimizer.adam-learning-rate {peak}: only muon has an AdamW beside it, found "
            f"--optimizer.name {opts.name}. Say its rate by --optimizer.learning-rate."
        )
    factor = peak / opts.learning_rate
    return {"adam_learning_rate": lambda count: factor * rate(count)}


def _decay_mask(no_decay: tuple[str, ...] | None) -> Callable:
    """Return the weight-decay mask: all but these patterns; None: all but biases and norms."""

    def mask(params: Tree) -> Any:
        paths = flatten(params)
        patterns = list(NO_DECAY if no_decay is None else no_decay)
        if no_decay is None:
            patterns = [p for p in patterns if any(fnmatchcase(path, p) for path in paths)]
        excluded = match_patterns(patterns, paths)
        return nest({path: path not in excluded for path in paths})

    return mask


def _parse_factor(text: str) -> tuple[str, float]:
    pattern, _, factor = text.rpartition("=")
    try:
        if pattern:
            return pattern, float(factor)
    except ValueError:
        pass
    raise ValueError(
        f"--optimizer.lr-factors {text}: PATTERN=FACTOR is expected, as in tokens=0.1."
    )
