"""The peak of live bytes in each half of a scheduled program.

A program of few layers may peak at another point than one of many: where it updates its state
rather than where the backward pass begins. Compilers report one number, so here each half gets its
own: until half of the backward pass is done, and after that. Each grows by the same with each
layer.

It follows the schedule but not XLA's reuse of operands' buffers, so it is too high; it also leaves
out what loops use inside. It shows how memory grows, and is no measure of how much there is.
"""

import math
import re
from collections.abc import Iterator

from hfjax.analysis import hlo

_ARRAY = re.compile(r"\b(pred|[a-z]+(\d+)\w*)\[([\d,]*)\]")
_INPUTS = ("parameter", "constant")
_ALIASING = ("bitcast", "tuple", "while", "optimization-barrier")  # these create no array
_BACKWARD = "transpose("  # JAX's name for derived operations

Array = tuple[str, int]  # an instruction, and the index of its result


def live_bytes(text: str) -> tuple[float, float]:
    """Return the peak of live bytes in each half of a scheduled HLO module.

    Arguments are not counted, nor results, which reuse the buffers of arguments.
    """
    computations, entry = hlo._computations(text)
    lines = computations[entry]
    born: dict[Array, int] = {}
    dies: dict[Array, int] = {}
    sizes: dict[Array, float] = {}
    arrays: dict[str, list[Array]] = {}  # instruction -> arrays that it creates or passes on
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
    """Yield the arrays that an instruction creates, with their bytes; arguments have none."""
    shapes = _ARRAY.findall(hlo._split(rest, " ")[0])
    sizes = [math.prod(map(int, filter(None, s.split(",")))) * _width(b) for _, b, s in shapes]
    if opcode.endswith("-start") and opcode != "all-reduce-start" and len(sizes) > 1:
        sizes = sizes[len(sizes) // 2 :]  # the first half are its operands
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
    """Return the temporaries of a program of `layers` layers, from programs of two depths.

    Args:
        layers: Number of layers.
        depths: Numbers of layers of the two programs.
        temporaries: Bytes of temporaries that the compiler reports for each.
        live: Peaks of live bytes in the halves of each.

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
