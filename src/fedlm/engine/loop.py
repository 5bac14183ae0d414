"""One member at a time, through real bytes: the oracle of every other engine.

In:       parameters and a cohort.
Out:      the sum of the members' updates, or each of them.
Promise:  slow and obvious; a member that fails is named.
Not here: speed (`mesh.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import equinox as eqx
import jax
import jax.numpy as jnp

from fedlm.cohort.pack import batch_up
from fedlm.core.errors import EngineError
from fedlm.core.keys import generator_for, key_for
from fedlm.core.types import Members, Params, Prepared, Rows, Shape, Total, Update
from fedlm.federation.round import Algorithm, add_member, empty_total, member_half


class LoopEngine:
    """Trains members one after the other, each batch a call, each update through its codec."""

    def __init__(self, algorithm: Algorithm, rows_of: Rows, shape: Shape, seed: int) -> None:
        self.algorithm, self.rows_of, self.shape, self.seed = algorithm, rows_of, shape, seed
        self.upload_bytes = self.download_bytes = 0
        self._step = jax.jit(algorithm.local.step)
        self._finish = jax.jit(
            lambda params, carry, examples, limit: member_half(
                algorithm, params, carry, examples, limit
            )
        )

    def prepare(self, round: int, members: Members) -> Prepared:
        """The members' batches, in the order in which they will be used."""
        made = []
        for member in members:
            rng = generator_for(self.seed, "shuffle", round=round, member=member)
            rows = self.rows_of(member)
            made.append((len(rows), batch_up(rows, self.shape, rng)))
        return Prepared(round, members, made)

    def collect(
        self, params: Params, cohort: Prepared, limit: float = math.inf
    ) -> Iterator[tuple[int, Update]]:
        """Each member's update, as it arrives after its trip over the wire."""
        sent = self.algorithm.download.encode(
            params, key_for(self.seed, "download", round=cohort.round)
        )
        for member, (rows, batches) in zip(cohort.members, cohort.batches, strict=True):
            self.download_bytes += len(sent)
            try:
                yield member, self._member(params, cohort.round, member, rows, batches, limit)
            except Exception as error:
                raise EngineError(
                    f"member {member} failed in round {cohort.round}: {error}"
                ) from error

    def _member(self, params, round, member, rows, batches, limit):  # type: ignore[no-untyped-def]
        carry = self.algorithm.local.init(params)
        for batch in batches:
            carry = self._step(carry, jnp.asarray(batch, jnp.int32))
        examples = jnp.float32(min(rows, self.shape.max_examples or rows))
        update = self._finish(params, carry, examples, jnp.float32(limit))
        key = key_for(self.seed, "upload", round=round, member=member)
        payload = self.algorithm.upload.encode(update.delta, key)
        self.upload_bytes += len(payload)
        arrived = self.algorithm.upload.decode(payload, update.delta)
        return eqx.tree_at(lambda u: u.delta, update, arrived)

    def gather(self, params: Params, cohort: Prepared, limit: float = math.inf) -> Total:
        """The sum of the cohort's updates."""
        total = empty_total(params)
        for _, update in self.collect(params, cohort, limit):
            total = add_member(total, update)
        return total
