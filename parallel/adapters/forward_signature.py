"""What `forward` may ask for by name, besides model and batch: random keys, the mode."""

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from flax import nnx

from hfjax.utils.paths import Flat, Index

KEY, EXAMPLE_KEYS, TRAIN, EXTRA = "key", "example_keys", "train", "extra"


def requested_names(forward: Callable | None) -> tuple[str, ...]:
    """Return what `forward` asks for by name besides the model and the batch."""
    if forward is None:
        return ()
    if not callable(forward):
        raise ValueError(f"forward={forward!r}: a function of (model, batch) is expected.")
    try:
        parameters = inspect.signature(forward).parameters
    except (TypeError, ValueError):  # it has no signature
        return ()
    bound = forward.keywords if isinstance(forward, functools.partial) else {}
    unbound = [name for name in list(parameters)[2:] if name not in bound]
    names = tuple(name for name in (KEY, EXAMPLE_KEYS, TRAIN) if name in unbound)
    try:
        inspect.signature(forward).bind_partial("model", "batch")
    except TypeError as error:
        raise ValueError(
            f"forward{inspect.signature(forward)}: it is called with (model, batch)."
        ) from error
    needed = [
        p.name
        for p in list(parameters.values())[2:]
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if unknown := [name for name in needed if name not in (*names, EXTRA)]:
        raise ValueError(
            f"forward{inspect.signature(forward)}: {unknown[0]!r} is not known. It is given "
            "(model, batch) and may ask by name for `key` (a random key of the step, another one "
            "on each device), `example_keys` (one for each example, the same on every mesh), "
            "`train` (whether this is a training step) and `extra` (what step.gradients is given)."
        )
    return names


def key_templates(names: Sequence[str]) -> dict[str, nnx.Variable]:
    """Return path -> template of the random keys that `forward` asks for."""
    abstract = jax.eval_shape(lambda: jax.random.key(0))
    kinds = {
        KEY: nnx.RngKey(abstract, tag="forward"),
        EXAMPLE_KEYS: nnx.Variable(abstract, per_example=True),
    }
    return {key_path(name): kinds[name] for name in names if name in kinds}


def add_keys(create: Callable[[Any], Flat], paths: Iterable[str]) -> Callable[[Any], Flat]:
    """Return a function of a seed that makes what `create` makes, and a key for each path."""
    paths = list(paths)

    def create_all(seed: Index) -> Flat:
        key = jax.random.fold_in(jax.random.key(seed), 2)
        return create(seed) | {path: jax.random.fold_in(key, i) for i, path in enumerate(paths)}

    return create_all if paths else create


def key_path(name: str) -> str:
    """Return the path in the state of a random key that `forward` asks for."""
    return f"forward.{name}"


def call_model(
    forward: Callable | None, model: Any, variables: Flat, inputs: Any, mode: str, extra: Any = None
) -> Any:
    """Return the outputs of a model, called directly or by the layout's `forward`."""
    if forward is None:
        return model(inputs) if callable(model) else model
    called = forward if extra is None else extra.give(forward)
    training = mode == "train"
    key = lambda name: variables[key_path(name)] if training else None
    options = {n: training if n == TRAIN else key(n) for n in requested_names(forward)}
    return called(model, inputs, **options)
