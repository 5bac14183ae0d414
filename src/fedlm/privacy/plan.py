"""The privacy plan: every number that a privacy claim depends on, in one place.

In:       a mechanism's name, a sampling law, a bound, an amount of noise, a number of rounds.
Out:      a frozen plan that the sampler, the noise and the accountant all read.
Promise:  whatever reads a plan reads the same numbers; the checks here are those that every
          mechanism needs.
Not here: mechanisms by name and the whole check of a plan (`catalog.py`), epsilon (`account.py`),
          who joins (`cohort/sampling.py`).

The unit is one client with all its text, or one leaf of a tree with the text of all its clients.
Two runs are neighbours if all that one unit contributes, in every round, is replaced by zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fedlm.core.errors import require
from fedlm.core.types import Sampling
from fedlm.privacy.sensitivity import participations


@dataclass(frozen=True, kw_only=True)
class PrivacyPlan:
    """Every number that the privacy claim depends on; no other setting may restate one.

    `fedlm.epsilon(plan)` tells its cost before any training; `Federation(privacy=plan)` trains
    under it, if sampling and rounds are those of the federation.

    Attributes:
      mechanism: the noise on each round's sum of updates: `gaussian`, `distributed`, `tree`,
        `banded`, `toeplitz` or `blt`.
      sampling: the law by which clients are drawn.
      rounds: the number of planned rounds.
      clip_norm: the longest update that one client may send, as an L2 norm.
      noise_multiplier: the standard deviation of the noise on a sum, in multiples of `clip_norm`.
      delta: the delta of the claim: a probability, well below one in the number of clients.
      restart_every: the number of rounds after which correlated noise begins anew; 0 is never.
      bands: the number of bands of the matrix, with `banded` and `toeplitz`; 0 is
        `min_separation` + 1.
      buffers: the number of copies of the model that the noise of `blt` remembers.
      honest_nodes: with `distributed`, how many nodes of a secure sum keep their noise secret.
      matrix: the numbers of the matrix of `banded` (its first column) or `blt` (decays, then
        scales). They are found once, when a run begins, because an optimiser may find others
        elsewhere; empty before.
      clip_quantile: the fraction of updates that an adaptive clip norm leaves unclipped; 0 keeps
        the clip norm fixed.
      clip_rate: how fast an adaptive clip norm moves, as a factor in the exponent.
      clip_noise: the standard deviation of the noise on how many updates were unclipped, in
        updates, per `clip_every` rounds.
      reveal: whether the journal also holds sums without noise, which no claim covers.
      unit: whose text is hidden: that of one `client`, or of a whole `leaf` of a tree.

    The numbers are checked where a plan is used (`fedlm.epsilon`, `Federation`), which raises
    `ConfigError` if the mechanism does not go with them.

    >>> import fedlm
    >>> spaced = fedlm.Sampling(law="spaced", population=1000, cohort=10, min_separation=50)
    >>> plan = PrivacyPlan(mechanism="tree", sampling=spaced, rounds=100, clip_norm=0.5,
    ...                    noise_multiplier=5.0, delta=1e-5)
    >>> fedlm.epsilon(plan).epsilon < 10
    True
    """

    mechanism: str
    sampling: Sampling
    rounds: int
    clip_norm: float
    noise_multiplier: float
    delta: float
    restart_every: int = 0
    bands: int = 0
    buffers: int = 3
    honest_nodes: int = 0
    matrix: tuple[float, ...] = ()
    clip_quantile: float = 0.0
    clip_rate: float = 0.2
    clip_noise: float = 0.0
    reveal: bool = False
    unit: str = "client"

    @property
    def sum_multiplier(self) -> float:
        """The noise of a round's sum, as a standard deviation in units of the clip norm.

        It is `noise_multiplier`, or more where the count of an adaptive clip takes its part. One
        member moves the sum by the clip and the centred count by a half. Together the two
        releases cost no more than one sum with `noise_multiplier`.
        """
        if not self.clip_quantile or not self.noise_multiplier:
            return self.noise_multiplier
        left = self.noise_multiplier**-2 - self.count_weight * (2 * self.clip_noise) ** -2
        return left**-0.5

    @property
    def clip_every(self) -> int:
        """The number of rounds for which an adaptive clip norm stands still."""
        return self.restart_every or 1

    @property
    def count_weight(self) -> int:
        """The factor by which a client's count may cost more than its sums (`clip.py`)."""
        sampling, every = self.sampling, self.clip_every
        most = participations(every, sampling.min_separation, sampling.max_participations)
        return min(every.bit_count(), most) if self.mechanism == "tree" else most

    @property
    def denominator(self) -> float:
        """The fixed divisor of the noisy sum; the true number of members is private."""
        return float(self.sampling.cohort)

    def noise_to_signal(self, size: int) -> float:
        """Return the norm of a round's noise in `size` numbers over the largest norm of a sum."""
        return self.sum_multiplier * math.sqrt(size) / self.denominator


