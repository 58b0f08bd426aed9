"""Who is in this run: by arguments, our variables, JAX's, torchrun's, or what JAX detects."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax._src.clusters import ClusterEnv

OURS = ("HFJAX_COORDINATOR", "HFJAX_PROCESSES", "HFJAX_PROCESS")
OF_JAX = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")  # Kubeflow sets them
MPI = (("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"), ("PMI_SIZE", "PMI_RANK"))


@dataclass(frozen=True)
class Settings:
    """Which process of how many this is, and where process 0 can be reached."""

    process: int
    processes: int
    coordinator: str | None  # host:port
    source: str
    detected: bool = False  # by JAX, which then chooses this process's one GPU too
    named: tuple[str, str, str] = OURS  # what a person would change: coordinator, count, number
    run: str = ""  # what the processes of this run alone know: HFJAX_RUN, or SLURM's job
    gpu: int | None = None  # the one GPU of this machine that is this process's; None: all visible
    alone: bool = False  # on its node, as the cluster says

    @property
    def address(self) -> tuple[str, int]:
        """The coordinator's host and port."""
        host, _, port = (self.coordinator or "").rpartition(":")
        return host.strip("[]"), int(port)


ALONE = Settings(0, 1, None, "one process")


def settings(
    given: Sequence[Any] = (None, None, None), environment: Mapping[str, str] = os.environ
) -> Settings:
    """Return what the first source that says anything says, checked; `ALONE` if none does.

    `given` are coordinator, processes and process as a program names them.
    """
    found = _settings(given, environment)
    if found.processes == 1:
        return found
    job = environment.get("SLURM_JOB_ID", "") if found.source == "SLURM" else ""
    return replace(found, run=environment.get("HFJAX_RUN", job))


def _settings(given: Sequence[Any], environment: Mapping[str, str]) -> Settings:
    if any(value is not None for value in given):
        return checked("the arguments", ("coordinator", "processes", "process"), given)
    if any(name in environment for name in OURS):
        return _ours(environment)
    if any(name in environment for name in OF_JAX[1:]):
        return checked("JAX's variables", OF_JAX, [environment.get(name) for name in OF_JAX])
    if "RANK" in environment:
        return _torchrun(environment)
    found = _detected_by_jax(environment)
    if found is None and "WORLD_SIZE" in environment:
        return _torchrun(environment)
    return found or _alone(environment)


def _ours(environment: Mapping[str, str]) -> Settings:
    """Return what our variables say; with the coordinator's alone, MPI says the rest."""
    names = OURS
    if not any(name in environment for name in OURS[1:]):
        names = next(((OURS[0], *pair) for pair in MPI if pair[0] in environment), OURS)
    return checked("hfjax's variables", names, [environment.get(name) for name in names])


def _torchrun(environment: Mapping[str, str]) -> Settings:
    """Return what torchrun's four variables say."""
    names = ("MASTER_ADDR and MASTER_PORT", "WORLD_SIZE", "RANK")
    host, port = (environment.get(name) for name in ("MASTER_ADDR", "MASTER_PORT"))
    where = f"[{host}]:{port}" if host and ":" in host else f"{host}:{port}"
    given = (where if host and port else None, *(environment.get(name) for name in names[1:]))
    return replace(checked("torchrun's variables", names, given), gpu=_gpu(environment))


def _gpu(environment: Mapping[str, str]) -> int | None:
    """Return which GPU is torchrun's for this process: one each, where it started several here."""
    alone = environment.get("LOCAL_WORLD_SIZE", "1") == "1"
    whole = alone or not _several_gpus(environment)
    return None if whole else int(environment.get("LOCAL_RANK", "0"))


def _several_gpus(environment: Mapping[str, str]) -> bool:
    """Return whether a process may see several GPUs; one name says that its own was chosen."""
    return "," in environment.get("CUDA_VISIBLE_DEVICES", ",")


def _alone(environment: Mapping[str, str]) -> Settings:
    """Return the settings of one process; refuse if MPI says that it is one of several."""
    for size, rank in MPI:
        if environment.get(size, "1") != "1":
            raise ValueError(
                f"{size}={environment[size]} says several processes, but JAX {jax.__version__} "
                f"cannot tell from this MPI where the first one is. Set HFJAX_COORDINATOR="
                f"host:port (process 0's machine, a free port); {size} and {rank} say the rest."
            )
    return ALONE


