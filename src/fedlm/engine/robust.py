"""An engine whose total is a robust centre of the cohort's updates.

In:       another engine; a rule for the centre; perhaps a bound on the norm of each update.
Out:      totals whose mean is that centre.
Promise:  a member whose update was refused does not count; every other one counts alike.
Not here: the rules (`server/robust.py`), training (`loop.py`, `mesh.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from fedlm.core.types import Arrived, Cohort, Engine, Gathered, Members, PyTree, Starts, Total
from fedlm.federation.algorithm import Algorithm, update_like
from fedlm.federation.member import model_like, total_like

Centre = Callable[[np.ndarray], np.ndarray]
SUMS = ("weight", "nats", "tokens", "steps", "refused", "unclipped")


class RobustEngine:
    """An engine that asks another one for single updates and returns their centre."""

    adds_noise = False

    def __init__(
        self,
        inner: Engine,
        algorithm: Algorithm,
        centre: Centre,
        shorten: Callable[[np.ndarray], np.ndarray],
    ) -> None:
        self.inner, self.algorithm = inner, algorithm
        self.centre, self.shorten = centre, shorten

    def prepare(self, round: int, members: Members) -> Cohort:
        """Make the members' batches."""
        return self.inner.prepare(round, members)

    def updates(self, starts: Starts, cohort: Cohort) -> Iterator[Arrived]:
        """Yield each member's update, no longer than the bound."""
        for arrived in self.inner.updates(starts, cohort):
            flat = self.shorten(flattened(arrived.update.delta))
            delta = like_model(flat, arrived.update.delta)
            yield arrived._replace(update=eqx.tree_at(lambda u: u.delta, arrived.update, delta))

    def total(self, starts: Starts, cohort: Cohort) -> Gathered:
        """Return a total whose mean is the centre of the updates."""
        like = update_like(self.algorithm, model_like(starts), cohort.round)
        sums, rows, remembered = dict.fromkeys(SUMS, np.float32(0.0)), [], []
        members = upload = download = 0
        for arrived in self.inner.updates(starts, cohort):
            update = jax.device_get(arrived.update)
            sums = {name: sums[name] + np.float32(getattr(update, name)) for name in SUMS}
            remembered.append(update.client_state)
            members, upload = members + 1, upload + arrived.upload_bytes
            download += arrived.download_bytes
            if float(update.weight) > 0:
                rows.append(self.shorten(flattened(update.delta)))
        flat = self.centre(np.stack(rows)) * float(sums["weight"]) if rows else None
        total = Total(
            delta=total_like(like).delta if flat is None else like_model(flat, like.delta),
            members=jnp.float32(members),
            **{name: jnp.asarray(value) for name, value in sums.items()},
        )
        if self.algorithm.remembers and remembered:
            kept = jax.tree.map(lambda *x: np.stack(x), *remembered)
            total = eqx.tree_at(lambda t: t.client_state, total, kept, is_leaf=lambda x: x is None)
        return Gathered(total, upload, download)


def flattened(delta: PyTree) -> np.ndarray:
    """Return all values of a change in one vector."""
    leaves = [np.asarray(leaf, np.float64).reshape(-1) for leaf in jax.tree.leaves(delta)]
    return np.concatenate([*leaves, np.zeros(0)])


def like_model(flat: np.ndarray, like: PyTree) -> PyTree:
    """Return a vector in the shapes and types of a model."""
    leaves, structure = jax.tree.flatten(like)
    ends = np.cumsum([leaf.size for leaf in leaves])
    made = [
        jnp.asarray(flat[end - leaf.size : end].reshape(leaf.shape), leaf.dtype)
        for leaf, end in zip(leaves, ends, strict=True)
    ]
    return jax.tree.unflatten(structure, made)
