"""The configuration of a run: every field is a flag of `hfjax train`, and a line of its YAML."""

import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from hfjax.data.chat.build_chats import ChatOptions
from hfjax.data.chat.conversations import is_chat_file
from hfjax.data.chat.template import TODAY
from hfjax.parallel.offload.activations import Offload
from hfjax.parallel.precision.auto import replace_auto
from hfjax.parallel.precision.by_path import parse_precision
from hfjax.parallel.precision.dtypes import AUTO, precision_of
from hfjax.parallel.remat import Remat
from hfjax.parallel.schedules.named import Schedule
from hfjax.trainer.config_checks import LARGEST, MOST, check_bounds, check_float32, is_default
from hfjax.trainer.lora_config import LoraConfig
from hfjax.trainer.profile import parse_steps
from hfjax.utils.hub import is_model_name, parse_dataset, parse_model
from hfjax.utils.keywords import is_real
from hfjax.utils.read_files import brief
from hfjax.utils.tables import quote

Names = tuple[str, ...]
FSDP_AXES = ("fsdp", "expert", "context")  # over which FSDP shards parameters


def pretrained_conflict(flag: str, value: Any, folder: str) -> str:
    """Return the message about a flag that conflicts with --model.pretrained."""
    return (
        f"{flag.replace('_', '-')} {value} beside --model.pretrained {quote(folder)}: the "
        "folder says what the model is. Leave out one of the two."
    )


SHAPE_FLAGS = (
    *("num_layers", "num_heads", "hidden_size", "num_kv_heads", "intermediate_size", "head_dim"),
    *("num_experts", "top_k", "vocab_size"),
)


@dataclass(frozen=True)
class ModelConfig:
    """The model."""

    preset: str = "gpt-tiny"
    """Preset: {presets}; of images: {image_presets}."""
    factory: str | None = None
    """Your model: file.py:function of vocab, seq_len; classes, size; or example (default: none)."""
    pretrained: str | None = None
    """Hugging Face model to start from: a folder, or ORG/NAME[@REVISION] (default: none)."""
    loss: str | None = None
    """Your own loss(outputs, batch): file.py:function (default: that of the task)."""
    seq_len: int | None = None
    """Tokens in a sequence (default: the preset's, or the folder's but at most 4096)."""
    vocab_size: int | None = None
    """Vocabulary of a preset, if --data.factory makes the data (default: that of the data)."""
    num_layers: int | None = None
    """Number of layers (default: the preset's)."""
    num_heads: int | None = None
    """Attention heads of a layer (default: the preset's)."""
    hidden_size: int | None = None
    """Size of embeddings and of the layers' input (default: the preset's)."""
    num_kv_heads: int | None = None
    """Heads of keys and values, of a Llama (default: as many for each head as the preset has)."""
    intermediate_size: int | None = None
    """Size of the hidden layer of a Llama's MLP, or of an expert (default: the preset's)."""
    head_dim: int | None = None
    """Size of one of a Llama's heads (default: --model.hidden-size / --model.num-heads)."""
    dropout: float | None = None
    """Dropout rate, from 0 to 1 (default: the preset's)."""
    auxiliary_dropout: float | None = None
    """Dropout rate of DeepLab's auxiliary head (default: the preset's)."""
    num_experts: int | None = None
    """Experts of a layer, in a preset that has experts (default: the preset's)."""
    top_k: int | None = None
    """Experts that each token goes to (default: the preset's)."""
    capacity_factor: float | None = None
    """Capacity of an expert, times the mean load; 0: drops nothing (default: the preset's)."""
    weights: Path | None = None
    """File of torchvision's weights (.safetensors) for an image preset (default: none)."""
    new_head: bool = False
    """Drop the last layer of --model.weights, for other classes."""
    num_classes: int | None = None
    """Number of classes of images (default: that of the data)."""
    freeze_batch_norm: bool = False
    """Freeze BatchNorm as in --model.weights: statistics, scale and bias."""
    group_norm: bool = False
    """Use GroupNorm for BatchNorm, so that no statistics mix examples."""
    label_smoothing: float = 0.0
    """Label smoothing: fraction of a target spread over all classes."""

    def __post_init__(self):
        check_bounds(self, "model.", seq_len=1, num_layers=1, num_heads=1, hidden_size=1)
        check_bounds(self, "model.", num_kv_heads=1, intermediate_size=1, head_dim=2)
        check_bounds(self, "model.", dropout=0, auxiliary_dropout=0, label_smoothing=0)
        check_bounds(self, "model.", num_experts=1, top_k=1, capacity_factor=0, num_classes=1)
        check_bounds(self, "model.", vocab_size=1)
        if self.label_smoothing >= 1:
            raise ValueError(
                f"--model.label-smoothing {self.label_smoothing}: a fraction from 0 to below 1."
            )
        for name in ("dropout", "auxiliary_dropout"):
            if (rate := getattr(self, name) or 0) > 1:
                flag = name.replace("_", "-")
                raise ValueError(f"--model.{flag} {rate}: a fraction from 0 to 1 is needed.")
        self._check_pretrained()

    def _check_pretrained(self) -> None:
        """Refuse flags of the shape beside --model.pretrained."""
        if self.pretrained is None:
            return
        object.__setattr__(self, "pretrained", str(self.pretrained))  # Python may give a Path
        for name in ("preset", "factory", *SHAPE_FLAGS):
            if (value := getattr(self, name)) != type(self).__dataclass_fields__[name].default:
                raise ValueError(pretrained_conflict(f"--model.{name}", value, self.pretrained))


