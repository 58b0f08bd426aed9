"""Cross entropy of a vocabulary's projection, forward and backward, without its logits.

`cross_entropy(x_ND, w_VD, labels_N)` is `logsumexp(x @ w.T) - (x @ w.T)[label]` of each row, in
float32 (float64 stays). Saved for backward: x, w, labels and the logsumexp, [N] floats. After
"Cut Your Losses in Large-Vocabulary Language Models" (Wijmans et al., 2024), with the gradients'
matmuls left to the BLAS library, as in Liger.

- Forward: tiles of logits on the tensor cores (`tiles.statistics`), reduced to the maximum and the
  sum of exponentials of each row.
- Backward: the vocabulary in P parts, one after another: (softmax - onehot) of a part in x's dtype
  [N, V / P], then dx += that @ w, dw = that.T @ x. Only one part of the logits exists at a time.

Labels: a negative one is ignored (its loss is 0 and it has no gradient); one beyond the vocabulary
makes its loss, and the gradients, NaN: an error that must be noticed.

`axis`: inside shard_map, the mesh axis (or axes) over which the rows of w are sharded; labels are
global. dx is this device's partial sum, and dw its shard; dx must be summed where x was replicated
over the axis: with check_vma JAX does so (x is cast to varying here, and the transpose of the cast
is the sum), without it the transpose of the enclosing shard_map.

The lower bound, for N rows, width D, V local columns, S devices of the axis, 2-byte operands:
  flops    forward 2NVD; backward 6NVD (the logits again, dx, dw): 8NVD, where saved logits
           need 6NVD. Exponentials: NV forward, NV backward.
  memory   saved: 4N bytes. Peak: 2NV / P of probabilities, 4ND of dx, 2ND of weighted x.
  traffic  forward 2ND + 2VD * N / 2048 (a group of 2048 rows shares its reads of w);
           backward 6NV of probabilities (written, read twice), 8NDP of dx.
  links    12N bytes all-reduced over the axis (maximum, then sum and picked logit), and dx once.
At 700 TFLOP/s, N=16384, V=50304, D=768: forward 1.8 ms, backward 5.4 ms, and 6 GB of traffic,
partly hidden by matmuls. Compiled for an H200: a peak of 265 MiB, where saved logits take 1572 MiB.
None of this has been timed yet.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from hfjax.pallas_kernels.cross_entropy import logits, tiles
from hfjax.pallas_kernels.cross_entropy.logits import Columns, Tuning, matmul, sum_dtype, take_part
from hfjax.utils.paths import Shaped
from hfjax.utils.vma import mark_varying, varying_axes, zeros

__all__ = ["Tuning", "cross_entropy", "reference", "refuses"]

Axis = str | tuple[str, ...] | None


def cross_entropy(
    x_ND: jax.Array,
    w_VD: jax.Array,
    labels_N: jax.Array,
    axis: Axis = None,
    vocab: int | None = None,
    tuning: Tuning = logits.KERNEL,
) -> jax.Array:
    """Return the loss of each row, [N] in float32: the kernel, for a Hopper GPU.

    `vocab`: the number of real columns, if w has padding rows beyond.
    """
    if reason := refuses(x_ND, w_VD, labels_N):
        raise ValueError(reason)
    return _row_losses(x_ND, w_VD, labels_N, Problem.of(True, axis, vocab, tuning))


def reference(
    x_ND: jax.Array,
    w_VD: jax.Array,
    labels_N: jax.Array,
    axis: Axis = None,
    vocab: int | None = None,
    tuning: Tuning = logits.PLAIN,
) -> jax.Array:
    """Return the same as `cross_entropy`, in plain JAX: the same parts, for any device and dtype.

    The compiler may shard it, too (axis=None under jit): compiled for 8 H200s, rows sharded over
    devices cost an all-reduce of dw, one part at a time; columns cost one all-reduce of dx, in
    float32, and three all-reduces of [N] for each part.
    """
    if reason := _check_shapes(x_ND, w_VD, labels_N):
        raise ValueError(reason)
    dtype = jnp.promote_types(x_ND.dtype, w_VD.dtype)
    operands = (x_ND.astype(dtype), w_VD.astype(dtype))
    return _row_losses(*operands, labels_N, Problem.of(False, axis, vocab, tuning))


def refuses(x_ND: Shaped, w_VD: Shaped, labels_N: Shaped) -> str | None:
    """Return why the kernel cannot take these operands, or None."""
    if reason := _check_shapes(x_ND, w_VD, labels_N):
        return reason
    if x_ND.dtype != w_VD.dtype or x_ND.dtype not in (jnp.bfloat16, jnp.float16):
        return (
            f"cross_entropy: x is {x_ND.dtype}, w is {w_VD.dtype}; the kernel takes both in "
            "bfloat16 or both in float16. Cast them, or use `reference`."
        )
    if x_ND.shape[1] % 64:
        return (
            f"cross_entropy: x {x_ND.shape} has a width of {x_ND.shape[1]}; the kernel takes "
            "multiples of 64. Pad x and w with zeros, or use `reference`."
        )
    return None


def _check_shapes(x: Shaped, w: Shaped, labels: Shaped) -> str | None:
    fit = x.ndim == w.ndim == 2 and x.shape[1] == w.shape[1] and labels.shape == x.shape[:1]
    if not fit or not x.size or not w.size or not jnp.issubdtype(labels.dtype, jnp.integer):
        return (
            f"cross_entropy: x {x.shape}, w {w.shape}, labels {labels.shape} {labels.dtype}; x is "
            "[N, D], w [V, D], labels [N] integers. Reshape them, or transpose w."
        )
    return None


@dataclass(frozen=True)
class Problem:
    """The sharding of the vocabulary, and the implementation that computes its tiles."""

    axis: Axis
    vocab: int | None
    tuning: Tuning
    statistics: Callable
    probabilities: Callable

    @classmethod
    def of(cls, kernel: bool, axis: Axis, vocab: int | None, tuning: Tuning) -> "Problem":
        """Return the problem, for the kernel or for plain JAX."""
        return cls(axis, vocab, tuning, *(KERNEL if kernel else PLAIN))

    @property
    def axes(self) -> tuple[str, ...]:
        return (self.axis,) if isinstance(self.axis, str) else tuple(self.axis or ())

    def size(self, w_VD: jax.Array) -> int:
        """Return the number of real columns of the global vocabulary."""
        num_columns = w_VD.shape[0] * (lax.axis_size(self.axes) if self.axes else 1)
        return num_columns if self.vocab is None else min(self.vocab, num_columns)

    def columns(self, w_VD: jax.Array) -> Columns:
        """Return the local columns of the vocabulary."""
        num_local = w_VD.shape[0]
        first = lax.axis_index(self.axes) * num_local if self.axes else 0
        return Columns(first, jnp.clip(self.size(w_VD) - first, 0, num_local))

    @property
    def tracked(self) -> frozenset[str]:
        """The axes over which JAX tracks values as varying (shard_map's check_vma)."""
        return frozenset[str]().union(*(varying_axes(lax.axis_index(axis)) for axis in self.axes))


def _row_losses(x: jax.Array, w: jax.Array, labels: jax.Array, problem: Problem) -> jax.Array:
    axes = problem.tracked.union(*map(varying_axes, (x, w, labels)))
    return _losses(problem, mark_varying(x, axes), mark_varying(w, axes), labels.astype(jnp.int32))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _losses(problem: Problem, x_ND: jax.Array, w_VD: jax.Array, labels_N: jax.Array) -> jax.Array:
    return forward(problem, x_ND, w_VD, labels_N)[0]


def forward(
    problem: Problem, x_ND: jax.Array, w_VD: jax.Array, labels_N: jax.Array
) -> tuple[jax.Array, tuple]:
    """Return (the loss of each row, the residuals of `backward`: operands and logsumexp)."""
    stats = problem.statistics(x_ND, w_VD, labels_N, problem.columns(w_VD), problem.tuning)
    logsumexp, picked = _reduce_stats(problem.axes, *stats)
    losses = jnp.where(labels_N < problem.size(w_VD), logsumexp - picked, jnp.nan)
    losses = jnp.where(labels_N < 0, 0, losses)
    return losses, (x_ND, w_VD, labels_N, logsumexp)


def _reduce_stats(
    axes: tuple[str, ...], row_max: jax.Array, sum_exp: jax.Array, picked: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return (logsumexp, picked logit), all-reduced over the axes."""
    if not axes:
        return row_max + jnp.log(sum_exp), picked
    global_max = lax.pmax(row_max, axes)
    sum_exp, picked = lax.psum(jnp.stack([sum_exp * jnp.exp(row_max - global_max), picked]), axes)
    return global_max + jnp.log(sum_exp), picked


def backward(problem: Problem, saved: tuple, g_N: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    """Return (this device's partial sum of dx; dw; None for the labels)."""
    x_ND, w_VD, labels_N, _ = saved
    g_N = jnp.where(labels_N < problem.size(w_VD), g_N, jnp.nan)
    g_N = jnp.where(labels_N < 0, 0, g_N)
    largest = jnp.abs(g_N).max()
    scale = jnp.where(largest > 0, largest, 1)
    dx, dw = _gradients(problem, saved, (g_N / scale).astype(x_ND.dtype), scale)
    return (dx * g_N[:, None]).astype(x_ND.dtype), dw.astype(w_VD.dtype), None


def _gradients(
    problem: Problem, saved: tuple, weights_N: jax.Array, scale: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return dx before each row is weighted, and dw.

    Row weights are applied to x: the probabilities, in a low-precision dtype, stay in [-1, 1].
    """
    x_ND, w_VD, labels_N, logsumexp = saved
    num_parts = problem.tuning.count_parts(w_VD.shape[0])
    w_CPD, weighted_ND = logits.split_parts(w_VD, num_parts), x_ND * weights_N[:, None]
    columns = problem.columns(w_VD)

    def add_part(part, gradients):
        dx, dw_CPD = gradients
        part = jnp.int32(part)
        labels, real = columns.part_labels(labels_N, part, num_parts)
        numbers, row_inputs = (part, real), (logsumexp, labels)
        probs = problem.probabilities(numbers, (x_ND, w_CPD), row_inputs, problem.tuning)
        num_padding = probs.shape[1] - w_CPD.shape[0]  # columns of zeros, for the kernel's tiles
        w_CD = jnp.pad(take_part(w_CPD, part), ((0, num_padding), (0, 0)))
        dw = (matmul(probs, weighted_ND, (0, 0)) * scale)[: w_CPD.shape[0]].astype(w_VD.dtype)
        dw_CPD = lax.dynamic_update_index_in_dim(dw_CPD, dw, part, 1)
        return dx + matmul(probs, w_CD, (1, 0)), dw_CPD

    start = zeros(x_ND.shape, x_ND, sum_dtype(x_ND.dtype)), zeros(w_CPD.shape, w_VD, w_VD.dtype)
    dx, dw_CPD = lax.fori_loop(0, num_parts, add_part, start)
    return dx, dw_CPD.reshape(-1, w_VD.shape[1])[: w_VD.shape[0]]


def _backward(problem: Problem, saved: tuple, g_N: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    if not problem.tracked and problem.axes:
        g_N = lax.psum(g_N, problem.axes)  # as the transpose of psum does without check_vma
    return backward(problem, saved, g_N)


_losses.defvjp(forward, _backward)

PLAIN = (logits.statistics, logits.probabilities)
KERNEL = (tiles.statistics, tiles.probabilities)
