"""A small federation for tests; its identities are made once."""

import functools

import numpy as np

from fedlm.secure.local import made_up_members
from fedlm.secure.terms import Session, Terms

RUN = "5ec0" * 8


@functools.cache
def people(count):
    return made_up_members(count)


def session(count=5, threshold=None, bits=16, size=7, round=3, attempt=0, **more):
    members, _ = people(count)
    t = threshold or count // 2 + 1
    terms = Terms(members=members, threshold=t, bits=bits, size=size, **more)
    return Session(terms, RUN, round, attempt)


def identities(count=5):
    return people(count)[1]


def vectors(count=5, bits=16, size=7, seed=0):
    rng = np.random.default_rng(seed)
    drawn = rng.integers(0, 2**bits, (count, size), np.uint64)
    return list(drawn.astype(np.uint32 if bits <= 32 else np.uint64))


def added(vectors, places, bits=16):
    return sum(vectors[i].astype(object) for i in places) % 2**bits
