"""Models in and out: every element has one place, in any layout; every byte is read once."""

import errno
import fcntl
import json
import os
import re
import shutil
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import hfjax
from hfjax.sharding.reorder_layers import params_in_model_order
from hfjax.trainer import source_snapshot
from hfjax.weights import file_rows, load, save
from hfjax.weights.file_rows import _write_rows
from hfjax.weights.tensor_files import FileTensor, open_to_read, read_rows
from tests.model_folders import BF16, CONFIGS, drawn, write_file, written

SPLIT = hfjax.FSDP.edit(replicate_below=0)
LAYOUTS: dict[str, Any] = {
    "DDP": (hfjax.DDP, {"data": 8}),
    "FSDP": (SPLIT, {"fsdp": 8}),
    "HSDP": (hfjax.HSDP.edit(replicate_below=0), {"data": 2, "fsdp": 4}),
    "FSDP|TENSOR": (SPLIT | hfjax.TENSOR, {"fsdp": 4, "tensor": 2}),
    "PIPE": (hfjax.PIPE, {"pipe": 2, "data": 4}),
    "FSDP|PIPE": (SPLIT | hfjax.PIPE, {"pipe": 2, "fsdp": 4}),
    "FSDP|EXPERT": (SPLIT | hfjax.EXPERT, {"fsdp": 2, "expert": 4}),
    "HOST": (SPLIT | hfjax.HOST_PARAMETERS, {"fsdp": 8}),
}
WITH_EXPERTS = {"mixtral", "qwen3_moe"}
PADDED: dict[str, Any] = {"pad_vocab_to": 32}


def layout_of(model, name="FSDP"):
    strategy, sizes = LAYOUTS[name]
    return hfjax.layout(model.create, optax.sgd(0.1), hfjax.make_mesh(**sizes), strategy)


