"""A run that begins with a model's folder: what it reads, keeps, refuses, and writes again."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import hfjax
from hfjax.__main__ import main
from hfjax.cli.memory.settings import memory_settings
from hfjax.cli.train import Saved, saved_config, saved_state
from hfjax.data import TokenSet, load_tokenizer, prepare, standard_library, stdlib_corpus
from hfjax.trainer import RunComponents, TrainConfig, config_io, load, train
from hfjax.trainer.build import check_flags_used
from hfjax.trainer.config import (
    CheckpointConfig as Checkpoints,
    DataConfig,
    EvalConfig,
    MeshConfig,
    ModelConfig,
)
from hfjax.trainer.pretrained_model import length_note
from hfjax.trainer.source_snapshot import COPY, TENSORS, read_copy, write_copy
from hfjax.trainer.tasks.text import flops_per_token
from hfjax.weights.model_folder import CONFIG, read_folder
from hfjax.weights.tensor_files import read_rows
from tests.small_model_folder import END, GPT2, LLAMA, VOCAB, small_folder
from tests.small_run import NO_EVAL, QUIET, corpus, small as small_gpt, told

pytestmark = pytest.mark.usefixtures("shown_log")

ONE = MeshConfig(data=1)
SHORT = {"log": replace(QUIET, interval=2), "eval": EvalConfig(interval=3, max_batches=1)}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with texts, and two models of one shape."""
    made = tmp_path_factory.mktemp("pretrained")
    (made / "bytes").mkdir()
    corpus(made / "bytes")
    small_folder(made / "llama", files=2)
    small_folder(made / "other", dtype=np.float16, files=2)
    prepare(made / "bytes" / "texts", made / "data", tokenizer=str(made / "llama"), valid=0.2)
    return made


def small(place: Path, name: str, folder: Path | str = "llama", **changes: Any) -> TrainConfig:
    """Return the configuration of a small run that begins with a model's folder."""
    model = ModelConfig(pretrained=str(place / folder), seq_len=16)
    fields = {"model": model, "mesh": ONE, "steps": 4, "global_batch_size": 4, **SHORT}
    return small_gpt(place / name, place / "data", **(fields | changes))


@pytest.fixture(scope="module")
def whole(place):
    """A run that nobody disturbed."""
    return train(small(place, "whole", checkpoint=Checkpoints(interval=0)))


@pytest.fixture(scope="module")
def alone(place, whole):
    """The same run, stopped after its first step; then the folder lost its weights, and is gone."""
    folder, config = place / "passing" / "llama", small(place, "alone", "passing/llama")
    shutil.copytree(place / "llama", folder)
    once = replace(config, max_runtime=0.0)
    assert train(once).step == 1
    for shard in folder.glob("*.safetensors"):
        shard.unlink()
    assert train(once).step == 2
    shutil.rmtree(folder)
    return config, train(config)


def said_by(words: list[Any], capsys: Any, status: int = 2) -> str:
    """Run `hfjax` with these words; return what it says, wherever."""
    capsys.readouterr()
    try:
        code: Any = main([str(word) for word in words])
    except SystemExit as end:
        code = end.code
    said = capsys.readouterr()
    assert code == status, said
    return said.out + said.err


# -- training ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_begins_with_the_weights_and_says_what_it_has_read(place, capsys):
    config = small(place, "begins", steps=1, mesh=MeshConfig(fsdp=2))
    train(config)
    said = capsys.readouterr().out
    model = hfjax.pretrained(place / "llama", pad_vocab_to=128)
    assert "llama: 40.1k parameters, FSDP on fsdp=2" in said
    assert "sequences of 16 tokens; the model takes 32: --model.seq-len" in said
    assert f"read {model.bytes / 1024:.1f} KiB of {place / 'llama'} in " in said
    assert "parameters are stored in float32" in said
    parts = RunComponents(config)
    state = hfjax.init(parts.layout, parameters=model.weights)
    losses = told(place / "begins", "valid_loss")
    assert list(losses) == [0, 1]
    assert losses[0] == pytest.approx(parts.validated(state, 1).loss, rel=1e-6)
    assert f"validated before the first step: loss {losses[0]:.4f}" in said


def test_a_run_that_was_killed_before_it_saved_begins_with_the_weights_again(place):
    config = small(place, "killed", steps=1)
    train(config)
    first = told(place / "killed", "valid_loss")
    shutil.rmtree(place / "killed" / "checkpoints" / "1")
    (place / "killed" / COPY / CONFIG).write_text("{")  # it was writing this
    train(config)
    assert told(place / "killed", "valid_loss") == first
    assert (
        read_copy(place / "killed" / COPY).fingerprint == read_folder(place / "llama").fingerprint
    )


