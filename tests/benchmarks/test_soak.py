"""The checks of the soak: each accepts what is right and rejects what is wrong."""

import numpy as np
import pytest

from benchmarks.soak import (
    answer_faults,
    growth_fault,
    growth_with_age,
    lines_of,
    model_faults,
    record_fault,
    round_faults,
)


def entries(*numbers):
    return [{"kind": "header"}, *({"kind": "round", "round": number} for number in numbers)]


def test_a_whole_journal_is_accepted():
    assert round_faults(entries(0, 1, 2, 3), 4, "journal") == []


@pytest.mark.parametrize(
    ("numbers", "fault"),
    [
        ((0, 1, 3), "missing [2]"),
        ((0, 1, 1, 2, 3), "twice [1]"),
        ((0, 1, 2, 3, 4), "beyond the end [4]"),
        ((0, 2, 1, 3), "out of order"),
        ((), "missing [0, 1, 2, 3]"),
    ],
)
def test_a_doctored_journal_is_rejected(numbers, fault):
    assert any(fault in said for said in round_faults(entries(*numbers), 4, "journal"))


def answer(number, question="q", run="r"):
    return {"kind": "answer", "run": run, "round": number, "question": question}


def test_a_node_that_counted_has_the_round_in_its_ledger():
    stats = [{"round": 0, "answered": ["north"]}, {"round": 1, "answered": ["north"]}]
    whole = {"north": [{"kind": "begin"}, answer(0), answer(1)]}
    assert answer_faults(stats, whole, "r", private=True) == []
    short = {"north": [answer(0), answer(1, run="another")]}
    assert "round 1" in answer_faults(stats, short, "r", private=False)[0]
    twice = {"north": [answer(0), answer(1), answer(1, "another")]}
    assert answer_faults(stats, twice, "r", private=False) == []
    assert "twice" in answer_faults(stats, twice, "r", private=True)[0]


@pytest.mark.parametrize("what", ["memory", "disk"])
def test_growth_is_rejected_and_noise_is_not(what):
    rng = np.random.default_rng(0)
    flat = 300 + 5 * rng.standard_normal(240)
    assert growth_fault(what, "server", list(flat)) == []
    assert growth_fault(what, "server", list(flat + np.linspace(0, 150, 240))) != []


def test_growth_within_lives_is_seen_though_each_kill_ends_it():
    def samples(slope):
        return [
            {
                "seconds": 30.0 * n,
                "age": {"server": 30.0 * (n % 10)},
                "memory": {"server": 300 + slope * (n % 10)},
            }
            for n in range(60)
        ]

    assert growth_with_age(samples(1.0), "server") == pytest.approx(120.0)
    assert growth_with_age(samples(0.0), "server") == pytest.approx(0.0)


def test_records_may_grow_with_the_rounds_and_no_faster():
    even = [{"rounds": 10 * n, "disk": {"records": 0.01 * n}} for n in range(1, 60)]
    assert record_fault(even) == []
    faster = [{"rounds": 10 * n, "disk": {"records": 1e-3 * n * n}} for n in range(1, 60)]
    assert record_fault(faster) != []
    still = [{"rounds": 100, "disk": {"records": 1.0}} for _ in range(60)]
    assert "without a round" in record_fault(still)[0]


def test_a_model_is_finite_and_better_than_its_start():
    good, bad = {"w": np.ones(3)}, {"w": np.array([1.0, np.nan])}
    assert model_faults(good, 500.0, 200.0) == []
    assert "finite" in model_faults(bad, 500.0, 200.0)[0]
    assert "perplexity" in model_faults(good, 500.0, 490.0)[0]
    assert model_faults(good, 500.0, 490.0, private=True) == []
    assert "perplexity" in model_faults(good, 500.0, float("nan"), private=True)[0]


def test_lines_that_a_kill_cut_short_are_no_lines(tmp_path):
    file = tmp_path / "ledger.jsonl"
    file.write_bytes(b'{"kind": "begin"}\n{"kind": "beg #cut\n{"kind": "answer"}\n{"kind"')
    assert [line["kind"] for line in lines_of(file)] == ["begin", "answer"]
