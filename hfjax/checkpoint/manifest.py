"""The checksum of every file of a step: what Orbax reads back without noticing is noticed here."""

import json
import os
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hfjax.checkpoint.directory import ENDS
from hfjax.checkpoint.metadata import FILE, FORMAT, check_format
from hfjax.utils.read_files import (
    MISSING,
    ORDINARY,
    TEXT,
    check_fields,
    contents,
    crc32,
    object_of,
    parsed,
    what_is,
    whole,
)
from hfjax.utils.tables import named

NAME = "manifest.json"
LATER = {NAME, *ENDS}  # written after it; never read
KINDS = {"format": whole(1), "files": object_of("texts", TEXT[1])}


def write_manifest(step: Path) -> None:
    """Write the size and CRC32 of every file below a directory into its manifest."""
    files = {name: f"{crc:08x} {size}" for name, (size, crc) in _sums(step, _files(step)).items()}
    with open(step / NAME, "x") as file:
        json.dump({"format": FORMAT, "files": files}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def manifest_sum(step: Path) -> str | None:
    """Return the CRC32 of a step's manifest, which tells it from other steps; None: it has none."""
    found = _sums(step, [NAME] * (what_is(step / NAME) == ORDINARY))
    return f"CRC32 {found[NAME][1]:08x} of its {NAME}" if found else None


def find_damage(step: Path) -> list[str]:
    """Return what is wrong with the files of a step, each named; nothing if it is whole."""
    if what_is(step / NAME) == MISSING:
        return [f"{NAME} is missing"]
    try:
        found = check_fields(parsed(contents(step / NAME)), KINDS)
        wanted = {name: _parsed(told) for name, told in found["files"].items()}
        _check_names(wanted)
    except (ValueError, OSError) as wrong:
        return [f"{NAME} does not parse ({str(wrong).rstrip('.')})"]
    check_format(step, found["format"])
    here = _sums(step, [name for name in wanted if what_is(step / name) == ORDINARY])
    told = [_compared(name, wanted[name], here.get(name)) for name in sorted(wanted)]
    return [line for line in told if line is not None]


def _check_names(names: Collection[str]) -> None:
    """Refuse the names of files elsewhere, and a list without the file that each step has."""
    if FILE not in names:
        raise ValueError(f"it does not name {FILE}")
    for name in names:
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(f"{named(name)} is not of this step")


def _parsed(told: str) -> tuple[int, int]:
    crc, size = told.split()
    return int(size), int(crc, 16)


def _compared(name: str, wanted: tuple, found: tuple | None) -> str | None:
    what = named(name)
    if found is None:
        return f"{what} is missing"
    if found[0] != wanted[0]:
        return f"{what} has {found[0]} bytes, {wanted[0]} were written"
    if found[1] != wanted[1]:
        return f"{what} has CRC32 {found[1]:08x}, {wanted[1]:08x} was written"
    return None


def _files(step: Path) -> list[str]:
    found = sorted(str(p.relative_to(step)) for p in step.rglob("*") if p.is_file())
    return [name for name in found if name not in LATER]


def _sums(step: Path, names: list[str]) -> dict[str, tuple[int, int]]:
    """Return {name: (bytes, CRC32)}."""
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        return dict(zip(names, pool.map(lambda name: _sum(step / name), names), strict=True))


def _sum(path: Path) -> tuple[int, int]:
    return path.stat().st_size, crc32(path)
