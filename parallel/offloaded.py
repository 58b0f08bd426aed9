"""The report of an offload: what layers keep for the backward pass, and what of it goes."""

import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field

from hfjax.parallel.offload import Offload, Share, Tensor
from hfjax.rows import aligned
from hfjax.sizes import human


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
    seen: set[str] = field(default_factory=set)  # names that layers gave, where remat asks for them

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
