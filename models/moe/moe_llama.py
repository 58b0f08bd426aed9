"""A layer-stack Llama whose MLPs are mixtures of experts. [B]atch, [S]equence, [D] embed."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from hfjax.models.layers import (
    FULL_SEQUENCE,
    STREAM,
    add_residual,
    local_ops,
    no_constraint,
    residual_scale,
    run_stacked,
    stack_layers,
)
from hfjax.models.llama import (
    MLP,
    Attention,
    LlamaConfig,
    compute_logits,
    embedding,
    make_norm,
    mark_local,
    residual_stream,
    unembedding,
)
from hfjax.models.loss import next_tokens
from hfjax.models.moe.layer import MixtureOptions, MoE
from hfjax.models.moe.metrics import RoutedOutputs, RouterMetrics, after_step
from hfjax.models.moe.routed_loss import over_batch
from hfjax.models.moe.router import Router
from hfjax.models.rope import Rope
from hfjax.utils.keywords import is_int


class Stream(NamedTuple):
    """The values passed from layer to layer."""

    x: jax.Array  # [B, S, D]
    documents: jax.Array | None  # [B, S]
    router_metrics: RouterMetrics


@dataclass(frozen=True)
class MoEConfig(MixtureOptions, LlamaConfig):
    """The configuration of a Llama whose MLPs are mixtures; `mlp` is the width of one expert.

    It has the fields of `LlamaConfig` and `MixtureOptions`, and these two. Presets: mixtral-tiny,
    deepseek-tiny, mixtral-8x7b and deepseek-16b.

    Attributes:
        experts: The number of experts of each mixture; or one number per layer, 0 for a plain MLP:
            layers that differ form a list, not a stack.
        dense: The width of plain MLPs, if there are any. None: `top_k` times `mlp`.

    Example:
        >>> from hfjax.models.moe import MoEConfig
        >>> MoEConfig.preset("mixtral-tiny").experts
        8
    """

    experts: int | tuple[int, ...] = 8
    dense: int | None = None

    def __post_init__(self) -> None:
        MixtureOptions.__post_init__(self)
        LlamaConfig.__post_init__(self)
        counts: Any = self.experts if hasattr(self.experts, "__len__") else [self.experts]
        if isinstance(counts, str) or not all(is_int(count, 0) for count in counts):
            raise ValueError(
                f"MoEConfig: experts={self.experts!r}: a whole number, at least 0, or one for each "
                "layer (0: a plain MLP)."
            )
        if not isinstance(self.experts, int) and len(self.experts) != self.layers:
            raise ValueError(
                f"MoEConfig: experts={self.experts} are {len(self.experts)} numbers for "
                f"{self.layers} layers. Give one for each layer (0: a plain MLP), or one for all."
            )
        if self.activation != "silu":
            raise ValueError(
                f"MoEConfig: activation={self.activation!r}: the gates of experts have silu alone."
            )
        if not any(self.by_layer):
            raise ValueError("MoEConfig: no layer has experts. That is a hfjax.models.llama.Llama.")

    @property
    def by_layer(self) -> tuple[int, ...]:
        """The number of experts of each layer, 0 for a plain MLP."""
        if isinstance(self.experts, int):
            return (self.experts,) * self.layers
        return tuple(self.experts)


_TINY = MoEConfig(vocab=256, length=64, layers=4, heads=8, kv_heads=4, embed=128, mlp=176)
_MIXTRAL = MoEConfig(kv_heads=8, mlp=14336, rotary=Rope(1e6), capacity=None)
PRESETS: Mapping[str, MoEConfig] = {
    "mixtral-tiny": _TINY,
    "deepseek-tiny": replace(
        _TINY,
        mlp=64,
        experts=16,
        top_k=4,
        shared=1,
        router=replace(Router.preset("deepseek-v3"), groups=4, best_groups=2),
    ),
    "mixtral-8x7b": _MIXTRAL,
    "deepseek-16b": replace(
        _MIXTRAL,
        vocab=102400,
        layers=28,
        heads=16,
        kv_heads=16,
        embed=2048,
        mlp=1408,
        rotary=Rope(1e4),
        experts=64,
        top_k=6,
        shared=2,
        router=Router(normalise="none", balance_loss=0.001, balance_over="row"),
    ),
}

MoEConfig.known = PRESETS


class Block(nnx.Module):
    """One pre-norm layer: attention, and a mixture or an MLP."""

    def __init__(self, config: MoEConfig, experts: int, *, rngs: nnx.Rngs) -> None:
        self.norm1, self.norm2 = make_norm(config), make_norm(config)
        self.norm1_after = make_norm(config) if config.norms_after else None
        self.norm2_after = make_norm(config) if config.norms_after else None
        self.attention = Attention(config, rngs=rngs)
        scale = residual_scale(config.layers)
        if experts:
            options: Any = {
                field.name: getattr(config, field.name) for field in fields(MixtureOptions)
            }
            options["top_k"] = min(config.top_k, experts)
            mixture = MoE(config.embed, config.mlp, experts, scale=scale, rngs=rngs, **options)
            self.mlp: Any = mixture
        else:
            mlp_width = config.dense or config.top_k * config.mlp
            self.mlp = MLP(config.embed, mlp_width, scale, rngs=rngs)
        self.place = no_constraint

    def __call__(self, stream: Stream) -> Stream:
        x, documents, router_metrics = stream
        attention = partial(self.attention, documents_BS=documents)
        x = add_residual(self.place, x, attention, self.norm1, self.norm1_after)
        if isinstance(self.mlp, MLP):
            x = add_residual(self.place, x, self.mlp, self.norm2, self.norm2_after)
            return Stream(x, documents, router_metrics)
        normalized = self.norm2(self.place(x, STREAM))
        y, router_metrics = self.mlp(self.place(normalized, FULL_SEQUENCE, STREAM), router_metrics)
        y, after = self.place(y, STREAM), self.norm2_after
        return Stream(x + (y if after is None else after(y)), documents, router_metrics)


class MoELlama(nnx.Module):
    """A Llama with mixtures; `layers` is one module of stacked arrays, or a list if layers differ.

    Checkpoint names in each layer, for remat and offload: qkv, attended, mlp_up.
    """

    def __init__(self, config: MoEConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.tokens = embedding(config, rngs)
        counts = config.by_layer
        if len(set(counts)) == 1:
            make = lambda rngs: Block(config, counts[0], rngs=rngs)
            self.layers: Any = stack_layers(config.layers, make, rngs)
            mark_local(config, self.layers)
        else:
            self.layers = nnx.List([Block(config, count, rngs=rngs) for count in counts])
            for number in () if config.local is None else config.local.layers:
                self.layers[number].attention.is_local[...] = jnp.ones((), bool)
        self.norm = make_norm(config)
        self.unembed = unembedding(config, rngs)
        self.deterministic = False
        self.place, self.kernels = no_constraint, local_ops

    def embed(self, batch: Mapping[str, jax.Array]) -> Stream:
        """Return the layers' input from `batch["tokens"]` [B, S + 1] and documents, if any."""
        inputs = next_tokens(batch)
        x = residual_stream(self, inputs["tokens"])
        mixtures = [count for count in self.config.by_layer if count]
        router_metrics = RouterMetrics.start(
            x, len(mixtures), max(mixtures), self.config.router.over_batch
        )
        return Stream(x, inputs.get("documents"), router_metrics)

    @staticmethod
    def prepare(batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Return a batch of full sequences in the form that `embed` and the loss read."""
        return next_tokens(batch)

    def head(self, stream: Stream) -> Any:
        """Return the logits [B, S, V], or what the step's loss takes in place of them."""
        router, training = self.config.router, not self.deterministic
        counts = [n for n in self.config.by_layer if n]
        router_metrics = over_batch(stream.router_metrics, router, self.kernels, counts, training)
        needs = router.tells and training
        return self.kernels.add_router_metrics(
            compute_logits(self, stream.x),
            partial(RoutedOutputs, router_metrics=router_metrics),
            needs,
        )

    def after_step(self, variables: Mapping[str, Any], metrics: Mapping[str, Any]) -> Any:
        """Return the routers' biases after a step, and its metrics with summaries."""
        router, counts = self.config.router, [n for n in self.config.by_layer if n]
        return after_step(variables, metrics, router.bias_rate, router.recentre, counts)

    def __call__(self, batch: Mapping[str, jax.Array]) -> jax.Array:
        stream = self.embed(batch)
        if isinstance(self.layers, nnx.List):
            for layer in self.layers:
                stream = layer(stream)
            return self.head(stream)
        return self.head(run_stacked(self.layers, stream))
