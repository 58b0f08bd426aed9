"""A task on a user's own data, of `--data.factory`, for a preset or for a user's own model.

`OwnDataTask` gives the batches, in place of token files or images. Everything else is of the task
of the model: text, images, or `OwnModelTask`, which knows no more of an example than its arrays.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import grain
import jax
import numpy as np

import hfjax
from hfjax.data.grain_examples import (
    ENDLESS,
    MASK,
    ArraySpec,
    GrainExamples,
    check_map_dataset,
    describe_specs,
)
from hfjax.data.grain_loader import GrainLoader
from hfjax.parallel.adapters.forward_signature import call_model
from hfjax.parallel.adapters.model_template import raw_value
from hfjax.parallel.layer_costs import jaxpr_flops
from hfjax.trainer.config import ModelConfig, TrainConfig
from hfjax.trainer.config_io import load_function
from hfjax.trainer.model import load_loss
from hfjax.trainer.sampling import mean_loss
from hfjax.trainer.tasks.images import MASKS, ImageTask
from hfjax.trainer.tasks.task import Scores
from hfjax.trainer.tasks.text import TextTask
from hfjax.utils.read_files import brief

TRAIN, VALID = "train", "valid"


@dataclass(frozen=True)
class OwnData:
    """The data sets that a user's function returns, each asked for once.

    Attributes:
        config: The configuration.
    """

    config: TrainConfig

    @property
    def name(self) -> str:
        """The flag that names the function."""
        return f"--data.factory {self.config.data.factory}"

    @cached_property
    def train(self) -> grain.MapDataset:
        """The data set to train on."""
        return self._load(TRAIN)

    @cached_property
    def valid(self) -> grain.MapDataset | None:
        """The data set to validate on; None if there is none."""
        return self._load(VALID)

    @cached_property
    def train_examples(self) -> GrainExamples:
        """The training examples."""
        dataset = self.train
        return self.read(TRAIN, lambda: GrainExamples(dataset))

    @property
    def batch_shapes(self) -> Any:
        """The shapes of a global batch, as it is on devices."""
        batch_size = self.config.global_batch_size
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((batch_size, *x.shape), x.dtype), self.example_shapes
        )

    @cached_property
    def example_shapes(self) -> Any:
        """The shapes of an example; JAX computes with 32 bits, unless told otherwise."""
        dtype = lambda x: jax.dtypes.canonicalize_dtype(x.dtype)
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, dtype(x)), self.train_examples.first
        )

    def _load(self, split: str) -> Any:
        make = load_function(str(self.config.data.factory), "--data.factory")
        if len(inspect.signature(make).parameters) != 2:
            raise ValueError(
                f"{self.name}: a function of (split, seed) is expected, which returns the "
                f"grain.MapDataset of split {TRAIN!r} or {VALID!r}; found "
                f"{inspect.signature(make)}."
            )
        dataset = make(split, self.config.seed)
        if dataset is not None or split == TRAIN:
            check_map_dataset(dataset, f"{self.name}, split {split!r}")
        return dataset

    def read(self, split: str, create: Callable[[], Any]) -> Any:
        """Return what reads the examples of a split; an error names the split."""
        try:
            return create()
        except ValueError as wrong:
            raise ValueError(f"{self.name}, split {split!r}: {wrong}") from wrong


# -- the batches --------------------------------------------------------------------------


class Readable(NamedTuple):
    """An array that a preset reads of an example.

    Attributes:
        shape: Its shape.
        dtypes: The dtypes that it may have: a kind of NumPy's.
        flags: What to say or to change where it does not fit.
        num_values: Its values are below this number. None: any.
        required: Whether every example has it.
    """

    shape: tuple[int, ...]
    dtypes: type
    flags: str = ""
    num_values: int | None = None
    required: bool = False

    def __str__(self) -> str:
        return f"{self.dtypes.__name__}{list(self.shape)}"


def readable_arrays(task: TextTask | ImageTask) -> dict[str, Readable]:
    """Return the arrays that the model and the loss of a preset read of an example."""
    if isinstance(task, TextTask):
        length, vocab = task.model.length, task.vocab or task.model.vocab
        flags = f"--model.seq-len {length}"
        return {
            "tokens": Readable((length + 1,), np.integer, f"{flags}, and one more", vocab, True),
            "targets": Readable((length,), np.integer, flags, vocab),
            "documents": Readable((length + 1,), np.integer, f"{flags}, and one more"),
            MASK: Readable((length,), np.number, flags),
        }
    size, classes = task.model.size, task.model.classes
    label, flags = (), f"--data.image-size {size}"
    if task.kind == MASKS:
        label, classes = (size, size), None  # 255 is ignored
    return {
        "image": Readable((size, size, 3), np.uint8, flags, None, True),
        "label": Readable(label, np.integer, flags if label else "", classes, True),
        MASK: Readable((), np.number),
    }


@dataclass(frozen=True)
class OwnDataTask:
    """The task of a model, on the data of a user.

    Attributes:
        config: The configuration.
        data: The data sets.
        model_task: The task that the model is of.
    """

    config: TrainConfig
    data: OwnData
    model_task: "TextTask | ImageTask | OwnModelTask"

    @property
    def unit(self) -> str:
        """What a step processes, in the plural."""
        return self.model_task.unit

    @property
    def units_per_example(self) -> int:
        """Number of these units in an example."""
        return self.model_task.units_per_example

    @property
    def model(self) -> Any:
        """The model to train, with its loss and sizes."""
        return self.model_task.model

    @property
    def eval_loss(self) -> Callable:
        """The loss with the metrics of an evaluation."""
        return self.model_task.eval_loss

    def flops(self, layout: hfjax.Layout) -> float:
        """Return the FLOPs of training on one unit; 0: not known."""
        return self.model_task.flops(layout)

    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the shapes of a batch; the first example is read."""
        self._check_readable(TRAIN, self.data.train_examples.specs)
        return self.data.batch_shapes

    def describe_example(self) -> str:
        """Return what the examples are."""
        return self.model_task.describe_example()

    def startup_notes(self) -> list[str]:
        """Return the lines to print before training: how many examples, of which arrays."""
        count = len(self.data.train)
        amount = "examples without end" if count >= ENDLESS else f"{count:,} examples"
        arrays = describe_specs(self.data.train_examples.specs)
        line = f"{self.data.name}: {amount}, in the order of the data set: {arrays}"
        return [line, *self.model_task.startup_notes()]

    def init_from_weights(
        self, layout: hfjax.Layout, seed: int, schedule: hfjax.Schedule | None
    ) -> tuple[hfjax.State, list[str]] | None:
        """Return an initial state with given weights, and lines to print; None without any."""
        return self.model_task.init_from_weights(layout, seed, schedule)

    def train_loader(self, local_slice: Callable) -> GrainLoader:
        """Return the training batches."""
        self._check_readable(TRAIN, self.data.train_examples.specs)
        batch_size, epochs = self.config.global_batch_size, self.config.data.epochs
        dataset = self._checked_values(self.data.train, self.data.train_examples.specs)
        loader = self._make_loader(TRAIN, dataset, batch_size=batch_size, epochs=epochs)
        loader.local_examples = local_slice(batch_size)
        return loader

    def valid_loader(self, local_slice: Callable) -> GrainLoader | None:
        """Return the validation batches: each example once, in order; None if there are none."""
        if (dataset := self.data.valid) is None:
            return None
        if len(dataset) >= ENDLESS:
            raise ValueError(
                f"{self.data.name}, split {VALID!r}: the data set has no end, and a validation "
                "reads each example once. Leave .repeat() out."
            )
        specs = self.data.read(VALID, lambda: GrainExamples(dataset)).specs
        self._check_readable(VALID, specs)
        dataset = self._checked_values(dataset, specs)
        if isinstance(self.model_task, TextTask) and MASK not in specs:
            mask = np.ones(self.model_task.model.length, np.float32)  # of padding examples 0
            dataset = dataset.map(lambda example: {**example, MASK: mask})
        batch_size = self.config.global_batch_size
        fields: Any = {"batch_size": batch_size, "epochs": 1, "pad_last": True}
        loader = self._make_loader(VALID, dataset, **fields)
        loader.local_examples = local_slice(batch_size)
        return loader

    def _make_loader(self, split: str, dataset: grain.MapDataset, **fields: Any) -> GrainLoader:
        return self.data.read(split, lambda: GrainLoader(dataset, **fields))

    def closing_lines(self, loader: Any) -> list[str]:
        """Return the lines to print after training: none."""
        return []

    def compute_scores(self, metrics: Sequence[Mapping[str, Any]]) -> Scores:
        """Return the scores of an evaluation from the metrics of all its batches."""
        return self.model_task.compute_scores(metrics)

    # -- what a preset reads --------------------------------------------------------------

    @cached_property
    def _readable(self) -> dict[str, Readable] | None:
        """The arrays that the preset reads; None: the model is the user's, and reads any."""
        task = self.model_task
        return None if isinstance(task, OwnModelTask) else readable_arrays(task)

    def _check_readable(self, split: str, specs: Mapping[str, ArraySpec]) -> None:
        """Refuse examples that the preset cannot read, by their keys."""
        if (readable := self._readable) is None:
            return
        first = f"{self.data.name}, split {split!r}: an example has {describe_specs(specs)}"
        reads = f"{self.model.name} reads {_describe_readable(readable)}"
        for name, array in readable.items():
            if (spec := specs.get(name)) is None:
                if array.required:
                    raise ValueError(f"{first}, and no {name!r}. {reads}. Name it so (.map).")
                continue
            if spec.shape != array.shape or not np.issubdtype(spec.dtype, array.dtypes):
                flags = f" ({array.flags})" if array.flags else ""
                raise ValueError(
                    f"{first}, and {self.model.name} reads {name!r} of {array}{flags}. Convert, "
                    "pad or crop it in the data set (.map), or change the model."
                )
        if (others := specs.keys() - readable) and not self.model.has_user_loss:
            raise ValueError(
                f"{first}: nothing reads {', '.join(map(repr, sorted(others)))}. {reads}. Leave "
                "out the rest (.map), or give a loss that reads it: --model.loss file.py:function."
            )

    def _checked_values(
        self, dataset: grain.MapDataset, specs: Mapping[str, ArraySpec]
    ) -> grain.MapDataset:
        """Return a data set that refuses numbers which the model or JAX cannot hold."""
        limits = {path: limit for path, spec in specs.items() if (limit := _dtype_limit(spec))}
        for name, array in (self._readable or {}).items():
            if array.num_values is not None and name in specs:
                flag = "--model.num-classes" if name == "label" else "--model.vocab-size"
                flag = "" if self.config.model.pretrained else f" ({flag})"
                why = f"{self.model.name} has {array.num_values}{flag}, numbered from 0 on"
                least = 0 if name == "tokens" else np.iinfo(np.int32).min  # a loss ignores others
                limits[name] = Limit(least, array.num_values - 1, why)
        if not limits:
            return dataset

        def check(index: int, example: Any) -> Any:
            for path, (least, most, why) in limits.items():
                x = _at_path(example, path)
                if x is None or not np.size(x):
                    continue
                for value in (int(np.min(x)), int(np.max(x))):
                    if not least <= value <= most:
                        raise ValueError(f"example {index}: {path!r} holds {value}, and {why}.")
            return example

        return dataset.map_with_index(check)


