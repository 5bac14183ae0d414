"""TernGrad: every value is minus the scale, zero, or the scale.

In:       an update.
Out:      for each tensor a scale, then five ternary digits per byte.
Promise:  unbiased for the clipped values; the size depends on shapes alone.
Not here: packing (`pack.py`), finer grids (`quantize.py`).

    sigma = sqrt(mean(v^2));   c = clip(v, -2.5 sigma, 2.5 sigma);   s = max|c|
    v'    = sign(v) * s with probability |c| / s, else 0

Sigma is taken about zero, not about the mean: the two agree for updates, and a tensor that is
constant or holds one number arrives exactly instead of being clipped away.

Gain. With n values, ||v'|| <= s sqrt(n) <= 2.5 sigma sqrt(n) = 2.5 ||v||: the clip
bounds it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp

from fedlm.core.errors import WireError, require
from fedlm.core.types import Codec
from fedlm.wire.bitwise import SLACK, fold, power_below, square, unit
from fedlm.wire.frame import Reader
from fedlm.wire.pack import pack_trits, trit_bytes, unpack_trits
from fedlm.wire.scheme import Coins, LeafScheme, Vector, per_leaf


class Trits(NamedTuple):
    """One coded tensor: digits 0, 1 and 2 stand for 0, +scale and -scale."""

    scale: Any  # 1
    digit: Any  # n


def ternary(clip: float = 2.5) -> Codec:
    """Make a codec of 1.6 bits per value and four bytes per tensor; `clip` is in sigmas."""
    clip = float(clip)
    require(1 <= clip <= 100, "clip", clip, "1 to 100 sigmas")
    return per_leaf(
        LeafScheme(
            name=f"ternary-{clip!r}",
            squeeze=lambda x, coin: _squeeze(x, coin, clip),
            expand=_expand,
            write=lambda t, size: t.scale.astype("<f4").tobytes() + pack_trits(t.digit),
            read=_read,
            leaf_bytes=lambda size: 4 + trit_bytes(size),
            norm_gain=SLACK * clip,
            random=True,
        )
    )


def _squeeze(x: Vector, coin: Coins | None, clip: float) -> Trits:
    assert coin is not None
    top = jnp.max(jnp.abs(x))
    # Division by a power of two is exact; squares then neither overflow nor vanish.
    power = power_below(top)
    y, top = x / power, top / power
    sigma = jnp.sqrt(fold(square(y)[None])[0] * (1 / len(x)))
    scale = jnp.minimum(top, clip * sigma)
    kept = unit(coin) * scale < jnp.abs(y)
    digit = jnp.where(kept, jnp.where(y < 0, 2, 1), 0).astype(jnp.uint8)
    return Trits((scale * power)[None], digit)


def _expand(t: Trits, size: int) -> Vector:
    return jnp.where(t.digit == 0, 0.0, jnp.where(t.digit == 1, t.scale, -t.scale))


def _read(reader: Reader, size: int) -> Trits:
    scale = reader.finite(1)
    if scale[0] < 0:
        raise WireError("frame holds a negative scale.")
    return Trits(scale, unpack_trits(reader, size))
