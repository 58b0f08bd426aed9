"""Adapters in peft's files: as peft computes with them, read, written and merged.

tests/adapters holds what peft made of tiny models; make_fixtures.py there writes it anew.
"""

import json
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import hfjax
from hfjax.adapters import Lora, export_adapter, load_adapter, lora
from hfjax.adapters.lora_model import LoraOptions
from hfjax.adapters.peft_config import parse_config
from hfjax.adapters.peft_rules import adapter_mappings, has_inputs_first, matrices_of
from hfjax.adapters.peft_save import AdapterContent
from hfjax.models.loss import next_token_loss
from hfjax.utils.paths import flatten
from hfjax.weights.families import FAMILIES, parse_config as parse_model_config
from hfjax.weights.tensor_files import read_header, read_rows
from hfjax.weights.tensor_rules import Rule
from tests.model_folders import write_file
from tests.pretrained.weights_of import drawn, told
from tests.test_decoder import apart, in_files, pretrained_of

FOLDER = Path(__file__).with_name("adapters")
FIXTURES = sorted(path.parent.name for path in FOLDER.glob("*/adapter_config.json"))
SPLIT = hfjax.FSDP.edit(replicate_below=0)
FILE = "adapter_model.safetensors"
UNREAD: Any = None  # a state that is refused before it is read


@cache
def expected(family: str) -> dict[str, np.ndarray]:
    return dict(np.load(FOLDER / family / "expected.npz"))


