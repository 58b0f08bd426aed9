"""Mixtures of experts: who chooses whom, the layer, and a Llama whose MLPs are mixtures."""

from hfjax.models.moe.layer import MoE
from hfjax.models.moe.loss import next_token_loss, over_batch, takes_routing, with_routing
from hfjax.models.moe.model import PRESETS, MoEConfig, MoELlama
from hfjax.models.moe.router import Router
from hfjax.models.moe.told import Routed, Told, after_step

__all__ = [
    "PRESETS",
    "MoE",
    "MoEConfig",
    "MoELlama",
    "Routed",
    "Router",
    "Told",
    "after_step",
    "next_token_loss",
    "over_batch",
    "takes_routing",
    "with_routing",
]
