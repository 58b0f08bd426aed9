"""Mixture of experts in plain numpy: what the layers of hfjax are compared with.

Each function tells again, for one device, what the function named in its docstring computes. Of
equals the first wins (the lowest expert, the earliest token): torch leaves that open. Shapes:
T tokens, E experts, K choices of a token, D width of a token, F width inside an expert.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

EPS = np.finfo(np.float32).eps  # of DeepSpeed's denominators: it computes gates in float32


@dataclass(frozen=True)
class Routing:
    """Where tokens go, and what remains after dropping.

    Attributes:
        experts: The chosen experts [T, K], the first choice first.
        weights: The factors of their outputs [T, K]; 0 where the choice was dropped.
        kept: Whether the expert has room for the token [T, K].
        places: The place within the expert's capacity [T, K]; -1 where the choice was dropped.
        capacity: How many tokens an expert takes.
        counts: How many tokens chose each expert [E], before dropping.
        l_aux: DeepSpeed's auxiliary loss, without its coefficient; 0 of the other projects, whose
            losses have functions of their own below.
    """

    experts: np.ndarray
    weights: np.ndarray
    kept: np.ndarray
    places: np.ndarray
    capacity: int
    counts: np.ndarray
    l_aux: float = 0.0

    @property
    def dropped(self) -> int:
        """How many choices found no room."""
        return int(self.counts.sum() - self.kept.sum())


def softmax(logits: np.ndarray) -> np.ndarray:
    """Return the softmax over the last dimension."""
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def largest(scores: np.ndarray, k: int) -> np.ndarray:
    """Return the indices of the k largest along the last dimension, the largest first."""
    return np.argsort(-scores, axis=-1, kind="stable")[..., :k]


def pick(of_experts: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Return the entries [T, K] of an array [T, E] at the chosen experts [T, K]."""
    return np.take_along_axis(of_experts, chosen, axis=-1)


def mask_of(chosen: np.ndarray, experts: int) -> np.ndarray:
    """Return 1 where a token chose an expert [T, E]."""
    return (chosen[..., None] == np.arange(experts)).sum(-2)


def before(mask: np.ndarray) -> np.ndarray:
    """Return how many earlier tokens are with an expert [T, E]."""
    return np.cumsum(mask, axis=0) - mask


def highest(mask: np.ndarray, priorities: np.ndarray, capacity: int) -> np.ndarray:
    """Return the mask without tokens that have no place among an expert's highest priorities."""
    of_choosers = np.where(mask > 0, priorities, -np.inf)
    order = np.argsort(-of_choosers, axis=0, kind="stable")[:capacity]
    kept = np.zeros_like(mask)
    np.put_along_axis(kept, order, 1, axis=0)
    return mask * kept


# DeepSpeed: deepspeed/moe/sharded_moe.py


def capacity_of(tokens: int, experts: int, factor: float, minimum: int) -> int:
    """Return how many tokens an expert takes; `factor` is k times the capacity factor.

    DeepSpeed, sharded_moe.py, `_capacity`. The product is taken in float32: 25 * 1.2 rounds up to
    31, in float64 to 30; 25 * 2.2 to 55, in float64 to 56.
    """
    return max(int(np.ceil(np.float32(tokens / experts) * np.float32(factor))), minimum)


def gate_logits(x: np.ndarray, router: np.ndarray, jitter: np.ndarray | None = None) -> np.ndarray:
    """Return the logits [T, E] of tokens [T, D] and a router [D, E].

    DeepSpeed, sharded_moe.py, `TopKGate.forward` and `multiplicative_jitter`. The policy "Jitter"
    multiplies what the router sees, while training, by factors [T, D] between 0.99 and 1.01. The
    experts see the tokens without them.
    """
    return (x if jitter is None else x * jitter) @ router


