"""The constants of a plan: of a GPU by name, of a file, or measured on this machine."""

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import jax

from hfjax.analysis.targets import GPUS, can_compile_for_gpus, how_to_install
from hfjax.hardware.machine import MACHINES, Machine, machine_of
from hfjax.planner.make_plan import machine_by_name
from hfjax.utils.write_files import user_cache

ASK = "import jax; print('kind', jax.devices()[0].device_kind, sep='|')"


@dataclass(frozen=True)
class Constants:
    """The constants of a plan, with caveats."""

    machine: Machine
    notes: tuple[str, ...] = ()


def constants_of(gpu: str) -> Constants:
    """Return the constants that --gpu asks for.

    Raises:
        ValueError: There are none, or they were measured on another device.
    """
    if gpu == "here":
        return _local_constants()
    if gpu.endswith(".toml"):
        return _file_constants(Path(gpu))
    return Constants(machine_by_name(gpu))


def check_whole_nodes(machine: Machine, count: int) -> None:
    """Refuse a number of GPUs that leaves a node incomplete."""
    node = machine.per_node
    if count > node and count % node:
        low = count // node * node
        raise ValueError(
            f"--count {count}: {machine.name} stand in nodes of {node}, and meshes take whole "
            f"nodes. --count {low} or {low + node} would do, or up to {node} in one node."
        )


def why_not_compiled(gpu: str) -> str | None:
    """Return why no program is compiled for a GPU; None: it can be."""
    if gpu not in GPUS:
        return f"hfjax compiles for {' and '.join(GPUS)}"
    if not can_compile_for_gpus():
        return f"nothing here compiles for CUDA: {how_to_install()}"
    return None


def calibration_path(device_kind: str) -> Path:
    """Return the path of the constants measured on a kind of device."""
    name = re.sub(r"[^a-z0-9]+", "-", device_kind.lower()).strip("-")
    return user_cache() / "machines" / f"{name}.toml"


def local_device_kind() -> str:
    """Return the kind of this machine's first device; another process asks JAX."""
    process = subprocess.run(
        [sys.executable, "-c", ASK], capture_output=True, text=True, check=False
    )
    _, _, kind = process.stdout.strip().rpartition("\n")[2].partition("|")
    if process.returncode or not kind:
        last = process.stderr.strip().splitlines()[-1:] or [f"exit status {process.returncode}"]
        raise ValueError(f"--gpu here: JAX tells of no device ({last[0]}).")
    return kind


def _local_constants() -> Constants:
    kind = local_device_kind()
    path = calibration_path(kind)
    if path.is_file():
        machine = Machine.load(path)
        machine.check_calibrated_for(kind, jax.__version__)
        return Constants(machine)
    if (known := machine_of(kind)) is not None:
        note = (
            f"constants of {known.key} as hfjax has them: none were measured on this {kind} "
            "(hfjax plan --calibrate here)"
        )
        return Constants(known, (note,))
    raise ValueError(
        f"--gpu here: there are no constants of {kind}. Measure them (hfjax plan --calibrate "
        f"here), or name a GPU: {', '.join(MACHINES)}."
    )


def _file_constants(path: Path) -> Constants:
    if not path.is_file():
        raise ValueError(f"--gpu {path}: there is no such file. Known: {', '.join(MACHINES)}.")
    machine = Machine.load(path)
    measured = machine.calibrated
    if measured is None:
        return Constants(machine)
    if not any(name in measured.device for name in machine.kinds):
        raise ValueError(
            f"--gpu {path}: measured on {measured.device}, and the file says that it is of "
            f"{' or '.join(machine.kinds)}. Give the file of that GPU, or calibrate again on it: "
            "hfjax plan --calibrate here."
        )
    if measured.jax == jax.__version__:
        return Constants(machine)
    note = (
        f"{path}: measured with jax {measured.jax} ({measured.date}), and this is jax "
        f"{jax.__version__}. hfjax plan --calibrate here measures again"
    )
    return Constants(machine, (note,))
