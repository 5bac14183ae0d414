"""A search by halving: what it tries, how long, that it goes on, and which text it never sees."""

import itertools
import json
import math
import tomllib
from dataclasses import replace

import numpy as np
import pytest

from fedlm.core.errors import ConfigError, RecordError
from fedlm.privacy.ledger import Ledger
from fedlm.recipe.build import build
from fedlm.recipe.settings import load
from fedlm.record.facts import facts_of
from fedlm.search import splits, tune
from fedlm.search.space import axis_of, default_axes, edges
from fedlm.search.tune import search_settings
from fedlm.search.tune_plan import cost, ladder, plan_search
from fedlm.training import Watcher

RATE = "client.learning_rate"


def write_rounds(path, *perplexities):
    """A journal of rounds of which every second one was scored; infinity is null, as in JSON."""
    path.mkdir(exist_ok=True)
    lines = [{"kind": "header", "recipe": {}}]
    for number, found in enumerate(perplexities):
        scored = {} if found is None else {"perplexity": found if math.isfinite(found) else None}
        lines.append({"kind": "round", "round": number, "seconds": 1.0, **scored})
    (path / "journal.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_score_beyond_all_numbers_counts_as_divergence(tmp_path):
    """It ended the search, or left a point with its score of a shorter rung."""
    write_rounds(tmp_path, None, math.inf)
    assert tune._scored(tmp_path, 2) == math.inf
    write_rounds(tmp_path, None, 55.0, None, math.inf)
    assert [tune._scored(tmp_path, rounds) for rounds in (2, 4)] == [55.0, math.inf]
    assert tune._scored(tmp_path, 6) is None


def test_a_rung_keeps_its_score_when_a_later_one_diverges(tmp_path):
    """A search that went on promoted another point than the one that was stopped."""
    write_rounds(tmp_path, None, 50.0, None)
    (tmp_path / "diverged.json").write_text("{}")
    assert [tune._scored(tmp_path, rounds) for rounds in (2, 4)] == [50.0, math.inf]


def test_a_range_is_even_in_its_logarithm():
    name, values = axis_of("client.learning_rate=0.001..1:4")
    assert name == RATE and values == (0.001, 0.01, 0.1, 1.0)
    assert len(axis_of("client.learning_rate=0.1..10")[1]) == 5
    assert len(set(axis_of("client.learning_rate=1..1.01:9")[1])) == 9
    assert axis_of("server.optimizer=fedadam, fedavg")[1] == ("fedadam", "fedavg")


@pytest.mark.parametrize(
    "text",
    [
        "client.learning_rate", "client.learning_rate=", "rate=1,2", "client.x=1..0",
        "client.x=0..1", "client.x=-1..1", "client.x=1..2:1", "client.x=1..2:900",
        "client.x=a..b", "client.x=1..",
        "client.x=,", "client.x=1..inf", "client.x=1..nan",
    ],
)  # fmt: skip
def test_what_cannot_be_tried_is_refused(text):
    with pytest.raises(ConfigError, match="expected"):
        axis_of(text)


@pytest.mark.parametrize("points", [1, 2, 3, 5, 9, 18, 100])
@pytest.mark.parametrize("rounds", [1, 2, 7, 90])
def test_every_rung_has_fewer_points_and_more_rounds(points, rounds):
    rungs = ladder(points, rounds, 3)
    assert rungs[0].points == points and rungs[-1].rounds == rounds
    for before, after in itertools.pairwise(rungs):
        assert after.points < before.points and after.rounds > before.rounds
        assert before.rounds % rungs[0].rounds == 0  # so that it is scored there
    assert cost(rungs) <= points * rounds


def test_the_budget_decides_how_many_points_there_are(tiny_recipe):
    over = {RATE: (0.1, 0.3, 1.0), "server.learning_rate": (0.01, 0.03, 0.1)}
    whole = plan_search(tiny_recipe, over=over)
    assert len(whole.points) == 9 and len(whole.seeds) == 1
    half = plan_search(tiny_recipe, over=over, rounds=20, seeds=(0, 1))
    assert cost(half.rungs) * 2 <= 20 and 1 <= len(half.points) < 9
    assert all(point in whole.points for point in half.points)
    assert half == plan_search(tiny_recipe, over=over, rounds=20, seeds=(0, 1))
    with pytest.raises(ConfigError, match="rounds = 5: expected at least 6"):
        plan_search(tiny_recipe, over=over, rounds=5)


def test_the_recipe_may_say_what_is_tried(tiny_recipe):
    said = "\n[tune]\nkeep_one_in = 2\nseeds = [3, 4]\n"
    said += 'over = ["client.learning_rate=0.1..1:2"]\n'
    tiny_recipe.write_text(tiny_recipe.read_text() + said)
    search = plan_search(tiny_recipe)
    assert search.axes == {RATE: (0.1, 1.0)} and search.seeds == (3, 4) and search.keep_one_in == 2
    with pytest.raises(ConfigError, match="client"):
        plan_search(tiny_recipe, over={"client.learning_rat": (1.0,)})
    with pytest.raises(ConfigError, match="does not decide itself"):
        plan_search(tiny_recipe, over={"run.seed": (1, 2)})


def test_every_optimizer_has_usual_rates(tiny_recipe):
    from fedlm.methods.optimizers import CLIENT_OPTIMIZERS, SERVER_OPTIMIZERS
    from fedlm.search.space import CLIENT_RATES, SERVER_RATES

    assert CLIENT_RATES.keys() == CLIENT_OPTIMIZERS.keys()
    assert SERVER_RATES.keys() == SERVER_OPTIMIZERS.keys()
    assert len(default_axes(load(tiny_recipe))) == 3


def test_a_private_search_takes_longer_steps_of_shorter_updates(tiny_recipe):
    averaged = (*PRIVATE, "server.optimizer=fedavgm")
    plain, private = (
        default_axes(load(tiny_recipe, changes)) for changes in (averaged[-1:], averaged)
    )
    clip, rate = private["privacy.clip_norm"], private["server.learning_rate"]
    assert max(clip) < 1 and min(rate) > max(plain["server.learning_rate"])


def test_the_edge_of_a_grid_is_told():
    clip = "client.gradient_clip_norm"
    axes = {RATE: (0.1, 0.3, 1.0), clip: (0.0, 1.0, 4.0), "model.name": ("a", "b")}
    inside = {RATE: 0.3, clip: 1.0, "model.name": "a"}
    assert edges(axes, inside) == []
    told = edges(axes, {**inside, RATE: 0.1, clip: 4.0})
    assert len(told) == 2 and "least" in told[0] and "largest" in told[1]
    assert edges(axes, {**inside, clip: 0.0}) == []


# ---- the text that chooses, and the text of the last figure --------------------------------

PRIVATE = (
    "server.sampling=poisson",
    "privacy.mechanism=gaussian",
    "privacy.noise_multiplier=1.0",
    "privacy.delta=1e-3",
    "data.test_clients=0.4",
)


def rows_of(evaluation):
    """All rows that an evaluation can see, as a set."""
    if hasattr(evaluation.text, "items"):
        found = [text.rows(1)[0] for text in evaluation.text.values()]
    else:
        found = list(evaluation.text.rows[evaluation.split].values())
    return [row.tobytes() for rows in found for row in np.asarray(rows)]


@pytest.mark.parametrize(
    "changes", [(), PRIVATE, ("data.validation=0.0", "data.test_clients=0.4")], ids=str
)
def test_what_chooses_and_the_last_figure_share_no_client(tiny_recipe, tmp_path, changes):
    run = build(load(tiny_recipe, changes), tmp_path / "stores", out=tmp_path / "run")
    chosen = splits.for_choosing(run).evaluation
    last, split = splits.for_the_last_figure(run)
    assert split == "test" and rows_of(chosen) and rows_of(last)
    owners = [
        {int(n) for text in part.text.values() for n in text.rows(1)[1]} for part in (chosen, last)
    ]
    assert owners[0].isdisjoint(owners[1])
    assert chosen.watched is not None and len(chosen.watched)


def test_a_tree_is_chosen_by_other_rows_than_it_is_judged_by(tiny_recipe, tmp_path):
    tree = ("federation.levels=[0]", "data.test_clients=0.0", "data.validation=0.4")
    run = build(load(tiny_recipe, tree), tmp_path / "stores", out=tmp_path / "run")
    chosen = splits.for_choosing(run).evaluation
    last, _ = splits.for_the_last_figure(run)
    whole = len(rows_of(run.evaluation))
    assert len(rows_of(chosen)) + len(rows_of(last)) == whole
    for place, rows in chosen.text.rows[chosen.split].items():
        both = len(rows) + len(last.text.rows[last.split][place])
        assert both == len(run.evaluation.text.rows[run.evaluation.split][place])


# ---- whole searches --------------------------------------------------------------------------

OVER = {RATE: (0.5, 1e9)}  # the second one diverges
SERVER_RATE = "server.learning_rate"
RATES = {SERVER_RATE: (1e-7, 0.01)}  # the first one stands still, the second is the default


def quiet(label):
    return Watcher()


@pytest.fixture
def search(tiny_recipe):
    return plan_search(tiny_recipe, ("server.rounds=4",), over=RATES, keep_one_in=2)


@pytest.mark.slow
def test_a_search_that_drops_no_point_plays_all_to_the_end(tiny_recipe, tmp_path):
    search = plan_search(tiny_recipe, ("server.rounds=4",), over=RATES, keep_one_in=1)
    assert cost(search.rungs) == 4 * len(search.points)
    found = search_settings(search, tmp_path / "a", tmp_path / "s", quiet)
    assert found.complete and [t.rounds for t in found.trials] == [4, 4]
    assert found.best.perplexity == min(t.perplexity for t in found.trials)


@pytest.mark.slow
def test_a_search_whose_minutes_end_within_its_only_rung_is_not_complete(
    tiny_recipe, tmp_path, monkeypatch
):
    search = plan_search(tiny_recipe, ("server.rounds=4",), over=RATES, keep_one_in=1, minutes=9)
    monkeypatch.setattr(tune._Clock, "over", lambda self: self.seconds > 0)
    found = search_settings(search, tmp_path / "a", tmp_path / "s", quiet)
    assert len(found.trials) == 1 and not found.complete
    again = search_settings(search, tmp_path / "a", tmp_path / "s", quiet)
    assert again.trials == found.trials and not again.complete
    told = (tmp_path / "a" / "best.toml").read_text()
    assert "the best of 1 points" in told and "The budget ended before" in told


@pytest.mark.parametrize("keep_one_in", [1, 2])
def test_a_search_in_which_every_point_diverges_has_no_best(
    tiny_recipe, tmp_path, monkeypatch, keep_one_in
):
    monkeypatch.setattr(tune, "_scored", lambda path, rounds: math.inf)
    search = plan_search(tiny_recipe, ("server.rounds=4",), over=RATES, keep_one_in=keep_one_in)
    with pytest.raises(ConfigError, match="every point diverged within"):
        search_settings(search, tmp_path / "a", tmp_path / "s", quiet)
    assert not (tmp_path / "a" / "best.toml").exists()


@pytest.mark.parametrize("there", ["5", '"x"', "[[1]]", "null", "{}"])
def test_a_folder_whose_plan_is_damaged_is_refused(tiny_recipe, tmp_path, there):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "tune.json").write_text(there)
    search = plan_search(tiny_recipe, ("server.rounds=4",), over=RATES)
    with pytest.raises(RecordError, match="holds another search"):
        search_settings(search, tmp_path / "a", tmp_path / "s", quiet)


