"""Convert a DeepSpeed configuration (`from_deepspeed`), with a table of the outcomes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jax

from hfjax.compat.deepspeed.compute import parse_execution, precision_name
from hfjax.compat.deepspeed.config_file import DeepSpeedConfig, read_config
from hfjax.compat.deepspeed.optimizer import OptimizerSetup, parse_optimizer
from hfjax.compat.deepspeed.parallelism import (
    Parallelism,
    batch_size_and_microbatches,
    mesh_sizes,
    microbatch_arguments,
    parallelism_flags,
    parse_parallelism,
)
from hfjax.parallel.mesh import show_sizes
from hfjax.parallel.strategy import Strategy
from hfjax.utils.keywords import is_int
from hfjax.utils.read_files import brief
from hfjax.utils.tables import align


@dataclass(frozen=True)
class DeepSpeedSetup:
    """The equivalent of a DeepSpeed configuration; `hfjax.compat.from_deepspeed` returns it.

    Attributes:
        strategy: The sharding strategy.
        execution: Arguments of `hfjax.train_step`.
        optimizer: An optax transformation. None: the file has none, give your own.
        rate: The learning rate, by the number of updates. None: the file has none.
        mesh: Arguments of `hfjax.make_mesh`.
        global_batch_size: The global batch size, in examples.
        table: A line for each key: its path, value and outcome.
        flags: The equivalent flags of `hfjax train`.
    """

    strategy: Strategy
    execution: dict[str, Any]
    optimizer: Any
    rate: Callable | None
    mesh: dict[str, int]
    global_batch_size: int
    table: tuple[tuple[str, str, str], ...] = field(repr=False)
    flags: dict[str, Any] = field(repr=False)
    file: str = field(repr=False)

    def __str__(self) -> str:
        times = self.execution["gradient_accumulation_steps"]
        head = f"{self.file}: {self.strategy.name} on {show_sizes(self.mesh)}, "
        head += f"{self.global_batch_size} examples"
        head += f" in {times} microbatches" * (times > 1)
        return "\n".join([head, *align([("key", "value", "what becomes of it"), *self.table])])


def from_deepspeed(
    source: str | Path | Mapping[str, Any], world: int | None = None
) -> DeepSpeedSetup:
    """Return the equivalent of a DeepSpeed configuration; print it for the outcome of each key.

    Args:
        source: The file, ds_config.json, or its content as a dict.
        world: The number of devices. None: `jax.device_count()`.

    Raises:
        ValueError: A key is unknown, its value is invalid, or the feature is not supported: the
            message has the table.

    Example:
        >>> import hfjax
        >>> config = {"train_batch_size": 32, "gradient_clipping": 0.5}
        >>> setup = hfjax.compat.from_deepspeed(config, 8)
        >>> setup.strategy.name, setup.mesh, setup.global_batch_size
        ('DDP', {'data': 8}, 32)
        >>> setup.execution
        {'gradient_accumulation_steps': 1, 'max_grad_norm': 0.5, 'precision': 'stored'}
    """
    world = jax.device_count() if world is None else world
    if not is_int(world):
        raise ValueError(f"from_deepspeed: world={brief(world)}: a number of devices is expected.")
    config = read_config(source)
    parsed = parse_config(config)
    parallelism = parsed.parallelism
    mesh = mesh_sizes(config, parallelism, world)
    batch_size, num_microbatches = batch_size_and_microbatches(
        config, world // parallelism.model_parallel_size
    )
    split_arguments = microbatch_arguments(parallelism, num_microbatches)
    flags = {**parallelism_flags(parallelism, mesh), **parsed.flags}
    flags |= {"global_batch_size": batch_size}
    flags |= {"gradient_accumulation_steps": split_arguments["gradient_accumulation_steps"]}
    if "schedule" in split_arguments:
        flags |= {"pipeline.schedule": "1f1b", "pipeline.microbatches": num_microbatches}
    optimizer_setup = parsed.optimizer_setup
    return DeepSpeedSetup(
        parallelism.strategy,
        {**split_arguments, **parsed.execution},
        optimizer_setup.optimizer,
        optimizer_setup.rate,
        mesh,
        batch_size,
        config.table(),
        flags,
        config.file,
    )


class ParsedConfig(NamedTuple):
    """The settings of a file that do not depend on the number of devices."""

    parallelism: Parallelism
    execution: dict[str, Any]
    optimizer_setup: OptimizerSetup

    @property
    def flags(self) -> dict[str, Any]:
        """The equivalent flags of `hfjax train`, except for those of the parallelism."""
        fields = self.execution
        flags = {
            "precision": precision_name(fields),
            "optimizer.max_grad_norm": fields["max_grad_norm"],
        }
        same = {"remat": "remat", "on_nonfinite": "on_nonfinite"}
        flags |= {flag: fields[name] for name, flag in same.items() if name in fields}
        if "offload" in fields:
            flags["offload.activations"] = f"{fields['offload']:g}"
        return {**flags, **self.optimizer_setup.flags}


def parse_config(config: DeepSpeedConfig) -> ParsedConfig:
    """Return the settings that do not depend on the number of devices; refused keys raise."""
    parsed = ParsedConfig(
        parse_parallelism(config), parse_execution(config), parse_optimizer(config)
    )
    if config.is_refused():
        raise config.error()
    return parsed
