"""The image input of a model: uint8 images are normalised, floating-point ones unchanged."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from hfjax.models.vision.vision_config import VisionConfig


def normalize_images(
    batch: Mapping[str, jax.Array], config: VisionConfig, dtype: DTypeLike
) -> jax.Array:
    """Return `batch["image"]` [B, H, W, 3], normalised, in a model's compute dtype.

    Args:
        batch: uint8 images are normalised here, (x / 255 - mean) / std; floating-point images must
            be normalised already.
        config: The configuration with mean and std.
        dtype: The compute dtype.

    Example:
        >>> import jax.numpy as jnp
        >>> from hfjax.models.vision.image_input import normalize_images
        >>> from hfjax.models.vision.vision_config import VisionConfig
        >>> config = VisionConfig(mean=(0.0, 0.5, 1.0), std=(1.0, 0.5, 0.5))
        >>> white = {"image": jnp.full((1, 1, 1, 3), 255, jnp.uint8)}
        >>> normalize_images(white, config, jnp.float32).tolist()
        [[[[1.0, 1.0, 0.0]]]]
    """
    if "image" not in batch:
        raise ValueError(
            f"a batch of {', '.join(batch) or 'nothing'}: a model of images reads batch['image']."
        )
    image = batch["image"]
    _check(image)
    if jnp.issubdtype(image.dtype, jnp.floating):
        return image.astype(dtype)
    wide = jnp.promote_types(dtype, jnp.float32)
    mean, std = (np.array(x, wide).reshape(1, 1, 1, 3) for x in (config.mean, config.std))
    return ((image.astype(wide) / 255 - mean) / std).astype(dtype)


def _check(image: jax.Array) -> None:
    """Refuse arrays that are no colour images, of uint8 or floating-point numbers."""
    if image.ndim != 4 or image.shape[3] != 3:
        raise ValueError(
            f"images of shape {list(image.shape)}: [rows, height, width, 3] is expected, channels "
            "last. Transpose [rows, 3, height, width]; repeat a grey channel three times."
        )
    if not (image.dtype == jnp.uint8 or jnp.issubdtype(image.dtype, jnp.floating)):
        raise ValueError(
            f"images of {image.dtype}: uint8 is expected (0 to 255, which the model normalises), "
            "or floating-point numbers, normalised already."
        )
