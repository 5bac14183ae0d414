"""From a sum of updates to their mean.

In:       a `Total` whose change is already weighted.
Out:      the weighted mean change, or the sum over a fixed number.
Promise:  the mean is the mean; an empty cohort changes nothing; a fixed denominator is fixed.
Not here: which weights (`local/train.py`), noise (`privacy`), the step (`methods`).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array

from fedlm.core import tree
from fedlm.core.types import Params, Total


def over(delta: Params, denominator: float) -> Params:
    """Divide a sum by a fixed number, whichever members took part."""
    return tree.scale(delta, 1.0 / denominator)


def mean(total: Total) -> Params:
    """Return the weighted mean of the changes, for each leaf over the members that trained it."""
    if total.shares is None:
        return tree.scale(total.delta, _inverse(total.weight))
    leaves, structure = jax.tree.flatten(total.delta)
    each = _inverse(total.shares)
    return jax.tree.unflatten(structure, [leaf * each[i] for i, leaf in enumerate(leaves)])


def _inverse(weight: Array) -> Array:
    safe = jnp.where(weight > 0, weight, 1.0)
    return jnp.where(weight > 0, 1.0 / safe, 0.0)
