"""From text, JSONL and Parquet to token files; the command; what a killed run leaves."""

import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tokenizers

from hfjax.__main__ import main
from hfjax.cli.data import DataCommand, run
from hfjax.data import (
    TokenSet,
    load_tokenizer,
    prepare,
    standard_library,
    tokenizer,
    write_tokens,
)
from hfjax.trainer.sampling import encode_prompt
from hfjax.utils import atomic
from tests.full_disk import allowed_bytes

TEXTS = ["Als Gregor Samsa", "eines Morgens\naus unruhigen Träumen", "erwachte, 🪲 fand er sich"]
COMMAND = (
    "import sys, tyro; from hfjax.cli.data import DataCommand, run\n"
    "sys.exit(run(tyro.cli(DataCommand, prog='hfjax data')))"
)


def write(path: Path, data: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "wb") as file:
        file.write(data.encode() if isinstance(data, str) else data)
    return path


def texts_of(data: TokenSet) -> list[str]:
    """Return the documents of a data set as text, the ends cut off."""
    ends = 0 if data.meta.end is None else 1
    places = zip(data.documents[:-1], data.documents[1:] - ends, strict=True)
    return [data.tokenizer.decode(data.tokens[start:stop]) for start, stop in places]


def files_with(kind: str, folder: Path) -> Path:
    """Return the input of a kind that holds TEXTS, named so that they come in order."""
    lines = "".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(TEXTS))
    if kind in ("text", "text.gz"):
        for i, text in enumerate(TEXTS):
            write(folder / "in" / f"{i}.txt{kind[4:]}", text)
        return folder / "in"
    if kind in ("jsonl", "jsonl.gz"):
        return write(folder / f"in.{kind}", lines)
    table = pyarrow.table({"id": list(range(3)), "text": TEXTS})
    pyarrow.parquet.write_table(table, folder / "in.parquet", row_group_size=2)
    return folder / "in.parquet"


@pytest.mark.parametrize("kind", ["text", "text.gz", "jsonl", "jsonl.gz", "parquet"])
def test_every_kind_of_file_gives_the_same_tokens(tmp_path, kind):
    made = prepare(files_with(kind, tmp_path), tmp_path / "out")
    data = TokenSet(tmp_path / "out")
    assert bytes(data.tokens) == b"".join(text.encode() + b"\0" for text in TEXTS)
    assert (texts_of(data), data.vocab, data.tokens.dtype) == (TEXTS, 256, np.uint8)
    assert made.parts[""] == data.meta
    assert data.meta.text == sum(len(text.encode()) for text in TEXTS) == len(data) - 3
    data.verify()


def test_a_folder_is_searched_in_order_and_what_is_passed_over_is_counted(tmp_path):
    for name in ("b/2.md", "a.txt", "b/1.txt", "c.py", ".git/x.txt", "b/.hidden.txt"):
        write(tmp_path / "in" / name, name)
    made = prepare(tmp_path / "in", tmp_path / "out")
    assert texts_of(TokenSet(made.out)) == ["a.txt", "b/1.txt", "b/2.md"]
    assert (made.files, made.passed_over) == (3, 1)
    made = prepare(tmp_path / "in", tmp_path / "python", pattern="**/*.py")
    assert texts_of(TokenSet(made.out)) == ["c.py"]
    assert made.passed_over == 0


def test_the_command_tells_what_it_left_out(tmp_path, capsys):
    for name, text in {"a.txt": "text", "b.txt": "", "c.py": "code"}.items():
        write(tmp_path / "in" / name, text)
    assert run(DataCommand((str(tmp_path / "in"),), tmp_path / "out")) == 0
    lines = capsys.readouterr().out.splitlines()[-3:]
    assert lines == [
        f"files read: 2; {tmp_path / 'out'} is whole.",
        "files of another kind, not read: 1 (--pattern '**/*' reads all).",
        "documents without text, left out: 1.",
    ]


