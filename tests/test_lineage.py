"""A claim counts where its model came from; a store counts all runs that it has seen."""

import dataclasses
import functools
import json
import math
import os
import shutil
import stat

import dp_accounting
import pytest

from fedlm import lineage, prepare
from fedlm.core.errors import RecordError
from fedlm.core.types import Sampling
from fedlm.corpus.concat import JoinedStore
from fedlm.privacy import ledger, spending
from fedlm.privacy.ledger import (
    Ledger,
    begin_entry,
    gaussian_entry,
    round_entry,
    selection_entry,
)
from fedlm.record.journal import dumps
from tests.privacy.plans import plan

PLAN = plan("gaussian", Sampling(law="poisson", population=8, cohort=4), rounds=9)
HEADER = {
    "recipe": {"model": {}},
    "start": {"perplexity": 9.0},
    "store": {"tokenizer_from": {"kind": "public"}},
}


def text(names):
    return [(name, "the cat sat on the mat\n" * 3) for name in names]


@pytest.fixture
def store(tmp_path):
    return prepare(text(f"c{n}" for n in range(8)), tmp_path / "stores/a", test_clients=0.0)


def trained(folder, store, *, start="", start_sha256="0", models=("m",), promised=PLAN, rounds=3):
    """What a run leaves behind: its ledger, its lineage, its place in the register."""
    folder.mkdir(parents=True, exist_ok=True)
    entries = []
    if promised is not None:
        book = Ledger(folder / ledger.NAME)
        entries = [book.begin(begin_entry({"": promised}))]
        for number in range(rounds):
            entries.append(round_entry(number, ledger.UNKNOWN))
            book.append(entries[-1])
    run = entries[0]["run"] if entries else lineage.new_run()
    lineage.begin_lineage(
        folder, store, run=run, private=promised is not None, start_sha256=start_sha256, start=start
    )
    if entries:
        lineage.copies(store, entries)
    lineage.add_models(folder, store, models)
    (folder / "model.safetensors").write_bytes(b"")
    return folder


def claim(folder, promised=PLAN, **more):
    facts = json.loads(dumps(dataclasses.asdict(promised)))
    return lineage.claim_of_run(folder, {**HEADER, "privacy": facts, **more})


@functools.cache
def poisson(rounds, noise=2.0, rate=0.5, delta=PLAN.delta):
    relation = dp_accounting.NeighboringRelation.REPLACE_SPECIAL
    event = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise))
    accountant = dp_accounting.pld.PLDAccountant(relation)
    return accountant.compose(event, rounds).get_epsilon(delta)


def test_a_run_from_a_fresh_model_costs_its_own_rounds(tmp_path, store):
    found = claim(trained(tmp_path / "run", store))
    assert found.epsilon == pytest.approx(poisson(3), rel=1e-3)
    assert "start model" not in " ".join(found.not_covered)


def test_no_finite_epsilon_after_rounds_without_a_plan_on_the_same_clients(tmp_path, store):
    """Six open rounds, then a private one from their model, used to read "epsilon 2.3"."""
    first = trained(tmp_path / "open", store, promised=None)
    second = trained(tmp_path / "run", store, start=str(first), start_sha256="m", models=("n",))
    found = claim(second)
    assert math.isinf(found.epsilon)
    assert found.sentence.startswith("No finite epsilon") and "no privacy plan" in found.sentence
    third = trained(tmp_path / "third", store, start=str(second), start_sha256="n", models=("o",))
    assert math.isinf(claim(third).epsilon), "a chain is followed to its beginning"


@pytest.mark.parametrize("gone", ["copied", "directory removed", "another vocabulary"])
def test_a_start_model_is_recognised_wherever_its_file_is(tmp_path, store, gone):
    first = trained(tmp_path / "open", store, promised=None)
    weights = tmp_path / "elsewhere.safetensors"
    shutil.copy(first / "model.safetensors", weights)
    if gone != "copied":
        shutil.rmtree(first)
    if gone == "another vocabulary":
        store = prepare(
            text(f"c{n}" for n in range(8)), tmp_path / "stores/b", test_clients=0.0, vocabulary=9
        )
    run = trained(tmp_path / "run", store, start=str(weights), start_sha256="m", models=("n",))
    assert math.isinf(claim(run).epsilon)


