"""Measures the constants of the available devices in half a minute; plans read the file it writes.

What cannot be measured here (a second node, a data sheet) is taken from the file of the same GPU,
or else from that of an H100, and its source begins with "assumed". On a CPU, seconds are processor
time of one device: simulated devices share the cores. Constants that only a GPU has get values
that make the formulas right for a CPU: one multiprocessor that computes a matmul element by
element, and attention that consists of matmuls.
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
FALLBACK_GPU = "h100"  # its constants replace those of an unknown GPU
ConstantValues = dict[str, Any]
Log = Callable[[str], Any]


def calibrate(
    out: str | Path, log: Log = lambda message: None, *, devices: Any = None, quick: bool = False
) -> Machine:
    """Measure the available devices, write a file of their constants, and return them.

    Args:
        out: The TOML file to write; `Machine.load` reads it.
        log: Called with progress messages.
        devices: Devices to measure. None: all that JAX has.
        quick: Use tiny sizes, whose results mean nothing: a test that everything runs.

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
    machine = (
        calibrate_cpu(watch, log, quick) if platform == "cpu" else calibrate_gpu(watch, log, quick)
    )
    today = datetime.date.today().isoformat()
    kind = devices[0].device_kind
    machine = replace(machine, calibrated=Calibration(kind, jax.__version__, today))
    machine.write(out)
    log(f"written: {out}")
    return machine


def calibrate_gpu(
    watch: Stopwatch, log: Log = lambda message: None, quick: bool = False
) -> Machine:
    """Return the constants of GPUs: measured ones, and the others from a file.

    Args:
        watch: The stopwatch.
        log: Called with progress messages.
        quick: Whether sizes are tiny.

    Example:
        >>> from hfjax.planner.calibration.calibrate import calibrate_gpu
        >>> from hfjax.planner.calibration.stopwatch import Stopwatch
        >>> watch = Stopwatch(jax.devices()[:1], processor=False, block=0.002, rounds=1)
        >>> calibrate_gpu(watch, quick=True).source("between")[:7]
        'assumed'
    """
    kind = watch.first_device.device_kind
    known = machine_of(kind)
    base = known or MACHINES[FALLBACK_GPU]
    why = "as in the file of this GPU" if known else f"as of an {base.name}"
    log("memory")
    measurements: ConstantValues = measure.memory(watch, quick)
    log("launches and products")
    measurements |= measure.launches(watch, quick) | measure.products(watch, quick)
    log("attention")
    measurements |= measure.attention(watch, quick, measurements["stream"])
    if len(watch.devices) > 1:
        log("transfers")
        measurements |= measure.transfers(watch, quick)
    log("the host's link")
    measurements |= measure.host_link(watch, quick)
    sources = {name: f"{_mark_assumed(base.source(name))}, {why}" for name in CONSTANTS}
    values: ConstantValues = {name: getattr(base, name) for name in CONSTANTS}
    device_stats = {
        "sms": getattr(watch.first_device, "core_count", None),
        "memory": _device_memory(watch.first_device),
    }
    for name, value in device_stats.items():
        if value and not known:
            values[name], sources[name] = int(value), "what JAX says of the device"
    if not known:  # without a data sheet the rate that was reached replaces the peak
        values["peak"], sources["peak"] = (
            measurements["flops"] / 0.7,
            "assumed: products reach 70 % of it",
        )
        values["bandwidth"] = round(measurements["stream"] / 0.9)
        sources["bandwidth"] = "assumed: a copy reaches 90 % of it"
        values["scheduled_flops"] = measurements["flops"] / 1.4
        sources["scheduled_flops"] = "assumed: half of the peak"
    texts = {"key": base.key if known else "here", "name": kind, "platform": "gpu"}
    capability = str(getattr(watch.first_device, "compute_capability", base.compute_capability))
    return _build_machine(
        texts | {"compute_capability": capability}, kind, values, sources, measurements
    )


