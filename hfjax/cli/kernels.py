"""`hfjax kernels`: shows which implementation each kernel uses on a device, and why."""

import argparse
from collections.abc import Sequence
from typing import Any

import jax

from hfjax.analysis.targets import GPUS
from hfjax.parallel.extensions.kernel_dispatch.choose_kernel import choose_impl, measurements_of
from hfjax.parallel.settings import KERNEL_WORDS, KERNELS, KernelChoices
from hfjax.utils.command_errors import run_command
from hfjax.utils.tables import align


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser."""
    add = parser.add_argument
    add("--gpu", choices=GPUS, help="GPU to ask for (default: the first device here)")
    meaning = (
        "auto: if faster; pallas: always; xla: never; reference: plain JAX (default: %(default)s)"
    )
    add("--kernels", choices=KERNEL_WORDS, default="auto", help=meaning)


def command(argv: Sequence[str]) -> int:
    """Run `hfjax kernels` with these arguments; return the exit status."""
    about = "Show which form each kernel takes on a device, and why."
    parser = argparse.ArgumentParser("hfjax kernels", description=about)
    add_arguments(parser)
    args = parser.parse_args(argv)
    return run_command("kernels", lambda: print(table(args.kernels, args.gpu)))


def table(kernels: Any = "auto", gpu: str | None = None) -> str:
    """Return a line for each kernel, and for each shape of it that was measured.

    It shows what the kernel does in a step, the implementation and the reason.
    """
    device = GPUS[gpu] if gpu else jax.devices()[0]
    preferences, known = KernelChoices.of(kernels), measurements_of(device.device_kind)
    shapes = lambda kernel: [one["shape"] for one in known.get(kernel, ())]
    by_shape = lambda kernel: shapes(kernel) if preferences.choice(kernel) == "auto" else ()
    requests = [(kernel, shape) for kernel in KERNELS for shape in by_shape(kernel) or (None,)]
    chosen = [choose_impl(preferences, kernel, device, shape=shape) for kernel, shape in requests]
    entries = [[c.kernel, KERNELS[c.kernel], c.impl, c.why] for c in chosen]
    head = ["kernel", "what it does", "form", "why"]
    return "\n".join([device.device_kind, *align([head, *entries])])
