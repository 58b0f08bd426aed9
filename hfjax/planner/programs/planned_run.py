"""The components of a run that is only planned: its devices and vocabulary need not be here."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from hfjax.pallas_kernels.capabilities import replace_attention
from hfjax.trainer.build import RunComponents

NO_TILES = "Couldn't find output tile sizes"  # of a matmul: XLA's compiler for GPUs gives up
PLAIN = {"xla_gpu_enable_triton_gemm": False}


@dataclass(frozen=True)
class PlannedRun(RunComponents):
    """Components of a run whose step is compiled but never run.

    Args:
        attention: Traced in place of causal attention; None: causal attention itself.
    """

    attention: Callable | None = None

    @property
    def batch(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The shapes of a batch."""
        return self.task.shapes()

    def trace(self, step: Any = None) -> jax.stages.Traced:
        """Return a step traced for the batch; None: the step of the run."""
        with replace_attention(self.attention):
            return (step or self.step).trace(self.batch)


def compile_for_gpu(
    lowered: jax.stages.Lowered, options: dict[str, Any] | None = None
) -> jax.stages.Compiled:
    """Return a compiled program; if XLA finds no tiles for a matmul, with other matmul kernels."""
    try:
        return lowered.compile(options)
    except jax.errors.JaxRuntimeError as error:
        if NO_TILES not in str(error):
            raise
    return lowered.compile({**(options or {}), **PLAIN})
