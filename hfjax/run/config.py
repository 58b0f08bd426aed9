"""The configuration of a run: every field is a flag of `hfjax train`, and a line of its YAML."""

import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from hfjax.base.keywords import is_real, is_whole
from hfjax.base.read_files import shown
from hfjax.base.tables import named
from hfjax.parallel.activation_offload import Offload
from hfjax.parallel.precision.by_path import by_path
from hfjax.parallel.precision.dtypes import precision_of
from hfjax.parallel.remat import Remat
from hfjax.parallel.schedules.named import Schedule
from hfjax.run.profile import steps_of

Names = tuple[str, ...]


MOST = 2**31 - 1  # of counts and seconds
LARGEST, SMALLEST = float(np.finfo(np.float32).max), float(np.finfo(np.float32).tiny)


def at_least(settings: Any, prefix: str, most: float = MOST, **least: float) -> None:
    """Refuse settings out of bounds, and numbers that are none; None is not looked at."""
    for name, bound in least.items():
        value = getattr(settings, name)
        if value is None:
            continue
        number = is_real(value, -math.inf, math.inf)
        counts = settings.__dataclass_fields__[name].type in (int, int | None)
        if counts and number and not is_whole(value, -MOST, 2**63) and bound <= value <= most:
            flag = f"{prefix}{name.replace('_', '-')}"
            raise ValueError(
                f"--{flag} {shown(value)}: a number from {bound} on is needed, a whole one."
            )
        if not number or not bound <= value <= most:
            flag = f"{prefix}{name.replace('_', '-')}"
            to = f"to {int(most) if most < 2**53 else most}" if number and value > most else "on"
            raise ValueError(f"--{flag} {shown(value)}: a number from {bound} {to} is needed.")


def in_float32(settings: Any, prefix: str, *names: str) -> None:
    """Refuse numbers below 0, and those that float32 makes infinite or 0."""
    at_least(settings, prefix, LARGEST, **dict.fromkeys(names, 0))
    for name in names:
        if 0 < (value := getattr(settings, name) or 0) < SMALLEST:
            flag = f"{prefix}{name.replace('_', '-')}"
            raise ValueError(f"--{flag} {value}: that is 0 in float32. Give 0, or more.")


def beside_pretrained(flag: str, given: Any, folder: Path) -> str:
    """Return what to say of a flag that is given beside a folder."""
    return (
        f"{flag.replace('_', '-')} {given} beside --model.pretrained {named(folder)}: the "
        "folder says what the model is. Leave out one of the two."
    )


@dataclass(frozen=True)
class Model:
    """What is trained."""

    preset: str = "gpt-tiny"
    """gpt-tiny, gpt-small (124M), gpt-medium, gpt-large, gpt-xl, llama-tiny, llama2-7b, llama3-8b
    and others; with experts mixtral-tiny, deepseek-tiny, mixtral-8x7b, deepseek-16b. Of images:
    resnet50, regnet-y-400mf, deeplabv3-resnet101, vit-b-16 and others."""
    own: str | None = None
    """Your own model in place of a preset: file.py:function, a function of (vocab, length) that
    returns model_init(rngs); of (classes, size) where --data.train is a folder of images."""
    pretrained: Path | None = None
    """A model from Hugging Face in place of a preset: its folder, with config.json, files of
    safetensors and tokenizer.json. Training begins with its weights."""
    stored: Literal["fp32", "bf16"] = "fp32"
    """Of --model.pretrained: in which type parameters are stored and updated. bf16 loses small
    updates: --optimizer.master keeps a float32 copy beside it."""
    loss: str | None = None
    """Your own loss(outputs, batch): file.py:function; without it, that of the next token."""
    length: int | None = None
    """Tokens in a row; None: what the preset has; of --model.pretrained its own, at most 4096."""
    layers: int | None = None
    heads: int | None = None
    embed: int | None = None
    dropout: float = 0.0
    experts: int | None = None
    """Of a preset with experts: how many each layer has."""
    top_k: int | None = None
    """How many experts a token goes to."""
    capacity: float | None = None
    """How many tokens of a row an expert takes: this times the mean; 0: all that come. None: what
    the preset has."""
    weights: Path | None = None
    """Of a preset of images: a file of safetensors with torchvision's names, to begin with."""
    new_head: bool = False
    """Leave out the last layer of --model.weights: it is of other classes."""
    classes: int | None = None
    """How many classes a model of images has; None: those of the data."""
    frozen_norms: bool = False
    """Keep BatchNorm as it is in --model.weights: its statistics, its scale and its bias."""
    group_norms: bool = False
    """GroupNorm in place of BatchNorm: no statistics, so that rows do not meet."""
    smoothing: float = 0.0
    """Of classes of images: the part of a target that is spread over all of them."""

    def __post_init__(self):
        at_least(self, "model.", length=1, layers=1, heads=1, embed=1, dropout=0)
        at_least(self, "model.", experts=1, top_k=1, capacity=0, classes=1, smoothing=0)
        if self.smoothing >= 1:
            raise ValueError(f"--model.smoothing {self.smoothing}: a part from 0 to below 1.")
        if self.dropout > 1:
            raise ValueError(f"--model.dropout {self.dropout}: a part from 0 to 1 is needed.")
        self._check_pretrained()

    def _check_pretrained(self) -> None:
        """Refuse what else says of which shape a model is, beside a folder that does."""
        if self.pretrained is None:
            if self.stored != "fp32":
                raise ValueError(
                    f"--model.stored {self.stored}: it is of --model.pretrained, which is not "
                    "given. Other models are stored in bfloat16 by --optimizer.master."
                )
            return
        for name in ("preset", "own", "layers", "heads", "embed", "experts", "top_k"):
            if (given := getattr(self, name)) != type(self).__dataclass_fields__[name].default:
                raise ValueError(beside_pretrained(f"--model.{name}", given, self.pretrained))


