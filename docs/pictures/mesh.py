"""Draw the picture of README.md: a mesh of 8 devices, what each stores, and what is sent.

python docs/pictures/mesh.py [FILE]    # mesh.svg next to this file

Every text stands at a position of its own: SVG drops double spaces. The table is what
`print(hfjax.FSDP | hfjax.TENSOR)` prints; its columns are drawn at fixed positions.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.sax.saxutils import escape

import hfjax

HERE = Path(__file__).parent
WIDTH = 830
INK, GREY, PALE, LINE = "#1f2328", "#59636e", "#eef1f4", "#8c959f"
BLUE, GOLD = "#2f6fd0", "#e3a62f"  # a piece of a matrix, rows of the batch
OVER = {"fsdp": "#b3491f", "data": "#1f7a3d", "tensor": "#7440b0"}  # what is sent over an axis
WIDE, HIGH, ACROSS, DOWN = 124, 62, 56, 46  # a device, and the free room to the next one
LEFT, TOP, APART = 68, 66, 72  # the first device; between the two groups
GROUP = 2 * WIDE + ACROSS + 24
CALL = "hfjax.FSDP | hfjax.TENSOR"
LETTER = 7.53  # pixels of a letter of the table
TITLE = "A mesh of 8 devices (data=2, fsdp=2, tensor=2), what each stores, and what is sent"


def text(x: float, y: float, words: str, **look: str | float) -> str:
    """Return a text; `look` has the attributes that differ from the picture's."""
    more = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in look.items())
    return f'<text x="{x:g}" y="{y:g}"{more}>{escape(words)}</text>'


def box(x: float, y: float, wide: float, high: float, fill: str, **look: str | float) -> str:
    """Return a rectangle."""
    more = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in look.items())
    return f'<rect x="{x:g}" y="{y:g}" width="{wide:g}" height="{high:g}" fill="{fill}"{more}/>'


def arrow(x: float, y: float, to_x: float, to_y: float, axis: str) -> str:
    """Return a line with a head at both ends, in the colour of an axis."""
    look = f'stroke="{OVER[axis]}" stroke-width="2" fill="none"'
    ends = f'marker-start="url(#{axis})" marker-end="url(#{axis})"'
    return f'<path d="M{x:g} {y:g}L{to_x:g} {to_y:g}" {look} {ends}/>'


def heads() -> Iterator[str]:
    """Yield the heads of arrows, one for each colour."""
    for axis, colour in OVER.items():
        yield (
            f'<marker id="{axis}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="4.5" '
            f'markerHeight="4.5" orient="auto-start-reverse"><path d="M0 0L8 4L0 8z" '
            f'fill="{colour}"/></marker>'
        )


def place(data: int, fsdp: int, tensor: int) -> tuple[float, float]:
    """Return the upper left corner of a device."""
    x = LEFT + data * (GROUP + APART) + tensor * (WIDE + ACROSS)
    return x, TOP + fsdp * (HIGH + DOWN)


def device(data: int, fsdp: int, tensor: int) -> Iterator[str]:
    """Yield a device: its number, its piece of the matrix, its rows of the batch."""
    x, y = place(data, fsdp, tensor)
    yield box(x, y, WIDE, HIGH, "white", stroke=INK, rx=5)
    yield text(x + 8, y + 17, f"{4 * data + 2 * fsdp + tensor}", font_size=13)
    for row in range(2):
        for column in range(2):
            fill = BLUE if (row, column) == (fsdp, tensor) else "white"
            at = x + 34 + 23 * column, y + 12 + 19 * row
            yield box(*at, 23, 19, fill, stroke=LINE, stroke_width=0.8)
    for quarter in range(4):
        fill = GOLD if quarter == 2 * data + fsdp else "white"
        yield box(x + 96, y + 12 + 9.5 * quarter, 14, 9.5, fill, stroke=LINE, stroke_width=0.8)


