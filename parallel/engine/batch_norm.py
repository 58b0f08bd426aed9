"""BatchNorm over the rows of all devices, as one device normalises: NNX's and Linen's."""

import math
from collections.abc import Callable
from typing import Any

from flax import linen, nnx

from hfjax.parallel.engine.fetch import devices_along
from hfjax.parallel.mesh import SAMPLE_AXES


def synchronised(model: nnx.Module) -> list[str]:
    """Let BatchNorm normalise over the rows of all devices, as one device does."""
    count = 0
    for _, module in nnx.iter_modules(model):
        if isinstance(module, nnx.BatchNorm):
            if type(module) is nnx.BatchNorm:
                module.__class__ = SyncBatchNorm
            setattr(module, "axis_name", SAMPLE_AXES)  # noqa: B010  flax declares one name
            count += 1
    if not count:
        return []
    return [
        f"BatchNorm ({count}): normalises over the rows of all devices, as one device does "
        "(sync_batch_norm=False: as the model is written)"
    ]


def check_mask(module: Any, mask: Any) -> None:
    """Refuse a mask where flax would average the means of devices, however many rows each has."""
    if mask is not None and math.prod(map(devices_along, SAMPLE_AXES)) > 1:
        raise ValueError(
            f"{type(module).__name__} with mask=: flax averages the statistics of devices whatever "
            "number of rows of each counts, which is not what one device computes. Mask before "
            "and after, or let each device normalise by itself: hfjax.layout(…, "
            "sync_batch_norm=False)."
        )


class SyncBatchNorm(nnx.BatchNorm):
    """BatchNorm over the rows of all devices."""

    def __call__(self, x: Any, use_running_average: Any = None, *, mask: Any = None) -> Any:
        """Normalise, over the rows of all devices unless by running averages."""
        first = self.use_running_average if use_running_average is None else use_running_average
        check_mask(self, None if first else mask)
        return super().__call__(x, use_running_average, mask=mask)


def synchronise_linen(call: Callable, args: tuple, kwargs: dict, context: Any) -> Any:
    """Let Linen's BatchNorm normalise over the rows of all devices: an interceptor of methods."""
    module = context.module
    if isinstance(module, linen.BatchNorm) and context.method_name == "__call__":
        object.__setattr__(module, "axis_name", SAMPLE_AXES)  # of this call's own instance
        check_mask(module, kwargs.get("mask"))
    return call(*args, **kwargs)
