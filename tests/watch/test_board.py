"""All runs of a folder at a glance, and any of them in full."""

import json
import os

import pytest

from fedlm.record.status import StatusFile
from fedlm.watch import board as boards
from fedlm.watch.board import Board, thinned
from fedlm.watch.tail import Tail, ends_of
from tests.watch.runs import lines, make_run, round_line


def fresh(board):
    """The rows as they are now, whatever was looked at a moment ago."""
    board._scanned = board._fresh = -1e9
    return {row["id"]: row for row in board.rows()}


# ---- lines ---------------------------------------------------------------------------------


def test_a_line_is_read_once_and_only_when_it_is_whole(tmp_path):
    path = tmp_path / "journal.jsonl"
    tail = Tail(path)
    assert tail.poll() == ([], False)
    path.write_text('{"a": 1}\n{"a": 2')
    assert tail.poll() == ([(1, {"a": 1})], False)
    with open(path, "a") as file:
        file.write("}\n")
    assert tail.poll() == ([(2, {"a": 2})], False)
    assert tail.poll() == ([], False)


def test_a_journal_that_was_rewound_is_read_again(tmp_path):
    """A resumed run replaces its journal by a shorter one, and may soon be as long as before."""
    path = tmp_path / "journal.jsonl"
    path.write_text('{"a": 1}\n{"a": 2}\n')
    tail = Tail(path)
    assert len(tail.poll().entries) == 2
    (tmp_path / "new").write_text('{"a": 1}\n{"a": 3}\n{"a": 4}\n')
    os.replace(tmp_path / "new", path)
    assert tail.poll() == ([(1, {"a": 1}), (2, {"a": 3}), (3, {"a": 4})], True)
    path.write_text('{"a": 9}\n')  # cut in place
    assert tail.poll() == ([(1, {"a": 9})], True)
    path.write_text('{"a": 8}\n')  # as long as before, and the same file
    assert tail.poll() == ([(1, {"a": 8})], True)


def test_the_ends_of_a_file_do_not_need_its_middle(tmp_path):
    path = tmp_path / "journal.jsonl"
    path.write_text("head\n" + "x" * 200_000 + "\n" + "y" * 70_000 + "\nlast\nhalf")
    first, last = ends_of(path)
    assert first == b"head\n" and last == [b"y" * 70_000, b"last"]
    assert ends_of(path, least=1)[1] == [b"last"]
    path.write_text("head\n")
    assert ends_of(path) == (b"head\n", [])
    path.write_text("hal")
    assert ends_of(path) == (b"", [])
    path.write_text("head\nword\n" + "x\n" * 200_000)
    assert len(ends_of(path)[1]) < 20_000 and b"word" in ends_of(path, word=b"word")[1]


# ---- rows ----------------------------------------------------------------------------------


def test_a_row_tells_how_far_a_run_is(tmp_path):
    make_run(tmp_path / "one", rounds=4, header={"privacy_budget": 8.0, "privacy": {}})
    status = StatusFile(tmp_path / "one" / "status.json", command="train")
    status.tell(state="training", doing="waiting for sweden, 40 s", rounds=10, round=4)
    status.begin()
    row = fresh(Board(tmp_path))["one"]
    assert (row["round"], row["rounds"], row["perplexity"]) == (4, 10, 87.0)
    assert (row["clients_per_second"], row["left"], row["budget"]) == (8.0, 3.0, 8.0)
    assert (row["state"], row["doing"], row["live"]) == (
        "training", "waiting for sweden, 40 s", True
    )  # fmt: skip
    assert row["can_stop"] and not row["can_resume"]


def test_a_row_of_a_long_run_knows_its_last_perplexity_and_its_rounds(tmp_path):
    """Both were lost where they lay further from the journal's end than was looked at."""
    told = [round_line(n, edges="x" * 200) for n in range(900)]
    for entry in told:
        entry.pop("perplexity", None)
    told[400]["perplexity"] = 80.0
    extended = {"kind": "extended", "before": 10, "rounds": 1000}
    path = make_run(tmp_path / "one", rounds=0, more=[*told[:10], extended, *told[10:]])
    (path / "recipe.toml").write_text("[server]\nrounds = 1000\n")
    row = fresh(Board(tmp_path))["one"]
    assert (row["round"], row["rounds"], row["perplexity"]) == (900, 1000, 80.0)


@pytest.mark.parametrize("rounds", ["x", [1], {"a": 1}, True, -1])
def test_a_damaged_header_is_told_in_its_own_row(tmp_path, rounds):
    make_run(tmp_path / "good")
    make_run(tmp_path / "bad", header={"recipe": {"server": {"rounds": rounds}}})
    rows = fresh(Board(tmp_path))
    assert rows["good"]["perplexity"] and "makes no sense" in rows["bad"]["problem"]


