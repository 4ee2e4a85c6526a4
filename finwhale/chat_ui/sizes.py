"""Sizes as people write them on a command line: 200GB, 64MB."""

from __future__ import annotations

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def size_in_bytes(text: str, flag: str) -> int:
    """Return 200GB, 64MB or 1000000 as bytes. Raises ValueError naming the flag."""
    number, unit = text.strip().upper().removesuffix("B"), ""
    if number and number[-1] in _UNITS:
        number, unit = number[:-1], number[-1]
    try:
        size = float(number) * _UNITS[unit]
    except ValueError:
        size = 0.0
    if not 1 <= size < 1 << 62:
        raise ValueError(f"{flag}: got {text!r}, expected a size as in 200GB or 64MB")
    return int(size)
