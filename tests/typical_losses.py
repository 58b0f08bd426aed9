"""Losses and metrics that people write, each a small program over a batch.

A function takes `w(name, *shape)`, which returns a weight, and the batch of
`random_programs.make_batch`, and returns a loss and variables. Some are said twice: over rows,
and over what looks like rows.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from tests.random_programs import (
    Asked,
    Program,
    arrays,
    clipped,
    coarse,
    make_weights,
    signs,
    soft,
    straight,
    turned,
    unit,
)

V = 7  # words
TYPICAL: dict[str, Callable[[Any, Any], Any]] = {}


def typical(function):
    TYPICAL[function.__name__] = function
    return function


def off_diagonal(n):
    return ~jnp.eye(n, dtype=bool)


def norm(x, axis=-1):
    return x / jnp.sqrt(1e-6 + jnp.sum(x * x, axis, keepdims=True))


def ce(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def classes(w, b, n=5):
    return jnp.tanh(b["x"] @ w("in", b["x"].shape[1], 4)) @ w("out", 4, n)


def words(w, b, d=4):
    """Logits [rows, length, words] of the tokens before."""
    h = w("table", V, d)[b["tokens"]]
    h = h + jnp.tanh(jnp.roll(h, 1, 1) @ w("mix", d, d))
    return h @ w("table", V, d).T


def features(w, b, name="in", d=3):
    return jnp.tanh(b["x"] @ w(name, b["x"].shape[1], d))


# --- plain losses -------------------------------------------------------------------------------


@typical
def linear_regression(w, b):
    error = b["x"] @ w("a", b["x"].shape[1]) + w("b", 1) - b["y"]
    return jnp.mean(error**2), {"mae": jnp.abs(error).mean(), "r2": 1 - error.var() / b["y"].var()}


@typical
def logistic_regression(w, b):
    logits = b["x"] @ w("a", b["x"].shape[1])
    truth = (b["labels"] > 0).astype(float)
    loss = optax.sigmoid_binary_cross_entropy(logits, truth).mean()
    return loss, {"accuracy": jnp.mean((logits > 0) == (truth > 0)), "logits": logits}


@typical
def classification(w, b):
    logits = classes(w, b)
    right = logits.argmax(-1) == b["labels"]
    return ce(logits, b["labels"]).mean(), {"right": right, "accuracy": right.mean()}


@typical
def cross_entropy_by_index(w, b):
    logs = jax.nn.log_softmax(classes(w, b))
    return -logs[jnp.arange(len(logs)), b["labels"]].mean(), {}


@typical
def cross_entropy_by_take_along_axis(w, b):
    logs = jax.nn.log_softmax(classes(w, b))
    return -jnp.take_along_axis(logs, b["labels"][:, None], 1).sum() / logs.shape[0], {}


@typical
def smoothed_labels(w, b):
    logits = classes(w, b)
    smooth = optax.smooth_labels(jax.nn.one_hot(b["labels"], 5), 0.1)
    return optax.softmax_cross_entropy(logits, smooth).mean(), {}


@typical
def focal_loss(w, b):
    logs = jax.nn.log_softmax(classes(w, b))
    own = jnp.take_along_axis(logs, b["labels"][:, None], 1)[:, 0]
    return -jnp.mean((1 - jnp.exp(own)) ** 2 * own), {}


@typical
def huber_loss(w, b):
    out = b["x"] @ w("a", b["x"].shape[1])
    loss = optax.huber_loss(out, b["y"], delta=0.5)
    return loss.mean(), {"worst": loss.max(), "which": loss.argmax(), "log_cosh": loss.sum()}


@typical
def class_weights(w, b):
    """Weights that follow from the counts of labels in the batch."""
    counts = jnp.zeros(5).at[b["labels"]].add(1)
    weight = (len(b["labels"]) / (1 + counts))[b["labels"]]
    loss = ce(classes(w, b), b["labels"])
    return jnp.sum(weight * loss) / jnp.sum(weight), {"counts": counts}


@typical
def distillation(w, b):
    student, teacher = classes(w, b), lax.stop_gradient(jnp.sin(classes(w, b)))
    target = jax.nn.softmax(teacher / 2)
    kl = optax.losses.kl_divergence(jax.nn.log_softmax(student / 2), target)
    return kl.mean() * 4, {"agree": (student.argmax(1) == teacher.argmax(1)).sum()}


@typical
def masked_tokens(w, b):
    loss = ce(words(w, b), b["tokens"])
    return jnp.sum(loss * b["mask"]) / jnp.sum(b["mask"]), {"tokens": b["mask"].sum()}


@typical
def masked_tokens_at_least_one(w, b):
    loss, keep = ce(words(w, b), b["tokens"]), b["keep"][:, None] & (b["mask"] > 0)
    return jnp.where(keep, loss, 0).sum() / jnp.maximum(keep.sum(), 1), {"kept": keep}


@typical
def mean_with_where(w, b):
    loss = ce(words(w, b), b["tokens"])
    keep = (b["mask"] > 0).at[0, 0].set(True)
    return loss.mean(where=keep), {
        "per_example": jnp.mean(loss, -1),
        "spread": loss.std(where=keep),
    }


@typical
def mean_of_each_sequence(w, b):
    loss = ce(words(w, b), b["tokens"])
    of_each = jnp.sum(loss * b["mask"], 1) / jnp.maximum(b["mask"].sum(1), 1)
    return of_each.mean(), {"perplexity": jnp.exp(of_each)}


@typical
def next_token(w, b):
    logits = words(w, b)[:, :-1]
    return ce(logits, b["tokens"][:, 1:]).mean(), {"bits": logits.max(-1)}


@typical
def flat_tokens(w, b):
    """[rows, length] as [rows * length]."""
    logits = words(w, b).reshape(-1, V)
    loss = ce(logits, b["tokens"].reshape(-1))
    keep = b["mask"].ravel()
    return (loss * keep).sum() / keep.sum(), {"loss": loss, "back": loss.reshape(b["mask"].shape)}


@typical
def chunks_of_words(w, b):
    """The softmax over words in pieces, from a scan."""
    h = w("table", V, 4)[b["tokens"]]
    pieces = w("out", 2, 4, 5)

    def piece(carry, p):
        logits = h @ p
        return jnp.logaddexp(carry, jax.nn.logsumexp(logits, -1)), logits.max()

    z, largest = lax.scan(piece, jnp.full(h.shape[:2], -1e30), pieces)
    return jnp.mean(z * b["mask"]), {"largest": largest}


@typical
def chunks_of_rows(w, b):
    """Rows two by two, for memory."""
    rows = len(b["x"])
    x, y = b["x"].reshape(rows // 2, 2, -1), b["y"].reshape(rows // 2, 2)
    a = w("a", b["x"].shape[1])

    def piece(total, xy):
        return total + jnp.sum((xy[0] @ a - xy[1]) ** 2), xy[0].mean()

    total, means = lax.scan(piece, 0.0, (x, y))
    return total / rows, {"means": means}


@typical
def microbatches_with_a_sum_of_gradients(w, b):
    a = w("a", b["x"].shape[1])
    loss = lambda a, x, y: jnp.mean((x @ a - y) ** 2)

    def piece(total, xy):
        return total + jax.grad(loss)(a, *xy), None

    parts = jax.tree.map(lambda v: v.reshape(2, -1, *v.shape[1:]), (b["x"], b["y"]))
    total, _ = lax.scan(piece, jnp.zeros_like(a), parts)
    return jnp.sum(total**2), {"gradient": total}


@typical
def connectionist(w, b):
    logits = words(w, b)[..., :4]
    pad = 1 - b["mask"].at[:, 0].set(1.0)
    labels = 1 + b["labels"][:, None] % 3
    loss = optax.ctc_loss(logits, pad, labels, jnp.zeros_like(labels, float))
    return loss.mean(), {"each": loss}


@typical
def conditional_random_field(w, b):
    scores, moves = words(w, b)[..., :3], w("moves", 3, 3)

    def forward(alpha, s):
        return jax.nn.logsumexp(alpha[:, :, None] + moves[None], 1) + s, None

    line = jnp.swapaxes(scores, 0, 1)
    alpha, _ = lax.scan(forward, line[0], line[1:])
    return jax.nn.logsumexp(alpha, -1).mean(), {"best": alpha.argmax(-1)}


# --- rows with rows -----------------------------------------------------------------------------


@typical
def clip_contrastive(w, b):
    left, right = norm(features(w, b)), norm(features(w, b, "other"))
    logits = jnp.exp(w("temperature")) * left @ right.T
    labels = jnp.arange(len(logits))
    loss = (ce(logits, labels).mean() + ce(logits.T, labels).mean()) / 2
    return loss, {"accuracy": (logits.argmax(1) == labels).mean(), "logits": logits}


@typical
def siglip(w, b):
    left, right = norm(features(w, b)), norm(features(w, b, "other"))
    logits = left @ right.T * jnp.exp(w("t")) + w("bias")
    signs = 2 * jnp.eye(len(logits)) - 1
    return -jnp.sum(jax.nn.log_sigmoid(signs * logits)) / len(logits), {}


@typical
def simclr(w, b):
    """Two views, one above the other."""
    views = norm(jnp.concatenate([features(w, b), features(w, b, "other")], 0))
    n = len(b["x"])
    logits = jnp.where(off_diagonal(2 * n), views @ views.T / 0.5, -1e9)
    labels = jnp.concatenate([jnp.arange(n) + n, jnp.arange(n)])
    return ce(logits, labels).mean(), {"top": lax.top_k(logits, 2)[1]}


@typical
def supervised_contrastive(w, b):
    z = norm(features(w, b))
    same = (b["labels"][:, None] == b["labels"][None]) & off_diagonal(len(z))
    logits = jnp.where(off_diagonal(len(z)), z @ z.T, -1e9)
    logs = logits - jax.nn.logsumexp(logits, 1, keepdims=True)
    per = jnp.sum(jnp.where(same, logs, 0), 1) / jnp.maximum(same.sum(1), 1)
    return -per.mean(), {"pairs": same.sum()}


@typical
def triplet_of_neighbours(w, b):
    z = features(w, b)
    near = jnp.sum((z - features(w, b, "other")) ** 2, -1)
    far = jnp.sum((z - jnp.roll(z, 1, 0)) ** 2, -1)
    return jax.nn.relu(near - far + 0.3).mean(), {"active": (near + 0.3 > far).mean()}


@typical
def triplet_of_the_hardest(w, b):
    z = features(w, b)
    gap = jnp.sum((z[:, None] - z[None]) ** 2, -1)
    same = b["labels"][:, None] == b["labels"][None, :]
    hardest = jnp.max(jnp.where(same, gap, 0), 1)
    nearest = jnp.min(jnp.where(same, 1e3, gap), 1)
    return jax.nn.softplus(hardest - nearest).mean(), {"nearest": nearest}


@typical
def hardest_negative(w, b):
    z = norm(features(w, b))
    logits = jnp.where(off_diagonal(len(z)), z @ z.T, -np.inf)
    hard = z[jnp.argmax(logits, 1)]
    return jnp.mean(jnp.sum(z * hard, -1)), {"which": jnp.argmax(logits, 1)}


@typical
def nearest_neighbours(w, b):
    z = features(w, b)
    gap = jnp.sum((z[:, None] - z[None]) ** 2, -1) + 1e3 * jnp.eye(len(z))
    value, at = lax.top_k(-gap, 2)
    return jnp.mean(b["y"][at] * value), {"at": at}


@typical
def pairs_in_order(w, b):
    """Every pair: who has the larger y should have the larger score."""
    score = b["x"] @ w("a", b["x"].shape[1])
    more = b["y"][:, None] > b["y"][None]
    return jnp.sum(jnp.where(more, jax.nn.softplus(score[None] - score[:, None]), 0)) / (
        more.sum()
    ), {"inversions": jnp.sum(more & (score[:, None] < score[None]))}


@typical
def softmax_over_rows(w, b):
    score = features(w, b) @ w("a", 3)
    share = jax.nn.softmax(score, axis=0)
    return jnp.sum(share * b["y"]), {"share": share, "entropy": -jnp.sum(share * jnp.log(share))}


@typical
def variance_and_covariance(w, b):
    z = features(w, b, d=4)
    z = z - z.mean(0)[None]
    cov = z.T @ z / (z.shape[0] - 1)
    off = cov * (1 - jnp.eye(4))
    spread = jnp.sqrt(z.var(0) + 1e-4)
    return jax.nn.relu(1 - spread).mean() + jnp.sum(off**2) / 4, {"cov": cov}


@typical
def barlow_twins(w, b):
    each = lambda z: (z - z.mean(0, keepdims=True)) / (z.std(0, keepdims=True) + 1e-3)
    left, right = each(features(w, b)), each(features(w, b, "other"))
    c = left.T @ right / len(left)
    return jnp.sum((jnp.diag(c) - 1) ** 2) + 0.1 * jnp.sum(jnp.triu(c, 1) ** 2), {"c": c}


@typical
def dino_centre(w, b):
    teacher = lax.stop_gradient(features(w, b, "other"))
    share = jax.nn.softmax((teacher - b["shared"][:1, :1]) / 0.1)
    loss = -jnp.sum(share * jax.nn.log_softmax(features(w, b)), -1).mean()
    return loss, {"centre": 0.9 * b["shared"][:1, :1] + 0.1 * teacher.mean(0, keepdims=True)}


@typical
def byol(w, b):
    online, target = features(w, b), lax.stop_gradient(features(w, b, "other"))
    return 2 - 2 * jnp.mean(jnp.sum(norm(online) * norm(target), -1)), {}


@typical
def sinkhorn(w, b):
    """SwAV: scores are made uniform over rows and over prototypes by turns."""
    scores = features(w, b) @ w("prototypes", 3, 4)
    q = jnp.exp(lax.stop_gradient(scores) / 0.5).T
    q = q / q.sum()

    def balance(_, q):
        q = q / q.sum(1, keepdims=True) / q.shape[0]
        return q / q.sum(0, keepdims=True) / q.shape[1]

    q = (lax.fori_loop(0, 3, balance, q) * q.shape[1]).T
    return -jnp.sum(q * jax.nn.log_softmax(scores), -1).mean(), {"q": q}


@typical
def two_samples(w, b):
    """Maximum mean discrepancy of the halves of a batch."""
    z = features(w, b)
    one, two = jnp.split(z, 2)
    kernel = lambda a, c: jnp.exp(-jnp.sum((a[:, None] - c[None]) ** 2, -1)).mean()
    return kernel(one, one) + kernel(two, two) - 2 * kernel(one, two), {}


@typical
def sliced_distance(w, b):
    z, key = features(w, b), b["key"]
    line = coarse(z @ jax.random.normal(key, (3, 4)), 16)
    target = jnp.sort(jax.random.normal(jax.random.split(key)[0], line.shape), 0)
    return jnp.mean((jnp.sort(line, 0) - target) ** 2), {}


@typical
def in_batch_softmax(w, b):
    """Sampled softmax, corrected by how often an item occurs in the batch."""
    user, item = features(w, b), w("items", 5, 3)[b["labels"]]
    often = jnp.log(jnp.bincount(b["labels"], length=5) / len(b["labels"]) + 1e-9)
    logits = user @ item.T - often[b["labels"]][None]
    clash = (b["labels"][:, None] == b["labels"][None]) & off_diagonal(len(user))
    return ce(jnp.where(clash, -1e9, logits), jnp.arange(len(user))).mean(), {}


@typical
def word_vectors(w, b):
    centre, context = w("c", V, 3)[b["tokens"][:, 0]], w("o", V, 3)[b["tokens"][:, 1]]
    good = jax.nn.log_sigmoid(jnp.sum(centre * context, -1))
    bad = [jax.nn.log_sigmoid(-jnp.sum(centre * jnp.roll(context, k, 0), -1)) for k in (1, 2)]
    return -(good + sum(bad)).mean(), {}


@typical
def matrix_factors(w, b):
    user, item = w("users", 5, 3)[b["labels"]], w("items", V, 3)[b["tokens"][:, 0]]
    error = jnp.einsum("bd,bd->b", user, item) - b["y"]
    return (error**2).mean() + 0.1 * (user**2).sum() / len(user), {}


@typical
def graph_of_rows(w, b):
    """Every row names its neighbours among the rows."""
    n, h = len(b["x"]), features(w, b)
    near = b["tokens"] % n
    h = h + jnp.tanh(h[near].mean(1) @ w("a", 3, 3))
    degree = jnp.zeros(n).at[near.ravel()].add(1)
    back = jax.ops.segment_sum(jnp.repeat(h, near.shape[1], 0), near.ravel(), n)
    return jnp.mean((back / (1 + degree[:, None])) ** 2), {"degree": degree}


# --- statistics of the batch --------------------------------------------------------------------


@typical
def batch_norm(w, b):
    h = b["x"] @ w("in", b["x"].shape[1], 4)
    mean, var = jnp.mean(h, 0), jnp.var(h, 0)
    out = (h - mean[None]) * lax.rsqrt(var[None] + 1e-3) * w("scale", 1, 4) + w("bias", 1, 4)
    old = jnp.ones(4)
    running = {"mean": 0.9 * old + 0.1 * mean, "var": 0.9 * old + 0.1 * var}
    return jnp.mean(jnp.tanh(out) * b["y"][:, None]), running


@typical
def batch_norm_of_what_counts(w, b):
    h, m = w("table", V, 3)[b["tokens"]], b["mask"][..., None]
    total = jnp.maximum(m.sum(), 1)
    mean = (h * m).sum((0, 1), keepdims=True) / total
    var = (((h - mean) ** 2) * m).sum((0, 1), keepdims=True) / total
    return jnp.mean(((h - mean) / jnp.sqrt(var + 0.1)) ** 3), {"mean": mean}


@typical
def batch_norm_over_rows_and_positions(w, b):
    z = b["z"] @ w("a", b["z"].shape[-1], 3)
    flat = z.reshape(-1, 3)
    flat = (flat - flat.mean(0, keepdims=True)) / (flat.std(0, keepdims=True) + 1e-2)
    return (jnp.tanh(flat.reshape(z.shape)) ** 2).mean(), {"n": jnp.array(flat.shape[0])}


@typical
def ghost_batch_norm(w, b):
    x = features(w, b)
    g = x.reshape(2, -1, 3)
    g = (g - g.mean(1, keepdims=True)) / jnp.sqrt(g.var(1, keepdims=True) + 0.1)
    return jnp.mean(jnp.sin(g.reshape(x.shape)) * b["y"][:, None]), {}


@typical
def layer_and_group_norm(w, b):
    z = b["z"] @ w("a", b["z"].shape[-1], 4)
    z = (z - z.mean(-1, keepdims=True)) / jnp.sqrt(z.var(-1, keepdims=True) + 0.1)
    g = z.reshape(*z.shape[:2], 2, 2)
    g = (g - g.mean((1, 3), keepdims=True)) / jnp.sqrt(g.var((1, 3), keepdims=True) + 0.1)
    return jnp.mean(jax.nn.gelu(g) ** 2), {}


@typical
def range_of_activations(w, b):
    """A running maximum, for quantisation."""
    h = features(w, b)
    high, low = jnp.maximum(0.1, jnp.abs(h).max()), h.min(0)
    step = lax.stop_gradient(high) / 7
    return jnp.mean((straight(h / step) * step) ** 2), {"high": high, "low": low}


@typical
def seen_so_far(w, b):
    n = b["x"].shape[0]
    total = b["count"] + n
    mean = (b["x"].sum(0) + 2) / (n + 2)
    return jnp.sum(features(w, b)) / n, {"seen": total, "mean": mean, "n": jnp.float64(n)}


@typical
def balance_of_experts(w, b):
    """The balance loss of a mixture, its z-loss, and two experts for each token."""
    x = b["z"].reshape(-1, b["z"].shape[-1])
    logits = x @ w("router", x.shape[1], 4)
    share = jax.nn.softmax(logits)
    value, at = lax.top_k(share, 2)
    load = jax.nn.one_hot(at, 4).sum(1).mean(0)
    out = jnp.einsum("td,edf->tef", x, w("experts", 4, x.shape[1], 2))
    picked = jnp.take_along_axis(out, at[..., None], 1) * value[..., None]
    balance = 4 * jnp.sum(load * share.mean(0))
    z = jnp.mean(jax.nn.logsumexp(logits, -1) ** 2)
    return jnp.mean(picked.sum(1) ** 2) + 0.1 * balance + 0.01 * z, {"load": load}


@typical
def capacity_of_experts(w, b):
    """Places in the queues of experts are given in the order of the rows."""
    x = b["x"]
    share = jax.nn.softmax(x @ w("router", x.shape[1], 3))
    chosen = jax.nn.one_hot(share.argmax(-1), 3)
    place = jnp.cumsum(chosen, 0) * chosen - 1
    fits = (place < 2) & (place >= 0)
    send = jax.nn.one_hot(jnp.where(fits, place, -1), 2)  # [rows, experts, places]
    queues = jnp.einsum("bec,bd->ecd", send, x)
    done = jnp.tanh(jnp.einsum("ecd,edf->ecf", queues, w("experts", 3, x.shape[1], 2)))
    back = jnp.einsum("bec,ecf,be->bf", send, done, share)
    return jnp.mean(back**2), {"dropped": (~fits.any(1)).sum(), "queues": queues}


@typical
def sorted_tokens_for_experts(w, b):
    """Tokens are sorted by their expert, and put back."""
    x = b["z"].reshape(-1, b["z"].shape[-1])
    at = (x @ w("router", x.shape[1], 3)).argmax(-1)
    order = jnp.argsort(at)
    moved = x[order] * w("scale", 3)[at[order]][:, None]
    back = jnp.zeros_like(x).at[order].set(moved)
    return jnp.mean(back**3), {"sizes": jnp.bincount(at, length=3), "order": order}


@typical
def codebook(w, b):
    """VQ: nearest codes, moving averages of the codebook, straight through."""
    x, codes = features(w, b), lax.stop_gradient(w("codes", 4, 3))
    gap = jnp.sum((x[:, None] - codes[None]) ** 2, -1)
    at = jnp.argmin(gap, 1)
    one_hot = jax.nn.one_hot(at, 4)
    q = codes[at]
    size, total = one_hot.sum(0), one_hot.T @ x
    new = 0.9 * codes + 0.1 * total / (size[:, None] + 1e-3)
    out = x + lax.stop_gradient(q - x)
    share = size / size.sum()
    perplexity = jnp.exp(-jnp.sum(share * jnp.log(share + 1e-9)))
    loss = jnp.mean((out @ w("out", 3) - b["y"]) ** 2) + jnp.mean((q - x) ** 2)
    return loss, {"codes": new, "perplexity": perplexity, "at": at}


@typical
def k_means(w, b):
    x, centres, at = b["x"], b["x"][:3], b["labels"]
    for _ in range(2):
        at = jnp.argmin(coarse(jnp.sum((x[:, None] - centres[None]) ** 2, -1)), 1)
        n = jnp.zeros(3).at[at].add(1.0)
        centres = jnp.zeros_like(centres).at[at].add(x) / (1 + n[:, None])
    return jnp.mean(centres**2) * jnp.sum(w("a", 2) ** 2), {"centres": centres, "at": at}


@typical
def queue_of_keys(w, b):
    """MoCo: the keys of this batch replace the oldest of a queue."""
    q, k = norm(features(w, b)), lax.stop_gradient(norm(features(w, b, "other")))
    queue, n = jnp.asarray(np.random.default_rng(0).normal(size=(24, 3))), len(q)
    logits = jnp.concatenate([jnp.sum(q * k, -1, keepdims=True), q @ queue.T], 1)
    at = (b["count"] * n) % 24
    new = lax.dynamic_update_slice_in_dim(queue, k, at, 0)
    rolled = jnp.concatenate([queue[n:], k], 0)
    return ce(logits, jnp.zeros(n, int)).mean(), {"queue": new, "rolled": rolled, "at": at + n}


@typical
def weights_of_importance(w, b):
    score = features(w, b) @ w("a", 3)
    weight = jnp.exp(score - score.max())
    weight = weight / weight.sum()
    return jnp.sum(weight * b["y"] ** 2), {"effective": 1 / jnp.sum(weight**2)}


@typical
def worst_group(w, b):
    """Group DRO: the mean loss of each group of rows, the worst of these."""
    loss = (b["x"] @ w("a", b["x"].shape[1]) - b["y"]) ** 2
    n = jax.ops.segment_sum(jnp.ones_like(loss), b["labels"], 5)
    mean = jax.ops.segment_sum(loss, b["labels"], 5) / jnp.maximum(n, 1)
    highest = jax.ops.segment_max(loss, b["labels"], 5)
    return mean.max(), {"mean": mean, "highest": highest, "group": mean.argmax()}


@typical
def correlation(w, b):
    p = features(w, b) @ w("a", 3)
    p, y = p - p.mean(), b["y"] - b["y"].mean()
    r = jnp.sum(p * y) / jnp.sqrt(jnp.sum(p * p) * jnp.sum(y * y) + 1e-6)
    return 1 - r, {"r": r, "corrcoef": jnp.corrcoef(p, y), "cov": jnp.cov(b["x"], rowvar=False)}


@typical
def pinball_and_median(w, b):
    error = b["y"] - b["x"] @ w("a", b["x"].shape[1])
    mad = jnp.median(jnp.abs(error - jnp.median(error)))
    return jnp.mean(jnp.maximum(0.3 * error, -0.7 * error)), {
        "mad": mad,
        "deciles": jnp.quantile(b["y"], jnp.array([0.1, 0.5, 0.9])),
    }


@typical
def histogram(w, b):
    p = jax.nn.sigmoid(classes(w, b)[:, 0])
    bins = jnp.clip((p * 4).astype(int), 0, 3)
    n = jnp.zeros(4).at[bins].add(1)
    conf = jnp.zeros(4).at[bins].add(p) / jnp.maximum(n, 1)
    edges = jnp.searchsorted(jnp.linspace(-2, 2, 5), b["y"])
    return jnp.sum(n * conf**2) / len(p), {"n": n, "edges": edges, "hist": jnp.histogram(p, 4)[0]}


@typical
def confusion(w, b):
    logits = classes(w, b)
    found = logits.argmax(1)
    table = jnp.zeros((5, 5), int).at[b["labels"], found].add(1)
    top = (lax.top_k(logits, 2)[1] == b["labels"][:, None]).any(1)
    f1 = 2 * jnp.diag(table) / jnp.maximum(table.sum(0) + table.sum(1), 1)
    return ce(logits, b["labels"]).mean(), {"table": table, "top": top.mean(), "f1": f1}


@typical
def area_under_the_curve(w, b):
    score = b["x"] @ w("a", b["x"].shape[1])
    order = jnp.argsort(score)
    truth = b["keep"][order]
    rank = jnp.cumsum(jnp.ones_like(score))
    good = truth.sum()
    auc = (jnp.sum(rank * truth) - good * (good + 1) / 2) / jnp.maximum(good * (~truth).sum(), 1)
    return jnp.mean(score**2), {"auc": auc, "order": order}


@typical
def hardest_half(w, b):
    """Online hard examples: the mean of the largest losses of the batch."""
    loss = ce(classes(w, b), b["labels"])
    value, at = lax.top_k(loss, len(loss) // 2)
    return value.mean(), {"at": at}


@typical
def trimmed_mean(w, b):
    loss = (b["x"] @ w("a", b["x"].shape[1]) - b["y"]) ** 2
    line = jnp.sort(loss)
    return line[1:-1].mean(), {"least": line[0], "most": line[-1]}


@typical
def threshold_by_quantile(w, b):
    loss = (b["x"] @ w("a", b["x"].shape[1]) - b["y"]) ** 2
    limit = lax.stop_gradient(jnp.quantile(loss, 0.7))
    keep = loss <= limit
    return jnp.sum(loss * keep) / keep.sum(), {"limit": limit}


@typical
def whitening(w, b):
    x = features(w, b)
    x = x - x.mean(0, keepdims=True)
    cov = x.T @ x / len(x) + 0.1 * jnp.eye(3)
    white = jnp.linalg.solve(jnp.linalg.cholesky(cov), x.T).T
    return jnp.mean(white**4), {"logdet": jnp.linalg.slogdet(cov)[1]}


@typical
def least_squares_of_the_batch(w, b):
    x = features(w, b)
    fit = jnp.linalg.solve(x.T @ x + 0.1 * jnp.eye(3), x.T @ b["y"])
    return jnp.mean((x @ fit - b["y"]) ** 2), {"fit": fit}


@typical
def fourier(w, b):
    a = jnp.fft.rfft(b["z"], axis=1)
    c = jnp.fft.fft(features(w, b), axis=0)
    return jnp.mean(jnp.abs(a) ** 2) * 0.01 + jnp.mean(jnp.real(c) ** 2) * 0.01, {}


@typical
def solve_for_each_row(w, b):
    x = features(w, b)
    m = x[:, :, None] * x[:, None, :] + jnp.eye(3)[None]
    out = jnp.linalg.solve(m, jnp.ones((len(x), 3, 1)))[..., 0]
    return jnp.mean(out * x), {"det": jnp.linalg.det(m), "inv": jnp.linalg.inv(m)}


# --- random numbers -----------------------------------------------------------------------------


@typical
def dropout(w, b):
    h = features(w, b)
    keep = jax.random.bernoulli(b["key"], 0.6, h.shape)
    return jnp.mean(jnp.where(keep, h / 0.6, 0) @ w("a", 3) * b["y"]), {"kept": keep.mean()}


@typical
def dropout_with_raw_keys(w, b):
    h, key = features(w, b), b["raw"]
    for i in range(2):
        key, own = jax.random.split(key)
        h = h * jax.random.bernoulli(own, 0.7, h.shape) + i
    return jnp.mean(h**2), {"key": key, "data": jax.random.key_data(b["key"])}


@typical
def drop_path(w, b):
    h = features(w, b)
    keep = jax.random.bernoulli(b["key"], 0.5, (len(h), 1))
    return jnp.mean((b["x"][:, :1] + keep * h) ** 2), {"keep": keep}


@typical
def variational(w, b):
    mean, log_var = features(w, b), features(w, b, "var")
    z = mean + jnp.exp(0.5 * log_var) * jax.random.normal(b["key"], mean.shape)
    kl = -0.5 * jnp.sum(1 + log_var - mean**2 - jnp.exp(log_var), -1)
    back = jnp.sum((z @ w("out", 3, b["x"].shape[1]) - b["x"]) ** 2, -1)
    return (kl + back).mean(), {"kl": kl.mean(), "z": z}


@typical
def gradient_penalty(w, b):
    real, fake = b["x"], jnp.roll(b["x"], 3, 0) * 0.5
    critic = lambda x: jnp.tanh(x @ w("in", b["x"].shape[1], 3)) @ w("a", 3)
    mix = jax.random.uniform(b["key"], (len(real), 1))
    slope = jax.grad(lambda x: critic(x).sum())(mix * real + (1 - mix) * fake)
    size = jnp.sqrt(jnp.sum(slope**2, 1) + 1e-6)
    return critic(fake).mean() - critic(real).mean() + jnp.mean((size - 1) ** 2), {"size": size}


@typical
def penalty_at_real_rows(w, b):
    critic = lambda x: jnp.tanh(x @ w("in", b["x"].shape[1], 3)) @ w("a", 3)
    value, slope = jax.vmap(jax.value_and_grad(critic))(b["x"])
    return jax.nn.softplus(-value).mean() + 0.5 * jnp.sum(slope**2, 1).mean(), {}


@typical
def diffusion(w, b):
    """A step of its own for each row."""
    alphas = np.linspace(0.9, 0.1, 10)
    t = jax.random.randint(b["key"], (len(b["x"]),), 0, 10)
    noise = jax.random.normal(jax.random.fold_in(b["key"], 1), b["x"].shape)
    a = jnp.asarray(alphas)[t][:, None]
    noisy = jnp.sqrt(a) * b["x"] + jnp.sqrt(1 - a) * noise
    h = noisy @ w("in", b["x"].shape[1], 3) + w("time", 10, 3)[t]
    error = jnp.mean((jnp.tanh(h) @ w("out", 3, b["x"].shape[1]) - noise) ** 2, 1)
    of_time = jnp.zeros(10).at[t].add(error) / jnp.maximum(jnp.zeros(10).at[t].add(1), 1)
    return error.mean(), {"of_time": of_time, "t": t}


@typical
def antithetic_steps(w, b):
    n = len(b["x"])
    t = jax.random.randint(b["raw"], (n // 2,), 0, 9)
    t = jnp.concatenate([t, 9 - t])
    return jnp.mean(w("time", 10, 2)[t] * b["x"][:, :1]), {"t": t}


@typical
def mixup(w, b):
    other = jax.random.permutation(b["key"], len(b["x"]))
    share = jax.random.beta(jax.random.fold_in(b["key"], 1), 0.8, 0.8)
    mixed = share * b["x"] + (1 - share) * b["x"][other]
    logits = classes(w, {"x": mixed})
    loss = share * ce(logits, b["labels"]) + (1 - share) * ce(logits, b["labels"][other])
    return loss.mean(), {"share": share}


@typical
def shuffled_rows(w, b):
    x = jax.random.permutation(b["key"], b["x"], axis=0)
    return jnp.mean(jnp.tanh(x @ w("a", x.shape[1])) * b["y"]), {"x": x}


@typical
def cutmix(w, b):
    z = b["z"]
    at = jax.random.randint(b["key"], (), 0, z.shape[1])
    keep = jnp.arange(z.shape[1]) < at
    mixed = jnp.where(keep[None, :, None], z, jnp.flip(z, 0))
    return jnp.mean((mixed @ w("a", z.shape[2])) ** 2), {"share": keep.mean()}


@typical
def a_key_for_each_row(w, b):
    keys = jax.random.split(b["key"], len(b["x"]))
    noise = jax.vmap(lambda k: jax.random.normal(k, (2,)))(keys)
    crop = jax.vmap(lambda k, z: lax.dynamic_slice(z, (jax.random.randint(k, (), 0, 2),), (1,)))
    return jnp.mean((noise + w("a", 1, 2)) * b["x"][:, :2]), {"crop": crop(keys, b["x"])}


@typical
def gumbel_straight_through(w, b):
    logits = classes(w, b)
    share = jax.nn.softmax(logits + jax.random.gumbel(b["key"], logits.shape))
    hard = jax.nn.one_hot(share.argmax(-1), 5)
    out = hard + share - lax.stop_gradient(share)
    return jnp.mean((out @ w("codes", 5) - b["y"]) ** 2), {"used": hard.any(0)}


@typical
def masked_language(w, b):
    hide = jax.random.bernoulli(b["key"], 0.4, b["tokens"].shape)
    loss = ce(words(w, {"tokens": jnp.where(hide, 0, b["tokens"])}), b["tokens"])
    return jnp.sum(loss * hide) / jnp.maximum(hide.sum(), 1), {"hidden": hide.sum(1)}


@typical
def masked_patches(w, b):
    """MAE: a random order of positions for each row; some are kept and put back."""
    z, keep = b["z"], max(1, b["z"].shape[1] // 2)
    noise = jax.random.uniform(b["key"], z.shape[:2])
    order = jnp.argsort(noise, 1)
    seen = jnp.take_along_axis(z, order[:, :keep, None], 1) @ w("a", z.shape[2], 3)
    token = jnp.broadcast_to(w("token", 1, 1, 3), (len(z), z.shape[1] - keep, 3))
    every = jnp.concatenate([seen, token], 1)
    back = jnp.take_along_axis(every, jnp.argsort(order, 1)[..., None], 1)
    return jnp.mean((back - jnp.sin(z[..., :1])) ** 2), {}


@typical
def sampled_actions(w, b):
    """REINFORCE, with advantages over the batch."""
    logits = classes(w, b)
    action = jax.random.categorical(b["key"], logits)
    reward = b["y"] + action
    advantage = lax.stop_gradient((reward - reward.mean()) / (reward.std() + 1e-3))
    logs = jnp.take_along_axis(jax.nn.log_softmax(logits), action[:, None], 1)[:, 0]
    return -jnp.mean(logs * advantage), {"reward": reward.mean(), "action": action}


@typical
def keys_as_results(w, b):
    key, own = jax.random.split(b["key"])
    x = features(w, b)
    return jnp.mean(x * jax.random.normal(own, (1, 3))), {"next": jax.random.key_data(key)}


@typical
def noise_of_weights(w, b):
    a = w("a", b["x"].shape[1], 3)
    a = a + 0.1 * jax.random.normal(b["raw"], a.shape)
    return jnp.mean(jnp.tanh(b["x"] @ a) ** 2), {}


# --- learning from rewards, inner steps ---------------------------------------------------------


@typical
def proximal_policy(w, b):
    logs = jax.nn.log_softmax(classes(w, b))[jnp.arange(len(b["x"])), b["labels"]]
    ratio = jnp.exp(logs - lax.stop_gradient(logs) + 0.3 * b["y"])
    advantage = (b["y"] - b["y"].mean()) / (b["y"].std() + 1e-3)
    low = jnp.clip(ratio, 0.8, 1.2) * advantage
    return -jnp.minimum(ratio * advantage, low).mean(), {"clipped": (ratio > 1.2).mean()}


@typical
def groups_of_answers(w, b):
    """GRPO: rewards are compared within groups of four rows."""
    reward = b["y"].reshape(-1, 4)
    spread = reward.std(1, keepdims=True)
    advantage = ((reward - reward.mean(1, keepdims=True)) / (spread + 1e-3)).reshape(-1)
    logs = -ce(words(w, b), b["tokens"])
    return -jnp.mean(advantage[:, None] * logs * b["mask"]), {"best": reward.argmax(1)}


@typical
def preferences(w, b):
    """DPO: even rows are preferred to odd ones."""
    logs = -jnp.sum(ce(words(w, b), b["tokens"]) * b["mask"], 1)
    good, bad = logs[::2], logs[1::2]
    return -jax.nn.log_sigmoid(good - bad).mean(), {"margin": good - bad}


@typical
def preferences_of_halves(w, b):
    logs = -jnp.sum(ce(words(w, b), b["tokens"]) * b["mask"], 1)
    good, bad = jnp.split(logs, 2)
    return -jax.nn.log_sigmoid(good - bad).mean(), {"right": (good > bad).mean()}


@typical
def q_learning(w, b):
    q, later = classes(w, b), lax.stop_gradient(jnp.sin(classes(w, b))).max(1)
    own = q[jnp.arange(len(q)), b["labels"]]
    error = b["y"] + 0.9 * jnp.where(b["keep"], later, 0) - own
    weight = (1 / (1 + jnp.abs(b["y"]))) ** 0.5
    return jnp.mean(weight / weight.max() * optax.huber_loss(error)), {"error": error}


@typical
def advantages_backward_in_time(w, b):
    value = b["z"] @ w("a", b["z"].shape[2])

    def back(carry, now):
        v, r = now
        carry = r + 0.9 * carry - 0.1 * v
        return carry, carry

    line = (value.T, b["across"])
    _, found = lax.scan(back, jnp.zeros(len(value)), line, reverse=True)
    return jnp.mean(found**2), {"found": found}


@typical
def inner_step(w, b):
    """MAML: a step on the first half, the loss of the second."""
    a, half = w("a", b["x"].shape[1]), len(b["x"]) // 2
    loss = lambda a, x, y: jnp.mean((jnp.tanh(x @ a) - y) ** 2)
    moved = a - 0.3 * jax.grad(loss)(a, b["x"][:half], b["y"][:half])
    return loss(moved, b["x"][half:], b["y"][half:]), {"moved": moved}


@typical
def sharpness_aware(w, b):
    a = w("a", b["x"].shape[1])
    loss = lambda a: jnp.mean((jnp.tanh(b["x"] @ a) - b["y"]) ** 2)
    slope = lax.stop_gradient(jax.grad(loss)(a))
    return loss(a + 0.1 * slope / jnp.sqrt(jnp.sum(slope**2) + 1e-9)), {"slope": slope}


@typical
def private_gradients(w, b):
    """DP-SGD: the gradient of each row is clipped, then all are added."""
    a = w("a", b["x"].shape[1])
    each = jax.vmap(jax.grad(lambda a, x, y: (jnp.tanh(x @ a) - y) ** 2), (None, 0, 0))
    rows = each(a, b["x"], b["y"])
    size = jnp.sqrt(jnp.sum(rows**2, 1, keepdims=True) + 1e-9)
    total = jnp.sum(rows * jnp.minimum(1, 0.5 / size), 0)
    return jnp.sum(total**2) / len(rows), {"total": total, "size": size}


@typical
def curvature(w, b):
    a = w("a", b["x"].shape[1])
    loss = lambda a: jnp.mean(jnp.sin(b["x"] @ a) * b["y"])
    h = jax.hessian(loss)(a)
    v = jax.random.normal(b["key"], a.shape)
    hv = jax.jvp(jax.grad(loss), (a,), (v,))[1]
    return jnp.sum(h**2) + v @ hv, {"trace": jnp.trace(h)}


@typical
def fixed_point(w, b):
    """A model that is solved for, with an implicit derivative."""
    a = 0.3 * jnp.tanh(w("a", 3, 3))

    def f(z, x):
        return jnp.tanh(z @ a + x)

    x = features(w, b)
    root = lax.custom_root(
        lambda z: f(z, x) - z,
        jnp.zeros_like(x),
        lambda g, z: lax.fori_loop(0, 40, lambda i, z: z + g(z), z),
        lambda g, y: lax.fori_loop(0, 40, lambda i, z: z + g(z) - y, -y),
    )
    return jnp.mean(root**2), {"root": root}


# --- own derivatives ----------------------------------------------------------------------------


@typical
def gradient_reversal(w, b):
    h = features(w, b)
    domain = optax.sigmoid_binary_cross_entropy(turned(h) @ w("d", 3), b["keep"] * 1.0)
    return jnp.mean((h @ w("a", 3) - b["y"]) ** 2) + domain.mean(), {}


@typical
def binary_activations(w, b):
    return jnp.mean((straight(2 * features(w, b)) @ w("a", 3) - b["y"]) ** 2), {}


@typical
def gradient_of_length_one(w, b):
    h = unit(b["x"] @ w("in", b["x"].shape[1], 3))
    return jnp.mean((h @ w("a", 3) - b["y"]) ** 2), {"h": h}


@typical
def gradient_clipped_by_its_norm(w, b):
    h = clipped(features(w, b))
    return jnp.sum((h @ clipped(w("a", 3)) - b["y"]) ** 2), {}


@typical
def clipped_in_every_layer(w, b):
    def layer(h, a):
        return clipped(jnp.tanh(h @ a)), jnp.abs(h).max()

    h, most = lax.scan(layer, features(w, b), w("layers", 3, 3, 3))
    return jnp.mean(unit(h)), {"most": most}


@typical
def gradient_not_linear_number_by_number(w, b):
    return jnp.mean(signs(features(w, b)) * b["y"][:, None]), {}


@typical
def own_tangent(w, b):
    return jnp.mean(soft(features(w, b) @ w("a", 3)) * b["y"]), {}


@typical
def rule_with_statistics(w, b):
    """A batch norm with a backward pass of its own."""

    @jax.custom_vjp
    def normal(x):
        return (x - x.mean(0, keepdims=True)) / jnp.sqrt(x.var(0, keepdims=True) + 0.1)

    def forward(x):
        spread = jnp.sqrt(x.var(0, keepdims=True) + 0.1)
        out = (x - x.mean(0, keepdims=True)) / spread
        return out, (out, spread)

    def backward(kept, g):
        out, spread = kept
        mean, along = g.mean(0, keepdims=True), (g * out).mean(0, keepdims=True)
        return ((g - mean - out * along) / spread,)

    normal.defvjp(forward, backward)
    return jnp.mean(jnp.tanh(normal(features(w, b)))[:, 0] * b["y"]), {}


@typical
def rule_of_a_loss(w, b):
    """A cross entropy whose gradient comes from its forward pass; divided by the rows inside."""

    @jax.custom_vjp
    def loss(logits, labels):
        return ce(logits, labels).mean()

    def forward(logits, labels):
        hot = jax.nn.one_hot(labels, logits.shape[-1])
        return loss(logits, labels), (jax.nn.softmax(logits) - hot) / logits.shape[0]

    loss.defvjp(forward, lambda kept, g: (g * kept, None))
    return loss(classes(w, b), b["labels"]), {}


@typical
def rule_that_returns_both(w, b):
    @jax.custom_vjp
    def product(x, a):
        return x @ a

    product.defvjp(
        lambda x, a: (x @ a, (x, a)),
        lambda kept, g: (g @ kept[1].T, kept[0].T @ jnp.sign(g) / len(g)),
    )
    return jnp.mean((product(b["x"], w("a", b["x"].shape[1], 3)) - b["y"][:, None]) ** 2), {}


@typical
def second_derivative_of_an_own_tangent(w, b):
    a = w("a", b["x"].shape[1])
    slope = jax.grad(lambda x: soft(jnp.tanh(x @ a)).sum())(b["x"])
    return jnp.mean(slope**2), {"slope": slope}


# --- along positions, layers and rows -----------------------------------------------------------


@typical
def recurrent(w, b):
    a, c = w("a", 3, 3), w("c", b["z"].shape[2], 3)

    def cell(h, x):
        h = jnp.tanh(h @ a + x @ c)
        return h, h

    h, every = lax.scan(cell, jnp.zeros((len(b["z"]), 3)), jnp.swapaxes(b["z"], 0, 1))
    return jnp.mean((h @ w("out", 3) - b["y"]) ** 2), {"every": every}


@typical
def long_short_term(w, b):
    d = b["z"].shape[2]
    a = w("a", d + 2, 8)

    def cell(carry, now):
        (h, c), (x, m) = carry, now
        i, f, g, o = jnp.split(jnp.concatenate([x, h], -1) @ a, 4, -1)
        c2 = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h2 = jax.nn.sigmoid(o) * jnp.tanh(c2)
        m = m[:, None] > 0
        return (jnp.where(m, h2, h), jnp.where(m, c2, c)), None

    start = (jnp.zeros((len(b["z"]), 2)),) * 2
    (h, _), _ = lax.scan(cell, start, (jnp.swapaxes(b["z"], 0, 1), b["mask"].T))
    return jnp.mean(h**2), {"h": h}


@typical
def linear_recurrence(w, b):
    x = b["z"] @ w("a", b["z"].shape[2], 3)
    decay = jax.nn.sigmoid(x)
    join = lambda p, q: (p[0] * q[0], p[1] * q[0] + q[1])
    _, h = lax.associative_scan(join, (decay, x), axis=1)
    return jnp.mean(h[:, -1] ** 2), {"h": h}


@typical
def recurrence_over_rows(w, b):
    """Rows are one after the other in time."""
    x = features(w, b)
    decay = 0.9

    def cell(h, x):
        h = decay * h + x
        return h, jnp.tanh(h)

    h, every = lax.scan(cell, jnp.zeros(3), x)
    return jnp.mean(every**2), {"last": h, "every": every}


@typical
def running_best_over_rows(w, b):
    line = coarse(b["x"] @ w("a", b["x"].shape[1]))
    best = lax.cummax(line)
    total = jnp.cumsum(line) / (1 + jnp.arange(len(line)))
    return jnp.mean(best - total), {"best": best, "total": total, "gap": jnp.diff(line)}


@typical
def differences_of_rows(w, b):
    """Time is along the batch: total variation, autocorrelation, padding."""
    p = features(w, b) @ w("a", 3)
    tv = jnp.abs(p[1:] - p[:-1]).sum()
    lag = jnp.mean(p[2:] * p[:-2])
    window = jnp.pad(p, (1, 1))
    smooth = (window[:-2] + window[1:-1] + window[2:]) / 3
    return tv + lag + jnp.mean((smooth - b["y"]) ** 2), {"convolved": jnp.convolve(p, jnp.ones(3))}


@typical
def causal_attention(w, b):
    z, d = b["z"], b["z"].shape[2]
    q, k, v = (z @ w(name, d, 4) for name in "qkv")
    split = lambda x: x.reshape(*x.shape[:2], 2, 2)
    scores = jnp.einsum("bihd,bjhd->bhij", split(q), split(k)) / jnp.sqrt(2)
    causal = jnp.tril(jnp.ones((z.shape[1], z.shape[1]), bool))[None, None]
    seen = b["mask"][:, None, None, :].at[..., 0].set(1.0) > 0
    share = jax.nn.softmax(jnp.where(causal & seen, scores, -1e9))
    out = jnp.einsum("bhij,bjhd->bihd", share, split(v)).reshape(q.shape)
    return jnp.mean(out**2), {"share": share}


@typical
def attention_of_jax(w, b):
    q, k, v = (b["z"] @ w(n, b["z"].shape[2], 4) for n in "qkv")
    heads = [x.reshape(*x.shape[:2], 2, 2) for x in (q, k, v)]
    return jnp.mean(jax.nn.dot_product_attention(*heads, is_causal=True) ** 2), {}


@typical
def attention_over_rows(w, b):
    """Every row looks at every other: tables, sets."""
    h = features(w, b)
    scores = (h @ w("q", 3, 3)) @ h.T
    share = jax.nn.softmax(jnp.where(b["keep"][None], scores, -1e9), 1)
    return jnp.mean((share @ h) ** 2), {"looked": share.sum(0)}


@typical
def packed_documents(w, b):
    """Tokens of one document look at each other; a document is a token's number here."""
    same = b["tokens"][:, :, None] == b["tokens"][:, None, :]
    at = jnp.cumsum(b["mask"], 1)
    h = w("table", V, 3)[b["tokens"]] + jnp.sin(at[..., None])
    scores = jnp.where(same, h @ jnp.swapaxes(h, 1, 2), -1e9)
    return jnp.mean((jax.nn.softmax(scores) @ h) ** 2), {"documents": same.sum((1, 2))}


