"""`hfjax export` of a run with adapters: peft's files, or the whole model with --merge."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hfjax.__main__ import main
from hfjax.data import prepare
from hfjax.trainer import TrainConfig, train
from hfjax.trainer.config import CheckpointConfig, MeshConfig, ModelConfig
from hfjax.trainer.config_io import save as save_config
from hfjax.trainer.lora_config import LoraConfig
from hfjax.weights.tensor_files import read_header, read_rows
from tests.small_model_folder import small_folder
from tests.small_run import NO_EVAL, QUIET, corpus, small as small_gpt

FILE = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a model, a run of its adapters, and one that says it has none."""
    made = tmp_path_factory.mktemp("export")
    (made / "bytes").mkdir()
    corpus(made / "bytes")
    small_folder(made / "llama", files=2)
    prepare(made / "bytes" / "texts", made / "data", tokenizer=str(made / "llama"), valid=0.2)
    train(config_of(made, "adapters", LoraConfig(rank=2, alpha=3.0)))
    (made / "whole").mkdir()
    save_config(config_of(made, "whole", LoraConfig()), made / "whole" / "config.yaml")
    return made


def config_of(place: Path, name: str, lora: LoraConfig) -> TrainConfig:
    model = ModelConfig(pretrained=str(place / "llama"), seq_len=16)
    fields: dict[str, Any] = {"model": model, "mesh": MeshConfig(data=1), "steps": 2, "lora": lora}
    fields |= {"global_batch_size": 8, "log": QUIET, "eval": NO_EVAL}
    fields["checkpoint"] = CheckpointConfig(interval=2)
    return small_gpt(place / name, place / "data", **fields)


def said_by(capsys: Any, status: int, *words: object) -> str:
    """Run `hfjax export` with these words; return what it says, wherever."""
    capsys.readouterr()
    try:
        code: Any = main(["export", *map(str, words), "--devices", "1"])
    except SystemExit as end:
        code = end.code
    said = capsys.readouterr()
    assert code == status, said
    return said.out + said.err


def arrays_of(folder: Path) -> dict[str, np.ndarray]:
    tensors = {k: t for file in folder.glob("*.safetensors") for k, t in read_header(file).items()}
    return {name: read_rows(t, 0, t.num_rows) for name, t in tensors.items()}


def test_a_run_of_adapters_is_written_as_these_or_merged_into_the_model(place, capsys):
    out, merged = place / "out", place / "merged"
    said = said_by(capsys, 0, place / "adapters", "--export-dir", out)
    assert "after step 2, adapters of 7 linear maps" in said
    assert sorted(path.name for path in out.iterdir()) == ["adapter_config.json", FILE]
    config = json.loads((out / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (2, 3)
    assert config["base_model_name_or_path"] == str(place / "llama")
    said_by(capsys, 0, place / "adapters", "--export-dir", merged, "--merge", "--dtype", "float32")
    adapters, base, whole = (arrays_of(folder) for folder in (out, place / "llama", merged))
    assert whole.keys() == base.keys()
    for name, x in whole.items():
        module, wanted = f"base_model.model.{name.removesuffix('.weight')}", np.float32(base[name])
        if f"{module}.lora_A.weight" in adapters:
            a, b = adapters[f"{module}.lora_A.weight"], adapters[f"{module}.lora_B.weight"]
            assert np.abs(b).max() > 0
            wanted = wanted + np.float32(1.5) * b @ a
        np.testing.assert_allclose(x, wanted, rtol=1e-6, atol=1e-7)


def test_flags_of_another_kind_of_export_are_refused(place, capsys):
    out = place / "refused"
    said = said_by(capsys, 2, place / "whole", "--export-dir", out, "--merge")
    assert "--merge: " in said
    assert "has no adapters (--lora.rank), its whole model is written" in said
    words = [place / "adapters", "--export-dir", out]
    for flags in (["--shard", "1MB"], ["--like", place / "llama"]):
        said = said_by(capsys, 2, *words, *flags)
        assert "of whole models, and of" in said
        assert "adapters are written. Leave them out, or give --merge." in said
    shutil.copytree(place / "llama", out)
    assert "is a folder already" in said_by(capsys, 2, *words)
