"""Basic layers of a transformer: linear, norms, dropout. Every parameter has named axes."""

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from hfjax.utils.head import head_logits, project
from hfjax.utils.mean_variance import mean_and_variance

Axes = tuple[str | None, ...]
Initializer = Callable[[jax.Array, tuple[int, ...]], jax.Array]  # (key, shape) -> array
Stream = jax.Array | tuple[jax.Array, jax.Array]  # the residual stream[, documents]

STREAM = ("batch", "seq", None)  # residual stream, norms and dropout: the sequence may be sharded
FULL_SEQUENCE = ("batch", None, None)  # the input of a linear map


def pack_stream(x_BSD: jax.Array, documents_BS: jax.Array | None) -> Any:
    """Return the value passed between layers: the residual stream, with documents if any."""
    return x_BSD if documents_BS is None else (x_BSD, documents_BS)


def unpack_stream(stream: Stream) -> tuple[jax.Array, jax.Array | None]:
    """Return the residual stream, and each token's document number or None."""
    return stream if isinstance(stream, tuple) else (stream, None)


def position_in_document(documents_BS: jax.Array) -> jax.Array:
    """Return each token's position in its document.

    >>> position_in_document(jnp.array([[1, 1, 1, 2, 2, 0]])).tolist()
    [[0, 1, 2, 0, 1, 0]]
    """
    positions = jnp.broadcast_to(jnp.arange(documents_BS.shape[1])[None], documents_BS.shape)
    starts = jnp.pad(documents_BS[:, 1:] != documents_BS[:, :-1], ((0, 0), (1, 0)))
    return positions - jax.lax.cummax(jnp.where(starts, positions, 0), axis=1)


class NoConstraint:
    """The default `place` of a module without a mesh: returns activations unchanged.

    In a module that sets `self.place = no_constraint`, a layout replaces it with its own function.

    Example:
        >>> import jax.numpy as jnp
        >>> from hfjax.models.layers import no_constraint
        >>> x = jnp.ones((2, 8, 16))
        >>> no_constraint(x, ("batch", "seq", None)) is x
        True
    """

    places_activations = True  # a layout replaces this object with its own function

    def __call__(self, x: jax.Array, names: Axes, gradient: Axes | None = None) -> jax.Array:
        """Return x unchanged; in a layout, x placed by the strategy's rules for `activations`.

        Args:
            x: An activation.
            names: The logical axis of each dimension, None where it is never sharded.
            gradient: The names by which its gradient is placed. None: those of `x`.
        """
        return x

    def axes(self, name: str | None) -> tuple[str, ...]:
        """Return (); in a layout, the tensor mesh axes that shard a logical axis of activations.

        Args:
            name: A logical axis, for instance "seq".
        """
        return ()


no_constraint = NoConstraint()