@typical
def rotary(w, b):
    z = b["z"] @ w("a", b["z"].shape[2], 4)
    angle = jnp.arange(z.shape[1])[:, None] * (0.5 ** jnp.arange(2))[None]
    cos, sin = jnp.cos(angle)[None], jnp.sin(angle)[None]
    even, odd = z[..., ::2], z[..., 1::2]
    turned = jnp.stack([even * cos - odd * sin, even * sin + odd * cos], -1).reshape(z.shape)
    near = jnp.abs(jnp.arange(z.shape[1])[:, None] - jnp.arange(z.shape[1])[None])
    bias = w("bias", 9)[near]
    return jnp.mean(turned @ jnp.swapaxes(turned, 1, 2) * bias[None]), {}


@typical
def layers_again(w, b):
    """A scan over stacked layers, computed again in the backward pass."""

    def layer(h, given):
        a, bias = given
        h = checkpoint_name(h + jnp.tanh(h @ a + bias[None, None]), "h")
        return h, jnp.mean(h**2)

    policy = jax.checkpoint_policies.save_only_these_names("h")
    layer = jax.checkpoint(layer, policy=policy)
    start = w("table", V, 3)[b["tokens"]]
    h, sizes = lax.scan(layer, start, (w("a", 3, 3, 3), w("b", 3, 3)))
    loss = ce(h @ w("table", V, 3).T, b["tokens"])
    return jnp.sum(loss * b["mask"]) / b["mask"].sum(), {"sizes": sizes}