def parameters(model, layout, **more):
    weights = model.weights
    state = hfjax.init(layout, parameters=weights, **more)
    assert weights.read == model.bytes  # each byte once
    return {path: np.asarray(x) for path, x in params_in_model_order(layout, state).items()}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder of each family, its elements numbered."""
    root = tmp_path_factory.mktemp("models")
    for name, config in CONFIGS.items():
        written(root / name, config, files=3 if name == "llama" else 1)
    return root


@pytest.mark.short("gpt2", "qwen3_moe")
@pytest.mark.parametrize("name", CONFIGS)
def test_every_element_of_every_file_has_one_place(name, folders):
    model = hfjax.pretrained(folders / name, **PADDED)
    found = parameters(model, layout_of(model, "DDP"))
    numbers = np.concatenate([x.ravel() for x in found.values()])
    padding = numbers[numbers == 0].size
    assert padding == (96 - 90) * 32 * (1 + ("unembed/kernel" in found))
    assert (np.sort(numbers)[padding:] == 1 + np.arange(numbers.size - padding)).all()


@pytest.mark.short("HSDP-mixtral-1073741824", "PIPE-qwen3-1073741824", "HOST-qwen3_moe-1024")
@pytest.mark.parametrize("most", [1 << 30, 1 << 10])
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "DDP"])
def test_any_layout_takes_the_same_and_gives_it_back(
    layout, name, most, folders, tmp_path, monkeypatch
):
    monkeypatch.setattr(load, "GROUP_BYTES", most)  # whole stacks at once, or a layer at a time
    if "EXPERT" in layout and name not in WITH_EXPERTS:
        layout = "FSDP|TENSOR"  # EXPERT is for mixtures
    model = hfjax.pretrained(folders / name, **PADDED)
    plain, made = layout_of(model, "DDP"), layout_of(model, layout)
    wanted, found = parameters(model, plain), parameters(model, made)
    assert wanted.keys() == found.keys()
    for path, x in wanted.items():
        np.testing.assert_array_equal(found[path], x, err_msg=path)
    state = hfjax.init(made, parameters=model.weights)
    hfjax.export(tmp_path / "out", made, state, like=model)
    assert_same_bits(tmp_path / "out", folders / name)


def assert_same_bits(one, other):
    """Both folders hold the same tensors, bit for bit."""
    ours, theirs = (hfjax.pretrained(folder).folder.tensors for folder in (one, other))
    assert list(ours) == list(theirs)
    for name, tensor in theirs.items():
        assert (ours[name].dtype, ours[name].shape) == (tensor.dtype, tensor.shape)
        bits = [read_rows(t, 0, t.num_rows).tobytes() for t in (ours[name], tensor)]
        assert bits[0] == bits[1], name


SPECS = {  # which no strategy makes: splits of what several tensors share, of inner dimensions
    "layers/attention/qkv/kernel": P(None, None, None, None, ("fsdp", "tensor")),
    "layers/mlp/gate_up/kernel": P(None, "fsdp", None, "tensor"),
    "layers/attention/out/kernel": P(None, None, "tensor", "fsdp"),
    "tokens": P(("fsdp", "tensor")),
    "unembed/kernel": P("tensor", "fsdp"),
    "layers/norm1/scale": P(None, ("fsdp", "tensor")),
}


def test_any_spec_takes_the_same_and_gives_it_back(folders, tmp_path):
    model = hfjax.pretrained(folders / "llama", **PADDED)
    wanted = parameters(model, layout_of(model, "DDP"))
    mesh = hfjax.make_mesh(fsdp=2, tensor=2, data=2)
    layout = hfjax.layout(model.create, optax.sgd(0.1), mesh, SPLIT | hfjax.TENSOR)
    layout = layout.with_specs(SPECS)
    for path, x in parameters(model, layout).items():
        np.testing.assert_array_equal(x, wanted[path], err_msg=path)
    state = hfjax.init(layout, parameters=model.weights)
    hfjax.export(tmp_path / "out", layout, state, like=model)
    assert_same_bits(tmp_path / "out", folders / "llama")


def test_a_state_stored_for_a_schedule_goes_in_and_out(folders, tmp_path):
    model, schedule = hfjax.pretrained(folders / "llama"), hfjax.Schedule("interleaved", 4)
    layout = layout_of(model, "PIPE")
    state = hfjax.init(layout, parameters=model.weights, schedule=schedule)
    assert state.order.tolist() == [0, 2, 1, 3]
    hfjax.export(tmp_path / "out", layout, state, like=model)
    assert_same_bits(tmp_path / "out", folders / "llama")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.dtype("float32"), BF16, np.dtype("float16")], ids=str)
@pytest.mark.parametrize("name", ["tied", "llama", "mixtral"])
def test_in_and_out_is_bit_for_bit_in_every_type(name, dtype, tmp_path):
    written(tmp_path / "in", CONFIGS[name], drawn(dtype), files=2)
    model = hfjax.pretrained(tmp_path / "in", **PADDED)
    for layout in ("FSDP|TENSOR", "FSDP|PIPE"):
        made = layout_of(model, layout)
        state = hfjax.init(made, parameters=model.weights)
        assert state.params["tokens"].dtype == np.float32
        hfjax.export(tmp_path / layout, made, state, like=model, shard="20kB")
        assert_same_bits(tmp_path / layout, tmp_path / "in")
        sizes = [p.stat().st_size for p in (tmp_path / layout).glob("*.safetensors")]
        assert len(sizes) > 1
        index = json.loads((tmp_path / layout / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == model.bytes


@pytest.mark.slow
def test_types_can_be_chosen(folders, tmp_path):
    model = hfjax.pretrained(folders / "llama", stored="bf16")
    layout = layout_of(model)
    state = hfjax.init(layout, parameters=model.weights)
    assert {x.dtype.name for x in jax.tree.leaves(state.params)} == {"bfloat16"}
    hfjax.export(tmp_path / "out", layout, state, like=model, dtype="float16")
    found = hfjax.pretrained(tmp_path / "out").folder
    assert {t.dtype.name for t in found.tensors.values()} == {"float16"}
    assert found.config["dtype"] == "float16"


def test_types_have_short_words_and_no_other_is_written(folders, tmp_path):
    for wrong in ("float16", "fp16", "int8"):
        with pytest.raises(ValueError, match=r"stored=.*: one of float32, bfloat16 \(fp32, bf16\)"):
            hfjax.pretrained(folders / "tied", stored=wrong)
    model = hfjax.pretrained(folders / "tied")
    layout = layout_of(model, "DDP")
    state = hfjax.init(layout, parameters=model.weights)
    for wrong in ("int8", "float8_e5m2"):
        with pytest.raises(
            ValueError, match=r"dtype=.*: one of float32, bfloat16, float16, float6"
        ):
            hfjax.export(tmp_path / "out", layout, state, like=model, dtype=wrong)
    wrong: Any
    for wrong in ("half a float", 16, [1]):
        with pytest.raises(ValueError, match=r"dtype=.*: a dtype, float32, bf16 …, is expected"):
            hfjax.export(tmp_path / "out", layout, state, like=model, dtype=wrong)
    for short, kind in {"bf16": "bfloat16", "fp32": "float32", "fp16": "float16"}.items():
        hfjax.export(tmp_path / short, layout, state, like=model, dtype=short)
        found = hfjax.pretrained(tmp_path / short).folder
        assert {t.dtype.name for t in found.tensors.values()} == {kind}
        assert found.config["dtype"] == kind


@pytest.mark.slow
@pytest.mark.parametrize("x64", [False, True])
def test_float64_goes_in_and_out_where_devices_have_no_such_type(x64, tmp_path):
    """Numbers are those of float32, in which parameters are stored."""
    double = np.dtype("float64")
    plain = written(tmp_path / "plain", CONFIGS["llama"], drawn())
    written(
        tmp_path / "in", CONFIGS["llama"], lambda _: {n: x.astype(double) for n, x in plain.items()}
    )
    with jax.enable_x64(x64):
        for name, dtype in (("in", None), ("plain", "float64"), ("plain", "fp64")):
            model = hfjax.pretrained(tmp_path / name, **PADDED)
            layout = layout_of(model, "FSDP|TENSOR")
            state = hfjax.init(layout, parameters=model.weights)
            hfjax.export(tmp_path / f"{name}-{dtype}", layout, state, like=model, dtype=dtype)
            assert_same_bits(tmp_path / f"{name}-{dtype}", tmp_path / "in")


def test_rows_that_do_not_fill_their_places_are_not_written(tmp_path):
    tensor = FileTensor(tmp_path / "file", "some", np.dtype("float64"), (4, 3), 8)
    with pytest.raises(AssertionError, match="name='some'"):
        _write_rows(0, tensor, 0, np.zeros((4, 3), np.float32))


def test_the_programs_are_one_for_each_shape(tmp_path):
    written(tmp_path / "in", CONFIGS["llama"] | {"num_hidden_layers": 6})
    model = hfjax.pretrained(tmp_path / "in")
    layout = layout_of(model)
    stream = load.WeightStream(layout, model.mappings)
    programs = {id(stream._row_mover(group)) for group in stream.groups}
    assert len(programs) < len(layout.arrays) + 1


# -- what is refused -----------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    written(tmp_path / "in", CONFIGS["llama"], files=2)
    return tmp_path / "in"


def changed(folder, **keys):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def refusal(folder):
    with pytest.raises(ValueError, match=re.escape(str(folder))) as told:
        hfjax.pretrained(folder)
    return str(told.value)


def test_folders_that_hold_no_model_say_so(folder, tmp_path):
    assert "is missing: the folder of a model is expected" in refusal(tmp_path / "nowhere")
    assert "has no config.json" in refusal(tmp_path)
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    assert "has no weights: neither model.safetensors nor" in refusal(folder)
    (folder / "adapter_model.safetensors").write_bytes(b"")
    assert "an adapter is no model: merge it into one first" in refusal(folder)
    (folder / "pytorch_model.bin").write_bytes(b"")
    assert "(pytorch_model.bin), which run code when they are read" in refusal(folder)
    (folder / "config.json").write_text("{")
    assert "config.json cannot be read" in refusal(folder)


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", "model.safetensors.index.json"]
)
def test_a_link_to_nothing_is_told_as_such(name, folder):
    """As a hub's cache has it of which a blob was deleted."""
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to("../blobs/gone")
    told = f"{name} is a link to ../blobs/gone, which is not there: an ordinary file is expected"
    assert told in refusal(folder)


