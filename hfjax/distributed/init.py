"""Join the processes of a run: find them, count them, initialize JAX.

Before JAX starts, all processes have connected and match, or an error says which do not.
"""

import logging
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax._src import distributed, xla_bridge

from hfjax.distributed.environment import Settings, find_settings
from hfjax.distributed.ports import listener
from hfjax.distributed.rendezvous import LINGER, RendezvousServer
from hfjax.distributed.rendezvous_client import SILENCE, RendezvousClient, connection, read_messages
from hfjax.distributed.wire_format import encode_hello, make_hello
from hfjax.utils.keywords import check_seconds

logger = logging.getLogger(__name__)


def preflight(settings: Settings, timeout: float, say: Callable[[str], Any] = print) -> float:
    """Wait until all processes have connected; return the seconds left of `timeout`.

    Raises TimeoutError (which are missing) or ValueError (which do not match), in every process. It
    uses the coordinator's port, which JAX takes right after: no other port has to be open.
    """
    client = RendezvousClient(settings, timeout, say)
    server = _start_server(settings, timeout) if settings.process == 0 else None
    try:
        client.meet()
    finally:
        if server is not None:
            server.join(LINGER + 1)
    return client.seconds_left


def _start_server(settings: Settings, timeout: float) -> threading.Thread:
    """Start the rendezvous server in process 0; refuse a port that is in use."""
    try:
        port = listener(settings.address[1])
    except OSError as error:
        raise ValueError(_port_conflict(settings, error)) from None
    server = RendezvousServer(port, settings.processes, timeout, settings.run_id)
    thread = threading.Thread(target=server.run, name="hfjax preflight", daemon=True)
    thread.start()
    return thread


def _port_conflict(settings: Settings, error: OSError) -> str:
    """Return why process 0 cannot listen: there is another process 0, or another program."""
    try:
        with connection(settings, 1.0) as sock:
            sock.sendall(encode_hello(make_hello(0, settings.processes, settings.run_id)))
            messages = read_messages(sock, time.monotonic() + SILENCE, settings.processes)
            refusal = next((message for message in messages if "refused" in message), {})
    except OSError:
        refusal = {}
    return refusal.get("refused") or (
        f"process 0 cannot listen on port {settings.address[1]} of this machine "
        f"({error.strerror}): another program has it, or another run. Choose another port "
        f"({settings.names[0]})."
    )


@dataclass(frozen=True)
class Cluster:
    """The processes of this run, and which of them this is."""

    process: int
    processes: int
    coordinator: str | None
    source: str  # where this was read, for messages


_cluster: Cluster | None = None


def init_distributed(
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
    *,
    timeout: float = 60,
    heartbeat: int = 10,
    say: Callable[[str], Any] = logger.warning,
) -> Cluster:
    """Join the processes of this run and return them. Call it before any JAX computation.

    They are read from the arguments, HFJAX_COORDINATOR, HFJAX_PROCESSES and HFJAX_PROCESS,
    JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, torchrun's variables, or SLURM,
    Open MPI and whatever else JAX detects; else it is one process. A second call returns the result
    of the first; if the program has called jax.distributed.initialize itself, that run is returned.

    Args:
        coordinator: Address of process 0, host:port with a free port.
        processes: Number of processes.
        process: The number of this one, from 0 on.
        timeout: Seconds within which all have to connect.
        heartbeat: Seconds without a heartbeat of one process after which the run ends.
        say: Called with a line of text while waiting for others. Default: log it as a warning.

    Raises:
        TimeoutError: Some did not connect; it says which.
        ValueError: The settings are incomplete, processes do not match, JAX has started its devices
            already, or this process has joined under another number.

    Example:
        >>> import hfjax
        >>> cluster = hfjax.init_distributed(processes=1)
        >>> cluster.process, cluster.processes
        (0, 1)
    """
    global _cluster
    check_seconds("init_distributed", timeout=timeout, heartbeat=heartbeat)
    if _cluster is None:
        _cluster = _find_initialized() or _join(
            find_settings((coordinator, processes, process)), timeout, heartbeat, say
        )
    _check_arguments(_cluster, processes=processes, process=process)
    return _cluster


def _check_arguments(cluster: Cluster, **arguments: int | None) -> None:
    """Refuse arguments that contradict the run that this process has joined."""
    for name, value in arguments.items():
        if value is not None and int(value) != getattr(cluster, name):
            raise ValueError(
                f"init_distributed({name}={value}): this process has joined a run already, as "
                f"process {cluster.process} of {cluster.processes} ({cluster.source}). Leave the "
                "arguments out, or join once."
            )


def _find_initialized() -> Cluster | None:
    """Return the run that the program joined itself, by jax.distributed.initialize."""
    if not jax.distributed.is_initialized():
        return None
    state = distributed.global_state
    count, address = state.num_processes, state.coordinator_address
    return Cluster(state.process_id, count, address, "jax.distributed.initialize")


def _join(settings: Settings, timeout: float, heartbeat: int, say: Callable[[str], Any]) -> Cluster:
    cluster = Cluster(settings.process, settings.processes, settings.coordinator, settings.source)
    if settings.processes == 1:
        return cluster
    if xla_bridge.backends_are_initialized():
        raise ValueError(
            f"{settings.source} say that this is process {settings.process} of "
            f"{settings.processes}, but JAX has already started its devices in this process alone. "
            "Call init_distributed() first, before any computation and jax.devices()."
        )
    left = preflight(settings, timeout, say)
    if settings.is_sole_on_node:
        say(
            f"process {settings.process} of {settings.processes} is the only one on its node "
            f"({settings.source}): it takes all of its GPUs"
        )
    _start_jax(settings, max(left, 10), heartbeat)
    return cluster


def _start_jax(settings: Settings, timeout: float, heartbeat: int) -> None:
    """Initialize jax.distributed; restore SIGTERM, which it would catch without ending."""
    old_handler = signal.getsignal(signal.SIGTERM)
    jax.distributed.initialize(
        settings.coordinator,
        settings.processes,
        settings.process,
        local_device_ids=settings.gpu,
        cluster_detection_method=None if settings.is_detected else "deactivate",
        initialization_timeout=int(timeout),
        heartbeat_timeout_seconds=heartbeat,
    )
    if threading.current_thread() is threading.main_thread() and old_handler is not None:
        signal.signal(signal.SIGTERM, old_handler)
