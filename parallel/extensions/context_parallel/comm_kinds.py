"""What travels between the devices that share a row, and what each choice sends.

For one attention of B rows, S positions, H heads of queries and G of keys, width D, e bytes a
number and w bytes a number in float32 (or wider); N devices, in N / u groups of u that exchange
heads. Sent by each device:

- Exchange, if u > 1: (u - 1) / u · B S / N · D · 2 (H + G) e forward, and again backward.
- Ring and allgather, if R = N / u > 1: (R - 1) · 2 B S / R · G / u · D · e forward, and backward
  the same with e + w in place of e: gradients travel in w. Under a window a ring makes fewer hops.
- Documents, where there are any: (N - 1) · B S / N · 4, forward.

G counts heads as they are sent: where u does not divide them, each is repeated.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hfjax.parallel.extensions.context_parallel.sequence_layout import Deal
from hfjax.parallel.extensions.context_parallel.ulysses import repeats
from hfjax.parallel.settings import CONTEXT_FORMS as FORMS, Context
from hfjax.utils.tables import aligned, human


def check_devices(settings: Context, devices: int) -> None:
    """Refuse groups that do not divide the devices which share a row."""
    if settings.ulysses is not None and devices % settings.ulysses:
        fits = [n for n in range(1, devices + 1) if devices % n == 0]
        raise ValueError(
            f"Context(ulysses={settings.ulysses}) on {devices} devices that share a row: groups of "
            f"{settings.ulysses} do not divide them. These do: {', '.join(map(str, fits))}."
        )
    if settings.form == "ulysses" and settings.ulysses not in (None, devices):
        if settings.ulysses == 1:
            raise ValueError(
                f'Context(form="ulysses", ulysses=1): with ulysses=1 no heads are exchanged, and '
                f'all {devices} devices exchange heads under form="ulysses". Leave ulysses= out, '
                'or choose what travels instead of heads: form="ring" or form="allgather".'
            )
        raise ValueError(
            f'Context(form="ulysses", ulysses={settings.ulysses}) on {devices} devices: groups of '
            f'{settings.ulysses} need something that joins them. Use form="ring" or '
            f'form="allgather" with ulysses={settings.ulysses}, or ulysses={devices}.'
        )


@dataclass(frozen=True)
class AttentionCall:
    """One attention that a model asks for, of a microbatch on one device (tensor axes divided)."""

    rows: int
    positions: int  # of whole rows
    heads: int
    key_heads: int
    width: int
    itemsize: int
    documents: bool
    own: bool  # the user's: without an exchange of all heads its keys and values are gathered
    window: int | None = None
    value_width: int | None = None  # if it is another than that of queries and keys
    times: int = 1  # layers

    @property
    def wide(self) -> int:
        """The bytes of a number in which gradients travel."""
        return max(self.itemsize, 4)


@dataclass(frozen=True)
class Option:
    """A form with its groups, and what each device sends by it."""

    form: str
    ulysses: int
    deal: Deal

    @property
    def devices(self) -> int:
        """How many share a row."""
        return self.deal.devices

    @property
    def name(self) -> str:
        """What is shown."""
        crossed = 1 < self.ulysses < self.devices
        return f"{self.form}, ulysses={self.ulysses}" if crossed else self.form

    def bytes(self, call: AttentionCall) -> tuple[int, int]:
        """Return the bytes that a device sends for one attention: forward, backward."""
        n, u, here = self.devices, self.ulysses, call.rows * call.positions // self.devices
        if call.own and u < n:
            gathered = (n - 1) * 2 * here * call.key_heads * call.width
            return gathered * call.itemsize, gathered * call.wide
        window = call.window if self.form == "ring" else None  # a gather sends everything
        hops = self.deal.hops(call.positions, window)
        groups = call.key_heads * repeats(call.key_heads, u)
        exchanged = (u - 1) * here * call.width * 2 * (call.heads + groups) * call.itemsize // u
        numbers = hops * 2 * here * groups * call.width  # u times the positions, groups / u
        documents = (n - 1) * 4 * here * call.documents
        forward = exchanged + numbers * call.itemsize + documents
        return forward, exchanged + numbers * (call.itemsize + call.wide)

    def total(self, calls: Iterable[AttentionCall]) -> int:
        """Return the bytes that a device sends for all of them, forward and backward."""
        return sum(sum(self.bytes(call)) * call.times for call in calls)

    def refuses(self, calls: Iterable[AttentionCall]) -> str | None:
        """Return why these cannot go so, or None."""
        for call in calls:
            if call.own and self.ulysses < self.devices:
                continue  # by its own equations
            if call.heads % self.ulysses:
                fits = [u for u in range(1, self.devices + 1) if _fits(u, self.devices, call)]
                return (
                    f"Ulysses gives each of {self.ulysses} devices whole heads, and the "
                    f"{call.heads} heads that a device has do not divide. These groups do: "
                    f"ulysses={', '.join(map(str, fits))}"
                )
            if call.own and call.key_heads % self.ulysses:
                return (
                    f"the model's own attention has {call.key_heads} heads of keys for "
                    f"{self.ulysses} devices: with each of them repeated it is another program. "
                    "Repeat them in the model, before it asks for attention"
                )
            if call.value_width not in (None, call.width) and self.ulysses < self.devices:
                return (
                    f"values of width {call.value_width} beside keys of width {call.width} can "
                    'only be exchanged: form="ulysses"'
                )
        return None


def _fits(ulysses: int, devices: int, call: AttentionCall) -> bool:
    return devices % ulysses == 0 and call.heads % ulysses == 0


def options(settings: Context, devices: int, order: str) -> list[Option]:
    """Return what the settings allow, what is preferred first."""
    groups = [n for n in range(1, devices + 1) if devices % n == 0]
    if settings.ulysses is not None:
        groups = [settings.ulysses]
    elif settings.form == "ulysses":
        groups = [devices]
    elif settings.form != "auto":
        groups = [1]
    forms = FORMS[:2] if settings.form == "auto" else (settings.form,)
    of = lambda form, u: Option(form if u < devices else "ulysses", u, Deal(devices, order, u))
    return list(dict.fromkeys(of(form, u) for u in groups for form in forms))


@dataclass(frozen=True)
class ContextChoice:
    """The form that a step takes, and what it and the others send: print it."""

    settings: Context
    calls: tuple[AttentionCall, ...]
    option: Option
    lines: tuple[tuple[str, ...], ...]

    @property
    def deal(self) -> Deal:
        """How positions are dealt."""
        return self.option.deal

    def __str__(self) -> str:
        head = ("form", "forward", "backward", "both", "")
        deal = self.deal
        shown = aligned([head, *self.lines])
        who = f"{deal.devices} devices share a row, {deal.order} order"
        return "\n".join([f"{who}; bytes that each sends for one microbatch:", *shown])

    __repr__ = __str__


def choose(
    settings: Context, devices: int, calls: Sequence[AttentionCall], no_ring: str | None = None
) -> ContextChoice:
    """Return the form that sends least of those that can run; `no_ring` says why no ring can."""
    check_devices(settings, devices)
    packed, order = any(call.documents for call in calls), settings.order
    if order == "auto":
        order = "contiguous" if calls and all(call.window for call in calls) else "zigzag"
    possible, lines = [], []
    for option in options(settings, devices, order):
        ring = option.form == "ring" and option.ulysses < devices
        why = option.refuses(calls) or (no_ring if ring else None)
        lines.append((option, why))
        if why is None:
            rank = (*(FORMS[1::-1] if packed else FORMS[:2]), FORMS[2]).index(option.form)
            possible.append((option.total(calls), rank, option))
    if not possible:
        raise ValueError(f'Context(form="{settings.form}"): {lines[0][1]}.')
    best = min(possible, key=lambda x: x[:2])[2]
    told = tuple(_line(option, why, calls, option == best) for option, why in lines)
    return ContextChoice(settings, tuple(calls), best, told)


def _line(
    option: Option, why: str | None, calls: Sequence[AttentionCall], best: bool
) -> tuple[str, ...]:
    each = [option.bytes(call) for call in calls for _ in range(call.times)]
    forward, backward = (sum(sizes) for sizes in zip((0, 0), *each, strict=True))
    sizes = [human(n) for n in (forward, backward, forward + backward)]
    note = "chosen" if best else f"cannot: {why}" if why else ""
    times = max((repeats(call.key_heads, option.ulysses) for call in calls), default=1)
    again = f"heads of keys are sent {times} times" if times > 1 and not why else ""
    return (option.name, *sizes, ", ".join(filter(None, (note, again))))
