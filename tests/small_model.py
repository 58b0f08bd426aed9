"""A model of one's own for small runs: in three parts, and a third of a GPT's time to compile."""

import jax.numpy as jnp
import numpy as np
from flax import nnx

from hfjax.models.gpt import GPTConfig
from hfjax.models.layers import pack_stream, stack_layers, unpack_stream
from tests.small_gpt import MLPs, OnlyMLP


class Behind(OnlyMLP):
    """An MLP that reads a token and the mean of those up to it."""

    def __call__(self, x):
        x_BSD, documents = unpack_stream(x)
        length = x_BSD.shape[1]
        mean = np.tril(np.ones((length, length))) / np.arange(1, length + 1)[:, None]
        behind = jnp.einsum("st,btd->bsd", mean.astype(x_BSD.dtype), x_BSD)
        return pack_stream(super().__call__(x_BSD + behind), documents)


class Stack(MLPs):
    """Kernels of 16,384 numbers and more, which strategies split, between tokens and a head."""

    def __init__(self, vocab: int, length: int, layers: int = 2, *, rngs: nnx.Rngs):
        config = GPTConfig.tiny(layers=layers, embed=64, heads=2, vocab=vocab, length=length)
        super().__init__(config, rngs=rngs)
        self.layers = stack_layers(layers, lambda rngs: Behind(config, rngs=rngs), rngs)


def deep(vocab: int, length: int):
    """Four layers."""
    return lambda rngs: Stack(vocab, length, 4, rngs=rngs)


def make(vocab: int, length: int):
    """A model for so many tokens, and rows so long."""
    return lambda rngs: Stack(vocab, length, rngs=rngs)
