"""Every codec under test. A new one joins all suites of this folder by a line here."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from fedlm.wire.catalog import codec

CODECS = [
    codec("float32"),
    codec("bfloat16"),
    codec("uniform", bits=1),
    codec("uniform", bits=3),
    codec("uniform", bits=8),
    codec("uniform", bits=13),
    codec("uniform", bits=16),
    codec("uniform", bits=4, block=8),
    codec("ternary"),
    codec("drive"),
    codec("drive", scale="unbiased", block=16),
    codec("topk", share=0.2),
    codec("topk", share=0.05, values="float16"),
    codec("uniform", bits=4, deflate=True),
    codec("topk", share=0.5, deflate=True),
    codec("secure", bits=12, clip=0.3, members=10),
    codec("secure", bits=32, clip=2.0, members=3),
]
BY_NAME = {c.name: c for c in CODECS}
all_codecs = pytest.mark.parametrize("codec", CODECS, ids=lambda c: c.name)
lossy = pytest.mark.parametrize("codec", CODECS[1:], ids=lambda c: c.name)

SHAPES = {"a": (7, 9), "b": (37,), "c": (), "none": (0, 3), "z": (5,)}


def update(seed=0):
    """A tree with a matrix, a vector, a number, an empty leaf and a leaf of zeros."""
    keys = jr.split(jr.key(seed), len(SHAPES))
    made = {n: jr.normal(k, s) for k, (n, s) in zip(keys, SHAPES.items(), strict=True)}
    return made | {"z": jnp.zeros(5)}


def filled(values):
    """The same tree with given values, repeated as often as needed."""
    made = {n: jnp.asarray(np.resize(np.asarray(values, np.float32), s)) for n, s in SHAPES.items()}
    return made | {"z": jnp.zeros(5)}


def same_bits(a, b):
    """Structure, types and every bit agree."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes(), (x, y)


def length(tree):
    """The norm, in float64."""
    return np.sqrt(sum(np.sum(np.asarray(x, np.float64) ** 2) for x in jax.tree.leaves(tree)))
