"""Numbers of bytes as people write them."""

import re

UNITS = {
    **{"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12},
    **{"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40},
}


def bytes_of(text: str, name: str = "size") -> int:
    """Return how many bytes a text says; a bare number is bytes.

    >>> bytes_of("24GiB") == 24 * 2**30, bytes_of("1.5 MB"), bytes_of("512")
    (True, 1500000, 512)
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if not found or (found[2] and found[2].lower() not in UNITS):
        raise ValueError(
            f"{name} {text}: a size is expected, for instance 24GiB (of 1024) or 24GB (of 1000)."
        )
    return round(float(found[1]) * UNITS[found[2].lower() or "b"])


def human(n: float) -> str:
    """Return a number of bytes as people write it.

    >>> human(3 * 2**20)
    '3.0 MiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.1f} TiB"
