"""The leaderboard: what an entry may be, which clients judge it, and who is on the front."""

import json
import math

import numpy as np
import pytest

from fedlm.core.errors import ConfigError
from fedlm.recipe import shipped
from fedlm.recipe.build import build
from fedlm.recipe.settings import load
from fedlm.record.leaderboard import drawing
from fedlm.search import leaderboard as boards
from fedlm.search import splits
from fedlm.search.leaderboard import (
    TRACKS,
    EntryRun,
    Leaderboard,
    entry_of,
    is_on_front,
    shipped_entries,
)
from tests.conftest import call

MINE = """
[data]
source = "sotu"
[model]
name = "cifg"
embedding_size = 8
hidden_size = 8
[client]
max_examples = 16
[server]
rounds = 2
cohort = 2
evaluate_every = 1
evaluate_rows = 16
"""


# ---- entries ---------------------------------------------------------------------------------


def test_the_shipped_entries_are_entries():
    entries = shipped_entries()
    for name, track in TRACKS.items():
        for corpus in track.corpora:
            assert [e for e in entries if (e.track, e.corpus) == (name, corpus)]
    assert {e.track for e in shipped_entries(["private"])} == {"private"}
    assert all(e.recipe.privacy.epsilon == 8.0 for e in shipped_entries(["private"]))
    assert all(f"leaderboard/{e.track}/{e.name}" in shipped.recipe_names() for e in entries)


@pytest.mark.parametrize(
    "track, added, said",
    [
        ("plain", "[data]\nvocabulary = 100", "data.vocabulary = 100: expected 5000"),
        ("plain", "[data]\nsplit_seed = 1", "data.split_seed"),
        ("plain", "[data]\ntest_clients = 0.2", "data.test_clients"),
        ("plain", '[data]\ngroups = ["1800"]', "data.groups"),
        ("private", "[data]", "one of chitchat on the track 'private'"),
        ("plain", "[federation]\nlevels = [0]\n[data]", "flat"),
        ("plain", '[model]\ninit_from = "x"', "fresh model"),
        ("plain", "[privacy]\nseed = 1\n[data]", "a claim does not hold"),
        ("fast", "[data]", "one of plain, private, 10mb"),
    ],
)
def test_what_is_no_entry_is_refused(tmp_path, track, added, said):
    file = tmp_path / "mine.toml"
    table = "[model]" if "[model]" in added else "[data]"
    file.write_text(MINE.replace(table, added))
    with pytest.raises(ConfigError, match=said):
        entry_of(file, track)


