"""What a federated method is: how it is built, and which settings it refuses.

In:       nothing.
Out:      `Method`, the entry of the registry; `MethodOptions`, what a method is built from.
Promise:  records only; whoever builds or checks a run asks the entry and compares no names.
Not here: the methods (one file each), their names (`catalog.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fedlm.core.types import ClientMethod, LossFn, ServerMethod, TrainablePart
from fedlm.local.train import ALL, WEIGHTS, Weigh
from fedlm.methods.optimizers import Optimizer


@dataclass(frozen=True, kw_only=True)
class MethodOptions:
    """What a method may be built from; each method reads what it needs."""

    loss: LossFn
    inner: Optimizer  # the clients' optimiser, of rate one for a method that takes its rate
    outer: Optimizer  # the server's optimiser, with its schedule
    base: Optimizer  # the server's optimiser at learning rate one
    client_learning_rate: float
    server_learning_rate: float
    weigh: Weigh = WEIGHTS["examples"]
    parts: tuple[TrainablePart, ...] = (ALL,)  # rounds train them in turn
    proximal: float = 0.0  # FedProx's mu, FedDyn's alpha or FedAdamW's
    weight_decay: float = 0.0  # of the clients' AdamW, for methods that define its step
    gradient_clip_norm: float = 0.0
    participation: float = 1.0  # the share of all clients that joins a round


Halves = tuple[tuple[ClientMethod, ...], ServerMethod]


@dataclass(frozen=True, kw_only=True)
class Method:
    """A federated method: how to build both halves, and what it needs of other settings.

    `build(options)` returns one client half per trainable part, and the server half.
    """

    build: Callable[[MethodOptions], Halves]
    proximal: str = ""  # what the paper calls `client.proximal`; empty: the method has no such term
    needs_proximal: bool = False  # it must be above zero
    needs_optimizer: str = ""  # of clients, if the method defines their step itself
    # Clients take their learning rate from the round: it may change from one to the next.
    takes_rate: bool = False
    needs_constant_schedule: bool = False  # the server's step has no schedule
    trains_parts: bool = False  # works with `wire.trainable` and `wire.error_feedback`
    # All that a client sends is one change of the model, whose length means something: a clip
    # bounds it, and a server may shorten it.
    one_change: bool = False
    keeps_client_state: bool = False  # clients remember something until their next round

    @property
    def may_be_private(self) -> bool:
        """Whether a privacy plan covers all that a client sends and remembers."""
        return self.one_change and not self.keeps_client_state
