"""A private round is on disk before anybody sees it, and is never played twice unless it is paid
for twice."""

import dataclasses
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest

from fedlm import lineage
from fedlm.core.errors import ConfigError, RecordError
from fedlm.corpus.population import of_paths
from fedlm.privacy import ledger
from fedlm.privacy.account import event_of, spent
from fedlm.privacy.cost import compose, gaussian_event
from fedlm.privacy.ledger import Ledger
from fedlm.recipe.settings import dump
from fedlm.record import checkpoint
from fedlm.record.journal import Journal
from fedlm.training import finish
from fedlm.training.begin import begin
from fedlm.training.write_ahead import WriteAhead
from tests.conftest import call
from tests.privacy.crashes import Killed, go_on, placed, released, runs_of, told

ROUNDS = 6
SHARED = ("privacy.clip_norm=0.1", "privacy.noise_multiplier=1.0", "server.cohort=2")
GAUSSIAN = (*SHARED, "privacy.mechanism=gaussian", "server.sampling=poisson")
TREE = (*SHARED, "privacy.mechanism=tree", "server.sampling=spaced", "privacy.min_separation=3")
FOREST = (*GAUSSIAN, "federation.levels=[0]", "federation.pool_clients=false")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ahead")


@pytest.fixture(scope="module")
def gaussian(folder):
    return runs_of(folder, *GAUSSIAN)


@pytest.fixture(scope="module")
def tree(folder):
    return runs_of(folder, *TREE)


def killed_at(run, out, round, monkeypatch, where=(Journal, "append"), after=False):
    """Plays a run until a function is called for a round, and kills it there."""
    owner, name = where
    act = getattr(owner, name)

    def dies(*args, **kwargs):
        numbers = [a.get("round") for a in args if hasattr(a, "get")]
        numbers += [a + 1 for a in args if isinstance(a, int)]
        if round not in numbers:
            return act(*args, **kwargs)
        if after:
            act(*args, **kwargs)
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(owner, name, dies)
        go_on(run, out)


def figures(out):
    return [entry["perplexity"] for entry in told(out)]


# ---- the order of a round ----------------------------------------------------------------------


def test_a_round_is_saved_then_paid_for_then_told(tree, tmp_path, monkeypatch):
    order = []
    save, append, tell = checkpoint.save, Ledger.append, Journal.append
    watch = tree[0].evaluation.watch

    monkeypatch.setattr(
        checkpoint, "save", lambda *args: (order.append(("state", args[1] - 1)), save(*args))
    )

    def pays(book, entry):
        if book.path.parent == tmp_path / "run":  # the store keeps a copy
            order.append(("ledger", entry["round"]))
        append(book, entry)

    monkeypatch.setattr(Ledger, "append", pays)
    monkeypatch.setattr(
        Journal, "append", lambda self, t: (order.append((t.kind, t.get("round"))), tell(self, t))
    )
    monkeypatch.setattr(
        type(tree[0].evaluation),
        "watch",
        lambda self, state: (order.append(("scored", int(state.round) - 1)), watch(state))[1],
    )
    go_on(tree[0], tmp_path / "run")
    begun = [("scored", -1), ("header", None), ("state", -1)]
    each = [(what, r) for r in range(ROUNDS) for what in ("state", "ledger", "scored", "round")]
    assert order == [*begun, *each, ("final", None)]


@pytest.mark.slow
def test_without_a_plan_nothing_is_paid_for(folder, tmp_path):
    (plain,) = runs_of(folder, "server.rounds=2", engines=("mesh",))
    go_on(plain, tmp_path / "run")
    assert not (tmp_path / "run" / "ledger.jsonl").exists()
    names = {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()}
    assert names == {"round-000000.safetensors", "round-000002.safetensors"}


def test_secrets_are_their_owners_alone(tree, tmp_path):
    before = os.umask(0)
    try:
        go_on(tree[0], tmp_path / "run")
    finally:
        os.umask(before)
    run = tmp_path / "run"
    assert stat.S_IMODE((run / "checkpoints").stat().st_mode) == 0o700
    for path in [*(run / "checkpoints").iterdir(), run / "ledger.jsonl"]:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not (run / ".lock").exists()


