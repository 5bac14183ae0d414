"""`fedlm privacy`: numbers as published, one JSON object, one sentence for a mistake."""

import dataclasses

import pytest

from fedlm.core.releasable import make_releasable
from fedlm.lineage import FILE, Record, write_lineage
from fedlm.privacy.account import spent
from fedlm.privacy.ledger import NAME, UNKNOWN, Ledger, begin_entry, round_entry
from fedlm.record.journal import Journal
from tests.cli.test_bad_input import refused
from tests.privacy.plans import plan

TREE = ("--mechanism", "tree", "--rounds", 2000, "--min-separation", 313)
TREE = (*TREE, "--max-participations", 6, "--delta", 1e-10)


@pytest.mark.slow
def test_the_published_epsilon_of_a_tree(run_cli):
    done = run_cli("privacy", "epsilon", *TREE, "--noise-multiplier", 7, "--json")
    assert done.code == 0 and done.stdout.count("\n") == 1 and done.stderr == ""
    found = done.json
    assert round(found["rho"], 2) == 0.81 and round(found["epsilon"], 2) == 7.99
    assert round(found["published_epsilon"], 2) == 8.90
    assert found["mechanism"] == "tree" and found["delta"] == 1e-10 and found["rounds"] == 2000
    shown = run_cli("privacy", "epsilon", *TREE, "--noise-multiplier", 7).stdout
    assert "8.898" in shown and "squared sensitivity 70.3" in shown


def test_noise_for_a_target(run_cli):
    found = run_cli("privacy", "calibrate", "--target-epsilon", 7.9907, *TREE, "--json").json
    assert 6.99 < found["noise_multiplier"] < 7.001 and found["epsilon"] <= 7.9907


def test_a_population_that_was_assumed_is_not_warned_about(run_cli):
    asked = ("privacy", "epsilon", *TREE, "--noise-multiplier", 7, "--delta", 0.01)
    assert "promises little" not in run_cli(*asked).stdout
    known = run_cli(*asked, "--cohort", 1, "--population", 400).stdout
    assert "promises little" in known


def test_gaussian_noise_needs_its_cohort(run_cli):
    asked = ("privacy", "epsilon", "--mechanism", "gaussian", "--rounds", 10, "--delta", 1e-5)
    asked = (*asked, "--noise-multiplier", 2)
    refused(run_cli(*asked), "--cohort is missing")
    people = ("--cohort", 10, "--population", 1000)
    poisson = run_cli(*asked, *people, "--json").json
    fixed = run_cli(*asked, *people, "--sampling", "fixed", "--json").json
    assert poisson["epsilon"] < fixed["epsilon"] and poisson["rho"] is None
    refused(run_cli(*asked, *people, "--sampling", "spaced"), "--sampling = 'spaced'")


def test_no_noise_is_no_privacy(run_cli):
    asked = ("privacy", "epsilon", *TREE, "--noise-multiplier", 0)
    assert run_cli(*asked, "--json").json["epsilon"] is None
    assert "no privacy" in run_cli(*asked).stderr


@pytest.mark.parametrize(
    "change, words",
    [
        (("--delta", 0), ("privacy.delta = 0.0: expected",)),
        (("--mechanism", "trees"), ("--mechanism = 'trees'", "Did you mean 'tree'?")),
        (("--rounds", 0), ("server.rounds = 0",)),
        (("--cohort", 10, "--population", 100), ("privacy.min_separation = 313", "at most 9")),
        (("--mechanism", "blt", "--buffers", 0), ("privacy.buffers = 0",)),
        (("--clip-norm", -1), ("privacy.clip_norm = -1.0",)),
        (("--noise-multiplier", -1), ("privacy.noise_multiplier = -1.0",)),
        (("--min-separation", -5), ("privacy.min_separation = -5",)),
        (("--sampling", "poisson"), ("privacy.mechanism = 'tree': expected gaussian",)),
    ],
)
def test_settings_that_cannot_be(run_cli, change, words):
    refused(run_cli("privacy", "epsilon", *TREE, "--noise-multiplier", 7, *change), *words)


def test_what_is_missing_is_named(run_cli):
    refused(run_cli("privacy", "epsilon", *TREE), "--noise-multiplier is missing")
    refused(run_cli("privacy", "epsilon", "--noise-multiplier", 1), "--mechanism is missing")
    refused(run_cli("privacy", "calibrate", "--target-epsilon", 0, *TREE), "privacy.epsilon = 0.0")


def test_the_epsilon_of_a_run_is_that_of_its_ledger(run_cli, tmp_path):
    chosen = plan("tree")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.toml").write_text("")
    journal = Journal(tmp_path / "run" / "journal.jsonl")
    journal.append(make_releasable("header", dict(privacy=dataclasses.asdict(chosen))))
    refused(run_cli("privacy", "epsilon", "run"), "has no ledger.jsonl")
    book = Ledger(tmp_path / "run" / NAME)
    begun = book.begin(begin_entry({"": chosen}))
    for r in range(3):
        journal.append(make_releasable("round", dict(round=r)))
        book.append(round_entry(r, UNKNOWN))
    refused(run_cli("privacy", "epsilon", "run"), "has no lineage.json")
    record = Record(run=begun["run"], name="run", private=True, clients=(), start="")
    write_lineage(tmp_path / "run" / FILE, record)
    found = run_cli("privacy", "epsilon", "run", "--json").json
    assert found["epsilon"] == spent(chosen, 3).epsilon and found["rounds"] == 3
    refused(run_cli("privacy", "epsilon", "run", "--delta", 1e-5), "leave the options away")
    refused(run_cli("privacy", "epsilon", "run", "--rounds", 5), "leave the options away")


def test_a_run_without_a_claim(run_cli, trained):
    refused(run_cli("privacy", "epsilon", trained / "runs" / "tiny"), "no privacy claim")
    refused(run_cli("privacy", "epsilon", trained), "is not a run directory")
