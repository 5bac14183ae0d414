"""A privacy claim in plain words: what an epsilon means, what it covers and what it does not.

In:       what the releases cost; the plan; what else the model depends on (the vocabulary, the
          model that training started from, held-out clients, fixed seeds).
Out:      a `Claim`: epsilon, one sentence for somebody who signs for it, two lists.
Promise:  journal, report, summary, terminal and Python take their words from here, so that no two
          of them disagree. Where something makes every finite epsilon false, there is none.
Not here: what releases cost (`ledger.py`, `account.py`), where a model came from (`lineage.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fedlm.core.documents import JsonObject
from fedlm.core.words import chance, count, number
from fedlm.privacy.account import Spent
from fedlm.privacy.plan import PrivacyPlan

# A larger epsilon bounds a likelihood ratio by more than twenty thousand: it promises nothing.
MEANINGFUL = 10.0
WHO = {
    "client": ("one client with all its text", "that client had not taken part"),
    "leaf": ("one leaf of the tree with all its training text", "that leaf had sent nothing"),
}
HELD_OUT = "held-out clients: figures of their text are exact, and nothing is promised to them"
REVEALED = "privacy.reveal wrote exact sums over clients into the run's files"
SEED = "the seed of the noise is a setting: whoever knows it can subtract the noise"
OTHER_RUNS = "other runs on the same text: fedlm privacy epsilon STORE adds up all that it knows"
DEVICES = "a person who is several clients here, and people whom a client's text is about"
ALWAYS = (DEVICES, OTHER_RUNS)  # said with every claim


class Claim(NamedTuple):
    """What a run promises, for whoever reads all that it released."""

    epsilon: float  # infinity: nothing finite is promised
    delta: float
    sentence: str
    covers: tuple[str, ...]
    not_covered: tuple[str, ...]
    accountant: str
    assumptions: tuple[str, ...]
    models_epsilon: float | None = None  # for somebody who sees only models, where files tell more
    published_epsilon: float | None = None  # by the conversion that was published, where it differs
    nodes: Mapping[str, float] | None = None  # of a tree: what its releases cost at each node

    @property
    def facts(self) -> JsonObject:
        """The claim as facts for a journal or for `--json`."""
        told = self._asdict()
        optional = ("models_epsilon", "published_epsilon", "nodes")
        return {name: v for name, v in told.items() if v is not None or name not in optional}


class Context(NamedTuple):
    """What a claim depends on besides the cost of its releases."""

    covered: tuple[str, ...] = ()  # further releases that are in the cost
    uncovered: tuple[str, ...] = ()  # what it does not cover, in words
    broken: tuple[str, ...] = ()  # why no finite epsilon holds
    unsafe_seed: bool = False
    held_out: bool = True  # whether figures of held-out clients are told
    released: str = ""  # what was released, if not rounds


def claim_of(spent: Spent, plan: PrivacyPlan, releases: int, context: Context = Context()) -> Claim:  # noqa: B008
    """Return the claim of a run that released so many rounds under a plan."""
    epsilon = math.inf if context.broken or plan.reveal else spent.epsilon
    without_noise = ("the noise is zero",) if plan.noise_multiplier == 0 else ()
    reasons = [*context.broken, *without_noise]
    if not reasons and math.isinf(spent.epsilon):
        reasons = ["what was released has no finite cost"] if releases else []
    what = "sums" if plan.unit == "client" else "changes of every leaf"
    rounds = (
        f"the noisy {what} of {count(releases, 'released round')}, and every model computed from "
        f"{'it' if releases == 1 else 'them'}"
    )
    covers = (context.released or rounds, *context.covered)
    uncovered = [*context.uncovered]
    uncovered += [REVEALED] if plan.reveal else []
    uncovered += [HELD_OUT] if context.held_out else []
    uncovered += [SEED] if context.unsafe_seed else []
    uncovered += ALWAYS
    revealed = plan.reveal and not reasons
    return Claim(
        epsilon,
        spent.delta,
        sentence(spent.epsilon, spent.delta, plan.unit, reasons, plan.reveal, context.unsafe_seed),
        covers,
        tuple(uncovered),
        spent.accountant,
        spent.assumptions,
        spent.epsilon if revealed else None,
        None if reasons or plan.reveal else spent.published_epsilon,
    )


def sentence(
    epsilon: float,
    delta: float,
    unit: str = "client",
    broken: Sequence[str] = (),
    revealed: bool = False,
    unsafe_seed: bool = False,
) -> str:
    """Return in one plain sentence what an epsilon means.

    >>> sentence(1.0, 1e-6)[:74]
    'Epsilon 1 at delta 1e-06: for any one client with all its text, whatever s'
    """
    if broken:
        return f"No finite epsilon holds: {'; '.join(broken)}."
    if revealed:
        return (
            "Nothing is promised against readers of this run's files, because privacy.reveal wrote "
            "exact sums into them; against somebody who sees only the models, "
            f"{_meaning(epsilon, delta, unit)}."
        )
    warned = "Unsafe for release, because the seed of the noise is fixed: " if unsafe_seed else ""
    return (
        f"{warned}Epsilon {number(epsilon)} at delta {delta:g}: {_meaning(epsilon, delta, unit)}."
    )


def _meaning(epsilon: float, delta: float, unit: str) -> str:
    who, otherwise = WHO[unit]
    factor = math.exp(min(epsilon, 700.0))
    said = number(factor, 3) if factor < 1e12 else "more than 1,000,000,000,000"
    end = "; so large a factor promises next to nothing" if epsilon > MEANINGFUL else ""
    return (
        f"for any {who}, whatever somebody concludes from what was released is at most {said} "
        f"times as likely as if {otherwise}, apart from a chance of {chance(delta)}{end}"
    )
