"""A script that ends process groups when its standard input closes: the launcher has died.

It reads "+ pid" and "- pid". Run as a file: it needs nothing but Python and starts quickly.
"""

import os
import signal
import sys


def main() -> None:
    """Keep the list of groups; kill those left when the input ends."""
    groups = set()
    for line in sys.stdin:
        sign, pid = line.split()
        (groups.add if sign == "+" else groups.discard)(int(pid))
    for pid in groups:
        try:
            os.killpg(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


if __name__ == "__main__":
    main()
