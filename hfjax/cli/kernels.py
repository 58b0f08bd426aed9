"""`hfjax kernels`: which form each kernel takes on a device, and why."""

import argparse
from collections.abc import Sequence
from typing import Any

import jax

from hfjax.analysis.targets import GPUS
from hfjax.parallel.extensions.kernel_dispatch.choose_kernel import choose, measured
from hfjax.parallel.settings import KERNEL_WORDS, KERNELS, Wanted
from hfjax.utils.command_errors import carried_out
from hfjax.utils.tables import aligned


def arguments(parser: argparse.ArgumentParser) -> None:
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
    arguments(parser)
    given = parser.parse_args(argv)
    return carried_out("kernels", lambda: print(table(given.kernels, given.gpu)))


def table(kernels: Any = "auto", gpu: str | None = None) -> str:
    """Return a line for each kernel, and for each shape of it that was measured.

    What it does in a step, the form taken, why.
    """
    device = GPUS[gpu] if gpu else jax.devices()[0]
    wanted, known = Wanted.of(kernels), measured(device.device_kind)
    shapes = lambda kernel: [one["shape"] for one in known.get(kernel, ())]
    by_shape = lambda kernel: shapes(kernel) if wanted.word(kernel) == "auto" else ()
    asked = [(kernel, shape) for kernel in KERNELS for shape in by_shape(kernel) or (None,)]
    chosen = [choose(wanted, kernel, device, shape=shape) for kernel, shape in asked]
    rows = [[c.kernel, KERNELS[c.kernel], c.form, c.why] for c in chosen]
    head = ["kernel", "what it does", "form", "why"]
    return "\n".join([device.device_kind, *aligned([head, *rows])])