def _detected_by_jax(environment: Mapping[str, str]) -> Settings | None:
    """Return what jax.distributed.initialize would detect (SLURM, Open MPI, Kubernetes, TPUs)."""
    kinds = [kind for kind in ClusterEnv._cluster_types if not kind.opt_in_only_method]
    kind = next((kind for kind in kinds if kind.is_env_present()), None)
    if kind is None:
        return None
    name = {"slurm": "SLURM", "ompi": "Open MPI"}.get(kind.name, kind.__name__)
    count = _answer(name, kind.get_process_count)
    if count == 1:
        return Settings(0, 1, None, name)
    port = environment.get("JAX_COORDINATOR_PORT")
    asked = environment.get("JAX_COORDINATOR_ADDRESS") or _answer(
        name, lambda: kind.get_coordinator_address(60, port)
    )
    named = ("JAX_COORDINATOR_ADDRESS", f"{name}'s count", f"{name}'s process number")
    found = (asked, count, _answer(name, kind.get_process_id))
    alone = _answer(name, lambda: _processes_here(name, environment)) == 1
    chosen = not _several_gpus(environment)
    return replace(checked(name, named, found, detected=not alone and not chosen), alone=alone)


def _processes_here(name: str, environment: Mapping[str, str]) -> int | None:
    """Return how many processes of the run are on this node; None: the cluster does not say."""
    if name == "Open MPI":
        here = environment.get("OMPI_COMM_WORLD_LOCAL_SIZE")
        return None if here is None else int(here)
    if name != "SLURM":
        return None
    node, each = environment.get("SLURM_NODEID"), environment.get("SLURM_STEP_TASKS_PER_NODE")
    if node and each:
        return _of_each_node(each)[int(node)]
    return 1 if environment["SLURM_NTASKS"] == environment.get("SLURM_STEP_NUM_NODES") else None


def _of_each_node(told: str) -> list[int]:
    """Return the tasks of each node, as SLURM writes them.

    >>> _of_each_node("2(x3),1")
    [2, 2, 2, 1]
    """
    runs = [part.rstrip(")").partition("(x") for part in told.split(",")]
    return [int(tasks) for tasks, _, nodes in runs for _ in range(int(nodes or 1))]


def _answer(name: str, question: Callable[[], Any]) -> Any:
    """Return a cluster's answer; say how to do without if it has none."""
    try:
        return question()
    except Exception as error:  # whatever a cluster's own client raises
        raise ValueError(
            f"this looks like {name}, which does not say who is in the run ({error!r}). Set "
            "HFJAX_PROCESSES=1 for one process, or HFJAX_COORDINATOR=host:port, HFJAX_PROCESSES "
            "and HFJAX_PROCESS."
        ) from error


def checked(
    source: str, named: Sequence[str], values: Sequence[Any], detected: bool = False
) -> Settings:
    """Return settings from (coordinator, processes, process), numbers or text; refuse nonsense."""
    coordinator, count, number = named
    given = dict(zip(named, values, strict=True))
    processes = _number(source, count, given[count])
    process = _number(source, number, given[number])
    if processes == 1 and not process:
        return Settings(0, 1, None, source)
    if missing := [name for name in named if given[name] is None]:
        told = ", ".join(f"{name}={value}" for name, value in given.items() if value is not None)
        raise ValueError(
            f"{source} say {told} but not {' and '.join(missing)}. Set all of "
            f"{coordinator}, {count} and {number}, or none for one process."
        )
    assert processes is not None
    assert process is not None
    if processes < 1 or not 0 <= process < processes:
        raise ValueError(
            f"{number}={process} with {count}={processes}: processes are numbered from 0 to one "
            f"less than their count."
        )
    _check_address(coordinator, str(given[coordinator]))
    where = str(given[coordinator])
    return Settings(process, processes, where, source, detected, (coordinator, count, number))


def _number(source: str, name: str, value: Any) -> int | None:
    try:
        return None if value is None else int(str(value))
    except ValueError:
        raise ValueError(f"{source}: {name}={value} is not a whole number.") from None


def _check_address(name: str, value: str) -> None:
    host, _, port = value.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(
            f"{name}={value} is not an address. Give host:port, for instance node1:29500, the "
            "machine of process 0 and a free port of it."
        )
