"""The privacy loss of Gaussian noise on a cohort of fixed size, drawn without replacement.

In:       a noise multiplier, and the share of the population that a cohort is.
Out:      a privacy loss distribution of dp_accounting, to be composed over rounds.
Promise:  it dominates every round of this kind, whatever all clients send, in any dimension; no
          distribution that dominates has a smaller delta in one round.
Not here: composition and epsilon (`cost.py`), the draw (`cohort/sampling.py`).

Neighbours differ in one client j, who sends v in the one run and zero in the other. Everybody sends
vectors of length at most one (the clip), noise has standard deviation s, and q = cohort /
population is the chance that j is in the cohort. H_a(P, Q) is the integral of (P - a Q) where it is
positive.

1. One other client. Draw cohort - 1 of the other clients, then one more of the rest, who sends u:
   j takes its place with chance q. Given both draws, and up to a shift that is the same in both
   runs, the runs release
       P = (1 - q) N(u) + q N(v)    and    Q = (1 - q) N(u) + q N(0).
   H_a is jointly convex, so a bound for all u and v is a bound for the mixture over the draws.
2. Advanced joint convexity (Balle, Barthe, Gaboardi 2018). For a >= 1 let b = 1 + (a - 1) / q. Then
       H_a(P, Q) = q H_b(N(v), (1 - a/b) N(u) + a/b N(0)),
       H_a(Q, P) = q H_b(N(0), (1 - a/b) N(u) + a/b N(v)).
3. The worst u and v. Seen from its first argument, such a divergence is the expectation of the
   convex function (1 - b L)_+ of L = sum_i p_i exp(X_i - Var X_i / 2), where X_i is the scalar
   product of standard normal noise with centre i, less the first centre, over s. By Kahane's
   inequality (1985) the expectation does not fall if no covariance of the X_i falls. Forward, the
   centres are u - v and -v: |u - v|^2 <= 4, <u - v, -v> = |v|^2 - <u, v> <= 2, |v|^2 <= 1, all
   reached at once by u = -v of length one. Backward, they are u and v: <u, v> <= 1 and both
   squared lengths, all reached at once by u = v of length one. So
       sup H_a(P, Q) = q H_b(N(1), (1 - a/b) N(-1) + a/b N(0)),
       sup H_a(Q, P) = q H_b(N(0), N(1)).
4. The pair. For a < 1, H_a(P, Q) = a H_(1/a)(Q, P) + 1 - a. The suprema for a >= 1 and a < 1
   together are a supremum of convex functions of a, hence convex, and so the profile of a pair of
   distributions that dominates every (P, Q). Such pairs compose, also if u and v are chosen after
   seeing earlier rounds (Zhu, Dong, Wang 2022). The same holds for (Q, P) with the two exchanged.

With N(-1) in place of N(0), the forward supremum is that of Poisson sampling with half the noise,
so the latter bounds it for a >= 1. It does not for a < 1: H_a of that pair vanishes where the
supremum does not. So Poisson accounting at half the noise, a common shortcut, is not proved by
this; it came out larger wherever both were computed.

The loss is discretised by connecting dots of the profile, which rounds up.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from fedlm.core.late import late
from fedlm.core.types import Vector

pld_pmf = late("dp_accounting.pld.pld_pmf")  # over a second
privacy_loss_distribution = late("dp_accounting.pld.privacy_loss_distribution")  # over a second
scipy = late("scipy")  # up to a second

# A mass so small is counted as a failure in every round.
TAIL = 1e-18
# Profiles are differences of numbers up to one: so much of them, times the rate, may be missing.
ROUNDING = 4 * np.finfo(float).eps


def fixed_size_loss(noise_multiplier: float, rate: float, step: float) -> Any:
    """Return the privacy loss distribution of one round, on multiples of `step`."""
    forth = _on_grid(lambda epsilons: forward(epsilons, noise_multiplier, rate), step)
    back = _on_grid(lambda epsilons: backward(epsilons, noise_multiplier, rate), step)
    lost = ROUNDING * rate
    return distribution_of(forth + lost, back + lost, step)


def distribution_of(forth: Vector, back: Vector, step: float, *, convex: bool = True) -> Any:
    """Return the loss distribution of two profiles, each at the epsilons 0, step, 2 step, ...

    Deltas are convex in exp(epsilon). Bounds that are not are lowered to the largest convex
    function below them, which bounds the profile too.
    """

    # Imported here: it costs over a second, and training does not need it.
    def mass(above: Vector, below: Vector) -> Any:
        """Return the distribution with these deltas for positive and for negative epsilons."""
        epsilons = np.arange(len(below)) * step
        left = (np.exp(-epsilons) * below - np.expm1(-epsilons))[:0:-1]
        deltas = np.minimum.accumulate(np.clip(np.concatenate([left, above]), 0, 1))
        if not convex:
            at = np.arange(1 - len(below), len(above)) * step
            deltas = _lower_hull(np.exp(at), deltas)
        return pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(
            step, 1 - len(below), len(above) - 1, deltas
        )

    return privacy_loss_distribution.PrivacyLossDistribution(mass(forth, back), mass(back, forth))


def _lower_hull(x: Vector, y: Vector) -> Vector:
    """Return the largest convex function that is nowhere above the points, at the same x."""
    hull: list[int] = []
    for i in range(len(x)):
        while len(hull) > 1:
            a, b = hull[-2], hull[-1]
            if (y[b] - y[a]) * (x[i] - x[a]) < (y[i] - y[a]) * (x[b] - x[a]):
                break
            hull.pop()
        hull.append(i)
    found: Vector = np.interp(x, x[hull], y[hull])
    return found


def forward(epsilons: Vector, noise_multiplier: float, rate: float) -> Vector:
    """Return the largest deltas of the client's run against the run without it.

    The density of N(1) is that of (b - a) N(-1) + a N(0) where y = exp(-x / s^2) is the positive
    root of (b - a) y^2 + a exp(1 / (2 s^2)) y = 1; the rest is normal tails.
    """
    s, a = noise_multiplier, np.exp(epsilons)
    other = np.expm1(epsilons) * (1 / rate - 1)  # b - a
    with np.errstate(divide="ignore"):
        log_square = np.log(4 * other)
    log_linear = epsilons + 1 / (2 * s * s)
    log_y = math.log(2) - np.logaddexp(log_linear, np.logaddexp(2 * log_linear, log_square) / 2)
    x = -s * s * log_y

    def tail(centre: float) -> Vector:
        found: Vector = scipy.special.ndtr((centre - x) / s)
        return found

    return rate * np.maximum(tail(1) - other * tail(-1) - a * tail(0), 0)


def backward(epsilons: Vector, noise_multiplier: float, rate: float) -> Vector:
    """Return the largest deltas of the run without the client against the client's."""
    s, b = noise_multiplier, 1 + np.expm1(epsilons) / rate
    begin = np.log(b) * s + 1 / (2 * s)
    deltas: Vector = scipy.special.ndtr(1 / s - begin) - b * scipy.special.ndtr(-begin)
    return rate * np.maximum(deltas, 0)


def _on_grid(profile: Callable[[Vector], Vector], step: float) -> Vector:
    """Return a profile at 0, step, 2 step, ..., until it is below `TAIL`.

    Raises `OverflowError` if that is beyond the largest number: with very little noise.
    """
    last = 1.0
    with np.errstate(over="ignore", invalid="ignore"):
        while profile(np.array([last]))[0] > TAIL:
            last *= 1.2
        found = profile(np.arange(math.ceil(last / step) + 1) * step)
    if not np.all(np.isfinite(found)):
        raise OverflowError("privacy losses beyond the largest number")
    return found
