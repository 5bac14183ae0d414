"""Fixed point for sums under masks: integers that add up modulo 2^bits without ever wrapping.

In:       a bound on every value of an update, the most updates of a sum, a width in bits.
Out:      the codec `secure`; integers of updates, sums of them, and numbers again.
Promise:  unbiased rounding of each update by itself; integer sums do not depend on order or
          grouping, so that flat and relayed federations agree to the bit; a range that could
          overflow is refused before the first round.
Not here: masks (`secure`), noise of integers (`privacy/discrete_gaussian.py`), clipping to an L2
          norm (`privacy/clip.py`).

With b bits, a bound C on the magnitude of a value, n updates at most, and r steps reserved for
noise:

    most = floor((2^(b-1) - 1 - r) / n)          the largest integer of one update
    step = the least power of two >= C / most
    u    = clip(v, -C, C) / step
    code = floor(u) + 1 with probability u - floor(u), else floor(u)

No overflow. |u| <= C / step <= most and `most` is an integer, hence floor(u) >= -most and
ceil(u) <= most: |code| <= most. The magnitude of a sum of at most n codes is then at most
n * most <= 2^(b-1) - 1 - r, however updates are grouped on the way, and with noise of at most r it
is at most 2^(b-1) - 1. The numbers from -(2^(b-1) - 1) to 2^(b-1) - 1 are different modulo 2^b, so
the sum is known from its lowest b bits. Partial sums may wrap around: addition modulo 2^b does not
mind. If the L2 norm of an update is at most C, so is each of its values, before and after a
rotation. A step has b - 1 - log2(n) bits below C, up to one lost to the power of two.

Exactness. Division by a power of two is exact. Where a code would need more than 24 bits, u is a
32-bit float without fraction and the code is u itself. So codes and decoded values are the same in
every program, and an update that was decoded gives back its codes.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedlm.core import tree
from fedlm.core.errors import WireError, require
from fedlm.core.types import Codec, Params
from fedlm.wire.bitwise import unit
from fedlm.wire.frame import Reader
from fedlm.wire.pack import pack, packed_bytes, unpack
from fedlm.wire.scheme import Coins, LeafScheme, Vector, per_leaf


@dataclass(frozen=True, kw_only=True)
class FixedPoint:
    """The integers of a secure sum.

    Attributes:
      bits: sums are modulo 2^bits.
      clip: the largest magnitude of a value of one update.
      members: the most updates that one sum holds.
      reserve: steps that are kept free for noise.
    """

    bits: int
    clip: float
    members: int
    reserve: int = 0

    def __post_init__(self) -> None:
        require(2 <= self.bits <= 64, "bits", self.bits, "2 to 64")
        require(
            1e-9 <= self.clip <= 1e9,
            "clip",
            self.clip,
            "the largest magnitude of a value, from 1e-9 to 1e9",
            "With a privacy plan it is privacy.clip_norm.",
        )
        require(self.members >= 1, "members", self.members, "at least one update per sum")
        require(self.reserve >= 0, "reserve", self.reserve, "zero or a number of steps")
        wanted = math.ceil(math.log2(self.members + self.reserve + 1)) + 1
        require(
            self.most >= 1,
            "bits",
            self.bits,
            f"at least {wanted}, because a sum of {self.members} updates could overflow",
            "Give the codec more bits, or lower the members of a round or their noise.",
        )

    @property
    def most(self) -> int:
        """The largest integer of one update."""
        return (2 ** (self.bits - 1) - 1 - self.reserve) // self.members

    @property
    def step(self) -> float:
        """The value of one: a power of two."""
        mantissa, exponent = math.frexp(self.clip / self.most)
        step = 2.0 ** (exponent - 1 if mantissa == 0.5 else exponent)
        # The division above is rounded: one look with exact integers.
        return step if _at_most(self.clip, self.most, step) else 2 * step

    # ---- integers of updates -----------------------------------------------------------------

    def rounded(self, values: np.ndarray, uniform: np.ndarray) -> np.ndarray:
        """Round numbers to integers by uniform draws from 0 to 1, without bias.

        Numbers beyond `clip` are cut to it; an update with a number that is not finite is zero.
        """
        if not np.isfinite(values).all():
            return np.zeros(len(values), np.int64)
        u = np.clip(np.asarray(values, np.float64), -self.clip, self.clip) / self.step
        floor = np.floor(u)
        return (floor + (uniform < u - floor)).astype(np.int64)

    def integers(self, update: Params) -> np.ndarray:
        """Return the codes of an update that the codec rounded, all leaves in one vector."""
        leaves = [np.asarray(leaf, np.float64).reshape(-1) for leaf in jax.tree.leaves(update)]
        u = np.concatenate([*leaves, np.zeros(0)]) / self.step
        codes = np.rint(np.where(np.isfinite(u), np.clip(u, -(2.0**62), 2.0**62), 0))
        if (codes != u).any():
            raise WireError(f"the update is not on the grid of {self.step:g}: round it first.")
        found = codes.astype(np.int64)
        self.check(found)
        return found

    def check(self, codes: np.ndarray) -> None:
        """Refuse integers that one update cannot have."""
        if codes.size and int(np.abs(codes).max()) > self.most:
            raise WireError(f"the update holds an integer beyond {self.most}: sums could overflow.")

    def wrapped(self, total: np.ndarray) -> np.ndarray:
        """Return signed integers modulo 2^bits, as unsigned words."""
        low = total.astype(np.int64).view(np.uint64) & np.uint64(2**self.bits - 1)
        return low.astype(np.uint32 if self.bits <= 32 else np.uint64)

    def signed(self, total: np.ndarray) -> np.ndarray:
        """Return the integers from -2^(bits-1) on that words modulo 2^bits stand for."""
        shift = np.uint64(64 - self.bits)
        return (total.astype(np.uint64) << shift).view(np.int64) >> np.int64(64 - self.bits)

    def values(self, total: np.ndarray, like: Params) -> Params:
        """Return the sum of updates, in the shapes and types of a model, from its words."""
        flat = self.signed(total).astype(np.float64) * self.step
        leaves, structure = jax.tree.flatten(like)
        ends = np.cumsum([leaf.size for leaf in leaves])
        if flat.size != (ends[-1] if len(ends) else 0):
            raise WireError(f"a sum of {flat.size} values: this model has {ends[-1:]}.")
        made = [
            flat[end - leaf.size : end].reshape(leaf.shape).astype(leaf.dtype)
            for leaf, end in zip(leaves, ends, strict=True)
        ]
        return tree.from_host(jax.tree.unflatten(structure, made))


def _at_most(clip: float, most: int, step: float) -> bool:
    """Tell exactly whether clip / step <= most."""
    above, below = clip.as_integer_ratio()
    top, bottom = step.as_integer_ratio()
    return above * bottom <= most * below * top


def grid_of(codec: Codec) -> FixedPoint:
    """Return the grid of a codec that `secure` made, from its name."""
    found = re.fullmatch(r"secure-(\d+)-clip([\d.]+)-members(\d+)", codec.name)
    if found is None:
        raise ValueError(f"{codec.name} has no grid")
    return FixedPoint(bits=int(found[1]), clip=float(found[2]), members=int(found[3]))


def check_additive(setting: str, codec: Codec) -> None:
    """Refuse a codec whose frames cannot be added under masks."""
    require(
        codec.additive,
        setting,
        codec.name,
        "a codec of integers that add up, because the server of a secure sum sees no single update",
        "Use 'secure-20-clip1-members100' with your bound and cohort, without '+zlib'.",
    )


def secure(bits: int = 20, clip: float = 1.0, members: int = 100) -> Codec:
    """Make a codec of `bits` per value whose integers add up for so many members.

    A value beyond `clip` is cut to it.
    """
    require(2 <= bits <= 32, "bits", bits, "2 to 32")
    grid = FixedPoint(bits=bits, clip=float(clip), members=members)
    bound = np.format_float_positional(clip, trim="-")
    made = per_leaf(
        LeafScheme(
            name=f"secure-{bits}-clip{bound}-members{members}",
            squeeze=lambda x, coin: _squeeze(x, coin, grid),
            expand=lambda code, size: code.astype(jnp.float32) * grid.step,
            write=lambda code, size: pack(grid.wrapped(code), bits),
            read=lambda reader, size: _read(reader, size, grid),
            leaf_bytes=lambda size: packed_bytes(size, bits),
            norm_gain=math.inf,
            random=True,
        )
    )
    return made._replace(additive=True)


def _squeeze(x: Vector, coin: Coins | None, grid: FixedPoint) -> Any:
    assert coin is not None
    # Next below, where 32 bits do not hold the bound: values must not leave it.
    bound = np.float32(grid.clip)
    if float(bound) > grid.clip:
        bound = np.nextafter(bound, np.float32(0))
    u = jnp.clip(x, -bound, bound) * (1 / grid.step)
    floor = jnp.floor(u)
    return (floor + (unit(coin) < u - floor)).astype(jnp.int32)


def _read(reader: Reader, size: int, grid: FixedPoint) -> np.ndarray:
    codes = grid.signed(unpack(reader, size, grid.bits))
    grid.check(codes)
    return codes.astype(np.int32)
