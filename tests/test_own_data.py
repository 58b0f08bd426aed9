"""`hfjax train --data.factory`: presets and models of one's own on any Grain data set."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hfjax.cli.train import evaluate_command, generate_command
from hfjax.trainer import RunComponents, train
from hfjax.trainer.config import (
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    LogConfig,
    MeshConfig,
    ModelConfig,
    TrainConfig,
)
from hfjax.trainer.config_io import load, save
from tests.small_model_folder import small_folder
from tests.small_run import MODEL, corpus, small, told

pytestmark = pytest.mark.usefixtures("shown_log")

HERE = Path(__file__).parent
ROOT = HERE.parent
OWN = f"{HERE}/own_data.py:"
EXAMPLE = f"{ROOT}/examples/own_data.py:"
POINTS = ModelConfig(factory=f"{OWN}linear", loss=f"{OWN}masked_squares")
TOKENS = replace(MODEL, vocab_size=256)
IMAGES = ModelConfig(preset="resnet-tiny", num_classes=3)
QUIET = LogConfig(interval=4, sample_tokens=20)


def own(out: Path | None, factory: str, model: ModelConfig, **changes: Any) -> TrainConfig:
    """Return the configuration of a small run on data of one's own."""
    fields: dict[str, Any] = {"steps": 6, "global_batch_size": 8, "devices": 2, "log": QUIET}
    fields |= {"eval": EvalConfig(interval=3), "checkpoint": CheckpointConfig(interval=2)}
    data = DataConfig(factory=f"{OWN}{factory}", **changes.pop("data", {}))
    return TrainConfig(run_dir=out, model=model, data=data, **(fields | changes))


def metrics_of(directory: Path) -> list[dict[str, Any]]:
    """Return what a run wrote of each step, without times."""
    lines = [json.loads(text) for text in (directory / "metrics.jsonl").open()]
    kept = ("step", "loss", "grad_norm", "far", "valid_loss", "valid_far")
    return [{name: line[name] for name in kept if name in line} for line in lines]


def test_a_model_and_a_loss_of_ones_own_read_any_arrays(tmp_path, capsys):
    log = LogConfig(interval=1, sample_tokens=20)
    result = train(own(tmp_path / "run", "points", POINTS, log=log))
    printed = capsys.readouterr().out
    assert f"--data.factory {OWN}points: 40 examples, in the order of the data set: " in printed
    assert "x float32[3], y float32[1]" in printed
    assert re.search(r"validated after step 6: loss [\d.]+, far [\d.]+, weight 11\n", printed)
    assert "examples/s/device" in printed
    assert "TFLOP" not in printed, "the loss computes, of which nothing is known"
    assert "what it writes" not in printed
    assert result.step == 6
    assert any("valid_far" in line for line in metrics_of(tmp_path / "run"))
    assert any("examples_per_second" in text for text in (tmp_path / "run/metrics.jsonl").open())
    evaluate = [str(tmp_path / "run"), "--devices", "4"]
    assert evaluate_command([*evaluate, "--trust"]) == 0
    assert f"loss {result.valid_loss:.4f}, far" in capsys.readouterr().out
    for words, message in [
        ([], f"names Python code, .* and --data.factory {OWN}points, which would run as you"),
        (["--trust", "--data", "x"], "has its data from --data.factory .*Leave it out"),
    ]:
        with pytest.raises(SystemExit):
            evaluate_command([*evaluate, *words])
        assert re.search(message, capsys.readouterr().err)
    with pytest.raises(SystemExit):
        generate_command([str(tmp_path / "run"), "--trust"])
    assert "it is of examples, and has no text" in capsys.readouterr().err


def test_a_stopped_run_goes_on_with_the_metrics_of_one_that_was_not(tmp_path):
    whole = own(tmp_path / "whole", "points", POINTS, steps=14)
    train(whole)
    stopped = replace(whole, run_dir=tmp_path / "stopped")
    for limit, steps in [(0.0, 1), (0.0, 2), (None, 14)]:
        assert train(replace(stopped, max_runtime=limit)).step == steps
    assert metrics_of(tmp_path / "stopped") == metrics_of(tmp_path / "whole")
    other = replace(whole, seed=1, steps=20)
    with pytest.raises(ValueError, match=r"of another stream of examples: its data is .*crc32"):
        train(other)


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    return corpus(tmp_path_factory.mktemp("text"))