def test_what_would_go_along_and_is_a_link_to_nothing_is_refused_before_anything_is_written(
    folder, tmp_path
):
    (folder / "tokenizer").mkdir()
    model = hfjax.pretrained(folder)
    layout = layout_of(model)
    state = hfjax.init(layout, parameters=model.weights)
    (folder / "tokenizer.json").symlink_to("../blobs/gone")
    words = r"tokenizer\.json is a link to \.\./blobs/gone, which is not there"
    for ask in (
        lambda: hfjax.pretrained(folder),
        lambda: model.has_tokenizer,
        lambda: hfjax.export(tmp_path / "out", layout, state, like=model),
        lambda: source_snapshot.write_copy(model.folder, tmp_path / "run"),
    ):
        with pytest.raises(ValueError, match=words):
            ask()
    assert sorted(path.name for path in tmp_path.rglob("*") if path.parent != folder) == [
        "in",
        "run",
    ]
    (folder / "tokenizer.json").unlink()
    hfjax.export(tmp_path / "out", layout, state, like=model)


def test_the_index_decides_what_belongs_to_the_model(folder):
    for name in ("consolidated.safetensors", "adapter_model.safetensors"):
        (folder / name).write_bytes(b"nothing that is read")
    assert len(hfjax.pretrained(folder).mappings) == 39
    shutil.copy(folder / "part-0.safetensors", folder / "model.safetensors")
    assert "model.safetensors.index.json of other files: which one is the model" in refusal(folder)
    (folder / "model.safetensors").unlink()
    index = folder / "model.safetensors.index.json"
    right = json.loads(index.read_text())["weight_map"]

    def told(**changes):
        index.write_text(json.dumps({"weight_map": right | changes}))
        return refusal(folder)

    (folder.parent / "other.safetensors").write_bytes(b"")
    assert "../other.safetensors, which is not in the folder itself" in told(
        **{"lm_head.weight": "../other.safetensors"}
    )
    assert "names the file gone.safetensors, which is missing" in told(
        **{"lm_head.weight": "gone.safetensors"}
    )
    held = told(**{"model.norm.weight": "part-1.safetensors"})
    assert "names tensors that their files do not hold: model.norm.weight in part-1" in held


