"""Shamir's secret sharing over a prime field.

In:       a secret of 32 bytes, a threshold, the places of those who hold shares.
Out:      a share per place; the secret again from enough of them.
Promise:  fewer shares than the threshold are independent of the secret; any `threshold` right
          shares give it back; the arithmetic is exact.
Not here: who holds a share (`node.py`), what is shared (`node.py`).

The field is that of the integers modulo 2^256 + 297, the least prime above all secrets of 32
bytes (`tests/secure/test_shamir.py` checks both). The secret is the value at 0 of a polynomial of
degree threshold - 1, the share of place i its value at i + 1. Given threshold - 1 shares, every
secret fits exactly one polynomial, and all polynomials are equally likely. Python's integers take
time that depends on their values: a node that shares a processor with an attacker is not defended.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping

PRIME = 2**256 + 297
SECRET_BYTES, SHARE_BYTES = 32, 33


def split(
    secret: bytes, threshold: int, places: Iterable[int], draw: Callable[[int], bytes]
) -> dict[int, bytes]:
    """Return the share of each place; `draw(n)` gives n secret bytes for the polynomial."""
    if len(secret) != SECRET_BYTES or threshold < 1:
        raise ValueError(f"{len(secret)} bytes, threshold {threshold}: cannot be shared")
    # 48 bytes per coefficient: modulo the prime, they are uniform up to 2^-127.
    rest = [int.from_bytes(draw(48), "big") % PRIME for _ in range(threshold - 1)]
    polynomial = [int.from_bytes(secret, "big"), *rest]
    return {i: evaluate(polynomial, i + 1).to_bytes(SHARE_BYTES, "big") for i in places}


def combine(shares: Mapping[int, bytes]) -> bytes | None:
    """Return the secret of the polynomial through all shares; None if it is no secret."""
    value = at(shares, 0)
    return value.to_bytes(SECRET_BYTES, "big") if value < 2 ** (8 * SECRET_BYTES) else None


def share_at(shares: Mapping[int, bytes], place: int) -> bytes:
    """Return the share of another place, on the polynomial through the given shares."""
    return at(shares, place + 1).to_bytes(SHARE_BYTES, "big")


def is_share(data: bytes) -> bool:
    """Tell whether bytes are the one encoding of a number of the field."""
    return len(data) == SHARE_BYTES and int.from_bytes(data, "big") < PRIME


def at(shares: Mapping[int, bytes], x: int, prime: int = PRIME) -> int:
    """Return the value at x of the polynomial through all shares (Lagrange)."""
    values = (int.from_bytes(share, "big") for share in shares.values())
    weights = _weights(tuple(place + 1 for place in shares), x, prime)
    return sum(w * y for w, y in zip(weights, values, strict=True)) % prime


@functools.lru_cache(maxsize=4096)  # the same holders open one secret after the other
def _weights(points: tuple[int, ...], x: int, prime: int) -> tuple[int, ...]:
    """Return the Lagrange weights at x of the values at some points."""
    found = []
    for xi in points:
        above = below = 1
        for xj in points:
            if xj != xi:
                above = above * (x - xj) % prime
                below = below * (xi - xj) % prime
        found.append(above * pow(below, -1, prime) % prime)
    return tuple(found)


def evaluate(polynomial: list[int], x: int, prime: int = PRIME) -> int:
    """Return the value at x of the polynomial with these coefficients, the constant one first."""
    value = 0
    for coefficient in reversed(polynomial):
        value = (value * x + coefficient) % prime
    return value
