"""Steps of known models compiled for 8 H200s: memory of a device, and what no matmul hides.

Their shapes are read from config.json's keys as the models have them; no weight is needed. Nothing
runs. Writes results/pretrained_h200.md.

    python -m benchmarks.pretrained_h200 [--layers N]
"""

import argparse
import math
import os
import time
from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # the devices to compile for are not here

import jax
import optax

import hfjax
from hfjax.analysis.flights import flights
from hfjax.models.attention import dot_product
from hfjax.models.llama import Llama
from hfjax.models.moe import MoELlama, next_token_loss
from hfjax.target import target_devices
from hfjax.weights.families import config_of

RESULTS = Path(__file__).parent / "results"
LLAMA = {
    **{"model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "num_hidden_layers": 32},
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336},
    **{"rope_theta": 500000.0, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5},
}
QWEN = {
    **{"model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048},
    **{"num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4},
    **{"head_dim": 128, "moe_intermediate_size": 768, "num_experts": 128},
    **{"num_experts_per_tok": 8, "norm_topk_prob": True, "rope_theta": 1e6},
    **{"max_position_embeddings": 40960, "intermediate_size": 6144},
}
FULL: dict[str, Any] = {"remat": "full"}
CASES = {
    "Llama 3 8B, FSDP": (LLAMA, Llama, hfjax.FSDP, {"fsdp": 8}, 8192),
    "Qwen3 30B-A3B, FSDP and EXPERT": (
        *(QWEN, MoELlama, hfjax.FSDP | hfjax.EXPERT, {"fsdp": 1, "expert": 8}, 4096),
    ),
}


def line(name: str, layers: int | None) -> str:
    """Return the row of a case."""
    keys, model, strategy, sizes, length = CASES[name]
    keys = keys if layers is None else keys | {"num_hidden_layers": layers}
    attention = partial(dot_product, implementation="xla")  # cuDNN's needs cuDNN to compile
    config = config_of(keys | {"max_position_embeddings": length})
    config = replace(config, attention=attention)
    mesh = hfjax.make_mesh(devices=target_devices("h200", 8), **sizes)
    optimizer = optax.adamw(1e-5)
    layout = hfjax.layout(lambda rngs: model(config, rngs=rngs), optimizer, mesh, strategy)
    step = hfjax.train_step(layout, next_token_loss, precision="bf16", clip=1.0, **FULL)
    batch = {"tokens": jax.ShapeDtypeStruct((8, length + 1), "int32")}
    start = time.perf_counter()
    compiled = step.lower(batch).compile()
    took = time.perf_counter() - start
    memory = compiled.memory_analysis()
    assert memory is not None
    found = flights(compiled)
    total = sum(f.total for f in found)
    hidden = sum(f.hidden for f in found)
    exposed = sum(f.exposed for f in found)
    count = sum(math.prod(a.shape) for a in layout.arrays.values()) / 1e9
    state, temporary = memory.argument_size_in_bytes, memory.temp_size_in_bytes
    return (
        f"| {name}, 1 x {length} a device | {config.layers} | {count:.1f}B | {state / 1e9:.1f} | "
        f"{temporary / 1e9:.1f} | {total / 1e9:.1f} | {hidden / total:.0%} | "
        f"{1e3 * exposed:.0f} ms | {took:.0f} s |"
    )


def main() -> None:
    """Compile, and write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--layers", type=int, default=None)
    parser.add_argument("--only", choices=[*CASES], default=None)
    given = parser.parse_args()
    lines = []
    for name in CASES if given.only is None else [given.only]:
        lines.append(line(name, given.layers))
        print(lines[-1], flush=True)
    page = "\n".join(
        [
            "# Known models, compiled for 8 H200s",
            "",
            f"`python -m benchmarks.pretrained_h200`, {date.today()}, jax {jax.__version__}, no "
            "GPU.",
            'AdamW in float32, bf16 products, remat="full", '
            "XLA's attention (cuDNN's needs cuDNN to compile).",
            "",
            "| model | layers | parameters | state, GB a device | temporaries, GB | sent, GB | "
            "beside matmuls | exposed | compiled in |",
            "|---|---|---|---|---|---|---|---|---|",
            *lines,
            "",
            "Exposed: the modelled time of transfers that no matmul covers (hfjax/"
            "analysis/flights.py).",
        ]
    )
    if given.layers is None and given.only is None:
        (RESULTS / "pretrained_h200.md").write_text(page + "\n")


if __name__ == "__main__":
    main()
