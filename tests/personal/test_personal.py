"""What every way of a personal model owes; a new one joins by being in the registry."""

import dataclasses
import json
import math
import stat

import jax
import numpy as np
import pytest
from safetensors.numpy import load as load_arrays
from safetensors.numpy import save

from fedlm.core import tree
from fedlm.core.errors import ConfigError, RecordError
from fedlm.core.keys import key_for
from fedlm.core.types import PAD
from fedlm.methods.optimizers import client_optimizer
from fedlm.models import catalog
from fedlm.personal import adapters
from fedlm.personal.cache import cache_from, cache_of
from fedlm.personal.choose import CHOSEN, Personalized, check_ways, outcome_table, personalize
from fedlm.personal.members import OwnText, member_called, members_of
from fedlm.personal.model import Personal, Scorer, mixture_perplexity, open_personal
from fedlm.personal.neighbours import neighbours_from, neighbours_of
from fedlm.personal.ways import WAYS, Attempt, Workshop, _last
from fedlm.recipe.build import build
from fedlm.recipe.parts import client_rows
from fedlm.recipe.settings import load
from fedlm.record.directory import RunDirectory
from tests.conftest import call

VOCAB = 12
SIZE = catalog.Dimensions(vocab=VOCAB, embedding_size=8, hidden_size=8)


def model(seed):
    return catalog.make("cifg", SIZE, key_for(seed, "init"))


def rows(count, seed, width=7):
    """A member's own habit: words that follow each other in a circle, now and then another."""
    rng = np.random.default_rng(seed)
    steps = np.where(rng.random((count, width)) < 0.9, 1, 3)
    found = 4 + (rng.integers(0, 8, (count, 1)) + np.cumsum(steps, axis=1)) % 8
    found[-1, width // 2 :] = PAD
    return found.astype(np.int32)


@pytest.fixture(scope="module")
def shop():
    return Workshop(
        federated=model(0),
        fresh=lambda: model(1),
        optimizer=client_optimizer("adam", 0.03),
        vocabulary=VOCAB,
        batch_size=4,
        passes=4,
    )


@pytest.fixture(scope="module")
def attempt(shop):
    return Attempt(shop, rows(24, 1), rows(6, 2))


# ---- the cache -------------------------------------------------------------------------------


def test_chances_of_a_cache_sum_to_one():
    cache = cache_of(rows(20, 3), VOCAB)
    for before in range(VOCAB):
        assert math.isclose(cache.next(before).sum(), 1.0, rel_tol=1e-12)
    asked = rows(5, 4)
    found = cache.chances(asked)
    for r, t in [(0, 0), (2, 3), (4, 1)]:
        assert math.isclose(found[r, t], cache.next(int(asked[r, t]))[asked[r, t + 1]])
    assert not found[asked[:, 1:] == PAD].any()


def test_a_cache_is_saved_and_a_damaged_one_refused():
    cache = cache_of(rows(20, 3), VOCAB)
    again = cache_from(cache.to_bytes(), VOCAB, "cache")
    np.testing.assert_array_equal(again.chances(rows(9, 5)), cache.chances(rows(9, 5)))
    for data, size in [(b"", VOCAB), (b"x" * 99, VOCAB), (cache.to_bytes(), VOCAB + 1)]:
        with pytest.raises(RecordError, match="damaged"):
            cache_from(data, size, "cache")
    empty = cache_of(np.zeros((0, 5), np.int32), VOCAB)
    assert not empty.chances(rows(2, 1)).any()


# ---- neighbours ------------------------------------------------------------------------------


def kept_text(count=40, seed=0, embed=6):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(count, embed)).astype(np.float32), rng.integers(4, VOCAB, count)


def test_chances_of_neighbours_sum_to_one_and_the_nearest_counts_most():
    features, targets = kept_text()
    made = neighbours_of(features, targets, VOCAB)
    sharp = dataclasses.replace(made, width=made.width * 1e-3)
    asked = features[:9] + 1e-3
    for n, feature in enumerate(asked):
        every = made.next(feature)
        assert math.isclose(every.sum(), 1.0, rel_tol=1e-6)
        np.testing.assert_allclose(
            made.chances(asked, np.full(9, 7))[n], every[7], rtol=1e-4, atol=1e-9
        )
        assert sharp.next(feature).argmax() == targets[n]
    by_hand = np.exp(-np.sum((features - asked[0]) ** 2, axis=1) / made.width)
    want = by_hand[targets == targets[0]].sum() / by_hand.sum()
    assert math.isclose(made.next(asked[0])[targets[0]], want, rel_tol=1e-4)


