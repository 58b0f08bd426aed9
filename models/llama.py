"""Llama in three parts: embed, layers, head. [B]atch, [S]equence, [D] embed, [V]ocabulary."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Self

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from hfjax.base.keywords import check_sizes, is_real
from hfjax.models.attention import causal_attention, rotate
from hfjax.models.loss import next_tokens
from hfjax.models.parts import (
    STREAM,
    WHOLE,
    Linear,
    RMSNorm,
    anywhere,
    plain,
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
    known: ClassVar[Mapping[str, Any]]  # the named shapes

    def __post_init__(self):
        sizes = ("vocab", "length", "layers", "heads", "kv_heads", "embed", "mlp")
        check_sizes("LlamaConfig", self, *sizes)
        for name, least in (("rotary_base", sys.float_info.min), ("epsilon", 0)):
            if not is_real(given := getattr(self, name), least, sys.float_info.max):
                raise ValueError(
                    f"LlamaConfig: {name}={given!r}; a finite number is expected, "
                    f"{'at least' if least == 0 else 'above'} 0."
                )
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

    @property
    def linear_maps(self) -> dict[str, tuple[int, int]]:
        """A layer's maps, inputs and outputs: in turn from the residual stream, and back to it."""
        d, qkv = self.embed, (self.heads + 2 * self.kv_heads) * self.width
        gate_up, down = (d, 2 * self.mlp), (self.mlp, d)
        return {"qkv": (d, qkv), "out": (d, d), "gate_up": gate_up, "down": down}

    @classmethod
    def preset(cls, name: str, **changes) -> Self:
        """Return a named shape, some fields changed.

        Args:
            name: tiny, llama2-7b, llama3-8b or llama3-70b.
            changes: Fields by name.

        Example:
            >>> from hfjax.models.llama import LlamaConfig
            >>> LlamaConfig.preset("llama3-8b", layers=16).kv_heads
            8
        """
        if name not in cls.known:
            model = cls.__name__.removesuffix("Config")
            raise ValueError(f"{model} preset {name!r}: one of {', '.join(cls.known)}.")
        return replace(cls.known[name], **changes)

    @classmethod
    def tiny(cls, **changes) -> Self:
        """Return the shape of a byte-level model that trains on a laptop.

        Args:
            changes: Fields by name.

        Example:
            >>> from hfjax.models.llama import LlamaConfig
            >>> LlamaConfig.tiny(layers=2).layers
            2
        """
        return cls.preset(next(iter(cls.known)), **changes)


_LLAMA3 = LlamaConfig(vocab=128256, length=8192, kv_heads=8, mlp=14336, rotary_base=500000.0)
PRESETS: Mapping[str, LlamaConfig] = {
    "tiny": LlamaConfig(vocab=256, length=64, layers=4, heads=8, kv_heads=4, embed=128, mlp=352),
    "llama2-7b": LlamaConfig(),
    "llama3-8b": _LLAMA3,
    "llama3-70b": replace(_LLAMA3, layers=80, heads=64, embed=8192, mlp=28672),
}

LlamaConfig.known = PRESETS


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
            rotate(qkv[:, :, :, :-1], self.base),
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

    def __init__(self, embed: int, mlp: int, scale: float, *, rngs: nnx.Rngs):
        shape = (embed, mlp, 2)
        self.gate_up = Linear(shape, ("embed", "mlp", None), 2, 0.02, bias=False, rngs=rngs)
        self.down = Linear((mlp, embed), ("mlp", "embed"), 1, scale, bias=False, rngs=rngs)
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
        self.mlp = MLP(config.embed, config.mlp, residual_scale(config.layers), rngs=rngs)
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

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.tokens = embedding(config, rngs)
        self.layers = stacked(config.layers, lambda rngs: Block(config, rngs=rngs), rngs)
        self.norm = RMSNorm(config.embed, config.epsilon)
        self.unembed = unembedding(config, rngs)
        self.place, self.kernels = anywhere, plain

    def embed(self, batch: Mapping[str, jax.Array]) -> Any:
        """Return the residual stream of `batch["tokens"]` [B, S + 1]; the last is only a target.

        With `batch["documents"]` [B, S + 1] tokens attend inside their document. (Rotary positions
        need not begin at 0: attention depends on distances alone.)
        """
        made = next_tokens(batch)
        return with_documents(residual_stream(self, made["tokens"]), made.get("documents"))

    @staticmethod
    def prepare(batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Return a batch of whole rows as `embed` and the loss read it."""
        return next_tokens(batch)

    def head(self, stream: Any) -> Any:
        """Return the logits [B, S, V], or a step's stand-in for them."""
        return logits_of(self, without_documents(stream)[0])

    def __call__(self, batch: Mapping[str, jax.Array]) -> jax.Array:
        return self.head(run_stacked(self.layers, self.embed(batch)))


def embedding(config: LlamaConfig, rngs: nnx.Rngs) -> nnx.Param:
    """Return the embedding of tokens."""
    kernel = 0.02 * jax.random.normal(rngs.params(), (config.vocab, config.embed))
    return nnx.Param(kernel, axes=("vocab", "embed"))


def unembedding(config: LlamaConfig, rngs: nnx.Rngs) -> Linear | None:
    """Return the head, None if it is the embedding."""
    shape, axes = (config.embed, config.vocab), ("embed", "vocab")
    return None if config.tied else Linear(shape, axes, 1, 0.02, bias=False, rngs=rngs)


def residual_stream(model: Any, tokens_BS: jax.Array) -> jax.Array:
    """Return what enters the layers of a model that has Llama's ends."""
    length = tokens_BS.shape[1]
    if length > model.config.length:
        raise ValueError(
            f"{length} tokens a row, the model is made for {model.config.length}: "
            f"shorten the rows, or raise {type(model.config).__name__}.length."
        )
    x = model.kernels.lookup(model.tokens[...], tokens_BS)
    return model.place(model.place(x, WHOLE), STREAM)


def logits_of(model: Any, x_BSD: jax.Array) -> Any:
    """Return the logits [B, S, V] of a model that has Llama's ends, or a step's stand-in."""
    x = model.place(model.norm(x_BSD), WHOLE, STREAM)
    kernel_VD = model.tokens[...] if model.unembed is None else model.unembed.kernel[...].T
    return model.kernels.outputs(x.astype(kernel_VD.dtype), kernel_VD, model.config.vocab)
