"""BatchNorm over the global batch, or over each device's examples: NNX's and Linen's.

A model sees the global batch, and all positions, so BatchNorm is that of one device. Where a model
sees its own examples only (batch_view="local"), it averages its statistics over devices. Where each
device is to normalise by itself, BatchNorm runs under `per_device`.
"""

import math
import warnings
from collections.abc import Callable, Collection
from dataclasses import fields
from functools import cache
from typing import Any

from flax import linen, nnx

from hfjax.parallel.mesh import DATA_AXES
from hfjax.parallel.spmd.axes import axis_size_or_one
from hfjax.parallel.spmd.partition_context import is_recording
from hfjax.parallel.spmd.rule_calls import per_device
from hfjax.utils.paths import join_path


def convert_batch_norms(model: nnx.Module, synchronised: bool) -> int:
    """Make BatchNorms normalise over the global batch, or per device; return how many there are."""
    modules = [module for _, module in nnx.iter_modules(model)]
    norms = [module for module in modules if isinstance(module, nnx.BatchNorm)]
    for module in norms:
        if not synchronised:
            module.__class__ = _per_device_norm(type(module))
            continue
        if type(module) is nnx.BatchNorm:
            module.__class__ = SyncBatchNorm
        setattr(module, "axis_name", DATA_AXES)  # noqa: B010  flax declares one name
    linen_states = (nnx.state(m, nnx.BatchStat) for m in modules if isinstance(m, nnx.bridge.ToNNX))
    paths = ({join_path(keys) for keys, _ in nnx.to_flat_state(state)} for state in linen_states)
    return len(norms) + sum(map(count_linen_norms, paths))


def batch_norm_notes(count: int, synchronised: bool) -> list[str]:
    """Return what `print(layout)` says of so many BatchNorms."""
    extent = "each device (sync_batch_norm=False)"
    if synchronised:
        extent = "all devices, as one device does (sync_batch_norm=False: as the model is written)"
    return [f"BatchNorm ({count}): normalises over the examples of {extent}"] if count else []


def count_linen_norms(paths: Collection[str]) -> int:
    """Return how many BatchNorms of Linen keep statistics under these paths.

    Their modules exist in calls only, and `model_init` may have called them before.
    """
    pairs = [(path.rpartition("/")[2], f"{path.removesuffix('mean')}var") for path in paths]
    return sum(name == "mean" and var in paths for name, var in pairs)


ONE_EXAMPLE = (
    "sync_batch_norm=False: each device has one example, the one that BatchNorm sees. Leave "
    "sync_batch_norm at True, give more examples, or use GroupNorm."
)


@cache
def _per_device_norm(norm_class: type) -> type:
    """Return a class of BatchNorm whose calls run on each device's own examples."""

    def call(self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        graph, state = nnx.split(self)

        def run(state: Any, x: Any, arrays: Any) -> Any:
            if x.shape[0] == 1:
                warnings.warn(ONE_EXAMPLE, UserWarning, stacklevel=2)
            module = nnx.merge(graph, state)
            y = norm_class.__call__(module, x, *args, **{**kwargs, **arrays})
            return y, nnx.state(module)

        arrays = {name: v for name, v in kwargs.items() if hasattr(v, "shape")}
        y, state = per_device(run)(state, x, arrays)
        nnx.update(self, state)
        return y

    return type(norm_class.__name__, (norm_class,), {"__call__": call})


def linen_per_device(call: Callable, args: tuple, kwargs: dict, context: Any) -> Any:
    """Make Linen's BatchNorm normalise over each device's examples: a method interceptor."""
    module = context.module
    is_norm = isinstance(module, linen.BatchNorm) and context.method_name == "__call__"
    if not is_norm or module.is_initializing() or not is_recording():
        return call(*args, **kwargs)
    settings = {f.name: getattr(module, f.name) for f in fields(module) if f.init}
    norm = type(module)(**{**settings, "parent": None})
    writes = module.is_mutable_collection("batch_stats")
    arrays = {name: v for name, v in kwargs.items() if hasattr(v, "shape")}

    def run(variables: Any, x: Any, arrays: Any) -> Any:
        more: Any = {**kwargs, **arrays, "mutable": ["batch_stats"] if writes else False}
        return norm.apply(variables, x, *args[1:], **more)

    out = per_device(run)(dict(module.variables), args[0], arrays)
    if not writes:
        return out
    y, updates = out
    for name, value in updates["batch_stats"].items():
        module.put_variable("batch_stats", name, value)
    return y


def check_mask(module: Any, mask: Any) -> None:
    """Refuse a mask where flax would average the devices' means, unweighted by examples."""
    if mask is not None and math.prod(map(axis_size_or_one, DATA_AXES)) > 1:
        raise ValueError(
            f"{type(module).__name__} with mask=: flax averages the statistics of devices whatever "
            "number of examples of each counts, which is not what one device computes. Mask before "
            "and after, or let each device normalise by itself: hfjax.layout(…, "
            "sync_batch_norm=False)."
        )


class SyncBatchNorm(nnx.BatchNorm):
    """BatchNorm over the global batch."""

    def __call__(self, x: Any, use_running_average: Any = None, *, mask: Any = None) -> Any:
        """Normalise, over the global batch unless by running averages."""
        first = self.use_running_average if use_running_average is None else use_running_average
        check_mask(self, None if first else mask)
        return super().__call__(x, use_running_average, mask=mask)


def synchronise_linen(call: Callable, args: tuple, kwargs: dict, context: Any) -> Any:
    """Make Linen's BatchNorm normalise over the global batch: a method interceptor."""
    module = context.module
    if isinstance(module, linen.BatchNorm) and context.method_name == "__call__":
        object.__setattr__(module, "axis_name", DATA_AXES)  # of this call's own instance
        check_mask(module, kwargs.get("mask"))
    return call(*args, **kwargs)
