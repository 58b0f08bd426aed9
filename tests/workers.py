"""Real processes for tests: Python sources that join each other on ports of their own."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIMIT = 60  # seconds; nothing in these tests should come near it
LAUNCH = "import sys; from hfjax.cli.launch import main; sys.exit(main(sys.argv[1:]))"


def environment(**more):
    """Return this environment with one fake CPU device, and the checkout to import from."""
    path = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    base = {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    return {**os.environ, **base, "PYTHONUNBUFFERED": "1", **more}


def start(source, *arguments, **more):
    """Start Python with a source and arguments, and variables added."""
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", source, *map(str, arguments)],
        env=environment(**more),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finished(*processes, limit=LIMIT):
    """Return (exit status, standard output, standard error) of each, when all have ended."""
    try:
        told = [process.communicate(timeout=limit) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(p.returncode, *streams) for p, streams in zip(processes, told, strict=True)]


def line(process, stream="stdout"):
    """Return the next line that a process writes, without a tag."""
    text = getattr(process, stream).readline()
    return re.sub(r"^\[\d\] ", "", text).rstrip("\n")


def launched(options, *command):
    """Start `hfjax launch` with options and a command."""
    return start(LAUNCH, *options, "--", *command)


def python(source):
    """Return the command that runs a source."""
    return [sys.executable, "-W", "ignore", "-c", source]
