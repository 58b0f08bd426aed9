"""Small parts of a transformer: linear, norms, dropout. Axes are named on every parameter."""

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from hfjax.utils.head import head_logits, project
from hfjax.utils.mean_variance import mean_and_variance

Axes = tuple[str | None, ...]
Initializer = Callable[[jax.Array, tuple[int, ...]], jax.Array]  # of a key and a shape
Stream = jax.Array | tuple[jax.Array, jax.Array]  # the residual stream[, documents]

STREAM = ("batch", "seq", None)  # the residual stream, norms and dropout: the sequence may be split
FULL_SEQUENCE = ("batch", None, None)  # what enters a linear map


def pack_stream(x_BSD: jax.Array, documents_BS: jax.Array | None) -> Any:
    """Return what goes from layer to layer: the residual stream, and documents if there are any."""
    return x_BSD if documents_BS is None else (x_BSD, documents_BS)


def unpack_stream(stream: Stream) -> tuple[jax.Array, jax.Array | None]:
    """Return the residual stream, and the number of each token's document or None."""
    return stream if isinstance(stream, tuple) else (stream, None)


def position_in_document(documents_BS: jax.Array) -> jax.Array:
    """Return how far each token is from the first of its document.

    >>> position_in_document(jnp.array([[1, 1, 1, 2, 2, 0]])).tolist()
    [[0, 1, 2, 0, 1, 0]]
    """
    positions = jnp.broadcast_to(jnp.arange(documents_BS.shape[1])[None], documents_BS.shape)
    starts = jnp.pad(documents_BS[:, 1:] != documents_BS[:, :-1], ((0, 0), (1, 0)))
    return positions - jax.lax.cummax(jnp.where(starts, positions, 0), axis=1)


class NoConstraint:
    """The `place` of a module that nobody has put on a mesh: leaves an activation as it is.

    A module that sets `self.place = anywhere` is handed the layout's own function in its place.

    Example:
        >>> import jax.numpy as jnp
        >>> from hfjax.models.layers import no_constraint
        >>> x = jnp.ones((2, 8, 16))
        >>> no_constraint(x, ("batch", "seq", None)) is x
        True
    """

    places_activations = True  # a layout puts its own function in place of this one

    def __call__(self, x: jax.Array, names: Axes, gradient: Axes | None = None) -> jax.Array:
        """Return x as it is; in a layout, x where the strategy's rule of `activations` says.

        Args:
            x: An activation.
            names: The logical axis of each dimension, None where it is never split.
            gradient: The names by which its gradient is placed. None: those of `x`.
        """
        return x

    def axes(self, name: str | None) -> tuple[str, ...]:
        """Return (); in a layout, the tensor axes that split a named dimension of activations.

        Args:
            name: A logical axis, for instance "seq".
        """
        return ()


no_constraint = NoConstraint()