@pytest.mark.parametrize("where", ["", "clients/ann"])
def test_a_model_in_the_directory_of_a_run_is_that_runs(tmp_path, store, where):
    """A member's own model, or one that was rounded, has a hash that the run does not know."""
    first = trained(tmp_path / "first", store, rounds=2)
    start = first / where
    start.mkdir(parents=True, exist_ok=True)
    run = trained(tmp_path / "run", store, start=str(start), start_sha256="?", models=("n",))
    found = claim(run)
    if where:
        assert math.isinf(found.epsilon) and f"{first}/{where}" in found.sentence
        (first / "linked.safetensors").symlink_to(tmp_path / "elsewhere.safetensors")
        (tmp_path / "elsewhere.safetensors").write_bytes(b"")
        again = trained(
            tmp_path / "again", store, start=str(first / "linked.safetensors"), start_sha256="?"
        )
        assert math.isfinite(claim(again).epsilon), "the run's own folder: its plan counts"
    else:
        assert found.epsilon == pytest.approx(poisson(5), rel=1e-3)


def test_private_rounds_of_the_start_model_are_counted(tmp_path, store):
    first = trained(tmp_path / "first", store, rounds=2)
    second = trained(tmp_path / "run", store, start=str(first), start_sha256="m", models=("n",))
    found = claim(second)
    assert found.epsilon == pytest.approx(poisson(5), rel=1e-3)
    assert found.epsilon != pytest.approx(poisson(3), rel=0.01)
    assert any(f"what {first} released" in line for line in found.covers)
    third = trained(tmp_path / "third", store, start=str(second), start_sha256="n", models=("o",))
    assert claim(third).epsilon == pytest.approx(poisson(8), rel=1e-3)


def test_other_people_and_files_from_elsewhere_are_named(tmp_path, store):
    public = prepare(text(f"p{n}" for n in range(8)), tmp_path / "p", test_clients=0.0)
    first = trained(tmp_path / "public", public, promised=None)
    run = trained(tmp_path / "run", store, start=str(first), start_sha256="m", models=("n",))
    found = claim(run)
    assert found.epsilon == pytest.approx(poisson(3), rel=1e-3)
    assert any(str(first) in line and "other people" in line for line in found.not_covered)
    unknown = trained(tmp_path / "x", store, start="download.bin", start_sha256="?", models=("u",))
    found = claim(unknown)
    assert any("download.bin" in line and "assumed public" in line for line in found.not_covered)
    module = trained(tmp_path / "y", store, start="python", start_sha256="?", models=("v",))
    assert any("from Python" in line for line in claim(module).not_covered)


def test_a_shard_of_the_clients_is_recognised(tmp_path, store):
    part = prepare(text(["c3", "q1", "q2"]), tmp_path / "part", test_clients=0.0)
    first = trained(tmp_path / "open", part, promised=None)
    run = trained(tmp_path / "run", store, start=str(first), start_sha256="m", models=("n",))
    assert math.isinf(claim(run).epsilon)
    names = [f"user {n}" for n in range(20_000)]
    assert lineage.overlap(lineage.sketch(names), lineage.sketch(names[:1000]))
    assert not lineage.overlap(lineage.sketch(names[1000:]), lineage.sketch(names[:1000]))


