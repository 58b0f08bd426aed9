"""With torch and peft at hand: adapters go in, train a step, and come out as theirs, both ways.

Slow, and skipped where they are not installed; tests/adapters has what they computed before.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import hfjax
from hfjax.adapters import export_adapter, load_adapter, lora
from hfjax.models.loss import next_token_loss
from hfjax.weights.tensor_files import read_header, read_rows

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from tests.adapters.make_fixtures import adapted, gradients_of, read  # noqa: E402
from tests.pretrained.make_fixtures import filled  # noqa: E402
from tests.pretrained.weights_of import tokens  # noqa: E402

SPLIT = hfjax.FSDP.edit(replicate_below=0)
FILE = "adapter_model.safetensors"
ROWS, LENGTH, VOCAB = 2, 48, 61
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
BOTH = ["embed_tokens", "lm_head"]
PATTERNS: dict[str, Any] = {
    "rank_pattern": {r".*\.mlp\..*": 3, "q_proj": 6},
    "alpha_pattern": {"^model.layers.*o_proj": 9},
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-list": ("llama2", {"target_modules": ["q_proj", "v_proj", "down_proj"]}),
    "llama-rslora": (
        "llama2",
        {"target_modules": "all-linear", "use_rslora": True, "lora_alpha": 2},
    ),
    "llama-patterns": ("llama2", {"target_modules": "all-linear", **PATTERNS}),
    "llama-whole": ("llama2", {"target_modules": ["o_proj"], "modules_to_save": BOTH}),
    "llama-norm": ("llama2", {"target_modules": ["o_proj"], "modules_to_save": ["model.norm"]}),
    "llama3-tied": (
        "llama3",
        {"target_modules": ["q_proj"], "modules_to_save": BOTH[:1], "ensure_weight_tying": True},
    ),
    "qwen3-regex": ("qwen3", {"target_modules": r".*\.(self_attn\.[qv]_proj|mlp\.up_proj)"}),
    "qwen3-all": ("qwen3", {"target_modules": "all-linear", "exclude_modules": ["k_proj"]}),
    "qwen2": ("qwen2", {"target_modules": "all-linear"}),
    "gemma3": ("gemma3_text", {"target_modules": "all-linear", "layers_to_transform": None}),
    "gpt2-all": ("gpt2", {"target_modules": "all-linear"}),
    "gpt2-list": ("gpt2", {"target_modules": ["c_attn", "attn.c_proj"], "use_rslora": True}),
    "mixtral": ("mixtral", {"target_modules": ATTENTION}),
    "qwen3_moe": ("qwen3_moe", {"target_modules": ATTENTION}),
}


def computed(model: Any, rows: np.ndarray) -> tuple[np.ndarray, float, dict[str, np.ndarray]]:
    """Return peft's logits, loss and gradients."""
    given = torch.from_numpy(rows.astype(np.int64))
    logits = model(input_ids=given[:, :-1], use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), given[:, 1:].flatten())
    loss.backward()
    return logits.detach().numpy(), float(loss.detach()), gradients_of(model)


def arrays_of(folder: Path) -> dict[str, np.ndarray]:
    (file,) = folder.glob("*.safetensors")
    return {name: read_rows(t, 0, t.num_rows) for name, t in read_header(file).items()}


def apart(found: Any, wanted: Any) -> float:
    found, wanted = np.asarray(found), np.asarray(wanted)
    assert found.shape == wanted.shape
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


def values_of(layout: Any, state: Any, rows: np.ndarray) -> tuple[np.ndarray, float, Any]:
    """Return our logits, loss and gradients, these as a state."""
    batch: Any = {"tokens": rows}
    graph, parameters, rest = nnx.split(hfjax.to_model(layout, state), nnx.Param, ...)

    def loss(parameters):
        logits = nnx.merge(graph, parameters, rest)(batch)
        logits = logits.outputs if hasattr(logits, "outputs") else logits
        mean = next_token_loss(logits, batch)
        return mean.total / mean.weight, logits

    (value, logits), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(parameters)
    as_state = replace(state, params=nnx.to_pure_dict(gradients))
    return np.asarray(logits)[..., :VOCAB], float(value), as_state


