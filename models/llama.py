"""Llama in three parts: embed, layers, head. [B]atch, [S]equence, [D] embed, [V]ocabulary."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from hfjax.models.attention import causal_attention, rotate
from hfjax.models.loss import next_tokens
from hfjax.models.parts import (
    STREAM,
    WHOLE,
    Linear,
    RMSNorm,
    anywhere,
    plain,
    project,
    residual_scale,
    run_stacked,
    stacked,
    with_documents,
    without_documents,
)


@dataclass(frozen=True)
class LlamaConfig:
    """The shape of a Llama.

    Attributes:
        vocab: The number of tokens.
        length: Tokens of the longest row; positions are rotary, so no array depends on it.
        layers: The number of layers.
        heads: The number of heads of queries; twice as many divide `embed`.
        kv_heads: The number of heads of keys and values: each serves heads / kv_heads queries.
        embed: The width of the residual stream.
        mlp: The width of the MLP.
        rotary_base: The base of the rotary positions' wavelengths.
        epsilon: Of the norms.
        tied: Whether the head is the embedding, transposed.
        attention: Function of (q, k, v), and of the documents if there are any.

    Example:
        >>> from hfjax.models.llama import LlamaConfig
        >>> LlamaConfig(heads=16, kv_heads=4).width
        256
    """

    vocab: int = 32000
    length: int = 4096
    layers: int = 32
    heads: int = 32
    kv_heads: int = 32
    embed: int = 4096
    mlp: int = 11008
    rotary_base: float = 10000.0
    epsilon: float = 1e-5  # of the norms
    tied: bool = False  # the head is the embedding, transposed
    attention: Callable = causal_attention

    def __post_init__(self):
        if self.embed % (2 * self.heads):
            raise ValueError(
                f"LlamaConfig: embed={self.embed} does not divide by 2 * heads={self.heads} "
                "(rotary positions turn pairs of dimensions). Choose heads that do."
            )
        if self.heads % self.kv_heads:
            raise ValueError(
                f"LlamaConfig: heads={self.heads} does not divide by kv_heads={self.kv_heads}. "
                "Choose kv_heads that divide heads."
            )

    @property
    def width(self) -> int:
        """The dimensions of one head."""
        return self.embed // self.heads

    @classmethod
    def preset(cls, name: str, **changes) -> "LlamaConfig":
        """Return a named shape, some fields changed.

        Args:
            name: tiny, llama2-7b, llama3-8b or llama3-70b.
            changes: Fields by name.

        Example:
            >>> from hfjax.models.llama import LlamaConfig
            >>> LlamaConfig.preset("llama3-8b", layers=16).kv_heads
            8
        """
        if name not in PRESETS:
            raise ValueError(f"Llama preset {name!r}: one of {', '.join(PRESETS)}.")
        return replace(PRESETS[name], **changes)

    @classmethod
    def tiny(cls, **changes) -> "LlamaConfig":
        """Return the shape of a byte-level model that trains on a laptop.

        Args:
            changes: Fields by name.

        Example:
            >>> from hfjax.models.llama import LlamaConfig
            >>> LlamaConfig.tiny(layers=2).layers
            2
        """
        return cls.preset("tiny", **changes)


_LLAMA3 = LlamaConfig(vocab=128256, length=8192, kv_heads=8, mlp=14336, rotary_base=500000.0)
PRESETS: Mapping[str, LlamaConfig] = {
    "tiny": LlamaConfig(vocab=256, length=64, layers=4, heads=8, kv_heads=4, embed=128, mlp=352),
    "llama2-7b": LlamaConfig(),
    "llama3-8b": _LLAMA3,
    "llama3-70b": replace(_LLAMA3, layers=80, heads=64, embed=8192, mlp=28672),
}


class Attention(nnx.Module):
    """Causal self-attention with rotary positions, kv heads first.

    A kv head holds its queries, then its key, then its value: [D, kv heads, queries + 2, d]. What
    a tensor axis splits is never cut.
    """

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        groups, width = config.kv_heads, config.width
        shape = (config.embed, groups, config.heads // groups + 2, width)
        self.qkv = Linear(shape, ("embed", "heads", None, None), 3, 0.02, bias=False, rngs=rngs)
        shape, scale = (config.heads, width, config.embed), residual_scale(config.layers)
        self.out = Linear(shape, ("heads", None, "embed"), 1, scale, bias=False, rngs=rngs)
        self.attend, self.base = config.attention, config.rotary_base
        self.place, self.kernels = anywhere, plain

    def __call__(self, x_BSD: jax.Array, documents_BS: jax.Array | None = None) -> jax.Array:
        qkv = self.place(self.qkv(x_BSD), ("batch", None, "heads", None, None))
        qkv = checkpoint_name(qkv, "qkv")
        qk, v = (
            rotate(qkv[:, :, :, :-1], self.base, self.kernels.positions(qkv.shape[1])),
            qkv[:, :, :, -1],
        )
        q, k = qk[:, :, :, :-1], qk[:, :, :, -1]
        q = q.reshape(*q.shape[:2], -1, q.shape[-1])
        inside = () if documents_BS is None else (documents_BS,)
        attend = self.kernels.attention(self.attend)
        attended = checkpoint_name(attend(q, k, v, *inside), "attended")
        return self.out(self.place(attended, ("batch", None, "heads", None)))


class MLP(nnx.Module):
    """SwiGLU (Shazeer, 2020). Gate and up share one kernel, mlp first: [D, mlp, 2]."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        shape, scale = (config.embed, config.mlp, 2), residual_scale(config.layers)
        self.gate_up = Linear(shape, ("embed", "mlp", None), 2, 0.02, bias=False, rngs=rngs)
        shape = (config.mlp, config.embed)
        self.down = Linear(shape, ("mlp", "embed"), 1, scale, bias=False, rngs=rngs)
        self.place = anywhere

    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        gate_up = self.place(self.gate_up(x_BSD), ("batch", None, "mlp", None))
        gate_up = checkpoint_name(gate_up, "mlp_up")
        return self.down(jax.nn.silu(gate_up[..., 0]) * gate_up[..., 1])


