"""Number formats in exact rational arithmetic: what the codecs are judged by.

Built from the bit fields of the formats with Python integers and fractions; uses neither torch
nor the package, so an agreement says something.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from fractions import Fraction


def e4m3_values() -> list[Fraction]:
    """Values of codes 0..126 of float8_e4m3fn (code 127 is NaN), increasing."""
    values = []
    for code in range(127):
        exponent, mantissa = code >> 3, code & 7
        if exponent == 0:
            values.append(Fraction(mantissa, 8) * Fraction(1, 2**6))
        else:
            values.append((1 + Fraction(mantissa, 8)) * Fraction(2) ** (exponent - 7))
    return values


def e2m1_values() -> list[Fraction]:
    """Values of codes 0..7, increasing."""
    values = []
    for code in range(8):
        exponent, mantissa = code >> 1, code & 1
        if exponent == 0:
            values.append(Fraction(mantissa, 2))
        else:
            values.append((1 + Fraction(mantissa, 2)) * Fraction(2) ** (exponent - 1))
    return values


E4M3, E2M1 = e4m3_values(), e2m1_values()


def nearest_code(x: Fraction, values: Sequence[Fraction]) -> int:
    """Code of the value nearest to x >= 0, ties to the even code, saturating."""
    x = min(x, values[-1])
    above = bisect_left(values, x)
    near = range(max(above - 1, 0), above + 1)
    return min(near, key=lambda code: (abs(values[code] - x), code % 2))


def ceil_log2(x: Fraction) -> int:
    """The least k with 2^k >= x, for x > 0."""
    k = x.numerator.bit_length() - x.denominator.bit_length() - 1
    while Fraction(2) ** k < x:
        k += 1
    return k


def round_to(x: Fraction, scale: Fraction, values: Sequence[Fraction]) -> Fraction:
    """Nearest signed multiple `scale * value` of x."""
    magnitude = values[nearest_code(abs(x) / scale, values)] * scale
    return -magnitude if x < 0 else magnitude


def rounded_block(block: Sequence[float], values: Sequence[Fraction]) -> list[float]:
    """The block after rounding with the scale 2^ceil(log2(amax / largest value))."""
    exact = [Fraction(x) for x in block]
    amax = max(abs(x) for x in exact)
    if amax == 0:
        return [0.0 for _ in exact]
    scale = Fraction(2) ** ceil_log2(amax / values[-1])
    return [float(round_to(x, scale, values)) for x in exact]
