"""Adapters of a model without hfjax's linear maps: it is called with W + s A B in place of W.

The model stays as it is, whatever framework it is of. Its matrices are known by their paths; A and
B are parameters beside them: `mlp/lora/kernel/a` and `…/b` of `mlp/kernel`. W + s A B is made where
the model is given its parameters (`ModelTemplate.merge`), so its gradient is, too: as many flops as
without adapters, and memory for one more copy of each matrix. Under FSDP a stack over which the
model scans is gathered whole before the scan, not layer by layer.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from hfjax.adapters.low_rank import A, Adapter, B, LinearMap
from hfjax.parallel.adapters.model_template import ModelTemplate, make_template, raw_value
from hfjax.utils.paths import Flat, check_paths, join_path

STACK, INPUT, OUTPUT = "s", "i", "o"
KERNEL, VECTORS = "kernel", ("bias", "scale")


@dataclass(frozen=True)
class Matrix(LinearMap):
    """A parameter that may have an adapter: its path is `name`, `part` the last name of that.

    Attributes:
        full_shape: Its own shape.
        dims: A letter for each dimension: s (of a stack of matrices), i (inputs) or o (outputs).
    """

    full_shape: tuple[int, ...] = ()
    dims: str = ""

    @classmethod
    def of(cls, name: str, full_shape: tuple[int, ...], dims: str) -> "Matrix":
        """Return the matrix of a parameter.

        Args:
            name: The path of the parameter.
            full_shape: Its shape.
            dims: The letters of its dimensions.
        """
        path, _, part = name.rpartition("/")
        shape = tuple(full_shape[d] for x in (INPUT, OUTPUT) for d in _find(dims, x))
        return cls(path, part, shape, (), dims.count(INPUT), 0, full_shape, dims)

    @property
    def adapter_dims(self) -> dict[str, tuple[int | None, ...]]:
        """The dimensions of A [*stack, *inputs, rank] and B [*stack, rank, *outputs] in W."""
        stack, inputs, outputs = (_find(self.dims, x) for x in (STACK, INPUT, OUTPUT))
        return {A: (*stack, *inputs, None), B: (*stack, None, *outputs)}


def _find(dims: str, letter: str) -> tuple[int, ...]:
    return tuple(d for d, own in enumerate(dims) if own == letter)


@dataclass(frozen=True)
class AnyModel:
    """The parameters of a model without hfjax's linear maps.

    Attributes:
        matrices: Those that may have an adapter.
        others: The paths of all others: vectors, what is named bias or scale (of a stack, or of
            several heads, it has two dimensions), and shards of experts.
    """

    matrices: tuple[Matrix, ...]
    others: tuple[str, ...]


def find_matrices(model_init: Callable, dims: Mapping[str, str]) -> AnyModel:
    """Return the matrices of any model.

    Args:
        model_init: A function of `nnx.Rngs`, as `hfjax.layout` takes it.
        dims: Letters of dimensions by pattern, where they are not "io", "sio", "ssio" …
    """
    template = make_template(model_init, lambda x, *names: x)
    shapes = {path: tuple(x.shape) for path, x in template.parameters.items()}
    matches = lambda path: any(fnmatchcase(path, pattern) for pattern in dims)
    is_vector = lambda path: path.rpartition("/")[2] in VECTORS and not matches(path)
    is_other = lambda path: len(shapes[path]) < 2 or is_vector(path) or template.takes_shards(path)
    matrices = [path for path in shapes if not is_other(path)]
    for pattern in dims:
        if not any(fnmatchcase(path, pattern) for path in matrices):
            raise ValueError(
                f"lora: dims: {pattern!r} matches no matrix of the model. Its matrices: "
                f"{', '.join(matrices)}."
            )
    letters = _linear_general_dims(template)
    chosen = []
    for path in matrices:
        default = letters.get(path, INPUT + OUTPUT).rjust(len(shapes[path]), STACK)
        own = next((x for pattern, x in dims.items() if fnmatchcase(path, pattern)), default)
        _check_letters(path, own, shapes[path])
        chosen.append(Matrix.of(path, shapes[path], own))
    return AnyModel(tuple(chosen), tuple(path for path in shapes if path not in matrices))


def _linear_general_dims(template: ModelTemplate) -> dict[str, str]:
    """Return the letters of nnx's maps of several dimensions, as its attention has."""
    model = template.abstract("train")
    modules = nnx.iter_modules(model) if isinstance(model, nnx.Module) else ()
    return {
        join_path((*keys, KERNEL)): INPUT * len(x.in_features) + OUTPUT * len(x.out_features)
        for keys, x in modules
        if isinstance(x, nnx.LinearGeneral)
    }


def _check_letters(path: str, letters: str, shape: tuple[int, ...]) -> None:
    is_known = {INPUT, OUTPUT} <= {*letters} <= {STACK, INPUT, OUTPUT}
    if len(letters) != len(shape) or not is_known:
        raise ValueError(
            f"lora: dims={letters!r} of {path} {shape}: a letter for each dimension is expected: s "
            '(of a stack of matrices), i (inputs) or o (outputs), for instance "ioo" of queries of '
            "several heads."
        )