@typical
def layers_with_batch_norm_and_dropout(w, b):
    def layer(carry, a):
        h, key = carry
        key, own = jax.random.split(key)
        h = jnp.tanh(h @ a)
        mean = h.mean(0)
        h = (h - mean[None]) * jax.random.bernoulli(own, 0.8, h.shape)
        return (h, key), mean

    (h, _), means = lax.scan(layer, (features(w, b), b["key"]), w("a", 3, 3, 3))
    return jnp.mean(h**2), {"means": means}


@typical
def shared_layers_until_small(w, b):
    """As many layers as the batch needs: a while loop without gradients, then a layer with."""
    a, x = w("a", 3, 3), features(w, b)
    go = lambda s: (jnp.max(jnp.abs(s[0])) > 0.4) & (s[1] < 9)
    still = lax.stop_gradient(a)
    again = lambda s: (jnp.tanh(s[0] @ still), s[1] + 1)
    h, n = lax.while_loop(go, again, (lax.stop_gradient(x), 0))
    return jnp.mean(jnp.tanh(x @ a) * h), {"layers": n}


@typical
def time_first(w, b):
    """[length, rows] from the loader."""
    x = b["across"]
    h = jnp.tanh(x[..., None] * w("a", 1, 1, 3))
    mean = h.mean(1, keepdims=True)
    flat = (h - mean).reshape(-1, 3)
    return jnp.mean(flat**2), {"flat": flat, "rows": h.sum(0), "steps": h.sum((1, 2))}


