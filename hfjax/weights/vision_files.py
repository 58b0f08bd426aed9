"""Models of images in and out: one file of safetensors, with the names that torchvision has.

Parameters and statistics are read by slices where the file lies, and written as they were. Beside
each running variance torchvision has `num_batches_tracked`, which counts steps and which nothing
computes with: it is not read, and goes out as the count of the file that a state began from plus
the steps of the state.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from hfjax.distributed.consensus import agreed, in_all
from hfjax.models.vision.deeplab import DeepLabConfig
from hfjax.models.vision.vision_config import ConvNetConfig, VisionConfig
from hfjax.parallel.execution import PipelineSchedule
from hfjax.sharding.layout import Layout, State
from hfjax.step.batches import full
from hfjax.step.init_state import init
from hfjax.utils.atomic import replacing
from hfjax.utils.paths import Flat, flatten, nest
from hfjax.utils.read_files import check_ordinary
from hfjax.utils.tables import named
from hfjax.weights.load import by_path
from hfjax.weights.model_folder import PICKLES
from hfjax.weights.save import in_full_precision
from hfjax.weights.tensor_files import (
    FileTensor,
    header_of,
    open_to_read,
    read_header,
    read_rows,
)
from hfjax.weights.tensor_rules import PlacedTensor, Shape, check_covers, misfits
from hfjax.weights.vision_rules import COUNTER, HEADS, shapes_of, vision_table

VARIANCE, BACKBONE = "running_var", "backbone."
NEW_HEAD = "--model.new-head (read_vision(…, new_head=True))"


@dataclass(frozen=True)
class FileArray:
    """A parameter that lies in a file; of a stack, each layer a tensor. Slices of it are read.

    Attributes:
        pieces: Its tensors, layer by layer.
        shape: Its shape.
    """

    pieces: Sequence[PlacedTensor]
    shape: Shape

    @property
    def dtype(self) -> np.dtype:
        """The type in the file."""
        assert self.pieces[0].tensor is not None
        return self.pieces[0].tensor.dtype

    def __getitem__(self, index: Any) -> np.ndarray:
        index = index if isinstance(index, tuple) else (index,)
        if not self.pieces[0].index:
            return _turned(self.pieces[0])[index]
        some, rest = index[0], index[1:]
        if not isinstance(some, slice):
            return np.asarray(self)[index]
        layers = [_turned(piece)[rest] for piece in self.pieces[some]]
        return np.stack(layers) if layers else np.asarray(self)[index]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        layers = [_turned(piece) for piece in self.pieces]
        whole = np.stack(layers) if self.pieces[0].index else layers[0]
        return np.array(whole, dtype or self.dtype)


def _turned(piece: PlacedTensor) -> np.ndarray:
    """Return a tensor in our order; what of it is asked for is read then."""
    assert piece.tensor is not None
    held, rule = piece.tensor, piece.rule
    with os.fdopen(open_to_read(held), "rb") as file:
        found = np.memmap(file, held.dtype, "r", held.begin, held.shape)
    return found.reshape(rule.view).transpose(rule.order)


def read_vision(
    file: str | Path, config: VisionConfig, new_head: bool = False
) -> dict[str, FileArray | None]:
    """Return {path: array} of a file, parameters and statistics; a slice is read when it is taken.

    `with_weights` makes a state of it.

    Args:
        file: Of safetensors, with torchvision's names; `safetensors.torch.save_file` writes one.
        config: The shape of the model.
        new_head: Whether what has the classes as a dimension is left out: None, from the seed. A
            model that segments may then begin from a ResNet that classifies, too.

    Raises:
        ValueError: The file is none of safetensors, or not of this model: all that does not fit.

    Example:
        >>> config = ResNetConfig.preset("resnet50")  # doctest: +SKIP
        >>> weights = read_vision("resnet50.safetensors", config)  # doctest: +SKIP
    """
    return in_all(lambda: _arrays_of(Path(file), config, new_head))


def _arrays_of(path: Path, config: VisionConfig, new_head: bool) -> dict[str, FileArray | None]:
    """Return what lies where in a file, once all of it fits."""
    _refuse_pickles(path)
    tensors, shapes = read_header(path), shapes_of(config)
    alone = _is_backbone(config, tensors)
    if alone:
        if not new_head:
            raise ValueError(
                f"{named(path)} is of a ResNet alone, without what segments. To keep the backbone "
                f"and draw the rest anew: {NEW_HEAD}."
            )
        fits = lambda name: not name.startswith("fc.")
        tensors = {f"{BACKBONE}{name}": t for name, t in tensors.items() if fits(name)}
    pieces = list(vision_table(config).pieces())
    check_covers(pieces, shapes)
    pieces = [replace(piece, tensor=tensors.get(piece.name)) for piece in pieces]
    drawn = lambda p: _of_head(p.path) or (alone and not p.name.startswith(BACKBONE))
    kept = [piece for piece in pieces if not (new_head and drawn(piece))]
    _check(path, pieces, kept, tensors)
    found: dict[str, FileArray | None] = dict.fromkeys(shapes)
    for of, parts in by_path(kept).items():
        found[of] = FileArray(sorted(parts, key=lambda p: p.index), shapes[of])
    return found


def _is_backbone(config: VisionConfig, tensors: Mapping[str, FileTensor]) -> bool:
    """Return whether a file is of the ResNet alone of a model that segments."""
    segments = isinstance(config, DeepLabConfig)
    return segments and "conv1.weight" in tensors and f"{BACKBONE}conv1.weight" not in tensors


def _refuse_pickles(path: Path) -> None:
    """Refuse a file of torch's by its name, before anything of it is read."""
    if any(path.match(pattern) for pattern in PICKLES):
        raise ValueError(
            f"{named(path)} is a pickle, which runs code when it is read: it is never opened. "
            f"Where torch is: safetensors.torch.save_file(torch.load({named(path.name)!r}, "
            f"weights_only=True), {named(path.with_suffix('.safetensors').name)!r}); give that."
        )
    check_ordinary(path)


