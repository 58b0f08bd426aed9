"""What people write along positions, each a small program over a batch of whole rows.

A function takes `w(name, *shape)`, which returns a weight, and the batch of
`random_programs.make_batch`: `z` [rows, length, width], `tokens`, `mask` [rows, length], and so on.
It returns a loss and variables, as in typical_losses.py, whose programs are run along positions
too.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from tests.random_programs import coarse
from tests.typical_losses import ce, norm, off_diagonal

V = 7  # words
PROGRAMS = {}


def program(function):
    PROGRAMS[function.__name__] = function
    return function


def squares(y):
    return (jnp.abs(y) ** 2).mean(), {"y": y}


def layer(function):
    """Take a function of (w, x [rows, length, width]) for a program: its squares are the loss."""

    def run(w, b):
        return squares(function(w, b["z"]))

    run.__name__ = function.__name__
    return program(run)


def heads(w, x, count=2, groups=None):
    """Queries, keys and values [rows, length, heads, size]."""
    width, size, groups = x.shape[-1], 3, groups or count
    q = (x @ w("q", width, count * size)).reshape(*x.shape[:2], count, size)
    k = (x @ w("k", width, groups * size)).reshape(*x.shape[:2], groups, size)
    v = (x @ w("v", width, groups * size)).reshape(*x.shape[:2], groups, size)
    return q, k, v


def attend(q, k, v, mask=None, bias: Any = 0.0):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1]) + bias
    scores = scores if mask is None else jnp.where(mask, scores, -1e9)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


def causal(length):
    return jnp.tril(jnp.ones((length, length), bool))[None, None]


def flat(x):
    return x.reshape(*x.shape[:2], -1)


# --- attention ----------------------------------------------------------------------------------


@layer
def attention_by_hand(w, x):
    return flat(attend(*heads(w, x), causal(x.shape[1])))


@layer
def attention_of_everything(w, x):
    return jax.nn.softmax(x @ x.swapaxes(1, 2)) @ x


@layer
def attention_of_jax(w, x):
    return flat(jax.nn.dot_product_attention(*heads(w, x), is_causal=True))


@layer
def grouped_heads(w, x):
    q, k, v = heads(w, x, 4, 2)
    every = lambda t: jnp.repeat(t, 2, axis=2)
    return flat(attend(q, every(k), every(v), causal(x.shape[1])))


@layer
def grouped_heads_of_jax(w, x):
    return flat(jax.nn.dot_product_attention(*heads(w, x, 4, 2)))


@layer
def slopes_by_head(w, x):
    q, k, v = heads(w, x, 4)
    far = jnp.abs(jnp.arange(x.shape[1])[:, None] - jnp.arange(x.shape[1])[None])
    slopes = 2.0 ** -jnp.arange(1, 5)
    return flat(attend(q, k, v, causal(x.shape[1]), -slopes[None, :, None, None] * far[None, None]))


@layer
def a_bias_from_a_table_of_distances(w, x):
    length = x.shape[1]
    far = jnp.arange(length)[None] - jnp.arange(length)[:, None] + length - 1
    bias = w("bias", 2, 2 * length - 1)[:, far]
    return flat(attend(*heads(w, x), bias=bias[None]))


@program
def attention_to_some(w, b):
    keep = (b["mask"] > 0).at[:, 0].set(True)
    return squares(flat(attend(*heads(w, b["z"]), keep[:, None, None, :])))


@program
def attention_within_documents(w, b):
    documents = jnp.cumsum(b["tokens"] == 0, axis=1)
    same = documents[:, None, :, None] == documents[:, None, None, :]
    return squares(flat(attend(*heads(w, b["z"]), same & causal(b["z"].shape[1]))))


@layer
def a_window(w, x):
    at = jnp.arange(x.shape[1])
    near = (at[:, None] - at[None] < 3) & (at[:, None] >= at[None])
    return flat(attend(*heads(w, x), near[None, None]))


@layer
def local_attention_in_blocks(w, x):
    q, k, v = (t.reshape(-1, 2, *t.shape[2:]) for t in heads(w, x))
    return attend(q, k, v, causal(2)).reshape(*x.shape[:2], -1)


@layer
def dilated_attention(w, x):
    far = lambda t: t.reshape(t.shape[0], -1, 2, *t.shape[2:]).swapaxes(1, 2)
    q, k, v = (far(t).reshape(-1, x.shape[1] // 2, *t.shape[2:]) for t in heads(w, x))
    y = attend(q, k, v).reshape(len(x), 2, x.shape[1] // 2, -1)
    return y.swapaxes(1, 2).reshape(*x.shape[:2], -1)


@layer
def linear_attention(w, x):
    q, k, v = heads(w, x)
    q, k = jax.nn.softplus(q), jax.nn.softplus(k)
    state = jnp.einsum("bshd,bshe->bhde", k, v)
    return flat(jnp.einsum("bshd,bhde->bshe", q, state) / x.shape[1])


@layer
def causal_linear_attention(w, x):
    q, k, v = heads(w, x)
    state = jnp.cumsum(jnp.einsum("bshd,bshe->bshde", k, v), axis=1)
    return flat(jnp.einsum("bshd,bshde->bshe", q, state))


@layer
def attention_pooling(w, x):
    share = jax.nn.softmax(x @ w("a", x.shape[-1]), axis=1)
    return jnp.einsum("bs,bsd->bd", share, x)


@layer
def queries_that_are_learnt(w, x):
    q = jnp.broadcast_to(w("queries", 3, 4)[None], (len(x), 3, 4))
    scores = jnp.einsum("bqd,bsd->bqs", q, x @ w("k", x.shape[-1], 4))
    return jnp.einsum("bqs,bsd->bqd", jax.nn.softmax(scores), x)


@layer
def attention_of_flax(w, x):
    module = nnx.MultiHeadAttention(2, x.shape[-1], 4, decode=False, rngs=nnx.Rngs(0))
    return module(x, mask=causal(x.shape[1]))


@layer
def attention_of_linen(w, x):
    module = linen.MultiHeadDotProductAttention(2, qkv_features=4)
    held = module.init(jax.random.key(0), jnp.zeros((1, 2, x.shape[-1])))
    return module.apply(held, x, mask=linen.make_causal_mask(x[..., 0]))


@layer
def attention_in_a_scan_over_keys(w, x):
    """Keys chunk by chunk, with a running maximum: what a flash kernel does."""
    q, k, v = heads(w, x)
    chunks = lambda t: jnp.moveaxis(t.reshape(t.shape[0], -1, 2, *t.shape[2:]), 1, 0)

    def turn(carry, kv):
        most, total, sums = carry
        scores = jnp.einsum("bqhd,bkhd->bqhk", q, kv[0])
        new = jnp.maximum(most, scores.max(-1))
        share, old = jnp.exp(scores - new[..., None]), jnp.exp(most - new)
        sums = sums * old[..., None] + jnp.einsum("bqhk,bkhd->bqhd", share, kv[1])
        return (new, total * old + share.sum(-1), sums), None

    start = jnp.full(q.shape[:3], -1e9), jnp.zeros(q.shape[:3]), jnp.zeros_like(q)
    (_, total, sums), _ = lax.scan(turn, start, (chunks(k), chunks(v)))
    return flat(sums / total[..., None])


@layer
def talking_heads(w, x):
    q, k, v = heads(w, x, 4)
    scores = jnp.einsum("bqhd,bkhd,hg->bgqk", q, k, w("mix", 4, 4))
    return flat(jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v))


@layer
def attention_with_a_sink(w, x):
    q, k, v = heads(w, x)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    most = jnp.maximum(scores.max(-1, keepdims=True), 0)
    share = jnp.exp(scores - most)
    share = share / (share.sum(-1, keepdims=True) + jnp.exp(-most))
    return flat(jnp.einsum("bhqk,bkhd->bqhd", share, v))


@layer
def capped_scores(w, x):
    q, k, v = heads(w, x)
    scores = 5 * jnp.tanh(jnp.einsum("bqhd,bkhd->bhqk", q, k) / 5)
    return flat(jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v))


@layer
def normed_queries_and_keys(w, x):
    q, k, v = heads(w, x)
    return flat(attend(norm(q), norm(k), v, causal(x.shape[1])))


# --- positions ----------------------------------------------------------------------------------


@layer
def positions_from_a_table(w, x):
    return x + w("at", 32, x.shape[-1])[: x.shape[1]][None]


@layer
def positions_by_index(w, x):
    return x + w("at", 32, x.shape[-1])[jnp.arange(x.shape[1])][None]


@layer
def positions_as_sines(w, x):
    at = np.arange(x.shape[1])[:, None] / 10.0 ** np.arange(x.shape[-1])[None]
    return x + np.sin(at)[None]


@layer
def positions_counted(w, x):
    return x + jnp.arange(x.shape[1])[None, :, None]


def angles(x):
    half = x.shape[-1] // 2
    turns = 100.0 ** (-jnp.arange(half) / half)
    at = jnp.arange(x.shape[1])[:, None] * turns[None]
    return jnp.cos(at)[None, :, None], jnp.sin(at)[None, :, None]


@layer
def rotary_of_halves(w, x):
    x = (x @ w("a", x.shape[-1], 8)).reshape(*x.shape[:2], 2, 4)
    cos, sin = angles(x)
    one, two = jnp.split(x, 2, axis=-1)
    return flat(jnp.concatenate([one * cos - two * sin, two * cos + one * sin], -1))


@layer
def rotary_of_neighbours(w, x):
    x = (x @ w("a", x.shape[-1], 8)).reshape(*x.shape[:2], 2, 4)
    cos, sin = angles(x)
    one, two = x[..., ::2], x[..., 1::2]
    return flat(jnp.stack([one * cos - two * sin, two * cos + one * sin], -1))


@layer
def rotary_by_complex_numbers(w, x):
    x = (x @ w("a", x.shape[-1], 8)).reshape(*x.shape[:2], 2, 4)
    cos, sin = angles(x)
    y = lax.complex(x[..., ::2], x[..., 1::2]) * lax.complex(cos, sin)
    return flat(jnp.stack([y.real, y.imag], -1))


@program
def positions_within_documents(w, b):
    at = jnp.broadcast_to(jnp.arange(b["tokens"].shape[1])[None], b["tokens"].shape)
    begins = jnp.pad(b["tokens"][:, 1:] != b["tokens"][:, :-1], ((0, 0), (1, 0)))
    at = at - lax.cummax(jnp.where(begins, at, 0), axis=1)
    return squares(b["z"] + w("at", 32, b["z"].shape[-1])[at])


@layer
def scaled_by_the_length(w, x):
    return x / x.shape[1] + x ** min(x.shape[1], 3)


@layer
def a_branch_on_the_length(w, x):
    return 2 * x if x.shape[1] >= 4 else x - 1


@layer
def a_table_of_the_length(w, x):
    return x * np.full((1, x.shape[1], 1), 1 / x.shape[1])


# --- neighbours ---------------------------------------------------------------------------------


@layer
def shifted_by_one(w, x):
    return x + jnp.roll(x, 1, axis=1)


@layer
def shifted_by_padding(w, x):
    return x - jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1]


@layer
def differences(w, x):
    return jnp.diff(x, axis=1)


@layer
def convolution_of_neighbours(w, x):
    kernel = w("kernel", 3, x.shape[-1], 4)
    names = ("NWC", "WIO", "NWC")
    return lax.conv_general_dilated(x, kernel, (1,), "SAME", dimension_numbers=names)


@layer
def causal_depthwise_convolution(w, x):
    width = x.shape[-1]
    names = ("NWC", "WIO", "NWC")
    return lax.conv_general_dilated(
        x, w("k", 3, 1, width), (1,), [(2, 0)], dimension_numbers=names, feature_group_count=width
    )


@layer
def depthwise_convolution_by_sums(w, x):
    padded, kernel = jnp.pad(x, ((0, 0), (2, 0), (0, 0))), w("k", 3, x.shape[-1])
    return sum(padded[:, i : i + x.shape[1]] * kernel[i][None, None] for i in range(3))


@layer
def convolution_of_each_position(w, x):
    names = ("NWC", "WIO", "NWC")
    kernel = w("kernel", 1, x.shape[-1], 4)
    return lax.conv_general_dilated(x, kernel, (1,), "VALID", dimension_numbers=names)


@layer
def convolution_over_features(w, x):
    kernel, names = w("kernel", x.shape[1], 3, 5), ("NCW", "IWO", "NCW")
    return lax.conv_general_dilated(x, kernel, (1,), "SAME", dimension_numbers=names)


@layer
def strided_convolution(w, x):
    kernel, names = w("kernel", 2, x.shape[-1], 4), ("NWC", "WIO", "NWC")
    return lax.conv_general_dilated(x, kernel, (2,), "VALID", dimension_numbers=names)


@layer
def patches(w, x):
    return x.reshape(len(x), -1, 2 * x.shape[-1]) @ w("a", 2 * x.shape[-1], 3)


@layer
def pairs_by_strides(w, x):
    return x[:, ::2] * x[:, 1::2]


@layer
def pooled_in_pairs(w, x):
    return nnx.avg_pool(x, (2,), (2,)) + nnx.max_pool(x, (2,), (2,))


@layer
def smoothed(w, x):
    return nnx.avg_pool(x, (3,), (1,), "SAME")


@layer
def squeezed_and_excited(w, x):
    gate = jax.nn.sigmoid(x.mean(1) @ w("a", x.shape[-1], x.shape[-1]))
    return x * gate[:, None]


# --- recurrences --------------------------------------------------------------------------------


@layer
def a_recurrence(w, x):
    a = w("a", x.shape[-1], x.shape[-1])
    new = lambda h, y: jnp.tanh(h @ a + y)
    step = lambda h, y: (new(h, y), new(h, y))
    return lax.scan(step, jnp.zeros_like(x[:, 0]), x.swapaxes(0, 1))[1].swapaxes(0, 1)


@layer
def linear_attention_as_a_recurrence(w, x):
    """What is remembered is a sum, of which each position reads what there is with its own."""
    d = x.shape[-1]
    q, k, v = (jnp.swapaxes(x @ w(name, d, d), 0, 1) for name in "qkv")

    def step(state, qkv):
        q, k, v = qkv
        state = state + jnp.einsum("bk,bv->bkv", k, v)
        return state, jnp.einsum("bk,bkv->bv", q, state)

    _, y = lax.scan(step, jnp.zeros((len(x), d, d)), (q, k, v))
    return jnp.swapaxes(y, 0, 1)


@layer
def an_lstm_of_flax(w, x):
    return nnx.RNN(
        nnx.LSTMCell(x.shape[-1], 4, dtype=x.dtype, param_dtype=x.dtype, rngs=nnx.Rngs(0))
    )(x)


@layer
def a_state_space_by_associative_scan(w, x):
    gate = jax.nn.sigmoid(x @ w("a", x.shape[-1], x.shape[-1]))
    join = lambda one, two: (one[0] * two[0], two[0] * one[1] + two[1])
    return lax.associative_scan(join, (gate, x), axis=1)[1]


@layer
def a_state_space_in_chunks(w, x):
    """Mamba 2: within chunks a product, between them a scan."""
    chunks = jnp.moveaxis(x.reshape(len(x), -1, 2, x.shape[-1]), 1, 0)

    def step(state, chunk):
        within = jnp.cumsum(chunk, axis=1)
        return 0.5 * state + within[:, -1], within + state[:, None]

    _, y = lax.scan(step, jnp.zeros_like(x[:, 0]), chunks)
    return jnp.moveaxis(y, 0, 1).reshape(x.shape)


@layer
def a_moving_average(w, x):
    join = lambda one, two: (one[0] * two[0], two[0] * one[1] + two[1])
    return lax.associative_scan(join, (jnp.full_like(x, 0.9), 0.1 * x), axis=1)[1]


@layer
def sums_up_to_here(w, x):
    return jnp.cumsum(x, axis=1) / (1 + jnp.arange(x.shape[1]))[None, :, None]


@layer
def sums_from_here(w, x):
    return lax.cumsum(x, axis=1, reverse=True)


@layer
def greatest_up_to_here(w, x):
    return lax.cummax(x, axis=1)


@layer
def until_every_position_is_small(w, x):
    """Adaptive computation: a position goes on until it is small."""
    go = lambda x: (jnp.abs(x).max(-1, keepdims=True) > 0.5).any()
    turn = lambda x: jnp.where(jnp.abs(x).max(-1, keepdims=True) > 0.5, 0.7 * x, x)
    return x + lax.stop_gradient(lax.while_loop(go, turn, x))


# --- sums, orders, transforms -------------------------------------------------------------------


@layer
def centred(w, x):
    return x - x.mean(axis=1, keepdims=True)


@layer
def normed_over_positions(w, x):
    return (x - x.mean(1, keepdims=True)) / (1e-3 + x.std(1, keepdims=True))


@layer
def layer_norm_of_flax(w, x):
    return nnx.LayerNorm(x.shape[-1], rngs=nnx.Rngs(0))(x)


@layer
def group_norm_of_flax(w, x):
    return nnx.GroupNorm(x.shape[-1], num_groups=1, rngs=nnx.Rngs(0))(x)


@layer
def instance_norm_of_flax(w, x):
    return nnx.InstanceNorm(x.shape[-1], rngs=nnx.Rngs(0))(x)


@layer
def batch_norm_of_flax(w, x):
    return nnx.BatchNorm(x.shape[-1], rngs=nnx.Rngs(0))(x)


@layer
def mixed_by_fft(w, x):
    return jnp.fft.fft2(x, axes=(1, 2)).real


@layer
def fft_over_features(w, x):
    return jnp.fft.fft(x, axis=2).real


@layer
def a_long_convolution_by_fft(w, x):
    length = x.shape[1]
    kernel = jnp.fft.rfft(w("k", length, x.shape[-1]), 2 * length, axis=0)
    return jnp.fft.irfft(jnp.fft.rfft(x, 2 * length, axis=1) * kernel[None], axis=1)[:, :length]


@layer
def solved_over_features(w, x):
    width = x.shape[-1]
    a = jnp.eye(width)[None, None] * 4 + 0.1 * x[..., None] * x[..., None, :]
    return jnp.linalg.solve(a, x[..., None])[..., 0]


@layer
def likelihoods_of_covariances(w, x):
    """A determinant and a solution for each row: of what all of its positions make."""
    spread = jnp.eye(x.shape[-1])[None] + jnp.einsum("bsd,bse->bde", x, x)
    solved = jnp.linalg.solve(spread, x.sum(1)[..., None])[..., 0]
    return jnp.linalg.slogdet(spread)[1][:, None] + solved + jnp.linalg.inv(spread).sum(-1)


@layer
def the_two_greatest(w, x):
    return x + lax.top_k(coarse(x, 64).swapaxes(1, 2), 2)[0].sum(-1)[:, None]


@layer
def tokens_that_are_kept(w, x):
    score = coarse(x @ w("a", x.shape[-1]), 64)
    _, at = lax.top_k(score, 2)
    return jnp.take_along_axis(x, at[..., None], axis=1)


@layer
def experts_that_choose_tokens(w, x):
    score = jax.nn.softmax(x @ w("router", x.shape[-1], 3))
    share, at = lax.top_k(coarse(score, 2**20).swapaxes(1, 2), 2)  # [rows, experts, 2]
    chosen = jax.vmap(lambda x, at: x[at])(x, at)
    y = jnp.einsum("becd,edf->becf", chosen, w("experts", 3, x.shape[-1], x.shape[-1]))
    y = y * share[..., None]
    add = lambda x, at, y: x.at[at.reshape(-1)].add(y.reshape(-1, y.shape[-1]))
    return jax.vmap(add)(jnp.zeros_like(x), at, y)


@layer
def slots_of_tokens(w, x):
    """Soft mixture of experts: slots take shares of all tokens."""
    logits = x @ w("slots", x.shape[-1], 4)
    inside = jnp.einsum("bsp,bsd->bpd", jax.nn.softmax(logits, axis=1), x)
    return jnp.einsum("bsp,bpd->bsd", jax.nn.softmax(logits, axis=2), jnp.tanh(inside))


@layer
def mixed_along_positions(w, x):
    """MLP-Mixer: a linear map over positions."""
    return x + jnp.einsum("bsd,st->btd", x, w("mix", x.shape[1], x.shape[1]))


@layer
def reversed_in_time(w, x):
    return x + x[:, ::-1]


@layer
def turned_around(w, x):
    return x.reshape(x.shape[0], x.shape[2], x.shape[1]).swapaxes(1, 2)


@layer
def a_class_in_front(w, x):
    first = jnp.broadcast_to(w("class", 1, 1, x.shape[-1]), (len(x), 1, x.shape[-1]))
    x = jnp.concatenate([first, x], axis=1)
    return (jax.nn.softmax(x @ x.swapaxes(1, 2)) @ x)[:, 0]


@layer
def prefix_tokens(w, x):
    prefix = jnp.broadcast_to(w("prefix", 2, x.shape[-1])[None], (len(x), 2, x.shape[-1]))
    q, k, v = heads(w, jnp.concatenate([prefix, x], axis=1))
    return flat(attend(q, k, v, causal(q.shape[1])))[:, 2:]


@layer
def keys_and_values_in_front(w, x):
    q, k, v = heads(w, x)
    more = lambda name, t: jnp.concatenate(
        [jnp.broadcast_to(w(name, 2, *t.shape[2:])[None], (len(t), 2, *t.shape[2:])), t], 1
    )
    return flat(attend(q, more("pk", k), more("pv", v)))


@layer
def the_last_position(w, x):
    return x[:, -1] @ w("a", x.shape[-1], 3)


@layer
def the_first_position(w, x):
    return x[:, 0] @ w("a", x.shape[-1], 3)


@layer
def set_to_zero_at_the_first(w, x):
    return x.at[:, 0].set(0)


@layer
def the_greatest_of_each_row(w, x):
    return x.max(axis=1)


@program
def a_sum_that_nothing_reads(w, b):
    unread = b["z"].sum(1) @ w("a", b["z"].shape[-1])
    return (b["z"] ** 2).mean() + 0 * lax.stop_gradient(unread).mean(), {}


# --- losses -------------------------------------------------------------------------------------


def logits_of(w, b):
    return w("in", V, 4)[b["tokens"]] @ w("out", 4, V) + b["z"] @ w("z", b["z"].shape[-1], V)


@program
def next_of_each(w, b):
    return ce(logits_of(w, b)[:, :-1], b["tokens"][:, 1:]).mean(), {}


@program
def mean_over_what_counts(w, b):
    loss = ce(logits_of(w, b), b["tokens"]) * b["mask"]
    return loss.sum() / jnp.maximum(b["mask"].sum(), 1), {"tokens": b["mask"].sum()}


@program
def mean_row_by_row(w, b):
    loss = ce(logits_of(w, b), b["tokens"]) * b["mask"]
    return (loss.sum(1) / jnp.maximum(b["mask"].sum(1), 1)).mean(), {"of_row": loss.sum(1)}


@program
def a_sum_over_positions(w, b):
    return logits_of(w, b).sum((1, 2)).mean(), {}


@program
def likelihood_of_whole_rows(w, b):
    return jax.nn.softplus(logits_of(w, b).mean((1, 2))).mean(), {}


@program
def a_loss_in_chunks_by_map(w, b):
    y, tokens = logits_of(w, b), b["tokens"]
    chunks = lambda t: jnp.moveaxis(t.reshape(len(t), -1, 2, *t.shape[2:]), 1, 0)
    return lax.map(lambda c: ce(*c).sum(), (chunks(y), chunks(tokens))).sum() / tokens.size, {}


@program
def a_loss_in_chunks_by_scan(w, b):
    h, out = w("in", V, 4)[b["tokens"]], w("out", 4, V)
    chunks = lambda t: jnp.moveaxis(t.reshape(len(t), -1, 2, *t.shape[2:]), 1, 0)

    @jax.checkpoint
    def turn(total, c):
        return total + ce(c[0] @ out, c[1]).sum(), None

    total, _ = lax.scan(turn, 0.0, (chunks(h), chunks(b["tokens"])))
    return total / b["tokens"].size, {}


@program
def a_mean_over_chunks(w, b):
    y = logits_of(w, b)
    return (y.reshape(y.shape[0], -1, 2, y.shape[-1]) ** 2).mean((2, 3)).mean(), {}


@program
def connectionist_over_positions(w, b):
    labels = 1 + b["tokens"][:, :2] % 3
    pad = jnp.zeros(b["tokens"].shape)
    loss = optax.ctc_loss(logits_of(w, b)[..., :4], pad, labels, jnp.zeros(labels.shape))
    return loss.mean(), {}


@program
def a_penalty_on_changes(w, b):
    h = w("in", V, 4)[b["tokens"]] + b["z"][..., :1]
    return ((h[:, 1:] - h[:, :-1]) ** 2).sum() + jnp.abs(w("in", V, 4)).sum(), {}


@program
def preferences(w, b):
    """DPO: likelihoods of whole rows, in pairs."""
    logs = jax.nn.log_softmax(logits_of(w, b))
    own = (jnp.take_along_axis(logs, b["tokens"][..., None], 2)[..., 0] * b["mask"]).sum(1)
    good, bad = own[::2], own[1::2]
    return -jax.nn.log_sigmoid(0.1 * (good - bad)).mean(), {"margin": (good - bad).mean()}


@program
def returns_of_rewards(w, b):
    """Advantages from the end on: a scan backwards."""
    values = b["z"] @ w("v", b["z"].shape[-1])
    turn = lambda total, r: (r + 0.9 * total,) * 2
    _, returns = lax.scan(turn, jnp.zeros(len(values)), b["mask"].T, reverse=True)
    return ((values - returns.T) ** 2).mean(), {"returns": returns}


@program
def contrastive_over_positions(w, b):
    left, right = norm(b["z"] @ w("l", b["z"].shape[-1], 3)), norm(b["z"])
    logits = jnp.einsum("bsd,btd->bst", left, right @ w("r", b["z"].shape[-1], 3))
    return ce(logits, jnp.arange(logits.shape[1])[None]).mean(), {}


@program
def positions_apart_from_each_other(w, b):
    z = norm(b["z"])
    near = jnp.einsum("bsd,btd->bst", z, z)
    return jnp.where(off_diagonal(z.shape[1])[None], near, 0).mean() * w("a"), {}


# --- rules of derivatives -----------------------------------------------------------------------


def with_rule(backward):
    @jax.custom_vjp
    def same(x):
        return x * 1.0

    same.defvjp(lambda x: (x * 1.0, x), lambda x, g: (backward(x, g),))
    return same


RULES = {
    "a_gradient_clipped_by_its_norm": lambda x, g: g / jnp.maximum(1, jnp.linalg.norm(g) * 9),
    "a_gradient_clipped_row_by_row": lambda x, g: (
        g / jnp.maximum(1, 9 * jnp.sqrt((g**2).sum((1, 2), keepdims=True)))
    ),
    "a_gradient_over_the_length": lambda x, g: g / g.shape[1],
    "a_gradient_with_its_mean_taken_off": lambda x, g: g - g.mean(1, keepdims=True),
    "a_gradient_shifted": lambda x, g: jnp.roll(g, 1, axis=1),
    "a_gradient_with_noise": lambda x, g: (
        g * (1 + jax.random.normal(jax.random.key(3), g.shape, g.dtype))
    ),
    "a_gradient_that_branches": lambda x, g: lax.cond(
        (g**2).sum() > 1e-4, lambda g: g * 0.5, lambda g: g, g
    ),
}
for _name, _rule in RULES.items():

    def _of_rule(w, x, rule=_rule):
        return with_rule(rule)(x @ w("a", x.shape[-1], 4))

    _of_rule.__name__ = _name
    layer(_of_rule)


@layer
def a_step_size_that_is_learnt(w, x):
    """LSQ: the gradient of the step is divided by the root of the size."""

    @jax.custom_vjp
    def quantised(x, step):
        return coarse(lax.stop_gradient(x / step), 8) * step

    def backward(kept, g):
        x, _ = kept
        return g, (g * x).sum() / math.sqrt(g.size)

    quantised.defvjp(lambda x, step: (quantised(x, step), (x, step)), backward)
    return quantised(x, 1 + jnp.abs(w("step")))


@layer
def a_jvp_rule_over_positions(w, x):
    @jax.custom_jvp
    def centre(x):
        return x - x.mean(1, keepdims=True)

    @centre.defjvp
    def _(primals, tangents):
        (x,), (t,) = primals, tangents
        return centre(x), t - 0.5 * t.mean(1, keepdims=True)

    return centre(x @ w("a", x.shape[-1], 4))


@layer
def straight_through(w, x):
    y = x @ w("a", x.shape[-1], 4)
    return y + lax.stop_gradient(coarse(y, 2) - y)


# --- random numbers -----------------------------------------------------------------------------


@program
def dropout(w, b):
    kept = jax.random.bernoulli(b["key"], 0.7, b["z"].shape)
    return squares(jnp.where(kept, b["z"] / 0.7, 0) @ w("a", b["z"].shape[-1], 3))


@program
def dropout_from_keys_of_rows(w, b):
    keys = jax.vmap(jax.random.fold_in, (None, 0))(b["key"], jnp.arange(len(b["z"])))
    kept = jax.vmap(lambda key: jax.random.bernoulli(key, 0.7, b["z"].shape[1:]))(keys)
    return squares(jnp.where(kept, b["z"], 0) @ w("a", b["z"].shape[-1], 3))


@program
def dropout_of_scores(w, b):
    q, k, v = heads(w, b["z"])
    scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
    kept = jax.random.bernoulli(b["key"], 0.8, scores.shape)
    return squares(flat(jnp.einsum("bhqk,bkhd->bqhd", jnp.where(kept, scores, 0), v)))


@program
def noise_from_a_constant_key(w, b):
    return squares(b["z"] + jax.random.normal(jax.random.key(7), b["z"].shape[1:])[None])


@program
def masked_spans(w, b):
    at = jax.random.randint(b["key"], (len(b["z"]), 1), 0, b["z"].shape[1])
    near = jnp.abs(jnp.arange(b["z"].shape[1])[None] - at) < 2
    return squares(jnp.where(near[..., None], w("blank", b["z"].shape[-1])[None, None], b["z"]))


@program
def shuffled_positions(w, b):
    order = jax.random.permutation(b["key"], b["z"].shape[1])
    return squares(b["z"][:, order] * b["z"])


# --- whole models -------------------------------------------------------------------------------


def block(w, x, name=""):
    named = lambda what, *shape: w(f"{name}{what}", *shape)
    q, k, v = heads(named, norm(x))
    y = flat(attend(q, k, v, causal(x.shape[1])))
    x = x + checkpoint_name(y, "attended") @ named("o", y.shape[-1], x.shape[-1])
    return x + jax.nn.gelu(norm(x) @ named("up", x.shape[-1], 8)) @ named("down", 8, x.shape[-1])


@program
def a_language_model(w, b):
    x = w("table", V, 4)[b["tokens"]] + w("at", 32, 4)[: b["tokens"].shape[1]][None]
    for name in "ab":
        x = jax.checkpoint(functools.partial(block, w, name=name))(x)
    logits = norm(x) @ w("table", V, 4).T
    return ce(logits[:, :-1], b["tokens"][:, 1:]).mean(), {"logits": logits}


@program
def a_language_model_in_a_scan(w, b):
    weights = {n: w(n, 2, *s) for n, s in {"q": (4, 6), "k": (4, 6), "v": (4, 6)}.items()}
    weights |= {n: w(n, 2, *s) for n, s in {"o": (6, 4), "up": (4, 8), "down": (8, 4)}.items()}
    x = w("table", V, 4)[b["tokens"]]
    turn = lambda x, held: (block(lambda name, *_: held[name], x), x.mean())
    x, means = lax.scan(turn, x, weights)
    return (ce(x @ w("table", V, 4).T, b["tokens"]) * b["mask"]).sum() / b["mask"].size, {
        "means": means
    }


@program
def an_encoder_of_masked_words(w, b):
    x = jnp.where(b["mask"][..., None] > 0, w("table", V, 4)[b["tokens"]], 0)
    x = x + jnp.sin(jnp.arange(x.shape[1]))[None, :, None]
    x = block(w, x)
    loss = ce(x @ w("table", V, 4).T, b["tokens"])
    return jnp.where(b["mask"] > 0, 0, loss).sum() / jnp.maximum((b["mask"] == 0).sum(), 1), {}


@program
def a_classifier_of_rows(w, b):
    x = block(w, b["z"])
    logits = x.mean(1) @ w("out", x.shape[-1], 5)
    return ce(logits, b["labels"]).mean(), {"accuracy": (logits.argmax(-1) == b["labels"]).mean()}
