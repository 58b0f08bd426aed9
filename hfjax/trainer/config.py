"""The configuration of a run: every field is a flag of `hfjax train`, and a line of its YAML."""

import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from hfjax.parallel.offload.activations import Offload
from hfjax.parallel.precision.by_path import parse_precision
from hfjax.parallel.precision.dtypes import precision_of
from hfjax.parallel.remat import Remat
from hfjax.parallel.schedules.named import Schedule
from hfjax.trainer.profile import parse_steps
from hfjax.utils.keywords import is_int, is_real
from hfjax.utils.read_files import brief
from hfjax.utils.tables import quote

Names = tuple[str, ...]


MOST = 2**31 - 1  # of counts and seconds
LARGEST, SMALLEST = float(np.finfo(np.float32).max), float(np.finfo(np.float32).tiny)


def check_bounds(settings: Any, prefix: str, most: float = MOST, **least: float) -> None:
    """Refuse settings that are out of bounds or not numbers; None is allowed."""
    for name, bound in least.items():
        value = getattr(settings, name)
        if value is None:
            continue
        number = is_real(value, -math.inf, math.inf)
        counts = settings.__dataclass_fields__[name].type in (int, int | None)
        if counts and number and not is_int(value, -MOST, 2**63) and bound <= value <= most:
            flag = f"{prefix}{name.replace('_', '-')}"
            raise ValueError(
                f"--{flag} {brief(value)}: a number from {bound} on is needed, a whole one."
            )
        if not number or not bound <= value <= most:
            flag = f"{prefix}{name.replace('_', '-')}"
            to = f"to {int(most) if most < 2**53 else most}" if number and value > most else "on"
            raise ValueError(f"--{flag} {brief(value)}: a number from {bound} {to} is needed.")


def check_float32(settings: Any, prefix: str, *names: str) -> None:
    """Refuse numbers below 0, and those that float32 makes infinite or 0."""
    check_bounds(settings, prefix, LARGEST, **dict.fromkeys(names, 0))
    for name in names:
        if 0 < (value := getattr(settings, name) or 0) < SMALLEST:
            flag = f"{prefix}{name.replace('_', '-')}"
            raise ValueError(f"--{flag} {value}: that is 0 in float32. Give 0, or more.")


def pretrained_conflict(flag: str, value: Any, folder: Path) -> str:
    """Return the message about a flag that conflicts with --model.pretrained."""
    return (
        f"{flag.replace('_', '-')} {value} beside --model.pretrained {quote(folder)}: the "
        "folder says what the model is. Leave out one of the two."
    )


