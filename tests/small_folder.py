"""The folder of a model as transformers writes it, small enough to make in a moment."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from hfjax.data.tokenizer import train_bpe
from hfjax.weights.config_keys import config_of
from hfjax.weights.families import FAMILIES
from hfjax.weights.model_folder import CONFIG, GENERATION, INDEX, WHOLE
from hfjax.weights.tensor_files import header_of

VOCAB, END = 270, 5
LLAMA: dict[str, Any] = {
    **{"model_type": "llama", "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 48},
    **{"max_position_embeddings": 32, "rms_norm_eps": 1e-5, "eos_token_id": 9},
}
GPT2: dict[str, Any] = {
    **{"model_type": "gpt2", "vocab_size": VOCAB, "n_positions": 24, "n_embd": 32},
    **{"n_layer": 1, "n_head": 2, "eos_token_id": END},
}
WORDS = "tensor pipe data mesh step loss axis row Once upon a time def return import self"


def small_folder(
    path: Path,
    keys: dict[str, Any] = LLAMA,
    seed: int = 0,
    tokens: int = VOCAB,
    shards: bool = False,
    dtype: Any = np.float32,
) -> Path:
    """Write a model's folder with drawn weights and a tokenizer; return its path."""
    path.mkdir(parents=True)
    (path / CONFIG).write_text(json.dumps(keys))
    (path / GENERATION).write_text(json.dumps({"eos_token_id": [END, 7]}))
    rng, table = np.random.default_rng(seed), FAMILIES[keys["model_type"]].table(config_of(keys))
    shapes = {piece.name: piece.rule.shape for piece in table.pieces()}
    names = list(shapes)
    parts = [names[::2], names[1::2]] if shards else [names]
    files = [f"model-0000{n + 1}-of-00002.safetensors" for n in range(2)] if shards else [WHOLE]
    for file, of in zip(files, parts, strict=True):
        header, _ = header_of({name: (np.dtype(dtype), shapes[name]) for name in of})
        drawn = [(0.1 * rng.standard_normal(shapes[name])).astype(dtype) for name in of]
        (path / file).write_bytes(header + b"".join(x.tobytes() for x in drawn))
    if shards:
        where = {name: file for file, of in zip(files, parts, strict=True) for name in of}
        (path / INDEX).write_text(json.dumps({"weight_map": where}))
    train_bpe([f"{WORDS} " * 8 + " ".join(map(chr, range(32, 127)))], tokens).save(path)
    return path
