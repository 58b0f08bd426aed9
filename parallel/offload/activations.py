"""Which residuals of layers are offloaded to the host, and a report of them.

A byte ratio takes full tensors, the largest first, and splits one more where that is free (as
haiscale's `CPUOffload` does); names and matmuls select tensors.
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

from hfjax.parallel.jaxprs.saved_tensor import Tensor, parse_names
from hfjax.parallel.offload.host_memory import largest_first
from hfjax.utils.tables import align, human

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Offload:
    """Which residuals of layers are kept in host memory.

    Give one of `ratio`, `names` and `dots`. Weights are never among them. As text: "0.3",
    "names:qkv,mlp_up", "dots".

    Attributes:
        ratio: A fraction of the bytes from 0 to 1; in a pipeline the same on all stages.
        names: Tensors with these names, given by `jax.ad_checkpoint.checkpoint_name`.
        dots: Whether to offload the results of matmuls.
        tag: Their name in the report.

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
        object.__setattr__(self, "names", parse_names(self.names, "offload"))
        if not isinstance(self.dots, bool) or not (isinstance(self.tag, str) and self.tag):
            raise ValueError(f"{self}: dots is true or false, and the tag a word.")
        choices = [self.ratio is not None, bool(self.names), self.dots]
        if sum(choices) != 1:
            raise ValueError(
                f"{self}: give one of ratio (a fraction of the bytes, for instance 0.3), names "
                "(of jax.ad_checkpoint.checkpoint_name) and dots=True."
            )
        if self.ratio is not None and not _is_fraction(self.ratio):
            raise _ratio_error(self.ratio)

    @classmethod
    def of(cls, given: Any) -> "Offload":
        """Return the Offload of a fraction, a text, or an Offload.

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
        kind, _, detail = given.partition(":")
        if kind == "names" and detail:
            return cls(names=detail)
        if given == "dots":
            return cls(dots=True)
        try:
            return cls(ratio=float(given))
        except ValueError:
            raise _ratio_error(given) from None

    @property
    def idle(self) -> bool:
        """Whether nothing is to be offloaded."""
        return self.ratio == 0


@dataclass(frozen=True)
class ToHost:
    """How much of a tensor is offloaded: the first `count` along `dim` (`dim` None: all of it)."""

    dim: int | None = None
    count: int = 0

    def bytes_of(self, tensor: Tensor) -> int:
        """Return how many bytes of the tensor are offloaded."""
        if self.dim is None:
            return tensor.bytes
        return tensor.bytes // tensor.shape[self.dim] * self.count


def _is_fraction(ratio: Any) -> bool:
    number = isinstance(ratio, Real) and not isinstance(ratio, bool)
    return number and 0 <= float(ratio) <= 1


def _ratio_error(value: object) -> ValueError:
    """Return the error for what is no fraction, or a list of fractions for several stages."""
    if ratios := parse_ratios(value):
        return ValueError(
            f"offload={value!r}: one ratio is expected, the same for all stages of a pipeline. "
            f"Give the largest of these, offload={max(ratios):g}."
        )
    return ValueError(
        f"offload={value!r}: a fraction of the bytes from 0 to 1, names:a,b, dots, or a "
        "hfjax.Offload. For the least that fits a memory ask "
        "`hfjax memory --offload.activations auto`."
    )


def parse_ratios(value: Any) -> list[float]:
    """Return the fractions of a list, or of a text with commas; [] for anything else."""
    items = value.split(",") if isinstance(value, str) else value
    try:
        ratios = [float(item) for item in items]
    except (TypeError, ValueError):
        return []
    return ratios if len(ratios) > 1 and all(map(_is_fraction, ratios)) else []


Share = dict[int, ToHost]  # index of a tensor -> how much of it is offloaded
HostSplit = tuple[list[jax.Array], list[jax.Array]]  # of a tensor: host part, device part


def split(share: Share, arrays: Iterable[jax.Array]) -> Iterator[HostSplit]:
    """Yield the host part and the device part of each array."""
    for i, x in enumerate(arrays):
        portion = share.get(i)
        if portion is None or portion.dim is None:
            yield ([], [x]) if portion is None else ([x], [])
        else:
            take = partial(lax.slice_in_dim, x, axis=portion.dim)
            yield [take(0, portion.count)], [take(portion.count, None)]


def join(share: Share, halves: Iterable[HostSplit]) -> list[jax.Array]:
    """Return the joined arrays.

    Without the barrier XLA would read one half of a fused sum of both on the host.
    """
    values = []
    for i, (on_host, on_device) in enumerate(halves):
        if len(both := [*on_host, *on_device]) > 1:
            full = jnp.concatenate(both, axis=share[i].dim)
            both = [lax.optimization_barrier(full)]
        values += both
    return values


def share_of_range(share: Share, first: int, last: int | None) -> Share:
    """Return the share of the tensors from `first` up to `last`, renumbered from 0."""
    end = max(share, default=0) + 1 if last is None else last
    return {i - first: portion for i, portion in share.items() if first <= i < end}


def select_tensors(offload: Offload, tensors: Sequence[Tensor], may_split: bool) -> Share:
    """Return which tensors are offloaded to the host."""
    if offload.names:
        names = set(offload.names)
        return {i: ToHost() for i, t in enumerate(tensors) if t.names & names}
    if offload.dots:
        return {i: ToHost() for i, t in enumerate(tensors) if t.operation == "dot_general"}
    assert offload.ratio is not None
    return _share_by_ratio(offload.ratio, tensors, may_split)


def _share_by_ratio(ratio: float, tensors: Sequence[Tensor], may_split: bool) -> Share:
    sizes = {i: t.bytes for i, t in enumerate(tensors) if t.bytes}
    bytes_left = ratio * sum(sizes.values())
    full_ids, rest = largest_first(sizes, bytes_left + 0.5)
    chosen, bytes_left = (
        dict.fromkeys(full_ids, ToHost()),
        bytes_left - sum(sizes[i] for i in full_ids),
    )
    if rest and may_split:
        chosen |= _split_one(bytes_left, rest, tensors)
    elif rest and bytes_left > sizes[rest[-1]] / 2:
        chosen[rest[-1]] = ToHost()
    return chosen


def _split_one(bytes_left: float, rest: Sequence[int], tensors: Sequence[Tensor]) -> Share:
    """Return a part of one more tensor: the one that comes nearest, then the largest."""
    best, distance = {}, bytes_left
    for i in rest:
        shape = tensors[i].shape
        dim = max(range(len(shape)), key=lambda d: (shape[d], -d)) if shape else 0
        slices = shape[dim] if shape else 1
        count = min(round(bytes_left / tensors[i].bytes * slices), slices)
        remainder = abs(bytes_left - count * tensors[i].bytes / slices)
        if count and remainder < distance - 0.5:
            best, distance = {i: ToHost(dim, count) if count < slices else ToHost()}, remainder
    return best


@dataclass(frozen=True)
class ResidualEntry:
    """One residual of `times` equal layers; `host_bytes` bytes of it are offloaded."""

    tag: str
    layer: str
    tensor: Tensor
    host_bytes: int  # bytes, of each
    times: int


@dataclass
class OffloadReport:
    """The residuals that layers keep for a microbatch, per device, and what is offloaded.

    Sizes are not divided by tensor axes: the partitioner shards these tensors further.
    """

    offload: Offload | None = None
    entries: dict[tuple[str, int], ResidualEntry] = field(default_factory=dict)

    def add(self, layer: str, times: int, tensors: Iterable[Tensor], chosen: Share) -> None:
        """Record a layer's residuals and what is offloaded; tracing it again changes nothing."""
        tag = self.offload.tag if self.offload else "layers"
        for i, t in enumerate(tensors):
            portion = chosen.get(i)
            host_bytes = 0 if portion is None else portion.bytes_of(t)
            self.entries[layer, i] = ResidualEntry(tag, layer, t, host_bytes, times)

    @property
    def total_bytes(self) -> int:
        """The bytes that layers keep for the backward pass."""
        return sum(entry.tensor.bytes * entry.times for entry in self.entries.values())

    @property
    def host_bytes(self) -> int:
        """The bytes that are sent to the host, and back."""
        return sum(entry.host_bytes * entry.times for entry in self.entries.values())

    @property
    def ratio(self) -> float:
        """The fraction that is offloaded."""
        return self.host_bytes / max(self.total_bytes, 1)

    def check(self) -> None:
        """Refuse, or warn of, an offload that does nothing."""
        offload = self.offload
        if offload is None or offload.idle:
            return
        if not self.entries:
            raise ValueError(
                f"{offload}: the layers keep nothing for the backward pass, so there is nothing to "
                "offload. Do they depend on what they are given?"
            )
        names = {name for entry in self.entries.values() for name in entry.tensor.names}
        if missing := sorted(set(offload.names) - names):
            raise ValueError(
                f"offload names={offload.names}: no tensor that is kept is named {missing[0]!r}; "
                f"named are {', '.join(sorted(names)) or 'none'}. Name it in the layer, "
                'x = jax.ad_checkpoint.checkpoint_name(x, "…"); what remat computes again is not '
                "kept."
            )
        if not self.host_bytes:
            least = min(entry.tensor.bytes for entry in self.entries.values())
            small = f"the smallest tensor has {least}. Raise the ratio, or name tensors."
            none = "none of them is a matrix product as it was made. Use a ratio, or names."
            warnings.warn(
                f"{offload} moves nothing: {self.total_bytes} bytes are kept, "
                + (none if offload.dots else small),
                stacklevel=2,
            )

    def __str__(self) -> str:
        if not self.entries:
            return f"{self.offload}: what layers keep is known once a gradient was traced."
        lines = [("layer", "times", "tensor", "made by", "kept", "on the host")]
        for entry in sorted(
            self.entries.values(), key=lambda entry: -entry.tensor.bytes * entry.times
        ):
            t = entry.tensor
            producer = t.operation + "".join(f" {name!r}" for name in sorted(t.names))
            shape = f"{t.dtype}[{','.join(map(str, t.shape))}]"
            lines.append(
                (
                    entry.layer,
                    str(entry.times),
                    shape,
                    producer,
                    human(t.bytes),
                    human(entry.host_bytes),
                )
            )
        ratio = self.offload.ratio if self.offload else None
        ratio_text = "" if ratio is None else f" (asked: {ratio})"
        summary = (
            f"{human(self.host_bytes)} of {human(self.total_bytes)} on the host: "
            f"{self.ratio:.1%}{ratio_text}"
        )
        return "\n".join([*align(lines, numbers=(1, 4, 5)), summary])
