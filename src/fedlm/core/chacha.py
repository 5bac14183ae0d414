"""ChaCha20 on the device: random words that nobody without the key can tell from chance.

In:       a key of 256 bits, the number of a stream, which of its blocks.
Out:      the words of those blocks.
Promise:  the key stream of RFC 8439, equal to the bit on every processor; streams of different
          keys or numbers are unrelated.
Not here: which key (`keys.py`), what is made of the words (`privacy/noise.py`).

JAX's own generators are not enough for noise that must stay secret. The key of threefry2x32 has 64
bits. That of rbg has 128, of which Philox takes 64 as its key; the others are where it starts to
count, and one block of output gives them away to whoever tries all keys.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int, UInt32

CipherKey = UInt32[Array, "8"]
_CONSTANTS = np.frombuffer(b"expand 32-byte k", "<u4")
BLOCK = 16  # words


def blocks(
    key: CipherKey, number: int | Int[Array, ""], first: int | Int[Array, ""], count: int
) -> UInt32[Array, "16 blocks"]:
    """Return `count` blocks of a stream from the `first` on, one block per column.

    The number is the first word of the nonce; a stream has 2^32 blocks.
    """
    counter = _word(first) + lax.iota(jnp.uint32, count)
    nonce = [_word(number), _word(0), _word(0)]
    words = [*(_word(int(c)) for c in _CONSTANTS), *key, counter, *nonce]
    start = tuple(jnp.broadcast_to(word, counter.shape) for word in words)
    end = lax.fori_loop(0, 10, _two_rounds, start)
    return jnp.stack([a + b for a, b in zip(start, end, strict=True)])


def fold_in(key: CipherKey, number: int | Int[Array, ""]) -> CipherKey:
    """Return a key of its own: the first 256 bits of a stream that nothing else is drawn from."""
    return blocks(key, number, 0, 1)[:8, 0]


def _word(x: int | Int[Array, ""]) -> UInt32[Array, ""]:
    return jnp.asarray(x, jnp.uint32)


def _two_rounds(_: Int[Array, ""], state: tuple[Array, ...]) -> tuple[Array, ...]:
    """Mix the columns, then the diagonals, of the square of sixteen words."""
    words = list(state)
    for shift in (0, 1):
        for i in range(4):
            at = [4 * row + (i + shift * row) % 4 for row in range(4)]
            for place, word in zip(at, _quarter(*(words[a] for a in at)), strict=True):
                words[place] = word
    return tuple(words)


def _quarter(a: Array, b: Array, c: Array, d: Array) -> tuple[Array, Array, Array, Array]:
    for left, right in ((16, 12), (8, 7)):
        a = a + b
        d = _turn(d ^ a, left)
        c = c + d
        b = _turn(b ^ c, right)
    return a, b, c, d


def _turn(x: Array, by: int) -> Array:
    return (x << np.uint32(by)) | (x >> np.uint32(32 - by))