class LocalOps:
    """The default `kernels` of a module outside a training step: everything is plain JAX.

    In a module that sets `self.kernels = local_ops`, a step replaces it with its own object.

    Example:
        >>> import jax
        >>> from hfjax.models.layers import local_ops
        >>> local_ops.attention(jax.nn.dot_product_attention) is jax.nn.dot_product_attention
        True
    """

    chooses_kernels = True  # a step replaces this object with its own

    def attention(self, attend: Callable) -> Callable:
        """Return the attention to run: `attend`, or a kernel if that is hfjax's causal attention.

        Args:
            attend: Function of (q, k, v), and of the documents if there are any.
        """
        return attend

    def run_length(self, length: int) -> int:
        """Return the number of consecutive positions on this device, within which groups must lie.

        Args:
            length: The number of positions on this device.

        Example:
            >>> from hfjax.models.layers import local_ops
            >>> local_ops.run_length(8)  # fewer where devices share rows
            8
        """
        return length

    def sum_over_batch(self, x: jax.Array) -> jax.Array:
        """Return sums over local examples, all-reduced over the devices that have others.

        Args:
            x: An array.
        """
        return x

    def channel_stats(self, x: jax.Array, axes: Any = None) -> tuple[jax.Array, jax.Array, int]:
        """Return mean and variance of each channel over examples and positions, and the count.

        In a step they cover the examples of all devices, in one all-reduce. Their dtype is at least
        float32.

        Args:
            x: An array whose last dimension is channels.
            axes: The mesh axes to reduce over, in a model that sees only each device's examples.

        Example:
            >>> import jax.numpy as jnp
            >>> from hfjax.models.layers import local_ops
            >>> mean, variance, count = local_ops.channel_stats(jnp.array([[1000.0], [1002.0]]))
            >>> mean.tolist(), variance.tolist(), count
            ([1001.0], [1.0], 2)
        """
        return *mean_and_variance(x), x.size // x.shape[-1]

    def experts(self, mixture: Any, x_GTD: jax.Array, routing: Any) -> jax.Array:
        """Return the experts' outputs for tokens; a step may shard the experts over devices.

        Args:
            mixture: The experts, a `hfjax.models.moe.experts.Mixture`.
            x_GTD: Tokens, in groups.
            routing: The slots or experts of each token.
        """
        return mixture.run_all(x_GTD, routing)

    def add_router_metrics(self, outputs: Any, add_metrics: Callable, require_metrics: bool) -> Any:
        """Return the input of the loss: the outputs, with router metrics if the loss uses them.

        Args:
            outputs: The outputs of the model.
            add_metrics: Function of the outputs that adds the router metrics.
            require_metrics: Whether training without them would omit an auxiliary loss or a bias
                update.
        """
        return outputs

    def matmul(self, place: Callable, between: Axes, multiply: Callable) -> Callable:
        """Return the matmul to run in a linear map: `multiply`, or one over a ring of devices.

        Args:
            place: The module's own `place`.
            between: The logical axes of the kernel's inputs and outputs.
            multiply: Function of (x, kernel), in plain JAX.
        """
        return multiply

    def outputs(
        self, x_BSD: jax.Array, kernel_VD: jax.Array, vocab: int, logits: Callable | None = None
    ) -> Any:
        """Return the input of the loss: logits x @ kernel.T, or a `Projection` in place of them.

        Args:
            x_BSD: The input of the head.
            kernel_VD: The head's matrix.
            vocab: The number of real rows: the rest is padding, whose logits are masked.
            logits: () -> the model's own logits, if they are more than x @ kernel.T (a cap, a
                bias). A grid, and a kernel that computes losses without logits, do not support
                this: scale x before, and put caps and biases into a loss that takes logits.
        """
        return logits() if logits else head_logits(no_constraint, x_BSD, kernel_VD, vocab)

    def lookup(self, table_VD: jax.Array, tokens_BS: jax.Array) -> jax.Array:
        """Return the embedding of each token from a table, placed as the residual stream.

        Args:
            table_VD: The table [vocab, embed], a parameter whose dimensions have these names: a
                grid refuses any other.
            tokens_BS: Tokens of full sequences.

        Example:
            >>> import jax.numpy as jnp
            >>> from hfjax.models.layers import local_ops
            >>> local_ops.lookup(jnp.eye(3), jnp.array([[2, 0]])).tolist()
            [[[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]]
        """
        return table_VD[tokens_BS]


local_ops = LocalOps()


class NoNumber(int):
    """The default `number` of a module that a layout numbers: 0 without a layout."""

    takes_number = True  # a layout replaces it with the module's number among its kind


no_number = NoNumber(0)