def check_numbers(plan: PrivacyPlan) -> None:
    """Refuse numbers that no mechanism can work with."""
    require(plan.rounds >= 1, "server.rounds", plan.rounds, "at least one round")
    require(
        0 < plan.delta < 1,
        "privacy.delta",
        plan.delta,
        "a probability above 0 and below 1, well below one in the number of clients",
        "1e-6 is a common choice for a million clients.",
    )
    require(
        0 <= plan.noise_multiplier < math.inf,
        "privacy.noise_multiplier",
        plan.noise_multiplier,
        "zero or a positive multiple of privacy.clip_norm",
    )
    require(
        plan.clip_norm > 0,
        "privacy.clip_norm",
        plan.clip_norm,
        "a positive L2 norm",
        "Leave [privacy] out to train without it.",
    )
    require(
        math.isfinite(plan.clip_norm) or plan.noise_multiplier == 0,
        "privacy.clip_norm",
        plan.clip_norm,
        "a finite L2 norm, because noise hides only what is bounded",
        "Set privacy.clip_norm, or privacy.noise_multiplier = 0.",
    )


def check_bins(sampling: Sampling, rounds: int) -> None:
    """Refuse more bins than the population can fill, and a limit that bins do not keep."""
    most = sampling.max_participations
    require(
        most == 0,
        "privacy.max_participations",
        most,
        f"0 when server.sampling = {sampling.law!r}, which does not enforce it",
    )
    check_separation(sampling, rounds)


def check_without_separation(sampling: Sampling) -> None:
    """Refuse a minimum separation or a limit of turns that the sampling law does not keep."""
    for name in ("min_separation", "max_participations"):
        value = getattr(sampling, name)
        require(
            value == 0,
            f"privacy.{name}",
            value,
            f"0 when server.sampling = {sampling.law!r}, which does not enforce it",
            "Or set server.sampling = 'spaced'.",
        )


def check_separation(sampling: Sampling, rounds: int) -> None:
    """Refuse a minimum separation that the population is too small for."""
    apart, most = sampling.min_separation, sampling.max_participations
    require(
        apart >= 0,
        "privacy.min_separation",
        apart,
        "zero or a number of rounds strictly between two participations of a client",
    )
    require(
        most >= 0,
        "privacy.max_participations",
        most,
        "zero (as many as the separation allows) or a number of rounds",
    )
    require(
        sampling.population >= sampling.cohort * (apart + 1),
        "privacy.min_separation",
        apart,
        f"at most {sampling.population // sampling.cohort - 1}, because {apart + 1} rounds in a "
        f"row need {sampling.cohort * (apart + 1)} different clients and there are "
        f"{sampling.population}",
        "Lower it or server.cohort.",
    )
    require(
        most == 0 or rounds * sampling.cohort <= sampling.population * most,
        "privacy.max_participations",
        most,
        f"at least {-(-rounds * sampling.cohort // sampling.population)}, because {rounds} rounds "
        f"of {sampling.cohort} clients have {rounds * sampling.cohort} places to fill from "
        f"{sampling.population} clients",
        "Raise it, or lower server.rounds or server.cohort.",
    )
