"""Should we federate? Which text decides, that every side gets the same care, and what is said."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from fedlm.core.errors import ConfigError, RecordError
from fedlm.corpus.store import Store
from fedlm.personal.members import member_called, members_of
from fedlm.personal.ways import Attempt, local
from fedlm.recipe.build import build
from fedlm.recipe.settings import load
from fedlm.record.advice import advice_page
from fedlm.record.facts import facts_of
from fedlm.search import advise as answers
from fedlm.search.advise import (
    Score,
    advice_table,
    advise,
    ask,
    by_first_halves,
    cell_recipe,
    line_of,
    sentences,
    store_at,
)
from tests.conftest import call, write_tiny

SMALL = (
    "data.sequence_length=8",
    "model.embedding_size=8",
    "model.hidden_size=8",
    "server.rounds=4",
    "server.cohort=4",
    "server.evaluate_every=2",
)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("advise")
    write_tiny(folder)
    done = call(folder, "prepare", "tiny.jsonl", "--out", "store", "--validation", "0.4")
    assert done.code == 0, done.stderr
    return folder / "store"


def question(store, **options):
    return ask(store, load("advise", SMALL), **{"members": 3, "shares": (1, 0.25), **options})


# ---- the text --------------------------------------------------------------------------------


def test_a_share_of_the_text_keeps_all_that_is_held_out(store, tmp_path):
    whole = Store(store)
    assert store_at(question(store), 1.0, tmp_path) == store  # which counts the run
    part = Store(store_at(question(store), 0.25, tmp_path))
    assert len(part) == len(part.training_clients) == len(whole.training_clients)
    numbers = {whole.client(int(n)): int(n) for n in whole.training_clients}
    for n in range(len(part)):
        at = numbers[part.client(n)]
        train = whole.train(at)
        np.testing.assert_array_equal(part.train(n), train[: math.ceil(0.25 * len(train))])
        np.testing.assert_array_equal(part.held(n), whole.held(at))


def test_groups_can_be_the_members(store, tmp_path):
    whole = Store(store)
    part = Store(store_at(question(store, by_group=True), 1.0, tmp_path))
    assert [part.client(n) for n in range(len(part))] == ["north", "south"]
    mine = [n for n in map(int, whole.training_clients) if whole.groups(n)[0] == "north"]
    np.testing.assert_array_equal(part.train(0), np.concatenate([whole.train(n) for n in mine]))
    np.testing.assert_array_equal(part.held(0), np.concatenate([whole.held(n) for n in mine]))


def test_what_decides_is_never_what_is_reported(store, tmp_path):
    """The federation is scored on exactly the rows by which its members choose."""
    recipe = cell_recipe(question(store), store, 1.0)
    run = by_first_halves(build(recipe, tmp_path, out=tmp_path / "run"))
    assert run.evaluation.splits() == ["validation"]
    rows, owners = run.evaluation.text["validation"].rows(1)
    for owner in np.unique(owners):
        member = member_called(run, run.store.client(int(owner)))
        np.testing.assert_array_equal(rows[owners == owner], member.choose)
        assert len(member.report) == len(member.choose) or len(member.report) + 1 == len(
            member.choose
        )
    assert len(run.evaluation.watched) == len(rows)  # all of them, not a sample


def test_a_member_alone_gets_the_second_smaller_rate_that_the_federation_gets(store, tmp_path):
    """Else a schedule of rates would pass for what the text of the others is worth."""
    asked = replace(question(store), passes=4)
    run = by_first_halves(build(cell_recipe(asked, store, 1.0), tmp_path, out=tmp_path / "run"))
    member = next(one for one in members_of(run) if one.enough)
    short = answers.Bench(asked).shop(run, None)
    short.federated = short.fresh()

    def alone(shop):
        rates = (answers.LOCAL_RATE, answers.PERSONAL_RATE)
        for scale in answers.SCALES:
            yield tuple(
                Attempt(shop.at_scale(rate * scale), member.own, member.choose, member.number)
                for rate in rates
            )

    for first, later in alone(short):  # which ends before it stops improving
        twice = answers.trained_twice(first, later)
        assert later.score(twice) < first.score(local(first)), "the second run must be run"
    enough = answers.with_enough_steps(short, member)
    assert enough.passes * -(-len(member.own) // enough.batch_size) >= answers.FEWEST_STEPS
    made = [(later, answers.trained_twice(first, later)) for first, later in alone(enough)]
    best = min(made, key=lambda pair: pair[0].score(pair[1]))[1]
    scored = answers.score_member(short, member, None)
    assert math.isclose(
        scored.perplexity["local"], short.perplexity(best.params, member.report), rel_tol=1e-6
    )
    assert "at the smaller rate" in scored.note["local"]


def test_a_federations_model_gets_all_of_local_training(store, tmp_path):
    """Else a member with much text seems to be better off alone: it was given the larger rate."""
    asked = replace(question(store), passes=4)
    run = by_first_halves(build(cell_recipe(asked, store, 1.0), tmp_path, out=tmp_path / "run"))
    member = next(one for one in members_of(run) if one.enough)
    shop = answers.Bench(asked).shop(run, None)
    shop.federated = shop.fresh()  # as good a start as a fresh one: both sides then end alike
    scored = answers.score_member(shop, member, None)
    assert math.isclose(scored.perplexity["personal"], scored.perplexity["local"], rel_tol=1e-6)
    assert "from the federation's model" in scored.note["personal"]


# ---- what is refused -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, options, said",
    [
        ((), {"shares": (0.0,)}, "--shares"),
        ((), {"shares": (2.0,)}, "--shares"),
        (("federation.levels=[0]",), {}, "flat federation"),
        (("privacy.mechanism=gaussian", "privacy.noise_multiplier=1.0"), {}, "no noise covers"),
        (("model.init_from=x",), {}, "fresh model"),
    ],
)
def test_a_question_without_an_answer_is_refused(store, changes, options, said):
    with pytest.raises(ConfigError, match=said):
        ask(store, load("advise", (*SMALL, *changes)), **options)


def test_a_folder_that_is_no_store_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="made by fedlm prepare"):
        ask(tmp_path, load("advise", SMALL))


# ---- what is said ----------------------------------------------------------------------------

ABOUT = {"parameters": 1000, "cohort": 4, "population": 18}


def line(*triples, share=1.0, complete=True):
    scores = [
        Score(f"m{n}", 100, dict(zip(answers.SIDES, each, strict=True)), {}, 10)
        for n, each in enumerate(triples)
    ]
    return line_of(share, scores, {"rounds": 9, "complete": complete})


def test_figures_are_those_of_the_definition():
    found = line((100, 120, 50), (100, 80, 50), (100, 90, 200))
    assert math.isclose(found.perplexity["personal"], (50 * 50 * 200) ** (1 / 3))
    assert math.isclose(found.gain["personal"], 1 - (0.5 * 0.5 * 2) ** (1 / 3))
    assert math.isclose(found.hurt["personal"], 1 / 3) and found.hurt["federated"] == 1 / 3
    assert math.isclose(found.error["personal"], np.std([1, 1, -1], ddof=1) * math.log(2) / 3**0.5)


def test_the_sentence_is_no_surer_than_the_figures():
    four = ((100, 90, 70), (100, 95, 72), (90, 80, 60), (95, 90, 69))
    clear = sentences([line(*four)], ABOUT)
    assert clear[0].startswith("Federate, and personalise: with 100 tokens per member")
    assert "0 of 4 members would be better off alone" in clear[0]
    few = sentences([line(*four[:3])], ABOUT)
    assert few[0].startswith("No clear difference"), "three members are too few for a verdict"
    alone = sentences([line(*((c, b, a) for a, b, c in four))], ABOUT)
    assert alone[0].startswith("Better alone") and "4 of 4 members" in alone[0]
    mixed = sentences([line((100, 90, 70), (100, 95, 160), (90, 80, 91))], ABOUT)
    assert mixed[0].startswith("No clear difference")
    assert any("A short run: one seed" in said for said in mixed)
    hurt = sentences([line((100, 190, 70), (100, 195, 72))], ABOUT)
    assert any("personal steps that make it pay" in said for said in hurt)
    late = sentences([line((100, 90, 70), (100, 95, 72), complete=False)], ABOUT)
    assert "worse than it is" in late[-1]


@pytest.mark.parametrize("members", [4, 6, 12])
def test_where_there_is_no_difference_one_is_seldom_called(members):
    """In one answer of twenty; two standard errors would be called so in one of seven of four."""
    rng, tries = np.random.default_rng(members), 4000
    apart = rng.normal(size=(tries, members))
    errors = abs(apart.mean(axis=1)) / (apart.std(axis=1, ddof=1) / members**0.5)
    called = (errors > answers.errors_apart(members)).mean()
    assert abs(called - 0.05) < 4 * (0.05 * 0.95 / tries) ** 0.5
    assert members > 6 or (errors > 2).mean() > 0.08


def test_the_page_draws_every_side_and_escapes_names():
    lines = [line((100, 90, 70), (100, 95, 72)), line((200, 90, 80), (210, 95, 80), share=0.1)]
    member = {
        "name": "<b>x</b>", "tokens": 9, "note": {"local": "a", "personal": "b"},
        "perplexity": {"local": 2.0, "federated": 3.0, "personal": 1.0},
    }  # fmt: skip
    told = {
        **ABOUT,
        "answer": sentences(lines, ABOUT),
        "lines": [one.facts() for one in lines],
        "shares": [{"share": 1.0, "members": [member]}],
    }
    page = advice_page(told, *advice_table(lines))
    assert "<script" not in page and "<b>x" not in page and "&lt;b&gt;x" in page
    assert page.count("class='curve") >= 3 and "tokens per member" in page
    json.dumps(told)


# ---- the whole -------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_answer_is_found_kept_and_gone_on_with(store, tmp_path):
    args = [part for change in SMALL for part in ("--set", change)]
    args = ["advise", store, *args, "--members", "3", "--shares", "1,0.25", "--out", "a"]
    done = call(tmp_path, *args, "--json")
    assert done.code == 0, done.stderr
    told = done.json
    assert [one["share"] for one in told["lines"]] == [1.0, 0.25] and not told["missing"]
    names = [[m["name"] for m in share["members"]] for share in told["shares"]]
    assert names[0] == names[1] and len(names[0]) == 3
    full, part = (share["members"] for share in told["shares"])
    assert all(a["tokens"] > b["tokens"] for a, b in zip(full, part, strict=True))
    assert all(a["report_tokens"] == b["report_tokens"] for a, b in zip(full, part, strict=True))
    for share in ("1", "0.25"):
        runs = sorted((tmp_path / "a/shares" / share).glob("federation-*"))
        assert len(runs) == len(answers.SCALES)
        rates = {facts_of(run).recipe["server"]["learning_rate"] for run in runs}
        assert len(rates) == len(answers.SCALES)
    # The second call finds everything done, and says the same.
    again = call(tmp_path, *args)
    assert again.code == 0 and told["answer"][0] in again.stdout.replace("\n", " ")
    assert "member 1 of" not in again.stderr
    # A member whose score is gone is scored again, and equal.
    (tmp_path / "a/shares/1/members/1.json").unlink()
    third = call(tmp_path, *args, "--json").json
    assert third["lines"] == told["lines"]
    other = call(tmp_path, *[part if part != "3" else "2" for part in args])
    assert other.code == 2 and "another question" in other.stderr
    assert (tmp_path / "a/report.html").read_text().startswith("<!doctype html>")


def test_too_few_minutes_are_said_and_what_was_asked_stays(store, tmp_path):
    with pytest.raises(ConfigError, match="--minutes: expected enough"):
        advise(question(store), tmp_path / "a", minutes=1e-6)
    with pytest.raises(KeyboardInterrupt):
        advise(question(store), tmp_path / "a", stop=lambda: True)
    with pytest.raises(RecordError, match=r"another question \(members differs"):
        advise(replace(question(store), members=2), tmp_path / "a")
