"""Noise of prefix sums at equal privacy: `python -m benchmarks.mechanisms`.

Computed from the matrices, not sampled. A mechanism with sensitivity s and a matrix F that makes
its noise has, at rho = 1/2 and clip 1, an error of s * |row t of (prefix sums) F| after t rounds;
the table has the root of the mean square over t. Only noise is compared: no model is trained.
"""

from __future__ import annotations

import numpy as np

from fedlm.privacy import strategy
from fedlm.privacy.sensitivity import of_strategy, of_tree

SETTINGS = [(100, 19, 5), (500, 99, 5), (2000, 313, 6)]  # rounds, separation, participations


def tree_error(rounds: int, apart: int, most: int) -> tuple[float, int]:
    """The tree of least variance: a block of 2^d rounds has variance 1 / (2 - 2^-d)."""
    digits = np.arange(rounds.bit_length())
    present = (np.arange(1, rounds + 1)[:, None] >> digits) & 1
    variance = (present / (2 - 2.0**-digits)).sum(axis=1).mean()
    return float(np.sqrt(of_tree(rounds, apart, most).value * variance)), rounds.bit_length()


def matrix_error(chosen: strategy.Strategy, apart: int, most: int) -> tuple[float, int]:
    """Any matrix: the rows of (prefix sums) M^-1."""
    rows = np.linalg.solve(chosen.matrix().T, np.tri(chosen.rounds).T).T
    variance = (rows**2).sum(axis=1).mean()
    squared = of_strategy(chosen, chosen.rounds, apart, most)
    return float(np.sqrt(squared * variance)), chosen.buffers


def main() -> None:
    print("| rounds | separation | participations | mechanism | error | tree / it | buffers |")
    print("|---|---|---|---|---|---|---|")
    for rounds, apart, most in SETTINGS:
        wide = apart + 1
        few = min(32, wide)
        tree = tree_error(rounds, apart, most)
        rows = {
            "independent": matrix_error(strategy.toeplitz(rounds, 1), apart, most),
            "tree": tree,
            "square-root Toeplitz, whole": matrix_error(
                strategy.toeplitz(rounds, rounds), apart, most
            ),
            f"square-root Toeplitz, {wide} bands": matrix_error(
                strategy.toeplitz(rounds, wide), apart, most
            ),
            f"banded, {few} bands": matrix_error(
                strategy.banded(rounds, strategy.find_banded(rounds, few)), apart, most
            ),
            f"banded, {wide} bands": matrix_error(
                strategy.banded(rounds, strategy.find_banded(rounds, wide)), apart, most
            ),
            "BLT": matrix_error(
                strategy.blt(rounds, strategy.find_blt(rounds, apart, most, 3)), apart, most
            ),
        }
        for name, (error, buffers) in rows.items():
            print(
                f"| {rounds} | {apart} | {most} | {name} | {error:.2f} | {tree[0] / error:.2f} "
                f"| {buffers} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