def top1(
    logits: np.ndarray,
    capacity_factor: float,
    min_capacity: int,
    *,
    used: np.ndarray | None = None,
    gumbel: np.ndarray | None = None,
    priorities: np.ndarray | None = None,
    drop: bool = True,
) -> Routing:
    """Return the routing to one expert each.

    DeepSpeed, sharded_moe.py, `top1gating`. Weights are the probability of the chosen expert, not
    normalised.

    Args:
        logits: [T, E].
        capacity_factor: Capacity is that of evenly spread tokens times this.
        min_capacity: The least capacity. DeepSpeed asserts that there are as many tokens.
        used: `used_token`, 1 or 0 for each token [T]. Others choose nothing; means still have T.
        gumbel: Noise [T, E] under the policy "RSample", while training. It decides the choice;
            weights and loss have none of it.
        priorities: Random token selection (`use_rts`, in evaluation too), uniform numbers [T, E]:
            capacity goes to the highest. Places are by position. None: capacity goes to the
            earliest. DeepSpeed then takes torch.topk of equal numbers, which keeps as many
            tokens, but any.
        drop: Whether capacity is limited; otherwise it is the largest count.
    """
    tokens, experts = logits.shape
    assert tokens >= min_capacity
    gates = softmax(logits)
    chosen = largest(gates if gumbel is None else logits + gumbel, 1)
    mask = mask_of(chosen, experts) * (1 if used is None else used[:, None].astype(int))
    counts = mask.sum(0)
    capacity = capacity_of(tokens, experts, capacity_factor, min_capacity)
    capacity = capacity if drop else int(counts.max())
    l_aux = experts * float(np.sum(gates.mean(0) * mask.mean(0)))
    mask = highest(mask, np.zeros_like(gates) if priorities is None else priorities, capacity)
    kept = pick(mask, chosen) > 0
    places = np.where(kept, pick(before(mask), chosen), -1)
    return Routing(chosen, pick(gates, chosen) * kept, kept, places, capacity, counts, l_aux)