@dataclass(frozen=True)
class Model:
    """The model."""

    preset: str = "gpt-tiny"
    """Preset: {presets}; of images: {image_presets}."""
    own: str | None = None
    """Your own model: file.py:function of (vocab, length) or (classes, size) (default: none)."""
    pretrained: Path | None = None
    """Folder of a Hugging Face model to start from, in place of a preset (default: none)."""
    stored: Literal["fp32", "bf16"] = "fp32"
    """Stored dtype of --model.pretrained; with bf16 use --optimizer.master."""
    loss: str | None = None
    """Your own loss(outputs, batch): file.py:function (default: that of the task)."""
    length: int | None = None
    """Tokens in a sequence (default: the preset's, or the folder's but at most 4096)."""
    layers: int | None = None
    """Number of layers (default: the preset's)."""
    heads: int | None = None
    """Attention heads of a layer (default: the preset's)."""
    embed: int | None = None
    """Width of embeddings and layers (default: the preset's)."""
    kv_heads: int | None = None
    """Heads of keys and values, of a Llama (default: as many for each head as the preset has)."""
    mlp: int | None = None
    """Width of a Llama's MLP, or of an expert (default: the preset's)."""
    head: int | None = None
    """Width of one of a Llama's heads (default: --model.embed / --model.heads)."""
    dropout: float | None = None
    """Dropout rate, from 0 to 1 (default: the preset's)."""
    auxiliary_dropout: float | None = None
    """Dropout rate of DeepLab's auxiliary head (default: the preset's)."""
    experts: int | None = None
    """Experts of a layer, in a preset that has experts (default: the preset's)."""
    top_k: int | None = None
    """Experts that each token goes to (default: the preset's)."""
    capacity: float | None = None
    """Tokens an expert takes, as a multiple of the mean; 0: all (default: the preset's)."""
    weights: Path | None = None
    """File of torchvision's weights (.safetensors) for an image preset (default: none)."""
    new_head: bool = False
    """Drop the last layer of --model.weights, for other classes."""
    classes: int | None = None
    """Number of classes of images (default: that of the data)."""
    frozen_norms: bool = False
    """Freeze BatchNorm as in --model.weights: statistics, scale and bias."""
    group_norms: bool = False
    """Use GroupNorm for BatchNorm, so that no statistics mix examples."""
    smoothing: float = 0.0
    """Label smoothing: fraction of a target spread over all classes."""

    def __post_init__(self):
        check_bounds(self, "model.", length=1, layers=1, heads=1, embed=1)
        check_bounds(self, "model.", kv_heads=1, mlp=1, head=2)
        check_bounds(self, "model.", dropout=0, auxiliary_dropout=0)
        check_bounds(self, "model.", experts=1, top_k=1, capacity=0, classes=1, smoothing=0)
        if self.smoothing >= 1:
            raise ValueError(f"--model.smoothing {self.smoothing}: a part from 0 to below 1.")
        for name in ("dropout", "auxiliary_dropout"):
            if (rate := getattr(self, name) or 0) > 1:
                flag = name.replace("_", "-")
                raise ValueError(f"--model.{flag} {rate}: a part from 0 to 1 is needed.")
        self._check_pretrained()

    def _check_pretrained(self) -> None:
        """Refuse flags of the shape beside --model.pretrained, and --model.stored without it."""
        if self.pretrained is None:
            if self.stored != "fp32":
                raise ValueError(
                    f"--model.stored {self.stored}: it is of --model.pretrained, which is not "
                    "given. Other models are stored in bfloat16 by --optimizer.master."
                )
            return
        of_shape = ("layers", "heads", "embed", "kv_heads", "mlp", "head", "experts", "top_k")
        for name in ("preset", "own", *of_shape):
            if (value := getattr(self, name)) != type(self).__dataclass_fields__[name].default:
                raise ValueError(pretrained_conflict(f"--model.{name}", value, self.pretrained))


@dataclass(frozen=True)
class Mesh:
    """Sizes of the mesh's axes; -1: all remaining devices. Devices that no size asks for go to the
    axis over which --strategy splits or, if that has a size, to data."""

    data: int | None = None
    """Devices that split the batch (default: automatic)."""
    fsdp: int | None = None
    """Devices that split the batch, and parameters with their state (default: automatic)."""
    row: int | None = None
    """Rows of a tensor grid, whose columns are --mesh.tensor (default: automatic)."""
    tensor: int | None = None
    """Devices that split each layer (default: automatic)."""
    context: int | None = None
    """Devices that split each sequence (default: automatic)."""
    expert: int | None = None
    """Devices that split the batch, and experts (default: automatic)."""
    pipe: int | None = None
    """Stages of the pipeline (default: automatic)."""


@dataclass(frozen=True)
class ContextOptions:
    """How devices share a sequence, if --mesh.context is above 1: docs/long_sequences.md."""

    form: Literal["auto", "ring", "allgather", "ulysses"] = "auto"
    """ring, allgather: exchange keys, values; ulysses: heads; auto: fewest bytes."""
    ulysses: int | None = None
    """Devices in a group that exchanges heads (default: as --context.form needs)."""
    order: Literal["auto", "zigzag", "contiguous"] = "auto"
    """zigzag: an early and a late part; contiguous: one; auto: by windows."""

    def __post_init__(self):
        check_bounds(self, "context.", ulysses=1)


@dataclass(frozen=True)
class PipelineOptions:
    """The schedule of a pipeline, if --mesh.pipe is above 1."""

    name: str = "1f1b"
    """Schedule, as hfjax schedule lists them: {schedules}."""
    microbatches: int | None = None
    """Microbatches in a step (default: four for each stage)."""
    chunks: int | None = None
    """Pieces of the model on each stage (default: as the schedule has them)."""

    def __post_init__(self):
        check_bounds(self, "pipeline.", microbatches=1, chunks=1)
        chunks: dict[str, Any] = {} if self.chunks is None else {"chunks": self.chunks}
        try:
            Schedule(self.name, self.microbatches or 1, **chunks)
        except ValueError as wrong:
            raise ValueError(f"--pipeline.name {self.name}: {wrong}") from None


