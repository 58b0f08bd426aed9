"""From a configuration to what runs: model, optimizer, mesh, strategy, layout, step, data."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, reduce
from typing import Any

import jax

import hfjax
from hfjax.compat.deepspeed.config_file import read
from hfjax.compat.deepspeed.convert import OnAnyDevices, of_file
from hfjax.data import TokenSet
from hfjax.data.indexed_loader import RowLoader
from hfjax.parallel.make_mesh import check_processes
from hfjax.parallel.mesh import PIPE_AXIS, describe_mesh
from hfjax.step.batches import rows_of_process
from hfjax.trainer.config import Train, beside_pretrained
from hfjax.trainer.model import check_preset
from hfjax.trainer.optimizer import keeps_nothing, optimizer_of, rate_of
from hfjax.trainer.pretrained_model import model_of
from hfjax.trainer.sampling import Sampling, check_weighs_by_mask, metrics_of_batches
from hfjax.trainer.tasks.images import Pictures, check_no_images, of_images
from hfjax.trainer.tasks.task import Scores, TaskOfRun
from hfjax.trainer.tasks.text import Texts
from hfjax.utils.read_files import shown
from hfjax.utils.tables import named
from hfjax.weights.pretrained import Pretrained

STRATEGIES = (
    *("ddp", "zero1", "zero2", "zero3", "fsdp", "hsdp", "tensor", "sequence", "grid", "context"),
    *("expert", "pipe", "host_optimizer", "host_parameters"),
)


PLANES = STRATEGIES[:6]  # each says where parameters and moments lie: one of them


@dataclass(frozen=True)
class Parts:
    """Everything that a run is made of; what is not asked for is not made.

    Args:
        config: The configuration.
        devices: The devices, in place of those at hand.
        vocab: The tokens of the vocabulary, in place of those of the data.
        trains: Whether there is a state of an optimizer; without one only to evaluate and to write.

    Example:
        >>> from hfjax.trainer import Parts, Train
        >>> parts = Parts(Train(steps=100, strategy="fsdp"))
        >>> parts.mesh.shape["fsdp"], round(float(parts.rate(20)), 4)
        (8, 0.003)
    """

    config: Train
    devices: Sequence[Any] | None = None
    vocab: int | None = None
    trains: bool = True

    @cached_property
    def task(self) -> TaskOfRun:
        """What the run learns from."""
        check_preset(self.config.model)
        if of_images(self.config):
            return Pictures(self.config)
        check_no_images(self.config)
        return Texts(self.config, self.pretrained, self.vocab)

    @property
    def texts(self) -> Texts:
        """The task, if it is of text."""
        if not isinstance(self.task, Texts):
            raise ValueError(f"{self.task.model.name}: it is of {self.task.unit}, and has no text.")
        return self.task

    @property
    def model(self) -> Any:
        """The model, and what is known of it."""
        return self.task.model

    @cached_property
    def pretrained(self) -> Pretrained | None:
        """The model of `--model.pretrained`; no weight is read. All processes ask for it."""
        given = self.config.model
        return None if given.pretrained is None else model_of(given)

    @property
    def tokenizer(self) -> Any:
        """The tokenizer: that of the model's folder, or else of the data."""
        return self.texts.tokenizer

    @property
    def tokens(self) -> list[TokenSet]:
        """The data sets to train on, of tokens."""
        return self.texts.tokens

    @property
    def reads_text(self) -> bool:
        """Whether there is a tokenizer: some data is of tokens alone, or of no text."""
        return isinstance(self.task, Texts) and self.task.reads_text

    @cached_property
    def mesh(self) -> jax.sharding.Mesh:
        """The devices."""
        mesh = mesh_of(self.config, self.devices)
        if self.devices is None:
            check_processes(mesh)
        return mesh

    @cached_property
    def layout(self) -> hfjax.Layout:
        """Where everything lives."""
        strategy, frozen = self._strategy, self.config.optimizer.frozen
        if not self.trains:
            return hfjax.layout(self.model.init, keeps_nothing(self.config), self.mesh, strategy)
        given = None if self.file is None else self.file.updates.optimizer
        optimizer = optimizer_of(self.config, self.rate, given)
        made = hfjax.layout(self.model.init, optimizer, self.mesh, strategy)
        return made.freeze(*frozen) if frozen else made

    @cached_property
    def rate(self) -> Callable:
        """The learning rate, by the number of updates."""
        given = None if self.file is None else self.file.updates.rate
        return given or rate_of(self.config)

    @cached_property
    def file(self) -> OnAnyDevices | None:
        """What a configuration of DeepSpeed says."""
        given = self.config.deepspeed
        return None if given is None else of_file(read(given))

    @property
    def _strategy(self) -> hfjax.Strategy:
        """That of the file in its details, unless another one is asked for."""
        found = strategy_of(self.config.strategy)
        told = found if self.file is None else self.file.place.strategy
        return told if told.name == found.name else found

    @cached_property
    def schedule(self) -> hfjax.Schedule | None:
        """The schedule of the pipeline."""
        stages, given = self.mesh.shape[PIPE_AXIS], self.config.pipeline
        if stages == 1:
            return None
        chunks: dict[str, Any] = {} if given.chunks is None else {"chunks": given.chunks}
        return hfjax.Schedule(given.name, given.microbatches or 4 * stages, **chunks)

    @property
    def execution(self) -> dict[str, Any]:
        """How the training step runs: fields of `Execution`."""
        c = self.config
        told = {} if self.file is None else self.file.execution
        return {
            "accumulate": c.accumulate,
            "schedule": self.schedule,
            "clip": c.optimizer.clip,
            "precision": told.get("precision", c.precision),
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
    def context(self) -> hfjax.Context:
        """How devices share rows."""
        return hfjax.Context(**asdict(self.config.context))

    @cached_property
    def step(self) -> Any:
        """The training step."""
        return hfjax.train_step(self.layout, self.model.loss, **self.execution)

    @cached_property
    def evaluate(self) -> Callable:
        """The evaluation: (state, batch) -> metrics."""
        c = self.config
        kernels = "auto" if c.kernels == "pallas" else c.kernels  # also where no kernel runs
        shared: Any = {"precision": c.precision, "schedule": self.schedule, "kernels": kernels}
        shared["context"] = self.context
        return hfjax.eval_step(self.layout, self.task.scored, **shared)

    @cached_property
    def data(self) -> RowLoader:
        """The batches to train on: of the rows that this process gives."""
        return self.task.batches(self._mine)

    @cached_property
    def valid(self) -> RowLoader | None:
        """The batches to validate on: each row once, in order; None: there are none."""
        return self.task.checks(self._mine)

    def _mine(self, batch: int) -> Any:
        return rows_of_process(self.layout, batch)

    def check_validation(self, state: hfjax.State, most: int | None = None) -> None:
        """Refuse one's own loss if it would count the rows that fill up the last batch.

        Args:
            state: A state of the layout.
            most: How many batches are validated on. None: all.
        """
        if self.valid is None or not self.model.own_loss:
            return
        count = len(self.valid)
        padded = count * self.config.batch > self.valid.rows_per_epoch
        if padded and (most is None or most >= count):
            check_weighs_by_mask(self.evaluate, state, self.valid.at(0))

    def validated(
        self,
        state: hfjax.State,
        most: int | None = None,
        beat: Callable[[], Any] = lambda: None,
    ) -> Scores:
        """Return the scores on the validation set, or on its first `most` batches.

        Args:
            state: A state of the layout.
            most: How many batches. None: all.
            beat: What is called for each batch: validating gets on.
        """
        assert self.valid is not None
        batches = self.valid.rewind()
        return self.task.read(metrics_of_batches(self.evaluate, state, batches, most, beat))

    def written(self, state: hfjax.State, prompt: str, count: int, sampling: Sampling) -> str:
        """Return a prompt and the text of `count` tokens that the model writes after it.

        Args:
            state: A state of the layout.
            prompt: Some text.
            count: How many tokens.
            sampling: How the next token is chosen, `hfjax.trainer.sampling.Sampling()`.
        """
        return self.texts.written(self.layout, state, prompt, count, sampling)

    def __str__(self) -> str:
        count = sum(math.prod(a.shape) for a in self.layout.arrays.values())
        devices = f"{self.mesh.size} of {jax.device_count()} devices, " * self._idle
        return (
            f"{self.model.name}: {short(count)} parameters, {self.layout.strategy.name} on "
            f"{describe_mesh(self.mesh)} ({devices}{self.mesh.devices.flat[0].device_kind})"
        )

    @property
    def _idle(self) -> bool:
        return self.mesh.size < jax.device_count()


def short(count: float) -> str:
    """Return a large number in few characters.

    >>> short(124_439_808), short(812)
    ('124.4M', '812')
    """
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.1f}{letter}"
    return f"{count:.4g}"


