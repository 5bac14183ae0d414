"""The mean is the mean."""

import jax.numpy as jnp
import numpy as np

from fedlm.core.types import Total
from fedlm.server.aggregate import mean


def total(delta, weight):
    rest = [jnp.zeros(())] * 6
    return Total({"w": jnp.asarray(delta)}, jnp.float32(weight), *rest)


def test_the_mean_divides_by_the_weight():
    np.testing.assert_allclose(mean(total([6.0, -3.0], 3.0))["w"], [2.0, -1.0])


def test_nobody_changes_nothing():
    np.testing.assert_array_equal(mean(total([0.0, 0.0], 0.0))["w"], 0.0)
