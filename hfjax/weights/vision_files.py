"""Import and export of vision models: one safetensors file with torchvision's names.

Parameters and statistics are read lazily, by slices, and written unchanged. Beside each running
variance torchvision has `num_batches_tracked`, a step count that no computation uses: it is not
read, and is written as the count of the file that a state began from plus the steps of the state.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from hfjax.distributed.consensus import run_on_all, run_on_first
from hfjax.models.vision.deeplab import DeepLabConfig
from hfjax.models.vision.vision_config import ConvNetConfig, VisionConfig
from hfjax.parallel.execution import PipelineSchedule
from hfjax.sharding.layout import Layout, State
from hfjax.step.batches import full_array
from hfjax.step.init_state import init
from hfjax.utils.atomic import atomic_file
from hfjax.utils.paths import Flat, flatten, nest
from hfjax.utils.read_files import check_ordinary
from hfjax.utils.tables import quote
from hfjax.weights.load import group_by_path
from hfjax.weights.model_folder import PICKLES
from hfjax.weights.save import full_precision_params
from hfjax.weights.tensor_files import (
    FileTensor,
    header_of,
    open_to_read,
    read_header,
    read_rows,
)
from hfjax.weights.tensor_rules import Shape, TensorMapping, check_coverage, find_mismatches
from hfjax.weights.vision_rules import COUNTER, HEADS, array_shapes, vision_table

VARIANCE, BACKBONE = "running_var", "backbone."
NEW_HEAD = "--model.new-head (read_vision(…, new_head=True))"


@dataclass(frozen=True)
class FileArray:
    """A parameter in a file, read lazily by slices; a stacked one has one tensor per layer.

    Attributes:
        mappings: The tensors, layer by layer.
        shape: The shape of the parameter.
    """

    mappings: Sequence[TensorMapping]
    shape: Shape

    @property
    def dtype(self) -> np.dtype:
        """The dtype in the file."""
        assert self.mappings[0].tensor is not None
        return self.mappings[0].tensor.dtype

    def __getitem__(self, index: Any) -> np.ndarray:
        index = index if isinstance(index, tuple) else (index,)
        if not self.mappings[0].index:
            return _open_tensor(self.mappings[0])[index]
        layer_index, rest = index[0], index[1:]
        if not isinstance(layer_index, slice):
            return np.asarray(self)[index]
        layers = [_open_tensor(mapping)[rest] for mapping in self.mappings[layer_index]]
        return np.stack(layers) if layers else np.asarray(self)[index]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        layers = [_open_tensor(mapping) for mapping in self.mappings]
        array = np.stack(layers) if self.mappings[0].index else layers[0]
        return np.array(array, dtype or self.dtype)


def _open_tensor(mapping: TensorMapping) -> np.ndarray:
    """Return a memory-mapped tensor in our order; indexing it reads the data."""
    assert mapping.tensor is not None
    tensor, rule = mapping.tensor, mapping.rule
    with os.fdopen(open_to_read(tensor), "rb") as file:
        data = np.memmap(file, tensor.dtype, "r", tensor.begin, tensor.shape)
    return data.reshape(rule.view).transpose(rule.order)


def read_vision(
    file: str | Path, config: VisionConfig, new_head: bool = False
) -> dict[str, FileArray | None]:
    """Return {path: array} of a file's parameters and statistics; slices are read when indexed.

    `with_weights` turns it into a state.

    Args:
        file: A safetensors file with torchvision's names, as `safetensors.torch.save_file` writes.
        config: The configuration of the model.
        new_head: Whether to leave out arrays with a class dimension: None, initialised from the
            seed. A segmentation model may then begin from a ResNet classifier, too.

    Raises:
        ValueError: The file is no safetensors file, or not of this model: lists all mismatches.

    Example:
        >>> config = ResNetConfig.preset("resnet50")  # doctest: +SKIP
        >>> weights = read_vision("resnet50.safetensors", config)  # doctest: +SKIP
    """
    return run_on_all(lambda: _open_arrays(Path(file), config, new_head))


def _open_arrays(path: Path, config: VisionConfig, new_head: bool) -> dict[str, FileArray | None]:
    """Return the arrays of a file by path, after checking that all of them fit."""
    _refuse_pickles(path)
    tensors, shapes = read_header(path), array_shapes(config)
    is_backbone = _is_backbone(config, tensors)
    if is_backbone:
        if not new_head:
            raise ValueError(
                f"{quote(path)} is of a ResNet alone, without what segments. To keep the backbone "
                f"and draw the rest anew: {NEW_HEAD}."
            )
        fits = lambda name: not name.startswith("fc.")
        tensors = {f"{BACKBONE}{name}": t for name, t in tensors.items() if fits(name)}
    mappings = list(vision_table(config).expand())
    check_coverage(mappings, shapes)
    mappings = [replace(mapping, tensor=tensors.get(mapping.name)) for mapping in mappings]
    is_random = lambda p: _is_head(p.path) or (is_backbone and not p.name.startswith(BACKBONE))
    required = [mapping for mapping in mappings if not (new_head and is_random(mapping))]
    _check_tensors(path, mappings, required, tensors)
    arrays: dict[str, FileArray | None] = dict.fromkeys(shapes)
    for param, param_mappings in group_by_path(required).items():
        arrays[param] = FileArray(sorted(param_mappings, key=lambda p: p.index), shapes[param])
    return arrays


def _is_backbone(config: VisionConfig, tensors: Mapping[str, FileTensor]) -> bool:
    """Return whether a file has only the ResNet backbone of a segmentation model."""
    segments = isinstance(config, DeepLabConfig)
    return segments and "conv1.weight" in tensors and f"{BACKBONE}conv1.weight" not in tensors


def _refuse_pickles(path: Path) -> None:
    """Refuse a torch pickle by its name, before any of it is read."""
    if any(path.match(pattern) for pattern in PICKLES):
        raise ValueError(
            f"{quote(path)} is a pickle, which runs code when it is read: it is never opened. "
            f"Where torch is: safetensors.torch.save_file(torch.load({quote(path.name)!r}, "
            f"weights_only=True), {quote(path.with_suffix('.safetensors').name)!r}); give that."
        )
    check_ordinary(path)


def _is_head(path: str) -> bool:
    return path.startswith(tuple(f"{head}/" for head in HEADS))


def _check_tensors(
    path: Path,
    mappings: Sequence[TensorMapping],
    required: Sequence[TensorMapping],
    tensors: Mapping[str, FileTensor],
) -> None:
    """Refuse tensors that are not those of the model; a mismatch of only the head says so."""
    known = {mapping.name for mapping in mappings}
    unused = [t for name, t in tensors.items() if name not in known and _is_read(name)]
    body = [p for p in required if not _is_head(p.path)]
    lines = find_mismatches(body, unused)
    if lines:
        raise ValueError(
            f"the tensors of {quote(path)} are not those of the model:\n  "
            + "\n  ".join(lines)
            + "\nNothing was read. Give the weights of a model of this shape, or the shape "
            "of the one that the file is of."
        )
    heads = find_mismatches([p for p in required if _is_head(p.path)], ())
    if heads:
        raise ValueError(
            f"{quote(path)} is of a model with other classes:\n  "
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
    """Return a new state with given weights: `hfjax.init`, plus the statistics.

    Args:
        layout: The layout of the state.
        weights: What `read_vision` returned: {path: array or None}; None: drawn from the seed.
        seed: An integer, as `hfjax.init` takes it.
        schedule: The pipeline schedule of the training step.
    """
    params = {path: x for path, x in weights.items() if path in layout.arrays}
    state = init(layout, seed=seed, schedule=schedule, parameters=params)
    variables = flatten(state.variables)
    statistics = {path: x for path, x in weights.items() if path not in params and x is not None}
    if unknown := [path for path in statistics if path not in variables]:
        raise ValueError(
            f"{unknown[0]} is neither a parameter nor a variable of the layout's model: the "
            "weights are of another shape or norm than the layout."
        )
    new_variables = {path: _place_like(x, variables[path]) for path, x in statistics.items()}
    return replace(state, variables=nest({**variables, **new_variables}))


def _place_like(x: Any, like: jax.Array) -> jax.Array:
    """Return an array with the sharding and dtype of another."""
    read_slice = lambda index: np.array(x[index], like.dtype)
    return jax.make_array_from_callback(like.shape, like.sharding, read_slice)


def write_vision(
    file: str | Path,
    layout: Layout,
    state: State,
    config: VisionConfig,
    like: str | Path | None = None,
) -> None:
    """Write a state as one safetensors file, for torchvision's load_state_dict.

    Args:
        file: The path. An existing file is replaced once the new one is complete.
        layout: The layout of the state. All processes call this.
        state: The state whose parameters and statistics are written.
        config: The configuration of the model.
        like: The file that the state began from: its dtypes are kept, and its batch counts
            continued. None: the dtypes of the state, counts from 0.
    """
    arrays = full_array({**full_precision_params(layout, state), **_statistics(state, config)})
    steps = 0 if isinstance(config, ConvNetConfig) and config.norm == "frozen" else int(state.step)
    like_tensors = {} if like is None else read_header(Path(like))
    run_on_first(lambda: _write_file(Path(file), arrays, config, like_tensors, steps))


def _statistics(state: State, config: VisionConfig) -> Flat:
    """Return the statistics of a state that a file contains."""
    shapes = array_shapes(config)
    return {path: x for path, x in flatten(state.variables).items() if path in shapes}


def _write_file(
    path: Path, arrays: Flat, config: VisionConfig, like: Mapping[str, FileTensor], steps: int
) -> None:
    by_name = dict(named_tensors(arrays, config, like, steps))
    tensors = {name: by_name[name] for name in (*(n for n in like if n in by_name), *by_name)}
    header, _ = header_of({name: (x.dtype, x.shape) for name, x in tensors.items()})
    with atomic_file(path) as file:
        file.write(header)
        for x in tensors.values():
            file.write(np.ascontiguousarray(x).tobytes())


def named_tensors(
    arrays: Flat,
    config: VisionConfig,
    like: Mapping[str, FileTensor] = MappingProxyType({}),
    steps: int = 0,
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the name and array of each tensor of a file, in torch's dimension order."""
    mappings = list(vision_table(config).expand())
    check_coverage(mappings, {path: x.shape for path, x in arrays.items()})
    for mapping in mappings:
        rule = mapping.rule
        block = arrays[mapping.path][mapping.index]
        array = block.transpose(np.argsort(rule.order)).reshape(rule.shape)
        yield (
            mapping.name,
            array.astype(like[mapping.name].dtype if mapping.name in like else block.dtype),
        )
        prefix, _, last = mapping.name.rpartition(".")
        if last == VARIANCE:
            counter = f"{prefix}.{COUNTER}"
            num_batches = read_rows(like[counter], 0, 1).item() if counter in like else 0
            yield counter, np.array(num_batches + steps, np.int64)
