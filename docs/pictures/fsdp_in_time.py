"""Draw FSDP in time: gathers, matmuls and reduce-scatters of one step, for docs/strategies.md.

python docs/pictures/fsdp_in_time.py [TEXT]    # compiles in 3 minutes; fsdp_in_time.svg

Compiles GPT-2 medium for 8 H200s (none is needed, only `make wheels`) and reads in which order the
program starts its matmuls and collectives, and where it waits for which. How long each takes is
modelled, with the formulas of `hfjax.analysis`; norms, softmax and the like take no time. TEXT: a
file with the text of the compiled program, which is written if it is not there.
"""

import functools
import math
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # the GPUs to compile for are not here

import jax
import optax

import hfjax
from hfjax.analysis import overlap
from hfjax.analysis.matmul_time import ProductModel, matmul_seconds
from hfjax.hardware.machine import H200
from hfjax.models.attention import dot_product
from hfjax.models.gpt import GPT, GPTConfig, next_token_loss

HERE = Path(__file__).parent
GPUS, ROWS, LENGTH = 8, 8, 1024
XLA = functools.partial(dot_product, implementation="xla")  # cuDNN's needs cuDNN to compile
CONFIG = GPTConfig.preset("medium", pad_vocab_to=128, attention=XLA)
WIDTH, LEFT, RIGHT, TOP, LINE, GAP = 830, 92, 20, 100, 24, 5
PANEL = 2 * LINE + GAP + 66  # pixels from one window to the next
WINDOW = 3.0e-3  # seconds
INK, GREY = "#1f2328", "#59636e"
COLOURS = {
    "forward": ("#8db4e8", "forward: matmuls"),
    "head": ("#b7a5dd", "head"),
    "backward": ("#86c98f", "backward: matmuls"),
    "all-gather": ("#eb9a5c", "gather of a layer's parameters"),
    "reduce-scatter": ("#e58fb0", "reduce-scatter of its gradients"),
}


def program() -> str:
    """Compile the step; return its text."""
    mesh = hfjax.make_mesh(devices=hfjax.analysis.target_devices("h200", GPUS), fsdp=GPUS)
    layout = hfjax.layout(lambda rngs: GPT(CONFIG, rngs=rngs), optax.adamw(1e-3), mesh, hfjax.FSDP)
    step = hfjax.train_step(layout, next_token_loss, precision="bf16", max_grad_norm=1.0)
    batch = {"tokens": jax.ShapeDtypeStruct((ROWS * GPUS, LENGTH + 1), "int32")}
    return step.lower(batch).compile().as_text() or ""


@dataclass
class Span:
    """A box: what, of which layer, from when to when."""

    kind: str
    label: str
    start: float
    end: float


@dataclass
class Run:
    """The program, run on two streams: one computes, the other sends."""

    text: str
    computed: list[Span] = field(default_factory=list)
    sent: list[Span] = field(default_factory=list)
    waited: list[tuple[float, float]] = field(default_factory=list)  # the computing stream

    def __post_init__(self) -> None:
        """Run the entry, in the order in which it is enqueued."""
        module, entry = overlap._scheduled(self.text)
        self.walk = overlap._Walk(module, [{"fsdp": GPUS}], H200)
        self.lines = module.computations[entry]
        self.now, self.layer, self.scattered = 0.0, 0, 0
        self.gathers = iter([*_gathered()])
        self.under_way: dict[str, Span] = {}
        for name, op in self.walk._ops(self.lines):
            if op.opcode.endswith("-done"):
                self._wait(self.under_way.pop(op.operands[0]))
            elif flight := self.walk._start_flight(op, self.lines, 1):
                self.under_way[name] = self._send(flight)
            else:
                self._compute(name, op)
        if missing := [*self.gathers]:
            raise ValueError(f"not gathered: {missing}; the names of the layers would be wrong")

    def _send(self, flight: overlap.Flight) -> Span:
        free = max([self.now, *(one.end for one in self.sent[-1:])])
        if flight.kind == "all-gather":
            label = next(self.gathers)
        else:
            label = self._scattered(flight)
        self.sent.append(Span(flight.kind, label, free, free + flight.seconds))
        return self.sent[-1]

    def _scattered(self, flight: overlap.Flight) -> str:
        """Return the layer whose gradients are sent: the last one first, with the embedding."""
        if flight.kind != "reduce-scatter":
            return ""
        layer = CONFIG.layers - 1 - self.scattered // _layer_bytes()
        ends = 4 * CONFIG.embed * (math.ceil(CONFIG.vocab / 128) * 128 + CONFIG.length)
        embedding = flight.bytes >= ends
        self.scattered += flight.bytes - ends * embedding
        return "embedding" if embedding else str(layer)

    def _wait(self, span: Span) -> None:
        if span.end > self.now:
            self.waited.append((self.now, span.end))
            self.now = span.end
        if span.kind == "all-gather" and span.label.isdigit():
            self.layer = int(span.label)

    def _compute(self, name: str, op: Any) -> None:
        for product in self.walk._products_of(name, op, self.lines):
            taken = product.count * matmul_seconds(product, ProductModel.from_machine(H200))
            head = max(product.m, product.n, product.k) >= CONFIG.vocab
            back = "transpose" in self.lines[name].partition("op_name=")[2].partition('"')[2][:80]
            kind = "head" if head else "backward" if back else "forward"
            label = "head" if head else f"layer {self.layer}"
            last = self.computed[-1:]
            if last and (last[0].kind, last[0].label, last[0].end) == (kind, label, self.now):
                last[0].end += taken
            else:
                self.computed.append(Span(kind, label, self.now, self.now + taken))
            self.now += taken


