"""A run: it trains, writes what it did, stops and goes on, on other devices too."""

import json
import os
from dataclasses import fields, replace
from pathlib import Path
from shutil import copytree, rmtree
from typing import Any, ClassVar, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import hfjax
from hfjax.cli.arguments import parse_flags
from hfjax.cli.memory.settings import memory_settings
from hfjax.cli.train import Generate
from hfjax.data import Loader, prepare
from hfjax.distributed.watchdog import Watchdog
from hfjax.models.llama import LlamaConfig
from hfjax.trainer import RunComponents, TrainConfig, evaluate, generate, load, train
from hfjax.trainer.config import (
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    LRScheduleConfig,
    MeshConfig,
    ModelConfig,
    OffloadConfig,
    OptimizerConfig,
    PipelineConfig,
)
from hfjax.trainer.logs.console import step_line
from hfjax.trainer.logs.metrics_file import MetricsFile, read_metrics
from hfjax.trainer.model import choose_model, presets
from hfjax.trainer.profile import Profile
from hfjax.trainer.sampling import Sampling
from hfjax.trainer.strategy import choose_strategy
from hfjax.trainer.train_loop import Run, restore_loader
from tests.full_disk import allowed_bytes
from tests.small_run import (
    BIGRAMS,
    EVAL,
    MODEL,
    NO_EVAL,
    QUIET,
    STACK,
    corpus,
    open_trackers,
    small as small_gpt,
    told,
)

pytestmark = pytest.mark.usefixtures("shown_log")

ROOT = Path(__file__).parents[1]
ONE = MeshConfig(data=1)
FIRST_TABLE = -7.972391  # the sum of the table of bigrams, with seed 0


def small(directory: Path, text: Path, **changes: Any) -> TrainConfig:
    """A small run; where nothing looks into its model, of one that compiles quickly."""
    return small_gpt(directory, text, **({"model": STACK} | changes))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory, data):
    """A run that nobody disturbed, on one device."""
    directory = tmp_path_factory.mktemp("runs") / "whole"
    return directory, train(small(directory, data, mesh=ONE))


@pytest.fixture(scope="module")
def begun(tmp_path_factory, data):
    """The same run, stopped after its first step."""
    directory = tmp_path_factory.mktemp("runs") / "begun"
    stopped = train(small(directory, data, mesh=ONE, max_runtime=0.0))
    assert (stopped.step, stopped.reason) == (1, "asked")
    assert hfjax.latest_step(directory / "checkpoints") == 1
    return directory


class Heard(Watchdog):
    """A watchdog that ends nothing, and writes down what it hears beside what else happens."""

    events: ClassVar[list[str]] = []
    slow: ClassVar[list[str]] = []

    def __init__(self, timeout):
        super().__init__(None)

    def beat(self, doing):
        self.events.append("beat")

    def allow(self, seconds, doing):
        self.slow.append(doing)
        return super().allow(seconds, doing)


@pytest.mark.slow
def test_a_run_gives_a_sign_of_life_for_each_batch(data, tmp_path, monkeypatch):
    monkeypatch.setattr(Heard, "events", [])
    monkeypatch.setattr("hfjax.trainer.train_loop.Watchdog", Heard)
    read = Loader.__next__
    monkeypatch.setattr(Loader, "__next__", lambda me: Heard.events.append("batch") or read(me))
    tell = Run._log_step
    monkeypatch.setattr(Run, "_log_step", lambda me, x: Heard.events.append("waits") or tell(me, x))
    keep = CheckpointConfig(interval=4)
    train(small(tmp_path, data, model=BIGRAMS, mesh=ONE, steps=9, checkpoint=keep))
    told = " ".join(Heard.events)
    assert told.count("batch") == 9 + 2 * 3  # steps, and two validations
    slow = [
        "downloading",
        "preparing",
        "the first step",
        "saving a checkpoint",
        "the first validation",
    ]
    slow += ["saving a checkpoint", "saving a checkpoint", "writing the last checkpoint"]
    assert Heard.slow == slow
    for silence in ("batch batch", "batch waits", "waits waits"):
        assert silence not in told


@pytest.mark.slow
def test_a_run_that_is_told_to_stop_saves_and_leaves_though_a_validation_is_due(data, tmp_path):
    """It validates first when it goes on, once; however often it is stopped."""
    config = small(tmp_path / "run", data, model=BIGRAMS, mesh=ONE, steps=3, eval=EvalConfig(1, 3))
    train(replace(config, run_dir=tmp_path / "undisturbed"))
    wanted = told(tmp_path / "undisturbed", "valid_loss")
    assert list(wanted) == [1, 2, 3]
    for step in (1, 2):
        stopped = train(replace(config, max_runtime=0.0))
        assert (stopped.step, stopped.reason) == (step, "asked")
        assert list(told(tmp_path / "run", "valid_loss")) == [*wanted][: step - 1]
        assert hfjax.latest_step(tmp_path / "run" / "checkpoints") == step
    train(config)
    assert told(tmp_path / "run", "valid_loss") == wanted
    train(replace(config, max_runtime=0.0))  # complete: nothing is left
    assert told(tmp_path / "run", "valid_loss") == wanted


@pytest.mark.slow
def test_a_run_whose_output_nobody_reads_any_more_saves_and_goes_on_later(
    data, tmp_path, monkeypatch, capfd
):
    rare = {"log": replace(QUIET, interval=1), "eval": NO_EVAL}
    rare["checkpoint"] = CheckpointConfig(interval=100)
    config = small(tmp_path, data, model=BIGRAMS, mesh=ONE, **rare)
    reader, writer = os.pipe()
    write = MetricsFile.log
    leave = lambda me, step, values: (step == 3 and os.close(reader), write(me, step, values))
    with open(writer, "w") as unread, monkeypatch.context() as patch:
        patch.setattr("sys.stdout", unread)
        patch.setattr(MetricsFile, "log", leave)
        stopped = train(config)
    assert stopped.reason == "stdout"
    assert hfjax.latest_step(tmp_path / "checkpoints") == stopped.step == 7
    assert "standard output: Broken pipe: stopping after this step\n" in capfd.readouterr().err
    assert train(config).step == 12


@pytest.mark.slow
def test_a_run_learns_and_leaves_metrics_configuration_plot_and_checkpoints(whole, data):
    directory, result = whole
    losses = told(directory)
    assert list(losses) == list(range(12))
    assert result.step == 12
    assert result.loss == losses[11] < losses[0] - 0.5
    assert list(told(directory, "valid_loss")) == [6, 12]
    assert result.valid_loss == told(directory, "valid_loss")[12]
    kept = small(directory, data, mesh=ONE, devices=None, precision="stored")
    assert load(directory / "config.yaml") == kept
    assert (directory / "loss.png").read_bytes()[:4] == b"\x89PNG"
    assert hfjax.latest_step(directory / "checkpoints") == 12
    assert result.reason is None