def test_all_that_does_not_fit_is_said_at_once(tmp_path):
    tensors = written(tmp_path, CONFIGS["llama"])
    del tensors["model.norm.weight"]
    tensors["model.layers.2.mlp.up_proj.weight"] = np.zeros((48, 31), np.float32)
    tensors["model.layers.1.mlp.down_proj.weight"] = np.zeros((32, 48), np.int32)
    tensors["model.layers.0.self_attn.q_proj.biased"] = np.zeros(32, np.float32)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(4, np.float32)
    write_file(tmp_path / "model.safetensors", tensors)
    told = refusal(tmp_path)
    assert "model.norm.weight [32] (our norm/scale) is missing" in told
    assert "up_proj.weight is float32[48, 31], [48, 32] of float32, bfloat16" in told
    assert "down_proj.weight is int32[32, 48], [32, 48] of float32" in told
    assert "(our layers/mlp/gate_up/kernel)" in told
    assert "model.layers.0.self_attn.q_proj.biased [32] is no tensor of this model" in told
    assert "inv_freq" not in told
    assert "No weight was read" in told


HUGE = {  # of a family that lists its layers, or experts, before the tensors of each
    "qwen3": {"num_hidden_layers": 10**9},
    "gpt2": {"n_layer": 10**18},
    "mixtral": {"num_local_experts": 10**9},
    "qwen3_moe": {"num_experts": 10**9},
}


@pytest.mark.parametrize("name", HUGE)
def test_more_layers_or_experts_than_tensors_are_refused_before_one_of_each_is_made(name, tmp_path):
    written(tmp_path, CONFIGS[name])
    changed(tmp_path, **HUGE[name])
    ((key, value),) = HUGE[name].items()
    assert f"config.json: {key} is {value}, and the files have " in refusal(tmp_path)
    text = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    assert f"config.json: {key} is {value}, and the files have " in refusal(tmp_path)


def test_names_may_lack_the_prefix_of_the_family(tmp_path):
    """As GPT-2's own files do, which hold masks of attention, too."""
    tensors = written(tmp_path, CONFIGS["gpt2"])
    plain = {name.removeprefix("transformer."): x for name, x in tensors.items()}
    plain["h.0.attn.bias"] = np.ones((1, 1, 32, 32), np.float32)
    write_file(tmp_path / "model.safetensors", plain)
    model = hfjax.pretrained(tmp_path)
    assert len(model.mappings) == len(tensors)
    assert "not read, since they follow from config.json: h.0.attn.bias" in str(model)


