"""`hfjax launch -n 4 -- command`: starts several processes on one machine."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import tyro

from hfjax.cli.arguments import parse_flags
from hfjax.distributed.job import Limits
from hfjax.distributed.launcher import launch
from hfjax.utils.command_errors import run_command


@dataclass(frozen=True)
class LaunchCommand:
    """Run a command as several processes on this machine: hfjax launch -n 4 -- command.

    They find each other by hfjax.init_distributed(). When one fails, the others are ended.
    """

    processes: Annotated[int, tyro.conf.arg(aliases=["-n"])]
    """Number of processes."""
    max_restarts: int = 0
    """Number of times to start all again after one has failed."""
    devices_per_process: int | None = None
    """Simulated CPU devices of each process, to try out (default: none)."""
    gpus_per_process: int | None = None
    """GPUs of each process (default: the visible ones, dealt evenly)."""
    grace: float = 5.0
    """Seconds after one process fails until the others are killed."""
    stop_timeout: float = 60.0
    """Seconds for all to save and end after SIGTERM or Ctrl-C."""
    command: tuple[str, ...] = ()
    """What to run, after the launcher's own flags or after --."""
    hidden: ClassVar[tuple[str, ...]] = ("command",)


def main(argv: Sequence[str]) -> int:
    """Run `hfjax launch` with the arguments after `launch`; return its exit code."""
    own, command = split_command(argv)
    act = lambda: run(replace(parse_flags(LaunchCommand, own, "launch"), command=command))
    return run_command("launch", act)


def split_command(argv: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """Return the launcher's own arguments and the command: from its first word, or all after --.

    >>> split_command(["-n", "2", "--", "train", "--", "x"])
    (['-n', '2'], ('train', '--', 'x'))
    >>> split_command(["-n", "2", "python", "train.py", "-v"])
    (['-n', '2'], ('python', 'train.py', '-v'))
    """
    args, at = list(argv), 0
    while at < len(args) and args[at].startswith("-") and args[at] != "--":
        is_single = (
            "=" in args[at] or args[at] in ("-h", "--help") or args[at + 1 : at + 2] == ["--"]
        )
        at += 1 if is_single else 2  # each of the launcher's flags has one value
    marked = args[at : at + 1] == ["--"]
    return args[:at], tuple(args[at + marked :])


def run(options: LaunchCommand) -> int:
    """Run the given command; return its exit code."""
    return launch(
        options.command,
        options.processes,
        options.max_restarts,
        devices=options.devices_per_process,
        gpus=options.gpus_per_process,
        limits=Limits(options.grace, options.stop_timeout),
    )
