"""A journal keeps what was appended, forgets what it is told to, and names what is damaged."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedlm.core.errors import RecordError
from fedlm.core.releasable import make_releasable
from fedlm.record.journal import Journal, dumps, read


@pytest.fixture
def journal(tmp_path):
    """A header, three rounds and a closing line."""
    made = Journal(tmp_path / "journal.jsonl")
    made.append(make_releasable("header", dict(recipe={"run": {"seed": 3}})))
    for number in range(3):
        made.append(make_releasable("round", dict(round=number, loss=1.5 / (number + 1))))
    made.append(make_releasable("final", dict(test={"perplexity": 20.5})))
    return made


def kinds(journal):
    return [entry["kind"] for entry in read(journal.path)]


def test_what_was_appended_is_read_in_order(journal):
    assert kinds(journal) == ["header", "round", "round", "round", "final"]
    assert [e["round"] for e in read(journal.path) if e["kind"] == "round"] == [0, 1, 2]
    assert next(read(journal.path))["recipe"] == {"run": {"seed": 3}}


def test_a_line_is_in_the_file_as_soon_as_append_returns(journal):
    before = journal.path.stat().st_size
    journal.append(make_releasable("round", dict(round=3)))
    assert journal.path.read_bytes()[before:] == b'{"kind": "round", "round": 3}\n'


def test_wherever_the_last_line_is_torn_the_lines_before_it_survive(journal):
    whole = journal.path.read_bytes()
    start = whole[:-1].rindex(b"\n") + 1
    for end in range(start, len(whole) - 1):
        journal.path.write_bytes(whole[:end])
        assert kinds(journal) == ["header", "round", "round", "round"]
    journal.path.write_bytes(whole[:-1])  # only the line end is missing: the line is whole
    assert kinds(journal)[-1] == "final"


@pytest.mark.parametrize("damage", [b"{", b"\xff\xfe", b"\x00\x00\x00\x00", b'"round'])
def test_a_damaged_line_in_the_middle_is_named_by_its_number(journal, damage):
    lines = journal.path.read_bytes().split(b"\n")
    lines[2] = damage
    journal.path.write_bytes(b"\n".join(lines))
    with pytest.raises(RecordError, match="line 3: not JSON; the journal is damaged"):
        list(read(journal.path))


@pytest.mark.parametrize("other", ["[1]", "3", '{"round": 1}'])
def test_json_that_is_not_an_entry_is_refused(journal, other):
    with open(journal.path, "a") as file:
        file.write(other + "\n")
    with pytest.raises(RecordError, match="line 6: not a journal entry"):
        list(read(journal.path))


def test_a_missing_journal_is_an_error_with_a_sentence(tmp_path):
    with pytest.raises(RecordError, match="is not readable: No such file"):
        list(read(tmp_path / "journal.jsonl"))


@pytest.mark.parametrize("first", range(5))
def test_rewind_keeps_exactly_the_rounds_before(journal, first):
    before = list(read(journal.path))
    journal.rewind(first)
    assert list(read(journal.path)) == before[: 1 + min(first, 3)]


def test_a_line_is_never_appended_to_a_torn_one(journal):
    """An extended run could not be resumed: its new line and a torn one became a damaged one."""
    whole = journal.path.read_bytes()
    journal.path.write_bytes(whole + b'{"kind": "round", "round": 3, "los')
    journal.append(make_releasable("extended", {"before": 2, "rounds": 3}))
    last = list(read(journal.path))[-1]
    assert journal.path.read_bytes().startswith(whole) and last["kind"] == "extended"
    journal.path.write_bytes(whole[:-1])  # only the line end is missing
    journal.append(make_releasable("extended", {"before": 2, "rounds": 3}))
    assert kinds(journal)[-2:] == ["final", "extended"]


def test_rewind_removes_a_torn_line_so_that_the_next_one_starts_afresh(journal):
    with open(journal.path, "a") as file:
        file.write('{"kind": "rou')
    journal.rewind(2)
    journal.append(make_releasable("round", dict(round=2)))
    assert kinds(journal) == ["header", "round", "round", "round"]
    assert [p.name for p in journal.path.parent.iterdir()] == ["journal.jsonl"]


def test_a_rewind_that_cannot_be_written_changes_nothing(journal, monkeypatch):
    before = journal.path.read_bytes()

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(RecordError, match="could not be written: No space left on device"):
        journal.rewind(1)
    assert journal.path.read_bytes() == before
    assert [p.name for p in journal.path.parent.iterdir()] == ["journal.jsonl"]


def test_an_append_that_cannot_be_written_says_what_to_do():
    with pytest.raises(RecordError, match=r"No space left on device.*repeat with --resume"):
        Journal("/dev/full").append(make_releasable("round", dict(round=0)))


def test_numbers_that_json_does_not_have_become_null(journal):
    journal.append(
        make_releasable(
            "round", dict(round=3, loss=math.nan, deep={"a": [math.inf, (-math.inf, 1.0)]})
        )
    )
    assert list(read(journal.path))[-1] == {
        "kind": "round",
        "round": 3,
        "loss": None,
        "deep": {"a": [None, [None, 1.0]]},
    }
    assert "NaN" not in journal.path.read_text() and "Infinity" not in journal.path.read_text()


def plain(value):
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, list):
        return [plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
VALUES = st.recursive(LEAVES, lambda v: st.lists(v) | st.dictionaries(st.text(), v), max_leaves=8)


@given(VALUES)
def test_any_value_is_one_line_of_strict_json(value):
    line = dumps(value)
    assert "\n" not in line and "\r" not in line

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    assert json.loads(line, parse_constant=refuse) == plain(value)
