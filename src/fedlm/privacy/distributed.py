"""Noise that no single party knows: every node adds a share, and the honest shares suffice.

In:       a clip norm, a noise multiplier, the size of an update, how many honest nodes survive.
Out:      the integers of one update, the noise of one node, what rounds cost.
Promise:  the sum that a server opens holds the noise of at least `honest` nodes that tell it to
          nobody; epsilon counts those shares alone, for one client replaced by zero.
Not here: the draw (`discrete_gaussian.py`), masks (`secure`), the range (`wire/fixed_point.py`),
          rotation (`wire/rotation.py`).

After Kairouz, Liu and Steinke, "The Distributed Discrete Gaussian Mechanism for Federated Learning
with Secure Aggregation", ICML 2021. All is in steps of the integer grid: an update of d values is
clipped to c, perhaps rotated, rounded at random to integers, and rounded again until its norm is at
most D (conditional rounding), with

    D^2 = min(c^2 + d/4 + sqrt(2 log(1/b)) (c + sqrt(d)/2), (c + sqrt(d))^2)

A try succeeds with probability at least 1 - b. D holds for the integers themselves, which are
compared with it exactly: whatever floating point did before, a client moves the sum by at most D.
Every node adds discrete Gaussian noise of variance s to the sum of its clients' integers. The sum
of h such shares is not discrete Gaussian, but close to one of variance h s: by the paper's
proposition 14 its Renyi divergence of order a is at most

    min(a/2 D^2/(h s) + T d,  a/2 (D/sqrt(h s) + T sqrt(d))^2),
    T = 10 sum over k = 1 to h-1 of exp(-2 pi^2 s k/(k+1)),

for s >= 1/2. As a > 1, T d <= a T d, so that the mechanism is rho-zCDP with

    rho = min(D^2/(2 h s) + T d,  (D/sqrt(h s) + T sqrt(d))^2 / 2).

Rounds add up their rho. The cohort is known to the server, which draws it: no amplification by
sampling is claimed. Reduction modulo 2^bits is post-processing. More survivors than h mean more
noise, not less; `excess` says how much.

How many are honest. The server opens a sum only with t survivors (`secure/terms.py`). If m of the
members may work together with the server, t - m of the survivors add noise that the coalition does
not know: h <= t - m.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

from fedlm.core.errors import EngineError, require
from fedlm.privacy.cost import epsilon_of_rho
from fedlm.privacy.discrete_gaussian import MOST_VARIANCE, discrete_gaussian

BETA = math.exp(-0.5)  # the chance that a rounding is too long, as in the paper
TRIES = 2000


@dataclass(frozen=True, kw_only=True)
class DistributedNoise:
    """Shares of noise for the sum of clients' integers.

    Attributes:
      clip: the L2 norm of an update before rounding, in steps of the grid.
      size: the number of values of an update, d.
      variance: of one node's share, in squared steps: a whole number.
      honest: the least number of survivors that tell their noise to nobody, h.
    """

    clip: float
    size: int
    variance: int
    honest: int

    def __post_init__(self) -> None:
        require(0 < self.clip < 2.0**40, "clip in steps", self.clip, "between 0 and 2^40")
        require(self.size >= 1, "size of an update", self.size, "at least one value")
        require(self.honest >= 1, "secure.honest", self.honest, "at least one node")
        whole = isinstance(self.variance, int) and 1 <= self.variance <= MOST_VARIANCE
        require(
            whole,
            "noise variance",
            self.variance,
            f"a whole number of squared steps from 1 to {MOST_VARIANCE}",
            "Fewer bits of the codec wire.upload make steps longer and this number smaller; more "
            "make it larger.",
        )

    @property
    def squared_bound(self) -> int:
        """The largest squared norm of the integers of one update, D^2."""
        c, d = self.clip, self.size
        likely = c * c + d / 4 + math.sqrt(2 * math.log(1 / BETA)) * (c + math.sqrt(d) / 2)
        return math.ceil(min(likely, (c + math.sqrt(d)) ** 2))

    @property
    def deviation(self) -> float:
        """The bound T on how far a sum of shares is from a discrete Gaussian."""
        parts = (k / (k + 1) for k in range(1, self.honest))
        return 10 * sum(math.exp(-2 * math.pi**2 * self.variance * part) for part in parts)

    @property
    def rho(self) -> float:
        """The zCDP of one round, for one client replaced by zero."""
        moved = math.sqrt(self.squared_bound / (self.honest * self.variance))
        far, d = self.deviation, self.size
        return min(moved**2 / 2 + far * d, (moved + far * math.sqrt(d)) ** 2 / 2)

    def epsilon(self, rounds: int, delta: float) -> float:
        """Return the epsilon of so many rounds, by dp_accounting's zCDP event."""
        return epsilon_of_rho(rounds * self.rho, delta)

    def excess(self, survivors: int) -> float:
        """Return the noise variance of a sum over `survivors` nodes, relative to the plan's."""
        return survivors / self.honest

    def reserve(self, nodes: int, chance: float = 2.0**-40) -> int:
        """Return the steps that the nodes' noise exceeds, in any value, with at most this chance.

        A discrete Gaussian of parameter s is subgaussian with s, hence a sum of n of them exceeds
        r in magnitude with probability at most 2 exp(-r^2 / (2 n s)).
        """
        tail = math.log(2 * self.size / chance)
        return math.ceil(math.sqrt(2 * nodes * self.variance * tail))

    def share(self, seed: bytes) -> np.ndarray:
        """Return the noise that one node adds to the sum of its clients' integers."""
        return discrete_gaussian(seed, self.variance, self.size)

    def rounded(self, update: np.ndarray, seed: bytes) -> np.ndarray:
        """Round an update, in steps, to integers whose norm is at most the bound.

        An update that is longer than the clip is shortened; one that is not finite becomes zero.
        `seed` may be known to all: the bound holds for every outcome.
        """
        x = np.asarray(update, np.float64).reshape(-1)
        if x.shape != (self.size,):
            raise EngineError(f"an update of {x.size} values: expected {self.size}.")
        length = float(np.linalg.norm(x))
        if not math.isfinite(length):
            return np.zeros(self.size, np.int64)
        x = x * min(1.0, self.clip / length) if length else x
        stream = Cipher(algorithms.ChaCha20(seed, bytes(16)), mode=None).encryptor()
        low = np.floor(x)
        chance, base, bound = x - low, low.astype(np.int64), self.squared_bound
        for _ in range(TRIES):
            words = np.frombuffer(stream.update(bytes(4 * self.size)), "<u4")
            codes = base + (words * 2.0**-32 < chance)
            if _squared(codes) <= bound:
                return codes
        raise EngineError("an update could not be rounded within its bound.")


def _squared(codes: np.ndarray) -> int:
    """Return the squared norm of integers, exactly."""
    large = np.abs(codes) >= 2**15
    small = codes[~large]
    # Squares below 2^30: 2^33 of them fit into 63 bits.
    return int(np.dot(small, small)) + sum(int(code) ** 2 for code in codes[large])


def shares_for(*, clip: float, size: int, noise_multiplier: float, honest: int) -> DistributedNoise:
    """Return shares whose honest part has at least the variance of a central noise multiplier.

    The noise multiplier is in units of the bound on the integers of one update, D, so that `rho` is
    that of central noise with the same multiplier, 1 / (2 noise_multiplier^2), or a little less.
    """
    require(
        0 < noise_multiplier < math.inf, "privacy.noise_multiplier", noise_multiplier, "positive"
    )
    bound = DistributedNoise(clip=clip, size=size, variance=1, honest=honest).squared_bound
    wanted = math.ceil(noise_multiplier**2 * bound / honest)
    return DistributedNoise(clip=clip, size=size, variance=max(1, wanted), honest=honest)