@dataclass(frozen=True)
class Data:
    """The data."""

    train: Names = ()
    """Folders made by hfjax data, or one of images (default: Python's library, as bytes)."""
    valid: str | None = None
    """Folder to validate on (default: the part valid of the first training folder)."""
    weights: tuple[float, ...] | None = None
    """Relative frequencies of several training folders (default: all alike)."""
    packing: Literal["stream", "documents"] = "stream"
    """stream: cut running text; documents: pack complete ones, with masks."""
    epochs: int | None = None
    """Maximum number of epochs, if --steps is not reached first (default: no limit)."""
    size: int | None = None
    """Height and width of images (default: 224; with masks 513, of tiny presets 32)."""
    broken: Literal["refuse", "skip"] = "refuse"
    """Images that do not decode: refuse stops the run, skip takes the next."""
    scale: tuple[float, float] | None = None
    """Range of a random crop's area (default: 0.08 1; with masks of the zoom, 0.5 2)."""
    flip: float = 0.5
    """Probability of flipping an image left to right."""
    brightness: float = 0.0
    """Random change of brightness; 0.4: times 0.6 to 1.4."""
    contrast: float = 0.0
    """Random change of contrast; 0.4: times 0.6 to 1.4."""
    saturation: float = 0.0
    """Random change of saturation; 0.4: times 0.6 to 1.4."""

    def __post_init__(self):
        check_bounds(self, "data.", epochs=1, size=1)
        check_bounds(self, "data.", 1, flip=0)
        check_float32(self, "data.", "brightness", "contrast", "saturation")
        if self.scale is not None and not 0 < self.scale[0] <= self.scale[1] < MOST:
            raise ValueError(
                f"--data.scale {self.scale[0]} {self.scale[1]}: the least and the largest, above 0."
            )


@dataclass(frozen=True)
class Optimizer:
    """The optimizer and its learning rate."""

    name: str = "adamw"
    """Optimizer of optax: adamw, lion, sgd, adafactor and others."""
    own: str | None = None
    """Your own optimizer: file.py:function of the learning rate (default: none)."""
    rate: float = 3e-3
    """Highest learning rate."""
    momentum: float | None = None
    """Momentum, of optimizers that have it, such as sgd (default: optax's)."""
    warmup: int | None = None
    """Steps of warm-up to --optimizer.rate (default: 20, or a quarter of a short run)."""
    decay: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape of the learning rate's decay."""
    end: float = 0.1
    """Final learning rate as a fraction of --optimizer.rate."""
    hold: int = 0
    """Steps at the highest rate before it decays."""
    weight_decay: float | None = None
    """Weight decay (default: 0.1 where the optimizer has it, 0 for sgd)."""
    no_decay: Names | None = None
    """Patterns of parameters without weight decay (default: biases and norms)."""
    frozen: Names = ()
    """Patterns of parameters that are not trained (default: none)."""
    scale: Names = ()
    """Factors on the learning rate: tokens=0.1 'layers/*=0.5' (default: none)."""
    clip: float | None = 1.0
    """Maximum global norm of the gradient; None disables clipping, as inf does."""
    ema: float | None = None
    """Average parameters with this decay, as 0.999, and validate the average (default: no)."""
    master: bool = False
    """Store parameters in bfloat16, and update a float32 copy of them."""
    in_backward: bool = False
    """Update each layer in the backward pass; needs --optimizer.clip None."""

    def __post_init__(self):
        check_bounds(self, "optimizer.", warmup=0, hold=0)
        check_bounds(self, "optimizer.", 1, momentum=0)
        if is_real(self.clip, LARGEST, math.inf):  # no norm is greater
            object.__setattr__(self, "clip", None)
        check_float32(self, "optimizer.", "rate", "weight_decay", "clip")


@dataclass(frozen=True)
class CheckpointOptions:
    """What is saved, and when."""

    every: int | None = None
    """Steps between checkpoints; 0: only the last (default: ten in a run, 25 apart at least)."""
    keep: int = 3
    """Number of the latest checkpoints to keep."""
    keep_every: int | None = None
    """Keep also the first checkpoint from each multiple of N steps on (default: none)."""
    keep_best: bool = False
    """Keep also the checkpoint with the lowest validation loss."""
    resume: Literal["auto", "never"] = "auto"
    """auto: resume from the latest checkpoint in --out; never: refuse if any."""
    start: str | None = None
    """Folder of a run whose parameters to start from, to fine-tune (default: none)."""

    def __post_init__(self):
        check_bounds(self, "checkpoints.", every=0, keep=1, keep_every=1)


