"""One member at a time, through real bytes: the oracle of every other engine.

In:       parameters and a cohort.
Out:      the sum of the members' updates, or each of them.
Promise:  slow and obvious; a member that fails is named.
Not here: speed (`mesh.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray

from fedlm.cohort.packing import batch_up
from fedlm.core import tree
from fedlm.core.errors import EngineError
from fedlm.core.keys import generator_for, key_for
from fedlm.core.types import BatchSpec, ClientMethod, Members, Prepared, Rows, Total, Update
from fedlm.engine.payload_size import through_bytes
from fedlm.federation.algorithm import Algorithm, round_key, update_like
from fedlm.federation.member import Trip, add_member, empty_total, member_half


class LoopEngine:
    """Trains members one after the other, each batch a call, each update through its codec."""

    def __init__(self, algorithm: Algorithm, rows_of: Rows, shape: BatchSpec, seed: int) -> None:
        self.algorithm, self.rows_of, self.shape, self.seed = algorithm, rows_of, shape, seed
        self.upload_bytes = self.download_bytes = 0

    def prepare(self, round: int, members: Members) -> Prepared:
        """The members' batches, in the order in which they will be used."""
        made = []
        for member in members:
            rng = generator_for(self.seed, "shuffle", round=round, member=member)
            rows = self.rows_of(member)
            made.append((len(rows), batch_up(rows, self.shape, rng)))
        return Prepared(round, members, made)

    def collect(
        self, sent: Any, cohort: Prepared, clip_norm: float = math.inf, client_state: Any = None
    ) -> Iterator[tuple[int, Update]]:
        """Each member's update, as it arrives after its trip over the wire."""
        codec, round = self.algorithm.download, cohort.round
        payload = codec.encode(sent, key_for(self.seed, "download", round=round))
        shared = self.algorithm.local_of(round).shared(
            codec.decode(payload, sent), round_key(self.algorithm, round)
        )
        for place, member in enumerate(cohort.members):
            self.download_bytes += len(payload)
            own = jax.tree.map(jnp.asarray, tree.take(client_state, place))
            try:
                yield member, self._member(shared, cohort, place, clip_norm, own)
            except Exception as error:
                raise EngineError(f"member {member} failed in round {round}: {error}") from error

    def _member(
        self, shared: Any, cohort: Prepared, place: int, clip_norm: float, client_state: Any
    ) -> Update:
        local = self.algorithm.local_of(cohort.round)
        rows, batches = cohort.batches[place]
        key = key_for(self.seed, "upload", round=cohort.round, member=cohort.members[place])
        carry = local.init(shared, key, None if client_state is None else client_state.own)
        for batch in batches:
            carry = self._step(local, shared, carry, jnp.asarray(batch, jnp.int32))
        examples = jnp.float32(min(rows, self.shape.max_examples or rows))
        trip = Trip(
            lambda delta: self._sent(delta, carry.mask, key), jnp.float32(clip_norm), client_state
        )
        return member_half(self.algorithm, local, shared, carry, examples, trip)

    @staticmethod
    @partial(jax.jit, static_argnums=0)
    def _step(local: ClientMethod, shared: Any, carry: Any, batch: Any) -> Any:
        return local.step(shared, carry, batch)

    def _sent(self, delta: Any, mask: Any, key: PRNGKeyArray) -> Any:
        arrived, size = through_bytes(self.algorithm.upload, delta, mask, key)
        self.upload_bytes += size
        return arrived

    def gather(
        self, sent: Any, cohort: Prepared, clip_norm: float = math.inf, client_state: Any = None
    ) -> Total:
        """The sum of the cohort's updates."""
        like = update_like(self.algorithm, sent, cohort.round)
        total = empty_total(like.delta, None if like.mask is None else like.mask.shape[0])
        remembered = []
        for _, update in self.collect(sent, cohort, clip_norm, client_state):
            total = add_member(total, update)
            remembered.append(update.client_state)
        if not self.algorithm.remembers:
            return total
        rows = jax.tree.map(lambda *x: np.stack(x), *remembered) if remembered else None
        return eqx.tree_at(lambda t: t.client_state, total, rows, is_leaf=lambda x: x is None)
