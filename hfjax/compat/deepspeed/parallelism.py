"""Where everything lies by a file: strategy, mesh, and the rows of a batch."""

import math
from functools import reduce
from typing import Any, NamedTuple

from hfjax.compat.deepspeed.config_file import Given
from hfjax.compat.deepspeed.key_entries import is_section
from hfjax.parallel import strategy as strategies
from hfjax.parallel.schedules.named import Schedule
from hfjax.parallel.strategy import Strategy
from hfjax.utils.keywords import is_whole

STAGES = ("ddp", "zero1", "zero2", "fsdp")
ZERO = "zero_optimization"
OFFLOADS = (  # section, its older key, strategy, least stage, and that in words
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


class Placing(NamedTuple):
    """A strategy by its names, how many devices each axis but those of rows has, and edits."""

    names: tuple[str, ...]
    tensor: int
    pipe: int
    expert: int
    group: int  # how many devices divide parameters among them; 0: all
    edits: dict[str, Any]

    @property
    def strategy(self) -> Strategy:
        """The strategy."""
        found = (getattr(strategies, name.upper()) for name in self.names)
        return reduce(lambda a, b: a | b, found).edit(**self.edits)

    @property
    def others(self) -> int:
        """How many devices share the rows of one place."""
        return self.tensor * self.pipe


# -- strategy -----------------------------------------------------------------------------


def placed(given: Given) -> Placing:
    """Return what a file says of the strategy; it asks for no number of devices."""
    stage = int(given.of(f"{ZERO}.stage"))
    if stage not in range(4):
        given.refuse(f"{ZERO}.stage", "the stages are 0 (DDP), 1, 2 (ZERO1, ZERO2) and 3 (FSDP)")
        stage = 0
    group = _group(given, stage)
    names = ["hsdp" if group else STAGES[stage]]
    given.take(f"{ZERO}.stage", names[0].upper())
    edits = _offloaded(given, stage, names)
    threshold = f"{ZERO}.stage3_param_persistence_threshold"
    if stage != 3:
        given.ignore(threshold, "only stage 3 divides parameters")
    elif threshold in given.values:
        edits["replicate_below"] = given.of(threshold)
    tensor, pipe, expert = given.tensor, _stages(given, stage), _experts(given, group)
    words = f"TENSOR, tensor={tensor}" if tensor > 1 else "tensor=1"
    for key in ("autotp_size", "tp.tp_size"):
        given.take(f"tensor_parallel.{key}", words)
    axes = {"tensor": tensor, "expert": expert, "pipe": pipe}
    names += [name for name, size in axes.items() if size > 1]
    return Placing(tuple(names), tensor, pipe, expert, group, edits)


def _group(given: Given, stage: int) -> int:
    """Return how many devices divide parameters among them, by ZeRO++ or MiCS; 0: all."""
    found = 0
    for key in ("zero_hpz_partition_size", "mics_shard_size"):
        path, size = f"{ZERO}.{key}", int(given.of(f"{ZERO}.{key}"))
        if size <= 1:
            given.ignore(path, "no groups are asked for")
        elif stage != 3:
            given.refuse(path, "groups of devices need stage 3")
        elif found not in (0, size):
            given.refuse(path, f"zero_hpz_partition_size is {found}: keep one")
        else:
            given.take(path, f"HSDP, fsdp={size}; the state is divided among these {size} too")
            found = size
    return found


def _offloaded(given: Given, stage: int, names: list[str]) -> dict[str, Any]:
    """Add what the host keeps to the names; return edits of the strategy."""
    for section, old, name, least, needs in OFFLOADS:
        inside, old = f"{ZERO}.{section}", f"{ZERO}.{old}"
        path = f"{inside}.device"
        if old in given.values and (inside in given.values or is_section(given.values, inside)):
            given.refuse(old, f"{section} is there too, which replaces it: keep that")
        if given.of(old):
            path, device = old, "cpu"
        else:
            given.ignore(old, "it is false")
            device = given.of(path)
        if device == "none":
            given.ignore(path, "nothing is offloaded")
        elif device != "cpu":
            why = "NVMe is not here" if device == "nvme" else "there are cpu and none"
            given.refuse(path, f'{why}: write "cpu"')
        elif stage < least:
            given.refuse(path, f"stage is {stage}, and offload of {needs}")
        else:
            names.append(name)
            given.take(path, name.upper())
    path = f"{ZERO}.offload_optimizer.ratio"
    ratio = given.of(path)
    if "host_optimizer" not in names:
        given.ignore(path, "nothing is offloaded")
    elif ratio < 1 and stage != 3:
        given.refuse(path, "a part below 1 needs stage 3")
    elif ratio < 1:
        given.take(path, f'memory={{"moments": {ratio}}}')
        return {"memory": {"moments": ratio}}
    return {}


def _stages(given: Given, stage: int) -> int:
    path, stages = "pipeline.stages", given.of("pipeline.stages")
    if stages == "auto":
        given.ignore(path, "it is no number: PIPE and make_mesh(pipe=…) say it here")
        return 1
    if not is_whole(stages):
        given.refuse(path, "a whole number from 1 on is expected")
        return 1
    if stages > 1 and stage > 1:
        given.refuse(path, f"DeepSpeed's pipelines take stage 0 or 1, and stage is {stage}")
    given.take(path, f'PIPE, pipe={stages}, Schedule("1f1b", gradient_accumulation_steps)')
    return stages


def _experts(given: Given, group: int) -> int:
    on, size = given.of("expert_parallel.enabled"), int(given.of("expert_parallel.autoep_size"))
    for path in ("expert_parallel.enabled", "expert_parallel.autoep_size"):
        if not on or size == 1:
            given.ignore(path, "each device has all experts")
        elif group:
            given.refuse(path, "groups of devices and experts do not go together")
        else:
            given.take(path, f"EXPERT, expert={size}")
    return max(size, 1) if on else 1


# -- how many -----------------------------------------------------------------------------


def sizes(given: Given, place: Placing, world: int) -> dict[str, int]:
    """Return the size of each axis that is in use, on so many devices."""
    group = place.group or 1
    needed = place.others * math.lcm(place.expert, group)
    if world % needed:
        raise given.error(
            f"{world} devices do not divide by {needed}: {'+'.join(place.names)} has "
            f"tensor={place.tensor}, pipe={place.pipe}, expert={place.expert}, groups of {group}. "
            "Change these sizes, or the number of devices."
        )
    rest = world // place.others // place.expert
    whole = place.names[0] == "fsdp"
    fsdp = place.group or (rest if whole else 1)
    found = {"pipe": place.pipe, "data": rest // fsdp, "fsdp": fsdp}
    found |= {"expert": place.expert, "tensor": place.tensor}
    main = "fsdp" if whole else "data"
    return {axis: size for axis, size in found.items() if size > 1 or axis == main}


def batch(given: Given, shares: int) -> tuple[int, int]:
    """Return the rows of a batch and its microbatches: rows = micro * accumulate * shares."""
    rows, micro, times = (int(given.of(path) or 0) for path in BATCH)  # 0: it is not said
    if not rows and not micro:
        raise given.error(
            "neither train_batch_size nor train_micro_batch_size_per_gpu: how many "
            "rows a step has is not known. Write train_batch_size."
        )
    times = times or (max(1, rows // (micro * shares)) if rows and micro else 1)
    micro = micro or rows // (times * shares)
    product = micro * times * shares
    if rows not in (0, product) or not product:
        raise given.error(
            f"train_batch_size {rows} is not {micro} rows * {times} microbatches * "
            f"{shares} devices that share the batch = {product}. Write train_batch_size "
            f"{product or times * shares}, or change {' or '.join(BATCH[1:])}, or the devices."
        )
    given.imply(BATCH[0], f"rows={product}, of all devices")
    given.imply(BATCH[2], f"accumulate={times}")
    return product, times


def microbatches(place: Placing, times: int) -> dict[str, Any]:
    """Return how a step runs them: by accumulation, or through the stages of a pipeline."""
    if place.pipe == 1:
        return {"accumulate": times}
    return {"accumulate": 1, "schedule": Schedule("1f1b", times)}
