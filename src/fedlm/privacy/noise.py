"""Noise for a stream of sums.

In:       each round's sum, once, in order, with the key of that round.
Out:      the sum plus noise, and what the next round must remember.
Promise:  the noise has the stated law; the same key gives the same noise; memory is a tree of
          arrays of constant size, so that a checkpoint holds all of it; what comes out lies on a
          grid (`grid.py`).
Not here: correlated noise (`correlated.py`), the noise of a plan (`catalog.py`), what noise costs
          (`cost.py`), seeds (the caller).

What is added in a round is the increment of the noise of the running sum. A server optimiser that
adds its inputs up, as SGD does, with or without momentum, therefore takes the steps of DP-FTRL:
with u_t = g_t + N_t - N_(t-1), the momentum m_t = beta m_(t-1) + u_t sums to
V_t = beta V_(t-1) + (g_1 + ... + g_t + N_t), and w_0 - eta V_t is what DP-FTRL computes from the
noisy prefix sum. Any other optimiser is post-processing of the same noisy sums.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from jaxtyping import Array, Float

from fedlm.core.by_value import by_value
from fedlm.core.chacha import CipherKey
from fedlm.core.types import Params, PyTree
from fedlm.privacy.grid import add_on_grid
from fedlm.privacy.normal import standard_normal


class Noise(NamedTuple):
    """Noise for a stream of sums; `draw` is called exactly once for each round."""

    stddev: float  # in units of the clip norm; 0 adds nothing
    init: Callable[[Params], PyTree]
    draw: Callable[[Params, PyTree, CipherKey], tuple[Params, PyTree]]  # in units of `stddev`

    def add(
        self,
        total: Params,
        memory: PyTree,
        key: CipherKey,
        clip_norm: float | Float[Array, ""] = 1.0,
    ) -> tuple[Params, PyTree]:
        """Return a round's sum plus its noise, on the grid, and the memory after the round."""
        if not self.stddev:
            return total, memory
        drawn, memory = self.draw(total, memory, key)
        return add_on_grid(total, drawn, self.stddev, clip_norm, key), memory


@by_value  # equal noise is one object, so that servers which add it share their program
def silent() -> Noise:
    """Return a `Noise` that adds nothing."""
    return Noise(0.0, init=lambda params: (), draw=lambda like, memory, key: (like, memory))


@by_value
def gaussian(stddev: float) -> Noise:
    """Make independent normal noise for every round."""

    def draw(like: Params, memory: PyTree, key: CipherKey) -> tuple[Params, PyTree]:
        return standard_normal(key, like), memory

    return Noise(stddev, init=lambda params: (), draw=draw)