@dataclass(frozen=True)
class Mesh:
    """How many devices on each axis; -1: those that are left. Devices that no size asks for go to
    the axis that the strategy uses, or else to data: see --strategy."""

    data: int | None = None
    fsdp: int | None = None
    row: int | None = None
    tensor: int | None = None
    context: int | None = None
    expert: int | None = None
    pipe: int | None = None


@dataclass(frozen=True)
class ContextOptions:
    """How devices share rows, where --mesh.context is above 1: docs/long_sequences.md."""

    form: Literal["auto", "ring", "allgather", "ulysses"] = "auto"
    """What travels: keys and values from device to device, the same at once, or heads; auto: what
    sends least."""
    ulysses: int | None = None
    """How many neighbours exchange heads within a ring or a gather."""
    order: Literal["auto", "zigzag", "contiguous"] = "auto"
    """Who holds what: an early and a late part each, or one part."""

    def __post_init__(self):
        at_least(self, "context.", ulysses=1)


@dataclass(frozen=True)
class PipelineOptions:
    """The schedule of a pipeline, where --mesh.pipe is above 1."""

    name: str = "1f1b"
    microbatches: int | None = None
    """None: four for each stage."""
    chunks: int | None = None

    def __post_init__(self):
        at_least(self, "pipeline.", microbatches=1, chunks=1)
        chunks: dict[str, Any] = {} if self.chunks is None else {"chunks": self.chunks}
        try:
            Schedule(self.name, self.microbatches or 1, **chunks)
        except ValueError as wrong:
            raise ValueError(f"--pipeline.name {self.name}: {wrong}") from None


@dataclass(frozen=True)
class Data:
    """What is read."""

    train: Names = ()
    """Directories that `hfjax data` made (with a part `train`, or whole); none: the source of
    Python's own standard library, in bytes. Of a model of images: a folder of them, with a folder
    for each class, or with images/ and masks/."""
    valid: str | None = None
    """The directory to validate on; None: the part `valid` of the first, if there is one."""
    weights: tuple[float, ...] | None = None
    """How often to draw from each of several."""
    packing: Literal["stream", "documents"] = "stream"
    """stream: rows cut from the text as it follows; documents: whole ones, packed and masked."""
    epochs: int | None = None
    """Stop after going over the data so often, if --steps has not come first."""
    size: int | None = None
    """Height and width of images in pixels; None: 224, with masks 513, of small presets 32."""
    broken: Literal["refuse", "skip"] = "refuse"
    """What to do where an image does not decode: stop, or take the next one and tell at the end."""
    scale: tuple[float, float] | None = None
    """Images are cut at random: the least and the largest part of the area; with masks how much
    larger they get. None: 0.08 1, and 0.5 2."""
    flip: float = 0.5
    """How often left and right of an image are exchanged."""
    brightness: float = 0.0
    """0.4: times 0.6 to 1.4; contrast and saturation likewise."""
    contrast: float = 0.0
    saturation: float = 0.0

    def __post_init__(self):
        at_least(self, "data.", epochs=1, size=1)
        at_least(self, "data.", 1, flip=0)
        in_float32(self, "data.", "brightness", "contrast", "saturation")
        if self.scale is not None and not 0 < self.scale[0] <= self.scale[1] < MOST:
            raise ValueError(
                f"--data.scale {self.scale[0]} {self.scale[1]}: the least and the largest, above 0."
            )