def _of_head(path: str) -> bool:
    return path.startswith(tuple(f"{head}/" for head in HEADS))


def _check(
    path: Path,
    pieces: Sequence[PlacedTensor],
    kept: Sequence[PlacedTensor],
    tensors: Mapping[str, FileTensor],
) -> None:
    """Refuse tensors that are not those of the model: the head alone, or what else."""
    known = {piece.name for piece in pieces}
    over = [t for name, t in tensors.items() if name not in known and _is_read(name)]
    others = [p for p in kept if not _of_head(p.path)]
    lines = misfits(others, over)
    if lines:
        raise ValueError(
            f"the tensors of {named(path)} are not those of the model:\n  "
            + "\n  ".join(lines)
            + "\nNothing was read. Give the weights of a model of this shape, or the shape "
            "of the one that the file is of."
        )
    heads = misfits([p for p in kept if _of_head(p.path)], ())
    if heads:
        raise ValueError(
            f"{named(path)} is of a model with other classes:\n  "
            + "\n  ".join(heads)
            + "\nTo keep the rest and draw the last layer anew: --model.new-head "
            "(read_vision(…, new_head=True)). Or give the number of classes of the file."
        )


def _is_read(name: str) -> bool:
    return name.rpartition(".")[2] != COUNTER


def with_weights(
    layout: Layout,
    weights: Mapping[str, Any],
    seed: int = 0,
    schedule: PipelineSchedule | None = None,
) -> State:
    """Return a new state that begins with weights: `hfjax.init`, and statistics in their place.

    Args:
        layout: Where everything lives.
        weights: What `read_vision` returned: {path: array or None}; None is as the seed has it.
        seed: Whole number, as `hfjax.init` takes it.
        schedule: The pipeline schedule of the training step.
    """
    of_step = {path: x for path, x in weights.items() if path in layout.arrays}
    state = init(layout, seed=seed, schedule=schedule, parameters=of_step)
    variables = flatten(state.variables)
    given = {path: x for path, x in weights.items() if path not in of_step and x is not None}
    if unknown := [path for path in given if path not in variables]:
        raise ValueError(
            f"{unknown[0]} is neither a parameter nor a variable of the layout's model: the "
            "weights are of another shape or norm than the layout."
        )
    put = {path: _put(x, variables[path]) for path, x in given.items()}
    return replace(state, variables=nest({**variables, **put}))


def _put(x: Any, like: jax.Array) -> jax.Array:
    """Return an array where another is, in its type."""
    part = lambda index: np.array(x[index], like.dtype)
    return jax.make_array_from_callback(like.shape, like.sharding, part)


def write_vision(
    file: str | Path,
    layout: Layout,
    state: State,
    config: VisionConfig,
    like: str | Path | None = None,
) -> None:
    """Write a state as one file of safetensors, which torchvision's load_state_dict takes.

    Args:
        file: It takes the place of one that is there when it is whole.
        layout: The layout of the state. All processes call this.
        state: Whose parameters and statistics are written.
        config: The shape of the model.
        like: The file that the state began from: its types are kept, and its counts of batches go
            on. None: the types of the state, counts from 0.
    """
    arrays = full({**in_full_precision(layout, state), **_statistics(state, config)})
    steps = 0 if isinstance(config, ConvNetConfig) and config.norm == "frozen" else int(state.step)
    before = {} if like is None else read_header(Path(like))
    agreed(lambda: _write(Path(file), arrays, config, before, steps))


def _statistics(state: State, config: VisionConfig) -> Flat:
    """Return the variables of a state that a file holds."""
    shapes = shapes_of(config)
    return {path: x for path, x in flatten(state.variables).items() if path in shapes}


def _write(
    path: Path, arrays: Flat, config: VisionConfig, like: Mapping[str, FileTensor], steps: int
) -> None:
    made = dict(named_tensors(arrays, config, like, steps))
    tensors = {name: made[name] for name in (*(n for n in like if n in made), *made)}
    header, _ = header_of({name: (x.dtype, x.shape) for name, x in tensors.items()})
    with replacing(path) as file:
        file.write(header)
        for x in tensors.values():
            file.write(np.ascontiguousarray(x).tobytes())


def named_tensors(
    arrays: Flat,
    config: VisionConfig,
    like: Mapping[str, FileTensor] = MappingProxyType({}),
    steps: int = 0,
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the tensors of a file by name, in torch's order of dimensions."""
    pieces = list(vision_table(config).pieces())
    check_covers(pieces, {path: x.shape for path, x in arrays.items()})
    for piece in pieces:
        rule = piece.rule
        block = arrays[piece.path][piece.index]
        array = block.transpose(np.argsort(rule.order)).reshape(rule.shape)
        yield (
            piece.name,
            array.astype(like[piece.name].dtype if piece.name in like else block.dtype),
        )
        part, _, last = piece.name.rpartition(".")
        if last == VARIANCE:
            counter = f"{part}.{COUNTER}"
            first = read_rows(like[counter], 0, 1).item() if counter in like else 0
            yield counter, np.array(first + steps, np.int64)