class Block(nnx.Module):
    """One layer: attention and MLP, each behind a norm and added to the residual stream."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        self.norm1 = RMSNorm(config.embed, config.epsilon)
        self.norm2 = RMSNorm(config.embed, config.epsilon)
        self.attention = Attention(config, rngs=rngs)
        self.mlp = MLP(config, rngs=rngs)
        self.place = anywhere

    def __call__(self, stream: Any) -> Any:
        x_BSD, documents = without_documents(stream)
        x = self._add(x_BSD, partial(self.attention, documents_BS=documents), self.norm1)
        return with_documents(self._add(x, self.mlp, self.norm2), documents)

    def _add(self, x: jax.Array, part: Callable, norm: RMSNorm) -> jax.Array:
        """The norm works on the sequence as the residual stream is split."""
        normed = norm(self.place(x, STREAM))
        return x + self.place(part(normed), STREAM)


class Llama(nnx.Module):
    """Llama 2 and 3; `layers` is one module of stacked arrays.

    Named in each layer, for remat and offload: qkv, attended, mlp_up.
    """

    works_on_a_grid = True

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        self.config = config
        shape, axes = (config.vocab, config.embed), ("vocab", "embed")
        self.tokens = nnx.Param(0.02 * jax.random.normal(rngs.params(), shape), axes=axes)
        self.layers = stacked(config.layers, lambda rngs: Block(config, rngs=rngs), rngs)
        self.norm = RMSNorm(config.embed, config.epsilon)
        untied = lambda: Linear(shape[::-1], axes[::-1], 1, 0.02, bias=False, rngs=rngs)
        self.unembed = None if config.tied else untied()
        self.place, self.kernels = anywhere, plain

    def embed(self, batch: Mapping[str, jax.Array]) -> Any:
        """Return the residual stream of `batch["tokens"]` [B, S + 1]; the last is only a target.

        With `batch["documents"]` [B, S + 1] tokens attend inside their document. (Rotary positions
        need not begin at 0: attention depends on distances alone.)
        """
        made = next_tokens(batch)
        length = self.kernels.row_length(made["tokens"].shape[1])
        if length > self.config.length:
            raise ValueError(
                f"{length} tokens a row, the model is made for {self.config.length}: "
                "shorten the rows, or raise LlamaConfig.length."
            )
        x = self.kernels.lookup(self.tokens[...], made["tokens"])
        x = self.place(self.place(x, WHOLE), STREAM)
        return with_documents(x, made.get("documents"))

    @staticmethod
    def prepare(batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Return a batch of whole rows as `embed` and the loss read it."""
        return next_tokens(batch)

    def head(self, stream: Any) -> Any:
        """Return the logits [B, S, V], or a step's stand-in for them."""
        x_BSD, _ = without_documents(stream)
        x = self.place(self.norm(x_BSD), WHOLE, STREAM)
        kernel_VD = self.tokens[...] if self.unembed is None else self.unembed.kernel[...].T
        logits = partial(self._logits, x, kernel_VD)
        return self.kernels.outputs(x, kernel_VD, self.config.vocab, logits)

    def _logits(self, x_BSD: jax.Array, kernel_VD: jax.Array) -> jax.Array:
        place = partial(self.place, names=("batch", None, "vocab"))
        return place(project(place, x_BSD, kernel_VD.T))

    def __call__(self, batch: Mapping[str, jax.Array]) -> jax.Array:
        return self.head(run_stacked(self.layers, self.embed(batch)))