def test_a_point_that_diverges_late_is_not_the_best(tiny_recipe, tmp_path, monkeypatch):
    """The leader of the first rung runs away in the second one."""
    heard = {0.1: {2: 30.0, 4: math.inf}, 0.5: {2: 40.0, 4: 20.0}}

    def scored(path, rounds):
        return heard[0.1 if f"{RATE}=0.1" in path.name else 0.5][rounds]

    monkeypatch.setattr(tune, "_scored", scored)
    over = {RATE: [0.1, 0.5]}
    search = plan_search(tiny_recipe, ("server.rounds=4",), over=over, keep_one_in=2)
    assert [(rung.points, rung.rounds) for rung in search.rungs] == [(2, 2), (1, 4)]
    found = search_settings(search, tmp_path / "a", tmp_path / "s", quiet)
    assert found.best.point == {RATE: 0.5} and found.best.perplexity == 40.0
    assert "Perplexity 40" in (tmp_path / "a" / "best.toml").read_text()


@pytest.mark.slow
def test_a_search_that_is_stopped_goes_on_to_the_same_end(search, tmp_path):
    asked = iter([False] * 5 + [True] * 99)
    with pytest.raises(KeyboardInterrupt):
        search_settings(search, tmp_path / "a", tmp_path / "s", quiet, lambda: next(asked))
    assert not (tmp_path / "a" / "best.toml").exists()
    found = search_settings(search, tmp_path / "a", tmp_path / "s", quiet)
    assert found.complete and found.best.point == {SERVER_RATE: 0.01}
    assert [t.rounds for t in found.trials] == [4, 2]
    assert found.edges and found.last["perplexity"][0] > 1
    best = tomllib.loads((tmp_path / "a" / "best.toml").read_text())
    assert best["server"]["learning_rate"] == 0.01 and best["server"]["evaluate_every"] == 2
    load(tmp_path / "a" / "best.toml")
    # The run that went on is one run: its rounds are those of an uninterrupted one.
    again = search_settings(search, tmp_path / "a", tmp_path / "s", quiet)
    assert again.best.perplexity == found.best.perplexity
    rounds = facts_of(found.best.paths[0]).rounds
    assert [told["round"] for told in rounds] == [0, 1, 2, 3]
    with pytest.raises(RecordError, match="another search"):
        other = replace(search, seeds=(7,))
        search_settings(other, tmp_path / "a", tmp_path / "s", quiet)