def mesh() -> Iterator[str]:
    """Yield two groups (data) of two rows (fsdp) and two columns (tensor), and the arrows."""
    high = 2 * HIGH + DOWN + 24
    for data in range(2):
        x, y = place(data, 0, 0)
        yield box(x - 12, y - 12, GROUP, high, PALE, rx=6)
        middle = x - 12 + GROUP / 2
        says = "data 0" if data == 0 else "data 1: stores the same as data 0"
        yield text(middle, 24, says, text_anchor="middle", font_size=14)
        for tensor in range(2):
            at = place(data, 0, tensor)[0] + WIDE / 2
            yield text(at, 46, f"tensor {tensor}", text_anchor="middle", fill=GREY)
    for fsdp in range(2):
        y = place(0, fsdp, 0)[1] + HIGH / 2
        yield text(46, y, f"fsdp {fsdp}", text_anchor="middle", fill=GREY, transform=_turned(y))
    for data in range(2):
        for fsdp in range(2):
            for tensor in range(2):
                yield from device(data, fsdp, tensor)
    yield from arrows()


def _turned(y: float) -> str:
    return f"rotate(-90 46 {y:g})"


def arrows() -> Iterator[str]:
    """Yield what is sent: over fsdp and tensor in each group, over data between the groups."""
    small = {"font_size": 11.5, "text_anchor": "middle"}
    for data in range(2):
        for one in range(2):
            x, y = place(data, 0, one)
            x, y = x + WIDE / 2, y + HIGH
            yield arrow(x, y + 4, x, y + DOWN - 4, "fsdp")
            yield text(x + 8, y + DOWN / 2 + 4, "gather", font_size=11.5, fill=OVER["fsdp"])
            x, y = place(data, one, 0)
            x, y = x + WIDE, y + HIGH / 2
            yield arrow(x + 4, y, x + ACROSS - 4, y, "tensor")
            yield text(x + ACROSS / 2, y - 8, "reduce", fill=OVER["tensor"], **small)
    x, y = place(0, 0, 1)
    x, y = x + WIDE + 12, y + HIGH + DOWN / 2
    yield arrow(x + 4, y, x + APART - 4, y, "data")
    yield text(x + APART / 2, y - 8, "reduce", fill=OVER["data"], **small)


def legend(y: float) -> Iterator[str]:
    """Yield what the colours mean, and what the arrows carry."""
    found = (
        ("fsdp", "gathers each layer's matrices before use; reduce-scatters their gradients"),
        ("tensor", "all-reduces the activations of attention and MLP"),
        ("data", "all-reduces gradients of equal pieces: 0 with 4, 1 with 5, 2 with 6, 3 with 7"),
    )
    for n, (axis, words) in enumerate(found):
        at = y + 19 * n
        yield arrow(54, at - 4, 84, at - 4, axis)
        yield text(96, at, f"over {axis}", fill=OVER[axis], font_weight="bold")
        yield text(180, at, words)
    x = 54
    yield box(x, y + 46, 14, 13, BLUE)
    yield text(x + 22, y + 57, "the piece of a matrix that a device stores")
    yield box(x + 290, y + 46, 14, 13, GOLD)
    yield text(x + 312, y + 57, "the rows of the batch that it works on")


def table(y: float) -> Iterator[str]:
    """Yield the strategy as it is printed: every column of words at a position of its own."""
    lines = [f">>> print({CALL})", *str(hfjax.FSDP | hfjax.TENSOR).splitlines()]
    mono = 'font-family="ui-monospace, Menlo, Consolas, DejaVu Sans Mono, monospace"'
    yield box(18, y, WIDTH - 36, 16 + 18 * len(lines), PALE, rx=6)
    yield f'<g {mono} font-size="12.5">'
    for n, line in enumerate(lines):
        for words in re.finditer(r"\S+( \S+)*", line):
            yield text(32 + LETTER * words.start(), y + 22 + 18 * n, words[0])
    yield "</g>"


def svg() -> str:
    """Return the picture."""
    height = 354 + 16 + 18 * (1 + len(str(hfjax.FSDP | hfjax.TENSOR).splitlines())) + 14
    size = f'width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
    fonts = 'font-family="Helvetica, Arial, DejaVu Sans, sans-serif" font-size="13"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} {fonts} fill="{INK}" role="img">',
        f"<title>{TITLE}</title>",
        box(0, 0, WIDTH, height, "white"),
        f"<defs>{''.join(heads())}</defs>",
        *mesh(),
        *legend(278),
        *table(354),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    file = Path(sys.argv[1]) if sys.argv[1:] else HERE / "mesh.svg"
    file.write_text(svg(), encoding="utf-8")
