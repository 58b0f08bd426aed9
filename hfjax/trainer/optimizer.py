"""The optimizer of a configuration: one of optax, or one's own."""

import inspect
from collections.abc import Callable
from fnmatch import fnmatchcase
from types import BuiltinFunctionType
from typing import Any

import jax
import jax.numpy as jnp
import optax

import hfjax
from hfjax.optimizers.transforms import Master, scaled
from hfjax.trainer.config import Optimizer, Train
from hfjax.trainer.config_io import function
from hfjax.utils.paths import Tree, flatten, matches, nest

NO_DECAY = ("*/bias", "*norm*", "norm*")
MASKS = ("mask", "weight_decay_mask")  # optax's names of one thing


def sgd(
    learning_rate: Callable,
    momentum: float | None = None,
    weight_decay: float = 0.0,
    mask: Any = None,
) -> Any:
    """Return optax's sgd; what decays is added to gradients before the momentum, as torch does."""
    plain = optax.sgd(learning_rate, momentum)
    return (
        optax.chain(optax.add_decayed_weights(weight_decay, mask), plain) if weight_decay else plain
    )


OURS = {"adamw": hfjax.adamw, "sgd": sgd}
USUAL = {"sgd": 0.0}  # what decays where nothing is said; of the others DECAY
DECAY = 0.1


def rate_of(config: Train) -> Callable:
    """Return the learning rate of a configuration, by the number of updates."""
    given, steps = config.optimizer, config.steps
    warmup = min(20, steps // 4) if given.warmup is None else given.warmup
    fields = {"warmup": warmup, "end": given.end, "hold": given.hold}
    return hfjax.rate(given.rate, steps=steps, decay=given.decay, **fields)


def optimizer_of(config: Train, rate: Callable, optimizer: Any = None) -> Any:
    """Return the optimizer of a configuration; one that is given is taken in place of its name."""
    given = config.optimizer
    if optimizer is None:
        optimizer = _named(given, rate) if given.own is None else _own(given, rate)
    optimizer = scaled(optimizer, dict(map(_factor, given.scale)))
    optimizer = optimizer if given.ema is None else hfjax.ema(optimizer, given.ema)
    return hfjax.master(optimizer) if given.master else optimizer


def keeps_nothing(config: Train) -> Any:
    """Return an optimizer without a state, whose parameters are stored as those of the run."""
    plain = optax.with_extra_args_support(optax.identity())
    if not config.optimizer.master:
        return plain
    made = Master(plain.init, plain.update)
    made.stored, made.inner = hfjax.master(plain).stored, plain
    return made


def _own(given: Optimizer, rate: Callable) -> Any:
    for name in ("weight_decay", "no_decay", "momentum"):
        if getattr(given, name) is not None:
            flag = name.replace("_", "-")
            raise ValueError(
                f"--optimizer.{flag} beside --optimizer.own {given.own}: say it in that function."
            )
    make = function(str(given.own), "--optimizer.own")
    if isinstance(make, BuiltinFunctionType) or len(inspect.signature(make).parameters) != 1:
        raise ValueError(
            f"--optimizer.own {given.own}: a function of the learning rate is expected, which "
            f"returns an optax transformation; found {inspect.signature(make)}."
        )
    return make(rate)


def _named(given: Optimizer, rate: Callable) -> Any:
    """Return an optimizer of optax, tried out on one small matrix."""
    known = OURS.get(given.name) or getattr(optax, given.name, None)
    make: Any = known or getattr(optax.contrib, given.name, None)
    names = list(inspect.signature(make).parameters) if callable(make) else []
    if names[:1] != ["learning_rate"] or given.name.startswith("scale"):
        raise ValueError(
            f"--optimizer.name {given.name}: optax has no optimizer of a learning rate by this "
            "name. For instance adamw, lion, sgd, adafactor; or --optimizer.own file.py:function."
        )
    fields = _decay(given, names) | _momentum(given, names)
    try:
        plain: Any = make(learning_rate=rate)
        matrix = jnp.zeros((2, 2))
        jax.eval_shape(lambda x: plain.update(x, plain.init(x), x), matrix)
        return make(learning_rate=rate, **fields)
    except Exception as wrong:
        why = next(iter(str(wrong).splitlines()), type(wrong).__name__)
        raise ValueError(
            f"--optimizer.name {given.name} cannot be used here: it needs more than gradients and "
            f"a schedule of learning rates ({why}). Use another, or give "
            "it what it needs: --optimizer.own file.py:function."
        ) from wrong


def _decay(given: Optimizer, names: list[str]) -> dict[str, Any]:
    """Return the arguments that say what decays."""
    mask = next((name for name in MASKS if name in names), None)
    for name, there in (("weight_decay", "weight_decay" in names), ("no_decay", mask is not None)):
        if getattr(given, name) is not None and not there:
            flag = name.replace("_", "-")
            raise ValueError(
                f"--optimizer.{flag}: optax's {given.name} cannot be told. Use adamw or lion, or "
                "leave it out."
            )
    if mask is None or "weight_decay" not in names:
        return {} if given.weight_decay is None else {"weight_decay": given.weight_decay}
    usual = USUAL.get(given.name, DECAY)
    decay = usual if given.weight_decay is None else given.weight_decay
    return {"weight_decay": decay, mask: _decayed(given.no_decay)}


def _momentum(given: Optimizer, names: list[str]) -> dict[str, Any]:
    """Return the argument that is the momentum, if one is asked for."""
    if given.momentum is None:
        return {}
    if "momentum" not in names:
        raise ValueError(
            f"--optimizer.momentum {given.momentum}: optax's {given.name} cannot be told. Use sgd, "
            "or leave it out."
        )
    return {"momentum": given.momentum}


def _decayed(no_decay: tuple[str, ...] | None) -> Callable:
    """Return the mask of what decays: all but these patterns; None: but biases and norms."""

    def mask(params: Tree) -> Any:
        paths = flatten(params)
        patterns = list(NO_DECAY if no_decay is None else no_decay)
        if no_decay is None:
            patterns = [p for p in patterns if any(fnmatchcase(path, p) for path in paths)]
        kept = matches(patterns, paths)
        return nest({path: path not in kept for path in paths})

    return mask


def _factor(given: str) -> tuple[str, float]:
    pattern, _, factor = given.rpartition("=")
    try:
        if pattern:
            return pattern, float(factor)
    except ValueError:
        pass
    raise ValueError(f"--optimizer.scale {given}: PATTERN=FACTOR is expected, as in tokens=0.1.")
