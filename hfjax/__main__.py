"""`hfjax COMMAND`: what the command line can do."""

import os
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from hfjax.cli.log_handler import show_log
from hfjax.utils.command_errors import close_stdout, import_or_explain, run_command
from hfjax.utils.keywords import name_hint
from hfjax.utils.renamed import OLD_COMMANDS, OldNamesWarning
from hfjax.utils.version import version

COMMANDS = {  # name: what it does, and the function that takes its arguments
    "demo": (
        "train a small GPT under every strategy, on 8 simulated devices",
        "hfjax.cli.demo:command",
    ),
    "train": ("train a model", "hfjax.cli.train:train_command"),
    "recipes": ("show configurations of known models", "hfjax.cli.recipes:command"),
    "eval": ("evaluate a trained model", "hfjax.cli.train:evaluate_command"),
    "generate": ("write text with a trained model", "hfjax.cli.train:generate_command"),
    "data": ("make a data set of text, or show what one holds", "hfjax.cli.data:main"),
    "inspect": (
        "show what a Hugging Face model's folder holds",
        "hfjax.cli.model_files:inspect_command",
    ),
    "export": ("write a run's model for Hugging Face", "hfjax.cli.model_files:export_command"),
    "launch": ("start several processes on this machine", "hfjax.cli.launch:main"),
    "memory": ("estimate a training step's memory", "hfjax.cli.memory.command:main"),
    "plan": ("find the fastest layout that fits your GPUs", "hfjax.cli.plan.command:main"),
    "schedule": ("show a pipeline schedule and its cost", "hfjax.cli.schedule:command"),
    "kernels": ("show which form each fused kernel takes, and why", "hfjax.cli.kernels:command"),
}

HEAD = (
    "hfjax: parallel training in JAX. A strategy divides your model over devices, unchanged.",
    "",
    "usage: hfjax COMMAND [OPTIONS]",
    "       hfjax COMMAND --help      list all options of a command",
    "       hfjax --version           print the version",
    "",
    "Start with `hfjax demo`, then `hfjax train`. The commands:",
    "",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command given; return its exit status."""
    _open_streams()
    name, *rest = (sys.argv[1:] if argv is None else list(argv)) or ["--help"]
    try:
        return _run(name, rest)
    except KeyboardInterrupt:
        with suppress(OSError):  # nobody reads
            print("stopped", file=sys.stderr, flush=True)
            sys.stdout.flush()
        os._exit(130)  # a compilation that is under way would crash the ordinary exit
    except BrokenPipeError:
        return close_stdout()


def _open_streams() -> None:
    """Open what a shell has closed (>&-): a file that is opened next would take its place."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))


def _run(name: str, rest: Sequence[str]) -> int:
    if name in ("-h", "--help", "help"):
        return run_command("--help", lambda: print(_help()))
    if name == "--version":
        return run_command(name, lambda: print(f"hfjax {version()}"))
    if name not in COMMANDS:
        near = OLD_COMMANDS.get(name)
        hint = f" It is hfjax {near} now." if near else name_hint(name, COMMANDS)
        print(f"hfjax {name}: no such command.{hint}\n\n{_help()}", file=sys.stderr)
        return 2
    _shorten_warnings(name)
    try:
        function = _function(name)
    except ModuleNotFoundError as missing:
        print(missing, file=sys.stderr)
        return 2
    with show_log():
        return function(rest)


def _shorten_warnings(name: str) -> None:
    """Print warnings about names of a user's files without a line of hfjax."""
    usual = warnings.formatwarning

    def short(message: Any, category: Any, *rest: Any) -> str:
        is_ours = issubclass(category, OldNamesWarning)
        return f"hfjax {name}: {message}\n" if is_ours else usual(message, category, *rest)

    warnings.formatwarning = short


def _function(name: str) -> Callable[[Sequence[str]], int]:
    module, _, attribute = COMMANDS[name][1].partition(":")
    return getattr(import_or_explain(module, f"hfjax {name}"), attribute)


def _help() -> str:
    lines = [f"  {name:<10} {summary}" for name, (summary, _) in COMMANDS.items()]
    return "\n".join([*HEAD, *lines])


if __name__ == "__main__":
    sys.exit(main())
