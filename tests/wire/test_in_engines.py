"""Law 1 for codecs: the compiled engine returns what real bytes gave."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedlm.core.types import BatchSpec, Loss, Sampling, Start
from fedlm.engine.loop import LoopEngine
from fedlm.engine.mesh import MeshEngine
from fedlm.federation.algorithm import Algorithm
from fedlm.local.train import WEIGHTS, local_training
from fedlm.methods import fedavg
from fedlm.methods.optimizers import client_optimizer
from fedlm.wire.dense import dense
from tests.wire.cases import CODECS, length

MEMBERS = np.arange(5)


def loss(params, tokens):
    """A bigram model: small, and its updates have zeros, ties and a bias of another size."""
    logits = params["table"][tokens[:, :-1]] + params["bias"][None, None]
    target = tokens[:, 1:]
    nats = (
        jax.nn.logsumexp(logits, axis=-1)
        - jnp.take_along_axis(logits, target[..., None], -1)[..., 0]
    )
    return Loss(jnp.sum(nats), jnp.float32(target.size))


def rows_of(client):
    return np.random.default_rng(client).integers(4, 20, (3 + client, 7)).astype(np.int16)


@pytest.mark.sample(1)
@pytest.mark.parametrize("codec", CODECS, ids=lambda c: c.name)
def test_mesh_equals_loop(codec):
    """To rounding, except where two programs that differ in the last bit of an update fall on two
    sides of a threshold: then one value of one member moves by a step."""
    algorithm = Algorithm(
        participation=Sampling(law="fixed", population=5, cohort=5),
        local=local_training(loss, client_optimizer("sgd", 0.5), WEIGHTS["examples"]),
        upload=codec,
        download=dense(),
        server=fedavg.fedavg_server(optax.sgd(1.0)),
    )
    params = {"table": np.zeros((20, 20), np.float32), "bias": np.zeros(20, np.float32)}
    loop, mesh = (
        E(algorithm, rows_of, BatchSpec(batch_size=4, sequence_length=6), 7)
        for E in (LoopEngine, MeshEngine)
    )
    sums = [e.total(Start(params), e.prepare(3, MEMBERS)) for e in (loop, mesh)]
    slow, fast = (found.total.delta for found in sums)
    assert length(slow) > 0
    for x, y in zip(jax.tree.leaves(fast), jax.tree.leaves(slow), strict=True):
        off = ~np.isclose(x, y, rtol=1e-5, atol=1e-5 * float(np.abs(y).max()))
        assert off.sum() <= 0.01 * off.size
    # Where a size depends on what is sent, a code that moved by a step can cost some bytes.
    made, counted = (found.upload_bytes for found in sums)
    assert abs(counted - made) <= (0 if codec.fixed_size else 0.001 * made)