class LocalOps:
    """The `kernels` of a module that no step has equipped: everything is plain JAX.

    A module that sets `self.kernels = plain` is handed the step's own object in its place.

    Example:
        >>> import jax
        >>> from hfjax.models.layers import local_ops
        >>> local_ops.attention(jax.nn.dot_product_attention) is jax.nn.dot_product_attention
        True
    """

    chooses_kernels = True  # a step puts its own object in place of this one

    def attention(self, attend: Callable) -> Callable:
        """Return the attention to run: `attend`, or a kernel if it is hfjax's own causal attention.

        Args:
            attend: Function of (q, k, v), and of the documents if there are any.
        """
        return attend

    def run_length(self, length: int) -> int:
        """Return how many positions follow each other, of those here: groups of them lie here.

        Args:
            length: How many positions are here.

        Example:
            >>> from hfjax.models.layers import local_ops
            >>> local_ops.run_length(8)  # fewer where devices share rows
            8
        """
        return length

    def sum_over_batch(self, x: jax.Array) -> jax.Array:
        """Return sums of rows here, added to those of all devices that have others.

        Args:
            x: An array.
        """
        return x

    def channel_stats(self, x: jax.Array, axes: Any = None) -> tuple[jax.Array, jax.Array, int]:
        """Return mean and variance of each channel over rows and positions, and their number.

        In a step they are those of the rows of all devices, in one message. They are of at least
        float32.

        Args:
            x: An array whose last dimension are channels.
            axes: Mesh axes over whose rows a model goes that sees each device's own.

        Example:
            >>> import jax.numpy as jnp
            >>> from hfjax.models.layers import local_ops
            >>> mean, variance, count = local_ops.channel_stats(jnp.array([[1000.0], [1002.0]]))
            >>> mean.tolist(), variance.tolist(), count
            ([1001.0], [1.0], 2)
        """
        return *mean_and_variance(x), x.size // x.shape[-1]

    def experts(self, mixture: Any, x_GTD: jax.Array, routing: Any) -> jax.Array:
        """Return what the experts of a layer make of tokens; a step may spread them over devices.

        Args:
            mixture: The experts, a `hfjax.models.moe.experts.Mixture`.
            x_GTD: Tokens, in groups.
            routing: Where each goes.
        """
        return mixture.run_all(x_GTD, routing)

    def record_metrics(self, outputs: Any, add_metrics: Callable, needed: bool) -> Any:
        """Return what the loss is given: the outputs, and what routers told if it asks for that.

        Args:
            outputs: Of the model.
            add_metrics: Function of the outputs that adds what routers told.
            needed: Whether training without it would leave out a loss or a bias.
        """
        return outputs

    def matmul(self, place: Callable, between: Axes, multiply: Callable) -> Callable:
        """Return the product to run in a linear map: `multiply`, or one that goes around a ring.

        Args:
            place: The module's own `place`.
            between: The logical axes of the kernel's inputs and outputs.
            multiply: Function of (x, kernel), in plain JAX.
        """
        return multiply

    def outputs(
        self, x_BSD: jax.Array, kernel_VD: jax.Array, vocab: int, logits: Callable | None = None
    ) -> Any:
        """Return what the loss is given: logits x @ kernel.T, or a projection that stands for them.

        Args:
            x_BSD: What the head multiplies.
            kernel_VD: The head's matrix.
            vocab: Its rows that count: what follows pads it, and its logits are masked.
            logits: () -> logits of the model's own, which are more than x @ kernel.T (a cap, a
                bias). A grid, and a kernel that makes losses without logits, cannot take it: scale
                x before, and put caps and biases into a loss that is given logits.
        """
        return logits() if logits else head_logits(no_constraint, x_BSD, kernel_VD, vocab)

    def lookup(self, table_VD: jax.Array, tokens_BS: jax.Array) -> jax.Array:
        """Return the row of each token in a table, as the residual stream has them.

        Args:
            table_VD: The table [vocab, embed], a parameter whose dimensions have these names: on a
                grid another one is refused.
            tokens_BS: Tokens of whole rows.

        Example:
            >>> import jax.numpy as jnp
            >>> from hfjax.models.layers import local_ops
            >>> local_ops.lookup(jnp.eye(3), jnp.array([[2, 0]])).tolist()
            [[[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]]
        """
        return table_VD[tokens_BS]


local_ops = LocalOps()


class NoNumber(int):
    """The number of a module that a layout numbers: 0 on its own."""

    takes_number = True  # a layout puts the number of the module among its like in place of it


no_number = NoNumber(0)


