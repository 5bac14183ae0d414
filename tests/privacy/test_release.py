"""What may be told under a plan is one rule: an allow-list that every exit takes its facts from."""

import dataclasses
from pathlib import Path

import pytest

from fedlm.core.releasable import Releasable
from fedlm.privacy.release import baselines, extend, release, splits
from tests.privacy.plans import plan

PLAN = plan("tree")
OPEN = dataclasses.replace(PLAN, reveal=True)
EXACT = {"round": 1, "loss": 2.5, "tokens": 30, "members": 7, "upload_bytes": 70, "unclipped": 6}


def test_nothing_but_the_rule_makes_what_may_be_told():
    with pytest.raises(TypeError, match="only"):
        Releasable("round", {"loss": 1.0}, key=None)


def test_only_the_rule_seals():
    """A second caller of `make_releasable` would be a second rule."""
    source = Path(__file__).parents[2] / "src" / "fedlm"
    callers = {
        str(file.relative_to(source))
        for file in source.rglob("*.py")
        if "import" in (text := file.read_text())
        and "releasable import" in text
        and "make_releasable" in text
    }
    assert callers == {"privacy/release.py"}


def test_under_a_plan_a_fact_passes_only_if_it_is_on_the_list():
    told = release(PLAN, "round", {**EXACT, "never_thought_of": 1}, lambda: {"members": 4})
    assert dict(told) == {"round": 1, "members": 4}


@pytest.mark.parametrize("told_all", [None, OPEN], ids=["no plan", "reveal"])
def test_without_a_plan_everything_is_told(told_all):
    assert dict(release(told_all, "round", EXACT, lambda: {"members": 4})) == EXACT


def test_nodes_of_a_tree_are_judged_by_a_list_of_their_own():
    facts = {"round": 0, "nodes": {"oslo": {"loss": 2.0, "change": 0.3, "up_bytes": 9}}}
    assert release(PLAN, "round", facts)["nodes"] == {"oslo": {"up_bytes": 9}}


def test_what_is_added_later_passes_the_same_rule():
    told = release(PLAN, "round", {"round": 0}, lambda: {"upload_bytes": 5})
    more = extend(PLAN, told, {"upload_bytes": 10, "epsilon": 1.5, "loss": 2.0})
    assert dict(more) == {"round": 0, "upload_bytes": 10, "epsilon": 1.5}


def test_text_of_training_clients_gives_no_figure_under_a_plan():
    assert splits(PLAN, ["test", "validation"]) == ["test"]
    assert splits(PLAN, ["validation"]) == []
    assert splits(OPEN, ["test", "validation"]) == ["test", "validation"]
    assert not baselines(PLAN) and baselines(None)


def test_the_header_of_a_private_run_has_no_counts_and_no_plain_hashes_of_text():
    store = {"train_tokens": 941, "clients_sha256": "ab", "salted_sha256": "cd", "vocabulary": 60}
    header = {"recipe": {}, "store": store, "never_thought_of": 1}
    told = release(PLAN, "header", header)
    assert dict(told) == {"recipe": {}, "store": {"salted_sha256": "cd", "vocabulary": 60}}
    assert dict(release(OPEN, "header", header)) == header
    assert dict(release(None, "header", header)) == header


def test_the_last_line_has_figures_of_held_out_clients_alone():
    facts = {"test": {"perplexity": 9.0}, "validation": {"perplexity": 8.0}, "loss": 2.0}
    assert dict(release(PLAN, "final", facts)) == {"test": {"perplexity": 9.0}}
    assert dict(release(None, "final", facts)) == facts