def test_a_run_that_is_complete_does_nothing_more(whole, data, capsys):
    directory, result = whole
    again = train(small(directory, data, mesh=ONE))
    said = capsys.readouterr().out
    assert (
        f"{directory} is complete: 12 steps, nothing was trained. To train on: --steps 24" in said
    )
    assert (
        f"anew: --run-dir ANOTHER, or --checkpoint.init-from {directory} --run-dir ANOTHER" in said
    )
    assert (again.step, again.loss) == (12, None)
    jax.tree.map(
        np.testing.assert_array_equal,
        hfjax.full_array(again.state.params),
        hfjax.full_array(result.state.params),
    )


@pytest.mark.slow
def test_other_settings_are_told_where_a_run_goes_on_and_do_not_replace_those_of_a_complete_one(
    tmp_path, data, capsys
):
    config = small(tmp_path, data, model=BIGRAMS, mesh=ONE, steps=2)
    train(config)
    assert "settings that changed" not in capsys.readouterr().out
    (tmp_path / "metrics.jsonl").write_text("")
    train(replace(config, precision="bf16", steps=3))
    said = capsys.readouterr().out
    assert f"{tmp_path}/metrics.jsonl has no line of steps 0-1 (the file counts from 0)\n" in said
    told = "--steps 3 (before: --steps 2), --precision bf16 (before: --precision stored)\n"
    assert f"settings that changed: {told}" in said
    written = (tmp_path / "config.yaml").read_text()
    train(replace(config, precision="fp32", steps=1))  # it has taken three
    assert (tmp_path / "config.yaml").read_text() == written


def test_other_data_to_validate_on_is_told_where_a_run_goes_on(tmp_path, data, capsys):
    copytree(data, tmp_path / "data")
    config = small(tmp_path / "run", tmp_path / "data", model=BIGRAMS, mesh=ONE, steps=2)
    train(config)
    rmtree(tmp_path / "data" / "valid")
    copytree(data / "train", tmp_path / "data" / "valid")
    changed = "the data to validate on is not what it was: do not compare losses of validations"
    for steps in (3, 4):
        capsys.readouterr()
        train(replace(config, steps=steps))
        told = f"{changed} after step 2 with those before\n"
        assert (told in capsys.readouterr().out) == (steps == 3)


def test_a_start_beside_checkpoints_is_told_to_be_left(tmp_path, data, capsys, monkeypatch):
    config = small(tmp_path / "first", data, model=BIGRAMS, mesh=ONE, steps=1)
    train(config)
    monkeypatch.chdir(tmp_path)
    config = replace(config, run_dir=Path("run"), checkpoint=CheckpointConfig(init_from="first"))
    train(config)
    capsys.readouterr()
    train(replace(config, steps=2))
    train(replace(load("run/config.yaml"), steps=3, devices=1))  # whose paths are whole
    assert "is not read" not in capsys.readouterr().out
    train(replace(config, steps=4, checkpoint=CheckpointConfig(init_from="another")))
    said = (
        "--checkpoint.init-from another is not read: run has checkpoints. To begin with its param"
    )
    assert said in capsys.readouterr().out


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "loss.png", "deepspeed.json"])
def test_a_folder_in_the_place_of_a_file_of_a_run_is_named(tmp_path, data, name, capsys):
    (tmp_path / name).mkdir()
    with pytest.raises(ValueError, match=rf"/{name} is a folder: an ordinary file is expected\.$"):
        train(small(tmp_path, data, model=BIGRAMS, mesh=ONE))
    assert capsys.readouterr().out == ""


def test_odd_characters_in_the_name_of_a_run_are_told_by_their_codes(tmp_path, data, capsys):
    odd = tmp_path / "red\x1b\nrun $\u202e$"
    config = small(odd, data, model=BIGRAMS, mesh=ONE, steps=1)
    for steps in (1, 2, 2):
        train(replace(config, steps=steps))
    said = capsys.readouterr().out
    name = rf"{tmp_path}/red\x1b\nrun $\u202e$"
    for words in (
        f"  run_dir: {name}\n",
        f"done: 1 steps; {name} has the checkpoints",
        f"going on after step 1 of {name}\n",
        f"{name} is complete: 2 steps",
        f"--checkpoint.init-from {name} --run-dir",
    ):
        assert words in said, words
    assert "\x1b" not in said
    assert (odd / "loss.png").is_file()
    with pytest.raises(ValueError, match=r"/run\\udcff/checkpoints: .* could not be read"):
        train(replace(config, run_dir=tmp_path / "run\udcff"))


def test_a_run_whose_folder_is_moved_leaves_one_that_can_be_used(
    tmp_path, data, capsys, monkeypatch
):
    place, write = tmp_path / "run", MetricsFile.log
    config = small(place, data, model=BIGRAMS, mesh=ONE, steps=4)
    move = lambda me, step, values: (
        write(me, step, values),
        step == 1 and "loss" in values and place.rename(tmp_path / "moved"),
    )
    monkeypatch.setattr(MetricsFile, "log", move)
    with pytest.warns(RuntimeWarning, match="/run/checkpoints was moved"):
        train(config)
    lost = "the checkpoints, but no metrics: it was moved or deleted while the run went on\n"
    assert f"done: 4 steps; {place} has {lost}" in capsys.readouterr().out
    assert load(place / "config.yaml") == load(tmp_path / "moved" / "config.yaml")
    assert list(told(tmp_path / "moved")) == [0, 1, 2, 3]


@pytest.mark.slow
def test_a_run_that_stops_at_a_step_which_is_just_being_saved_has_it(tmp_path, data):
    every = CheckpointConfig(interval=1)
    config = small(tmp_path, data, model=BIGRAMS, mesh=ONE, checkpoint=every, max_runtime=0.0)
    stopped = train(config)
    assert (stopped.step, stopped.reason is None) == (1, False)
    assert train(replace(config, max_runtime=None, steps=2)).step == 2


def test_a_run_that_was_stopped_goes_on_bit_for_bit(whole, begun, data, tmp_path):
    copytree(begun, tmp_path, dirs_exist_ok=True)
    assert train(small(tmp_path, data, mesh=ONE)).step == 12
    assert told(tmp_path) == told(whole[0])
    assert told(tmp_path, "valid_loss") == told(whole[0], "valid_loss")


@pytest.mark.parametrize(
    ("strategy", "changes"),
    [
        (
            hfjax.HSDP | hfjax.TENSOR,
            {
                "mesh": MeshConfig(fsdp=2, tensor=2, data=2),
                "sequence_parallel": False,
                "gradient_accumulation_steps": 2,
            },
        ),
        pytest.param(hfjax.ZERO1, {"mesh": MeshConfig(data=8), "zero": 1}, marks=pytest.mark.slow),
        pytest.param(hfjax.DDP, {"mesh": MeshConfig(data=4)}, marks=pytest.mark.slow),
        pytest.param(
            hfjax.FSDP | hfjax.HOST_OPTIMIZER,
            {
                "mesh": MeshConfig(fsdp=2),
                "offload": OffloadConfig("0.5", optimizer=True),
                "remat": "dots",
            },
            marks=pytest.mark.slow,
        ),
    ],
    ids=["fsdp+tensor", "zero1", "ddp", "fsdp+host_optimizer"],
)
def test_a_run_goes_on_under_another_strategy(whole, begun, data, tmp_path, strategy, changes):
    copytree(begun, tmp_path, dirs_exist_ok=True)
    config = small(tmp_path, data, eval=NO_EVAL, **changes)
    assert choose_strategy(config) == strategy
    train(config)
    found, wanted = told(tmp_path), told(whole[0])
    np.testing.assert_allclose(list(found.values()), list(wanted.values()), rtol=1e-4)