# ---- after a kill ------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("mechanism", ["gaussian", "tree"])
def test_a_saved_round_is_not_played_again_with_other_lanes(
    request, tmp_path, monkeypatch, mechanism
):
    """The audit's case: the repeated sum differs in a bit and got noise of its own."""
    mesh, loop = request.getfixturevalue(mechanism)
    out = tmp_path / "run"
    killed_at(mesh, out, 3, monkeypatch)
    saved = max((out / "checkpoints").iterdir())
    assert saved.name == "round-000004.safetensors" and len(told(out)) == 3
    before = saved.read_bytes()
    summary = go_on(loop, out)
    assert released(out) == list(range(ROUNDS))
    assert [entry["round"] for entry in told(out)] == list(range(ROUNDS))
    assert saved.read_bytes() == before
    # The line that the kill kept from the journal is that of the saved state.
    score = mesh.evaluation.watch
    state = checkpoint.from_bytes(before, mesh.round.init(mesh.start()), "it")
    assert told(out)[3]["perplexity"] == score(state)["perplexity"]
    assert summary["epsilon"] == spent(mesh.plan, ROUNDS).epsilon


@pytest.mark.slow
def test_lanes_do_differ(tree, tmp_path):
    """Or the test above would show nothing."""
    digests = set()
    for number, run in enumerate(tree):
        start = placed(run, tmp_path / str(number))
        state = start.round.init(start.start())
        played = next(start.round.play(state, range(1)))
        digests.add(start.round.digest(played.state))
    assert len(digests) == 2


@pytest.mark.slow
def test_a_kill_before_the_ledger_pays_once(tree, tmp_path, monkeypatch):
    out = tmp_path / "run"
    killed_at(tree[0], out, 2, monkeypatch, (Ledger, "append"))
    assert released(out) == [0, 1] and len(told(out)) == 2
    go_on(tree[1], out)
    assert released(out) == list(range(ROUNDS))


@pytest.mark.slow
def test_finish_alone_pays_for_the_last_round(tree, tmp_path, monkeypatch):
    out = tmp_path / "run"
    killed_at(tree[0], out, ROUNDS - 1, monkeypatch, (Ledger, "append"))
    done = finish(placed(tree[0], out))
    assert released(out) == list(range(ROUNDS)) and len(told(out)) == ROUNDS
    assert done["epsilon"] == spent(tree[0].plan, ROUNDS).epsilon


# ---- what is lost ------------------------------------------------------------------------------


def without_states(out, first):
    for path in (out / "checkpoints").iterdir():
        if int(path.stem[-6:]) >= first:
            path.unlink()


def contents(out):
    """Return the contents of all files but the one that says what a run is doing now."""
    found = (path for path in out.rglob("*") if path.is_file() and path.name != "status.json")
    return {path: path.read_bytes() for path in found}


@pytest.mark.sample(1)
@pytest.mark.parametrize("lost", ["checkpoints", "ledger.jsonl", "lineage.json"])
def test_no_run_goes_on_without_its_states_or_its_ledger(tree, tmp_path, monkeypatch, lost):
    out = tmp_path / "run"
    killed_at(tree[0], out, 3, monkeypatch)
    (out / lost).rename(tmp_path / "lost")
    before = contents(out)
    way_out = "or begin another run with another --out"
    with pytest.raises(RecordError, match="Bring the file back" if "lineage" in lost else way_out):
        go_on(tree[0], out)
    assert contents(out) == before
    # Neither does a ledger that lacks lines, as from a backup.
    (tmp_path / "lost").rename(out / lost)
    lines = (out / "ledger.jsonl").read_bytes().splitlines(keepends=True)
    (out / "ledger.jsonl").write_bytes(b"".join(lines[:-2]))
    with pytest.raises(RecordError, match="the run directory is an older copy"):
        go_on(tree[0], out)
    shutil.rmtree(tree[0].store.path / "ledgers")  # also where no store remembers it
    with pytest.raises(RecordError, match="lacks lines that were there when round 4 was saved"):
        go_on(tree[0], out)
    shutil.rmtree(tree[0].store.path / "ledgers")
    other = json.loads(lines[-1]) | {"digest": "0" * 64}
    (out / "ledger.jsonl").write_bytes(b"".join([*lines[:-1], json.dumps(other).encode(), b"\n"]))
    with pytest.raises(RecordError, match="are of different runs"):
        go_on(tree[0], out)


