"""Bare pytrees of arrays as models: split into arrays by path, and what is no array."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen

from hfjax.parallel.jaxprs.bind import call_on_one_device
from hfjax.utils.paths import Flat, Index, check_paths


@dataclass(frozen=True)
class TreeTemplate:
    """A bare pytree without its arrays."""

    definition: Any
    leaves: tuple[Any, ...]  # paths of arrays, and what is no array as it is
    is_path: tuple[bool, ...]

    def fill(self, arrays: Flat) -> Any:
        """Return the tree that holds these arrays."""
        pairs = zip(self.leaves, self.is_path, strict=True)
        return self.definition.unflatten([arrays[x] if path else x for x, path in pairs])


def split_tree(make: Callable[[Any], Any]) -> dict[str, Any]:
    """Return the fields of a `ModelTemplate` of a bare pytree: its loss is given the tree.

    Integer arrays and keys are variables; what is no array stays as it is.
    """
    leaves_with_path: list[tuple[Any, Any]] = []
    treedef: Any = None

    def arrays(seed: Index):
        nonlocal treedef
        tree = make(seed)
        if isinstance(tree, linen.Module):
            raise ValueError(
                f"model_init returned the Linen module {type(tree).__name__}, which holds no "
                "arrays. Return flax.nnx.bridge.ToNNX(module, rngs=rngs).lazy_init(inputs), or "
                "the parameters, module.init(rngs.params(), inputs), with forward=lambda params, "
                "batch: module.apply(params, …)."
            )
        leaves_with_path[:], treedef = jax.tree_util.tree_flatten_with_path(tree)
        return {i: leaf for i, (_, leaf) in enumerate(leaves_with_path) if _is_array(leaf)}

    shapes = jax.eval_shape(call_on_one_device(lambda: arrays(0)))
    if not shapes:
        raise ValueError(
            f"model_init returned {_describe(leaves_with_path, treedef)}: an nnx.Module or a "
            "pytree of arrays is expected."
        )
    paths = [
        jax.tree_util.keystr(keys, simple=True, separator="/") or "array"
        for keys, _ in leaves_with_path
    ]
    check_paths([paths[i] for i in shapes])
    static_leaves = {i: leaf for i, (_, leaf) in enumerate(leaves_with_path) if i not in shapes}
    _check_numbers(leaves_with_path, static_leaves, paths)
    is_path = tuple(i in shapes for i in range(len(leaves_with_path)))
    tree = TreeTemplate(
        treedef, tuple(static_leaves.get(i, path) for i, path in enumerate(paths)), is_path
    )
    is_trainable = lambda x: jnp.issubdtype(x.dtype, jnp.inexact)

    def create(seed: Index):
        values = call_on_one_device(lambda: arrays(seed))()
        return {paths[i]: x if is_trainable(x) else jnp.asarray(x) for i, x in values.items()}

    return dict(
        create=create,
        parameters={paths[i]: x for i, x in shapes.items() if is_trainable(x)},
        variables={paths[i]: x for i, x in shapes.items() if not is_trainable(x)},
        graphs=dict.fromkeys(("model", "train", "eval"), tree),
        keys={paths[i]: () for i in shapes},
        notes=tuple(_number_notes(static_leaves, paths)),
    )


def _describe(leaves_with_path: Sequence[tuple[Any, Any]], treedef: Any) -> str:
    kinds = sorted({type(leaf).__name__ for _, leaf in leaves_with_path})
    return f"no array, but {', '.join(kinds)}" if kinds else type(treedef.unflatten([])).__name__


def _is_array(leaf: object) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | np.generic)


def _check_numbers(
    leaves_with_path: Sequence, static_leaves: Mapping[int, Any], paths: Sequence[str]
) -> None:
    """Refuse a Python float where it may be meant as a parameter: in a plain container."""
    for i, leaf in static_leaves.items():
        attribute = any(isinstance(key, jax.tree_util.GetAttrKey) for key in leaves_with_path[i][0])
        if isinstance(leaf, float | complex) and not attribute:
            raise ValueError(
                f"{paths[i]} is the Python number {leaf}: is it a parameter? Write "
                f"jnp.asarray({leaf}) to train it, or leave it out of what model_init returns."
            )


def _number_notes(static_leaves: Mapping[int, Any], paths: Sequence[str]) -> Iterator[str]:
    numbers = [paths[i] for i, leaf in static_leaves.items() if isinstance(leaf, float | complex)]
    if numbers:
        yield f"Python numbers stay as they are and are not trained: {', '.join(numbers)}"
