"""A round: its members, the model they are sent, and the server's step with their sum.

In:       an `Algorithm`, a `NodeState`, a seed.
Out:      members; what they are sent; the next `NodeState`.
Promise:  the same functions in every engine; what survives a round is in `NodeState`.
Not here: loops over rounds (`run.py`), a member's half (`member.py`), named choices
          (`methods`).
"""

from __future__ import annotations

import contextlib
import hmac
import math
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray, UInt32

from fedlm.cohort.prefetch import prefetch
from fedlm.cohort.sampling import draw, joined, no_history
from fedlm.core import tree
from fedlm.core.chacha import CipherKey
from fedlm.core.errors import EngineError
from fedlm.core.keys import cipher_key_for, generator_for
from fedlm.core.releasable import Releasable
from fedlm.core.types import (
    Cohort,
    Engine,
    FederationState,
    Gathered,
    History,
    Members,
    Message,
    OptState,
    Params,
    PyTree,
    Start,
    Total,
    Update,
)
from fedlm.federation.algorithm import Algorithm, ServerHalf, on_base, round_key, update_like
from fedlm.federation.member import ClientState, add_member
from fedlm.privacy.catalog import MECHANISMS
from fedlm.privacy.clip import ClipState, clip, next_clip_state
from fedlm.privacy.ledger import digest_of
from fedlm.privacy.normal import standard_normal
from fedlm.privacy.release import release
from fedlm.server.aggregate import mean, over

Metrics = dict[str, Any]


class NodeState(eqx.Module):
    """The state that a server node keeps between rounds; nothing else survives."""

    params: Params  # the trained part alone, where the algorithm has a base
    server_memory: OptState
    noise_memory: PyTree
    history: History
    clip_norm: Float[Array, ""]  # the longest update that a member may send
    unclipped: Float[Array, ""]  # the noisy share of updates that were inside it, where released
    counted: Float[Array, ""]  # the exact count of which the next such share is made
    secret: UInt32[Array, "4"]  # what private draws are made from
    round: Int[Array, ""]
    client_state: PyTree = (
        None  # what each client remembers, where the method has it remember anything
    )
    digest: Any = None  # under a plan: the ledger's digest of the sum that led here, as 32 numbers
    flight: Any = None  # in buffered rounds: the members that have not answered yet


def init_node(algorithm: Algorithm, params: Params, secret: bytes = bytes(16)) -> NodeState:
    """Make the state before the first round; a plan needs a secret that nobody can guess.

    `params` is the whole model; the state keeps what the algorithm's base does not hold.
    """
    plan, params = algorithm.plan, tree.without(params, algorithm.base)
    history = no_history(algorithm.sampling)
    memory = algorithm.server.init(params)
    sent = algorithm.server.send(params, memory)
    released = params if algorithm.expands_first else update_like(algorithm, sent).delta
    return NodeState(
        params,
        memory,
        algorithm.noise.init(tree.zeros_like(released)),
        tree.from_host(history),
        jnp.float32(math.inf if plan is None else plan.clip_norm),
        jnp.float32(math.nan),
        jnp.float32(0.0),
        jnp.asarray(np.frombuffer(secret, "<u4").astype(np.uint32)),
        jnp.int32(0),
        init_client_state(algorithm, sent),
        None if plan is None else jnp.zeros(32, jnp.uint8),
    )


def outgoing(algorithm: Algorithm, state: NodeState) -> Message:
    """Return what the server sends to the members of a round."""
    return algorithm.server.send(state.params, state.server_memory)


def init_client_state(algorithm: Algorithm, sent: Message) -> PyTree:
    """Return the initial client state, one row per client; None if clients keep no state."""
    if not algorithm.remembers:
        return None
    rows = algorithm.sampling.population
    if algorithm.memory_at_nodes:
        return np.full(rows, -1, np.int32)
    whole = init_memory(algorithm, sent)
    return jax.tree.map(lambda x: np.broadcast_to(np.asarray(x), (rows, *x.shape)).copy(), whole)


