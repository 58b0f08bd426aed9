"""Each format that hfjax left on disk before its names were changed is read, and goes on.

The files in tests/formats, and the losses, are of the commit that added them: see make_formats.py.
"""

import json
import zipfile

import jax
import numpy as np
import optax
import pytest

import hfjax
from hfjax import DDP, FSDP, TENSOR, Schedule
from hfjax.__main__ import main
from hfjax.hardware.machine import Machine
from hfjax.trainer import load
from hfjax.trainer.strategy import choose_strategy
from hfjax.weights.model_folder import read_folder
from tests.golden import here
from tests.make_before import going_on, metrics_of
from tests.make_formats import CHECKPOINTS, HERE, RUNS, STOPS, checksum, layout_of
from tests.test_before import close, same_words

EXPECTED = json.loads((HERE / "expected.json").read_text(encoding="utf-8"))
OTHERS = {  # another strategy that each checkpoint is restored under
    "plain": (FSDP | TENSOR, {"fsdp": 2, "tensor": 2}, {}),
    "ema": (FSDP, {"fsdp": 2}, {}),
    "master": (FSDP, {"fsdp": 4}, {}),
    "fp16": (DDP, {"data": 2}, {"precision": "fp16"}),
    "pipe": (FSDP, {"fsdp": 4}, {}),
    "packed": (DDP, {"data": 2}, {}),
    "experts": (DDP, {"data": 2}, {}),
}


@pytest.fixture
def unpacked(tmp_path, monkeypatch):
    """Return what unpacks archives into the folder in which the test runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("hfjax.cli.train.start", lambda config: None)

    def unpack(*names):
        for name in names:
            with zipfile.ZipFile(HERE / f"{name}.zip") as archive:
                archive.extractall(tmp_path)
        return tmp_path

    return unpack


def restored(name, folder, strategy, sizes):
    """Return a layout, and the state of a checkpoint under it."""
    layout = layout_of(CHECKPOINTS[name], strategy, sizes)
    found = hfjax.restore(folder / name, layout)
    assert (found.step, int(found.state.step)) == (2, 2)
    assert found.data == {"rows": 16}
    return layout, found.state


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_checkpoint_is_read_bit_for_bit(name, unpacked):
    case = CHECKPOINTS[name]
    found = restored(name, unpacked(name), case.strategy, case.sizes)
    assert checksum(*found) == EXPECTED["checkpoints"][name]["crc32"]


@pytest.mark.parametrize("name", CHECKPOINTS)
@pytest.mark.short("packed")
def test_a_checkpoint_goes_on_bit_for_bit(name, unpacked):
    case, wanted = CHECKPOINTS[name], EXPECTED["checkpoints"][name]["losses"]
    layout, state = restored(name, unpacked(name), case.strategy, case.sizes)
    found, _ = going_on(layout, state, 2, case.loss, **case.fields)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    assert found == wanted or here() != EXPECTED["here"]


@pytest.mark.parametrize("name", CHECKPOINTS)
@pytest.mark.short("pipe")
def test_a_checkpoint_goes_on_under_another_strategy(name, unpacked):
    strategy, sizes, fields = OTHERS[name]
    layout, state = restored(name, unpacked(name), strategy, sizes)
    found, _ = going_on(layout, state, 2, CHECKPOINTS[name].loss, **fields)
    rtol = 1e-3 if name == "fp16" else 1e-5
    np.testing.assert_allclose(found, EXPECTED["checkpoints"][name]["losses"], rtol=rtol)


STRATEGIES = {"finished": "ZERO1", "piped": "FSDP|PIPE", "images": "DDP", "pretrained": "FSDP"}


def read(path, fields="batch is global_batch_size"):
    """Return a configuration of before; it is read with a warning that has today's fields."""
    with pytest.warns(UserWarning, match=f"fields of an earlier hfjax, .* Today: .*{fields}"):
        return load(path)


@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_read(name, unpacked):
    place = unpacked(name, "inputs")
    config, steps = read(place / name / "config.yaml"), EXPECTED["runs"][name]["loss"]
    assert choose_strategy(config).name == STRATEGIES[name]
    last = hfjax.latest_step(place / name / "checkpoints")
    assert last == (config.steps if name == "finished" else STOPS)
    found = metrics_of(place / name, "loss")
    assert list(found.items()) == list(steps.items())[:last]


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_run_goes_on_with_the_losses_of_one_that_was_left_alone(name, unpacked, capsys):
    place = unpacked(name, "inputs")
    words = ["--max-runtime", "None", "--devices", str(RUNS[name][1])]
    with pytest.warns(UserWarning, match="fields of an earlier hfjax"):
        assert main(["train", "--config", f"{name}/config.yaml", *words]) == 0
    for metric, wanted in EXPECTED["runs"][name].items():
        if metric != "eval":
            found = metrics_of(place / name, metric)
            assert list(found) == list(wanted)
            close([*found.values()], [*wanted.values()])
    capsys.readouterr()
    assert main(["eval", name, "--devices", "1"]) == 0
    same_words(capsys.readouterr().out, EXPECTED["runs"][name]["eval"])


def test_configurations_are_read(unpacked):
    place = unpacked("settings")
    one, two = read(place / "run.yaml"), read(place / "run.py", "optimizer.rate is optimizer.lear")
    planned = read(place / "plan.yaml")
    assert (one.steps, one.global_batch_size) == (2000, 64)
    assert (one.gradient_accumulation_steps, one.precision) == (4, "bf16")
    assert (one.mesh.tensor, one.mesh.fsdp, one.optimizer.max_grad_norm) == (2, 4, 1.0)
    assert choose_strategy(one).name == "FSDP|TENSOR|SEQUENCE"
    assert (two.pipeline.schedule, two.pipeline.chunks) == ("interleaved", 2)
    assert (two.model.num_layers, choose_strategy(two).name) == (4, "ZERO1|PIPE")
    assert (planned.global_batch_size, planned.model.preset) == (64, "gpt-tiny")


@pytest.mark.parametrize("name", ["1f1b", "interleaved"])
def test_a_run_whose_schedule_had_another_name_is_read(name, tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(f"mesh: {{pipe: 2}}\npipeline: {{name: {name}-half}}\n")
    config = read(path, "pipeline.name is pipeline.schedule")
    assert config.pipeline.schedule == f"{name}-published"


def test_a_table_a_calibration_and_a_data_set_are_read(unpacked, capsys):
    place = unpacked("settings", "inputs")
    text = (place / "schedule.txt").read_text(encoding="utf-8")
    assert str(Schedule.from_text(text).table(2)) == text
    assert Machine.load(place / "here.toml").platform == "cpu"
    assert main(["data", "--show", "text", "--verify"]) == 0
    assert "train: every CRC32 is right" in capsys.readouterr().out


def test_an_export_is_read(unpacked):
    folder = read_folder(unpacked("export") / "export")
    assert folder.config["model_type"] == "llama"
    model = hfjax.pretrained("export")
    layout = hfjax.layout(model.create, optax.sgd(0.1), hfjax.make_mesh(data=8), DDP)
    state = hfjax.init(layout, parameters=model.weights)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(hfjax.full_array(state.params)))
