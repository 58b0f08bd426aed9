"""Experts of a model on the devices of a step: passed to mixtures through their `kernels`."""

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
    """Dispatches tokens to experts on a mesh; records the dispatch of each mixture.

    Attributes:
        mesh: The mesh; None: all experts are local.
        dispatch: auto, all_to_all or gather.
        calls: The mixtures of a step and their dispatch, once it is traced.
    """

    mesh: Mesh | None = None
    dispatch: str = "auto"
    calls: dict[MixtureCall, str] = field(default_factory=dict, compare=False)

    def run(self, mixture: Any, x_GTD: jax.Array, routed: Any) -> jax.Array:
        """Return the experts' output for the local tokens."""
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
        """The choice; None where no experts are sharded."""
        return DispatchChoice(tuple(self.calls.items()), self.dispatch) if self.calls else None


def mixture_call(devices: int, x_GTD: jax.Array, routed: Any) -> MixtureCall:
    """Return the call of a mixture with these tokens on each of `devices` devices."""
    (groups, tokens, width), weights = x_GTD.shape, routed.weights
    slot_choices = getattr(routed, "choice_at", None)
    slots = None if slot_choices is None else slot_choices.shape[1] * slot_choices.shape[2]
    sizes = x_GTD.dtype.itemsize, weights.dtype.itemsize
    return MixtureCall(devices, groups, tokens, weights.shape[-1], slots, width, *sizes)
