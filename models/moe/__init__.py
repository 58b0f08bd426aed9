"""Mixture of experts (MoE): routing, the layer, and a Llama with MoE layers.

`layer` is the layer, `router` chooses experts, `slots` assigns tokens to expert capacity, `experts`
and `grouped` run the experts, with and without a capacity. `losses` are the auxiliary losses, which
`metrics` carries to `routed_loss`; `moe_llama` is the model.
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