@typical
def folded_batch(w, b):
    """[rows, length] to [length * rows] and back, with statistics of all."""
    z = jnp.swapaxes(b["z"], 0, 1)
    flat = z.reshape(-1, z.shape[-1]) @ w("a", z.shape[-1], 2)
    flat = flat - flat.mean(0, keepdims=True)
    back = jnp.swapaxes(flat.reshape(*z.shape[:2], 2), 0, 1)
    return jnp.mean(jnp.sin(back) * b["mask"][..., None]), {"back": back}


@typical
def two_views_stacked(w, b):
    x = jnp.stack([b["x"], -b["x"]])
    h = jnp.tanh(x.reshape(-1, x.shape[-1]) @ w("a", x.shape[-1], 3))
    left, right = h.reshape(2, -1, 3)
    return jnp.mean((left - right) ** 2) + h.var(), {"right": right}


@typical
def views_interleaved(w, b):
    x = jnp.stack([b["x"], -b["x"]], 1).reshape(-1, b["x"].shape[1])
    h = jnp.tanh(x @ w("a", x.shape[1], 3))
    return jnp.mean(h[::2] * h[1::2] * 2) + jnp.max(coarse(h)), {"h": h}


@typical
def several_crops(w, b):
    """jnp.repeat and jnp.tile of rows, against whole ones."""
    many, tiled = jnp.repeat(b["x"], 3, 0), jnp.tile(b["x"], (2, 1))
    h = jnp.tanh(many @ w("a", many.shape[1], 2))
    of_each = h.reshape(-1, 3, 2).mean(1)
    t = jnp.tanh(tiled @ w("a", many.shape[1], 2)).reshape(2, -1, 2)
    return jnp.mean((of_each - t[1]) ** 2) + jnp.mean(of_each * b["y"][:, None]), {"t": t}