def _gathered() -> Iterator[str]:
    """Yield what is gathered, in order: once for the forward pass and once for the backward."""
    yield from ("embedding", *map(str, range(CONFIG.layers)))
    yield from map(str, reversed(range(CONFIG.layers)))


def _layer_bytes() -> int:
    """Return the bytes of the matrices of a layer's gradients, in float32."""
    return 4 * 12 * CONFIG.embed**2


def text(x: float, y: float, words: str, **look: str | float) -> str:
    """Return a text; `look` has the attributes that differ from the picture's."""
    more = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in look.items())
    return f'<text x="{x:.4g}" y="{y:.4g}"{more}>{escape(words)}</text>'


def panel(run: Run, y: float, begin: float, title: str) -> Iterator[str]:
    """Yield one window of the step: what computes, below it what is sent, and the time."""
    scale = (WIDTH - LEFT - RIGHT) / WINDOW
    yield text(LEFT, y - 8, title, font_weight="bold")
    yield text(LEFT - 8, y + 16, "computes", text_anchor="end")
    yield text(LEFT - 8, y + LINE + GAP + 16, "sends", text_anchor="end")
    end = begin + WINDOW
    for line, spans in enumerate((run.computed, run.sent)):
        top = y + line * (LINE + GAP)
        for s in spans:
            start, stop = max(s.start, begin), min(s.end, end)
            if start < stop and s.kind in COLOURS:
                yield from _box(s, LEFT + scale * (start - begin), scale * (stop - start), top)
    for start, stop in run.waited:
        start, stop = max(start, begin), min(stop, end)
        if start < stop:
            x, wide = LEFT + scale * (start - begin), scale * (stop - start)
            shape = f'x="{x:.1f}" y="{y}" width="{wide:.1f}" height="{LINE}"'
            yield f'<rect {shape} fill="url(#waits)"/>'
    yield from _axis(y + 2 * LINE + GAP, begin, end, scale)


def _box(s: Span, x: float, wide: float, top: float) -> Iterator[str]:
    shape = f'x="{x:.1f}" y="{top}" width="{max(wide - 1, 0.8):.1f}" height="{LINE}"'
    yield f'<rect {shape} fill="{COLOURS[s.kind][0]}"/>'
    if s.label and 6.4 * len(s.label) <= wide - 1:
        yield text(x + wide / 2, top + 16, s.label, text_anchor="middle", font_size=11.5)


def _axis(y: float, begin: float, end: float, scale: float) -> Iterator[str]:
    yield f'<path stroke="{GREY}" fill="none" d="M{LEFT} {y + 4}H{WIDTH - RIGHT}"/>'
    for n in range(math.ceil(2000 * begin), math.floor(2000 * end) + 1):
        x = LEFT + scale * (n / 2000 - begin)
        yield f'<path stroke="{GREY}" d="M{x:.1f} {y + 4}v5"/>'
        yield text(x, y + 22, f"{n / 2:g} ms", text_anchor="middle", fill=GREY, font_size=11.5)


def svg(run: Run) -> str:
    """Return the picture."""
    windows = {
        "The forward pass begins: a layer is gathered under the matmuls of the layer before": 0.0,
        "The backward pass begins: it gathers each layer again, from the last one down": (
            next(s.start for s in run.computed if s.kind == "backward") - 0.5e-3
        ),
        "The step ends: nothing is left to hide the last reduce-scatters": (
            run.now - WINDOW + 0.1e-3
        ),
    }
    height = TOP + PANEL * len(windows) + 26
    size = f'width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
    fonts = 'font-family="Helvetica, Arial, DejaVu Sans, sans-serif" font-size="13"'
    name = f"FSDP in time: GPT-2 medium on {GPUS} H200s, {ROWS} rows of {LENGTH} tokens on each"
    sent = sum(s.end - s.start for s in run.sent)
    waits = sum(end - start for start, end in run.waited)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} {fonts} fill="{INK}" role="img">',
        f"<title>{name}</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        '<defs><pattern id="waits" width="6" height="6" patternUnits="userSpaceOnUse" '
        'patternTransform="rotate(45)"><rect width="6" height="6" fill="#f3f4f6"/>'
        '<rect width="2" height="6" fill="#c3c8ce"/></pattern></defs>',
        text(20, 26, name, font_size=16),
        text(
            20, 47, "Modelled: the order is the compiled program's, the times are formulas.",
            fill=GREY,
        ),
        text(
            20, 65,
            f"The step has {1e3 * (run.now - waits):.1f} ms of matmuls and {1e3 * sent:.1f} ms of "
            f"transfers, of which it waits for {1e3 * waits:.1f} ms. All else takes no time here.",
            fill=GREY,
        ),
    ]  # fmt: skip
    for n, (title, begin) in enumerate(windows.items()):
        parts += panel(run, TOP + PANEL * n, begin, title)
    return "\n".join([*parts, *_legend(height - 24), "</svg>"]) + "\n"


def _legend(y: float) -> Iterator[str]:
    x = 20.0
    entries = [*COLOURS.values(), ("url(#waits)", "waits")]
    for colour, words in entries:
        yield f'<rect x="{x:.0f}" y="{y}" width="14" height="13" fill="{colour}"/>'
        yield text(x + 19, y + 11, words, font_size=12)
        x += 19 + 5.9 * len(words) + 16


def main() -> None:
    """Compile, unless there is a text, and draw."""
    kept = Path(sys.argv[1]) if sys.argv[1:] else None
    found = kept.read_text(encoding="utf-8") if kept and kept.exists() else program()
    if kept and not kept.exists():
        kept.write_text(found, encoding="utf-8")
    (HERE / "fsdp_in_time.svg").write_text(svg(Run(found)), encoding="utf-8")


if __name__ == "__main__":
    main()