def strategy_of(names: str) -> hfjax.Strategy:
    """Return the strategy named so: fsdp+tensor."""
    given = _names(names)
    for name in given:
        if name not in STRATEGIES:
            raise ValueError(
                f"--strategy {named(names)}: no strategy {name!r}. Join some of "
                f"{', '.join(STRATEGIES)} by +, for instance fsdp+tensor."
            )
    planes = [name for name in given if name in PLANES]
    if len(planes) > 1 or len(set(given)) < len(given):
        raise ValueError(
            f"--strategy {named(names)}: at most one of {', '.join(PLANES)}, found "
            f"{', '.join(planes)}; and each name once. What goes with it: "
            f"{', '.join(STRATEGIES[len(PLANES) :])}."
        )
    return reduce(lambda a, b: a | b, (getattr(hfjax, name.upper()) for name in given))


def without_optimizer(names: str) -> str:
    """Return a strategy for what has no state of an optimizer.

    >>> without_optimizer("fsdp+host_optimizer"), without_optimizer("host_optimizer")
    ('fsdp', 'ddp')
    """
    return "+".join(name for name in _names(names) if name != "host_optimizer") or "ddp"


def whole(names: str) -> str:
    """Return a strategy in which each device has all; what lay on the host stays there.

    >>> whole("fsdp+tensor"), whole("fsdp+host_parameters")
    ('ddp', 'ddp+host_parameters')
    """
    return "+".join(["ddp", *(name for name in _names(names) if name.startswith("host_"))])