def test_a_store_adds_up_all_runs_that_it_has_seen(tmp_path, store):
    for number, rounds in enumerate((2, 3)):
        shutil.rmtree(trained(tmp_path / f"run-{number}", store, rounds=rounds))
    book = Ledger(store.path / ledger.NAME)
    book.begin(begin_entry({}))
    book.append(gaussian_entry("vocabulary", 5.0, 1e-9))
    found = lineage.spent_on(store)
    relation = dp_accounting.NeighboringRelation.REPLACE_SPECIAL
    accountant = dp_accounting.pld.PLDAccountant(relation)
    drawn = dp_accounting.PoissonSampledDpEvent(0.5, dp_accounting.GaussianDpEvent(2.0))
    accountant.compose(drawn, 5).compose(dp_accounting.GaussianDpEvent(5.0))
    wanted = accountant.get_epsilon(PLAN.delta - 1e-9)
    assert found.epsilon == pytest.approx(wanted, rel=1e-3) and found.private_runs == 2
    trained(tmp_path / "open", store, promised=None)
    found = lineage.spent_on(store)
    assert math.isinf(found.epsilon) and found.other_runs == 1
    assert found.private_epsilon == pytest.approx(wanted, rel=1e-3)


def test_a_store_counts_what_its_runs_started_from_elsewhere(tmp_path, store):
    """The claim of the run counted it, the total of its store did not."""
    clients = text(f"c{n}" for n in range(8))
    other = prepare(clients, tmp_path / "other/b", test_clients=0.0, vocabulary=9)
    first = trained(tmp_path / "first", other, rounds=2)
    second = trained(tmp_path / "run", store, start=str(first), start_sha256="m", models=("n",))
    assert lineage.spent_on(store).epsilon == pytest.approx(claim(second).epsilon, rel=1e-6)
    first = trained(tmp_path / "open", other, promised=None, models=("o",))
    trained(tmp_path / "again", store, start=str(first), start_sha256="o", models=("p",))
    found = lineage.spent_on(store)
    assert math.isinf(found.epsilon) and found.other_runs == 1
    assert found.private_epsilon == pytest.approx(poisson(8), rel=1e-3)


def test_the_total_of_runs_has_their_vocabulary_and_start_models(tmp_path, store):
    """The total of a sweep could be below the epsilon of one of its runs."""
    book = Ledger(store.path / ledger.NAME)
    book.begin(begin_entry({}))
    book.append(gaussian_entry("vocabulary", 2.0, 1e-9))
    first = trained(tmp_path / "first", store, rounds=2)
    run = trained(tmp_path / "run", store, start=str(first), start_sha256="m", models=("n",))
    assert lineage.spent_together([run]).epsilon == pytest.approx(claim(run).epsilon, rel=1e-6)
    assert lineage.spent_together([run, first]).epsilon == pytest.approx(
        claim(run).epsilon, rel=1e-6
    )
    opened = trained(tmp_path / "open", store, promised=None, models=("o",))
    third = trained(tmp_path / "third", store, start=str(opened), start_sha256="o", models=("p",))
    assert math.isinf(lineage.spent_together([run, third]).epsilon)
    assert lineage.spent_together([opened]) is None


@pytest.mark.parametrize("promised", [PLAN, None])
def test_a_run_that_goes_on_is_registered_again(tmp_path, store, promised):
    """The folder of a store that was removed and prepared again had forgotten its runs."""
    run = trained(tmp_path / "run", store, promised=promised)
    shutil.rmtree(store.path / lineage.REGISTER)
    lineage.register_again(run, store)
    if promised is not None:
        lineage.copies(store, Ledger(run / ledger.NAME).entries())
    found = lineage.spent_on(store)
    assert (found.private_runs, found.other_runs) == ((1, 0) if promised else (0, 1))
    assert found.runs[0]["run"] == str(run)


def test_of_two_copies_of_a_ledger_the_longer_one_counts(tmp_path, store):
    entries = Ledger(trained(tmp_path / "run", store) / ledger.NAME).entries()
    for books in ([entries, entries[:2]], [entries[:2], entries]):
        assert spending.total_spent(books).epsilon == pytest.approx(poisson(3), rel=1e-3)


def test_the_model_that_a_leaf_keeps_to_itself_is_no_private_start(tmp_path, store):
    """It carries no noise, whatever the plan of its run; it used to count as public."""
    first = trained(tmp_path / "first", store)
    lineage.add_models(first, store, [], ["w"])
    kept = first / "private/north.safetensors"
    run = trained(tmp_path / "run", store, start=str(kept), start_sha256="w", models=("n",))
    assert math.isinf(claim(run).epsilon) and f"{first}/private" in claim(run).sentence
    assert math.isinf(lineage.spent_on(store).epsilon), "though its run is private and counted"


