"""Example = f(number), of any grain.MapDataset: dictionaries of arrays, all with the same shapes.

Every example is compared with the first before examples are stacked, so that an error names its
number and its key.
"""

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import grain
import numpy as np

from hfjax.data.examples import ArrayDict
from hfjax.utils.tables import quote

ENDLESS = 1 << 48  # no data set has so many examples: it repeats without end
MASK = "mask"
NUM_CHECKED = 4  # examples whose content identifies a data set
_GAPS = (
    "Which examples a filter keeps is known only once they are read, so that a process could not "
    "number its own. Choose before: keep = [i for i in range(len(data)) if wanted(data[i])], then "
    "grain.MapDataset.source(keep).map(data.__getitem__)."
)


class ArraySpec(NamedTuple):
    """Shape and dtype of one array of an example."""

    shape: tuple[int, ...]
    dtype: np.dtype

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


class GrainExamples:
    """The examples of a data set; with `with_mask` each has a mask, zeros for a padding example.

    Example i is `dataset[i]`, also beyond its length: then it is of a later epoch.

    Args:
        dataset: A grain.MapDataset whose examples are dictionaries of arrays.
        with_mask: Whether to add the array "mask", a 1, to examples that have none.
    """

    def __init__(self, dataset: Any, with_mask: bool = False) -> None:
        check_map_dataset(dataset, "from_grain")
        self._dataset, self._with_mask = dataset, with_mask
        self.specs: dict[str, ArraySpec] = {}
        first, second = self._read(0), self._read(0)
        self.specs = specs_of(first)
        self.first: ArrayDict = first
        _check_repeatable(first, second)

    def example(self, index: int, position: int) -> ArrayDict:
        """Return the example at a position of the stream; the epoch is in the position."""
        arrays = self._read(position)
        if not self._with_mask or MASK in arrays:
            return arrays
        return {**arrays, MASK: np.ones((), np.float32)}

    def padding_example(self) -> ArrayDict:
        """Return an example of zeros."""
        mask = {MASK: np.zeros((), np.float32)} if self._with_mask else {}
        return mask | _map_arrays(np.zeros_like, self.first)

    def collate(self, examples: list[ArrayDict]) -> ArrayDict:
        """Return examples as a batch."""
        return _stack(examples)

    def content(self) -> dict[str, Any]:
        """Return what identifies the data set, as far as its first examples show it, as JSON."""
        arrays = {path: str(spec) for path, spec in self.specs.items()}
        count = min(NUM_CHECKED, len(self._dataset))
        crc32 = 0
        for index in range(count):
            for path, x in flat_arrays(self._read(index)):
                crc32 = zlib.crc32(path.encode() + _digest(x), crc32)
        return {"examples": len(self._dataset), "arrays": arrays, "crc32": crc32}

    def _read(self, index: int) -> ArrayDict:
        try:
            raw = self._dataset[index]
        except Exception as error:
            if str(error).startswith(f"example {index}:"):
                raise
            epoch = f" (of a later epoch: it has {n})" if index >= (n := len(self._dataset)) else ""
            error.add_note(f"The data set raises this for its example {index}{epoch}.")
            raise
        arrays = _as_arrays(raw, index)
        if self.specs:
            _check_like_first(specs_of(arrays), self.specs, index)
        return arrays


# -- the data set -------------------------------------------------------------------------

_FILTER, _BATCH = (
    type(dataset)
    for dataset in (grain.MapDataset.range(1).filter(bool), grain.MapDataset.range(1).batch(1))
)
# Whether an object is of a kind -> what to do with it in place of a MapDataset.
_KINDS: tuple[tuple[Callable[[Any], bool], str], ...] = (
    (lambda x: x is None, "Return it: is a `return` missing?"),
    (
        lambda x: isinstance(x, grain.IterDataset),
        "It is read in order only, so it can neither go on at a number nor be shared among "
        "processes. Give the MapDataset from before .to_iter_dataset(), without .batch().",
    ),
    (
        lambda x: isinstance(x, grain.DataLoader),
        "hfjax batches, shares and resumes itself. Give what it reads: "
        "grain.MapDataset.source(data_source).map(…).",
    ),
    (
        lambda x: hasattr(x, "__next__"),
        "An iterator can neither go on at a number nor be shared among processes. Give what has "
        "len(data) and data[i]: grain.MapDataset.source(data).",
    ),
    (lambda x: isinstance(x, Mapping), "Give one data set."),
    (
        lambda x: hasattr(x, "__len__") and hasattr(x, "__getitem__"),
        "It has examples by number, so make one of it: grain.MapDataset.source(data).",
    ),
    (callable, "Call it."),
)


def check_map_dataset(dataset: Any, origin: str) -> None:
    """Refuse anything but a data set with examples, without gaps and not batched.

    Args:
        dataset: What is to be a grain.MapDataset.
        origin: Where it is from, for messages.
    """
    if not isinstance(dataset, grain.MapDataset):
        advice = next((text for fits, text in _KINDS if fits(dataset)), "")
        kind = "None" if dataset is None else f"a {type(dataset).__name__}"
        raise ValueError(
            f"{origin}: a grain.MapDataset is expected, found {kind}. {advice}".strip()
        )
    if not len(dataset):
        raise ValueError(f"{origin}: the data set has no example, at least one is needed.")
    if isinstance(dataset, _BATCH):
        raise ValueError(
            f"{origin}: the data set is batched already, by .batch(). Leave that out: hfjax makes "
            "the batches, the same on any number of processes."
        )
    if any(isinstance(node, _FILTER) for node in _grain_nodes(dataset)):
        raise ValueError(f"{origin}: the data set has a .filter(), which leaves gaps. {_GAPS}")


