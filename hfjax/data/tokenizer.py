"""Tokenizers: bytes (nothing to train, 256 tokens), or one of the `tokenizers` library."""

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

from hfjax.utils.command_errors import optional
from hfjax.utils.read_files import MISSING, Kind, check_fields, contents, parsed, what_is
from hfjax.utils.tables import named

END = "<|endoftext|>"  # of the tokenizers trained here
KNOWN_ENDS = (END, "</s>", "<|end_of_text|>", "<eos>", "<|im_end|>", "[SEP]")
FILE = "tokenizer.json"
MEND = f"Mend its {FILE}, or give another one."
MODEL = ("generation_config.json", "config.json")  # of a model: what says its end of a text
KNOWN = ("bytes", FILE, "none")  # what a data set may be made by
MADE_BY: Kind = (f"one of {', '.join(KNOWN)}", lambda x: x in KNOWN)
PIECE = 1 << 20  # characters: where a long document may be cut to be encoded
GROUP = 1 << 23  # characters that are encoded together
MOST_TOKENS = 1 << 24  # the largest vocabularies have a million; the library lists ids with gaps
NO_TOKEN = "\0no token"  # stands where a tokenizer has none: no text spells it
LINE = re.compile(r"[\w.,;:!?)}\]]\n(?=\w)")  # the end of a line whose break is a token of its own

T = TypeVar("T")


class ByteTokenizer:
    """Text as its UTF-8 bytes; byte 0, which text does not contain, ends a document."""

    kind, vocab, end = "bytes", 256, 0
    dropped, unknown = 0, 0  # of any text nothing is lost

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """Return the tokens of each text."""
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of tokens; bytes that are no UTF-8 become U+FFFD."""
        array = np.asarray(tokens)
        if array.size and (array.min() < 0 or array.max() > 255):
            raise ValueError(f"token {array.max()}: the byte tokenizer has tokens 0 … 255.")
        return array.astype(np.uint8).tobytes().decode(errors="replace")

    def save(self, directory: Path) -> None:
        """Write nothing: the name says it all."""


class TrainedTokenizer:
    """A tokenizer of the `tokenizers` library.

    Attributes:
        inner: That of the library.
        vocab: One more than its highest token.
        end: Its end of a document, if it has one.
        dropped: How many characters (or bytes of some) have had no token and were left out.
        unknown: How often text became the token for what is unknown.
    """

    kind = FILE

    def __init__(self, inner: Any, end: str | None = None) -> None:
        self.inner = inner
        inner.encode_special_tokens = True  # "<|endoftext|>" in a text is text
        inner.no_truncation()  # as a folder may have them that a model was trained in
        inner.no_padding()
        if getattr(inner.model, "dropout", None):  # of merges, drawn anew for each text
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
        """Return the tokens of each text, without any that a template would add."""
        parts: list[list[np.ndarray]] = [[] for _ in texts]
        pieces = ((i, piece) for i, text in enumerate(texts) for piece in self._pieces(text))
        for group in in_groups(pieces, GROUP, lambda pair: len(pair[1])):
            coded = self._coded([x for _, x in group])
            for (i, _), tokens in zip(group, coded, strict=True):
                parts[i].append(tokens)
        return [np.concatenate(part) for part in parts]

    def _coded(self, texts: list[str]) -> list[np.ndarray]:
        """Return the tokens of each text, and count what has none."""
        found = _tokens_of(self._marking or self.inner, texts)
        marks = [int((tokens == self.vocab).sum()) for tokens in found]
        self.dropped += sum(marks)
        some = [i for i, count in enumerate(marks) if count]
        plain = _tokens_of(self.inner, [texts[i] for i in some])
        for i, tokens in zip(some, plain, strict=True):
            found[i] = tokens
        if self.unknown_token is not None:
            self.unknown += sum(int((tokens == self.unknown_token).sum()) for tokens in found)
        return found

    @cached_property
    def unknown_token(self) -> int | None:
        """The token for what is unknown, if there is one."""
        model = json.loads(self.inner.to_str())["model"]
        if "unk_id" in model:  # of Unigram
            return model["unk_id"]
        return self.inner.token_to_id(model["unk_token"]) if model.get("unk_token") else None

    @cached_property
    def _marking(self) -> Any:
        """A tokenizer that writes token `vocab` where this one drops a character; None: it cannot.

        BPE without a token for what is unknown is the one model that drops. Tokens that were added
        keep their ids if the model has them; special ones are text here.
        """
        found = json.loads(self.inner.to_str())
        model = found["model"]
        if model["type"] != "BPE" or model["unk_token"] is not None:
            return None
        added = {x["content"]: x["id"] for x in found["added_tokens"] if not x["special"]}
        model["vocab"] |= added | {NO_TOKEN: self.vocab}
        model |= {"unk_token": NO_TOKEN, "fuse_unk": False}
        marking = tokenizers_library().Tokenizer.from_str(json.dumps(found))
        marking.encode_special_tokens = True
        return marking

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of tokens."""
        with _in_words("the tokenizer cannot write these tokens", MEND):
            return self.inner.decode(list(map(int, tokens)), skip_special_tokens=False)

    def save(self, directory: Path) -> None:
        """Write `tokenizer.json` to a directory."""
        (directory / FILE).write_text(self.inner.to_str(pretty=True), encoding="utf-8")

    def tells_like(self, other: object) -> bool:
        """Return whether another one makes the same tokens of a text."""
        return isinstance(other, TrainedTokenizer) and self._tokens_by == other._tokens_by

    @cached_property
    def _tokens_by(self) -> list[Any]:
        found = json.loads(self.inner.to_str())
        return [found[name] for name in ("normalizer", "pre_tokenizer", "model", "added_tokens")]

    def _pieces(self, text: str) -> Iterator[str]:
        """Yield a long text in pieces, cut where no token can lie across, else whole."""
        start = 0
        while len(text) - start > PIECE and self._cuts_at_lines:
            cut = LINE.search(text, start + PIECE)
            if cut is None:
                break
            yield text[start : cut.end()]
            start = cut.end()
        yield text[start:]

    @cached_property
    def _cuts_at_lines(self) -> bool:
        """Whether no token lies across such a line break, as with GPT-2's."""
        found = json.loads(self.inner.to_str())
        before = found["pre_tokenizer"] or {}
        plain = {"add_prefix_space": False, "use_regex": True, "type": "ByteLevel"}
        return found["normalizer"] is None and plain.items() <= before.items()


