"""Generate text with a trained model, and evaluate its loss over a data set.

Generation computes the whole sequence again for each token. Evaluation uses each example once.
"""

import dataclasses
import itertools
import math
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P

from hfjax.parallel.adapters.forward_signature import TRAIN, requested_names
from hfjax.parallel.execution import Execution
from hfjax.parallel.jaxprs.model_mesh import without_mesh
from hfjax.parallel.offload.host_memory import to_device
from hfjax.sharding.check_state import check_layout_and_state, check_state_shapes
from hfjax.sharding.layout import Layout, State
from hfjax.sharding.reorder_layers import rearrange
from hfjax.sharding.xla_options import options_for
from hfjax.utils.keywords import check_keywords, is_int, is_real
from hfjax.utils.paths import Tree, flatten
from hfjax.utils.read_files import brief
from hfjax.utils.rounding import widen

COLDEST, HOTTEST = 1e-30, 1e30  # logits divided by them fit float32


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen."""

    temperature: float = 0.8
    """Temperature of sampling; 0: always the likeliest token."""
    top_k: int | None = 40
    """Choose among the N likeliest tokens; None allows all."""
    seed: int = 0
    """Seed of the random choices."""

    def __post_init__(self) -> None:
        least = 0 if is_real(self.temperature, 0, 0) else COLDEST
        warm = is_real(self.temperature, least, HOTTEST)
        if not warm or not (self.top_k is None or is_int(self.top_k, 1)):
            raise ValueError(
                f"temperature={brief(self.temperature)}, top_k={brief(self.top_k)}: a temperature "
                f"of at least 0 (0, or from {COLDEST:g} to {HOTTEST:g}), and at least one token to "
                "choose from, a whole number (top_k=None: all)."
            )
        if not is_int(self.seed, 0, (1 << 32) - 1):
            raise ValueError(
                f"--seed {brief(self.seed)}: a number from 0 to {(1 << 32) - 1} is needed, a whole "
                "one."
            )

    def for_prompt(self, number: int) -> "Sampling":
        """Return the settings for prompt `number`: with the seed higher by `number`."""
        return dataclasses.replace(self, seed=(self.seed + number) % (1 << 32))

    def choose_token(self, logits_V: jax.Array, key: jax.Array) -> jax.Array:
        """Return the next token."""
        if self.temperature == 0:
            return logits_V.argmax()
        if self.top_k is not None:
            least = lax.top_k(logits_V, min(self.top_k, len(logits_V)))[0][-1]
            logits_V = jnp.where(logits_V < least, -jnp.inf, logits_V)
        return jax.random.categorical(key, logits_V / self.temperature)


Prompt = Sequence[int] | str


@without_mesh
def generate(  # noqa: PLR0913  options of one call
    layout: Layout,
    state: State,
    prompt: Prompt | Sequence[Prompt],
    count: int,
    *,
    length: int | None = None,
    vocab: int | None = None,
    tokenizer: Any = None,
    sampling: Sampling = Sampling(),
    **fields: Any,
) -> Any:
    """Return `count` tokens generated after a prompt, or after each of several; for text, text.

    All prompts form one batch. Prompt i is sampled with seed + i, so each gets what it would get
    alone (up to rounding).

    Args:
        layout: The layout of a model that returns logits [B, S, V] of {"tokens": [B, S + 1]}.
        state: A state of the layout, its layers stored for any schedule.
        prompt: At least one token, each of the vocabulary. Or a text, if there is a tokenizer. Or a
            list of prompts: then a list is returned.
        count: Number of tokens to generate, at least 1.
        length: How many of the last tokens the model sees, at most as many as it has positions.
            None: all.
        vocab: Number of tokens to choose from; logits beyond are ignored. None: that of the
            tokenizer, or all.
        tokenizer: What `hfjax.data.load_tokenizer` returns, or any object that has `encode(texts)`,
            `decode(tokens)` and `vocab`.
        sampling: Temperature, top_k and seed together.
        fields: Or each by name: temperature=0.8 (0 takes the likeliest token), top_k=40 (choose
            among the 40 likeliest; None: among all), seed=0.

    Raises:
        ValueError: A number or a prompt is invalid, or the logits are not finite.

    Example:
        >>> import hfjax, optax
        >>> from flax import nnx
        >>> class Bigrams(nnx.Module):
        ...     def __init__(self, rngs):
        ...         self.table = nnx.Embed(256, 256, rngs=rngs)
        ...     def __call__(self, batch):
        ...         return self.table(batch["tokens"][:, :-1])
        >>> layout = hfjax.layout(Bigrams, optax.sgd(0.1), hfjax.make_mesh(data=8), hfjax.DDP)
        >>> state = hfjax.init(layout)
        >>> tokens = hfjax.generate(layout, state, b"Once", 5, length=8, temperature=0)
        >>> len(tokens), all(0 <= token < 256 for token in tokens)
        (5, True)
        >>> several = hfjax.generate(layout, state, [b"Once", [104, 105]], 5, top_k=8, seed=1)
        >>> [len(tokens) for tokens in several]
        [5, 5]
        >>> text = hfjax.data.load_tokenizer("bytes")
        >>> type(hfjax.generate(layout, state, "Once", 5, tokenizer=text)).__name__
        'str'
    """
    check_keywords("generate", fields, [field.name for field in dataclasses.fields(Sampling)])
    sampling = dataclasses.replace(sampling, **fields)
    check_layout_and_state("generate", layout, state)
    _check_counts(count, length=length, vocab=vocab)
    is_single = isinstance(prompt, str | bytes) or all(
        np.ndim(x) == 0 for x in _without_texts(prompt)
    )
    prompts: Any = [prompt] if is_single else list(prompt)
    vocab = getattr(tokenizer, "vocab", None) if vocab is None else vocab
    token_lists = [_prompt_tokens(x, tokenizer, vocab, length) for x in prompts]
    length = length or max(map(len, token_lists)) + count
    generator = _Generator(layout, dataclasses.replace(sampling, seed=0), count, vocab)
    new_tokens = _generate_tokens(generator, state, sampling.seed, token_lists, length)
    decode = lambda x, tokens: tokenizer.decode(tokens) if isinstance(x, str) else tokens
    texts = [decode(*pair) for pair in zip(prompts, new_tokens, strict=True)]
    return texts[0] if is_single else texts


def _check_counts(count: int, **others: int | None) -> None:
    """Refuse anything but positive whole numbers."""
    if not is_int(count, 1):
        raise ValueError(
            f"generate: {brief(count)} tokens are asked for, at least 1 is needed, a whole number."
        )
    for name, value in others.items():
        if value is not None and not is_int(value, 1):
            raise ValueError(
                f"generate: {name}={brief(value)}; a whole number of tokens, at least 1, is "
                "expected, or None: all."
            )


def _without_texts(prompt: Any) -> Any:
    """Return the items of a prompt, each text in it as a list of tokens."""
    return [[0] if isinstance(x, str | bytes) else x for x in prompt]


def _prompt_tokens(prompt: Any, tokenizer: Any, vocab: int | None, length: int | None) -> list[int]:
    """Return the tokens of a prompt that the model sees."""
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ValueError(
                "generate: a text is given and no tokenizer. Give tokens, or "
                'tokenizer=hfjax.data.load_tokenizer("bytes"), or that of your data.'
            )
        prompt = encode_prompt(prompt, tokenizer)
    tokens = np.asarray(list(prompt))
    if not tokens.size:
        raise ValueError("generate: the prompt has no token. Give some text.")
    _check_tokens(tokens, vocab)
    return tokens.tolist()[-(length or 0) :]


def encode_prompt(prompt: str, tokenizer: Any) -> list[int]:
    """Return the tokens of a text; warn if the tokenizer leaves characters of it out."""
    before = getattr(tokenizer, "dropped", 0)
    tokens = tokenizer.encode([prompt])[0].tolist()
    if lost := getattr(tokenizer, "dropped", 0) - before:
        warnings.warn(
            f"the tokenizer has no token for {lost} characters of the prompt "
            f"{brief(prompt)}: the model does not see them",
            RuntimeWarning,
            stacklevel=2,
        )
    return tokens


def _check_tokens(tokens: np.ndarray, vocab: int | None) -> None:
    """Refuse a prompt with anything but tokens of the vocabulary."""
    is_integer = tokens.dtype.kind in "iu"
    most = np.iinfo(np.int32).max if vocab is None else vocab - 1
    wrong = tokens[(tokens < 0) | (tokens > most)] if is_integer else tokens
    if wrong.size:
        raise ValueError(
            f"generate: the prompt holds {brief(wrong.tolist()[0])}; tokens are whole numbers from "
            f"0 to {most}. Give tokens of the model's vocabulary."
        )


def _generate_tokens(
    generator: "_Generator", state: State, seed: int, prompts: list[list[int]], length: int
) -> list[list[int]]:
    """Return the tokens generated after each of these prompts."""
    layout = generator.layout
    sequences = np.zeros((len(prompts), length), np.int32)
    for sequence, tokens in zip(sequences, prompts, strict=True):
        sequence[: len(tokens)] = tokens
    seeds = np.asarray([(seed + i) % (1 << 32) for i in range(len(prompts))], np.uint32)
    state, program = rearrange(layout.model_layout, state), _program(generator)
    with jax.set_mesh(layout.mesh):
        counts = np.asarray(list(map(len, prompts)), np.int32)
        outs = program(state.params, state.variables, sequences, counts, seeds)
    new_tokens, finite, logits = (np.asarray(x.addressable_data(0)) for x in outs)
    for tokens in prompts:
        _check_tokens(np.asarray(tokens), int(logits))
    if not finite.all():
        raise ValueError(
            f"generate: the logits of prompt {int(finite.argmin())} are not finite, so that no "
            "token can be chosen. The parameters of this state hold NaN or infinity, or overflow: "
            "give the state of an earlier step."
        )
    return new_tokens.tolist()


@lru_cache(maxsize=8)
def _program(generator: "_Generator") -> jax.stages.Wrapped:
    """Return the compiled program, cached by its generator."""
    options = options_for(generator.layout, Execution())
    replicated = NamedSharding(generator.layout.mesh, P())
    return jax.jit(generator, out_shardings=replicated, compiler_options=options)


@dataclass(frozen=True)
class _Generator:
    """The program that generates `count` tokens after each sequence of a batch.

    It also returns whether all logits of each sequence were finite, and the logits per token.
    """

    layout: Layout
    sampling: Sampling
    count: int
    vocab: int | None

    def __call__(
        self, params: Tree, variables: Any, tokens_BS: jax.Array, lengths_B: jax.Array, seeds_B: Any
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return the tokens that follow the first `lengths_B` of each sequence.

        Parameters in host memory are copied once, for all tokens: each device has its shards.
        """
        plain = self.layout.model_layout
        check_state_shapes(plain, State(None, params, None, variables), optimizer=False)
        template, params = self.layout.template, to_device(flatten(params))
        model = template.merge(params, flatten(variables), "eval")
        keys_B, length = jax.vmap(jax.random.key)(seeds_B), tokens_BS.shape[1]
        indices = jnp.arange(len(tokens_BS))

        def body(i, carry):
            sequences, lengths, new_tokens, finite, _ = carry
            logits = self._logits(model, jnp.pad(sequences, ((0, 0), (0, 1))))
            last = widen(logits[indices, lengths - 1, : self.vocab]).astype(jnp.float32)
            keys = jax.vmap(jax.random.fold_in, (0, None))(keys_B, i)
            tokens = jax.vmap(self.sampling.choose_token)(last, keys).astype(sequences.dtype)
            is_full = lengths == length
            sequences = jnp.where(is_full[:, None], jnp.roll(sequences, -1, axis=1), sequences)
            sequences = sequences.at[indices, jnp.where(is_full, length - 1, lengths)].set(tokens)
            finite &= jnp.isfinite(last.max(-1))  # masked logits are -inf
            lengths, new_tokens = jnp.minimum(lengths + 1, length), new_tokens.at[:, i].set(tokens)
            return sequences, lengths, new_tokens, finite, jnp.int32(logits.shape[-1])

        new_tokens = jnp.zeros((len(tokens_BS), self.count), tokens_BS.dtype)
        init = (
            jnp.asarray(tokens_BS),
            lengths_B,
            new_tokens,
            jnp.ones(len(tokens_BS), bool),
            jnp.int32(0),
        )
        return lax.fori_loop(0, self.count, body, init)[2:]

    def _logits(self, model: Any, tokens_BS: jax.Array) -> jax.Array:
        forward, batch = self.layout.forward, {"tokens": tokens_BS}
        if forward is None:
            return model(batch)
        forward_kwargs = {
            name: False if name == TRAIN else None for name in requested_names(forward)
        }
        return forward(model, batch, **forward_kwargs)


