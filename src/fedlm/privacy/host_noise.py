"""Normal noise for small releases that are made on the host.

In:       a secret seed and an address (purpose, round).
Out:      standard normal numbers in 64-bit floating point, or numbers rounded to a grid.
Promise:  who does not know the seed cannot tell the numbers from chance: they are made of the
          stream of ChaCha20 under the address's key of 256 bits, as all noise is; the same address
          gives the same numbers.
Not here: the cipher (`core/chacha.py`), noise on sums of updates (`noise.py`).

Uniform numbers of 53 bits become normal ones by Box and Muller's formula, so that none is larger
than 8.7; the probability beyond is below 1e-17.
"""

from __future__ import annotations

import jax
import numpy as np

from fedlm.core import chacha
from fedlm.core.keys import Purpose, cipher_key_for

STEPS = 1 << 10  # per unit of a released number
LARGEST = 8.7  # no drawn number is larger
AT_ONCE = 1 << 10  # blocks of the cipher, so that one compiled program serves all


def standard_normal(seed: int, purpose: Purpose, count: int, *, round: int = 0) -> np.ndarray:
    """Return `count` standard normal numbers of an address.

    >>> standard_normal(7, "vocabulary", 3).shape
    (3,)
    """
    half = -(-count // 2)
    bits = _words(seed, purpose, round, 2 * half).reshape(2, half) >> np.uint64(11)
    radius = np.sqrt(-2 * np.log((bits[0] + 0.5) * 2.0**-53))
    angle = 2 * np.pi * bits[1] * 2.0**-53
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]


def _words(seed: int, purpose: Purpose, round: int, count: int) -> np.ndarray:
    """Return the first words of 64 bits of the stream of an address."""
    key = cipher_key_for(seed, purpose, round=round)
    each = AT_ONCE * chacha.BLOCK // 2
    parts = [
        np.asarray(_blocks(key, first * AT_ONCE)).T.astype("<u4").tobytes()
        for first in range(-(-count // each))
    ]
    return np.frombuffer(b"".join(parts), "<u8")[:count]


@jax.jit
def _blocks(key: chacha.CipherKey, first: int) -> jax.Array:
    return chacha.blocks(key, 0, first, AT_ONCE)


def on_grid(values: np.ndarray) -> np.ndarray:
    """Round noisy numbers to multiples of 1 / `STEPS`, which hides the low bits of the noise."""
    return np.round(np.asarray(values, np.float64) * STEPS) / STEPS
