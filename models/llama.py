"""Llama as a layer-stack model. [B]atch, [S]equence, [D] embed, [V]ocabulary.

One decoder: the differences between Llama, Qwen, Mistral and Gemma are configuration fields.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from hfjax.models.attention import causal_attention, rotate
from hfjax.models.layers import (
    FULL_SEQUENCE,
    STREAM,
    Linear,
    RMSNorm,
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
from hfjax.models.loss import next_tokens
from hfjax.models.model_config import TextPresets
from hfjax.models.rope import EitherRope, Rope
from hfjax.utils.head import head_logits as product_of
from hfjax.utils.keywords import check_sizes, is_int, is_real

ACTIVATIONS: Mapping[str, Callable] = {
    "silu": jax.nn.silu,
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
}


@dataclass(frozen=True)
class LocalLayers:
    """Layers of a stack that use another attention than the others.

    All layers stay in one stack: the kind of a layer is data.

    Attributes:
        layers: The numbers of these layers, from 0 on.
        attention: Their attention: `hfjax.models.attention.windowed`, for instance.
        rotary: Their rotary positions. None: those of the others.

    Example:
        >>> from hfjax.models.attention import windowed
        >>> from hfjax.models.llama import LlamaConfig, LocalLayers
        >>> LlamaConfig.tiny(local=LocalLayers((0, 1, 2), windowed(16))).local.layers
        (0, 1, 2)
    """

    layers: tuple[int, ...]
    attention: Callable
    rotary: Rope | None = None

    def check(self, owner: str, layers: int) -> None:
        """Refuse numbers that are not a subset of a model's layers."""
        numbers = {n for n in self.layers if is_int(n, 0, layers - 1)}
        if len(numbers) != len(self.layers) or len(numbers) not in range(1, layers):
            raise ValueError(
                f"{owner}: local.layers={self.layers}: numbers of some of {layers} layers, from 0 "
                f"to {layers - 1}. Where all are alike, set attention= and rotary= in place of "
                "local=."
            )
        if not callable(self.attention):
            raise ValueError(
                f"{owner}: local.attention={self.attention!r}: a function of (q, k, v)."
            )
        if not isinstance(self.rotary, Rope | None):
            raise ValueError(f"{owner}: local.rotary={self.rotary!r}: a {ROPE}, or None.")


@dataclass(frozen=True)
class LlamaConfig(TextPresets):
    """The configuration of a Llama.

    Attributes:
        vocab: The vocabulary size.
        length: The maximum sequence length; positions are rotary, so no array depends on it.
        layers: The number of layers.
        heads: The number of query heads; twice as many divide `embed`.
        kv_heads: The number of key and value heads: each serves heads / kv_heads query heads.
        embed: The width of the residual stream.
        mlp: The width of the MLP.
        rotary: The rotary positions.
        epsilon: The epsilon of the norms.
        tied: Whether the head is the embedding, transposed.
        attention: Function of (q, k, v), and of the documents if there are any.
        head: The width of one head. None: embed / heads.
        qkv_bias: Whether queries, keys and values have biases.
        qk_norm: Whether each head's query and key are normalised (RMS) before the rotation.
        norms_after: Whether outputs of attention and MLP are normalised before the addition, too.
        norm_plus_one: Whether norms multiply by 1 + their scale, which is then initialised to 0.
        activation: The activation of the MLP's gate: silu or gelu_tanh.
        embedding_scale: The factor of the embedding. None: no scaling.
        query_scale: The factor of attention scores. None: head ** -0.5.
        logit_cap: The logits' soft cap: cap * tanh(logit / cap). None: no cap.
        local: Layers of another kind. None: all are alike.
        pad_vocab_to: Pad the embedding to a multiple of so many rows; their logits are masked.

    Example:
        >>> from hfjax.models.llama import LlamaConfig
        >>> LlamaConfig(heads=16, kv_heads=4).width
        256
        >>> LlamaConfig(vocab=32003, pad_vocab_to=128).padded_vocab
        32128
    """

    vocab: int = 32000
    length: int = 4096
    layers: int = 32
    heads: int = 32
    kv_heads: int = 32
    embed: int = 4096
    mlp: int = 11008
    rotary: Rope = Rope()
    epsilon: float = 1e-5  # epsilon of the norms
    tied: bool = False  # the head is the embedding, transposed
    attention: Callable = causal_attention
    head: int | None = None  # the width of one head; None: embed / heads
    qkv_bias: bool = False
    qk_norm: bool = False
    norms_after: bool = False
    norm_plus_one: bool = False
    activation: str = "silu"
    embedding_scale: float | None = None
    query_scale: float | None = None  # None: head ** -0.5
    logit_cap: float | None = None
    local: LocalLayers | None = None  # layers of another kind
    pad_vocab_to: int = 1

    def __post_init__(self) -> None:
        owner = type(self).__name__
        sizes = ("vocab", "length", "layers", "heads", "kv_heads", "embed", "mlp", "pad_vocab_to")
        check_sizes(owner, self, *sizes)
        _check_numbers(owner, self)
        _check_choices(owner, self)
        if self.head is None and self.embed % (2 * self.heads):
            raise ValueError(
                f"{owner}: embed={self.embed} does not divide by 2 * heads={self.heads} "
                "(rotary positions turn pairs of dimensions). Choose heads that do."
            )
        if not (self.head is None or is_int(self.head, 2)) or self.width % 2:
            raise ValueError(
                f"{owner}: head={self.head!r}: an even number of dimensions (rotary positions turn "
                "pairs of them), or None: embed / heads."
            )
        if self.heads % self.kv_heads:
            raise ValueError(
                f"{owner}: heads={self.heads} does not divide by kv_heads={self.kv_heads}. "
                "Choose kv_heads that divide heads."
            )
        if self.local is not None:
            self.local.check(owner, self.layers)

    @property
    def width(self) -> int:
        """The width of one head."""
        return self.embed // self.heads if self.head is None else self.head

    @property
    def linear_maps(self) -> dict[str, tuple[int, int]]:
        """Sizes (in, out) of a layer's linear maps, alternately from and to the residual stream."""
        d, qkv = self.embed, (self.heads + 2 * self.kv_heads) * self.width
        out, gate_up, down = (self.heads * self.width, d), (d, 2 * self.mlp), (self.mlp, d)
        return {"qkv": (d, qkv), "out": out, "gate_up": gate_up, "down": down}


