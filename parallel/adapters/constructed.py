"""Models whose constructor cannot be traced: they are built for real, on the CPU.

A constructor may ask for the value of an array (`float(jnp.sqrt(8.0))`), draw from a generator that
was made before (`rngs=nnx.Rngs(0)` as a default), or keep layers in functions. The built model is
split into arrays; a program that initializes a state gets those of its seed.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.errors import TraceContextError
from jax.core import Tracer

from hfjax.utils.paths import is_random_key
from hfjax.utils.tables import human
from hfjax.utils.trace_context import set_value

_ARRAYS: ContextVar[Sequence[Any] | None] = ContextVar("arrays of a built model", default=None)


class HoldsLayersError(Exception):
    """A model keeps layers where nothing finds them: in functions."""


UNTRACEABLE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.UnexpectedTracerError,
    TraceContextError,
    HoldsLayersError,
)


class EagerInit:
    """Returns a model that was built, with the arrays of a seed.

    Attributes:
        notes: What to say of it.
    """

    def __init__(self, make: Callable[[Any], Any], cause: Exception) -> None:
        self._make = make
        try:
            model = self._construct(0)
        except Exception as error:
            raise ValueError(
                f"model_init cannot be traced ({_first_line(cause)}), and fails where it is built "
                f"for real, on the CPU: {type(error).__name__}: {_first_line(error)}"
            ) from error
        self._graph, self._treedef, leaves = _split_model(model)
        self._is_key = [is_random_key(x) for x in leaves]
        self._first = list(map(_on_host, leaves))
        self._last = 0, self._first  # a seed, and what was built for it
        size = human(sum(x.nbytes for x in self._first))
        self.notes = (
            f"model_init cannot be traced ({_first_line(cause)}): the model is built for real, on "
            f"the CPU, {size}, here and for each seed",
        )

    def arrays(self, seed: int) -> list[np.ndarray]:
        """Return the arrays of the model that is built for a seed."""
        if seed == 0:
            return self._first
        if seed != self._last[0]:
            self._last = seed, list(map(_on_host, _split_model(self._construct(seed))[2]))
        return self._last[1]

    def __call__(self, seed: Any) -> Any:
        """Return the model with the arrays in use or of the seed; of a traced seed those of 0."""
        host_arrays = _ARRAYS.get()
        if host_arrays is None and not isinstance(seed, Tracer):
            host_arrays = self.arrays(seed)
        arrays = map(jnp.asarray, self._first if host_arrays is None else host_arrays)
        pairs = zip(arrays, self._is_key, strict=True)
        leaves = [jax.random.wrap_key_data(x) if keyed else x for x, keyed in pairs]
        model = jax.tree.unflatten(self._treedef, leaves)
        return model if self._graph is None else nnx.merge(self._graph, model)

    def _construct(self, seed: int) -> Any:
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            return self._make(seed)


_LAST: list[tuple[Callable, EagerInit]] = []  # what was built last, and by what


def eager_init(model_init: Callable, make: Callable[[Any], Any], cause: Exception) -> EagerInit:
    """Return what `model_init` builds: once for successive layouts, as its numbers may vary."""
    if not _LAST or _LAST[0][0] is not model_init:
        _LAST[:] = [(model_init, EagerInit(make, cause))]
    return _LAST[0][1]


def use_arrays(arrays: Sequence[Any]) -> AbstractContextManager:
    """Give models that are built meanwhile these arrays."""
    return set_value(_ARRAYS, arrays)


def layers_in_functions(model: nnx.Module) -> list[str]:
    """Return the attributes of a model that are functions which keep layers."""
    attributes = []
    for _, module in nnx.iter_modules(model):
        holders = (name for name, value in vars(module).items() if _keeps_layers(value))
        attributes += [f"{type(module).__name__}.{name}" for name in holders]
    names = sorted(set(attributes))
    return names if len(names) < 5 else [*names[:3], f"{len(names) - 3} others"]


def _keeps_layers(value: object) -> bool:
    cells = [cell.cell_contents for cell in getattr(value, "__closure__", None) or ()]
    return any(isinstance(x, nnx.Module) or _keeps_layers(x) for x in cells)


def _split_model(model: Any) -> tuple[Any, Any, list[Any]]:
    """Return the graph of a module (None: a pytree), its treedef, and its arrays."""
    graph, tree = nnx.split(model) if isinstance(model, nnx.Module) else (None, model)
    leaves, treedef = jax.tree.flatten(tree)
    return graph, treedef, leaves


def _on_host(x: jax.Array) -> np.ndarray:
    return np.asarray(jax.random.key_data(x) if is_random_key(x) else x)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "").strip().rstrip(".:") or type(error).__name__
