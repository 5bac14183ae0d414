"""Normal noise for small releases that are made on the host.

In:       a secret seed and an address (purpose, round).
Out:      standard normal numbers in 64-bit floating point, or numbers rounded to a grid.
Promise:  who does not know the seed cannot tell the numbers from chance: they are made of the
          output of SHAKE-256, not of a statistical generator; the same address gives the same
          numbers.
Not here: noise on sums of updates (`noise.py`), which is drawn on the device.

Uniform numbers of 53 bits become normal ones by Box and Muller's formula, so that none is larger
than 8.7; the probability beyond is below 1e-17.
"""

from __future__ import annotations

import hashlib

import numpy as np

from fedlm.core.keys import Purpose, digest_for

STEPS = 1 << 10  # per unit of a released number


def standard_normal(seed: int, purpose: Purpose, count: int, *, round: int = 0) -> np.ndarray:
    """Return `count` standard normal numbers of an address.

    >>> standard_normal(7, "vocabulary", 3).shape
    (3,)
    """
    half = -(-count // 2)
    stream = hashlib.shake_256(digest_for(seed, purpose, round=round)).digest(16 * half)
    bits = np.frombuffer(stream, "<u8").reshape(2, half) >> np.uint64(11)
    radius = np.sqrt(-2 * np.log((bits[0] + 0.5) * 2.0**-53))
    angle = 2 * np.pi * bits[1] * 2.0**-53
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]


def on_grid(values: np.ndarray) -> np.ndarray:
    """Round noisy numbers to multiples of 1 / `STEPS`, which hides the low bits of the noise."""
    return np.round(np.asarray(values, np.float64) * STEPS) / STEPS
