"""The one rule for which facts of a run may be released.

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
        "releases",
        "perplexity",
        "accuracy",
        "personal_perplexity",
        "places",
        "nodes",
        "routes",
    }
)
# Of a round: what the plan expects, in place of what happened.
EXPECTED = ("members", "upload_bytes", "download_bytes")
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
    """Keep the facts that a plan allows to release; without a plan or with `reveal`, all.

    The number of members, and so of bytes they sent, is a sum over members too. `expected` holds
    the numbers that replace them, which follow from the plan alone.

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


def recall(plan: PrivacyPlan | None, told: Mapping[str, Any]) -> Releasable:
    """Return the facts of a round again that were released, but that a crash kept from the journal.

    The rule is applied once more; numbers that follow from the plan stay as they were.
    """
    expected = {name: told[name] for name in EXPECTED if name in told}
    return release(plan, "round", told, lambda: expected)


def hides(plan: PrivacyPlan | None) -> bool:
    """Return whether exact sums over members stay private."""
    return plan is not None and not plan.reveal


def splits(plan: PrivacyPlan | None, available: Sequence[str]) -> list[str]:
    """Return the splits whose figures may be released.

    The validation split is text of training clients: under a plan it gives no figure. Held-out
    clients take part in no round; the plan promises nothing to them.

    >>> splits(None, ["test", "validation"])
    ['test', 'validation']
    """
    return [split for split in available if split == "test"] if hides(plan) else list(available)


def baselines(plan: PrivacyPlan | None) -> bool:
    """Return whether figures of n-gram models, counted without noise, may be released."""
    return not hides(plan)


def extend(plan: PrivacyPlan | None, told: Releasable, facts: Mapping[str, Any]) -> Releasable:
    """Add figures, epsilon and sums over released rounds to facts that were already released."""
    more = {name: value for name, value in facts.items() if name in told or name in ROUND}
    return make_releasable(told.kind, {**told, **(more if hides(plan) else facts)})
