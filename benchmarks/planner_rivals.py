"""What others' formulas say of the configurations in planner_memory.py, by their own code.

Megatron-LM's `report_theoretical_memory` (weights, optimizer and activations of the most loaded
GPU) and DeepSpeed's `estimate_zero2_model_states_mem_needs` and `estimate_zero3_...` (parameters,
gradients and moments; nothing of activations). Their functions are read from the files given and
run as they are; nothing else of those files runs, so that neither torch nor they are installed.
What a formula has no words for is said in the notes. With checkouts of NVIDIA/Megatron-LM and
deepspeedai/DeepSpeed beside this one:

    python -m benchmarks.planner_rivals --megatron ../Megatron-LM --deepspeed ../DeepSpeed

--megatron takes theoretical_memory_usage.py too, --deepspeed a folder with stage3.py and
stage_1_and_2.py. The bytes kept are those of Megatron-LM d98e8a64 and DeepSpeed edaa7221 (0.19.6),
both of 22 August 2026.
"""

import argparse
import ast
import contextlib
import io
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.planner_memory import CASES, VOCAB
from hfjax.models.gpt import GPTConfig
from hfjax.models.llama import LlamaConfig
from hfjax.models.moe import MoEConfig

RESULTS = Path(__file__).parent / "results" / "planner_rivals.json"
MEGATRON = Path("megatron/training/theoretical_memory_usage.py")
DEEPSPEED = Path("deepspeed/runtime/zero")
CONFIGS = {
    "gpt-medium": GPTConfig.preset("medium"),
    "llama3-8b": LlamaConfig.preset("llama3-8b"),
    "llama3-70b": LlamaConfig.preset("llama3-70b"),
    "mixtral-8x7b": MoEConfig.preset("mixtral-8x7b"),
}


def functions_of(path: Path, known: dict[str, Any], *names: str) -> dict[str, Any]:
    """Return functions and constants of a file, run by themselves; no names: all of them."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    kept: list[ast.stmt] = [
        part
        for part in tree.body
        if (isinstance(part, ast.Assign) and not names)
        or (isinstance(part, ast.FunctionDef) and (not names or part.name in names))
    ]
    found = dict(known)
    exec(compile(ast.Module(kept, []), str(path), "exec"), found)
    if missing := [name for name in names if name not in found]:
        raise SystemExit(f"{path}: {', '.join(missing)} is not there.")
    return found


def megatron_of(path: Path) -> Any:
    """Return Megatron's function; path: of a checkout, or of the file."""
    file = path if path.is_file() else path / MEGATRON
    known = {"math": math, "is_hybrid_model": lambda args: False, "print_rank_0": print}
    return functions_of(file, known)["report_theoretical_memory"]


def deepspeed_of(path: Path) -> tuple[Any, Any]:
    """Return DeepSpeed's functions for stages 2 and 3; path: of a checkout, or of the folder."""
    folder = path / DEEPSPEED if (path / DEEPSPEED).is_dir() else path
    names = [f"estimate_zero{stage}_model_states_mem_needs" for stage in (2, 3)]
    files = ("stage_1_and_2.py", "stage3.py")
    two, three = (
        functions_of(folder / file, {}, name)[name] for file, name in zip(files, names, strict=True)
    )
    return two, three


# -- a case in one form -------------------------------------------------------------------


def case_of(name: str) -> SimpleNamespace:
    """Return a case: its model, the sides of its mesh, what else the formulas ask for."""
    preset, count, flags = CASES[name]
    strategy = flags["strategy"].split("+")
    config = CONFIGS[preset]
    side = {axis: flags.get(f"mesh.{axis}", 1) for axis in ("pipe", "tensor", "context", "expert")}
    rows = count // (side["pipe"] * side["tensor"] * side["context"])  # what splits the batch
    pieces = flags.get("pipeline.microbatches", 1) * flags.get("accumulate", 1)
    return SimpleNamespace(
        config=config,
        moe=isinstance(config, MoEConfig),
        llama=isinstance(config, LlamaConfig),
        count=count,
        strategy=strategy,
        **side,
        rows=rows,
        shards=flags.get("mesh.fsdp", rows),
        micro=flags["batch"] // (rows * pieces),
        microbatches=flags.get("pipeline.microbatches", 1),
        chunks=flags.get("pipeline.chunks"),
        schedule=flags.get("pipeline.name", "1f1b"),
        length=flags.get("model.length", config.length),
        vocab=math.ceil(VOCAB[preset] / 128) * 128,
        remat=flags.get("remat", "none"),
    )


def parameters_of(case: SimpleNamespace) -> tuple[int, int]:
    """Return how many parameters there are, and how many the largest module has by itself.

    The largest as DeepSpeed counts them (`model_to_params`: no module's children) is the
    embedding: an expert is a module of its own.
    """
    config, rows = case.config, case.vocab * case.config.embed
    if not case.llama:
        maps = config.linear_maps.values()
        layer = sum(a * b + b for a, b in maps) + 4 * config.embed
        ends = rows + config.length * config.embed + 2 * config.embed
    else:
        heads = config.embed // config.heads * (2 * config.heads + 2 * config.kv_heads)
        mlp = 3 * config.embed * config.mlp
        mixture = config.experts * (mlp + config.embed) if case.moe else mlp
        layer = config.embed * heads + mixture + 2 * config.embed
        ends = 2 * rows + config.embed
    return config.layers * layer + ends, rows


