"""How fast a run is: tokens and floating-point operations a second, of what the devices can do."""

import math
import resource
import sys
import time
from collections.abc import Mapping
from typing import Any

from hfjax.parallel.blueprint import LAYERS
from hfjax.run.build import Parts

# Dense matmuls in bfloat16, FLOP/s of one device (makers' data sheets).
PEAKS = {
    "H200": 989e12,
    "H100": 989e12,
    "H800": 989e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "V100": 125e12,
    "B200": 2250e12,
}


def flops_per_token(parts: Parts) -> float:
    """Return what training needs for one token: 6 for each parameter of a matmul, and attention.

    As in PaLM's appendix B: nothing is counted for what is computed again, nor less for causality;
    embeddings count where they are the head's matrix. Of one's own model every matrix is counted,
    and no attention.
    """
    shape = parts.model.shape
    arrays = parts.layout.arrays.items()
    matrices = {path: math.prod(a.shape) for path, a in arrays if len(a.shape) > 1}
    if shape is None:
        return 6.0 * sum(matrices.values())
    layers = sum(size for path, size in matrices.items() if path.startswith(LAYERS))
    head = shape.embed * shape.vocab
    return 6.0 * (layers + head) + 12.0 * shape.layers * shape.embed * parts.model.length


def peak_flops(device: Any) -> float | None:
    """Return the FLOP/s of a device by its name; None for a CPU or an unknown one."""
    return next((flops for name, flops in PEAKS.items() if name in device.device_kind), None)


def memory(device: Any) -> int:
    """Return the most bytes that were in use: of a GPU, or of this process."""
    found = device.memory_stats() if device.platform != "cpu" else None
    if found and "peak_bytes_in_use" in found:
        return found["peak_bytes_in_use"]
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class Speed:
    """Tokens a second since the last look, without what the run did between its steps."""

    def __init__(self, parts: Parts):
        self._each = parts.config.batch * parts.model.length / parts.mesh.size
        self._flops = flops_per_token(parts)
        self._peak = peak_flops(parts.mesh.devices.flat[0])
        self._device = parts.mesh.local_devices[0]
        self._since: float | None = None  # None: the first step, which compiles, is not counted
        self._steps = 0

    def count(self) -> None:
        """A step is done."""
        if self._since is None:
            self._since = time.perf_counter()
        else:
            self._steps += 1

    def pause(self) -> None:
        """What follows is no step; the next step begins a new measurement."""
        self._since, self._steps = None, 0

    def look(self) -> Mapping[str, Any]:
        """Return tokens/s, TFLOP/s and MFU per device since the last look; {} if too little ran."""
        found: dict[str, Any] = {"memory": memory(self._device)}
        if self._since is None or not self._steps:
            return found
        now = time.perf_counter()
        tokens = self._each * self._steps / (now - self._since)
        self._since, self._steps = now, 0
        flops = tokens * self._flops
        found |= {"tokens_per_second": tokens, "tflops": flops / 1e12}
        return found | ({"mfu": flops / self._peak} if self._peak else {})