def test_a_run_on_joined_stores_counts_for_each(tmp_path, store):
    other = prepare(text(["x", "y"]), tmp_path / "stores/b", test_clients=0.0, tokenizer="bytes")
    one = prepare(text(["v", "w"]), tmp_path / "stores/c", test_clients=0.0, tokenizer="bytes")
    trained(tmp_path / "run", JoinedStore([other.path, one.path]))
    assert lineage.spent_on(other).private_runs == lineage.spent_on(one).private_runs == 1


def test_exact_sums_told_leave_no_epsilon_for_readers_of_the_files(tmp_path, store):
    told = dataclasses.replace(PLAN, reveal=True)
    found = claim(trained(tmp_path / "run", store, promised=told), promised=told)
    assert math.isinf(found.epsilon) and found.models_epsilon == pytest.approx(poisson(3), rel=1e-3)
    assert found.sentence.startswith("Nothing is promised against readers")
    assert lineage.spent_on(store).other_runs == 1


def test_what_each_node_of_a_tree_cost_has_its_vocabulary_and_start_model(tmp_path, store):
    first = trained(tmp_path / "first", store)
    small = dataclasses.replace(PLAN, noise_multiplier=4.0)
    folder = tmp_path / "tree"
    folder.mkdir()
    book = Ledger(folder / ledger.NAME)
    run = book.begin(begin_entry({"a": PLAN, "b": small}))["run"]
    book.append(round_entry(0, ledger.UNKNOWN))
    start = str(first / "model.safetensors")
    lineage.begin_lineage(folder, store, run=run, private=True, start_sha256="m", start=start)
    nodes = {name: dataclasses.asdict(p) for name, p in (("a", PLAN), ("b", small))}
    found = claim(folder, privacy_nodes=json.loads(dumps(nodes)))
    assert found.nodes is not None and found.nodes["a"] == found.epsilon
    assert found.nodes["a"] == pytest.approx(poisson(4), rel=1e-3)
    assert poisson(3) < found.nodes["b"] < found.nodes["a"]


def test_records_are_for_their_owner_and_damage_is_refused(tmp_path, store):
    run = trained(tmp_path / "run", store)
    files = [run / lineage.FILE, *(store.path / lineage.REGISTER).iterdir()]
    assert len(files) == 3
    assert all(stat.S_IMODE(os.stat(file).st_mode) == 0o600 for file in files)
    sound = json.loads((run / lineage.FILE).read_text())
    wrong = ({"run": "x"}, {"private": 1}, {"clients": [1]}, {"further": 0}, {"ancestors": [{}]})
    for damage in ("{", "[]", '{"run": 3}', *(json.dumps(sound | part) for part in wrong)):
        (run / lineage.FILE).write_text(damage)
        with pytest.raises(RecordError, match="is damaged"):
            claim(run)


BEGUN = {"kind": "begin", "run": "0" * 32, "plans": {}, "parent": None, "tokenizer": {}}
BEGUN["assumes"] = []


@pytest.mark.parametrize(
    "book",
    [
        [], [BEGUN, BEGUN], [BEGUN, {}], [BEGUN, {"kind": "gaussian", "what": "vocabulary"}],
        [BEGUN, {"kind": "from a later version"}],
        [BEGUN, gaussian_entry("vocabulary", 1.0) | {"noise_multiplier": 10**400}],
    ],
)  # fmt: skip
def test_ledgers_within_a_lineage_are_read_as_strictly_as_their_own_files(tmp_path, store, book):
    """A line that nobody understands was skipped, and its cost with it; an empty book crashed."""
    run = trained(tmp_path / "run", store)
    sound = json.loads((run / lineage.FILE).read_text())
    (run / lineage.FILE).write_text(json.dumps(sound | {"vocabulary": [book]}))
    with pytest.raises(RecordError, match="is damaged"):
        claim(run)


