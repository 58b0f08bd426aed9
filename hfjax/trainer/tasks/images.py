"""The image task: folders of classes, or images with masks; the model and its scores."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import hfjax
from hfjax.data.images import Augment, ImageLoader, ImageSet, check_same_classes, parts_of
from hfjax.data.images.find_images import has_masks, split_folder
from hfjax.models.vision import deeplab, vit
from hfjax.models.vision.losses import (
    classification_loss,
    confusion_counts,
    segmentation_eval_loss,
    segmentation_loss,
)
from hfjax.models.vision.preset_table import PRESETS
from hfjax.models.vision.vision_config import ConvNetConfig, VisionConfig
from hfjax.trainer.config import ModelConfig, TrainConfig
from hfjax.trainer.config_checks import is_default
from hfjax.trainer.config_io import load_function
from hfjax.trainer.model import load_loss
from hfjax.trainer.sampling import mean_loss
from hfjax.utils.image_names import contains_images
from hfjax.utils.read_files import brief
from hfjax.utils.tables import align, quote
from hfjax.weights.vision_files import read_vision, with_weights
from hfjax.weights.vision_rules import model_factory

CLASSES, MASKS = "classes", "masks"
SIZES = {CLASSES: 224, MASKS: 513}  # default image sizes
SMALL_SIZE = 32  # the same for models with a stem for small images
TEXT_OPTS = (
    *("seq_len", "num_layers", "num_heads", "hidden_size", "num_kv_heads", "intermediate_size"),
    *("head_dim", "num_experts", "top_k", "capacity_factor"),
)
TOKEN_OPTS = ("weights", "packing", "template", "turns", "long", "loss_per", "date")


@dataclass(frozen=True)
class ImageModel:
    """An image model to train, with its loss and sizes."""

    name: str
    init: Callable
    loss: Callable
    size: int  # of the images, in pixels
    classes: int
    shape: VisionConfig | None = None  # the configuration of a preset
    has_user_loss: bool = False


@dataclass(frozen=True)
class ImageScores:
    """The scores of an evaluation on images.

    Attributes:
        loss: The mean loss.
        count: The number of images, or of pixels, that it averages.
        unit: Which of them.
        numbers: Scores by name, from 0 to 1.
        iou: For masks: intersection over union by class; None for a class that never occurs.
    """

    loss: float
    count: int
    unit: str
    numbers: Mapping[str, float]
    iou: Mapping[str, float | None] | None = None

    @property
    def line(self) -> str:
        """The scores in a line."""
        scores = [f"{SCORE_NAMES.get(name, name)} {x:.2%}" for name, x in self.numbers.items()]
        return ", ".join([f"loss {self.loss:.4f}", *scores, f"{self.count} {self.unit}"])

    @property
    def table(self) -> str:
        """The scores of each class, if there are any."""
        if self.iou is None:
            return ""
        format_score = lambda x: "does not occur" if x is None else f"{x:.2%}"
        return "\n".join(align([[quote(c), format_score(x)] for c, x in self.iou.items()]))


SCORE_NAMES = {
    "valid_top1": "top-1",
    "valid_top5": "top-5",
    "valid_pixels": "pixels",
    "valid_iou": "IoU",
}


@dataclass(frozen=True)
class ImageTask:
    """The task of predicting the class of an image, or of each of its pixels.

    Attributes:
        config: The configuration.
    """

    config: TrainConfig
    unit = "images"
    units_per_example = 1

    def __post_init__(self) -> None:
        _check_flags(self.config)

    @property
    def _preset(self) -> VisionConfig | None:
        return None if self.config.model.factory else PRESETS[self.config.model.preset]

    @cached_property
    def kind(self) -> str:
        """Whether images have a class each, or masks."""
        if self.config.data.train:
            return self.images.kind
        return MASKS if isinstance(self._preset, deeplab.DeepLabConfig) else CLASSES

    @cached_property
    def images(self) -> ImageSet:
        """The images to train on."""
        folders = self.config.data.train
        if len(folders) != 1:
            raise ValueError(
                f"--data.train {' '.join(map(quote, folders)) or '(none)'}: a model of images is "
                "trained on one folder: of classes (photos/cat/1.jpg), or images/ and masks/."
            )
        train_folder = split_folder(Path(folders[0]), "train")
        masks = self.config.model.num_classes if has_masks(train_folder) else None
        image_set = ImageSet(folders[0], part="train", classes=masks)
        self._check_kind(image_set)
        return image_set

    def _check_kind(self, image_set: ImageSet) -> None:
        preset = self._preset
        if preset is None or self.config.model.loss is not None:
            return
        needed = MASKS if isinstance(preset, deeplab.DeepLabConfig) else CLASSES
        if image_set.kind != needed:
            has = {CLASSES: "folders of classes", MASKS: "images and masks"}
            does = {CLASSES: "says what an image shows", MASKS: "says what each pixel shows"}
            raise ValueError(
                f"--data.train {quote(image_set.directory)} has {has[image_set.kind]}, and "
                f"--model.preset {self.config.model.preset} {does[needed]}: it needs "
                f"{has[needed]}."
            )

    @cached_property
    def model(self) -> ImageModel:
        """The model, for the classes of the data."""
        opts, size = self.config.model, self._size
        loss = load_loss(opts) or self._default_loss
        has_user_loss = opts.loss is not None
        if opts.factory is not None:
            init = _user_model(opts, self.classes, size)
            return ImageModel(opts.factory, init, loss, size, self.classes, None, has_user_loss)
        shape = self._shape(size)
        return ImageModel(
            opts.preset, model_factory(shape), loss, size, shape.classes, shape, has_user_loss
        )

    @property
    def _default_loss(self) -> Callable:
        smoothing = self.config.model.label_smoothing
        if self.kind == MASKS:
            if smoothing:
                raise ValueError(
                    f"--model.label-smoothing {smoothing}: it is of classes, not of masks."
                )
            return segmentation_loss
        if not smoothing:
            return classification_loss
        return lambda outputs, batch: classification_loss(outputs, batch, smoothing)

    @property
    def classes(self) -> int:
        """The number of classes."""
        count, preset = self.config.model.num_classes, self._preset
        if self.config.data.train:
            least = len(self.images.classes)
            if count is not None and count < least:
                raise ValueError(
                    f"--model.num-classes {count}: {quote(self.images.directory)} has {least} "
                    f"classes. Give {least} or more, or leave the flag out."
                )
            return count or least
        return count or (1000 if preset is None else preset.classes)

    @property
    def _size(self) -> int:
        preset, requested = self._preset, self.config.data.image_size
        if isinstance(preset, vit.ViTConfig):
            return requested or preset.image
        small = getattr(preset, "stem", None) == "small"
        return requested or (SMALL_SIZE if small else SIZES[self.kind])

    def _shape(self, size: int) -> VisionConfig:
        """Return the shape of a preset, as changed by flags."""
        opts, preset = self.config.model, self._preset
        assert preset is not None
        changes: dict[str, Any] = {"classes": self.classes}
        norm = "frozen" if opts.freeze_batch_norm else "group" if opts.group_norm else None
        if norm is not None:
            if not isinstance(preset, ConvNetConfig):
                flag = "freeze-batch-norm" if norm == "frozen" else "group-norm"
                raise ValueError(f"--model.{flag}: {opts.preset} has no BatchNorm. Leave it out.")
            changes["norm"] = norm
        changes |= _dropout_rates(opts, preset)
        if isinstance(preset, vit.ViTConfig):
            changes["image"] = size
        return replace(preset, **changes)

    @property
    def eval_loss(self) -> Callable:
        """The loss with the metrics of an evaluation."""
        if self.model.has_user_loss:
            return self.model.loss
        return classification_loss if self.kind == CLASSES else segmentation_eval_loss

    def flops(self, layout: hfjax.Layout) -> float:
        """Return the FLOPs of training on one image: three times XLA's count for the forward."""
        model = nnx.eval_shape(lambda: self.model.init(nnx.Rngs(0)))
        graph, state = nnx.split(model)
        shapes = {
            k: jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype) for k, x in self.shapes().items()
        }

        def forward(state: Any, batch: Any) -> Any:
            model = nnx.merge(graph, state)
            model.eval()
            return model(batch)

        cost: Any = jax.jit(forward).lower(state, shapes).cost_analysis()
        return 3.0 * float((cost or {}).get("flops", 0.0))

    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the shapes of a batch."""
        batch_size, size = self.config.global_batch_size, self._size
        label = (batch_size,) if self.kind == CLASSES else (batch_size, size, size)
        return {
            "image": jax.ShapeDtypeStruct((batch_size, size, size, 3), jnp.uint8),
            "label": jax.ShapeDtypeStruct(label, jnp.int32),
        }

    def describe_example(self) -> str:
        """Return what the examples are."""
        return f"images of {self._size} x {self._size}"

    def startup_notes(self) -> list[str]:
        """Return the lines to print before training: the data, and how bytes are normalised."""
        shape, size = self.model.shape, self.model.size
        lines = [f"{self.images}; {size} x {size} pixels"] if self.config.data.train else []
        if shape is not None:
            numbers = lambda name: " ".join(f"{x:g}" for x in getattr(shape, name))
            lines.append(f"normalised by mean {numbers('mean')}, deviation {numbers('std')}")
        return lines

    def init_from_weights(
        self, layout: hfjax.Layout, seed: int, schedule: hfjax.Schedule | None
    ) -> tuple[hfjax.State, list[str]] | None:
        """Return an initial state with the weights of a file, and lines to print."""
        opts, shape = self.config.model, self.model.shape
        if opts.weights is None or shape is None:
            return None
        weights = read_vision(opts.weights, shape, new_head=opts.new_head)
        state = with_weights(layout, weights, seed, schedule)
        new_paths = [path for path, x in weights.items() if x is None]
        note = f"read the weights of {quote(opts.weights)}"
        return state, [f"{note}; drawn anew: {', '.join(new_paths)}" if new_paths else note]

    # -- data -----------------------------------------------------------------------------

    def train_loader(self, local_slice: Callable) -> ImageLoader:
        """Return the training batches."""
        data = self.config.data
        colours = {name: getattr(data, name) for name in ("flip", *COLOURS)}
        augment = Augment(scale=data.crop_scale, **colours)
        if self.kind == CLASSES and data.crop_scale is not None and data.crop_scale[1] > 1:
            raise ValueError(
                f"--data.crop-scale {data.crop_scale[0]} {data.crop_scale[1]}: of "
                "classes it is the part of the area that is cut out, from above 0 to 1."
            )
        fields: Any = {"augment": augment, "epochs": data.epochs, "seed": self.config.seed}
        return self._make_loader(local_slice, self.images, train=True, **fields)

    def valid_loader(self, local_slice: Callable) -> ImageLoader | None:
        """Return the validation batches; None if there are none."""
        data = self.config.data
        if data.valid is None and "valid" not in parts_of(data.train[0]):
            return None
        classes, folder = self.images.classes, data.valid or data.train[0]
        valid = ImageSet(folder, part="valid", classes=classes if self.kind == MASKS else None)
        if set(valid.classes) < set(classes):  # folders: labels go by name; see `closing_lines`
            valid = ImageSet(folder, part="valid", classes=classes)
        check_same_classes(self.images, valid)
        return self._make_loader(local_slice, valid, train=False, epochs=1, pad_last=True)

    def _make_loader(self, local_slice: Callable, data: ImageSet, **fields: Any) -> ImageLoader:
        batch = self.config.global_batch_size
        loader = ImageLoader(
            data, batch, self._size, broken=self.config.data.on_broken_image, **fields
        )
        loader.check(self.model.classes)
        loader.local_examples = local_slice(batch)
        return loader

    def closing_lines(self, loader: Any) -> list[str]:
        """Return the lines to print after training: classes without images, undecodable images."""
        return [*self._missing_class_lines(loader.images), *self._skipped_lines(loader)]

    def _missing_class_lines(self, data: ImageSet) -> list[str]:
        """Return a line about the classes of which a data set has no image."""
        if data.kind == MASKS or not (left := set(range(len(data.classes))) - set(data.labels)):
            return []
        some = ", ".join(quote(data.classes[i]) for i in sorted(left)[:5]) + ", …" * (len(left) > 5)
        count = len(data.classes)
        return [
            f"{quote(data.directory)} has images of {count - len(left)} of the {count} classes; of "
            f"these it has none, and the scores tell nothing of them: {some}"
        ]

    def _skipped_lines(self, loader: Any) -> list[str]:
        if not (skipped := loader.skipped):
            return []
        some = ", ".join(map(quote, skipped[:5])) + ", …" * (len(skipped) > 5)
        folder = quote(loader.images.directory)
        instead = "others took their places" if loader.train else "they do not count"
        return [f"{folder}: {len(skipped)} images did not decode, and {instead}: {some}"]

    # -- scores ---------------------------------------------------------------------------

    def compute_scores(self, metrics: Sequence[Mapping[str, Any]]) -> ImageScores:
        """Return the scores of all batches."""
        unit = "images" if self.kind == CLASSES else "pixels"
        loss, count = mean_loss(metrics, unit.removesuffix("s"))
        weights = np.array([float(m["weight"]) for m in metrics])
        mean = lambda name: float(
            sum(w * float(m[name]) for w, m in zip(weights, metrics, strict=True) if w)
            / sum(weights)
        )
        known = [n for n in ("top1", "top5", "pixels") if n in metrics[0]]
        numbers = {f"valid_{name}": mean(name) for name in known}
        if "confusion" not in metrics[0]:
            return ImageScores(loss, count, unit, numbers)
        counts = sum(
            confusion_counts(m["confusion"], self.config.global_batch_size) for m in metrics
        )
        iou = intersection_over_union(np.asarray(counts, np.int64))
        present = [x for x in iou if x is not None]
        numbers["valid_iou"] = float(np.mean(present)) if present else 0.0
        classes = self.images.classes if self.config.data.train else ()  # own data has no names
        names = [*classes, *map(str, range(len(classes), len(iou)))]
        return ImageScores(loss, count, unit, numbers, dict(zip(names, iou, strict=True)))


def _dropout_rates(opts: ModelConfig, preset: VisionConfig) -> dict[str, float]:
    """Return the requested dropout rates; refuse those that the preset does not have."""
    rates = {}
    for name in RATES:
        if (rate := getattr(opts, name)) is None:
            continue
        if hasattr(preset, name):
            rates[name] = rate
        elif rate:  # 0 is fine without dropout
            flag, label = name.replace("_", "-"), name.replace("_", " ")
            raise ValueError(f"--model.{flag} {rate}: {opts.preset} has no {label}. Leave it out.")
    return rates


COLOURS = ("brightness", "contrast", "saturation")


def intersection_over_union(counts: np.ndarray) -> list[float | None]:
    """Return for each class its correct pixels over all that have it as label or prediction.

    >>> intersection_over_union(np.array([[3, 1, 0], [0, 2, 0], [0, 0, 0]]))
    [0.75, 0.6666666666666666, None]
    """
    right = np.diagonal(counts)
    union = counts.sum(0) + counts.sum(1) - right
    return [float(r / u) if u else None for r, u in zip(right, union, strict=True)]


def _user_model(opts: ModelConfig, classes: int, size: int) -> Callable:
    make = load_function(str(opts.factory), "--model.factory")
    if len(inspect.signature(make).parameters) != 2:
        raise ValueError(
            f"--model.factory {opts.factory}: a function of (classes, size) is expected, since the "
            f"data are images, which returns model_init(rngs); found {inspect.signature(make)}."
        )
    return make(classes, size)


def _check_flags(config: TrainConfig) -> None:
    """Refuse text flags for an image model."""
    of = f"{config.model.factory or config.model.preset} is a model of images"
    for settings, prefix, names in (
        (config.model, "model", TEXT_OPTS),
        (config.data, "data", TOKEN_OPTS),
    ):
        for name in names:
            if not is_default(settings, name):
                flag = f"--{prefix}.{name.replace('_', '-')}"
                raise ValueError(f"{flag} {brief(getattr(settings, name))}: {of}. Leave it out.")
    if config.model.weights is not None and config.model.factory is not None:
        raise ValueError(
            "--model.weights is of presets: load the weights in --model.factory yourself."
        )
    if config.model.freeze_batch_norm and config.model.group_norm:
        raise ValueError("--model.freeze-batch-norm and --model.group-norm: give one of the two.")
    _check_combinations(config)
    if config.model.new_head and config.model.weights is None:
        raise ValueError("--model.new-head goes with --model.weights FILE: a head is new anyway.")


RATES = ("dropout", "auxiliary_dropout")


def _check_combinations(config: TrainConfig) -> None:
    """Refuse flags that have no effect beside others."""
    opts, start = config.model, config.checkpoint.init_from
    norms = [name for name in ("freeze_batch_norm", "group_norm") if getattr(opts, name)]
    flags = [*norms, *(name for name in RATES if getattr(opts, name) is not None)]
    if opts.factory is not None and flags:
        raise ValueError(
            f"--model.{flags[0].replace('_', '-')} is of presets, and --model.factory "
            f"{opts.factory} is none: say it there."
        )
    if opts.label_smoothing and opts.loss is not None:
        raise ValueError(f"--model.label-smoothing beside --model.loss {opts.loss}: say it there.")
    if opts.weights is not None and start is not None:
        raise ValueError(
            f"--model.weights {opts.weights} beside --checkpoint.init-from {start}: a run begins "
            "with one of the two. Leave the other out."
        )
    if opts.freeze_batch_norm and opts.weights is None and start is None:
        raise ValueError(
            "--model.freeze-batch-norm keeps norms as weights have them, and none are given: add "
            "--model.weights FILE or --checkpoint.init-from RUN, or take --model.group-norm."
        )


def is_image_task(config: TrainConfig) -> bool:
    """Return whether a configuration is of images: by its preset, or its own model's data."""
    if config.model.factory is None:
        return config.model.pretrained is None and config.model.preset in PRESETS
    return bool(config.data.train) and contains_images(Path(config.data.train[0]))


