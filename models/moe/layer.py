"""The MoE layer: router, experts, shared experts. [B]atch, [S]equence, [D] embed."""

import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.core import Tracer
from jax.extend import source_info_util

from hfjax.models.layers import (
    ExampleKey,
    Linear,
    local_ops,
    no_constraint,
    no_number,
    project,
    stack_layers,
)
from hfjax.models.llama import MLP
from hfjax.models.moe.experts import DroplessRouting, Mixture
from hfjax.models.moe.losses import balance, per_token, z_losses
from hfjax.models.moe.metrics import RouterMetrics
from hfjax.models.moe.router import (
    JITTER,
    ExpertChoice,
    Router,
    RouterNoise,
    choose_experts,
    is_chosen,
)
from hfjax.models.moe.slots import assign_slots, capacity as capacity_of, sort_choices
from hfjax.utils.keywords import attribute_docs, is_int, is_real, strict_fields
from hfjax.utils.rounding import widen

source_info_util.register_exclusion(__file__)  # report the user's source line for a mixture

EXPERTS = "experts"  # the logical axis that stacks experts
KEEP_SHARDED: Any = {
    "keep_sharded": True
}  # a mixture reads only the local shard of such a parameter
no_split = partial(no_constraint, names=())  # router logits are never sharded


class RouterBias(nnx.Variable):
    """A bias added to expert scores for the choice; the step updates it, not the optimizer."""


class SwiGLUExperts(nnx.Module):
    """Gated MLP experts; gate and up share one kernel: [E, D, mlp, 2]."""

    def __init__(self, count: int, embed: int, mlp: int, scale: float, *, rngs: nnx.Rngs) -> None:
        normal = lambda scale, *shape: scale * jax.random.normal(rngs.params(), shape)
        up, down = normal(0.02, count, embed, mlp, 2), normal(scale, count, mlp, embed)
        self.gate_up = nnx.Param(up, axes=(EXPERTS, "embed", "mlp", "gate_up"), **KEEP_SHARDED)
        self.down = nnx.Param(down, axes=(EXPERTS, "mlp", "embed"), **KEEP_SHARDED)
        self.place = no_constraint

    def arrays(self) -> tuple[jax.Array, jax.Array]:
        """Return the arrays of the local experts; other reads would all-gather them."""
        return self.gate_up.get_raw_value(), self.down.get_raw_value()

    def apply(self, arrays: tuple[jax.Array, jax.Array], x_ND: jax.Array) -> jax.Array:
        """Return the output of one expert for some rows."""
        gate_up, down = arrays
        width, mlp, _ = gate_up.shape
        hidden = (x_ND @ gate_up.reshape(width, -1)).reshape(-1, mlp, 2)
        hidden = checkpoint_name(self.place(hidden, (None, "mlp", None)), "mlp_up")
        gated = jax.nn.silu(hidden[..., 0]) * hidden[..., 1]
        return self.place(gated @ down, (None, None))


class CustomExperts(nnx.Module):
    """Experts that are user-defined modules, all alike."""

    def __init__(self, count: int, create: Callable, *, rngs: nnx.Rngs) -> None:
        self.each = stack_layers(count, create, rngs)
        others = nnx.to_flat_state(nnx.state(self.each, nnx.Not(nnx.Param)))
        if others:
            raise ValueError(
                f"MoE(expert=…): an expert holds {'/'.join(map(str, others[0][0]))}, which is no "
                "parameter. Experts have parameters alone: put dropout and statistics around them."
            )
        for _, parameter in nnx.to_flat_state(nnx.state(self.each, nnx.Param)):
            names = parameter.get_metadata("axes", (None,) * (parameter[...].ndim - 1))
            parameter.set_metadata(axes=(EXPERTS, *names), **KEEP_SHARDED)

    def arrays(self) -> nnx.State:
        """Return the arrays of the local experts."""
        return nnx.split(self.each)[1]

    def apply(self, arrays: nnx.State, x_ND: jax.Array) -> jax.Array:
        """Return the output of one expert for some rows."""
        return nnx.merge(nnx.graphdef(self.each), arrays)(x_ND)


