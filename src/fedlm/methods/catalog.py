"""Federated methods by name, and what each refuses.

In:       a name, and the settings that it must go together with.
Out:      the method's entry.
Promise:  one line in `METHODS` adds a method; a setting with which a method would not do what it
          says is refused with the reason.
Not here: what a method does (one file each).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fedlm.core.errors import either, require
from fedlm.methods import fedadamw, fedavg, feddyn, mimelite, scaffold
from fedlm.methods.method import Method

METHODS: dict[str, Method] = {
    "fedavg": fedavg.METHOD,
    "mimelite": mimelite.METHOD,
    "scaffold": scaffold.METHOD,
    "feddyn": feddyn.METHOD,
    "fedadamw": fedadamw.METHOD,
}


@dataclass(frozen=True, kw_only=True)
class RelatedSettings:
    """The settings beside a method that decide whether it can do what it says."""

    optimizer: str  # of the clients
    gradient_clip_norm: float
    proximal: float
    schedule: str
    warmup_rounds: int
    client_schedule: str
    client_warmup_rounds: int
    trainable: str
    error_feedback: bool
    private: bool


def check_method_settings(name: str, related: RelatedSettings) -> None:
    """Refuse settings with which the method would not do what it says."""
    method = METHODS[name]
    require(
        method.trains_parts or (related.trainable == "all" and not related.error_feedback),
        "client.method",
        name,
        f"{method_names(lambda m: m.trains_parts)} where wire.trainable is not 'all' or "
        "wire.error_feedback is on",
    )
    _check_proximal(name, method, related.proximal)
    _check_steps(name, method, related)
    require(
        method.may_be_private or not related.private,
        "client.method",
        name,
        f"{method_names(lambda m: m.may_be_private)} under a privacy plan: what other methods "
        "send beside a change has no bound",
    )


def method_names(has: Callable[[Method], bool]) -> str:
    """List the methods that have a property, for an error: `'fedavg' or 'mimelite'`."""
    return either(repr(name) for name, method in METHODS.items() if has(method))


def _check_proximal(name: str, method: Method, proximal: float) -> None:
    if method.needs_proximal:
        require(proximal > 0, "client.proximal", proximal, f"{method.proximal}, above 0")
    require(bool(method.proximal) or proximal == 0, "client.proximal", proximal, f"0 with {name!r}")


def _check_steps(name: str, method: Method, related: RelatedSettings) -> None:
    """Refuse optimisers and schedules that the method would not use."""
    require(
        method.needs_optimizer in ("", related.optimizer),
        "client.optimizer",
        related.optimizer,
        f"{method.needs_optimizer!r}: {name!r} defines the member's step",
    )
    require(
        method.needs_optimizer != "sgd" or related.gradient_clip_norm == 0,
        "client.gradient_clip_norm",
        related.gradient_clip_norm,
        f"0: {name!r} defines the member's step",
    )
    for setting, value, wanted in (
        ("schedule", related.client_schedule, "constant"),
        ("warmup_rounds", related.client_warmup_rounds, 0),
    ):
        require(
            method.takes_rate or value == wanted,
            f"client.{setting}",
            value,
            f"{wanted!r} with {name!r}: {method_names(lambda m: m.takes_rate)} may "
            "change a member's learning rate over the rounds",
        )
    require(
        not method.needs_constant_schedule or related.schedule == "constant",
        "server.schedule",
        related.schedule,
        f"'constant' with {name!r}",
    )
    require(
        not method.needs_constant_schedule or related.warmup_rounds == 0,
        "server.warmup_rounds",
        related.warmup_rounds,
        f"0 with {name!r}, whose server step has no schedule",
    )
