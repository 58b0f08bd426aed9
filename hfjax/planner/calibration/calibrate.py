"""The constants of the devices at hand, measured in half a minute: a file that plans read.

What cannot be measured here (a second node, a data sheet) is taken from the file of the same GPU,
or else from that of an H100, and its source begins with "assumed". On a CPU seconds are those of
the processor, of one device's work: fake devices share the cores. What only a GPU has gets values
with which the formulas are right for a CPU: one multiprocessor that makes a product number by
number, attention that is products.
"""

import datetime
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from hfjax.hardware.machine import CONSTANTS, MACHINES, Calibration, Machine, machine_of
from hfjax.planner.calibration import microbenchmarks as measure
from hfjax.planner.calibration.stopwatch import Stopwatch

BY = "hfjax plan --calibrate here"
MODEL = "h100"  # whose constants stand in for those of an unknown GPU
Found = dict[str, Any]
Tell = Callable[[str], Any]


def calibrate(
    out: str | Path, tell: Tell = lambda words: None, *, devices: Any = None, quick: bool = False
) -> Machine:
    """Measure the devices at hand, write a file of their constants, and return these.

    Args:
        out: The file, of TOML; `Machine.load` reads it.
        tell: Called with words on what goes on.
        devices: Which devices. None: all that JAX has.
        quick: Take tiny sizes, whose numbers mean nothing: to test that everything runs.

    Raises:
        ValueError: The devices are neither GPUs nor CPUs.

    Example:
        >>> import tempfile
        >>> from hfjax.planner.calibration.calibrate import calibrate
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     machine = calibrate(f"{folder}/here.toml", devices=jax.devices()[:1], quick=True)
        >>> machine.platform, machine.sms
        ('cpu', 1)
    """
    devices = list(devices or jax.devices())
    platform = "gpu" if devices[0].platform in ("gpu", "cuda", "rocm") else devices[0].platform
    if platform not in ("gpu", "cpu"):
        raise ValueError(
            f"calibrate: these are devices of {platform!r}. Allowed: gpu, cpu. Run it on a machine "
            'with GPUs, or with JAX_PLATFORMS="cpu".'
        )
    rounds = {"block": 0.002, "rounds": 1} if quick else {}
    watch = Stopwatch(devices, platform == "cpu", **rounds)
    machine = of_cpu(watch, tell, quick) if platform == "cpu" else of_gpu(watch, tell, quick)
    today = datetime.date.today().isoformat()
    kind = devices[0].device_kind
    machine = replace(machine, calibrated=Calibration(kind, jax.__version__, today))
    machine.write(out)
    tell(f"written: {out}")
    return machine


def of_gpu(watch: Stopwatch, tell: Tell = lambda words: None, quick: bool = False) -> Machine:
    """Return the constants of GPUs: measured, and beside them those of a file.

    Args:
        watch: The stopwatch.
        tell: Called with words on what goes on.
        quick: Whether sizes are tiny.

    Example:
        >>> from hfjax.planner.calibration.calibrate import of_gpu
        >>> from hfjax.planner.calibration.stopwatch import Stopwatch
        >>> watch = Stopwatch(jax.devices()[:1], processor=False, block=0.002, rounds=1)
        >>> of_gpu(watch, quick=True).source("between")[:7]
        'assumed'
    """
    kind = watch.one.device_kind
    known = machine_of(kind)
    base = known or MACHINES[MODEL]
    why = "as in the file of this GPU" if known else f"as of an {base.name}"
    tell("memory")
    found: Found = measure.memory(watch, quick)
    tell("launches and products")
    found |= measure.launches(watch, quick) | measure.products(watch, quick)
    tell("attention")
    found |= measure.attention(watch, quick, found["stream"])
    if len(watch.devices) > 1:
        tell("transfers")
        found |= measure.transfers(watch, quick)
    tell("the host's link")
    found |= measure.host_link(watch, quick)
    told = {name: f"{_assumed(base.source(name))}, {why}" for name in CONSTANTS}
    given: Found = {name: getattr(base, name) for name in CONSTANTS}
    said = {"sms": getattr(watch.one, "core_count", None), "memory": _memory_of(watch.one)}
    for name, value in said.items():
        if value and not known:
            given[name], told[name] = int(value), "what JAX says of the device"
    if not known:  # a data sheet is not at hand: what is reached stands in for it
        given["peak"], told["peak"] = found["flops"] / 0.7, "assumed: products reach 70 % of it"
        given["bandwidth"] = round(found["stream"] / 0.9)
        told["bandwidth"] = "assumed: a copy reaches 90 % of it"
        given["scheduled_flops"] = found["flops"] / 1.4
        told["scheduled_flops"] = "assumed: half of the peak"
    texts = {"key": base.key if known else "here", "name": kind, "platform": "gpu"}
    capability = str(getattr(watch.one, "compute_capability", base.compute_capability))
    return _machine(texts | {"compute_capability": capability}, kind, given, told, found)