def test_documents_without_text_are_left_out_and_counted(tmp_path):
    write(tmp_path / "in.jsonl", '{"text": "a"}\n\n{"text": ""}\n{"text": "b"}\n')
    made = prepare(tmp_path / "in.jsonl", tmp_path / "out")
    assert (texts_of(TokenSet(made.out)), made.empty) == (["a", "b"], 1)


def test_another_field_and_no_ends(tmp_path):
    write(tmp_path / "in.jsonl", '{"code": "a\\u0000"}\n{"code": "b"}\n')
    prepare(tmp_path / "in.jsonl", tmp_path / "out", field="code", append_end=False)
    data = TokenSet(tmp_path / "out")
    assert (bytes(data.tokens), data.documents.tolist(), data.meta.end) == (
        b"a\0b",
        [0, 2, 3],
        None,
    )


@pytest.fixture(name="corpus", scope="module")
def fixture_corpus(tmp_path_factory) -> Path:
    """Documents with much white space and signs: the source of the json package."""
    path = tmp_path_factory.mktemp("corpus") / "in.jsonl"
    files = sorted(Path(json.__file__).parent.glob("*.py"))
    texts = [file.read_text() for file in files] + ["  <|endoftext|>\n\n\tin a text  "]
    return write(path, "".join(json.dumps({"text": text}) + "\n" for text in texts))


def test_a_trained_tokenizer_gives_the_text_back(corpus, tmp_path):
    made = prepare(corpus, tmp_path / "a", tokenizer="bpe", vocab=600)
    data = TokenSet(tmp_path / "a")
    documents = [json.loads(line)["text"] for line in corpus.read_text().splitlines()]
    assert texts_of(data) == documents
    assert (data.vocab, data.tokens.dtype, data.meta.end) == (600, np.uint16, 0)
    ends = np.flatnonzero(np.asarray(data.tokens) == 0)  # <|endoftext|> in a text is text
    np.testing.assert_array_equal(ends, data.documents[1:] - 1)
    assert len(data) < made.parts[""].text / 2


def test_a_tokenizer_is_trained_to_the_same_bits_and_serves_again(corpus, tmp_path):
    first = prepare(corpus, tmp_path / "a", tokenizer="bpe", vocab=600)
    again = prepare(corpus, tmp_path / "b", tokenizer="bpe", vocab=600)
    saved = prepare(corpus, tmp_path / "c", tokenizer=str(tmp_path / "a" / "tokenizer.json"))
    of_set = prepare(corpus, tmp_path / "d", tokenizer=str(tmp_path / "a"))
    crcs = [made.parts[""].crc32 for made in (first, again, saved, of_set)]
    assert crcs[0] == crcs[1] == crcs[2] == crcs[3]


def test_what_a_tokenizer_would_add_to_a_sentence_is_not_added(corpus, tmp_path):
    prepare(corpus, tmp_path / "a", tokenizer="bpe", vocab=300)
    path = tmp_path / "a" / "tokenizer.json"
    inner = tokenizers.Tokenizer.from_file(str(path))
    plain = load_tokenizer(path).encode(["text"])[0].tolist()
    ends = [("<|endoftext|>", 0)]
    inner.post_processor = tokenizers.processors.TemplateProcessing("<|endoftext|> $A", None, ends)
    inner.save(str(path))
    assert inner.encode("text").ids == [0, *plain]
    assert load_tokenizer(path).encode(["text"])[0].tolist() == plain


def tokenizer_of(path: Path, **model: Any) -> str:
    """Write a tokenizer of words whose model has these fields; return its path."""
    before = {"type": "WhitespaceSplit"}
    write(path, json.dumps({"version": "1.0", "pre_tokenizer": before, "model": model}))
    return str(path)


BPE = {"type": "BPE", "merges": [["h", "e"], ["l", "l"]], "vocab": {"he": 20, "ll": 21}}
LETTERS = {letter: i for i, letter in enumerate("helowrd")}


