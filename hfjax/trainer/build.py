"""Build a run from its configuration: model, optimizer, mesh, strategy, layout, step, data."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import jax

import hfjax
from hfjax.compat.deepspeed.config_file import read_config
from hfjax.compat.deepspeed.convert import ParsedConfig, parse_config
from hfjax.data import TokenSet
from hfjax.data.indexed_loader import IndexedLoader
from hfjax.parallel.make_mesh import check_processes
from hfjax.parallel.mesh import PIPE_AXIS, describe_mesh
from hfjax.parallel.precision.auto import auto_precision, replace_auto
from hfjax.parallel.precision.dtypes import AUTO
from hfjax.sharding.report import optimizer_notes
from hfjax.step.batches import process_batch_slice
from hfjax.trainer import config_io
from hfjax.trainer.config import TrainConfig, pretrained_conflict
from hfjax.trainer.model import check_preset
from hfjax.trainer.optimizer import build_optimizer, make_lr_schedule, stateless_optimizer
from hfjax.trainer.pretrained_model import open_pretrained
from hfjax.trainer.sampling import Sampling, check_mask_weights, eval_batches
from hfjax.trainer.strategy import build_mesh, choose_strategy
from hfjax.trainer.tasks.images import ImageTask, check_text_only, is_image_task
from hfjax.trainer.tasks.own_data import OwnData, OwnDataTask, OwnModelTask
from hfjax.trainer.tasks.task import Scores, Task
from hfjax.trainer.tasks.text import TextTask
from hfjax.utils.read_files import brief
from hfjax.weights.pretrained import Pretrained


@dataclass(frozen=True)
class RunComponents:
    """The components of a run, each built on first use.

    Args:
        config: The configuration.
        devices: The devices to use. None: `jax.devices()`.
        vocab: The vocabulary size. None: that of the data.
        trains: Whether there is optimizer state; without it the run can only evaluate and write.

    Example:
        >>> from hfjax.trainer import RunComponents, TrainConfig
        >>> from hfjax.trainer.config import MeshConfig
        >>> parts = RunComponents(TrainConfig(steps=100, mesh=MeshConfig(fsdp=-1)))
        >>> parts.mesh.shape["fsdp"], round(float(parts.rate(20)), 4)
        (8, 0.003)
    """

    config: TrainConfig
    devices: Sequence[Any] | None = None
    vocab: int | None = None
    trains: bool = True

    @cached_property
    def task(self) -> Task:
        """The task: text, images, or one on data of a user's own."""
        if self.config.data.factory is not None:
            data = OwnData(self.config)
            has_own_model = self.config.model.factory is not None
            model_task = OwnModelTask(self.config, data) if has_own_model else self._preset_task
            return OwnDataTask(self.config, data, model_task)
        if (size := self.config.model.vocab_size) is not None:
            raise ValueError(
                f"--model.vocab-size {size}: without --data.factory the vocabulary is that of the "
                "data. Leave it out."
            )
        return self._preset_task

    @property
    def _preset_task(self) -> TextTask | ImageTask:
        """The task of text or images, whichever the model is of."""
        check_preset(self.config.model)
        if is_image_task(self.config):
            return ImageTask(self.config)
        check_text_only(self.config)
        return TextTask(self.config, self.pretrained, self.vocab or self.config.model.vocab_size)

    @property
    def _text_task(self) -> TextTask | None:
        """The text task, also where a user's own data takes the place of its token files."""
        task = self.task.model_task if isinstance(self.task, OwnDataTask) else self.task
        return task if isinstance(task, TextTask) else None

    @property
    def texts(self) -> TextTask:
        """The task; refuse one that is not text."""
        if (task := self._text_task) is None:
            raise ValueError(f"{self.task.model.name}: it is of {self.task.unit}, and has no text.")
        return task

    @property
    def model(self) -> Any:
        """The model to train, with its loss and sizes."""
        return self.task.model

    @cached_property
    def pretrained(self) -> Pretrained | None:
        """The model of `--model.pretrained`, no weights read yet. All processes must call it."""
        opts = self.config.model
        return None if opts.pretrained is None else open_pretrained(opts, self.config.param_dtype)

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
        return (task := self._text_task) is not None and task.reads_text

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
        strategy, frozen = self.strategy, self.config.optimizer.frozen
        if not self.trains:
            return hfjax.layout(
                self.model.init, stateless_optimizer(self.config), self.mesh, strategy
            )
        file_optimizer = None if self.file is None else self.file.optimizer_setup.optimizer
        optimizer = build_optimizer(self.config, self.rate, file_optimizer)
        layout = hfjax.layout(self.model.init, optimizer, self.mesh, strategy)
        return layout.freeze(*frozen) if frozen else layout

    @cached_property
    def rate(self) -> Callable:
        """The learning-rate schedule, by the number of updates."""
        file_rate = None if self.file is None else self.file.optimizer_setup.rate
        return file_rate or make_lr_schedule(self.config)

    @cached_property
    def file(self) -> ParsedConfig | None:
        """The parsed DeepSpeed configuration, if there is one."""
        path = self.config.deepspeed
        return None if path is None else parse_config(read_config(path))

    @cached_property
    def strategy(self) -> hfjax.Strategy:
        """The strategy, with the details of the DeepSpeed file if that describes the same."""
        strategy = choose_strategy(self.config)
        if self.file is None:
            return strategy
        names = lambda s: {part.name.replace("HSDP", "FSDP") for part in s.parts}
        file_strategy = self.file.parallelism.strategy
        return file_strategy if names(file_strategy) == names(strategy) else strategy

    @cached_property
    def schedule(self) -> hfjax.Schedule | None:
        """The pipeline schedule; None without pipeline stages."""
        stages, opts = self.mesh.shape[PIPE_AXIS], self.config.pipeline
        if stages == 1:
            return None
        chunks: dict[str, Any] = {} if opts.chunks is None else {"chunks": opts.chunks}
        return hfjax.Schedule(opts.schedule, opts.microbatches or 4 * stages, **chunks)

    @cached_property
    def precision(self) -> str:
        """The precision, with what "auto" stands for on these devices and for this model."""
        return self.precision_on(self.mesh.devices.flat[0])

    def precision_on(self, device: Any) -> str:
        """Return the precision, with what "auto" stands for on a device.

        Args:
            device: The device, or the machine that is planned for.
        """
        if AUTO not in self.config.precision:
            return self.config.precision
        dtypes = (p.dtype for p in self.layout.param_specs.values())
        return replace_auto(self.config.precision, auto_precision(device, dtypes))

    @property
    def execution(self) -> dict[str, Any]:
        """How the training step runs: fields of `Execution`."""
        c = self.config
        from_file = {} if self.file is None else self.file.execution
        return {
            "gradient_accumulation_steps": c.gradient_accumulation_steps,
            "schedule": self.schedule,
            "max_grad_norm": c.optimizer.max_grad_norm,
            "precision": from_file.get("precision", self.precision),
            "remat": c.remat,
            "offload": c.offload.activations,
            "optimizer_in_backward": c.optimizer.in_backward,
            "on_nonfinite": c.on_nonfinite,
            "context": self.context,
            "dispatch": c.dispatch,
            "tensor_overlap_chunks": c.tensor_overlap_chunks,
            "gradient_reduction": c.gradient_reduction,
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
        opts: Any = {"precision": self.precision, "schedule": self.schedule, "kernels": kernels}
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
        padded = count * self.config.global_batch_size > self.valid.examples_per_epoch
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

    def answered(self, state: hfjax.State, prompt: str, count: int, sampling: Sampling) -> str:
        """Return the answer of at most `count` tokens to a message, by the chat template.

        Args:
            state: A state of the layout.
            prompt: The user's message.
            count: Number of tokens to generate; what follows the end of the turn is left out.
            sampling: How the next token is chosen, `hfjax.trainer.sampling.Sampling()`.
        """
        return self.texts.answer_prompt(self.layout, state, prompt, count, sampling)

    def startup_notes(self) -> list[str]:
        """Return the lines below the summary: of the task, and which parameters muon updates."""
        return [*self.task.startup_notes(), *optimizer_notes(self.layout)]

    def __str__(self) -> str:
        count = sum(math.prod(a.shape) for a in self.layout.arrays.values())
        devices = f"{self.mesh.size} of {jax.device_count()} devices, " * self._has_idle_devices
        return (
            f"{self.model.name}: {format_count(count)} parameters, {self.layout.strategy.name} on "
            f"{describe_mesh(self.mesh)} ({devices}{self.mesh.devices.flat[0].device_kind}), "
            f"precision {self.precision}"
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


# Flags -> the mesh axis that they need, and what turns it on.
NEEDED_AXES = {
    **{"context.": ("context", "--mesh.context 2"), "pipeline.": ("pipe", "--mesh.pipe 2")},
    **dict.fromkeys(("sequence_parallel", "tensor_overlap_chunks"), ("tensor", "--mesh.tensor 2")),
}
UNUSED = {  # of two flags, the second has no effect
    "model.factory": "model.preset",
    "optimizer.factory": "optimizer.name",
}


def check_flags_used(configs: Sequence[TrainConfig], argv: Sequence[str]) -> None:
    """Refuse command-line flags that none of the configurations uses.

    Unused settings of a configuration file are allowed, such as those of a pipeline that is off.
    """
    typed = {arg.partition("=")[0].removeprefix("--").replace("-", "_") for arg in argv}
    model = configs[0].model
    if model.pretrained is not None and "model.preset" in typed:  # even the default
        raise ValueError(pretrained_conflict("--model.preset", model.preset, model.pretrained))
    changed = config_io.changed_fields(configs[0])
    for used, unused in UNUSED.items():
        if used in changed and unused in typed:
            raise ValueError(
                f"--{unused} beside --{used} {changed[used]}, which takes its place. Leave out one."
            )
    if configs[0].lr_schedule.type == "constant":
        for name in typed & {"lr_schedule.final_fraction", "lr_schedule.stable_steps"}:
            flag = name.replace("_", "-")
            raise ValueError(
                f"--{flag}: nothing uses it, since --lr-schedule.type is constant. Leave it out."
            )
    for prefix, (axis, flag) in NEEDED_AXES.items():
        if any(config.mesh.is_on(axis) for config in configs):
            continue
        for name, value in changed.items():
            no_name = f"no_{name}"
            if name.startswith(prefix) and ({name, no_name} & typed):
                text = f"no-{name}" if value is False else f"{name} {brief(value)}"
                raise ValueError(
                    f"--{text.replace('_', '-')}: nothing uses it, since --mesh.{axis} is 1. Give "
                    f"{flag}, or leave the flag out."
                )
