"""How tokens are dispatched to experts, and what each choice sends.

For one mixture of G groups of T tokens on a device, k choices of each, E experts of capacity C,
width D, e bytes a number, w bytes a weight (4: routers compute in float32); N devices over which
the experts are sharded. Sent by each device:

- all_to_all: 2 (N - 1) / N · G E C D e forward, and the same backward, whatever was chosen.
- gather: (N - 1) G (2 T D e + 4 T k + w T k) forward: tokens there and back, the expert of each
  choice, and its weight; backward (N - 1) G (2 T D e + w T k).

Without a capacity (`capacity=None`) only a gather is possible: a device cannot know how many tokens
will come. A gather sends less where there are fewer devices than choices.

A layer that is recomputed (remat="full") sends part of this again: an all_to_all both ways, since
the gradient of a weight needs the experts' outputs; a gather only the way there:
(N - 1) G (T D e + 4 T k + w T k).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from hfjax.parallel.settings import DISPATCH
from hfjax.utils.tables import align, human


@dataclass(frozen=True)
class MixtureCall:
    """One mixture that a model calls, for a microbatch on one device."""

    devices: int
    groups: int
    tokens: int  # per group
    k: int
    slots: int | None  # of all experts together, per group; None: without a capacity
    width: int
    itemsize: int
    weight_itemsize: int  # bytes of a weight

    def bytes(self, dispatch: str) -> tuple[int, int]:
        """Return the bytes that a device sends: forward, backward."""
        n, token_bytes = self.devices, self.groups * self.width * self.itemsize
        if dispatch == "all_to_all":
            assert self.slots is not None
            one_pass = 2 * (n - 1) * token_bytes * self.slots // n
            return one_pass, one_pass
        weights = self.groups * self.tokens * self.k * self.weight_itemsize
        numbers = self.groups * self.tokens * self.k * 4
        round_trip = 2 * token_bytes * self.tokens
        return (n - 1) * (round_trip + numbers + weights), (n - 1) * (round_trip + weights)

    def bytes_resent_by_remat(self, dispatch: str) -> int:
        """Return the bytes that are sent again if the layer is recomputed."""
        forward, _ = self.bytes(dispatch)
        back = (self.devices - 1) * self.groups * self.tokens * self.width * self.itemsize
        return forward if dispatch == "all_to_all" else forward - back

    def refuses(self, dispatch: str) -> str | None:
        """Return why tokens cannot be dispatched this way, or None."""
        if dispatch == "all_to_all" and self.slots is None:
            return "without a capacity no device knows how many tokens will come"
        return None


@dataclass(frozen=True)
class DispatchChoice:
    """How a step dispatches tokens to experts, and what each way sends: print it."""

    calls: tuple[tuple[MixtureCall, str], ...]
    dispatch: str = "auto"

    def __str__(self) -> str:
        lines = [("dispatch", "forward", "backward", "both", "computed again", "")]
        for call, chosen in self.calls:
            lines += [self._line(call, kind, chosen) for kind in DISPATCH]
        devices = self.calls[0][0].devices if self.calls else 1
        head = f"experts on {devices} devices; bytes that each sends for one layer and microbatch:"
        return "\n".join([head, *align(lines)])

    __repr__ = __str__

    def _line(self, call: MixtureCall, kind: str, chosen: str) -> tuple[str, ...]:
        if why := call.refuses(kind):
            return (kind, "-", "-", "-", "-", f"cannot: {why}")
        both = call.bytes(kind)
        sizes = (human(n) for n in (*both, sum(both), call.bytes_resent_by_remat(kind)))
        why = "it sends least" if self.dispatch == "auto" else "asked for"
        return (kind, *sizes, f"chosen: {why}" if kind == chosen else "")


def choose_dispatch(dispatch: str, call: MixtureCall) -> str:
    """Return the requested dispatch; auto: the one that sends the fewest bytes."""
    possible: Sequence[str] = [kind for kind in DISPATCH if call.refuses(kind) is None]
    if dispatch == "auto":
        return min(possible, key=lambda kind: sum(call.bytes(kind)))
    if why := call.refuses(dispatch):
        raise ValueError(
            f'dispatch="{dispatch}": {why}. Give the mixture a capacity (MoE(capacity=1.25)), or '
            'choose dispatch="gather".'
        )
    return dispatch