def adapter_folder(family: str, folder: Path, **config: Any) -> Path:
    """Write the adapter of a fixture, its weights drawn; some keys of its configuration changed."""
    folder.mkdir(parents=True)
    record = json.loads((FOLDER / family / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(record | config))
    shapes = json.loads((FOLDER / family / "tensors.json").read_text())["tensors"]
    write_file(folder / FILE, {name: drawn(name, tuple(shape)) for name, shape in shapes.items()})
    return folder


def arrays_of(file: Path) -> dict[str, np.ndarray]:
    return {name: read_rows(t, 0, t.num_rows) for name, t in read_header(file).items()}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    made = tmp_path_factory.mktemp("peft")
    for family in FIXTURES:
        adapter_folder(family, made / family / "adapter")
    return made


@cache
def base_of(place: Path, family: str) -> Any:
    return pretrained_of(family, place / family / "base")


def layout_of(model: Any, count: int = 1, strategy=hfjax.DDP, **sizes: int) -> Any:
    mesh = hfjax.make_mesh(devices=jax.devices()[:count], **sizes)
    return hfjax.layout(model, optax.sgd(1.0), mesh, strategy)


@pytest.mark.short("llama2")
@pytest.mark.parametrize("family", FIXTURES)
def test_logits_loss_and_all_gradients_of_adapters_are_those_of_peft(family, place, tmp_path):
    wanted = expected(family)
    adapted = load_adapter(place / family / "adapter", base_of(place, family))
    layout = layout_of(adapted)
    state = hfjax.init(layout, parameters=adapted.weights)
    batch: Any = {"tokens": wanted["tokens"]}
    graph, parameters, rest = nnx.split(hfjax.to_model(layout, state), nnx.Param, ...)

    def loss(parameters):
        logits = nnx.merge(graph, parameters, rest)(batch)
        mean = next_token_loss(logits, batch)
        return mean.total / mean.weight, logits

    (found, logits), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(parameters)
    as_state = replace(state, params=nnx.to_pure_dict(gradients))
    export_adapter(tmp_path / "out", layout, as_state)
    by_name = arrays_of(tmp_path / "out" / FILE)
    names = {name.removeprefix("gradient/") for name in wanted if name.startswith("gradient/")}
    assert by_name.keys() == names
    errors = {n: apart(told(n, x), wanted[f"gradient/{n}"]) for n, x in by_name.items()}
    errors["logits"] = apart(logits[..., : wanted["logits"].shape[-1]], wanted["logits"])
    errors["loss"] = apart(found, wanted["loss"])
    assert max(errors.values()) < 1e-5, errors


@pytest.mark.short("llama2-one")
@pytest.mark.parametrize("devices", [pytest.param(1, id="one"), pytest.param(4, id="four")])
@pytest.mark.parametrize("family", FIXTURES)
def test_what_is_read_is_written_again_and_merged_as_peft_merges_it(
    family, devices, place, tmp_path
):
    model = base_of(place, family)
    adapted = load_adapter(place / family / "adapter", model)
    layout = layout_of(adapted)
    if devices == 4:
        layout = layout_of(adapted, 4, SPLIT | hfjax.TENSOR, fsdp=2, tensor=2)
    state = hfjax.init(layout, parameters=adapted.weights)
    written = export_adapter(tmp_path / "out", layout, state)
    old, new = (arrays_of(path / FILE) for path in (place / family / "adapter", tmp_path / "out"))
    assert old.keys() == new.keys()
    assert all(np.array_equal(new[name], x) for name, x in old.items())
    assert written == sum(x.nbytes for x in new.values())
    again = load_adapter(tmp_path / "out", model)
    assert again.options == adapted.options
    merged = in_files(model, layout, state, tmp_path / "merged")
    wanted = {n: x for n, x in expected(family).items() if n.startswith("merged/")}
    assert {f"merged/{name}" for name in merged} == wanted.keys()
    for name, x in merged.items():
        scale = np.linalg.norm(x.reshape(-1)) + 1
        error = np.abs(x @ np.ones(x.shape[-1]) - wanted[f"merged/{name}"]).max()
        assert error < 1e-6 * scale, name


@pytest.mark.slow
@pytest.mark.parametrize(("family", "target"), [("gpt2", "attention"), ("qwen3_moe", "mlp")])
def test_a_new_adapter_is_the_base_with_adapters_of_the_seed(family, target, tmp_path):
    model = pretrained_of(family, tmp_path / "base")
    adapted = lora(model, rank=3, targets=[target])
    layout = layout_of(adapted, 2, SPLIT, fsdp=2)
    state = hfjax.init(layout, seed=5, parameters=adapted.weights)
    seeded = flatten(hfjax.init(layout, seed=5).params)
    for path, x in flatten(state.params).items():
        if adapted.is_adapter(path):
            assert np.array_equal(x, seeded[path])
    merged = in_files(model, layout, state, tmp_path / "merged")
    base = arrays_of(tmp_path / "base" / "model.safetensors")
    assert all(np.array_equal(merged[name], x) for name, x in base.items())
    if family == "gpt2":
        export_adapter(tmp_path / "half", layout, state, dtype="bf16")
        half = read_header(tmp_path / "half" / FILE).values()
        assert {t.dtype.name for t in half} == {"bfloat16"}


# -- rules -----------------------------------------------------------------------------------------

MODELS = Path(__file__).with_name("pretrained")
UNUSUAL: dict[str, dict[str, Any]] = {
    "gpt2": {"n_head": 1},
    "llama2": {"num_key_value_heads": 1, "head_dim": 8},
    "qwen2": {"num_key_value_heads": 4},
    "gemma2": {"num_attention_heads": 1, "num_key_value_heads": 1},
    "qwen3_moe": {"mlp_only_layers": []},
}


def model_configs():
    for path in sorted(MODELS.glob("*/config.json")):
        yield pytest.param(path, {}, id=path.parent.name)
        if changes := UNUSUAL.get(path.parent.name):
            yield pytest.param(path, changes, id=f"{path.parent.name}-unusual")


def in_file(rule: Rule, x: np.ndarray) -> np.ndarray:
    """Return the tensor of a file whose block of ours is x."""
    return x.transpose(np.argsort(rule.order)).reshape(rule.shape)


@pytest.mark.parametrize(("path", "changes"), list(model_configs()))
def test_products_of_files_are_the_matrices_that_ours_are(path, changes):
    record = json.loads(path.read_text()) | changes
    config, family = parse_model_config(record), FAMILIES[record["model_type"]]
    adapted = Lora(lambda rngs: family.model(config, rngs=rngs), LoraOptions(rank=2, alpha=6.0))
    base = list(family.table(config).expand())
    matrices = matrices_of(adapted.maps, base)
    shapes = {k: x.shape for k, x in flatten(shapes_of(adapted)).items() if "/lora/" in k}
    names, filled = [], []
    for adapter in adapted.adapters:
        found = list(adapter_mappings(adapter, matrices[adapter.map.name]))
        names += [m.name for m in found]
        filled += [(m.path, m.index) for m in found]
        for m in found:
            assert shapes[m.path][len(m.index) :] == m.rule.block
        rule_a, rule_b = found[0].rule, found[1].rule
        a, b = (drawn(r.theirs, r.block) for r in (rule_a, rule_b))
        product = np.tensordot(a, b, 1)  # ours: inputs, outputs
        theirs = in_file(rule_b, b) @ in_file(rule_a, a)  # [out, in]
        rule = matrices[adapter.map.name][0].rule
        theirs = theirs.T if has_inputs_first(rule, adapter.map.inputs) else theirs
        assert np.allclose(in_file(rule, product.reshape(rule.block)), theirs, atol=1e-5)
    assert len({*names}) == len(names)
    assert len({*filled}) == len(filled)
    counts = {p: int(np.prod(s[: len(i)])) for p, i in filled for s in [shapes[p]]}
    assert len(filled) == sum(counts.values())
    assert counts.keys() == shapes.keys()


def shapes_of(adapted: Lora) -> Any:
    model = nnx.eval_shape(lambda: adapted(nnx.Rngs(0)))
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


# -- configurations --------------------------------------------------------------------------------

PLAIN: dict[str, Any] = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
Q = "model.layers.{}.self_attn.q_proj"


def test_targets_ranks_and_alphas_are_chosen_as_peft_chooses_them():
    config = parse_config(PLAIN | {"rank_pattern": {r"layers\.1\..*q_proj": 2, "q_proj": 3}})
    assert [config.rank_of(Q.format(i)) for i in (0, 1, 11)] == [3, 2, 3]
    assert config.is_target(Q.format(0))
    assert not config.is_target("model.layers.0.self_attn.xq_proj")
    regex = parse_config(PLAIN | {"target_modules": r".*\.1\..*_proj"})
    assert [regex.is_target(Q.format(i)) for i in (0, 1)] == [False, True]
    others = {"target_modules": "all-linear", "exclude_modules": ["q_proj"]}
    everything = parse_config(PLAIN | others)
    assert [everything.is_target(x) for x in (Q.format(0), "a.k_proj")] == [False, True]
    layers = parse_config(PLAIN | {"layers_to_transform": [1, 2]})
    assert [layers.is_target(Q.format(i)) for i in (0, 1, 12)] == [False, True, False]
    saved = parse_config(PLAIN | {"modules_to_save": ["self_attn"]})
    assert not saved.is_target(Q.format(0))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3': LORA is read alone. Merge it"),
        ({"use_dora": True}, "use_dora is True: DoRA scales the columns"),
        ({"target_parameters": ["experts.w1"]}, "target_parameters is .*that are no linear maps"),
        ({"lora_bias": True}, "lora_bias is True: biases of the adapters"),
        ({"layer_replication": [[0, 1]]}, "layer_replication is .*several times"),
        ({"kasa_config": {"a": 1}}, "kasa_config is .*singular values"),
        ({"bias": "all"}, "bias is 'all': biases that train with the adapter are not read"),
        ({"new_thing": 3}, "new_thing is 3, a key that is not known here"),
        (
            {"init_lora_weights": "pissa_niter_4"},
            "init_lora_weights is .*which changes the base's weights, too",
        ),
        ({"r": 0}, "r is 0, a whole number from 1 on is expected"),
        ({"lora_alpha": 0}, "lora_alpha is 0, a number other than 0 is expected"),
        ({"target_modules": 3}, "target_modules is 3, a list of names"),
        ({"target_modules": "("}, r"\( is no regular expression"),
        ({"rank_pattern": {"q": "4"}}, "rank_pattern is .*an object of ranks is expected"),
        ({"lora_dropout": 1}, "lora_dropout is 1, a number from 0 to below 1"),
    ],
)
def test_a_configuration_of_something_else_is_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=f"adapter_config.json: {message}"):
        parse_config(PLAIN | changes)