def _grain_nodes(dataset: grain.MapDataset) -> Iterator[grain.MapDataset]:
    """Yield a data set and those that it is made of; of a user's own class only itself."""
    yield dataset
    if type(dataset).__module__.partition(".")[0] == "grain":  # another may fill gaps
        for parent in dataset.parents:
            yield from _grain_nodes(parent)


# -- one example --------------------------------------------------------------------------


def _as_arrays(raw: Any, index: int, path: str = "") -> ArrayDict:
    """Return an example as nested dictionaries of arrays; refuse anything else by its key."""
    if raw is None and not path:
        raise ValueError(f"example {index} is None: it is missing. {_GAPS}")
    if not isinstance(raw, Mapping) or not raw:
        kind = "an empty dictionary" if isinstance(raw, Mapping) else f"a {type(raw).__name__}"
        raise ValueError(
            f"example {index}{path and f': {path!r}'} is {kind}: a dictionary of arrays is "
            'expected. Name what it holds: .map(lambda x: {"x": x}).'
        )
    arrays: dict[str, Any] = {}
    for key in raw:
        if not isinstance(key, str):
            raise ValueError(
                f"example {index} has the key {key!r}: keys are texts, as 'tokens' or 'image'."
            )
        name = f"{path}/{key}" if path else key
        is_dict = isinstance(raw[key], Mapping)
        arrays[key] = (
            _as_arrays(raw[key], index, name) if is_dict else _array(raw[key], index, name)
        )
    return arrays


def _array(value: Any, index: int, name: str) -> np.ndarray:
    """Return a value as an array of numbers."""
    advice = "Tokenize text and decode images in the data set (.map), and leave out the rest."
    if isinstance(value, list | tuple):
        advice = "Convert it: np.asarray(…)."
    elif isinstance(value, np.ndarray | np.generic | bool | int | float | complex) or hasattr(
        value, "__array__"
    ):
        array = np.asarray(value)
        if array.dtype.kind in "biufc" or array.dtype.type.__module__ == "ml_dtypes":
            return array
        advice = f"Its dtype is {array.dtype}."
    raise ValueError(
        f"example {index}: {quote(repr(name))} is a {type(value).__name__}: an array of numbers is "
        f"expected. {advice}"
    )


def flat_arrays(arrays: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path and the array of each entry, sorted: ("inputs/tokens", …)."""
    for key in sorted(arrays):
        if isinstance(arrays[key], Mapping):
            yield from flat_arrays(arrays[key], f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", arrays[key]


def specs_of(arrays: ArrayDict) -> dict[str, ArraySpec]:
    """Return shape and dtype of each array of an example, by path.

    >>> {path: str(spec) for path, spec in specs_of({"tokens": np.zeros(33, np.int32)}).items()}
    {'tokens': 'int32[33]'}
    """
    return {path: ArraySpec(x.shape, x.dtype) for path, x in flat_arrays(arrays)}


def describe_specs(specs: Mapping[str, ArraySpec]) -> str:
    """Return the arrays of an example in words.

    >>> describe_specs({"x": ArraySpec((2,), np.dtype("float32"))})
    'x float32[2]'
    """
    return ", ".join(f"{path} {spec}" for path, spec in specs.items())


def _map_arrays(function: Callable[[Any], Any], arrays: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _map_arrays(function, x) if isinstance(x, Mapping) else function(x)
        for key, x in arrays.items()
    }


def _stack(examples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    batch: dict[str, Any] = {}
    for key, x in examples[0].items():
        column = [example[key] for example in examples]
        batch[key] = _stack(column) if isinstance(x, Mapping) else np.stack(column)
    return batch


# -- comparisons --------------------------------------------------------------------------


def _check_like_first(
    specs: Mapping[str, ArraySpec], first: Mapping[str, ArraySpec], index: int
) -> None:
    """Refuse an example that cannot be stacked on the first."""
    if specs == first:
        return
    for path in first:
        if path not in specs:
            raise ValueError(
                f"example {index} has no {path!r}, example 0 has. Give all examples the same keys: "
                f"{', '.join(first)}."
            )
    for path, spec in specs.items():
        if path not in first:
            raise ValueError(
                f"example {index} has {path!r}, example 0 has not. Give all examples the same "
                f"keys: {', '.join(first)}."
            )
        if spec != first[path]:
            same_shape = spec.shape == first[path].shape
            advice = (
                f"Give both the same dtype: x.astype(np.{first[path].dtype})."
                if same_shape
                else "Pad or crop all to one shape in the data set (.map), and mask what is padded."
            )
            raise ValueError(
                f"example {index}: {path!r} is {spec}, that of example 0 is {first[path]}. {advice}"
            )


def _check_repeatable(first: ArrayDict, second: ArrayDict) -> None:
    """Refuse a data set whose example 0 differs when it is read again."""
    for (path, x), (_, y) in zip(flat_arrays(first), flat_arrays(second), strict=True):
        if x.shape != y.shape or x.tobytes() != y.tobytes():
            raise ValueError(
                f"example 0: {path!r} differs when it is read again. Processes and a resumed run "
                "read examples by number, so each must always be the same. Draw what is random by "
                "number: dataset.seed(0).random_map(lambda x, rng: …)."
            )


def _digest(x: np.ndarray) -> bytes:
    """Return what identifies an array: its bytes, or of floats three digits of their mean size.

    The last bits of floats that were computed depend on the machine, and a run may move.
    """
    if x.dtype.kind in "biu":
        return np.ascontiguousarray(x).tobytes()
    return f"{np.abs(x).astype(np.float64).sum():.2e}".encode()