def of_text(text: Path, run_dir: Path, **changes: Any) -> tuple[TrainConfig, TrainConfig]:
    """Return a run on a folder of tokens, and one on the same tokens by a function."""
    fields: dict[str, Any] = {"mesh": MeshConfig(fsdp=2), "devices": 2} | changes
    files = small(run_dir / "files", text, **fields)
    data = DataConfig(factory=f"{OWN}library")
    return files, replace(files, run_dir=run_dir / "own", data=data, model=TOKENS)


def test_a_preset_gets_the_batches_that_token_files_give(tmp_path, text, monkeypatch):
    monkeypatch.setenv("OWN_DATA_FOLDER", str(text))
    files, by_function = map(RunComponents, of_text(text, tmp_path))
    assert files.task.shapes() == by_function.task.shapes()
    assert (by_function.task.unit, by_function.task.units_per_example) == ("tokens", 16)
    steps = files.data.examples_per_epoch // 16 + 2  # into the second epoch
    for batch, expected, _ in zip(by_function.data, files.data, range(steps), strict=False):
        np.testing.assert_array_equal(batch["tokens"], expected["tokens"])
    assert files.valid is not None
    assert by_function.valid is not None
    for batch, expected in zip(by_function.valid, files.valid, strict=True):
        np.testing.assert_array_equal(batch["tokens"], expected["tokens"])
        np.testing.assert_array_equal(batch["mask"], expected["mask"])
    with pytest.raises(ValueError, match="library gives tokens and no tokenizer, so that there is"):
        _ = by_function.tokenizer


@pytest.mark.slow
def test_a_preset_has_the_losses_that_it_has_on_token_files(tmp_path, text, monkeypatch, capsys):
    monkeypatch.setenv("OWN_DATA_FOLDER", str(text))
    files, by_function = of_text(text, tmp_path)
    train(files)
    train(replace(by_function, log=QUIET))
    for name in ("loss", "valid_loss"):
        assert told(tmp_path / "own", name) == told(tmp_path / "files", name)
    assert "what it writes" not in capsys.readouterr().out


def test_a_run_ends_with_its_epochs_and_may_have_nothing_to_validate_on(tmp_path, capsys):
    config = own(tmp_path / "run", "train_only", POINTS, data={"epochs": 2}, steps=99)
    assert train(config).step == 10
    printed = capsys.readouterr().out
    assert "the data ends after 2 epochs" in printed
    assert "validated" not in printed
    with pytest.raises(SystemExit):
        evaluate_command([str(tmp_path / "run"), "--trust"])
    assert "has no validation set" in capsys.readouterr().err


@pytest.mark.slow
def test_a_preset_of_images_trains_and_is_scored(tmp_path, capsys):
    train(own(tmp_path / "run", "images", IMAGES, data={"image_size": 16}))
    printed = capsys.readouterr().out
    assert "normalised by mean" in printed
    assert re.search(r"step 6: loss [\d.]+, top-1 [\d.]+%, 11 images", printed)


@pytest.mark.slow
def test_a_pretrained_model_is_tuned_on_tokens_of_ones_own_and_writes(tmp_path, capsys):
    small_folder(tmp_path / "llama", files=1)
    model = ModelConfig(pretrained=tmp_path / "llama", seq_len=16)
    train(own(tmp_path / "run", "tokens", model))
    assert "what it writes" in capsys.readouterr().out
    assert generate_command([str(tmp_path / "run"), "--trust", "--tokens", "4"]) == 0


# -- in real processes --------------------------------------------------------------------

HFJAX = [sys.executable, "-W", "ignore", "-m", "hfjax"]
FLAGS = [
    *("--data.factory", f"{EXAMPLE}data", "--model.factory", f"{EXAMPLE}make"),
    *("--model.loss", f"{EXAMPLE}loss", "--mesh.fsdp", "2", "--log.interval", "0"),
    *("--steps", "200", "--eval.interval", "50", "--checkpoint.interval", "10"),
]


def started(*words: Any) -> subprocess.Popen:
    path = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    env = os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
    streams: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([*HFJAX, *map(str, words)], env=env, **streams)


