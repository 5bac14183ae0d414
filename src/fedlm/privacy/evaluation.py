"""Private evaluation: figures of training clients' held-out text, as noisy sums over clients.

In:       nats, tokens and right guesses of every client on its own held-out text.
Out:      perplexity, accuracy and quantiles of perplexity over clients, each with the standard
          error that the noise gives it.
Promise:  one release is a Gaussian release whose L2 sensitivity to one client is one; everything
          told is computed from its noisy numbers and from settings.
Not here: scoring text (`evaluate`), when to release and the ledger's line (`training/rounds.py`).

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

What is told. With noisy sums N (nats, uncentred), K (tokens) and R (right guesses) the perplexity
is exp(N / K) and the accuracy R / K; their standard errors are those of the delta method for the
noise alone. Clients beyond T tokens weigh like clients of T tokens: with few long clients the
figure is nearer to a mean over clients than one over tokens. Quantiles are read from the noisy
histogram, linearly within a bin; their error is that of the noisy share below the quantile over the
density there, and half a bin at least.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from fedlm.core.errors import require
from fedlm.core.types import Figures
from fedlm.privacy.host_noise import on_grid, standard_normal

SHARES = (0.4, 0.2, 0.2, 0.2)  # of the squared sensitivity: nats, tokens, right guesses, histogram
BINS = 24
QUANTILES = (0.1, 0.5, 0.9)
# A sum of tokens of which noise may be a third or more makes no figure.
LEAST_SIGNAL = 3.0
Column = Float[np.ndarray, " clients"]


@dataclass(frozen=True, kw_only=True)
class ScheduledEvaluation:
    """Noisy figures that a run releases on a stated cadence.

    Attributes:
      figures: makes the noisy figures of a state; each call is a release of its own.
      noise_multiplier: what one release costs, as the ledger writes it.
      every: rounds between two releases; 0 is one release, after the last round.
    """

    figures: Callable[[Any], dict[str, Any]]
    noise_multiplier: float
    every: int

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
    return sum(is_due(every, played, rounds) for played in range(1, rounds + 1))


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
        exact = self.vectors(nats, tokens, right).sum(axis=0)
        drawn = standard_normal(int.from_bytes(secret, "little"), "evaluate", len(exact))
        noisy = on_grid(exact + self.noise_multiplier * drawn)
        return {
            **self._means(noisy[:3]),
            "clients": self._quantiles(noisy[3:]),
            "noise_multiplier": self.noise_multiplier,
            "tokens_per_client": self.tokens,
        }

    def _means(self, noisy: np.ndarray) -> dict[str, float | None]:
        roots = np.sqrt(SHARES[:3])
        nats, tokens, right = noisy / roots
        of_nats, of_tokens, of_right = self.noise_multiplier / roots
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

    def _quantiles(self, noisy: np.ndarray) -> dict[str, float | None]:
        """Return quantiles of perplexity over clients, from a noisy histogram of mean nats."""
        counts = noisy / math.sqrt(SHARES[3])
        noise = self.noise_multiplier / math.sqrt(SHARES[3])
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
