"""What compiled programs of a plan's best candidates tell: each from a process of its own.

A compilation may die or take long: its process is then ended, and the others go on. What was
compiled once is kept on disk, by all that the program depends on: settings, versions and sources.
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
from hfjax.planner.programs.compile_step import Compiled, CompiledTransfer
from hfjax.trainer import config_io
from hfjax.trainer.config import Train
from hfjax.utils.atomic import replacing
from hfjax.utils.version import version
from hfjax.utils.write_files import user_cache

COMMAND = (sys.executable, "-m", "hfjax.planner.programs.compile_step")
LIMIT, LIMIT_OF_PIPELINES = 60.0, 240.0  # seconds; quiet ones take a quarter of it, or half
# Fields of a run that its program does not depend on, or only in the values of constants.
NOT_OF_PROGRAM = (
    *("out", "steps", "seed", "checkpoints", "log", "timeout", "init_timeout"),
    *config_io.HERE,
)
PACKAGES = ("jax", "jaxlib", "flax", "optax")
LARGEST = 256 * 2**20  # bytes of compiled kernels that are kept


@dataclass(frozen=True)
class Failed:
    """A candidate that has no compiled program, and why."""

    why: str


def compile_candidate(
    config: Train,
    gpu: str = "h200",
    count: int = 8,
    vocab: int | None = None,
    *,
    limit: float | None = None,
    cache: Path | None = None,
) -> Compiled | Failed:
    """Return what the compiled program of a configuration tells, or why there is none.

    Args:
        config: The run.
        gpu: What it is compiled for: h200, h100. No GPU is needed, only what compiles for it.
        count: How many of them.
        vocab: The tokens of the vocabulary. None: those of the data; what they are is not known
            here, so the result is not kept.
        limit: Seconds that it may take. None: 60, of a pipeline 240.
        cache: The folder in which results are kept. None: in the user's cache.

    Raises:
        ValueError: Nothing here compiles for CUDA; the message says what to install.
    """
    if not can_compile_for_gpus():
        raise ValueError(
            f"compiling for a {gpu} needs the wheels that compile for CUDA (no GPU): "
            f"{how_to_install()}"
        )
    folder = (user_cache() if cache is None else cache) / "plans"
    asked = {"settings": _settings(config), "gpu": gpu, "count": count, "vocab": vocab}
    place = folder / f"{_key(asked)}.json" if _is_known(config, vocab) else None
    if place is not None and (found := _read(place)) is not None:
        return found
    if limit is None:
        limit = LIMIT_OF_PIPELINES if _is_pipeline(config) else LIMIT
    with _kernels(folder, gpu) as kernels:
        asked["kernels"] = None if kernels is None else str(kernels)
        answer = _answer(json.dumps(asked), limit)
    if isinstance(answer, Failed):
        return answer
    if (found := _compiled(answer)) is None:
        return Failed(f"died: it told {answer[:80]!r}")
    if place is not None:
        _write(place, json.dumps(asdict(found), indent=1).encode())
    return found


# -- the process --------------------------------------------------------------------------


def _answer(asked: str, limit: float) -> str | Failed:
    """Return the last line that a process prints which is asked for a program, or why none."""
    environment = {"TF_CPP_MIN_LOG_LEVEL": "3", **os.environ}
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            COMMAND,
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=errors,
            env=environment,
            start_new_session=True,  # Ctrl-C comes here; the end of its input tells it of our death
        )
        try:
            status = _ended(process, asked, limit)
        finally:
            _kill(process)
        if status is None:
            return Failed(f"took more than {limit:g} s")
        if status < 0:
            return Failed(f"died: {signal.Signals(-status).name}")
        line = _last_line(out if status == 0 else errors)
        return line if status == 0 else Failed(f"died: {line or f'exit status {status}'}")


def _ended(process: subprocess.Popen, asked: str, limit: float) -> int | None:
    """Ask a process and wait for its end; None: it is not reached within the limit."""
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # it has died already
        process.stdin.write(asked.encode() + b"\n")
        process.stdin.flush()
    with suppress(subprocess.TimeoutExpired):
        return process.wait(limit)
    return None


def _kill(process: subprocess.Popen) -> None:
    """End a process and all that it started."""
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


# -- what is kept -------------------------------------------------------------------------


def _settings(config: Train) -> dict[str, Any]:
    """Return what of a configuration its program depends on, as JSON has it."""
    run = Train(**{f.name: getattr(config, f.name) for f in fields(Train)})
    plain = config_io.plain(config_io.anywhere(run))
    return {name: value for name, value in plain.items() if name not in NOT_OF_PROGRAM}


def _is_known(config: Train, vocab: int | None) -> bool:
    """Return whether settings alone say what the program is: no file, data or code does."""
    named = (config.model.pretrained, config.deepspeed, *config_io.code_of(config))
    return vocab is not None and not any(named)


def _is_pipeline(config: Train) -> bool:
    return config.mesh.pipe not in (None, 1) or "pipe" in config.strategy.lower()


def _key(asked: Mapping[str, Any]) -> str:
    """Return the name of what is asked for: another one for other versions or sources."""
    told = {**asked, "versions": _versions(), "flags": os.environ.get("XLA_FLAGS", "")}
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:32]


@once
def _versions() -> dict[str, str]:
    """Return the versions of what compiles, and a hash of hfjax's own sources."""
    found = {"hfjax": version(), "sources": _sources()}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = installed(name)
    return found


def _sources() -> str:
    found = hashlib.sha256()
    for folder, inner, names in os.walk(Path(hfjax.__file__).parent, followlinks=True):
        inner.sort()
        for name in sorted(names):
            if name.endswith((".py", ".json")):
                found.update(name.encode() + Path(folder, name).read_bytes())
    return found.hexdigest()


def _read(place: Path) -> Compiled | None:
    """Return what is kept in a file; None: there is none, or it is damaged."""
    try:
        return _compiled(place.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _compiled(text: str) -> Compiled | None:
    """Return a result from JSON; None: it is none."""
    try:
        given = json.loads(text)
        rows = tuple(CompiledTransfer(**row) for row in given.pop("transfers"))
        numbers = [*given.values(), *(n for row in rows for n in list(vars(row).values())[2:])]
        found = Compiled(**{**given, "transfers": rows, "depths": tuple(given["depths"])})
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    sane = lambda n: isinstance(n, list) or (isinstance(n, int | float) and 0 <= n < math.inf)
    return found if all(map(sane, numbers)) else None


def _write(place: Path, content: bytes) -> None:
    """Write a file in one piece, if it can be written: what is kept is only quicker."""
    with suppress(OSError, ValueError):
        place.parent.mkdir(parents=True, exist_ok=True)
        with replacing(place) as file:
            file.write(content)


@contextmanager
def _kernels(folder: Path, gpu: str) -> Iterator[Path | None]:
    """Give a copy of the file of compiled kernels; it takes the file's place afterwards.

    Kernels take most of the time and are the same in many programs. None: nothing can be written.
    """
    place = folder / f"kernels-{gpu}-{installed('jaxlib')}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        own = tempfile.mkdtemp(dir=folder)
    except OSError:
        yield None
        return
    try:
        copy = Path(own, "kernels")
        with suppress(OSError):
            shutil.copyfile(place, copy)
        yield copy
        with suppress(OSError):
            if copy.stat().st_size <= LARGEST:
                os.replace(copy, place)
    finally:
        shutil.rmtree(own, ignore_errors=True)