def init_memory(algorithm: Algorithm, sent: Message) -> ClientState:
    """Return what one client remembers before its first turn."""
    like = update_like(algorithm, sent)
    residual = like.delta if algorithm.feedback else None
    local = algorithm.local
    own = None
    if local.init_memory is not None:
        shared = local.shared(sent, round_key(algorithm, 0))
        own = local.init_memory(on_base(algorithm.base, shared))
    return ClientState(own, tree.zeros_like(residual))


def client_state_of(state: NodeState, members: Members) -> PyTree:
    """Return the client state of a round's members, in their order."""
    return tree.take(jax.tree.map(np.asarray, state.client_state), np.asarray(members))


def start_of_round(algorithm: Algorithm, state: NodeState, members: Members) -> Start:
    """Return what all members of a round begin from."""
    sent, client_state = outgoing(algorithm, state), client_state_of(state, members)
    secret = b""
    if noise_at_nodes(algorithm):
        address = f"fedlm/nodes/{int(state.round)}".encode()
        secret = hmac.digest(secret_of(state), address, "sha256")
    return Start(sent, float(state.clip_norm), client_state, secret)


def noise_at_nodes(algorithm: Algorithm) -> bool:
    """Return whether a sum carries all its noise before the server sees it."""
    plan = algorithm.plan
    return plan is not None and MECHANISMS[plan.mechanism].at_nodes


def private_seed(state: NodeState) -> int:
    """Return the seed of cohort draws and noise under a plan, never that of the recipe."""
    return int.from_bytes(secret_of(state), "little")


def secret_of(state: NodeState) -> bytes:
    """Return the 16 bytes that private draws are made from."""
    return np.asarray(state.secret).astype("<u4").tobytes()


def another_secret(secret: UInt32[Array, "4"], lines: int) -> UInt32[Array, "4"]:
    """Return a new secret, made from an old one and the number of lines of the ledger.

    A round that is played again after its state was lost draws other members and other noise, so
    that it costs what any round costs: a client may stay out of each release independently.
    """
    before = np.asarray(secret).astype("<u4").tobytes()
    made = hmac.digest(before, f"fedlm/again/{lines}".encode(), "sha256")[:16]
    return jnp.asarray(np.frombuffer(made, "<u4").astype(np.uint32))


class CohortSampler:
    """The members of each round, in order, drawn by the algorithm's law."""

    def __init__(self, algorithm: Algorithm, seed: int, state: NodeState) -> None:
        self.sampling = algorithm.sampling
        self.seed = seed if algorithm.plan is None else private_seed(state)
        self.history = jax.tree.map(np.asarray, state.history)

    def __call__(self, round: int) -> Members:
        rng = generator_for(self.seed, "cohort", round=round)
        members = draw(self.sampling, rng, round, self.history)
        self.history = joined(self.history, members, round)
        return members


def with_text(algorithm: Algorithm, members: Members) -> Members:
    """Return the members that train: all but the canaries."""
    return members[members < algorithm.sampling.population - algorithm.canaries]


def direction(key: CipherKey, like: Params) -> Params:
    """Draw a direction of length one, uniformly."""
    drawn = standard_normal(key, like)
    return tree.scale(drawn, 1.0 / tree.norm(drawn))


def _add_canaries(algorithm: Algorithm, state: NodeState, total: Total, members: Members) -> Total:
    for number in members[len(with_text(algorithm, members)) :] if algorithm.canaries else ():
        key = cipher_key_for(private_seed(state), "canary", member=int(number))
        total = _add_canary(total, state.clip_norm, key)
    return total


@jax.jit
def _add_canary(total: Total, clip_norm: Float[Array, ""], key: CipherKey) -> Total:
    one, zero = jnp.ones(()), jnp.zeros(())
    sent = Update(
        tree.scale(direction(key, total.delta), clip_norm), one, zero, zero, zero, zero, one
    )
    return add_member(total, clip(sent, clip_norm))