def test_a_number_that_no_float_holds_is_refused_in_a_ledger(tmp_path, store):
    run = trained(tmp_path / "run", store)
    line = gaussian_entry("evaluation", 1.0) | {"noise_multiplier": 10**400}
    with open(run / ledger.NAME, "a") as file:
        file.write(f"{json.dumps(line)}\n")
    with pytest.raises(RecordError, match=r"noise_multiplier = .* makes no sense"):
        claim(run)


def test_a_negative_delta_within_a_lineage_is_refused(tmp_path, store):
    run = trained(tmp_path / "run", store)
    sound = json.loads((run / lineage.FILE).read_text())
    line = json.loads(json.dumps(gaussian_entry("vocabulary", 2.0, 1e-9))) | {"delta": -1}
    book = [json.loads(json.dumps(begin_entry({}))), line]
    (run / lineage.FILE).write_text(json.dumps(sound | {"vocabulary": [book]}))
    with pytest.raises(RecordError, match="makes no sense"):
        claim(run)


@pytest.mark.parametrize("gone", [[lineage.FILE], [ledger.NAME], [ledger.NAME, lineage.FILE]])
@pytest.mark.parametrize("before", ["nothing", "words", "an open run", "a private run"])
def test_a_copy_without_a_file_of_its_owner_makes_no_claim(tmp_path, store, gone, before):
    """Whoever may not read these files copies the others: epsilon 18 had become 0.3."""
    start = {}
    if before == "words":
        book = Ledger(store.path / ledger.NAME)
        book.begin(begin_entry({}))
        book.append(gaussian_entry("vocabulary", 1.0, 1e-9))
    elif before != "nothing":
        promised = None if before == "an open run" else PLAN
        first = trained(tmp_path / "first", store, promised=promised)
        start = {"start": str(first), "start_sha256": "m", "models": ("n",)}
    run = trained(tmp_path / "run", store, **start)
    whole = claim(run)
    assert whole.epsilon >= poisson(3) * (1 - 1e-3)
    for name in gone:
        (run / name).unlink()
    with pytest.raises(RecordError, match=rf"has no {gone[0]}.*copy the run as its owner"):
        claim(run)
    if ledger.NAME not in gone:
        with pytest.raises(RecordError, match=r"has no lineage\.json"):
            lineage.spent_together([run])


def test_a_run_that_was_killed_before_its_first_release_costs_nothing_yet(tmp_path):
    Ledger(tmp_path / ledger.NAME).begin(begin_entry({"": PLAN}))  # and here it was killed
    assert lineage.spent_together([tmp_path]).epsilon == 0


@pytest.mark.parametrize("lost", ["its line", "its ledger", "its record"])
def test_an_open_run_whose_line_was_lost_is_not_taken_for_a_private_one(tmp_path, store, lost):
    """On a full disk the store's ledger of it had no line but the first, or was not there."""
    trained(tmp_path / "open", store, promised=None)
    (file,) = (store.path / lineage.REGISTER).glob("*.jsonl")
    if lost == "its line":
        file.write_bytes(file.read_bytes().splitlines(keepends=True)[0])
    else:
        (file if lost == "its ledger" else file.with_suffix(".json")).unlink()
    found = lineage.spent_on(store, 1e-5)
    assert (found.other_runs, found.private_runs) == (1, 0) and math.isinf(found.epsilon)


def test_a_private_run_whose_record_was_lost_has_no_finite_cost(tmp_path, store):
    """The open run that it started from was in that file alone."""
    clients = text(f"c{n}" for n in range(8))
    other = prepare(clients, tmp_path / "other/b", test_clients=0.0, vocabulary=9)
    first = trained(tmp_path / "open", other, promised=None)
    trained(tmp_path / "run", store, start=str(first), start_sha256="m", models=("n",))
    assert math.isinf(lineage.spent_on(store).epsilon)
    (file,) = (store.path / lineage.REGISTER).glob("*.json")
    file.unlink()
    assert math.isinf(lineage.spent_on(store, PLAN.delta).epsilon)


