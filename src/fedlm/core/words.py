"""Numbers and counts as people read them.

In:       numbers with their meaning: a figure, a count of things, bytes, seconds, a chance.
Out:      short text, the same on the terminal, on pages and in cards.
Promise:  no exponents, no "1 clients", no digits that say nothing.
Not here: which numbers are told (`privacy/release.py`), tables (`cli/console.py`).
"""

from __future__ import annotations

import math
from typing import Any

NOTHING = "-"
IRREGULAR = {"branch": "branches", "leaf": "leaves", "box": "boxes"}
# Below this a number is written as a bound: nobody counts so many zeros.
LEAST = 1e-12


def number(value: Any, digits: int = 4) -> str:
    """Return a number with `digits` digits that count, and commas between thousands.

    >>> number(69812.7), number(3.14159), number(1e-6), number(12), number(None)
    ('69,813', '3.142', '0.000001', '12', '-')
    """
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return NOTHING
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if math.isinf(value):
        return "infinite" if value > 0 else "-infinite"
    if isinstance(value, int) or value == 0:
        return f"{value:,.0f}"
    if abs(value) < LEAST:
        return f"below {LEAST:.12f}"
    places = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{places}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def count(number: float, noun: str) -> str:
    """Return a number with its noun in the singular or the plural.

    >>> count(1, "member"), count(20_000, "client"), count(2, "leaf")
    ('1 member', '20,000 clients', '2 leaves')
    """
    shown = f"{number:,.0f}" if float(number).is_integer() else f"{number:,.1f}"
    return f"{shown} {noun if number == 1 else IRREGULAR.get(noun, f'{noun}s')}"


def size(number: float) -> str:
    """Return a number of bytes with a unit.

    >>> size(999), size(1_500), size(2.5e9)
    ('999 B', '1.5 kB', '2.5 GB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:,.1f} TB"


def duration(seconds: float) -> str:
    """Return a time in the unit that fits it.

    >>> duration(4.25), duration(90), duration(7200)
    ('4.2 s', '90 s', '2 h 0 min')
    """
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 120:
        return f"{minutes} min"
    return f"{minutes // 60:,} h {minutes % 60} min"


def chance(value: float) -> str:
    """Return a small probability as one in so many.

    >>> chance(1e-6), chance(0.25)
    ('1 in 1,000,000', '1 in 4')
    """
    return f"1 in {1 / value:,.0f}" if value > 0 else "zero"