@dataclass(frozen=True)
class Optimizer:
    """How parameters are updated."""

    name: str = "adamw"
    """Any of optax that takes a schedule of learning rates: adamw, lion, sgd, adafactor, …"""
    own: str | None = None
    """Your own: file.py:function, a function of the learning rate (a schedule) that returns any
    optax transformation."""
    rate: float = 3e-3
    """The highest learning rate."""
    momentum: float | None = None
    """Of an optimizer that has it: sgd, rmsprop, …; None: what optax has (of sgd: none)."""
    warmup: int | None = None
    """Steps to go up to it; None: 20, or a quarter of a short run."""
    decay: Literal["cosine", "linear", "constant"] = "cosine"
    end: float = 0.1
    """The last learning rate, as a part of the highest."""
    hold: int = 0
    """Steps at the highest rate before it decays."""
    weight_decay: float | None = None
    """None: 0.1 where the optimizer has it; of sgd 0."""
    no_decay: Names | None = None
    """Patterns of paths that do not decay; None: biases and norms."""
    frozen: Names = ()
    """Patterns of paths that stay as they are."""
    scale: Names = ()
    """Learning rates of some paths, as a factor: tokens=0.1 'layers/*=0.5'."""
    clip: float | None = 1.0
    """Greatest global norm of the gradient."""
    ema: float | None = None
    """Decay of an average of the parameters, for instance 0.999; it is what is validated."""
    master: bool = False
    """Store parameters in bfloat16, and update a float32 copy of them."""
    in_backward: bool = False
    """Update each layer as soon as its gradient is there; requires --optimizer.clip None."""

    def __post_init__(self):
        at_least(self, "optimizer.", warmup=0, hold=0)
        at_least(self, "optimizer.", 1, momentum=0)
        in_float32(self, "optimizer.", "rate", "weight_decay", "clip")


@dataclass(frozen=True)
class CheckpointOptions:
    """What is saved, and when."""

    every: int | None = None
    """Steps between checkpoints; None: ten in a run, at least 25 apart; 0: only the last step."""
    keep: int = 3
    """How many of the latest are kept."""
    keep_every: int | None = None
    """And the first one at or after each multiple of this."""
    keep_best: bool = False
    """And the one with the lowest validation loss."""
    resume: Literal["auto", "never"] = "auto"
    """auto: go on from the latest in the directory of the run, if there is one."""
    start: str | None = None
    """Begin with the parameters of another run's directory (fine-tuning)."""

    def __post_init__(self):
        at_least(self, "checkpoints.", every=0, keep=1, keep_every=1)


@dataclass(frozen=True)
class Log:
    """What is told, and where."""

    every: int = 10
    """Steps between log lines; metrics.jsonl has every step."""
    valid_every: int | None = None
    """Steps between validations; None: four in a run; 0: none."""
    valid_batches: int = 20
    """At most so many batches for each validation."""
    tensorboard: bool = False
    wandb: str | None = None
    """The name of a Weights & Biases project."""
    sample: int = 200
    """Tokens of text to show at the end; 0: none."""

    def __post_init__(self):
        at_least(self, "log.", every=0, valid_every=0, valid_batches=1, sample=0)