def normalised(gates: np.ndarray, chosen: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """Return probabilities of the kept choices over their sum: a token has 1 in all, or nothing."""
    weights = pick(gates, chosen) * kept
    return weights / np.maximum(weights.sum(-1, keepdims=True), EPS)


def top2(
    logits: np.ndarray,
    capacity_factor: float,
    min_capacity: int,
    *,
    gumbel: np.ndarray | None = None,
    drop: bool = True,
) -> Routing:
    """Return the routing to two experts each.

    DeepSpeed, sharded_moe.py, `top2gating`. All first choices have a place before any second one,
    by position in each; dropped first choices count. The loss counts first choices only and is not
    divided by 2. It knows neither `used_token` nor "RSample" nor random token selection.

    Args:
        logits: [T, E].
        capacity_factor: Capacity is that of evenly spread tokens times twice this.
        min_capacity: The least capacity.
        gumbel: Noise [T, E] in the choice of the second expert (`top2_2nd_expert_sampling`, in
            evaluation too); weights have none of it.
        drop: Whether capacity is limited; otherwise it is the largest count.
    """
    tokens, experts = logits.shape
    gates = softmax(logits)
    first = largest(gates, 1)
    mask1 = mask_of(first, experts)
    noisy = logits if gumbel is None else logits + gumbel
    second = largest(np.where(mask1 > 0, -np.inf, noisy), 1)
    mask2 = mask_of(second, experts)
    counts = (mask1 + mask2).sum(0)
    capacity = capacity_of(tokens, experts, capacity_factor * 2, min_capacity)
    capacity = capacity if drop else int(counts.max())
    l_aux = experts * float(np.sum(gates.mean(0) * mask1.mean(0)))
    after = mask1.sum(0) + before(mask2)
    places = np.concatenate([pick(before(mask1), first), pick(after, second)], -1)
    kept = places < capacity
    chosen = np.concatenate([first, second], -1)
    weights, places = normalised(gates, chosen, kept), np.where(kept, places, -1)
    return Routing(chosen, weights, kept, places, capacity, counts, l_aux)


def topk(
    logits: np.ndarray,
    k: int,
    capacity_factor: float,
    min_capacity: int,
    *,
    policy: str = "probs",
    drop: bool = True,
) -> Routing:
    """Return the routing to the k most probable experts each.

    DeepSpeed, sharded_moe.py, `topkgating` (its gate takes it for k > 2, with "probs"). The loss
    counts all choices and is divided by k. No noise, no `used_token`.

    Args:
        logits: [T, E].
        k: How many experts a token chooses.
        capacity_factor: Capacity is that of evenly spread tokens times k times this.
        min_capacity: The least capacity.
        policy: Who has a place. probs: the tokens to whom the expert is most probable, whichever
            choice it is. position: the earliest tokens, whichever choice it is. Places are by
            position in both.
        drop: Whether capacity is limited; otherwise it is the largest count.
    """
    tokens, experts = logits.shape
    gates = softmax(logits)
    chosen = largest(gates, k)
    mask = mask_of(chosen, experts)
    counts = mask.sum(0)
    capacity = capacity_of(tokens, experts, capacity_factor * k, min_capacity)
    capacity = capacity if drop else int(counts.max())
    l_aux = experts / k * float(np.sum(gates.mean(0) * mask.mean(0)))
    mask = highest(mask, {"probs": gates, "position": 0 * gates}[policy], capacity)
    kept = pick(mask, chosen) > 0
    places = np.where(kept, pick(before(mask), chosen), -1)
    return Routing(chosen, normalised(gates, chosen, kept), kept, places, capacity, counts, l_aux)


def residual(
    x: np.ndarray, of_experts: np.ndarray, of_mlp: np.ndarray, weight: np.ndarray, bias: np.ndarray
) -> np.ndarray:
    """Return outputs [T, D] of experts and of an MLP, mixed by a softmax of x @ weight + bias.

    DeepSpeed, deepspeed/moe/layer.py, `MoE.forward` with `use_residual` (PR-MoE). The first of the
    two coefficients [D, 2] is that of the experts.
    """
    share = softmax(x @ weight + bias)
    return of_experts * share[..., :1] + of_mlp * share[..., 1:]


# Routing of today's models, without capacity


def dropless(chosen: np.ndarray, weights: np.ndarray, experts: int) -> Routing:
    """Return the routing in which every expert takes all that chose it, by position."""
    mask = mask_of(chosen, experts)
    counts = mask.sum(0)
    kept, places = np.full(chosen.shape, True), pick(before(mask), chosen)
    return Routing(chosen, weights, kept, places, int(counts.max()), counts)


def mixtral(logits: np.ndarray, k: int) -> Routing:
    """Return the routing by a softmax over the k largest logits.

    transformers, modeling_mixtral.py, `MixtralSparseMoeBlock`: it takes the softmax over all and
    divides the k largest by their sum, which is the same number.
    """
    chosen = largest(logits, k)
    return dropless(chosen, softmax(pick(logits, chosen)), logits.shape[-1])


def qwen3_moe(logits: np.ndarray, k: int, normalise: bool = True) -> Routing:
    """Return the routing by the k largest of a softmax over all experts, divided by their sum.

    transformers, modeling_qwen3_moe.py, `Qwen3MoeSparseMoeBlock`; `normalise` is `norm_topk_prob`
    (true in Qwen3's checkpoints, false by default). Without it weights sum to less than 1.
    """
    gates = softmax(logits)
    chosen = largest(gates, k)
    weights = pick(gates, chosen)
    if normalise:
        weights = weights / weights.sum(-1, keepdims=True)
    return dropless(chosen, weights, logits.shape[-1])


def sigmoid(x: np.ndarray) -> np.ndarray:
    """Return the logistic function."""
    return 1 / (1 + np.exp(-x))


def deepseek_v3(
    logits: np.ndarray,
    k: int,
    bias: np.ndarray | None = None,
    *,
    groups: int = 1,
    chosen_groups: int = 1,
    scale: float = 2.5,
) -> Routing:
    """Return the routing by sigmoid scores, within the best groups of experts.

    DeepSeek-V3, inference/model.py, `Gate`; the 1e-20 is of transformers, modeling_deepseek_v3.py,
    and torchtitan, models/common/moe.py. The bias [E] is added for both choices, of groups (by the
    sum of a group's two best) and of experts; weights have none of it. Experts outside of the
    chosen groups are out (-inf); early versions of transformers gave them score 0 instead, which
    wins against a negative biased score.
    """
    tokens, experts = logits.shape
    scores = sigmoid(logits)
    biased = scores if bias is None else scores + bias
    of_groups = np.sort(biased.reshape(tokens, groups, -1), -1)[..., -2:].sum(-1)
    allowed = mask_of(largest(of_groups, chosen_groups), groups).repeat(experts // groups, -1)
    chosen = largest(np.where(allowed > 0, biased, -np.inf), k)
    weights = pick(scores, chosen)
    weights = weights / (weights.sum(-1, keepdims=True) + 1e-20) * scale
    return dropless(chosen, weights, experts)


def updated_bias(
    bias: np.ndarray, counts: np.ndarray, rate: float = 1e-3, recentred: bool = True
) -> np.ndarray:
    """Return the bias [E] after an optimizer step in which experts had `counts` tokens [E].

    Up by `rate` if an expert had fewer than the mean, down if more (2408.15664). `recentred`: the
    update has mean 0, as in torchtitan, components/optimizer/optimizer.py, `_update_expert_bias`.
    Counts are over all devices and microbatches of the step, before the optimizer's update.
    """
    change = rate * np.sign(counts.mean() - counts)
    return bias + (change - change.mean() if recentred else change)


# Losses, without their coefficients


def sequence_loss(logits: np.ndarray, k: int) -> float:
    """Return the auxiliary loss of one sequence [T, E]; a batch has the mean over its sequences.

    DeepSeek-V3's report, equations 17 to 20, sum of f_i P_i: f_i is E / (k T) times the tokens that
    have expert i among their k highest scores, without bias and groups; P_i the mean of scores
    that are divided by their sum over experts. Spread evenly it is 1.
    """
    tokens, experts = logits.shape
    scores = sigmoid(logits)
    f = experts / (k * tokens) * mask_of(largest(scores, k), experts).sum(0)
    p = (scores / scores.sum(-1, keepdims=True)).mean(0)
    return float(np.sum(f * p))


def z_loss(logits: np.ndarray) -> float:
    """Return the mean over tokens of log(sum(exp(logits)))².

    ST-MoE (2202.08906), equation 5.
    """
    top = logits.max(-1)
    return float(np.mean((top + np.log(np.exp(logits - top[..., None]).sum(-1))) ** 2))


def batch_loss(logits: Sequence[np.ndarray], k: int, mask: np.ndarray | None = None) -> float:
    """Return the loss of a batch, of logits [T, E] for each layer: Switch's for k=1, one layer.

    transformers, modeling_mixtral.py, `load_balancing_loss_func`; Switch Transformer (2101.03961),
    equations 4 to 6. Both means are over the tokens of all layers together, where `mask` [T] is 1;
    it is not divided by k. Spread evenly it is k.
    """
    every = np.concatenate(logits)
    real = np.ones(len(every)) if mask is None else np.tile(mask, len(logits))
    gates, experts = softmax(every), every.shape[-1]
    f = real @ mask_of(largest(gates, k), experts) / real.sum()
    p = real @ gates / real.sum()
    return experts * float(f @ p)


# A whole layer


def swiglu(x: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray) -> np.ndarray:
    """Return (silu(x @ gate) * (x @ up)) @ down, of gate and up [D, F] and down [F, D]."""
    opened = x @ gate
    return (opened * sigmoid(opened) * (x @ up)) @ down


def experts_layer(
    x: np.ndarray,
    routing: Routing,
    gate: np.ndarray,
    up: np.ndarray,
    down: np.ndarray,
    shared: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None,
) -> np.ndarray:
    """Return the outputs [T, D] of experts (gate and up [E, D, F], down [E, F, D]).

    DeepSpeed, sharded_moe.py, `MOELayer.forward`, with the experts and shared experts of
    transformers, modeling_deepseek_v3.py, `DeepseekV3MoE`. Tokens travel through buffers
    [E, capacity, D]; outputs are weighted after the experts; a dropped choice adds nothing.
    """
    buffers = np.zeros((len(gate), routing.capacity, x.shape[-1]))
    taken = np.zeros(buffers.shape[:2], bool)
    for token, choice in np.argwhere(routing.kept):
        slot = routing.experts[token, choice], routing.places[token, choice]
        assert not taken[slot]
        buffers[slot], taken[slot] = x[token], True
    outputs = np.stack([swiglu(*of) for of in zip(buffers, gate, up, down, strict=True)])
    y = np.zeros(x.shape) if shared is None else swiglu(x, *shared)
    for token, choice in np.argwhere(routing.kept):
        slot = routing.experts[token, choice], routing.places[token, choice]
        y[token] += routing.weights[token, choice] * outputs[slot]
    return y
