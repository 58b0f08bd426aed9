"""Build a run from its configuration: model, optimizer, mesh, strategy, layout, step, data."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, reduce
from typing import Any

import jax

import hfjax
from hfjax.compat.deepspeed.config_file import read_config
from hfjax.compat.deepspeed.convert import ParsedConfig, parse_config
from hfjax.data import TokenSet
from hfjax.data.indexed_loader import IndexedLoader
from hfjax.parallel.make_mesh import check_processes
from hfjax.parallel.mesh import PIPE_AXIS, describe_mesh
from hfjax.step.batches import process_batch_slice
from hfjax.trainer.config import Train, pretrained_conflict
from hfjax.trainer.model import check_preset
from hfjax.trainer.optimizer import build_optimizer, make_lr_schedule, stateless_optimizer
from hfjax.trainer.pretrained_model import open_pretrained
from hfjax.trainer.sampling import Sampling, check_mask_weights, eval_batches
from hfjax.trainer.tasks.images import ImageTask, check_text_only, is_image_task
from hfjax.trainer.tasks.task import Scores, Task
from hfjax.trainer.tasks.text import TextTask
from hfjax.utils.read_files import brief
from hfjax.utils.tables import quote
from hfjax.weights.pretrained import Pretrained

STRATEGIES = (
    *("ddp", "zero1", "zero2", "zero3", "fsdp", "hsdp", "tensor", "sequence", "grid", "context"),
    *("expert", "pipe", "host_optimizer", "host_parameters"),
)


DATA_STRATEGIES = STRATEGIES[:6]  # each places parameters and optimizer state: at most one


@dataclass(frozen=True)
class RunComponents:
    """The components of a run, each built on first use.

    Args:
        config: The configuration.
        devices: The devices to use. None: `jax.devices()`.
        vocab: The vocabulary size. None: that of the data.
        trains: Whether there is optimizer state; without it the run can only evaluate and write.

    Example:
        >>> from hfjax.trainer import RunComponents, Train
        >>> parts = RunComponents(Train(steps=100, strategy="fsdp"))
        >>> parts.mesh.shape["fsdp"], round(float(parts.rate(20)), 4)
        (8, 0.003)
    """

    config: Train
    devices: Sequence[Any] | None = None
    vocab: int | None = None
    trains: bool = True

    @cached_property
    def task(self) -> Task:
        """The task: text or images."""
        check_preset(self.config.model)
        if is_image_task(self.config):
            return ImageTask(self.config)
        check_text_only(self.config)
        return TextTask(self.config, self.pretrained, self.vocab)

    @property
    def texts(self) -> TextTask:
        """The task; refuse one that is not text."""
        if not isinstance(self.task, TextTask):
            raise ValueError(f"{self.task.model.name}: it is of {self.task.unit}, and has no text.")
        return self.task

    @property
    def model(self) -> Any:
        """The model to train, with its loss and sizes."""
        return self.task.model

    @cached_property
    def pretrained(self) -> Pretrained | None:
        """The model of `--model.pretrained`, no weights read yet. All processes must call it."""
        opts = self.config.model
        return None if opts.pretrained is None else open_pretrained(opts)

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the model's folder, or else of the data."""
        return self.texts.tokenizer

    @property
    def tokens(self) -> list[TokenSet]:
        """The token data sets to train on."""
        return self.texts.tokens

    @property
    def reads_text(self) -> bool:
        """Whether there is a tokenizer: images and data of bare tokens have none."""
        return isinstance(self.task, TextTask) and self.task.reads_text

    @cached_property
    def mesh(self) -> jax.sharding.Mesh:
        """The device mesh."""
        mesh = build_mesh(self.config, self.devices)
        if self.devices is None:
            check_processes(mesh)
        return mesh

    @cached_property
    def layout(self) -> hfjax.Layout:
        """The layout of the training state on the mesh."""
        strategy, frozen = self._strategy, self.config.optimizer.frozen
        if not self.trains:
            return hfjax.layout(
                self.model.init, stateless_optimizer(self.config), self.mesh, strategy
            )
        file_optimizer = None if self.file is None else self.file.updates.optimizer
        optimizer = build_optimizer(self.config, self.rate, file_optimizer)
        layout = hfjax.layout(self.model.init, optimizer, self.mesh, strategy)
        return layout.freeze(*frozen) if frozen else layout

    @cached_property
    def rate(self) -> Callable:
        """The learning-rate schedule, by the number of updates."""
        file_rate = None if self.file is None else self.file.updates.rate
        return file_rate or make_lr_schedule(self.config)

    @cached_property
    def file(self) -> ParsedConfig | None:
        """The parsed DeepSpeed configuration, if there is one."""
        path = self.config.deepspeed
        return None if path is None else parse_config(read_config(path))

    @property
    def _strategy(self) -> hfjax.Strategy:
        """The strategy, with the details of the DeepSpeed file unless --strategy names another."""
        named_strategy = parse_strategy(self.config.strategy)
        file_strategy = named_strategy if self.file is None else self.file.parallelism.strategy
        return file_strategy if file_strategy.name == named_strategy.name else named_strategy

    @cached_property
    def schedule(self) -> hfjax.Schedule | None:
        """The pipeline schedule; None without pipeline stages."""
        stages, opts = self.mesh.shape[PIPE_AXIS], self.config.pipeline
        if stages == 1:
            return None
        chunks: dict[str, Any] = {} if opts.chunks is None else {"chunks": opts.chunks}
        return hfjax.Schedule(opts.name, opts.microbatches or 4 * stages, **chunks)

    @property
    def execution(self) -> dict[str, Any]:
        """How the training step runs: fields of `Execution`."""
        c = self.config
        from_file = {} if self.file is None else self.file.execution
        return {
            "accumulate": c.accumulate,
            "schedule": self.schedule,
            "clip": c.optimizer.clip,
            "precision": from_file.get("precision", c.precision),
            "remat": c.remat,
            "offload": c.offload,
            "optimizer_in_backward": c.optimizer.in_backward,
            "nonfinite": c.nonfinite,
            "context": self.context,
            "dispatch": c.dispatch,
            "split_rows": c.split_rows,
            "reduction": c.reduction,
            "kernels": c.kernels,
        }

    @property
    def context(self) -> hfjax.ContextParallel:
        """How devices shard each sequence."""
        return hfjax.ContextParallel(**asdict(self.config.context))

    @cached_property
    def step(self) -> Any:
        """The training step."""
        return hfjax.train_step(self.layout, self.model.loss, **self.execution)

    @cached_property
    def evaluate(self) -> Callable:
        """The evaluation: (state, batch) -> metrics."""
        c = self.config
        kernels = "auto" if c.kernels == "pallas" else c.kernels  # also where no Pallas kernel runs
        opts: Any = {"precision": c.precision, "schedule": self.schedule, "kernels": kernels}
        opts["context"] = self.context
        return hfjax.eval_step(self.layout, self.task.eval_loss, **opts)

    @cached_property
    def data(self) -> IndexedLoader:
        """The training batches: the examples that this process loads."""
        return self.task.train_loader(self._local_slice)

    @cached_property
    def valid(self) -> IndexedLoader | None:
        """The validation batches: each example once, in order; None if there are none."""
        return self.task.valid_loader(self._local_slice)

    def _local_slice(self, batch: int) -> Any:
        return process_batch_slice(self.layout, batch)

    def check_validation(self, state: hfjax.State, most: int | None = None) -> None:
        """Refuse a user's loss that would count the examples that pad the last batch.

        Args:
            state: A state of the layout.
            most: Maximum number of validation batches. None: all.
        """
        if self.valid is None or not self.model.has_user_loss:
            return
        count = len(self.valid)
        padded = count * self.config.batch > self.valid.rows_per_epoch
        if padded and (most is None or most >= count):
            check_mask_weights(self.evaluate, state, self.valid.at(0))

    def validated(
        self,
        state: hfjax.State,
        most: int | None = None,
        beat: Callable[[], Any] = lambda: None,
    ) -> Scores:
        """Return the scores on the validation set, or on its first `most` batches.

        Args:
            state: A state of the layout.
            most: Maximum number of batches. None: all.
            beat: Called for each batch, to report progress.
        """
        assert self.valid is not None
        batches = self.valid.rewind()
        return self.task.compute_scores(eval_batches(self.evaluate, state, batches, most, beat))

    def written(self, state: hfjax.State, prompt: str, count: int, sampling: Sampling) -> str:
        """Return a prompt followed by the text of `count` generated tokens.

        Args:
            state: A state of the layout.
            prompt: The text to continue.
            count: Number of tokens to generate.
            sampling: How the next token is chosen, `hfjax.trainer.sampling.Sampling()`.
        """
        return self.texts.complete_prompt(self.layout, state, prompt, count, sampling)

    def __str__(self) -> str:
        count = sum(math.prod(a.shape) for a in self.layout.arrays.values())
        devices = f"{self.mesh.size} of {jax.device_count()} devices, " * self._has_idle_devices
        return (
            f"{self.model.name}: {format_count(count)} parameters, {self.layout.strategy.name} on "
            f"{describe_mesh(self.mesh)} ({devices}{self.mesh.devices.flat[0].device_kind})"
        )

    @property
    def _has_idle_devices(self) -> bool:
        return self.mesh.size < jax.device_count()


