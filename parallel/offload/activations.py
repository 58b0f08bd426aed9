"""Which residuals of layers wait on the host, and the report of it.

A byte ratio takes whole tensors, the largest first, and cuts one more where that is free (as
haiscale's `CPUOffload` does); names and products select tensors.
"""

import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from numbers import Real
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from hfjax.parallel.jaxprs.program import Tensor
from hfjax.parallel.offload.host_memory import largest_first
from hfjax.parallel.remat import names_of
from hfjax.utils.tables import aligned, human

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Offload:
    """Which of the tensors that layers keep for the backward pass wait in host memory.

    Give one of `ratio`, `names` and `dots`. Weights are never among them. As words: "0.3",
    "names:qkv,mlp_up", "dots".

    Attributes:
        ratio: A fraction of the bytes from 0 to 1; of a pipeline the same on all stages.
        names: Those that `jax.ad_checkpoint.checkpoint_name` named so.
        dots: Whether the results of matrix products go.
        tag: What the report calls them.

    Example:
        >>> import hfjax
        >>> hfjax.Offload.of("names:qkv,mlp_up").names
        ('qkv', 'mlp_up')
    """

    ratio: float | None = None
    names: str | tuple[str, ...] = ()
    dots: bool = False
    tag: str = "layers"

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", names_of(self.names, "offload"))
        if not isinstance(self.dots, bool) or not (isinstance(self.tag, str) and self.tag):
            raise ValueError(f"{self}: dots is true or false, and the tag a word.")
        given = [self.ratio is not None, bool(self.names), self.dots]
        if sum(given) != 1:
            raise ValueError(
                f"{self}: give one of ratio (a fraction of the bytes, for instance 0.3), names "
                "(of jax.ad_checkpoint.checkpoint_name) and dots=True."
            )
        if self.ratio is not None and not _is_fraction(self.ratio):
            raise _refused(self.ratio)

    @classmethod
    def of(cls, given: Any) -> "Offload":
        """Return what is meant by a fraction, by words, or by an Offload.

        Args:
            given: An Offload (returned as it is), a number, or a text: "0.3", "names:a,b", "dots".

        Example:
            >>> import hfjax
            >>> hfjax.Offload.of("0.5").ratio
            0.5
        """
        if isinstance(given, Offload):
            return given
        if not isinstance(given, str):
            return cls(ratio=given)
        word, _, detail = given.partition(":")
        if word == "names" and detail:
            return cls(names=detail)
        if given == "dots":
            return cls(dots=True)
        try:
            return cls(ratio=float(given))
        except ValueError:
            raise _refused(given) from None

    @property
    def idle(self) -> bool:
        """Whether nothing is asked for."""
        return self.ratio == 0


@dataclass(frozen=True)
class ToHost:
    """How much of a tensor goes: the first `count` along `dim` (all of it, if `dim` is None)."""

    dim: int | None = None
    count: int = 0

    def bytes_of(self, tensor: Tensor) -> int:
        """Return how many bytes of the tensor go."""
        if self.dim is None:
            return tensor.bytes
        return tensor.bytes // tensor.shape[self.dim] * self.count


def _is_fraction(ratio: Any) -> bool:
    number = isinstance(ratio, Real) and not isinstance(ratio, bool)
    return number and 0 <= float(ratio) <= 1


def _refused(given: object) -> ValueError:
    """Return the error of what is no fraction; several of them were given for several stages."""
    if ratios := several(given):
        return ValueError(
            f"offload={given!r}: one ratio is expected, the same for all stages of a pipeline. "
            f"Give the largest of these, offload={max(ratios):g}."
        )
    return ValueError(
        f"offload={given!r}: a fraction of the bytes from 0 to 1, names:a,b, dots, or a "
        "hfjax.Offload. For the least that fits a memory ask `hfjax memory --offload auto`."
    )


def several(given: Any) -> list[float]:
    """Return the fractions of a list, or of words with commas; none if it is anything else."""
    parts = given.split(",") if isinstance(given, str) else given
    try:
        ratios = [float(part) for part in parts]
    except (TypeError, ValueError):
        return []
    return ratios if len(ratios) > 1 and all(map(_is_fraction, ratios)) else []


Share = dict[int, ToHost]  # number of a tensor -> how much of it goes
Parts = tuple[list[jax.Array], list[jax.Array]]  # of a tensor: what goes, what stays


def split(share: Share, arrays: Iterable[jax.Array]) -> Iterator[Parts]:
    """Yield what goes of each array, and what stays."""
    for i, x in enumerate(arrays):
        cut = share.get(i)
        if cut is None or cut.dim is None:
            yield ([], [x]) if cut is None else ([x], [])
        else:
            part = partial(lax.slice_in_dim, x, axis=cut.dim)
            yield [part(0, cut.count)], [part(cut.count, None)]


def join(share: Share, parts: Iterable[Parts]) -> list[jax.Array]:
    """Return the arrays again. XLA would read one half of a fused sum of both on the host."""
    values = []
    for i, (gone, stayed) in enumerate(parts):
        if len(both := [*gone, *stayed]) > 1:
            whole = jnp.concatenate(both, axis=share[i].dim)
            both = [lax.optimization_barrier(whole)]
        values += both
    return values


