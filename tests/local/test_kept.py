"""An optimiser state that is kept: two rounds of one step are one round of two steps."""

import jax
import numpy as np
import optax

from fedlm.core.types import Loss
from fedlm.local.kept import MEMORY, MODEL, fresh, keeping
from fedlm.local.train import local_training


def loss(params, tokens):
    return Loss(jax.numpy.sum((params["w"] - tokens) ** 2), jax.numpy.float32(2.0))


LOCAL = local_training(loss, optax.adam(0.1))
BATCHES = [np.float32([1.0, 2.0]), np.float32([3.0, -1.0])]
PARAMS = {"w": jax.numpy.zeros(2)}


def test_two_rounds_of_one_step_are_one_round_of_two():
    plain = LOCAL.init(PARAMS)
    for batch in BATCHES:
        plain = LOCAL.step(plain, batch)
    local, start = keeping(LOCAL), fresh(LOCAL, PARAMS)
    for batch in BATCHES:
        update = local.finish(start, local.step(local.init(start), batch), np.float32(1.0))
        start = jax.tree.map(lambda x, d: x + d, start, update.delta)
    np.testing.assert_allclose(start[MODEL]["w"], plain.params["w"], rtol=1e-6)
    assert float(start[MEMORY][0].count) == 2.0


def test_a_change_that_is_not_finite_leaves_the_memory_alone():
    local, start = keeping(LOCAL), fresh(LOCAL, PARAMS)
    carry = local.step(local.init(start), np.float32([np.nan, 1.0]))
    update = local.finish(start, carry, np.float32(1.0))
    assert float(update.refused) == 1.0
    assert all(not np.any(np.asarray(x)) for x in jax.tree.leaves(update.delta))
