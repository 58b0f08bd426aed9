"""GPT-2 as a layer-stack model. [B]atch, [S]equence, [D] embed, [V]ocabulary."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from hfjax.models.attention import causal_attention
from hfjax.models.layers import (
    FULL_SEQUENCE,
    STREAM,
    Dropout,
    LayerNorm,
    Linear,
    Stream,
    add_residual,
    local_ops,
    no_constraint,
    pack_stream,
    residual_scale,
    run_stacked,
    stack_layers,
    unpack_stream,
)
from hfjax.models.loss import next_token_loss, next_tokens
from hfjax.models.model_config import TextPresets
from hfjax.utils.keywords import check_sizes, is_real

__all__ = ["GPT", "PRESETS", "GPTConfig", "next_token_loss"]


@dataclass(frozen=True)
class GPTConfig(TextPresets):
    """The configuration of a GPT.

    Attributes:
        vocab: The vocabulary size.
        length: The number of positions: the maximum sequence length.
        layers: The number of layers.
        heads: The number of heads; they divide `embed`.
        embed: The width of the residual stream; an MLP is four times as wide.
        dropout: The dropout rate, after the embedding and before each residual addition.
        pad_vocab_to: Pad the embedding to a multiple of so many rows; their logits are masked.
        attention: Function of (q, k, v), and of the documents if there are any.

    Example:
        >>> from hfjax.models.gpt import GPTConfig
        >>> GPTConfig(layers=6, pad_vocab_to=128).padded_vocab
        50304
    """

    vocab: int = 50257
    length: int = 1024
    layers: int = 12
    heads: int = 12
    embed: int = 768
    dropout: float = 0.0
    pad_vocab_to: int = 1
    attention: Callable = causal_attention

    def __post_init__(self) -> None:
        sizes = ("vocab", "length", "layers", "heads", "embed", "pad_vocab_to")
        check_sizes("GPTConfig", self, *sizes)
        if not is_real(self.dropout, 0, 1):
            raise ValueError(
                f"GPTConfig: dropout={self.dropout!r}; the part that is dropped is from 0 to 1."
            )
        if self.embed % self.heads:
            raise ValueError(
                f"GPTConfig: embed={self.embed} does not divide by heads={self.heads}. "
                "Choose heads that divide embed."
            )

    @property
    def linear_maps(self) -> dict[str, tuple[int, int]]:
        """Sizes (in, out) of a layer's linear maps, alternately from and to the residual stream."""
        d = self.embed
        return {"qkv": (d, 3 * d), "out": (d, d), "up": (d, 4 * d), "down": (4 * d, d)}


PRESETS: Mapping[str, GPTConfig] = {
    "tiny": GPTConfig(vocab=256, length=64, layers=4, heads=4, embed=128),
    "small": GPTConfig(),
    "medium": GPTConfig(layers=24, heads=16, embed=1024),
    "large": GPTConfig(layers=36, heads=20, embed=1280),
    "xl": GPTConfig(layers=48, heads=25, embed=1600),
    "gpt3-175b": GPTConfig(length=2048, layers=96, heads=96, embed=12288),
}

GPTConfig.known = PRESETS


class Attention(nnx.Module):
    """Causal self-attention. Query, key and value share one kernel, heads first: [D, H, 3, d]."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs) -> None:
        width = config.embed // config.heads
        heads = (config.heads, 3, width)
        axes = ("embed", "heads", "qkv", None)
        self.qkv = Linear((config.embed, *heads), axes, 3, 0.02, rngs=rngs)
        shape, scale = (config.heads, width, config.embed), residual_scale(config.layers)
        self.out = Linear(shape, ("heads", None, "embed"), 1, scale, rngs=rngs)
        self.attend = config.attention
        self.place, self.kernels = no_constraint, local_ops

    def __call__(self, x_BSD: jax.Array, documents_BS: jax.Array | None = None) -> jax.Array:
        qkv = self.place(self.qkv(x_BSD), ("batch", None, "heads", None, None))
        qkv = checkpoint_name(qkv, "qkv")
        q, k, v = (qkv[:, :, :, i] for i in range(3))
        documents = () if documents_BS is None else (documents_BS,)
        attend = self.kernels.attention(self.attend)
        attended = checkpoint_name(attend(q, k, v, *documents), "attended")
        return self.out(self.place(attended, ("batch", None, "heads", None)))


class MLP(nnx.Module):
    """Two linear maps with a GELU between them."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs) -> None:
        wide = (config.embed, 4 * config.embed)
        self.up = Linear(wide, ("embed", "mlp"), 1, 0.02, rngs=rngs)
        self.down = Linear(
            wide[::-1], ("mlp", "embed"), 1, residual_scale(config.layers), rngs=rngs
        )
        self.place = no_constraint

    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        up = checkpoint_name(self.place(self.up(x_BSD), ("batch", None, "mlp")), "mlp_up")
        return self.down(jax.nn.gelu(up))