# Flags that only images use: fields of Model and Data.
IMAGE_OPTS: Mapping[str, tuple[str, ...]] = {
    "model": (
        *("weights", "new_head", "freeze_batch_norm", "group_norm", "num_classes"),
        *("label_smoothing", "auxiliary_dropout"),
    ),
    "data": ("image_size", "on_broken_image", "crop_scale", "flip", *COLOURS),
}


def check_text_only(config: TrainConfig) -> None:
    """Refuse image flags and image data for a text model."""
    plain = asdict(TrainConfig())
    for prefix, names in IMAGE_OPTS.items():
        for name in names:
            if (value := getattr(getattr(config, prefix), name)) != plain[prefix][name]:
                raise ValueError(
                    f"--{prefix}.{name.replace('_', '-')} {brief(value)}: it is of images, and "
                    f"{config.model.factory or config.model.preset} is a model of text. Leave it "
                    f"out, or choose one of {', '.join(PRESETS)}."
                )
    value = config.data.train
    if value and contains_images(Path(value[0])):
        model = config.model.pretrained or config.model.preset
        raise ValueError(
            f"--data.train {quote(value[0])} holds images, and {quote(model)} is a model of text. "
            f"Give --model.preset, one of {', '.join(PRESETS)}; or make a data set of text: "
            "hfjax data."
        )
