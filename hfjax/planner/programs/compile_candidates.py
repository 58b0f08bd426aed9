"""Statistics of the compiled programs of a plan's best candidates, each from its own process.

A compilation may crash or take long: its process is then ended, and the others go on. Results are
cached on disk, keyed by all that the program depends on: settings, versions and sources.
"""

import hashlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from functools import cache as once
from importlib.metadata import PackageNotFoundError, version as installed
from pathlib import Path
from typing import IO, Any

import hfjax
from hfjax.analysis.targets import can_compile_for_gpus, how_to_install
from hfjax.planner.programs.compile_step import CompiledTransfer, ProgramStats
from hfjax.trainer import config_io
from hfjax.trainer.config import TrainConfig
from hfjax.utils.atomic import atomic_file
from hfjax.utils.version import version
from hfjax.utils.write_files import user_cache

COMMAND = (sys.executable, "-m", "hfjax.planner.programs.compile_step")
LIMIT, LIMIT_OF_PIPELINES = 60.0, 240.0  # seconds; quick ones take a quarter of it, or half
# Fields of a run that its program does not depend on, or only in the values of constants.
NOT_OF_PROGRAM = (
    *("run_dir", "steps", "seed", "checkpoint", "eval", "log", "watchdog_timeout", "init_timeout"),
    *config_io.MACHINE_FIELDS,
)
PACKAGES = ("jax", "jaxlib", "flax", "optax")
LARGEST = 256 * 2**20  # bytes of compiled kernels that are kept


@dataclass(frozen=True)
class CompileFailure:
    """A candidate that has no compiled program, and why."""

    why: str


def compile_candidate(
    config: TrainConfig,
    gpu: str = "h200",
    count: int = 8,
    vocab: int | None = None,
    *,
    limit: float | None = None,
    cache: Path | None = None,
) -> ProgramStats | CompileFailure:
    """Return statistics of a configuration's compiled program, or why there is none.

    Args:
        config: The run.
        gpu: GPU to compile for: h200, h100. No GPU is needed, only a compiler for it.
        count: Number of GPUs.
        vocab: Vocabulary size. None: that of the data, which is not known here: the result is not
            cached.
        limit: Seconds that it may take. None: 60, and 240 for a pipeline.
        cache: Folder in which results are kept. None: in the user's cache.

    Raises:
        ValueError: Nothing here compiles for CUDA; the message says what to install.
    """
    if not can_compile_for_gpus():
        raise ValueError(
            f"compiling for a {gpu} needs the wheels that compile for CUDA (no GPU): "
            f"{how_to_install()}"
        )
    folder = (user_cache() if cache is None else cache) / "plans"
    request = {"settings": _settings(config), "gpu": gpu, "count": count, "vocab": vocab}
    path = folder / f"{_cache_key(request)}.json" if _is_known(config, vocab) else None
    if path is not None and (program := _read(path)) is not None:
        return program
    if limit is None:
        limit = LIMIT_OF_PIPELINES if _is_pipeline(config) else LIMIT
    with _kernel_cache(folder, gpu) as kernels:
        request["kernels"] = None if kernels is None else str(kernels)
        answer = _run_compile_process(json.dumps(request), limit)
    if isinstance(answer, CompileFailure):
        return answer
    if (program := _parse_program(answer)) is None:
        return CompileFailure(f"died: it told {answer[:80]!r}")
    if path is not None:
        _write(path, json.dumps(asdict(program), indent=1).encode())
    return program


# -- the process --------------------------------------------------------------------------


def _run_compile_process(request: str, timeout: float) -> str | CompileFailure:
    """Return the last line printed by a process that compiles the request, or why there is none."""
    environment = {"TF_CPP_MIN_LOG_LEVEL": "3", **os.environ}
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            COMMAND,
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=errors,
            env=environment,
            start_new_session=True,  # Ctrl-C comes here; it ends when its input is closed
        )
        try:
            status = _send_and_wait(process, request, timeout)
        finally:
            _kill(process)
        if status is None:
            return CompileFailure(f"took more than {timeout:g} s")
        if status < 0:
            return CompileFailure(f"died: {signal.Signals(-status).name}")
        line = _last_line(out if status == 0 else errors)
        return line if status == 0 else CompileFailure(f"died: {line or f'exit status {status}'}")