@dataclass(frozen=True)
class Log:
    """Logs and validation."""

    every: int = 10
    """Steps between log lines; 0: none. metrics.jsonl has every step."""
    valid_every: int | None = None
    """Steps between validations; 0: none (default: four in a run)."""
    valid_batches: int = 20
    """Maximum number of batches of a validation."""
    tensorboard: bool = False
    """Log to TensorBoard, in the folder of the run."""
    wandb: str | None = None
    """Log to this project of Weights & Biases (default: none)."""
    sample: int = 200
    """Tokens of text to write at the end; 0: none."""

    def __post_init__(self):
        check_bounds(self, "log.", every=0, valid_every=0, valid_batches=1, sample=0)


@dataclass(frozen=True)
class Train:
    """Train a model: on this machine, or in several processes started by `hfjax launch`, SLURM,
    Open MPI or torchrun. Without any flag: a byte-level GPT on Python's own library.
    """

    out: Path | None = None
    """Folder of the run (default: runs/ and the name of the model)."""
    steps: int = 300
    """Number of training steps."""
    batch: int = 32
    """Examples in a step, over all devices."""
    accumulate: int = 1
    """Microbatches in a step, whose gradients are accumulated."""
    deepspeed: Path | None = None
    """Take settings from a ds_config.json of DeepSpeed (default: none)."""
    strategy: str = "ddp"
    """Strategy: {strategies}, joined by + (fsdp+tensor), at most one of the first six."""
    precision: str = "stored"
    """Precision: {precisions}; or by path, the first for all else: bf16,*norm*=fp32."""
    remat: str = "none"
    """Recompute: {remats}, every:N, group:N, names:A,B. dots keeps matmuls, names A, B."""
    offload: str | None = None
    """Offload activations: a fraction of the bytes (0.3), dots or names:A,B (default: none)."""
    offload_words: ClassVar[tuple[str, ...]] = ()  # further allowed values
    kernels: Literal["auto", "pallas", "xla", "reference"] = "auto"
    """Kernels. auto: if faster; pallas: always; xla: never; reference: plain JAX."""
    dispatch: Literal["auto", "all_to_all", "gather"] = "auto"
    """Exchange of tokens with experts on other devices; auto: fewest bytes."""
    split_rows: int = 1
    """Parts of a batch that take turns in a layer, to overlap communication."""
    reduction: Literal["flat", "hierarchical"] = "flat"
    """Sum gradients at once (flat), or first within a node (hierarchical)."""
    nonfinite: Literal["stop", "skip"] = "stop"
    """Stop at a loss or gradient that is not finite, or skip that step."""
    seed: int = 0
    """Seed of initial parameters, the order of the data and dropout."""
    model: Model = field(default_factory=Model)
    mesh: Mesh = field(default_factory=Mesh)
    context: ContextOptions = field(default_factory=ContextOptions)
    pipeline: PipelineOptions = field(default_factory=PipelineOptions)
    data: Data = field(default_factory=Data)
    optimizer: Optimizer = field(default_factory=Optimizer)
    checkpoints: CheckpointOptions = field(default_factory=CheckpointOptions)
    log: Log = field(default_factory=Log)
    devices: int | None = None
    """Use only the first N devices (default: all)."""
    cpu_devices: int | None = None
    """Number of simulated CPU devices to run on (default: none, real devices)."""
    profile: str | None = None
    """Steps to trace, FIRST:END; 5:8 traces steps 5, 6 and 7 (default: none)."""
    timeout: float = 600.0
    """Seconds without progress until a process is ended; an hour to compile."""
    init_timeout: float = 60.0
    """Seconds in which all processes of a run have to connect."""
    minutes: float | None = None
    """Save and stop after N minutes; start again to go on (default: no limit)."""
    cache: Path | None = None
    """Folder of compiled programs (default: in the user's cache)."""

    def __post_init__(self):
        check_bounds(self, "", steps=1, batch=1, accumulate=1, split_rows=1)
        check_bounds(self, "", devices=1, cpu_devices=1)
        check_bounds(self, "", timeout=1, init_timeout=1, minutes=0)
        check_bounds(self, "", 2**32 - 1, seed=0)
        Remat.of(self.remat)
        precision_of(parse_precision(self.precision))
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
        first, end = parse_steps(self.profile)
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