@typical
def upper_and_lower_rows(w, b):
    n = len(b["x"])
    x = jnp.concatenate([b["x"][n // 2 :], b["x"][: n // 2]])
    h = jnp.tanh(x @ w("a", x.shape[1]))
    return jnp.mean(h[: n // 2] * b["y"][n // 2 :]), {"first": h[0], "last": h[-1]}


@typical
def one_row_alone(w, b):
    h = features(w, b)
    return jnp.sum(h[0] * h[-1]) + jnp.mean(h[3] ** 2), {"row": h[b["count"]], "some": h[1:4]}


@typical
def numbers_of_rows(w, b):
    n = len(b["x"])
    h = features(w, b) + jnp.arange(n)[:, None] / n
    even = jnp.arange(n) % 2 == 0
    table = np.random.default_rng(0).normal(size=(n, 3))
    loss = jnp.mean(h * table) + jnp.mean(jnp.where(even[:, None], h, -h) ** 2)
    return loss, {"number": jnp.arange(n) * b["labels"], "table": jnp.asarray(table)}


@typical
def divided_by_a_number_of_rows_written_down(w, b):
    error = b["x"] @ w("a", b["x"].shape[1]) - b["y"]
    return jnp.sum(error**2) / 8, {"sum": error.sum(), "again": error.sum() + w("a", 1)[0]}


@typical
def convolution(w, b):
    dims = ("NWC", "WIO", "NWC")
    c = b["z"].shape[2]
    conv = functools.partial(lax.conv_general_dilated, dimension_numbers=dims)
    h = conv(b["z"], w("a", 3, c, 4), (1,), "SAME")
    mean, var = h.mean((0, 1), keepdims=True), h.var((0, 1), keepdims=True)
    h = jax.nn.relu((h - mean) / jnp.sqrt(var + 0.1))
    h = conv(h, w("d", 3, 1, 4), (1,), "SAME", feature_group_count=4)
    return jnp.mean((h.mean(1) @ w("out", 4) - b["y"]) ** 2), {"mean": mean}


@typical
def pooling_and_upsampling(w, b):
    z = jnp.concatenate([b["z"], b["z"]], 1)
    small = lax.reduce_window(z, 0.0, lax.add, (1, 2, 1), (1, 2, 1), "VALID") / 2
    most = lax.reduce_window(z, -np.inf, lax.max, (1, 2, 1), (1, 2, 1), "VALID")
    up = jnp.repeat((small + most) @ w("a", z.shape[2], z.shape[2]), 2, 1)
    return jnp.mean((up - z) ** 2), {"most": most}


@typical
def windows(w, b):
    z = jnp.concatenate([b["z"], b["z"]], 1)
    patch = z.reshape(len(z), -1, 2, z.shape[2]).reshape(-1, 2 * z.shape[2])
    h = jnp.tanh(patch @ w("a", 2 * z.shape[2], 3)).reshape(len(z), -1, 3)
    tokens = jnp.concatenate([jnp.broadcast_to(w("cls", 1, 1, 3), (len(z), 1, 3)), h], 1)
    return jnp.mean((tokens[:, 0] * tokens[:, 1:].mean(1)) ** 2), {}


@typical
def map_over_rows(w, b):
    a = w("a", b["x"].shape[1])
    each = lambda xy: (jnp.tanh(xy[0] @ a) - xy[1]) ** 2
    return lax.map(each, (b["x"], b["y"])).mean(), {"v": jax.vmap(each)((b["x"], b["y"]))}


@typical
def map_over_pairs_of_rows(w, b):
    x = features(w, b)
    gap = jax.vmap(lambda a: jax.vmap(lambda c: jnp.sum((a - c) ** 2))(x))(x)
    return jnp.mean(jnp.exp(-gap)), {"gap": gap, "mapped": lax.map(lambda r: (x @ r).max(), x)}


# --- branches, numbers that are not finite, forms of results ------------------------------------


@typical
def skipped_if_not_finite(w, b):
    loss = jnp.mean((b["x"] @ w("a", b["x"].shape[1]) - b["y"]) ** 2)
    fine = jnp.isfinite(loss) & (loss < 1e3)
    return jnp.where(fine, loss, 0.0), {"fine": fine}


@typical
def branch_on_all_rows(w, b):
    h = features(w, b)
    high = jnp.mean(b["y"]) > 0
    h = lax.cond(high, lambda h: h - h.mean(0, keepdims=True), lambda h: h * h.max(), h)
    return jnp.mean(h**2), {"high": high}


@typical
def branches_without_sums_inside(w, b):
    h = features(w, b)
    which = jnp.clip(b["count"] + (b["labels"].sum() > 9), 0, 2)
    h = lax.switch(which, [jnp.tanh, jnp.sin, lambda h: h @ w("a", 3, 3)], h)
    return jnp.mean(h * b["y"][:, None]), {"which": which}


@typical
def branch_for_each_row(w, b):
    """cond under vmap: a select."""
    a = w("a", b["x"].shape[1])
    one = lambda k, x: lax.cond(k, lambda x: jnp.tanh(x @ a), lambda x: jnp.sum(x * a) * 0.1, x)
    return jax.vmap(one)(b["keep"], b["x"]).mean(), {}


@typical
def branch_in_a_loop(w, b):
    h = features(w, b)

    def body(i, carry):
        h, total = carry
        h = lax.cond(h.sum() + i > 2.3, lambda h: h - h.mean(), lambda h: jnp.sin(h) + 0.1, h)
        return h, total + h.max()

    h, total = lax.fori_loop(0, 4, body, (h, 0.0))
    return jnp.mean(h) + 0.1 * total, {"total": total}


@typical
def loop_for_each_row(w, b):
    """A while loop for every row, as long as the slowest needs."""
    start = jnp.abs(b["y"]) + b["labels"]
    one = lambda x: lax.while_loop(lambda s: s[0] > 0.5, lambda s: (s[0] * 0.6, s[1] + 1), (x, 0))
    found: Any = jax.vmap(one)(start)
    return jnp.mean(features(w, b) * found[1][:, None]), {"n": found[1]}


@typical
def search_for_a_temperature(w, b):
    score = lax.stop_gradient(features(w, b)[:, 0])

    def halve(_, s):
        low, high = s
        middle = (low + high) / 2
        over = jnp.mean(jnp.tanh(score * middle) ** 2) > 0.3
        return jnp.where(over, low, middle), jnp.where(over, middle, high)

    low, high = lax.fori_loop(0, 12, halve, (0.1, 9.0))
    return jnp.mean(features(w, b) * low), {"low": low, "high": high}


@typical
def a_row_that_is_masked_because_it_is_not_a_number(w, b):
    bad = jnp.where(b["keep"], b["y"], np.nan)
    safe = jnp.where(jnp.isnan(bad), 0.0, bad)
    error = (b["x"] @ w("a", b["x"].shape[1]) - safe) ** 2 * ~jnp.isnan(bad)
    return error.sum() / jnp.sum(~jnp.isnan(bad)), {"nan": jnp.nanmean(bad), "sum": bad.sum()}


@typical
def a_mean_of_nothing(w, b):
    none = (b["labels"] > 99) * 1.0
    error = (b["x"] @ w("a", b["x"].shape[1]) - b["y"]) ** 2
    return jnp.sum(error * none) / none.sum(), {"none": none.sum()}


@typical
def infinities(w, b):
    x = features(w, b)
    high = jnp.log(jnp.maximum(b["x"], 0))
    return jnp.mean(x), {
        "low": high.min(),
        "sum": high.sum(0),
        "top": jnp.max(jnp.where(b["keep"][:, None], 1 / b["x"], -np.inf), 0),
        "z": jax.nn.logsumexp(high, 0),
        "where": jnp.argmin(high, 0),
    }


@typical
def products_and_truths(w, b):
    x = features(w, b)
    return jnp.prod(1 + 0.3 * x, 0).sum() + jnp.prod(b["x"] / 2).sum() * jnp.sum(x[0]), {
        "any": (b["x"] > 1).any(0),
        "all": (b["x"] > -2).all(),
        "odd": jnp.bitwise_xor.reduce(b["labels"]),
        "most": b["tokens"].max(0),
        "unique": jnp.unique(b["labels"], size=5, fill_value=-1),
        "nonzero": jnp.nonzero(b["keep"], size=4, fill_value=-1)[0],
    }


@typical
def what_goes_in_comes_out(w, b):
    loss = jnp.mean(features(w, b))
    other = jax.tree.map(jnp.asarray, {k: b[k] for k in ("y", "across", "tokens", "count")})
    return loss, other | {"w": w("in", b["x"].shape[1], 3), "c": jnp.ones(8), "n": jnp.arange(8)}


@typical
def weights_alone(w, b):
    a = w("a", 3, 3)
    return jnp.sum((a.T @ a - jnp.eye(3)) ** 2), {"rows": jnp.array(b["x"].shape[0])}


@typical
def rows_and_weight_decay(w, b):
    h = features(w, b)
    decay = 0.1 * jnp.sum(w("a", 3) ** 2)
    return jnp.mean(h @ w("a", 3)) + decay + 2.0, {"decay": decay, "h": h.sum() + decay}


@typical
def a_product_of_two_means(w, b):
    """Not a sum over rows in any way."""
    h = features(w, b)
    a, c = h.mean(), jnp.mean(b["y"] ** 2)
    return a * c / (1 + jnp.exp(-a)) + jnp.sqrt(c) * h.sum(), {"ratio": a / c, "power": a**2}


@typical
def the_largest_loss(w, b):
    error = (b["x"] @ w("a", b["x"].shape[1]) - coarse(b["y"])) ** 2
    return jnp.max(error), {"ties": jnp.max(b["x"], 0), "at": jnp.argmax(b["x"], 0)}


@typical
def ties_at_the_maximum(w, b):
    """The gradient of a maximum is shared among all that are as large."""
    x = b["x"] * (1 + 0 * w("a", 1, 1))
    return jnp.sum(jnp.max(x, 0)) + jnp.min(x) * w("a", 1, 1)[0, 0] + jnp.max(jnp.abs(x)), {}


@typical
def lower_precision_numbers(w, b):
    """Whole numbers and images of other types."""
    image = (b["tokens"] * 30).astype(jnp.uint8)
    x = image.astype(jnp.float64) / 255 - 0.5
    return jnp.mean((x @ w("a", x.shape[1]) - b["y"]) ** 2), {
        "sum": image.sum(),
        "small": b["tokens"].astype(jnp.int8).sum(0),
        "max": image.max(0),
        "half": b["x"].astype(jnp.bfloat16),
        "single": b["x"].astype(jnp.float32).max(),
    }


@typical
def argmax_by_a_reduction_of_pairs(w, b):
    value, at = coarse(features(w, b)), lax.broadcasted_iota(jnp.int32, (len(b["x"]), 3), 0)

    def larger(p, q):
        take = (p[0] > q[0]) | ((p[0] == q[0]) & (p[1] < q[1]))
        return jnp.where(take, p[0], q[0]), jnp.where(take, p[1], q[1])

    start = (np.float64(-np.inf), np.int32(99))
    best, which = lax.reduce(lax.stop_gradient((value, at)), start, larger, (0,))
    return jnp.mean(value) + value[which, jnp.arange(3)].sum(), {"best": best, "which": which}


@typical
def two_crops_of_each_row(w, b):
    """The loader gives twice as many crops as rows: pairs of neighbours, or the second half."""
    d = b["x"].shape[1]
    crops = jnp.tanh(b["crops"] @ w("a", d, 3))
    mean = crops.reshape(-1, 2, 3).mean(1)
    halves = crops.reshape(2, -1, 3)
    loss = jnp.mean((mean - features(w, b)) ** 2) + jnp.mean(halves[1] * features(w, b, "other"))
    return loss, {"even": crops[::2] * b["y"][:, None], "first": crops[: len(b["x"])], "h": halves}


@typical
def rows_repeated_as_crops(w, b):
    crops, x = b["crops"] * w("a", 1, b["x"].shape[1]), b["x"]
    near, far = jnp.repeat(x, 2, axis=0) - crops, jnp.tile(x, (2, 1)) - crops
    both = jnp.concatenate([x, -x], 0) + crops
    return jnp.mean(near**2) - 0.5 * jnp.mean(far**2) + jnp.mean(both**3), {"near": near}


@typical
def flat_tokens_from_the_loader(w, b):
    flat = b["flat"] * w("a", 1)
    line = flat.reshape(b["tokens"].shape)
    other = b["tokens"].reshape(-1) * flat
    return jnp.mean(line * b["mask"]) + jnp.mean(other**2), {
        "line": line.sum(1),
        "turned": flat.reshape(b["tokens"].shape[::-1]).sum(0),
        "next": flat[1:] - flat[:-1],
    }


@typical
def factors_that_are_not_finite(w, b):
    """A sum times infinity, where a device may have a sum of nothing."""
    first = b["y"] * (jnp.arange(len(b["y"])) < 1)
    zero = b["count"] - 2.0
    return jnp.mean(features(w, b)), {
        "times": first.sum() * np.inf,
        "plus": first.sum() + np.inf,
        "chosen": jnp.where(zero == 0, 1.0, first.sum()),
    }


@typical
def large_whole_numbers(w, b):
    """Sums of whole numbers that wrap around, as on one device."""
    big = b["labels"].astype(jnp.int8) * jnp.int8(50)
    total = jnp.sum(big, dtype=jnp.int8)
    return jnp.mean(features(w, b)) * total, {
        "total": total,
        "half": total // 2,
        "rest": b["tokens"].sum() % 5,
        "wide": b["tokens"].sum().astype(jnp.int8),
        "unsigned": b["tokens"].astype(jnp.uint32).sum() - jnp.uint32(1),
        "or": jnp.bitwise_or.reduce(b["labels"]),
        "and": jnp.bitwise_and.reduce(b["tokens"], axis=0),
        "shifted": b["labels"].sum() >> 1,
        "below": (b["keep"].sum(dtype=jnp.uint32) - jnp.uint32(1)).astype(float) / 3,
        "truth": b["labels"].sum().astype(bool),
        "float": b["labels"].sum().astype(float) / 3,
    }


@typical
def called_back(w, b):
    """The host sees the rows, and hands something back."""
    h = features(w, b)
    jax.debug.callback(lambda x: None, h.mean())
    shape = jax.ShapeDtypeStruct(b["tokens"].shape, np.int32)
    order = lambda x: np.sort(x, 0)
    seen = jax.pure_callback(order, shape, b["tokens"], vmap_method="sequential")
    return jnp.mean(h[:, :1] * seen), {"seen": seen}


@typical
def keys_along_a_loop(w, b):
    def body(h, given):
        key, a = given
        return jnp.tanh(h @ a) * jax.random.bernoulli(key, 0.7, h.shape), h.mean()

    keys = jax.random.split(b["key"], 3)
    h, means = lax.scan(body, features(w, b), (keys, w("a", 3, 3, 3)))
    return jnp.mean(h**2), {"means": means}


@typical
def keys_of_rows_along_a_loop(w, b):
    keys = jax.random.split(b["key"], len(b["x"]))

    def body(total, given):
        key, x = given
        return total + jnp.sum(x * jax.random.normal(key, x.shape)), jax.random.uniform(key)

    total, each = lax.scan(body, 0.0, (keys, features(w, b)))
    return total / len(keys), {"each": each}


@typical
def ensemble(w, b):
    """vmap over stacked weights."""
    one = lambda a, c: jnp.mean((jnp.tanh(b["x"] @ a) @ c - b["y"]) ** 2)
    losses = jax.vmap(one)(w("a", 3, b["x"].shape[1], 2), w("c", 3, 2))
    return losses.sum(), {"losses": losses, "best": losses.argmin()}


@typical
def low_rank_updates(w, b):
    d = b["x"].shape[1]
    picked = w("left", 5, d, 2)[b["labels"]], w("right", 5, 2, 3)[b["labels"]]
    out = jnp.einsum("bd,bdr,brf->bf", b["x"], *picked)
    return jnp.mean((out.sum(1) - b["y"]) ** 2), {}


@typical
def deltas_of_a_memory(w, b):
    """Fast weights: an outer product of rows, read by the rows."""
    k, v, q = (features(w, b, name) for name in ("k", "v", "q"))
    memory = jnp.einsum("bi,bj->ij", k, v) / len(k)
    causal = jnp.cumsum(jnp.einsum("bi,bj->bij", k, v), 0)
    read = jnp.einsum("bi,bij->bj", q, causal) / len(k)
    return jnp.mean((q @ memory) ** 2) + jnp.mean(read**2), {"memory": memory}


# --- operations that are seen less often ---------------------------------------------------------


@typical
def ragged_products_of_experts(w, b):
    """Sorted tokens, and a product whose groups follow from the data."""
    x = b["z"].reshape(-1, b["z"].shape[-1])
    at = (x @ w("router", x.shape[1], 3)).argmax(-1)
    order = jnp.argsort(at)
    sizes = jnp.bincount(at, length=3).astype(jnp.int32)
    done = lax.ragged_dot(x[order], w("experts", 3, x.shape[1], 2), sizes)
    back = jnp.zeros_like(done).at[order].set(done)
    return jnp.mean(back**3), {"sizes": sizes, "back": back}


@typical
def distributions(w, b):
    key = b["key"]
    split = functools.partial(jax.random.fold_in, key)
    n, h = len(b["x"]), features(w, b)
    mean = jnp.zeros(2)
    draws = {
        "gamma": jax.random.gamma(split(0), 1 + jnp.abs(b["y"])),
        "beta": jax.random.beta(split(1), 1.5, 2.0, (n, 1)),
        "dirichlet": jax.random.dirichlet(split(2), jnp.ones(3), (n,)),
        "poisson": jax.random.poisson(split(3), 2.0, (n,)),
        "normal": jax.random.truncated_normal(split(4), -1, 1, (n, 3)),
        "many": jax.random.multivariate_normal(split(5), mean, jnp.eye(2), (n,)),
        "signs": jax.random.rademacher(split(6), (n,)),
        "bits": jax.random.bits(split(7), (3, n), jnp.uint32),
        "choice": jax.random.choice(split(8), n, (n,), replace=False),
        "laplace": jax.random.laplace(split(9), (n // 2, 2)),
        "turn": jax.random.orthogonal(split(10), 3),
    }
    return jnp.mean(h * draws["normal"]) + jnp.mean(h @ draws["turn"]) ** 2, draws


@typical
def rows_of_random_bits_in_other_places(w, b):
    """The rows are not the first dimension of what is drawn."""
    n, s, d = b["z"].shape
    key, noise = b["raw"], functools.partial(jax.random.normal, b["key"])
    z = jnp.swapaxes(b["z"], 0, 1)
    flat = noise((n * s, d)).reshape(n, s, d)
    turned = jnp.swapaxes(noise((s, n, d)), 0, 1)
    keep = jax.random.bernoulli(key, 0.5, (s * n,)).reshape(s, n, 1)
    one = jnp.concatenate([noise((n,)), noise((n,))])
    loss = jnp.mean(b["z"] * flat * turned * w("a", 1, 1, d)) + jnp.sum(z * keep) / n
    return loss, {"one": one, "keep": keep}


@typical
def sorted_by_two_keys(w, b):
    order = jnp.lexsort((b["y"], b["labels"]))
    first, second, x = lax.sort((b["labels"], b["y"], b["x"][:, 0]), num_keys=2)
    rank = jnp.zeros(len(order), int).at[order].set(jnp.arange(len(order)))
    return jnp.mean(x * second * jnp.arange(len(x))) * w("a", 1)[0], {
        "order": order,
        "first": first,
        "rank": rank,
        "partition": jnp.sort(jnp.partition(b["y"], 2)[:2]),
        "unique": jnp.unique(b["tokens"], size=5, fill_value=0, return_counts=True),
    }


@typical
def decompositions(w, b):
    x = features(w, b)
    cov = x.T @ x / len(x) + jnp.diag(jnp.arange(3.0))
    values, vectors = jnp.linalg.eigh(cov)
    r = jnp.linalg.qr(x)[1]
    low = jnp.linalg.cholesky(cov + jnp.eye(3))
    half = jax.scipy.linalg.solve_triangular(low, x.T, lower=True)
    return values.sum() + jnp.mean(half**2) + jnp.sum(jnp.abs(vectors[:, 0]) * values[0]), {
        "singular": jnp.linalg.svd(x, compute_uv=False),
        "r": jnp.abs(r),
        "rank": jnp.linalg.matrix_rank(x),
        "inverse": jnp.linalg.pinv(cov + jnp.eye(3)),
    }


@typical
def interpolation(w, b):
    p = jax.nn.sigmoid(features(w, b)[:, 0])
    at = jnp.linspace(0, 1, 5)
    value = jnp.interp(p, at, w("a", 5))
    bins = jnp.digitize(p, at)
    piece = jnp.select([p < 0.3, p < 0.6], [p, p**2], default=jnp.sin(p))
    return jnp.mean(value * piece), {"bins": bins, "poly": jnp.polyval(jnp.ones(3), p)}


@typical
def resized_images(w, b):
    image = jax.image.resize(b["z"], (len(b["z"]), 3, b["z"].shape[2]), "linear")
    small = jnp.kron(b["x"], jnp.ones((1, 2)))
    return jnp.mean((image @ w("a", b["z"].shape[2], 2)) ** 2) + jnp.mean(small**2), {}


@typical
def gradients_of_a_convolution_inside(w, b):
    c = b["z"].shape[2]
    dims = ("NWC", "WIO", "NWC")
    conv = lambda k, z: lax.conv_general_dilated(z, k, (1,), "SAME", dimension_numbers=dims)
    energy = lambda k, z: jnp.mean(jnp.tanh(conv(k, z)) ** 2)
    of_kernel, of_rows = jax.grad(energy, (0, 1))(w("k", 2, c, 2), b["z"])
    return jnp.sum(of_kernel**2) + 10 * jnp.sum(of_rows**2), {"of_rows": of_rows}


@typical
def gradients_of_pooling_inside(w, b):
    z = b["z"] * w("a", 1, 1, b["z"].shape[2])
    most = lambda z: lax.reduce_window(z, -np.inf, lax.max, (1, 2, 1), (1, 1, 1), "SAME")
    mean = lambda z: lax.reduce_window(z, 0.0, lax.add, (1, 2, 1), (1, 1, 1), "SAME") / 2
    slope = jax.grad(lambda z: jnp.sum(most(z) * mean(z)))(z)
    return jnp.mean(slope * z), {}


@typical
def windows_over_rows(w, b):
    x = features(w, b)
    add = lax.reduce_window(x, 0.0, lax.add, (3, 1), (1, 1), "SAME")
    kernel = w("k", 3, 1, 1)
    conv = lax.conv_general_dilated(
        x.T[..., None], kernel, (1,), [(2, 0)], dimension_numbers=("NWC", "WIO", "NWC")
    )
    return jnp.mean(add * conv[..., 0].T), {"add": add[::3]}


@typical
def special_functions(w, b):
    x = features(w, b)
    found = jax.scipy.special.gammaln(2 + x) + jax.scipy.special.digamma(3 + x)
    found = found + jax.scipy.stats.norm.logpdf(x) + jnp.cbrt(2 + x) + jnp.sinc(x)
    angle = jnp.angle(x + 1j * b["y"][:, None])
    return jnp.mean(found) + jnp.mean(jnp.real(jnp.exp(1j * x))), {"angle": angle, "c": x + 1j}


@typical
def other_types(w, b):
    x = b["x"].astype(jnp.bfloat16)
    return jnp.mean(features(w, b)), {
        "greatest": x.max(0),
        "turned": x.T,
        "half": b["x"].astype(jnp.float16)[::-1],
        "bits": lax.bitcast_convert_type(b["labels"], jnp.float32).view(jnp.int32),
        "bytes": b["tokens"].astype(jnp.uint8).reshape(-1),
        "complex": (b["x"] + 2j).sum(0),
        "not": ~b["keep"],
        "small": b["x"].astype(jnp.float8_e4m3fn).astype(float),
    }


@typical
def a_rule_for_vmap(w, b):
    @jax.custom_batching.custom_vmap
    def shifted(x):
        return x + 1.0

    @shifted.def_vmap
    def _(size, batched, x):
        return x + 1.0, True

    h = features(w, b)
    return jnp.mean(h * jax.vmap(shifted)(lax.stop_gradient(h))), {}


@typical
def linearized(w, b):
    a = w("a", b["x"].shape[1])
    f = lambda x: jnp.tanh(x @ a)
    value, push = jax.linearize(f, b["x"])
    pull = jax.linear_transpose(lambda t: jnp.cumsum(t * 2.0, 0), b["y"])
    jac = jax.jacrev(lambda a: jnp.tanh(b["x"] @ a))(a)
    return jnp.mean(value * push(jnp.ones_like(b["x"]))) + jnp.sum(jac**2) / len(value), {
        "pulled": pull(b["y"])[0],
        "jac": jac,
    }


@typical
def approximate_best(w, b):
    score = features(w, b)[:, 0]
    value, at = lax.approx_max_k(score, 3)
    return jnp.mean(jnp.sort(value)), {"at": jnp.sort(at)}


@typical
def updates_in_place(w, b):
    """Memories of all examples: the rows say which of them they are."""
    n, d = len(b["x"]), b["x"].shape[1]
    memory = jnp.asarray(np.random.default_rng(0).normal(size=(40, d)))
    at = b["tokens"][:, 0] + 7 * (jnp.arange(n) % 5)
    old = memory[at]
    new = memory.at[at].add(0.1 * lax.stop_gradient(b["x"]))
    own = jnp.arange(n) * 2
    kept = memory.at[own].set(b["x"])
    column = memory.at[:, 0].set(0.0).at[3].max(b["x"].max(0))
    return jnp.mean((features(w, b) - old[:, :1]) ** 2), {"new": new, "kept": kept, "c": column}


@typical
def blocks_of_a_matrix(w, b):
    h = features(w, b)
    gram = h @ h.T
    n = len(gram)
    blocks = gram.reshape(n // 2, 2, n // 2, 2)
    lower = gram[jnp.tril_indices(n)]
    return jnp.mean(blocks.mean((1, 3)) ** 2) + jnp.mean(lower), {
        "diagonal": jnp.diagonal(gram, 1),
        "trace": jnp.trace(gram),
        "rows": gram.sum(0) - gram.sum(1),
        "wide": jnp.concatenate([gram, gram.T], 1).sum(0),
        "up": jnp.triu(gram, 1).T,
        "rolled": jnp.roll(gram, (1, 2), (0, 1)),
    }


@typical
def a_batch_of_one_half_of_the_rows(w, b):
    """Masks that choose halves, and rows taken by a table known beforehand."""
    n = len(b["x"])
    table = np.random.default_rng(3).permutation(n)
    x = b["x"][table]
    first = b["x"][np.arange(0, n, 2)]
    picked = b["x"][np.random.default_rng(1).random(n) < 0.5]
    return jnp.mean(jnp.tanh(x @ w("a", x.shape[1])) * b["y"]) + first.var(), {"p": picked}


@typical
def means_of_means(w, b):
    """Statistics of statistics; sums that are divided, compared, chosen and shown."""
    h = features(w, b)
    total, square = h.sum(), (h**2).sum(0)
    better = jnp.where(total > 0, total, -total)
    chosen = jnp.where(square > 0.5, square, total)
    stacked = jnp.stack([total, square[0], 1.0])
    return better / (1 + square.sum()) + stacked @ jnp.ones(3), {
        "stacked": stacked,
        "joined": jnp.concatenate([square, stacked, jnp.ones(2)]),
        "sorted": jnp.sort(square),
        "reshaped": jnp.broadcast_to(square[None], (2, 3)).T,
        "indexed": square[b["labels"]],
        "chosen": chosen,
        "padded": jnp.pad(square, 1, constant_values=2.0),
        "at": square.at[1].set(total).at[0].add(1.0),
        "clipped": jnp.clip(square, 0.1, total),
        "product": square * total,
        "over": square / total,
        "under": 1 / square,
        "outer": jnp.outer(square, h[:, 0]),
        "with": h + square[None] - total,
        "scan": lax.cumsum(square),
        "max": jnp.maximum(square, total),
        "sign": jnp.sign(total) * lax.round(square),
        "dot": square @ square,
        "loop": lax.fori_loop(0, 3, lambda i, t: t + square.sum(), total),
        "pow": total**2,
        "neg": -total + 1.0,
    }


SIZES = {"plain": (8, 4, 3), "alike": (8, 8, 4), "more": (16, 4, 2)}  # rows, length, width
LONG = {"long": (2, 16, 3), "square": (8, 8, 4), "few": (3, 8, 5)}


def batch_of(rows, length, width, seed=0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return arrays(rng, rows, length, width, labels=5, seed=seed) | {"count": np.int32(2)}


def named(
    name: str, sizes: str = "plain", seed: int = 0, among: dict[str, Any] = TYPICAL
) -> Program:
    """Return the program of this name, with a batch of these sizes."""
    function = among[name]
    batch, shapes = batch_of(*(SIZES | LONG)[sizes], seed), {}
    asked = set()

    def ask(name, *shape):
        shapes.setdefault(name, shape)
        return jnp.zeros(shapes[name])

    def discover(batch):
        seen = Asked(batch)
        found = function(ask, seen)
        asked.update(seen.asked)
        return found

    jax.eval_shape(discover, batch)
    weights = make_weights(np.random.default_rng([seed, 2]), shapes)
    program = lambda weights, batch: function(lambda n, *_: weights[n], batch)
    return Program(f"{name}, {sizes}", program, weights, {k: batch[k] for k in sorted(asked)})