LAG = 2  # results are read so many batches later, so that nothing waits for the device


def check_mask_weights(step: Callable, state: State, batch: Mapping[str, Any]) -> None:
    """Refuse a loss that counts examples of mask 0, which pad the last batch."""
    empty = dict(batch, mask=np.zeros_like(batch["mask"]))
    if weight := float(step(state, empty)["weight"]):
        raise ValueError(
            f"the loss weighs a batch whose mask is 0 everywhere by {weight:g}: the examples that "
            'pad the last batch would count. Let it use batch["mask"] and return hfjax.Mean(total, '
            "mask.sum()), or validate with a --global-batch-size that divides the examples."
        )


class MeanLoss(NamedTuple):
    """A mean loss, and the number of tokens that it averages."""

    loss: float
    tokens: int

    @property
    def numbers(self) -> Mapping[str, float]:
        """Further scores by name: none."""
        return {}

    @property
    def table(self) -> str:
        """Further scores as a table: none."""
        return ""

    @property
    def line(self) -> str:
        """The scores in a line."""
        perplexity = math.exp(min(self.loss, 700.0))
        return f"loss {self.loss:.4f}, perplexity {perplexity:.2f}, {self.tokens} tokens"


def evaluate(
    step: Callable,
    state: State,
    batches: Iterable[Any],
    most: int | None = None,
    beat: Callable[[], Any] = lambda: None,
) -> MeanLoss:
    """Return the mean loss by `hfjax.eval_step` over all batches, or the first `most` of them.

    Args:
        step: What `hfjax.eval_step` returned.
        state: The state to evaluate.
        batches: For instance a `Loader` with epochs=1.
        most: Maximum number of batches. None: all.
        beat: Called for each batch, to report progress.

    Returns:
        (loss, tokens): the mean, and the number of tokens (weight of the loss) that it averages.

    Example:
        >>> import hfjax, jax.numpy as jnp, numpy as np, optax
        >>> from hfjax.trainer import evaluate
        >>> model = lambda rngs: {"w": jnp.ones(())}
        >>> layout = hfjax.layout(model, optax.sgd(0.1), hfjax.make_mesh(data=8), hfjax.DDP)
        >>> step = hfjax.eval_step(layout, lambda params, x: (params["w"] * x).mean())
        >>> evaluate(step, hfjax.init(layout), [np.full(8, 1.0), np.full(8, 3.0)])
        MeanLoss(loss=2.0, tokens=16)
    """
    return mean_loss(eval_batches(step, state, batches, most, beat))


