"""What several interpreted GPUs share: semaphores, each other's buffers, and who waits for whom.

Every fake device runs in one process and jax keeps all their buffers in one place, keyed by device.
Two things are missing there and are here: counters that any device may raise and wait for, with the
vector clocks by which races are found, and the way from "this ref on that device" to its buffer.
"""
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false

import dataclasses
import functools
import inspect
import threading
import time
from collections import defaultdict
from typing import Any

import numpy as np
from jax._src.pallas.mosaic_gpu import core
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks as callbacks

AT_ONCE = 31  # jax runs 32 programs on a CPU device at a time; each warpgroup is one
PATIENCE = 120.0  # seconds without any signal, after which a waiting thread calls it a deadlock


@dataclasses.dataclass
class Count:
    """One semaphore of one device; all it ever got and was awaited for; its signallers' clocks."""

    value: int = 0
    signalled: int = 0
    awaited: int = 0
    clock: Any = None


class Fabric:
    """The semaphores of one launch on all devices of a mesh; all are zero when it begins."""

    def __init__(self, axes, patience):
        self.axes = dict(axes)
        self.patience = patience
        self.counts = defaultdict(Count)
        self.changed = threading.Condition()
        self.last_signal = time.monotonic()
        self.begun, self.ended = set(), set()

    def device(self, name, own, coordinates):
        """Return the number of a device named by nothing (own), a number or places on axes."""
        if name is None:
            return own
        if not isinstance(name, dict):
            return int(np.asarray(name))
        number = 0
        for (axis, size), here in zip(self.axes.items(), coordinates, strict=True):
            place = int(name.get(axis, here))
            if not 0 <= place < size:
                raise IndexError(f"device {place} of axis {axis!r}, which has {size}")
            number = number * size + place
        return number

    def signal(self, key, amount, clock):
        with self.changed:
            count = self.counts[key]
            if key[0] in self.ended:
                raise RuntimeError(f"LATE SIGNAL: {key[0]}'s kernel has ended; semaphore {key}")
            count.value += amount
            count.signalled += amount
            if clock is not None and count.clock is None:
                count.clock = clock
            elif clock is not None:
                count.clock.update(clock)
            self.last_signal = time.monotonic()
            self.changed.notify_all()

    def wait(self, key, value, decrement, check):
        """Return the clock of those who signalled `key`, once it has reached `value`."""
        began = time.monotonic()
        with self.changed:
            count = self.counts[key]
            while count.value < value:
                self.changed.wait(0.05)
                check()
                if time.monotonic() - max(began, self.last_signal) > self.patience:
                    raise RuntimeError(self._deadlock(key, value))
            count.awaited = count.awaited + value if decrement else max(count.awaited, value)
            count.value -= value if decrement else 0
            return None if count.clock is None else count.clock.copy()

    def _deadlock(self, key, value):
        values = {key: count.value for key, count in self.counts.items()}
        return (
            f"DEADLOCK: no signal for {self.patience} s, and (device, semaphore, index) {key} is "
            f"awaited to reach {value}. The semaphores hold {values}"
        )

    def at_an_end(self, device):
        """Note that a device's kernel begins or, the second time, ends."""
        with self.changed:
            ending = device in self.begun
            (self.ended if ending else self.begun).add(device)
        if ending:
            self._check_all_awaited(device)

    def _check_all_awaited(self, device):
        for key, count in self.counts.items():
            if key[0] == device and count.awaited < count.signalled:
                raise RuntimeError(
                    f"UNAWAITED SIGNAL: (device, semaphore, index) {key} got {count.signalled} and "
                    f"its device waited for {count.awaited}: such a signal may arrive after the "
                    "kernel's end, when its memory is another's"
                )


def fabric():
    return callbacks._get_shared_memory().fabric


@callbacks.fail_on_exception
def begin(*, token, axes, patience):
    memory = callbacks._get_shared_memory()
    blocks, warpgroups = memory.num_blocks_per_cluster, memory.num_pallas_threads_per_block
    if memory.num_devices * blocks * warpgroups > AT_ONCE:
        raise ValueError(
            f"{memory.num_devices} devices x {blocks} blocks x {warpgroups} warpgroups: the "
            f"interpreter runs at most {AT_ONCE} at the same time. Test with fewer blocks"
        )
    with memory.lock:
        if not hasattr(memory, "fabric"):
            memory.fabric = Fabric(axes, patience)
    return token


@callbacks.fail_on_exception
def signal(*, token, mesh_location, thread, semaphore, index, amount, device):
    memory = callbacks._get_shared_memory()
    target = fabric().device(device, thread.device_id, mesh_location.device_coords)
    key = (target, semaphore, tuple(int(i) for i in index))
    clock = memory.incr_clock(thread) if memory.detect_races else None
    fabric().signal(key, int(amount), clock)
    return token


@callbacks.fail_on_exception
def wait(*, token, mesh_location, thread, semaphore, index, value, decrement):
    memory = callbacks._get_shared_memory()
    key = (thread.device_id, semaphore, tuple(int(i) for i in index))
    clock = fabric().wait(key, int(value), bool(decrement), memory.check_failed)
    if clock is not None and memory.detect_races:
        with memory.lock:
            memory.clocks[thread].update(clock)
    return token


def at_both_ends(update_clocks):
    """Return jax's callback before the first and after the last block, which the fabric notes."""

    @functools.wraps(update_clocks)
    def noted(token, device):
        fabric().at_an_end(device.device_id)
        return update_clocks(token, device)

    return callbacks.fail_on_exception(noted)


def _wait_for_buffer(memory, key):
    """Wait until a peer's launch has begun: on GPUs the runtime's barrier before a launch does."""
    began = time.monotonic()
    while key not in memory.mem:
        memory.check_failed()
        if time.monotonic() - began > memory.fabric.patience:
            raise RuntimeError(f"no buffer {key} appeared")
        time.sleep(0.002)


def following_peers(function):
    """Return a callback that finds the buffer on the peer where its transforms name one."""
    signature = inspect.signature(function)
    ends = [name.removesuffix("transforms") for name in signature.parameters]
    refs = [end for end in ends if f"{end}transforms" in signature.parameters]

    @functools.wraps(function)
    def followed(*positional, **named):
        bound = signature.bind(*positional, **named)
        for end in refs:
            _follow(bound.arguments, f"{end}transforms", f"{end}allocation_key_as_array")
        return function(*bound.args, **bound.kwargs)

    return followed


def _follow(arguments, transforms, key):
    peers = [t for t in arguments.get(transforms) or () if isinstance(t, core.PeerMemRef)]
    if not peers:
        return
    (peer,) = peers
    thread, location = arguments["thread"], arguments["mesh_location"]
    device = fabric().device(peer.device_id, thread.device_id, location.device_coords)
    there = callbacks.HostAllocationKey.from_array(np.asarray(arguments[key]))
    there = dataclasses.replace(there, device_id=device)
    _wait_for_buffer(callbacks._get_shared_memory(), there)
    arguments[key] = there.as_np_array
    arguments[transforms] = tuple(t for t in arguments[transforms] if t is not peer)