def layout_of(model: Any, count: int, strategy: Any, **sizes: int) -> Any:
    mesh = hfjax.make_mesh(devices=jax.devices()[:count], **sizes)
    return hfjax.layout(model, optax.adam(1e-2), mesh, strategy)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_an_adapter_of_peft_computes_goes_out_and_merges_as_it_does_there(case, tmp_path):
    family, options = CASES[case]
    base = filled(family)
    base.save_pretrained(tmp_path / "base")
    adapted(tmp_path / "in", base, {"r": 4, "lora_alpha": 6, **options})
    rows = tokens(VOCAB, ROWS, LENGTH)
    logits, loss, gradients = computed(theirs := read(tmp_path / "in", filled(family)), rows)
    model = hfjax.pretrained(tmp_path / "base", pad_vocab_to=4)
    ours = load_adapter(tmp_path / "in", model)
    layout = layout_of(ours, 1, hfjax.DDP)
    state = hfjax.init(layout, parameters=ours.weights)
    found_logits, found_loss, as_state = values_of(layout, state, rows)
    errors = {"logits": apart(found_logits, logits), "loss": apart(found_loss, loss)}
    export_adapter(tmp_path / "gradients", layout, as_state)
    found = arrays_of(tmp_path / "gradients")
    if base.config.tie_word_embeddings:  # theirs is in the embedding's
        gradients |= {name: found[name] for name in found if name.endswith("lm_head.weight")}
    assert found.keys() == gradients.keys()
    errors |= {name: apart(x, gradients[name]) for name, x in found.items()}
    assert max(errors.values()) < 1e-5, errors
    export_adapter(tmp_path / "out", layout, state)
    old, new = arrays_of(tmp_path / "in"), arrays_of(tmp_path / "out")
    assert old.keys() == new.keys()
    assert all(np.array_equal(new[name], x) for name, x in old.items())
    hfjax.export(tmp_path / "merged", layout, state, like=model)
    theirs.merge_and_unload().save_pretrained(tmp_path / "theirs")
    merged, wanted = arrays_of(tmp_path / "merged"), arrays_of(tmp_path / "theirs")
    assert merged.keys() == wanted.keys()
    assert max(apart(merged[name], x) for name, x in wanted.items()) < 1e-6


OURS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama2", {"targets": "all-linear", "alpha": 5}),
    "llama-whole": ("llama2", {"targets": "attention", "modules_to_save": ("tokens", "unembed")}),
    "llama-patterns": (
        "llama2",
        {"targets": ("attention", "mlp"), "rank_pattern": {"q": 3, "mlp": 2}, "use_rslora": True}
        | {"alpha_pattern": {"attention/out": 7}, "alpha": 3},
    ),
    "tied": ("qwen3", {"targets": "mlp", "modules_to_save": ("tokens",)}),
    "gpt2": ("gpt2", {"targets": "all-linear", "alpha": 5}),
    "gpt2-whole": ("gpt2", {"targets": "mlp/down", "modules_to_save": ("tokens", "positions")}),
    "gemma3": ("gemma3_text", {"targets": "all-linear"}),
    "mixtral": ("mixtral", {"targets": "all-linear"}),
    "qwen3_moe": ("qwen3_moe", {"targets": "attention"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", OURS)
def test_an_adapter_that_trained_here_computes_alike_in_peft(case, tmp_path):
    family, options = OURS[case]
    filled(family).save_pretrained(tmp_path / "base")
    model = hfjax.pretrained(tmp_path / "base", pad_vocab_to=4)
    ours = lora(model, rank=4, **options)
    layout = layout_of(ours, 4, SPLIT | hfjax.TENSOR, fsdp=2, tensor=2)
    state = hfjax.init(layout, parameters=ours.weights)
    rows = tokens(VOCAB, ROWS, LENGTH)
    step = hfjax.train_step(layout, next_token_loss)
    for _ in range(3):
        state, _ = step(state, {"tokens": rows})
    logits = np.asarray(hfjax.predict_step(layout)(state, {"tokens": rows}))[..., :VOCAB]
    export_adapter(tmp_path / "out", layout, state)
    hfjax.export(tmp_path / "merged", layout, state, like=model)
    base = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "base", attn_implementation="eager", dtype=torch.float32
    )
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "out").eval()
    given = torch.from_numpy(rows[:, :-1].astype(np.int64))
    with torch.no_grad():
        assert apart(theirs(input_ids=given, use_cache=False).logits.numpy(), logits) < 1e-5
    wanted = {n: x.numpy() for n, x in peft.get_peft_model_state_dict(theirs).items()}
    found = arrays_of(tmp_path / "out")
    assert wanted.keys() == found.keys()
    assert all(np.array_equal(wanted[name], x) for name, x in found.items())
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tmp_path / "base")
    merged = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "merged", attn_implementation="eager", dtype=torch.float32
    )
    with torch.no_grad():
        assert apart(merged(input_ids=given, use_cache=False).logits.numpy(), logits) < 1e-5
