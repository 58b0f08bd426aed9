"""The recipes of hfjax/configs: each is read, laid out, traced, and fits by the plan's formulas."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from hfjax.__main__ import main
from hfjax.analysis.targets import can_compile_for_gpus
from hfjax.planner.candidate import Candidate
from hfjax.planner.make_plan import BuildCheck, empty_plan, fits_memory
from hfjax.trainer import load
from hfjax.trainer.recipes import recipe_files, recipe_title
from tests.small_run import corpus
from tests.weightless import QWEN3, QWEN3_30B_A3B, write_folder

VOCABULARIES = {"gpt2-124m": 50257, "llama3-8b": 128256}
WEIGHTS = {"qwen3-0.6b": QWEN3, "qwen3-30b-a3b": QWEN3_30B_A3B}
PLAN = re.compile(
    r"# (?P<layout>.*): (?P<seconds>[\d.]+) s a step of (?P<tokens>[\d,]+) tokens, (?P<gib>\d+) of"
)


def _plan(name, tmp_path):
    """Return the plan, without entries, of a recipe on the GPUs of its title."""
    path = recipe_files()[name]
    config = load(path)
    if name in WEIGHTS:
        folder = write_folder(tmp_path / "model", WEIGHTS[name])
        config = replace(config, model=replace(config.model, pretrained=str(folder)))
    title = re.search(r"(\d+) (H\d+)", recipe_title(path))
    assert title is not None
    count, gpu = int(title[1]), title[2].lower()
    return empty_plan(config, gpu=gpu, count=count, vocab=VOCABULARIES.get(name))


@pytest.mark.auto_precision
@pytest.mark.short("gpt2-124m", "qwen3-0.6b")
@pytest.mark.parametrize("name", recipe_files())
def test_a_recipe_runs_where_it_says_and_takes_what_it_says(name, tmp_path):
    plan = _plan(name, tmp_path)
    candidate = Candidate.of(plan.config, plan.count)
    assert BuildCheck(plan.scorer).refusal(candidate) is None  # its layout and step
    scored = plan.scorer.score(candidate)  # reads the step's traces
    assert fits_memory(scored, plan.memory)
    said = PLAN.search(recipe_files()[name].read_text())
    assert said is not None
    assert said["layout"] == str(candidate)
    tokens = plan.config.global_batch_size * plan.scorer.length
    assert said["tokens"] == f"{tokens:,}"
    if not can_compile_for_gpus():
        return  # without the GPU's kernels, the formulas say more of both
    assert float(said["seconds"]) == pytest.approx(scored.time.total, rel=0.1)
    assert int(said["gib"]) == round(scored.peak.total / 2**30)


def test_recipes_are_listed_and_shown(capsys):
    assert main(["recipes"]) == 0
    listed = capsys.readouterr().out
    assert "llama3-8b      Llama 3 8B from random weights, on 8 H100" in listed
    assert main(["recipes", "gpt2-124m"]) == 0
    assert capsys.readouterr().out == recipe_files()["gpt2-124m"].read_text()


def test_flags_replace_settings_of_a_recipe_whose_data_is_there(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    data = corpus(tmp_path)
    small = "--model.num-layers 1 --model.num-heads 2 --model.hidden-size 32 --model.seq-len 16"
    short = "--steps 2 --global-batch-size 8 --gradient-accumulation-steps 1 --devices 1"
    few = "--eval.interval 0 --log.sample-tokens 0 --lr-schedule.warmup-steps 1"
    flags = f"{small} {short} {few}".split()
    assert main(["train", "--recipe", "gpt2-124m", "--data.train", str(data), *flags]) == 0
    assert "gpt-small: " in capsys.readouterr().out
    saved = load(Path("runs/gpt-small/config.yaml"))
    assert (saved.optimizer.learning_rate, saved.checkpoint.interval) == (6e-4, 1000)
    assert saved.data.train == (str(data),)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--recipe gpt2-124m", r"reads tokens from data/tokens, which is not there\. Make them"),
        ("--recipe=gpt2", r"--recipe gpt2: one of gpt2-124m, .* Did you mean gpt2-124m\?"),
        ("--recipe", r"--recipe: the name of a recipe is expected"),
        ("--recipe gpt2-124m --config a.yaml", r"--recipe and --config: settings come from one"),
        ("--config a.yaml --config b.yaml", r"--config and --config: settings come from one file"),
    ],
)
def test_a_recipe_that_cannot_be_is_refused(flags, told, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["train", *flags.split()])
    assert ended.value.code == 2
    assert re.search(told, capsys.readouterr().err)
    assert not list(tmp_path.iterdir())


def test_a_recipe_that_does_not_exist_is_refused_by_all_commands(capsys):
    for command in ("plan", "memory"):
        with pytest.raises(SystemExit):
            main([command, "--recipe", "llama"])
        assert f"hfjax {command}: --recipe llama: one of gpt2-124m" in capsys.readouterr().err
        with pytest.raises(SystemExit):
            main([command, "--recipe", "gpt2-124m"])
        assert re.search(r"which is not there\. .* or give --vocab N", capsys.readouterr().err)
    assert main(["recipes", "llama"]) == 2
    assert "--recipe llama: one of gpt2-124m" in capsys.readouterr().err