@strict_fields
@dataclass(frozen=True)
class MixtureOptions:
    """Options of a mixture: keywords of `MoE`, and fields of `MoEConfig`.

    Attributes:
        top_k: The number of experts per token.
        capacity: The capacity factor: an expert takes this times the mean number of tokens of a
            group, rounded up. None: no limit.
        eval_capacity: The capacity factor in evaluations. "same": as in training.
        min_capacity: The minimum capacity of an expert, in tokens of a group; 0 is as 1.
        group: The tokens of a group: a divisor or a multiple of a sequence. None: a sequence.
        shared: The number of shared experts, which process every token.
        residual: Whether an MLP runs beside the experts, and each token mixes both (PR-MoE).
        router: How tokens choose: a `Router`, or the name of a preset.
        block: The number of rows of a matmul, without a capacity.

    Example:
        >>> from hfjax.models.moe.layer import MixtureOptions
        >>> MixtureOptions(top_k=1, router="switch").router.normalise
        'none'
    """

    top_k: int = 2
    capacity: float | None = 1.25
    eval_capacity: float | str | None = "same"
    min_capacity: int = 4
    group: int | None = None
    shared: int = 0
    residual: bool = False
    router: Any = Router()
    block: int = 128

    def __post_init__(self) -> None:
        router = Router.preset(self.router) if isinstance(self.router, str) else self.router
        object.__setattr__(self, "router", router)
        for name in ("capacity", "eval_capacity"):
            factor = getattr(self, name)
            is_same = name == "eval_capacity" and factor == "same"
            number = is_real(factor, sys.float_info.min, sys.float_info.max)
            if factor is not None and not is_same and not number:
                raise ValueError(
                    f"{name}={factor!r} of a mixture: a positive factor of the mean number of "
                    "tokens of an expert, or None: an expert takes all that come."
                )
        if not isinstance(self.residual, bool):
            raise ValueError(f"residual={self.residual!r} of a mixture: true or false.")
        if not isinstance(router, Router):
            raise ValueError(
                f"router={router!r} of a mixture: a hfjax.models.moe.Router, or the name of a "
                "preset, is expected."
            )
        least = {"top_k": 1, "min_capacity": 0, "group": 1, "block": 1, "shared": 0}
        for name, low in least.items():
            number = getattr(self, name)
            if not is_int(number, low) and (name, number) != ("group", None):
                raise ValueError(
                    f"{name}={number!r} of a mixture: a whole number, at least {low}."
                    f"{' None: a row.' * (name == 'group')}"
                )

    def capacity_factor(self, training: bool) -> float | None:
        """Return the capacity factor, or None without a capacity."""
        other = training or self.eval_capacity == "same"
        return self.capacity if other else self.eval_capacity  # type: ignore[return-value]