class Linear(nnx.Module):
    """x @ kernel (+ bias) over the last `len(shape) - outputs` dimensions of x.

    The kernel is drawn from normal numbers times `scale`, or by it if it is a function of a key and
    a shape; the bias is zeros, or what such a function draws.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        axes: Axes,
        outputs: int,
        scale: float | Initializer,
        *,
        bias: bool | Initializer = True,
        rngs: nnx.Rngs,
    ) -> None:
        self.inputs = len(shape) - outputs
        key = rngs.params()
        kernel = scale(key, shape) if callable(scale) else scale * jax.random.normal(key, shape)
        self.kernel = nnx.Param(kernel, axes=axes)
        bias_shape = shape[self.inputs :]
        init_bias = lambda: (
            bias(rngs.params(), bias_shape) if callable(bias) else jnp.zeros(bias_shape)
        )
        self.bias = nnx.Param(init_bias(), axes=axes[self.inputs :]) if bias else None
        self.between = (axes[0], axes[self.inputs])  # embed, and what may be split: heads, mlp
        self.place, self.kernels = no_constraint, local_ops

    def __call__(self, x: jax.Array) -> jax.Array:
        kernel, dtype = jnp.asarray(self.kernel[...]), x.dtype
        x = x.astype(kernel.dtype)  # precision by path: what leaves has the dtype of what entered
        batch_shape, inputs = x.shape[: -self.inputs], math.prod(kernel.shape[: self.inputs])
        multiply = partial(project, lambda x: x)
        if len(batch_shape) == 2:  # of [B, S, …] dimensions have names
            multiply = self.kernels.matmul(self.place, self.between, self._multiply)
        y: Any = multiply(x.reshape(*batch_shape, inputs), kernel.reshape(inputs, -1))
        y = y.reshape(*y.shape[:-1], *kernel.shape[self.inputs :])
        if self.bias is not None:
            y = y + jnp.expand_dims(jnp.asarray(self.bias[...]), range(len(batch_shape)))
        return y.astype(dtype)

    def _multiply(self, x_BSI: jax.Array, kernel_IO: jax.Array) -> jax.Array:
        """Return x @ kernel; of a sequence that is split, the whole enters a layer."""
        if self.between[0] == "embed":
            x_BSI = self.place(x_BSI, FULL_SEQUENCE, STREAM)
        return project(
            partial(self.place, names=("batch", None, self.between[1])), x_BSI, kernel_IO
        )


class LayerNorm(nnx.Module):
    """Layer normalisation over the last dimension, computed in float32 or wider."""

    def __init__(self, size: int, axis: str | None = "embed", epsilon: float = 1e-5) -> None:
        self.scale = nnx.Param(jnp.ones((size,)), axes=(axis,))
        self.bias = nnx.Param(jnp.zeros((size,)), axes=(axis,))
        self.epsilon, self.axis, self.kernels = epsilon, axis, local_ops

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        centred = wide - wide.mean(-1, keepdims=True)
        unit = centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + self.epsilon)
        like = lambda p: p[...].reshape((1,) * (x.ndim - 1) + (-1,))
        return (unit * like(self.scale) + like(self.bias)).astype(x.dtype)


class RMSNorm(nnx.Module):
    """x over its root mean square, scaled; along the last dimension, in float32 or wider.

    With `plus_one` it is scaled by 1 + the parameter.
    """

    def __init__(
        self,
        size: int,
        epsilon: float = 1e-5,
        axis: str | None = "embed",
        plus_one: bool = False,
    ) -> None:
        self.epsilon, self.plus_one = epsilon, plus_one
        initializer = jnp.zeros if plus_one else jnp.ones
        self.scale = nnx.Param(initializer((size,)), axes=(axis,))
        self.axis, self.kernels = axis, local_ops

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        unit = wide * jax.lax.rsqrt((wide**2).mean(-1, keepdims=True) + self.epsilon)
        scale = self.scale[...].reshape((1,) * (x.ndim - 1) + (-1,))
        if self.plus_one:
            scale = 1 + scale.astype(wide.dtype)
        return (unit * scale).astype(x.dtype)


class ExampleKey(nnx.Variable):
    """A random key that a training step turns into one key per row of the global batch."""


class Dropout(nnx.Module):
    """Dropout whose mask depends on an element's place in the global batch, never on the device.

    So masks are equal bit by bit on every mesh. It does nothing in evaluations.

    Args:
        rate: The part that is dropped, from 0 to 1; what is left is divided by 1 - rate.
        rngs: Where its key comes from: the stream `dropout`.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from hfjax.models.layers import Dropout
        >>> dropout = Dropout(0.5, rngs=nnx.Rngs(0))
        >>> sorted(set(dropout(jnp.ones((4, 16))).ravel().tolist()))
        [0.0, 2.0]
    """

    def __init__(self, rate: float, *, rngs: nnx.Rngs) -> None:
        if isinstance(rate, bool | str) or not 0 <= rate <= 1:
            raise ValueError(f"Dropout(rate={rate!r}): the part that is dropped is from 0 to 1.")
        self.rate = rate
        self.deterministic = False
        is_random = 0 < rate < 1
        self.key = (
            ExampleKey(rngs.dropout(), per_example=True, per_position=True) if is_random else None
        )
        self.kernels = local_ops

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return x with elements dropped, or as it is in an evaluation.

        Args:
            x: An array with a row for each row of the batch; its second dimension may be the
                sequence.
        """
        if self.deterministic or self.rate == 0:
            return x
        if self.key is None:
            return jnp.zeros_like(x)
        keys = self.key[...]
        if keys.ndim == 0:  # outside a training step: the rows are those of x
            keys = jax.vmap(jax.random.fold_in, (None, 0))(keys, jnp.arange(x.shape[0]))
        if len(keys) != len(x):
            raise ValueError(
                f"Dropout of {x.shape} with keys for {len(keys)} rows: these are not the rows of "
                "the batch, with which an array to drop from begins."
            )
        mask = jax.vmap(self._draw_mask(x))(keys)
        return jnp.where(mask, x / (1 - self.rate), jnp.zeros((), x.dtype))

    def _draw_mask(self, x: jax.Array) -> Callable[[jax.Array], jax.Array]:
        """Return (key of a row) -> which of its elements are kept."""
        return lambda key: jax.random.bernoulli(key, 1 - self.rate, x.shape[1:])


