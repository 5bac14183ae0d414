"""Laws 3 and 5 for runs that promise something: the same noise after a kill, no more than the
budget, and nothing told that the plan does not cover."""

import hashlib
import itertools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from safetensors.numpy import load_file

from fedlm.core.errors import RecordError
from fedlm.privacy.account import spent
from fedlm.publish.pages import page_of
from fedlm.publish.statement import statement_of
from fedlm.recipe.build import build
from fedlm.recipe.settings import load
from fedlm.record.directory import RunDirectory
from fedlm.record.facts import facts_of
from fedlm.record.statement import statement_page as statement_page
from tests.conftest import call, write_tiny
from tests.laws.test_resume import MAIN, facts, newest, same

# Eighteen training clients: two a round with at least three rounds of rest.
SEPARATED = ("server.sampling=spaced", "server.cohort=2", "privacy.min_separation=3")
TREE = (
    *SEPARATED,
    "privacy.mechanism=tree",
    "privacy.noise_multiplier=1.0",
    "privacy.clip_norm=0.1",
)
BLT = (*SEPARATED, "privacy.mechanism=blt", "privacy.noise_multiplier=1.0", "privacy.clip_norm=0.1")
GAUSSIAN = ("server.sampling=poisson", "privacy.mechanism=gaussian", "privacy.clip_norm=0.1")
SEED = "privacy.seed=7"


def changes(*settings):
    return [part for setting in settings for part in ("--set", setting)]


def summary_of(run):
    return json.loads((run / "summary.json").read_text())


def state_of(run):
    """The leaves of a run's newest state by name."""
    return load_file(newest(run))