class Linear(nnx.Module):
    """x @ kernel (+ bias) over the last `len(shape) - outputs` dimensions of x.

    The kernel is initialised from a normal distribution times `scale`, or by `scale` if it is a
    function of (key, shape); the bias is zeros, or initialised by such a function. `parts` names
    maps that share the kernel, in order, with their sizes along the second dimension of the
    outputs: `hfjax.adapters` gives each an adapter, `lora`.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        axes: Axes,
        outputs: int,
        scale: float | Initializer,
        *,
        bias: bool | Initializer = True,
        parts: Mapping[str, int] = MappingProxyType({}),
        rngs: nnx.Rngs,
    ) -> None:
        self.inputs, self.parts = len(shape) - outputs, tuple(parts.items())
        key = rngs.params()
        kernel = scale(key, shape) if callable(scale) else scale * jax.random.normal(key, shape)
        self.kernel = nnx.Param(kernel, axes=axes)
        bias_shape = shape[self.inputs :]
        init_bias = lambda: (
            bias(rngs.params(), bias_shape) if callable(bias) else jnp.zeros(bias_shape)
        )
        self.bias = nnx.Param(init_bias(), axes=axes[self.inputs :]) if bias else None
        self.between = (axes[0], axes[self.inputs])  # embed, and what may be sharded: heads, mlp
        self.lora: Any = None  # x -> the change of the outputs
        self.place, self.kernels = no_constraint, local_ops

    def __call__(self, x: jax.Array) -> jax.Array:
        kernel, dtype, x_in = jnp.asarray(self.kernel[...]), x.dtype, x
        x = x.astype(kernel.dtype)  # precision by path: the output has the input's dtype
        batch_shape, inputs = x.shape[: -self.inputs], math.prod(kernel.shape[: self.inputs])
        multiply = partial(project, lambda x: x)
        if len(batch_shape) == 2:  # the dimensions of [B, S, …] have names
            multiply = self.kernels.matmul(self.place, self.between, self._multiply)
        y: Any = multiply(x.reshape(*batch_shape, inputs), kernel.reshape(inputs, -1))
        y = y.reshape(*y.shape[:-1], *kernel.shape[self.inputs :])
        if self.bias is not None:
            y = y + jnp.expand_dims(jnp.asarray(self.bias[...]), range(len(batch_shape)))
        if self.lora is not None:
            change = self.lora(x_in)
            if self.between[1] == "embed" and len(batch_shape) == 2:
                y = self.place(y, STREAM)  # as the change: partial sums are reduce-scattered first
            y = y.astype(jnp.promote_types(y.dtype, change.dtype)) + change
        return y.astype(dtype)

    def _multiply(self, x_BSI: jax.Array, kernel_IO: jax.Array) -> jax.Array:
        """Return x @ kernel; a sharded sequence is all-gathered where it enters a layer."""
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
    """RMS normalisation over the last dimension, scaled, computed in float32 or wider.

    With `plus_one` the scale is 1 + the parameter.
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
    """A random key that a training step turns into one key per example of the global batch."""


class Dropout(nnx.Module):
    """Dropout whose mask depends on an element's index in the global batch, never on the device.

    So masks are bit-identical on every mesh. It does nothing in evaluations.

    Args:
        rate: The fraction to drop, from 0 to 1; the rest is divided by 1 - rate.
        rngs: The random number generators; the key comes from the stream `dropout`.

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
        """Return x with elements dropped, or unchanged in an evaluation.

        Args:
            x: An array whose first dimension is the batch; the second may be the sequence.
        """
        if self.deterministic or self.rate == 0:
            return x
        if self.key is None:
            return jnp.zeros_like(x)
        keys = self.key[...]
        if keys.ndim == 0:  # outside a training step: x is the whole batch
            keys = jax.vmap(jax.random.fold_in, (None, 0))(keys, jnp.arange(x.shape[0]))
        if len(keys) != len(x):
            raise ValueError(
                f"Dropout of {x.shape} with keys for {len(keys)} rows: these are not the rows of "
                "the batch, with which an array to drop from begins."
            )
        mask = jax.vmap(self._draw_mask(x))(keys)
        return jnp.where(mask, x / (1 - self.rate), jnp.zeros((), x.dtype))

    def _draw_mask(self, x: jax.Array) -> Callable[[jax.Array], jax.Array]:
        """Return (key of an example) -> mask of its kept elements."""
        return lambda key: jax.random.bernoulli(key, 1 - self.rate, x.shape[1:])


MAX_LAYERS = 100_000  # each has its own random stream, which are counted before they are created


def add_residual(
    place: Callable, x: jax.Array, sublayer: Callable, norm: Callable, post: Any
) -> jax.Array:
    """Return x + sublayer(norm(x)); norms see x sharded as the residual stream."""
    y = place(sublayer(norm(place(x, STREAM))), STREAM)
    return x + (y if post is None else post(y))


def stack_layers(
    count: int, create: Callable[[nnx.Rngs], nnx.Module], rngs: nnx.Rngs
) -> nnx.Module:
    """Return one module whose arrays stack `count` layers along a new first dimension.

    For the equal layers of a layer-stack model: they compile once, and can be sharded over pipe.

    Args:
        count: The number of layers.
        create: Function of `nnx.Rngs` that returns one layer.
        rngs: The random number generators, split per layer.

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
    """Return x after all layers of a `stack_layers` module, applied in order.

    Updates of a layer's variables (running statistics, say) are kept.
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
    """Return x after all layers of a list, applied in order."""
    for layer in layers:
        x = layer(x)
    return x


def residual_scale(layers: int) -> float:
    """Return the init scale of kernels that write to the residual stream, twice a layer (GPT-2)."""
    return 0.02 / math.sqrt(2 * layers)
