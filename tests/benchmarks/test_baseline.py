"""A ratio that fell by more than the tolerance is named, and ends the command with 1."""

import json
import sys

import pytest

from benchmarks import baseline


@pytest.fixture
def files(tmp_path):
    """`files(before, now)`: arguments that name a baseline and what was measured."""

    def write(before, now):
        paths = [tmp_path / name for name in ("baseline.json", "ratios.json")]
        facts = {"measured": {"on": "here", "commit": "c"}, "tolerance": 0.15}
        for path, ratios in zip(paths, (before, now), strict=True):
            path.write_text(json.dumps({**facts, "ratios": ratios}))
        return ["--baseline", str(paths[0]), "--ratios", str(paths[1])]

    return write


def run(monkeypatch, arguments):
    monkeypatch.setattr(sys, "argv", ["baseline", *arguments])
    with pytest.raises(SystemExit) as ended:
        baseline.main()
    return ended.value.code


def test_a_ratio_that_fell_is_named_and_others_are_not(files, monkeypatch, capsys):
    before = {"a: x": 2.0, "a: y": 1.0, "b: z": 3.0}
    assert run(monkeypatch, files(before, {"a: x": 1.75, "a: y": 1.4, "c: new": 1.0})) == 0
    assert "not measured" in capsys.readouterr().out
    assert run(monkeypatch, files(before, {"a: x": 1.6, "a: y": 1.0})) == 1
    said = capsys.readouterr()
    assert "a: x fell from 2 to 1.6: more than 15%" in said.err and "a: y" not in said.err
    assert "| a: x | 2 | 1.6 | -20% | fell |" in said.out


def test_a_new_baseline_keeps_what_was_not_measured(files, monkeypatch, tmp_path):
    arguments = files({"a: x": 2.0, "b: z": 3.0}, {"a: x": 1.0})
    monkeypatch.setattr(sys, "argv", ["baseline", *arguments, "--write"])
    baseline.main()
    assert run(monkeypatch, arguments) == 0
    written = json.loads((tmp_path / "baseline.json").read_text())
    assert written["ratios"] == {"a: x": 1.0, "b: z": 3.0} and written["tolerance"] == 0.15


def test_a_benchmark_replaces_its_own_ratios_alone(tmp_path):
    path = tmp_path / "bench" / "ratios.json"
    baseline.keep("engines", "here", {"x": 1.23456, "y": 2.0}, path)
    baseline.keep("evaluation", "here", {"x": 4.0}, path)
    baseline.keep("engines", "here", {"x": 3.0}, path)
    assert json.loads(path.read_text())["ratios"] == {"evaluation: x": 4.0, "engines: x": 3.0}


def test_a_damaged_file_is_said(files, monkeypatch):
    assert "ratio is no positive number" in run(monkeypatch, files({"a: x": 2.0}, {"a: x": 0}))


def test_the_committed_baseline_can_be_compared(files, monkeypatch):
    known = baseline._read(baseline.BASELINE)
    assert len(known["ratios"]) > 20 and 0 < known["tolerance"] < 1
    assert not baseline.fallen(baseline.compare(known["ratios"], known["ratios"]), 0.15)