def test_a_row_follows_its_files(tmp_path):
    path = make_run(tmp_path / "one", rounds=1)
    board = Board(tmp_path)
    assert fresh(board)["one"]["round"] == 1
    with open(path / "journal.jsonl", "a") as file:
        file.write(lines(round_line(1)))
    assert fresh(board)["one"]["round"] == 2
    make_run(tmp_path / "two")
    assert list(fresh(board)) == ["one", "two"]
    number = fresh(board)["two"]["number"]
    make_run(tmp_path / "a-new-one")
    assert fresh(board)["two"]["number"] == number  # its colour stays


def test_a_killed_run_is_not_live(tmp_path):
    path = make_run(tmp_path / "one")
    StatusFile(path / "status.json", command="train").begin()
    status = json.loads((path / "status.json").read_text())
    (path / "status.json").write_text(json.dumps({**status, "process": "1"}))
    row = fresh(Board(tmp_path))["one"]
    assert row["state"] == "killed" and row["can_resume"] and not row["can_stop"]


def test_damage_gives_a_sentence_and_leaves_the_others(tmp_path):
    make_run(tmp_path / "whole")
    for name, text in [
        ("no-header", lines(round_line(0))),
        ("not-json", lines({"kind": "header"}) + "{\n" + lines(round_line(1))),
        ("wrong-type", lines({"kind": "header", "recipe": 7}, round_line(0))),
        ("wrong-round", lines({"kind": "header"}, {"kind": "round", "round": "x"})),
        ("odd-final", lines({"kind": "header"}, {"kind": "final", "test": [1]})),
        ("odd-tree", lines({"kind": "header", "tree": 3}, round_line(0, routes=[7]))),
    ]:
        (make_run(tmp_path / name) / "journal.jsonl").write_text(text)
    (make_run(tmp_path / "status") / "status.json").write_text("{}")
    board = Board(tmp_path)
    rows = fresh(board)
    for name in ("no-header", "not-json", "wrong-type", "wrong-round", "odd-final", "status"):
        assert "damaged" in rows[name]["problem"], (name, rows[name]["problem"])
    assert rows["whole"]["problem"] is None and rows["whole"]["round"] == 3
    for name in ("not-json", "wrong-type", "odd-tree"):
        assert "damaged" in board.details(name)["problem"], name
    path = tmp_path / "not-json" / "journal.jsonl"
    assert "problem" in board.details("not-json")
    path.write_text(lines({"kind": "header"}, round_line(0)))  # mended
    assert len(board.details("not-json")["points"]) == 1


def test_hidden_folders_and_nodes_of_a_run_are_no_runs(tmp_path):
    """Candidates of a private selection are secret; a node's model belongs to its run."""
    make_run(tmp_path / ".candidates" / "0")
    make_run(tmp_path / "tree")
    make_run(tmp_path / "tree" / "nodes" / "north")
    assert list(fresh(Board(tmp_path))) == ["tree"]


def test_no_other_path_has_a_name(tmp_path):
    make_run(tmp_path / "in" / "one")
    make_run(tmp_path / "out")
    board = Board(tmp_path / "in")
    for name in ("../out", str(tmp_path / "out"), "one/../../out", ""):
        assert "no run" in _problem(board, name)


def _problem(board, name):
    try:
        board.find(name)
    except boards.RecordError as error:
        return str(error)
    return ""


def test_a_large_folder_is_read_in_parts(tmp_path):
    for n in range(5):
        make_run(tmp_path / f"run-{n}")
    board, seen = Board(tmp_path), []
    while not seen or board.unread:
        seen.append([row["id"] for row in board.rows(seconds=0.0)])
    assert [len(ids) for ids in seen] == [1, 2, 3, 4, 5]
    assert seen[-1] == [f"run-{n}" for n in range(5)]
    assert len(Board(tmp_path).rows()) == 5


# ---- one run in full -----------------------------------------------------------------------


def test_curves_grow_and_begin_again(tmp_path):
    path = make_run(tmp_path / "one", rounds=2)
    board = Board(tmp_path)
    fresh(board)
    before = board.details("one")
    assert [p[0] for p in before["points"]] == [1, 2] and before["start_perplexity"] == 100.0
    assert board.details("one")["version"] == before["version"]
    with open(path / "journal.jsonl", "a") as file:
        file.write(lines(round_line(2)))
    after = board.details("one")
    assert [p[0] for p in after["points"]] == [1, 2, 3] and after["version"] != before["version"]
    (path / "new").write_text((path / "journal.jsonl").read_text().rsplit("\n", 2)[0] + "\n")
    os.replace(path / "new", path / "journal.jsonl")
    assert [p[0] for p in board.details("one")["points"]] == [1, 2]


def test_a_long_curve_is_thinned_but_keeps_its_perplexities_and_its_end():
    points = [
        [n, 0.0, 1.0, 5.0 if n % 100 == 7 else None, None, 0, None, None] for n in range(9999)
    ]
    found = thinned(points, 500)
    assert len(found) < 700 and found[-1][0] == 9998
    assert sum(p[3] is not None for p in found) == 100