class Block(nnx.Module):
    """One pre-norm layer: attention and MLP, each added to the residual stream."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs) -> None:
        self.norm1, self.norm2 = LayerNorm(config.embed), LayerNorm(config.embed)
        self.attention = Attention(config, rngs=rngs)
        self.mlp = MLP(config, rngs=rngs)
        self.dropout1 = Dropout(config.dropout, rngs=rngs)
        self.dropout2 = Dropout(config.dropout, rngs=rngs)
        self.place = no_constraint

    def __call__(self, stream: Stream) -> Any:
        x_BSD, documents = unpack_stream(stream)
        attention = partial(self.attention, documents_BS=documents)
        x = add_residual(self.place, x_BSD, attention, self.norm1, self.dropout1)
        x = add_residual(self.place, x, self.mlp, self.norm2, self.dropout2)
        return pack_stream(x, documents)


class GPT(nnx.Module):
    """GPT-2 with tied embeddings; `layers` is one module of stacked arrays.

    Checkpoint names in each layer, for remat and offload: qkv, attended, mlp_up.
    """

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        normal = lambda scale, *shape: scale * jax.random.normal(rngs.params(), shape)
        tokens = normal(0.02, config.padded_vocab, config.embed)
        self.tokens = nnx.Param(tokens, axes=("vocab", "embed"))
        self.positions = nnx.Param(
            normal(0.01, config.length, config.embed), axes=("position", "embed")
        )
        self.dropout = Dropout(config.dropout, rngs=rngs)
        self.layers = stack_layers(config.layers, lambda rngs: Block(config, rngs=rngs), rngs)
        self.norm = LayerNorm(config.embed)
        self.place, self.kernels = no_constraint, local_ops

    def embed(self, batch: Mapping[str, jax.Array]) -> Any:
        """Return the residual stream of `batch["tokens"]` [B, S + 1]; the last is only a target.

        With `batch["documents"]` [B, S + 1] tokens attend within their document, whose positions
        start at 0.
        """
        inputs = next_tokens(batch)
        length = inputs["tokens"].shape[1]
        if length > self.config.length:
            raise ValueError(
                f"{length} tokens a row, the model has {self.config.length} positions: shorten the "
                "rows, or raise GPTConfig.length."
            )
        x = self.place(self.kernels.lookup(self.tokens[...], inputs["tokens"]), FULL_SEQUENCE)
        x = x + self._position_embeddings(x.shape[1], inputs.get("positions"))
        return pack_stream(self.dropout(self.place(x, STREAM)), inputs.get("documents"))

    @staticmethod
    def prepare(batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Return a batch of full sequences in the form that `embed` and the loss read."""
        return next_tokens(batch)

    def _position_embeddings(self, length: int, in_documents_BS: jax.Array | None) -> jax.Array:
        """Return the embedding of each token's position."""
        if in_documents_BS is not None:
            return self.place(self.positions[...][in_documents_BS], FULL_SEQUENCE)
        return self.positions[...][None, :length]

    def head(self, stream: Any) -> Any:
        """Return the logits [B, S, V], or a step's `Projection` in place of them."""
        x_BSD, _ = unpack_stream(stream)
        x = self.place(self.norm(x_BSD), FULL_SEQUENCE, STREAM)
        kernel_VD: Any = self.tokens[...]
        return self.kernels.outputs(x.astype(kernel_VD.dtype), kernel_VD, self.config.vocab)

    def __call__(self, batch: Mapping[str, jax.Array]) -> jax.Array:
        return self.head(run_stacked(self.layers, self.embed(batch)))