def of_part(share: Share, first: int, last: int | None) -> Share:
    """Return what goes of some of the tensors, numbered from 0."""
    end = max(share, default=0) + 1 if last is None else last
    return {i - first: cut for i, cut in share.items() if first <= i < end}


def share(offload: Offload, tensors: Sequence[Tensor], may_cut: bool) -> Share:
    """Return which tensors go to the host."""
    if offload.names:
        wanted = set(offload.names)
        return {i: ToHost() for i, t in enumerate(tensors) if t.names & wanted}
    if offload.dots:
        return {i: ToHost() for i, t in enumerate(tensors) if t.what == "dot_general"}
    assert offload.ratio is not None
    return _by_ratio(offload.ratio, tensors, may_cut)


def _by_ratio(ratio: float, tensors: Sequence[Tensor], may_cut: bool) -> Share:
    sizes = {i: t.bytes for i, t in enumerate(tensors) if t.bytes}
    left = ratio * sum(sizes.values())
    whole, rest = largest_first(sizes, left + 0.5)
    chosen, left = dict.fromkeys(whole, ToHost()), left - sum(sizes[i] for i in whole)
    if rest and may_cut:
        chosen |= _cut_one(left, rest, tensors)
    elif rest and left > sizes[rest[-1]] / 2:
        chosen[rest[-1]] = ToHost()
    return chosen


def _cut_one(left: float, rest: Sequence[int], tensors: Sequence[Tensor]) -> Share:
    """Return a part of one more tensor: of the one where it comes nearest, then the largest."""
    best, apart = {}, left
    for i in rest:
        shape = tensors[i].shape
        dim = max(range(len(shape)), key=lambda d: (shape[d], -d)) if shape else 0
        slices = shape[dim] if shape else 1
        count = min(round(left / tensors[i].bytes * slices), slices)
        reached = abs(left - count * tensors[i].bytes / slices)
        if count and reached < apart - 0.5:
            best, apart = {i: ToHost(dim, count) if count < slices else ToHost()}, reached
    return best


@dataclass(frozen=True)
class Moved:
    """One tensor of `times` equal layers, kept until its backward pass; `moved` bytes of it go."""

    tag: str
    layer: str
    tensor: Tensor
    moved: int  # bytes, of each
    times: int


@dataclass
class Offloaded:
    """The report: what layers keep for a microbatch, on each device, and what goes to the host.

    Tensor axes are not divided: the partitioner splits these tensors further.
    """

    offload: Offload | None = None
    rows: dict[tuple[str, int], Moved] = field(default_factory=dict)

    def add(self, layer: str, times: int, tensors: Iterable[Tensor], chosen: Share) -> None:
        """Note what a layer keeps and what of it goes; tracing it again changes nothing."""
        tag = self.offload.tag if self.offload else "layers"
        for i, t in enumerate(tensors):
            cut = chosen.get(i)
            moved = 0 if cut is None else cut.bytes_of(t)
            self.rows[layer, i] = Moved(tag, layer, t, moved, times)

    @property
    def total(self) -> int:
        """The bytes that layers keep for the backward pass."""
        return sum(row.tensor.bytes * row.times for row in self.rows.values())

    @property
    def moved(self) -> int:
        """The bytes that go to the host, and come back."""
        return sum(row.moved * row.times for row in self.rows.values())

    @property
    def ratio(self) -> float:
        """The fraction that goes to the host."""
        return self.moved / max(self.total, 1)

    def check(self) -> None:
        """Refuse, or warn of, an offload that does nothing."""
        offload = self.offload
        if offload is None or offload.idle:
            return
        if not self.rows:
            raise ValueError(
                f"{offload}: the layers keep nothing for the backward pass, so there is nothing to "
                "offload. Do they depend on what they are given?"
            )
        names = {name for row in self.rows.values() for name in row.tensor.names}
        if missing := sorted(set(offload.names) - names):
            raise ValueError(
                f"offload names={offload.names}: no tensor that is kept is named {missing[0]!r}; "
                f"named are {', '.join(sorted(names)) or 'none'}. Name it in the layer, "
                'x = jax.ad_checkpoint.checkpoint_name(x, "…"); what remat computes again is not '
                "kept."
            )
        if not self.moved:
            least = min(row.tensor.bytes for row in self.rows.values())
            small = f"the smallest tensor has {least}. Raise the ratio, or name tensors."
            none = "none of them is a matrix product as it was made. Use a ratio, or names."
            warnings.warn(
                f"{offload} moves nothing: {self.total} bytes are kept, "
                + (none if offload.dots else small),
                stacklevel=2,
            )

    def __str__(self) -> str:
        if not self.rows:
            return f"{self.offload}: what layers keep is known once a gradient was traced."
        rows = [("layer", "times", "tensor", "made by", "kept", "on the host")]
        for row in sorted(self.rows.values(), key=lambda row: -row.tensor.bytes * row.times):
            t = row.tensor
            made = t.what + "".join(f" {name!r}" for name in sorted(t.names))
            shape = f"{t.dtype}[{','.join(map(str, t.shape))}]"
            rows.append((row.layer, str(row.times), shape, made, human(t.bytes), human(row.moved)))
        asked = self.offload.ratio if self.offload else None
        of = "" if asked is None else f" (asked: {asked})"
        total = f"{human(self.moved)} of {human(self.total)} on the host: {self.ratio:.1%}{of}"
        return "\n".join([*aligned(rows, numbers=(1, 4, 5)), total])