def test_parameters_are_stored_in_bfloat16_beside_a_copy_or_with_a_word(place, tmp_path, capsys):
    fields = {"param_dtype": "bf16", "steps": 1, "eval": NO_EVAL}
    found = train(small(place, tmp_path / "run", **fields))
    said = capsys.readouterr().out
    assert {str(x.dtype) for x in jax.tree.leaves(found.state.params)} == {"bfloat16"}
    assert "parameters are stored in bfloat16" in said
    assert "without --master-weights, updates that bfloat16 rounds away are lost" in said
    assert told(tmp_path / "run", "valid_loss") == {}


def test_a_run_goes_on_without_weights_and_then_without_the_folder(place, whole, alone, capsys):
    config, result = alone
    assert result.step == whole.step == 4
    assert told(place / "alone") == told(place / "whole")
    assert list(told(place / "alone", "valid_loss")) == [0, 3, 4]
    again = train(config)
    said = capsys.readouterr().out
    assert again.loss is None
    assert f"{place / 'passing' / 'llama'} is missing" in said
    assert f"The run goes on without it: {place / 'alone' / COPY} has what is needed" in said
    assert "read " not in said
    assert load(place / "alone" / "config.yaml").model == config.model  # the flag, as it was given


def test_a_folder_that_moved_goes_on_and_one_that_changed_does_not(place, alone, tmp_path):
    config, _ = alone
    moved = lambda path: replace(config, model=replace(config.model, pretrained=path))
    shutil.copytree(place / "llama", tmp_path / "moved")
    assert train(moved(tmp_path / "moved")).step == 4
    hashes = [read_folder(place / name).fingerprint for name in ("other", "llama")]
    told = rf"other is not the model that .*alone began from: its tensors differ \(hash {hashes[0]}"
    with pytest.raises(ValueError, match=rf"{told}, of the run {hashes[1]}\). Give the folder"):
        train(moved(place / "other"))
    (tmp_path / "moved" / CONFIG).write_text(json.dumps(LLAMA | {"rms_norm_eps": 1e-6}))
    (tmp_path / "moved" / "part-0.safetensors").unlink()
    with pytest.raises(ValueError, match=r"its config.json differs \(hash another config.json, of"):
        train(moved(tmp_path / "moved"))


@pytest.mark.slow
def test_a_run_of_something_else_does_not_go_on_with_a_folder(place, tmp_path):
    own = small_gpt(tmp_path / "own", place / "data", steps=1, mesh=ONE, **SHORT)
    train(own)
    there = replace(own, steps=2, model=ModelConfig(pretrained=place / "llama", seq_len=16))
    with pytest.raises(ValueError, match=r"has checkpoints, and no copy of a model's folder"):
        train(there)


def test_another_run_begins_with_the_parameters_of_one_and_with_its_copy_alone(
    place, alone, capsys
):
    config, result = alone
    copy = replace(config.model, pretrained=place / "alone" / COPY)
    fields = {"run_dir": place / "next", "model": copy, "steps": 1}
    with pytest.raises(
        ValueError, match=r"it is what a run keeps of its model, and has no weights"
    ):
        train(replace(config, **fields))
    start = Checkpoints(init_from=str(place / "alone"))
    train(replace(config, **fields, checkpoint=start))
    assert f"starting with the parameters of {place / 'alone'}, step 4" in capsys.readouterr().out
    assert told(place / "next", "valid_loss")[1] == pytest.approx(result.valid_loss, abs=0.1)
    assert not (place / "next" / COPY / "model.safetensors").exists()


# -- what a run keeps -------------------------------------------------------------------------


def test_a_copy_says_all_that_a_folder_says_and_follows_no_link(place, tmp_path):
    folder = read_folder(place / "llama")
    (tmp_path / "run").mkdir()
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "run" / ".model.unfinished-12").symlink_to(tmp_path)
    for _ in range(2):
        write_copy(folder, tmp_path / "run")
    copy = read_copy(tmp_path / "run" / COPY)
    plain = lambda tensors: [(t.name, t.file.name, t.dtype, t.shape, t.begin) for t in tensors]
    assert plain(copy.tensors.values()) == plain(folder.tensors.values())
    assert copy.config == folder.config
    told = [(of.path / "generation_config.json").read_bytes() for of in (copy, folder)]
    assert told[0] == told[1]
    assert copy.fingerprint == folder.fingerprint
    assert (tmp_path / "mine").read_text() == "mine"
    assert [path.name for path in (tmp_path / "run").iterdir()] == [COPY]
    written = tmp_path / "run" / COPY / TENSORS
    for wrong in (
        written.read_text().replace("270", "271", 1),
        "{}",
        "[1",
        '{"tensors": {"a": 1}}',
    ):
        written.write_text(wrong)
        with pytest.raises(ValueError, match=r"model, the run's copy of its model, is damaged \("):
            read_copy(tmp_path / "run" / COPY)


