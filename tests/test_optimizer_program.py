"""Whether an optimizer works entry by entry is read from its program: nothing is run."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib as contrib
import pytest

import hfjax
from hfjax import DDP, EXPERT, FSDP, PIPE
from hfjax.checks.optimizers import (
    check_element_by_element,
    check_packed_rows,
    check_padding,
    warn_of_mixed_experts,
)
from hfjax.models.moe import MoELlama
from hfjax.sharding.stage_assignment import assign_stages
from tests.small_stack import Stack, of_stacks, stack_layout
from tests.test_experts import CONFIG
from tests.test_uneven_stages import short


def each(change):
    """Return an optimizer that changes gradients, array by array."""
    update = lambda updates, state, params=None: (jax.tree.map(change, updates), state)
    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def of_place(g):
    return g * jnp.arange(len(g)).reshape(-1, *(1,) * (g.ndim - 1)) if g.ndim else g


def unit_rows(g):
    return g / (1e-6 + jnp.linalg.norm(g, axis=-1, keepdims=True)) if g.size else g


def transposed_pairs(updates, state, params=None):
    """An inner product of a gradient with itself, turned around."""
    paired = lambda g: g * jnp.vdot(g, g[::-1])
    return jax.tree.map(paired, updates), state


leaves = jax.tree.leaves


def at_first(x):
    return jnp.full_like(x, 1 + (len(x) if x.ndim else 0))


def cosines(g):
    return jnp.sum(jnp.cos(g))


def begins(first):
    """Return an optimizer that keeps what it begins with."""
    scaled = lambda u, s: (
        jax.tree.map(lambda g, x: g / x, u, s)
        if isinstance(s, dict)
        else (jax.tree.map(lambda g: g / s, u))
    )
    update: Any = lambda u, s, params=None: (scaled(u, s), s)
    return optax.GradientTransformation(first, update)


def of_norms(choose, power=lambda g: g * g):
    """Return an optimizer that divides by what it chooses of the sums of all arrays."""

    def update(updates, state, params=None):
        by = 1e-3 + choose([jnp.sum(power(g)) for g in leaves(updates)])
        return jax.tree.map(lambda g: g / by, updates), state

    return optax.GradientTransformation(optax.init_empty_state, update)


def kept(number):
    """Return an optimizer that divides by a number of the step before."""

    def update(updates, state, params=None):
        new = sum(number(g) for g in leaves(updates) if g.size)
        return jax.tree.map(lambda g: g / (1 + state), updates), new

    return optax.GradientTransformation(lambda params: jnp.float32(0), update)


def drifts(updates: Any, state: Any, params: Any = None) -> Any:
    """Also where gradients and parameters are 0."""
    norm = optax.global_norm(params)
    return jax.tree.map(lambda g: jnp.where(g >= 0, 1, -1) * 0.02 * norm, updates), state


def early(step: Any, **_: Any) -> Any:
    return step < 3


def clip_ends(params):
    return {key: key != "layers" for key in params}


def with_clip(optimizer):
    return optax.chain(optax.clip_by_global_norm(1.0), optimizer)


RATE = 1e-2
WARM = optax.warmup_cosine_decay_schedule(0.0, 1e-3, 5, 50)
# What is made of it: for a layer alone, a piece of a layer, packed rows, beside empty places, for
# the experts of one array: + as one device, - refused (of experts: told).
OPTIMIZERS = {
    "sgd": (optax.sgd(RATE, 0.9, nesterov=True), "+++++"),
    "adamw": (optax.adamw(WARM), "+++++"),
    "adagrad": (optax.adagrad(RATE), "+++++"),
    "amsgrad": (optax.amsgrad(RATE), "+++++"),
    "radam": (optax.radam(WARM), "+++++"),
    "lion": (optax.chain(optax.clip(1.0), optax.lion(RATE)), "+++++"),
    "rmsprop": (optax.rmsprop(RATE, momentum=0.9, centered=True, nesterov=True), "+++++"),
    "rprop": (optax.rprop(RATE), "+++++"),
    "inject": (optax.inject_hyperparams(optax.adamw)(learning_rate=WARM), "+++++"),
    "master": (hfjax.optimizers.master_weights(optax.adamw(RATE)), "+++++"),
    "ema": (hfjax.optimizers.ema(optax.adamw(RATE), 0.5), "+++++"),
    "ademamix": (contrib.ademamix(RATE), "+++++"),
    "nothing": (optax.set_to_zero(), "+++++"),
    "at times": (optax.conditionally_transform(optax.scale(0.1), early), "+++++"),
    "clip": (with_clip(optax.adamw(WARM)), "--+++"),
    "clip of ends": (optax.chain(optax.masked(optax.clip_by_global_norm(1.0), clip_ends)), "+++++"),
    "if finite": (optax.apply_if_finite(optax.adam(RATE), 3), "--+++"),
    "several in one": (optax.MultiSteps(optax.adam(RATE), 4), "--+++"),
    "dog": (contrib.dog(), "--+++"),
    "schedule-free": (contrib.schedule_free_sgd(RATE), "--+++"),
    "lamb": (optax.lamb(RATE), "---+-"),
    "lars": (optax.lars(RATE), "---+-"),
    "novograd": (optax.novograd(RATE), "---+-"),
    "fromage": (optax.fromage(RATE), "---+-"),
    "adafactor": (optax.adafactor(RATE), "-----"),
    "block RMS": (optax.clip_by_block_rms(1.0), "-----"),
    "muon": (contrib.muon(RATE, muon_weight_dimension_numbers=of_stacks), "--++-"),
    "zero NaNs": (optax.zero_nans(), "---++"),
    "by path": (
        hfjax.optimizers.by_path({"layers*": optax.adam(RATE), "*": optax.lamb(RATE)}),
        "+++++",
    ),
    "unit rows": (each(unit_rows), "+--++"),
    "of place": (each(of_place), "-----"),
    "of size": (each(lambda g: g / (g.size or 1)), "-----"),
    "sorted": (each(lambda g: jnp.sort(g, axis=0) if g.ndim else g), "-----"),
    "pairs": (optax.GradientTransformation(optax.init_empty_state, transposed_pairs), "-----"),
    "sizes at first": (begins(lambda p: jnp.float32(sum(x.size for x in leaves(p)))), "++--+"),
    "a number of arrays": (begins(lambda p: jnp.float32(len(leaves(p)))), "++-++"),
    "a shape at first": (begins(lambda p: jax.tree.map(at_first, p)), "++--+"),
    "the greatest norm": (of_norms(lambda norms: jnp.max(jnp.stack(norms))), "---+-"),
    "the first norm": (of_norms(lambda norms: jnp.stack(norms)[0]), "---+-"),
    "0 over 0": (
        optax.chain(optax.scale_by_adam(eps=0), optax.clip_by_global_norm(1.0), optax.sgd(RATE)),
        "----+",
    ),
    "powers": (of_norms(lambda norms: 1 / sum(norms), lambda g: g**-2), "----+"),
    "ones": (each(lambda g: g / (1 + jnp.sum(jnp.ones_like(g)))), "-----"),
    "a flattened turn": (each(lambda g: g * (1 + jnp.vdot(g, g.T))), "-----"),
    "by rows": (each(lambda g: g * (2.0 if g.ndim and len(g) >= 6 else 1.0)), "++--+"),
    "a sort that is kept": (kept(lambda g: jnp.sort(jnp.abs(g).ravel())[0]), "-----"),
    "a loop": (
        each(lambda g: g / jax.lax.fori_loop(0, 2, lambda _, a: a + cosines(g), 1.0)),
        "-----",
    ),
    "drifts": (optax.GradientTransformation(optax.init_empty_state, drifts), "----+"),
    "a print": (each(lambda g: (jax.debug.print("{}", 1), g)[1]), "+++++"),
}


def on_pipe(model, optimizer, stages):
    mesh = hfjax.make_mesh(pipe=stages, devices=jax.devices()[:stages])
    layout = hfjax.layout(model, optimizer, mesh, PIPE)
    return assign_stages(layout, hfjax.Schedule("gpipe", 2))


def mixture(optimizer):
    model = lambda rngs: MoELlama(CONFIG, rngs=rngs)
    return hfjax.layout(model, optimizer, hfjax.make_mesh(expert=8), DDP | EXPERT)


CHECKS = [
    (lambda o: stack_layout(DDP, {"data": 2}, o), check_element_by_element),
    (
        lambda o: stack_layout(FSDP, {"fsdp": 2}, o),
        lambda layout: check_element_by_element(layout, "optimizer_in_backward", with_pieces=True),
    ),
    (lambda o: on_pipe(short, o, 2), check_packed_rows),
    (lambda o: on_pipe(lambda rngs: Stack(4, rngs=rngs), o, 3), check_padding),
    (mixture, warn_of_mixed_experts),
]


def verdict(layout, check):
    """Return + or -, and how many programs were compiled."""
    compiled = []

    def listen(event: str, *_: Any, **__: Any) -> None:
        if "backend_compile" in event:
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            check(layout)
        found = "+"
    except (ValueError, UserWarning):
        found = "-"
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    return found, compiled


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.short(
    "sgd", "rprop", "at times", "lamb", "zero NaNs", "sizes at first", "powers", "a print"
)
def test_what_an_optimizer_may_do_is_read_from_its_program(name):
    optimizer, wanted = OPTIMIZERS[name]
    found = [verdict(make(optimizer), check) for make, check in CHECKS]
    assert "".join(sign for sign, _ in found) == wanted
    assert [compiled for _, compiled in found] == [[]] * 5