def _names(joined: str) -> list[str]:
    return [name.strip().lower() for name in joined.replace("|", "+").split("+")]


def mesh_of(config: Train, devices: Sequence[Any] | None = None) -> jax.sharding.Mesh:
    """Return the mesh; devices that no size asks for go to the axis that the strategy uses.

    None stays idle, but those that `config.devices` leaves out.
    """
    more = "--cpu-devices" if devices is None else "--count"
    devices = _first(config.devices, devices or jax.devices())
    return hfjax.make_mesh(devices=devices, **sizes_of(config, len(devices), more))


def sizes_of(config: Train, count: int, more: str = "--count") -> dict[str, int]:
    """Return the sizes of a mesh of so many devices; -1: those that are left.

    Args:
        config: The configuration.
        count: How many devices.
        more: The flag that asks for more of them.
    """
    sizes = asdict(config.mesh)
    free = _free_axis(config, count)
    if sizes[free] is None and -1 not in sizes.values():
        sizes[free] = -1
    given = {axis: size for axis, size in sizes.items() if size is not None}
    _check_count(given, count, more)
    return given


def _first(count: int | None, devices: Sequence[Any]) -> Sequence[Any]:
    """Return the first so many devices, if there are so many."""
    if count is None:
        return devices
    if count > (found := len(devices)):
        are = "is 1" if found == 1 else f"are {found}"
        raise ValueError(f"--devices {count}: there {are}. Give a number from 1 to {found}.")
    if (processes := jax.process_count()) > 1 and count < found:
        raise ValueError(
            f"--devices {count}: in a run of {processes} processes each takes part with all of its "
            f"devices, {found} together. Start them with fewer, or start fewer."
        )
    return devices[:count]