def calibrate_cpu(
    watch: Stopwatch, log: Log = lambda message: None, quick: bool = False
) -> Machine:
    """Return the constants of a CPU, in processor seconds of one device.

    Args:
        watch: The stopwatch.
        log: Called with progress messages.
        quick: Whether sizes are tiny.

    Example:
        >>> from hfjax.planner.calibration.calibrate import calibrate_cpu
        >>> from hfjax.planner.calibration.stopwatch import Stopwatch
        >>> watch = Stopwatch(jax.devices()[:1], processor=True, block=0.002, rounds=1)
        >>> calibrate_cpu(watch, quick=True).tile
        (1, 1)
    """
    log("memory")
    measurements: ConstantValues = measure.memory(watch, quick)
    log("launches and products")
    measurements |= measure.launches(watch, quick) | measure.products(
        watch, quick, measurements["cached"]
    )
    links: ConstantValues = {
        "inside": measurements["stream"],
        "inside_start": measurements["launch"],
    }
    link_source = "assumed: as a copy and a launch; there is one device to measure on"
    if len(watch.devices) > 1:
        log("transfers")
        links, link_source = measure.transfers(watch, quick), _provenance_text()
    prefix = "assumed: a CPU has none; as"
    rate, flops, stream = measurements["flops_fp32"], measurements["flops"], measurements["stream"]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // len(watch.devices)
    link_speed, link_start = links["inside"], links["inside_start"]
    rates = {f"attention_{w}_{d}": rate for w in ("forward", "backward") for d in (64, 128)}
    values: ConstantValues = {
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
        "inside": link_speed,
        "between": link_speed,
        "inside_start": link_start,
        "inside_hop": MIN_HOP,
        "between_start": link_start,
        "between_hop": MIN_HOP,
        "host_link": stream,
        "beside": 0.0,
        "spread": 0.0,
        "reserve": 0,
    }
    sources: dict[str, str] = {
        "memory": "what the system says that it has, shared by the devices",
        "bandwidth": f"{prefix} a large copy",
        "peak": f"{prefix} a large product",
        "scheduled_flops": f"{prefix} a large product",
        "sms": "assumed: one core's work is what counts",
        "tile": "assumed: a product is made number by number, and none is made in vain",
        **dict.fromkeys(rates, "assumed: attention is products here, at their rate"),
        "attention_forward_passes": "assumed: what it reads and writes",
        "attention_backward_passes": "assumed: what it reads and writes",
        "per_node": "fake devices are all in one",
        "inside": link_source,
        "between": f"{prefix} within a node",
        "inside_start": link_source,
        "inside_hop": "assumed: next to nothing, a ring is no ring here",
        "between_start": f"{prefix} within a node",
        "between_hop": f"{prefix} within a node",
        "host_link": f"{prefix} a large copy",
        "beside": "assumed: nothing runs beside a transfer",
        "spread": "assumed: fake devices are alike",
        "reserve": "a CPU has none",
    }
    kind = watch.first_device.device_kind
    texts = {"key": "cpu", "name": kind, "platform": "cpu", "compute_capability": "none"}
    return _build_machine(texts, kind, values, sources, measurements)


MIN_HOP = 1e-9


def _build_machine(
    texts: Mapping[str, str],
    kind: str,
    defaults: ConstantValues,
    default_sources: Mapping[str, str],
    measurements: ConstantValues,
) -> Machine:
    """Return a machine of measured constants (`measurements`) and known ones (`defaults`)."""
    measured = {
        name: _round_digits(value) for name, value in measurements.items() if name in CONSTANTS
    }
    sources = {**default_sources, **dict.fromkeys(measured, _provenance_text())}
    values: ConstantValues = {
        **{name: _round_digits(value) for name, value in defaults.items()},
        **measured,
    }
    return Machine(kinds=(kind,), **texts, **values, sources=sources)


def _round_digits(value: Any) -> Any:
    """Return a number rounded as a file shows it: more digits were not measured.

    >>> _round_digits(219398236167.8), _round_digits(1)
    (219400000000.0, 1)
    """
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _provenance_text() -> str:
    return f"measured: {BY}, {datetime.date.today()}"


def _mark_assumed(source: str) -> str:
    return source if source.startswith("assumed") else f"assumed: {source}"


def _device_memory(device: Any) -> int | None:
    """Return the bytes of a device that JAX may use, if it reports them."""
    stats = device.memory_stats() or {}
    return stats.get("bytes_limit")
