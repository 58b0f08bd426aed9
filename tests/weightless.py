"""Folders of pretrained models whose weights take no space: real headers before a hole."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3_30B_A3B = QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "decoder_sparse_step": 1,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "router_aux_loss_coef": 0.001,
    "tie_word_embeddings": False,
}


def _tensors(c: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the names and shapes of a Qwen3's tensors."""
    embed, width = c["hidden_size"], c["head_dim"]
    q, kv = c["num_attention_heads"] * width, c["num_key_value_heads"] * width
    yield "model.embed_tokens.weight", (c["vocab_size"], embed)
    for layer in range(c["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        yield f"{at}.self_attn.q_proj.weight", (q, embed)
        yield f"{at}.self_attn.k_proj.weight", (kv, embed)
        yield f"{at}.self_attn.v_proj.weight", (kv, embed)
        yield f"{at}.self_attn.o_proj.weight", (embed, q)
        for norm in ("q_norm", "k_norm"):
            yield f"{at}.self_attn.{norm}.weight", (width,)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{at}.{norm}.weight", (embed,)
        mlps, hidden = [f"{at}.mlp"], c["intermediate_size"]
        if experts := c.get("num_experts"):
            yield f"{at}.mlp.gate.weight", (experts, embed)
            mlps, hidden = (
                [f"{at}.mlp.experts.{e}" for e in range(experts)],
                c["moe_intermediate_size"],
            )
        for mlp in mlps:
            yield f"{mlp}.gate_proj.weight", (hidden, embed)
            yield f"{mlp}.up_proj.weight", (hidden, embed)
            yield f"{mlp}.down_proj.weight", (embed, hidden)
    yield "model.norm.weight", (embed,)
    if not c["tie_word_embeddings"]:
        yield "lm_head.weight", (c["vocab_size"], embed)


def write_folder(folder: Path, config: dict[str, Any]) -> Path:
    """Write a model's config.json, and a file of safetensors in bfloat16 that is a hole."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    header, end = {}, 0
    for name, shape in _tensors(config):
        size = 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return folder
