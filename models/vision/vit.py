"""Vision transformers as layer-stack models: patches, equal layers, and the class token's head.

[B]atch, [S]equence of a class token and patches, [D] embed, [H]eads. The logical axes of a layer
are those of GPT, so that the same strategies shard both.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from hfjax.models.layers import (
    FULL_SEQUENCE,
    STREAM,
    Dropout,
    Initializer,
    LayerNorm,
    Linear,
    add_residual,
    local_ops,
    no_constraint,
    run_stacked,
    stack_layers,
)
from hfjax.models.vision.convolutions import fan_in_uniform
from hfjax.models.vision.image_input import normalize_images
from hfjax.models.vision.vision_config import IMAGE_REFUSALS, VisionConfig
from hfjax.utils.keywords import check_sizes, is_real

__all__ = ["PRESETS", "ViT", "ViTConfig", "full_attention"]

EPSILON = 1e-6  # epsilon of the norms


def full_attention(q_BSHD: jax.Array, k_BSHD: jax.Array, v_BSHD: jax.Array) -> jax.Array:
    """Return attention of every position to all positions, scores in float32 or wider.

    >>> ones = jnp.ones((1, 3, 2, 4))
    >>> bool((full_attention(ones, ones, 2 * ones) == 2).all())
    True
    """
    wide = jnp.promote_types(q_BSHD.dtype, jnp.float32)
    scale = jnp.asarray(q_BSHD.shape[-1] ** -0.5, q_BSHD.dtype)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q_BSHD * scale, k_BSHD, preferred_element_type=wide)
    weights = jax.nn.softmax(scores, axis=-1).astype(v_BSHD.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v_BSHD)


@dataclass(frozen=True)
class ViTConfig(VisionConfig):
    """The configuration of a vision transformer.

    Attributes:
        classes: The number of classes.
        mean: The mean to subtract from uint8 images after division by 255.
        std: The standard deviation to divide them by then.
        image: The side of an image in pixels.
        patch: The side of a patch in pixels; it divides `image`.
        layers: The number of layers.
        heads: The number of heads; they divide `embed`.
        embed: The width of the residual stream.
        mlp: The width of the MLP.
        dropout: The dropout rate, after the embedding, in the MLP and before residual additions.
        attention: Function of (q, k, v).

    Example:
        >>> from hfjax.models.vision.vit import ViTConfig
        >>> ViTConfig.preset("vit-b-16", image=384).positions
        577
    """

    image: int = 224
    patch: int = 16
    layers: int = 12
    heads: int = 12
    embed: int = 768
    mlp: int = 3072
    dropout: float = 0.0
    attention: Callable = full_attention

    def __post_init__(self) -> None:
        super().__post_init__()
        owner = type(self).__name__
        check_sizes(owner, self, "image", "patch", "layers", "heads", "embed", "mlp")
        if not is_real(self.dropout, 0, 1):
            raise ValueError(
                f"{owner}: dropout={self.dropout!r}; the part that is dropped is from 0 to 1."
            )
        if self.image % self.patch:
            raise ValueError(
                f"{owner}: image={self.image} does not divide by patch={self.patch}. Choose a "
                "patch that divides the image, or images of another size."
            )
        if self.embed % self.heads:
            raise ValueError(
                f"{owner}: embed={self.embed} does not divide by heads={self.heads}. "
                "Choose heads that divide embed."
            )

    @property
    def positions(self) -> int:
        """The number of patches plus one for the class token."""
        return (self.image // self.patch) ** 2 + 1

    @property
    def linear_maps(self) -> dict[str, tuple[int, int]]:
        """Sizes (in, out) of a layer's linear maps, alternately from and to the residual stream."""
        d, m = self.embed, self.mlp
        return {"qkv": (d, 3 * d), "out": (d, d), "up": (d, m), "down": (m, d)}


_VIT = ViTConfig()
PRESETS: Mapping[str, ViTConfig] = {
    "vit-tiny": ViTConfig(classes=10, image=8, patch=2, layers=2, heads=2, embed=32, mlp=64),
    "vit-b-16": _VIT,
    "vit-l-16": replace(_VIT, layers=24, heads=16, embed=1024, mlp=4096),
}

ViTConfig.known = PRESETS


def xavier_uniform(inputs: int, outputs: int) -> Initializer:
    """Return Xavier's uniform initializer of a matrix, with variance 2 / (inputs + outputs)."""
    bound = math.sqrt(6 / (inputs + outputs))
    return lambda key, shape: jax.random.uniform(key, shape, minval=-bound, maxval=bound)


