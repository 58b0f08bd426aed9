"""Exit codes: what a process tells the launcher, SLURM or Kubernetes about how it ended."""

import signal

# 1: an exception, reported on standard error; 2: a setting that no restart cures
from hfjax.utils.command_errors import FAILED as FAILED, MISTAKE as MISTAKE

FINISHED = 0
ASKED = 75  # stopped and resumable, asked for by the program (a time limit); sysexits' "try again"
HUNG = 124  # the watchdog ended it; `timeout` uses the same
INTERRUPTED = 130  # stopped and resumable, by Ctrl-C: 128 + SIGINT
TERMINATED = 143  # stopped and resumable, from outside: 128 + SIGTERM

RESUMABLE = (ASKED, INTERRUPTED, TERMINATED)
_OF_REASON = {None: FINISHED, "SIGINT": INTERRUPTED}
_OF_REASON |= dict.fromkeys(("SIGTERM", "SIGHUP", "stdout"), TERMINATED)


def exit_code(reason: str | None) -> int:
    """Return the exit code of a run that saved and stopped for a reason.

    Args:
        reason: `Stop.reason`: "SIGTERM", "SIGHUP" or "stdout" (143), "SIGINT" (130), "asked" or
            anything else (75). None: the run is finished (0).

    Example:
        >>> from hfjax.distributed import exit_code
        >>> exit_code("SIGTERM"), exit_code("asked"), exit_code(None)
        (143, 75, 0)
    """
    return _OF_REASON.get(reason, ASKED)


def is_resumable(code: int) -> bool:
    """Return whether a process with this exit code has saved and asks to be started again."""
    return code in RESUMABLE


def stop_signals() -> tuple[int, ...]:
    """Return the signals that ask to stop; SIGHUP is none of them under nohup."""
    ends_on_hangup = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    return (signal.SIGTERM, signal.SIGINT, *[signal.SIGHUP] * ends_on_hangup)