@pytest.mark.slow
def test_a_schedule_is_that_of_the_whole_length(tiny_recipe, tmp_path, run_cli):
    """A trial that goes on from a rung ends with the parameters of `fedlm train`."""
    changes = ("server.rounds=4", "server.schedule=linear")
    found = search_settings(
        plan_search(tiny_recipe, changes, over=RATES, keep_one_in=2),
        tmp_path / "a",
        tmp_path / ".fedlm" / "stores",
        quiet,
    )
    settings = [part for change in changes for part in ("--set", change)]
    done = run_cli("train", tiny_recipe, *settings, "--out", "plain", "--json").json
    there = json.loads((found.best.paths[0] / "summary.json").read_text())
    assert there["params_sha256"] == done["params_sha256"]


@pytest.mark.slow
def test_a_point_that_diverges_is_a_result(tiny_recipe, tmp_path):
    search = plan_search(tiny_recipe, ("server.rounds=4",), over=OVER, keep_one_in=2)
    found = search_settings(search, tmp_path / "a", tmp_path / "s", quiet)
    assert found.best.point == {RATE: 0.5} and math.isfinite(found.best.perplexity)


@pytest.fixture
def privately(tiny_recipe, run_cli):
    """A search of two private runs, by the command."""
    asked = ("tune", tiny_recipe, "--over", "client.learning_rate=0.1,0.5", "--keep-one-in", 2)
    settings = [part for change in (*PRIVATE, "server.rounds=2") for part in ("--set", change)]
    return lambda *more: run_cli(*asked, *settings, *more)


