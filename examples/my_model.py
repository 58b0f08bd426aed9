"""A model, a loss and an optimizer of one's own for `hfjax train`.

hfjax train --model.factory examples/my_model.py:make --model.loss examples/my_model.py:loss \
    --optimizer.factory examples/my_model.py:optimizer --steps 100 --run-dir runs/mine
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from hfjax.models.gpt import next_token_loss


class Bigrams(nnx.Module):
    """The next token from this one alone."""

    def __init__(self, vocab: int, *, rngs: nnx.Rngs):
        self.table = nnx.Param(0.02 * jax.random.normal(rngs.params(), (vocab, vocab)))

    def __call__(self, batch: dict[str, jax.Array]) -> jax.Array:
        return jnp.asarray(self.table[...])[batch["tokens"][:, :-1]]


def make(vocab: int, seq_len: int):
    """A model for so many tokens, and sequences so long."""
    return lambda rngs: Bigrams(vocab, rngs=rngs)


def loss(outputs: jax.Array, batch: dict[str, jax.Array]):
    """The usual loss; what else the metrics should tell goes into Mean(…, metrics=…)."""
    return next_token_loss(outputs, batch)


def optimizer(rate):
    """Any optax transformation of the learning rate, which is a schedule."""
    return optax.chain(optax.scale_by_adam(b2=0.95), optax.scale_by_learning_rate(rate))