class MoE(nnx.Module):
    """A mixture of experts in place of an MLP: each token is routed to its `top_k` experts.

    Called with x [B, S, D] (or [B, D]) it returns the output, and the `RouterMetrics` for the loss:
    pass these from layer to layer, and to the loss.

    Args:
        embed: The width of the tokens.
        mlp: The width of an expert's hidden layer.
        experts: The number of experts.
        expert: Function of `nnx.Rngs` that returns one expert. None: a gated MLP.
        scale: The init scale of the kernels that write to the residual stream.
        rngs: The random number generators.
        mixing: Fields of `MixtureOptions`, for instance `top_k=2, capacity=1.25, shared=1,
            router=…`:

            {fields}

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from hfjax.models.moe import MoE
        >>> moe = MoE(16, 32, experts=4, top_k=2, rngs=nnx.Rngs(0))
        >>> y, told = nnx.jit(lambda moe, x: moe(x))(moe, jnp.ones((2, 8, 16)))
        >>> y.shape, told.load.sum().item()  # 2 choices of 16 tokens
        ((2, 8, 16), 32.0)
    """

    def __init__(
        self,
        embed: int,
        mlp: int,
        experts: int,
        expert: Callable | None = None,
        scale: float = 0.02,
        *,
        rngs: nnx.Rngs,
        **mixing: Any,
    ) -> None:
        self.mixing = options = MixtureOptions(**mixing)
        self.embed, self.experts = embed, experts
        _check(experts, options)
        normal = lambda *shape: 0.02 * jax.random.normal(rngs.params(), shape)
        self.router_kernel = nnx.Param(normal(embed, experts), axes=("embed", "router"))
        self.router_bias = (
            RouterBias(jnp.zeros(experts), needs_after_step=True)
            if options.router.bias_rate
            else None
        )
        if expert is None:
            self.each: Any = SwiGLUExperts(experts, embed, mlp, scale, rngs=rngs)
        else:
            self.each = CustomExperts(experts, expert, rngs=rngs)
        self.shared = MLP(embed, options.shared * mlp, scale, rngs=rngs) if options.shared else None
        self.residual = MLP(embed, mlp, scale, rngs=rngs) if options.residual else None
        mix = partial(Linear, (embed, 2), ("embed", "router"), 1, 0.02)
        self.mix = mix(rngs=rngs) if options.residual else None
        draws = options.router.draws
        self.key = (
            ExampleKey(rngs.dropout(), per_example=True, per_position=True) if draws else None
        )
        self.deterministic = False
        self.number, self.kernels = no_number, local_ops

    @property
    def router(self) -> Router:
        """The router of the mixture."""
        return self.mixing.router

    def __call__(
        self,
        x: jax.Array,
        router_metrics: RouterMetrics | None = None,
        used: jax.Array | None = None,
    ) -> tuple[jax.Array, RouterMetrics]:
        """Return the output for x, and the router metrics up to this layer.

        Args:
            x: Tokens [B, S, D]; or [B, D], or images [B, H, W, D].
            router_metrics: The metrics of the layers before. None: this is the only layer that
                records metrics.
            used: Which tokens count, [B, S], bools or 1 and 0; others are not routed. None: all.
        """
        if x.ndim < 2 or x.shape[-1] != self.embed:
            raise ValueError(
                f"MoE(embed={self.embed}) is given an array of shape {x.shape}: tokens are "
                f"[B, S, {self.embed}], [B, {self.embed}], or images [B, H, W, {self.embed}]."
            )
        start = partial(RouterMetrics.start, x, 1, self.experts, self.router.over_batch)
        before = start() if router_metrics is None else router_metrics
        x_BSD = x.reshape(len(x), -1, x.shape[-1])
        y, new = self._run_experts(x_BSD, None if used is None else _used_flags(used, x))
        if self.shared is not None:
            y = y + self.shared(x_BSD)
        if self.residual is not None:
            assert self.mix is not None
            share = jax.nn.softmax(self.mix(x_BSD))
            y = y * share[..., :1] + self.residual(x_BSD) * share[..., 1:]
        new = replace(new, loss=new.loss.reshape(x.shape[:-1]))
        return y.reshape(x.shape).astype(x.dtype), before.append(new)

    def _run_experts(self, x: jax.Array, used: jax.Array | None) -> tuple[jax.Array, RouterMetrics]:
        """Return the experts' output for tokens, and the metrics of this layer."""
        noise = RouterNoise() if self.deterministic else self._draw_noise(x)
        wide = widen(x)
        noisy = wide if noise.jitter is None else wide * noise.jitter
        logits: Any = project(no_split, noisy, widen(self.router_kernel[...]).astype(wide.dtype))
        bias = None if self.router_bias is None else self.router_bias[...].astype(wide.dtype)
        choice = choose_experts(self.router, self.mixing.top_k, logits, bias, noise)
        if used is not None:
            none = jnp.where(used[..., None], choice.experts, self.experts)
            choice = choice._replace(experts=none)
        group = self._group_size(x)
        by_group = lambda a: a.reshape(-1, group, a.shape[-1])
        routing, has_slot = self._route(jax.tree.map(by_group, choice), noise, by_group)
        tells = self.router.tells and not self.deterministic
        arrays, block = self.each.arrays(), self.mixing.block
        mixture = Mixture(self.experts, arrays, self.each.apply, block, tells)
        dtypes = {a.dtype for a in jax.tree.leaves(arrays)}
        x_cast = x.astype(*dtypes) if len(dtypes) == 1 else x  # precision by path: the experts'
        y = self.kernels.experts(mixture, by_group(x_cast), routing)
        return y.reshape(x.shape).astype(x.dtype), self._router_metrics(
            logits, choice, used, has_slot, by_group
        )

    def _route(
        self, choice: ExpertChoice, random_draws: RouterNoise, by_group: Callable
    ) -> tuple[Any, Any]:
        """Return the routing of grouped tokens, and which choices have a slot (None: all)."""
        factor = self.mixing.capacity_factor(training=not self.deterministic)
        experts, weights = choice.experts, choice.weights
        if factor is None:
            none = experts == self.experts
            return DroplessRouting(experts, self._normalize(jnp.where(none, 0, weights))), None
        _, tokens, k = experts.shape
        size = capacity_of(tokens, k, self.experts, factor, self.mixing.min_capacity)
        self._warn_of_empty(size, tokens, factor)
        sort = sort_choices(experts, self._priority(choice, random_draws, by_group), self.experts)
        slots = assign_slots(sort, experts, weights, size)
        has_slot = slots.slot_of < self.experts * size
        return slots._replace(weights=self._normalize(slots.weights)), has_slot

    def _warn_of_empty(self, size: int, tokens: int, factor: float) -> None:
        """Warn of groups so small that most slots stay empty, but are computed nevertheless."""
        num_choices, num_slots = tokens * self.mixing.top_k * max(factor, 1), self.experts * size
        if num_slots > 2 * num_choices:
            warnings.warn(
                f"groups of {tokens} tokens choose {self.mixing.top_k} experts each, and the "
                f"{self.experts} experts have {num_slots} places for them, {size} each "
                f"(capacity={factor}, min_capacity={self.mixing.min_capacity}): all of them are "
                "computed and sent. Make groups larger (group=: tokens of a row, or a number of "
                "whole rows), or take capacity=None.",
                UserWarning,
                stacklevel=2,
            )

    def _normalize(self, weights: jax.Array) -> jax.Array:
        if self.router.normalise != "kept":
            return weights
        least = jnp.finfo(jnp.float32).eps
        return weights * self.router.scale / jnp.maximum(weights.sum(-1, keepdims=True), least)

    def _priority(self, choice: ExpertChoice, noise: RouterNoise, by_group: Callable) -> jax.Array:
        """Return a number for each choice: lower ones get the slots of an expert first."""
        if noise.priority is not None:
            return -by_group(noise.priority)
        if self.router.priority == "probability":
            return -jax.lax.stop_gradient(choice.weights)
        by_choice = self.router.priority == "choice"
        return jnp.broadcast_to(jnp.arange(self.mixing.top_k) * by_choice, choice.experts.shape)

    def _router_metrics(
        self,
        logits: jax.Array,
        choice: ExpertChoice,
        used: jax.Array | None,
        has_slot: Any,
        by_group: Any,
    ) -> RouterMetrics:
        """Return the router metrics of this layer."""
        batch_size, router = len(logits), self.router
        sum_sequence = lambda x: x.reshape(batch_size, 1, -1, x.shape[-1]).sum(2)
        is_used = jnp.ones(logits.shape[:-1], bool) if used is None else used
        scores = jnp.where(is_used[..., None], choice.scores, 0)
        counts = is_chosen(choice.experts, self.experts)
        load = counts.sum(-2).astype(logits.dtype)
        share = counts[..., 0, :].astype(load.dtype) if router.first_choices_only else load
        losses = jnp.zeros(is_used.shape, logits.dtype)
        if router.balance_loss and router.balance_over != "batch" and not self.deterministic:
            by_sequence = router.balance_over == "row"
            regroup = (
                (lambda a: a.reshape(batch_size, -1, a.shape[-1])) if by_sequence else by_group
            )
            if by_sequence:  # per sequence, by scores alone: DeepSeek-V3's report, equation 18
                best = jax.lax.top_k(jax.lax.stop_gradient(scores), self.mixing.top_k)[1]
                share = is_chosen(best, self.experts).sum(-2, dtype=load.dtype) * is_used[..., None]
            group_losses = balance(regroup(share), regroup(scores))
            losses += router.balance_loss * per_token(group_losses, is_used.shape)
        if router.z_loss and not self.deterministic:
            losses += router.z_loss * z_losses(logits)
        entropy = -(scores * jnp.log(jnp.maximum(scores, 1e-30))).sum(-1, keepdims=True)
        known = by_group(choice.experts) < self.experts
        lost = jnp.zeros_like(known) if has_slot is None else known & ~has_slot
        score_sums = (
            sum_sequence(scores)
            if router.over_batch
            else jnp.zeros((batch_size, 1, 0), logits.dtype)
        )
        return RouterMetrics(
            loss=jnp.where(is_used, losses, 0),
            load=jax.lax.stop_gradient(sum_sequence(load)),
            scores=score_sums,
            dropped=lost.reshape(batch_size, 1, -1).sum(-1).astype(logits.dtype),
            entropy=jax.lax.stop_gradient(sum_sequence(entropy)[..., 0]),
            tokens=sum_sequence(is_used[..., None].astype(logits.dtype))[..., 0],
            number=jnp.full((batch_size, 1), self.number, logits.dtype),
            experts=self.experts,
        )

    @property
    def _needs_no_group(self) -> bool:
        """Whether tokens are independent: no capacity, and no loss over groups."""
        of_groups = self.router.balance_loss > 0 and self.router.balance_over == "group"
        return self.mixing.capacity_factor(not self.deterministic) is None and not of_groups

    def _group_size(self, x: jax.Array) -> int:
        """Return the number of tokens per group."""
        (batch_size, length), run = x.shape[:2], self.kernels.run_length(x.shape[1])
        requested = self.mixing.group
        group = (run if self._needs_no_group else length) if requested is None else requested
        is_whole_sequences = (
            run == length and group % length == 0 and batch_size * length % group == 0
        )
        if run % group and not is_whole_sequences:
            fits = [n for n in range(1, run + 1) if run % n == 0]
            if run == length:
                fits += [n * length for n in range(2, batch_size + 1) if batch_size % n == 0]
            raise ValueError(
                f"MoE(group={requested}): groups of {group} tokens, and {run} that follow each "
                f"other are on one device ({length} in a sequence, {batch_size} sequences). A "
                f"group lies on one device: choose one of {', '.join(map(str, fits[-8:]))}."
            )
        return group

    def _draw_noise(self, x: jax.Array) -> RouterNoise:
        """Return the random numbers of each token, keyed by its example and position."""
        if self.key is None:
            return RouterNoise()
        keys, router = self.key[...], self.router
        if keys.ndim == 0:  # outside a training step: x is the whole batch
            keys = jax.vmap(jax.random.fold_in, (None, 0))(keys, jnp.arange(len(x)))
        positions = jnp.arange(x.shape[1])
        keys = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)), (0, None))(keys, positions)

        def draw(number: int, make: Callable, *shape: int) -> jax.Array:
            each = lambda key: make(jax.random.fold_in(key, number), shape, dtype)
            return jax.vmap(jax.vmap(each))(keys)

        dtype = jnp.promote_types(x.dtype, jnp.float32)
        uniform, gumbel = jax.random.uniform, jax.random.gumbel
        jitter = lambda: 1 + JITTER * (2 * draw(0, uniform, x.shape[-1]) - 1)
        return RouterNoise(
            jitter=jitter() if router.noise == "jitter" else None,
            first=draw(1, gumbel, self.experts) if router.noise == "rsample" else None,
            second=draw(2, gumbel, self.experts) if router.sample_second else None,
            priority=draw(3, uniform, self.mixing.top_k) if router.priority == "random" else None,
        )


