"""The parts of a run that is only planned: for devices and a vocabulary that need not be here."""

from dataclasses import dataclass
from typing import Any

import jax

from hfjax.run.build import Parts

NO_TILES = "Couldn't find output tile sizes"  # of a product: XLA's compiler for GPUs gives up
PLAIN = {"xla_gpu_enable_triton_gemm": False}


@dataclass(frozen=True)
class Planned(Parts):
    """Parts of a run whose step is compiled, never run."""

    @property
    def batch(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The shapes of a batch."""
        return self.task.shapes()


def compile_for_gpu(
    lowered: jax.stages.Lowered, options: dict[str, Any] | None = None
) -> jax.stages.Compiled:
    """Return a program; where XLA finds no tiles for a product, with other kernels of products."""
    try:
        return lowered.compile(options)
    except jax.errors.JaxRuntimeError as error:
        if NO_TILES not in str(error):
            raise
    return lowered.compile({**(options or {}), **PLAIN})
