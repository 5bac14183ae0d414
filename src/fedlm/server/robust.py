"""Robust aggregation: a centre of updates that a few liars cannot move far.

In:       the updates of a cohort, one row each.
Out:      their centre, by a named rule; updates shortened to a norm.
Promise:  every member counts alike, so that nobody gains by claiming many examples; one line in
          `RULES` adds a rule.
Not here: which updates there are (`engine/robust.py`); sums under masks or with noise: these rules
          look at single updates, which secure sums hide and privacy claims do not cover.

    mean              the least error without liars; one liar moves it anywhere
    median            coordinate by coordinate; stands while liars are fewer than half
    trimmed-mean      without the largest and the smallest values of each coordinate (Yin et al.
                      2018); stands while liars are fewer than the part that is cut on each side
    geometric-median  the point with the least sum of distances (Pillutla et al. 2022); stands while
                      liars are fewer than half

Rules but `plain_mean` hold all updates of a cohort in memory at once.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Rule = Callable[[np.ndarray, float], np.ndarray]
"""From updates (members x values) and the part to cut on each side to their centre."""
STEPS, NEAR = 200, 1e-7  # of Weiszfeld's iteration: at most, and when it stands still


def plain_mean(updates: np.ndarray, trim: float = 0.0) -> np.ndarray:
    """Return the mean."""
    return np.mean(updates, axis=0)


def median(updates: np.ndarray, trim: float = 0.0) -> np.ndarray:
    """Return the median of each coordinate."""
    return np.median(updates, axis=0)


def trimmed_mean(updates: np.ndarray, trim: float) -> np.ndarray:
    """Return the mean of each coordinate without its extreme values.

    >>> trimmed_mean(np.array([[-9.0], [1.0], [2.0], [3.0], [99.0]]), 0.2)
    array([2.])
    """
    cut = int(np.ceil(trim * len(updates) - 1e-9))
    if 2 * cut >= len(updates):
        return median(updates)
    ordered = np.sort(updates, axis=0)
    return np.mean(ordered[cut : len(updates) - cut], axis=0)


def geometric_median(updates: np.ndarray, trim: float = 0.0) -> np.ndarray:
    """Return the point with the least sum of distances to the updates, by Weiszfeld's iteration.

    Distances are smoothed by a millionth of their median, so that the iteration may pass through an
    update.
    """
    centre = np.median(updates, axis=0)
    for _ in range(STEPS):
        away = np.linalg.norm(updates - centre, axis=1)
        scale = float(np.median(away))
        if scale == 0:
            return centre
        weights = 1 / np.maximum(away, 1e-6 * scale)
        moved = weights @ updates / weights.sum()
        still = np.linalg.norm(moved - centre) <= NEAR * scale
        centre = moved
        if still:
            break
    return centre


RULES: dict[str, Rule] = {
    "mean": plain_mean,
    "median": median,
    "trimmed-mean": trimmed_mean,
    "geometric-median": geometric_median,
}


def bounded(update: np.ndarray, norm: float) -> np.ndarray:
    """Return an update, shortened to a norm if it is longer."""
    length = float(np.linalg.norm(update))
    return update * (norm / length) if length > norm else update
