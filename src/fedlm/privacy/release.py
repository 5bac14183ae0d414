"""What may be told of a run: the only rule.

In:       a privacy plan, or None; facts about a run, a round or a model.
Out:      `Releasable` facts, which journal, terminal, trackers, reports and replies alone accept.
Promise:  nothing else makes a `Releasable`. Under a plan without `reveal` a fact passes only if its
          name is on a list here: it is fixed before the run, it is noisy, or it is computed from
          what is. Everything else stays, whatever a caller adds later.
Not here: noise (`noise.py`), what a release costs (`account.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fedlm.core.releasable import Kind, Releasable, make_releasable
from fedlm.privacy.plan import PrivacyPlan

# Of a round: settings, clock, and post-processing of noisy sums. Evaluation figures are those of
# held-out clients (`splits`), who are not members of any round.
ROUND = frozenset(
    {
        "round",
        "seconds",
        "clip_norm",
        "unclipped_share",
        "noise_to_signal",
        "epsilon",
        "perplexity",
        "accuracy",
        "personal_perplexity",
        "places",
        "nodes",
        "routes",
    }
)
# Of a node of a tree: sizes, and functions of models that already carry noise.
NODE = frozenset(
    {
        "up_bytes",
        "down_bytes",
        "missed",
        "entropy_down",
        "entropy_up",
        "self_weight",
        "agreement",
        "backbone_norm",
    }
)


def release(
    plan: PrivacyPlan | None,
    kind: Kind,
    facts: Mapping[str, Any],
    expected: Callable[[], Mapping[str, Any]] = dict,
) -> Releasable:
    """Keeps of `facts` what may be told under a plan; without one, or with `reveal`, all.

    How many members came, and so how many bytes they sent, is a sum over members too. `expected`
    gives what is told in its place: numbers that follow from the plan alone.

    >>> dict(release(None, "round", {"round": 3, "loss": 2.5}))
    {'round': 3, 'loss': 2.5}
    """
    if kind == "round" and hides(plan):
        facts = {name: value for name, value in facts.items() if name in ROUND} | dict(expected())
        if "nodes" in facts:
            facts["nodes"] = {
                node: {name: value for name, value in of.items() if name in NODE}
                for node, of in facts["nodes"].items()
            }
    return make_releasable(kind, facts)


def hides(plan: PrivacyPlan | None) -> bool:
    """Whether exact sums over members stay untold."""
    return plan is not None and not plan.reveal


def splits(plan: PrivacyPlan | None, available: Sequence[str]) -> list[str]:
    """The splits whose figures may be told.

    The validation split is text of training clients: under a plan it gives no figure. Held-out
    clients take part in no round; the plan promises nothing to them.

    >>> splits(None, ["test", "validation"])
    ['test', 'validation']
    """
    return [split for split in available if split == "test"] if hides(plan) else list(available)


def baselines(plan: PrivacyPlan | None) -> bool:
    """Whether n-gram models, counted on the training text without noise, may be told."""
    return not hides(plan)


def extend(plan: PrivacyPlan | None, told: Releasable, facts: Mapping[str, Any]) -> Releasable:
    """What was told already, with more: figures, epsilon, sums over rounds of what was told."""
    more = {name: value for name, value in facts.items() if name in told or name in ROUND}
    return make_releasable(told.kind, {**told, **(more if hides(plan) else facts)})