def server_half(
    algorithm: Algorithm, state: NodeState, total: Total, members: Members
) -> NodeState:
    """Return the state after the server's step with the sum of a cohort."""
    total = _add_canaries(algorithm, state, total, members)
    key, digest = _noise_key(algorithm, state, total), _digest(algorithm, state, total)
    history = joined(jax.tree.map(np.asarray, state.history), members, int(state.round))
    round = int(state.round)
    # Client state and history stay on the host: they grow with the number of clients, and a history
    # whose length changes would compile the step again in every round.
    rows, total = total.client_state, replace(total, client_state=None)
    brief = replace(state, client_state=None, history=None)  # type: ignore[arg-type]
    # A fresh state is bound to no device, and the next one to that of the sum: without this the
    # second round would compile the step again.
    brief = jax.device_put(brief, getattr(total.weight, "sharding", None))
    keys = (key, round_key(algorithm, round))
    after = _server_step(algorithm.server_half(round), brief, total, keys)
    after = replace(
        after, client_state=state.client_state, history=tree.from_host(history), digest=digest
    )
    return after if rows is None else _keep(after, with_text(algorithm, members), rows)


def _keep(state: NodeState, members: Members, rows: Any) -> NodeState:
    """Return the state with these rows as the client state of these members."""

    def put(held: PyTree, new: PyTree) -> PyTree:
        held = np.array(held)
        held[np.asarray(members)] = np.asarray(new)
        return held

    return replace(state, client_state=jax.tree.map(put, state.client_state, rows))


def _noise_key(algorithm: Algorithm, state: NodeState, total: Total) -> CipherKey:
    """Return the key of a round's noise, derived also from the sum that gets the noise.

    A round that is run again after a crash has the same sum and gets the same noise. Should its
    sum ever differ, the noise does too: the difference of two releases must not cancel it.
    """
    if algorithm.plan is None:
        return cipher_key_for(0, "noise")
    sum_is = int(tree.sha256((total.delta, total.unclipped, total.members, state.counted)), 16)
    return cipher_key_for(private_seed(state), "noise", round=int(state.round), member=sum_is)


def _digest(algorithm: Algorithm, state: NodeState, total: Total) -> Any:
    """Return the ledger's digest of a round's exact sum; None without a plan."""
    if algorithm.plan is None:
        return None
    exact = tree.sha256((total.delta, total.unclipped, total.members)).encode()
    made = digest_of(secret_of(state), int(state.round), exact)
    return jnp.asarray(np.frombuffer(made, np.uint8))


@eqx.filter_jit
def _server_step(
    half: ServerHalf,
    state: NodeState,
    total: Total,
    keys: tuple[CipherKey, PRNGKeyArray],
) -> NodeState:
    memory = state.noise_memory
    clip_state = ClipState(state.clip_norm, state.unclipped, state.counted)
    key, shared = keys

    def whole(delta: PyTree) -> PyTree:
        return half.expand(state.params, shared, delta)

    if half.denominator is None:
        change = whole(mean(total))
    else:
        first = half.expands_first
        delta = whole(total.delta) if first else total.delta
        noisy, memory = half.noise.add(delta, memory, key, clip_state.clip_norm)
        mean_of = over(noisy, half.denominator)
        change = mean_of if first else whole(mean_of)
        if half.adaptive is not None:
            clip_state = next_clip_state(half.adaptive, state.round, clip_state, total, key)
    params, server_memory = half.server.step(state.params, state.server_memory, change)
    return NodeState(
        params,
        server_memory,
        memory,
        state.history,
        *clip_state,
        state.secret,
        state.round + 1,
    )


def told(algorithm: Algorithm, metrics: Metrics, before: NodeState, after: NodeState) -> Releasable:
    """Return the facts of a round that may be released."""
    plan = algorithm.plan
    if plan is None:
        return release(None, "round", metrics)
    facts = {**metrics, "clip_norm": float(before.clip_norm)}
    if plan.clip_quantile and not math.isnan(after.unclipped):
        facts["unclipped_share"] = float(after.unclipped)
    # The norm of a round's noise over the largest possible norm of the mean change.
    facts["noise_to_signal"] = plan.noise_to_signal(tree.size(after.params))
    return release(plan, "round", facts, lambda: _expected(algorithm, outgoing(algorithm, before)))