@pytest.mark.slow
def test_gaussian_rounds_whose_states_are_lost_are_paid_for_twice(gaussian, tmp_path, monkeypatch):
    out, said = tmp_path / "run", []
    killed_at(gaussian[0], out, 4, monkeypatch)
    first = figures(out)
    without_states(out, 4)
    done = go_on(gaussian[0], out, said)
    assert released(out) == [0, 1, 2, 3, 4, 3, 4, 5]
    assert "states after round 3 are lost, and rounds up to 5 were released" in " ".join(said)
    assert done["epsilon"] == spent(gaussian[0].plan, ROUNDS + 2).epsilon
    lines = (out / "journal.jsonl").read_text().splitlines()
    told_of = [json.loads(line).get("releases") for line in lines[1:-1]]
    assert told_of == [None, None, None, 6, 7, 8]
    # Same lanes, same state, and yet another release: its members and noise are drawn anew.
    assert figures(out)[:3] == first[:3] and figures(out)[3] != first[3]
    shown = call(tmp_path, "privacy", "epsilon", out, "--json")
    assert shown.json["epsilon"] == done["epsilon"] and shown.stderr == ""
    # Whoever may not read the ledger copies the rest: that tells no epsilon.
    (out / "ledger.jsonl").unlink()
    copied = call(tmp_path, "privacy", "epsilon", out, "--json")
    assert copied.code == 2 and "has no ledger.jsonl" in copied.stderr


@pytest.mark.slow
def test_a_kill_in_a_repeated_round_is_paid_for_too(gaussian, tmp_path, monkeypatch):
    """The ledger has a line of that round already, of the release whose state was lost."""
    out = tmp_path / "run"
    killed_at(gaussian[0], out, 4, monkeypatch)
    without_states(out, 4)
    killed_at(gaussian[0], out, 3, monkeypatch, (Ledger, "append"))
    assert released(out) == [0, 1, 2, 3, 4]
    go_on(gaussian[0], out)
    assert released(out) == [0, 1, 2, 3, 4, 3, 4, 5]


def test_a_correlated_run_whose_states_are_lost_ends_with_what_it_has(tree, tmp_path, monkeypatch):
    out, said = tmp_path / "run", []
    killed_at(tree[0], out, 4, monkeypatch)
    kept = checkpoint.load_newest(out / "checkpoints", tree[0].round.init(tree[0].start()), print)
    without_states(out, 4)
    done = go_on(tree[1], out, said)
    assert done is not None and done["rounds"] == 3 and len(told(out)) == 3
    assert "so the run ends with the model of round 3" in " ".join(said)
    assert released(out) == [0, 1, 2, 3, 4]
    assert done["epsilon"] == spent(tree[0].plan, 5).epsilon
    assert kept is not None and int(kept.state.round) == 5


@pytest.mark.slow
@pytest.mark.parametrize("given", ["noise", "target"])
def test_the_budget_counts_what_was_released_again(folder, tmp_path, monkeypatch, given):
    noise = spent(runs_of(folder, *GAUSSIAN, engines=("mesh",))[0].plan, ROUNDS).epsilon
    fixed = (*GAUSSIAN, f"privacy.epsilon={noise + 1e-9}")
    wanted = fixed if given == "noise" else [s for s in fixed if "noise_mult" not in s]
    (run,) = runs_of(folder, *wanted, engines=("mesh",))
    assert run.cadence.rounds == ROUNDS
    out, said = tmp_path / "run", []
    killed_at(run, out, 3, monkeypatch)
    without_states(out, 3)
    done = go_on(run, out, said)
    assert released(out) == [0, 1, 2, 3, 2, 3] and done["rounds"] == 4
    assert done["epsilon"] <= noise + 1e-9
    assert "The privacy budget ends here: round 5 of 6" in " ".join(said)


@pytest.mark.slow
def test_a_tree_of_federations_goes_the_same_way(folder, tmp_path, monkeypatch):
    (run,) = runs_of(folder, *FOREST, "server.rounds=4", engines=("mesh",))
    out = tmp_path / "run"
    killed_at(run, out, 2, monkeypatch)
    go_on(run, out)
    assert released(out) == [0, 1, 2, 3]
    entries = Ledger(out / "ledger.jsonl").entries()
    assert len(entries[0]["plans"]) > 1 and "" not in entries[0]["plans"]
    assert len({entry["digest"] for entry in entries[1:]}) == 4
    other = tmp_path / "other"
    killed_at(run, other, 2, monkeypatch)
    first = told(other)
    without_states(other, 2)
    go_on(run, other)
    assert released(other) == [0, 1, 2, 1, 2, 3]
    assert told(other)[0] == first[0] and told(other)[1] != first[1]


# ---- two at once -------------------------------------------------------------------------------


# What the lock of a run directory is, without the seconds that importing fedlm takes.
HOLD = """
    import fcntl, os, sys, time
    file = os.open(sys.argv[1] + "/.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(file, fcntl.LOCK_EX)
    os.write(file, str(os.getpid()).encode())
    print("locked", flush=True)
    time.sleep(600)
"""