def test_more_runs_never_cost_less(tmp_path, store):
    """What costs most alone may cost less together with others: no plan stands for all."""
    rare = plan(
        "gaussian",
        Sampling(law="poisson", population=1000, cohort=2),
        noise_multiplier=0.5,
        delta=1e-6,
    )
    every = plan(
        "gaussian",
        Sampling(law="poisson", population=1000, cohort=1000),
        noise_multiplier=3.0,
        delta=1e-6,
    )

    def book():
        return [begin_entry({"a": rare, "b": every}), round_entry(0, ledger.UNKNOWN)]

    found = [spending.total_spent([book() for _ in range(n)]).epsilon for n in (1, 6, 7, 9)]
    assert found == sorted(found)
    alone = [
        [{**b[0], "plans": {"b": b[0]["plans"]["b"]}}, b[1]] for b in (book() for _ in "1234567")
    ]
    assert found[2] >= spending.total_spent(alone).epsilon - 1e-9


def test_a_node_that_costs_less_than_another_one_for_sure_is_no_choice():
    """Two trees of many places whose cohorts differ had 11.43 in place of 7.29."""

    def of(population):
        drawn = Sampling(law="poisson", population=population, cohort=10)
        return plan("gaussian", drawn, noise_multiplier=1.0, delta=1e-6)

    def tree(*populations):
        plans = {f"town {n}": of(n) for n in populations}
        return [begin_entry(plans), *(round_entry(n, ledger.UNKNOWN) for n in range(9))]

    many = spending.total_spent([tree(*range(100, 350, 10)) for _ in range(2)])
    assert many.epsilon == spending.total_spent([tree(100), tree(100)]).epsilon


def test_where_combinations_are_too_many_a_bound_is_told(tmp_path, store, monkeypatch):
    plans = [dataclasses.replace(PLAN, noise_multiplier=1.5 + n / 4) for n in range(3)]
    books = [
        [begin_entry({"a": plans[0], "b": plans[1 + n % 2]}), round_entry(n, ledger.UNKNOWN)]
        for n in range(3)
    ]
    exact = spending.total_spent(books)
    monkeypatch.setattr(spending, "MOST_SLOW_COMBINATIONS", 1)
    bound = spending.total_spent(books)
    assert exact.epsilon < bound.epsilon < 4 * exact.epsilon and "added" in bound.accountant


def test_an_older_copy_of_a_run_is_noticed_by_its_store(tmp_path, store):
    run = trained(tmp_path / "run", store)
    entries = Ledger(run / ledger.NAME).entries()
    assert len(lineage.copies(store, entries)) == 1
    with pytest.raises(RecordError, match=r"counted 3 releases .* ledger has 1.* an older copy"):
        lineage.copies(store, entries[:2])
    other = [*entries[:3], round_entry(2, "f" * 64)]
    with pytest.raises(RecordError, match="an older copy"):
        lineage.copies(store, other)


def test_a_selection_whose_copied_line_is_missing_has_released_nothing_yet(tmp_path, store):
    entry = selection_entry(PLAN, 3, "geometric", 2.0)
    lineage.begin_selection(tmp_path / "best", store, entry, start_sha256="0", start="")
    (file,) = (store.path / lineage.REGISTER).glob("*.jsonl")
    file.write_bytes(file.read_bytes().splitlines(keepends=True)[0])
    found = lineage.spent_on(store, 1e-5)
    assert (found.private_runs, found.other_runs, found.epsilon) == (1, 0, 0)


def test_a_selection_killed_before_its_line_is_counted_when_it_goes_on(tmp_path, store):
    entry = selection_entry(PLAN, 3, "geometric", 2.0)
    folder = tmp_path / "best"
    folder.mkdir()
    Ledger(folder / ledger.NAME).begin(begin_entry({}))  # and here it was killed
    for _ in range(2):
        lineage.begin_selection(folder, store, entry, start_sha256="0", start="")
    kinds = [each["kind"] for each in Ledger(folder / ledger.NAME).entries()]
    assert kinds == ["begin", "selection"]
    assert lineage.spent_on(store).private_runs == 1
