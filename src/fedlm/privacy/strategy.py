"""Strategies of matrix mechanisms: which lower-triangular matrix the noise is divided by.

In:       the number of rounds, how clients may join, and a size (bands or buffers).
Out:      the matrix, as few numbers.
Promise:  the numbers are those that the noise is made with, rounded as it rounds them, so that an
          epsilon computed from them is that of the noise. What an optimiser found has six digits
          and is kept in the plan; the matrix is made from those numbers alone.
Not here: the streaming product (`correlated.py`), what a matrix costs (`sensitivity.py`), which
          plan has which matrix (`spaced.py`).

A round's sum gets the row of stddev * M^-1 Z, where Z is independent normal noise and M is:

    toeplitz   the square root of the matrix of prefix sums, cut to `bands` diagonals
    banded     a Toeplitz matrix of `bands` diagonals, optimised for the error of prefix sums,
               with columns scaled to length one
    blt        ones on the diagonal and sum_j scale_j decay_j^(i-1) on the i-th diagonal below:
               it needs only as many buffers as there are terms, whatever the number of rounds

The square root over all rounds would need a buffer for every round, and with several
participations it is worse than the same matrix cut to the separation; so it is offered cut.
jax_privacy finds the coefficients. It is imported inside functions: it costs over a second.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jaxtyping import Float

from fedlm.core.late import late
from fedlm.core.types import Vector
from fedlm.privacy.cost import quiet

library = late("jax_privacy.matrix_factorization.toeplitz")  # over a second
buffered_library = late("jax_privacy.matrix_factorization.buffered_toeplitz")  # over a second


@dataclass(frozen=True, eq=False)
class Strategy:
    """A lower-triangular matrix over `rounds` rounds."""

    rounds: int
    coefficients: Vector  # the first column, as far as it is not zero
    normalized: bool = False  # every column scaled to length one
    decay: Vector | None = None  # blt: the terms that make up the first column
    scale: Vector | None = None

    @property
    def buffers(self) -> int:
        """The number of model-sized buffers that the noise must remember."""
        return len(self.coefficients) - 1 if self.decay is None else len(self.decay)

    def column_norms(self, rounds: int) -> Vector:
        """Return the norms of the first `rounds` columns, cut after `rounds` rows."""
        squares = np.zeros(self.rounds)
        squares[: len(self.coefficients)] = self.coefficients**2
        upto = np.cumsum(squares)
        seen = np.sqrt(upto[:rounds][::-1])
        return seen / np.sqrt(upto[self.rounds - rounds :][::-1]) if self.normalized else seen

    def matrix(self) -> Float[np.ndarray, "rounds rounds"]:
        """Return the dense matrix, for tests and benchmarks."""
        dense = np.zeros((self.rounds, self.rounds))
        for below, value in enumerate(self.coefficients):
            dense += np.diag(np.full(self.rounds - below, value), -below)
        return dense / np.linalg.norm(dense, axis=0) if self.normalized else dense


def toeplitz(rounds: int, bands: int) -> Strategy:
    """Return the square root of the prefix-sum matrix, cut to `bands` diagonals."""
    with exact():
        root = np.asarray(library.optimal_max_error_strategy_coefs(bands), np.float64)
    return Strategy(rounds, _as_used(root))


@functools.lru_cache(maxsize=16)
def find_banded(rounds: int, bands: int) -> tuple[float, ...]:
    """Optimise a Toeplitz matrix of `bands` diagonals for the error of prefix sums."""
    with exact():
        found = np.asarray(library.optimize_banded_toeplitz(rounds, bands), np.float64)
    return _six_digits(found / np.linalg.norm(found))


def banded(rounds: int, numbers: Sequence[float]) -> Strategy:
    """Return the Toeplitz matrix with this first column, with columns scaled to length one."""
    return Strategy(rounds, _as_used(np.array(numbers, np.float64)), normalized=True)


@functools.lru_cache(maxsize=16)
def find_blt(
    rounds: int, min_separation: int, max_participations: int, buffers: int
) -> tuple[float, ...]:
    """Optimise a buffered linear Toeplitz matrix for the mean error of prefix sums.

    Return the decays, then the scales.
    """
    # It advises fewer buffers; a buffer of no weight does no harm.
    with exact(), quiet("absl"):
        found = buffered_library.optimize(
            n=rounds,
            min_sep=min_separation + 1,  # there, the difference of indices
            max_participations=max_participations or None,
            error="mean",
            min_buffers=buffers,
            max_buffers=buffers,
        )
    decay, scale = (np.asarray(x, np.float64) for x in (found.buf_decay, found.output_scale))
    return _six_digits(decay) + _six_digits(scale)


def blt(rounds: int, numbers: Sequence[float]) -> Strategy:
    """Return the buffered linear Toeplitz matrix with these decays and scales."""
    decay, scale = _as_used(np.array(numbers, np.float64)).reshape(2, -1)
    powers = decay ** np.arange(rounds - 1)[:, None]
    column = np.concatenate([[1.0], (powers * scale).sum(axis=1)])
    return Strategy(rounds, column, decay=decay, scale=scale)


def _six_digits(numbers: Vector) -> tuple[float, ...]:
    """Round down to six digits after the point, more than the error can tell apart.

    Rounded down, the column of a BLT keeps falling, which its sensitivity rests on.
    """
    return tuple((np.floor(numbers * 1e6) / 1e6).tolist())


def _as_used(numbers: Vector) -> Vector:
    """Round numbers to the 32 bits in which noise is computed, and hold them in 64."""
    return numbers.astype(np.float32).astype(np.float64)


@contextlib.contextmanager
def exact() -> Iterator[None]:
    """Enable 64 bits and rank promotion, which jax_privacy's calculations need."""
    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
        yield