def test_characters_without_a_token_are_counted_and_told(tmp_path, capsys):
    write(tmp_path / "in.jsonl", '{"text": "hello world"}\n{"text": "hello"}\n{"text": "wwd"}\n')
    some = {letter: i for letter, i in LETTERS.items() if letter not in "wrd"}
    path = tokenizer_of(tmp_path / "t.json", **BPE | {"vocab": some | BPE["vocab"]})
    made = prepare(tmp_path / "in.jsonl", tmp_path / "a", tokenizer=path, append_end=False)
    plain = tokenizers.Tokenizer.from_file(path)
    ids = [plain.encode(text).ids for text in ("hello world", "hello")]
    data = TokenSet(tmp_path / "a")
    assert (made.dropped, made.unknown, made.empty) == (6, 0, 1)  # of the third nothing is left
    assert [data.read(*pair).tolist() for pair in ((0, 5), (5, 8))] == ids
    with pytest.warns(RuntimeWarning, match="has no token for 3 characters of the prompt 'hey!w'"):
        assert encode_prompt("hey!w", load_tokenizer(path)) == [20]
    again = (str(tmp_path / "in.jsonl"),)
    assert run(DataCommand(again, tmp_path / "b", tokenizer=path, append_end=False)) == 0
    assert "warning: 6 characters have no token in the tokenizer" in capsys.readouterr().out


def test_bytes_without_a_token_are_counted_and_added_tokens_keep_their_ids(tmp_path):
    """A tokenizer that was trained on some bytes only, with tokens that were added to it."""
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, show_progress=False)
    inner.train_from_iterator(["abc á <call>"] * 9, trainer)
    inner.add_special_tokens(["<|endoftext|>"])
    inner.add_tokens(["<call>", "d"])
    inner.save(str(tmp_path / "t.json"))
    trained = load_tokenizer(tmp_path / "t.json")
    assert isinstance(trained, tokenizer.TrainedTokenizer)
    texts = ["abc á<call>d", "a é <call>", "ä", "<|endoftext|>"]
    found = [tokens.tolist() for tokens in trained.encode(texts)]
    inner.encode_special_tokens = True
    assert found == [inner.encode(text).ids for text in texts]
    assert trained.dropped == 1 + 1 + sum(letter not in "abc<>ld" for letter in "<|endoftext|>")


def test_text_that_becomes_the_unknown_token_is_counted_and_told(tmp_path, capsys):
    write(tmp_path / "in.txt", "hello big world")
    vocab = {"[UNK]": 0, "hello": 1, "world": 2}
    pieces = [[name, -1.0] for name in vocab]
    for number, model in enumerate(
        (
            {"type": "WordLevel", "vocab": vocab, "unk_token": "[UNK]"},
            {"type": "Unigram", "vocab": pieces, "unk_id": 0},
        )
    ):
        path = tokenizer_of(tmp_path / "t.json", **model)
        out = tmp_path / str(number)
        command = DataCommand((str(tmp_path / "in.txt"),), out, path, append_end=False)
        assert run(command) == 0
        told = capsys.readouterr().out
        assert "warning: 1 of 3 tokens are the tokenizer's token for unknown text" in told


def test_dropout_of_a_tokenizer_is_switched_off(tmp_path):
    merges = BPE | {"vocab": LETTERS | BPE["vocab"]}
    texts = ["hello world"] * 50
    with_dropout = tokenizer_of(tmp_path / "a.json", **merges, dropout=0.5)
    without = tokenizer_of(tmp_path / "b.json", **merges)
    found, plain = (load_tokenizer(path) for path in (with_dropout, without))
    assert all(map(np.array_equal, found.encode(texts), plain.encode(texts)))
    found.save(tmp_path)
    assert json.loads((tmp_path / "tokenizer.json").read_text())["model"]["dropout"] is None


@pytest.mark.parametrize("name", ["in.txt", "in.jsonl", "in.jsonl.gz"])
def test_a_byte_order_mark_begins_a_file_and_is_no_text(tmp_path, name):
    text = "a" if name == "in.txt" else '\n{"text": "a"}\n'
    write(tmp_path / name, b"\xef\xbb\xbf" + text.encode())
    prepare(tmp_path / name, tmp_path / "out")
    assert texts_of(TokenSet(tmp_path / "out")) == ["a"]