USES = {  # the names of a strategy by the axis that they split over
    **{"fsdp": ("fsdp", "zero3", "hsdp"), "data": ("ddp", "zero1", "zero2")},
    **{"tensor": ("tensor", "sequence", "grid"), "row": ("grid",)},
    **{"context": ("context",), "expert": ("expert",), "pipe": ("pipe",)},
}


def _free_axis(config: Train, devices: int) -> str:
    """Return the axis of the devices that no size asks for."""
    strategy_of(config.strategy)  # its names are checked
    used = [axis for axis, of in USES.items() if {*of} & {*_names(config.strategy)}]
    unsaid = [axis for axis in used if getattr(config.mesh, axis) is None]
    if len(unsaid) > 1 and devices > 1 and -1 not in asdict(config.mesh).values():
        flags = " and ".join(f"--mesh.{axis}" for axis in unsaid[1:])
        raise ValueError(
            f"--strategy {config.strategy}: it splits over {' and '.join(unsaid)}, and no flag "
            f"says how many of the {devices} devices go to which. Give {flags}; the others go to "
            f"{unsaid[0]}."
        )
    return next(iter(unsaid), "data")


SETTINGS_OF = {"context": "context", "pipeline": "pipe"}  # of these flags: what has to be there


def check_used(configs: Sequence[Train], words: Sequence[str]) -> None:
    """Refuse flags of a command line of which none of its configurations takes notice.

    What a file of configuration says beside them stays: of a pipeline, say, that is off here.
    """
    typed = {word.partition("=")[0].removeprefix("--").replace("-", "_") for word in words}
    model = configs[0].model
    if model.pretrained is not None and "model.preset" in typed:  # the usual one, even
        raise ValueError(beside_pretrained("--model.preset", model.preset, model.pretrained))
    for settings, needed in SETTINGS_OF.items():
        if any(_uses(config, needed) for config in configs):
            continue
        for name, usual in asdict(getattr(Train(), settings)).items():
            given = getattr(getattr(configs[0], settings), name)
            if f"{settings}.{name}" in typed and given != usual:
                strategy = configs[0].strategy
                raise ValueError(
                    f"--{settings}.{name} {shown(given)}: nothing takes notice of it, since "
                    f"--strategy {strategy} has no {needed}. Add it: --strategy {strategy}+{needed}"
                    f" --mesh.{needed} 2. Or leave the flag out."
                )


def _uses(config: Train, axis: str) -> bool:
    return axis in _names(config.strategy) or getattr(config.mesh, axis) not in (None, 1)


def _check_count(given: dict[str, int], found: int, more: str) -> None:
    """Refuse a mesh of other devices than there are, by its flags."""
    typed = {axis: size for axis, size in given.items() if size != -1}
    needed, rest = math.prod(typed.values()), -1 in given.values()
    if min(typed.values(), default=1) < 1 or (found % needed == 0 if rest else found == needed):
        return
    flags = " ".join(f"--mesh.{axis} {size}" for axis, size in typed.items())
    if not rest and found > needed:
        raise ValueError(f"{flags}: {_idle(typed, found, more)}")
    are = "is 1" if found == 1 else f"are {found}"
    fake = " makes fake ones" * (more == "--cpu-devices")
    todo = (
        f"Lower a size, or ask for more devices: {more} {needed}{fake}."
        if found < needed
        else f"Give sizes whose product divides {found}."
    )
    raise ValueError(f"{flags}: {needed} devices are needed, and there {are}. {todo}")


def _idle(typed: dict[str, int], found: int, more: str) -> str:
    """Return how many devices a mesh leaves idle, and what to do."""
    needed = math.prod(typed.values())
    others = needed // typed["data"]
    todo = (
        f"Leave out --mesh.data, which then is {found // others}"
        if found % others == 0
        else f"Give sizes whose product is {found}"
    )
    flag = "--count" if more == "--count" else "--devices"
    fewer = f", or say that so few are meant: {flag} {needed}" * (jax.process_count() == 1)
    return (
        f"{needed} of the {found} devices {'is' if needed == 1 else 'are'} used, and "
        f"{found - needed} would stay idle. {todo}{fewer}."
    )
