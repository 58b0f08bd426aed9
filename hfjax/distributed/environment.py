"""Find this run's processes: from arguments, our variables, JAX's, torchrun's, or JAX detection."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax._src.clusters import ClusterEnv

OUR_VARS = ("HFJAX_COORDINATOR", "HFJAX_PROCESSES", "HFJAX_PROCESS")
JAX_VARS = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")  # Kubeflow sets them
MPI_VARS = (("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"), ("PMI_SIZE", "PMI_RANK"))


@dataclass(frozen=True)
class Settings:
    """The number of this process, the number of processes, and the address of process 0."""

    process: int
    processes: int
    coordinator: str | None  # host:port
    source: str
    is_detected: bool = False  # by JAX, which then chooses this process's one GPU too
    names: tuple[str, str, str] = OUR_VARS  # to change: coordinator, count, number
    run_id: str = ""  # known to the processes of this run only: HFJAX_RUN, or SLURM's job
    gpu: int | None = None  # this process's one GPU of this machine; None: all visible
    is_sole_on_node: bool = False  # on its node, according to the cluster

    @property
    def address(self) -> tuple[str, int]:
        """The coordinator's host and port."""
        host, _, port = (self.coordinator or "").rpartition(":")
        return host.strip("[]"), int(port)


SINGLE_PROCESS = Settings(0, 1, None, "one process")


def find_settings(
    init_arguments: Sequence[Any] = (None, None, None), environment: Mapping[str, str] = os.environ
) -> Settings:
    """Return checked settings of the first source that has any; `SINGLE_PROCESS` if none has.

    `init_arguments` are coordinator, processes and process as passed by the program.
    """
    choice = _first_settings(init_arguments, environment)
    if choice.processes == 1:
        return choice
    job = environment.get("SLURM_JOB_ID", "") if choice.source == "SLURM" else ""
    return replace(choice, run_id=environment.get("HFJAX_RUN", job))


def _first_settings(init_arguments: Sequence[Any], environment: Mapping[str, str]) -> Settings:
    if any(value is not None for value in init_arguments):
        return check_settings(
            "the arguments", ("coordinator", "processes", "process"), init_arguments
        )
    if any(name in environment for name in OUR_VARS):
        return _hfjax_settings(environment)
    if any(name in environment for name in JAX_VARS[1:]):
        return check_settings(
            "JAX's variables", JAX_VARS, [environment.get(name) for name in JAX_VARS]
        )
    if "RANK" in environment:
        return _torchrun_settings(environment)
    choice = _detect_with_jax(environment)
    if choice is None and "WORLD_SIZE" in environment:
        return _torchrun_settings(environment)
    return choice or _single_process(environment)


def _hfjax_settings(environment: Mapping[str, str]) -> Settings:
    """Return the settings of our variables; with the coordinator's alone, MPI has the rest."""
    names = OUR_VARS
    if not any(name in environment for name in OUR_VARS[1:]):
        names = next(
            ((OUR_VARS[0], *pair) for pair in MPI_VARS if pair[0] in environment), OUR_VARS
        )
    return check_settings("hfjax's variables", names, [environment.get(name) for name in names])


def _torchrun_settings(environment: Mapping[str, str]) -> Settings:
    """Return the settings of torchrun's four variables."""
    names = ("MASTER_ADDR and MASTER_PORT", "WORLD_SIZE", "RANK")
    host, port = (environment.get(name) for name in ("MASTER_ADDR", "MASTER_PORT"))
    address = f"[{host}]:{port}" if host and ":" in host else f"{host}:{port}"
    values = (address if host and port else None, *(environment.get(name) for name in names[1:]))
    return replace(
        check_settings("torchrun's variables", names, values), gpu=_torchrun_gpu(environment)
    )


def _torchrun_gpu(environment: Mapping[str, str]) -> int | None:
    """Return this process's GPU under torchrun: one each if it started several here; else None."""
    is_single = environment.get("LOCAL_WORLD_SIZE", "1") == "1"
    takes_all = is_single or not _sees_several_gpus(environment)
    return None if takes_all else int(environment.get("LOCAL_RANK", "0"))


def _sees_several_gpus(environment: Mapping[str, str]) -> bool:
    """Return whether a process may see several GPUs; one name means that its own was chosen."""
    return "," in environment.get("CUDA_VISIBLE_DEVICES", ",")


