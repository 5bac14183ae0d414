"""One averaged change through an outer optimiser.

In:       parameters, the optimiser's memory, the members' mean change.
Out:      new parameters and memory.
Promise:  SGD of rate 1 gives exactly `params + change`.
Not here: choosing the optimiser (`federation/algorithms.py`).
"""

from __future__ import annotations

import optax

from fedlm.core import tree
from fedlm.core.types import OptState, Params


def step(
    optimizer: optax.GradientTransformation, params: Params, memory: OptState, change: Params
) -> tuple[Params, OptState]:
    """The outer optimiser descends along the negated change, the pseudo-gradient."""
    moved, memory = optimizer.update(tree.scale(change, -1.0), memory, params)
    return optax.apply_updates(params, moved), memory