def _used_flags(used: jax.Array, x: jax.Array) -> jax.Array:
    """Return which tokens count, as bools [B, S]; refuse invalid flags."""
    other = not isinstance(used, Tracer) and not np.isin(np.asarray(used), (0, 1)).all()
    used = jnp.asarray(used)
    if used.shape != x.shape[:-1]:
        raise ValueError(
            f"MoE(…)(x, used=…) of shape {used.shape} for tokens {x.shape}: one flag for each "
            f"token is expected, {x.shape[:-1]}."
        )
    if jnp.issubdtype(used.dtype, jnp.inexact) or other:
        raise ValueError(
            f"MoE(…)(x, used=…) of dtype {used.dtype}: flags, or whole numbers 1 and 0, are "
            "expected: a token counts or does not. Write used=weights > 0; what a token weighs in "
            "the loss belongs into with_routing."
        )
    return used.astype(bool).reshape(len(x), -1)


def _check(experts: int, options: MixtureOptions) -> None:
    """Refuse a number of experts that does not fit the options."""
    router = options.router
    if not isinstance(experts, int) or experts < 1 or options.top_k > experts:
        raise ValueError(
            f"MoE(experts={experts}, top_k={options.top_k}): a token chooses at least one expert, "
            "and each at most once. Choose top_k from 1 to the number of experts."
        )
    if router.sample_second and options.top_k == 1 < experts:
        raise ValueError(
            "MoE(top_k=1) with Router(sample_second=True): there is no second choice to draw. Take "
            'top_k=2, or sample_second=False; noise="rsample" draws the first.'
        )
    if experts % router.groups:
        raise ValueError(
            f"Router(groups={router.groups}) of {experts} experts: groups are of equal size. "
            f"Choose a number that divides {experts}."
        )
    num_available = router.best_groups * (experts // router.groups)
    if options.top_k > num_available:
        raise ValueError(
            f"MoE(top_k={options.top_k}): Router(groups={router.groups}, "
            f"best_groups={router.best_groups}) leaves {num_available} of {experts} experts to "
            "choose from. Choose more groups, or fewer experts."
        )


MoE.__doc__ = (MoE.__doc__ or "").replace("{fields}", attribute_docs(MixtureOptions, 12).lstrip())