@pytest.mark.slow
def test_a_run_whose_whole_state_lies_on_the_host_updates_layer_by_layer(data, tmp_path):
    plain = OptimizerConfig(learning_rate=1e-2, max_grad_norm=None)
    given = {"optimizer": plain, "steps": 3, "mesh": ONE, "eval": NO_EVAL}
    train(small(tmp_path / "here", data, **given))
    given["optimizer"] = replace(plain, in_backward=True)
    given |= {"offload": OffloadConfig(optimizer=True, parameters=True), "remat": "full"}
    given["mesh"] = MeshConfig(fsdp=2)
    train(small(tmp_path / "there", data, **given))
    found, wanted = told(tmp_path / "there"), told(tmp_path / "here")
    np.testing.assert_allclose(list(found.values()), list(wanted.values()), rtol=1e-5)


OWN_STEP = {"mesh": ONE, "precision": "bf16", "remat": "dots", "offload": OffloadConfig("0.3")}
OWN_STEP |= {"on_nonfinite": "skip", "gradient_accumulation_steps": 2}
SPREAD = {"mesh": MeshConfig(fsdp=2, tensor=2), "sequence_parallel": False}
SPREAD["tensor_overlap_chunks"] = 2
DEEP = replace(STACK, factory=f"{ROOT}/tests/small_model.py:deep")
PIPED = {"mesh": MeshConfig(pipe=2), "model": DEEP}


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        (
            OWN_STEP,
            {
                **{"precision": "bf16", "remat": "dots", "offload": "0.3", "on_nonfinite": "skip"},
                "gradient_accumulation_steps": 2,
            },
        ),
        (SPREAD | {"kernels": "xla"}, {"tensor_overlap_chunks": 2, "kernels": "xla"}),
        ({"mesh": ONE, "optimizer": OptimizerConfig(max_grad_norm=0.25)}, {"max_grad_norm": 0.25}),
        (
            {"mesh": ONE, "optimizer": OptimizerConfig(max_grad_norm=float("inf"))},
            {"max_grad_norm": None},
        ),
        ({"mesh": ONE, "optimizer": OptimizerConfig(max_grad_norm=1e39)}, {"max_grad_norm": None}),
        (
            {"mesh": ONE, "optimizer": OptimizerConfig(max_grad_norm=None, in_backward=True)},
            {"max_grad_norm": None, "optimizer_in_backward": True},
        ),
        (
            PIPED | {"pipeline": PipelineConfig("interleaved", 4, chunks=2)},
            {"schedule": hfjax.Schedule("interleaved", 4, 2)},
        ),
    ],
    ids=[
        "a step of ones own",
        "parts of rows",
        "max_grad_norm",
        "no clip",
        "clips nothing",
        "in backward",
        "pipeline",
    ],
)
def test_what_is_set_is_how_the_step_runs(data, tmp_path, changes, fields):
    parts, wanted = RunComponents(small(tmp_path, data, **changes)), hfjax.Execution(**fields)
    found = hfjax.Execution(**parts.execution)
    for name in fields:
        assert getattr(found, name) == getattr(wanted, name), name


@pytest.mark.slow
def test_a_run_starts_in_a_pipeline_and_goes_on_without_one(whole, data, tmp_path):
    pipeline = {"mesh": MeshConfig(pipe=2, data=2), "pipeline": PipelineConfig("1f1b", 2)}
    piped = small(tmp_path, data, eval=NO_EVAL, **pipeline)
    assert train(replace(piped, max_runtime=0.0)).step == 1
    train(replace(piped, mesh=MeshConfig(fsdp=2)))
    found, wanted = told(tmp_path), told(whole[0])
    np.testing.assert_allclose(list(found.values()), list(wanted.values()), rtol=1e-4)


@pytest.mark.slow
def test_documents_an_average_and_the_best_checkpoint(data, tmp_path):
    config = small(
        tmp_path,
        data,
        data=DataConfig(train=(str(data),), packing="documents"),
        optimizer=OptimizerConfig(
            learning_rate=1e-2, ema=0.5, frozen=("positions",), lr_factors=("tokens=2",)
        ),
        lr_schedule=LRScheduleConfig(warmup_steps=3),
        checkpoint=CheckpointConfig(interval=6, keep_latest=1, keep_best=True),
    )
    result = train(config)
    parts = RunComponents(config)
    assert parts.valid is not None
    found = evaluate(parts.evaluate, hfjax.optimizers.averaged(result.state), parts.valid, 3)
    assert found.loss == pytest.approx(result.valid_loss, rel=1e-6)
    plain = evaluate(parts.evaluate, result.state, parts.valid.rewind(), 3)
    assert plain.loss != found.loss
    saved = hfjax.restore(tmp_path / "checkpoints", parts.layout)
    assert saved.metrics == {"valid_loss": result.valid_loss}


def test_a_run_of_ones_own_model_loss_and_optimizer(data, tmp_path):
    name = f"{ROOT / 'examples' / 'my_model.py'}:"
    config = small(
        tmp_path,
        data,
        model=ModelConfig(factory=f"{name}make", loss=f"{name}loss", seq_len=16),
        optimizer=OptimizerConfig(factory=f"{name}optimizer", learning_rate=0.1),
        lr_schedule=LRScheduleConfig(warmup_steps=1),
    )
    result = train(config)
    assert told(tmp_path)[11] < told(tmp_path)[0] - 0.5
    assert result.state.params["table"].shape == (256, 256)


@pytest.mark.slow
def test_a_llama_is_a_preset_too(data, tmp_path):
    model = replace(MODEL, preset="llama-tiny")
    config = small(tmp_path, data, steps=1, model=model, mesh=ONE, eval=NO_EVAL)
    assert RunComponents(config).model.shape.kv_heads == 1
    assert train(config).step == 1


def test_flags_say_all_widths_of_a_llama():
    flags: Any = {"num_layers": 80, "num_heads": 64, "hidden_size": 8192}
    flags |= {"num_kv_heads": 8, "intermediate_size": 28672}
    of = lambda preset, **sizes: (
        choose_model(TrainConfig(model=ModelConfig(preset=preset, **sizes)), 32000).shape
    )
    wanted = LlamaConfig(layers=80, heads=64, embed=8192, kv_heads=8, mlp=28672)
    assert of("llama2-7b", **flags) == wanted
    assert of("llama2-7b", **flags, head_dim=64).width == 64
    expert = of("mixtral-tiny", intermediate_size=96, num_kv_heads=2)
    assert (expert.mlp, expert.kv_heads) == (96, 2)


