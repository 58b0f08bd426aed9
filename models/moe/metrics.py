"""Router metrics: values that mixtures pass to the loss, beside the activations.

Pipelines forbid writing to variables, and a microbatch may be recomputed: so modules store none of
them. [B]atch, [S]equence, [L]ayers that are mixtures, [E]xperts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from hfjax.utils.mean import ENTROPY
from hfjax.utils.paths import natural_sort_key

BIAS = "router_bias"  # the variable with a layer's biases
LOAD, DROPPED = "expert_load", "dropped"  # per-layer metrics


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["loss", "load", "scores", "dropped", "entropy", "tokens", "number"],
    meta_fields=["experts"],
)
@dataclass(frozen=True)
class RouterMetrics:
    """The router metrics of the layers so far, per example.

    Attributes:
        loss: [B, S]: the auxiliary losses of each token's group, sequence and self, times their
            factors, summed over layers.
        load: [B, L, E]: the number of choices of each expert, before capacity is applied.
        scores: [B, L, E]: the sum of the tokens' scores; [B, L, 0] where no loss needs them.
        dropped: [B, L]: the number of choices without a slot.
        entropy: [B, L]: the sum of the entropy of the tokens' scores.
        tokens: [B, L]: the number of tokens used.
        number: [B, L]: the number of the layer's mixture, in the order of paths in the model.
        experts: The number of experts of these layers.
    """

    loss: jax.Array
    load: jax.Array
    scores: jax.Array
    dropped: jax.Array
    entropy: jax.Array
    tokens: jax.Array
    number: jax.Array
    experts: int

    @classmethod
    def start(
        cls, x: jax.Array, layers: int, experts: int, scores: bool = False
    ) -> "RouterMetrics":
        """Return the metrics before the first layer.

        Args:
            x: The input of that layer: [B, S, D], [B, D], or images [B, H, W, D].
            layers: The number of mixtures.
            experts: The number of experts of the largest mixture.
            scores: Whether a balance loss over the whole batch will need scores.
        """
        dtype = jnp.promote_types(x.dtype, jnp.float32)
        zeros = lambda *shape: jnp.zeros((x.shape[0], *shape), dtype)
        sums = zeros(layers, experts), zeros(layers, experts if scores else 0)
        none = zeros(layers)
        return cls(jnp.zeros(x.shape[:-1], dtype), *sums, none, none, none, none, experts)

    def append(self, other: "RouterMetrics") -> "RouterMetrics":
        """Return the metrics with those of one more layer: layers shift up, the newest comes last.

        Args:
            other: The metrics of one layer, with as many experts or fewer.
        """

        def join(old: jax.Array, new: jax.Array) -> jax.Array:
            more = [(0, 0)] * old.ndim
            more[2:] = [(0, n - m) for n, m in zip(old.shape[2:], new.shape[2:], strict=True)]
            return jnp.concatenate([old[:, 1:], jnp.pad(new, more).astype(old.dtype)], 1)

        if other.experts > self.experts or other.scores.shape[2] > self.scores.shape[2]:
            raise ValueError(
                f"a mixture of {other.experts} experts tells more than Told.start made room for "
                f"({self.experts} experts, scores={bool(self.scores.shape[2])}): give the most "
                "experts that a layer has, and scores=True where a router balances over the batch."
            )
        names = ("load", "scores", "dropped", "entropy", "tokens", "number")
        arrays = {name: join(getattr(self, name), getattr(other, name)) for name in names}
        return replace(self, loss=self.loss + other.loss, **arrays)


@partial(
    jax.tree_util.register_dataclass, data_fields=["outputs", "router_metrics"], meta_fields=[]
)
@dataclass(frozen=True)
class RoutedOutputs:
    """The outputs of a model with its router metrics, for a loss that uses them.

    Attributes:
        outputs: The outputs otherwise: logits, or a `Projection`.
        router_metrics: The metrics of its layers.
    """

    outputs: Any
    router_metrics: RouterMetrics


def after_step(
    variables: Mapping[str, jax.Array],
    metrics: Mapping[str, jax.Array],
    rate: float = 0.0,
    recentre: bool = True,
    counts: Sequence[int] | None = None,
) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """Return the biases after a step, and its metrics with summaries of the per-layer ones.

    If a model has a method of this name with two arguments, a step calls it once: with all the
    model's variables by path, and the metrics of the whole batch.

    Args:
        variables: The variables by path; biases are those named `router_bias`.
        metrics: The metrics of the step.
        rate: `Router.bias_rate`.
        recentre: `Router.recentre`.
        counts: The number of experts of each layer, in the order of paths, where they differ.
    """
    if LOAD not in metrics:
        return {}, dict(metrics)
    load, new_metrics = metrics[LOAD], dict(metrics)
    layers, num_experts = load.shape
    counts = [num_experts] * layers if counts is None else counts
    new_metrics["load_max_over_mean"] = (load.max(-1) * jnp.asarray(counts)).max()
    for name in (DROPPED, ENTROPY):
        new_metrics[f"{name}_mean"] = metrics[name].mean()
    mixture_key = lambda path: natural_sort_key(path.removesuffix(BIAS))
    paths = sorted((path for path in variables if path.rsplit("/", 1)[-1] == BIAS), key=mixture_key)
    new_biases, first = {}, 0
    for path in paths if rate else ():
        bias = variables[path]
        biases = bias.reshape(-1, bias.shape[-1])
        layer_load = load[first : first + len(biases), : bias.shape[-1]]
        first += len(biases)
        if layer_load.shape == biases.shape:
            step = rate * _bias_direction(layer_load)
            step = step - step.mean(-1, keepdims=True) if recentre else step
            new_biases[path] = (biases + step.astype(bias.dtype)).reshape(bias.shape)
    if rate and first != layers:
        raise ValueError(
            f"after_step: {first} layers have a {BIAS}, and {layers} told their load. A bias is "
            "moved by the load of its own layer: give all mixtures of a model a bias (Router("
            "bias_rate=…)), or none, call each once, and hand `told` from one to the next."
        )
    return new_biases, new_metrics


def _bias_direction(load: jax.Array) -> jax.Array:
    """Return 1 where load is below the mean, -1 above, 0 where equal up to rounding."""
    mean = load.mean(-1, keepdims=True)
    return jnp.where(jnp.abs(mean - load) > 1e-6 * mean, jnp.sign(mean - load), 0)