def _tokens_of(inner: Any, texts: list[str]) -> list[np.ndarray]:
    with _in_words("the tokenizer cannot read this text", MEND):
        found = inner.encode_batch_fast(texts, add_special_tokens=False)
    return [np.array(coded.ids, np.int64) for coded in found]


@contextmanager
def _in_words(what: str, todo: str) -> Iterator[None]:
    """Tell what the library raises: bare Exceptions, and panics, which are none."""
    try:
        yield
    except (ValueError, MemoryError):
        raise
    except BaseException as wrong:
        if not isinstance(wrong, Exception) and type(wrong).__name__ != "PanicException":
            raise
        raise ValueError(f"{what} ({named(str(wrong)).rstrip('.')}). {todo}") from None


def _check_vocab(tokens: Mapping[str, int]) -> None:
    """Refuse a tokenizer without tokens, and one with an id that no vocabulary reaches."""
    if not tokens:
        raise ValueError(f"the tokenizer has no token. Give the {FILE} of a trained one.")
    name, most = max(tokens.items(), key=lambda pair: pair[1])
    if most >= MOST_TOKENS:
        raise ValueError(
            f"the tokenizer's token {named(name)} has id {most}; ids are 0 to {MOST_TOKENS - 1}, "
            f"and it has {len(tokens)} tokens. Number them one after the other in its {FILE}."
        )


def in_groups(items: Iterable[T], most: int, size: Callable[[T], int]) -> Iterator[list[T]]:
    """Yield items in lists of at most `most` together (or of one larger item).

    >>> list(in_groups([2, 2, 3, 9, 1], 4, int))
    [[2, 2], [3], [9], [1]]
    """
    group, total = [], 0
    for item in items:
        if group and total + size(item) > most:
            yield group
            group, total = [], 0
        group.append(item)
        total += size(item)
    if group:
        yield group


