"""The one rule for which facts of a run may be released.

In:       a privacy plan, or None; facts about a run, a round or a model.
Out:      `Releasable` facts, which journal, terminal, trackers, reports and replies alone accept.
Promise:  nothing else makes a `Releasable`. Under a plan without `reveal` a fact passes only if its
          name is on a list here: it is fixed before the run, it is noisy, or it is computed from
          what is. Everything else stays, whatever a caller adds later.
Not here: noise (`noise.py`), what a release costs (`account.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fedlm.core.documents import JsonMapping
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
        "noise_excess",
        "epsilon",
        "releases",
        "perplexity",
        "accuracy",
        "private_validation",
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
        "attention_down",
        "attention_up",
        "self_weight",
        "agreement",
        "backbone_norm",
    }
)
# Of a node's reply to the server that adds the noise. The server needs how many updates its sum
# holds, how many were unusable, and how many were unclipped (an adaptive clip releases that with
# noise). How much text was trained on and how well it went stays at the node. A leaf that adds its
# own noise tells none of these.
REPLY = frozenset({"weight", "refused", "unclipped"})
# Of who answered a round: which nodes were asked tells who was drawn, even as a number.
NODES = frozenset({"round"})

# Under noise at the leaves of a tree, a leaf's own model carries no noise: what is computed from
# it stays, also its attention to what others sent.
OF_OWN_MODEL = frozenset({"personal_perplexity", "entropy_down", "attention_down", "self_weight"})
# Of the header: what was fixed before the first round, and figures of held-out clients.
HEADER = frozenset(
    {
        "command",
        "recipe",
        "store",
        "parameters",
        "privacy",
        "privacy_nodes",
        "privacy_budget",
        "canaries",
        "unsafe_seed",
        "custom",
        "part_of",
        "tree",
        "start",
        "start_sha256",
        "versions",
    }
)
# Of the last line: figures of held-out clients, words of the noisy model, the claim.
FINAL = frozenset({"test", "predictions", "privacy", "releases"})
# Of what happened to a run: settings, and rounds chosen by released figures.
HISTORY = frozenset({"before", "rounds", "round", "patience", "best_round"})
# Of the store in the header: its tokenizer, which leaves with the model, and a hash of the text
# under a salt that stays. Exact counts of tokens and plain hashes would tell whether a client is in
# the text.
STORE = frozenset(
    {
        "format",
        "vocabulary",
        "special_tokens",
        "tokenizer_sha256",
        "tokenizer_from",
        "salted_sha256",
        "user_field",
    }
)


def release(
    plan: PrivacyPlan | None,
    kind: Kind,
    facts: JsonMapping,
    expected: Callable[[], JsonMapping] = dict,
) -> Releasable:
    """Keep the facts that a plan allows to release; without a plan or with `reveal`, all.

    The number of members, and so of bytes they sent, is a sum over members too. `expected` holds
    the numbers that replace them, which follow from the plan alone.

    >>> dict(release(None, "round", {"round": 3, "loss": 2.5}))
    {'round': 3, 'loss': 2.5}
    """
    if kind == "header" and hides(plan):
        facts = {name: value for name, value in facts.items() if name in HEADER}
        if "store" in facts:
            facts["store"] = {k: v for k, v in facts["store"].items() if k in STORE}
    if kind == "round" and hides(plan):
        allowed, of_nodes = _allowed(plan, ROUND), _allowed(plan, NODE)
        facts = {name: value for name, value in facts.items() if name in allowed} | dict(expected())
        if "nodes" in facts:
            facts["nodes"] = {
                node: {name: value for name, value in of.items() if name in of_nodes}
                for node, of in facts["nodes"].items()
            }
    elif kind == "final" and hides(plan):
        facts = {name: value for name, value in facts.items() if name in FINAL}
    elif kind in ("extended", "stopped") and hides(plan):
        facts = {name: value for name, value in facts.items() if name in HISTORY}
    elif kind in ("reply", "nodes") and hides(plan):
        kept = REPLY if kind == "reply" else NODES
        if kind == "reply" and own_models_stay(plan):  # a leaf tells its noisy change alone
            kept = frozenset()
        facts = {name: value for name, value in facts.items() if name in kept} | dict(expected())
    return make_releasable(kind, facts)


def recall(plan: PrivacyPlan | None, told: JsonMapping) -> Releasable:
    """Return the facts of a round again that were released before: from a checkpoint or a journal.

    The rule is applied once more; numbers that follow from the plan stay as they were.
    """
    expected = {name: told[name] for name in EXPECTED if name in told}
    return release(plan, "round", told, lambda: expected)


def hides(plan: PrivacyPlan | None) -> bool:
    """Return whether exact sums over members stay private."""
    return plan is not None and not plan.reveal


def _allowed(plan: PrivacyPlan | None, names: frozenset[str]) -> frozenset[str]:
    return names - OF_OWN_MODEL if own_models_stay(plan) else names


def own_models_stay(plan: PrivacyPlan | None) -> bool:
    """Return whether the leaves' own models, and figures of them, stay private."""
    return plan is not None and plan.unit == "leaf" and hides(plan)


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


def extend(plan: PrivacyPlan | None, told: Releasable, facts: JsonMapping) -> Releasable:
    """Add figures, epsilon and sums over released rounds to facts that were already released."""
    allowed = _allowed(plan, ROUND)
    more = {name: value for name, value in facts.items() if name in told or name in allowed}
    return make_releasable(told.kind, {**told, **(more if hides(plan) else facts)})