ROPE = "hfjax.models.rope.Rope"
OPTIONAL = ("embedding_scale", "query_scale", "logit_cap")


def _check_numbers(owner: str, config: LlamaConfig) -> None:
    """Refuse numbers that are not finite, or too small."""
    number = [name for name in OPTIONAL if getattr(config, name) is not None]
    for name, least in (("epsilon", 0), *((name, sys.float_info.min) for name in number)):
        if not is_real(number := getattr(config, name), least, sys.float_info.max):
            raise ValueError(
                f"{owner}: {name}={number!r}; a finite number is expected, "
                f"{'at least' if least == 0 else 'above'} 0."
            )


def _check_choices(owner: str, config: LlamaConfig) -> None:
    """Refuse fields whose value is none of the allowed ones."""
    if not isinstance(config.rotary, Rope):
        raise ValueError(f"{owner}: rotary={config.rotary!r}; a {ROPE} is expected.")
    if config.activation not in ACTIVATIONS:
        raise ValueError(
            f"{owner}: activation={config.activation!r}; one of {', '.join(ACTIVATIONS)}."
        )
    for name in ("tied", "qkv_bias", "qk_norm", "norms_after", "norm_plus_one"):
        if not isinstance(flag := getattr(config, name), bool):
            raise ValueError(f"{owner}: {name}={flag!r}; true or false.")
    if not isinstance(config.local, LocalLayers | None):
        raise ValueError(f"{owner}: local={config.local!r}; a LocalLayers, or None, is expected.")


_LLAMA3 = LlamaConfig(vocab=128256, length=8192, kv_heads=8, mlp=14336, rotary=Rope(500000.0))
PRESETS: Mapping[str, LlamaConfig] = {
    "tiny": LlamaConfig(vocab=256, length=64, layers=4, heads=8, kv_heads=4, embed=128, mlp=352),
    "llama2-7b": LlamaConfig(),
    "llama3-8b": _LLAMA3,
    "llama3-70b": replace(_LLAMA3, layers=80, heads=64, embed=8192, mlp=28672),
    "llama3-405b": replace(_LLAMA3, layers=126, heads=128, embed=16384, mlp=53248),
}

LlamaConfig.known = PRESETS


class LayerKind(nnx.Variable):
    """Whether a layer is one of `LlamaConfig.local`. It is data that no step changes."""


def make_norm(config: LlamaConfig, size: int | None = None) -> RMSNorm:
    """Return a norm of the residual stream, or of heads of width `size`."""
    axis = "embed" if size is None else None
    return RMSNorm(size or config.embed, config.epsilon, axis, plus_one=config.norm_plus_one)


