"""The losses of vision models: cross entropy of the class of each image or pixel."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from hfjax.utils.head import widen_tokens
from hfjax.utils.keywords import is_real
from hfjax.utils.mean import Mean

IGNORED = 255  # the label of pixels to ignore
AUXILIARY = 0.5  # the weight of the auxiliary classifier's loss
DIGIT = 256  # counts are returned as three digits of this base


def classification_loss(
    outputs: jax.Array, batch: Mapping[str, jax.Array], smoothing: float = 0.0
) -> Mean:
    """Return the cross entropy of `batch["label"]` [B], with the metrics top1 and top5.

    Examples with `batch["mask"]` [B] 0 or a negative label are ignored. A label beyond the classes
    makes the loss NaN. There is no top5 for five classes or fewer.

    Args:
        outputs: Logits [B, classes].
        batch: A batch with `label`, and optionally `mask`.
        smoothing: The fraction of each target that is spread evenly over all classes.

    Example:
        >>> import jax.numpy as jnp
        >>> from hfjax.models.vision.losses import classification_loss
        >>> logits = jnp.array([[9.0, 0.0], [9.0, 0.0]])
        >>> made = classification_loss(logits, {"label": jnp.array([0, 1])})
        >>> float(made.metrics["top1"].total / made.metrics["top1"].weight)
        0.5
    """
    if not is_real(smoothing, 0, 1) or smoothing == 1:
        raise ValueError(
            f"classification_loss(smoothing={smoothing!r}): the part of a target that is spread "
            "over all classes is from 0 to below 1."
        )
    if isinstance(outputs, Mapping):
        raise ValueError(
            f"outputs {{{', '.join(outputs)}}}: logits [rows, classes] are expected. Of a model "
            "that segments use segmentation_loss."
        )
    labels = _labels(batch, outputs.shape[:-1], "[rows], one class for each image")
    weights = _example_weights(batch, labels) * (labels >= 0)
    logits = _widen(outputs)
    losses = _cross_entropy(logits, labels, smoothing)
    rank = _rank(logits, labels)
    loss_sum, weight = (_weigh(losses, weights)).sum(), weights.sum()
    top_k = {"top1": 1} | ({"top5": 5} if outputs.shape[-1] > 5 else {})
    accuracy = lambda n: Mean((weights * (rank < n)).sum(), weight)
    return Mean(loss_sum, weight, metrics={name: accuracy(n) for name, n in top_k.items()})


def segmentation_loss(outputs: Mapping[str, jax.Array], batch: Mapping[str, jax.Array]) -> Mean:
    """Return the cross entropy of `batch["label"]` [B, H, W], with the metric pixels (accuracy).

    Pixels of label 255, and those of examples with `batch["mask"]` [B] 0, are ignored. Half of the
    loss of the auxiliary classifier is added, if there is one.

    Args:
        outputs: {"out": logits [B, H, W, classes]}, and "aux" if the model has it.
        batch: A batch with `label`, and optionally `mask`.

    Example:
        >>> import jax.numpy as jnp
        >>> from hfjax.models.vision.losses import segmentation_loss
        >>> logits, labels = jnp.zeros((1, 1, 2, 3)), jnp.array([[[1, 255]]])
        >>> made = segmentation_loss({"out": logits, "aux": logits}, {"label": labels})
        >>> round(float(made.total), 3), float(made.weight)  # 1.5 * log(3) of one pixel
        (1.648, 1.0)
    """
    logits, labels, weights = _pixel_inputs(outputs, batch)
    loss_sum = _weigh(_cross_entropy(logits, labels), weights).sum()
    if "aux" in outputs:
        aux_losses = _cross_entropy(_widen(outputs["aux"]), labels)
        loss_sum = loss_sum + AUXILIARY * _weigh(aux_losses, weights).sum()
    num_correct = (weights * (_rank(logits, labels) < 1)).sum()
    weight = weights.sum()
    return Mean(loss_sum, weight, metrics={"pixels": Mean(num_correct, weight)})


def segmentation_eval_loss(
    outputs: Mapping[str, jax.Array], batch: Mapping[str, jax.Array]
) -> Mean:
    """Return the segmentation loss with one more metric, the confusion matrix.

    It is [3, classes, classes] and holds the number of pixels of a class (first) predicted as
    another (second), over the number of examples, in digits of base 256; `confusion_counts`
    converts it to exact counts.

    Args:
        outputs: {"out": logits [B, H, W, classes]}, and "aux" if the model has it.
        batch: A batch with `label`, and optionally `mask`.

    Example:
        >>> import jax.numpy as jnp
        >>> from hfjax.models.vision.losses import confusion_counts, segmentation_eval_loss
        >>> logits, labels = jnp.array([[[[1.0, 2.0], [1.0, 0.0]]]]), jnp.array([[[0, 0]]])
        >>> mean = segmentation_eval_loss({"out": logits}, {"label": labels})
        >>> confusion = mean.metrics["confusion"]
        >>> confusion_counts(confusion.total / confusion.weight, num_examples=1).tolist()
        [[1, 1], [0, 0]]
    """
    logits, labels, weights = _pixel_inputs(outputs, batch)
    num_examples, classes = logits.shape[0], logits.shape[-1]
    flat = lambda x: x.reshape(num_examples, -1, 1)
    of_class = lax.broadcasted_iota(jnp.int32, (1, 1, classes), 2)
    truth = ((flat(labels) == of_class) & (flat(weights) > 0)).astype(jnp.float32)
    predicted = (flat(jnp.argmax(logits, axis=-1)) == of_class).astype(jnp.float32)
    counts = jnp.einsum("bpt,bpc->btc", truth, predicted, precision=lax.Precision.HIGHEST)
    int_counts = counts.astype(jnp.int32)
    digits = [int_counts % DIGIT, int_counts // DIGIT % DIGIT, int_counts // DIGIT**2]
    digit_sums = jnp.stack([digit.astype(jnp.float32).sum(0) for digit in digits])
    confusion = Mean(digit_sums, jnp.asarray(num_examples, jnp.float32))
    mean = segmentation_loss(outputs, batch)
    return replace(mean, metrics={**mean.metrics, "confusion": confusion})


MAX_EXAMPLES = 4096  # per step: the digits of so many examples sum to less than 2 ** 20


def confusion_counts(confusion: Any, num_examples: int) -> np.ndarray:
    """Return the exact counts [classes, classes] of a step with `segmentation_eval_loss`.

    A sum of digits is below 2 ** 20 and divided by the number of examples in float32: an error of
    some units in the last place, times that number, is less than a half.

    Args:
        confusion: The metric of the step.
        num_examples: The size of its global batch: at most 4096, of images of less than 2 ** 24
            pixels.
    """
    if not 0 < num_examples <= MAX_EXAMPLES:
        raise ValueError(
            f"counts_of(…, rows={num_examples!r}): from 1 to {MAX_EXAMPLES} rows, of which float32 "
            "adds the counts exactly. Evaluate fewer rows in a step."
        )
    digits = np.rint(np.asarray(confusion, np.float64) * num_examples).astype(np.int64)
    return digits[0] + DIGIT * digits[1] + DIGIT**2 * digits[2]


def _widen(logits: jax.Array) -> jax.Array:
    return logits.astype(jnp.promote_types(logits.dtype, jnp.float32))


def _labels(batch: Mapping[str, jax.Array], shape: tuple[int, ...], expected: str) -> jax.Array:
    """Return the labels; refuse those that do not match the outputs."""
    labels = widen_tokens(jnp.asarray(batch["label"]))
    if labels.shape != shape or not jnp.issubdtype(labels.dtype, jnp.integer):
        raise ValueError(
            f"labels {labels.dtype}{list(labels.shape)} beside outputs of {list(shape)}: whole "
            f"numbers {expected}, are expected."
        )
    return labels


def _example_weights(batch: Mapping[str, jax.Array], labels: jax.Array) -> jax.Array:
    """Return the weight of each example, with the dimensions of the labels."""
    mask = jnp.asarray(batch["mask"] if "mask" in batch else jnp.ones(labels.shape[:1]))
    if mask.shape != labels.shape[:1] or jnp.issubdtype(mask.dtype, jnp.complexfloating):
        raise ValueError(
            f"mask {mask.dtype}{list(mask.shape)} beside {len(labels)} rows: what each of them "
            "counts is expected, true and false or a number."
        )
    weights = mask.astype(jnp.promote_types(jnp.float32, mask.dtype))
    return weights.reshape(-1, *(1,) * (labels.ndim - 1))


def _pixel_inputs(
    outputs: Mapping[str, jax.Array], batch: Mapping[str, jax.Array]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return logits, labels, and the weight of each pixel."""
    if not isinstance(outputs, Mapping) or "out" not in outputs:
        raise ValueError(
            'the outputs of a model that segments are expected, {"out": logits [B, H, W, classes]},'
            f" found {type(outputs).__name__}. For one class an image use classification_loss."
        )
    logits = _widen(outputs["out"])
    labels = _labels(batch, logits.shape[:-1], "[rows, height, width], one for each pixel")
    weights = _example_weights(batch, labels) * ((labels >= 0) & (labels != IGNORED))
    return logits, labels, weights