def test_equal_positions_count_alike_whatever_their_order():
    """The first position of every row is the same: no ten of them may be picked."""
    features = np.repeat(np.ones((1, 6), np.float32), 30, axis=0)
    made = neighbours_of(features, np.arange(30) % 3 + 4, VOCAB)
    np.testing.assert_allclose(made.next(np.ones(6, np.float32))[4:7], 1 / 3, rtol=1e-6)


def test_neighbours_are_saved_and_damaged_ones_refused():
    features, targets = kept_text()
    made = neighbours_of(features, targets, VOCAB)
    again = neighbours_from(made.to_bytes(), VOCAB, 6, "neighbours")
    np.testing.assert_array_equal(again.next(features[0]), made.next(features[0]))
    hostile = [
        dataclasses.replace(made, width=width).to_bytes() for width in (float("nan"), 1e300, 0.0)
    ]
    hostile += [
        dataclasses.replace(made, targets=made.targets + 9).to_bytes(),
        dataclasses.replace(made, features=made.features * np.float32(1e30)).to_bytes(),
        dataclasses.replace(made, features=made.features.astype(np.float64)).to_bytes(),
        save({**load_arrays(made.to_bytes()), "vocabulary": np.array([np.inf])}),
        save({**load_arrays(made.to_bytes()), "more": np.zeros(3)}),
    ]
    for data, words, embed in [
        *((b"", VOCAB, 6), (b"x" * 99, VOCAB, 6), (made.to_bytes(), VOCAB + 1, 6)),
        *((made.to_bytes(), VOCAB, 7), *((data, VOCAB, 6) for data in hostile)),
    ]:
        with pytest.raises(RecordError, match="damaged"):
            neighbours_from(data, words, embed, "neighbours")
    assert neighbours_of(features[:5], targets[:5], VOCAB) is None, "too little text"


def test_the_last_rows_hold_as_many_targets_as_are_kept():
    text = rows(20, 1)  # six targets each, the last row two
    assert len(_last(text, 2)) == 1 and len(_last(text, 3)) == 2 and len(_last(text, 8)) == 2
    np.testing.assert_array_equal(_last(text, 9), text[-3:])
    assert len(_last(text, 10**6)) == 20 and len(_last(text[:0], 5)) == 0


# ---- adapters --------------------------------------------------------------------------------


def test_fresh_factors_change_nothing_and_changes_have_a_low_rank():
    size = catalog.Dimensions(vocab=30, embedding_size=16, hidden_size=24)
    model = catalog.make("cifg", size, key_for(0, "init"))
    factors, fixed = adapters.begin(model, key_for(0, "partial"))
    before = tree.named_leaves(model)
    for name, leaf in tree.named_leaves(adapters.adapted(factors, fixed)).items():
        np.testing.assert_array_equal(leaf, before[name])
    assert all(min(before[name].shape) > adapters.RANK for name in factors), "a rank can be low"
    rng = np.random.default_rng(0)
    trained = {k: rng.normal(size=x.shape).astype(np.float32) for k, x in factors.items()}
    after = tree.named_leaves(adapters.adapted(trained, fixed))
    for name in before:
        change = np.asarray(after[name] - before[name])
        assert np.any(change) == (name in factors)
        if name in factors:
            assert np.linalg.matrix_rank(change, tol=1e-3) == adapters.RANK


# ---- every way -------------------------------------------------------------------------------


@pytest.mark.sample(3)
@pytest.mark.parametrize("way", WAYS)
def test_a_way_is_no_worse_than_the_federation_where_it_chose(attempt, way):
    made = WAYS[way](attempt)
    assert made.way == way and made.note
    before = attempt.score(WAYS["federated"](attempt))
    if not way.startswith("local"):
        assert attempt.score(made) <= before * (1 + 1e-9)
    if way != "federated" and not way.startswith("local"):
        assert attempt.score(made) < before  # this member's text is easy to learn


