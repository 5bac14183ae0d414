"""Optimisers and schedules by name: those of clients, those of servers.

In:       names and learning rates.
Out:      optax transformations.
Promise:  each name is the published update rule; one line in a registry adds another.
Not here: what is done with them (one file per method).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import jax
import optax

from fedlm.core.by_value import by_value
from fedlm.core.types import Params, PyTree

Optimizer: TypeAlias = optax.GradientTransformation
Rate: TypeAlias = float | optax.Schedule

# Tables of rows and filters of single channels have two axes and are no matrices that multiply.
NO_MATRICES = ("embedding", "head", "places", "taps")


def inner_matrices(params: Params) -> PyTree:
    """Mark the matrices between embedding and readout, which Muon makes orthogonal."""

    def mark(
        path: tuple[object, ...], leaf: jax.Array
    ) -> optax.contrib.MuonDimensionNumbers | None:
        name = jax.tree_util.keystr(path[-1:], simple=True)
        return (
            optax.contrib.MuonDimensionNumbers()
            if leaf.ndim == 2 and name not in NO_MATRICES
            else None
        )

    return jax.tree_util.tree_map_with_path(mark, params)


def muon(rate: Rate, weight_decay: float) -> Optimizer:
    """Return Muon for matrices inside the model and AdamW for all else (Jordan et al. 2024).

    Steps are as long as AdamW's (0.2 per number in the mean square, Liu et al. 2025), so that one
    learning rate fits both.
    """
    return optax.contrib.muon(
        rate,
        weight_decay=weight_decay,
        adam_weight_decay=weight_decay,
        muon_weight_dimension_numbers=inner_matrices,
        consistent_rms=0.2,
    )


# (learning rate, momentum, weight decay) -> optimiser
CLIENT_OPTIMIZERS: dict[str, Callable[[Rate, float, float], Optimizer]] = {
    "sgd": lambda rate, momentum, decay: optax.sgd(rate),
    "momentum": lambda rate, momentum, decay: optax.sgd(rate, momentum=momentum),
    "adam": lambda rate, momentum, decay: optax.adam(rate),
    "adamw": lambda rate, momentum, decay: optax.adamw(rate, weight_decay=decay),
    "muon": lambda rate, momentum, decay: muon(rate, decay),
}

# (learning rate, momentum, beta2, epsilon) -> optimiser
SERVER_OPTIMIZERS: dict[str, Callable[[Rate, float, float, float], Optimizer]] = {
    "fedavg": lambda rate, b1, b2, eps: optax.sgd(rate),
    "fedavgm": lambda rate, b1, b2, eps: optax.sgd(rate, momentum=b1),
    "nesterov": lambda rate, b1, b2, eps: optax.sgd(rate, momentum=b1, nesterov=True),
    "fedadam": lambda rate, b1, b2, eps: optax.adam(rate, b1=b1, b2=b2, eps=eps),
    "fedyogi": lambda rate, b1, b2, eps: optax.yogi(rate, b1=b1, b2=b2, eps=eps),
    "fedadagrad": lambda rate, b1, b2, eps: optax.adagrad(
        rate, initial_accumulator_value=0.0, eps=eps
    ),
}

# (learning rate, rounds, final fraction of the rate) -> learning rate by round
SCHEDULES: dict[str, Callable[[float, int, float], optax.Schedule]] = {
    "constant": lambda rate, rounds, end: optax.constant_schedule(rate),
    "linear": lambda rate, rounds, end: optax.linear_schedule(rate, end * rate, rounds),
    "cosine": lambda rate, rounds, end: optax.cosine_decay_schedule(rate, rounds, alpha=end),
}


def client_optimizer(
    name: str, rate: Rate, *, momentum: float = 0.9, weight_decay: float = 0.0, clip: float = 0.0
) -> Optimizer:
    """Make a client's optimiser; `clip` bounds the gradient norm for stability, not privacy."""
    return _clipped(CLIENT_OPTIMIZERS[name], rate, momentum, weight_decay, clip)


@by_value
def _clipped(
    make: Callable[[Rate, float, float], Optimizer],
    rate: Rate,
    momentum: float,
    weight_decay: float,
    clip: float,
) -> Optimizer:
    made = make(rate, momentum, weight_decay)
    return optax.chain(optax.clip_by_global_norm(clip), made) if clip > 0 else made


def server_optimizer(
    name: str, rate: Rate, *, momentum: float, beta2: float, epsilon: float
) -> Optimizer:
    """Make the server's optimiser, which takes the negated mean change for a gradient."""
    return _plain(SERVER_OPTIMIZERS[name], rate, momentum, beta2, epsilon)


@by_value
def _plain(
    make: Callable[[Rate, float, float, float], Optimizer],
    rate: Rate,
    momentum: float,
    beta2: float,
    epsilon: float,
) -> Optimizer:
    return make(rate, momentum, beta2, epsilon)


def schedule(name: str, rate: float, *, rounds: int, warmup: int, end: float) -> Rate:
    """Make a learning rate over rounds: a linear warm-up, then the named schedule.

    A schedule that falls ends at `end * rate`.
    """
    if name == "constant" and warmup == 0:
        # A number, not a function: optimisers then count no rounds in their state.
        return rate
    return _warmed_up(SCHEDULES[name], rate, rounds, warmup, end)


@by_value
def _warmed_up(
    make: Callable[[float, int, float], optax.Schedule],
    rate: float,
    rounds: int,
    warmup: int,
    end: float,
) -> optax.Schedule:
    body = make(rate, max(1, rounds - warmup), end)
    # The first round already moves: warm-up starts at rate / warmup, not at zero.
    ramp = optax.linear_schedule(rate / max(1, warmup), rate, max(1, warmup - 1))
    return optax.join_schedules([ramp, body], [warmup])
