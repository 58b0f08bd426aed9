"""cross_entropy beside what XLA makes of logits: the loss, and with its gradients."""

from collections.abc import Callable, Iterator
from functools import partial

import jax
import jax.numpy as jnp

from benchmarks.gpu_sections.cases import Case, Goal, run_cases, tunings
from benchmarks.gpu_sections.rows import Reporter
from hfjax.pallas_kernels.cross_entropy.loss import Tuning, cross_entropy, reference

KERNEL = "cross_entropy"
SIZE, TINY = (16384, 50304, 768), (64, 256, 64)  # rows, vocabulary, width
TUNINGS = (
    {"columns": 128},
    {"columns": 192},
    {"stages": 3},
    {"group": 8},
    {"group": 32},
)
PARTS = ({"num_parts": 4}, {"num_parts": 6}, {"num_parts": 12}, {"columns": 128})


def run(reporter: Reporter) -> None:
    """Measure the loss with its gradients, then alone."""
    run_cases(reporter, cases)


def cases(smoke: bool) -> Iterator[Case]:
    """Yield both cases."""
    size = TINY if smoke else SIZE
    name = "N={} V={} D={}".format(*size)
    yield _case(f"forward and backward, {name}", size, smoke, _both)
    yield _case(f"forward, {name}", size, smoke, _mean)


def _case(name: str, size: tuple, smoke: bool, of: Callable) -> Case:
    rows, vocab, width = size
    both = of is _both
    candidates = {"reference": of(reference)}
    if not smoke:
        found = tunings(Tuning(), *(PARTS if both else TUNINGS))
        make = lambda tuning: of(partial(cross_entropy, tuning=tuning))
        candidates = {text: make(tuning) for text, tuning in found.items()}
    return Case(
        KERNEL,
        name,
        operands=partial(_operands, size),
        candidates=candidates,
        rivals={"XLA": of(_plain)} | ({} if smoke else {"plain parts": of(reference)}),
        oracle=of(_exact),
        flops=(6 if both else 2) * rows * vocab * width,
        bytes=(4 if both else 2) * (rows + vocab) * width,
        shape={"N": rows, "V": vocab, "D": width},
        goals=(Goal("ratio", 0.95), Goal("memory", 0.2)) if both else (),
    )


def _operands(size: tuple, seed: int) -> tuple:
    rows, vocab, width = size
    one, two, three = jax.random.split(jax.random.key(seed), 3)
    x = jax.random.normal(one, (rows, width), jnp.bfloat16)
    w = (2 * width**-0.5 * jax.random.normal(two, (vocab, width))).astype(jnp.bfloat16)
    return x, w, jax.random.randint(three, (rows,), 0, vocab, jnp.int32)


def _plain(x: jax.Array, w: jax.Array, labels: jax.Array) -> jax.Array:
    """Return each row's loss as a model makes it of logits in bfloat16."""
    return _losses(jnp.dot(x, w.T).astype(jnp.float32), labels)


def _exact(x: jax.Array, w: jax.Array, labels: jax.Array) -> jax.Array:
    return _losses(jnp.dot(x.astype(jnp.float32), w.astype(jnp.float32).T), labels)


def _losses(logits: jax.Array, labels: jax.Array) -> jax.Array:
    picked = jnp.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]
    return jax.nn.logsumexp(logits, axis=-1) - picked


def _mean(losses: Callable) -> Callable:
    return lambda x, w, labels: losses(x, w, labels).mean()


def _both(losses: Callable) -> Callable:
    """Return (x, w, labels) -> the mean loss and the gradients of x and w."""
    return jax.value_and_grad(_mean(losses), argnums=(0, 1))
