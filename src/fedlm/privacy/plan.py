"""The privacy plan: everything that a claim rests on, in one hand.

In:       a mechanism, a sampling law, a bound, an amount of noise, a number of rounds.
Out:      a frozen plan that the sampler, the noise and the accountant all read.
Promise:  `check` passes only plans whose epsilon can be computed; no other pair of mechanism and
          sampling law is let through.
Not here: epsilon (`account.py`), noise (`noise.py`), who joins (`cohort/sampling.py`).

The unit is one client with all its text. Two runs are neighbours if one client's contributions,
in every round, are replaced by zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from fedlm.core.errors import nearest, require
from fedlm.core.types import Sampling

Mechanism = Literal["gaussian", "tree", "banded", "toeplitz", "blt"]
MECHANISMS: tuple[str, ...] = get_args(Mechanism)

# More buffers do not lower the error, and the optimiser of the parameters becomes unstable.
MAX_BUFFERS = 10


@dataclass(frozen=True, kw_only=True)
class PrivacyPlan:
    """Everything the privacy claim rests on. No other setting may restate it."""

    mechanism: Mechanism
    sampling: Sampling
    rounds: int  # planned; a matrix mechanism is built for this many
    clip_norm: float
    noise_multiplier: float  # noise stddev in units of clip_norm
    delta: float
    restart_every: int = 0  # tree: rounds a tree; 0 is one tree over all rounds
    bands: int = 0  # banded, toeplitz: bands of the matrix; 0 is min_separation + 1
    buffers: int = 3  # blt
    clip_quantile: float = 0.0  # the share of updates that an adaptive clip lets through; 0: fixed
    clip_rate: float = 0.2  # how fast it follows
    clip_noise: float = 0.0  # stddev of the noise on how many were let through
    reveal: bool = False  # whether the journal also holds sums without noise; no claim covers them

    @property
    def sum_multiplier(self) -> float:
        """The noise multiplier of the sum, when the count of an adaptive clip takes its part.

        One member moves the sum by the clip and the centred count by a half. Together the two
        releases cost as much as one sum with `noise_multiplier`.
        """
        if not self.clip_quantile or not self.noise_multiplier:
            return self.noise_multiplier
        left = self.noise_multiplier**-2 - (2 * self.clip_noise) ** -2
        return left**-0.5

    def stddev(self, norm_gain: float = 1.0) -> float:
        """The noise of a sum whose terms a codec may lengthen by `norm_gain`."""
        if not self.noise_multiplier:
            return 0.0
        return self.sum_multiplier * self.clip_norm * norm_gain

    @property
    def denominator(self) -> float:
        """What the noisy sum is divided by: fixed, because the true head count is private."""
        return float(self.sampling.cohort)

    def noise_to_signal(self, size: int, norm_gain: float = 1.0) -> float:
        """Length of a round's noise in `size` numbers over the longest sum of a cohort."""
        stddev = self.stddev(norm_gain) / self.clip_norm
        return stddev * math.sqrt(size) / self.denominator

    @property
    def width(self) -> int:
        """How many bands a banded matrix really has."""
        return min(self.bands or self.sampling.min_separation + 1, self.rounds)


def check(plan: PrivacyPlan) -> None:
    """Refuses a plan that could not keep, or not account for, what it claims."""
    require(
        plan.mechanism in MECHANISMS,
        "privacy.mechanism",
        plan.mechanism,
        f"one of {', '.join(MECHANISMS)}",
        nearest(str(plan.mechanism), MECHANISMS),
    )
    require(plan.rounds >= 1, "server.rounds", plan.rounds, "at least one round")
    _check_numbers(plan)
    _check_pair(plan)
    _check_population(plan.sampling)
    if plan.sampling.law == "spaced":
        _check_separation(plan.sampling, plan.rounds)
    _check_matrix(plan)
    _check_adaptive(plan)


