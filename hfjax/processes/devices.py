"""The devices of each process on one machine, as environment variables."""

import os
import shutil
import subprocess
from collections.abc import Mapping


def device_variables(
    processes: int,
    fake: int | None = None,
    gpus: int | None = None,
    environment: Mapping[str, str] = os.environ,
) -> list[dict[str, str]]:
    """Return for each process the variables that give it `fake` CPU devices, or its GPUs.

    Visible GPUs are dealt evenly, or `gpus` to each.
    """
    for given, kind in ((fake, "fake devices"), (gpus, "GPUs")):
        if given is not None and given < 1:
            raise ValueError(f"{given} {kind} for each process: give at least 1.")
    if fake is not None:
        return [{"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(fake)}] * processes
    visible = visible_gpus(environment) if processes > 1 or gpus is not None else []
    if not visible and gpus is None:
        return [{}] * processes
    each = gpus or _even(len(visible), processes)
    if each * processes > len(visible):
        raise ValueError(
            f"{processes} processes with {each} GPUs each need {each * processes} GPUs, and "
            f"{len(visible)} are visible. Lower -n or --gpus-per-process."
        )
    shares = [visible[i * each : (i + 1) * each] for i in range(processes)]
    return [{"CUDA_VISIBLE_DEVICES": ",".join(share)} for share in shares]


def _even(gpus: int, processes: int) -> int:
    if gpus % processes:
        raise ValueError(
            f"{gpus} GPUs do not divide evenly among {processes} processes. Give -n a divisor of "
            f"{gpus}, --gpus-per-process, or JAX_PLATFORMS=cpu to use none."
        )
    return gpus // processes


def visible_gpus(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return the names of the NVIDIA GPUs that a process of this environment would see."""
    if environment.get("JAX_PLATFORMS") == "cpu":
        return []
    if "CUDA_VISIBLE_DEVICES" in environment:
        return [name for name in environment["CUDA_VISIBLE_DEVICES"].split(",") if name.strip()]
    if shutil.which("nvidia-smi") is None:
        return []
    told = subprocess.run(
        ["nvidia-smi", "--list-gpus"], capture_output=True, text=True, timeout=60, check=False
    )
    count = sum(line.startswith("GPU ") for line in told.stdout.splitlines())
    return [str(number) for number in range(count)]