def test_a_changed_entry_is_another_run(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(MINE)
    first = boards.run_path(tmp_path, entry_of(file, "plain"), 0)
    assert first == boards.run_path(tmp_path, entry_of(file, "plain"), 0)
    file.write_text(MINE.replace("rounds = 2", "rounds = 3"))
    assert boards.run_path(tmp_path, entry_of(file, "plain"), 0) != first


def test_the_last_clients_are_seen_by_nothing_else(tiny_recipe, tmp_path):
    recipe = load(tiny_recipe, ("data.test_clients=0.4",))
    run = build(recipe, tmp_path, out=tmp_path / "run")
    seen, last = splits.without_last_clients(run).evaluation, splits.last_clients(run)
    owners = {s: set(t.rows(1)[1].tolist()) for s, t in seen.text.items()}
    judges = set(last.text["test"].rows(1)[1].tolist())
    assert owners["validation"] and owners["test"] and judges
    assert not judges & (owners["validation"] | owners["test"])
    assert judges | owners["test"] == set(run.store.test_clients.tolist())
    private = load(
        tiny_recipe,
        (
            "data.test_clients=0.4", "privacy.mechanism=gaussian", "privacy.noise_multiplier=1",
            "server.sampling=poisson", "privacy.clip_norm=1",
        ),
    )  # fmt: skip
    other = splits.last_clients(build(private, tmp_path, out=tmp_path / "private"))
    np.testing.assert_array_equal(other.text["test"].rows(1)[1], last.text["test"].rows(1)[1])


# ---- the board -------------------------------------------------------------------------------


def row(perplexity, epsilon=None, up=1e6, corpus="sotu", fault=None):
    return {
        "perplexity": perplexity, "epsilon": epsilon, "upload_per_client": up, "corpus": corpus,
        "fault": fault,
    }  # fmt: skip


def test_the_front_is_what_nobody_dominates():
    rows = [row(100), row(90, up=2e6), row(95, up=3e6), row(300, epsilon=8.0), row(101)]
    assert [is_on_front(r, rows) for r in rows] == [True, True, False, True, False]
    assert is_on_front(row(500, corpus="chitchat"), rows)  # another text
    assert not is_on_front(row(1, fault="diverged"), rows)
    assert not is_on_front(row(None), rows)
    assert [is_on_front(r, rows) for r in rows] == [
        is_on_front(r, [*rows, row(1, fault="12 MB")]) for r in rows
    ]
    twins = [row(5), row(5)]
    assert all(is_on_front(r, twins) for r in twins)


def played(perplexity, **more):
    facts = {
        "seed": 0, "perplexity": perplexity, "looked_at": perplexity, "epsilon": None,
        "delta": None, "upload_bytes": 4e6, "download_bytes": 8e6, "clients": 4, "rounds": 2,
        "parameters": 10, "seconds": 1.5, "params_sha256": "x",
    }  # fmt: skip
    return EntryRun(**{**facts, **more})


def test_a_board_tells_spread_limits_and_what_diverged():
    board, entries = Leaderboard(), {e.name: e for e in shipped_entries()}
    board.add(entries["sotu-si-cifg"], [played(70.0), played(80.0)])
    board.add(entries["sotu-cifg-clip"], [played(60.0), played(None)])
    board.add(entries["sotu-si-cifg-8bit"], [played(75.0, upload_bytes=4.1e7)])
    board.add(entries["chitchat-blt"], [played(300.0, epsilon=7.9, delta=4e-4)])
    board.add(entries["chitchat-gaussian"], [played(200.0, epsilon=8.1, delta=4e-4)])
    found = {r["entry"]: r for r in board.ranked()}
    assert math.isclose(found["sotu-si-cifg"]["spread"], 50**0.5)
    assert found["sotu-si-cifg"]["upload_per_client"] == 1e6 and found["sotu-si-cifg"]["front"]
    assert found["sotu-cifg-clip"]["fault"] == "diverged"
    assert found["sotu-si-cifg-8bit"]["fault"] == "10.2 MB up per client"
    assert found["chitchat-blt"]["fault"] is None and found["chitchat-blt"]["front"]
    assert found["chitchat-gaussian"]["fault"] == "epsilon 8.1 is above 8"
    assert TRACKS["private"].fault({**row(1), "delta": None}) == "no privacy plan"
    head, rows = boards.board_table(board.ranked())
    assert all(len(r) == len(head) for r in rows) and rows[0][3] == "75.0 ± 7.1"
    json.dumps(board.facts())
    picture = drawing(board.ranked())
    assert picture.startswith("<svg xmlns=") and picture.count("<svg") == 1
    assert "class='front'" in drawing([*board.ranked(), {**found["sotu-si-cifg"], "perplexity": 9}])


def test_a_thousandth_of_epsilon_puts_nobody_on_the_front():
    """An entry that was worse in everything else stayed there by 7.9997 in place of 7.99999."""
    row = {"corpus": "chitchat", "fault": None, "upload_per_client": 1.7e6, "perplexity": 194.7}
    best = row | {"epsilon": 7.999996}
    worse = row | {"epsilon": 7.999656, "perplexity": 252.8, "upload_per_client": 5.5e6}
    cheaper = worse | {"epsilon": 4.0}
    assert [boards.is_on_front(r, [best, worse]) for r in (best, worse)] == [True, False]
    assert boards.is_on_front(cheaper, [best, cheaper])


def test_the_terminal_has_a_table_that_fits():
    board = Leaderboard()
    for entry in shipped_entries():
        board.add(
            entry,
            [played(1234.5, epsilon=7.99, delta=4e-4), played(1300.5, epsilon=7.99, delta=4e-4)],
        )
    head, rows = boards.short_table(board.ranked())
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    assert sum(widths) + 3 * len(widths) + 1 <= 80
    assert {row[0] for row in rows} == {f"{e.track}/{e.name}" for e in shipped_entries()}


def test_options_that_do_not_fit_are_refused(run_cli):
    for args, said in (
        (("--only", "fast"), "--only"),
        (("--corpus", "books"), "--corpus"),
        (("--entry", "x.toml"), "one track"),
        (("--seeds", "a"), "--seeds"),
        (("--only", "private", "--corpus", "sotu"), "no entry"),
    ):
        done = run_cli("bench-quality", *args)
        assert done.code == 2 and said in done.stderr and not done.stdout


@pytest.mark.slow
def test_an_entry_is_played_judged_and_not_played_again(tmp_path):
    (tmp_path / "mine.toml").write_text(MINE)
    args = ["bench-quality", "--only", "10mb", "--corpus", "sotu", "--json"]
    # Shipped entries would take minutes: the folder of recipes is another one here.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shipped, "recipes_folder", lambda: tmp_path)
        done = call(tmp_path, *args, "--entry", "mine.toml", "--seeds", "0,1")
        assert done.code == 0, done.stderr
        (found,) = done.json["entries"]
        again = call(tmp_path, *args, "--entry", "mine.toml", "--seeds", "0,1")
    assert again.json["entries"] == done.json["entries"] and "mine" not in again.stderr
    assert found["seeds"] == 2 and found["spread"] > 0 and found["fault"] is None
    paths = sorted((tmp_path / "runs/leaderboard/runs/10mb").iterdir())
    told = [json.loads((path / "summary.json").read_text()) for path in paths]
    assert [run["upload_bytes"] for run in found["runs"]] == [t["upload_bytes"] for t in told]
    assert [run["params_sha256"] for run in found["runs"]] == [t["params_sha256"] for t in told]
    assert all(
        run["perplexity"] != t["perplexity"] for run, t in zip(found["runs"], told, strict=True)
    )
    assert (tmp_path / "runs/leaderboard/leaderboard.svg").is_file()
