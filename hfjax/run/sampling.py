"""Text from a trained model, and the loss over a data set.

Text: one token after the other, the whole row computed for each. Loss: each row once.
"""

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P

from hfjax.base.paths import Tree, flatten
from hfjax.parallel.memory import to_device
from hfjax.plan.layout import Layout, State
from hfjax.plan.rearrange import canonical


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen."""

    temperature: float = 0.8
    """0: always the likeliest token."""
    top_k: int | None = 40
    """Only among so many of the likeliest; None: among all."""
    seed: int = 0

    def __post_init__(self):
        if self.temperature < 0 or (self.top_k is not None and self.top_k < 1):
            raise ValueError(
                f"temperature={self.temperature}, top_k={self.top_k}: a temperature of at least 0, "
                "and at least one token to choose from."
            )
        if not 0 <= self.seed < 1 << 32:
            raise ValueError(f"--seed {self.seed}: a number from 0 to {(1 << 32) - 1} is needed.")

    def choose(self, logits_V: jax.Array, key: jax.Array) -> jax.Array:
        """Return the next token."""
        if self.temperature == 0:
            return logits_V.argmax()
        if self.top_k is not None:
            least = lax.top_k(logits_V, min(self.top_k, len(logits_V)))[0][-1]
            logits_V = jnp.where(logits_V < least, -jnp.inf, logits_V)
        return jax.random.categorical(key, logits_V / self.temperature)


def generate(
    layout: Layout,
    state: State,
    prompt: Sequence[int],
    count: int,
    *,
    length: int,
    vocab: int,
    sampling: Sampling = Sampling(),
) -> list[int]:
    """Return `count` tokens that follow the prompt; the model sees the last `length` of them.

    Args:
        layout: The layout of a model that returns logits [B, S, V] of {"tokens": [B, S + 1]}.
        state: A state of it, its layers stored for any schedule.
        prompt: At least one token; those beyond `vocab` are left out.
        count: How many tokens, at least 1.
        length: How many of the last tokens the model sees, at most as many as it has positions.
        vocab: Tokens to choose from; logits beyond are ignored.
        sampling: Temperature, top_k and seed. Temperature 0 takes the likeliest token.

    Example:
        >>> import hfjax, optax
        >>> from flax import nnx
        >>> from hfjax.run import generate
        >>> class Bigrams(nnx.Module):
        ...     def __init__(self, rngs):
        ...         self.table = nnx.Embed(256, 256, rngs=rngs)
        ...     def __call__(self, batch):
        ...         return self.table(batch["tokens"][:, :-1])
        >>> layout = hfjax.layout(Bigrams, optax.sgd(0.1), hfjax.make_mesh(data=8), hfjax.DDP)
        >>> tokens = generate(layout, hfjax.init(layout), b"Once", 5, length=8, vocab=256)
        >>> len(tokens), all(0 <= token < 256 for token in tokens)
        (5, True)
    """
    if count < 1:
        raise ValueError(f"generate: {count} tokens are asked for, at least 1 is needed.")
    known = [token for token in prompt if token < vocab][-length:]
    if not known:
        raise ValueError("generate: the prompt has no token. Give some text.")
    row = np.zeros(length, np.int32)
    row[: len(known)] = known
    state = canonical(layout, state)
    follow = _Follow(layout, sampling, count, vocab)
    run = jax.jit(follow, out_shardings=NamedSharding(layout.mesh, P()))
    with jax.set_mesh(layout.mesh):
        found = run(state.params, state.variables, row, len(known))
    return np.asarray(found.addressable_data(0)).tolist()


@dataclass(frozen=True)
class _Follow:
    """The program that writes `count` tokens."""

    layout: Layout
    sampling: Sampling
    count: int
    vocab: int

    def __call__(self, params: Tree, variables: Any, row_S: jax.Array, known: Any) -> jax.Array:
        """Return the tokens that follow the first `known` of a row.

        Parameters of the host are fetched once, for all tokens: each device has its shards.
        """
        blueprint, params = self.layout.blueprint, to_device(flatten(params))
        model = blueprint.merge(params, flatten(variables), "eval")
        key, length = jax.random.key(self.sampling.seed), row_S.shape[0]

        def body(i, carry):
            row, known, new = carry
            logits = model({"tokens": jnp.pad(row, (0, 1))[None]})[0, known - 1, : self.vocab]
            token = self.sampling.choose(
                logits.astype(jnp.float32), jax.random.fold_in(key, i)
            ).astype(row.dtype)
            full = known == length
            row = jnp.where(full, jnp.roll(row, -1), row)
            row = row.at[jnp.where(full, length - 1, known)].set(token)
            return row, jnp.minimum(known + 1, length), new.at[i].set(token)

        first = (jnp.asarray(row_S), jnp.asarray(known), jnp.zeros(self.count, row_S.dtype))
        return lax.fori_loop(0, self.count, body, first)[2]


LAG = 2  # batches behind which results are read: nothing waits for the device


def check_weighs_by_mask(step: Callable, state: State, batch: Mapping[str, Any]) -> None:
    """Refuse a loss that counts rows of mask 0, as they fill up the last batch."""
    empty = dict(batch, mask=np.zeros_like(batch["tokens"][:, 1:], np.float32))
    if weight := float(step(state, empty)["weight"]):
        raise ValueError(
            f"the loss weighs a batch whose mask is 0 everywhere by {weight:g}: the rows that fill "
            'up the last batch would count. Let it use batch["mask"] and return hfjax.Mean(total, '
            "mask.sum()), or validate with a --batch that divides the rows."
        )


class Evaluated(NamedTuple):
    """A mean loss, and of how many tokens it is the mean."""

    loss: float
    tokens: int


def evaluate(
    step: Callable,
    state: State,
    batches: Iterable[Any],
    most: int | None = None,
    beat: Callable[[], Any] = lambda: None,
) -> Evaluated:
    """Return the mean loss by `hfjax.eval_step` over all batches, or the first `most` of them.

    Args:
        step: What `hfjax.eval_step` returned.
        state: The state to evaluate.
        batches: For instance a `Loader` with epochs=1.
        most: How many batches at most. None: all.
        beat: What is called for each batch: evaluating gets on.

    Returns:
        (loss, tokens): the mean, and of how many tokens (the weight of the loss) it is the mean.

    Example:
        >>> import hfjax, jax.numpy as jnp, numpy as np, optax
        >>> from hfjax.run import evaluate
        >>> model = lambda rngs: {"w": jnp.ones(())}
        >>> layout = hfjax.layout(model, optax.sgd(0.1), hfjax.make_mesh(data=8), hfjax.DDP)
        >>> step = hfjax.eval_step(layout, lambda params, x: (params["w"] * x).mean())
        >>> evaluate(step, hfjax.init(layout), [np.full(8, 1.0), np.full(8, 3.0)])
        Evaluated(loss=2.0, tokens=16)
    """
    read: list[tuple[float, float]] = []
    unread = deque[Any]()
    for batch in itertools.islice(batches, most):
        beat()
        unread.append(step(state, batch))
        while len(unread) > LAG:
            read.append(_read(unread.popleft()))
            beat()
    read += map(_read, unread)
    if not read:
        raise ValueError("evaluate: there is no batch. Give a data set with at least one row.")
    tokens = sum(weight for weight, _ in read)
    if not tokens:
        raise ValueError(
            f"evaluate: no token of {len(read)} batches has a weight, so that there is no mean. "
            "Look at the data set and its masks."
        )
    total = sum(weight * loss for weight, loss in read if weight)
    return Evaluated(total / tokens, round(tokens))


def _read(metrics: Mapping[str, Any]) -> tuple[float, float]:
    """Return weight and loss of a batch."""
    return float(metrics["weight"]), float(metrics["loss"])
