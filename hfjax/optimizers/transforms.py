"""Optimizers put together from any of optax: by path of parameters, and with their average."""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from numbers import Real
from types import CellType, FunctionType, MethodType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike

from hfjax.utils.keywords import is_real, parse_dtype
from hfjax.utils.paths import Flat, Tree, find_parameter, flatten, match_patterns, nest
from hfjax.utils.read_files import brief


def adamw(
    learning_rate: optax.ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 1e-4,
    mask: optax.Params | Callable[[optax.Params], Any] | None = None,
    mu_dtype: DTypeLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Return optax.adamw: the same numbers, the same state.

    Args:
        learning_rate: A number, or a schedule: a function of the number of updates done.
        b1: Decay of the first moment.
        b2: Decay of the second moment.
        eps: What is added to the root of the second moment.
        weight_decay: Strength of the decay, times the learning rate.
        mask: Which parameters decay: a tree of booleans, or a function of the parameters that
            returns one (`hfjax.optimizers.matching`). None: all.
        mu_dtype: The dtype of the first moment. None: that of the parameter.

    Example:
        >>> import hfjax, jax.numpy as jnp, optax
        >>> params, gradients = {"w": jnp.ones(2)}, {"w": jnp.array([0.5, -0.5])}
        >>> ours, theirs = hfjax.adamw(3e-4), optax.adamw(3e-4)
        >>> a, _ = ours.update(gradients, ours.init(params), params)
        >>> b, _ = theirs.update(gradients, theirs.init(params), params)
        >>> bool((a["w"] == b["w"]).all())
        True
    """
    numbers = {"b1": b1, "b2": b2, "eps": eps, "weight_decay": weight_decay}
    maxima = dict.fromkeys(numbers, float(jnp.finfo(jnp.float32).max)) | {"b1": 1.0, "b2": 1.0}
    for name, number in numbers.items():
        if not is_real(number, 0, maxima[name]):
            raise ValueError(
                f"adamw: {name}={number!r}: a plain number is expected, the same in every step, "
                f"from 0 to {maxima[name]:.4g}. Use optax.adamw for one that changes."
            )
    check_rate("adamw", learning_rate)
    return optax.adamw(learning_rate, b1, b2, eps, 0.0, mu_dtype, weight_decay, mask)


def check_rate(caller: str, rate: object, argument: str = "learning_rate") -> None:
    """Refuse a learning rate that is no number; arrays and schedules are not checked."""
    is_plain = isinstance(rate, Real | str) or rate is None
    if is_plain and not is_real(rate, 0, float(jnp.finfo(jnp.float32).max)):
        raise ValueError(
            f"{caller}: {argument}={rate!r}: a finite number, at least 0, or a schedule, a "
            "function of the number of updates (hfjax.lr_schedule), is expected."
        )


def by_path(
    optimizers: Mapping[str, optax.GradientTransformation],
) -> optax.GradientTransformationExtraArgs:
    """Return an optimizer that updates a parameter by the first pattern that its path matches.

    Use it for parameter groups: of weight decay, of learning rates, of anything.

    Args:
        optimizers: {pattern: optax transformation}; `*` matches anything, also `/`. The
            first pattern that matches counts, so the most general comes last.

    Raises:
        ValueError: Something is no optimizer. At `init`: a parameter matches no pattern, or a
            pattern never counts.

    Example:
        >>> import hfjax, jax.numpy as jnp, optax
        >>> optimizer = hfjax.optimizers.by_path({"*/bias": optax.sgd(1.0), "*": optax.sgd(0.1)})
        >>> params = {"mlp": {"bias": jnp.ones(2), "kernel": jnp.ones(2)}}
        >>> updates, _ = optimizer.update(params, optimizer.init(params), params)
        >>> {name: round(float(x[0]), 1) for name, x in updates["mlp"].items()}
        {'bias': -1.0, 'kernel': -0.1}
    """
    _check_groups(optimizers)
    patterns = list(optimizers)

    def labels(params: Tree) -> dict:
        paths = flatten(params)
        pattern_of = match_patterns(patterns, paths)
        if unmatched := [path for path in paths if path not in pattern_of]:
            raise ValueError(
                f"by_path: {unmatched[0]} (and {len(unmatched) - 1} more) matches none of "
                f'{patterns}. Add a last pattern "*".'
            )
        if unused := [pattern for pattern in patterns if pattern not in pattern_of.values()]:
            raise ValueError(
                f"by_path: {unused[0]!r} never counts, since patterns before it match the same "
                f"paths: {patterns}. The first that matches counts: put it before them."
            )
        return nest(pattern_of)

    return optax.partition({**optimizers}, labels)


def _check_groups(optimizers: Any) -> None:
    is_by_name = isinstance(optimizers, Mapping) and all(isinstance(x, str) for x in optimizers)
    if not optimizers or not is_by_name:
        raise ValueError(
            "by_path: a dictionary of patterns and optimizers is expected, found "
            f'{brief(optimizers)}. Write for instance {{"*": optax.adamw(1e-3)}}.'
        )
    for pattern, optimizer in optimizers.items():
        _check_optimizer(f"by_path: {pattern!r}", optimizer)


def is_optimizer(value: object) -> bool:
    """Return whether it can be used as an optax transformation.

    >>> is_optimizer(optax.sgd(1.0)), is_optimizer({"update": 1}), is_optimizer(optax.sgd)
    (True, False, False)
    """
    return callable(getattr(value, "init", None)) and callable(getattr(value, "update", None))


def _check_optimizer(caller: str, optimizer: object) -> None:
    """Refuse what is no optimizer: a learning rate, or a function that returns one."""
    if not is_optimizer(optimizer):
        name = getattr(optimizer, "__name__", "") if callable(optimizer) else ""
        raise ValueError(
            f"{caller}: an optax optimizer is expected, for instance optax.adamw(1e-3), found "
            f"{f'the function {name}' if name else brief(optimizer)}."
        )


def matching(*patterns: str) -> Callable[[Any], Any]:
    """Return a mask for optax: which parameters have a path that one of the patterns matches.

    Args:
        patterns: Paths; `*` matches anything, also `/`. One that matches no parameter is
            refused when the mask is used.

    Returns:
        A function of the parameters, as optax takes it for `mask`.

    Example:
        >>> import hfjax, optax
        >>> hfjax.optimizers.matching("*/kernel")({"mlp": {"bias": 0, "kernel": 0}})
        {'mlp': {'bias': False, 'kernel': True}}
        >>> mask = hfjax.optimizers.matching("*/kernel")
        >>> optimizer = optax.adamw(1e-3, weight_decay=0.1, mask=mask)
    """

    def mask(params: Tree) -> dict:
        paths = flatten(params)
        matched = match_patterns(patterns, paths)
        return nest({path: path in matched for path in paths})

    return mask


def scaled(
    optimizer: optax.GradientTransformation, factors: Mapping[str, float]
) -> optax.GradientTransformation:
    """Return the optimizer with other learning rates for some paths, as factors.

    Args:
        optimizer: Any optax transformation.
        factors: {pattern: finite factor of at least 0}; `*` matches anything, also `/`, and
            the first pattern that matches counts. Other paths keep their rate.

    Example:
        >>> import hfjax, jax.numpy as jnp, optax
        >>> optimizer = hfjax.optimizers.scaled(optax.sgd(1.0), {"tokens": 0.5})
        >>> params = {"head": jnp.ones(1), "tokens": jnp.ones(1)}
        >>> updates, _ = optimizer.update(params, optimizer.init(params))
        >>> {name: float(x[0]) for name, x in updates.items()}
        {'head': -1.0, 'tokens': -0.5}
    """
    _check_optimizer("scaled", optimizer)
    for pattern, factor in factors.items():
        if not is_real(factor, 0, float(jnp.finfo(jnp.float32).max)):
            raise ValueError(f"scaled: {pattern}={factor!r}; a finite factor of at least 0.")
    if not factors:
        return optimizer

    def update(updates: Any, state: Any, params: Tree = None) -> tuple:
        flat = flatten(updates)
        pattern_of = match_patterns(list(factors), flat)
        is_scaled = lambda path, x: (
            path in pattern_of and hasattr(x, "dtype")
        )  # not of a frozen one
        scale = lambda path, x: x * factors[pattern_of[path]] if is_scaled(path, x) else x
        return nest({path: scale(path, x) for path, x in flat.items()}), state

    init = lambda params: optax.EmptyState()
    return optax.chain(optimizer, optax.GradientTransformation(init, update))


def freeze_params(
    optimizer: optax.GradientTransformation, frozen: Collection[str]
) -> optax.GradientTransformation:
    """Return an optimizer that neither updates these parameters nor keeps state for them."""
    inner = unwrap(optimizer, FrozenParams)
    label = lambda path: "frozen" if path in frozen else "trained"
    labels = lambda params: nest({path: label(path) for path in flatten(params)})
    frozen_params = FrozenParams(
        *optax.partition({"trained": inner, "frozen": optax.set_to_zero()}, labels)
    )
    frozen_params.inner = inner
    return frozen_params


class FrozenParams(optax.GradientTransformationExtraArgs):
    """An optimizer without some parameters; `inner` is the one that has them all."""

    inner: Any


class FrozenLayers(optax.GradientTransformationExtraArgs):
    """An optimizer without some entries of stacked layers; `inner` is the one that has them all."""

    inner: Any


def freeze_layers(optimizer: Any, frozen_rows: Mapping[str, np.ndarray]) -> FrozenLayers:
    """Return an optimizer that changes neither entries of some parameters nor their state.

    `frozen_rows` says by path which stay as they are, bit by bit: parameters, optimizer state,
    master weights and averages. Their gradients count as zero.
    """

    def keep_frozen(path: str, new: Any, old: Any) -> Any:
        """Return an array with the old entries where they are frozen."""
        if path not in frozen_rows or not hasattr(new, "dtype"):  # those of another group have none
            return new
        is_frozen = frozen_rows[path].reshape(-1, *(1,) * (new.ndim - 1))
        return jnp.where(is_frozen, jnp.asarray(old, new.dtype), new)

    def zero_frozen(tree: Tree) -> dict:
        return nest({path: keep_frozen(path, x, 0) for path, x in flatten(tree).items()})

    def update(updates: Any, state: Any, params: Tree = None, **extra: Any) -> tuple:
        shapes = {path: x.shape for path, x in flatten(updates).items() if path in frozen_rows}
        inner_updates, new = inner.update(zero_frozen(updates), state, params, **extra)

        def keep_state(keys: tuple, new: jax.Array, old: jax.Array) -> jax.Array:
            owner = find_parameter(keys, new.shape, shapes)
            return new if owner is None else keep_frozen(owner[1], new, old)

        return zero_frozen(inner_updates), jax.tree_util.tree_map_with_path(keep_state, new, state)

    inner = optax.with_extra_args_support(optimizer)
    frozen_layers = FrozenLayers(inner.init, update)
    frozen_layers.inner = optimizer
    return frozen_layers


def unwrap(optimizer: Any, *wrappers: type) -> Any:
    """Return the optimizer inside of these wrappers, from the outermost on."""
    for wrapper in wrappers:
        optimizer = optimizer.inner if isinstance(optimizer, wrapper) else optimizer
    return optimizer


class Mastered(NamedTuple):
    """The state of an optimizer with master weights."""

    optimizer: Any
    master: Any  # the parameters, in float32 or wider


class MasterWeights(optax.GradientTransformationExtraArgs):
    """An optimizer of master weights, with the dtype in which the state stores parameters."""

    param_dtype: Any
    inner: Any  # the optimizer that it wraps


def master_weights(
    optimizer: optax.GradientTransformation, stored: DTypeLike = "bfloat16"
) -> MasterWeights:
    """Return the optimizer of a float32 copy of the parameters; the state's are stored narrower.

    After each step a parameter is its master weight, rounded. The optimizer sees master weights
    and float32 gradients. Put it outermost: `master_weights(ema(by_path({…}), 0.999))`.

    Args:
        optimizer: Any optax transformation.
        stored: The dtype of the state's parameters: a floating-point type narrower than float32.

    Example:
        >>> import hfjax, jax.numpy as jnp, optax
        >>> model = lambda rngs: {"w": jnp.ones((64, 8))}
        >>> optimizer = hfjax.optimizers.master_weights(optax.adamw(1e-3))
        >>> layout = hfjax.layout(model, optimizer, hfjax.make_mesh(data=8), hfjax.DDP)
        >>> state = layout.abstract_state()
        >>> state.params["w"].dtype.name, state.optimizer.master["w"].dtype.name
        ('bfloat16', 'float32')
    """
    _check_optimizer("master", optimizer)
    dtype = parse_dtype("master: stored", stored)
    if not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize >= 4:
        raise ValueError(
            f"master: stored={dtype.name}: a floating-point type that is narrower than float32 "
            'is expected, for instance "bfloat16". Without one leave '
            "hfjax.optimizers.master_weights out."
        )
    inner = optax.with_extra_args_support(optimizer)
    widen = lambda x: jnp.array(x, jnp.promote_types(x.dtype, jnp.float32), copy=True)

    def init(params: Tree) -> Mastered:
        copies = jax.tree.map(widen, params)
        return Mastered(inner.init(copies), copies)

    def update(updates: optax.Updates, state: Any, params: Tree = None, **extra: Any) -> tuple:
        gradients = jax.tree.map(lambda g, m: g.astype(m.dtype), updates, state.master)
        inner_updates, inner_state = inner.update(gradients, state.optimizer, state.master, **extra)
        new = optax.apply_updates(state.master, inner_updates)
        deltas = jax.tree.map(lambda m, p: m - p.astype(m.dtype), new, params)
        return deltas, Mastered(inner_state, new)

    master_optimizer = MasterWeights(init, update)
    master_optimizer.param_dtype, master_optimizer.inner = dtype, optimizer
    return master_optimizer


def stored_dtype(optimizer: Any, dtype: DTypeLike | None) -> DTypeLike | None:
    """Return the dtype in which a state stores parameters, given the model's own."""
    inner = unwrap(optimizer, FrozenLayers, FrozenParams)
    return inner.param_dtype if isinstance(inner, MasterWeights) else dtype


def check_master(optimizer: Any, params: Tree) -> None:
    """Refuse master weights of an optimizer that is not the outermost."""
    inner = unwrap(optimizer, FrozenParams, MasterWeights)
    if _find_states(jax.eval_shape(inner.init, params), Mastered):
        raise ValueError(
            "hfjax.optimizers.master_weights is inside another optimizer, and what that one does "
            "would not reach the master weights. Put it outermost: "
            "hfjax.optimizers.master_weights(optax.chain(…)), "
            "hfjax.optimizers.master_weights(hfjax.optimizers.ema(…)); clip with train_step(…, "
            "max_grad_norm=1.0)."
        )


def check_update_arguments(optimizer: Any, params: Tree) -> None:
    """Refuse an optimizer whose update needs more than gradients, its state and parameters."""
    if not any(map(_has_required_keywords, find_closure_functions(optimizer.update, set()))):
        return  # tracing an update takes seconds
    try:
        jax.eval_shape(optimizer.update, params, jax.eval_shape(optimizer.init, params), params)
    except Exception as error:  # the step reports any other kind
        if not (match := re.search(r"missing \d+ required keyword-only \w+: (.*)", str(error))):
            return
        raise ValueError(
            f"the optimizer's update asks for {match[1]}, and a step gives it gradients, its "
            "state and parameters. Leave out what asks (optax.contrib.reduce_on_plateau, "
            "optax.lbfgs and others that look at the loss): a rate may follow the number of the "
            "step, hfjax.lr_schedule(…)."
        ) from None


def _has_required_keywords(function: FunctionType) -> bool:
    """Return whether a function has required keyword arguments."""
    code, defaults = function.__code__, function.__kwdefaults__ or ()
    return code.co_kwonlyargcount > len(defaults)


def find_closure_functions(value: Any, visited_ids: set[int]) -> Iterator[Any]:
    """Yield a function and those in its closure, as a chain has its transformations there."""
    if id(value) in visited_ids:
        return
    visited_ids.add(id(value))
    if isinstance(value, FunctionType):
        yield value
    for x in _find_children(value):
        yield from find_closure_functions(x, visited_ids)


def _find_children(value: Any) -> Sequence[Any]:
    """Return what a function, a method, a dict or a sequence holds."""
    return (
        [cell.cell_contents for cell in value.__closure__ or () if _has_contents(cell)]
        if isinstance(value, FunctionType)
        else [value.__func__, *getattr(value.__self__, "__dict__", {}).values()]
        if isinstance(value, MethodType)  # optax.MultiSteps
        else list(value.values())
        if isinstance(value, Mapping)
        else value
        if isinstance(value, list | tuple)
        else ()
    )


def bind_axes(optimizer: Any, arrays: Mapping[str, Any], packed: str) -> Any:
    """Return the optimizer; one that reads names of dimensions gets those of these arrays.

    An update function that reads them brings what binds them (`layout_axes`), as `bind_axes`.
    """
    functions = find_closure_functions(optimizer.update, set())
    bound = (f.bind_axes(optimizer, arrays, packed) for f in functions if hasattr(f, "bind_axes"))
    return next(bound, optimizer)


def _has_contents(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # not set yet
        return False


def params_from_master(params: Mapping[str, Any], state: Any) -> dict[str, Any]:
    """Return parameters by path, cast from master weights where the optimizer keeps these."""
    new = dict(params)
    for node in _find_states(state, Mastered):
        new |= _cast_like(node.master, params)
    return new


def masters_or_params(params: Mapping[str, Any], state: Any) -> Flat:
    """Return parameters by path, uncast master weights in place of those that have one."""
    new = dict(params)
    for node in _find_states(state, Mastered):
        new |= _arrays_by_path(node.master)
    return new


def _find_states(state: Any, kind: type) -> list[Any]:
    """Return the nodes of an optimizer state that are of a type."""
    is_match = lambda x: isinstance(x, kind)
    return [x for x in jax.tree.leaves(state, is_leaf=is_match) if is_match(x)]


def _cast_like(tree: Tree, params: Mapping[str, Any]) -> Flat:
    """Return arrays kept for parameters, by path, in their dtypes; frozen ones have none."""
    return {path: x.astype(params[path].dtype) for path, x in _arrays_by_path(tree).items()}


def _arrays_by_path(tree: Tree) -> Flat:
    """Return arrays kept for parameters, by path."""
    return {path: x for path, x in flatten(tree).items() if hasattr(x, "astype")}


class Averaged(NamedTuple):
    """The state of an averaging optimizer."""

    optimizer: Any
    average: Any  # of the parameters, in float32 or wider


def ema(optimizer: optax.GradientTransformation, decay: float) -> optax.GradientTransformation:
    """Return the optimizer, which also keeps an exponential moving average of the parameters.

    It starts from the first parameters, is sharded as the optimizer state, and is saved with it. A
    step that is skipped does not change it. `averaged(state)` is the state to evaluate.

    Args:
        optimizer: Any optax transformation. In a chain put `ema` outermost: the average is of what
            this optimizer alone makes of the parameters.
        decay: Weight of the old average, a float between 0 and 1, for instance 0.999.

    Example:
        >>> import hfjax, jax.numpy as jnp, optax
        >>> optimizer = hfjax.optimizers.ema(optax.sgd(1.0), decay=0.75)
        >>> params = {"w": jnp.array(4.0)}
        >>> _, kept = optimizer.update({"w": jnp.array(4.0)}, optimizer.init(params), params)
        >>> float(kept.average["w"])  # of 4.0, and of 0.0 after the update
        3.0
    """
    _check_optimizer("ema", optimizer)
    if not isinstance(decay, float) or not 0 < decay < 1:
        raise ValueError(f"ema: decay={decay!r}; a number between 0 and 1, for instance 0.999.")
    inner = optax.with_extra_args_support(optimizer)
    widen = lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32))

    def init(params: Tree) -> Averaged:
        copies = jax.tree.map(lambda x: jnp.array(widen(x), copy=True), params)
        return Averaged(inner.init(params), copies)

    def update(updates: optax.Updates, state: Any, params: Tree = None, **extra: Any) -> tuple:
        updates, inner_state = inner.update(updates, state.optimizer, params, **extra)
        new = optax.apply_updates(params, updates)
        mix = lambda old, x: decay * old + (1 - decay) * widen(x)
        return updates, Averaged(inner_state, jax.tree.map(mix, state.average, new))

    return optax.GradientTransformationExtraArgs(init, update)


