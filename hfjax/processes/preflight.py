"""Before JAX starts: all processes of the run are here and fit together, or it is said who not."""

import threading
import time
from collections.abc import Callable
from typing import Any

from hfjax.processes.guest import Guest, connection, words
from hfjax.processes.meeting import LINGER, Meeting
from hfjax.processes.ports import listener
from hfjax.processes.settings import Settings
from hfjax.processes.spoken import hello, spoken


def preflight(settings: Settings, timeout: float, say: Callable[[str], Any] = print) -> float:
    """Wait until all processes are here and return the seconds left of `timeout`.

    Raises TimeoutError (who did not come) or ValueError (who does not fit), in every process. It
    uses the coordinator's port, which JAX takes right after: nothing else has to be open.
    """
    guest = Guest(settings, timeout, say)
    host = _host(settings, timeout) if settings.process == 0 else None
    try:
        guest.attend()
    finally:
        if host is not None:
            host.join(LINGER + 1)
    return guest.left


def _host(settings: Settings, timeout: float) -> threading.Thread:
    """Start the meeting in process 0; refuse a port that somebody else has."""
    try:
        port = listener(settings.address[1])
    except OSError as error:
        raise ValueError(_who_has_the_port(settings, error)) from None
    meeting = Meeting(port, settings.processes, timeout, settings.run)
    thread = threading.Thread(target=meeting.run, name="hfjax preflight", daemon=True)
    thread.start()
    return thread


def _within(seconds: float) -> Callable[[], float]:
    """Return what tells the seconds left, and raises TimeoutError where there are none."""
    end = time.monotonic() + seconds

    def left() -> float:
        if (found := end - time.monotonic()) <= 0:
            raise TimeoutError("no end of what is said")
        return found

    return left


def _who_has_the_port(settings: Settings, error: OSError) -> str:
    """Return why process 0 cannot listen: there is another process 0, or another program."""
    try:
        with connection(settings, 1.0) as met:
            met.sendall(spoken(hello(0, settings.processes, settings.run)))
            answer = words(met, _within(2.0), settings.processes)
            told = next((word for word in answer if "refused" in word), {})
    except OSError:
        told = {}
    return told.get("refused") or (
        f"process 0 cannot listen on port {settings.address[1]} of this machine "
        f"({error.strerror}): another program has it, or another run. Choose another port "
        f"({settings.named[0]})."
    )
