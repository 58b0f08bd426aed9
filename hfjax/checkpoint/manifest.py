"""Checksums of every file of a step: they reveal damage that Orbax reads without noticing."""

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
    crc32,
    integer,
    object_of,
    parse_json,
    path_kind,
    read_text,
)
from hfjax.utils.tables import quote

NAME = "manifest.json"
EXCLUDED = {NAME, *ENDS}  # written after it; never read
CHECKS = {"format": integer(1), "files": object_of("texts", TEXT[1])}


def write_manifest(step: Path) -> None:
    """Write the size and CRC32 of every file below a directory into its manifest."""
    files = {
        name: f"{crc:08x} {size}" for name, (size, crc) in _checksums(step, _files(step)).items()
    }
    with open(step / NAME, "x") as file:
        json.dump({"format": FORMAT, "files": files}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def manifest_checksum(step: Path) -> str | None:
    """Return the CRC32 of a step's manifest, which identifies the step; None if it has none."""
    sums = _checksums(step, [NAME] * (path_kind(step / NAME) == ORDINARY))
    return f"CRC32 {sums[NAME][1]:08x} of its {NAME}" if sums else None


def find_damage(step: Path) -> list[str]:
    """Return a line for each damaged file of a step; none if it is intact."""
    if path_kind(step / NAME) == MISSING:
        return [f"{NAME} is missing"]
    try:
        manifest = check_fields(parse_json(read_text(step / NAME)), CHECKS)
        expected = {name: _parse_checksum(lines) for name, lines in manifest["files"].items()}
        _check_names(expected)
    except (ValueError, OSError) as wrong:
        return [f"{NAME} does not parse ({str(wrong).rstrip('.')})"]
    check_format(step, manifest["format"])
    actual = _checksums(step, [name for name in expected if path_kind(step / name) == ORDINARY])
    lines = [_compare_file(name, expected[name], actual.get(name)) for name in sorted(expected)]
    return [line for line in lines if line is not None]


def _check_names(names: Collection[str]) -> None:
    """Refuse names outside the step, and a list without the metadata that each step has."""
    if FILE not in names:
        raise ValueError(f"it does not name {FILE}")
    for name in names:
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(f"{quote(name)} is not of this step")


def _parse_checksum(crc_and_size: str) -> tuple[int, int]:
    crc, size = crc_and_size.split()
    return int(size), int(crc, 16)


def _compare_file(name: str, expected: tuple, actual: tuple | None) -> str | None:
    label = quote(name)
    if actual is None:
        return f"{label} is missing"
    if actual[0] != expected[0]:
        return f"{label} has {actual[0]} bytes, {expected[0]} were written"
    if actual[1] != expected[1]:
        return f"{label} has CRC32 {actual[1]:08x}, {expected[1]:08x} was written"
    return None


def _files(step: Path) -> list[str]:
    paths = sorted(str(p.relative_to(step)) for p in step.rglob("*") if p.is_file())
    return [name for name in paths if name not in EXCLUDED]


def _checksums(step: Path, names: list[str]) -> dict[str, tuple[int, int]]:
    """Return {name: (bytes, CRC32)}."""
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        return dict(zip(names, pool.map(lambda name: _checksum(step / name), names), strict=True))


def _checksum(path: Path) -> tuple[int, int]:
    return path.stat().st_size, crc32(path)
