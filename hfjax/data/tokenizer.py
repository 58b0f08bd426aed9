"""Tokenizers: bytes (no training, 256 tokens), or one of the `tokenizers` library."""

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import numpy as np

from hfjax.utils.command_errors import import_optional
from hfjax.utils.read_files import MISSING, Check, check_fields, parse_json, path_kind, read_text
from hfjax.utils.tables import quote

END = "<|endoftext|>"  # of the tokenizers trained here
KNOWN_ENDS = (END, "</s>", "<|end_of_text|>", "<eos>", "<|im_end|>", "[SEP]")
FILE = "tokenizer.json"
MEND = f"Mend its {FILE}, or give another one."
MODEL = ("generation_config.json", "config.json")  # files of a model that name its end token
KNOWN = ("bytes", FILE, "none")  # tokenizers that a data set may record
MADE_BY: Check = (f"one of {', '.join(KNOWN)}", lambda x: x in KNOWN)
CHUNK_SIZE = 1 << 20  # characters after which a long document may be split for encoding
GROUP_SIZE = 1 << 23  # characters to encode together
MOST_TOKENS = 1 << 24  # the largest vocabularies have a million; the library lists ids with gaps
NO_TOKEN = "\0no token"  # placeholder for a missing token: no text spells it
LINE = re.compile(r"[\w.,;:!?)}\]]\n(?=\w)")  # a line end whose newline is a token of its own

T = TypeVar("T")


class ByteTokenizer:
    """Text as its UTF-8 bytes; byte 0, which text does not contain, ends a document."""

    kind, vocab, end = "bytes", 256, 0
    dropped, unknown = 0, 0  # bytes encode any text without loss

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """Return the tokens of each text."""
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of tokens; invalid UTF-8 becomes U+FFFD."""
        array = np.asarray(tokens)
        if array.size and (array.min() < 0 or array.max() > 255):
            raise ValueError(f"token {array.max()}: the byte tokenizer has tokens 0 … 255.")
        return array.astype(np.uint8).tobytes().decode(errors="replace")

    def save(self, directory: Path) -> None:
        """Write nothing: the name `bytes` is enough."""


class TrainedTokenizer:
    """A tokenizer of the `tokenizers` library.

    Attributes:
        inner: The library's tokenizer.
        vocab: One more than its highest token.
        end: Its token for the end of a document, if it has one.
        dropped: The number of characters (or bytes of some) dropped so far, for lack of a token.
        unknown: The number of unknown tokens so far.
    """

    kind = FILE

    def __init__(self, inner: Any, end: str | None = None) -> None:
        self.inner = inner
        inner.encode_special_tokens = True  # "<|endoftext|>" in a text is plain text
        inner.no_truncation()  # a training folder may enable it
        inner.no_padding()
        if getattr(inner.model, "dropout", None):  # of BPE merges: random for each text
            inner.model.dropout = None
        self.dropped = self.unknown = 0
        tokens = inner.get_vocab(with_added_tokens=True)
        self.vocab = max(tokens.values(), default=-1) + 1  # ids may have gaps
        _check_vocab(tokens)
        names = KNOWN_ENDS if end is None else (end,)
        self.end: int | None = next((tokens[name] for name in names if name in tokens), None)
        if end is not None and self.end is None:
            raise ValueError(
                f"the tokenizer has no token {end!r} for the end of a document. Name one of its "
                "own with --end-token, or give --no-append-end."
            )

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """Return the tokens of each text, without those that a template would add."""
        arrays_by_text: list[list[np.ndarray]] = [[] for _ in texts]
        chunks = ((i, chunk) for i, text in enumerate(texts) for chunk in self._split_text(text))
        for group in group_by_size(chunks, GROUP_SIZE, lambda pair: len(pair[1])):
            token_arrays = self._encode_batch([x for _, x in group])
            for (i, _), tokens in zip(group, token_arrays, strict=True):
                arrays_by_text[i].append(tokens)
        return [np.concatenate(arrays) for arrays in arrays_by_text]

    def _encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """Return the tokens of each text; count dropped characters and unknown tokens."""
        token_arrays = _encode_plain(self._marking_tokenizer or self.inner, texts)
        num_dropped = [int((tokens == self.vocab).sum()) for tokens in token_arrays]
        self.dropped += sum(num_dropped)
        indices = [i for i, count in enumerate(num_dropped) if count]
        plain = _encode_plain(self.inner, [texts[i] for i in indices])
        for i, tokens in zip(indices, plain, strict=True):
            token_arrays[i] = tokens
        if self.unknown_token is not None:
            self.unknown += sum(
                int((tokens == self.unknown_token).sum()) for tokens in token_arrays
            )
        return token_arrays

    @cached_property
    def unknown_token(self) -> int | None:
        """The unknown token, if there is one."""
        model = json.loads(self.inner.to_str())["model"]
        if "unk_id" in model:  # Unigram
            return model["unk_id"]
        return self.inner.token_to_id(model["unk_token"]) if model.get("unk_token") else None

    @cached_property
    def _marking_tokenizer(self) -> Any:
        """A tokenizer that emits token `vocab` where this one drops a character; None: never drops.

        Only BPE without an unknown token drops characters. Added tokens keep their ids if the model
        has them; special tokens are plain text here.
        """
        config = json.loads(self.inner.to_str())
        model = config["model"]
        if model["type"] != "BPE" or model["unk_token"] is not None:
            return None
        added = {x["content"]: x["id"] for x in config["added_tokens"] if not x["special"]}
        model["vocab"] |= added | {NO_TOKEN: self.vocab}
        model |= {"unk_token": NO_TOKEN, "fuse_unk": False}
        tokenizer = tokenizers_library().Tokenizer.from_str(json.dumps(config))
        tokenizer.encode_special_tokens = True
        return tokenizer

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of tokens."""
        with _wrap_library_errors("the tokenizer cannot write these tokens", MEND):
            return self.inner.decode(list(map(int, tokens)), skip_special_tokens=False)

    def save(self, directory: Path) -> None:
        """Write `tokenizer.json` to a directory."""
        (directory / FILE).write_text(self.inner.to_str(pretty=True), encoding="utf-8")

    def is_equivalent(self, other: object) -> bool:
        """Return whether another tokenizer encodes texts to the same tokens."""
        return isinstance(other, TrainedTokenizer) and self._settings == other._settings

    @cached_property
    def _settings(self) -> list[Any]:
        config = json.loads(self.inner.to_str())
        return [config[name] for name in ("normalizer", "pre_tokenizer", "model", "added_tokens")]

    def _split_text(self, text: str) -> Iterator[str]:
        """Yield a long text in chunks, split where no token can cross; else as one chunk."""
        start = 0
        while len(text) - start > CHUNK_SIZE and self._splits_at_lines:
            match = LINE.search(text, start + CHUNK_SIZE)
            if match is None:
                break
            yield text[start : match.end()]
            start = match.end()
        yield text[start:]

    @cached_property
    def _splits_at_lines(self) -> bool:
        """Whether no token crosses such a line break, as with GPT-2's."""
        config = json.loads(self.inner.to_str())
        pre_tokenizer = config["pre_tokenizer"] or {}
        byte_level = {"add_prefix_space": False, "use_regex": True, "type": "ByteLevel"}
        return config["normalizer"] is None and byte_level.items() <= pre_tokenizer.items()


