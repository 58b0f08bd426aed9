"""`hfjax COMMAND`: what the command line can do."""

import os
import sys
from collections.abc import Callable, Sequence

from hfjax.base.exits import imported, nobody_reads
from hfjax.base.keywords import nearest_of
from hfjax.base.version import version

COMMANDS = {  # name: what it does, and the function that takes its arguments
    "train": ("train a model; --help lists every setting", "hfjax.cli.run:train_command"),
    "eval": ("the loss of a trained model", "hfjax.cli.run:evaluate_command"),
    "generate": ("text from a trained model", "hfjax.cli.run:generate_command"),
    "import": ("what is in a model's folder", "hfjax.cli.in_and_out:import_command"),
    "export": ("a model's folder from a run", "hfjax.cli.in_and_out:export_command"),
    "data": ("make token files of text; tell what is in a folder of images", "hfjax.cli.data:main"),
    "launch": ("start several processes on this machine", "hfjax.cli.launch:main"),
    "memory": (
        "what a training step would take, before it runs",
        "hfjax.cli.memory.command:main",
    ),
    "plan": (
        "the fastest layout of all that fit so many GPUs, and why others lose",
        "hfjax.cli.plan.plan_command:main",
    ),
    "schedule": ("show a pipeline schedule and what it costs", "hfjax.cli.schedule:command"),
    "kernels": ("which form each fused kernel takes here, and why", "hfjax.cli.kernels:command"),
    "demo": ("train a GPT on 8 fake devices, every strategy", "hfjax.cli.demo:command"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command given; return its exit status."""
    name, *rest = (sys.argv[1:] if argv is None else list(argv)) or ["--help"]
    if name in ("-h", "--help", "help"):
        print(_help())
        return 0
    if name == "--version":
        print(f"hfjax {version()}")
        return 0
    if name not in COMMANDS:
        near = nearest_of(name, COMMANDS)
        print(f"hfjax {name}: no such command.{near}\n\n{_help()}", file=sys.stderr)
        return 2
    try:
        function = _function(name)
    except ModuleNotFoundError as missing:
        print(missing, file=sys.stderr)
        return 2
    try:
        return function(rest)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(130)  # a compilation that is under way would crash the ordinary exit
    except BrokenPipeError:
        return nobody_reads()


def _function(name: str) -> Callable[[Sequence[str]], int]:
    module, _, attribute = COMMANDS[name][1].partition(":")
    return getattr(imported(module, f"hfjax {name}"), attribute)


def _help() -> str:
    lines = [f"  {name:<10} {what}" for name, (what, _) in COMMANDS.items()]
    usage = "usage: hfjax COMMAND …; hfjax COMMAND --help tells more; hfjax --version"
    return "\n".join(["hfjax: parallel training for JAX", "", usage, "", *lines])


if __name__ == "__main__":
    sys.exit(main())
