"""Private evaluation: figures of training clients' held-out text, as noisy sums over clients.

In:       nats, tokens and right guesses of every client on its own held-out text.
Out:      perplexity, accuracy and quantiles of perplexity over clients, each with the standard
          error that the noise gives it.
Promise:  one release is a Gaussian release whose L2 sensitivity to one client is one; everything
          told is computed from its noisy numbers and from settings.
Not here: scoring text (`evaluate`), when to release and the ledger's line (`training/rounds.py`),
          questions to nodes (`engine/remote_evaluation.py`).

The vector of a client. A client with more than T tokens is scaled down to T tokens, and its mean
nats per token are clipped to C, a little above the cost of guessing. With n nats, t <= T tokens
and r right guesses after that, it adds

    sqrt(0.4) (n - t C / 2) / (T C / 2)    between -t/T and t/T times the root
    sqrt(0.2) t / T
    sqrt(0.2) (2 r - t) / T                between -t/T and t/T times the root
    sqrt(0.2) in one of the bins of a histogram of n / t over 0 .. C, and 0 in the others,

whose squares sum to at most 0.4 + 0.2 + 0.2 + 0.2 = 1; a client without tokens adds zero. So a
client replaced by zero moves the sum by at most one, and noise of standard deviation sigma on every
number is the Gaussian mechanism with noise multiplier sigma. Nats are centred because that halves
their range, and with it the noise. Noisy sums are rounded to a grid (`host_noise.py`).

Several places. Where the text is at nodes, each node adds up the vectors of its own clients, adds
noise of standard deviation sigma to every number, and sends nothing else. All these noisy sums
together are one Gaussian release with noise multiplier sigma to each client. Proof: a client lives
at exactly one node. Replaced by zero it moves that node's sum by at most one, and no other sum; the
noises of nodes are independent, so the other sums have the same law in both worlds, also given this
one, and the privacy loss of all of them is the loss of this one sum. (So it is with releases on
disjoint parts of a text: the dearest counts, not the total.) Whatever is computed from the noisy
sums costs nothing more: figures per node, and those of the total of n sums, whose noise has
standard deviation sigma sqrt(n); the errors told are those of this larger noise.

What is told. With noisy sums N (nats, uncentred), K (tokens) and R (right guesses) the perplexity
is exp(N / K) and the accuracy R / K; their standard errors are those of the delta method for the
noise alone. Clients beyond T tokens weigh like clients of T tokens: with few long clients the
figure is nearer to a mean over clients than one over tokens. Quantiles are read from the noisy
histogram, linearly within a bin; their error is that of the noisy share below the quantile over the
density there, and half a bin at least.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from fedlm.core.errors import WireError, require
from fedlm.core.types import Figures
from fedlm.privacy.host_noise import LARGEST, STEPS, on_grid, standard_normal

SHARES = (0.4, 0.2, 0.2, 0.2)  # of the squared sensitivity: nats, tokens, right guesses, histogram
BINS = 24
QUANTILES = (0.1, 0.5, 0.9)
# A sum of tokens of which noise may be a third or more makes no figure.
LEAST_SIGNAL = 3.0
# Which numbers of a vector can be below zero: nats and right guesses, which are centred.
SIGNED = np.array([True, False, True] + [False] * BINS)
Column = Float[np.ndarray, " clients"]
Vector = Float[np.ndarray, "27"]


@dataclass(frozen=True, kw_only=True)
class ScheduledEvaluation:
    """Noisy figures that a run releases on a stated cadence.

    Attributes:
      figures: makes the noisy figures of a state, or None if there are none; each call is a
        release of its own, unless they are made `at_nodes`.
      noise_multiplier: what one release costs, as the ledger writes it.
      every: rounds between two releases; 0 is one release, after the last round.
      at_nodes: whether nodes add the noise. Then their answers are a release as soon as they are
        asked, so that it is paid for first; the same state has the same figures whenever they are
        asked again, so that it is paid for once.
    """

    figures: Callable[[Any], dict[str, Any] | None]
    noise_multiplier: float
    every: int
    at_nodes: bool = False

    def due(self, played: int, rounds: int) -> bool:
        """Return whether figures are released after `played` of all `rounds`."""
        return is_due(self.every, played, rounds)


def is_due(every: int, played: int, rounds: int) -> bool:
    """Return whether figures are released after `played` of all `rounds`."""
    return played == rounds or (every > 0 and played % every == 0)


def releases(rounds: int, every: int) -> int:
    """Return how many times a run of so many rounds releases figures.

    >>> releases(7, 3), releases(6, 3), releases(6, 0)
    (3, 2, 1)
    """
    if every == 0:
        return min(rounds, 1)
    return -(-rounds // every)


def together(noise_multipliers: Iterable[float]) -> float:
    """Return the noise multiplier of the one Gaussian release that several ones amount to.

    Exact: n releases are one in n times as many dimensions, in which a client moves by sqrt(n).

    >>> together([2.0] * 4), together([])
    (1.0, inf)
    """
    length = math.hypot(*(1 / noise for noise in noise_multipliers))
    return 1 / length if length else math.inf


@dataclass(frozen=True, kw_only=True)
class PrivateEvaluation:
    """Noisy figures of training clients.

    Attributes:
      noise_multiplier: standard deviation of the noise over the sensitivity to one client.
      tokens: the most tokens with which a client counts.
      most_nats: the most nats per token with which a client counts.
    """

    noise_multiplier: float
    tokens: int
    most_nats: float

    def __post_init__(self) -> None:
        noise = self.noise_multiplier
        wanted = "a positive number: without noise nothing may be told"
        require(0 < noise < math.inf, "privacy.evaluation_noise", noise, wanted)
        require(self.tokens >= 1, "privacy.evaluation_tokens", self.tokens, "at least one token")

    def vectors(
        self, nats: Column, tokens: Column, right: Column
    ) -> Float[np.ndarray, "clients 27"]:
        """Return what each client adds to the sum: a row of norm at most one."""
        tokens = np.maximum(np.nan_to_num(np.asarray(tokens, np.float64)), 0.0)
        some = tokens > 0
        mean = np.divide(nats, tokens, out=np.zeros(len(tokens)), where=some)
        # What is not a number counts as bad as guessing.
        mean = np.clip(np.nan_to_num(mean, nan=self.most_nats, posinf=self.most_nats), 0, None)
        mean = np.minimum(mean, self.most_nats)
        rate = np.divide(right, tokens, out=np.zeros(len(tokens)), where=some)
        rate = np.clip(np.nan_to_num(rate), 0.0, 1.0)
        share = np.minimum(tokens, self.tokens) / self.tokens
        half = self.most_nats / 2
        columns = np.stack([(mean - half) / half * share, share, (2 * rate - 1) * share], axis=1)
        bins = np.minimum((mean / self.most_nats * BINS).astype(int), BINS - 1)
        histogram = np.eye(BINS)[bins] * some[:, None]
        roots = np.sqrt(SHARES)
        return np.concatenate([columns * roots[:3], histogram * roots[3]], axis=1)

    def release(self, nats: Column, tokens: Column, right: Column, secret: bytes) -> Figures:
        """Return noisy figures with their standard errors; None where the noise hides a figure.

        Args:
          nats, tokens, right: sums per client.
          secret: 16 bytes of the system's entropy, used once and forgotten.
        """
        return self._figures(self.noisy_sum(nats, tokens, right, secret), 1)

    def noisy_sum(self, nats: Column, tokens: Column, right: Column, secret: bytes) -> Vector:
        """Return the sum of the clients' vectors with noise.

        Args:
          nats, tokens, right: sums per client.
          secret: 16 bytes that nobody else knows, and that no other sum is released with.
        """
        exact = self.vectors(nats, tokens, right).sum(axis=0)
        drawn = standard_normal(int.from_bytes(secret, "little"), "evaluate", len(exact))
        return on_grid(exact + self.noise_multiplier * drawn)

    def check_noisy(self, noisy: Vector, clients: int) -> None:
        """Raise `WireError` for numbers that no noisy sum over so many clients can have."""
        most = clients * np.sqrt([*SHARES[:3], *[SHARES[3]] * BINS])
        least = np.where(SIGNED, -most, 0.0)
        slack = self.noise_multiplier * LARGEST + 1 / STEPS
        if noisy.shape != most.shape or not np.all(
            (noisy >= least - slack) & (noisy <= most + slack)  # not so of what is no number
        ):
            raise WireError(f"reply holds a noisy sum that {clients} clients cannot have.")

    def figures_of(self, sums: Mapping[str, Vector]) -> Figures | None:
        """Return the figures of all places' noisy sums together, and of each place by name.

        None if there is no sum.
        """
        if not sums:
            return None
        whole = self._figures(np.sum(list(sums.values()), axis=0), len(sums))
        return {**whole, "nodes": {name: self._means(of[:3], 1) for name, of in sums.items()}}

    def _figures(self, noisy: Vector, sums: int) -> Figures:
        return {
            **self._means(noisy[:3], sums),
            "clients": self._quantiles(noisy[3:], sums),
            "noise_multiplier": self.noise_multiplier,
            "tokens_per_client": self.tokens,
        }

    def _means(self, noisy: np.ndarray, sums: int) -> dict[str, float | None]:
        """Return means of the total of so many sums, each of which has noise of its own."""
        roots = np.sqrt(SHARES[:3])
        nats, tokens, right = noisy / roots
        of_nats, of_tokens, of_right = self.noise_multiplier * math.sqrt(sums) / roots
        names = ("perplexity", "perplexity_error", "accuracy", "accuracy_error")
        if tokens < LEAST_SIGNAL * of_tokens:
            return dict.fromkeys(names)
        half = self.most_nats / 2
        mean, rate = nats / tokens, right / tokens  # both centred: between -1 and 1
        perplexity = math.exp(min(max(half * (1 + mean), 0.0), self.most_nats))
        of_mean = half * math.hypot(of_nats, mean * of_tokens) / tokens
        of_rate = math.hypot(of_right, rate * of_tokens) / tokens / 2
        accuracy = min(max((1 + rate) / 2, 0.0), 1.0)
        values = (perplexity, perplexity * of_mean, accuracy, of_rate)
        return dict(zip(names, map(float, values), strict=True))

    def _quantiles(self, noisy: np.ndarray, sums: int) -> dict[str, float | None]:
        """Return quantiles of perplexity over clients, from a noisy histogram of mean nats."""
        counts = noisy / math.sqrt(SHARES[3])
        noise = self.noise_multiplier * math.sqrt(sums / SHARES[3])
        total, width = float(counts.sum()), self.most_nats / BINS
        found: dict[str, float | None] = {}
        for quantile in QUANTILES:
            name = f"p{round(100 * quantile)}"
            found |= {name: None, f"{name}_error": None}
            if total < LEAST_SIGNAL * noise * math.sqrt(BINS):
                continue
            # The largest share so far: a noisy sum of counts may fall, a share of clients not.
            below = np.maximum.accumulate(np.concatenate([[0.0], np.cumsum(counts)])) / total
            at = int(np.clip(np.searchsorted(below, quantile) - 1, 0, BINS - 1))
            inside = max(below[at + 1] - below[at], 1e-9)
            place = min(max((quantile - below[at]) / inside, 0.0), 1.0)
            nats = (at + place) * width
            # Of the bins below the quantile and of those above it, relative to the whole.
            spread = math.sqrt((at + 1) * (1 - quantile) ** 2 + (BINS - at - 1) * quantile**2)
            error = max(spread * noise / total * width / inside, width / 2)
            found[name] = math.exp(nats)
            found[f"{name}_error"] = math.exp(nats) * min(error, self.most_nats)
        return found
