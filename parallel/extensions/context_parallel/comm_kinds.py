"""How the devices that share a sequence communicate, and what each choice sends.

For one attention of B sequences, S positions, H heads of queries and G of keys, width D, e bytes a
number and w bytes a number in float32 (or wider); N devices, in N / u groups of u that exchange
heads. Sent by each device:

- Exchange, if u > 1: (u - 1) / u · B S / N · D · 2 (H + G) e forward, and again backward.
- Ring and allgather, if R = N / u > 1: (R - 1) · 2 B S / R · G / u · D · e forward, and backward
  the same with e + w in place of e: gradients have w. Under a window a ring makes fewer hops.
- Documents, where there are any: (N - 1) · B S / N · 4, forward.

G counts heads as they are sent: where u does not divide them, each is repeated.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hfjax.parallel.extensions.context_parallel.sequence_layout import SequenceLayout
from hfjax.parallel.extensions.context_parallel.ulysses import num_repeats
from hfjax.parallel.settings import CONTEXT_FORMS as FORMS, ContextParallel
from hfjax.utils.tables import align, human


def check_devices(settings: ContextParallel, devices: int) -> None:
    """Refuse groups that do not divide the devices which share a sequence."""
    if settings.ulysses is not None and devices % settings.ulysses:
        fits = [n for n in range(1, devices + 1) if devices % n == 0]
        raise ValueError(
            f"ContextParallel(ulysses={settings.ulysses}) on {devices} devices that share a row: "
            f"groups of {settings.ulysses} do not divide them. These do: "
            f"{', '.join(map(str, fits))}."
        )
    if settings.form == "ulysses" and settings.ulysses not in (None, devices):
        if settings.ulysses == 1:
            raise ValueError(
                'ContextParallel(form="ulysses", ulysses=1): with ulysses=1 no heads are '
                f'exchanged, and all {devices} devices exchange heads under form="ulysses". Leave '
                'ulysses= out, or choose what travels instead of heads: form="ring" or '
                'form="allgather".'
            )
        raise ValueError(
            f'ContextParallel(form="ulysses", ulysses={settings.ulysses}) on {devices} devices: '
            f'groups of {settings.ulysses} need something that joins them. Use form="ring" or '
            f'form="allgather" with ulysses={settings.ulysses}, or ulysses={devices}.'
        )


@dataclass(frozen=True)
class AttentionCall:
    """One attention call of a model, for a microbatch on one device (divided by tensor axes)."""

    batch_size: int
    seq_len: int  # of full sequences
    heads: int
    key_heads: int
    width: int
    itemsize: int
    documents: bool
    is_custom: bool  # the user's: without an exchange of all heads its keys and values are gathered
    window: int | None = None
    value_width: int | None = None  # if it differs from that of queries and keys
    times: int = 1  # layers

    @property
    def grad_itemsize(self) -> int:
        """The bytes of a number of gradients as they are sent."""
        return max(self.itemsize, 4)


@dataclass(frozen=True)
class CommOption:
    """A kind of communication with its groups, and what each device sends."""

    kind: str
    ulysses: int
    seq_layout: SequenceLayout

    @property
    def devices(self) -> int:
        """How many devices share a sequence."""
        return self.seq_layout.devices

    @property
    def name(self) -> str:
        """The name to show."""
        is_mixed = 1 < self.ulysses < self.devices
        return f"{self.kind}, ulysses={self.ulysses}" if is_mixed else self.kind

    def bytes(self, call: AttentionCall) -> tuple[int, int]:
        """Return the bytes that a device sends for one attention: forward, backward."""
        n, u, local_tokens = (
            self.devices,
            self.ulysses,
            call.batch_size * call.seq_len // self.devices,
        )
        if call.is_custom and u < n:
            gathered_numbers = (n - 1) * 2 * local_tokens * call.key_heads * call.width
            return gathered_numbers * call.itemsize, gathered_numbers * call.grad_itemsize
        window = call.window if self.kind == "ring" else None  # a gather sends everything
        hops = self.seq_layout.hops(call.seq_len, window)
        sent_heads = call.key_heads * num_repeats(call.key_heads, u)
        exchanged_bytes = (
            (u - 1) * local_tokens * call.width * 2 * (call.heads + sent_heads) * call.itemsize // u
        )
        numbers = (
            hops * 2 * local_tokens * sent_heads * call.width
        )  # u times the positions, groups / u
        documents = (n - 1) * 4 * local_tokens * call.documents
        forward = exchanged_bytes + numbers * call.itemsize + documents
        return forward, exchanged_bytes + numbers * (call.itemsize + call.grad_itemsize)

    def total_bytes(self, calls: Iterable[AttentionCall]) -> int:
        """Return the bytes that a device sends for all of them, forward and backward."""
        return sum(sum(self.bytes(call)) * call.times for call in calls)

    def refuses(self, calls: Iterable[AttentionCall]) -> str | None:
        """Return why this option cannot run these calls, or None."""
        for call in calls:
            if call.is_custom and self.ulysses < self.devices:
                continue  # runs by its own equations
            if call.heads % self.ulysses:
                fits = [u for u in range(1, self.devices + 1) if _fits(u, self.devices, call)]
                return (
                    f"Ulysses gives each of {self.ulysses} devices whole heads, and the "
                    f"{call.heads} heads that a device has do not divide. These groups do: "
                    f"ulysses={', '.join(map(str, fits))}"
                )
            if call.is_custom and call.key_heads % self.ulysses:
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


def list_options(settings: ContextParallel, devices: int, order: str) -> list[CommOption]:
    """Return the options that the settings allow, the preferred ones first."""
    groups = [n for n in range(1, devices + 1) if devices % n == 0]
    if settings.ulysses is not None:
        groups = [settings.ulysses]
    elif settings.form == "ulysses":
        groups = [devices]
    elif settings.form != "auto":
        groups = [1]
    kinds = FORMS[:2] if settings.form == "auto" else (settings.form,)
    make_option = lambda kind, u: CommOption(
        kind if u < devices else "ulysses", u, SequenceLayout(devices, order, u)
    )
    return list(dict.fromkeys(make_option(kind, u) for u in groups for kind in kinds))


@dataclass(frozen=True)
class ContextChoice:
    """The option that a step uses, and what it and the others send: print it."""

    settings: ContextParallel
    calls: tuple[AttentionCall, ...]
    option: CommOption
    lines: tuple[tuple[str, ...], ...]

    @property
    def seq_layout(self) -> SequenceLayout:
        """How positions are sharded."""
        return self.option.seq_layout

    def __str__(self) -> str:
        head = ("form", "forward", "backward", "both", "")
        seq_layout = self.seq_layout
        table = align([head, *self.lines])
        title = f"{seq_layout.devices} devices share a sequence, {seq_layout.order} order"
        return "\n".join([f"{title}; bytes that each sends for one microbatch:", *table])

    __repr__ = __str__


def choose_comm_kind(
    settings: ContextParallel,
    devices: int,
    calls: Sequence[AttentionCall],
    ring_refusal: str | None = None,
) -> ContextChoice:
    """Return the option that sends least of those that can run; `ring_refusal`: why no ring can."""
    check_devices(settings, devices)
    has_documents, order = any(call.documents for call in calls), settings.order
    if order == "auto":
        order = "contiguous" if calls and all(call.window for call in calls) else "zigzag"
    possible, lines = [], []
    for option in list_options(settings, devices, order):
        is_ring = option.kind == "ring" and option.ulysses < devices
        why = option.refuses(calls) or (ring_refusal if is_ring else None)
        lines.append((option, why))
        if why is None:
            rank = (*(FORMS[1::-1] if has_documents else FORMS[:2]), FORMS[2]).index(option.kind)
            possible.append((option.total_bytes(calls), rank, option))
    if not possible:
        raise ValueError(f'ContextParallel(form="{settings.form}"): {lines[0][1]}.')
    best = min(possible, key=lambda x: x[:2])[2]
    table = tuple(_line(option, why, calls, option == best) for option, why in lines)
    return ContextChoice(settings, tuple(calls), best, table)


def _line(
    option: CommOption, why: str | None, calls: Sequence[AttentionCall], best: bool
) -> tuple[str, ...]:
    call_bytes = [option.bytes(call) for call in calls for _ in range(call.times)]
    forward, backward = (sum(sizes) for sizes in zip((0, 0), *call_bytes, strict=True))
    sizes = [human(n) for n in (forward, backward, forward + backward)]
    verdict = "chosen" if best else f"cannot: {why}" if why else ""
    times = max((num_repeats(call.key_heads, option.ulysses) for call in calls), default=1)
    repeat_note = f"heads of keys are sent {times} times" if times > 1 and not why else ""
    return (option.name, *sizes, ", ".join(filter(None, (verdict, repeat_note))))
