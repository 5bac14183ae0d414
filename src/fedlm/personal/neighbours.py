"""Neighbours of a position's features in a member's own text, and the tokens that followed them.

In:       features of positions, and the tokens that came next.
Out:      the chance of a target after a feature; the chances of all next tokens.
Promise:  chances sum to one over the vocabulary; the nearer a neighbour, the more it counts; what
          is saved is loaded equal, and a damaged file is refused.
Not here: features (`model.py`), which width and share a member takes (`ways.py`).

    p(w | f) = sum_{i: w_i = w} k_i / sum_i k_i,   k_i = exp(-|f - f_i|^2 / width)

Marfoq et al. (2022, kNN-Per) count the ten nearest alone. Many positions of a member's text are
equal up to rounding (the first of every row), and rounding would decide which ten: here all count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int
from safetensors import SafetensorError
from safetensors.numpy import load, save

from fedlm.core.errors import SURPRISES, RecordError

MOST = 50_000  # positions that are kept, the last ones of a member's text
NEAREST, SAMPLE = (
    10,
    256,
)  # the unit of widths: how far the tenth of others is, of so many positions
LEAST = 1e-4  # of a feature's squared length: nearer ones differ by rounding
LARGEST = 1e15  # of a feature: its square is a number
BLOCK, KEPT_BLOCK = 128, 4096  # features asked at once; what is kept is a multiple of


NAMES = {"vocabulary", "features", "targets", "width"}


@dataclass(frozen=True, eq=False)
class Neighbours:
    """Features of positions, and the tokens that came next."""

    vocabulary: int
    features: Float[np.ndarray, "kept embed"]
    targets: Int[np.ndarray, " kept"]
    width: float

    def chances(
        self, features: Float[np.ndarray, "asked embed"], targets: Int[np.ndarray, " asked"]
    ) -> Float[np.ndarray, " asked"]:
        """Return the chance of a target after each feature."""
        return self.chances_by_width(features, targets, [1.0])[0]

    def chances_by_width(
        self,
        features: Float[np.ndarray, "asked embed"],
        targets: Int[np.ndarray, " asked"],
        widths: Sequence[float],
    ) -> Float[np.ndarray, "widths asked"]:
        """Return the chances if the width were some multiples of what it is."""
        at = jnp.asarray(widths, jnp.float32) * self.width
        # Programs have sizes: what is kept is filled up with positions that are infinitely far.
        more = -len(self.targets) % KEPT_BLOCK
        kept = jnp.asarray(np.pad(self.features, ((0, more), (0, 0))))
        words = jnp.asarray(np.pad(self.targets, (0, more), constant_values=-1))
        found = []
        for first in range(0, len(targets), BLOCK):
            asked, wanted = features[first : first + BLOCK], targets[first : first + BLOCK]
            fill = BLOCK - len(wanted)
            asked = np.pad(asked, ((0, fill), (0, 0)))
            wanted = np.pad(wanted, (0, fill)).astype(np.int32)
            found.append(np.asarray(_shares(asked, wanted, kept, words, at))[:, : BLOCK - fill])
        return np.concatenate(found, axis=1) if found else np.zeros((len(widths), 0))

    def next(self, feature: Float[np.ndarray, " embed"]) -> Float[np.ndarray, " vocabulary"]:
        """Return the chances of all tokens after a feature."""
        apart = self._lengths + np.sum(np.square(feature)) - 2 * self.features @ feature
        apart = np.maximum(apart, 0.0)
        near = np.exp((apart.min() - apart) / self.width)
        return np.bincount(self.targets, near, self.vocabulary) / near.sum()

    @cached_property
    def _lengths(self) -> Float[np.ndarray, " kept"]:
        return np.sum(np.square(self.features), axis=1)

    def to_bytes(self) -> bytes:
        """Return all of it as safetensors."""
        arrays = {
            "vocabulary": np.array([self.vocabulary], np.int64),
            "features": self.features,
            "targets": self.targets,
            "width": np.array([self.width], np.float64),
        }
        return bytes(save(arrays))


@jax.jit
def _shares(asked, wanted, kept, words, widths):  # type: ignore[no-untyped-def]
    lengths = jnp.sum(jnp.square(asked), 1)[:, None] + jnp.sum(jnp.square(kept), 1)[None]
    both = jnp.matmul(asked, kept.T, precision="highest")
    apart = jnp.maximum(lengths - 2 * both, 0.0)
    apart = jnp.where(words[None] < 0, jnp.inf, apart)
    least, own = jnp.min(apart, axis=1, keepdims=True), words[None] == wanted[:, None]

    def share(width):  # type: ignore[no-untyped-def]
        near = jnp.exp((least - apart) / width)
        return jnp.sum(jnp.where(own, near, 0.0), axis=1) / jnp.sum(near, axis=1)

    return jax.lax.map(share, widths)


def _apart(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return the squared distances of features."""
    lengths = np.sum(np.square(one), 1)[:, None] + np.sum(np.square(other), 1)[None]
    return np.maximum(lengths - 2 * one @ other.T, 0.0)


def neighbours_of(
    features: Float[np.ndarray, "positions embed"],
    targets: Int[np.ndarray, " positions"],
    vocabulary: int,
) -> Neighbours | None:
    """Keep positions with a width of one unit; None if there are too few to know one."""
    features, targets = features[-MOST:].astype(np.float32), targets[-MOST:].astype(np.int32)
    if len(targets) <= NEAREST + 1:
        return None
    asked = np.linspace(0, len(targets) - 1, min(SAMPLE, len(targets))).astype(int)
    far = np.partition(_apart(features[asked], features), NEAREST, axis=1)[:, NEAREST]
    least = LEAST * float(np.mean(np.sum(np.square(features), axis=1)))
    unit = max(float(np.mean(far)), least)
    return Neighbours(vocabulary, features, targets, unit) if unit > 0 else None


def neighbours_from(data: bytes, vocabulary: int, embed: int, what: str) -> Neighbours:
    """Read saved neighbours, or raise `RecordError`."""
    try:
        arrays = load(data)
        made = Neighbours(
            int(arrays["vocabulary"][0]),
            arrays["features"],
            arrays["targets"],
            float(arrays["width"][0]),
        )
    except (SafetensorError, *SURPRISES) as error:
        raise RecordError(f"{what} is damaged: {' '.join(str(error).split())[:200]}.") from None
    features, targets = made.features, made.targets
    if (
        arrays.keys() != NAMES
        or arrays["vocabulary"].dtype != np.int64
        or arrays["width"].dtype != np.float64
        or any(arrays[name].shape != (1,) for name in ("vocabulary", "width"))
        or made.vocabulary != vocabulary
        or features.dtype != np.float32
        or targets.dtype != np.int32
        or targets.ndim != 1
        or not 0 < len(targets) <= MOST
        or features.shape != (len(targets), embed)
        or not np.all(np.abs(features) < LARGEST)
        or bool(np.any((targets < 0) | (targets >= vocabulary)))
        or not 1 / LARGEST < made.width < LARGEST
    ):
        raise RecordError(
            f"{what} is damaged: expected features of {embed} numbers, and {vocabulary} words."
        )
    return made
