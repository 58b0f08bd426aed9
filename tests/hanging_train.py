"""`hfjax train` as a job to be disturbed: process 1 hangs, the first time, before one known step.

So it is known what its peer does then, however slow the machine is: a step, and no checkpoint.
Started again it goes slowly from a later step on: there is time to tell it to stop.
"""

import os
import signal
import sys
import time
from functools import partial

from hfjax.cli import train
from hfjax.distributed import Watchdog
from hfjax.distributed.init import init_distributed
from hfjax.trainer import train_loop

HANGS, SLOW = 75, 90  # steps


class Hanging(Watchdog):
    def beat(self, doing):
        super().beat(doing)
        again = os.environ["HFJAX_RESTART"] != "0"
        if not again and os.environ["HFJAX_PROCESS"] == "1" and doing == f"step {HANGS}":
            os.kill(os.getpid(), signal.SIGSTOP)
        if again and doing.startswith("step ") and int(doing.split()[1]) >= SLOW:
            time.sleep(0.1)


if __name__ == "__main__":
    train_loop.Watchdog = Hanging
    # What ends a process that hangs is its peer's watchdog, and never JAX's own.
    train.init_distributed = partial(init_distributed, heartbeat=600)
    sys.exit(train.train_command(sys.argv[1:]))
