"""Times small programs on the available devices for `calibrate`.

On a GPU it is wall-clock time: calls are queued one after another and waited for once. On a CPU it
is processor time over all threads, since other programs use the cores too.
"""

import resource
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

MAX_CALLS = 1000


@dataclass(frozen=True)
class Stopwatch:
    """Measures how long programs run.

    Attributes:
        devices: Where they run.
        processor: Whether seconds are processor time.
        block: Seconds of consecutive calls.
        rounds: Number of blocks; the median counts.
    """

    devices: Sequence[Any]
    processor: bool
    block: float = 0.05
    rounds: int = 7

    @property
    def first_device(self) -> Any:
        """The first device."""
        return self.devices[0]

    def seconds(self, function: Callable, *operands: Any, in_place: bool = False) -> float:
        """Return the seconds of a call on one device.

        CPU devices all run it at once, so that they compete for the caches as they do in a step,
        and the time is divided by their number.

        Args:
            function: What is compiled and called.
            operands: Arrays on the first device.
            in_place: The result replaces the first operand, also for the next call.

        Example:
            >>> import jax
            >>> from hfjax.planner.calibration.stopwatch import Stopwatch
            >>> watch = Stopwatch(jax.devices()[:1], processor=True, block=0.01, rounds=1)
            >>> watch.seconds(lambda x: x + 1, jax.numpy.ones(8)) > 0
            True
        """
        count = len(self.devices)
        if not self.processor or count == 1:
            return self.seconds_on_all_devices(function, *operands, in_place=in_place)
        mesh = Mesh(np.array(self.devices), ("x",))
        every = NamedSharding(mesh, P("x"))
        replicate = lambda x: jax.device_put(
            np.broadcast_to(np.asarray(x), (count, *x.shape)), every
        )
        run_local = lambda *args: jax.tree.map(lambda y: y[None], function(*(x[0] for x in args)))
        run = jax.shard_map(run_local, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
        return (
            self.seconds_on_all_devices(run, *map(replicate, operands), in_place=in_place) / count
        )

    def seconds_on_all_devices(
        self, function: Callable, *operands: Any, in_place: bool = False
    ) -> float:
        """Return the seconds of a call that runs on all participating devices.

        Args:
            function: What is compiled and called.
            operands: Arrays, already on their devices.
            in_place: The result replaces the first operand, also for the next call.
        """
        donated = (0,) if in_place else ()
        run = jax.jit(function, donate_argnums=donated).lower(*operands).compile()
        args = [jax.numpy.copy(operands[0]), *operands[1:]] if in_place else list(operands)

        def block(calls: int) -> float:
            began, result = self._now(), None
            for _ in range(calls):
                result = run(*args)
                if in_place:
                    args[0] = result
            jax.block_until_ready(result)
            return (self._now() - began) / calls

        block(2)
        began = time.perf_counter()
        block(2)
        each = max((time.perf_counter() - began) / 2, 1e-7)
        calls = int(min(max(self.block / each, 2), MAX_CALLS))
        return max(statistics.median(block(calls) for _ in range(self.rounds)), 1e-9)

    def _now(self) -> float:
        if not self.processor:
            return time.perf_counter()
        used = resource.getrusage(resource.RUSAGE_SELF)
        return used.ru_utime + used.ru_stime
