"""What hfjax wrote before its code was rebuilt can still be read, and goes on with the same losses.

The files in tests/before, and the losses, are of commit 92464be: see tests/make_before.py.
"""

import json
import re
import shutil
import zlib
from pathlib import Path

import numpy as np
import pytest

import hfjax
from hfjax.__main__ import main
from hfjax.trainer import load
from tests.make_before import SHAPE, STEPS, STOPS, going_on, judged, layout, metrics_of
from tests.make_before_decoder import layout_of, losses

BEFORE = Path(__file__).with_name("before")
EXPECTED = json.loads((BEFORE / "expected.json").read_text(encoding="utf-8"))
DEVICES = {
    "FSDP on 4": (hfjax.FSDP, {"fsdp": 4}),
    "DDP on 2": (hfjax.DDP, {"data": 2}),
    "ZERO2 on 4": (hfjax.ZERO2, {"data": 4}),
    "FSDP+TENSOR on 4": (hfjax.FSDP | hfjax.TENSOR, {"fsdp": 2, "tensor": 2}),
}
STEPS_SAVED = [BEFORE / "checkpoint" / "2", BEFORE / "run" / "checkpoints" / str(STOPS)]


@pytest.fixture
def checkpoint(tmp_path):
    """A copy of the old checkpoint."""
    return Path(shutil.copytree(BEFORE / "checkpoint", tmp_path / "checkpoint"))


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """Runs `hfjax` beside copies of the old run and of its data; returns what it said."""
    for name in ("run", "text"):
        shutil.copytree(BEFORE / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("hfjax.cli.train.start", lambda config: None)

    def act(*words):
        assert main(words) == 0
        return capsys.readouterr().out

    return act


def close(found, wanted, rtol=1e-5):
    np.testing.assert_allclose(found, wanted, rtol)


def same_words(told, wanted):
    """Refuse another validation than was told then; of its numbers the last digit may differ."""
    number = re.compile(r"\d+\.\d+")
    assert number.sub("#", told) == number.sub("#", wanted)
    both = [[float(x) for x in number.findall(text)] for text in (told, wanted)]
    close(*both, rtol=1e-4)


@pytest.mark.parametrize(
    "devices",
    [
        "FSDP+TENSOR on 4",
        pytest.param("FSDP on 4", marks=pytest.mark.slow),
        pytest.param("DDP on 2", marks=pytest.mark.slow),
        pytest.param("ZERO2 on 4", marks=pytest.mark.slow),
    ],
)
def test_an_old_checkpoint_is_restored_and_goes_on_with_the_same_losses(checkpoint, devices):
    strategy, sizes = DEVICES[devices]
    made = layout(strategy, **sizes)
    found = hfjax.restore(checkpoint, made)
    assert (found.step, int(found.state.step)) == (2, 2)
    close(judged(made, found.state), EXPECTED["checkpoint"]["loss"])
    losses, state = going_on(made, found.state, 2)
    close(losses, EXPECTED["checkpoint"]["next"])
    hfjax.save(checkpoint, made, state)  # beside the old one, in its directory
    assert hfjax.latest_step(checkpoint) == 4


def test_what_lies_beside_the_arrays_of_an_old_checkpoint_is_read(checkpoint):
    made = layout(hfjax.FSDP, fsdp=4)
    found = hfjax.restore(checkpoint, made)
    config = {"rate": 1e-2, "shape": SHAPE}
    assert (found.config, found.data, found.metrics) == (config, {"rows": 16}, {"loss": 2.5})
    assert found.origin == "FSDP on fsdp=4, processes: 1"
    told = hfjax.checkpoint_metadata(checkpoint)
    assert (told["format"], told["config"], told["step"]) == (1, config, 2)
    with hfjax.CheckpointManager(checkpoint, made) as checkpoints:
        assert checkpoints.latest() == 2
        assert int(checkpoints.restore().state.step) == 2


@pytest.mark.slow
def test_only_the_parameters_of_an_old_checkpoint_are_taken(checkpoint):
    made = layout(hfjax.DDP, data=2)
    found = hfjax.restore(checkpoint, made, parameters_only=True)
    assert int(found.state.step) == 0
    close(judged(made, found.state), EXPECTED["checkpoint"]["loss"])


@pytest.mark.parametrize("step", STEPS_SAVED, ids=["checkpoint", "run"])
def test_each_file_of_an_old_step_is_what_its_manifest_says(step):
    """Read here as docs/checkpoints.md tells it, with nothing of hfjax: the files are whole."""
    files = json.loads((step / "manifest.json").read_text(encoding="utf-8"))["files"]
    assert "meta/metadata" in files
    for name, told in files.items():
        content = (step / name).read_bytes()
        assert f"{zlib.crc32(content):08x} {len(content)}" == told, name


def test_a_changed_bit_in_an_old_checkpoint_is_noticed(checkpoint):
    (file,) = (checkpoint / "2").glob("state/d/*")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(ValueError, match=rf"step 2 .* is damaged: state/d/{file.name} has CRC32"):
        hfjax.restore(checkpoint, layout(hfjax.DDP, data=2))


def test_an_old_run_goes_on_with_the_losses_of_one_that_was_left_alone(command):
    old = metrics_of(Path("run"), "loss")
    assert list(old) == [str(number) for number in range(STOPS)]
    given = ["--config", "run/config.yaml", "--max-runtime", "None", "--devices", "4"]
    assert f"going on after step {STOPS} of run" in command("train", *given)
    for name in ("loss", "valid_loss"):
        found, wanted = metrics_of(Path("run"), name), EXPECTED["run"][name]
        assert list(found) == list(wanted)
        close(list(found.values()), list(wanted.values()))
    assert hfjax.latest_step("run/checkpoints") == STEPS
    same_words(command("eval", "run", "--devices", "2"), EXPECTED["run"]["eval"])


def test_an_old_run_is_evaluated(command):
    same_words(command("eval", "run", "--devices", "2"), EXPECTED["run"]["eval when stopped"])


def test_an_old_run_writes_text(command):
    words = ["run", "--devices", "1", "--prompt", "mesh ", "--tokens", "4"]
    assert command("generate", *words).startswith("mesh ")


def test_an_old_data_set_is_whole(command):
    shown = command("data", "--show", "text", "--verify")
    assert "train: every CRC32 is right" in shown
    assert "valid: every CRC32 is right" in shown


def test_a_configuration_with_a_ratio_for_each_stage_is_read_with_the_largest(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text('steps: 3\noffload: "0.5,0.1"\n')
    largest = r"offload is offload\.activations \(the largest of its ratios, 0\.5\)"
    with pytest.warns(UserWarning, match=largest):
        assert load(path).offload.activations == "0.5"


DECODERS = {
    "llama on 1": ("llama", hfjax.DDP, {"data": 1}),
    "llama, FSDP+TENSOR": ("llama", hfjax.FSDP | hfjax.TENSOR, {"fsdp": 2, "tensor": 2}),
    "mixture, FSDP+EXPERT": ("mixture", hfjax.FSDP | hfjax.EXPERT, {"fsdp": 2, "expert": 2}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", DECODERS)
def test_checkpoints_of_the_decoders_before_they_were_one_go_on(case, tmp_path):
    name, strategy, sizes = DECODERS[case]
    shutil.copytree(BEFORE / name, tmp_path / name)
    layout = layout_of(name, strategy, **sizes)
    restored = hfjax.restore(tmp_path / name, layout)
    wanted = json.loads((BEFORE / "decoder.json").read_text(encoding="utf-8"))[name]
    close(losses(layout, restored.state, 2)[0], wanted)
