"""Wrap any block, so that some of its residuals wait in host memory."""

from collections.abc import Callable, Sequence
from functools import update_wrapper
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from hfjax.parallel.engine.layer_remat import can_split_locally, offload_residuals
from hfjax.parallel.jaxprs.saved_tensor import Tensor
from hfjax.parallel.offload.activations import Offload, OffloadReport, Share, select_tensors
from hfjax.parallel.offload.check_host_loops import check_host_loops
from hfjax.parallel.offload.host_residuals import save_residuals_on_host
from hfjax.parallel.whole_model.unshard_on_use import wrap_at_run
from hfjax.utils.keywords import is_int
from hfjax.utils.paths import Tree


def offload(
    block: Callable,
    ratio: float | None = None,
    tag: str = "layers",
    *,
    names: str | tuple[str, ...] = (),
    dots: bool = False,
    weights: int | Sequence[int] = 0,
) -> Any:
    """Return the block, which now keeps part of its activations in host memory.

    What is returned has the block's own signature. Its `offloaded` is the report of its last
    gradient, of one call (and of one iteration, in a loop).

    Args:
        block: An nnx module, or a function of arrays.
        ratio: A fraction of the bytes from 0 to 1. Give one of `ratio`, `names` and `dots`.
        tag: What the report calls these tensors.
        names: Tensors to which `jax.ad_checkpoint.checkpoint_name` gave these names.
        dots: Whether to offload the results of matmuls.
        weights: Of a function: the numbers of the arguments that are weights, () for none. They are
            never offloaded, nor is what follows from them alone, nor what the function closes over.
            A module knows its own.

    Example:
        >>> import hfjax, jax, jax.numpy as jnp
        >>> mlp = hfjax.offload(lambda w, x: jnp.tanh(x @ w) @ w.T, ratio=0.5)
        >>> w, x = jnp.ones((4, 16)), jnp.ones((8, 4))
        >>> jax.grad(lambda w: mlp(w, x).sum())(w).shape
        (4, 16)
        >>> 0 < mlp.offloaded.ratio <= 0.5
        True
    """
    if isinstance(ratio, str):
        raise ValueError(f"offload(block, ratio={ratio!r}): a number from 0 to 1 is expected.")
    settings = Offload(ratio=ratio, names=names, dots=dots, tag=tag)
    if isinstance(block, nnx.Module):
        if weights != 0:
            raise ValueError("offload(block, weights=…) is for functions: a module knows its own.")
        return OffloadedModule(block, settings)
    if not callable(block):
        raise ValueError(f"offload(block): a module or a function is expected, found {block!r}.")
    return _OffloadedFunction(block, settings, _numbers(weights))


def _numbers(weights: Any) -> tuple[int, ...]:
    numbers = (weights,) if isinstance(weights, int) else weights
    if not isinstance(numbers, list | tuple) or not all(is_int(n, 0) for n in numbers):
        raise ValueError(
            f"offload(block, weights={weights!r}): numbers of arguments from 0 on are expected, "
            "for instance 0, (0, 2), or () where there are no weights."
        )
    return tuple(numbers)


class _OffloadChooser:
    """Chooses tensors of one block, and keeps the report; equal to itself only."""

    def __init__(self, settings: Offload) -> None:
        check_host_loops(Mesh(jax.local_devices()[:1], "data"))
        self.settings, self.report = settings, OffloadReport(settings)

    def __call__(self, tensors: Sequence[Tensor]) -> Share:
        chosen = select_tensors(self.settings, tensors, can_split_locally())
        self.report.entries.clear()
        self.report.add(self.settings.tag, 1, tensors, chosen)
        self.report.check()
        return chosen


class _OffloadedFunction:
    """A function of arrays that keeps part of its activations in host memory."""

    def __init__(self, function: Callable, settings: Offload, weights: Sequence[int]) -> None:
        self.function, self.weights, self._choice = function, weights, _OffloadChooser(settings)
        update_wrapper(self, function)

    @property
    def offloaded(self) -> OffloadReport:
        """What is saved and what of it goes to the host, once a gradient was traced."""
        return self._choice.report

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._choice.settings.idle:
            return self.function(*args, **kwargs)
        if missing := [i for i in self.weights if i >= len(args)]:
            raise ValueError(
                f"offload: weights are argument {missing[0]} of {self.function}, which was given "
                f"{len(args)} by position (by name: {', '.join(kwargs) or 'none'}). Give weights "
                "by position, or say which they are: offload(block, weights=0)."
            )
        weight_args = [args[i] for i in self.weights]
        rest, join = _split_arrays(
            ([x for i, x in enumerate(args) if i not in self.weights], kwargs)
        )

        def run(weight_args, rest):
            others, kwargs = join(rest)
            remaining = {True: iter(weight_args), False: iter(others)}
            merged = [next(remaining[i in self.weights]) for i in range(len(args))]
            return self.function(*merged, **kwargs)

        pure, closed = jax.closure_convert(run, weight_args, rest)
        apply = lambda known, weights, rest: (pure(weights[0], rest, *weights[1]), ())
        return save_residuals_on_host(apply, self._choice)((), (weight_args, closed), rest)[0]


class OffloadedModule(nnx.Module):
    """A module that keeps part of the activations of `block` in host memory."""

    def __init__(self, block: nnx.Module, settings: Offload) -> None:
        self.block = block
        self._choice = _OffloadChooser(settings)

    @property
    def offloaded(self) -> OffloadReport:
        """What is saved and what of it goes to the host, once a gradient was traced."""
        return self._choice.report

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._choice.settings.idle:
            return self.block(*args, **kwargs)
        graph, parameters, variables = nnx.split(self.block, nnx.Param, ...)
        arrays, join = _split_arrays((args, kwargs))

        def run(parameters, variables, arrays):
            args, kwargs = join(arrays)
            block = nnx.merge(graph, parameters, variables)
            return block(*args, **kwargs), nnx.state(block, nnx.Not(nnx.Param))

        with_offload = lambda run: offload_residuals(run, self._choice)
        y, variables = wrap_at_run(with_offload, run)(parameters, variables, arrays)
        nnx.update(self.block, variables)
        return y


def _split_arrays(tree: Tree) -> tuple[list, Callable]:
    """Return the arrays of a tree, and a function that replaces them."""
    leaves, treedef = jax.tree.flatten(tree)
    is_array = [hasattr(leaf, "dtype") for leaf in leaves]

    def join(arrays: list) -> Any:
        arrays_left = iter(arrays)
        merged = [
            next(arrays_left) if a else leaf for a, leaf in zip(is_array, leaves, strict=True)
        ]
        return treedef.unflatten(merged)

    return [leaf for a, leaf in zip(is_array, leaves, strict=True) if a], join