def test_a_budget_refuses_private_runs(privately, tmp_path):
    refused = privately("--epsilon", 0.5, "--out", "a")
    assert refused.code == 2 and "epsilon = 0.5: expected at least" in refused.stderr
    assert not list(tmp_path.glob("a/runs/*"))


@pytest.mark.slow
def test_private_runs_are_counted(privately, tmp_path):
    done = privately("--out", "b", "--json")
    assert done.code == 0, done.stderr
    assert "2 private runs" in done.json["privacy"]
    assert done.json["chosen_by"].startswith("one half")
    assert all(Ledger(p / "ledger.jsonl").exists() for p in (tmp_path / "b" / "runs").iterdir())


@pytest.mark.slow
def test_a_private_run_that_the_minutes_stopped_is_counted(tiny_recipe, tmp_path, monkeypatch):
    """The second point has released a round when the minutes end, and has no score."""
    over = {RATE: [0.1, 0.5]}
    changes = (*PRIVATE, "server.rounds=4")
    search = plan_search(tiny_recipe, changes, over=over, keep_one_in=1, minutes=9)
    real, begun = tune._until, []

    def until(rounds, watcher, clock):
        begun.append(1)
        if len(begun) == 2:
            clock.most = 1e-9
        return real(rounds, watcher, clock)

    monkeypatch.setattr(tune, "_until", until)
    (tmp_path / "a" / "runs" / "empty").mkdir(parents=True)  # of nobody: it counted as an open run
    found = search_settings(search, tmp_path / "a", tmp_path / "s", quiet)
    assert len(found.trials) == 1 and "2 private runs" in found.spent
    assert "no privacy plan" not in found.spent


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "options, words",
    [
        (("--over", "data.vocabulary=15,20"), "leave the text alone"),
        (("--over", "server.evaluate_rows=1,2"), "leave the text alone"),
        (("--over", "client.learning_rate=1..0"), "two positive numbers"),
        (("--over", "client.lr=1,2"), "has no setting 'lr'"),
        (("--over", "client.epochs=1", "--over", "client.epochs=2"), "each setting once"),
        (("--seeds", "1,x"), "whole numbers"),
        (("--seeds", "1,1"), "seeds that differ"),
        (("--minutes", "-1"), "a positive number"),
        (("--minutes", "nan"), "a positive number"),
        (("--rounds", "1"), "at least 6"),
        (("--epsilon", "1"), "no budget for runs without"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, tuple) else "",
)
def test_bad_options_end_in_one_sentence(run_cli, tiny_recipe, options, words):
    done = run_cli("tune", tiny_recipe, *options)
    assert done.code == 2 and words in done.stderr and "Traceback" not in done.stderr