@pytest.mark.sample(3)
@pytest.mark.parametrize("way", WAYS)
def test_token_by_token_it_gives_the_chances_that_rows_are_scored_by(attempt, way):
    made = WAYS[way](attempt)
    asked = rows(2, 9)[:1]
    nats = made.nats(asked, attempt.shop.scorer)[0]
    speaker = made.speaker(16)
    state = speaker.start()
    for t in range(3):
        state, logits = speaker.advance(state, int(asked[0, t]))
        logs = jax.nn.log_softmax(logits)
        assert math.isclose(-logs[asked[0, t + 1]], nats[t], abs_tol=2e-4)


def test_looks_between_passes_change_no_step(shop):
    """Six steps are a pass: a look after each six is a look after each pass."""
    own, choose = rows(24, 1), rows(6, 2)
    plain = shop.train(shop.federated, own, choose, 0)
    often = shop.at_scale(1.0)
    often.look_every = 6
    again = often.train(shop.federated, own, choose, 0)
    assert again.passes == plain.passes
    np.testing.assert_array_equal(
        np.concatenate([x.ravel() for x in jax.tree.leaves(again.params)]),
        np.concatenate([x.ravel() for x in jax.tree.leaves(plain.params)]),
    )
    often.look_every = 4
    found = often.train(shop.federated, own, choose, 0).passes
    assert found in {n * 4 / 6 for n in range(7)}, "of 24 steps a look comes after every fourth"


def test_the_best_model_may_lie_within_a_long_pass(shop):
    """Forty steps are a pass: a large rate is past its best long before the pass is over."""
    own, choose = rows(160, 1), rows(40, 5)
    fast = shop.at_scale(3.0)
    found = fast.train(shop.federated, own, choose, 0)
    assert found.passes in {n / 4 for n in range(1, 17)} and found.passes % 1, found.passes
    by_passes = shop.at_scale(3.0)
    by_passes.look_every = 40
    whole = by_passes.train(shop.federated, own, choose, 0)
    assert fast.perplexity(found.params, choose) < fast.perplexity(whole.params, choose)


def test_no_more_steps_than_allowed_and_other_orders_in_a_second_run(shop):
    own, choose = rows(24, 1), rows(6, 2)
    some = shop.at_scale(1.0)
    some.look_every, some.most_steps = 1, 8
    assert some.train(shop.federated, own, choose, 0).passes <= 8 / 6
    some.passes, some.most_steps = 1, 6
    first, second = (some.train(shop.federated, own, choose, 0, after=n) for n in (0, 1.5))
    two = shop.at_scale(1.0)
    assert list(map(str, two._walk(own, 0, 2)))[:6] == list(map(str, two._walk(own, 0, 0)))[12:18]
    assert not np.array_equal(
        *(np.concatenate([x.ravel() for x in jax.tree.leaves(m.params)]) for m in (first, second))
    )


