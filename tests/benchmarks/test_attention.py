"""How attention spreads: the invariant model does not feel the factor, the plain one does."""

import jax.numpy as jnp
import numpy as np

from benchmarks import attention


def test_a_factor_on_queries_and_keys_moves_the_plain_model_alone():
    tokens = jnp.asarray(np.random.default_rng(0).integers(4, 2000, (4, 8)), jnp.int32)
    found = {
        name: [attention.spread(attention.rescaled(model, factor), tokens) for factor in (0.5, 2.0)]
        for name, model in attention.models([]).items()
    }
    plain, invariant = found["transformer"], found["si-transformer"]
    assert plain[0][0] > plain[1][0] + 0.1, "larger scores, less spread"
    np.testing.assert_allclose(invariant[0], invariant[1], rtol=1e-4)