def _encode_plain(inner: Any, texts: list[str]) -> list[np.ndarray]:
    with _wrap_library_errors("the tokenizer cannot read this text", MEND):
        encodings = inner.encode_batch_fast(texts, add_special_tokens=False)
    return [np.array(encoding.ids, np.int64) for encoding in encodings]


@contextmanager
def _wrap_library_errors(problem: str, advice: str) -> Iterator[None]:
    """Raise the library's bare Exceptions, and its panics, as ValueErrors with advice."""
    try:
        yield
    except (ValueError, MemoryError):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"{problem} ({quote(str(error)).rstrip('.')}). {advice}") from None


def _check_vocab(tokens: Mapping[str, int]) -> None:
    """Refuse a tokenizer without tokens, or with an id beyond any vocabulary."""
    if not tokens:
        raise ValueError(f"the tokenizer has no token. Give the {FILE} of a trained one.")
    name, max_id = max(tokens.items(), key=lambda pair: pair[1])
    if max_id >= MOST_TOKENS:
        raise ValueError(
            f"the tokenizer's token {quote(name)} has id {max_id}; ids are 0 to {MOST_TOKENS - 1}, "
            f"and it has {len(tokens)} tokens. Number them one after the other in its {FILE}."
        )


def group_by_size(items: Iterable[T], limit: int, size: Callable[[T], int]) -> Iterator[list[T]]:
    """Yield items in lists of total size at most `limit` (or of one larger item).

    >>> list(group_by_size([2, 2, 3, 9, 1], 4, int))
    [[2, 2], [3], [9], [1]]
    """
    group, group_size = [], 0
    for item in items:
        if group and group_size + size(item) > limit:
            yield group
            group, group_size = [], 0
        group.append(item)
        group_size += size(item)
    if group:
        yield group


