"""Named choices: optimisers of members and servers.

In:       names and rates.
Out:      optax transformations.
Promise:  each name is the published update rule.
Not here: state classes; when a rate changes is decided here, by its schedule.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import optax

Optimizer: TypeAlias = optax.GradientTransformation
Rate: TypeAlias = float | optax.Schedule


def client_optimizer(
    name: str, rate: Rate, *, momentum: float = 0.9, weight_decay: float = 0.0, clip: float = 0.0
) -> Optimizer:
    """What a member descends with; `clip` bounds the gradient norm for stability, not privacy."""
    made = CLIENT[name](rate, momentum, weight_decay)
    return optax.chain(optax.clip_by_global_norm(clip), made) if clip > 0 else made


CLIENT: dict[str, Callable[[Rate, float, float], Optimizer]] = {
    "sgd": lambda rate, momentum, decay: optax.sgd(rate),
    "momentum": lambda rate, momentum, decay: optax.sgd(rate, momentum=momentum),
    "adam": lambda rate, momentum, decay: optax.adam(rate),
    "adamw": lambda rate, momentum, decay: optax.adamw(rate, weight_decay=decay),
}


def server_optimizer(
    name: str, rate: Rate, *, momentum: float, beta2: float, epsilon: float
) -> Optimizer:
    """What the server does with the mean change: FedAvg and its adaptive relatives."""
    return SERVER[name](rate, momentum, beta2, epsilon)


SERVER: dict[str, Callable[[Rate, float, float, float], Optimizer]] = {
    "fedavg": lambda rate, b1, b2, eps: optax.sgd(rate),
    "fedavgm": lambda rate, b1, b2, eps: optax.sgd(rate, momentum=b1),
    "nesterov": lambda rate, b1, b2, eps: optax.sgd(rate, momentum=b1, nesterov=True),
    "fedadam": lambda rate, b1, b2, eps: optax.adam(rate, b1=b1, b2=b2, eps=eps),
    "fedyogi": lambda rate, b1, b2, eps: optax.yogi(rate, b1=b1, b2=b2, eps=eps),
    "fedadagrad": lambda rate, b1, b2, eps: optax.adagrad(
        rate, initial_accumulator_value=0.0, eps=eps
    ),
}


def schedule(name: str, rate: float, *, rounds: int, warmup: int, end: float) -> Rate:
    """A rate over rounds: constant, or a linear warm-up followed by a fall to `end * rate`."""
    if name == "constant" and warmup == 0:
        return rate
    rest = max(1, rounds - warmup)
    body = {
        "constant": optax.constant_schedule(rate),
        "linear": optax.linear_schedule(rate, end * rate, rest),
        "cosine": optax.cosine_decay_schedule(rate, rest, alpha=end),
    }[name]
    # The first round already moves: warm-up starts at rate / warmup, not at zero.
    ramp = optax.linear_schedule(rate / max(1, warmup), rate, max(1, warmup - 1))
    return optax.join_schedules([ramp, body], [warmup])
