"""Calls that have a rule of their own, in programs of every kind: as on one device, or refused.

They are experts on several devices, parts of own rows, attention of shared rows, moments.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.extend.core import jaxpr_as_fun

import hfjax
from hfjax.models.attention import causal_attention
from hfjax.models.layers import local_ops
from hfjax.models.moe import MoE, Router
from hfjax.parallel.spmd.partition_context import record_calls
from hfjax.parallel.spmd.rule_calls import map_token_groups
from hfjax.parallel.strategy import CONTEXT, DDP, EXPERT, FSDP


class Experts(nnx.Module):
    def __init__(self, rngs):
        router = Router(balance_loss=0)
        self.mixture = MoE(8, 8, 4, top_k=1, capacity=None, group=4, router=router, rngs=rngs)
        self.mixture.router_kernel[...] *= 50
        self.mixture.each.gate_up[...] *= 30

    def __call__(self, x):
        return x + 20 * self.mixture(x)[0]


class OwnRows(nnx.Module):
    def __init__(self, rngs):
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), (8, 8)))

    def __call__(self, x):
        return hfjax.per_device(lambda x, kernel: jnp.cumsum(x @ kernel, 1))(x, self.kernel[...])


class Attention(nnx.Module):
    def __init__(self, rngs):
        self.kernels, self.heads = local_ops, nnx.Linear(8, 24, rngs=rngs)

    def __call__(self, x):
        heads = self.heads(x).reshape(*x.shape[:2], 3, 2, 4)
        attend = self.kernels.attention(causal_attention)
        return attend(*(heads[:, :, i] for i in range(3))).reshape(x.shape)


class Moments(nnx.Module):
    def __init__(self, rngs):
        self.kernels, self.scale = local_ops, nnx.Param(jnp.ones(8))

    def __call__(self, x):
        mean, variance, _ = self.kernels.channel_stats(x)
        scale = lax.rsqrt(variance + 1e-3) * self.scale[...]
        return (x - mean[None, None]) * scale[None, None]


CALLS = {
    "experts": (Experts, DDP | EXPERT, {"expert": 2, "data": 2}),
    "experts, each device all": (Experts, FSDP, {"fsdp": 4}),
    "own rows": (OwnRows, DDP, {"data": 4}),
    "attention": (Attention, DDP | CONTEXT, {"context": 2, "data": 2}),
    "optimizer_state": (Moments, DDP, {"data": 4}),
}


def ruled(f, function=None, scale=2):
    """`function`, whose rule says that the derivative is this many times the identity."""
    g = jax.custom_vjp(function or f)
    forward = lambda state, x: (f(state, x) if function is None else x, (state, x))
    zeros = lambda state: jax.tree.map(jnp.zeros_like, state)
    backward = lambda saved, dy: (
        zeros(saved[0]),
        scale * dy if function is None else dy * f(*saved),
    )
    g.defvjp(forward, backward)
    return g


def tangents(f):
    g = jax.custom_jvp(f)
    g.defjvp(lambda xs, dxs: (f(*xs), 2 * dxs[1]))
    return g


def recomputed(f):
    g = jax.custom_vjp(f)
    g.defvjp(lambda *xs: (f(*xs), xs), lambda xs, dy: jax.vjp(f, *xs)[1](dy))
    return g


def twice(f):
    return lambda state, x: lax.scan(lambda x, _: (f(state, x), None), x, None, length=2)[0]


def while_loop(f):
    turn = lambda state: lambda c: (c[0] + 1, f(state, c[1]))
    run = lambda state, x: lax.while_loop(lambda c: c[0] < 2, turn(state), (0, x))[1]
    return lambda state, x: lax.stop_gradient(run(*lax.stop_gradient((state, x)))) * x


# Programs in which every call is that of one device.
PROGRAMS = {
    "custom_vjp": ruled,
    "the rule of a custom_vjp": lambda f: ruled(f, lambda state, x: x),
    "custom_jvp": tangents,
    "checkpoint": jax.checkpoint,
    "cond": lambda f: lambda *xs: lax.cond(xs[1].sum() > -1e9, f, lambda state, x: x, *xs),
    "scan": twice,
    "while_loop": while_loop,
    "jit in jit": lambda f: jax.jit(jax.jit(f)),
    "custom_vjp in checkpoint": lambda f: jax.checkpoint(ruled(f)),
    "checkpoint in custom_vjp": lambda f: ruled(jax.checkpoint(f)),
    "custom_vjp in scan": lambda f: twice(ruled(f)),
    "custom_vjp in custom_jvp": lambda f: tangents(ruled(f)),
}


def step_of(call, program, mesh_sizes=None):
    """Return a layout of a model with this call in this program."""
    block, strategy, sizes = CALLS[call]
    if mesh_sizes:
        strategy, sizes = DDP, mesh_sizes

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.first, self.block = nnx.Linear(8, 8, rngs=rngs), block(rngs)

        def __call__(self, x):
            graph, state = nnx.split(self.block)
            return program(lambda state, x: nnx.merge(graph, state)(x))(
                jax.tree.map(lambda a: 1.0 * a, state), self.first(x)
            )

    mesh = hfjax.make_mesh(devices=jax.devices()[: math.prod(sizes.values())], **sizes)
    strategy = strategy if strategy is DDP else strategy.edit(replicate_below=0)
    return hfjax.layout(Model, optax.sgd(1.0, momentum=0.9), mesh, strategy)


def loss(outputs, batch):
    return jnp.square(outputs - 0.3).mean()


BATCH = np.random.default_rng(0).normal(size=(8, 8, 8)).astype(np.float32)


def found(layout):
    """Return the outputs, and the parameters after a step."""
    state = hfjax.init(layout)
    outputs = hfjax.predict_step(layout)(state, BATCH)
    state, metrics = hfjax.train_step(layout, loss)(state, BATCH)
    return (
        np.asarray(outputs),
        float(metrics["loss"]),
        hfjax.full_array(hfjax.to_model_order(layout, state).params),
    )


def check_equal(one, many):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(many), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * np.abs(a).max() + 1e-6)


@pytest.mark.short("own rows-custom_vjp in scan")
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("call", CALLS)
def test_a_call_in_a_program_is_that_of_one_device(call, program):
    of_one = found(step_of(call, PROGRAMS[program], {"data": 1}))
    of_many = found(step_of(call, PROGRAMS[program]))
    check_equal(of_one, of_many)


def solved(f):
    def run(state, x):
        wide = lambda b: (2 + jnp.square(f(state, x))) * b
        solve = lambda _, b: b / (2 + jnp.square(f(state, x)))
        return lax.custom_linear_solve(wide, x, solve, symmetric=True)

    return run


def of_one_batch(f):
    def run(state, x):
        g = jax.custom_batching.custom_vmap(f)
        g.def_vmap(lambda *_: ((), ()))
        return g(state, x)

    return run


GRAD, VMAP = "the model differentiates, within its own program, .* in", "jax.vmap is around"
WHOLE = ", which runs on all examples, is around"
REFUSED = {
    "grad": (GRAD, lambda f: lambda s, x: jax.grad(lambda x: f(s, x).sum())(x)),
    "jvp": (GRAD, lambda f: lambda s, x: jax.jvp(lambda x: f(s, x), (x,), (x,))[1]),
    "recomputed in the rule of a custom_vjp": (GRAD, recomputed),
    "vmap": (VMAP, lambda f: lambda s, x: jax.vmap(lambda x: f(s, x))(jnp.stack([x, x]))[0]),
    "custom_linear_solve": (f"custom_linear_solve{WHOLE}", solved),
    "custom_vmap": (f"custom_vmap_call{WHOLE}", of_one_batch),
}
NAMES = {"experts": "a mixture of experts, whose tokens", "own rows": "hfjax.per_device"}


@pytest.mark.parametrize("program", REFUSED)
@pytest.mark.parametrize("call", NAMES)
def test_what_a_call_cannot_be_in_is_refused(call, program):
    words, around = REFUSED[program]
    step = hfjax.train_step(step_of(call, around), loss)
    with pytest.raises(ValueError, match=rf"test_rule_calls.*: .*{words} {NAMES[call]}"):
        step.lower(BATCH)


def test_experts_that_are_all_on_each_device_may_be_differentiated_within_a_model():
    of_one, of_many = (
        found(step_of("experts, each device all", recomputed, sizes))
        for sizes in ({"data": 1}, None)
    )
    check_equal(of_one, of_many)


class ReadExperts(Experts):
    def __call__(self, x):
        return x * jnp.square(self.mixture.each.down[...]).sum()


def test_parameters_of_experts_are_not_differentiated_outside_of_their_mixture(monkeypatch):
    monkeypatch.setitem(CALLS, "read", (ReadExperts, *CALLS["experts"][1:]))
    of_one, of_many = found(step_of("read", twice, {"data": 1})), found(step_of("read", twice))
    np.testing.assert_allclose(of_one[0], of_many[0], rtol=1e-4)
    total = lambda tree: sum(x.sum() for x in jax.tree.leaves(tree))
    grad = lambda f: lambda state, x: x * total(jax.grad(lambda s: f(s, x).sum())(state))
    with pytest.raises(ValueError, match=f"{GRAD} parameters of experts that are read outside"):
        hfjax.train_step(step_of("read", grad), loss).lower(BATCH)


def test_what_stands_in_for_a_call_never_runs():
    alike = map_token_groups(lambda arrays, x: x, with_dispatch=True)
    with record_calls():
        traced = jax.make_jaxpr(alike)((), jnp.ones(4))
    with pytest.raises(ValueError, match=r"a program is run as it is written .* a mixture of exp"):
        jax.jit(jaxpr_as_fun(traced))(jnp.ones(4))
