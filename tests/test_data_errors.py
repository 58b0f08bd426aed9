"""What is wrong with files, tokenizers and data sets on disk is told: where, and what to do."""

import gzip
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from hfjax.cli.data import DataCommand, run
from hfjax.data import (
    TokenSet,
    documents,
    load_tokenizer,
    prepare,
    stdlib_corpus,
    tokenizer,
    write_tokens,
)


@pytest.fixture(name="refused")
def fixture_refused(tmp_path):
    """Return a function that sees a file of these bytes refused, and nothing left behind."""

    def refused(name: str, data: bytes, message: str, **options) -> None:
        (tmp_path / name).write_bytes(data)
        before = sorted(tmp_path.iterdir())
        with pytest.raises(ValueError, match=message):
            prepare(tmp_path / name, tmp_path / "out", **options)
        assert sorted(tmp_path.iterdir()) == before

    return refused


# -- what is read -------------------------------------------------------------------------


def test_files_that_are_not_there_or_hold_nothing(tmp_path, refused):
    with pytest.raises(ValueError, match=r"missing\.txt: no such file or folder"):
        prepare(tmp_path / "missing.txt", tmp_path / "out")
    with pytest.raises(ValueError, match=r"no file to read in .* \(\.txt, \.md, \.jsonl"):
        prepare(tmp_path, tmp_path / "out")
    with pytest.raises(ValueError, match=r"no file to read in .* \(\*\*/\*\.py\)"):
        prepare(tmp_path, tmp_path / "out", pattern="**/*.py")
    refused("in.txt", b"", r"in\.txt: no text in it\. Nothing was written")
    refused("in.jsonl", b"\n\n", r"in\.jsonl: no text in it")


def test_a_table_that_is_not_read_as_one_and_a_file_named_twice(tmp_path, refused):
    (tmp_path / "in.txt").write_text("a")
    with pytest.raises(ValueError, match=r"in\.txt is named twice"):
        prepare([tmp_path, tmp_path / "in.txt"], tmp_path / "out")
    refused("in.json", b"[]", r"in\.json: \.json is not read\. Convert it to \.jsonl")


def test_text_that_is_not_utf8(tmp_path, refused):
    refused("in.txt", b"abc\xe4", r"in\.txt is not UTF-8: byte 3 is 0xe4\. .* --errors replace")
    refused(
        "in.md", "a".encode("utf-16"), r"byte 0 is 0xff\. Convert it \(iconv -f utf-16 -t utf-8"
    )
    prepare(tmp_path / "in.txt", tmp_path / "out", errors="replace")
    data = TokenSet(tmp_path / "out")
    assert data.tokenizer.decode(data.tokens[:-1]) == "abc\N{REPLACEMENT CHARACTER}"


def test_a_fault_while_a_tokenizer_is_trained_is_told_too(refused):
    refused("in.txt", b"abc\xe4", r"in\.txt is not UTF-8: byte 3", tokenizer="bpe")


def test_lines_that_are_not_utf8_no_json_or_without_the_field(refused):
    good = b'{"text": "a"}\n'
    faults = {
        b'{"text": "\xff"}': r"in\.jsonl:2 is not UTF-8: byte 10 is 0xff",
        b'{"text": "b"': r"in\.jsonl:2: no JSON: .* at character 12",
        b'{"txt": "b", "id": 1}': r"in\.jsonl:2 has no field 'text': it has txt, id\. .* --field",
        b"[1]": r"in\.jsonl:2 has no field 'text': it has list",
        b"[" * 100_000: r"in\.jsonl:2 cannot be read: it is nested too deeply",
        b"9" * 5000: r"in\.jsonl:2 cannot be read: a number in it has too many digits",
        b'{"text": null}': r"in\.jsonl:2: 'text' is null, .* Take such rows out, or give them",
    }
    for line, message in faults.items():
        refused("in.jsonl", good + line, message)