@dataclass(frozen=True)
class Train:
    """Train a model: on this machine, or in several processes started by `hfjax launch`, SLURM,
    Open MPI or torchrun. Without any flag: a byte-level GPT on Python's own library.

    --config FILE takes other defaults from a .yaml file, or from `config` of a .py file; flags have
    the last word.
    """

    out: Path | None = None
    """The directory of the run; None: runs/PRESET, or runs/ and the name of the model's folder."""
    steps: int = 300
    batch: int = 32
    """Rows in a step, on all devices together."""
    accumulate: int = 1
    """Microbatches in a step."""
    deepspeed: Path | None = None
    """A configuration of DeepSpeed, ds_config.json: the flags that it speaks of are as it says."""
    strategy: str = "ddp"
    """ddp, zero1, zero2, zero3, fsdp, hsdp, tensor, sequence, grid, context, expert, pipe,
    host_optimizer, host_parameters, joined by +: fsdp+tensor; at most one of the first six. Devices
    that no --mesh size asks for go to the axis that it uses (fsdp, tensor, context …) or, if that
    has a size, to data."""
    precision: str = "stored"
    """stored, fp32, bf16, fp16; or by path, the first for all else: bf16,*norm*=fp32."""
    remat: str = "none"
    """What layers compute again in the backward pass: none, dots (all but matrix products), full,
    except_last (in a pipeline), every:2, group:4, names:qkv,mlp_up (all but these)."""
    offload: str | None = None
    """What of the tensors that layers keep waits in host memory: a part of the bytes (0.3),
    names:qkv,mlp_up, dots."""
    offload_words: ClassVar[tuple[str, ...]] = ()  # further ones that are allowed
    kernels: Literal["auto", "pallas", "xla", "reference"] = "auto"
    """Which form fused kernels take: what was measured to be faster on this device (hfjax kernels
    tells), the kernels, what XLA makes of plain JAX, or the plain JAX beside each kernel."""
    dispatch: Literal["auto", "all_to_all", "gather"] = "auto"
    """How tokens get to experts on other devices; auto: by what sends the fewest bytes."""
    split_rows: int = 1
    """Parts of a device's rows that go through each layer one after the other: collectives over
    tensor of one part run beside products of the other."""
    reduction: Literal["flat", "hierarchical"] = "flat"
    """How gradients are summed over data and fsdp: at once, or in a node first."""
    nonfinite: Literal["stop", "skip"] = "stop"
    """What to do where loss or gradient is not finite."""
    seed: int = 0
    model: Model = field(default_factory=Model)
    mesh: Mesh = field(default_factory=Mesh)
    context: ContextOptions = field(default_factory=ContextOptions)
    pipeline: PipelineOptions = field(default_factory=PipelineOptions)
    data: Data = field(default_factory=Data)
    optimizer: Optimizer = field(default_factory=Optimizer)
    checkpoints: CheckpointOptions = field(default_factory=CheckpointOptions)
    log: Log = field(default_factory=Log)
    devices: int | None = None
    """Use only the first so many devices; None: all."""
    cpu_devices: int | None = None
    """Run on so many fake CPU devices."""
    profile: str | None = None
    """Steps to trace, FIRST:END; for instance 5:8 traces steps 5, 6 and 7."""
    timeout: float = 600.0
    """A process that makes no progress for so many seconds is ended: reads no batch, ends no step.
    What compiles (preparing, the first step) may take an hour, a checkpoint ten minutes."""
    init_timeout: float = 60.0
    """Seconds within which all processes of a run have to come."""
    minutes: float | None = None
    """Save and stop after so many minutes; started again, the run goes on."""
    cache: Path | None = None
    """Where compiled programs are kept; None: in the user's cache."""

    def __post_init__(self):
        at_least(self, "", steps=1, batch=1, accumulate=1, split_rows=1)
        at_least(self, "", devices=1, cpu_devices=1)
        at_least(self, "", timeout=1, init_timeout=1, minutes=0)
        at_least(self, "", 2**32 - 1, seed=0)
        Remat.of(self.remat)
        precision_of(by_path(self.precision))
        self._check_offload()
        self._check_microbatches()
        self._check_profile()

    def _check_offload(self) -> None:
        if self.offload is not None and self.offload not in self.offload_words:
            Offload.of(self.offload)

    def _check_microbatches(self) -> None:
        piped = None if self.mesh.pipe in (None, 1) else self.pipeline.microbatches
        flags = {"--accumulate": self.accumulate, "--pipeline.microbatches": piped}
        for flag, count in flags.items():
            if count is not None and count > self.batch:
                raise ValueError(
                    f"{flag} {count}: more than --batch {self.batch} has rows. Lower the one, or "
                    "raise the other."
                )

    def _check_profile(self) -> None:
        if self.profile is None:
            return
        first, end = steps_of(self.profile)
        if end > self.steps:
            raise ValueError(
                f"--profile {self.profile}: the last step is {self.steps - 1} (--steps "
                f"{self.steps}), so END is at most {self.steps}, for instance "
                f"{min(first, self.steps - 1)}:{self.steps}."
            )

    @property
    def directory(self) -> Path:
        """The directory of the run."""
        if self.out is not None:
            return self.out
        if self.model.pretrained is not None:
            return Path("runs") / Path(os.path.abspath(self.model.pretrained)).name
        return Path("runs") / ("own" if self.model.own else self.model.preset)
