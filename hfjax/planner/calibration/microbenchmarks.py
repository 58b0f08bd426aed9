"""Microbenchmarks of one device: matmuls, memory, launches, attention, transfers.

Every function takes a `Stopwatch` and returns constants of a `Machine` by name. `quick` makes all
sizes tiny: the numbers then mean nothing, and only check that everything runs.
"""

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from hfjax.models.attention import causal_attention
from hfjax.planner.calibration.stopwatch import Stopwatch

Timings = dict[str, float]
SMALL = ((64, 64, 64), (128, 128, 128), (256, 256, 256), (512, 256, 256))  # m, n, k
CHAIN = 32  # small matmuls or sums in sequence in one program
MIN_SECONDS = 1e-8  # seconds: the least that is measured


def _random_array(
    watch: Stopwatch, *shape: int, dtype: Any = jnp.float32, seed: int = 0
) -> jax.Array:
    """Return an array of normal random numbers on the first device."""
    x = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
    return jax.device_put(jnp.asarray(x, dtype), watch.first_device)


def memory(watch: Stopwatch, quick: bool) -> Timings:
    """Return memory bandwidth of a large copy; on a CPU also of one that stays in the cache."""
    large, small = (
        (2**16, 2**14) if quick else (2**24, 2**18) if watch.processor else (2**29, 2**20)
    )
    x = jax.device_put(np.ones(large, np.float32), watch.first_device)
    rate = lambda x: 2 * x.nbytes / watch.seconds(lambda x: -x, x, in_place=watch.processor)
    timings = {"stream": rate(x)}
    del x
    return timings | ({"cached": rate(_random_array(watch, small))} if watch.processor else {})


def launches(watch: Stopwatch, quick: bool) -> Timings:
    """Return the seconds of an almost empty operation in a program of many."""
    del quick

    def sums(x: jax.Array) -> jax.Array:
        for _ in range(CHAIN):
            x = x / (1 + jnp.abs(x).sum())
        return x

    few = watch.seconds(lambda x: x / (1 + jnp.abs(x).sum()), _random_array(watch, 64))
    each = (watch.seconds(sums, _random_array(watch, 64)) - few) / (CHAIN - 1)
    return {"launch": max(each / (2 if watch.processor else 1), MIN_SECONDS)}


def products(watch: Stopwatch, quick: bool, cached: float = 0.0) -> Timings:
    """Return the rates of large matmuls in both dtypes, and the fixed overhead of each matmul.

    Args:
        watch: The stopwatch.
        quick: Whether sizes are tiny.
        cached: On a CPU, the rate at which operands and results pass the cache; 0: on a GPU.
    """
    size = 64 if quick else 1024 if watch.processor else 8192
    timings: Timings = {}
    for name, dtype in (("flops", jnp.bfloat16), ("flops_fp32", jnp.float32)):
        a, b = (_random_array(watch, size, size, dtype=dtype, seed=n) for n in range(2))
        timings[name] = 2.0 * size**3 / watch.seconds(jnp.dot, a, b)
    overheads = [
        _product_seconds(watch, m, n, k)
        - _min_product_seconds(m, n, k, timings["flops_fp32"], cached)
        for m, n, k in SMALL[: 1 if quick else None]
    ]
    timings["start_up"] = max(statistics.median(overheads), MIN_SECONDS)
    return timings


def _min_product_seconds(m: int, n: int, k: int, rate: float, cached: float) -> float:
    """Return the seconds that the operations and bytes of a matmul take."""
    memory_seconds = 4 * (m * k + k * n + m * n) / cached if cached else 0.0
    return 2.0 * m * n * k / rate + memory_seconds


def _product_seconds(watch: Stopwatch, m: int, n: int, k: int) -> float:
    """Return the seconds of a matmul in a program of several."""
    b = _random_array(watch, k, n, seed=1)
    several = [_random_array(watch, m, k, seed=s) for s in range(4)]
    each = lambda b, *several: [a @ b for a in several]
    return watch.seconds(each, b, *several) / len(several)