@pytest.mark.slow
def test_a_preset_with_experts_tells_how_even_their_loads_are(data, tmp_path, capfd):
    model = replace(MODEL, preset="mixtral-tiny", num_experts=4, top_k=1, capacity_factor=1.0)
    spread = {"zero": 3, "mesh": MeshConfig(expert=2)}
    log = replace(QUIET, interval=1)
    config = small(tmp_path, data, steps=3, model=model, log=log, eval=NO_EVAL, **spread)
    assert train(config).step == 3
    lines = [line for line in read_metrics(tmp_path / "metrics.jsonl") if "loss" in line]
    assert all(1 <= line["load_max_over_mean"] <= 4 for line in lines)
    assert all(0 <= line["dropped_mean"] < 1 for line in lines)
    assert all(line["token_loss"] < line["loss"] for line in lines)
    said = capfd.readouterr().out
    assert "experts on 2 devices; bytes" in said
    assert "load of experts" in said


def test_a_run_begins_with_the_parameters_of_another(whole, data, tmp_path):
    directory, result = whole
    config = small(tmp_path, data, mesh=ONE, checkpoint=CheckpointConfig(init_from=str(directory)))
    first = train(replace(config, max_runtime=0.0))
    assert told(tmp_path)[0] < told(directory)[4]
    assert first.step == 1
    assert result.step == 12


@pytest.mark.slow
def test_the_data_ends_and_so_does_the_run(data, tmp_path, capsys):
    once = DataConfig(train=(str(data),), epochs=1)
    config = small(tmp_path, data, model=BIGRAMS, mesh=ONE, steps=500, data=once)
    result = train(config)
    assert result.step == RunComponents(config).data.examples_per_epoch // 16
    assert "the data ends after 1 epochs" in capsys.readouterr().out
    train(config)
    assert "nothing was trained. To train on: --data.epochs 2" in capsys.readouterr().out


def test_a_profile_is_written(data, tmp_path, capsys):
    train(small(tmp_path, data, model=BIGRAMS, steps=4, profile="1:3", mesh=ONE))
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))
    assert "trace of steps 1 to 2" in capsys.readouterr().out


def test_tensorboard_gets_the_same_numbers(data, tmp_path):
    log = replace(QUIET, tensorboard=True)
    train(small(tmp_path, data, model=BIGRAMS, mesh=ONE, steps=2, log=log))
    assert list((tmp_path / "tensorboard").glob("events.out.tfevents.*"))


def test_a_journal_drops_the_steps_that_are_done_again(tmp_path):
    with open_trackers(tmp_path) as journal:
        for step in range(6):
            journal.log(step, loss=float(step))
        journal.log(4, valid_loss=0.5)
        journal.log(6, valid_loss=0.25)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')  # killed
    with open_trackers(tmp_path, 4):
        pass
    assert told(tmp_path) == {0: 0.0, 1: 1.0, 2: 2.0, 3: 3.0}
    assert told(tmp_path, "valid_loss") == {4: 0.5}


def test_lines_that_a_journal_drops_are_kept_beside_it(tmp_path):
    for steps, start in ((4, 0), (2, 3), (0, 0)):
        with open_trackers(tmp_path, start) as journal:
            for step in range(start, start + steps):
                journal.log(step, loss=float(step))
    lines = [json.loads(text) for text in (tmp_path / "metrics.dropped.jsonl").open()]
    assert [line["step"] for line in lines] == [3, 0, 1, 2, 3, 4]
    assert told(tmp_path) == {}
    place = tmp_path / "metrics.dropped.jsonl"
    assert journal.file.notes == [
        f"5 lines of metrics.jsonl moved to {place}: no checkpoint is left, so the run begins anew"
    ]


def test_holes_in_a_journal_are_told_in_one_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    notes = lambda start: open_trackers(tmp_path, start).file.notes
    assert notes(0) == []
    assert notes(9) == [f"{path} has no line of steps 0-8 (the file counts from 0)"]
    steps = [0, 1, 1, 4, 5, 6, 8, 6, 5]
    path.write_text("".join(f'{{"step": {step}, "loss": 1.0}}\n' for step in steps))
    assert notes(9) == [
        f"{path} has no line of steps 2-3, 7 and several of steps 1, 5-6 (the file counts from 0)"
    ]
    path.write_text("".join(f'{{"step": {step}, "loss": null}}\n' for step in range(9)))
    assert notes(9) == []
    path.write_text("".join(f'{{"step": {step}, "loss": 1.0}}\n' for step in range(0, 80, 2)))
    assert notes(80) == [
        f"{path} has no line of steps 1, 3, 5, 7, 9, 11 and 34 more (the file counts from 0)"
    ]


def test_a_run_whose_checkpoints_are_out_of_reach_does_not_begin_anew(data, tmp_path, capsys):
    run, disk = tmp_path / "run", tmp_path / "disk"
    disk.mkdir()
    run.mkdir()
    (run / "checkpoints").symlink_to(disk)
    config = small(run, data, model=BIGRAMS, mesh=ONE, steps=2, eval=NO_EVAL)
    train(config)
    before = (run / "metrics.jsonl").read_text()
    disk.rename(tmp_path / "not mounted")
    refused = rf"{run}/metrics.jsonl is of a run, .* out of reach: {run}/checkpoints is "
    with pytest.raises(ValueError, match=rf"{refused}a link to {disk}, which is not there\."):
        train(config)
    disk.mkdir()  # where it is mounted
    with pytest.raises(ValueError, match=rf"{refused}a folder without .*mv {run}/metrics"):
        train(config)
    (run / "checkpoints").unlink()
    with pytest.raises(ValueError, match=rf"{refused}missing\."):
        train(config)
    assert (run / "metrics.jsonl").read_text() == before
    assert not (run / "checkpoints").exists()
    (run / "metrics.jsonl").rename(run / "metrics.old.jsonl")
    assert train(config).step == 2  # anew, as the message says
    assert list(told(run)) == [0, 1]


def test_a_log_line_tells_what_there_is_to_tell():
    values = {"step": 99, "loss": 1.25, "lr": 3e-4, "grad_norm": 0.5, "memory": 5 * 2**30}
    speed = {"tokens_per_second": 43210.0, "tflops": 387.4, "mfu": 0.4123}
    assert step_line(values | speed, 1000) == (
        "step  100/1000  loss 1.2500  lr 3.00e-04  grad norm 0.500  43.2k tokens/s/device  "
        "387 TFLOP/s/device  MFU 41.2%  memory 5.0 GiB"
    )


# -- evaluation and text ------------------------------------------------------------------


@pytest.mark.slow
def test_an_evaluation_is_the_mean_over_every_row_whatever_the_batch(whole, data):
    directory, _ = whole
    losses = []
    for batch in (8, 24, 40):
        parts = RunComponents(
            small(directory, data, global_batch_size=batch, mesh=MeshConfig(data=8))
        )
        assert parts.valid is not None
        state = hfjax.restore(directory / "checkpoints", parts.layout, parameters_only=True).state
        found = evaluate(parts.evaluate, state, parts.valid)
        assert found.tokens == parts.valid.examples_per_epoch * 16
        losses.append(found.loss)
    assert parts.valid.examples_per_epoch % 40  # the last batch is not full
    np.testing.assert_allclose(losses, losses[0], rtol=1e-6)


def test_an_evaluation_in_which_nothing_weighs_is_refused_in_words():
    step: Any = lambda state, batch: {"loss": 2.5 if batch else np.nan, "weight": batch}
    assert evaluate(step, cast(Any, None), [4.0, 0.0]) == (2.5, 4)
    with pytest.raises(ValueError, match="evaluate: no token of 2 batches has a weight"):
        evaluate(step, cast(Any, None), [0.0, 0.0])