def tiny_normal(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Return normal numbers times 1e-6: the initializer of MLP biases."""
    return 1e-6 * jax.random.normal(key, shape)


class Attention(nnx.Module):
    """Self-attention. Query, key and value share one kernel, heads first: [D, H, 3, d]."""

    def __init__(self, config: ViTConfig, *, rngs: nnx.Rngs) -> None:
        width, embed = config.embed // config.heads, config.embed
        heads, axes = (config.heads, 3, width), ("embed", "heads", "qkv", None)
        init = xavier_uniform(embed, 3 * embed)
        self.qkv = Linear((embed, *heads), axes, 3, init, rngs=rngs)
        shape = (config.heads, width, embed)
        self.out = Linear(shape, ("heads", None, "embed"), 1, fan_in_uniform(embed), rngs=rngs)
        self.attend = config.attention
        self.place, self.kernels = no_constraint, local_ops

    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        qkv = self.place(self.qkv(x_BSD), ("batch", None, "heads", None, None))
        qkv = checkpoint_name(qkv, "qkv")
        q, k, v = (qkv[:, :, :, i] for i in range(3))
        attended = checkpoint_name(self.kernels.attention(self.attend)(q, k, v), "attended")
        return self.out(self.place(attended, ("batch", None, "heads", None)))


class MLP(nnx.Module):
    """Two linear maps with an exact GELU, as torch's, between them."""

    def __init__(self, config: ViTConfig, *, rngs: nnx.Rngs) -> None:
        sizes = (config.embed, config.mlp)
        linear_args: Any = {"scale": xavier_uniform(*sizes), "bias": tiny_normal, "rngs": rngs}
        self.up = Linear(sizes, ("embed", "mlp"), 1, **linear_args)
        self.down = Linear(sizes[::-1], ("mlp", "embed"), 1, **linear_args)
        self.dropout = Dropout(config.dropout, rngs=rngs)
        self.place = no_constraint

    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        up = checkpoint_name(self.place(self.up(x_BSD), ("batch", None, "mlp")), "mlp_up")
        return self.down(self.dropout(jax.nn.gelu(up, approximate=False)))


class Block(nnx.Module):
    """One pre-norm layer: attention and MLP, each added to the residual stream."""

    def __init__(self, config: ViTConfig, *, rngs: nnx.Rngs) -> None:
        self.norm1 = LayerNorm(config.embed, epsilon=EPSILON)
        self.norm2 = LayerNorm(config.embed, epsilon=EPSILON)
        self.attention = Attention(config, rngs=rngs)
        self.mlp = MLP(config, rngs=rngs)
        self.dropout1 = Dropout(config.dropout, rngs=rngs)
        self.dropout2 = Dropout(config.dropout, rngs=rngs)
        self.place = no_constraint

    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        x = add_residual(self.place, x_BSD, self.attention, self.norm1, self.dropout1)
        return add_residual(self.place, x, self.mlp, self.norm2, self.dropout2)


class ViT(nnx.Module):
    """A vision transformer; `layers` is one module of stacked arrays.

    Checkpoint names in each layer, for remat and offload: qkv, attended, mlp_up.
    """

    refuses: ClassVar[Mapping[str, str]] = IMAGE_REFUSALS

    def __init__(self, config: ViTConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        embed, patch = config.embed, config.patch
        shape, axes = (patch, patch, 3, embed), ("height", "width", "channel_in", "embed")
        scale = 1 / math.sqrt(patch * patch * 3)
        self.patches = Linear(shape, axes, 1, scale, rngs=rngs)
        self.token = nnx.Param(jnp.zeros((embed,)), axes=("embed",))
        position_table = 0.02 * jax.random.normal(rngs.params(), (config.positions, embed))
        self.positions = nnx.Param(position_table, axes=("position", "embed"))
        self.dropout = Dropout(config.dropout, rngs=rngs)
        self.layers = stack_layers(config.layers, lambda rngs: Block(config, rngs=rngs), rngs)
        self.norm = LayerNorm(embed, epsilon=EPSILON)
        self.fc = Linear((embed, config.classes), ("embed", "class"), 1, 0.0, rngs=rngs)
        self.place = no_constraint

    def embed(self, batch: Mapping[str, jax.Array]) -> jax.Array:
        """Return the residual stream of `batch["image"]` [B, H, W, 3]: a token, then patches."""
        x = normalize_images(batch, self.config, self.patches.kernel[...].dtype)
        size, patch = self.config.image, self.config.patch
        if x.shape[1:3] != (size, size):
            raise ValueError(
                f"images of {x.shape[1]}x{x.shape[2]} pixels, the model is made for {size}x{size}: "
                f"resize them, or set ViTConfig.image (a multiple of patch={patch})."
            )
        grid_size = size // patch
        patches = x.reshape(x.shape[0], grid_size, patch, grid_size, patch, 3).transpose(
            0, 1, 3, 2, 4, 5
        )
        patch_embeds = self.patches(
            patches.reshape(x.shape[0], grid_size * grid_size, patch, patch, 3)
        )
        token = jnp.broadcast_to(
            self.token[...].reshape(1, 1, -1), (x.shape[0], 1, patch_embeds.shape[2])
        )
        stream = jnp.concatenate([token.astype(patch_embeds.dtype), patch_embeds], axis=1)
        stream = self.place(stream, FULL_SEQUENCE) + self.positions[...][None]
        return self.dropout(self.place(stream, STREAM))

    def head(self, x_BSD: jax.Array) -> jax.Array:
        """Return the logits [B, classes]."""
        x = self.place(self.norm(x_BSD), FULL_SEQUENCE, STREAM)
        return self.fc(x[:, 0])

    def __call__(self, batch: Mapping[str, jax.Array]) -> jax.Array:
        return self.head(run_stacked(self.layers, self.embed(batch)))