class Limit(NamedTuple):
    """The least and the largest value of an array, and why."""

    least: int
    most: int
    why: str


def _dtype_limit(spec: ArraySpec) -> Limit | None:
    """Return what fits the dtype that whole numbers have in JAX, if that is a smaller one."""
    dtype = jax.dtypes.canonicalize_dtype(spec.dtype)
    if dtype == spec.dtype or spec.dtype.kind not in "iu":
        return None
    info = np.iinfo(dtype)
    return Limit(
        int(info.min), int(info.max), f"JAX makes it {dtype} (JAX_ENABLE_X64=1: it does not)"
    )


def _at_path(example: Any, path: str) -> Any:
    """Return an array of an example as the data set made it; None if it is not there."""
    for key in path.split("/"):
        example = example.get(key) if isinstance(example, Mapping) else None
    return example


def _describe_readable(readable: Mapping[str, Readable]) -> str:
    return ", ".join(
        f"{name} {array}{'' if array.required else ' (optional)'}"
        for name, array in readable.items()
    )


# -- a model of a user's own --------------------------------------------------------------


class OwnModel(NamedTuple):
    """A user's model, with the loss."""

    name: str
    init: Callable
    loss: Callable
    shape: None = None
    has_user_loss: bool = True


@dataclass(frozen=True)
class OwnScores:
    """The scores of an evaluation by a user's loss.

    Attributes:
        loss: The mean loss.
        weight: The sum of the weights that it averages by.
        numbers: The metrics of the loss by name.
    """

    loss: float
    weight: float
    numbers: Mapping[str, float]
    table: str = ""

    @property
    def line(self) -> str:
        """The scores in a line."""
        scores = [f"{name.removeprefix('valid_')} {x:.4f}" for name, x in self.numbers.items()]
        return ", ".join([f"loss {self.loss:.4f}", *scores, f"weight {self.weight:g}"])


