"""Arithmetic on Kubernetes' quantities, as far as we need it: the sum of two amounts of memory."""

from __future__ import annotations

import re
from fractions import Fraction

NUMBER = r"[0-9]+([.][0-9]*)?([eE][+-]?[0-9]{1,2})?"

FACTORS = {
    "n": Fraction(1, 10**9),
    "u": Fraction(1, 10**6),
    "m": Fraction(1, 1000),
    "": Fraction(1),
    **{suffix: Fraction(1000 ** (power + 1)) for power, suffix in enumerate("kMGTPE")},
    **{f"{suffix}i": Fraction(1024 ** (power + 1)) for power, suffix in enumerate("KMGTPE")},
}


def read_quantity(quantity: int | str) -> Fraction:
    """Reads a quantity such as ``16Gi``.

    Raises:
        ValueError: It is none.
    """
    text = str(quantity)
    digits = text.rstrip("numkKMGTPEi")
    suffix = text[len(digits) :]
    if suffix not in FACTORS or not re.fullmatch(NUMBER, digits):
        raise ValueError(f"{quantity!r} is not a quantity such as 2, 500m or 16Gi")
    # Fraction reads 1e3 as well.
    return Fraction(digits) * FACTORS[suffix]


def add_bytes(first: int | str, second: int | str) -> str:
    """Adds two amounts of memory, rounded up to whole bytes."""
    total = read_quantity(first) + read_quantity(second)
    whole = -(-total.numerator // total.denominator)
    return f"{whole // 2**20}Mi" if whole % 2**20 == 0 else str(whole)