MAX_LAYERS = 100_000  # each has random numbers of its own, which are counted before they are made


def add_residual(
    place: Callable, x: jax.Array, sublayer: Callable, norm: Callable, post: Any
) -> jax.Array:
    """Return x and what a part of a layer makes of it; norms see it split as the stream is."""
    y = place(sublayer(norm(place(x, STREAM))), STREAM)
    return x + (y if post is None else post(y))


def stack_layers(
    count: int, create: Callable[[nnx.Rngs], nnx.Module], rngs: nnx.Rngs
) -> nnx.Module:
    """Return one module whose arrays stack `count` layers along a new first dimension.

    So a model in three parts holds equal layers: they compile once, and can be split over pipe.

    Args:
        count: How many layers.
        create: Function of `nnx.Rngs` that returns one layer.
        rngs: Where random numbers come from; each layer has its own.

    Example:
        >>> from flax import nnx
        >>> from hfjax.models.layers import stack_layers
        >>> layers = stack_layers(4, lambda rngs: nnx.Linear(8, 16, rngs=rngs), nnx.Rngs(0))
        >>> layers.kernel.shape
        (4, 8, 16)
    """
    if not 1 <= count <= MAX_LAYERS:
        raise ValueError(f"layers={count}: from 1 to {MAX_LAYERS} layers are stacked.")
    make = nnx.vmap(create, in_axes=(0,), out_axes=0)
    return nnx.split_rngs(splits=count)(make)(rngs)


def run_stacked(layers: nnx.Module, x: Any) -> Any:
    """Return x after each of the layers of a `stack_layers` module, as they are written.

    What a layer writes to its variables (running statistics, say) is kept.
    """
    graph, arrays = nnx.split(layers)
    read = lambda state: dict(nnx.to_flat_state(state))

    def run(x: Any, layer: nnx.State) -> tuple[Any, dict]:
        before = {path: v.get_raw_value() for path, v in read(layer).items()}
        module = nnx.merge(graph, layer)
        x = module(x)
        after = {path: v.get_raw_value() for path, v in read(nnx.state(module)).items()}
        return x, {path: new for path, new in after.items() if new is not before[path]}

    x, written = jax.lax.scan(run, x, arrays)
    if written:
        variables = read(arrays)
        nnx.update(
            layers, nnx.from_flat_state({p: variables[p].replace(v) for p, v in written.items()})
        )
    return x


def run_listed(layers: Iterable[Callable], x: Any) -> Any:
    """Return x after each of the layers of a list, as they are written."""
    for layer in layers:
        x = layer(x)
    return x


def residual_scale(layers: int) -> float:
    """Return the scale of kernels that write to the residual stream, twice a layer (GPT-2)."""
    return 0.02 / math.sqrt(2 * layers)
