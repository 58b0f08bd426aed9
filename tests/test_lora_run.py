"""`hfjax train --lora.rank`: what a run with adapters trains, keeps, resumes and refuses."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hfjax
from hfjax.__main__ import main
from hfjax.cli.train import Saved, saved_config, saved_state
from hfjax.data import prepare
from hfjax.trainer import RunComponents, TrainConfig, train
from hfjax.trainer.config import CheckpointConfig as Checkpoints, MeshConfig, ModelConfig
from hfjax.trainer.lora_config import LoraConfig
from hfjax.utils.paths import flatten
from tests.small_model_folder import small_folder
from tests.small_run import NO_EVAL, QUIET, corpus, small as small_gpt

pytestmark = pytest.mark.usefixtures("shown_log")

ONE = MeshConfig(data=1)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with texts, and two models of one shape."""
    made = tmp_path_factory.mktemp("lora")
    (made / "bytes").mkdir()
    corpus(made / "bytes")
    small_folder(made / "llama", files=2)
    shutil.copytree(made / "llama", made / "other")
    shard = sorted((made / "other").glob("*.safetensors"))[0]
    data = bytearray(shard.read_bytes())
    data[-4] ^= 1  # one bit of one weight
    shard.write_bytes(data)
    prepare(made / "bytes" / "texts", made / "data", tokenizer=str(made / "llama"), valid=0.2)
    return made


def small(place: Path, name: str, folder: str = "llama", **changes: Any) -> TrainConfig:
    """Return the configuration of a small run with adapters."""
    model = ModelConfig(pretrained=str(place / folder), seq_len=16)
    fields = {"model": model, "mesh": ONE, "steps": 4, "global_batch_size": 8, "log": QUIET}
    fields |= {"lora": LoraConfig(rank=2), "eval": NO_EVAL}
    return small_gpt(place / name, place / "data", **(fields | changes))


@pytest.fixture(scope="module")
def run(place):
    """A run of four steps that nobody disturbed."""
    config = small(place, "run", checkpoint=Checkpoints(interval=2))
    return config, train(config)


def saved_arrays(folder: Path) -> dict[str, list]:
    """Return the arrays of the latest checkpoint: path -> [dtype, shape]."""
    step = max((folder / "checkpoints").glob("[0-9]*"), key=lambda path: int(path.name))
    return json.loads((step / "meta" / "metadata").read_text())["arrays"]


def test_a_checkpoint_holds_the_adapters_and_their_optimizer_state_alone(run):
    config, _ = run
    arrays = saved_arrays(config.directory)
    params = [path for path in arrays if path.startswith("params/")]
    assert len(params) == 14
    assert all("/lora/" in path for path in params)
    moments = [path for path in arrays if "/mu/" in path or "/nu/" in path]
    assert len(moments) == 28
    assert all("/lora/" in path for path in moments)


def test_another_mesh_resumes_it_and_ends_where_the_undisturbed_run_does(place, run):
    whole, ended = run
    config = small(place, "resumed", checkpoint=Checkpoints(interval=2))
    train(replace(config, max_runtime=0.0))
    result = train(replace(config, mesh=MeshConfig(fsdp=4), devices=4))
    assert result.step == ended.step == 4
    a, b = (
        saved_state(Saved(c.directory), saved_config(Saved(c.directory)))[1]
        for c in (whole, config)
    )
    for path, x in flatten(a.state.params).items():
        np.testing.assert_allclose(x, flatten(b.state.params)[path], rtol=2e-5, atol=1e-6)


def test_the_base_is_that_of_the_folder_bit_for_bit(place, run):
    config, _ = run
    state = saved_state(Saved(config.directory), saved_config(Saved(config.directory)))[1].state
    plain: Any = RunComponents(replace(config, lora=LoraConfig()))
    base = hfjax.init(plain.layout, parameters=plain.pretrained.weights)
    params = flatten(state.params)
    for path, x in flatten(base.params).items():
        np.testing.assert_array_equal(x, params[path])


def test_other_weights_of_the_same_shape_are_refused_by_their_hash(place, run, capsys):
    config, _ = run
    with pytest.raises(SystemExit, match="2"):
        main(["eval", str(config.directory), "--base", str(place / "other")])
    assert "they are others, though the shapes are the same" in capsys.readouterr().err


def test_eval_and_generate_read_the_base_from_its_folder_and_say_where_it_is_needed(
    place, run, capsys
):
    config, _ = run
    moved = place / "moved"
    shutil.copytree(place / "llama", moved)
    assert main(["eval", str(config.directory), "--base", str(moved)]) == 0
    assert "loss" in capsys.readouterr().out
    assert main(["generate", str(config.directory), "--prompt", "a", "--tokens", "2"]) == 0
    gone = small(place, "gone", "passing", steps=1)
    shutil.copytree(place / "llama", place / "passing")
    train(gone)
    shutil.rmtree(place / "passing")
    with pytest.raises(ValueError, match="checkpoints hold adapters alone"):
        train(replace(gone, steps=2))
    again = replace(gone, steps=2, model=replace(gone.model, pretrained=str(moved)))
    assert train(again).step == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, r"--lora\.rank 0: a whole number from 1 on"),
        ({"rank": 2, "alpha": 0.0}, r"--lora\.alpha 0\.0: a number is needed, not 0"),
        ({"alpha": 4.0}, r"--lora\.alpha 4\.0: there are adapters only with --lora\.rank"),
        ({"rank": 2, "rank_pattern": ("q",)}, r"--lora\.rank-pattern 'q': PATTERN=NUMBER"),
        ({"rank": 2, "dropout": 1.0}, r"--lora\.dropout 1\.0: from 0 to below 1"),
    ],
)
def test_wrong_flags_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        LoraConfig(**options)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"lora": LoraConfig(rank=2, targets=("norm1",))},
            r"--lora\.targets: 'norm1' matches no linear map",
        ),
        ({"lora": LoraConfig(rank=400)}, r"--lora\.rank 400 of layers/.*at most \d+ is of use"),
    ],
)
def test_a_model_refuses_what_it_has_no_maps_for(place, changes, message):
    with pytest.raises(ValueError, match=message):
        _ = RunComponents(small(place, "refused", **changes)).model


def test_adapters_need_a_trained_model():
    with pytest.raises(ValueError, match=r"--lora\.rank 2: adapters change a trained model"):
        TrainConfig(lora=LoraConfig(rank=2))


def test_another_alpha_is_refused_since_trained_adapters_would_compute_something_else(run):
    config, _ = run
    changed = replace(config, steps=6, lora=LoraConfig(rank=2, alpha=8.0))
    with pytest.raises(ValueError, match="was multiplied by 1 in training, and would be by 4"):
        train(changed)


def test_modules_to_save_that_match_nothing_are_refused(place):
    lora = LoraConfig(rank=2, modules_to_save=("lm_head",))
    with pytest.raises(ValueError, match=r"modules_to_save: 'lm_head' matches no parameter"):
        _ = RunComponents(small(place, "refused", lora=lora)).layout