def format_count(count: float) -> str:
    """Return a large number in few characters.

    >>> format_count(124_439_808), format_count(812)
    ('124.4M', '812')
    """
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.1f}{letter}"
    return f"{count:.4g}"


def parse_strategy(names: str) -> hfjax.Strategy:
    """Return the strategy of these names, such as fsdp+tensor."""
    parts = _split_names(names)
    for name in parts:
        if name not in STRATEGIES:
            raise ValueError(
                f"--strategy {quote(names)}: no strategy {name!r}. Join some of "
                f"{', '.join(STRATEGIES)} by +, for instance fsdp+tensor."
            )
    data_strategies = [name for name in parts if name in DATA_STRATEGIES]
    if len(data_strategies) > 1 or len(set(parts)) < len(parts):
        raise ValueError(
            f"--strategy {quote(names)}: at most one of {', '.join(DATA_STRATEGIES)}, found "
            f"{', '.join(data_strategies)}; and each name once. What goes with it: "
            f"{', '.join(STRATEGIES[len(DATA_STRATEGIES) :])}."
        )
    return reduce(lambda a, b: a | b, (getattr(hfjax, name.upper()) for name in parts))


def without_host_optimizer(names: str) -> str:
    """Return the names of a strategy for a state without optimizer state.

    >>> without_host_optimizer("fsdp+host_optimizer"), without_host_optimizer("host_optimizer")
    ('fsdp', 'ddp')
    """
    return "+".join(name for name in _split_names(names) if name != "host_optimizer") or "ddp"