@dataclass(frozen=True)
class MeshConfig:
    """Sizes of the mesh's axes; -1: all remaining devices. A size other than 1 turns the axis's
    parallelism on."""

    data: int | None = None
    """Data parallelism: replicas of the parameters (default: all remaining devices)."""
    fsdp: int = 1
    """FSDP (ZeRO 3): shards of parameters, gradients and optimizer state."""
    row: int = 1
    """Rows of a tensor grid (2D tensor parallelism), of --mesh.tensor columns."""
    tensor: int = 1
    """Tensor parallelism: shards of each layer."""
    context: int = 1
    """Context parallelism: shards of each sequence."""
    expert: int = 1
    """Expert parallelism: shards of the experts, and of the batch."""
    pipe: int = 1
    """Pipeline parallelism: stages."""

    def is_on(self, axis: str) -> bool:
        """Return whether the parallelism of an axis is on: its size is not 1.

        >>> MeshConfig(fsdp=-1).is_on("fsdp"), MeshConfig().is_on("fsdp")
        (True, False)
        """
        return getattr(self, axis) != 1

    @property
    def flags(self) -> str:
        """The flags of its sizes that are no defaults.

        >>> MeshConfig(data=2, fsdp=-1).flags
        '--mesh.data 2 --mesh.fsdp -1'
        """
        default = vars(type(self)())
        sizes = {axis: size for axis, size in vars(self).items() if size != default[axis]}
        return " ".join(f"--mesh.{axis} {size}" for axis, size in sizes.items())


@dataclass(frozen=True)
class ContextConfig:
    """How devices share a sequence, if --mesh.context is above 1: docs/long_sequences.md."""

    form: Literal["auto", "ring", "allgather", "ulysses"] = "auto"
    """ring, allgather: exchange keys, values; ulysses: heads; auto: fewest bytes."""
    ulysses: int | None = None
    """Devices in a group that exchanges heads (default: as --context.form needs)."""
    order: Literal["auto", "zigzag", "contiguous"] = "auto"
    """zigzag: balances causal attention; contiguous: in order; auto: by windows."""

    def __post_init__(self):
        check_bounds(self, "context.", ulysses=1)


