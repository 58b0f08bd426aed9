"""Writes what peft makes of adapters of tiny models: logits, loss and gradients, in float32.

Run it where torch, transformers and peft are installed (jax is not needed):

    PYTHONPATH=. python tests/adapters/make_fixtures.py [family …]

The models are those of tests/pretrained. A folder has the adapter_config.json that peft wrote,
tensors.json (names and shapes of the adapter's tensors, and the versions) and expected.npz. Weights
are drawn from their names (tests/pretrained/weights_of.py), B like A.
"""

# pyright: reportMissingImports=false, reportArgumentType=false

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
import transformers
from safetensors.numpy import load_file, save_file

from tests.pretrained.make_fixtures import filled, of_files
from tests.pretrained.weights_of import drawn, tokens, told

HERE = Path(__file__).parent
ROWS, LENGTH = 2, 24
ADAPTERS: dict[str, dict[str, Any]] = {
    "gpt2": {"r": 2, "lora_alpha": 5, "target_modules": ["c_attn", "mlp.c_proj"]},
    "llama2": {
        **{"r": 2, "lora_alpha": 3, "target_modules": "all-linear", "use_rslora": True},
        **{"rank_pattern": {"q_proj": 4, "mlp.up_proj": 3}, "alpha_pattern": {"o_proj": 7}},
        "modules_to_save": ["embed_tokens", "lm_head"],
    },
    "qwen3": {"r": 2, "lora_alpha": 4, "target_modules": r".*\.(q|v|o|gate|down)_proj"},
}
VERSIONS = (torch, transformers, peft, np)


def adapted(folder: Path, model: Any, options: dict[str, Any]) -> Any:
    """Return a model with an adapter whose weights are drawn, and which was read from a folder."""
    config = peft.LoraConfig(**options, task_type="CAUSAL_LM")
    peft.get_peft_model(model, config).save_pretrained(folder)
    made = load_file(folder / "adapter_model.safetensors")
    weights = {name: drawn(name, x.shape) for name, x in made.items()}
    for name, x in weights.items():  # a head that is tied is one with its embedding
        twin = name.replace("lm_head", "model.embed_tokens")
        if options.get("ensure_weight_tying") and twin in weights:
            weights[name] = x if twin == name else weights[twin]
    save_file(weights, folder / "adapter_model.safetensors", {"format": "pt"})


def read(folder: Path, base: Any) -> Any:
    """Return a base with the adapter of a folder, which trains."""
    return peft.PeftModel.from_pretrained(base, folder, is_trainable=True).eval()


def gradients_of(model: Any) -> dict[str, np.ndarray]:
    """Return the gradients by the names of the adapter's file."""
    names = {"modules_to_save.default.": "", ".default.": "."}
    found = {}
    for name, x in model.named_parameters():
        if x.requires_grad:
            for old, new in names.items():
                name = name.replace(old, new)
            found[name] = x.grad.numpy()
    return found


def write(family: str) -> None:
    """Write the folder of a family."""
    folder = HERE / family
    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        adapted(Path(place), filled(family), ADAPTERS[family])
        made = load_file(Path(place, "adapter_model.safetensors"))
        config = json.loads(Path(place, "adapter_config.json").read_text())
        model = read(Path(place), filled(family))
    config["base_model_name_or_path"] = family
    if isinstance(config["target_modules"], list):
        config["target_modules"].sort()
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=1) + "\n")
    versions = {module.__name__: module.__version__ for module in VERSIONS}
    tensors = {name: list(x.shape) for name, x in made.items()}
    text = json.dumps({"versions": versions, "tensors": tensors}, indent=0)
    (folder / "tensors.json").write_text(text + "\n")
    rows = tokens(61, ROWS, LENGTH)
    given = torch.from_numpy(rows.astype(np.int64))
    logits = model(input_ids=given[:, :-1], use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), given[:, 1:].flatten())
    loss.backward()
    expected = {"tokens": rows, "logits": logits.detach().numpy(), "loss": np.float32(loss.item())}
    gradients = gradients_of(model)
    assert gradients.keys() == made.keys(), gradients.keys() ^ made.keys()
    expected |= {f"gradient/{name}": told(name, x) for name, x in gradients.items()}
    merged = of_files(model.merge_and_unload())
    expected |= {f"merged/{name}": x @ np.ones(x.shape[-1]) for name, x in merged.items()}
    np.savez_compressed(folder / "expected.npz", **expected)
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{family}: {len(made)} tensors, {size / 1000:.0f} kB", flush=True)
    assert size <= 100_000


if __name__ == "__main__":
    for one in sys.argv[1:] or ADAPTERS:
        write(one)
