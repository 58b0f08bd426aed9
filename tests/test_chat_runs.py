"""A run on chats: from a file to a checkpoint, and what a configuration refuses."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hfjax.__main__ import main
from hfjax.data import load_tokenizer
from hfjax.trainer import RunComponents, TrainConfig, train
from hfjax.trainer.config import (
    CheckpointConfig,
    DataConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
)
from hfjax.trainer.sampling import Sampling
from tests.chats.templates import CHATML, TAGGED
from tests.small_model_folder import LLAMA, small_folder
from tests.small_run import NO_EVAL, QUIET, told

ROWS = [
    {
        "messages": [
            {"role": "user", "content": f"{i}?"},
            {"role": "assistant", "content": "data " * (1 + i % 3)},
        ]
    }
    for i in range(24)
]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A model's folder with a template, and files of chats; the cache is of this test."""
    folder = tmp_path_factory.mktemp("chats")
    model = small_folder(
        folder / "llama", {**LLAMA, "vocab_size": 272, "max_position_embeddings": 64}
    )
    tokenizer: Any = load_tokenizer(str(model))
    tokenizer.inner.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.save(model)
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHATML}))
    for name, rows in {"train": ROWS, "held": ROWS[:5]}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "tagged.jinja").write_text(TAGGED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        yield folder


pytestmark = pytest.mark.usefixtures("shown_log")


def config(place: Path, name: str = "run", **data: Any) -> TrainConfig:
    files = {"train": (str(place / "train.jsonl"),), "valid": str(place / "held.jsonl")}
    fields: dict[str, Any] = files | data
    return TrainConfig(
        run_dir=place / name,
        steps=6,
        global_batch_size=4,
        model=ModelConfig(pretrained=str(place / "llama"), seq_len=63),
        mesh=MeshConfig(data=1),
        devices=1,
        data=DataConfig(**fields),
        optimizer=OptimizerConfig(learning_rate=1e-2),
        checkpoint=CheckpointConfig(interval=0),
        eval=replace(NO_EVAL, interval=3),
        log=QUIET,
    )


def folders(place):
    return sorted(p.name for p in (place / "cache/hfjax/chats").iterdir() if p.is_dir())


def test_a_run_trains_on_chats_and_validates_on_others(place, capsys):
    result = train(config(place))
    losses = told(place / "run")
    assert result.step == 6
    assert losses[5] < losses[0]
    out = capsys.readouterr().out
    assert "train.jsonl: 24 chats of 782 tokens, of which the loss counts 264\n" in out
    assert result.valid_loss is not None
    names = folders(place)
    assert len(names) == 2
    parts = RunComponents(config(place))
    assert parts.texts.packing == "documents"
    assert folders(place) == names  # nothing was made anew
    batch = next(parts.data)
    (tokens,) = parts.tokens
    assert batch["mask"].sum() < (batch["documents"] > 0).sum()
    assert tokens.meta.documents == 24


def test_a_run_is_asked_by_the_template_and_answers_to_the_end_of_its_turn(place, capsys):
    if not (place / "run").exists():
        train(config(place))
    asked = ["generate", str(place / "run"), "--chat", "--prompt", "<|im_end|>3?", "--tokens", "8"]
    assert main([*asked, "--temperature", "0"]) == 0
    answer = capsys.readouterr().out
    assert "<|im" not in answer
    assert "3?" not in answer
    preset = RunComponents(replace(config(place), model=ModelConfig(preset="gpt-tiny")))
    with pytest.raises(ValueError, match=r"--chat: .* did not begin with --model\.pretrained"):
        preset.texts.answer_prompt(None, None, "3?", 8, Sampling())  # type: ignore[arg-type]


def test_the_template_the_turns_the_date_and_the_bytes_of_the_file_are_the_key(place):
    text = (place / "train.jsonl").read_text()
    for change in (
        *({"template": place / "tagged.jinja"}, {"turns": "each"}, {"date": "2026-11-29"}),
        {"train": (str(place / "other.jsonl"),)},
    ):
        (place / "other.jsonl").write_text(text.replace("data", "pipe"))
        before = set(folders(place))
        tokens = RunComponents(config(place, **{"valid": None, **change})).tokens[0]
        assert len(set(folders(place)) - before) == 1, change
        assert tokens.meta.documents == 24


def test_the_loss_weighs_tokens_or_chats_and_several_sets_mix(place):
    both = (str(place / "train.jsonl"), str(place / "held.jsonl"))
    parts = RunComponents(config(place, train=both, loss_per="example"))
    batch = next(parts.data)
    numbers = batch["documents"].max(axis=1)
    np.testing.assert_allclose(batch["mask"].sum(axis=1), numbers, rtol=1e-5)


REFUSED = {
    r"--data\.loss-per example beside --data\.packing stream": {
        **{"loss_per": "example", "packing": "stream"}
    },
    r"--data\.turns some: all or each": {"turns": "some"},
    r"--data\.date 29 Nov: a date as 2024-07-26": {"date": "29 Nov"},
    r"holds conversations, which are read whole": {"packing": "stream"},
    r"--data\.template .*nowhere: no such file": {"template": Path("nowhere")},
    r"--data\.train .*gone\.jsonl: it is missing": {"train": ("gone.jsonl",)},
    r"--data\.turns each: it is of chats, and --data": {
        "turns": "each",
        "train": (),
        "valid": None,
    },
}


@pytest.mark.parametrize("message", REFUSED)
def test_a_configuration_that_makes_no_chats_is_refused(place, message):
    with pytest.raises(ValueError, match=message):
        _ = RunComponents(config(place, **REFUSED[message])).data


def test_chats_need_the_tokenizer_and_the_template_of_a_model(place, tmp_path):
    preset = replace(config(place), model=ModelConfig(preset="gpt-tiny"))
    with pytest.raises(ValueError, match=r"train\.jsonl: conversations are written by .* --model"):
        _ = RunComponents(preset).data
    bare = small_folder(tmp_path / "bare")
    without = replace(config(place), model=ModelConfig(pretrained=str(bare), seq_len=31))
    with pytest.raises(ValueError, match=r"bare has no chat template .*--data\.template FILE"):
        _ = RunComponents(without).data
    (bare / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        _ = RunComponents(without).data
