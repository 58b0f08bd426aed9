"""Text, as tokens: the model for their vocabulary, rows of them, the loss of the next one."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import hfjax
from hfjax.data import Loader, TokenSet, standard_library
from hfjax.data.token_dataset import SPLITS, check_made_by, check_same_tokenizer
from hfjax.parallel.adapters.model_template import LAYERS
from hfjax.parallel.mesh import EXPERTS
from hfjax.trainer.config import Train
from hfjax.trainer.model import ROUND_TO, ModelChoice, choose
from hfjax.trainer.pretrained_model import (
    FROM_NOTHING,
    begun_with,
    choice_of,
    told_of_rate,
    told_of_rows,
    without_tokenizer,
)
from hfjax.trainer.sampling import Evaluated, Sampling, generate, mean_of, tokens_of
from hfjax.weights.pretrained import Pretrained

PADDED = 1 << 16  # rows of a batch that a small set may be filled up to


@dataclass(frozen=True)
class Texts:
    """A task: the next token.

    Attributes:
        config: The configuration.
        pretrained: The model of a folder, if one is given.
        vocab: The tokens of the vocabulary, in place of those of the data.
    """

    config: Train
    pretrained: Pretrained | None = None
    vocab: int | None = None
    unit = "tokens"

    @cached_property
    def model(self) -> ModelChoice:
        """The model, for the vocabulary of the data; or that of a folder."""
        if self.pretrained is not None:
            return choice_of(self.config, self.pretrained)
        return choose(self.config, self.vocab or max(tokens.vocab for tokens in self.tokens))

    @property
    def each(self) -> int:
        """The tokens of a row."""
        return self.model.length

    @property
    def scored(self) -> Callable:
        """The loss: nothing else is counted."""
        return self.model.loss

    def flops(self, layout: hfjax.Layout) -> float:
        """Return what training needs for one token."""
        return flops_per_token(self.model, layout)

    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the shapes of a batch of token rows."""
        rows, length = self.config.batch, self.model.length
        batch = {"tokens": jax.ShapeDtypeStruct((rows, length + 1), jnp.int32)}
        if self.config.data.packing == "documents":
            batch["documents"] = jax.ShapeDtypeStruct((rows, length + 1), jnp.int32)
            batch["mask"] = jax.ShapeDtypeStruct((rows, length), jnp.float32)
        return batch

    def rows(self) -> str:
        """Return what a row is."""
        return f"rows of {self.model.length} tokens"

    def told(self) -> list[str]:
        """Return what to say before training: of a folder's model."""
        if self.pretrained is None:
            return []
        lines, rate = [told_of_rows(self.pretrained, self.model.length)], self.config.optimizer.rate
        by_file = self.config.deepspeed is not None
        return lines if by_file or rate < FROM_NOTHING else [*lines, told_of_rate(rate)]

    def begun(
        self, layout: hfjax.Layout, seed: int, schedule: hfjax.Schedule | None
    ) -> tuple[hfjax.State, list[str]] | None:
        """Return the state that begins with a folder's weights, and what to say."""
        model = self.pretrained
        if model is None:
            return None
        state, said = begun_with(model, layout, seed, schedule)
        lost = "without --optimizer.master, updates that bfloat16 rounds away are lost"
        loses = model.stored == "bfloat16" and not self.config.optimizer.master
        return state, [said, lost] if loses else [said]

    # -- data -----------------------------------------------------------------------------

    @property
    def _reader(self) -> Pretrained | None:
        """The model of a folder that has a tokenizer, by which all text is read."""
        given = self.pretrained
        return given if given is not None and given.has_tokenizer else None

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer: that of the model's folder, or else of the data."""
        return self.tokens[0].tokenizer if self._reader is None else self._reader.tokenizer

    @property
    def reads_text(self) -> bool:
        """Whether there is a tokenizer: some data is of tokens alone."""
        return self._reader is not None or self.tokens[0].meta.tokenizer != "none"

    @cached_property
    def tokens(self) -> list[TokenSet]:
        """The data sets to train on."""
        given = self.config.data.train
        places = [Path(place) for place in given] if given else [self._library]
        return [self._of_model(TokenSet(part(place, SPLITS[0]) or place)) for place in places]

    @cached_property
    def _library(self) -> Path:
        """What there is to read where no data is named."""
        if self.pretrained is None:
            return standard_library()
        if not self.pretrained.has_tokenizer:
            raise ValueError(without_tokenizer(self.pretrained.folder.path))
        return standard_library(tokenizer=self.pretrained.folder.path)

    def _of_model(self, tokens: TokenSet) -> TokenSet:
        """Return a data set; refuse one whose numbers are no tokens of the folder's model."""
        if self._reader is not None:
            check_made_by(tokens, self._reader.tokenizer, self._reader.folder.path)
        return tokens

    def batches(self, mine: Callable) -> Loader:
        """Return the batches to train on."""
        c = self.config.data
        fields: Any = {"epochs": c.epochs, "weights": c.weights, "seed": self.config.seed}
        return self._loader(mine, self.tokens, **fields)

    def checks(self, mine: Callable) -> Loader | None:
        """Return the batches to validate on; None: there are none."""
        c = self.config.data
        given = c.valid or (c.train[0] if c.train else self._library)
        place = part(Path(given), SPLITS[1])
        if place is None and c.valid is None:
            return None
        tokens = self._of_model(TokenSet(place or Path(given)))
        if self._reader is None:
            check_same_tokenizer([self.tokens[0], tokens])
        return self._loader(mine, tokens, shuffle=False, epochs=1, pad_last=True)

    def _loader(self, mine: Callable, data: Any, **fields: Any) -> Loader:
        batch, packing = self.config.batch, self.config.data.packing
        loader = Loader(data, batch, self.model.length, packing=packing, **fields)
        loader.check(self.model.vocab, self.model.most)
        if batch > max(loader.rows_per_epoch, PADDED):
            raise ValueError(
                f"a batch of {batch} rows: the data to validate on has {loader.rows_per_epoch} "
                f"rows of {loader.length} tokens. Lower --batch."
            )
        loader.mine = mine(batch)  # not of a batch that is refused
        return loader

    def after(self, loader: Any) -> list[str]:
        """Return what to say after training: nothing."""
        return []

    # -- scores and text ------------------------------------------------------------------

    def read(self, metrics: Sequence[Mapping[str, Any]]) -> Evaluated:
        """Return the mean loss of all batches."""
        return mean_of(metrics)

    def written(
        self, layout: hfjax.Layout, state: hfjax.State, prompt: str, count: int, sampling: Sampling
    ) -> str:
        """Return a prompt and the text of `count` tokens that the model writes after it."""
        tokenizer = self.tokenizer
        known = tokens_of(prompt, tokenizer)
        needed = -(-(len(known) + count) // ROUND_TO) * ROUND_TO  # prompts share a program
        length = min(self.model.length, needed)
        fields: Any = {"length": length, "vocab": tokenizer.vocab, "sampling": sampling}
        new = generate(layout, state, known, count, **fields)
        return tokenizer.decode([*known, *new])


def part(place: Path, name: str) -> Path | None:
    """Return that part of a data set, if it has one."""
    return place / name if (place / name).is_dir() else None


def flops_per_token(model: ModelChoice, layout: hfjax.Layout) -> float:
    """Return what training needs for one token: 6 for each parameter of a matmul, and attention.

    As in PaLM's appendix B: nothing is counted for what is computed again, nor less for causality,
    but for windows of attention it is; of experts those that a token goes to; embeddings count
    where they are the head's matrix. Of one's own model every matrix is counted, and no attention.
    """
    shape = model.shape
    arrays = layout.arrays.items()
    matrices = {path: math.prod(a.shape) for path, a in arrays if len(a.shape) > 1}
    if shape is None:
        return 6.0 * sum(matrices.values())
    used = lambda path: _share_in_use(shape, layout.arrays[path].axes)
    in_layers = {path: size for path, size in matrices.items() if _is_matrix_of_layer(path)}
    layers = sum(size * used(path) for path, size in in_layers.items())
    head = shape.embed * shape.vocab
    width = shape.heads * getattr(shape, "width", shape.embed // shape.heads)
    return 6.0 * (layers + head) + 12.0 * width * _positions(shape, model.length)


def _is_matrix_of_layer(path: str) -> bool:
    """Return whether tokens are multiplied by a parameter: biases and norms are no matrices."""
    return path.startswith(LAYERS) and not path.endswith(("/bias", "/scale"))


def _positions(shape: Any, length: int) -> int:
    """Return how many positions a token is scored against, by all layers together."""
    seen = lambda attend: min(getattr(attend, "window", None) or length, length)
    local = getattr(shape, "local", None)
    some = 0 if local is None else len(local.layers)
    others = (shape.layers - some) * seen(shape.attention)
    return others + (some * seen(local.attention) if local is not None else 0)


def _share_in_use(shape: Any, axes: tuple) -> float:
    """Return which part of an array a token computes with: of experts, those that it chose."""
    most = getattr(shape, "by_layer", (1,))
    return shape.top_k / max(most) if EXPERTS in axes else 1.0