# -- Megatron -----------------------------------------------------------------------------


def megatron_arguments(case: SimpleNamespace) -> SimpleNamespace:
    """Return the arguments that say a case as well as Megatron's formula lets them."""
    config = case.config
    ffn = config.mlp if case.llama else 4 * config.embed
    return SimpleNamespace(
        world_size=case.count,
        data_parallel_size=case.rows,
        tensor_model_parallel_size=case.tensor,
        pipeline_model_parallel_size=case.pipe,
        virtual_pipeline_model_parallel_size=case.chunks,
        expert_model_parallel_size=case.expert,
        expert_tensor_parallel_size=1,
        sequence_parallel="sequence" in case.strategy,
        use_distributed_optimizer=bool({"fsdp", "hsdp", "zero2"} & set(case.strategy)),
        recompute_granularity="full" if case.remat == "full" else "selective",
        micro_batch_size=case.micro,
        seq_length=case.length,
        num_layers=config.layers,
        hidden_size=config.embed,
        kv_channels=config.embed // config.heads,
        num_attention_heads=config.heads,
        group_query_attention=case.llama,
        num_query_groups=config.kv_heads if case.llama else config.heads,
        multi_latent_attention=False,
        ffn_hidden_size=ffn,
        swiglu=case.llama,
        normalization="RMSNorm" if case.llama else "LayerNorm",
        add_bias_linear=not case.llama,
        padded_vocab_size=case.vocab,
        untie_embeddings_and_output_weights=case.llama,
        num_experts=config.experts if case.moe else None,
        moe_layer_freq=1,
        moe_ffn_hidden_size=ffn if case.moe else None,
        moe_router_topk=config.top_k if case.moe else None,
        moe_shared_expert_intermediate_size=None,
        moe_latent_size=None,
        mtp_num_layers=None,
    )


def megatron_notes(case: SimpleNamespace) -> list[str]:
    """Return what Megatron's formula has no words for."""
    strategy = set(case.strategy)
    plain = case.remat == "full" or "sequence" not in strategy  # the formula that takes no width
    told = {
        "ZeRO-2/3 as its distributed optimizer (6 + 12/n bytes a parameter)": strategy
        & {"fsdp", "hsdp", "zero2"},
        f"shards over {case.rows} rather than {case.shards}": "hsdp" in strategy,
        "no context side: rows are whole": case.context > 1,
        "no full recomputation: as if nothing were recomputed": case.remat == "full",
        "no such recomputation: as if only attention's scores were": case.remat == "dots",
        f"{case.schedule} as 1F1B": case.schedule in ("gpipe", "zb-v"),
        "activations of an MLP of 4 x hidden": case.llama and plain,
        "activations of one expert an MLP": case.moe,
    }
    return [words for words, holds in told.items() if holds]


def by_megatron(report: Any, case: SimpleNamespace) -> int:
    """Return the bytes that Megatron's formula says."""
    with contextlib.redirect_stdout(io.StringIO()):
        *_, total = report(megatron_arguments(case), case.microbatches)
    return round(total * 2**20)


# -- DeepSpeed ----------------------------------------------------------------------------


def by_deepspeed(two: Any, three: Any, case: SimpleNamespace) -> tuple[int | None, str]:
    """Return the bytes that DeepSpeed's formula says, if it has words for the case, and a note."""
    if case.pipe * case.tensor * case.expert > 1:
        return None, "none for a tensor, expert or pipe side"
    total, largest = parameters_of(case)
    if {"ddp", "zero2"} & set(case.strategy):
        shards = case.rows if "zero2" in case.strategy else 1
        _, found = two(total, num_gpus_per_node=shards, cpu_offload=False)
        return found, "stage 2" if shards > 1 else "stage 2 of one GPU, for none splits its state"
    host = {"cpu_offload": False, "cpu_offload_params": False}
    _, found, _ = three(total, largest, num_gpus_per_node=case.shards, **host)
    split = f"stage 3, shards over {case.shards}" if case.shards < case.count else "stage 3"
    return found, split


def main() -> None:
    """Compute, and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--megatron", type=Path, required=True)
    parser.add_argument("--deepspeed", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    report, stages = megatron_of(given.megatron), deepspeed_of(given.deepspeed)
    found: dict[str, dict[str, Any]] = {}
    for name in CASES:
        case = case_of(name)
        bytes_, said = by_deepspeed(*stages, case)
        note = f"Megatron: {'; '.join(megatron_notes(case)) or 'said whole'}. DeepSpeed: {said}."
        found[name] = {"megatron": by_megatron(report, case), "deepspeed": bytes_, "note": note}
    given.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
