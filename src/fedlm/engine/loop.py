"""One member at a time, through real bytes: the oracle of every other engine.

In:       what members begin from, and a cohort.
Out:      the sum of the members' updates, or each of them, with the bytes they took.
Promise:  slow and obvious; a member that fails is named.
Not here: speed (`mesh.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from fedlm.cohort.packing import batch_order, batches_of
from fedlm.core import tree
from fedlm.core.errors import EngineError
from fedlm.core.keys import generator_for, key_for
from fedlm.core.types import (
    Arrived,
    Batch,
    BatchSpec,
    ClientMemory,
    ClientMethod,
    Cohort,
    Gathered,
    Members,
    Message,
    Precomputed,
    PyTree,
    Rows,
    Shared,
    Start,
    Starts,
    Update,
)
from fedlm.engine.frozen_features import FrozenFeatures
from fedlm.engine.payload_size import through_bytes
from fedlm.federation.algorithm import Algorithm, on_base, round_key, summed_like
from fedlm.federation.member import (
    Finished,
    add_member,
    member_half,
    model_like,
    start_of,
    total_like,
)


class LoopEngine:
    """An engine that trains one member after the other, one call per batch, through real codecs."""

    adds_noise = False

    def __init__(
        self,
        algorithm: Algorithm,
        rows_of: Rows,
        shape: BatchSpec,
        seed: int,
        *,
        frozen: FrozenFeatures | None = None,
    ) -> None:
        self.algorithm, self.rows_of, self.shape, self.seed = algorithm, rows_of, shape, seed
        self.frozen = frozen

    def prepare(self, round: int, members: Members) -> Cohort:
        """Choose the rows of the members' batches, in the order in which they will be used."""
        return Cohort(round, members, [self._batches(round, member) for member in members])

    def _batches(self, round: int, member: int) -> tuple[int, Any]:
        """Return a member's number of rows, and the numbers of the rows in its batches."""
        rng = generator_for(self.seed, "shuffle", round=round, member=member)
        count = len(self.rows_of(member))
        return count, batch_order(count, self.shape, rng)

    def _steps(self, member: int, order: Any) -> Iterator[Batch]:
        """Yield a member's batches, with the features of frozen blocks if they are kept."""
        for numbers, tokens in zip(order, batches_of(self.rows_of(member), order), strict=True):
            batch = tree.from_host(tokens.astype(np.int32))
            if self.frozen is None:
                yield batch
            else:
                (features,) = self.frozen.batches([(member, numbers)])
                yield Precomputed(batch, tree.from_host(features))

    def total(self, starts: Starts, cohort: Cohort) -> Gathered:
        """Sum the updates of a cohort."""
        total = total_like(summed_like(self.algorithm, model_like(starts), cohort.round))
        remembered, upload, download = [], 0, 0
        for _, update, sent, received in self.updates(starts, cohort):
            total = add_member(total, update)
            remembered.append(update.client_state)
            upload, download = upload + sent, download + received
        if self.algorithm.remembers and remembered:
            rows = jax.tree.map(lambda *x: np.stack(x), *remembered)
            total = eqx.tree_at(lambda t: t.client_state, total, rows, is_leaf=lambda x: x is None)
        return Gathered(total, upload, download)

    def updates(self, starts: Starts, cohort: Cohort) -> Iterator[Arrived]:
        """Yield each member's update, as it arrives after its trip over the wire."""
        model, shared, download = None, None, 0
        for place, member in enumerate(cohort.members):
            start = start_of(starts, place)
            if start.model is not model:  # one model for all is encoded once
                model = start.model
                shared, download = self._download(model, cohort.round)
            try:
                update, upload = self._train(start, shared, cohort, place)
            except Exception as error:
                where = f"member {member} failed in round {cohort.round}"
                raise EngineError(f"{where}: {error}") from error
            yield Arrived(int(member), update, upload, download)

    def _download(self, model: Message, round: int) -> tuple[Shared, int]:
        """Return the model as members decode it, and the size of its frame."""
        codec = self.algorithm.download
        payload = codec.encode(model, key_for(self.seed, "download", round=round))
        arrived, key = codec.decode(payload, model), round_key(self.algorithm, round)
        shared = self.algorithm.local_of(round).shared(arrived, key)
        return on_base(self.algorithm.base, shared), len(payload)

    def _train(
        self, start: Start, shared: Shared, cohort: Cohort, place: int
    ) -> tuple[Update, int]:
        """Train one member; return its update as it arrives, and the size of its frame."""
        algorithm, round, member = self.algorithm, cohort.round, cohort.members[place]
        local = algorithm.local_of(round)
        rows, order = cohort.batches[place] if cohort.batches else self._batches(round, member)
        key = key_for(self.seed, "upload", round=round, member=member)
        client_state = tree.from_host(start.client_state)
        memory = None if client_state is None else client_state.own
        carry = self._begin(local, shared, key, memory, jnp.float32(algorithm.rate_of(round)))
        for batch in self._steps(member, order):
            carry = self._step(local, shared, carry, batch)
        examples = jnp.float32(min(rows, self.shape.max_examples or rows))
        done = Finished(shared, carry, examples, jnp.float32(start.clip_norm), client_state)
        sizes = []

        def send(delta: PyTree) -> PyTree:
            arrived, size = through_bytes(algorithm.upload, delta, carry.mask, key)
            sizes.append(size)
            return arrived

        compiled = local._replace(finish=partial(self._finish, local))
        return member_half(algorithm.client_half, compiled, done, send), sizes[0]

    # One program each; operation by operation there would be several for each shape of a leaf.

    @staticmethod
    @partial(jax.jit, static_argnums=0)
    def _begin(
        local: ClientMethod, shared: Shared, key: PRNGKeyArray, memory: ClientMemory, rate: Array
    ) -> PyTree:
        return local.init(shared, key, memory, rate)

    @staticmethod
    @partial(jax.jit, static_argnums=0)
    def _step(local: ClientMethod, shared: Shared, carry: PyTree, batch: Any) -> PyTree:
        return local.step(shared, carry, batch)

    @staticmethod
    @partial(jax.jit, static_argnums=0)
    def _finish(local: ClientMethod, shared: Shared, carry: PyTree, examples: Array) -> Update:
        return local.finish(shared, carry, examples)
