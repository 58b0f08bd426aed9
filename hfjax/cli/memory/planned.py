"""The parts of a run that is only planned: for devices and a vocabulary that need not be here."""

from dataclasses import dataclass
from typing import Any

import jax

from hfjax.models.attention import dot_product
from hfjax.run.build import Parts


@dataclass(frozen=True)
class Planned(Parts):
    """Parts of a run whose step is compiled, never run."""

    @property
    def batch(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The shapes of a batch."""
        return self.task.shapes()


@jax.custom_vjp
def recomputed(q_BSHD: Any, k_BSGD: Any, v_BSGD: Any, documents_BS: Any = None) -> jax.Array:
    """Return causal attention that keeps no scores for the backward pass, as cuDNN's keeps none."""
    return dot_product(q_BSHD, k_BSGD, v_BSGD, documents_BS, "xla")


def _forward(
    q_BSHD: Any, k_BSGD: Any, v_BSGD: Any, documents_BS: Any = None
) -> tuple[jax.Array, Any]:
    out = dot_product(q_BSHD, k_BSGD, v_BSGD, documents_BS, "xla")
    return out, (q_BSHD, k_BSGD, v_BSGD, documents_BS)


def _backward(given: Any, cotangent: jax.Array) -> tuple[Any, ...]:
    *arrays, documents = given
    attend = lambda q, k, v: dot_product(q, k, v, documents, "xla")
    return *jax.vjp(attend, *arrays)[1](cotangent), None


recomputed.defvjp(_forward, _backward)
