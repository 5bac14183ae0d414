"""The gate before an answer: every question passes here, at a node and at a relay.

In:       a request with its recipe and plan, who is asked, policy and ledger.
Out:      nothing, or a `Refusal`; in the ledger, the answer that is about to be given.
Promise:  what is asked fits the recipe, the policy, the ledger and the lifetime epsilon; it is in
          the ledger before this returns; what is refused is in the ledger too.
Not here: each check (`question.py`, `policy.py`, `node_ledger.py`, `lifetime.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from fedlm.core.documents import toml_tables
from fedlm.core.errors import FedlmError, WireError
from fedlm.corpus.store import Store
from fedlm.deploy.lifetime import GoingOn, Release, lifetime
from fedlm.deploy.limits import within
from fedlm.deploy.node_ledger import NodeLedger, ToldFigures, about
from fedlm.deploy.policy import Policy, Refusal, believed
from fedlm.deploy.question import (
    Asked,
    check_evaluation,
    check_figures_due,
    check_question,
    most_turns,
)
from fedlm.engine.evaluate_messages import EvaluateRequest
from fedlm.engine.messages import TrainRequest
from fedlm.engine.secure_messages import SecureRequest
from fedlm.privacy import ledger as run_ledger
from fedlm.privacy.catalog import with_matrix
from fedlm.privacy.plan import PrivacyPlan
from fedlm.recipe.private_evaluation import PlannedFigures, planned_figures
from fedlm.recipe.settings import Recipe, parse


class Admission(NamedTuple):
    """The plan with which a run is entered into the ledger."""

    plan: PrivacyPlan | None


@dataclass(frozen=True)
class Guard:
    """The checks of one node or relay, with all that they remember."""

    policy: Policy
    ledger: NodeLedger
    asked: Asked
    others: tuple[Release, ...] = ()  # what preparing the store cost its clients

    @contextmanager
    def recording(self, request: TrainRequest | EvaluateRequest | SecureRequest) -> Iterator[None]:
        """Enter into the ledger whatever is refused in a block of code.

        Not where the ledger is an older copy: its counter must not grow until somebody confirms.
        """
        self.ledger.check_counter(request.counter)
        try:
            yield
        except Exception as error:  # also one that nobody foresaw: the node lives
            reason = str(error) if isinstance(error, FedlmError) else type(error).__name__
            self.ledger.refuse(request.run, request.round, reason)
            raise

    def admit(
        self,
        request: TrainRequest,
        recipe: Recipe,
        plan: PrivacyPlan | None,
        clients: Sequence[str],
        asked: Asked | None = None,
    ) -> None:
        """Raise `Refusal`, or enter the answer to a request into the ledger.

        Args:
          request: the request.
          recipe: its recipe, which the policy allows.
          plan: the recipe's plan, with the population that the server tells.
          clients: who is asked, by their names in the ledger.
          asked: how many members this place answers for, where that depends on the run.
        """
        same = about(request.recipe, request.first, request.population, request.text)
        entered = within(
            self.policy.longest_seconds,
            lambda: self._check(request, recipe, plan, clients, asked or self.asked, same),
        )
        if entered is not None:  # outside the limit: what is written is written whole
            self._enter(request, entered.plan, same, clients)

    def _check(
        self,
        request: TrainRequest,
        recipe: Recipe,
        plan: PrivacyPlan | None,
        clients: Sequence[str],
        asked: Asked,
        same: str,
    ) -> Admission | None:
        """Return the ledger entry to write before answering, or None if it is already written."""
        check_question(self.policy, request, recipe, plan, asked)
        known = self._known(request.run, plan, asked)
        most = most_turns(plan)
        run, round = request.run, request.round
        if not self.ledger.check(run, same, round, request.digest, clients, most):
            return None
        self._check_lifetime(run, known, clients, planned_figures(recipe, plan))
        return Admission(known)

    def admit_evaluation(
        self,
        request: EvaluateRequest,
        recipe: Recipe,
        plan: PrivacyPlan | None,
        asked: Asked | None = None,
    ) -> None:
        """Raise `Refusal`, or enter the answer to a question about held-out text.

        Under a plan a round has one such answer per phase and text, as it has one update.
        """
        check_evaluation(self.policy, request, recipe, plan, asked or self.asked)
        same = about(request.recipe, request.first, request.population, request.text)
        self.ledger.evaluate(
            request.run,
            same,
            request.round,
            f"{request.phase} {' '.join(sorted(set(request.splits)))}",
            request.digest,
            once=plan is not None,
        )

    def noisy_figures(
        self,
        request: EvaluateRequest,
        recipe: Recipe,
        plan: PrivacyPlan | None,
        make: Callable[[], Sequence[float]] = tuple,
        asked: Asked | None = None,
    ) -> tuple[float, ...]:
        """Raise `Refusal`, or return noisy figures of all clients here, entered with their cost.

        They are made once: whoever asks the same again gets the numbers of the ledger, also where
        another version or machine would add up others. A relay, which has none, makes nothing.
        """
        asked, run, round = asked or self.asked, request.run, request.round
        check_evaluation(self.policy, request, recipe, plan, asked)
        same = about(request.recipe, request.first, request.population, request.text)
        known = self.ledger.figures_told(run, same, round, request.digest)
        if known is not None:
            return known.numbers
        planned = planned_figures(recipe, plan)
        assert planned is not None  # `check_evaluation` has seen to it
        told = self.ledger.runs[run].figures if run in self.ledger.runs else ()
        check_figures_due(request, recipe, told)

        def check() -> PrivacyPlan | None:
            known = self._known(run, plan, asked)
            self._check_lifetime(run, known, None, planned)
            return known

        seconds = self.policy.longest_seconds
        entered, numbers = within(seconds, check), tuple(within(seconds, make))
        self.ledger.begin_run(run, entered, same)  # outside the limit: it is written whole
        noisy = ToldFigures(request.digest, planned.noise_multiplier, numbers)
        self.ledger.tell_figures(run, round, noisy)
        return numbers

    def _known(self, run: str, plan: PrivacyPlan | None, asked: Asked) -> PrivacyPlan | None:
        """Return the plan that this node counts by: the one of the run's first question."""
        if plan is None or run in self.ledger.runs:
            return None if plan is None else self.ledger.runs[run].plan
        return with_matrix(believed(self.policy, plan, asked.members))

    def _enter(
        self, request: TrainRequest, plan: PrivacyPlan | None, same: str, clients: Sequence[str]
    ) -> None:
        self.ledger.begin_run(request.run, plan, same)
        self.ledger.answer(request.run, request.round, request.digest, clients)

    def _check_lifetime(
        self,
        run: str,
        plan: PrivacyPlan | None,
        clients: Sequence[str] | None,
        figures: PlannedFigures | None,
    ) -> None:
        """Raise `Refusal` if some of these clients, or of all, would have spent too much."""
        most = self.policy.largest_lifetime_epsilon
        if most is None or plan is None:
            return
        spent = lifetime(self.ledger, clients, GoingOn(run, plan, figures), self.others)
        if not spent.epsilon <= most:
            raise Refusal(
                f"with this run a client would have spent epsilon {spent.epsilon:.3g} over all "
                f"runs of this node: it allows {most:g}."
            )


def parse_recipe(text: str) -> Recipe:
    """Convert the recipe of a request, or raise `WireError`."""
    return parse(toml_tables(text, "the recipe", WireError))


def store_releases(path: Path) -> tuple[Release, ...]:
    """Return what preparing a store released about its clients, failed attempts included."""
    books = [run_ledger.Ledger(file).entries() for file in Store(path).ledgers]
    entries = [entry for book in books for entry in book if entry["kind"] == "gaussian"]
    return tuple(Release(entry["noise_multiplier"], entry["delta"]) for entry in entries)
