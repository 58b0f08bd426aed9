"""The bytes that are live in a scheduled program, in each half of it.

A program of few layers may take most memory at another moment than one of many: where it updates
its state rather than where the backward pass begins. What compilers tell of it is one number, so
here each half has its own: until half of the backward pass is done, and after that. Each grows by
the same with each layer.

It is what the schedule says, without what XLA writes in place of what it read: so too much, and
without its loops' own. Good for how it grows, no measure of how much there is.
"""

import math
import re
from collections.abc import Iterator

from hfjax.analysis import hlo

_ARRAY = re.compile(r"\b(pred|[a-z]+(\d+)\w*)\[([\d,]*)\]")
_INPUTS = ("parameter", "constant")
_ALIASING = ("bitcast", "tuple", "while", "optimization-barrier")  # these make no array
_BACKWARD = "transpose("  # as JAX names what it derives

Array = tuple[str, int]  # an instruction, and which of its results


def live_bytes(text: str) -> tuple[float, float]:
    """Return the most that is live at once in each half of a scheduled HLO module.

    Arguments are not counted, nor results, which take the place of arguments.
    """
    computations, entry = hlo._computations(text)
    lines = computations[entry]
    born: dict[Array, int] = {}
    dies: dict[Array, int] = {}
    sizes: dict[Array, float] = {}
    arrays: dict[str, list[Array]] = {}  # instruction -> what it makes or hands on
    backward: list[int] = []
    for at, (name, rest) in enumerate(lines.items()):
        op = hlo._parse(rest)
        read = [array for operand in op.operands for array in arrays.get(operand, [])]
        dies.update(dict.fromkeys(read, at))
        if op.opcode in _ALIASING or op.opcode.endswith("-done"):
            arrays[name] = read
        elif op.opcode == "get-tuple-element":
            number = int(op.attributes["index"])
            arrays[name] = read[number : number + 1]
        else:
            outputs = dict(_output_sizes(name, rest, op.opcode))
            arrays[name] = list(outputs)
            sizes |= outputs
            born.update(dict.fromkeys(outputs, at))
            if op.opcode in ("fusion", "custom-call", "dot") and _BACKWARD in rest:
                backward.append(at)
    results = set(arrays[next(reversed(lines))])
    change = [0.0] * (len(lines) + 1)
    for array, size in sizes.items():
        if array not in results:
            change[born[array]] += size
            change[dies.get(array, born[array]) + 1] -= size
    middle = backward[len(backward) // 2] if backward else len(lines)
    return _max_of_halves(change, middle)


def _output_sizes(name: str, rest: str, opcode: str) -> Iterator[tuple[Array, float]]:
    """Yield the arrays that an instruction makes, with their bytes; arguments have none."""
    shapes = _ARRAY.findall(hlo._split(rest, " ")[0])
    sizes = [math.prod(map(int, filter(None, s.split(",")))) * _width(b) for _, b, s in shapes]
    if opcode.endswith("-start") and opcode != "all-reduce-start" and len(sizes) > 1:
        sizes = sizes[len(sizes) // 2 :]  # the first half is what it is given
    for number, size in enumerate(sizes):
        yield (name, number), 0.0 if opcode in _INPUTS else size


def _width(bits: str) -> float:
    return int(bits) / 8 if bits else 1.0


def _max_of_halves(change: list[float], middle: int) -> tuple[float, float]:
    halves, live = [0.0, 0.0], 0.0
    for at, more in enumerate(change):
        live += more
        half = int(at >= middle)
        halves[half] = max(halves[half], live)
    return halves[0], halves[1]


def temporaries_at_depth(
    layers: int,
    depths: tuple[int, int],
    temporaries: tuple[float, float],
    live: tuple[tuple[float, float], tuple[float, float]],
) -> float:
    """Return what a program of so many layers has of temporaries, by programs of two depths.

    Args:
        layers: How many layers.
        depths: Those of the two programs.
        temporaries: What the compiler tells of each.
        live: What is live in the halves of each.

    Example:
        >>> temporaries_at_depth(24, (6, 12), (10.0, 11.0), ((4.0, 5.0), (10.0, 6.0)))
        22.0
        >>> temporaries_at_depth(24, (6, 12), (10.0, 16.0), ((11.0, 5.0), (18.0, 6.0)))
        30.0
    """
    line = lambda a, b: b + (b - a) * (layers - depths[1]) / (depths[1] - depths[0])
    estimates = [line(*temporaries)]
    for few, more in zip(*live, strict=True):
        too_much = max(few - temporaries[0], more - temporaries[1], 0)
        estimates.append(line(few, more) - too_much)
    return max(estimates)