def test_a_text_with_fewer_pairs_than_asked_for_gives_a_smaller_vocabulary(tmp_path, capsys):
    write(tmp_path / "in.txt", "abcabc")
    command = DataCommand((str(tmp_path / "in.txt"),), tmp_path / "out", tokenizer="bpe")
    assert run(command) == 0
    assert "a vocabulary of 260 only; --vocab asked for 8192" in capsys.readouterr().out


@pytest.mark.parametrize("piece", [1, 7, 50, 1000])
def test_a_long_document_is_encoded_in_pieces_as_if_whole(corpus, tmp_path, monkeypatch, piece):
    prepare(corpus, tmp_path / "a", tokenizer="bpe", vocab=600)
    text = "".join(json.loads(line)["text"] for line in corpus.read_text().splitlines())
    trained = load_tokenizer(tmp_path / "a")
    whole = trained.encode([text])[0]
    monkeypatch.setattr(tokenizer, "CHUNK_SIZE", piece)
    monkeypatch.setattr(tokenizer, "GROUP_SIZE", 100)
    short, pieces = trained.encode(["x", text])
    np.testing.assert_array_equal(pieces, whole)
    assert len(short) == 1


def test_the_smallest_dtype_holds_the_vocabulary(tmp_path):
    for i, (vocab, dtype) in enumerate([(256, "u1"), (257, "u2"), (65536, "u2"), (65537, "u4")]):
        data = write_tokens(tmp_path / str(i), [np.array([0, vocab - 1])], vocab)
        assert (data.tokens.dtype, data.tokens.tolist()) == (np.dtype(dtype), [0, vocab - 1])


def test_one_of_every_so_many_documents_is_for_validation(tmp_path):
    write(tmp_path / "in.jsonl", "".join(f'{{"text": "{i}"}}\n' for i in range(200)))
    made = prepare(tmp_path / "in.jsonl", tmp_path / "out", valid=0.1)
    parts = [texts_of(TokenSet(tmp_path / "out" / name)) for name in ("train", "valid")]
    assert list(map(len, parts)) == [180, 20]
    assert sorted(map(int, parts[0] + parts[1])) == list(range(200))
    assert all(i <= int(text) / 10 < i + 1 for i, text in enumerate(parts[1]))
    again = prepare(tmp_path / "in.jsonl", tmp_path / "again", valid=0.1)
    assert made.parts == again.parts


def test_of_a_single_document_the_end_is_for_validation(tmp_path):
    write(tmp_path / "in.txt", "0123456789")
    prepare(tmp_path / "in.txt", tmp_path / "out", valid=0.2)
    assert texts_of(TokenSet(tmp_path / "out" / "train")) == ["01234567"]
    assert texts_of(TokenSet(tmp_path / "out" / "valid")) == ["89"]


def test_a_data_set_is_replaced_only_if_that_is_wanted(tmp_path):
    write(tmp_path / "in.txt", "new")
    prepare(write(tmp_path / "old.txt", "old"), tmp_path / "out")
    with pytest.raises(ValueError, match=r"out holds a data set already\. Give --over"):
        prepare(tmp_path / "in.txt", tmp_path / "out")
    assert texts_of(TokenSet(tmp_path / "out")) == ["old"]
    prepare(tmp_path / "in.txt", tmp_path / "out", overwrite=True)
    assert texts_of(TokenSet(tmp_path / "out")) == ["new"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.txt", "old.txt", "out"]


def test_a_folder_of_something_else_is_never_replaced(tmp_path):
    write(tmp_path / "out" / "thesis.txt", "text")
    with pytest.raises(ValueError, match="out exists and is not a data set: choose another"):
        prepare(tmp_path / "out", tmp_path / "out", overwrite=True)
    assert (tmp_path / "out" / "thesis.txt").read_text() == "text"


# -- a run that is stopped ----------------------------------------------------------------


@pytest.fixture(name="waiting")
def fixture_waiting(tmp_path):
    """A run that has written some documents and waits for more from a pipe."""
    os.mkfifo(tmp_path / "in.jsonl")
    started = subprocess.Popen(
        [sys.executable, "-c", COMMAND, tmp_path / "in.jsonl", "--data-dir", tmp_path / "out"],
        stderr=subprocess.PIPE,
        text=True,
    )
    with (tmp_path / "in.jsonl").open("w") as pipe:
        pipe.write('{"text": "a"}\n')
        pipe.flush()
        until = time.monotonic() + 60
        while not list(tmp_path.glob(".out.*/*/tokens.bin")) and time.monotonic() < until:
            time.sleep(0.02)
        assert list(tmp_path.glob(".out.*/*/tokens.bin"))
        yield started
        if started.poll() is None:
            started.kill()
        started.communicate(timeout=60)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 1), (signal.SIGTERM, 143)])
