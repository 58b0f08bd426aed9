"""Write what DeepSpeed's own code says: tests/deepspeed_rates.npz and tests/deepspeed_keys.txt.

It needs torch and DeepSpeed (no GPU) in an environment of its own, and the page of its
configuration, docs/_pages/config-json.md of its repository:

    DS_BUILD_OPS=0 pip install --no-build-isolation deepspeed==0.19.8
    DS_ACCELERATOR=cpu python tests/make_deepspeed.py config-json.md
"""

# pyright: reportMissingImports=false
import inspect
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
STEPS = 2000
MOMENTUM = {"cycle_momentum": False}
RATES = {  # name: type, parameters
    "WarmupLR, by default": ("WarmupLR", {}),
    "WarmupLR": ("WarmupLR", {"warmup_max_lr": 3e-3, "warmup_num_steps": 500}),
    "WarmupLR, one step": ("WarmupLR", {"warmup_max_lr": 0.1, "warmup_num_steps": 1}),
    "WarmupLR, linear": (
        "WarmupLR",
        {
            "warmup_min_lr": 1e-5,
            "warmup_max_lr": 1e-3,
            "warmup_num_steps": 700,
            "warmup_type": "linear",
        },
    ),
    "WarmupDecayLR, by default": ("WarmupDecayLR", {"total_num_steps": 1700}),
    "WarmupDecayLR": ("WarmupDecayLR", {"total_num_steps": 1800, "warmup_min_lr": 1e-4}),
    "WarmupDecayLR, linear": (
        "WarmupDecayLR",
        {"total_num_steps": 1500, "warmup_num_steps": 100, "warmup_type": "linear"},
    ),
    "WarmupCosineLR": ("WarmupCosineLR", {"total_num_steps": 1900}),
    "WarmupCosineLR, linear": (
        "WarmupCosineLR",
        {
            "total_num_steps": 1500,
            "warmup_num_steps": 300,
            "warmup_min_ratio": 0.1,
            "cos_min_ratio": 0.05,
            "warmup_type": "linear",
        },
    ),
    "OneCycle": (
        "OneCycle",
        {
            **MOMENTUM,
            "cycle_min_lr": 1e-4,
            "cycle_max_lr": 1e-2,
            "cycle_first_step_size": 400,
            "cycle_second_step_size": 700,
            "decay_step_size": 100,
            "decay_lr_rate": 0.5,
        },
    ),
    "OneCycle, stairs": (
        "OneCycle",
        {
            **MOMENTUM,
            "cycle_min_lr": 1e-4,
            "cycle_max_lr": 1e-2,
            "cycle_first_step_size": 300,
            "cycle_first_stair_count": 7,
            "cycle_second_stair_count": 4,
        },
    ),
    "LRRangeTest": ("LRRangeTest", {"lr_range_test_step_size": 150}),
    "LRRangeTest, stairs": (
        "LRRangeTest",
        {
            "lr_range_test_min_lr": 1e-4,
            "lr_range_test_step_size": 300,
            "lr_range_test_step_rate": 5.0,
            "lr_range_test_staircase": True,
        },
    ),
}
LR = 2e-3  # of the optimizer
TORCH = {  # of torch: class, parameters, and those of the file
    "Adam": ("AdamW", {"betas": (0.8, 0.999), "weight_decay": 0.1}, {}),
    "Adam, decay in gradients": ("Adam", {"weight_decay": 0.1}, {"adam_w_mode": False}),
    "Adagrad": ("Adagrad", {"weight_decay": 0.01, "initial_accumulator_value": 0.5}, {}),
    "SGD": ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}, {}),
}
MODELS = {  # section: where its class is
    "zero_optimization": "runtime.zero.config:DeepSpeedZeroConfig",
    "fp16": "runtime.precision_config:DeepSpeedFP16Config",
    "bf16": "runtime.precision_config:DeepSpeedBF16Config",
    "bfloat16": "runtime.precision_config:DeepSpeedBF16Config",
    "tensorboard": "monitor.config:TensorBoardConfig",
    "wandb": "monitor.config:WandbConfig",
    "comet": "monitor.config:CometConfig",
    "csv_monitor": "monitor.config:CSVConfig",
    "compile": "compile.config:CompileConfig",
    "hybrid_engine": "runtime.config:HybridEngineConfig",
    "tensor_parallel": "runtime.tensor_parallel.config:TPTrainingConfig",
    "comms_logger": "comm.config:CommsConfig",
    "flops_profiler": "profiling.config:DeepSpeedFlopsProfilerConfig",
}
HEADINGS = {  # of the page
    "Expert Parallel (AutoEP)": "expert_parallel",
    "Hybrid Engine": "hybrid_engine",
    "Asynchronous I/O": "aio",
}
SCALARS = """train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps
managed_gradient_accumulation steps_per_print dump_state disable_python_gc disable_allgather
communication_data_type seq_parallel_communication_data_type prescale_gradients
gradient_predivide_factor gradient_allreduce_op gradient_clipping zero_allow_untested_optimizer
zero_force_ds_cpu_optimizer wall_clock_breakdown memory_breakdown dataloader_drop_last log_level
use_data_before_expert_parallelism vocabulary_size sparse_gradients optimizer.type
optimizer.legacy_fusion scheduler.type torch_autocast.enabled torch_autocast.dtype
torch_autocast.lower_precision_safe_modules data_types.grad_accum_dtype data_types.param_dtype
data_types.buffer_dtype data_types.keep_in_fp32_modules""".split()