def test_a_shape_scales_the_steps_by_their_place(shop):
    """Steps after a quarter have no length: the model is that of the first quarter."""
    own, choose = rows(24, 1), rows(6, 2)
    some, short = shop.at_scale(1.0), shop.at_scale(1.0)
    some.look_every = short.look_every = 1
    some.passes, some.most_steps, short.most_steps = 2, 8, 2
    some.shape = lambda done: float(done < 0.25)
    first, second = (one.train(shop.federated, own, choose, 0) for one in (some, short))
    assert first.passes == second.passes <= 2 / 6
    for a, b in zip(jax.tree.leaves(first.params), jax.tree.leaves(second.params), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_member_that_learns_nothing_stays_with_the_federation(shop):
    """Own text that says nothing about the text to choose by: passes are taken back."""
    rng = np.random.default_rng(0)
    away = rng.integers(4, VOCAB, (12, 7)).astype(np.int32)
    good = Attempt(shop, rows(24, 1), rows(6, 2)).tuned.params
    stubborn = Workshop(good, shop.fresh, client_optimizer("sgd", 30.0), VOCAB, 4, 3)
    at = Attempt(stubborn, away, rows(6, 2))
    assert at.tuned.passes == 0
    assert at.score(WAYS["weights"](at)) <= at.score(WAYS["federated"](at))


def test_the_rows_of_the_report_decide_nothing(shop):
    own, choose = rows(16, 1), rows(4, 2)
    names = check_ways(["finetune", "adapters", "cache", "finetune+neighbours"])
    first = personalize(shop, OwnText("m", 0, own, choose, rows(4, 3)), names)
    second = personalize(shop, OwnText("m", 0, own, choose, rows(9, 4)), names)
    assert first.way == second.way and first.chosen.note == second.chosen.note
    assert first.perplexity != second.perplexity


def test_the_table_tells_who_is_hurt():
    def outcome(name, federated, local, tuned, way):
        each = {"federated": federated, "local": local, "finetune": tuned}
        nats = {k: 10 * math.log(v) for k, v in each.items()}
        return Personalized(name, way, Personal(way, None), each, nats, 10)

    lines = outcome_table(
        [outcome("a", 9.0, 20.0, 8.0, "finetune"), outcome("b", 9.0, 4.0, 10.0, "finetune")]
    )
    found = {line.way: line for line in lines}
    assert found["finetune"].hurt == 0.5 and found["finetune"].hurt_alone == 0.5
    assert found["federated"].hurt == 0.0 and found["federated"].taken == 0.0
    assert found[CHOSEN].perplexity == 9.0
    assert math.isclose(found["finetune"].together, math.sqrt(80.0))


def test_unknown_ways_are_refused():
    assert check_ways(["cache"]) == ("federated", "cache")
    with pytest.raises(ConfigError, match="--ways"):
        check_ways(["magic"])


# ---- whole runs ------------------------------------------------------------------------------


@pytest.fixture
def made(trained, monkeypatch):
    monkeypatch.chdir(trained)
    recipe = load(trained / "runs" / "tiny" / "recipe.toml")
    return build(recipe, trained / ".fedlm" / "stores", out=trained / "runs" / "tiny")


def test_the_three_parts_are_all_of_a_members_text(made):
    store = made.store
    text = client_rows(made.recipe, store, np.arange(len(store)))
    for split in ("validation", "test"):
        for member in members_of(made, split, most=3):
            number = next(n for n in range(len(store)) if store.client(n) == member.name)
            whole = text.held(number)
            if split == "validation":
                np.testing.assert_array_equal(member.own, text.train(number))
                parts = [member.choose, member.report]
            else:
                parts = [member.own, member.choose, member.report]
            np.testing.assert_array_equal(np.concatenate(parts), whole)
    with pytest.raises(ConfigError, match="no such member"):
        member_called(made, "nobody")


@pytest.mark.slow
def test_the_model_of_a_client_is_kept_and_served(trained, tmp_path):
    run, name = trained / "runs" / "tiny", None
    shown = call(trained, "personalize", run, "--all", "--split", "test", "--passes", 2, "--json")
    assert shown.code == 0, shown.stderr
    assert [line["way"] for line in shown.json["ways"]] == [*WAYS, CHOSEN]
    name = shown.json["by_member"][0]["client"]
    kept = call(trained, "personalize", run, "--client", name, "--passes", 2, "--json")
    assert kept.code == 0, kept.stderr
    folder = RunDirectory(run).client(name).path
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    judged = call(trained, "evaluate", run, "--client", name, "--json").json
    assert math.isclose(judged["perplexity"], kept.json["perplexity"], rel_tol=1e-5)
    said = call(trained, "predict", run, "the cat", "--client", name, "--json").json
    assert len(said["next"]) == 5
    out = tmp_path / "out"
    assert call(trained, "export", run, "--client", name, "--out", out, "--json").code == 0
    assert (out / "model.safetensors").is_file()
    (folder / "personal.json").write_text("[]")
    refused = call(trained, "predict", run, "the cat", "--client", name)
    assert refused.code == 2 and "damaged" in refused.stderr


@pytest.mark.slow
@pytest.mark.parametrize("way", ["adapters", "neighbours", "finetune+neighbours"])
def test_a_memory_of_ones_text_is_kept_and_served(trained, way):
    run = trained / "runs" / "tiny"
    ways = ("--ways", way, "--split", "test", "--passes", 4, "--json")
    members = call(trained, "personalize", run, "--all", *ways).json["by_member"]
    name = next(m["client"] for m in members if m["way"] == way)
    kept = call(trained, "personalize", run, "--client", name, *ways)
    assert kept.code == 0 and kept.json["way"] == way, kept.stderr
    judged = call(trained, "evaluate", run, "--client", name, "--json").json
    assert math.isclose(judged["perplexity"], kept.json["perplexity"], rel_tol=1e-5)
    assert len(call(trained, "predict", run, "the cat", "--client", name, "--json").json["next"])
    file = RunDirectory(run).client(name).path / "neighbours.safetensors"
    assert file.is_file() == ("neighbours" in way)
    if file.is_file():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        whole = file.read_bytes()
        file.write_bytes(whole[:-9])
        refused = call(trained, "predict", run, "the cat", "--client", name)
        assert refused.code == 2 and "damaged" in refused.stderr
        file.unlink()
        refused = call(trained, "evaluate", run, "--client", name)
        assert refused.code == 2 and "neighbours.safetensors is missing" in refused.stderr


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "options, words",
    [
        ((), "either --client NAME or --all"),
        (("--all", "--client", "x"), "either --client NAME or --all"),
        (("--all", "--ways", "magic"), "--ways"),
        (("--all", "--learning-rate", "nan"), "a positive number"),
        (("--all", "--optimizer", "x"), "--optimizer"),
        (("--all", "--split", "x"), "--split"),
        (("--client", "nobody"), "no such member"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, tuple) else "",
)
def test_bad_options_end_in_one_sentence(trained, options, words):
    done = call(trained, "personalize", trained / "runs" / "tiny", *options)
    assert done.code == 2 and words in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_leaf_of_a_tree_starts_from_its_own_model(run_cli, tiny_recipe, tmp_path):
    tree = ("--set", "federation.levels=[0]", "--set", "data.validation=0.4", "--set")
    done = run_cli("train", tiny_recipe, *tree, "server.rounds=2", "--out", "tree", "--json")
    assert done.code == 0, done.stderr
    shown = run_cli("personalize", "tree", "--all", "--passes", 1, "--json")
    assert shown.code == 0, shown.stderr
    assert {m["client"] for m in shown.json["by_member"]} == {"north", "south"}
    assert run_cli("personalize", "tree", "--client", "north", "--passes", 1).code == 0
    assert json.loads((tmp_path / "tree" / "clients" / "north" / "summary.json").read_text())


@pytest.mark.slow
def test_nothing_of_a_training_client_of_a_private_run_is_told(run_cli, tiny_recipe):
    private = ("server.sampling=poisson", "privacy.mechanism=gaussian", "privacy.delta=1e-3")
    private += ("privacy.noise_multiplier=1.0", "server.rounds=2", "data.test_clients=0.4")
    settings = [part for change in private for part in ("--set", change)]
    assert run_cli("train", tiny_recipe, *settings, "--out", "private").code == 0
    refused = run_cli("personalize", "private", "--all", "--passes", 1)
    assert refused.code == 2 and "without noise" in refused.stderr
    shown = run_cli("personalize", "private", "--all", "--passes", 1, "--split", "test", "--json")
    assert shown.code == 0, shown.stderr
    name = shown.json["by_member"][0]["client"]
    assert run_cli("personalize", "private", "--client", name, "--passes", 1).code == 0


def test_scores_of_rows_do_not_depend_on_how_many_there_are():
    scorer, asked = Scorer(), rows(19, 2)
    whole = scorer.nats(model(0), asked)
    np.testing.assert_allclose(scorer.nats(model(0), asked[:3]), whole[:3], rtol=1e-5)
    mixed = scorer.mixed(model(0), model(1), asked, [0.0, 1.0])
    np.testing.assert_allclose(mixed[0], whole, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(mixed[1], scorer.nats(model(1), asked), rtol=1e-4, atol=1e-5)
    assert mixture_perplexity(whole, asked) > 1


def test_a_damaged_personal_model_is_refused(tmp_path):
    (tmp_path / "personal.json").write_text('{"share": 7, "cache_share": 0}')
    with pytest.raises(RecordError, match="damaged"):
        open_personal(RunDirectory(tmp_path), VOCAB)
