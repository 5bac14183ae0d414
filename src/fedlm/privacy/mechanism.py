"""What a privacy mechanism is: its noise, its cost, and which plans it takes.

In:       nothing.
Out:      `Mechanism`, the entry of the registry; `Cost`, what some rounds of a plan cost.
Promise:  records only; whoever checks, accounts for or adds noise asks the entry and compares no
          names.
Not here: the mechanisms (`gaussian.py`, `spaced.py`), their names (`catalog.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from fedlm.privacy.cost import DpEvent
from fedlm.privacy.noise import Noise
from fedlm.privacy.plan import PrivacyPlan
from fedlm.privacy.sensitivity import Squared
from fedlm.privacy.strategy import Strategy


class Cost(NamedTuple):
    """The cost of the first rounds of a plan, with its accountant and its assumptions."""

    epsilon: float
    accountant: str
    assumptions: tuple[str, ...]
    rho: float | None = None
    published_epsilon: float | None = None  # by the conversion that papers print, where it differs


@dataclass(frozen=True, kw_only=True)
class Mechanism:
    """A privacy mechanism: its noise, its cost and the plans that it accepts."""

    noise: Callable[[PrivacyPlan, float], Noise]  # from a plan and a standard deviation
    cost: Callable[[PrivacyPlan, int], Cost]  # of the first so many rounds of a checked plan
    event: Callable[[PrivacyPlan, int], DpEvent]  # what those rounds release, for composition
    check: Callable[[PrivacyPlan], None]  # refuses its own settings where they make no sense
    laws: tuple[str, ...]  # of `server.sampling` that it allows, the usual one first
    reason: str  # why any other law is refused
    way_out: str  # what to set instead
    settings: tuple[str, ...] = ()  # fields of a plan that shape its noise; unused by others
    clip_moves: Literal["at restarts", "every round"] = "at restarts"  # under its noise
    independent: bool = False  # whether noise is fresh in every round
    # What so many releases cost who knows the draw, where noise is independent.
    turn_event: Callable[[PrivacyPlan, int], DpEvent] | None = None
    at_nodes: bool = False  # whether nodes add the noise before the server sees a sum
    trusted: Callable[[PrivacyPlan], str] | None = None  # against whom it holds, if not as usual
    # Laws under which members and noise of a round are drawn for it alone, so that a round that is
    # played again, or that comes after the planned ones, costs what any other round costs.
    replay_laws: tuple[str, ...] = ()
    # Laws under which its cost depends on the chance of joining, hence on how many clients exist.
    chance_laws: tuple[str, ...] = ()
    first_guess: Callable[[PrivacyPlan, float], float] = lambda plan, epsilon: 1.0  # of the noise
    sensitivity: Callable[[PrivacyPlan, int], Squared] | None = None  # of correlated noise
    strategy: Callable[[PrivacyPlan], Strategy] | None = None  # of noise that a matrix makes
    # Searches for the numbers of that matrix (`PrivacyPlan.matrix`), where none are prescribed.
    find_matrix: Callable[[PrivacyPlan], tuple[float, ...]] | None = None