def test_parquet_files_without_the_column_of_other_things_or_truncated(tmp_path, refused):
    path = tmp_path / "in.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"id": [1], "body": ["a"]}), path)
    whole = path.read_bytes()
    refused(path.name, whole, r"in\.parquet has no column 'text': it has id, body\. .* --field")
    refused(path.name, whole, r"in\.parquet: row 1: 'id' is int, text is expected", field="id")
    refused(path.name, whole[:-9], r"in\.parquet is no whole Parquet file")
    for column in (["a", None], pyarrow.nulls(2)):
        pyarrow.parquet.write_table(pyarrow.table({"text": column}), path)
        refused(path.name, path.read_bytes(), r"in\.parquet: row .: 'text' is null, text is expec")
    table = pyarrow.table({"text": [f"text {number} äö" for number in range(999)]})
    pyarrow.parquet.write_table(table, path, compression="snappy", use_dictionary=False)
    whole = path.read_bytes()
    begin = whole.index(b"text 0")
    for at, message in {
        begin + 500: r"in\.parquet is no whole Parquet file: Corrupt snappy compressed data\.",
        5: r"in\.parquet is no whole Parquet file: Couldn't deserialize thrift: .*",
    }.items():
        broken = whole[:at] + b"\xff" * 40 + whole[at + 40 :]
        refused(path.name, broken, f"{message}$")
    pyarrow.parquet.write_table(table, path, compression="none", use_dictionary=False)
    latin = path.read_bytes().replace("text 7 äö".encode(), b"text 7 \xe4\xf6..")
    refused(path.name, latin, r"in\.parquet: row 8 is not UTF-8: byte 7 is 0xe4\. .*--errors repl")
    prepare(path, tmp_path / "out", errors="replace")