def load_tokenizer(
    source: str | Path, end: str | None = None
) -> "ByteTokenizer | TrainedTokenizer":
    """Return the tokenizer "bytes", of a `tokenizer.json`, of a data set or of a model.

    Args:
        source: "bytes", or the path of the file, of the data set's directory, or of a Hugging Face
            model's folder.
        end: The name of the token that ends a document, in a `tokenizer.json`. None: the one that
            the model's folder names, else the first of the usual names that exists.

    Returns:
        An object with `encode(texts)`, `decode(tokens)`, `vocab` and `end`.

    Example:
        >>> from hfjax.data import load_tokenizer
        >>> tokenizer = load_tokenizer("bytes")
        >>> tokens = tokenizer.encode(["Once"])[0]
        >>> tokens.tolist(), tokenizer.decode(tokens)
        ([79, 110, 99, 101], 'Once')
    """
    if source == "bytes":
        return ByteTokenizer()
    path = Path(source)
    if path.is_dir():
        path = path / "train" if (path / "train").is_dir() else path
        kind = _tokenizer_kind(path)
        if kind == "bytes":
            return ByteTokenizer()
        if kind == "none":
            raise ValueError(f"{path} was written from tokens: it has no tokenizer.")
        path = path / FILE
    if (kind := path_kind(path)) != "a file":
        tokenizer = "no such file" if kind == MISSING else f"{path} is {kind}"
        raise ValueError(
            f"tokenizer {str(source)!r}: {tokenizer}. Give bytes, bpe (trained on the text), the "
            f"path of a {FILE}, a data set's directory, or the folder of a model that has "
            f"{FILE} (transformers' AutoTokenizer writes it: tokenizer.save_pretrained(folder))."
        )
    library = tokenizers_library()
    advice = "It is written by tokenizer.save(…), or by hfjax data --tokenizer bpe."
    with _wrap_library_errors(f"{quote(path)} is no tokenizer of the `tokenizers` library", advice):
        inner = library.Tokenizer.from_file(str(path))
    tokenizer = TrainedTokenizer(inner, end)
    return (
        tokenizer
        if end is not None or path.parent != Path(source)
        else _with_model_end(tokenizer, path)
    )


def end_tokens(*files: Mapping[str, Any]) -> list[int]:
    """Return the tokens that end a text, from the first of a model's files that lists them.

    >>> settings = {"eos_token_id": 2}
    >>> end_tokens({}, settings), end_tokens({"eos_token_id": [5, 7]}, settings)
    ([2], [5, 7])
    """
    for file in files:
        token_ids = file.get("eos_token_id")
        tokens = [
            x for x in (token_ids if isinstance(token_ids, list) else [token_ids]) if type(x) is int
        ]
        if tokens:
            return tokens
    return []


def _with_model_end(tokenizer: TrainedTokenizer, path: Path) -> TrainedTokenizer:
    """Return the tokenizer of a folder, with the end token that the model there names."""
    ends = end_tokens(*(read_keys(path.with_name(name)) for name in MODEL))
    if ends and not 0 <= ends[0] < tokenizer.vocab:
        raise ValueError(
            f"{quote(path)} has {tokenizer.vocab} tokens, and the model beside it ends a text with "
            f"token {ends[0]} (eos_token_id of {' or '.join(MODEL)}): the two are not of one "
            "model. Get the folder again, or put its own eos_token_id there."
        )
    tokenizer.end = ends[0] if ends else tokenizer.end
    return tokenizer


def read_keys(path: Path) -> dict[str, Any]:
    """Return the keys of a model's JSON file; empty if it is missing."""
    if path_kind(path) == MISSING:
        return {}
    try:
        return check_fields(parse_json(read_text(path)), {})
    except ValueError as error:
        raise ValueError(f"{quote(path)} cannot be read: {str(error).rstrip('.')}.") from None


def train_bpe(texts: Iterable[str], vocab: int) -> TrainedTokenizer:
    """Return a byte-level BPE tokenizer (as GPT-2's) trained on texts; its end token is 0."""
    library = tokenizers_library()
    if vocab <= 257:
        raise ValueError(
            f"--vocab {vocab}: a BPE tokenizer has 256 bytes, the end of a document, and merges: "
            "at least 258. Use --tokenizer bytes for 256."
        )
    inner = library.Tokenizer(library.models.BPE())
    inner.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END],
        initial_alphabet=sorted(library.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer)
    return TrainedTokenizer(inner, END)


def tokenizers_library() -> ModuleType:
    """Return the `tokenizers` library; if it is missing, the error says how to install it."""
    return import_optional("tokenizers", "a trained tokenizer", "text")


def _tokenizer_kind(directory: Path) -> str:
    """Return which tokenizer encoded a data set, from its metadata."""
    path = directory / "meta.json"
    if not os.path.lexists(path):
        return FILE
    try:
        return check_fields(parse_json(read_text(path)), {"tokenizer": MADE_BY})["tokenizer"]
    except ValueError as error:
        why = str(error).rstrip(".")
        raise ValueError(
            f"tokenizer {str(directory)!r}: {path} is damaged ({why}). Make that data set again."
        ) from None
