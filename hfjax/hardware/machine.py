"""The constants of a GPU, each with its source, read from a TOML file.

    bandwidth = { value = 3_350_000_000_000, source = "NVIDIA H100 data sheet" }

A source names a data sheet or a measurement with its date, or it begins with "assumed". `MACHINES`
has those in this folder; `Machine.load` reads a file of your own, `write` writes one.
"""

import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, NoReturn, get_args, get_origin, get_type_hints

from hfjax.utils.atomic import replace_text

Number = int | float
Value = Number | tuple[int, int]


@dataclass(frozen=True)
class Calibration:
    """Where and when the constants of a file were measured."""

    device: str  # its `device_kind`
    jax: str  # version
    date: str  # 2026-11-26


@dataclass(frozen=True)
class Machine:
    """What a GPU is and what it reaches; `source` returns the source of a number.

    Example:
        >>> from hfjax.hardware.machine import MACHINES
        >>> MACHINES["h100"].peak
        989000000000000.0
        >>> MACHINES["h100"].source("peak")
        'NVIDIA H100 data sheet, SXM; with sparsity twice that'
    """

    key: str
    name: str
    kinds: tuple[str, ...]  # a device is one of these if its `device_kind` contains the word
    platform: str
    compute_capability: str

    memory: Annotated[int, "bytes"]
    bandwidth: Annotated[int, "of memory by the data sheet, bytes a second"]
    peak: Annotated[float, "dense bfloat16 by the data sheet, FLOP a second"]
    flops: Annotated[float, "that a large bfloat16 product reaches, FLOP a second"]
    flops_fp32: Annotated[
        float, "that a large float32 product reaches, TF32 if it can, FLOP a second"
    ]
    scheduled_flops: Annotated[float, "by which schedules are judged (bfloat16), FLOP a second"]
    stream: Annotated[float, "read and written by a large copy, bytes a second"]
    sms: Annotated[int, "streaming multiprocessors: tiles of a product that run at once"]
    tile: Annotated[tuple[int, int], "rows and columns of a product that one of them makes"]
    start_up: Annotated[float, "of each product, seconds"]
    launch: Annotated[float, "of each operation that is launched, seconds"]

    # Fused causal attention takes its operations over this rate, and in addition its passes over
    # memory. Operations are those of the scores that are needed: 4 for each score and dimension of
    # a head forward, 10 backward. `FusedAttention` in analysis/matmul_time.py computes it.
    attention_forward_64: Annotated[float, "heads up to 64 wide, FLOP a second"]
    attention_forward_128: Annotated[float, "wider heads, FLOP a second"]
    attention_backward_64: Annotated[float, "heads up to 64 wide, FLOP a second"]
    attention_backward_128: Annotated[float, "wider heads, FLOP a second"]
    attention_forward_passes: Annotated[float, "arrays as large as the queries that pass memory"]
    attention_backward_passes: Annotated[float, "arrays as large as the queries that pass memory"]

    per_node: Annotated[int, "GPUs of a node; in a mesh they follow one another"]
    inside: Annotated[float, "that one GPU sends in its node, bytes a second"]
    between: Annotated[float, "that one GPU sends to another node, bytes a second"]
    # A collective takes its start, a hop for each step of its ring, and then its bytes.
    inside_start: Annotated[float, "of a collective in a node, seconds"]
    inside_hop: Annotated[float, "of each step of a ring in a node, seconds"]
    between_start: Annotated[float, "of a collective between nodes, seconds"]
    between_hop: Annotated[float, "of each step of a ring between nodes, seconds"]
    host_link: Annotated[
        float, "between a GPU and pinned memory of its host, bytes a second, one way"
    ]
    beside: Annotated[float, "seconds that products lose for each that a transfer runs beside them"]
    spread: Annotated[float, "standard deviation of the speed of devices of one kind, of the mean"]
    reserve: Annotated[int, "bytes of `memory` that neither XLA's allocator nor the program counts"]

    sources: Mapping[str, str] = field(hash=False)
    calibrated: Calibration | None = None

    @property
    def device_kind(self) -> str:
        """The name, as a device reports it."""
        return self.name

    def source(self, name: str) -> str:
        """Return the source of a constant."""
        return self.sources[name]

    @classmethod
    def load(cls, path: str | Path) -> "Machine":
        """Return the machine described by a file.

        Raises:
            ValueError: The file is no TOML, or a key is missing, unknown or wrong: it is named.
        """
        return _Reader(Path(path)).machine()

    def write(self, path: str | Path) -> None:
        """Write a file that `load` reads again."""
        replace_text(Path(path), _text(self))

    def check_calibrated_for(self, device_kind: str, jax_version: str) -> None:
        """Check that measured constants are those of this device and this jax.

        Raises:
            ValueError: They were measured on another device, or with another version of jax.
        """
        if self.calibrated is None:
            return
        measured = f"{self.calibrated.device} with jax {self.calibrated.jax}"
        if measured != f"{device_kind} with jax {jax_version}":
            raise ValueError(
                f"machine {self.key!r} was calibrated on {measured} ({self.calibrated.date}), and "
                f"this is {device_kind} with jax {jax_version}. Calibrate it again here."
            )


TEXTS = ("key", "name", "platform", "compute_capability")


