"""Every codec under test. A new one joins all suites of this folder by a line here."""

import random
from collections import defaultdict

import jax
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


def drawn(codecs, most=2):
    """A few codecs of each family, by a fixed seed: all tests of the default run take the same
    ones, so that each is compiled once."""
    families = defaultdict(list)
    for c in codecs:
        families[c.name.split("-")[0], "+" in c.name].append(c.name)
    rng = random.Random(0)
    return {
        name for of in families.values() for name in rng.sample(of, min(len(of) - 1, most) or 1)
    }


DEFAULT = drawn(CODECS)


def over(codecs, name="codec", of=lambda c: c):
    """A test for each codec; those that were not drawn are slow."""
    marks = [() if c.name in DEFAULT else pytest.mark.slow for c in codecs]
    cases = [pytest.param(of(c), marks=m, id=c.name) for c, m in zip(codecs, marks, strict=True)]
    return pytest.mark.parametrize(name, cases)


all_codecs = over(CODECS)
all_names = over(CODECS, "name", lambda c: c.name)
lossy = over(CODECS[1:])

SHAPES = {"a": (7, 9), "b": (37,), "c": (), "none": (0, 3), "z": (5,)}


def update(seed=0):
    """A tree with a matrix, a vector, a number, an empty leaf and a leaf of zeros."""
    rng = np.random.default_rng(seed)
    made = {n: np.asarray(rng.normal(size=s), np.float32) for n, s in SHAPES.items()}
    return made | {"z": np.zeros(5, np.float32)}


def filled(values):
    """The same tree with given values, repeated as often as needed."""
    made = {n: np.resize(np.asarray(values, np.float32), s) for n, s in SHAPES.items()}
    return made | {"z": np.zeros(5, np.float32)}


def same_bits(a, b):
    """Structure, types and every bit agree."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes(), (x, y)


def length(tree):
    """The norm, in float64."""
    return np.sqrt(sum(np.sum(np.asarray(x, np.float64) ** 2) for x in jax.tree.leaves(tree)))