def rates() -> dict[str, np.ndarray]:
    """Return the rate of each update: DeepSpeed's engine steps the scheduler after it."""
    import torch
    from deepspeed.runtime import lr_schedules

    found = {}
    for name, (kind, params) in RATES.items():
        optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))], lr=LR)
        scheduler, values = getattr(lr_schedules, kind)(optimizer, **params), []
        for _ in range(STEPS):
            values.append(optimizer.param_groups[0]["lr"])
            scheduler.step()
        found[name] = np.array(values, np.float32)
    return found


def gradient(x: np.ndarray) -> np.ndarray:
    """Return the gradient that the optimizers below are given at a place."""
    return 2 * x - np.array([1.0, -3.0, 0.25], np.float32)


def places() -> dict[str, np.ndarray]:
    """Return where torch's optimizers go in 20 updates from (1, 2, 3), at the rate LR."""
    import torch

    found = {}
    for name, (kind, params, _) in TORCH.items():
        x = torch.nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
        optimizer, walk = getattr(torch.optim, kind)([x], lr=LR, **params), []
        for _ in range(20):
            x.grad = torch.from_numpy(gradient(x.detach().numpy()))
            optimizer.step()
            walk.append(x.detach().numpy().copy())
        found[f"optimizer {name}"] = np.array(walk)
    return found


def fields(kind, prefix: str):
    """Yield the paths of a model of pydantic, by each name, those of models in it too."""
    for name, field in kind.model_fields.items():
        inner = [x for x in (field.annotation, *getattr(field.annotation, "__args__", ()))]
        models = [x for x in inner if hasattr(x, "model_fields")]
        for path in {f"{prefix}.{field.alias or name}", f"{prefix}.{name}"}:
            yield path
            yield from (p for model in models for p in fields(model, path))


def parameters():
    """Yield the parameters of schedulers: of their constructors."""
    from deepspeed.runtime import lr_schedules

    for kind in lr_schedules.VALID_LR_SCHEDULES:
        names = inspect.signature(getattr(lr_schedules, kind)).parameters
        yield from (f"scheduler({kind}).params.{name}" for name in names if name != "optimizer")


def of_page(text: str):
    """Yield the paths in the examples of the page."""
    for block in re.findall(r"```json\n(.*?)```", text, re.S):
        outer, name = [], None
        for word in re.findall(r'"[^"\n]*"\s*[:=]|[{}]', block):
            if word == "{":
                outer.append(name)
                name = None
            elif word == "}":
                name = outer.pop() if outer else None
            elif word.startswith('"'):
                name = re.findall(r'"([^"]*)"', word)[0]
                path = ".".join([x for x in outer if x] + [name])
                path = "zero_optimization." * path.startswith("offload_") + path
                if not path.startswith(("optimizer.params", "scheduler.params")):
                    yield path


def under_headings(text: str):
    """Yield the names in bold under the headings of some sections."""
    for heading, section in HEADINGS.items():
        part = text.split(f"### {heading}")[1].split("\n### ")[0]
        yield from (f"{section}.{name}" for name in re.findall(r"\*\*\*(\w+)\*\*\*:", part))


def of_optimizers(text: str):
    """Yield the parameters of optimizers: of their constructors, and of the page's tables."""
    import torch
    from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
    from deepspeed.ops.adam import FusedAdam
    from deepspeed.ops.lamb import FusedLamb
    from deepspeed.ops.lion import FusedLion

    kinds = {"Adam": (FusedAdam, torch.optim.Adam), "AdamW": (FusedAdam, torch.optim.AdamW)}
    kinds |= {"Lamb": (FusedLamb,), "Lion": (FusedLion,), "SGD": (torch.optim.SGD,)}
    kinds |= {"Adagrad": (torch.optim.Adagrad, DeepSpeedCPUAdagrad)}
    for name, classes in kinds.items():
        names = {n for kind in classes for n in inspect.signature(kind).parameters}
        names -= {"params", "model_params", "initial_accumulator_value_", "self"}
        yield from (f"optimizer({name}).params.{n}" for n in names)
    muon = text.split("Muon supports")[1].split("Example of")[0]
    for n in re.findall(r"(?m)^\| (\w[\w\\]*) +\|", muon):
        yield f"optimizer(Muon).params.{n}".replace("\\", "")
    for name in ("torch_adam", "adam_w_mode"):
        yield from (f"optimizer({kind}).params.{name}" for kind in ("Adam", "AdamW"))


def keys(page: Path) -> list[str]:
    """Return every path that DeepSpeed's classes or its page have."""
    import importlib

    text = page.read_text()
    found = {*SCALARS, *parameters(), *of_page(text), *under_headings(text), *of_optimizers(text)}
    for section, place in MODELS.items():
        module, _, name = place.partition(":")
        kind = getattr(importlib.import_module(f"deepspeed.{module}"), name, None)
        found |= set(fields(kind, section)) if hasattr(kind, "model_fields") else set()
    return sorted(found)


if __name__ == "__main__":
    arrays: Any = {**rates(), **places()}
    np.savez_compressed(HERE / "deepspeed_rates.npz", **arrays)
    (HERE / "deepspeed_keys.txt").write_text("\n".join(keys(Path(sys.argv[1]))) + "\n")
