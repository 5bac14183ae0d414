"""The vector of a secure sum: the integers of updates, then a few counts, then nothing else.

In:       the updates of a node's members; afterwards the words of the opened sum.
Out:      words modulo 2^bits for the protocol; the sum of updates and the counts again.
Promise:  each update is rounded by itself; no count can overflow, whatever the width of words; a
          node without members has a vector of the same size; under noise at nodes there are no
          counts, because they would have none.
Not here: the protocol (`secure`), the range and the rounding (`wire/fixed_point.py`).

Counts. A number of 62 bits does not fit into a word of b bits beside those of n nodes. It is cut
into pieces of w = b - ceil(log2 n) bits. The sum of n pieces is at most n (2^w - 1) < 2^b: it does
not wrap around, and the sum of the numbers is put together from the sums of their pieces.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import jax.numpy as jnp
import numpy as np

from fedlm.core.errors import EngineError, require
from fedlm.core.types import PyTree, Total, Update

COUNTS = ("weight", "nats", "tokens", "steps", "refused", "unclipped")
UNIT = 2.0**-20
MOST_COUNT = 2.0**42 - 1
COUNT_BITS = 62


class Integers(Protocol):
    """The integers of a secure sum (`recipe/secure_sums.py` makes them)."""

    @property
    def bits(self) -> int:
        """Sums are modulo 2^bits."""

    @property
    def members(self) -> int:
        """The largest number of updates in a sum."""

    def size(self, like: PyTree) -> int:
        """Return how many integers an update has."""

    def rounded(self, delta: PyTree, clip_norm: float, round: int, member: int) -> np.ndarray:
        """Return the integers of one update."""

    def wrapped(self, total: np.ndarray) -> np.ndarray:
        """Return signed integers as words modulo 2^bits."""

    def values(self, words: np.ndarray, like: PyTree, round: int) -> PyTree:
        """Return the numbers of a sum in the shapes of a model."""


class Shares(Protocol):
    """Noise of which each node adds a share (`privacy/distributed.py` makes it)."""

    def share(self, seed: bytes) -> np.ndarray:
        """Return the noise that one node adds to the sum of its clients' integers."""

    def excess(self, survivors: int) -> float:
        """Return the noise variance of a sum over `survivors` nodes, relative to the plan's."""


@dataclass(frozen=True, kw_only=True)
class SumVector:
    """What the nodes of a round add up."""

    integers: Integers
    nodes: int  # that take part in a sum at most
    like: PyTree  # the shapes of an update
    shares: Shares | None = None  # noise at nodes

    def __post_init__(self) -> None:
        require(
            self.shares is not None or self.piece >= 1,
            "wire.upload",
            f"{self.integers.bits} bits",
            f"more than {self.integers.bits - self.piece} bits, because {self.nodes} nodes add up "
            "counts too",
        )

    @property
    def piece(self) -> int:
        """Bits of a count that one word carries."""
        return self.integers.bits - math.ceil(math.log2(self.nodes))

    @property
    def pieces(self) -> int:
        """Words of one count; none under noise at nodes."""
        return 0 if self.shares is not None else -(-COUNT_BITS // self.piece)

    @property
    def size(self) -> int:
        """Words of a vector."""
        return self.integers.size(self.like) + len(COUNTS) * self.pieces

    def excess(self, survivors: int) -> float | None:
        """Return `Shares.excess` of a sum over `survivors` nodes; None if nodes add no noise."""
        return None if self.shares is None else self.shares.excess(survivors)

    def words(self, codes: np.ndarray, counts: dict[str, float], seed: bytes) -> np.ndarray:
        """Return a node's vector; `seed` is the secret of its noise, if nodes add noise."""
        if self.shares is not None:
            codes = codes + self.shares.share(seed)
        told = [_units(counts.get(name, 0.0)) for name in COUNTS]
        cut = [(n >> (self.piece * at)) & (2**self.piece - 1) for n in told for at in self._places]
        plain = self.integers.wrapped(codes)
        return np.concatenate([plain, np.array(cut, plain.dtype)])

    def total(self, words: np.ndarray, round: int, members: int) -> Total:
        """Return the sum of updates, and of counts, that words stand for."""
        size = self.integers.size(self.like)
        change = self.integers.values(words[:size], self.like, round)
        sums = [int(word) for word in words[size:]]
        found = dict.fromkeys(COUNTS, 0.0)
        for number, name in enumerate(COUNTS if self.pieces else ()):
            own = sums[number * self.pieces : (number + 1) * self.pieces]
            found[name] = UNIT * sum(n << (self.piece * at) for at, n in enumerate(own))
        scalars = {name: jnp.float32(value) for name, value in found.items()}
        return Total(delta=change, members=jnp.float32(members), **scalars)

    @property
    def _places(self) -> range:
        return range(self.pieces)


class NodeSum:
    """The sum of the updates of one node's members, as it grows."""

    def __init__(self, vector: SumVector, round: int) -> None:
        self.vector, self.round = vector, round
        self.codes = np.zeros(vector.integers.size(vector.like), np.int64)
        self.counts = dict.fromkeys(COUNTS, 0.0)

    def add(self, member: int, update: Update, clip_norm: float) -> None:
        """Round an update and add it."""
        codes = self.vector.integers.rounded(update.delta, clip_norm, self.round, member)
        self.codes += codes * int(_whole_weight(update))
        for name in COUNTS:
            self.counts[name] += float(getattr(update, name))

    def words(self, seed: bytes = b"") -> np.ndarray:
        """Return the vector of this node."""
        return self.vector.words(self.codes, self.counts, seed)


def _units(count: float) -> int:
    """Return a count in whole units; what is not a size counts as zero."""
    return round(min(count, MOST_COUNT) / UNIT) if count > 0 else 0


def _whole_weight(update: Update) -> float:
    """Return the weight of a member: one, or zero where its update was refused."""
    weight = float(update.weight)
    if weight not in (0.0, 1.0):
        raise EngineError(f"a member has the weight {weight:g}: under secure sums all count alike.")
    return weight
