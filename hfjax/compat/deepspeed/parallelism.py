"""The strategy, mesh and batch size of a file."""

import math
from functools import reduce
from typing import Any, NamedTuple

from hfjax.compat.deepspeed.config_file import DeepSpeedConfig
from hfjax.compat.deepspeed.key_entries import is_section
from hfjax.parallel import strategy as strategies
from hfjax.parallel.mesh import AXES
from hfjax.parallel.schedules.named import Schedule
from hfjax.parallel.strategy import Strategy
from hfjax.utils.keywords import is_int

STAGES = ("ddp", "zero1", "zero2", "fsdp")
ZERO = "zero_optimization"
OFFLOADS = (  # section, its older key, strategy, minimum ZeRO stage, and that in words
    (
        "offload_optimizer",
        "cpu_offload",
        "host_optimizer",
        1,
        "the optimizer needs stage 1, 2 or 3",
    ),
    ("offload_param", "cpu_offload_param", "host_parameters", 3, "parameters needs stage 3"),
)
BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


class Parallelism(NamedTuple):
    """A strategy by its names, the sizes of its model-parallel axes, and edits."""

    names: tuple[str, ...]
    tensor: int
    pipe: int
    expert: int
    shard_group_size: int  # devices that shard parameters among them; 0: all
    edits: dict[str, Any]

    @property
    def strategy(self) -> Strategy:
        """The strategy."""
        parts = (getattr(strategies, name.upper()) for name in self.names)
        return reduce(lambda a, b: a | b, parts).edit(**self.edits)

    @property
    def model_parallel_size(self) -> int:
        """The number of devices that share one shard of the batch."""
        return self.tensor * self.pipe


# -- strategy -----------------------------------------------------------------------------


def parse_parallelism(config: DeepSpeedConfig) -> Parallelism:
    """Return the strategy of a file, independent of the number of devices."""
    zero_stage = int(config.get(f"{ZERO}.stage"))
    if zero_stage not in range(4):
        config.refuse(f"{ZERO}.stage", "the stages are 0 (DDP), 1, 2 (ZERO1, ZERO2) and 3 (FSDP)")
        zero_stage = 0
    shard_group_size = _shard_group_size(config, zero_stage)
    names = ["hsdp" if shard_group_size else STAGES[zero_stage]]
    config.take(f"{ZERO}.stage", names[0].upper())
    edits = _offload_edits(config, zero_stage, names)
    threshold = f"{ZERO}.stage3_param_persistence_threshold"
    if zero_stage != 3:
        config.ignore(threshold, "only stage 3 divides parameters")
    elif threshold in config.values:
        edits["replicate_below"] = config.get(threshold)
    tensor, pipe, expert = (
        config.tensor_size,
        _num_pipeline_stages(config, zero_stage),
        _expert_size(config, shard_group_size),
    )
    meaning = f"TENSOR, tensor={tensor}" if tensor > 1 else "tensor=1"
    for key in ("autotp_size", "tp.tp_size"):
        config.take(f"tensor_parallel.{key}", meaning)
    axes = {"tensor": tensor, "expert": expert, "pipe": pipe}
    names += [name for name, size in axes.items() if size > 1]
    return Parallelism(tuple(names), tensor, pipe, expert, shard_group_size, edits)


def _shard_group_size(config: DeepSpeedConfig, zero_stage: int) -> int:
    """Return the number of devices that shard parameters among them, by ZeRO++ or MiCS; 0: all."""
    group_size = 0
    for key in ("zero_hpz_partition_size", "mics_shard_size"):
        path, size = f"{ZERO}.{key}", int(config.get(f"{ZERO}.{key}"))
        if size <= 1:
            config.ignore(path, "no groups are asked for")
        elif zero_stage != 3:
            config.refuse(path, "groups of devices need stage 3")
        elif group_size not in (0, size):
            config.refuse(path, f"zero_hpz_partition_size is {group_size}: keep one")
        else:
            config.take(path, f"HSDP, fsdp={size}; the state is divided among these {size} too")
            group_size = size
    return group_size


def _offload_edits(
    config: DeepSpeedConfig, zero_stage: int, strategy_names: list[str]
) -> dict[str, Any]:
    """Add the strategies for host memory to `strategy_names`; return edits of the strategy."""
    for section, old, name, least, needs in OFFLOADS:
        inside, old = f"{ZERO}.{section}", f"{ZERO}.{old}"
        path = f"{inside}.device"
        if old in config.values and (inside in config.values or is_section(config.values, inside)):
            config.refuse(old, f"{section} is there too, which replaces it: keep that")
        if config.get(old):
            path, device = old, "cpu"
        else:
            config.ignore(old, "it is false")
            device = config.get(path)
        if device == "none":
            config.ignore(path, "nothing is offloaded")
        elif device != "cpu":
            why = "NVMe is not here" if device == "nvme" else "there are cpu and none"
            config.refuse(path, f'{why}: write "cpu"')
        elif zero_stage < least:
            config.refuse(path, f"stage is {zero_stage}, and offload of {needs}")
        else:
            strategy_names.append(name)
            config.take(path, name.upper())
    path = f"{ZERO}.offload_optimizer.ratio"
    ratio = config.get(path)
    if "host_optimizer" not in strategy_names:
        config.ignore(path, "nothing is offloaded")
    elif ratio < 1 and zero_stage != 3:
        config.refuse(path, "a part below 1 needs stage 3")
    elif ratio < 1:
        config.take(path, f'memory={{"optimizer_state": {ratio}}}')
        return {"memory": {"optimizer_state": ratio}}
    return {}