def unsharded_strategy(names: str) -> str:
    """Return the names of a replicated strategy; what is in host memory stays there.

    >>> unsharded_strategy("fsdp+tensor"), unsharded_strategy("fsdp+host_parameters")
    ('ddp', 'ddp+host_parameters')
    """
    return "+".join(["ddp", *(name for name in _split_names(names) if name.startswith("host_"))])


def _split_names(text: str) -> list[str]:
    return [name.strip().lower() for name in text.replace("|", "+").split("+")]


def build_mesh(config: Train, devices: Sequence[Any] | None = None) -> jax.sharding.Mesh:
    """Return the mesh; devices without a requested size go to the axis that the strategy uses.

    No device stays idle, except those that `config.devices` leaves out.
    """
    more_flag = "--cpu-devices" if devices is None else "--count"
    devices = _take_devices(config.devices, devices or jax.devices())
    return hfjax.make_mesh(devices=devices, **mesh_sizes(config, len(devices), more_flag))


def mesh_sizes(config: Train, count: int, more_flag: str = "--count") -> dict[str, int]:
    """Return the axis sizes of a mesh of `count` devices; -1 means all remaining devices.

    Args:
        config: The configuration.
        count: Number of devices.
        more_flag: The flag that requests more of them.
    """
    sizes = asdict(config.mesh)
    free = _free_axis(config, count)
    if sizes[free] is None and -1 not in sizes.values():
        sizes[free] = -1
    axis_sizes = {axis: size for axis, size in sizes.items() if size is not None}
    _check_device_count(axis_sizes, count, more_flag)
    return axis_sizes


def _take_devices(count: int | None, devices: Sequence[Any]) -> Sequence[Any]:
    """Return the first `count` devices; refuse more than are available."""
    if count is None:
        return devices
    if count > (available := len(devices)):
        are = "is 1" if available == 1 else f"are {available}"
        raise ValueError(f"--devices {count}: there {are}. Give a number from 1 to {available}.")
    if (processes := jax.process_count()) > 1 and count < available:
        raise ValueError(
            f"--devices {count}: in a run of {processes} processes each takes part with all of its "
            f"devices, {available} together. Start them with fewer, or start fewer."
        )
    return devices[:count]


