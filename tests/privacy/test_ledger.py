"""A ledger loses nothing, shows itself to nobody, and costs at least what its releases cost."""

import dataclasses
import itertools
import json
import math
import os
import stat

import numpy as np
import pytest
from scipy.stats import norm

from fedlm.core.errors import RecordError
from fedlm.core.types import Sampling
from fedlm.privacy import ledger
from fedlm.privacy.account import spent
from fedlm.privacy.catalog import MECHANISMS
from fedlm.privacy.ledger import (
    NAME,
    UNKNOWN,
    Ledger,
    begin_entry,
    digest_of,
    gaussian_entry,
    of_run,
    round_entry,
    spent_by_node,
    spent_of,
)
from fedlm.privacy.sensitivity import released_tree
from tests.privacy.plans import CORRELATED, PLANS, ROUNDS, plan, strategy

CHEAP = plan("tree")


def lines_of(rounds, plans=None, others=()):
    """The lines of a ledger with these rounds."""
    first = begin_entry({"": CHEAP} if plans is None else plans)
    return [first, *(round_entry(r, f"{r:064x}") for r in rounds), *others]


@pytest.fixture
def book(tmp_path):
    made = Ledger(tmp_path / NAME)
    made.begin(begin_entry({"": CHEAP}))
    return made


# ---- the file ----------------------------------------------------------------------------------


def test_what_is_appended_is_read_again(book):
    added = [round_entry(0, "ab" * 32), gaussian_entry("vocabulary", 4.0, 1e-9)]
    for entry in added:
        book.append(entry)
    first, *rest = book.entries()
    assert rest == added
    assert ledger.plans_of([first]) == {"": CHEAP}
    assert len(first["run"]) == 32 and first["run"] != begin_entry({})["run"]


def test_a_plan_without_a_bound_survives_json(tmp_path):
    free = plan("gaussian", clip_norm=math.inf, noise_multiplier=0.0)
    book = Ledger(tmp_path / NAME)
    book.begin(begin_entry({"": free}))
    assert ledger.plans_of(book.entries()) == {"": free}
    book.append(round_entry(0, UNKNOWN))
    assert spent_of(book.entries()).epsilon == math.inf


def test_only_the_owner_reads_it(book):
    old = os.umask(0)
    try:
        open_book = Ledger(book.path.with_name("other.jsonl"))
        open_book.begin(begin_entry({}))
    finally:
        os.umask(old)
    assert stat.S_IMODE(open_book.path.stat().st_mode) == 0o600
    book.path.chmod(0o644)
    book.append(round_entry(0, UNKNOWN))
    assert stat.S_IMODE(book.path.stat().st_mode) == 0o600


def test_every_line_is_on_the_disk_before_append_returns(book, monkeypatch):
    synced, fsync = [], os.fsync

    def seen(file):
        synced.append(os.fstat(file).st_size)
        fsync(file)

    monkeypatch.setattr(os, "fsync", seen)
    book.append(round_entry(0, UNKNOWN))
    assert synced == [book.path.stat().st_size]


