"""The cipher is the published one, and a key has all its bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedlm.core import chacha
from fedlm.core.keys import cipher_key_for

# RFC 8439, appendix A.1: the last word of the key, the counter, the block.
ZERO = (
    "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
    "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586"
)
PUBLISHED = [
    (0, 0, ZERO),
    (
        0x01000000,
        1,
        "3aeb5224ecf849929b9d828db1ced4dd832025e8018b8160b82284f3c949aa5a"
        "8eca00bbb4a73bdad192b5c42f73f2fd4e273644c8b36125a64addeb006c13a0",
    ),
]


@pytest.mark.parametrize("last, counter, block", PUBLISHED)
def test_published_blocks(last, counter, block):
    key = jnp.zeros(8, jnp.uint32).at[7].set(last)
    words = np.asarray(chacha.blocks(key, 0, counter, 1))[:, 0]
    assert words.astype("<u4").tobytes().hex() == block


def test_another_implementation():
    algorithms = pytest.importorskip("cryptography.hazmat.primitives.ciphers")
    key = np.frombuffer(bytes(range(32)), "<u4")
    number, first, count = 0xFEDCBA98, 5, 9
    start = np.array([first, number, 0, 0], "<u4").tobytes()
    cipher = algorithms.Cipher(algorithms.algorithms.ChaCha20(bytes(range(32)), start), mode=None)
    wanted = np.frombuffer(cipher.encryptor().update(bytes(64 * count)), "<u4").reshape(count, 16)
    found = chacha.blocks(jnp.asarray(key), np.uint32(number), first, count)
    assert (wanted == np.asarray(found).T).all()


def test_every_bit_of_a_key_counts():
    """A key whose bits are folded together, or cut, would give equal words for some of these."""
    key = cipher_key_for(0, "noise")
    assert key.shape == (8,) and key.dtype == jnp.uint32
    one_off = [
        key.at[word].set(key[word] ^ np.uint32(1 << bit)) for word in range(8) for bit in (0, 31)
    ]
    block = jax.jit(lambda key: chacha.blocks(key, 0, 0, 1))
    drawn = {np.asarray(block(k)).tobytes() for k in (key, *one_off)}
    assert len(drawn) == 17
    # The sum's whole digest makes the key, not its first bits.
    far = cipher_key_for(0, "noise", member=2**255)
    assert (
        len({bytes(np.asarray(k)) for k in (key, far, cipher_key_for(0, "noise", member=1))}) == 3
    )
    assert (chacha.fold_in(key, 1) != chacha.fold_in(key, 2)).any()
