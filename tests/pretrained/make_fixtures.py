"""Writes what transformers makes of tiny models: logits, loss and gradients, in float32.

Run it where torch and transformers are installed (jax is not needed):

    PYTHONPATH=. python tests/pretrained/make_fixtures.py [family …]

A folder has the model's config.json, tensors.json (names, shapes and dtypes as in its files, and
the versions) and expected.npz. Weights are drawn from their names (weights_of.py). rope.json has
the speeds of rotary positions of published models, whose keys are in published.json.
"""

# pyright: reportMissingImports=false, reportReturnType=false, reportArgumentType=false

import importlib
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import torch
import transformers
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.pretrained.weights_of import drawn, tokens, told

HERE = Path(__file__).parent
ROWS, LENGTH = 2, 128
SMALL = {"vocab_size": 61, "hidden_size": 48, "intermediate_size": 40, "num_attention_heads": 4}
SHAPE: dict[str, Any] = {**SMALL, "num_hidden_layers": 3, "num_key_value_heads": 2}
LONG = {"max_position_embeddings": LENGTH, "pad_token_id": None, "bos_token_id": 1}
EXPERTS = {"num_experts_per_tok": 2, "eos_token_id": 2}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 4.0,
    "original_max_position_embeddings": 8,
}
GEMMA: dict[str, Any] = {**SHAPE, "head_dim": 16, "query_pre_attn_scalar": 24, "eos_token_id": 2}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": (
        "GPT2Config",
        {"vocab_size": 61, "n_positions": LENGTH, "n_embd": 48, "n_layer": 3, "n_head": 4}
        | {"bos_token_id": 1, "eos_token_id": 2},
    ),
    "llama2": ("LlamaConfig", {**SHAPE, **LONG}),
    "llama3": (
        "LlamaConfig",
        {**SHAPE, **LONG, "rope_parameters": LLAMA3, "tie_word_embeddings": True, "head_dim": 16},
    ),
    "mistral": ("MistralConfig", {**SHAPE, **LONG, "sliding_window": 24, "head_dim": 16}),
    "qwen2": (
        "Qwen2Config",
        {**SHAPE, **LONG, "rope_parameters": YARN, "use_sliding_window": True}
        | {"sliding_window": 24, "max_window_layers": 1},
    ),
    "qwen3": (
        "Qwen3Config",
        {**SHAPE, **LONG, "head_dim": 16, "tie_word_embeddings": True},
    ),
    "gemma2": (
        "Gemma2Config",
        {**GEMMA, **LONG, "num_hidden_layers": 4, "sliding_window": 24}
        | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "gemma3_text": (
        "Gemma3TextConfig",
        {**GEMMA, **LONG, "num_hidden_layers": 7, "sliding_window": 24}
        | {
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            }
        },
    ),
    "mixtral": (
        "MixtralConfig",
        {**SHAPE, **LONG, **EXPERTS, "num_local_experts": 4, "head_dim": 16},
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {**SHAPE, **LONG, **EXPERTS, "num_experts": 4, "moe_intermediate_size": 24}
        | {"norm_topk_prob": True, "mlp_only_layers": [1], "head_dim": 16},
    ),
}


def of_files(model: Any) -> dict[str, np.ndarray]:
    """Return the tensors of a model by the names that they have in files."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return load_file(Path(folder, "model.safetensors"))


def filled(family: str) -> Any:
    """Return a family's model whose weights are drawn."""
    kind, keys = FAMILIES[family]
    config = getattr(transformers, kind)(**keys, dtype="float32")
    config._attn_implementation = "eager"
    made = of_files(AutoModelForCausalLM.from_config(config))
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        weights = {name: drawn(name, x.shape) for name, x in made.items()}
        save_file(weights, Path(folder, "model.safetensors"), {"format": "pt"})
        how: dict[str, Any] = {"attn_implementation": "eager", "dtype": torch.float32}
        model, told_of = AutoModelForCausalLM.from_pretrained(
            folder, output_loading_info=True, **how
        )
        assert not any(told_of.values()), told_of
    again = of_files(model)
    assert all(np.array_equal(again[name], x) for name, x in weights.items())
    return model.eval()


def expected(model: Any) -> Iterator[tuple[str, np.ndarray]]:
    """Return tokens, logits, the loss, and what is written down of each gradient."""
    rows = tokens(model.config.vocab_size, ROWS, LENGTH)
    given = torch.from_numpy(rows.astype(np.int64))
    logits = model(input_ids=given[:, :-1], use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), given[:, 1:].flatten())
    loss.backward()
    yield from (("tokens", rows), ("logits", logits.detach().numpy()))
    yield "loss", np.float32(loss.item())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.grad)
    for name, gradient in of_files(model).items():
        yield f"gradient/{name}", told(name, gradient)


def write(family: str) -> None:
    """Write the folder of a family."""
    folder = HERE / family
    folder.mkdir(exist_ok=True)
    model = filled(family)
    model.config.save_pretrained(folder)
    tensors = {n: [list(x.shape), str(x.dtype)] for n, x in of_files(model).items()}
    versions = {module.__name__: module.__version__ for module in VERSIONS}
    text = json.dumps({"versions": versions, "tensors": tensors}, indent=0)
    (folder / "tensors.json").write_text(text + "\n", encoding="utf-8")
    np.savez_compressed(folder / "expected.npz", **dict(expected(model)))
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{family}: {len(tensors)} tensors, {size / 1000:.0f} kB", flush=True)
    assert size <= 200_000


def rotary_of(keys: dict[str, Any]) -> dict[str, Any]:
    """Return the keys as they are saved today, and the speeds of each kind of layer."""
    family = keys["model_type"]
    config = transformers.AutoConfig.for_model(**keys)
    folder = family.removesuffix("_text")
    module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    (name,) = [n for n in vars(module) if n.endswith("RotaryEmbedding") and "Vision" not in n]
    made = getattr(module, name)(config)
    speeds = {n: x.tolist() for n, x in made.named_buffers() if "original" not in n}
    grows = {n: x for n, x in vars(made).items() if n.endswith("attention_scaling")}
    return {"saved": config.to_diff_dict() | {"model_type": family}, **speeds, **grows}


def write_rotary() -> None:
    """Write what transformers makes of the rotary positions of published models."""
    published = json.loads((HERE / "published.json").read_text(encoding="utf-8"))
    found = {n: rotary_of(keys) for n, keys in published.items() if keys["model_type"] != "gpt2"}
    text = json.dumps(found, indent=0, default=str)
    (HERE / "rope.json").write_text(text + "\n", encoding="utf-8")


VERSIONS = (torch, transformers, np, safetensors)

if __name__ == "__main__":
    write_rotary()
    for one in sys.argv[1:] or FAMILIES:
        write(one)