@pytest.mark.parametrize(
    ("family", "base", "changes", "message"),
    [
        ("qwen3", "qwen3", {"target_modules": ["c_attn"]}, "are no linear maps of .*another model"),
        (
            *("qwen3", "qwen3", {"target_modules": r".*\.0\..*q_proj"}),
            "gives some layers of layers/attention/qkv/q an adapter that others have not",
        ),
        (
            *("qwen3", "qwen3", {"rank_pattern": {"layers.1.*": 4}}),
            "gives some layers of layers/attention/out a rank that others",
        ),
        ("qwen3", "qwen3", {"r": 3}, r"is float32\[2, \d+\], \[3, \d+\] of float32"),
        (
            "qwen3",
            "qwen3",
            {"target_modules": ["q_proj", "k_proj"]},
            r"k_proj.lora_A.weight .*miss",
        ),
        ("qwen3", "qwen3", {"target_modules": ["q_proj"]}, "is no tensor of this model"),
        ("qwen3", "gpt2", {}, "are no linear maps of .*c_attn.*another model"),
        ("llama2", "qwen3", {}, r"o_proj.lora_A.weight is float32\[2, 48\], \[2, 64\] of"),
        ("qwen3", "qwen3", {"r": 80}, "rank=80 of layers/attention/out"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(family, base, changes, message, place, tmp_path):
    folder = adapter_folder(family, tmp_path / "adapter", **changes)
    with pytest.raises(ValueError, match=message):
        load_adapter(folder, base_of(place, base))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model.embed_tokens.lora_embedding_A", "embedding or head.*modules_to_save"),
        ("lm_head.lora_A.weight", "embedding or head.*modules_to_save"),
        ("model.layers.0.mlp.experts.0.w1.lora_A.weight", "adapter of an expert"),
        ("model.layers.0.self_attn.q_proj.lora_magnitude_vector", "no tensor of a plain LoRA"),
        ("model.embed_tokens.weight", "one of two matrices which are the same.*ensure_weight"),
    ],
)
def test_tensors_of_other_kinds_are_refused_by_name(name, message, place, tmp_path):
    folder = adapter_folder("qwen3", tmp_path / "adapter")
    arrays = arrays_of(folder / FILE) | {f"base_model.model.{name}": np.zeros((61, 48), np.float32)}
    write_file(folder / FILE, arrays)
    with pytest.raises(ValueError, match=message):
        load_adapter(folder, base_of(place, "qwen3"))


def test_a_folder_without_a_file_and_a_function_are_refused(place, tmp_path):
    shutil.copytree(place / "gpt2" / "adapter", tmp_path / "adapter")
    (tmp_path / "adapter" / FILE).unlink()
    with pytest.raises(ValueError, match=r"has no adapter_model\.safetensors: the folder of an ad"):
        load_adapter(tmp_path / "adapter", base_of(place, "gpt2"))
    with pytest.raises(ValueError, match=r"what hfjax\.pretrained returns is expected"):
        load_adapter(place / "gpt2" / "adapter", base_of(place, "gpt2").create)


def test_an_adapter_of_a_model_of_another_name_is_told(place, tmp_path, caplog):
    folder = adapter_folder("gpt2", tmp_path / "adapter", base_model_name_or_path="org/other")
    with caplog.at_level("WARNING"):
        load_adapter(folder, base_of(place, "gpt2"))
    assert "was trained on org/other, and is given" in caplog.text


# -- writing ---------------------------------------------------------------------------------------


def test_what_cannot_be_written_is_refused(place, tmp_path):
    model = base_of(place, "gpt2")
    cases = [
        (model.create, {}, "export_adapter: the layout's model has no adapters"),
        (lora(model.create, rank=2), {}, "the base is a function"),
        (lora(model, rank=2, modules_to_save="mlp/up"), {}, "has an adapter and trains whole"),
        (lora(model, rank=2), {"dtype": "int8"}, "dtype='int8': one of float32"),
        (lora(model, rank=2), {}, "is a folder already: nothing is written over it"),
    ]
    for adapted, options, message in cases:
        with pytest.raises(ValueError, match=message):
            export_adapter(tmp_path, layout_of(adapted), UNREAD, **options)


def test_experts_that_train_whole_are_not_written(place, tmp_path):
    model = pretrained_of("mixtral", tmp_path / "base")
    layout = layout_of(lora(model, rank=2, modules_to_save="mlp/each"))
    with pytest.raises(ValueError, match="peft has other names for experts and routers"):
        export_adapter(tmp_path / "out", layout, UNREAD)


def test_adapters_of_dense_layers_among_experts_are_not_written(tmp_path):
    model = pretrained_of("qwen3_moe", tmp_path / "base")
    layout = layout_of(lora(model, rank=2, targets=["mlp"]))
    with pytest.raises(ValueError, match="a dense layer of a model with experts: peft takes"):
        export_adapter(tmp_path / "out", layout, UNREAD)


def test_ranks_and_alphas_by_pattern_are_written_as_peft_reads_them(place, tmp_path):
    model = base_of(place, "gpt2")
    patterns = {"rank_pattern": {"qkv": 3}, "alpha_pattern": {"attention/out": 7.5}}
    adapted = lora(model, rank=2, alpha=5, targets=["attention", "mlp/down"], **patterns)
    content = AdapterContent(adapted, model)
    config, shapes = content.config, {m.name: m.rule.shape for m in content.mappings}
    assert config["target_modules"] == ["c_attn", "c_proj"]
    assert (config["r"], config["lora_alpha"]) == (2, 5)
    assert config["rank_pattern"] == {"c_attn": 3}
    assert config["alpha_pattern"] == {"attn.c_proj": 7.5}
    assert config["fan_in_fan_out"] is True
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    write_file(tmp_path / FILE, {name: np.zeros(x, np.float32) for name, x in shapes.items()})
    again = load_adapter(tmp_path, model)
    ours = [(x.map.name, x.rank, x.scale) for x in adapted.adapters]
    assert [(x.map.name, x.rank, x.scale) for x in again.adapters] == ours
