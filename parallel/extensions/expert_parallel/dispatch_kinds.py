"""How tokens get to experts, and what each choice sends.

For one mixture of G groups of T tokens on a device, k choices of each, E experts of capacity C,
width D, e bytes a number, w bytes a weight (4: routers compute in float32); N devices among which
the experts are spread. Sent by each device:

- all_to_all: 2 (N - 1) / N · G E C D e forward, and the same backward, whatever was chosen.
- gather: (N - 1) G (2 T D e + 4 T k + w T k) forward: tokens there and back, where each choice
  goes, and what it weighs; backward (N - 1) G (2 T D e + w T k).

Without a capacity (`capacity=None`) only a gather can: a device cannot know how many tokens will
come. A gather sends less where there are fewer devices than choices.

A layer that is computed again (remat="full") sends part of this again: both ways of an all_to_all,
for the gradient of a weight needs what the experts made; of a gather what goes there, not the way
back: (N - 1) G (T D e + 4 T k + w T k).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from hfjax.parallel.settings import DISPATCH
from hfjax.utils.tables import aligned, human


@dataclass(frozen=True)
class MixtureCall:
    """One mixture that a model asks for, of a microbatch on one device."""

    devices: int
    groups: int
    tokens: int  # of a group
    k: int
    places: int | None  # of all experts together, of a group; None: without a capacity
    width: int
    itemsize: int
    weight: int  # bytes of a weight

    def bytes(self, dispatch: str) -> tuple[int, int]:
        """Return the bytes that a device sends: forward, backward."""
        n, one_way = self.devices, self.groups * self.width * self.itemsize
        if dispatch == "all_to_all":
            assert self.places is not None
            each = 2 * (n - 1) * one_way * self.places // n
            return each, each
        weights = self.groups * self.tokens * self.k * self.weight
        numbers = self.groups * self.tokens * self.k * 4
        there_and_back = 2 * one_way * self.tokens
        return (n - 1) * (there_and_back + numbers + weights), (n - 1) * (there_and_back + weights)

    def again(self, dispatch: str) -> int:
        """Return the bytes that are sent again if the layer is computed again."""
        forward, _ = self.bytes(dispatch)
        back = (self.devices - 1) * self.groups * self.tokens * self.width * self.itemsize
        return forward if dispatch == "all_to_all" else forward - back

    def refuses(self, dispatch: str) -> str | None:
        """Return why tokens cannot go so, or None."""
        if dispatch == "all_to_all" and self.places is None:
            return "without a capacity no device knows how many tokens will come"
        return None


@dataclass(frozen=True)
class DispatchChoice:
    """How tokens get to the experts of a step, and what each way sends: print it."""

    calls: tuple[tuple[MixtureCall, str], ...]
    asked: str = "auto"

    def __str__(self) -> str:
        lines = [("dispatch", "forward", "backward", "both", "computed again", "")]
        for call, chosen in self.calls:
            lines += [self._line(call, way, chosen) for way in DISPATCH]
        devices = self.calls[0][0].devices if self.calls else 1
        head = f"experts on {devices} devices; bytes that each sends for one layer and microbatch:"
        return "\n".join([head, *aligned(lines)])

    __repr__ = __str__

    def _line(self, call: MixtureCall, way: str, chosen: str) -> tuple[str, ...]:
        if why := call.refuses(way):
            return (way, "-", "-", "-", "-", f"cannot: {why}")
        both = call.bytes(way)
        shown = (human(n) for n in (*both, sum(both), call.again(way)))
        why = "it sends least" if self.asked == "auto" else "asked for"
        return (way, *shown, f"chosen: {why}" if way == chosen else "")


def choose(dispatch: str, call: MixtureCall) -> str:
    """Return the dispatch that is asked for; auto: the one that sends the fewest bytes."""
    possible: Sequence[str] = [way for way in DISPATCH if call.refuses(way) is None]
    if dispatch == "auto":
        return min(possible, key=lambda way: sum(call.bytes(way)))
    if why := call.refuses(dispatch):
        raise ValueError(
            f'dispatch="{dispatch}": {why}. Give the mixture a capacity (MoE(capacity=1.25)), or '
            'choose dispatch="gather".'
        )
    return dispatch
