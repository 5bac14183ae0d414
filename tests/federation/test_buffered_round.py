"""Buffered rounds: the synchronous round where all are waited for, FedBuff otherwise."""

from dataclasses import replace

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedlm.cohort.delays import DELAYS, Delays
from fedlm.core import tree
from fedlm.core.types import BatchSpec, Cohort, Loss, Sampling, Start
from fedlm.engine.loop import LoopEngine
from fedlm.federation.algorithm import Algorithm
from fedlm.federation.buffered_round import EMPTY, Buffer, BufferedRound, Simulated
from fedlm.federation.round import FlatRound
from fedlm.local.train import WEIGHTS, local_training
from fedlm.methods import fedavg
from fedlm.record import checkpoint
from fedlm.wire.dense import dense

CLIENTS, COHORT = 12, 4


def loss(params, tokens):
    """Half the squared distance to the one number in the batch."""
    return Loss(0.5 * (params["w"] - tokens[0, 0]) ** 2, jnp.float32(1.0))


def rows_of(client):
    return np.full((1 + client % 3, 1), client, np.int32)


def flat(weight="tokens"):
    algorithm = Algorithm(
        participation=Sampling(law="fixed", population=CLIENTS, cohort=COHORT),
        local=local_training(loss, optax.sgd(0.1), WEIGHTS[weight]),
        upload=dense(),
        download=dense(),
        server=fedavg.fedavg_server(optax.sgd(1.0, momentum=0.5)),
    )
    engine = LoopEngine(algorithm, rows_of, BatchSpec(batch_size=1, sequence_length=0), seed=3)
    return FlatRound(algorithm=algorithm, engine=engine, seed=3)


def buffered(delays="pareto", **settings):
    whole = flat()
    buffer = Buffer(**settings)
    return BufferedRound(
        flat=whole,
        buffer=buffer,
        waiting=Simulated(engine=whole.engine, grace=buffer.grace),
        delays=Delays(law=delays, seed=7).of,
    )


def start(rounds):
    return rounds.init({"w": jnp.float32(1.0)})


def played(rounds, state, count):
    first, metrics = int(state.round), []
    for one in rounds.play(state, range(first, first + count)):
        state = one.state
        metrics.append({k: v for k, v in one.metrics.items() if k != "seconds"})
    return state, metrics


@pytest.mark.sample(1)
@pytest.mark.parametrize("settings", [{}, {"size": COHORT}, {"size": 1, "grace": 1e6}])
def test_waiting_for_all_is_the_synchronous_round_to_the_bit(settings):
    here, told = played(flat(), start(flat()), 6)
    rounds = buffered(**settings)
    there, said = played(rounds, start(rounds), 6)
    assert tree.sha256(replace(there, flight=None)) == tree.sha256(here)
    for one, other in zip(told, said, strict=True):
        assert one.items() <= other.items()
        assert list(other["answers"]) == [str(other["round"])] and other["in_flight"] == 0


def test_without_waiting_for_all_the_model_is_another_one():
    here, _ = played(flat(), start(flat()), 6)
    rounds = buffered(size=2)
    there, _ = played(rounds, start(rounds), 6)
    assert not eqx.tree_equal(there.params, here.params)


def test_a_late_answer_began_from_the_model_of_its_round_and_counts_less():
    """One round by hand: what lands is the answer to the model that was sent when it began."""
    rounds = buffered(size=2, exponent=1.0)
    whole, state = flat(), start(rounds)
    sent, stale = {}, 0
    for one in rounds.play(state, range(12)):
        round, algorithm = one.metrics["round"], whole.algorithm
        sent[round] = state.params
        delta, weight = jnp.float32(0.0), jnp.float32(0.0)
        for began, members in one.metrics["answers"].items():
            for member in members:
                cohort = Cohort(int(began), np.array([member]))
                (answer,) = whole.engine.updates(Start(sent[int(began)]), cohort)
                late = round - int(began)
                stale += late > 0
                delta += answer.update.delta["w"] * answer.update.weight / (1 + late)
                weight += answer.update.weight
        params, _ = algorithm.server.step(state.params, state.server_memory, {"w": delta / weight})
        np.testing.assert_allclose(one.state.params["w"], params["w"], rtol=1e-5)
        state = one.state
    assert stale > 3


def test_nobody_is_asked_twice_at_a_time_and_the_old_are_given_up():
    rounds = buffered(size=1, largest_staleness=2)
    state, gone = start(rounds), 0
    for one in rounds.play(state, range(40)):
        flight = one.state.flight
        here = flight.members[flight.members != EMPTY]
        assert len(set(here.tolist())) == len(here) < COHORT
        for began in one.metrics["answers"]:
            assert 0 <= one.metrics["round"] - int(began) <= 2
        gone += one.metrics["given_up"]
    assert gone > 0
    clocks = [m["clock"] for m in played(rounds, state, 40)[1]]
    assert clocks == sorted(clocks)


def test_no_staleness_keeps_no_model_and_drops_whoever_is_late():
    rounds = buffered(size=2, largest_staleness=0)
    state, told = played(rounds, start(rounds), 5)
    assert state.flight.models["w"].size == 0
    assert all(list(m["answers"]) == [str(m["round"])] for m in told)
    assert all(m["given_up"] == 2 for m in told[1:])


def test_a_run_goes_on_from_its_checkpoint_with_the_same_members_in_flight(tmp_path):
    rounds = buffered(size=2)
    whole, told = played(rounds, start(rounds), 9)
    half, _ = played(rounds, start(rounds), 4)
    assert np.any(np.asarray(half.flight.members) != EMPTY)
    checkpoint.save(tmp_path, 4, half)
    saved = checkpoint.load_newest(tmp_path, start(rounds), print)
    again, said = played(rounds, saved.state, 5)
    assert tree.sha256(again) == tree.sha256(whole) and said == told[4:]


@pytest.mark.sample(1)
@pytest.mark.parametrize("law", [name for name in DELAYS if name != "none"])
def test_delays_have_their_mean_and_are_addressed(law):
    delays = Delays(law=law, seconds=2.0, shape=3.0 if law == "pareto" else 0.8)
    drawn = delays.of(1, np.arange(20_000))
    assert abs(drawn.mean() - 2.0) < 6 * drawn.std() / np.sqrt(len(drawn))
    assert abs(drawn.mean() - 2.5) > 6 * drawn.std() / np.sqrt(len(drawn))
    assert np.array_equal(delays.of(1, np.array([7, 3])), drawn[[7, 3]])
    assert not np.array_equal(delays.of(2, np.arange(5)), drawn[:5])
    fixed = replace(delays, by_client=True)
    assert np.array_equal(fixed.of(1, np.arange(5)), fixed.of(2, np.arange(5)))