def _check_adaptive(plan: PrivacyPlan) -> None:
    require(
        0 <= plan.clip_quantile < 1,
        "privacy.clip_quantile",
        plan.clip_quantile,
        "0 (a fixed clip) or a share of updates below 1",
    )
    if not plan.clip_quantile:
        return
    require(
        plan.mechanism == "gaussian",
        "privacy.clip_quantile",
        plan.clip_quantile,
        f"0 with privacy.mechanism = {plan.mechanism!r}, because correlated noise was made for one "
        "clip and may not see it move",
        "Find a clip with the gaussian mechanism first, then set privacy.clip_norm.",
    )
    require(
        plan.noise_multiplier == 0 or 2 * plan.clip_noise > plan.noise_multiplier,
        "privacy.clip_noise",
        plan.clip_noise,
        f"more than half of privacy.noise_multiplier, here {plan.noise_multiplier / 2:g}: the "
        "count of updates let through spends a part of the same budget",
        "A twentieth of server.cohort is common.",
    )


def _check_numbers(plan: PrivacyPlan) -> None:
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


def _check_pair(plan: PrivacyPlan) -> None:
    """The table of mechanisms and sampling laws, with the reason for each refusal."""
    law = plan.sampling.law
    if plan.mechanism == "gaussian":
        require(
            law in ("poisson", "fixed"),
            "privacy.mechanism",
            plan.mechanism,
            f"tree, banded, toeplitz or blt when server.sampling = {law!r}, because the cost of "
            "gaussian noise is computed from the chance of joining a round and a separation "
            "leaves no such chance",
            "Or set server.sampling = 'poisson'.",
        )
    else:
        require(
            law == "spaced",
            "privacy.mechanism",
            plan.mechanism,
            f"gaussian when server.sampling = {law!r}, because correlated noise is accounted by "
            "how often and how closely a client may join, and that law bounds neither",
            "Or set server.sampling = 'spaced' and privacy.min_separation.",
        )
    if law != "spaced":
        for name in ("min_separation", "max_participations"):
            value = getattr(plan.sampling, name)
            require(
                value == 0,
                f"privacy.{name}",
                value,
                f"0 when server.sampling = {law!r}, which does not enforce it",
                "Or set server.sampling = 'spaced'.",
            )


def _check_population(sampling: Sampling) -> None:
    require(sampling.population > 0, "population", sampling.population, "at least one client")
    require(
        1 <= sampling.cohort <= sampling.population,
        "server.cohort",
        sampling.cohort,
        f"between 1 and the {sampling.population} training clients",
    )


def _check_separation(sampling: Sampling, rounds: int) -> None:
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


def _check_matrix(plan: PrivacyPlan) -> None:
    """What shapes the noise, and is meant only for the mechanism that has it."""
    require(
        plan.restart_every == 0 or (plan.restart_every > 0 and plan.mechanism == "tree"),
        "privacy.restart_every",
        plan.restart_every,
        "0 (never), or with privacy.mechanism = 'tree' a positive number of rounds",
    )
    require(
        plan.bands == 0 or (plan.bands > 0 and plan.mechanism in ("banded", "toeplitz")),
        "privacy.bands",
        plan.bands,
        "0 (min_separation + 1), or with privacy.mechanism = 'banded' or 'toeplitz' a positive "
        "number",
    )
    require(
        plan.bands <= plan.rounds,
        "privacy.bands",
        plan.bands,
        f"at most server.rounds, here {plan.rounds}",
    )
    require(
        plan.mechanism != "banded" or plan.bands <= plan.sampling.min_separation + 1,
        "privacy.bands",
        plan.bands,
        f"at most min_separation + 1, here {plan.sampling.min_separation + 1}, because wider bands "
        "let two participations of a client overlap",
        "Lower it, or set privacy.mechanism = 'toeplitz', whose cost is known for any width.",
    )
    require(
        plan.mechanism != "blt" or 1 <= plan.buffers <= MAX_BUFFERS,
        "privacy.buffers",
        plan.buffers,
        f"between 1 and {MAX_BUFFERS}",
        "3 is a good choice.",
    )
