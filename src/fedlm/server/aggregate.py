"""From a sum of updates to their mean.

In:       a `Total` whose change is already weighted.
Out:      the weighted mean change, or the sum over a fixed number.
Promise:  the mean is the mean; an empty cohort changes nothing; a fixed denominator is fixed.
Not here: which weights (`local/train.py`), noise (`privacy`), the step (`step.py`).
"""

from __future__ import annotations

import jax.numpy as jnp

from fedlm.core import tree
from fedlm.core.types import Params, Total


def over(total: Total, denominator: float) -> Params:
    """The sum over a number that does not depend on who came."""
    return tree.scale(total.delta, 1.0 / denominator)


def mean(total: Total) -> Params:
    """The weighted mean of the members' changes."""
    safe = jnp.where(total.weight > 0, total.weight, 1.0)
    return tree.scale(total.delta, jnp.where(total.weight > 0, 1.0 / safe, 0.0))
