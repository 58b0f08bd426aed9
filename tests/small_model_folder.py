"""The folder of a small model with a tokenizer, as transformers writes it."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from hfjax.data.tokenizer import train_bpe
from hfjax.weights.model_folder import GENERATION
from tests.model_folders import drawn, written

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
    path: Path, keys: dict[str, Any] = LLAMA, dtype: Any = np.float32, files: int = 1
) -> Path:
    """Write a model's folder with drawn weights and a tokenizer; return its path."""
    written(path, keys, drawn(dtype), files)
    (path / GENERATION).write_text(json.dumps({"eos_token_id": [END, 7]}))
    train_bpe([f"{WORDS} " * 8 + " ".join(map(chr, range(32, 127)))], VOCAB).save(path)
    return path
