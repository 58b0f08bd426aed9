"""What the two readers of copies share: a copy between memories, and where a value lies."""

import dataclasses
from collections.abc import Sequence

from hfjax.analysis.hlo import Transfer

TO_HOST, TO_DEVICE = "to host", "to device"
Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Copy(Transfer):
    """A copy between the memories of device and host; its kind is its direction."""

    whole: bool = False  # the shape is of the whole array: how it is split is not said


@dataclasses.dataclass(frozen=True)
class Placement:
    """In which memory a value lies, and in how many pieces each dimension is split.

    `split` is None where the program does not say. Within a shard_map over all axes nothing is
    split further.
    """

    host: bool = False
    split: Shape | None = None

    def copied(self, to_host: bool, dtype: str, shape: Shape) -> tuple["Placement", list[Copy]]:
        """Return where the value lies after it was sent, and the copy, if it was elsewhere."""
        there = dataclasses.replace(self, host=to_host)
        if self.host == to_host:
            return there, []
        local = _local(shape, self.split)
        kind = TO_HOST if to_host else TO_DEVICE
        return there, [Copy(kind, (), dtype, local or shape, whole=local is None)]


def _local(shape: Shape, split: Shape | None) -> Shape | None:
    """Return the shape on one device, None if it is not known."""
    if split is None or len(split) != len(shape):
        return None
    return tuple(-(-size // pieces) for size, pieces in zip(shape, split, strict=True))


def entered(split: Shape | None, outer: Shape, inner: Shape) -> Shape | None:
    """Return how what enters a shard_map is split further in there, along its other axes.

    >>> entered((2, 4), (8, 8), (4, 8)), entered(None, (8,), (4,))
    ((1, 4), None)
    """
    if split is None or 0 in inner:
        return None
    manual = (a // b for a, b in zip(outer, inner, strict=True))
    return tuple(max(pieces // own, 1) for pieces, own in zip(split, manual, strict=True))


def left(split: Shape | None, inner: Shape, outer: Shape) -> Shape | None:
    """Return how what leaves a shard_map is split, along all axes.

    >>> left((1, 4), (4, 8), (8, 8))
    (2, 4)
    """
    if split is None or 0 in inner:
        return None
    return tuple(p * (b // a) for p, a, b in zip(split, inner, outer, strict=True))


def constrained(new: Sequence[int | None], old: Shape | None) -> Shape | None:
    """Return the split of a constraint; what it leaves open (None) stays as it was.

    >>> constrained((2, None), (1, 4)), constrained((2, None), None)
    ((2, 4), None)
    """
    pairs = zip(new, old or (None,) * len(new), strict=True)
    split = [old if pieces is None else pieces for pieces, old in pairs]
    return None if None in split else tuple(pieces for pieces in split if pieces is not None)


def follow(operands: Sequence[tuple[Placement, Shape]], shape: Shape) -> Placement:
    """Return where a result of this shape lies: on the host if an operand does.

    Arithmetic is done on the device only, so what reads the host moves or views it. A result is
    split as the first operand of which it is a copy, a slice or a view.
    """
    host = any(lies.host for lies, _ in operands)
    splits = (_viewed(lies.split, old, shape) for lies, old in operands)
    return Placement(host, next((split for split in splits if split is not None), None))


def _viewed(split: Shape | None, old: Shape, new: Shape) -> Shape | None:
    """Return how a view or slice of an array is split, None if that cannot be told.

    >>> _viewed((1, 4), (6, 8), (1, 8)), _viewed((1, 4), (1, 8), (8,)), _viewed((4,), (8,), (2,))
    ((1, 4), (4,), None)
    """
    if split is None or not old:
        return None
    if len(old) == len(new):
        pairs = zip(old, new, split, strict=True)
        return split if all(a == b or pieces == 1 for a, b, pieces in pairs) else None
    kept = [(size, pieces) for size, pieces in zip(old, split, strict=True) if size > 1]
    if [size for size, _ in kept] != [size for size in new if size > 1]:
        return None
    pieces = iter(pieces for _, pieces in kept)
    return tuple(next(pieces) if size > 1 else 1 for size in new)