def _num_pipeline_stages(config: DeepSpeedConfig, zero_stage: int) -> int:
    path, stages = "pipeline.stages", config.get("pipeline.stages")
    if stages == "auto":
        config.ignore(path, "it is no number: PIPE and make_mesh(pipe=…) say it here")
        return 1
    if not is_int(stages):
        config.refuse(path, "a whole number from 1 on is expected")
        return 1
    if stages > 1 and zero_stage > 1:
        config.refuse(path, f"DeepSpeed's pipelines take stage 0 or 1, and stage is {zero_stage}")
    config.take(path, f'PIPE, pipe={stages}, Schedule("1f1b", gradient_accumulation_steps)')
    return stages


def _expert_size(config: DeepSpeedConfig, shard_group_size: int) -> int:
    on, size = config.get("expert_parallel.enabled"), int(config.get("expert_parallel.autoep_size"))
    for path in ("expert_parallel.enabled", "expert_parallel.autoep_size"):
        if not on or size == 1:
            config.ignore(path, "each device has all experts")
        elif shard_group_size:
            config.refuse(path, "groups of devices and experts do not go together")
        else:
            config.take(path, f"EXPERT, expert={size}")
    return max(size, 1) if on else 1


# -- sizes --------------------------------------------------------------------------------


def mesh_sizes(config: DeepSpeedConfig, parallelism: Parallelism, world: int) -> dict[str, int]:
    """Return the size of each used mesh axis, for `world` devices."""
    group = parallelism.shard_group_size or 1
    needed = parallelism.model_parallel_size * math.lcm(parallelism.expert, group)
    if world % needed:
        raise config.error(
            f"{world} devices do not divide by {needed}: {parallelism.strategy.name} has "
            f"tensor={parallelism.tensor}, pipe={parallelism.pipe}, expert={parallelism.expert}, "
            f"groups of {group}. Change these sizes, or the number of devices."
        )
    rest = world // parallelism.model_parallel_size // parallelism.expert
    is_fsdp = parallelism.names[0] == "fsdp"
    fsdp = parallelism.shard_group_size or (rest if is_fsdp else 1)
    axis_sizes = {"pipe": parallelism.pipe, "data": rest // fsdp, "fsdp": fsdp}
    axis_sizes |= {"expert": parallelism.expert, "tensor": parallelism.tensor}
    main = "fsdp" if is_fsdp else "data"
    return {axis: size for axis, size in axis_sizes.items() if size > 1 or axis == main}


def parallelism_flags(parallelism: Parallelism, mesh: dict[str, int]) -> dict[str, Any]:
    """Return the flags of hfjax train for a strategy on a mesh.

    >>> flags = parallelism_flags(Parallelism(("zero1", "tensor"), 2, 1, 1, 0, {}), {"tensor": 2})
    >>> flags["zero"], flags["sequence_parallel"], flags["mesh.tensor"]
    (1, False, 2)
    """
    first, sizes = parallelism.names[0], {axis: mesh.get(axis, 1) for axis in AXES}
    zero = {"zero1": 1, "zero2": 2}.get(first)
    if first == "fsdp" and sizes["fsdp"] == 1 < sizes["expert"]:  # no size of fsdp says it
        zero = 3
    flags: dict[str, Any] = {"strategy": None, "zero": zero}
    flags |= {"sequence_parallel": False} if parallelism.tensor > 1 else {}
    for place in ("optimizer", "parameters"):
        flags[f"offload.{place}"] = f"host_{place}" in parallelism.names
    return flags | {f"mesh.{axis}": size for axis, size in sizes.items()}


def batch_size_and_microbatches(config: DeepSpeedConfig, num_shards: int) -> tuple[int, int]:
    """Return the global batch size and number of microbatches: batch = micro * count * shards."""
    batch_size, micro, num_microbatches = (
        int(config.get(path) or 0) for path in BATCH
    )  # 0: not set
    if not batch_size and not micro:
        raise config.error(
            "neither train_batch_size nor train_micro_batch_size_per_gpu: how many "
            "rows a step has is not known. Write train_batch_size."
        )
    num_microbatches = num_microbatches or (
        max(1, batch_size // (micro * num_shards)) if batch_size and micro else 1
    )
    micro = micro or batch_size // (num_microbatches * num_shards)
    product = micro * num_microbatches * num_shards
    if batch_size not in (0, product) or not product:
        raise config.error(
            f"train_batch_size {batch_size} is not {micro} examples * {num_microbatches} "
            f"microbatches * {num_shards} devices that share the batch = {product}. Write "
            f"train_batch_size {product or num_microbatches * num_shards}, or change "
            f"{' or '.join(BATCH[1:])}, or the devices."
        )
    config.imply(BATCH[0], f"global_batch_size={product}")
    config.imply(BATCH[2], f"gradient_accumulation_steps={num_microbatches}")
    return product, num_microbatches


def microbatch_arguments(parallelism: Parallelism, num_microbatches: int) -> dict[str, Any]:
    """Return the step arguments for microbatches: accumulation, or a pipeline schedule."""
    if parallelism.pipe == 1:
        return {"gradient_accumulation_steps": num_microbatches}
    return {"gradient_accumulation_steps": 1, "schedule": Schedule("1f1b", num_microbatches)}
