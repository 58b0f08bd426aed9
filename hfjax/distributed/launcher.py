"""Run a command as several processes of one machine, which live and end together.

Each process gets its own devices through environment variables.
"""

import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from typing import Any

from hfjax.distributed.child_processes import Child, Guardian
from hfjax.distributed.exit_codes import stop_signals
from hfjax.distributed.job import Job, Limits, next_event
from hfjax.distributed.ports import free_port


def device_variables(
    processes: int,
    fake: int | None = None,
    gpus: int | None = None,
    environment: Mapping[str, str] = os.environ,
) -> list[dict[str, str]]:
    """Return each process's variables that give it `fake` simulated CPU devices, or its GPUs.

    Visible GPUs are divided evenly, or `gpus` to each.
    """
    for count, kind in ((fake, "fake devices"), (gpus, "GPUs")):
        if count is not None and count < 1:
            raise ValueError(f"{count} {kind} for each process: give at least 1.")
    if fake is not None:
        return [{"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(fake)}] * processes
    visible = visible_gpus(environment) if processes > 1 or gpus is not None else []
    if not visible and gpus is None:
        return [{}] * processes
    each = gpus or _gpus_per_process(len(visible), processes)
    if each * processes > len(visible):
        raise ValueError(
            f"{processes} processes with {each} GPUs each need {each * processes} GPUs, and "
            f"{len(visible)} are visible. Lower -n or --gpus-per-process."
        )
    gpu_groups = [visible[i * each : (i + 1) * each] for i in range(processes)]
    return [{"CUDA_VISIBLE_DEVICES": ",".join(group)} for group in gpu_groups]


def _gpus_per_process(gpus: int, processes: int) -> int:
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
    listing = subprocess.run(
        ["nvidia-smi", "--list-gpus"], capture_output=True, text=True, timeout=60, check=False
    )
    count = sum(line.startswith("GPU ") for line in listing.stdout.splitlines())
    return [str(number) for number in range(count)]


DEFAULT = Limits()


def _print_error(line: str) -> None:
    with suppress(OSError):  # the reader or terminal may be gone: the job continues
        print(f"hfjax launch: {line}", file=sys.stderr, flush=True)


def launch(
    command: Sequence[str],
    processes: int,
    max_restarts: int = 0,
    *,
    devices: int | None = None,
    gpus: int | None = None,
    limits: Limits = DEFAULT,
    say: Callable[[str], Any] = _print_error,
) -> int:
    """Run `processes` copies of a command as one job; return its exit code.

    When one fails the others are ended and, up to `max_restarts` times, all start again. Each gets
    `devices` simulated CPU devices, or `gpus` GPUs; by default visible GPUs are divided evenly.
    """
    _check(command, processes, max_restarts)
    device_envs = device_variables(processes, devices, gpus)
    events: SimpleQueue = SimpleQueue()
    restart = 0
    with _forward_signals(events), Guardian() as guardian:
        while True:
            children = _start(command, device_envs, restart, events, guardian)
            job = Job(children, events, limits, say)
            code = job.run()
            if not job.may_restart or restart == max_restarts:
                return code
            pause = min(limits.backoff * 2**restart, 30)
            restart += 1
            say(f"restart {restart} of {max_restarts} in {pause:g} s")
            if next_event(events, time.monotonic() + pause) is not None:
                return code


def _check(command: Sequence[str], processes: int, max_restarts: int) -> None:
    if processes < 1:
        raise ValueError(f"{processes} processes: give at least 1 (-n).")
    if max_restarts < 0:
        raise ValueError(f"{max_restarts} restarts: give 0 or more (--max-restarts).")
    if not command:
        raise ValueError("no command. Put it after --: hfjax launch -n 2 -- python train.py")
    if shutil.which(command[0]) is None:
        raise ValueError(
            f"command {command[0]!r} is not a program on PATH, nor a file that may be executed. "
            f"For a script: hfjax launch -n {processes} -- python {command[0]}"
        )


@contextmanager
def _forward_signals(events: SimpleQueue) -> Iterator[None]:
    """Put signals that ask to stop into the queue, and restore their handlers at the end."""
    before = {n: signal.signal(n, lambda number, _: events.put(number)) for n in stop_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _start(
    command: Sequence[str],
    device_envs: list[dict[str, str]],
    restart: int,
    events: SimpleQueue,
    guardian: Guardian,
) -> list[Child]:
    """Start all processes of one attempt, with its own port that only this machine sees."""
    port = free_port()
    job_env = {
        "HFJAX_COORDINATOR": f"localhost:{port}",
        "JAX_COORDINATOR_BIND_ADDRESS": f"127.0.0.1:{port}",
        "HFJAX_RUN": secrets.token_hex(8),
        "HFJAX_PROCESSES": str(len(device_envs)),
        "HFJAX_RESTART": str(restart),
        "PYTHONUNBUFFERED": "1",
    }
    environments = [
        {**os.environ, **job_env, **device_env, "HFJAX_PROCESS": str(process)}
        for process, device_env in enumerate(device_envs)
    ]
    return [
        Child(process, command, environment, len(device_envs) > 1, events, guardian)
        for process, environment in enumerate(environments)
    ]