def add_adapters(
    names: Mapping[str, tuple],
    template: ModelTemplate,
    forward: Callable | None,
    adapters: Sequence[Adapter],
    gaussian: bool,
) -> tuple[dict[str, tuple], ModelTemplate]:
    """Return the names of dimensions, and the template, of a model with adapters.

    A's dimensions have the names of W's inputs, B's those of its outputs.

    Args:
        names: Names of the model's own dimensions, as `ModelTemplate.axes` takes them.
        template: The model.
        forward: As `hfjax.layout` has it.
        adapters: All adapters.
        gaussian: Whether A is drawn from a normal distribution.
    """
    if template.is_layer_stack and forward is None:
        raise ValueError(
            "lora: the model is in three parts (embed, layers, head), which are run one by one, "
            "and has no linear maps of hfjax's. Make its maps hfjax.models.layers.Linear, or run "
            "the model as it is written: hfjax.layout(…, forward=lambda model, batch: "
            "model(batch))."
        )
    shapes, axes = {}, dict(names)
    for adapter in adapters:
        matrix: Any = adapter.map
        own_axes = template.axes(matrix.name, names)
        dtype = _adapter_dtype(raw_value(template.parameters[matrix.name]))
        for path, dims in _arrays_of(adapter).items():
            pick = lambda values, rank, dims=dims: tuple(
                rank if d is None else values[d] for d in dims
            )
            shapes[path] = jax.ShapeDtypeStruct(pick(matrix.full_shape, adapter.rank), dtype)
            if axes.setdefault(path, pick(own_axes, None)) != pick(own_axes, None):
                raise ValueError(
                    f"axes: {path!r}: {axes[path]}: the names of an adapter's dimensions follow "
                    f"from those of {matrix.name}: {pick(own_axes, None)}. Name those."
                )
    check_paths([*template.parameters, *template.variables, *shapes])

    def create(seed: Any) -> Flat:
        key = jax.random.fold_in(jax.random.key(seed), 3)
        keys = [jax.random.fold_in(key, i) for i in range(len(adapters))]
        draw = partial(_draw, gaussian=gaussian)
        arrays = [draw(x, k, shapes) for x, k in zip(adapters, keys, strict=True)]
        return template.create(seed) | {p: x for each in arrays for p, x in each.items()}

    return axes, replace(
        template,
        create=create,
        parameters={**template.parameters, **shapes},
        is_layer_stack=False,
        adapt=partial(merge_matrices, adapters),
        notes=(
            *template.notes,
            f"adapters of {len(adapters)} matrices, none in a linear map of hfjax's: each step "
            "makes W + s A B and its gradient whole",
        ),
    )


def _arrays_of(adapter: Adapter) -> dict[str, tuple[int | None, ...]]:
    """Return path -> dimensions in W of an adapter's arrays."""
    matrix: Any = adapter.map
    return {f"{matrix.adapter_path}/{name}": dims for name, dims in matrix.adapter_dims.items()}


def _adapter_dtype(kernel: Any) -> Any:
    """Return float32, or a dtype that is more precise."""
    return jnp.promote_types(kernel.dtype, jnp.float32)


def _draw(adapter: Adapter, key: jax.Array, shapes: Mapping[str, Any], gaussian: bool) -> Flat:
    """Return A, of the distribution of `LowRank`, and B, which is 0."""
    a_path, b_path = _arrays_of(adapter)
    a, b, bound = shapes[a_path], shapes[b_path], adapter.map.sizes[0] ** -0.5
    a_values = (
        jax.random.normal(key, a.shape, a.dtype) / adapter.rank
        if gaussian
        else jax.random.uniform(key, a.shape, a.dtype, minval=-bound, maxval=bound)
    )
    return {a_path: a_values, b_path: jnp.zeros(b.shape, b.dtype)}


def merge_matrices(adapters: Sequence[Adapter], parameters: Mapping[str, Any]) -> Flat:
    """Return the parameters of the model alone: W + s A B in place of W, in W's dtype.

    Args:
        adapters: All adapters.
        parameters: The parameters by path; shapes of them stay as they are.
    """
    merged = dict(parameters)
    for adapter in adapters:
        path, (a_dims, b_dims) = adapter.map.name, _arrays_of(adapter).values()
        a, b = map(merged.pop, _arrays_of(adapter))
        if isinstance(kernel := merged[path], jax.ShapeDtypeStruct):
            continue
        a_indices, b_indices = (
            [kernel.ndim if d is None else d for d in x] for x in (a_dims, b_dims)
        )
        change = jnp.einsum(a, a_indices, b, b_indices, list(range(kernel.ndim)))
        merged[path] = (kernel + adapter.scale * change).astype(kernel.dtype)
    return merged