@dataclass(frozen=True)
class OwnModelTask:
    """The task of a user's own model and loss, which read any arrays.

    Attributes:
        config: The configuration.
        data: The data sets.
    """

    config: TrainConfig
    data: OwnData
    unit = "examples"
    units_per_example = 1

    @cached_property
    def model(self) -> OwnModel:
        """The model, for the arrays of an example."""
        opts = self.config.model
        self._check_flags(opts)
        loss = load_loss(opts)
        if loss is None:
            raise ValueError(
                f"--model.factory {opts.factory} beside {self.data.name}: what its loss is, is not "
                "said. Give --model.loss file.py:function, of (outputs, batch)."
            )
        make = load_function(str(opts.factory), "--model.factory")
        if len(inspect.signature(make).parameters) != 1:
            raise ValueError(
                f"--model.factory {opts.factory}: beside --data.factory a function of (example), "
                "the shapes of an example by key, is expected, which returns model_init(rngs); "
                f"found {inspect.signature(make)}."
            )
        return OwnModel(str(opts.factory), make(self.data.example_shapes), loss)

    def _check_flags(self, opts: ModelConfig) -> None:
        """Refuse flags of presets."""
        for name, default in vars(ModelConfig()).items():
            value = getattr(opts, name)
            if name not in ("factory", "loss", "preset") and value != default:
                raise ValueError(
                    f"--model.{name.replace('_', '-')} {brief(value)} is of presets, and "
                    f"--model.factory {opts.factory} is none: say it there."
                )
        if (size := self.config.data.image_size) is not None:
            raise ValueError(f"--data.image-size {size}: {self.data.name} makes the examples.")

    @property
    def eval_loss(self) -> Callable:
        """The loss."""
        return self.model.loss

    def flops(self, layout: hfjax.Layout) -> float:
        """Return the FLOPs of training on an example, three times those of the forward; 0: unknown.

        A model that needs the axes of a mesh cannot be traced here, and computes nothing here if
        the loss calls it.
        """
        one = lambda x: jax.ShapeDtypeStruct((1, *x.shape), x.dtype)
        template = layout.template
        shapes = lambda arrays: {
            path: jax.ShapeDtypeStruct(raw_value(x).shape, raw_value(x).dtype)
            for path, x in arrays.items()
        }

        def forward(parameters: Any, variables: Any, batch: Any) -> Any:
            model = template.merge(parameters, variables, "eval")
            with template.call_context():
                outputs = call_model(layout.forward, model, variables, batch, "eval")
            return [x for x in jax.tree.leaves(outputs) if hasattr(x, "dtype")]

        batch = jax.tree.map(one, self.data.example_shapes)
        try:
            program = jax.make_jaxpr(forward)(
                shapes(template.parameters), shapes(template.variables), batch
            )
        except Exception:  # the first step reports what is wrong with a model
            return 0.0
        return 3.0 * jaxpr_flops(program.jaxpr)

    def describe_example(self) -> str:
        """Return what the examples are."""
        return f"examples of {describe_specs(self.data.train_examples.specs)}"

    def startup_notes(self) -> list[str]:
        """Return the lines to print before training: none."""
        return []

    def init_from_weights(
        self, layout: hfjax.Layout, seed: int, schedule: hfjax.Schedule | None
    ) -> None:
        """Return None: there are no given weights."""

    def compute_scores(self, metrics: Sequence[Mapping[str, Any]]) -> OwnScores:
        """Return the mean loss and metrics of all batches."""
        loss, _ = mean_loss(metrics, "example")
        weights = np.array([float(m["weight"]) for m in metrics])
        names = [n for n, x in metrics[0].items() if n not in ("loss", "weight") and not np.ndim(x)]
        mean = lambda name: sum(
            w * float(m[name]) for w, m in zip(weights, metrics, strict=True) if w
        )
        total = float(weights.sum())
        return OwnScores(loss, total, {f"valid_{name}": mean(name) / total for name in names})
