"""The choice of experts by tokens. [T]okens, [E]xperts, [k] choices of a token.

Everything here is per token; interactions between tokens of a group, i.e. slots of an expert's
capacity and balance losses, are in `slots.py` and `losses.py`.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from hfjax.utils.keywords import is_int, is_real

SCORES = ("softmax", "sigmoid")
NORMALISE = ("none", "chosen", "kept")
NOISE = (None, "jitter", "rsample")
PRIORITY = ("position", "choice", "probability", "random")
OVER = ("group", "row", "batch")
JITTER = 1e-2  # DeepSpeed's noisy gate multiplies inputs by 1 - JITTER to 1 + JITTER


@dataclass(frozen=True)
class Router:
    """How tokens choose experts, and how load is balanced.

    Attributes:
        scores: softmax over all experts, or sigmoid of each expert separately.
        normalise: none: weights are the scores. chosen: the weights of the chosen experts sum to 1
            (the same as softmax after the choice). kept: those of choices with a slot sum to 1.
        scale: The factor of all weights.
        groups: The number of expert groups; each token first chooses `best_groups` of them, by the
            sum of their two best scores.
        best_groups: The number of groups that a token chooses from.
        bias_rate: The update of an expert's bias per step, towards even loads; 0: no bias. The
            bias affects the choice only, is part of the state, and needs no loss (DeepSeek-V3).
        recentre: Whether to recentre biases so that their mean stays 0.
        noise: jitter: in training, the router's inputs are multiplied by 0.99 to 1.01. rsample:
            the first choice is sampled by the scores. None: no noise.
        sample_second: Whether to sample the second choice by the scores, in training.
        priority: Which choices get a slot if an expert has too few. position: the first tokens of
            the group. choice: all first choices before all second ones. probability: the highest
            scores. random: drawn.
        balance_loss: The factor of the auxiliary balance loss: the number of experts times the sum
            over them of (share of choices) times (mean score).
        balance_over: The domain of these means: group (each group of tokens), row (each sequence)
            or batch (all examples of a microbatch on all devices).
        first_choices_only: Whether that loss, over groups, counts first choices only.
        pools_layers: Whether that loss, over the batch, pools the choices of all layers
            (transformers), instead of one loss per layer.
        z_loss: The factor of the mean square of log(sum(exp(logits))).

    Example:
        >>> from hfjax.models.moe import Router
        >>> Router(scores="sigmoid", bias_rate=1e-3, balance_loss=0).groups
        1
    """

    scores: str = "softmax"
    normalise: str = "chosen"
    scale: float = 1.0
    groups: int = 1
    best_groups: int = 1
    bias_rate: float = 0.0
    recentre: bool = True
    noise: str | None = None
    sample_second: bool = False
    priority: str = "position"
    balance_loss: float = 0.01
    balance_over: str = "group"
    first_choices_only: bool = False
    z_loss: float = 0.0
    pools_layers: bool = False

    def __post_init__(self) -> None:
        choices = {
            "scores": SCORES,
            "normalise": NORMALISE,
            "noise": NOISE,
            "priority": PRIORITY,
            "balance_over": OVER,
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"Router({name}={getattr(self, name)!r}): one of "
                    f"{', '.join(map(str, allowed))}."
                )
        for name in ("bias_rate", "balance_loss", "z_loss", "scale"):
            if not is_real(setting := getattr(self, name), 0, sys.float_info.max):
                raise ValueError(f"Router({name}={setting!r}): a finite number, at least 0.")
        for name in ("recentre", "sample_second", "first_choices_only", "pools_layers"):
            if not isinstance(setting := getattr(self, name), bool):
                raise ValueError(f"Router({name}={setting!r}): true or false.")
        draws_experts = self.noise == "rsample" or self.sample_second
        if draws_experts and (self.scores != "softmax" or self.bias_rate):
            raise ValueError(
                'Router(noise="rsample") and sample_second=True draw experts by a softmax of the '
                f"logits; scores={self.scores!r} and bias_rate={self.bias_rate} would have no part "
                'in it. Take scores="softmax" and bias_rate=0, or draw nothing.'
            )
        self._check_over()
        if not (is_int(self.groups, 1) and is_int(self.best_groups, 1, self.groups)):
            raise ValueError(
                f"Router(groups={self.groups!r}, best_groups={self.best_groups!r}): a token "
                "chooses at least one group, and not more than there are. Give whole numbers."
            )

    def _check_over(self) -> None:
        """Refuse options that do not apply to the kind of balance loss."""
        of_groups = "only the loss over groups knows first choices"
        of_all = "only the loss over the batch is added when all layers have run"
        for name, over, why in (
            ("first_choices_only", "group", of_groups),
            ("pools_layers", "batch", of_all),
        ):
            if getattr(self, name) and self.balance_over != over:
                raise ValueError(
                    f"Router({name}=True, balance_over={self.balance_over!r}): {why}. Take "
                    f'balance_over="{over}", or {name}=False.'
                )

    @classmethod
    def preset(cls, name: str) -> "Router":
        """Return the router of a known model.

        Args:
            name: mixtral, qwen3, deepseek-v3, switch, deepspeed-top1, deepspeed-top2 or
                deepspeed-topk.

        Example:
            >>> from hfjax.models.moe import Router
            >>> Router.preset("deepseek-v3").best_groups
            4
        """
        if name not in PRESETS:
            raise ValueError(f"router preset {name!r}: one of {', '.join(PRESETS)}.")
        return PRESETS[name]

    @property
    def draws(self) -> bool:
        """Whether anything is random in training."""
        return self.noise is not None or self.sample_second or self.priority == "random"

    @property
    def over_batch(self) -> bool:
        """Whether there is a balance loss over the whole batch, which models add at their end."""
        return self.balance_over == "batch" and self.balance_loss > 0

    @property
    def tells(self) -> bool:
        """Whether the loss must use router metrics, for auxiliary losses or bias updates."""
        return self.balance_loss > 0 or self.z_loss > 0 or self.bias_rate > 0


PRESETS: Mapping[str, Router] = {
    "mixtral": Router(balance_loss=0.02, balance_over="batch"),
    "qwen3": Router(balance_loss=0.001, balance_over="batch"),
    "deepseek-v3": Router(
        scores="sigmoid",
        scale=2.5,
        groups=8,
        best_groups=4,
        bias_rate=1e-3,
        recentre=False,
        balance_loss=1e-4,
        balance_over="row",
    ),
    "switch": Router(normalise="none", balance_loss=0.01),
    "deepspeed-top1": Router(normalise="none", priority="random", balance_loss=0.01),
    "deepspeed-top2": Router(
        normalise="kept", priority="choice", sample_second=True, first_choices_only=True
    ),
    "deepspeed-topk": Router(normalise="kept", priority="probability"),
}


class RouterNoise(NamedTuple):
    """Random numbers of a microbatch, None where not needed."""

    jitter: jax.Array | None = None  # factors of the router's inputs, [..., D]
    first: jax.Array | None = None  # Gumbel noise of the first choice, [..., E]
    second: jax.Array | None = None  # Gumbel noise of the second choice, [..., E]
    priority: jax.Array | None = None  # from 0 to 1, [..., k]


class ExpertChoice(NamedTuple):
    """The choices of each token, before capacity is applied."""

    experts: jax.Array  # [..., k] int32
    weights: jax.Array  # [..., k]
    scores: jax.Array  # [..., E], summing to 1


def choose_experts(
    router: Router, k: int, logits: jax.Array, bias: jax.Array | None, noise: RouterNoise
) -> ExpertChoice:
    """Return the k experts of each token and their weights; logits are [..., E], in float32."""
    softmax = router.scores == "softmax"
    scores = jax.nn.softmax(logits) if softmax else jax.nn.sigmoid(logits)
    ranked = scores if bias is None else scores + bias.reshape((1,) * (scores.ndim - 1) + (-1,))
    ranked = _mask_groups(router, lax.stop_gradient(ranked))
    experts = _top_experts(k, ranked, lax.stop_gradient(logits), noise)
    weights = take_experts(scores, experts)
    if router.normalise == "chosen":
        weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
    probs = scores if softmax else scores / (scores.sum(-1, keepdims=True) + 1e-20)
    scale = 1 if router.normalise == "kept" else router.scale  # kept: `layer.py` applies it
    return ExpertChoice(experts, weights * scale, probs)


def take_experts(x: jax.Array, experts: jax.Array) -> jax.Array:
    """Return x[..., experts]; its gradient is a sum, not a scatter."""
    return jnp.where(is_chosen(experts, x.shape[-1]), x[..., None, :], 0).sum(-1)


def is_chosen(experts: jax.Array, count: int) -> jax.Array:
    """Return [..., k, E]: the one-hot choices of experts."""
    shape = (*experts.shape, count)
    return experts[..., None] == lax.broadcasted_iota(experts.dtype, shape, experts.ndim)


def _mask_groups(router: Router, ranked: jax.Array) -> jax.Array:
    """Return scores, -inf outside each token's best groups."""
    if router.groups == 1:
        return ranked
    by_group = ranked.reshape(*ranked.shape[:-1], router.groups, -1)
    best = lax.top_k(by_group, min(2, by_group.shape[-1]))[0].sum(-1)
    allowed = is_chosen(lax.top_k(best, router.best_groups)[1], router.groups).any(-2)
    return jnp.where(allowed[..., None], by_group, -jnp.inf).reshape(ranked.shape)


def _top_experts(k: int, ranked: jax.Array, logits: jax.Array, noise: RouterNoise) -> jax.Array:
    """Return the numbers of the k experts that each token ranks highest, best first."""
    if noise.first is None and noise.second is None:
        return lax.top_k(ranked, k)[1]
    logits = jnp.where(jnp.isneginf(ranked), -jnp.inf, logits)  # outside a token's groups
    first = jnp.argmax(ranked if noise.first is None else logits + noise.first, -1)[..., None]
    if k == 1:
        return first.astype(jnp.int32)
    mask_out = lambda x, experts: jnp.where(is_chosen(experts, x.shape[-1]).any(-2), -jnp.inf, x)
    if noise.second is None:
        rest = lax.top_k(mask_out(ranked, first), k - 1)[1]
        return jnp.concatenate([first.astype(jnp.int32), rest], -1)
    second = jnp.argmax(mask_out(logits + noise.second, first), -1)[..., None]
    two = jnp.concatenate([first, second], -1).astype(jnp.int32)
    if k == 2:
        return two
    return jnp.concatenate([two, lax.top_k(mask_out(ranked, two), k - 2)[1]], -1)