@dataclass(frozen=True)
class PipelineConfig:
    """The schedule of a pipeline, if --mesh.pipe is above 1."""

    schedule: str = "1f1b"
    """Schedule, as hfjax schedule shows it (1f1b-published: Megatron's): {schedules}."""
    microbatches: int | None = None
    """Microbatches of each accumulation step (default: four for each stage)."""
    chunks: int | None = None
    """Model chunks of each stage (default: as the schedule has them)."""

    def __post_init__(self):
        check_bounds(self, "pipeline.", microbatches=1, chunks=1)
        chunks: dict[str, Any] = {} if self.chunks is None else {"chunks": self.chunks}
        try:
            Schedule(self.schedule, self.microbatches or 1, **chunks)
        except ValueError as wrong:
            raise ValueError(f"--pipeline.schedule {self.schedule}: {wrong}") from None


@dataclass(frozen=True)
class OffloadConfig:
    """Offload to host memory."""

    activations: str | None = None
    """Residuals of layers: a fraction of the bytes (0.3), dots or names:A,B (default: none)."""
    optimizer: bool = False
    """Optimizer state and master weights."""
    parameters: bool = False
    """Parameters, which each step reads."""
    activation_words: ClassVar[tuple[str, ...]] = ()  # further allowed values

    def __post_init__(self):
        if self.activations is not None and self.activations not in self.activation_words:
            Offload.of(self.activations)