HEADERS = {
    "its header has 99999999999 bytes, the file": lambda head, data: (99999999999, head, data),
    "its header is no JSON": lambda head, data: (None, head[:-20], data),
    "stands in it twice": lambda head, data: (None, b'{"a":1,"a":2}', data),
    "is of dtype 'F4': one of F64, F32": lambda head, data: (
        None,
        head.replace(b"F32", b"F4 ", 1).replace(b"F4 ", b"F4", 1),
        data,
    ),
    "overlaps": lambda head, data: (None, moved(head, -4), data),
    "leaves a hole after": lambda head, data: (None, moved(head, 4), data + b"0000"),
    "the file ends 8 bytes before": lambda head, data: (None, head, data[:-8]),
    "8 bytes after the end of": lambda head, data: (None, head, data + b"12345678"),
    "bytes, its offsets": lambda head, data: (None, head.replace(b"[90,32]", b"[90,31]"), data),
}


def moved(head, by):
    """The header with its last tensor moved."""
    entries = json.loads(head)
    last = max(entries, key=lambda name: entries[name].get("data_offsets", [0])[0])
    entries[last]["data_offsets"] = [at + by for at in entries[last]["data_offsets"]]
    return json.dumps(entries).encode()


@pytest.mark.parametrize("words", HEADERS)
def test_headers_that_say_anything_else_than_the_file_are_refused(words, tmp_path):
    written(tmp_path, CONFIGS["tied"])
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    size = int.from_bytes(whole[:8], "little")
    length, head, data = HEADERS[words](whole[8 : 8 + size], whole[8 + size :])
    path.write_bytes((length or len(head)).to_bytes(8, "little") + head + data)
    told = refusal(tmp_path)
    assert words in told
    assert "model.safetensors is no whole file of safetensors" in told


@pytest.mark.parametrize("size", [0, 7, 8, 100])
def test_files_cut_at_any_point_are_refused(size, tmp_path):
    written(tmp_path, CONFIGS["tied"])
    os.truncate(tmp_path / "model.safetensors", size)
    assert "is no whole file of safetensors" in refusal(tmp_path)


def test_weights_that_cannot_be_trained_are_named(tmp_path):
    tensors = written(tmp_path, CONFIGS["llama"])
    name = "model.layers.2.mlp.gate_proj.weight"
    for wrong in (np.nan, np.inf):
        tensors[name][3, 5] = wrong
        write_file(tmp_path / "model.safetensors", tensors)
        model = hfjax.pretrained(tmp_path)
        with pytest.raises(ValueError, match=f"{re.escape(name)} holds numbers that are not finit"):
            hfjax.init(layout_of(model), parameters=model.weights)


def test_a_tied_head_may_be_there_twice_and_must_not_differ(tmp_path):
    tensors = written(tmp_path, CONFIGS["tied"])
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    write_file(tmp_path / "model.safetensors", tensors)
    model = hfjax.pretrained(tmp_path)
    layout = layout_of(model, "FSDP|TENSOR")
    state = hfjax.init(layout, parameters=model.weights)
    hfjax.export(tmp_path / "out", layout, state, like=model)
    assert_same_bits(tmp_path / "out", tmp_path)
    tensors["lm_head.weight"][80, 30] += 1
    write_file(tmp_path / "model.safetensors", tensors)
    model = hfjax.pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"tie_word_embeddings, and lm_head\.weight differs from"):
        hfjax.init(layout, parameters=model.weights)


def test_a_file_that_is_cut_while_it_is_read_is_named(tmp_path, monkeypatch):
    written(tmp_path, CONFIGS["llama"])
    model = hfjax.pretrained(tmp_path)

    def open_then_cut(tensor):
        found = open_to_read(tensor)
        os.truncate(tensor.file, 5000)
        return found

    monkeypatch.setattr(file_rows, "open_to_read", open_then_cut)
    with pytest.raises(ValueError, match=r"model\.safetensors ends within model\."):
        hfjax.init(layout_of(model), parameters=model.weights)


