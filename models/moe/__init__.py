"""Mixtures of experts: who chooses whom, the layer, and a Llama whose MLPs are mixtures.

`layer` is the layer, `router` chooses, `slots` says which tokens an expert takes, `experts` and
`grouped` what experts make of them, with a capacity and without. `losses` are those of routers,
which `metrics` carries to `routed_loss`; `moe_llama` is the model.
"""

from hfjax.models.moe.layer import MoE
from hfjax.models.moe.metrics import RoutedOutputs, RouterMetrics, after_step
from hfjax.models.moe.moe_llama import PRESETS, MoEConfig, MoELlama
from hfjax.models.moe.routed_loss import (
    next_token_loss,
    over_batch,
    uses_router_metrics,
    with_routing,
)
from hfjax.models.moe.router import Router

__all__ = [
    "PRESETS",
    "MoE",
    "MoEConfig",
    "MoELlama",
    "RoutedOutputs",
    "Router",
    "RouterMetrics",
    "after_step",
    "next_token_loss",
    "over_batch",
    "uses_router_metrics",
    "with_routing",
]
