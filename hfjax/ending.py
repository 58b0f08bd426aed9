"""How a command ends: its exit status, and a mistake told on standard error."""

import os
import sys
from collections.abc import Callable
from typing import Any


def carried_out(name: str, act: Callable[[], Any]) -> int:
    """Run what `hfjax NAME` does; return its exit status."""
    try:
        act()
        sys.stdout.flush()
    except BrokenPipeError:
        return nobody_reads()
    except (ValueError, OSError) as wrong:
        print(f"hfjax {name}: {wrong}", file=sys.stderr)
        return 1
    return 0


def nobody_reads() -> int:
    """Return the exit status when the reader of standard output has seen enough."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1