CHANGES = {
    "was written or replaced after its header was read, which says where model": lambda folder: (
        written(folder, CONFIGS["tied"], drawn())  # other weights, as long
    ),
    "was written or replaced after its header was read": lambda folder: os.utime(
        folder / "model.safetensors", ns=(0, 0)
    ),
    "was written or replaced after": lambda folder: os.truncate(folder / "model.safetensors", 5000),
    "safetensors is missing": lambda folder: (folder / "model.safetensors").unlink(),
    r"safetensors cannot be read \(Permission denied\)": lambda folder: None,
}


@pytest.mark.parametrize("words", CHANGES)
def test_a_file_that_is_not_as_its_header_was_read_is_named(words, tmp_path, monkeypatch):
    written(tmp_path, CONFIGS["tied"])
    model = hfjax.pretrained(tmp_path)
    CHANGES[words](tmp_path)
    if "Permission" in words:
        monkeypatch.setattr(os, "open", denied)
    with pytest.raises(ValueError, match=words):
        hfjax.init(layout_of(model, "DDP"), parameters=model.weights)
    if "Permission" in words:
        assert re.search(words, refusal(tmp_path))


def test_a_file_of_another_order_is_named_though_its_size_and_time_are_the_same(tmp_path):
    written(tmp_path, CONFIGS["tied"])
    model, file = hfjax.pretrained(tmp_path), tmp_path / "model.safetensors"
    before, data = os.stat(file), file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    head = json.loads(data[8 : 8 + length])
    one, other = [n for n in head if n.endswith(("k_proj.weight", "v_proj.weight"))][:2]
    head[one], head[other] = head[other], head[one]  # as long: of one shape
    text = json.dumps(head, separators=(",", ":")).encode()
    assert len(text) <= length
    file.write_bytes(data[:8] + text.ljust(length) + data[8 + length :])
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(ValueError, match="its size, time or header is another"):
        hfjax.init(layout_of(model, "DDP"), parameters=model.weights)


def test_a_file_that_is_written_while_it_is_read_is_named(tmp_path, monkeypatch):
    written(tmp_path, CONFIGS["tied"])
    model = hfjax.pretrained(tmp_path)
    usual = file_rows.fill

    def fill_while_another_writes(descriptor, at, into, tensor):
        usual(descriptor, at, into, tensor)
        with tensor.file.open("r+b") as file:
            file.seek(-4, os.SEEK_END)
            file.write(bytes(4))

    monkeypatch.setattr(file_rows, "fill", fill_while_another_writes)
    with pytest.raises(ValueError, match=r"model\.safetensors was written while it was read"):
        hfjax.init(layout_of(model, "DDP"), parameters=model.weights)


def denied(*_):
    raise PermissionError(13, "Permission denied")


def test_what_was_read_is_told_by_the_model(folders):
    model = hfjax.pretrained(folders / "tied")
    assert model.weights.read == 0
    hfjax.init(layout_of(model, "DDP"), parameters=model.weights)
    assert model.weights.read == model.bytes


def test_a_layout_of_another_model_is_refused(folder, tmp_path):
    model = hfjax.pretrained(folder)
    written(tmp_path / "other", CONFIGS["llama"] | {"intermediate_size": 64})
    other = hfjax.pretrained(tmp_path / "other")
    with pytest.raises(
        ValueError, match=r"mlp/gate_up/kernel \[32, 48, 1\]: it is \[4, 32, 64, 2\]"
    ):
        hfjax.init(layout_of(other), parameters=model.weights)
    state = hfjax.init(layout_of(other), parameters=other.weights)
    with pytest.raises(ValueError, match=r"\[4, 64, 32\] in the state, \[4, 48, 32\] in the model"):
        hfjax.export(tmp_path / "out", layout_of(other), state, like=model)


def test_exports_are_whole_or_not_there(folder, tmp_path, monkeypatch):
    model = hfjax.pretrained(folder)
    layout = layout_of(model)
    state = hfjax.init(layout, parameters=model.weights)
    with pytest.raises(ValueError, match=r"like=None\): the names, types and configuration"):
        hfjax.export(tmp_path / "out", layout, state)
    with pytest.raises(ValueError, match="in is a folder already: nothing is written over it"):
        hfjax.export(folder, layout, state, like=model)
    with pytest.raises(ValueError, match="dtype='int8'"):
        hfjax.export(tmp_path / "out", layout, state, like=model, dtype="int8")

    def full(*_):
        raise OSError(28, "No space left on device")

    for function in ("posix_fallocate", "pwrite", "rename"):
        with monkeypatch.context() as patch:
            patch.setattr(os, function, full)
            with pytest.raises(ValueError, match="No space left on device"):
                hfjax.export(tmp_path / "out", layout, state, like=model)
        assert [p.name for p in tmp_path.iterdir()] == ["in"]
    (stale := tmp_path / ".out.unfinished-12").mkdir()  # of a process that was killed
    (stale / "model.safetensors").write_bytes(b"half")
    with pytest.raises(ValueError, match="has no config"):
        hfjax.pretrained(stale)
    hfjax.export(tmp_path / "out", layout, state, like=model)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "out"]