@pytest.mark.parametrize("keep", range(1, 10))
def test_a_line_cut_by_a_crash_is_no_release_and_stays(book, keep):
    book.append(round_entry(0, UNKNOWN))
    whole = book.path.read_bytes()
    line = whole.splitlines(keepends=True)[-1]
    book.path.write_bytes(whole + line[: keep * len(line) // 10])
    before = book.path.read_bytes()
    assert ledger.rounds_of(book.entries()) == [0]
    book.append(round_entry(1, UNKNOWN))
    assert ledger.rounds_of(book.entries()) == [0, 1]
    assert book.path.read_bytes().startswith(before)


def test_a_whole_line_without_its_end_counts(book):
    book.append(round_entry(0, UNKNOWN))
    book.path.write_bytes(book.path.read_bytes().removesuffix(b"\n"))
    assert ledger.rounds_of(book.entries()) == [0]
    book.append(round_entry(0, UNKNOWN))
    assert ledger.rounds_of(book.entries()) == [0, 0]


def test_a_disk_that_takes_half_a_line_says_so(book, monkeypatch):
    def full(file, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(RecordError, match="could not be written or read: No space left"):
        book.append(round_entry(0, UNKNOWN))


def test_a_link_is_not_followed(tmp_path):
    (tmp_path / "elsewhere").write_text("precious")
    book = Ledger(tmp_path / NAME)
    book.path.symlink_to(tmp_path / "elsewhere")
    assert book.exists()
    for act in (book.entries, lambda: book.append(round_entry(0, UNKNOWN)), lambda: book.begin({})):
        with pytest.raises(RecordError):
            act()
    assert (tmp_path / "elsewhere").read_text() == "precious"


def test_a_ledger_begins_once(book):
    with pytest.raises(RecordError, match="cannot be made: File exists"):
        book.begin(begin_entry({}))
    assert [path.name for path in book.path.parent.iterdir()] == [NAME]
    with pytest.raises(RecordError, match="has begun already"):
        book.append(begin_entry({}))


GOOD = {"kind": "round", "round": 3, "digest": "0" * 64}


@pytest.mark.parametrize(
    "line, words",
    [
        ("{]", "not JSON"),
        ("7", "kind None is none of"),
        ("{}", "kind None is none of"),
        ('{"kind": ["round"]}', "is none of begin, round, gaussian"),
        ('{"kind": "laplace"}', "what it cost is not known"),
        (json.dumps(GOOD | {"round": -1}), "round = '-1' makes no sense"),
        (json.dumps(GOOD | {"round": 1.5}), "makes no sense"),
        (json.dumps(GOOD | {"round": True}), "makes no sense"),
        (json.dumps(GOOD | {"digest": "0" * 63}), "digest = "),
        (json.dumps(GOOD | {"more": 1}), "has an unknown field 'more'"),
        ('{"kind": "round", "round": 3}', "lacks field 'digest'"),
        (json.dumps(gaussian_entry("x", 1.0) | {"noise_multiplier": -1}), "noise_multiplier"),
        (json.dumps(gaussian_entry("x", 1.0) | {"delta": 1}), "delta = '1'"),
        (json.dumps(gaussian_entry("x", 1.0) | {"delta": math.nan}), "delta = 'nan'"),
        (json.dumps(gaussian_entry("", 1.0)), "what = ''"),
        (json.dumps(begin_entry({})), "begins twice"),
        ("[" * 100_000, "not JSON"),
        ("", "not JSON"),
    ],
)
def test_a_line_that_is_not_understood_is_refused(book, line, words):
    with open(book.path, "a", encoding="utf-8") as file:
        file.write(line + "\n" + json.dumps(GOOD) + "\n")
    with pytest.raises(RecordError) as refused:
        book.entries()
    assert words in str(refused.value)


def test_a_ledger_without_plans_or_too_large_is_refused(book, monkeypatch):
    whole = book.path.read_bytes()
    for bad in (b"", json.dumps(GOOD).encode() + b"\n", whole[:50]):
        book.path.write_bytes(bad)
        with pytest.raises(RecordError, match="does not begin with the plans"):
            book.entries()
    book.path.write_bytes(whole)
    monkeypatch.setattr(ledger, "MOST_BYTES", 10)
    with pytest.raises(RecordError, match="more than a ledger can have"):
        book.entries()
    damaged = json.loads(whole)
    damaged["plans"][""]["delta"] = "x"
    with pytest.raises(RecordError, match="plan is damaged"):
        spent_of([damaged])


def test_a_digest_needs_the_secret():
    one = digest_of(bytes(16), 3, b"sum")
    assert len(one) == 32
    assert one == digest_of(bytes(16), 3, b"sum")
    others = [digest_of(bytes(16), 4, b"sum"), digest_of(bytes(16), 3, b"sun")]
    assert one not in [*others, digest_of(b"\1" + bytes(15), 3, b"sum")]
    assert ledger.joined_digest([one]) == one
    assert ledger.joined_digest([one, one]) not in (one, ledger.joined_digest([one, one, one]))


# ---- what it cost ------------------------------------------------------------------------------


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", PLANS)
def test_each_round_once_costs_what_the_plan_costs(name):
    chosen = {"": PLANS[name]}
    assert spent_of(lines_of([], chosen)).epsilon == 0
    assert spent_of(lines_of(range(5), chosen)) == spent(PLANS[name], 5)
    assert spent_of(lines_of([0, 1, 4], chosen)) == spent(PLANS[name], 5)  # no discount
    tighter = dataclasses.replace(PLANS[name], delta=1e-7)
    assert spent_of(lines_of(range(5), chosen), 1e-7) == spent(tighter, 5)


@pytest.mark.parametrize("name", ["gaussian", "gaussian, fixed"])
def test_a_round_released_again_is_one_round_more(name):
    found = spent_of(lines_of([0, 1, 2, 1, 2, 3], {"": PLANS[name]}))
    assert found.epsilon == spent(PLANS[name], 6).epsilon
    assert "2 further releases of rounds" in found.assumptions[-1]


def epsilon_of_gaussian(shift, delta):
    """The exact epsilon of two normals at a distance, by bisection."""

    def excess(epsilon):
        return norm.cdf(shift / 2 - epsilon / shift) - np.exp(epsilon) * norm.cdf(
            -shift / 2 - epsilon / shift
        )

    low, high = 0.0, 200.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if excess(middle) > delta else (low, middle)
    return low


def placements(sampling, rounds):
    """Every way in which a client may join."""
    for marks in itertools.product((0, 1), repeat=rounds):
        at = np.flatnonzero(marks)
        if np.all(np.diff(at) > sampling.min_separation):
            yield np.asarray(marks)


def rows_of(chosen, released):
    """What a release of a round gives, up to fresh noise: a row of the matrix of releases."""
    if chosen.mechanism == "tree":
        return released_tree(chosen.rounds, chosen.restart_every)[released]
    return np.abs(strategy(chosen))[released]


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", CORRELATED)
@pytest.mark.parametrize(
    "released",
    [[0, 1, 2, 3, 2, 3, 4, 5, 6, 7], [0, 0, 0, 1], [*range(8), *range(8)], [0, 1, 2, 3, 3, 3, 3]],
)
def test_correlated_rounds_released_again_cost_at_least_brute_force(name, released):
    """By hand: what one client moves in every row that was released, over all its placements."""
    chosen = CORRELATED[name]
    moved = max(
        sum(float(np.sum((rows_of(chosen, r) @ joins) ** 2)) for r in released)
        for joins in placements(chosen.sampling, ROUNDS)
    )
    least = epsilon_of_gaussian(np.sqrt(moved) / chosen.noise_multiplier, chosen.delta)
    found = spent_of(lines_of(released, {"": chosen})).epsilon
    assert least <= found * (1 + 1e-5) < math.inf
    once = spent_of(lines_of(sorted(set(released)), {"": chosen})).epsilon
    assert found > once


def test_a_tree_costs_what_its_costliest_node_costs():
    small = Sampling(law="poisson", population=26, cohort=13)
    plans = {"a": plan("gaussian"), "b": plan("gaussian", small), "c": plan("gaussian")}
    entries = lines_of(range(3), plans)
    each = spent_by_node(entries)
    assert each == {name: spent(chosen, 3) for name, chosen in plans.items()}
    assert spent_of(entries) == each["b"]
    assert each["b"].epsilon > each["a"].epsilon


def test_other_releases_are_counted():
    extra = [gaussian_entry("vocabulary", 3.0, 1e-6)]
    both = spent_of(lines_of(range(3), others=extra))
    rounds, alone = spent_of(lines_of(range(3))), spent_of(lines_of([], {}, extra), CHEAP.delta)
    assert max(rounds.epsilon, alone.epsilon) < both.epsilon < math.inf
    assert both.delta == CHEAP.delta
    assert "vocabulary" in both.assumptions[-1]
    used_up = [gaussian_entry("vocabulary", 3.0, CHEAP.delta)]
    assert spent_of(lines_of(range(3), others=used_up)).epsilon == math.inf
    assert spent_of(lines_of([], {}, [gaussian_entry("x", 0.0)]), 1e-6).epsilon == math.inf
    with pytest.raises(RecordError, match="has no delta of its own"):
        spent_of(lines_of([], {}, extra))


def test_a_run_is_accounted_by_its_ledger_alone(tmp_path):
    """A journal does not tell what else was released about the same clients."""
    header = {"privacy": dataclasses.asdict(plan("gaussian"))}
    with pytest.raises(RecordError, match=r"has no ledger\.jsonl.*copy the run as its owner"):
        of_run(tmp_path, header)
    book = Ledger(tmp_path / NAME)
    book.begin(begin_entry({"": plan("gaussian")}))
    for number in (0, 1, 2, 2):
        book.append(round_entry(number, UNKNOWN))
    assert spent_of(of_run(tmp_path, header)).epsilon == spent(plan("gaussian"), 4).epsilon
    with pytest.raises(RecordError, match="makes no privacy claim"):
        of_run(tmp_path, {})


def test_only_independent_noise_counts_rounds_one_by_one():
    """A mechanism whose rounds hang together must not say that they do not."""
    assert [name for name, entry in MECHANISMS.items() if entry.independent] == [
        "gaussian",
        "distributed",
    ]
