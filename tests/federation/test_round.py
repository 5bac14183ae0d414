"""A round is the published algorithm."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedlm.core import tree
from fedlm.core.types import BatchSpec, Loss, Sampling, Start
from fedlm.engine.loop import LoopEngine
from fedlm.federation.algorithm import Algorithm
from fedlm.federation.round import CohortSampler, init_node, server_half
from fedlm.local.train import WEIGHTS, local_training
from fedlm.methods import fedavg
from fedlm.wire.dense import dense
from tests.oracle import quadratic_descent

TARGETS = {0: [3.0, -1.0], 1: [5.0], 2: [0.5, 0.25, 8.0]}


def loss(params, tokens):
    """Half the squared distance to the one number in the batch."""
    return Loss(0.5 * (params["w"] - tokens[0, 0]) ** 2, jnp.float32(1.0))


def algorithm(weight, server):
    return Algorithm(
        participation=Sampling(law="fixed", population=3, cohort=2),
        local=local_training(loss, optax.sgd(0.1), WEIGHTS[weight]),
        upload=dense(),
        download=dense(),
        server=fedavg.fedavg_server(server),
    )


def rows_of(client):
    # Whole numbers only: the engine hands tokens over as integers.
    return np.round(10 * np.array(TARGETS[client])).astype(np.int32)[:, None]


def one_round(weight):
    """One round of FedAvg over all three clients, in the order the engine shuffled them."""
    chosen = algorithm(weight, optax.sgd(1.0))
    engine = LoopEngine(chosen, rows_of, BatchSpec(batch_size=1, sequence_length=0), seed=0)
    state = init_node(chosen, {"w": jnp.float32(1.0)})
    cohort = engine.prepare(0, np.arange(3))
    order = [
        [float(rows_of(member)[numbers[0], 0]) for numbers in batches]
        for member, (_, batches) in enumerate(cohort.batches)
    ]
    total = engine.total(Start(state.params), cohort).total
    after = server_half(chosen, state, total, np.arange(3))
    return float(after.params["w"]), order


def test_fedavg_by_hand():
    """The mean of the members' end points, by examples or each counted once."""
    for weight in ("examples", "uniform"):
        found, order = one_round(weight)
        ends = [quadratic_descent(1.0, targets, 0.1) for targets in order]
        sizes = [len(t) for t in order] if weight == "examples" else [1, 1, 1]
        np.testing.assert_allclose(found, np.average(ends, weights=sizes), rtol=1e-5)


def test_cohorts_follow_seed_and_round_and_nothing_else():
    chosen = algorithm("uniform", optax.sgd(1.0))
    state = init_node(chosen, {"w": jnp.float32(1.0)})

    def drawn(seed):
        choose = CohortSampler(chosen, seed, state)
        return [tuple(choose(r)) for r in range(20)]

    assert drawn(4) == drawn(4) != drawn(5)
    assert len(set(drawn(4))) > 1


def test_what_survives_a_round_is_all_in_the_state():
    chosen = algorithm("uniform", optax.adam(0.1))
    state = init_node(chosen, {"w": jnp.float32(1.0)})
    engine = LoopEngine(chosen, rows_of, BatchSpec(batch_size=1, sequence_length=0), seed=0)
    total = engine.total(Start(state.params), engine.prepare(0, np.arange(3))).total
    once = server_half(chosen, state, total, np.arange(3))
    copied = jax.tree.map(lambda x: jnp.array(np.asarray(x)), once)
    assert int(once.round) == 1
    again = [server_half(chosen, s, total, np.arange(3)) for s in (once, copied)]
    assert tree.sha256(again[0]) == tree.sha256(again[1])