def no_locks(*_):
    raise OSError(errno.ENOLCK, "No locks available")


@pytest.mark.parametrize("locks", [True, False])
def test_of_two_exports_into_one_folder_one_is_whole_and_the_other_says_so(
    locks, tmp_path, monkeypatch
):
    """The second begins when the files of the first are made: it is refused at once.

    Where a file system has no locks both write, and the first to end has the name.
    """
    written(tmp_path / "in", CONFIGS["tied"], drawn())
    model = hfjax.pretrained(tmp_path / "in")
    layout = layout_of(model, "DDP")
    first = hfjax.init(layout, parameters=model.weights)
    second = replace(first, params=jax.tree.map(lambda x: x / 2, first.params))
    usual, told = save.full_precision_params, []
    if not locks:
        monkeypatch.setattr(fcntl, "flock", no_locks)

    def read_while_another_begins(layout, state):
        if state is first:
            told.append(export(second))
        return usual(layout, state)

    def export(state):
        try:
            return hfjax.export(tmp_path / "out", layout, state, like=model)
        except ValueError as error:
            return str(error)

    monkeypatch.setattr(save, "full_precision_params", read_while_another_begins)
    told.append(export(first))
    refused = "out is being written by another process" if locks else "out was written by another"
    assert refused in told[0 if locks else 1]
    assert told[1 if locks else 0] == model.bytes
    one = hfjax.pretrained(tmp_path / "out").folder.tensors["model.embed_tokens.weight"]
    other = model.folder.tensors["model.embed_tokens.weight"]
    found, plain = read_rows(one, 0, one.num_rows), read_rows(other, 0, one.num_rows)
    np.testing.assert_array_equal(found, plain if locks else plain / 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


def test_what_goes_along_goes_along(folder, tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "README.md"):
        (folder / name).write_text("{}")
    (folder / "chat_template.jinja").write_text("")
    model = hfjax.pretrained(folder)
    layout = layout_of(model)
    hfjax.export(tmp_path / "out", layout, hfjax.init(layout, parameters=model.weights), like=model)
    names = {p.name for p in (tmp_path / "out").iterdir()}
    beside = {"tokenizer.json", "tokenizer_config.json", "generation_config.json"}
    assert names == beside | {"config.json", "model.safetensors", "chat_template.jinja"}


# -- types that differ -----------------------------------------------------------------------------


def cast_some(tensors, dtypes):
    """Tensors in types by the beginning of their names; the others in bfloat16."""
    kind = lambda name: next((d for start, d in dtypes.items() if name.startswith(start)), BF16)
    return {name: x.astype(kind(name)) for name, x in tensors.items()}


MIXED = {
    "a layer": ("llama", {"model.layers.1.": np.dtype("float16")}),
    "a norm": ("llama", {"model.layers.2.input": np.dtype("float32")}),
    "an expert": ("mixtral", {"model.layers.3.block_sparse_moe.experts.2": np.dtype("float32")}),
}


@pytest.mark.parametrize("case", MIXED)
def test_files_may_mix_types_and_come_out_as_they_were(case, tmp_path):
    name, dtypes = MIXED[case]
    plain = written(tmp_path / "plain", CONFIGS[name], drawn(BF16))
    values = {name: x.astype(np.float32) for name, x in plain.items()}
    shutil.copytree(tmp_path / "plain", tmp_path / "in")
    write_file(tmp_path / "in" / "model.safetensors", cast_some(values, dtypes))
    model = hfjax.pretrained(tmp_path / "in", **PADDED)
    wanted = parameters(one := hfjax.pretrained(tmp_path / "plain", **PADDED), layout_of(one))
    layout = layout_of(model, "FSDP|TENSOR")
    for path, x in parameters(model, layout).items():
        np.testing.assert_allclose(x, wanted[path], rtol=0, atol=1e-7, err_msg=path)
    state = hfjax.init(layout, parameters=model.weights)
    hfjax.export(tmp_path / "out", layout, state, like=model)
    assert_same_bits(tmp_path / "out", tmp_path / "in")


def test_a_tied_head_in_another_type_is_refused(tmp_path):
    tensors = written(tmp_path, CONFIGS["tied"], drawn(BF16))
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].astype(np.float32)
    write_file(tmp_path / "model.safetensors", tensors)
    told = refusal(tmp_path)
    assert "lm_head.weight is float32, and model.embed_tokens.weight, which is the same" in told