@pytest.fixture(scope="module")
def private(tmp_path_factory):
    """A folder with a finished run with a secret of its own."""
    folder = tmp_path_factory.mktemp("private")
    write_tiny(folder)
    done = call(folder, "train", "tiny.toml", *changes(*TREE), "--out", "one", "--json")
    assert done.code == 0, done.stderr
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("mechanism", [TREE, BLT], ids=["tree", "blt"])
def test_a_killed_private_run_ends_the_same(run_cli, tiny_recipe, tmp_path, mechanism):
    """The secret is fixed only so that there is another run to compare with."""
    settings = changes(*mechanism, SEED, "server.rounds=40", "run.checkpoint_every=7")
    command = [sys.executable, "-c", MAIN, "train", str(tiny_recipe), *settings]
    process = subprocess.Popen(
        [*command, "--out", "killed"],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    run = tmp_path / "killed"
    while process.poll() is None and (not (run / "journal.jsonl").exists() or len(facts(run)) < 9):
        time.sleep(0.1)
    time.sleep(int.from_bytes(os.urandom(2), "little") / (1 << 20))
    process.kill()
    assert process.wait() == -signal.SIGKILL, "it was to be killed before its end"
    done = run_cli("train", tiny_recipe, *settings, "--out", "killed", "--resume")
    assert done.code == 0 and "going on after round" in done.stderr
    assert run_cli("train", tiny_recipe, *settings, "--out", "whole").code == 0
    same(run, tmp_path / "whole")
    assert summary_of(run)["epsilon"] > 0
    # Secret, history, memory of the noise and of the optimiser: all of it, to the byte.
    ended, wanted = state_of(run), state_of(tmp_path / "whole")  # files differ in the seconds told
    assert ended.keys() == wanted.keys()
    assert not [n for n in wanted if ended[n].tobytes() != wanted[n].tobytes()]
    assert state_of(run)["history.times"].sum() == 40 * 2


@pytest.mark.slow
def test_a_run_with_a_secret_of_its_own_goes_on_with_it(private, tmp_path):
    """No seed at all: what is random is in the checkpoint and nowhere else."""
    whole = private / "one"
    cut = tmp_path / "cut"
    cut.mkdir()
    for name in ("recipe.toml", "journal.jsonl", "text.salt", "lineage.json"):
        (cut / name).write_bytes((whole / name).read_bytes())
    lines = (whole / "ledger.jsonl").read_bytes().splitlines(keepends=True)
    (cut / "ledger.jsonl").write_bytes(b"".join(lines[:5]))
    (cut / "checkpoints").mkdir()
    for path in (whole / "checkpoints").iterdir():
        if path.name < "round-000005":
            (cut / "checkpoints" / path.name).write_bytes(path.read_bytes())
    for counted in private.glob(".fedlm/stores/*/ledgers"):  # or the store knows of later rounds
        shutil.rmtree(counted)
    done = call(private, "train", cut / "recipe.toml", "--out", cut, "--resume")
    assert done.code == 0 and "going on after round 4" in done.stderr, done.stderr
    same(cut, whole)
    assert (cut / "ledger.jsonl").read_bytes() == (whole / "ledger.jsonl").read_bytes()


def test_a_run_whose_plan_is_another_one_now_does_not_go_on(private, tmp_path):
    """A noise that is found from a target could come out otherwise in another version."""
    cut = tmp_path / "cut"
    shutil.copytree(private / "one", cut)
    (cut / "summary.json").unlink()
    text = (cut / "journal.jsonl").read_text()
    before = '"privacy": {"mechanism": "tree", "sampling"'
    changed = text.replace(before, before.replace("tree", "blt"))
    assert changed != text
    (cut / "journal.jsonl").write_text(changed)
    done = call(private, "train", cut / "recipe.toml", "--out", cut, "--resume")
    assert done.code == 2 and "begun with another privacy plan" in done.stderr


@pytest.mark.slow
def test_two_runs_of_one_recipe_have_different_noise(private):
    assert call(private, "train", "tiny.toml", *changes(*TREE), "--out", "two").code == 0
    one, two = (state_of(private / name)["secret"] for name in ("one", "two"))
    assert not np.array_equal(one, two)
    assert (
        summary_of(private / "one")["params_sha256"] != summary_of(private / "two")["params_sha256"]
    )


def test_the_secret_is_in_the_checkpoint_and_nowhere_else(private):
    run = private / "one"
    secret = state_of(run)["secret"].astype("<u4")
    assert secret.any()
    raw, number = secret.tobytes(), int.from_bytes(secret.tobytes(), "little")
    forms = [raw, raw.hex().encode(), str(number).encode()]
    forms += [str(int(word)).encode() for word in secret]
    forms.append(", ".join(str(int(b)) for b in raw).encode())
    assert raw in newest(run).read_bytes()
    others = [p for p in run.rglob("*") if p.is_file() and p.parent.name != "checkpoints"]
    assert {"recipe.toml", "journal.jsonl", "report.html", "summary.json"} < {
        p.name for p in others
    }
    for path in others:
        data = path.read_bytes()
        assert not [form for form in forms if form in data], path


@pytest.mark.slow
def test_a_fixed_seed_gives_the_same_model_and_is_called_unsafe(run_cli, tiny_recipe, tmp_path):
    found = [
        run_cli("train", tiny_recipe, *changes(*TREE, SEED), "--out", out, "--json")
        for out in ("one", "two")
    ]
    assert found[0].json["params_sha256"] == found[1].json["params_sha256"]
    assert "privacy.seed is fixed" in found[0].stderr
    assert "Unsafe for release" in (tmp_path / "one" / "report.html").read_text()
    other = run_cli("train", tiny_recipe, *changes(*TREE, "privacy.seed=8"), "--json")
    assert other.json["params_sha256"] != found[0].json["params_sha256"]


# ---- what is told ----------------------------------------------------------------------


def test_a_private_run_tells_what_the_plan_releases(private):
    told = facts_of(private / "one")
    for entry in told.rounds:
        assert not {"loss", "tokens", "refused", "steps", "unclipped"} & entry.keys()
        assert entry["members"] == 2 and entry["clip_norm"] == pytest.approx(0.1)
    # Held-out text of training clients, and counts of their words, are theirs.
    assert "test" in told.final and "validation" not in told.final
    assert "baselines" not in told.final
    summary = summary_of(private / "one")
    assert summary["tokens"] is None and summary["validation_perplexity"] is None
    assert summary["perplexity"] > 1 and summary["rounds"] == 6


def test_epsilon_is_that_of_the_rounds_that_ran(private):
    told, summary = facts_of(private / "one"), summary_of(private / "one")
    made = build(load(private / "one/recipe.toml"), private / ".fedlm/stores", lambda *a: None)
    claim = spent(made.plan, 6)
    assert summary["epsilon"] == told.final["privacy"]["epsilon"] == claim.epsilon
    assert summary["delta"] == claim.delta == 1e-6
    shown = [entry["epsilon"] for entry in told.rounds if "epsilon" in entry]
    assert len(shown) == 3 and shown == sorted(shown) and shown[-1] == claim.epsilon
    asked = call(private, "privacy", "epsilon", "one", "--json").json
    assert asked["epsilon"] == claim.epsilon and asked["rounds"] == 6


def test_the_report_states_the_claim(private):
    page = (private / "one" / "report.html").read_text()
    for words in (
        "one client with all its text",
        "replaced by zero",
        "is trusted",
        "at delta 1e-06",
        "<td>tree</td>",
        "<td>spaced</td>",
        "at least 3 rounds in between",
    ):
        assert words in page, words
    assert "Unsafe for release" not in page and "Training loss" not in page


def test_a_page_shows_only_what_the_plan_allows(private, tmp_path):
    """Facts that a journal should not hold do not reach a page, whoever planted them."""
    copy = tmp_path / "planted"
    copy.mkdir()
    journal = (private / "one" / "journal.jsonl").read_text()
    (copy / "journal.jsonl").write_text(journal)
    before = page_of([copy])  # noise may have put any digits there
    lines = [json.loads(x) for x in journal.splitlines()]
    for line in lines:
        line |= {"loss": 7.654321, "tokens": 7654321, "train_tokens": 7654321}
        if line["kind"] == "final":
            line |= {"validation": {"perplexity": 76543.21, "accuracy": 0.7654}}
            line |= {"baselines": {"test": {"trigram": 76543.21}}}
    lines[0]["store"] |= {"train_clients": 7654321, "clients_sha256": "7654321"}
    (copy / "journal.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = page_of([copy])
    planted = ("7.654", "7,654", "76,543", "7654", "76.5")
    assert not [words for words in planted if page.count(words) > before.count(words)]
    assert "trained for" in page and "held-out clients" in page
    # The same facts are shown where no plan hides them.
    del lines[0]["privacy"]
    (copy / "journal.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "7,654,321" in page_of([copy]) and "76,543" in page_of([copy])


def test_a_statement_is_one_page_of_the_claim(private):
    done = call(private, "privacy", "statement", "one", "--out", "page.html", "--json")
    assert done.code == 0, done.stderr
    told, claim = done.json, facts_of(private / "one").final["privacy"]
    assert told["epsilon"] == pytest.approx(claim["epsilon"]) and told["sentence"]
    assert told["rounds_epsilon_published"] >= told["rounds_epsilon_exact"] > 0
    ledger = (private / "one" / "ledger.jsonl").read_bytes()
    assert told["ledger_sha256"] == hashlib.sha256(ledger).hexdigest()
    for each in told["odds"]:
        before, after = (x / (1 - x) for x in (each["before"], each["at_most_after"]))
        assert after / before == pytest.approx(math.exp(claim["epsilon"]))
    page = (private / "page.html").read_text()
    for words in ("Epsilon, two ways", "What is not covered", "Who is trusted", "Signature",
                  "No audit was made", told["ledger_sha256"], "may afterwards be"):  # fmt: skip
        assert words in page, words
    assert "<script" not in page and len(page) < 60_000


def test_an_audit_stands_beside_the_account(private, tmp_path):
    copy = shutil.copytree(private / "one", tmp_path / "one")
    found = {"canaries": 1, "epsilon_lower": 0.25, "confidence": 0.95}
    (copy / "audit.json").write_text(json.dumps(found))
    page = statement_page(statement_of(copy))
    assert "search for 1 planted client shows" in page and "does not contradict the account" in page
    (copy / "audit.json").write_text(json.dumps({**found, "epsilon_lower": 1e9}))
    assert "It contradicts the account: do not sign." in statement_page(statement_of(copy))
    (copy / "audit.json").write_text("[]")
    with pytest.raises(RecordError, match="audit the run again"):
        statement_of(copy)


def test_what_promises_nothing_has_no_statement(private, trained, tmp_path):
    with pytest.raises(RecordError, match="makes no privacy claim"):
        statement_of(trained / "runs" / "tiny")
    copy = shutil.copytree(private / "one", tmp_path / "one")
    header, *rest = (copy / "journal.jsonl").read_text().splitlines()
    told = json.loads(header)
    told["privacy"]["reveal"] = True
    (copy / "journal.jsonl").write_text("\n".join([json.dumps(told), *rest]) + "\n")
    with pytest.raises(RecordError, match="nothing to sign for"):
        statement_of(copy)


@pytest.mark.slow
def test_reveal_tells_everything(run_cli, tiny_recipe, tmp_path):
    settings = changes(*TREE, "privacy.reveal=true", "server.rounds=2")
    done = run_cli("train", tiny_recipe, *settings, "--out", "run", "--json")
    assert done.code == 0 and done.json["tokens"] > 0 and done.json["validation_perplexity"] > 1
    told = facts_of(tmp_path / "run")
    assert all({"loss", "tokens", "refused", "steps"} <= entry.keys() for entry in told.rounds)
    assert told.final["baselines"]


# ---- the budget ------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_stops_before_it_would_pass_its_budget(run_cli, tiny_recipe, tmp_path):
    plan = build(
        load(tiny_recipe, (*GAUSSIAN, "privacy.noise_multiplier=1.0")),
        tmp_path / "s",
        lambda *a: None,
    ).plan
    budget = (spent(plan, 3).epsilon + spent(plan, 4).epsilon) / 2
    settings = changes(*GAUSSIAN, "privacy.noise_multiplier=1.0", f"privacy.epsilon={budget}")
    done = run_cli("train", tiny_recipe, *settings, "--out", "run", "--json")
    assert done.code == 0, done.stderr
    assert "The privacy budget ends here: round 4 of 6 would pass epsilon" in done.stderr
    assert done.json["rounds"] == 3 and done.json["epsilon"] <= budget
    assert done.json["epsilon"] == pytest.approx(spent(plan, 3).epsilon)
    assert (tmp_path / "run" / "model.safetensors").is_file()
    assert run_cli("predict", "run", "the cat", "--json").code == 0
    again = run_cli("train", tiny_recipe, *settings, "--out", "run", "--resume", "--json")
    assert again.json["rounds"] == 3


@pytest.mark.slow
def test_a_target_alone_decides_the_noise(run_cli, tiny_recipe, tmp_path):
    wanted = changes(*TREE[:-2], "privacy.clip_norm=0.1", "privacy.epsilon=20")
    done = run_cli("train", tiny_recipe, *wanted, "--out", "run", "--json")
    assert done.code == 0, done.stderr
    assert 19.9 < done.json["epsilon"] <= 20 and done.json["rounds"] == 6
    header = facts_of(tmp_path / "run").header
    assert header["privacy"]["noise_multiplier"] > 0 and header["privacy_budget"] == 20
    assert RunDirectory.existing(tmp_path / "run").finished()


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 2], ids=["gaussian", "tree"])
def test_an_adaptive_clip_moves_and_is_told_with_noise(run_cli, tiny_recipe, tmp_path, every):
    chosen = GAUSSIAN if every == 1 else (*TREE, f"privacy.restart_every={every}")
    adaptive = (
        "privacy.clip_quantile=0.5",
        "privacy.clip_noise=2.0",
        "privacy.noise_multiplier=1.0",
    )
    done = run_cli("train", tiny_recipe, *changes(*chosen, *adaptive), "--out", "run", "--json")
    assert done.code == 0, done.stderr
    rounds = facts_of(tmp_path / "run").rounds
    clips = [entry["clip_norm"] for entry in rounds]
    moved = [
        number for number, pair in enumerate(itertools.pairwise(clips), 1) if len(set(pair)) == 2
    ]
    assert len(moved) >= 2 and all(number % every == 0 for number in moved)
    assert all(clips[i] == clips[i - i % every] for i in range(len(clips)))
    assert all(0 <= entry["unclipped_share"] <= 1 for entry in rounds[every - 1 :])
    assert all("unclipped_share" not in entry for entry in rounds[: every - 1])
