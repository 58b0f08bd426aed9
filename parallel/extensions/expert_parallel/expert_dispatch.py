"""Experts of a model on the devices of a step: handed to mixtures through their `kernels`."""

from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import Mesh

from hfjax.parallel.extensions.expert_parallel.dispatch_kinds import (
    DispatchChoice,
    MixtureCall,
    choose_dispatch,
)
from hfjax.parallel.extensions.expert_parallel.token_exchange import all_to_all, gather
from hfjax.parallel.mesh import EXPERT_AXES, in_use, platform_of, size_of


@dataclass(frozen=True)
class ExpertDispatch:
    """How tokens get to experts on a mesh; remembers what each mixture was given.

    Attributes:
        mesh: The mesh; None: all experts are here.
        dispatch: auto, all_to_all or gather.
        calls: What the mixtures of a step asked for, once it is traced.
    """

    mesh: Mesh | None = None
    dispatch: str = "auto"
    calls: dict[MixtureCall, str] = field(default_factory=dict, compare=False)

    def run(self, mixture: Any, x_GTD: jax.Array, routed: Any) -> jax.Array:
        """Return what the experts make of the tokens here."""
        if self.mesh is None or mixture.num_local == mixture.experts:
            return mixture.run_all(x_GTD, routed)
        axes = in_use(self.mesh, EXPERT_AXES)
        call = mixture_call(size_of(axes, self.mesh), x_GTD, routed)
        kind = self.calls.setdefault(call, choose_dispatch(self.dispatch, call))
        if kind == "all_to_all":
            return all_to_all(mixture, x_GTD, routed, axes)
        return gather(mixture, x_GTD, routed, axes, wide=platform_of(self.mesh) == "cpu")

    @property
    def choice(self) -> DispatchChoice | None:
        """What was chosen; None where no experts are spread."""
        return DispatchChoice(tuple(self.calls.items()), self.dispatch) if self.calls else None


def mixture_call(devices: int, x_GTD: jax.Array, routed: Any) -> MixtureCall:
    """Return what a mixture asks for that is given these tokens on each of so many devices."""
    (groups, tokens, width), weights = x_GTD.shape, routed.weights
    slot_choices = getattr(routed, "choice_at", None)
    slots = None if slot_choices is None else slot_choices.shape[1] * slot_choices.shape[2]
    sizes = x_GTD.dtype.itemsize, weights.dtype.itemsize
    return MixtureCall(devices, groups, tokens, weights.shape[-1], slots, width, *sizes)