@dataclass(frozen=True)
class DataConfig:
    """The data."""

    train: Names = ()
    """Folders of hfjax data, images; chats.jsonl; hub:ORG/NAME (default: Python's library)."""
    valid: str | None = None
    """Folder, chats or hub:ORG/NAME to validate on (default: part valid of the first of train)."""
    factory: str | None = None
    """Your own data: file.py:function of (split, seed), a grain.MapDataset (default: none)."""
    weights: tuple[float, ...] | None = None
    """Relative frequencies of several training folders (default: all alike)."""
    packing: Literal["stream", "documents"] | None = None
    """stream: cut running text; documents: pack complete ones (default: stream; of chats these)."""
    template: Path | None = None
    """File of Jinja that writes chats (default: the template of --model.pretrained)."""
    turns: Literal["all", "each"] = "all"
    """Examples of chats: one for all turns of the assistant, or one for each."""
    long: Literal["cut", "drop"] = "cut"
    """Chats longer than --model.seq-len: cut the end, or drop them."""
    loss_per: Literal["token", "example"] = "token"
    """Mean of the loss over counted tokens, or over chats (packed documents)."""
    date: str = TODAY
    """Date of chats, which some templates write."""
    epochs: int | None = None
    """Maximum number of epochs, if --steps is not reached first (default: no limit)."""
    image_size: int | None = None
    """Height and width of images (default: 224; with masks 513, of tiny presets 32)."""
    on_broken_image: Literal["refuse", "skip"] = "refuse"
    """Images that do not decode: refuse stops the run, skip takes the next."""
    crop_scale: tuple[float, float] | None = None
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
        check_bounds(self, "data.", epochs=1, image_size=1)
        for name in (*self.train, self.valid or ""):
            parse_dataset(name)
        check_bounds(self, "data.", 1, flip=0)
        self._check_factory()
        self._check_chats()
        check_float32(self, "data.", "brightness", "contrast", "saturation")
        if self.crop_scale is not None and not 0 < self.crop_scale[0] <= self.crop_scale[1] < MOST:
            raise ValueError(
                f"--data.crop-scale {self.crop_scale[0]} {self.crop_scale[1]}: the least and the "
                "largest, above 0."
            )

    def _check_chats(self) -> None:
        """Refuse flags of chats that are wrong, or that no file of chats uses."""
        ChatOptions(self.turns, self.date)
        has_chats = any(map(is_chat_file, filter(None, (*self.train, self.valid))))
        for name in ("template", "turns", "date"):
            value = getattr(self, name)
            if value != type(self).__dataclass_fields__[name].default and not has_chats:
                raise ValueError(
                    f"--data.{name} {value}: it is of chats, and --data.train names no file of "
                    "them (.jsonl, .parquet). Leave it out."
                )
        if self.loss_per != "token" and self.packing == "stream":
            raise ValueError(
                f"--data.loss-per {self.loss_per} beside --data.packing stream, which has no "
                "examples of its own: give --data.packing documents, or leave one of the two out."
            )

    def _check_factory(self) -> None:
        """Refuse flags of other data sets beside --data.factory."""
        if self.factory is None:
            return
        for name in type(self).__dataclass_fields__:
            value = getattr(self, name)
            if name not in ("factory", "epochs", "image_size") and not is_default(self, name):
                flag = name.replace("_", "-")
                raise ValueError(
                    f"--data.{flag} {brief(value)} beside --data.factory {self.factory}, which "
                    "makes all examples: say it in that function."
                )


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer."""

    name: str = "adamw"
    """Optimizer: adamw, muon, lion, sgd, adafactor and others of optax."""
    factory: str | None = None
    """Your own optimizer: file.py:function of the learning rate (default: none)."""
    learning_rate: float = 3e-3
    """Highest learning rate; also --lr."""
    adam_learning_rate: float | None = None
    """Highest learning rate of the AdamW beside muon (default: muon's)."""
    momentum: float | None = None
    """Momentum, of optimizers that have it: sgd, muon (default: optax's)."""
    weight_decay: float | None = None
    """Weight decay (default: 0.1 where the optimizer has it, 0 for sgd)."""
    no_decay: Names | None = None
    """Patterns of parameters without weight decay (default: biases and norms)."""
    frozen: Names = ()
    """Patterns of parameters that are not trained (default: none)."""
    lr_factors: Names = ()
    """Factors on the learning rate: tokens=0.1 'layers/*=0.5' (default: none)."""
    max_grad_norm: float | None = 1.0
    """Maximum global norm of the gradient; None disables clipping, as inf does."""
    ema: float | None = None
    """Average parameters with this decay, as 0.999, and validate the average (default: no)."""
    in_backward: bool = False
    """Update layers in the backward pass; needs --optimizer.max-grad-norm None."""

    def __post_init__(self):
        check_bounds(self, "optimizer.", 1, momentum=0)
        if is_real(self.max_grad_norm, LARGEST, math.inf):  # no norm is greater
            object.__setattr__(self, "max_grad_norm", None)
        check_float32(
            self,
            "optimizer.",
            *("learning_rate", "adam_learning_rate", "weight_decay", "max_grad_norm"),
        )


@dataclass(frozen=True)
class LRScheduleConfig:
    """The learning rate over the steps: warm-up, a stable phase, decay."""

    type: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape of the decay."""
    warmup_steps: int | None = None
    """Steps of warm-up (default: 20, or a quarter of a short run)."""
    stable_steps: int = 0
    """Steps at the highest rate before it decays."""
    final_fraction: float = 0.1
    """Final learning rate as a fraction of --optimizer.learning-rate."""

    def __post_init__(self):
        check_bounds(self, "lr_schedule.", warmup_steps=0, stable_steps=0)


@dataclass(frozen=True)
class CheckpointConfig:
    """What is saved, and when."""

    interval: int | None = None
    """Steps between checkpoints; 0: only the last (default: ten in a run, 25 apart at least)."""
    keep_latest: int = 3
    """Number of the latest checkpoints to keep."""
    keep_period: int | None = None
    """Keep also the first checkpoint from each multiple of N steps on (default: none)."""
    keep_best: bool = False
    """Keep also the checkpoint with the lowest validation loss."""
    resume: Literal["auto", "never"] = "auto"
    """auto: resume from the latest checkpoint in --run-dir; never: refuse if any."""
    init_from: str | None = None
    """Folder of a run whose parameters to start from, to fine-tune (default: none)."""

    def __post_init__(self):
        check_bounds(self, "checkpoint.", interval=0, keep_latest=1, keep_period=1)


@dataclass(frozen=True)
class EvalConfig:
    """Validation during training."""

    interval: int | None = None
    """Steps between validations; 0: none (default: four in a run)."""
    max_batches: int = 20
    """Maximum number of batches of a validation."""

    def __post_init__(self):
        check_bounds(self, "eval.", interval=0, max_batches=1)


@dataclass(frozen=True)
class LogConfig:
    """Logs."""

    interval: int = 10
    """Steps between log lines; 0: none. metrics.jsonl has every step."""
    tensorboard: bool = False
    """Log to TensorBoard, in the folder of the run."""
    wandb: str | None = None
    """Log to this project of Weights & Biases (default: none)."""
    tracker: str | None = None
    """Your own tracker of metrics: file.py:Class of a hfjax.trainer.Tracker (default: none)."""
    sample_tokens: int = 200
    """Tokens of text to write at the end; 0: none."""

    def __post_init__(self):
        check_bounds(self, "log.", interval=0, sample_tokens=0)


@dataclass(frozen=True)
class TrainConfig:
    """Train a model: on this machine, or in several processes started by `hfjax launch`, SLURM,
    Open MPI or torchrun. Without any flag: a byte-level GPT on Python's own library.
    """

    run_dir: Path | None = None
    """Folder of the run (default: runs/ and the name of the model)."""
    steps: int = 300
    """Number of training steps."""
    global_batch_size: int = 32
    """Examples in an optimizer step, over all devices and accumulation steps."""
    gradient_accumulation_steps: int = 1
    """Forward and backward passes in an optimizer step, whose gradients add up."""
    deepspeed: Path | None = None
    """Take settings from a ds_config.json of DeepSpeed (default: none)."""
    zero: Literal[0, 1, 2, 3] | None = None
    """ZeRO of --mesh.data: 1 optimizer state, 2 gradients too; 3: use --mesh.fsdp (default: 0)."""
    sequence_parallel: bool = True
    """Shard the sequence over --mesh.tensor between matmuls, as Megatron does."""
    strategy: str | None = None
    """Your own table of sharding rules: file.py:name of a hfjax.Strategy (default: none)."""
    precision: str = AUTO
    """Compute dtype: auto (bf16 if a GPU has it), {precisions}; by path: bf16,*norm*=fp32."""
    param_dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype of --model.pretrained's parameters; with bf16 use --master-weights."""
    master_weights: bool = False
    """Keep bfloat16 parameters, and a float32 copy for the optimizer."""
    remat: str = "none"
    """Activation checkpointing: {remats}, every:N, group:N, names:A,B; dots keeps dots."""
    kernels: Literal["auto", "pallas", "xla", "reference"] = "auto"
    """Kernels. auto: if faster; pallas: always; xla: never; reference: plain JAX."""
    dispatch: Literal["auto", "all_to_all", "gather"] = "auto"
    """Exchange of tokens with experts on other devices; auto: fewest bytes."""
    tensor_overlap_chunks: int = 1
    """Chunks of a batch that take turns, so that matmuls hide communication."""
    gradient_reduction: Literal["flat", "hierarchical"] = "flat"
    """flat: sum gradients at once; hierarchical: first in a node (--mesh.fsdp)."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """Stop at a loss or gradient that is not finite, or skip that step."""
    seed: int = 0
    """Seed of initial parameters, the order of the data and dropout."""
    model: ModelConfig = field(default_factory=ModelConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    context: ContextConfig = field(default_factory=ContextConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    data: DataConfig = field(default_factory=DataConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lr_schedule: LRScheduleConfig = field(default_factory=LRScheduleConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    log: LogConfig = field(default_factory=LogConfig)
    devices: int | None = None
    """Use only the first N devices (default: all)."""
    cpu_devices: int | None = None
    """Number of simulated CPU devices to run on (default: none, real devices)."""
    profile: str | None = None
    """Steps to trace, FIRST:END; 5:8 traces steps 5, 6 and 7 (default: none)."""
    watchdog_timeout: float = 600.0
    """Seconds without progress until a process is ended; 3600 while compiling."""
    init_timeout: float = 60.0
    """Seconds in which all processes of a run have to connect."""
    max_runtime: float | None = None
    """Save and stop after N minutes; start again to go on (default: no limit)."""
    compilation_cache: Path | None = None
    """Folder of compiled programs (default: in the user's cache)."""

    def __post_init__(self):
        check_bounds(self, "", steps=1, global_batch_size=1, gradient_accumulation_steps=1)
        check_bounds(self, "", tensor_overlap_chunks=1, devices=1, cpu_devices=1)
        check_bounds(self, "", watchdog_timeout=1, init_timeout=1, max_runtime=0)
        check_bounds(self, "", 2**32 - 1, seed=0)
        Remat.of(self.remat)
        precision_of(parse_precision(replace_auto(self.precision, "stored")))
        self._check_parallelism()
        self._check_microbatches()
        self._check_profile()
        self.lora.check_beside(self.model.pretrained, self.optimizer.frozen)
        if self.param_dtype != "fp32" and self.model.pretrained is None:
            raise ValueError(
                f"--param-dtype {self.param_dtype}: it is of --model.pretrained, which is not "
                "given. Other models are stored in bfloat16 by --master-weights."
            )

    def _check_parallelism(self) -> None:
        """Refuse flags of parallelism that contradict each other."""
        mesh, zero = self.mesh, self.zero
        if self.strategy is not None and zero is not None:
            raise ValueError(
                f"--zero {zero} beside --strategy {self.strategy}: the table says what is sharded. "
                "Leave out one of the two."
            )
        if not self.sequence_parallel and (self.strategy is not None or mesh.is_on("row")):
            what = "a tensor grid" if self.strategy is None else "the table of --strategy"
            raise ValueError(
                f"--no-sequence-parallel: {what} says how sequences are sharded. Leave it out."
            )
        if zero == 3 and not any(map(mesh.is_on, FSDP_AXES)):
            raise ValueError(
                "--zero 3: parameters are sharded over --mesh.fsdp, which is 1. Give --mesh.fsdp "
                "-1 (all remaining devices), which needs no --zero."
            )
        two_levels = self.gradient_reduction == "hierarchical" and mesh.data != 1
        if zero in (0, 1, 2) and mesh.is_on("fsdp") and not two_levels:
            raise ValueError(
                f"--zero {zero} beside --mesh.fsdp {mesh.fsdp}: --mesh.fsdp shards parameters, "
                f"gradients and optimizer state, which is ZeRO 3. Leave out --zero; or for ZeRO "
                f"{zero} give --mesh.data {mesh.fsdp} in place of --mesh.fsdp."
            )
        if mesh.is_on("row") and not mesh.is_on("tensor") and self.strategy is None:
            raise ValueError(
                f"--mesh.row {mesh.row}: a tensor grid has columns too. Give --mesh.tensor 2, or "
                f"only --mesh.tensor {mesh.row}."
            )

    def _check_microbatches(self) -> None:
        piped = self.pipeline.microbatches if self.mesh.is_on("pipe") else None
        steps = self.gradient_accumulation_steps
        flags = {"--gradient-accumulation-steps": steps, "--pipeline.microbatches": piped}
        for flag, count in flags.items():
            if count is not None and count > self.global_batch_size:
                raise ValueError(
                    f"{flag} {count}: more than --global-batch-size {self.global_batch_size} has "
                    "examples. Lower the one, or raise the other."
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
        if self.run_dir is not None:
            return self.run_dir
        if (source := self.model.pretrained) is not None:
            name = parse_model(source) if is_model_name(source) else None
            return Path("runs") / Path(os.path.abspath(name.repo if name else source)).name
        return Path("runs") / ("own" if self.model.factory else self.model.preset)