@pytest.mark.slow
def test_two_processes_do_not_train_in_one_directory(tree, folder, tmp_path, monkeypatch):
    out = tmp_path / "run"
    killed_at(tree[0], out, 2, monkeypatch)
    before = (out / "journal.jsonl").read_bytes()
    hold = [sys.executable, "-c", textwrap.dedent(HOLD), str(out)]
    with subprocess.Popen(hold, stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout is not None and other.stdout.readline() == b"locked\n"
            with pytest.raises(
                RecordError, match=rf"is being trained by another process \(pid {other.pid}\)"
            ):
                go_on(tree[0], out)
            done = call(folder, "train", out / "recipe.toml", "--out", out, "--resume")
            assert done.code == 2 and "another process" in done.stderr, done.stderr
            assert (out / "journal.jsonl").read_bytes() == before
        finally:
            other.kill()
    go_on(tree[0], out)  # the lock went with the process
    assert released(out) == list(range(ROUNDS))


@pytest.mark.slow
def test_two_resumes_at_once_do_not_double_a_journal(tree, tmp_path, folder, monkeypatch):
    out = tmp_path / "run"
    killed_at(tree[0], out, 1, monkeypatch)
    main = "from fedlm.cli.main import main; main()"
    command = [sys.executable, "-c", main, "train", out / "recipe.toml", "--out", out, "--resume"]
    both = [subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE) for _ in range(2)]
    errors = [process.communicate()[1].decode() for process in both]
    codes = [process.returncode for process in both]
    assert 0 in codes and set(codes) <= {0, 2}, errors
    for code, error in zip(codes, errors, strict=True):
        assert code == 0 or "is being trained by another process" in error
    assert [entry["round"] for entry in told(out)] == list(range(ROUNDS))
    assert released(out) == list(range(ROUNDS))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_process_killed_by_the_system_goes_on_from_what_it_paid_for(
    tree, tmp_path, folder, seed, monkeypatch
):
    """A real SIGKILL, at any moment."""
    out, rng = tmp_path / "run", np.random.default_rng(seed)
    killed_at(tree[0], out, 0, monkeypatch)
    main = "from fedlm.cli.main import main; main()"
    command = [sys.executable, "-c", main, "train", out / "recipe.toml", "--out", out, "--resume"]
    process = subprocess.Popen(command, cwd=folder, stderr=subprocess.DEVNULL)
    while process.poll() is None and len(told(out)) < 2:
        time.sleep(0.002)
    time.sleep(rng.random() / 20)
    process.kill()
    assert process.wait() == -signal.SIGKILL, "it was to be killed before its end"
    go_on(tree[1], out)
    assert released(out) == list(range(ROUNDS)) and len(told(out)) == ROUNDS


# ---- the budget counts what the claim counts -----------------------------------------------------


def begun(folder, tmp_path, *changes):
    """A run on record of which no round was played, and what was said at its beginning."""
    (run,) = runs_of(folder, *GAUSSIAN, *changes, engines=("mesh",))
    run, said = placed(run, tmp_path / "run"), []
    begin(run, run.record.claim(dump(run.recipe), resume=False), said.append)
    return run, " ".join(said)


@pytest.mark.slow
def test_a_budget_pays_for_noisy_figures_too(folder, tmp_path):
    plan = runs_of(folder, *GAUSSIAN, engines=("mesh",))[0].plan
    figures = ("privacy.evaluation_noise=4.0", "privacy.evaluation_every=2")

    def cost(rounds, reports):
        events = [event_of(plan, rounds), *[gaussian_event(4.0)] * reports]
        return compose(events, plan.delta)[0]

    budget = f"privacy.epsilon={cost(4, 2) + 1e-6}"
    run, said = begun(folder, tmp_path, *figures, budget)
    assert run.cadence.rounds == ROUNDS, "the rounds alone would fit"
    assert WriteAhead(run).affordable(0) == 4 and cost(5, 3) > cost(4, 2)
    assert "holds 4 of 6 rounds, because the vocabulary, the start model and noisy" in said
    with pytest.raises(ConfigError, match="a budget that holds one round"):
        least = spent(plan, 1).epsilon + 1e-6
        begun(folder, tmp_path / "other", *figures, f"privacy.epsilon={least}")