def averaged(state: Any) -> Any:
    """Return the state with the average of its parameters in their place: to evaluate, to export.

    Parameters of which no average is kept (frozen ones, those of another group) stay as they are.

    Args:
        state: A `hfjax.State` whose optimizer is `hfjax.optimizers.ema(…)`, or has one in it.

    Example:
        >>> import hfjax, jax.numpy as jnp, optax
        >>> model = lambda rngs: {"w": jnp.ones((64, 8))}
        >>> optimizer = hfjax.optimizers.ema(optax.adamw(1e-3), decay=0.999)
        >>> layout = hfjax.layout(model, optimizer, hfjax.make_mesh(data=8), hfjax.DDP)
        >>> state = hfjax.init(layout)
        >>> float(hfjax.optimizers.averaged(state).params["w"].sum())
        512.0
    """
    if not hasattr(state, "optimizer"):
        raise ValueError(f"averaged(state): a hfjax.State is expected, found {state!r}.")
    if not (nodes := _find_states(state.optimizer, Averaged)):
        raise ValueError(
            "averaged(state): its optimizer keeps no average. Train with "
            "hfjax.optimizers.ema(optimizer, "
            "decay=0.999)."
        )
    params, new = flatten(state.params), Flat()
    for node in nodes:
        averages = _cast_like(node.average, params)
        if repeated := averages.keys() & new.keys():
            raise ValueError(f"averaged(state): two averages are kept of {min(repeated)}.")
        new |= averages
    return replace(state, params=nest(params | new))