def greedy(parts, state, prompt, count):
    """Write by the likeliest token, plainly."""
    module = nnx.eval_shape(lambda: parts.model.init(nnx.Rngs(0)))
    nnx.update(module, jax.tree.map(jnp.asarray, hfjax.full_array(state.params)))
    graph, arrays = nnx.split(module)
    run = jax.jit(lambda row: nnx.merge(graph, arrays)({"tokens": row}))
    tokens = list(prompt)
    for _ in range(count):
        seen = tokens[-16:]
        row = np.zeros((1, 17), np.int32)
        row[0, : len(seen)] = seen
        tokens.append(int(run(row)[0, len(seen) - 1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.slow
@pytest.mark.parametrize("length", [3, 40])
def test_the_likeliest_text_is_the_same_on_many_devices_and_from_the_host(whole, data, length):
    directory, _ = whole
    prompt = list(b"the mesh of the tensor axis is a row of data")[:length]
    many = {"mesh": MeshConfig(fsdp=2, tensor=2), "sequence_parallel": False}
    host = {"mesh": MeshConfig(fsdp=2), "offload": OffloadConfig(parameters=True)}
    fields = {"length": 16, "vocab": 256, "sampling": Sampling(temperature=0)}
    wanted = greedy(RunComponents(small(directory, data, mesh=ONE)), whole[1].state, prompt, 12)
    for changes in ({"mesh": ONE}, many, host):
        layout = RunComponents(small(directory, data, **changes)).layout
        state = hfjax.restore(directory / "checkpoints", layout, parameters_only=True).state
        assert generate(layout, state, prompt, 12, **fields) == wanted


def test_sampled_text_is_the_same_for_the_same_seed_and_another_for_another(whole, data):
    directory, result = whole
    layout = RunComponents(small(directory, data, mesh=ONE)).layout
    write = lambda **sampling: generate(
        layout, result.state, [100], 24, length=16, vocab=200, sampling=Sampling(**sampling)
    )
    assert write(seed=1) == write(seed=1) != write(seed=2)
    assert max(write(temperature=5.0, top_k=None)) < 200
    assert write(top_k=1) == write(temperature=0)


# -- what is refused ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"strategy": "fsdp+tp"},
            r"--strategy fsdp\+tp: file.py:strategy or package.module:strategy is expected",
        ),
        (
            {"strategy": "fsdp+tensor"},
            r"--strategy fsdp\+tensor: .* Give --mesh.fsdp -1 --mesh.tensor 2 --no-sequence-para",
        ),
        (
            {"strategy": "hfjax:adamw"},
            r"--strategy hfjax:adamw: hfjax has no strategy adamw. There",
        ),
        ({"zero": 1, "mesh": MeshConfig(fsdp=8)}, r"--zero 1 beside --mesh.fsdp 8: .* is ZeRO 3"),
        ({"zero": 1, "strategy": "hfjax:DDP"}, r"--zero 1 beside --strategy hfjax:DDP: the table"),
        ({"zero": 3}, r"--zero 3: parameters are sharded over --mesh.fsdp, which is 1"),
        ({"mesh": MeshConfig(row=2)}, r"--mesh.row 2: a tensor grid has columns too"),
        (
            {"mesh": MeshConfig(fsdp=-1, tensor=-1)},
            r"--mesh.fsdp -1 and --mesh.tensor -1: only one",
        ),
        ({"mesh": MeshConfig(fsdp=0)}, r"--mesh.fsdp 0: a number of devices is needed, or -1"),
        (
            {"model": ModelConfig(loss="os:getcwd")},
            r"--model.loss os:getcwd is <built-in .*: a function ",
        ),
        (
            {"model": ModelConfig(loss="hfjax:latest_step")},
            r"is a function of \(directory: .*outputs, batch",
        ),
        (
            {"global_batch_size": 10**9},
            r"a batch of 1000000000 examples: the data has 315 examples of 16 tokens",
        ),
        ({"mesh": MeshConfig(pipe=-1)}, r"2 layers for 8 parts \(stages x chunks\)"),
        ({"model": ModelConfig(preset="gpt-huge")}, r"--model.preset gpt-huge: one of gpt-tiny, "),
        (
            {"model": ModelConfig(factory="x.py:make")},
            r"--model.factory x.py:make: there is no file x.py",
        ),
        (
            {"model": ModelConfig(factory="make")},
            r"--model.factory make: file.py:function or package",
        ),
        ({"model": ModelConfig(factory="hfjax:mak")}, r"hfjax has no function mak. There: \["),
        (
            {"model": ModelConfig(factory="hfjax:init")},
            r"a function of \(vocab, seq_len\) is expected",
        ),
        (
            {"mesh": MeshConfig(data=3, tensor=4)},
            r"--mesh.data 3 --mesh.tensor 4: 12 devices are needed",
        ),
        (
            {"global_batch_size": 12, "mesh": MeshConfig(data=8)},
            r"batch of 12 examples does not divide by 8 devices",
        ),
        ({"optimizer": OptimizerConfig(name="adamx")}, r"name adamx: optax has no optimizer"),
        (
            {"optimizer": OptimizerConfig(name="rmsprop", weight_decay=0.1)},
            r"optax's rmsprop cannot be told",
        ),
        (
            {"optimizer": OptimizerConfig(name="rmsprop", no_decay=("tokens",))},
            r"no-decay: optax's rmsprop",
        ),
        ({"optimizer": OptimizerConfig(name="lbfgs")}, r"lbfgs cannot be used here: it needs more"),
        ({"optimizer": OptimizerConfig(name="scale_by_learning_rate")}, r"optax has no optimizer"),
        (
            {"optimizer": OptimizerConfig(adam_learning_rate=1e-3)},
            r"adam-learning-rate 0.001: only muon has an AdamW beside it, found .*name adamw",
        ),
        (
            {"optimizer": OptimizerConfig(factory="a:b", adam_learning_rate=1e-3)},
            r"adam-learning-rate beside --optimizer.factory",
        ),
        (
            {"optimizer": OptimizerConfig(factory="hfjax:save")},
            r"a function of the learning rate is exp",
        ),
        (
            {"optimizer": OptimizerConfig(factory="a:b", no_decay=("x",))},
            r"no-decay beside --optimizer.factory",
        ),
        (
            {"optimizer": OptimizerConfig(lr_factors=("tokens=nan",))},
            r"scaled: tokens=nan; a finite factor",
        ),
        (
            {"lr_schedule": LRScheduleConfig(warmup_steps=12)},
            r"to decay after .*Give more --steps, f",
        ),
        ({"model": ModelConfig(preset="bert-tiny")}, r"--model.preset bert-tiny: one of gpt-tiny"),
        ({"model": ModelConfig(preset="llama-tiny", dropout=0.1)}, r"a Llama has no dropout"),
        (
            {"model": ModelConfig(factory="hfjax:init", num_layers=2)},
            r"--model.num-layers is of presets",
        ),
        (
            {"model": ModelConfig(factory="hfjax:init", dropout=0.0)},
            r"--model.dropout is of presets",
        ),
        (
            {"model": ModelConfig(factory="hfjax:init", capacity_factor=0.0)},
            r"--model.capacity-factor is of presets",
        ),
        (
            {"model": ModelConfig(preset="llama-tiny", top_k=2)},
            r"--model.top-k: llama-tiny has no exp",
        ),
        (
            {"model": ModelConfig(num_kv_heads=2)},
            r"--model.num-kv-heads: gpt-tiny is a GPT, .* llama-tiny, lla",
        ),
        (
            {"model": ModelConfig(factory="hfjax:init", num_kv_heads=2)},
            r"--model.num-kv-heads is of presets",
        ),
        ({"data": DataConfig(valid="nowhere")}, r"nowhere"),
        (
            {"optimizer": OptimizerConfig(lr_factors=("tokens",))},
            r"lr-factors tokens: PATTERN=FACTOR",
        ),
        (
            {"model": BIGRAMS, "optimizer": OptimizerConfig(lr_factors=("x=2",))},
            r"pattern 'x' matches no parameter",
        ),
        ({"optimizer": OptimizerConfig(no_decay=("biases",))}, r"'biases' matches no parameter"),
        ({"profile": "5"}, r"--profile 5: FIRST:END is expected, for instance 5:8"),
        ({"data": DataConfig(train=("nowhere",))}, r"nowhere"),
        (
            {"strategy": "hfjax:DDP", "mesh": MeshConfig(tensor=2)},
            r"tensor splits neither the batch nor a parameter under DDP",
        ),
        ({"mesh": MeshConfig(pipe=4)}, r"2 layers for 4 parts \(stages x chunks\)"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused(data, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        train(small(tmp_path, data, **changes))


def test_a_model_that_is_too_short_for_the_rows_is_refused(data, tmp_path):
    parts = RunComponents(small(tmp_path, data))
    with pytest.raises(ValueError, match=r"sequences of 16 tokens, the model has 8 positions"):
        cast(Loader, parts.data).check(256, 8)


def test_another_seed_or_model_does_not_go_on(whole, data):
    config = small(whole[0], data, steps=13, mesh=ONE)
    with pytest.raises(ValueError, match=r"its seed is 0, here it is 1"):
        train(replace(config, seed=1))
    with pytest.raises(
        ValueError, match=r"--model.seq-len 8: .* was trained with --model.seq-len 16"
    ):
        train(replace(config, model=replace(STACK, seq_len=8)))
    with pytest.raises(ValueError, match=r"--checkpoint.resume never: .* the latest of step 12"):
        train(replace(config, checkpoint=CheckpointConfig(resume="never")))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.yaml", "stepps: 3", r"a.yaml:1: no field 'stepps'. Nearest: \['steps'"),
        ("a.yaml", "steps: many", r"a.yaml:1: steps='many': a whole number is expected"),
        ("a.yaml", "mesh: 3", r"a.yaml:1: mesh: fields with values are expected, found '3'"),
        ("a.yaml", "mesh:\n  data: [1]", r"a.yaml:2: mesh: data=\['1'\]: a whole number is"),
        ("a.yaml", "precision: fp8", r"precision='fp8': one of auto, stored, fp32, bf16, fp16"),
        ("a.yaml", "data:\n  train: {}", r"data: train={}: a list is expected"),
        ("a.yaml", "steps: 0", r"--steps 0: a number from 1 on is needed"),
        (
            "a.yaml",
            "offload:\n  activation_words: [dots]",
            r"a.yaml:2: offload: no field 'activation_words'. Nearest: \['activations'",
        ),
        (
            "a.yaml",
            "{",
            r"a.yaml:1 is no YAML: expected the node content, but found",
        ),
        ("a.yaml", "- 1", r"fields with values are expected, found \['1'\]"),
        ("a.yaml", "mesh:\n  data: .inf", r"a.yaml:2: mesh: data='.inf': a whole number is expect"),
        ("a.yaml", "steps: 1e400", r"a.yaml:1: steps='1e400': a whole number is expected"),
        ("a.yaml", "seed: .nan", r"a.yaml:1: seed='.nan': a whole number is expected"),
        ("a.yaml", "log:\n  interval: -1", r"a.yaml:1: log: --log.interval -1: a number from 0 on"),
        (
            "a.yaml",
            "steps: 1\nglobal_batch_size: 2\nsteps: 3",
            r"a.yaml:3 is no YAML: steps is there twice",
        ),
        ("a.yaml", "steps: !!timestamp x", r"a.yaml is no YAML"),
        ("a.yaml", "data: &a {train: *a}", r"a.yaml:1 is no YAML: found unconstructable recurs"),
        ("a.yaml", "run_dir: ''", r"a.yaml:1: run_dir='': a path is expected"),
        ("a.yaml", 'run_dir: "\\ud800"', r"a.yaml:1: run_dir='\\ud800': a path is expected"),
        ("a.py", "f(", r"a.py: '\(' was never closed"),
        ("a.py", "from os import nope", r"a.py: cannot import name 'nope'"),
        (
            "a.py",
            "from hfjax.trainer import TrainConfig\nconfig = TrainConfig(stepz=3)",
            r"a.py: .*stepz",
        ),
        ("a.py", "x = 1", r"a.py: it must define `config`, a hfjax.trainer.TrainConfig; found N"),
        (None, "", r"b.yaml: there is no such file"),
    ],
)
def test_a_configuration_file_that_says_nonsense_is_refused(tmp_path, name, text, message):
    if name:
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        load(tmp_path / (name or "b.yaml"))


def test_a_configuration_comes_from_yaml_or_python(tmp_path):
    (tmp_path / "a.yaml").write_text(
        "steps: 7.0\noptimizer:\n  learning_rate: 3e-4\n  frozen: tokens\n"
    )
    (tmp_path / "a.py").write_text(
        "from hfjax.trainer import TrainConfig\n"
        "from hfjax.trainer.config import OptimizerConfig as Optimizer\n"
        "of = Optimizer(learning_rate=3e-4, frozen=('tokens',))\n"
        "config = TrainConfig(steps=7, optimizer=of)\n"
    )
    wanted = TrainConfig(steps=7, optimizer=OptimizerConfig(learning_rate=3e-4, frozen=("tokens",)))
    assert load(tmp_path / "a.yaml") == load(tmp_path / "a.py") == wanted
    (tmp_path / "empty.yaml").write_text("")
    assert load(tmp_path / "empty.yaml") == TrainConfig()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TrainConfig(steps=0), r"--steps 0: a number from 1 on"),
        (lambda: TrainConfig(seed=2**32), r"--seed 4294967296: a number from 0 to 4294967295"),
        (lambda: TrainConfig(max_runtime=float("nan")), r"--max-runtime nan: a number from 0"),
        (
            lambda: TrainConfig(watchdog_timeout=1e300),
            r"--watchdog-timeout 1e\+300: a number from 1 to 2147483647 is",
        ),
        (
            lambda: TrainConfig(global_batch_size=2**31),
            r"--global-batch-size 2147483648: a number from 1 to 2147483647 is",
        ),
        (
            lambda: TrainConfig(gradient_accumulation_steps=33),
            r"--gradient-accumulation-steps 33: more than --global-batch-size 32 has e",
        ),
        (
            lambda: TrainConfig(mesh=MeshConfig(pipe=2), pipeline=PipelineConfig(microbatches=64)),
            r"microbatches 64:",
        ),
        (
            lambda: TrainConfig(profile="1:99", steps=6),
            r"--profile 1:99: the last step is 5 .* 1:6\.",
        ),
        (lambda: TrainConfig(profile="²:9"), r"--profile ²:9: FIRST:END is expected"),
        (
            lambda: PipelineConfig(schedule="nope"),
            r"--pipeline.schedule nope: no schedule 'nope'. Schedules: g",
        ),
        (
            lambda: OptimizerConfig(learning_rate=1e40),
            r"--optimizer.learning-rate 1e\+40: a number from 0 to 3.4028",
        ),
        (
            lambda: OptimizerConfig(learning_rate=1e-50),
            r"--optimizer.learning-rate 1e-50: that is 0 in float32",
        ),
        (lambda: hfjax.lr_schedule(1e40), r"lr_schedule: peak=1e\+40"),
        (lambda: Sampling(seed=2**32), r"--seed 4294967296: a number from 0 to 4294967295"),
        (
            lambda: TrainConfig(steps=cast("Any", 1.5)),
            r"--steps 1.5: a number from 1 on is .* whole one",
        ),
        (lambda: ModelConfig(num_layers=0), r"--model.num-layers 0: a number from 1 on"),
        (lambda: ModelConfig(dropout=2), r"--model.dropout 2: a fraction from 0 to 1"),
        (lambda: CheckpointConfig(interval=-5), r"--checkpoint.interval -5"),
        (lambda: EvalConfig(max_batches=0), r"--eval.max-batches 0: a number from 1"),
        (lambda: OptimizerConfig(learning_rate=-1.0), r"--optimizer.learning-rate -1.0"),
        (lambda: PipelineConfig(chunks=0), r"--pipeline.chunks 0"),
    ],
)
def test_a_number_out_of_bounds_is_refused_with_its_flag(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_an_empty_value_is_no_folder():
    for words in (["--run-dir="], ["--run-dir", ""], ["--data.train="]):
        with pytest.raises(ValueError, match=f"{words[0][:5]}.*: its value is empty. Give"):
            parse_flags(TrainConfig, words, "train")


def test_seeds_go_up_to_32_bits_and_small_ones_stay_what_they_were(data, tmp_path):
    layout = RunComponents(small(tmp_path, data, model=BIGRAMS, mesh=ONE)).layout
    seeds = (0, 2**31 - 1, 2**31)
    made = {seed: np.asarray(hfjax.init(layout, seed).params["table"]) for seed in seeds}
    assert float(made[0].sum()) == pytest.approx(FIRST_TABLE, abs=1e-4)
    assert len({float(x.sum()) for x in made.values()}) == 3
    unsigned: Any = np.uint32(2**31)
    assert (hfjax.init(layout, unsigned).params["table"] == made[2**31]).all()
    assert (hfjax.init(layout, -1).params["table"] != made[0]).any()
    wrong: Any = (2**32, -(2**31) - 1, 1.5, float("nan"), True, "3", None)
    for seed in wrong:
        wanted = f"seed={seed!r}: a whole number from -2147483648 to 4294967295 is expected"
        with pytest.raises(ValueError, match=wanted):
            hfjax.init(layout, seed)
    config = small(tmp_path, data, model=BIGRAMS, mesh=ONE, seed=2**32 - 1, steps=1)
    assert train(config).step == 1
    assert train(replace(config, steps=2)).step == 2


def test_a_position_that_is_none_is_refused_with_its_file(data, tmp_path):
    config = small(tmp_path, data, model=BIGRAMS, steps=1, mesh=ONE)
    train(config)
    loader, step = RunComponents(config).data, tmp_path / "checkpoints" / "1"
    told = hfjax.checkpoint_metadata(tmp_path / "checkpoints")["data"]
    assert restore_loader(loader, told, step) == 0
    for change, message in (
        ({"data": told["data"] | {"rows": -5}}, r"1/meta/metadata: data: data: rows is -5, a wh"),
        ({"data": told["data"] | {"rows": 10**30}}, r"is at example 10{30}, the data ends at"),
        ({"data": [1]}, r"1/meta/metadata: data: data: an object is expected, found \[1\]"),
        ({"skipped": "x"}, r"1/meta/metadata: data: skipped is 'x', a whole number"),
        ({"skipped": 10**400}, r"skipped is 10+\.\.\.0+, a whole number from 0 to 1"),
    ):
        with pytest.raises(ValueError, match=message):
            restore_loader(loader, told | change, step)
    with pytest.raises(ValueError, match=r"metadata: data: an object is expected, found None"):
        restore_loader(loader, None, step)


def test_a_bit_that_changes_between_a_run_and_its_resumption_is_told(tmp_path):
    text = corpus(tmp_path)
    config = small(tmp_path / "run", text, model=BIGRAMS, steps=1, mesh=ONE)
    train(config)
    path = text / "train" / "tokens.bin"
    tokens = np.fromfile(path, np.uint8)
    tokens[len(tokens) // 2] ^= 1
    tokens.tofile(path)
    with pytest.raises(ValueError, match=r"train/tokens.bin: CRC32 \w+, written was \w+: the file"):
        train(replace(config, steps=2))


def test_a_disk_that_is_full_is_told_in_one_line(data, tmp_path, capfd):
    config = small(tmp_path, data, model=BIGRAMS, mesh=ONE)
    with (
        allowed_bytes(20_000),
        pytest.raises(OSError, match=r"step 5 was not saved .* File too"),
    ):
        train(config)
    said = capfd.readouterr().err.splitlines()
    assert [line for line in said if " … " not in line] == []  # what takes long says so
    assert train(config).step == 12


def test_files_of_a_run_that_do_not_fit_are_named(data, tmp_path, capsys):
    config = small(tmp_path, data, model=BIGRAMS, mesh=ONE, steps=1)
    with allowed_bytes(10), pytest.raises(OSError, match=r"File too large: '.*/config.yaml'"):
        train(config)
    assert not list(tmp_path.glob("*config*"))
    journal = open_trackers(tmp_path)
    journal.log(0, loss=1.0)
    with allowed_bytes(30):
        told = r"metrics.jsonl cannot be written: File too large. What was saved is whole: start"
        with pytest.raises(OSError, match=told):
            journal.log(1, loss=1.0)
        journal.finish()
    assert "loss.png is not drawn: File too large" in capsys.readouterr().out


def test_a_profile_of_steps_that_are_done_is_told(tmp_path, capsys):
    with Profile("1:3", tmp_path) as profile:
        for step in (5, 6):
            profile.before_step(step)
            profile.after_step(step)
    assert capsys.readouterr().out.count("no trace: this run goes on after the steps 1:3") == 1


def test_steps_that_are_not_finite_are_never_saved_over(data, tmp_path):
    """However often it is started again, the run ends at the same step."""
    config = small(
        tmp_path,
        data,
        mesh=ONE,
        optimizer=OptimizerConfig(learning_rate=1e30, max_grad_norm=None),
        lr_schedule=LRScheduleConfig(warmup_steps=0),
        checkpoint=CheckpointConfig(interval=2),
    )
    for _ in range(2):
        with pytest.raises(FloatingPointError, match=r"step 2 is not finite"):
            train(config)
    assert hfjax.latest_step(tmp_path / "checkpoints") is None
    assert set(told(tmp_path)) <= {0, 1}


@pytest.mark.slow
def test_skipped_steps_are_no_updates_for_the_learning_rate(data, tmp_path):
    (tmp_path / "own.py").write_text(
        "import jax.numpy as jnp, hfjax\n"
        "from hfjax.models.gpt import next_token_loss\n"
        "def loss(outputs, batch):\n"
        "    mean = next_token_loss(outputs, batch)\n"
        "    bad = (batch['tokens'][:, 0] == ord('t')).any()\n"
        "    return hfjax.Mean(jnp.where(bad, jnp.nan, mean.total), mean.weight)\n"
    )
    model = replace(BIGRAMS, loss=f"{tmp_path}/own.py:loss")
    config = small(tmp_path, data, mesh=ONE, global_batch_size=4, model=model, on_nonfinite="skip")
    with pytest.warns(RuntimeWarning, match="was skipped"):
        train(config)
    more = replace(config, steps=13)
    train(more)  # goes on
    losses, rates = told(tmp_path), told(tmp_path, "lr")
    skipped, rate = 0, RunComponents(config).rate
    for step in range(12):
        assert rates[step] == pytest.approx(float(rate(step - skipped)))
        skipped += losses[step] is None
    assert 0 < skipped < 12
    assert rates[12] == pytest.approx(float(RunComponents(more).rate(12 - skipped)))


def test_the_best_checkpoint_is_judged_by_its_own_validation(data, tmp_path):
    every = replace(EVAL, interval=4)
    keep = CheckpointConfig(interval=5, keep_latest=1, keep_best=True)
    train(small(tmp_path, data, model=BIGRAMS, mesh=ONE, eval=every, checkpoint=keep))
    found = told(tmp_path, "valid_loss")
    assert list(found) == [4, 5, 8, 10, 12]
    recorded = hfjax.checkpoint_metadata(tmp_path / "checkpoints", 12)
    assert recorded["metrics"] == {"valid_loss": found[12]}


def test_keeping_the_best_without_a_validation_set_is_refused(data, tmp_path):
    alone = DataConfig(train=(str(data / "train"),))
    keep = CheckpointConfig(keep_best=True)
    with pytest.raises(ValueError, match=r"keep-best needs a validation set"):
        train(small(tmp_path, data, data=alone, checkpoint=keep))


def test_a_loss_that_counts_empty_rows_is_refused_where_it_would_matter(data, tmp_path):
    (tmp_path / "own.py").write_text(
        "from hfjax.models.gpt import next_token_loss\n"
        "def loss(outputs, batch):\n"
        "    mean = next_token_loss(outputs, {'tokens': batch['tokens']})\n"
        "    return mean.total / mean.weight\n"
    )
    model = replace(BIGRAMS, loss=f"{tmp_path}/own.py:loss")
    every = replace(EVAL, max_batches=1000)
    with pytest.raises(ValueError, match=r"mask is 0 everywhere by 16: the examples that pad"):
        train(small(tmp_path, data, mesh=ONE, model=model, eval=every))
    assert train(small(tmp_path / "a", data, mesh=ONE, model=model)).valid_loss is not None


def test_other_tokenizers_are_not_mixed(data, tmp_path):
    texts = str(data.parent / "texts")
    for name, part in (("a", "1*.txt"), ("b", "2*.txt")):
        prepare(texts, tmp_path / name, tokenizer="bpe", vocab=270, pattern=part)
    both = DataConfig(train=(str(tmp_path / "a"), str(tmp_path / "b")))
    with pytest.raises(ValueError, match=r"were made by different tokenizers"):
        train(small(tmp_path / "run", data, data=both))
    other = DataConfig(train=(str(tmp_path / "a"),), valid=str(tmp_path / "b"))
    with pytest.raises(ValueError, match=r"were made by different tokenizers"):
        train(small(tmp_path / "run", data, data=other))


@pytest.mark.slow
def test_a_configuration_is_saved_to_be_read_from_any_folder(data, tmp_path, monkeypatch):
    monkeypatch.chdir(data.parent)
    train(small(tmp_path, Path("data"), model=BIGRAMS, steps=1, mesh=ONE))
    assert load(tmp_path / "config.yaml").data.train == (str(data),)


def test_the_page_names_every_field_of_a_step_and_every_preset():
    page = (ROOT / "docs/training.md").read_text(encoding="utf-8")
    missing = [f.name for f in fields(hfjax.Execution) if f"`{f.name}=" not in page]
    assert not missing
    assert not [name for name in presets() if f"`{name}`" not in page]


@pytest.mark.slow
def test_what_belongs_to_a_machine_or_to_one_start_is_not_saved(data, tmp_path):
    keep = CheckpointConfig(interval=5, resume="never")
    here = {"devices": 1, "cpu_devices": 8, "compilation_cache": tmp_path / "cache"}
    once = {"profile": "0:1", "max_runtime": 60.0, "checkpoint": keep}
    config = small(tmp_path / "run", data, model=BIGRAMS, steps=1, **here, **once)
    train(config)
    there = dict.fromkeys([*here, "profile", "max_runtime"]) | {"precision": "stored"}
    resumed = replace(config, checkpoint=replace(keep, resume="auto"), **there)
    assert load(tmp_path / "run" / "config.yaml") == resumed
    assert memory_settings(config).devices is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": -1}, r"temperature=-1"),
        ({"temperature": float("nan")}, r"temperature=nan.*0, or from 1e-30 to 1e\+30"),
        ({"temperature": float("inf")}, r"temperature=inf.*0, or from 1e-30 to 1e\+30"),
        ({"temperature": 1e-40}, r"temperature=1e-40.*0, or from 1e-30 to 1e\+30"),
        ({"temperature": "1"}, r"temperature='1'"),
        ({"temperature": True}, r"temperature=True"),
        ({"top_k": 0}, r"top_k=0: .*at least one token"),
        ({"top_k": 1.5}, r"top_k=1.5: .*a whole number \(top_k=None: all"),
        ({"seed": 1.5}, r"--seed 1.5: a number from 0 to 4294967295 .* a whole one"),
        ({"seed": True}, r"--seed True: a number from 0 to 4294967295"),
    ],
)
def test_sampling_that_makes_no_sense_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**fields)


@pytest.mark.parametrize("given", ["nan", "inf"])
def test_a_temperature_that_is_no_number_is_refused_on_the_command_line(given):
    with pytest.raises(ValueError, match=f"temperature={given}, top_k=40: a temperature"):
        parse_flags(Generate, ["runs/a", "--temperature", given], "generate")


def test_a_prompt_without_a_token_is_refused(whole, data):
    directory, result = whole
    layout = RunComponents(small(directory, data, mesh=ONE)).layout
    with pytest.raises(ValueError, match=r"the prompt has no token. Give some text"):
        generate(layout, result.state, [], 4, length=16, vocab=256)
