"""Arithmetic on trees, as compiled programs do it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedlm.core import tree


def test_a_program_computes_a_squared_norm_once():
    def sound(a):
        return tree.where(jnp.isfinite(tree.squared_norm(a)), a, tree.zeros_like(a))

    leaves = {str(n): jax.ShapeDtypeStruct((n + 1, 3), jnp.float32) for n in range(12)}
    program = jax.jit(sound).lower(leaves).compile().as_text()
    assert program.count(" add(") < 4 * len(leaves)  # and not once more for every leaf


@pytest.mark.parametrize("number", [0.0, -0.0, 2e-38, 0.1, -3.7, 3e38, np.inf, -np.inf])
def test_once_changes_no_bit(number):
    given = np.float32(number)
    assert np.asarray(jax.jit(tree.once)(given)).tobytes() == given.tobytes()


def test_once_keeps_what_is_no_number():
    assert np.isnan(jax.jit(tree.once)(np.float32(np.nan)))