def test_what_cannot_be_read_again_is_not_written(folder, tmp_path):
    model = hfjax.pretrained(folder)
    layout = layout_of(model)
    state = hfjax.init(layout, parameters=model.weights)  # numbers up to 50,000
    large = jax.tree.map(lambda x: x * 2, state.params)
    with pytest.raises(ValueError, match=r"\.weight \(our .*\) would hold numbers that are not"):
        hfjax.export(tmp_path / "a", layout, replace(state, params=large), model, dtype="float16")
    assert not list(tmp_path.glob("*a*"))


def test_a_configuration_that_was_changed_is_not_written_over_by_the_old_one(folder, tmp_path):
    model = hfjax.pretrained(folder, epsilon=0.1, length=16)
    layout = layout_of(model)
    state = hfjax.init(layout, parameters=model.weights)
    with pytest.raises(ValueError, match=r"epsilon is 0.1 in the state, 1e-06 in the model"):
        hfjax.export(tmp_path / "out", layout, state, like=model)
    shutil.copytree(folder, tmp_path / "other")
    changed(tmp_path / "other", rope_theta=5e4)
    shorter = hfjax.pretrained(folder, length=16)
    layout = layout_of(shorter)
    with pytest.raises(ValueError, match=r"rotary is Rope\(base=10000.0"):
        hfjax.export(tmp_path / "out", layout, state, like=tmp_path / "other")
    hfjax.export(tmp_path / "out", layout, state, like=folder)


def test_master_weights_go_out_in_full_and_averages_as_averages(tmp_path):
    written(tmp_path / "in", CONFIGS["llama"], drawn())
    model = hfjax.pretrained(tmp_path / "in", stored="float32")
    mesh = hfjax.make_mesh(fsdp=8)
    optimizer = hfjax.optimizers.master_weights(hfjax.optimizers.ema(optax.sgd(0.1), 0.5))
    layout = hfjax.layout(model.create, optimizer, mesh, SPLIT)
    state = hfjax.init(layout, parameters=model.weights)
    assert state.params["tokens"].dtype == jax.numpy.bfloat16
    hfjax.export(tmp_path / "out", layout, state, like=model)
    assert_same_bits(tmp_path / "out", tmp_path / "in")
    moved = jax.tree.map(lambda x: x + 1, hfjax.optimizers.averaged(state).params)
    hfjax.export(tmp_path / "moved", layout, replace(state, params=moved), like=model)
    tensor = hfjax.pretrained(tmp_path / "moved").folder.tensors["model.norm.weight"]
    np.testing.assert_array_equal(read_rows(tensor, 0, 32), np.asarray(moved["norm"]["scale"]))


def test_a_folder_of_links_as_a_hub_keeps_it_is_whole(folder, tmp_path):
    for name in ("tokenizer.json", "generation_config.json", "chat_template.jinja"):
        (folder / name).write_text("{}")
    (tmp_path / "links").mkdir()
    for path in folder.iterdir():
        (tmp_path / "links" / path.name).symlink_to(path)
    model = hfjax.pretrained(tmp_path / "links")
    layout = layout_of(model)
    hfjax.export(tmp_path / "out", layout, hfjax.init(layout, parameters=model.weights), model)
    names = {p.name for p in (tmp_path / "out").iterdir()}
    assert {"tokenizer.json", "generation_config.json", "chat_template.jinja"} < names
    with pytest.raises(ValueError, match="the name of a new folder is expected"):
        hfjax.export("/", layout, hfjax.init(layout), model)