def _send_and_wait(process: subprocess.Popen, request: str, timeout: float) -> int | None:
    """Send a request to a process and wait for its end; None: the limit came first."""
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # it has died already
        process.stdin.write(request.encode() + b"\n")
        process.stdin.flush()
    with suppress(subprocess.TimeoutExpired):
        return process.wait(timeout)
    return None


def _kill(process: subprocess.Popen) -> None:
    """Kill a process and all that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    assert process.stdin is not None
    with suppress(BrokenPipeError):
        process.stdin.close()
    process.wait()


def _last_line(file: IO[bytes]) -> str:
    file.seek(0)
    lines = file.read().decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else ""


# -- the cache ----------------------------------------------------------------------------


def _settings(config: TrainConfig) -> dict[str, Any]:
    """Return the settings that a configuration's program depends on, as JSON has them."""
    run = TrainConfig(**{f.name: getattr(config, f.name) for f in fields(TrainConfig)})
    plain = config_io.to_plain(config_io.with_absolute_paths(run))
    return {name: value for name, value in plain.items() if name not in NOT_OF_PROGRAM}


def _is_known(config: TrainConfig, vocab: int | None) -> bool:
    """Return whether settings alone determine the program: no file, data or code does."""
    named = (config.model.pretrained, config.deepspeed, *config_io.code_flags(config))
    return vocab is not None and not any(named)


def _is_pipeline(config: TrainConfig) -> bool:
    return config.mesh.is_on("pipe")


def _cache_key(request: Mapping[str, Any]) -> str:
    """Return the cache key of a request; versions and sources are part of it."""
    content = {**request, "versions": _versions(), "flags": os.environ.get("XLA_FLAGS", "")}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


@once
def _versions() -> dict[str, str]:
    """Return the versions of what compiles, and a hash of hfjax's own sources."""
    versions = {"hfjax": version(), "sources": _source_hash()}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[name] = installed(name)
    return versions


def _source_hash() -> str:
    digest = hashlib.sha256()
    for folder, inner, names in os.walk(Path(hfjax.__file__).parent, followlinks=True):
        inner.sort()
        for name in sorted(names):
            if name.endswith((".py", ".json")):
                digest.update(name.encode() + Path(folder, name).read_bytes())
    return digest.hexdigest()


def _read(path: Path) -> ProgramStats | None:
    """Return the result in a cache file; None: there is none, or it is damaged."""
    try:
        return _parse_program(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _parse_program(text: str) -> ProgramStats | None:
    """Return a result from JSON; None: it is not valid."""
    try:
        values = json.loads(text)
        transfers = tuple(CompiledTransfer(**t) for t in values.pop("transfers"))
        numbers = [*values.values(), *(n for t in transfers for n in list(vars(t).values())[2:])]
        program = ProgramStats(
            **{**values, "transfers": transfers, "depths": tuple(values["depths"])}
        )
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    sane = lambda n: isinstance(n, list) or (isinstance(n, int | float) and 0 <= n < math.inf)
    return program if all(map(sane, numbers)) else None


def _write(path: Path, content: bytes) -> None:
    """Write a file atomically; errors are ignored, since the cache only saves time."""
    with suppress(OSError, ValueError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as file:
            file.write(content)


@contextmanager
def _kernel_cache(folder: Path, gpu: str) -> Iterator[Path | None]:
    """Yield a copy of the file of compiled kernels; it replaces the file afterwards.

    Kernels take most of the time and are the same in many programs. None: nothing can be written.
    """
    path = folder / f"kernels-{gpu}-{installed('jaxlib')}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        scratch = tempfile.mkdtemp(dir=folder)
    except OSError:
        yield None
        return
    try:
        copy = Path(scratch, "kernels")
        with suppress(OSError):
            shutil.copyfile(path, copy)
        yield copy
        with suppress(OSError):
            if copy.stat().st_size <= LARGEST:
                os.replace(copy, path)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