def ended(process: subprocess.Popen) -> str:
    out, _ = process.communicate(timeout=240)
    assert process.returncode == 0, out
    return out


@pytest.mark.slow
def test_a_killed_run_of_the_example_and_two_processes_have_the_metrics_of_one(tmp_path):
    ended(started("train", *FLAGS, "--cpu-devices", 2, "--run-dir", tmp_path / "whole"))
    killed = [*FLAGS, "--cpu-devices", 2, "--run-dir", tmp_path / "killed"]
    process, metrics = started("train", *killed), tmp_path / "killed/metrics.jsonl"
    deadline = time.monotonic() + 120
    while not metrics.is_file() or metrics.read_text().count("\n") < 40:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert "going on after step" in ended(started("train", *killed))
    two = ["launch", "-n", 2, "--devices-per-process", 1, "--", *HFJAX, "train", *FLAGS]
    ended(started(*two, "--run-dir", tmp_path / "two"))
    whole = metrics_of(tmp_path / "whole")
    assert len(whole) == 204
    assert metrics_of(tmp_path / "killed") == whole
    for line, other in zip(whole, metrics_of(tmp_path / "two"), strict=True):
        np.testing.assert_allclose(list(other.values()), list(line.values()), rtol=1e-5)


# -- what is refused ----------------------------------------------------------------------

OTHERS = "targets integer[16] (optional), documents integer[17] (optional), mask number[16]"
REFUSED: dict[str, tuple[str, ModelConfig, str]] = {
    "a list": ("listed", TOKENS, "split 'train': a grain.MapDataset is expected, found a list"),
    "an iterator": ("iterated", TOKENS, "An iterator can neither go on at a number nor"),
    "nothing": ("nothing", TOKENS, "expected, found None. Return it: is a `return` missing?"),
    "another signature": (
        "of_split",
        TOKENS,
        "own_data.py:of_split: a function of (split, seed) is expected, which returns the "
        "grain.MapDataset of split 'train' or 'valid'; found (split: str)",
    ),
    "no function": ("missing", TOKENS, "own_data.py has no function missing. There: ["),
    "unlike examples": (
        "unlike",
        TOKENS,
        "example 7: 'tokens' is int32[18], that of example 0 is int32[17]. Pad or crop",
    ),
    "no vocabulary": (
        "tokens",
        MODEL,
        "own_data.py:tokens beside --model.preset gpt-tiny: how many tokens there are is not said",
    ),
    "another name": (
        "renamed",
        TOKENS,
        "split 'train': an example has input_ids int64[17], and no 'tokens'. gpt-tiny reads tokens "
        f"integer[17], {OTHERS} (optional). Name it so (.map).",
    ),
    "another length": (
        "longer",
        TOKENS,
        "an example has tokens int32[18], and gpt-tiny reads 'tokens' of integer[17] "
        "(--model.seq-len 16, and one more). Convert, pad or crop it in the data set",
    ),
    "floats": ("floats", TOKENS, "an example has tokens float32[17], and gpt-tiny reads 'tokens'"),
    "what nothing reads": (
        "more",
        TOKENS,
        "an example has id int64[], tokens int64[17]: nothing reads 'id'. gpt-tiny reads",
    ),
    "a token beyond the vocabulary": (
        "tokens",
        replace(TOKENS, vocab_size=5),
        "example 5: 'tokens' holds 5, and gpt-tiny has 5 (--model.vocab-size), numbered from 0 on.",
    ),
    "a negative token": ("negative", TOKENS, "example 4: 'tokens' holds -1, and gpt-tiny has 256"),
    "a class beyond the last": (
        "images",
        replace(IMAGES, num_classes=2),
        "example 2: 'label' holds 2, and resnet-tiny has 2 (--model.num-classes)",
    ),
    "images of another size": (
        "images",
        IMAGES,
        "and resnet-tiny reads 'image' of uint8[32, 32, 3] (--data.image-size 32). Convert",
    ),
    "a number beyond 32 bits": (
        "large",
        POINTS,
        "example 1: 'id' holds 2147483648, and JAX makes it int32 (JAX_ENABLE_X64=1: it does not)",
    ),
    "a validation without end": (
        "endless",
        POINTS,
        "split 'valid': the data set has no end, and a validation reads each example once",
    ),
    "no loss": (
        "points",
        replace(POINTS, loss=None),
        "own_data.py:points: what its loss is, is not said. Give --model.loss file.py:function",
    ),
    "a model of tokens": (
        "points",
        replace(POINTS, factory=f"{ROOT}/examples/my_model.py:make"),
        "my_model.py:make: beside --data.factory a function of (example), the shapes of an example "
        "by key, is expected, which returns model_init(rngs); found (vocab: int, seq_len: int)",
    ),
    "a size of a preset": (
        "points",
        replace(POINTS, num_layers=2),
        "--model.num-layers 2 is of presets, and --model.factory",
    ),
}