def test_a_tree_has_a_frame_per_round(tmp_path):
    nodes = {"root": {"up_bytes": 0, "down_bytes": 0, "agreement": 0.5},
             "a": {"up_bytes": 7, "down_bytes": 9, "self_weight": 0.25, "secret": 1}}  # fmt: skip
    nodes["a"]["attention_down"] = {"a": 0.25, "root": 0.7, "far": 0.001}
    way = {"layer": 0, "from": "a", "to": "root", "likeness": {"root": 0.5}}
    make_run(
        tmp_path / "one", rounds=0, header={"tree": {"names": ["root", "a"], "parents": [-1, 0]}},
        more=[round_line(n, nodes=nodes, routes=[way, way], places={"a": [50.0, 40.0]})
              for n in range(2)],
    )  # fmt: skip
    board = Board(tmp_path)
    fresh(board)
    tree = board.details("one")["tree"]
    assert [f["round"] for f in tree["frames"]] == [1, 2]
    assert tree["frames"][0]["routes"] == [["a", "root", 2]]
    assert tree["frames"][0]["nodes"]["a"] == {"self_weight": 0.25}
    assert tree["frames"][0]["listens"] == [["a", "root", 0.7, "down"]]
    assert tree["frames"][0]["bytes"]["a"] == [7, 9]
    assert tree["moved"]["a"] == [14, 18]


# ---- a federation --------------------------------------------------------------------------

STATS = {"round": 0, "answered": ["north"], "late": ["south"], "away": [], "refused": {},
         "garbage": {}, "up_bytes": 5, "down_bytes": 6, "edges": {"north": [5, 6]}}  # fmt: skip


def test_a_federation_shows_who_answered(tmp_path):
    path = make_run(tmp_path / "one")
    seats = [{"name": "north", "leaves": [["n1", 3]]}, {"name": "south"}]
    (path / "seats.json").write_text(json.dumps(seats))
    torn = '{"round": 1, "answ\n'  # what a full disk left; the lines after it count
    again = lines({**STATS, "round": 1}, {**STATS, "round": 1})
    (path / "nodes.jsonl").write_text(lines(STATS) + torn + again)
    board = Board(tmp_path)
    fresh(board)
    found = board.details("one")["federation"]
    assert found["counts"] == {"north": {"answered": 2}, "south": {"late": 2}}
    assert found["last"]["of"] == {"north": "answered", "south": "late"}
    assert found["seats"] == [{"name": "north", "below": ["n1"]}, {"name": "south", "below": []}]
    assert found["bytes"] == [10, 12] and found["edges"] == {"north": [10, 12]}


def test_names_that_a_plan_hides_are_for_the_owner_alone(tmp_path):
    path = make_run(tmp_path / "one")
    (path / "seats.json").write_text(json.dumps([{"name": "north"}, {"name": "south"}]))
    (path / "nodes.jsonl").write_text(lines({"round": 0, "nodes": 2}))
    (path / "private").mkdir()
    (path / "private" / "nodes.jsonl").write_text(lines(STATS))
    told = []
    for private in (False, True):
        board = Board(tmp_path, private=private)
        fresh(board)
        told.append(board.details("one")["federation"])
    assert told[0]["nodes"] == 2 and not told[0]["named"] and "north" not in json.dumps(told[0])
    assert told[1]["counts"]["north"] == {"answered": 1}


# ---- models to type with -------------------------------------------------------------------


def test_personal_and_pretrained_models_are_offered(tmp_path):
    path = make_run(tmp_path / "one")
    start = make_run(tmp_path / "start")
    (path / "recipe.toml").write_text(f"[model]\ninit_from = {str(start)!r}\n")
    for folder in (path, start, path / "clients" / "ann%2Fe", path / "nodes" / "north"):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "model.safetensors").write_bytes(b"")
    told = []
    for private in (True, False):
        board = Board(tmp_path, private=private)
        fresh(board)
        told.append([(m["kind"], m["node"]) for m in board.details("one")["models"]])
    assert told[0] == [("last", ""), ("last", "north"), ("personal", "ann/e"), ("pretrained", "")]
    assert told[1] == [("last", ""), ("last", "north"), ("pretrained", "")]


# ---- sweeps --------------------------------------------------------------------------------


def test_a_sweep_fills_up(tmp_path):
    for rate in (0.1, 0.2):
        make_run(tmp_path / "grid" / f"rate={rate}",
                 header={"recipe": {"client": {"rate": rate, "same": 1}}})  # fmt: skip
    points = [{"name": f"rate={r}", "settings": {"client.rate": r}} for r in (0.1, 0.2, 0.3)]
    (tmp_path / "grid" / "sweep.json").write_text(json.dumps({"points": points}))
    board = Board(tmp_path)
    fresh(board)
    (sweep,) = board.sweeps()
    assert sweep["name"] == "grid" and sweep["head"] == ["client.rate"]
    assert [p["name"] for p in sweep["planned"]] == ["rate=0.1", "rate=0.2", "rate=0.3"]
    assert sweep["values"]["grid/rate=0.3"] == [0.3]