def _weigh(losses: jax.Array, weights: jax.Array) -> jax.Array:
    """Return losses times weights; zero weights give zero, even where the loss is NaN."""
    return jnp.where(weights == 0, 0, losses * weights)


def _cross_entropy(logits: jax.Array, labels: jax.Array, smoothing: float = 0.0) -> jax.Array:
    """Return the cross entropy of labels along the last dimension of logits."""
    label_logits = _label_logits(logits, labels)
    logsumexp = jax.nn.logsumexp(logits, axis=-1)
    losses = logsumexp - label_logits
    if smoothing:
        losses = (1 - smoothing) * losses + smoothing * (logsumexp - logits.mean(-1))
    return jnp.where(labels < logits.shape[-1], losses, jnp.nan)


def _label_logits(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the logit of each label."""
    return jnp.where(_columns(logits) == labels[..., None], logits, 0).sum(-1)


def _rank(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the label's rank: the number of greater logits, and of equal ones to its left.

    NaNs rank before, so that they never count as correct.
    """
    label_logit, columns = _label_logits(logits, labels)[..., None], _columns(logits)
    after = (logits < label_logit) | ((logits == label_logit) & (columns >= labels[..., None]))
    return (~after).sum(-1)


def _columns(logits: jax.Array) -> jax.Array:
    shape = (*(1,) * (logits.ndim - 1), logits.shape[-1])
    return lax.broadcasted_iota(jnp.int32, shape, logits.ndim - 1)