def read_all(task: Any) -> None:
    """Ask for the model of a task, and read one epoch of both of its splits."""
    _ = task.model
    for loader in (task.train_loader(np.arange), task.valid_loader(np.arange)):
        for _ in zip(range(5), loader, strict=False):
            pass


@pytest.mark.parametrize("name", REFUSED)
def test_data_that_the_model_cannot_read_is_refused_by_key(name):
    factory, model, message = REFUSED[name]
    size = 16 if model.num_classes == 2 else None
    task = RunComponents(own(None, factory, model, data={"image_size": size})).task
    with pytest.raises(ValueError, match=re.escape(message)):
        read_all(task)


def test_a_loss_may_read_more_than_a_preset():
    model = replace(TOKENS, loss=f"{ROOT}/examples/my_model.py:loss")
    loader = RunComponents(own(None, "more", model)).task.train_loader(np.arange)
    assert set(next(loader)) == {"tokens", "id"}


def test_a_key_that_the_loss_does_not_find_is_named_beside_those_that_there_are(tmp_path):
    model = replace(POINTS, loss=f"{OWN}labelled")
    message = r"or the loss asks for 'label', which this batch does not have\. It has: x, y\."
    with pytest.raises(ValueError, match=message):
        train(own(tmp_path / "run", "train_only", model))


def test_a_loss_that_counts_examples_of_padding_is_refused(tmp_path):
    model = replace(POINTS, loss=f"{OWN}squares")
    with pytest.raises(ValueError, match="examples that pad the last batch would count"):
        train(own(tmp_path / "run", "points", model))


def test_flags_that_do_not_go_with_a_factory_are_refused():
    others: list[dict[str, Any]] = [{"train": ("x",)}, {"valid": "x"}, {"flip": 0.0}]
    for fields in [*others, {"weights": (1.0,)}, {"packing": "documents"}]:
        (name, _), *_ = fields.items()
        with pytest.raises(ValueError, match=rf"--data.{name} .* beside --data.factory a.py:f, wh"):
            DataConfig(factory="a.py:f", **fields)
    with pytest.raises(ValueError, match=r"--model.vocab-size 9: without --data.factory the voca"):
        _ = RunComponents(TrainConfig(model=ModelConfig(vocab_size=9))).task
    with pytest.raises(ValueError, match=r"--model.vocab-size 9 beside --model.pretrained"):
        ModelConfig(vocab_size=9, pretrained="x")
    with pytest.raises(ValueError, match=r"--data.image-size 8: --data.factory .* makes the exam"):
        _ = RunComponents(own(None, "points", POINTS, data={"image_size": 8})).task.model


def test_the_configuration_of_a_run_names_the_factory_by_its_whole_path(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    save(TrainConfig(data=DataConfig(factory="tests/own_data.py:points")), tmp_path / "run.yaml")
    assert load(tmp_path / "run.yaml").data.factory == f"{OWN}points"


def test_the_arithmetic_of_a_model_of_ones_own_is_counted_by_example():
    model = ModelConfig(factory=f"{EXAMPLE}make", loss=f"{EXAMPLE}loss")
    config = TrainConfig(model=model, data=DataConfig(factory=f"{EXAMPLE}data"), devices=1)
    parts = RunComponents(config)
    products, sums = 2 * (2 * 64 + 64 * 64 + 64 * 2), 64 + 64 + 2
    gelu = parts.task.flops(parts.layout) / 3 - products - sums
    assert gelu % (2 * 64) == 0
    assert gelu / (2 * 64) == 8
    assert RunComponents(own(None, "points", POINTS)).task.flops(parts.layout) == 0, "no such model"