class Attention(nnx.Module):
    """Causal self-attention with rotary positions, kv heads first.

    Each kv head has its queries, then its key, then its value: [D, kv heads, queries + 2, d]. So
    the dimension that a tensor axis shards is never sliced.
    """

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs) -> None:
        groups, width, bias = config.kv_heads, config.width, config.qkv_bias
        parts = {"q": config.heads // groups, "k": 1, "v": 1}
        shape, axes = (config.embed, groups, sum(parts.values()), width), ("embed", "heads", "qkv")
        self.qkv = Linear(shape, (*axes, None), 3, 0.02, bias=bias, parts=parts, rngs=rngs)
        shape, scale = (config.heads, width, config.embed), residual_scale(config.layers)
        self.out = Linear(shape, ("heads", None, "embed"), 1, scale, bias=False, rngs=rngs)
        self.q_norm = make_norm(config, width) if config.qk_norm else None
        self.k_norm = make_norm(config, width) if config.qk_norm else None
        self.attend, self.rotary, self.local = config.attention, config.rotary, config.local
        kind = LayerKind(jnp.zeros((), bool), layer_kind=True)
        self.is_local = None if config.local is None else kind
        scale = config.query_scale
        self.query_factor = (
            None if scale is None else scale * width**0.5
        )  # kernels divide by sqrt(width)
        self.place, self.kernels = no_constraint, local_ops

    def __call__(self, x_BSD: jax.Array, documents_BS: jax.Array | None = None) -> jax.Array:
        qkv = self.place(self.qkv(x_BSD), ("batch", None, "heads", None, None))
        qkv = checkpoint_name(qkv, "qkv")
        qk, v = self._rotate_qk(qkv[:, :, :, :-1]), qkv[:, :, :, -1]
        q, k = qk[:, :, :, :-1], qk[:, :, :, -1]
        q = q.reshape(*q.shape[:2], -1, q.shape[-1])
        documents = () if documents_BS is None else (documents_BS,)
        attended = checkpoint_name(self._attend(q, k, v, *documents), "attended")
        return self.out(self.place(attended, ("batch", None, "heads", None)))

    def _rotate_qk(self, qk: jax.Array) -> jax.Array:
        """Return queries and keys, normalised if configured, and rotated by their positions."""
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(qk[:, :, :, :-1]), self.k_norm(qk[:, :, :, -1:])
            qk = jnp.concatenate([q, k], axis=3)
        factors = None
        if self.query_factor not in (
            None,
            1,
        ):  # for queries only; in float32, before rounding
            factors = [self.query_factor] * (qk.shape[3] - 1) + [1.0]
        return rotate(qk, self._rotary, factors=factors)

    @property
    def _rotary(self) -> Rope | EitherRope:
        if self.is_local is None or self.local is None or self.local.rotary is None:
            return self.rotary
        return EitherRope(self.is_local[...], self.local.rotary, self.rotary)

    def _attend(self, *operands: jax.Array) -> jax.Array:
        """Return the output of this layer's kind of attention."""
        attend = self.kernels.attention(self.attend)
        if self.is_local is None or self.local is None or self.local.attention is self.attend:
            return attend(*operands)
        attend_local = self.kernels.attention(self.local.attention)
        return jax.lax.cond(self.is_local[...], attend_local, attend, *operands)


class MLP(nnx.Module):
    """SwiGLU (Shazeer, 2020). Gate and up share one kernel, mlp first: [D, mlp, 2]."""

    def __init__(
        self, embed: int, mlp: int, scale: float, activation: str = "silu", *, rngs: nnx.Rngs
    ) -> None:
        shape, axes, parts = (embed, mlp, 2), ("embed", "mlp", "gate_up"), {"gate": 1, "up": 1}
        self.gate_up = Linear(shape, axes, 2, 0.02, bias=False, parts=parts, rngs=rngs)
        self.down = Linear((mlp, embed), ("mlp", "embed"), 1, scale, bias=False, rngs=rngs)
        self.activation = activation
        self.place = no_constraint

    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        gate_up = self.place(self.gate_up(x_BSD), ("batch", None, "mlp", None))
        gate_up = checkpoint_name(gate_up, "mlp_up")
        return self.down(ACTIVATIONS[self.activation](gate_up[..., 0]) * gate_up[..., 1])


class Block(nnx.Module):
    """One pre-norm layer: attention and MLP, each added to the residual stream."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs) -> None:
        self.norm1, self.norm2 = make_norm(config), make_norm(config)
        self.norm1_after = make_norm(config) if config.norms_after else None
        self.norm2_after = make_norm(config) if config.norms_after else None
        self.attention = Attention(config, rngs=rngs)
        scale = residual_scale(config.layers)
        self.mlp = MLP(config.embed, config.mlp, scale, config.activation, rngs=rngs)
        self.place = no_constraint

    def __call__(self, stream: Stream) -> Any:
        x_BSD, documents = unpack_stream(stream)
        attention = partial(self.attention, documents_BS=documents)
        x = add_residual(self.place, x_BSD, attention, self.norm1, self.norm1_after)
        x = add_residual(self.place, x, self.mlp, self.norm2, self.norm2_after)
        return pack_stream(x, documents)


class Llama(nnx.Module):
    """Llama 2 and 3, and similar models; `layers` is one module of stacked arrays.

    Checkpoint names in each layer, for remat and offload: qkv, attended, mlp_up.
    """

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.tokens = embedding(config, rngs)
        self.layers = stack_layers(config.layers, lambda rngs: Block(config, rngs=rngs), rngs)
        mark_local(config, self.layers)
        self.norm = make_norm(config)
        self.unembed = unembedding(config, rngs)
        self.place, self.kernels = no_constraint, local_ops

    def embed(self, batch: Mapping[str, jax.Array]) -> Any:
        """Return the residual stream of `batch["tokens"]` [B, S + 1]; the last is only a target.

        With `batch["documents"]` [B, S + 1] tokens attend within their document. (Rotary positions
        need not start at 0: attention depends on distances only.)
        """
        inputs = next_tokens(batch)
        return pack_stream(residual_stream(self, inputs["tokens"]), inputs.get("documents"))

    @staticmethod
    def prepare(batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Return a batch of full sequences in the form that `embed` and the loss read."""
        return next_tokens(batch)

    def head(self, stream: Any) -> Any:
        """Return the logits [B, S, V], or a step's `Projection` in place of them."""
        return compute_logits(self, unpack_stream(stream)[0])

    def __call__(self, batch: Mapping[str, jax.Array]) -> jax.Array:
        return self.head(run_stacked(self.layers, self.embed(batch)))


def mark_local(config: LlamaConfig, layers: Any) -> None:
    """Mark in stacked layers which of them belong to `config.local`."""
    if config.local is not None:
        numbers = jnp.array(config.local.layers)
        layers.attention.is_local[...] = jnp.zeros(config.layers, bool).at[numbers].set(True)


def embedding(config: LlamaConfig, rngs: nnx.Rngs) -> nnx.Param:
    """Return the token embedding."""
    kernel = 0.02 * jax.random.normal(rngs.params(), (config.padded_vocab, config.embed))
    return nnx.Param(kernel, axes=("vocab", "embed"))


def unembedding(config: LlamaConfig, rngs: nnx.Rngs) -> Linear | None:
    """Return the head, or None if it is tied to the embedding."""
    shape, axes = (config.embed, config.padded_vocab), ("embed", "vocab")
    return None if config.tied else Linear(shape, axes, 1, 0.02, bias=False, rngs=rngs)


def residual_stream(model: Any, tokens_BS: jax.Array) -> jax.Array:
    """Return the input of the layers, for a model with Llama's embedding."""
    length, scale = tokens_BS.shape[1], model.config.embedding_scale
    if length > model.config.length:
        raise ValueError(
            f"{length} tokens a row, the model is made for {model.config.length}: "
            f"shorten the rows, or raise {type(model.config).__name__}.length."
        )
    x = model.kernels.lookup(model.tokens[...], tokens_BS)
    if scale is not None:
        x = x * jnp.asarray(scale, x.dtype)  # rounded first, as Gemma was trained
    return model.place(model.place(x, FULL_SEQUENCE), STREAM)


def compute_logits(model: Any, x_BSD: jax.Array) -> Any:
    """Return the logits [B, S, V], or a step's `Projection`, for a model with Llama's head."""
    x = model.place(model.norm(x_BSD), FULL_SEQUENCE, STREAM)
    kernel_VD = model.tokens[...] if model.unembed is None else model.unembed.kernel[...].T
    x, vocab, cap = x.astype(kernel_VD.dtype), model.config.vocab, model.config.logit_cap
    capped_logits = (
        None if cap is None else partial(product_of, model.place, x, kernel_VD, vocab, cap)
    )
    return model.kernels.outputs(x, kernel_VD, vocab, capped_logits)