def _expected(algorithm: Algorithm, sent: Message) -> Metrics:
    """Return the numbers of members and bytes that the plan expects in a round."""
    cohort = algorithm.sampling.cohort
    update = algorithm.upload.encoded_bytes(update_like(algorithm, sent).delta)
    return {
        "members": cohort,
        "upload_bytes": cohort * update,
        "download_bytes": cohort * algorithm.download.encoded_bytes(sent),
    }


# ---- rounds of a flat federation -----------------------------------------------------------


class Played(NamedTuple):
    """A played round: the state after it, its exact metrics, and its releasable facts."""

    state: FederationState
    metrics: Metrics
    told: Releasable


@dataclass(frozen=True, kw_only=True)
class FlatRound:
    """Rounds of a flat federation: sample, gather, step."""

    algorithm: Algorithm
    engine: Engine
    seed: int
    secret: Callable[[], bytes] = lambda: bytes(16)

    names = ("",)
    topology = None

    def init(self, params: Params) -> NodeState:
        """Return the state before the first round."""
        return init_node(self.algorithm, params, self.secret())

    def play(self, state: NodeState, rounds: range) -> Generator[Played, None, None]:
        """Play rounds one after the other; the next cohort is prepared while one trains."""
        algorithm, engine = self.algorithm, self.engine
        if noise_at_nodes(algorithm) and not engine.adds_noise:
            raise EngineError(
                "the plan has nodes add the noise, and this engine has no such nodes: the sums "
                "would have none. Set wire.secure_nodes."
            )
        choose = CohortSampler(algorithm, self.seed, state)

        def ready(round: int) -> tuple[Members, Cohort]:
            members = choose(round)
            return members, engine.prepare(round, with_text(algorithm, members))

        with contextlib.closing(prefetch(ready, rounds)) as cohorts:
            for round, (members, cohort) in zip(rounds, cohorts, strict=True):
                began = time.perf_counter()
                gathered = engine.total(start_of_round(algorithm, state, cohort.members), cohort)
                after = server_half(algorithm, state, gathered.total, members)
                metrics = metrics_of(round, gathered, began)
                yield Played(after, metrics, told(algorithm, metrics, state, after))
                state = after

    def models(self, state: NodeState) -> dict[str, Params]:
        """Return the whole model of a state, under the empty name."""
        return {"": self.params(state)}

    def own_models(self, state: NodeState) -> dict[str, Params]:
        """Return nothing: a flat federation has one model."""
        return {}

    def params(self, state: NodeState) -> Params:
        """Return all parameters of a state, with the frozen ones."""
        return tree.join(state.params, self.algorithm.base)

    def renewed(self, state: NodeState, lines: int) -> NodeState:
        """Return the state with a new secret, made from its old one and the ledger's length."""
        return replace(state, secret=another_secret(state.secret, lines))

    def digest(self, state: NodeState) -> bytes:
        """Return the ledger's digest of the sum that led to a state."""
        return np.asarray(state.digest).tobytes()

    def header(self) -> Metrics:
        """Return nothing: a flat federation has no shape to describe."""
        return {}


def metrics_of(round: int, gathered: Gathered, began: float) -> Metrics:
    """Return the metrics of a round; reading the sums waits for the device."""
    names = ("members", "refused", "steps", "tokens", "unclipped", "nats")
    read = {name: float(np.asarray(getattr(gathered.total, name))) for name in names}
    nats = read.pop("nats")
    # Nodes under a plan do not tell their tokens: then only a round that all failed has no loss.
    failed = read["refused"] >= read["members"]
    excess = gathered.noise_excess
    return {
        "round": round,
        **{name: int(value) for name, value in read.items()},
        "loss": mean_loss(nats, read["tokens"], failed * read["refused"]),
        "upload_bytes": gathered.upload_bytes,
        "download_bytes": gathered.download_bytes,
        "seconds": time.perf_counter() - began,
        **({} if excess is None else {"noise_excess": excess}),
    }


def mean_loss(nats: float, tokens: float, refused: float) -> float:
    """Return nats per token; without tokens, infinity if members were refused, else zero."""
    if tokens:
        return nats / tokens
    return math.inf if refused else 0.0
