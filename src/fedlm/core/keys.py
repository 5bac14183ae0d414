"""Randomness, addressed by purpose, round and member.

In:       the run's seed and an address (purpose, round, member).
Out:      a JAX key, a cipher's key or a NumPy generator that depends on that address and on
          nothing else.
Promise:  resumed, reordered or parallel, the same address gives the same numbers;
          different addresses give unrelated ones. What must stay secret is drawn with a cipher's
          key, which has 256 bits; a JAX key has 64.
Not here: drawing (each package draws with the key that it is given), the cipher (`chacha.py`).
"""

from __future__ import annotations

import hashlib
from typing import Literal, get_args

import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import PRNGKeyArray

from fedlm.core.chacha import CipherKey

Purpose = Literal[
    "init",
    "cohort",
    "deal",
    "shuffle",
    "upload",
    "download",
    "rotation",
    "partial",
    "noise",
    "canary",
    "evaluate",
    "generate",
    "synthetic",
    "vocabulary",
    "selection",
    "account",
    "delay",
    "tune",
]
PURPOSES: tuple[str, ...] = get_args(Purpose)


def digest_for(seed: int, purpose: Purpose, *, round: int = 0, member: int = 0) -> bytes:
    """Return the 32-byte hash of an address, from which its key and its generator are made."""
    if purpose not in PURPOSES:
        raise ValueError(f"unknown purpose {purpose!r}; known: {', '.join(PURPOSES)}")
    address = f"fedlm/{int(seed)}/{purpose}/{int(round)}/{int(member)}"
    return hashlib.blake2b(address.encode(), digest_size=32).digest()


def key_for(seed: int, purpose: Purpose, *, round: int = 0, member: int = 0) -> PRNGKeyArray:
    """Return the JAX key of an address."""
    digest = digest_for(seed, purpose, round=round, member=member)
    return jr.wrap_key_data(jnp.asarray(key_data(digest)), impl="threefry2x32")


def cipher_key_for(seed: int, purpose: Purpose, *, round: int = 0, member: int = 0) -> CipherKey:
    """Return the cipher key of an address: all 256 bits of its hash."""
    digest = digest_for(seed, purpose, round=round, member=member)
    return jnp.asarray(np.frombuffer(digest, "<u4").astype(np.uint32))


def key_data(digest: bytes) -> np.ndarray:
    """Return the first eight bytes of a digest as the data of a JAX key."""
    return np.frombuffer(digest[:8], np.uint32)


def generator_for(
    seed: int, purpose: Purpose, *, round: int = 0, member: int = 0
) -> np.random.Generator:
    """Return the NumPy generator of an address, for work on the host."""
    digest = digest_for(seed, purpose, round=round, member=member)
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest[8:24], "little")))