@pytest.mark.parametrize("round", [1, ROUNDS - 1])
def test_figures_that_are_paid_for_twice_stay_within_the_budget(
    folder, tmp_path, monkeypatch, round
):
    """The kill comes between their line in the ledger and the journal."""
    plan = runs_of(folder, *GAUSSIAN, engines=("mesh",))[0].plan
    whole = compose([event_of(plan, ROUNDS), *[gaussian_event(4.0)] * 3], plan.delta)[0]
    figures = ("privacy.evaluation_noise=4.0", "privacy.evaluation_every=2")
    budget = f"privacy.epsilon={whole + 1e-6}"
    (run,) = runs_of(folder, *GAUSSIAN, *figures, budget, engines=("mesh",))
    out = tmp_path / "run"
    killed_at(run, out, round, monkeypatch)
    summary = go_on(run, out)
    lines = Ledger(out / ledger.NAME).entries()
    assert ledger.spent_of(lines).epsilon <= whole + 1e-6
    assert summary["epsilon"] == ledger.spent_of(lines).epsilon
    assert len(told(out)) == (ROUNDS if round == ROUNDS - 1 else 4)


@pytest.mark.slow
def test_a_budget_pays_for_vocabulary_and_start_model_too(folder, tmp_path):
    plan = runs_of(folder, *GAUSSIAN, engines=("mesh",))[0].plan
    run, _ = begun(folder, tmp_path, f"privacy.epsilon={spent(plan, ROUNDS).epsilon + 1e-6}")
    ahead = WriteAhead(run)
    assert ahead.affordable(0) == ROUNDS
    record = lineage.read_lineage(run.record.path / lineage.FILE)
    words = [ledger.begin_entry({}), ledger.gaussian_entry("vocabulary", 5.0)]
    before = [ledger.begin_entry({"": plan}), ledger.round_entry(0, ledger.UNKNOWN)]
    parent = lineage.Ancestor(
        run="0" * 32, name="first", private=True, clients=record.clients, entries=before
    )
    for change, events in (
        ({"vocabulary": (words,)}, [gaussian_event(5.0)]),
        ({"ancestors": (parent,)}, [event_of(plan, 1)]),
    ):
        lineage.write_lineage(run.record.path / lineage.FILE, record.model_copy(update=change))
        left = ahead.affordable(0)
        budget = run.recipe.privacy.epsilon
        assert compose([event_of(plan, left), *events], plan.delta)[0] <= budget
        assert left < ROUNDS
        assert compose([event_of(plan, left + 1), *events], plan.delta)[0] > budget


def test_over_a_network_lost_rounds_are_not_played_again(gaussian, tmp_path, monkeypatch):
    """Nodes answer each round once, so the server does not say that it will ask again."""
    out = tmp_path / "run"
    killed_at(gaussian[0], out, 4, monkeypatch)
    without_states(out, 4)
    paths = [("a",), ("b",)] * (gaussian[0].population.size // 2)
    far = dataclasses.replace(placed(gaussian[0], out), population=of_paths(paths))
    state = far.round.init(far.start())
    saved, said = checkpoint.load_newest(out / "checkpoints", state, print), []
    resumed = WriteAhead(far).resume(saved, said.append)
    assert resumed.ended and resumed.rounds == 3
    assert "Nodes answer each round once, so the run ends with the model of round 3" in said[0]


@pytest.mark.slow
def test_balls_in_bins_go_on_after_a_kill_and_end_where_states_are_lost(
    folder, tmp_path, monkeypatch
):
    """The bins are drawn once: a resumed run keeps them, and lost rounds cannot be drawn anew."""
    bins = (*SHARED, "privacy.mechanism=gaussian", "server.sampling=balls-in-bins")
    (run,) = runs_of(folder, *bins, "privacy.min_separation=3", engines=("mesh",))
    whole, out, said = tmp_path / "whole", tmp_path / "run", []
    done = go_on(run, whole)
    killed_at(run, out, 4, monkeypatch)
    resumed = go_on(run, out)
    assert released(out) == released(whole) == list(range(ROUNDS))
    assert resumed["epsilon"] == done["epsilon"] == spent(run.plan, ROUNDS).epsilon
    shown = call(tmp_path, "privacy", "epsilon", out, "--json").json
    assert shown["epsilon"] == done["epsilon"]
    assert any("falls into one of 4 bins by chance" in each for each in shown["assumptions"])
    lost = tmp_path / "lost"
    killed_at(run, lost, 4, monkeypatch)
    without_states(lost, 4)
    ended = go_on(run, lost, said)
    assert ended["rounds"] == 3 and released(lost) == [0, 1, 2, 3, 4]
    assert "members were drawn for all rounds together" in " ".join(said)