def load_tokenizer(
    source: str | Path, end: str | None = None
) -> "ByteTokenizer | TrainedTokenizer":
    """Return the tokenizer named: "bytes", a `tokenizer.json`, or that of a data set or a model.

    Args:
        source: The word, or the path of the file, of the data set's directory, or of the folder of
            a model from Hugging Face.
        end: The name of the token that ends a document, in a `tokenizer.json`. None: the one that
            the model's folder says, else the first of the usual names that it has.

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
        kind = _kind_of(path)
        if kind == "bytes":
            return ByteTokenizer()
        if kind == "none":
            raise ValueError(f"{path} was written from tokens: it has no tokenizer.")
        path = path / FILE
    if (kind := what_is(path)) != "a file":
        found = "no such file" if kind == MISSING else f"{path} is {kind}"
        raise ValueError(
            f"tokenizer {str(source)!r}: {found}. Give bytes, bpe (trained on the text), the "
            f"path of a {FILE}, a data set's directory, or the folder of a model that has "
            f"{FILE} (transformers' AutoTokenizer writes it: tokenizer.save_pretrained(folder))."
        )
    library = tokenizers_library()
    written = "It is written by tokenizer.save(…), or by hfjax data --tokenizer bpe."
    with _in_words(f"{named(path)} is no tokenizer of the `tokenizers` library", written):
        inner = library.Tokenizer.from_file(str(path))
    found = TrainedTokenizer(inner, end)
    return found if end is not None or path.parent != Path(source) else _of_model(found, path)


def ends_of(*files: Mapping[str, Any]) -> list[int]:
    """Return the tokens that end a text, by the first of a model's files that says them.

    >>> ends_of({}, {"eos_token_id": 2}), ends_of({"eos_token_id": [5, 7]}, {"eos_token_id": 2})
    ([2], [5, 7])
    """
    for file in files:
        given = file.get("eos_token_id")
        found = [x for x in (given if isinstance(given, list) else [given]) if type(x) is int]
        if found:
            return found
    return []


def _of_model(tokenizer: TrainedTokenizer, path: Path) -> TrainedTokenizer:
    """Return the tokenizer of a folder, with the end of a text that a model there says."""
    ends = ends_of(*(_keys(path.with_name(name)) for name in MODEL))
    if ends and not 0 <= ends[0] < tokenizer.vocab:
        raise ValueError(
            f"{named(path)} has {tokenizer.vocab} tokens, and the model beside it ends a text with "
            f"token {ends[0]} (eos_token_id of {' or '.join(MODEL)}): the two are not of one "
            "model. Get the folder again, or put its own eos_token_id there."
        )
    tokenizer.end = ends[0] if ends else tokenizer.end
    return tokenizer


def _keys(path: Path) -> dict[str, Any]:
    """Return the keys of a file of a model; none if it is not there."""
    if what_is(path) == MISSING:
        return {}
    try:
        return check_fields(parsed(contents(path)), {})
    except ValueError as wrong:
        raise ValueError(f"{named(path)} cannot be read: {str(wrong).rstrip('.')}.") from None


def train_bpe(texts: Iterable[str], vocab: int) -> TrainedTokenizer:
    """Return a byte-level BPE tokenizer (as GPT-2's) trained on texts; its end is token 0."""
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
    """Return the `tokenizers` library, or say how to get it."""
    return optional("tokenizers", "a trained tokenizer", "text")


def _kind_of(directory: Path) -> str:
    """Return which tokenizer made a data set, from its description."""
    path = directory / "meta.json"
    if not os.path.lexists(path):
        return FILE
    try:
        return check_fields(parsed(contents(path)), {"tokenizer": MADE_BY})["tokenizer"]
    except ValueError as wrong:
        why = str(wrong).rstrip(".")
        raise ValueError(
            f"tokenizer {str(directory)!r}: {path} is damaged ({why}). Make that data set again."
        ) from None
