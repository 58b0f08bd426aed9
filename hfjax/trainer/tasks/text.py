"""The text task: sequences of tokens, a model for their vocabulary, the next-token loss."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import hfjax
from hfjax.data import Loader, TokenSet, standard_library
from hfjax.data.chat.encode import ChatEncoder
from hfjax.data.chat.template import TemplateProcess, load_template
from hfjax.data.token_dataset import SPLITS, check_same_tokenizer, check_tokenizer
from hfjax.parallel.adapters.model_template import LAYERS
from hfjax.parallel.mesh import EXPERTS
from hfjax.trainer.chat_sources import chat_files, chat_line, prepare_chats, reads_chats
from hfjax.trainer.config import TrainConfig
from hfjax.trainer.hub_sources import prepare_data
from hfjax.trainer.model import ROUND_TO, ModelChoice, choose_model
from hfjax.trainer.pretrained_model import (
    MAX_FINETUNING_RATE,
    init_from_folder,
    length_note,
    missing_tokenizer,
    model_choice,
    rate_warning,
)
from hfjax.trainer.sampling import MeanLoss, Sampling, encode_prompt, generate, mean_loss
from hfjax.utils.hub import parse_dataset
from hfjax.utils.tables import quote
from hfjax.weights.pretrained import Pretrained

MAX_PADDED_BATCH = 1 << 16  # examples that a batch of a small data set may be padded to


@dataclass(frozen=True)
class TextTask:
    """The task of predicting the next token.

    Attributes:
        config: The configuration.
        pretrained: The model of a folder, if one is given.
        vocab: The vocabulary size. None: that of the data.
    """

    config: TrainConfig
    pretrained: Pretrained | None = None
    vocab: int | None = None
    unit = "tokens"

    @cached_property
    def model(self) -> ModelChoice:
        """The model, for the vocabulary of the data; or that of a folder."""
        if self.pretrained is not None:
            return model_choice(self.config, self.pretrained)
        return choose_model(self.config, self._vocab)

    @property
    def _vocab(self) -> int:
        if self.vocab is not None:
            return self.vocab
        if self.config.data.factory is not None:
            raise ValueError(
                f"--data.factory {self.config.data.factory} beside --model.preset "
                f"{self.config.model.preset}: how many tokens there are is not said. Give "
                "--model.vocab-size N; or a model of your own, --model.factory."
            )
        return max(tokens.vocab for tokens in self.tokens)

    @property
    def units_per_example(self) -> int:
        """Number of tokens in an example."""
        return self.model.length

    @property
    def eval_loss(self) -> Callable:
        """The loss, without further metrics."""
        return self.model.loss

    def flops(self, layout: hfjax.Layout) -> float:
        """Return the FLOPs of training on one token."""
        return flops_per_token(self.model, layout)

    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the shapes of a batch of token sequences."""
        batch_size, length = self.config.global_batch_size, self.model.length
        batch = {"tokens": jax.ShapeDtypeStruct((batch_size, length + 1), jnp.int32)}
        if self.packing == "documents":
            batch["documents"] = jax.ShapeDtypeStruct((batch_size, length + 1), jnp.int32)
            batch["mask"] = jax.ShapeDtypeStruct((batch_size, length), jnp.float32)
        return batch

    def describe_example(self) -> str:
        """Return what the examples are."""
        return f"sequences of {self.model.length} tokens"

    def startup_notes(self) -> list[str]:
        """Return the lines to print before training, about a folder's model and chats."""
        if self.pretrained is None:
            return []
        return [*self._model_notes(), *self._chat_notes()]

    def _chat_notes(self) -> list[str]:
        """Return a line for each file of conversations."""
        c, length = self.config.data, self.model.length
        files = chat_files(c)
        return [chat_line(name, TokenSet(self.folders[name]), length, c.long) for name in files]

    def _model_notes(self) -> list[str]:
        assert self.pretrained is not None
        lines, rate = (
            [length_note(self.pretrained, self.model.length)],
            self.config.optimizer.learning_rate,
        )
        has_own_rate = self.config.deepspeed is not None or self.config.lora.rank is not None
        return lines if has_own_rate or rate < MAX_FINETUNING_RATE else [*lines, rate_warning(rate)]

    def init_from_weights(
        self, layout: hfjax.Layout, seed: int, schedule: hfjax.Schedule | None
    ) -> tuple[hfjax.State, list[str]] | None:
        """Return an initial state with a folder's weights, and lines to print."""
        model = self.pretrained
        if model is None:
            return None
        state, note = init_from_folder(model, layout, seed, schedule)
        lost = "without --master-weights, updates that bfloat16 rounds away are lost"
        loses = model.param_dtype == "bfloat16" and not self.config.master_weights
        return state, [note, lost] if loses else [note]

    # -- data -----------------------------------------------------------------------------

    @property
    def _tokenizing_model(self) -> Pretrained | None:
        """The model of a folder that has a tokenizer, which then reads all text."""
        model = self.pretrained
        return model if model is not None and model.has_tokenizer else None

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer of the model's folder, or else of the data."""
        return (
            self.tokens[0].tokenizer
            if self._tokenizing_model is None
            else self._tokenizing_model.tokenizer
        )

    @property
    def reads_text(self) -> bool:
        """Whether there is a tokenizer: data of bare tokens has none."""
        if self._tokenizing_model is not None or self.config.data.factory is not None:
            return self._tokenizing_model is not None
        return self.tokens[0].meta.tokenizer != "none"

    @cached_property
    def tokens(self) -> list[TokenSet]:
        """The data sets to train on."""
        if (factory := self.config.data.factory) is not None:
            raise ValueError(
                f"--data.factory {factory} gives tokens and no tokenizer, so that there is no "
                "text. Only models that began from a folder with one (--model.pretrained) have it."
            )
        paths = [self.folders[name] for name in self.config.data.train] or [self._library]
        return [
            self._check_tokenizer(TokenSet(split_folder(path, SPLITS[0]) or path)) for path in paths
        ]

    @cached_property
    def folders(self) -> dict[str, Path]:
        """The folder of each data set by its name: one of the Hub is prepared. All call this."""
        c, model = self.config.data, self._tokenizing_model
        names = dict.fromkeys((*c.train, *([c.valid] if c.valid else ())))
        if self.pretrained is not None and model is None and any(map(parse_dataset, names)):
            raise ValueError(missing_tokenizer(self.pretrained.folder))
        tokenizer = "bytes" if model is None else model.folder.path
        folders = {name: self._prepare_chats(name) for name in chat_files(c)}
        folders |= {name: prepare_data(name, tokenizer) for name in names if parse_dataset(name)}
        return {name: folders.get(name, Path(name)) for name in names}

    def _prepare_chats(self, name: str) -> Path:
        """Return the folder of tokens of a file of conversations; refuse it without a tokenizer."""
        if self.pretrained is None:
            raise ValueError(
                f"--data.train {quote(name)}: conversations are written by the template and the "
                "tokenizer of a model. Give --model.pretrained FOLDER; or if the file is of plain "
                f"text, make a data set of it: hfjax data {quote(name)} --data-dir DIR"
            )
        if self._tokenizing_model is None:
            raise ValueError(missing_tokenizer(self.pretrained.folder))
        return prepare_chats(name, self._tokenizing_model, self.config.data)

    @cached_property
    def packing(self) -> str:
        """How examples are made of text: conversations are packed whole."""
        default = "documents" if reads_chats(self.config.data) else "stream"
        return self.config.data.packing or default

    @cached_property
    def _library(self) -> Path:
        """The default data set: Python's own library."""
        if self.pretrained is None:
            return standard_library()
        if not self.pretrained.has_tokenizer:
            raise ValueError(missing_tokenizer(self.pretrained.folder))
        return standard_library(tokenizer=self.pretrained.folder.path)

    def _check_tokenizer(self, tokens: TokenSet) -> TokenSet:
        """Return a data set; refuse one whose tokens are not those of the folder's model."""
        if self._tokenizing_model is not None:
            folder = self._tokenizing_model.folder
            check_tokenizer(tokens, self._tokenizing_model.tokenizer, folder.hub or folder.path)
        return tokens

    def train_loader(self, local_slice: Callable) -> Loader:
        """Return the training batches."""
        c = self.config.data
        fields: Any = {"epochs": c.epochs, "weights": c.weights, "seed": self.config.seed}
        return self._make_loader(local_slice, self.tokens, **fields)

    def valid_loader(self, local_slice: Callable) -> Loader | None:
        """Return the validation batches; None if there are none."""
        c = self.config.data
        name = c.valid or (c.train[0] if c.train else None)
        folder = self._library if name is None else self.folders[name]
        valid_folder = split_folder(folder, SPLITS[1])
        if valid_folder is None and c.valid is None:
            return None
        tokens = self._check_tokenizer(TokenSet(valid_folder or folder))
        if self._tokenizing_model is None:
            check_same_tokenizer([self.tokens[0], tokens])
        return self._make_loader(local_slice, tokens, shuffle=False, epochs=1, pad_last=True)

    def _make_loader(self, local_slice: Callable, data: Any, **fields: Any) -> Loader:
        batch, c = self.config.global_batch_size, self.config.data
        fields |= {"packing": self.packing, "long_chats": c.long, "loss_per": c.loss_per}
        loader = Loader(data, batch, self.model.length, **fields)
        loader.check(self.model.vocab, self.model.max_length)
        if batch > max(loader.examples_per_epoch, MAX_PADDED_BATCH):
            raise ValueError(
                f"a batch of {batch} examples: the validation data has {loader.examples_per_epoch} "
                f"sequences of {loader.seq_len} tokens. Lower --global-batch-size."
            )
        loader.local_examples = local_slice(batch)  # only once the batch is accepted
        return loader

    def closing_lines(self, loader: Any) -> list[str]:
        """Return the lines to print after training: none."""
        return []

    # -- scores and text ------------------------------------------------------------------

    def compute_scores(self, metrics: Sequence[Mapping[str, Any]]) -> MeanLoss:
        """Return the mean loss of all batches."""
        return mean_loss(metrics)

    def complete_prompt(
        self, layout: hfjax.Layout, state: hfjax.State, prompt: str, count: int, sampling: Sampling
    ) -> str:
        """Return a prompt followed by the text of `count` generated tokens."""
        tokens = encode_prompt(prompt, self.tokenizer)
        new_tokens = self._generate(layout, state, tokens, count, sampling)
        return self.tokenizer.decode([*tokens, *new_tokens])

    def answer_prompt(
        self, layout: hfjax.Layout, state: hfjax.State, prompt: str, count: int, sampling: Sampling
    ) -> str:
        """Return the answer to a user's message, by the chat template, to the end of the turn."""
        model, c = self._tokenizing_model, self.config.data
        if model is None:
            raise ValueError(
                "--chat: a chat is written by the template and the tokenizer of a model, and this "
                "run did not begin with --model.pretrained. Leave it out."
            )
        encoder = ChatEncoder(model.tokenizer)
        marking = encoder.specials.mark([{"role": "user", "content": prompt}])
        with TemplateProcess(load_template(model.folder.path, c.template), c.date) as process:
            (rendered,) = process.render([(marking.messages, True)], "--prompt")
        ((tokens, _),) = encoder.encode([marking.unmark(rendered)])
        new_tokens = self._generate(layout, state, tokens.tolist(), count, sampling)
        ends = {
            model.tokenizer.end,
            *map(model.tokenizer.inner.token_to_id, encoder.specials.by_text),
        }
        return self.tokenizer.decode(takewhile(lambda token: token not in ends, new_tokens))

    def _generate(
        self,
        layout: hfjax.Layout,
        state: hfjax.State,
        tokens: list[int],
        count: int,
        sampling: Sampling,
    ) -> list[int]:
        padded = -(-(len(tokens) + count) // ROUND_TO) * ROUND_TO  # prompts share a program
        length = min(self.model.length, padded)
        fields: Any = {"length": length, "vocab": self.tokenizer.vocab, "sampling": sampling}
        return [int(token) for token in generate(layout, state, tokens, count, **fields)]


def split_folder(folder: Path, split: str) -> Path | None:
    """Return the folder of a split of a data set, if it has one."""
    return folder / split if (folder / split).is_dir() else None


def flops_per_token(model: ModelChoice, layout: hfjax.Layout) -> float:
    """Return the FLOPs of training on one token: 6 per parameter of a matmul, and attention.

    As in PaLM's appendix B: recomputation does not count, and causal attention counts in full, but
    windowed attention only its window; of experts those that a token is routed to; embeddings
    where they are the head's matrix. For a user's model every matrix counts, and no attention.
    """
    shape = model.shape
    arrays = layout.arrays.items()
    matrices = {path: math.prod(a.shape) for path, a in arrays if len(a.shape) > 1}
    if shape is None:
        return 6.0 * sum(matrices.values())
    fraction = lambda path: _used_fraction(shape, layout.arrays[path].axes)
    in_layers = {path: size for path, size in matrices.items() if _is_matrix_of_layer(path)}
    layers = sum(size * fraction(path) for path, size in in_layers.items())
    head = shape.embed * shape.vocab
    width = shape.heads * getattr(shape, "width", shape.embed // shape.heads)
    return 6.0 * (layers + head) + 12.0 * width * _attended_positions(shape, model.length)


def _is_matrix_of_layer(path: str) -> bool:
    """Return whether a parameter is a layer's matrix: biases and norms are not."""
    return path.startswith(LAYERS) and not path.endswith(("/bias", "/scale"))


def _attended_positions(shape: Any, length: int) -> int:
    """Return how many positions a token attends to, summed over all layers."""
    num_attended = lambda attend: min(getattr(attend, "window", None) or length, length)
    local = getattr(shape, "local", None)
    num_local = 0 if local is None else len(local.layers)
    others = (shape.layers - num_local) * num_attended(shape.attention)
    return others + (num_local * num_attended(local.attention) if local is not None else 0)


def _used_fraction(shape: Any, axes: tuple) -> float:
    """Return the fraction of an array that a token uses: of experts, those that it chose."""
    experts = getattr(shape, "by_layer", (1,))
    return shape.top_k / max(experts) if EXPERTS in axes else 1.0