def _single_process(environment: Mapping[str, str]) -> Settings:
    """Return the settings of one process; refuse if MPI says that it is one of several."""
    for size, rank in MPI_VARS:
        if environment.get(size, "1") != "1":
            raise ValueError(
                f"{size}={environment[size]} says several processes, but JAX {jax.__version__} "
                f"cannot tell from this MPI where the first one is. Set HFJAX_COORDINATOR="
                f"host:port (process 0's machine, a free port); {size} and {rank} say the rest."
            )
    return SINGLE_PROCESS


def _detect_with_jax(environment: Mapping[str, str]) -> Settings | None:
    """Return what jax.distributed.initialize would detect (SLURM, Open MPI, Kubernetes, TPUs)."""
    kinds = [kind for kind in ClusterEnv._cluster_types if not kind.opt_in_only_method]
    kind = next((kind for kind in kinds if kind.is_env_present()), None)
    if kind is None:
        return None
    name = {"slurm": "SLURM", "ompi": "Open MPI"}.get(kind.name, kind.__name__)
    count = _ask_cluster(name, kind.get_process_count)
    if count == 1:
        return Settings(0, 1, None, name)
    port = environment.get("JAX_COORDINATOR_PORT")
    coordinator = environment.get("JAX_COORDINATOR_ADDRESS") or _ask_cluster(
        name, lambda: kind.get_coordinator_address(60, port)
    )
    names = ("JAX_COORDINATOR_ADDRESS", f"{name}'s count", f"{name}'s process number")
    values = (coordinator, count, _ask_cluster(name, kind.get_process_id))
    is_sole = _ask_cluster(name, lambda: _local_process_count(name, environment)) == 1
    has_own_gpu = not _sees_several_gpus(environment)
    return replace(
        check_settings(name, names, values, is_detected=not is_sole and not has_own_gpu),
        is_sole_on_node=is_sole,
    )


def _local_process_count(name: str, environment: Mapping[str, str]) -> int | None:
    """Return how many processes of the run are on this node; None: the cluster does not say."""
    if name == "Open MPI":
        local_size = environment.get("OMPI_COMM_WORLD_LOCAL_SIZE")
        return None if local_size is None else int(local_size)
    if name != "SLURM":
        return None
    node, tasks = environment.get("SLURM_NODEID"), environment.get("SLURM_STEP_TASKS_PER_NODE")
    if node and tasks:
        return _tasks_per_node(tasks)[int(node)]
    return 1 if environment["SLURM_NTASKS"] == environment.get("SLURM_STEP_NUM_NODES") else None


def _tasks_per_node(text: str) -> list[int]:
    """Return the tasks of each node, as SLURM writes them.

    >>> _tasks_per_node("2(x3),1")
    [2, 2, 2, 1]
    """
    runs = [item.rstrip(")").partition("(x") for item in text.split(",")]
    return [int(tasks) for tasks, _, nodes in runs for _ in range(int(nodes or 1))]


def _ask_cluster(name: str, ask: Callable[[], Any]) -> Any:
    """Return a cluster's answer; if it has none, raise an error that says how to do without."""
    try:
        return ask()
    except Exception as error:  # whatever a cluster's own client raises
        raise ValueError(
            f"this looks like {name}, which does not say who is in the run ({error!r}). Set "
            "HFJAX_PROCESSES=1 for one process, or HFJAX_COORDINATOR=host:port, HFJAX_PROCESSES "
            "and HFJAX_PROCESS."
        ) from error


def check_settings(
    source: str, names: Sequence[str], values: Sequence[Any], is_detected: bool = False
) -> Settings:
    """Return settings of (coordinator, processes, process), numbers or text; check them."""
    coordinator, count, number = names
    by_name = dict(zip(names, values, strict=True))
    processes = _parse_number(source, count, by_name[count])
    process = _parse_number(source, number, by_name[number])
    if processes == 1 and not process:
        return Settings(0, 1, None, source)
    if missing := [name for name in names if by_name[name] is None]:
        present = ", ".join(
            f"{name}={value}" for name, value in by_name.items() if value is not None
        )
        raise ValueError(
            f"{source} say {present} but not {' and '.join(missing)}. Set all of "
            f"{coordinator}, {count} and {number}, or none for one process."
        )
    assert processes is not None
    assert process is not None
    if processes < 1 or not 0 <= process < processes:
        raise ValueError(
            f"{number}={process} with {count}={processes}: processes are numbered from 0 to one "
            f"less than their count."
        )
    _check_address(coordinator, str(by_name[coordinator]))
    address = str(by_name[coordinator])
    return Settings(process, processes, address, source, is_detected, (coordinator, count, number))


def _parse_number(source: str, name: str, value: Any) -> int | None:
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