def test_links_that_lead_to_themselves_or_nowhere(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("a")
    for name, target in (("self", "self"), ("in/up", "..")):
        (tmp_path / name).symlink_to(target)
    loop = r"self is not to be reached \(Too many levels of symbolic links\)"
    for out in (tmp_path / "self", tmp_path / "self" / "out"):
        with pytest.raises(ValueError, match=r"not to be reached .* choose another --data-dir"):
            prepare(tmp_path / "in", out)
    with pytest.raises(ValueError, match=loop.replace(" is ", ": it is ")):
        prepare(tmp_path / "self", tmp_path / "out")
    with pytest.raises(ValueError, match=loop):
        prepare(tmp_path / "in", tmp_path / "out", tokenizer=str(tmp_path / "self"))
    prepare(tmp_path / "in", tmp_path / "out")
    assert run(DataCommand((str(tmp_path / "in"),), tmp_path / "again")) == 0
    (tmp_path / "in" / "self.txt").symlink_to("self.txt")
    with pytest.raises(ValueError, match=r"self\.txt is not to be reached .* Take it out"):
        prepare(tmp_path / "in", tmp_path / "third")


def test_a_document_that_memory_does_not_hold_is_named(tmp_path, monkeypatch):
    (tmp_path / "in.txt").write_text("a")

    def full(*_: object) -> str:
        raise MemoryError

    for owner, name in ((documents.Sources, "_decode"), (tokenizer.ByteTokenizer, "encode")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, full)
            with pytest.raises(MemoryError, match=r"in\.txt: memory is full\. Memory holds a doc"):
                prepare(tmp_path / "in.txt", tmp_path / "out")


def test_gzip_files_that_are_truncated_or_none(refused):
    whole = gzip.compress(b"text" * 1000)
    refused("in.txt.gz", whole[:-9], r"in\.txt\.gz is no whole gzip file")
    refused("in.txt.gz", b"text", r"in\.txt\.gz is no whole gzip file")


def test_byte_0_is_no_text_for_the_byte_tokenizer(refused):
    refused("in.txt", b"ab\0", r"in\.txt contains byte 0 \(at 2\), .* --no-append-end")


# -- how it is made -----------------------------------------------------------------------


def test_options_that_mean_nothing(refused):
    refused("in.txt", b"a", r"--valid 0\.6: a part of the documents, from 0 to 0\.5", valid=0.6)
    refused("in.txt", b"a", "--errors ignore: strict or replace", errors="ignore")
    refused("in.txt", b"a", "--end-token <e>: for a tokenizer.json; bytes has its", end_token="<e>")
    refused("in.txt", b"a", "--vocab 300: for --tokenizer bpe; bytes has a vocab", vocab=300)
    refused("in.txt", b"a", "--vocab 257: .* at least 258", tokenizer="bpe", vocab=257)


def test_a_part_for_validation_that_no_document_falls_into(refused):
    two = b'{"text": "a"}\n{"text": "b"}\n'
    refused("in.jsonl", two, r"--valid 0\.01 of 2 documents leaves none to valid", valid=0.01)
    refused("in.txt", b"a", r"--valid 0\.01 of 1 documents leaves none to valid", valid=0.01)


def test_tokenizers_that_are_not_there_or_none(tmp_path, refused):
    refused("in.txt", b"a", "tokenizer 'bite': no such file. Give bytes, bpe", tokenizer="bite")
    refused("in.txt", b"a", "in.txt is no tokenizer of", tokenizer=str(tmp_path / "in.txt"))


BPE = {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}
HOSTILE: dict[str, tuple[dict, Any]] = {
    r"in\.txt: the tokenizer cannot read this text \(Onig: .*\)\. Mend its tokenizer\.json": (
        BPE,
        {"type": "Split", "pattern": {"Regex": "(a|a)*$"}, "behavior": "Isolated", "invert": False},
    ),
    r"in\.txt: the tokenizer cannot read this text \(Unk token `c` not found": (
        BPE | {"unk_token": "c"},
        None,
    ),
    r"the tokenizer's token b has id 2147483648; ids are 0 to 16777215, and it has 2 tokens": (
        BPE | {"vocab": {"a": 0, "b": 2**31}},
        None,
    ),
    r"the tokenizer has no token\. Give the": (BPE | {"vocab": {}}, None),
    r"t\.json is no tokenizer of the `tokenizers` library": (BPE | {"vocab": {"a": -1}}, None),
}


@pytest.mark.parametrize("message", HOSTILE)
def test_a_tokenizer_that_the_library_fails_on_is_told_in_words(tmp_path, refused, message, capfd):
    model, before = HOSTILE[message]
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"version": "1.0", "pre_tokenizer": before, "model": model}))
    text = b"a" * 40 + b"c"
    refused("in.txt", text, message, tokenizer=str(path), append_end=False)
    if "Onig" in message:
        assert "panicked" in capfd.readouterr().err  # the library's own words


def test_a_tokenizer_without_an_end_of_documents(tmp_path):
    prepare(_text(tmp_path), tmp_path / "a", tokenizer="bpe", vocab=300)
    path = tmp_path / "a" / "tokenizer.json"
    path.write_text(path.read_text().replace("<|endoftext|>", "<stop>"))
    make = lambda name, **more: prepare(
        _text(tmp_path), tmp_path / name, tokenizer=str(path), **more
    )
    with pytest.raises(ValueError, match=r"so the end of a document has no token\. Name it with"):
        make("b")
    with pytest.raises(ValueError, match="the tokenizer has no token '<halt>' for the end"):
        make("b", end_token="<halt>")
    assert make("b", end_token="<stop>").parts[""].end == 0
    assert make("c", append_end=False).parts[""].end is None


def test_a_package_that_is_missing(monkeypatch, refused):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    message = r"a trained tokenizer needs the package tokenizers: pip install 'hfjax\[text\]'"
    refused("in.txt", b"a", message, tokenizer="bpe")
    refused("in.parquet", b"", r"reading Parquet needs the package pyarrow: pip install 'hfjax\[te")