def test_a_folder_of_the_user_in_the_place_of_the_copy_stays(place, tmp_path):
    shutil.copytree(place / "llama", tmp_path / "run" / COPY)
    config = small(place, tmp_path / "run", tmp_path / "run" / COPY)
    with pytest.raises(ValueError, match=r"run/model is there, and no run has written it"):
        train(config)
    with pytest.raises(
        ValueError, match=r"it is the folder of --model.pretrained, and a run writes"
    ):
        train(replace(config, run_dir=tmp_path / "run" / COPY))
    assert read_folder(tmp_path / "run" / COPY).files


# -- flags ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"preset": "llama-tiny"},
        {"factory": "mine.py:make"},
        *({name: 2} for name in ("num_layers", "hidden_size", "num_kv_heads", "head_dim")),
        *({name: 2} for name in ("intermediate_size", "num_experts", "num_heads", "top_k")),
    ],
)
def test_what_else_says_the_shape_is_refused_with_both_flags(fields):
    name, value = next(iter(fields.items()))
    flag = f"--model.{name.replace('_', '-')} {value} beside --model.pretrained llama: the folder"
    with pytest.raises(ValueError, match=flag):
        ModelConfig(pretrained="llama", **fields)


def test_flags_that_make_no_sense_of_a_folder_are_refused(place):
    config = TrainConfig(model=ModelConfig(pretrained=place / "llama"))
    with pytest.raises(ValueError, match=r"--model.preset gpt-tiny beside --model.pretrained"):
        check_flags_used([config], ["--model.preset=gpt-tiny"])
    with pytest.raises(ValueError, match=r"--param-dtype bf16: it is of --model.pretrained, which"):
        TrainConfig(param_dtype="bf16")
    with pytest.raises(ValueError, match=r"--vocab 300 beside --model.pretrained"):
        memory_settings(config, vocab=300)
    for fields, message in (
        ({"dropout": 0.1}, r"--model.dropout 0.1: only a GPT has dropout. Leave it out"),
        (
            {"capacity_factor": 2.0},
            r"--model.capacity-factor 2.0: this model has no experts. Leave it out",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            _ = RunComponents(replace(config, model=replace(config.model, **fields))).model
    assert config.directory == Path("runs/llama")


def test_rows_are_as_long_as_the_model_takes_but_no_longer_than_is_useful(place, tmp_path):
    keys = {"max_position_embeddings": 131072}
    long = small_folder(tmp_path / "long", LLAMA | keys)
    model = lambda folder, **fields: ModelConfig(pretrained=folder, **fields)
    of = lambda *words, **fields: RunComponents(TrainConfig(model=model(*words, **fields)))
    assert [of(folder).model.length for folder in (place / "llama", long)] == [32, 4096]
    assert of(long).model.name == "long"
    more = of(place / "llama", seq_len=40)
    assert (more.model.length, more.model.max_length) == (40, 40)
    assert more.pretrained is not None
    assert length_note(more.pretrained, 40).startswith(
        "warning: sequences of 40 tokens are longer than those that the model was trained for (32)"
    )
    learned = small_folder(tmp_path / "gpt2", GPT2)
    parts = of(learned, seq_len=16)
    assert (parts.model.length, parts.model.shape.length) == (16, 24)
    with pytest.raises(ValueError, match=r"--model.seq-len 25: .*gpt2 has learned 24 positions"):
        _ = of(learned, seq_len=25).model


# -- tokens -----------------------------------------------------------------------------------


def test_data_is_made_with_the_end_of_a_text_that_the_model_has(place, tmp_path):
    assert TokenSet(place / "data" / "train").meta.end == END
    folder = small_folder(tmp_path / "cut")
    made = json.loads((folder / "tokenizer.json").read_text())
    cut = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    (folder / "tokenizer.json").write_text(json.dumps(made | {"truncation": cut}))
    tokenizer = load_tokenizer(folder)
    assert len(tokenizer.encode(["tensor pipe data mesh step loss"])[0]) > 3  # cut nowhere
    assert load_tokenizer(folder, "<|endoftext|>").end == 0
    (folder / "generation_config.json").unlink()
    assert load_tokenizer(folder).end == LLAMA["eos_token_id"]
    (folder / CONFIG).write_text(json.dumps(LLAMA | {"eos_token_id": 300}))
    with pytest.raises(ValueError, match=r"has 270 tokens, and the model .* with token 300 \(eos_"):
        load_tokenizer(folder)


def test_data_of_another_tokenizer_is_refused_with_both_named(place, tmp_path):
    texts = place / "bytes" / "texts"
    for folder, made_by in (
        (place / "bytes" / "data", "bytes with a vocabulary of 256"),
        (tmp_path / "other", "tokenizer.json with a vocabulary of"),
    ):
        if not folder.exists():
            prepare(texts, folder, tokenizer="bpe", vocab=262)
        valid = DataConfig((str(place / "data"),), str(folder))
        for data in (DataConfig(train=(str(folder),)), valid):
            parts = RunComponents(small(place, "refused", data=data))
            wrong = rf"{folder}\S* was made by another tokenizer \({made_by}"
            with pytest.raises(
                ValueError, match=rf"{wrong}.* model {place / 'llama'} \(270 tokens"
            ):
                _ = parts.data, parts.valid


def test_a_tokenizer_of_more_tokens_than_the_embedding_has_is_refused(place, tmp_path):
    folder = small_folder(tmp_path / "few", LLAMA | {"vocab_size": VOCAB - 1})
    with pytest.raises(ValueError, match=r"has 270 tokens, the model's embedding 269 rows"):
        _ = RunComponents(small(place, "refused", folder)).data


def test_without_data_the_library_is_read_by_the_tokenizer_of_the_model(
    place, tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    few = tuple(sorted((place / "bytes" / "texts").iterdir()))
    monkeypatch.setattr(stdlib_corpus, "library_files", lambda root: few)
    parts = RunComponents(small(place, "library", data=DataConfig()))
    tokens = parts.tokens[0]
    assert tokens.meta.end == END
    assert tokens.directory.parent != standard_library()
    assert tokens.directory.parent == standard_library(tokenizer=place / "llama")
    assert tokens.tokenizer.decode(tokens.read(0, 12)) in few[0].read_text()
    assert parts.valid is not None


# -- what it costs ----------------------------------------------------------------------------


def flops_of(folder, **model):
    shape = ModelConfig(pretrained=folder, **model)
    parts = RunComponents(TrainConfig(model=shape, mesh=ONE, devices=1))
    return flops_per_token(parts.model, parts.layout)


def test_operations_are_those_of_the_model_itself(place, tmp_path):
    """By hand: matrices of a layer, the head, and scores of each layer with what it sees."""
    layer = 32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 48  # queries; keys, values; back; the MLP
    head = 32 * VOCAB
    plain = 6 * (2 * layer + head) + 12 * 2 * 32 * 16
    assert flops_of(place / "llama", seq_len=16) == plain
    wide = small_folder(tmp_path / "qwen3", LLAMA | {"model_type": "qwen3", "head_dim": 32})
    more = 2 * 32 * 32 + 2 * 32 * 32 + 2 * 32 * 32 + 3 * 32 * 48  # two heads of 32, one of keys
    assert flops_of(wide, seq_len=16) == 6 * (2 * more + head) + 12 * 2 * 64 * 16
    window = small_folder(
        tmp_path / "mistral", LLAMA | {"model_type": "mistral", "sliding_window": 4}
    )
    assert flops_of(window, seq_len=16) == plain - 12 * 2 * 32 * (16 - 4)
    kinds = {"layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True}
    some = LLAMA | kinds | {"model_type": "qwen2", "sliding_window": 4, "tie_word_embeddings": True}
    local = small_folder(tmp_path / "qwen2", some)
    assert flops_of(local, seq_len=16) == plain - 12 * 32 * (16 - 4)
    few = {"num_local_experts": 4, "num_experts_per_tok": 2, "model_type": "mixtral"}
    experts = small_folder(tmp_path / "mixtral", LLAMA | few)
    assert flops_of(experts, seq_len=16) == plain + 6 * 2 * (3 * 32 * 48 + 32 * 4)


def test_what_a_step_takes_is_planned_from_the_folder(place, capsys):
    words = ["--model.pretrained", place / "llama", "--global-batch-size", 8]
    words += ["--gpu", "here", "--compare", "none"]
    assert "llama, DDP on data=8" in said_by(["memory", *words], capsys, 0)


# -- in and out -------------------------------------------------------------------------------


def test_inspect_prints_the_table_and_says_what_is_no_folder(place, capsys):
    said = said_by(["inspect", place / "llama"], capsys, 0)
    assert said == f"{hfjax.pretrained(place / 'llama')}\n"
    assert "hfjax inspect: " in said_by(["inspect", place / "nowhere"], capsys)
    assert "has no config.json" in said_by(["inspect", place / "data"], capsys)


def test_a_run_is_exported_evaluated_and_writes_text_without_its_folder(place, alone, capsys):
    _, result = alone
    run, out = place / "alone", place / "exported"
    said = said_by(
        ["export", run, "--export-dir", out, "--devices", 1, "--shard", "60KB"], capsys, 0
    )
    assert f"{out}: {run} after step 4, 21 tensors; wrote 128.1 KiB" in said
    found, source = read_folder(out), read_folder(place / "llama")
    assert list(found.tensors) == list(source.tensors)
    assert len(found.files) == 3
    assert found.config == source.config
    told = [(of.path / "generation_config.json").read_bytes() for of in (found, source)]
    assert told[0] == told[1]
    rows = {name: read_rows(t, 0, t.num_rows) for name, t in found.tensors.items()}
    tokens = np.asarray(result.state.params["tokens"])
    assert tokens.shape == (384, 32)
    np.testing.assert_array_equal(rows["model.embed_tokens.weight"], tokens[:VOCAB])
    assert load_tokenizer(out).end == END
    assert "is a folder already: nothing is written over it" in said_by(
        ["export", run / "no-run", "--export-dir", out], capsys
    )
    again = ["export", run, "--step", 2, "--export-dir", place / "half", "--devices", 1]
    assert "after step 2" in said_by([*again, "--dtype", "bfloat16"], capsys, 0)
    half = read_folder(place / "half")
    assert {str(t.dtype) for t in half.tensors.values()} == {"bfloat16"}
    assert "step 4" in said_by(["eval", run, "--devices", 1], capsys, 0)
    text = said_by(
        ["generate", run, "--prompt", "tensor", "--tokens", 4, "--devices", 1], capsys, 0
    )
    assert "tensor" in text


def test_a_run_of_a_preset_is_exported_only_like_a_model(place, tmp_path, capsys):
    run = tmp_path / "run"
    run.mkdir()
    model = ModelConfig(preset="llama-tiny", hidden_size=32, num_layers=2, num_heads=2, seq_len=16)
    config_io.save(small_gpt(run, place / "data", model=model, devices=None), run / "config.yaml")
    words = ["export", run, "--devices", 1, "--export-dir", tmp_path / "out"]
    said = said_by(words, capsys)
    assert "began from no model's folder (--model.preset llama-tiny), which would say" in said
    assert "Give one of the same shape: --like FOLDER" in said
    assert "--shard 0: at least one byte" in said_by([*words, "--shard", "0"], capsys)
    assert not (tmp_path / "out").exists()


def test_a_model_of_another_kind_is_no_likeness(place, alone, tmp_path, capsys):
    other = small_folder(tmp_path / "theta", LLAMA | {"rope_theta": 5e5})
    words = ["export", place / "alone", "--devices", 1, "--export-dir", tmp_path / "out", "--like"]
    said = said_by([*words, other], capsys)
    assert "Its config.json would describe another model. Give the folder of" in said
    assert "rotary is Rope(base=10000.0" in said
    assert "after step 4" in said_by([*words, place / "other"], capsys, 0)
    assert {str(t.dtype) for t in read_folder(tmp_path / "out").tensors.values()} == {"float16"}


def test_transformers_makes_the_same_logits_of_what_is_exported(place, alone, capsys):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    run, out = place / "alone", place / "to-transformers"
    said_by(["export", run, "--export-dir", out, "--devices", 1], capsys, 0)
    saved = Saved(run, devices=1)
    parts, restored = saved_state(saved, saved_config(saved))
    tokens = np.arange(34, dtype=np.int32).reshape(2, 17)
    ours = hfjax.predict_step(parts.layout)(restored.state, {"tokens": tokens})
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    theirs = model(torch.tensor(tokens[:, :-1])).logits.detach().numpy()
    np.testing.assert_allclose(np.asarray(ours)[..., :VOCAB], theirs, rtol=1e-4, atol=1e-5)