def of_cpu(watch: Stopwatch, tell: Tell = lambda words: None, quick: bool = False) -> Machine:
    """Return the constants of a CPU, by the processor's seconds of one device.

    Args:
        watch: The stopwatch.
        tell: Called with words on what goes on.
        quick: Whether sizes are tiny.

    Example:
        >>> from hfjax.planner.calibration.calibrate import of_cpu
        >>> from hfjax.planner.calibration.stopwatch import Stopwatch
        >>> watch = Stopwatch(jax.devices()[:1], processor=True, block=0.002, rounds=1)
        >>> of_cpu(watch, quick=True).tile
        (1, 1)
    """
    tell("memory")
    found: Found = measure.memory(watch, quick)
    tell("launches and products")
    found |= measure.launches(watch, quick) | measure.products(watch, quick, found["cached"])
    more: Found = {"inside": found["stream"], "inside_start": found["launch"]}
    sent = "assumed: as a copy and a launch; there is one device to measure on"
    if len(watch.devices) > 1:
        tell("transfers")
        more, sent = measure.transfers(watch, quick), _here()
    alike = "assumed: a CPU has none; as"
    rate, flops, stream = found["flops_fp32"], found["flops"], found["stream"]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // len(watch.devices)
    near, far = more["inside"], more["inside_start"]
    rates = {f"attention_{w}_{d}": rate for w in ("forward", "backward") for d in (64, 128)}
    given: Found = {
        "memory": memory,
        "bandwidth": round(stream),
        "peak": flops,
        "scheduled_flops": flops,
        "sms": 1,
        "tile": (1, 1),
        **rates,
        "attention_forward_passes": 4.0,
        "attention_backward_passes": 8.0,
        "per_node": len(watch.devices),
        "inside": near,
        "between": near,
        "inside_start": far,
        "inside_hop": LEAST_HOP,
        "between_start": far,
        "between_hop": LEAST_HOP,
        "host_link": stream,
        "beside": 0.0,
        "spread": 0.0,
        "reserve": 0,
    }
    told: dict[str, str] = {
        "memory": "what the system says that it has, shared by the devices",
        "bandwidth": f"{alike} a large copy",
        "peak": f"{alike} a large product",
        "scheduled_flops": f"{alike} a large product",
        "sms": "assumed: one core's work is what counts",
        "tile": "assumed: a product is made number by number, and none is made in vain",
        **dict.fromkeys(rates, "assumed: attention is products here, at their rate"),
        "attention_forward_passes": "assumed: what it reads and writes",
        "attention_backward_passes": "assumed: what it reads and writes",
        "per_node": "fake devices are all in one",
        "inside": sent,
        "between": f"{alike} within a node",
        "inside_start": sent,
        "inside_hop": "assumed: next to nothing, a ring is no ring here",
        "between_start": f"{alike} within a node",
        "between_hop": f"{alike} within a node",
        "host_link": f"{alike} a large copy",
        "beside": "assumed: nothing runs beside a transfer",
        "spread": "assumed: fake devices are alike",
        "reserve": "a CPU has none",
    }
    kind = watch.one.device_kind
    texts = {"key": "cpu", "name": kind, "platform": "cpu", "compute_capability": "none"}
    return _machine(texts, kind, given, told, found)


LEAST_HOP = 1e-9


def _machine(
    texts: Mapping[str, str], kind: str, given: Found, told: Mapping[str, str], found: Found
) -> Machine:
    """Return a machine of what was measured (`found`) and what else is known (`given`)."""
    measured = {name: _short(value) for name, value in found.items() if name in CONSTANTS}
    sources = {**told, **dict.fromkeys(measured, _here())}
    values: Found = {**{name: _short(value) for name, value in given.items()}, **measured}
    return Machine(kinds=(kind,), **texts, **values, sources=sources)


def _short(value: Any) -> Any:
    """Return a number as a file shows it: more digits were not measured.

    >>> _short(219398236167.8), _short(1)
    (219400000000.0, 1)
    """
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _here() -> str:
    return f"measured: {BY}, {datetime.date.today()}"


def _assumed(source: str) -> str:
    return source if source.startswith("assumed") else f"assumed: {source}"


def _memory_of(device: Any) -> int | None:
    """Return the bytes that JAX may use of a device, if it says so."""
    stats = device.memory_stats() or {}
    return stats.get("bytes_limit")
