"""The rival: DeepLabV3 trained on several devices by hand, with `jax.shard_map` and no toolkit.

Parameters and running statistics are dictionaries by hfjax's paths, so that both begin alike. Each
device computes the loss of its rows; gradients are summed once, and BatchNorm has the mean and the
mean of squares of all devices. Nothing is dropped.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from hfjax.models.vision.deeplab import DeepLabConfig

Arrays = Mapping[str, jax.Array]
Convolution = Callable[..., jax.Array]  # (x, kernel, stride, padding, dilation)


def lax_convolution(
    x: jax.Array, kernel: jax.Array, stride: int, padding: int, dilation: int
) -> jax.Array:
    """Return the convolution as one calls JAX's."""
    around = ((padding, padding),) * 2
    return lax.conv_general_dilated(
        x,
        kernel,
        (stride, stride),
        around,
        rhs_dilation=(dilation, dilation),
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )


class Forward:
    """One forward pass in training; `new` are the running statistics after it."""

    def __init__(self, config: DeepLabConfig, arrays: Arrays, convolution: Convolution):
        self.config, self.arrays, self.convolution = config, arrays, convolution
        self.new: dict[str, jax.Array] = {}

    def outputs(self, image: jax.Array) -> dict[str, jax.Array]:
        """Return the logits of both classifiers, of each pixel of images of bytes."""
        config = self.config
        mean, std = (jnp.array(given) for given in (config.mean, config.std))
        x = (image.astype(jnp.float32) / 255 - mean) / std
        x = jax.nn.relu(self.norm("stem/norm", self.conv("stem/conv", x, stride=2)))
        around = ((0, 0), (1, 1), (1, 1), (0, 0))
        x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), around)
        before, last = x, len(config.depths) - 1
        for n, shape in enumerate(config.blocks):
            before = x if shape.stage < last or shape.number == 0 else before
            x = self.block(f"layers/{n}", x, shape.stride, shape.dilation)
        size = (*image.shape[:3], config.classes)
        out = self.classifier("classifier", self.pyramid(x))
        aux = self.classifier("auxiliary", before)
        # What is enlarged is bilinear, and aligned as torch's is with align_corners=False.
        large = partial(jax.image.resize, shape=size, method="linear", antialias=False)
        return {"out": large(out), "aux": large(aux)}

    def block(self, path: str, x: jax.Array, stride: int, dilation: int) -> jax.Array:
        """Return what leaves a bottleneck."""
        y = jax.nn.relu(self.norm(f"{path}/norm1", self.conv(f"{path}/conv1", x)))
        y = self.conv(f"{path}/conv2", y, stride, dilation)
        y = jax.nn.relu(self.norm(f"{path}/norm2", y))
        y = self.norm(f"{path}/norm3", self.conv(f"{path}/conv3", y))
        if f"{path}/skip/conv/kernel" in self.arrays:
            x = self.norm(f"{path}/skip/norm", self.conv(f"{path}/skip/conv", x, stride))
        return jax.nn.relu(y + x)

    def pyramid(self, x: jax.Array) -> jax.Array:
        """Return what is around each position, in five ways, projected."""
        both = lambda path, x, dilation=1: jax.nn.relu(
            self.norm(f"{path}/norm", self.conv(f"{path}/conv", x, dilation=dilation))
        )
        whole = both("pyramid/image", x.mean((1, 2), keepdims=True))
        rates = enumerate(self.config.rates)
        around = [both(f"pyramid/around/{n}", x, rate) for n, rate in rates]
        here = both("pyramid/here", x)
        whole = jnp.broadcast_to(whole, here.shape)
        return both("pyramid/project", jnp.concatenate([here, *around, whole], axis=3))

    def classifier(self, path: str, x: jax.Array) -> jax.Array:
        """Return the logits of each position."""
        x = self.norm(f"{path}/inner/norm", self.conv(f"{path}/inner/conv", x))
        return self.conv(f"{path}/outer", jax.nn.relu(x)) + self.arrays[f"{path}/outer/bias"]

    def conv(self, path: str, x: jax.Array, stride: int = 1, dilation: int = 1) -> jax.Array:
        """Return a convolution that keeps the size if the stride is 1."""
        kernel = self.arrays[f"{path}/kernel"]
        padding = dilation * (kernel.shape[0] - 1) // 2
        return self.convolution(x, kernel, stride, padding, dilation)

    def norm(self, path: str, x: jax.Array) -> jax.Array:
        """Return x by the statistics of the rows of all devices."""
        means = jnp.stack([x.mean((0, 1, 2)), (x * x).mean((0, 1, 2))])
        mean, square = lax.pmean(means, "data")
        variance = square - mean * mean
        count = x.size // x.shape[3] * lax.axis_size("data")
        for name, found in (("mean", mean), ("var", variance * (count / (count - 1)))):
            kept = 0.9 * self.arrays[f"{path}/{name}"] + 0.1 * found
            self.new[f"{path}/{name}"] = lax.stop_gradient(kept)
        factor = lax.rsqrt(variance + 1e-5) * self.arrays[f"{path}/scale"]
        return (x - mean) * factor + self.arrays[f"{path}/bias"]


def loss_of(outputs: Mapping[str, jax.Array], labels: jax.Array) -> jax.Array:
    """Return the mean cross entropy of the pixels here; no pixel is left out."""
    each = optax.softmax_cross_entropy_with_integer_labels
    return each(outputs["out"], labels).mean() + 0.5 * each(outputs["aux"], labels).mean()


def train_step(
    config: DeepLabConfig,
    mesh: Mesh,
    optimizer: optax.GradientTransformation,
    convolution: Convolution = lax_convolution,
) -> Any:
    """Return the step: (parameters, statistics, moments, batch) to the first three, and the loss.

    Args:
        config: The shape, as hfjax has it.
        mesh: Its axis is data.
        optimizer: Of the parameters.
        convolution: What computes one.
    """

    def gradients(params: Arrays, kept: Arrays, batch: Arrays) -> Any:
        own = jax.tree.map(lambda p: lax.pcast(p, "data", to="varying"), params)

        def loss(params: Arrays) -> Any:
            forward = Forward(config, {**params, **kept}, convolution)
            found = loss_of(forward.outputs(batch["image"]), batch["label"])
            return found / lax.axis_size("data"), forward.new

        (part, new), grads = jax.value_and_grad(loss, has_aux=True)(own)
        return lax.psum(part, "data"), new, lax.psum(grads, "data")

    spread = jax.shard_map(gradients, mesh=mesh, in_specs=(P(), P(), P("data")), out_specs=P())

    @partial(jax.jit, donate_argnums=(0, 1, 2), out_shardings=NamedSharding(mesh, P()))
    def step(params: Arrays, kept: Arrays, moments: Any, batch: Arrays) -> Any:
        loss, new, grads = spread(params, kept, batch)
        updates, moments = optimizer.update(grads, moments, params)
        return optax.apply_updates(params, updates), new, moments, loss

    return step