def test_pipes_that_are_not_read_twice_or_backwards_or_that_nobody_writes_to(tmp_path, monkeypatch):
    cases: Any = (
        ("in.txt", "in.txt is a pipe, but bpe reads the text twice", {"tokenizer": "bpe"}),
        ("in.parquet", "in.parquet is a pipe, Parquet is read from its end: give a file", {}),
        ("in.jsonl", r"in.jsonl is a pipe, and for 0\.1 seconds nobody opened it to write", {}),
    )
    for name, message, options in cases:
        os.mkfifo(tmp_path / name)
        monkeypatch.setattr(documents, "PATIENCE", 0.1)
        with pytest.raises(ValueError, match=message):
            prepare(tmp_path / name, tmp_path / "out", **options)
    with pytest.raises(ValueError, match=r"/dev/null: it is a device\. Name files and folders"):
        prepare("/dev/null", tmp_path / "out")


def test_half_of_a_pair_is_no_text(tmp_path, refused):
    lines = b'{"text": "\\ud83d\\ude00"}\n{"text": "ab\\ud800"}\n'
    refused("in.jsonl", lines, r"in\.jsonl:2: character 2 of 'text' is \\ud800, half of a pair")
    refused("in.jsonl", lines, r"in\.jsonl:2: character 2", tokenizer="bpe", vocab=300)
    prepare(tmp_path / "in.jsonl", tmp_path / "out", errors="replace")
    data = TokenSet(tmp_path / "out")
    assert data.tokenizer.decode(data.tokens) == "\U0001f600\0ab\N{REPLACEMENT CHARACTER}\0"


def test_tokens_that_are_none(tmp_path):
    write = lambda *documents: write_tokens(tmp_path / "out", list(documents), vocab=10)
    with pytest.raises(ValueError, match=r"document 1: token 2 is 10, the vocabulary has 10 \(0"):
        write(np.array([1]), np.array([0, 9, 10]))
    with pytest.raises(ValueError, match="document 0: token 0 is -1, the vocabulary has 10"):
        write(np.array([-1]))
    with pytest.raises(ValueError, match=r"shape \(1, 2\) and dtype int64: a document is a flat"):
        write(np.zeros((1, 2), np.int64))
    with pytest.raises(ValueError, match=r"shape \(2,\) and dtype float64: a document is a flat"):
        write(np.zeros(2))
    with pytest.raises(ValueError, match=r"shape \(0,\) and dtype int64: .* at least one"):
        write(np.zeros(0, np.int64))
    with pytest.raises(ValueError, match=r"no documents for .*out: at least one"):
        write()
    with pytest.raises(ValueError, match="a vocabulary of 0: 1 to 4294967296 tokens"):
        write_tokens(tmp_path / "out", [np.array([0])], vocab=0)
    assert list(tmp_path.iterdir()) == []


def test_tokens_that_a_byte_tokenizer_does_not_have():
    with pytest.raises(ValueError, match=r"token 256: the byte tokenizer has tokens 0 … 255"):
        load_tokenizer("bytes").decode([65, 256])


def test_a_python_without_its_sources(tmp_path):
    with pytest.raises(ValueError, match=r"has no \.py files: this Python comes without"):
        stdlib_corpus.library_files(tmp_path)


# -- data sets on disk --------------------------------------------------------------------


def _text(folder: Path) -> Path:
    (folder / "in.txt").write_text("some text, some more text")
    return folder / "in.txt"


@pytest.fixture(name="made")
def fixture_made(tmp_path) -> Path:
    return write_tokens(tmp_path / "made", [np.arange(300), np.arange(50)], vocab=300).directory