def test_a_run_that_is_told_to_end_leaves_nothing(waiting, tmp_path, number, code):
    waiting.send_signal(number)
    assert abs(waiting.wait(60)) in (code, number)
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]
    assert "Error" not in waiting.stderr.read()


def test_a_killed_run_leaves_no_data_set_and_the_next_start_sweeps_it_but_nothing_at_work(
    waiting, tmp_path
):
    (unfinished,) = tmp_path.glob(".out.unfinished-*")
    assert not (tmp_path / "out").exists()
    prepare(write(tmp_path / "in.txt", "text"), tmp_path / "out")
    assert unfinished.is_dir()
    waiting.kill()
    waiting.wait(60)
    assert texts_of(TokenSet(tmp_path / "out")) == ["text"]
    with pytest.raises(ValueError, match=r"is not a data set: it has no meta\.json"):
        TokenSet(unfinished)
    prepare(tmp_path / "in.txt", tmp_path / "out", overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "in.txt", "out"]


def test_a_data_set_that_a_killed_run_was_replacing_is_put_back(tmp_path):
    prepare(write(tmp_path / "in.txt", "old"), tmp_path / "out")
    unfinished = tmp_path / ".out.unfinished-0123"
    prepare(write(tmp_path / "in.txt", "new"), unfinished / atomic.NEW)
    (tmp_path / "out").rename(unfinished / atomic.OLD)  # and killed here
    with pytest.raises(ValueError, match="out holds a data set already"):
        prepare(tmp_path / "in.txt", tmp_path / "out")
    assert texts_of(TokenSet(tmp_path / "out")) == ["old"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.txt", "out"]


@pytest.mark.parametrize(
    ("text", "options", "most"),
    [
        ('{"text": "a"}\n' * 2000, {}, 8000),  # the offsets do not fit
        ('{"text": "abc"}\n', {"tokenizer": "bpe", "vocab": 300}, 4000),  # nor does the tokenizer
        ('{"text": "abc"}\n', {}, 200),  # nor what describes it
    ],
)
def test_whatever_does_not_fit_a_full_disk_is_told_alike(tmp_path, text, options, most):
    write(tmp_path / "in.jsonl", text)
    with allowed_bytes(most), pytest.raises(OSError, match="File too large; nothing is left of"):
        prepare(tmp_path / "in.jsonl", tmp_path / "out", **options)
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_a_full_disk_is_told_and_leaves_nothing(tmp_path):
    write(tmp_path / "in.txt", "text" * 100_000)
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))\n"
    words = [tmp_path / "in.txt", "--data-dir", tmp_path / "out"]
    done = subprocess.run(
        [sys.executable, "-c", limit + COMMAND, *words],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert "File too large; nothing is left of what was written" in done.stderr
    assert f"'{tmp_path / 'out'}'" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["in.txt"]


# -- the standard library, and the command ------------------------------------------------


@pytest.mark.slow
def test_the_standard_library_is_made_once_also_by_several_processes(tmp_path, monkeypatch):
    code = "import sys; from hfjax.data import standard_library; print(standard_library())"
    here = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    start = lambda: subprocess.Popen([sys.executable, "-c", code], stdout=-1, env=here, text=True)
    processes = [start() for _ in range(2)]
    found = {process.communicate(timeout=120)[0].strip() for process in processes}
    assert [process.returncode for process in processes] == [0, 0]
    (place,) = map(Path, found)
    assert [path.name for path in (tmp_path / "hfjax").iterdir()] == [place.name]
    before = (place / "train" / "meta.json").stat().st_mtime_ns
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert standard_library() == place
    assert (place / "train" / "meta.json").stat().st_mtime_ns == before


def test_the_standard_library_is_enough_to_train_on(tmp_path):
    place = standard_library(tmp_path / "library")
    train, valid = TokenSet(place / "train"), TokenSet(place / "valid")
    assert len(train) > 3_000_000
    assert 0.01 < len(valid) / len(train) < 0.2
    assert any("class JSONEncoder" in text for text in texts_of(train) + texts_of(valid))
    train.verify()


def test_the_command_makes_and_shows_a_data_set(tmp_path, capfd):
    for i, text in enumerate(TEXTS * 10):
        write(tmp_path / "in" / f"{i:02}.txt", text)

    def run(*words):
        code = main(["data", *map(str, words)])
        return code, *capfd.readouterr()

    folder, out = tmp_path / "in", tmp_path / "out"
    code, made, err = run(folder, "--data-dir", out, "--valid", "0.1")
    assert (code, err) == (0, "")
    head, *parts = (line.split() for line in made.splitlines()[:3])
    assert " ".join(head) == "data set documents tokens vocabulary on disk tokens per byte"
    assert [[*part[:4], part[-1]] for part in parts] == [
        ["train", "27", "747", "256", "1.038"],
        ["valid", "3", "73", "256", "1.043"],
    ]
    assert made.endswith(f"\nfiles read: 30; {out} is whole.\n")
    code, shown, _ = run("--show", out, "--verify")
    assert code == 0
    about = f"uint8, tokenizer bytes, end of a document: token 0\nmade from {folder}\n"
    assert f"train: {about}" in shown
    assert "  | Als Gregor Samsa\n" in shown
    assert "valid: every CRC32 is right (documents.npy, tokens.bin)" in shown
    code, told, err = run(folder, "--data-dir", out)
    assert (code, told) == (2, "")
    assert err.startswith(f"hfjax data: {out} holds a data set already.")


def test_tokens_of_other_programs_are_shown_without_text(tmp_path, capsys):
    write_tokens(tmp_path / "out", [np.array([7, 50256])], vocab=50257)
    assert run(DataCommand(show=tmp_path / "out")) == 0
    assert "  | 7 50256" in capsys.readouterr().out
    with pytest.raises(ValueError, match="was written from tokens: it has no tokenizer"):
        _ = TokenSet(tmp_path / "out").tokenizer


def test_progress_is_told_in_bytes_of_all_files(tmp_path):
    told = []
    folder = files_with("text", tmp_path)
    tell = lambda *said: told.append(said)
    prepare(folder, tmp_path / "out", tokenizer="bpe", vocab=300, progress=tell)
    read = np.cumsum([len(text.encode()) for text in TEXTS]).tolist()
    tasks = ("training the tokenizer", "writing tokens")
    assert told == [(task, done, read[-1]) for task in tasks for done in read]


def test_what_is_not_used_is_not_imported(tmp_path):
    code = (
        "import sys, hfjax.data as d; d.prepare(*sys.argv[1:]); d.TokenSet(sys.argv[2])\n"
        "print([m for m in ('grain', 'tokenizers', 'pyarrow', 'tyro') if m in sys.modules])"
    )
    write(tmp_path / "in.txt", "text")
    command = [sys.executable, "-c", code, tmp_path / "in.txt", tmp_path / "out"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize("in_one_step", [True, False])
def test_ctrl_c_at_any_moment_of_a_replacement_leaves_the_old_data_or_the_new(
    tmp_path, monkeypatch, in_one_step
):
    """Each rename, exchange and the first deletion: interrupted before it, and after it."""
    place, calls = tmp_path / "out", []
    rename, rmtree = Path.rename, shutil.rmtree
    exchanged = atomic.exchange_folders if in_one_step else lambda one, other: False

    def interrupted(act, moment):
        def do(*given, **more):
            calls.append(act)
            if len(calls) == moment:
                raise KeyboardInterrupt
            found = act(*given, **more)
            if len(calls) == -moment:
                calls.append(act)
                raise KeyboardInterrupt
            return found

        return do

    lengths, moments = {}, 3 if in_one_step else 4
    for moment in (0, *range(1, moments), *range(1 - moments, 0)):
        with monkeypatch.context() as patch:
            write_tokens(place, [np.arange(5)], 8, overwrite=True)
            assert [path.name for path in tmp_path.iterdir()] == ["out"]  # all is swept
            calls.clear()
            answers = interrupted(exchanged, moment) if in_one_step else exchanged
            patch.setattr(atomic, "exchange_folders", answers)
            patch.setattr(Path, "rename", interrupted(rename, moment))
            patch.setattr(shutil, "rmtree", interrupted(rmtree, moment))
            with pytest.raises(KeyboardInterrupt) if moment else nullcontext():
                write_tokens(place, [np.arange(6)], 8, overwrite=True)
        lengths[moment] = len(TokenSet(place))
        if abs(moment) < moments - 1:  # not while what is left is deleted
            assert [path.name for path in tmp_path.iterdir()] == ["out"], moment
    if in_one_step:
        assert lengths == {0: 6, 1: 5, 2: 6, -1: 6, -2: 6}
    else:
        assert lengths == {0: 6, 1: 5, 2: 5, 3: 6, -1: 5, -2: 6, -3: 6}


KILLED = """
import os, signal, sys
import numpy as np
from hfjax.utils import atomic
from hfjax.data import write_tokens

left, exchanged = [int(sys.argv[2])], atomic.exchange_folders

def count(event, *_):
    if event in ("os.rename", "os.rmdir", "exchange"):
        left[0] -= 1
        left[0] or os.kill(os.getpid(), signal.SIGKILL)

atomic.exchange_folders = lambda *given: (count("exchange"), exchanged(*given))[1]
sys.addaudithook(count)
write_tokens(sys.argv[1], [np.arange(6)], 8, overwrite=True)
"""


def test_a_kill_at_any_moment_of_a_replacement_leaves_a_data_set_in_its_place(tmp_path):
    """Killed before the exchange, and before the deletion of the old data."""
    place, lengths = tmp_path / "out", []
    for moment in (1, 2):
        write_tokens(place, [np.arange(5)], 8, overwrite=True)
        assert [path.name for path in tmp_path.iterdir()] == ["out"]  # all is swept
        command = [sys.executable, "-c", KILLED, place, str(moment)]
        done = subprocess.run(command, timeout=60)
        assert done.returncode == -signal.SIGKILL
        lengths.append(len(TokenSet(place)))
    assert lengths == [5, 6]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_the_old_data_is_deleted_leaves_nothing_beside(
    tmp_path, monkeypatch, number
):
    write_tokens(tmp_path / "out", [np.arange(5)], 8)
    rmtree = shutil.rmtree

    def interrupted(*given, **more):
        signal.raise_signal(number)
        return rmtree(*given, **more)

    monkeypatch.setattr(shutil, "rmtree", interrupted)
    with pytest.raises((SystemExit, KeyboardInterrupt)):
        write_tokens(tmp_path / "out", [np.arange(6)], 8, overwrite=True)
    assert len(TokenSet(tmp_path / "out")) == 6
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_a_kill_left_before_the_first_file_is_swept_also_from_a_maker_at_work(
    tmp_path, monkeypatch
):
    (tmp_path / ".out.unfinished-0123").mkdir()
    usual, locked = atomic._lock, []

    def sweeping(folder):
        """Sweep as another maker does, after the first new folder and before it is locked."""
        locked.append(folder)
        if len(locked) == 2:  # the first is that of the kill
            atomic.sweep(tmp_path / "out")
        return usual(folder)

    monkeypatch.setattr(atomic, "_lock", sweeping)
    write_tokens(tmp_path / "out", [np.arange(5)], 8)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    first, swept, again, last = locked
    assert first.name == ".out.unfinished-0123"
    assert swept == again != last
