"""Folders of models for tests, written by NumPy: numbered elements, or drawn ones."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from hfjax.weights.tensor_files import header_of

BF16 = np.dtype(ml_dtypes.bfloat16)
WIDTHS = {"vocab_size": 90, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
WIDTHS |= {"num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 32}
GPT2 = {"vocab_size": 90, "n_positions": 32, "n_embd": 32, "n_layer": 4, "n_head": 4}
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {"model_type": "gpt2", **GPT2},
    "llama": {"model_type": "llama", **WIDTHS},
    "tied": {"model_type": "llama", **WIDTHS, "tie_word_embeddings": True},
    "qwen2": {"model_type": "qwen2", **WIDTHS},
    "qwen3": {"model_type": "qwen3", **WIDTHS, "head_dim": 16},
    "gemma3": {"model_type": "gemma3_text", **WIDTHS, "head_dim": 16, "sliding_window": 8}
    | {"num_hidden_layers": 6},
    "mixtral": {"model_type": "mixtral", **WIDTHS, "num_local_experts": 4},
    "qwen3_moe": {"model_type": "qwen3_moe", **WIDTHS, "num_experts": 4, "head_dim": 16}
    | {"moe_intermediate_size": 16, "num_experts_per_tok": 2, "mlp_only_layers": [1]},
}
Tensors = dict[str, np.ndarray]


def write_file(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Write tensors as a file of safetensors."""
    header, _ = header_of({name: (x.dtype, x.shape) for name, x in tensors.items()})
    path.write_bytes(header + b"".join(x.tobytes() for x in tensors.values()))


def names_of(folder: Path, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the tensors of a model, by its family's table."""
    from hfjax.weights.families import FAMILIES, parse_config

    table = FAMILIES[config["model_type"]].table(parse_config(config))
    return {piece.name: piece.rule.shape for piece in table.expand()}


def numbered(shapes: Mapping[str, tuple[int, ...]]) -> Tensors:
    """Return tensors whose elements are 1, 2, 3 … over all of them."""
    made, at = {}, 1
    for name, shape in shapes.items():
        count = int(np.prod(shape))
        made[name] = np.arange(at, at + count, dtype=np.float32).reshape(shape)
        at += count
    return made


def drawn(dtype: Any = np.float32) -> Callable[[Mapping[str, tuple[int, ...]]], Tensors]:
    """Return what draws small numbers; some are zero with a sign."""

    def make(shapes: Mapping[str, tuple[int, ...]]) -> Tensors:
        draw = np.random.default_rng(0)
        made = {name: draw.normal(0, 0.1, shape) for name, shape in shapes.items()}
        for x in made.values():
            x.reshape(-1)[::7] = -0.0
        return {name: x.astype(dtype) for name, x in made.items()}

    return make


def written(
    folder: Path,
    config: Mapping[str, Any],
    make: Callable[[Mapping[str, tuple[int, ...]]], Tensors] = numbered,
    files: int = 1,
) -> Tensors:
    """Write a model's folder; return its tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = make(names_of(folder, config))
    (folder / "config.json").write_text(json.dumps(config))
    if files == 1:
        write_file(folder / "model.safetensors", tensors)
        return tensors
    names = np.array_split(np.array(list(tensors)), files)
    shards = {f"part-{i}.safetensors": list(map(str, of)) for i, of in enumerate(names)}
    for shard, held in shards.items():
        write_file(folder / shard, {name: tensors[name] for name in held})
    index = {"weight_map": {name: shard for shard, held in shards.items() for name in held}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return tensors