def test_a_directory_that_is_no_data_set(tmp_path, made):
    with pytest.raises(ValueError, match=r"nowhere: no such directory\. Make a data set there"):
        TokenSet(tmp_path / "nowhere")
    with pytest.raises(
        ValueError, match=r"org/texts: .* A data set of the Hub is named hub:org/te"
    ):
        TokenSet(Path("org/texts"))
    with pytest.raises(ValueError, match=r"is not a data set: it has no meta\.json\. Make"):
        TokenSet(tmp_path)
    made.rename(tmp_path / "train")
    with pytest.raises(ValueError, match=r"holds several data sets: open .*train, one at a time"):
        TokenSet(tmp_path)


def test_tokens_that_are_truncated_or_too_many(made):
    path = made / "tokens.bin"
    whole = path.read_bytes()
    path.write_bytes(whole[:-2])
    message = r"tokens\.bin is truncated: 698 bytes, meta.json says 700 \(350 tokens of uint16\)"
    with pytest.raises(ValueError, match=message):
        TokenSet(made)
    path.write_bytes(whole + b"\0")
    with pytest.raises(ValueError, match="is longer than it was: 701 bytes"):
        TokenSet(made)
    path.unlink()
    with pytest.raises(ValueError, match=r"tokens\.bin is missing: an ordinary file is expected"):
        TokenSet(made)


def test_documents_that_are_truncated_or_of_another_data_set(made):
    path = made / "documents.npy"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"documents\.npy is truncated or no array"):
        TokenSet(made)
    for dtype in (np.uint64, np.uint32, np.int32, float):  # of unsigned ones differences wrap
        np.save(path, np.array([0, 350, 400], dtype))
        with pytest.raises(ValueError, match=r"numbers are \w+, int64 is what hfjax writes"):
            TokenSet(made)
    np.save(path, np.array([0, 350]))
    with pytest.raises(ValueError, match=r"has shape \(2,\), meta.json says 3 offsets from 0"):
        TokenSet(made)


def test_a_description_that_is_damaged_or_of_another_format(made):
    path = made / "meta.json"
    whole = json.loads(path.read_text())
    for change, message in {
        "{": r"meta\.json is damaged \(.*\): a JSON object of vocab, dtype",
        json.dumps(whole | {"more": 1}): "is damaged .*more",
        json.dumps(whole | {"dtype": "uint8"}): "dtype uint8, a vocabulary of 300 has uint16",
        json.dumps(whole | {"format": 3}): "format 3, this hfjax reads formats 1 and 2",
    }.items():
        path.write_text(change)
        with pytest.raises(ValueError, match=message):
            TokenSet(made)


def test_a_flipped_bit_is_found_when_it_is_looked_for(made, capsys):
    data = bytearray((made / "tokens.bin").read_bytes())
    data[100] ^= 1
    (made / "tokens.bin").write_bytes(data)
    with pytest.raises(ValueError, match=r"tokens\.bin: CRC32 \w{8}, written was \w{8}: the file"):
        TokenSet(made).verify()
    assert run(DataCommand(show=made)) == 0
    assert run(DataCommand(show=made, verify=True)) == 1
    assert "hfjax data: " in capsys.readouterr().err


def test_a_token_beyond_the_vocabulary_is_found_when_it_is_read(made):
    tokens = np.fromfile(made / "tokens.bin", "<u2")
    tokens[7] = 300
    tokens.tofile(made / "tokens.bin")
    with pytest.raises(ValueError, match="token 7 is 300, the vocabulary has 300"):
        TokenSet(made).check_vocab(TokenSet(made).tokens[5:9], 5)


def test_words_of_the_command_that_do_not_go_together(tmp_path, capsys):
    some = ("in.txt",)
    for command, message in {
        DataCommand(): "name what to read and where to write",
        DataCommand(some): "name what to read and where to write",
        DataCommand(some, tmp_path, verify=True): "--verify goes with --show DIR",
        DataCommand(some, show=tmp_path): "--show DIR goes without inputs and without --data-dir",
        DataCommand(some, tmp_path / "out"): "in.txt: no such file or folder",
    }.items():
        assert run(command) == 2
        assert message in capsys.readouterr().err