CONSTANTS = {  # name -> type and meaning
    name: get_args(hint)
    for name, hint in get_type_hints(Machine, include_extras=True).items()
    if get_origin(hint) is Annotated
}
CALIBRATED = tuple(one.name for one in fields(Calibration))
MAY_BE_NOTHING = {"reserve", "beside", "spread"}


class _Reader:
    """Reads one file; every error names it and the key."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._data = tomllib.loads(path.read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path}: it is no TOML ({error}). Correct that place.") from error

    def machine(self) -> Machine:
        """Return the machine of the file, checked."""
        allowed = {*TEXTS, "kinds", *CONSTANTS, "calibrated"}
        measured_before = {"processor"}  # of CPUs, in files that older versions wrote
        if unknown := [key for key in self._data if key not in allowed | measured_before]:
            self._refuse(unknown[0], f"unknown. Allowed: {', '.join(sorted(allowed))}")
        values: dict[str, Any] = {
            name: self._check_text(name, self._data.get(name)) for name in TEXTS
        }
        values |= {name: self._constant(name, *of) for name, of in CONSTANTS.items()}
        values["sources"] = {name: self._source(name) for name in CONSTANTS}
        return Machine(kinds=self._kinds(), calibrated=self._calibrated(), **values)

    def _refuse(self, key: str, why: str) -> NoReturn:
        raise ValueError(f"{self._path}: {key}: {why}.")

    def _check_text(self, key: str, value: object) -> str:
        if isinstance(value, str) and value.strip():
            return value
        self._refuse(key, f"{_repr_or_missing(value)}: a text is needed")

    def _source(self, name: str) -> str:
        source = self._data[name]["source"]
        if isinstance(source, str) and source.strip():
            return source
        self._refuse(
            f"{name}.source",
            f"{source!r}: name a data sheet or a measurement with its date, or begin with assumed",
        )

    def _kinds(self) -> tuple[str, ...]:
        kinds = self._data.get("kinds")
        if isinstance(kinds, list) and kinds and all(isinstance(x, str) and x for x in kinds):
            return tuple(kinds)
        self._refuse(
            "kinds", f'{_repr_or_missing(kinds)}: a list of texts is needed, as in ["H100", "H800"]'
        )

    def _constant(self, name: str, kind: object, about: str) -> Value:
        """Return the value of a constant."""
        entry = self._data.get(name)
        if not isinstance(entry, dict) or set(entry) != {"value", "source"}:
            needed = f'{{ value = ..., source = "..." }} is needed ({about})'
            self._refuse(name, f"{_repr_or_missing(entry)}: {needed}")
        value = entry["value"]
        if kind != tuple[int, int]:
            return self._check_number(name, value, kind is int)
        if not isinstance(value, list) or len(value) != 2:
            self._refuse(name, f"{value!r}: two numbers are needed, as in [128, 256]")
        high, wide = (int(self._check_number(name, x, True)) for x in value)
        return high, wide

    def _check_number(self, name: str, value: object, require_integer: bool) -> Number:
        """Return a number, checked."""
        about = CONSTANTS[name][1]
        wrong = isinstance(value, bool) or (require_integer and not isinstance(value, int))
        if wrong or not isinstance(value, int | float):
            kind = "a whole number" if require_integer else "a number"
            self._refuse(name, f"{value!r}: {kind} is needed ({about})")
        enough = value >= 0 if name in MAY_BE_NOTHING else value > 0
        if not enough or not math.isfinite(value):
            least = "0 or more" if name in MAY_BE_NOTHING else "more than 0"
            self._refuse(name, f"{value!r}: {least} is needed ({about})")
        return value if require_integer else float(value)

    def _calibrated(self) -> Calibration | None:
        """Return where the constants were measured, if the file says so."""
        table = self._data.get("calibrated")
        if table is None:
            return None
        if not isinstance(table, dict) or set(table) != {*CALIBRATED}:
            self._refuse("calibrated", f"{table!r}: {', '.join(CALIBRATED)} are needed, no others")
        return Calibration(
            **{key: self._check_text(f"calibrated.{key}", table[key]) for key in table}
        )


def _repr_or_missing(value: object) -> str:
    """Return how an error shows a value of a file."""
    return "missing" if value is None else repr(value)


def _spell(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _text(machine: Machine) -> str:
    """Return the text of a machine's file."""
    lines = [f"{name} = {_spell(getattr(machine, name))}" for name in TEXTS]
    lines += [f"kinds = {_spell(machine.kinds)}"]
    for name, (_, about) in CONSTANTS.items():
        value, source = _spell(getattr(machine, name)), _spell(machine.sources[name])
        lines += ["", f"# {about}", f"{name} = {{ value = {value}, source = {source} }}"]
    if machine.calibrated is not None:
        lines += ["", "[calibrated]"]
        lines += [f"{name} = {_spell(getattr(machine.calibrated, name))}" for name in CALIBRATED]
    return "\n".join(lines) + "\n"


MACHINES: Mapping[str, Machine] = {
    path.stem: Machine.load(path) for path in sorted(Path(__file__).parent.glob("*.toml"))
}
H200 = MACHINES["h200"]


def machine_of(device_kind: str) -> Machine | None:
    """Return the machine of a device by its `device_kind`, None if it is not known.

    >>> machine_of("NVIDIA H800").key
    'h100'
    """
    named = (m for m in MACHINES.values() if any(kind in device_kind for kind in m.kinds))
    return next(named, None)
