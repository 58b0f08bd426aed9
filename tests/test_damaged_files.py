"""Whatever lies where a file is read: one error that names the file, no trace, no stall."""

import copy
import gzip
import json
import os
import pickle
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

import hfjax
from hfjax.checkpoint.manifest import find_damage
from hfjax.checkpoint.metadata import read_record
from hfjax.cli.data import DataCommand, run
from hfjax.data import (
    Loader,
    TokenSet,
    documents,
    load_tokenizer,
    prepare,
    token_dataset,
    token_writer,
    write_tokens,
)
from hfjax.trainer import load
from tests.small_checkpoint import saved, small_layout
from tests.small_run import open_trackers

DEEP = "[" * 100_000
MANY = b"9" * 400  # digits: a number that no float holds
VALUES = (None, True, -1, 1.5, float("nan"), float("inf"), 10**30, "x", "", [], [1], {"a": 1})


def of_bytes(data: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(data)


THINGS = {
    "random": of_bytes(np.random.default_rng(0).bytes(500)),
    "zeros": of_bytes(b"\0" * 300),
    "deep": of_bytes(DEEP.encode()),
    "deep objects": of_bytes(b'{"a":' * 100_000),
    "list": of_bytes(b"[1]"),
    "digits": of_bytes(b"9" * 5000),
    "folder": lambda path: path.mkdir(),
    "pipe": lambda path: os.mkfifo(path),
    "broken link": lambda path: path.symlink_to("nowhere"),
    "circle": lambda path: path.symlink_to(path.name),
}
ODD = ("folder", "pipe", "broken link", "circle")


@pytest.fixture(autouse=True)
def fixture_no_stall(monkeypatch):
    """What stalls is ended: as a fault."""

    def ended(*_: object) -> None:
        raise AssertionError("it stalls")

    monkeypatch.setattr(documents, "PATIENCE", 0.05)
    before = signal.signal(signal.SIGALRM, ended)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def replaced(path: Path, put: Callable[[Path], object]) -> None:
    """Put something in the place of what is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    put(path)


def refused(path: Path, read: Callable[[], object], things=THINGS, named: str | None = None):
    """See each thing in the place of a file refused with its name, and the file itself read."""
    whole = path.read_bytes()
    for name in things:
        replaced(path, THINGS[name])
        with pytest.raises((ValueError, OSError)) as told:
            print(f"{path.name}: {name} is accepted: {read()}")
        assert (named or path.name) in str(told.value), name
        assert "\n" not in str(told.value), name
    replaced(path, of_bytes(whole))
    read()


@pytest.fixture(name="made")
def fixture_made(tmp_path) -> Path:
    return write_tokens(tmp_path / "made", [np.arange(300), np.arange(50)], 300).directory


@pytest.mark.parametrize("name", ["meta.json", "documents.npy", "tokens.bin"])
def test_a_data_set(made, name):
    read = lambda: Loader(made, 2, 8, threads=0).at(0)
    refused(made / name, read)
    replaced(made / name, of_bytes(b""))
    with pytest.raises(ValueError, match=name):
        read()


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("in.txt", b"text"),
        ("in.jsonl", b'{"text": "a"}\n'),
        ("in.jsonl.gz", gzip.compress(b'{"text": "a"}\n')),
        ("in.parquet", b""),
    ],
    ids=["text", "lines", "zipped", "table"],
)
def test_what_a_data_set_is_made_of(tmp_path, name, data):
    path = tmp_path / name
    path.write_bytes(data)
    if name.endswith("parquet"):
        pyarrow.parquet.write_table(pyarrow.table({"text": ["a"]}), path)
    things = [thing for thing in THINGS if name != "in.txt" or thing in ODD]
    refused(path, lambda: prepare(path, tmp_path / "out", overwrite=True), things)


def test_a_tokenizer(tmp_path):
    (tmp_path / "in.txt").write_text("some text, some more text")
    made = tmp_path / "made"
    prepare(tmp_path / "in.txt", made, tokenizer="bpe", vocab=300)
    refused(made / "tokenizer.json", lambda: load_tokenizer(made))
    refused(made / "meta.json", lambda: load_tokenizer(made))


def test_a_configuration(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("steps: 3\n")
    refused(path, lambda: load(path))


def test_a_configuration_whose_aliases_grow_without_end(tmp_path):
    path = tmp_path / "run.yaml"
    ways = {"{{<<: [{}]}}": "{k: 1, l: 2}", "{{a: [{}]}}": "{k: 1}", "[{}]": "text"}
    message = r"run\.yaml:1 is no YAML: its aliases \(\*name\), written out, are more than 100000"
    for way, first in ways.items():
        lines = [f"l0: &l0 {first}"]
        for n in range(400):  # each is eight of the one before
            lines.append(f"l{n + 1}: &l{n + 1} " + way.format(", ".join([f"*l{n}"] * 8)))
        path.write_text("\n".join(lines))
        with pytest.raises(ValueError, match=message):
            load(path)
    path.write_text("checkpoint: &often {interval: 3}\nlog: {<<: *often, sample_tokens: 0}\n")
    assert (load(path).log.interval, load(path).log.sample_tokens) == (3, 0)


def test_the_metrics_of_a_run(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0, "loss": 1.0}\n{"step": 1, "loss": 2.0}\n')
    refused(path, lambda: open_trackers(tmp_path, 1).finish(), ODD)
    lines = [b"\xff", DEEP.encode(), b"[1]", b'{"loss": 1}', b'{"step": -5, "loss": 1}']
    for line in (*lines, b'{"step": 1, "x": %s}' % MANY, b'{"step": %s}' % MANY, b'{"step":1}\0'):
        path.write_bytes(b'{"step": 0, "loss": 1.0}\n' + line + b'\n{"step": 2, "loss": 1.0}\n')
        with pytest.raises(ValueError, match=r"metrics\.jsonl:2 is no line of a run \(.*Take it"):
            open_trackers(tmp_path, 3)


@pytest.fixture(name="step", scope="module")
def fixture_step(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoints")
    saved(directory, 1, data={"rows": 5})
    return directory / "1"


def test_the_files_beside_a_checkpoint(step):
    def verified():
        if lines := find_damage(step):
            raise ValueError(*lines)

    refused(step / "manifest.json", verified)
    refused(step / "meta/metadata", lambda: read_record(step))
    refused(step / "meta/metadata", verified)
    layout = small_layout()
    unverified = lambda: hfjax.restore(step.parent, layout, verify=False)
    refused(step / "state/_METADATA", unverified, ["pipe", "broken link"])
    some = {"format": 1, "files": {}}
    for files, told in ((some["files"], "does not name meta/metadata"), ({"x": "1"}, "manifest")):
        whole = (step / "manifest.json").read_text()
        (step / "manifest.json").write_text(json.dumps(some | {"files": files}))
        assert told in find_damage(step)[0]
        (step / "manifest.json").write_text(whole)


@pytest.mark.parametrize("name", ["a" * 5000, "a\0b", "\ud800", "a/" * 3000, "\x1b[31m\nred"])
def test_a_manifest_with_a_name_that_no_file_has(tmp_path, name):
    layout = saved(tmp_path, 1, 2)
    path = tmp_path / "2/manifest.json"
    whole = json.loads(path.read_text())
    whole["files"][name] = "00000000 0"
    path.write_text(json.dumps(whole))
    with pytest.raises(
        ValueError, match=r"step 2 of \S+ is damaged: .* is missing\. Step 1"
    ) as told:
        hfjax.restore(tmp_path, layout)
    assert len(str(told.value)) < 1000
    assert str(told.value).isprintable()
    with pytest.warns(RuntimeWarning, match="step 2 .* is missing"):
        assert hfjax.restore(tmp_path, layout, on_damage="previous").step == 1


RED = "\x1b[31m\u202e[/red]"  # of a terminal, of the direction of writing, of rich's markup


def test_control_characters_of_names_never_reach_a_terminal(tmp_path, step, capsys):
    """Names of files and of keys, from whoever made the folder."""

    def harmless(read: Callable[[], object], match: str) -> None:
        with pytest.raises((ValueError, OSError), match=match) as told:
            read()
        assert all(line.isprintable() for line in str(told.value).splitlines())

    code = r"\\x1b\[31m\\u202e"
    texts = tmp_path / f"texts{RED.replace('/', '')}"
    texts.mkdir()
    for name, text in {"txt": b"\xff", "jsonl": json.dumps({RED: 1}).encode(), "json": b""}.items():
        (texts / f"a.{name}").write_bytes(text)
        harmless(lambda: prepare(texts, tmp_path / "o", pattern=f"*.{name}"), code)  # noqa: B023
    pyarrow.parquet.write_table(pyarrow.table({RED: ["a"]}), texts / "a.parquet")
    harmless(lambda: prepare(texts, tmp_path / "o", pattern="*.parquet"), f"it has {code}")
    (tmp_path / "a.yaml").write_text('"\\e[31m": 1\n"\\e[31m": 1')
    harmless(lambda: load(tmp_path / "a.yaml"), r"\\x1b\[31m is there twice")
    shutil.copytree(step, tmp_path / "c/1")
    record = json.loads((step / "meta/metadata").read_text())
    arrays = record["arrays"] | {f"params/{RED}": ["float32", [1]]}
    (tmp_path / "c/1/meta/metadata").write_text(json.dumps(record | {"arrays": arrays}))
    layout = small_layout()
    harmless(
        lambda: hfjax.restore(tmp_path / "c", layout, verify=False), f"params/{code}.* is saved"
    )
    (tmp_path / "d" / RED.replace("/", "")).mkdir(parents=True)
    harmless(lambda: hfjax.restore(tmp_path / "d", layout), f"found {code}")
    made = write_tokens(tmp_path / "made", [np.arange(5)], 8).directory
    meta = json.loads((made / "meta.json").read_text())
    (made / "meta.json").write_text(json.dumps(meta | {RED: 1}))
    harmless(lambda: TokenSet(made), f"meta.json is damaged .*{code}")
    (made / "meta.json").write_text(json.dumps(meta | {"sources": [RED]}))
    assert run(DataCommand(show=made, verify=True)) == 0
    assert "made from \\x1b[31m\\u202e[/red]" in capsys.readouterr().out
    assert run(DataCommand(show=tmp_path / RED)) == 2
    assert "\x1b" not in capsys.readouterr().err


def test_numbers_that_no_float_holds(step, tmp_path):
    record = json.loads((step / "meta/metadata").read_text())
    shutil.copytree(step, tmp_path / "1")
    text = json.dumps(record | {"metrics": {"loss": int(MANY)}})
    (tmp_path / "1/meta/metadata").write_text(text)
    with pytest.raises(ValueError, match=r"meta/metadata does not parse: metrics is .* numbers is"):
        read_record(tmp_path / "1")
    hfjax.CheckpointManager(
        tmp_path, small_layout(), keep=hfjax.RetentionPolicy(best="loss")
    ).close()
    (tmp_path / "run.yaml").write_text(f"optimizer: {{learning_rate: {int(MANY)}}}")
    told = r"run.yaml:1: optimizer: learning_rate='999.*: a number is expec"
    with pytest.raises(ValueError, match=told):
        load(tmp_path / "run.yaml")


# -- fields of other kinds ----------------------------------------------------------------


def of_other_kinds(path: Path, read: Callable[[], object], free: dict[str, tuple]) -> None:
    """See each value in the place of each field refused by its name, but those in `free`."""
    whole = path.read_text()
    for name, of_file in json.loads(whole).items():
        for value in VALUES:
            if value in (of_file, *free.get(name, ())):
                continue
            path.write_text(json.dumps(json.loads(whole) | {name: value}))
            with pytest.raises(ValueError, match=rf"{path.name}.*{name}") as told:
                print(f"{name}={value!r} is accepted: {read()}")
            assert "\n" not in str(told.value)
    path.write_text(whole)
    read()


def test_fields_of_a_data_set(made):
    free = {"end": (None,), "text": (10**30,), "sources": ([],), "tokens": (10**30,)}
    free |= {"samples": ({"a": 1},), "documents": (10**30,)}
    of_other_kinds(made / "meta.json", lambda: Loader(made, 2, 8, threads=0).at(0), free)
    whole = json.loads((made / "meta.json").read_text())
    for name, value, told in (
        ("tokens", 10**30, "700 bytes, meta.json says 2000000"),
        ("documents", 3, r"has shape \(3,\), meta.json says 4 offsets"),
        ("end", 300, r"meta.json is damaged \(end is 300, beyond a vocabulary of 300\)"),
        ("end", 7, "meta.json: end is 7, but the document that ends at token 300 ends with 299"),
        ("crc32", {"tokens.bin": 1}, "meta.json is damaged .*crc32 has no documents.npy"),
        ("samples", {"../x": 1}, "meta.json is damaged .*'../x', which is no name of a file"),
    ):
        (made / "meta.json").write_text(json.dumps(whole | {name: value}))
        with pytest.raises(ValueError, match=told):
            Loader(made, 2, 8)


def test_fields_of_a_checkpoint(step):
    free = {name: VALUES for name in ("config", "data")} | {"processes": (10**30,)}
    free |= {"strategy": ("x", ""), "mesh": ("x", ""), "metrics": ({"a": 1},)}
    free |= {"format": (10**30,), "step": (10**30,)}  # another step's: a folder that was renamed
    of_other_kinds(step / "meta/metadata", lambda: read_record(step), free)
    whole = json.loads((step / "meta/metadata").read_text())
    for told in ([1], ["float33", [1]], ["float32", [-1]], ["float32", "x"]):
        (step / "meta/metadata").write_text(json.dumps(whole | {"arrays": {"params/x": told}}))
        with pytest.raises(ValueError, match=r"meta/metadata does not parse: arrays is"):
            hfjax.restore(step.parent, small_layout(), verify=False)


# -- a data set that changed after it was made --------------------------------------------


def test_ends_of_documents_that_are_no_ends(tmp_path):
    (tmp_path / "in.jsonl").write_text('{"text": "abc"}\n{"text": "defg"}\n')
    prepare(tmp_path / "in.jsonl", tmp_path / "made")
    path = tmp_path / "made" / "documents.npy"
    meta = tmp_path / "made" / "meta.json"
    for offsets, told in {
        (0, 5, 9): r"meta\.json: end is 0, but the document that ends at token 5 ends with 100",
        (0, 9, 9): r"documents\.npy: documents do not follow one another",
        (0, -3, 9): r"documents\.npy: documents do not follow",
        (0, 99, 9): r"documents\.npy: documents do not follow",
    }.items():
        np.save(path, np.array(offsets))
        with pytest.raises(ValueError, match=r"documents\.npy: CRC32 \w+, written was"):
            Loader(tmp_path / "made", 1, 2)
        whole = json.loads(meta.read_text())
        whole["crc32"][path.name] = token_dataset.crc32(path)
        meta.write_text(json.dumps(whole))
        with pytest.raises(ValueError, match=told):
            Loader(tmp_path / "made", 1, 2)
    np.save(path, np.array([0.0, 4, 9]))
    with pytest.raises(ValueError, match=r"documents\.npy is .* no array of numbers \(.*float64"):
        TokenSet(tmp_path / "made")


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def test_a_bit_that_changes_in_a_small_data_set_is_found_by_the_next_loader(made):
    state = Loader(made, 2, 8).state()
    for place in (0, 333, 699):
        flip(made / "tokens.bin", place)
        with pytest.raises(ValueError, match=r"tokens\.bin: CRC32 \w+, written was \w+: the file"):
            Loader(made, 2, 8).restore(state)
        flip(made / "tokens.bin", place)
    Loader(made, 2, 8).restore(state)


def test_of_a_large_data_set_samples_are_compared(tmp_path, monkeypatch):
    """Two thirds of this one are in samples: every third block is not."""
    for module in (token_dataset, token_writer):
        monkeypatch.setattr(module, "SMALL", 1 << 12)
    monkeypatch.setattr(token_dataset, "SAMPLE", 100)
    monkeypatch.setattr(token_dataset, "SAMPLES", 11)
    made = write_tokens(tmp_path / "made", [np.arange(1600) % 256], 300).directory
    assert set(json.loads((made / "meta.json").read_text())["samples"]) == set()
    made = write_tokens(tmp_path / "large", [np.arange(3000) % 256], 300).directory
    assert set(json.loads((made / "meta.json").read_text())["samples"]) == {"tokens.bin"}
    Loader(made, 2, 8)
    for place in (0, 99, 590, 5900, 5999):
        flip(made / "tokens.bin", place)
        with pytest.raises(ValueError, match=r"tokens\.bin: CRC32 \w+, written was"):
            Loader(made, 2, 8)
        flip(made / "tokens.bin", place)
    flip(made / "tokens.bin", 300)  # between samples
    Loader(made, 2, 8)
    with pytest.raises(ValueError, match=r"tokens\.bin: CRC32"):
        TokenSet(made).verify()


def test_a_data_set_of_an_earlier_hfjax_has_no_samples(made):
    path = made / "meta.json"
    whole = json.loads(path.read_text())
    del whole["samples"]
    path.write_text(json.dumps(whole))
    assert Loader(made, 2, 8).at(0)["tokens"].shape == (2, 9)


def test_a_file_that_is_cut_while_it_is_read_is_named(made):
    """A memory map of it would end the process with SIGBUS, without a word."""
    given: Any = ({}, {"documents": True}, {"packing": "documents"})
    loaders = [Loader(made, 2, 8, threads=0, **options) for options in given]
    copies = [copy.deepcopy(TokenSet(made)), pickle.loads(pickle.dumps(TokenSet(made)))]
    assert all((data.read(3, 9) == np.arange(3, 9)).all() for data in copies)
    whole = (made / "tokens.bin").read_bytes()
    for loader in loaders:
        loader.at(1)
        os.truncate(made / "tokens.bin", 20)
        with pytest.raises(
            ValueError, match=r"tokens\.bin was cut while it is read: 20 .* Copy it"
        ):
            loader.at(1)
        with pytest.raises(ValueError, match=r"tokens\.bin: CRC32|was cut while it is read"):
            copies[0].verify()
        (made / "tokens.bin").write_bytes(whole)
        loader.at(1)
    os.truncate(made / "documents.npy", 0)
    with pytest.raises(ValueError, match=r"documents\.npy was cut while it is read: 0 bytes,"):
        loaders[1].at(1)