def attention(watch: Stopwatch, quick: bool, stream: float) -> Timings:
    """Return rates and memory passes of fused attention, from two lengths of as many tokens."""
    lengths = (16, 32) if quick else (1024, 4096)
    tokens, width = (32, 64) if quick else (16384, 1024)
    timings: Timings = {}
    passes: dict[str, list[float]] = {"forward": [], "backward": []}
    for head in (64, 128):
        measurements: dict[str, list[tuple[float, float]]] = {"forward": [], "backward": []}
        for length in lengths:
            heads = max(width // head, 1)
            shape = (tokens // length, length, heads, head)
            forward, both = _attention_seconds(watch, shape)
            needed = 2.0 * tokens * heads * head * length
            measurements["forward"].append((needed, forward))
            measurements["backward"].append((2.5 * needed, max(both - forward, MIN_SECONDS)))
        for direction, ((f, s), (g, t)) in measurements.items():
            rate = (g - f) / max(t - s, MIN_SECONDS)
            timings[f"attention_{direction}_{head}"] = rate
            size = 2 * tokens * max(width // head, 1) * head
            passes[direction].append(max(s - f / rate, 0.0) * stream / size)
    min_passes = {"forward": 4.0, "backward": 8.0}  # the least that it reads and writes
    means = {
        direction: max(statistics.mean(samples), min_passes[direction])
        for direction, samples in passes.items()
    }
    return timings | {f"attention_{direction}_passes": mean for direction, mean in means.items()}


def _attention_seconds(watch: Stopwatch, shape: tuple[int, ...]) -> tuple[float, float]:
    """Return the seconds of attention forward, and of forward and backward."""
    q, k, v, g = (_random_array(watch, *shape, dtype=jnp.bfloat16, seed=s) for s in range(4))

    def both(q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array) -> Any:
        out, pull = jax.vjp(causal_attention, q, k, v)
        return out, pull(g)

    mesh = Mesh(np.array([watch.first_device]), ("data",))
    with jax.set_mesh(mesh):  # attention depends on the current mesh
        return watch.seconds(causal_attention, q, k, v), watch.seconds(both, q, k, v, g)


def transfers(watch: Stopwatch, quick: bool) -> Timings:
    """Return start, hop and rate of collectives over all devices; on a CPU no hop.

    On a CPU these are processor seconds of one device: the total over all devices, divided.
    """
    count = len(watch.devices)
    share = count if watch.processor else 1
    small, large = 2**6, 2**10 if quick else 2**16 if watch.processor else 2**25
    measurements = {}
    for name, (function, sizes_sent) in COLLECTIVES.items():
        for size in (small, large):
            seconds = _collective_seconds(watch, function, size) / share
            measurements[name, size] = seconds, 4 * size * sizes_sent(count)
    starts = [measurements[name, small][0] for name in COLLECTIVES]
    per_second = {}
    for name in COLLECTIVES:
        (s, a), (t, b) = measurements[name, small], measurements[name, large]
        per_second[name] = (b - a) / max(t - s, MIN_SECONDS)
    permute, gather = measurements["permute", small][0], measurements["all-gather", small][0]
    hop = max((gather - permute) / max(count - 2, 1), MIN_SECONDS)
    if watch.processor:
        del per_second["all-gather"]
        inside = statistics.mean(per_second.values())
        return {"inside_start": statistics.median(starts), "inside": inside}
    timings = {"inside": statistics.median(per_second.values())}
    return timings | {"inside_hop": hop, "inside_start": max(permute - hop, MIN_SECONDS)}


# name -> the collective, and how many operands' worth a device sends among n devices
COLLECTIVES: dict[str, tuple[Callable, Callable[[int], float]]] = {
    "all-gather": (partial(lax.all_gather, axis_name="x", tiled=True), lambda n: n - 1),
    "reduce-scatter": (
        partial(lax.psum_scatter, axis_name="x", tiled=True),
        lambda n: (n - 1) / n,
    ),
    "permute": (
        lambda x: lax.ppermute(x, "x", [(i, (i + 1) % _axis()) for i in range(_axis())]),
        lambda n: 1,
    ),
}


def _axis() -> int:
    return lax.axis_size("x")


def _collective_seconds(watch: Stopwatch, function: Callable, size: int) -> float:
    """Return the seconds of a collective of `size` elements per device, without its sums."""
    mesh = Mesh(np.array(watch.devices), ("x",))
    x = jax.device_put(jnp.ones(size * len(watch.devices)), NamedSharding(mesh, P("x")))

    repeats = 8

    def several(x: jax.Array, of: Callable) -> jax.Array:
        for _ in range(repeats):
            out = lax.optimization_barrier(of(x))
            x = x + out[0]
        return x

    run = lambda of: jax.shard_map(
        partial(several, of=of), mesh=mesh, in_specs=P("x"), out_specs=P("x")
    )
    baseline = watch.seconds_on_all_devices(run(lambda x: x), x)
    return max(watch.seconds_on_all_devices(run(function), x) - baseline, MIN_SECONDS) / repeats


def host_link(watch: Stopwatch, quick: bool) -> Timings:
    """Return the lower of the rates to pinned host memory and back; {}: there is none."""
    kinds = {memory.kind for memory in watch.first_device.addressable_memories()}
    if "pinned_host" not in kinds or watch.processor:
        return {}
    x = jax.device_put(np.ones(2**12 if quick else 2**27, np.float32), watch.first_device)
    device = jax.sharding.SingleDeviceSharding(watch.first_device)
    host = device.with_memory_kind("pinned_host")
    host_x = jax.device_put(x, host)
    rates = []
    for operand, to in ((x, host), (host_x, device)):
        copy = lambda x, to=to: jax.device_put(x, to)
        rates.append(x.nbytes / watch.seconds(copy, operand))
    return {"host_link": min(rates)}