AXIS_STRATEGIES = {  # mesh axis -> the strategies that shard over it
    **{"fsdp": ("fsdp", "zero3", "hsdp"), "data": ("ddp", "zero1", "zero2")},
    **{"tensor": ("tensor", "sequence", "grid"), "row": ("grid",)},
    **{"context": ("context",), "expert": ("expert",), "pipe": ("pipe",)},
}


def _free_axis(config: Train, devices: int) -> str:
    """Return the axis that takes the devices without a requested size."""
    parse_strategy(config.strategy)  # check its names
    used = [
        axis for axis, of in AXIS_STRATEGIES.items() if {*of} & {*_split_names(config.strategy)}
    ]
    unset = [axis for axis in used if getattr(config.mesh, axis) is None]
    if len(unset) > 1 and devices > 1 and -1 not in asdict(config.mesh).values():
        flags = " and ".join(f"--mesh.{axis}" for axis in unset[1:])
        raise ValueError(
            f"--strategy {config.strategy}: it splits over {' and '.join(unset)}, and no flag "
            f"says how many of the {devices} devices go to which. Give {flags}; the others go to "
            f"{unset[0]}."
        )
    return next(iter(unset), "data")


SETTINGS_AXES = {"context": "context", "pipeline": "pipe"}  # flags -> the mesh axis that they need


def check_flags_used(configs: Sequence[Train], argv: Sequence[str]) -> None:
    """Refuse command-line flags that none of the configurations uses.

    Unused settings of a configuration file are allowed, such as those of a pipeline that is off.
    """
    typed = {arg.partition("=")[0].removeprefix("--").replace("-", "_") for arg in argv}
    model = configs[0].model
    if model.pretrained is not None and "model.preset" in typed:  # even the default
        raise ValueError(pretrained_conflict("--model.preset", model.preset, model.pretrained))
    for settings, needed in SETTINGS_AXES.items():
        if any(_uses_axis(config, needed) for config in configs):
            continue
        for name, default in asdict(getattr(Train(), settings)).items():
            value = getattr(getattr(configs[0], settings), name)
            if f"{settings}.{name}" in typed and value != default:
                strategy = configs[0].strategy
                raise ValueError(
                    f"--{settings}.{name} {brief(value)}: nothing takes notice of it, since "
                    f"--strategy {strategy} has no {needed}. Add it: --strategy {strategy}+{needed}"
                    f" --mesh.{needed} 2. Or leave the flag out."
                )


def _uses_axis(config: Train, axis: str) -> bool:
    return axis in _split_names(config.strategy) or getattr(config.mesh, axis) not in (None, 1)


def _check_device_count(sizes: dict[str, int], available: int, more_flag: str) -> None:
    """Refuse a mesh that does not fit the number of devices; name its flags."""
    typed = {axis: size for axis, size in sizes.items() if size != -1}
    needed, rest = math.prod(typed.values()), -1 in sizes.values()
    if min(typed.values(), default=1) < 1 or (
        available % needed == 0 if rest else available == needed
    ):
        return
    flags = " ".join(f"--mesh.{axis} {size}" for axis, size in typed.items())
    if not rest and available > needed:
        raise ValueError(f"{flags}: {_idle_message(typed, available, more_flag)}")
    are = "is 1" if available == 1 else f"are {available}"
    fake = " makes fake ones" * (more_flag == "--cpu-devices")
    todo = (
        f"Lower a size, or ask for more devices: {more_flag} {needed}{fake}."
        if available < needed
        else f"Give sizes whose product divides {available}."
    )
    raise ValueError(f"{flags}: {needed} devices are needed, and there {are}. {todo}")


def _idle_message(typed: dict[str, int], available: int, more_flag: str) -> str:
    """Return the message about devices that a mesh leaves idle."""
    needed = math.prod(typed.values())
    others = needed // typed["data"]
    todo = (
        f"Leave out --mesh.data, which then is {available // others}"
        if available % others == 0
        else f"Give sizes whose product is {available}"
    )
    flag = "--count" if more_flag == "--count" else "--devices"
    fewer = f", or say that so few are meant: {flag} {needed}" * (jax.process_count() == 1)
    return (
        f"{needed} of the {available} devices {'is' if needed == 1 else 'are'} used, and "
        f"{available - needed} would stay idle. {todo}{fewer}."
    )