def eval_batches(
    step: Callable,
    state: State,
    batches: Iterable[Any],
    most: int | None = None,
    beat: Callable[[], Any] = lambda: None,
) -> list[Mapping[str, np.ndarray]]:
    """Return the metrics of all batches, or of the first `most`; nothing waits for the device."""
    metrics_read: list[Mapping[str, np.ndarray]] = []
    unread = deque[Any]()
    on_host = lambda metrics: {name: np.asarray(x) for name, x in metrics.items()}
    for batch in itertools.islice(batches, most):
        beat()
        unread.append(step(state, batch))
        while len(unread) > LAG:
            metrics_read.append(on_host(unread.popleft()))
            beat()
    return metrics_read + [on_host(metrics) for metrics in unread]


def mean_loss(metrics: Sequence[Mapping[str, Any]], unit: str = "token") -> MeanLoss:
    """Return the mean loss of batches, weighted by their weights."""
    if not metrics:
        raise ValueError("evaluate: there is no batch. Give a data set with at least one example.")
    pairs = list(map(_weight_and_loss, metrics))
    tokens = sum(weight for weight, _ in pairs)
    if not tokens:
        raise ValueError(
            f"evaluate: no {unit} of {len(pairs)} batches has a weight, so that there is no mean. "
            "Look at the data set and its masks."
        )
    loss_sum = sum(weight * loss for weight, loss in pairs if weight)
    return MeanLoss(loss_sum / tokens, round(tokens))


def _weight_and_loss(metrics: Mapping[str, Any]) -> tuple[float, float]:
    """Return weight and loss of a batch."""
    return float(metrics["weight"]), float(metrics["loss"])
