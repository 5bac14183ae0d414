"""Two builds of one recipe are the same experiment; what cannot work is refused at once."""

import json

import jax
import numpy as np
import pytest

from fedlm.core import tree
from fedlm.core.errors import ConfigError, CorpusError
from fedlm.engine.loop import LoopEngine
from fedlm.engine.mesh import MeshEngine
from fedlm.federation.round import CohortSampler
from fedlm.models import catalog
from fedlm.privacy import account
from fedlm.privacy.cost import compose, gaussian_event
from fedlm.privacy.ledger import Ledger
from fedlm.recipe.assemble import loss_of
from fedlm.recipe.build import build
from fedlm.recipe.parts import store_settings
from fedlm.recipe.settings import dump, load, parse


@pytest.fixture
def made(tiny_recipe, tmp_path):
    """`made("table.key=value", ...)`: the tiny experiment with changes."""
    return lambda *changes: build(load(tiny_recipe, changes), tmp_path / "stores", quiet)


def quiet(stage, done):
    pass


def cohorts(experiment, rounds):
    """The members of the first rounds."""
    state = experiment.round.init(experiment.start())
    choose = CohortSampler(experiment.algorithm, experiment.recipe.run.seed, state)
    return [choose(r).tolist() for r in range(rounds)]


@pytest.fixture
def store(made):
    """A store of 20 clients, prepared with `vocabulary = 60`."""
    return made().store.path


def with_store(folder, store, **data):
    """A recipe that names a store in place of a text."""
    lines = [f"{name} = {json.dumps(value)}" for name, value in data.items()]
    recipe = folder / "stored.toml"
    server = (
        "[server]\ncohort = 4\n[run]\ndevices = 2\n[model]\nembedding_size = 8\nhidden_size = 12\n"
    )
    recipe.write_text("\n".join(["[data]", f"store = '{store}'", *lines, server]))
    return build(load(recipe), folder / "unused", quiet)


def test_the_same_recipe_builds_the_same_experiment(made):
    one, two = made(), made()
    assert one.store.path == two.store.path
    assert tree.sha256(one.start()) == tree.sha256(two.start())
    assert tree.size(one.start()) == one.model.parameters
    assert cohorts(one, 3) == cohorts(two, 3) and len(cohorts(one, 1)[0]) == 4
    assert np.array_equal(one.evaluation.watched, two.evaluation.watched)


def test_another_seed_builds_another_model_and_other_cohorts(made):
    one, two = made(), made("run.seed=1")
    assert tree.sha256(one.start()) != tree.sha256(two.start())
    assert cohorts(one, 4) != cohorts(two, 4)


def test_a_text_is_prepared_once_and_again_when_it_changes(made, tiny_text):
    first = made().store.path
    written = (first / "store.json").stat().st_mtime_ns
    assert made("server.rounds=9").store.path == first
    assert (first / "store.json").stat().st_mtime_ns == written
    assert made("data.vocabulary=30").store.path != first
    with open(tiny_text, "a") as file:
        file.write(json.dumps({"client": "new", "text": "a cat"}) + "\n")
    assert made().store.path != first


@pytest.mark.parametrize(
    "name, value",
    [
        ("tokenizer", "bytes"),
        ("vocabulary", 61),
        ("lowercase", False),
        ("test_clients", 0.25),
        ("validation", 0.25),
        ("split_seed", 1),
    ],
)
def test_a_store_made_with_another_setting_is_refused_by_its_name(tmp_path, store, name, value):
    with pytest.raises(ConfigError) as caught:
        with_store(tmp_path, store, **{name: value})
    said = str(caught.value)
    assert said.startswith(f"data.{name} = {value!r}: the store {store} was made with ")
    assert "prepare another store" in said


def test_settings_left_out_are_the_stores_own(tmp_path, store):
    found = with_store(tmp_path, store)
    assert found.recipe.data.vocabulary == 60
    assert store_settings(found.recipe.data) == found.store.settings
    again = with_store(tmp_path, store, vocabulary=60, tokenizer="words")
    assert again.recipe == found.recipe


def test_a_resolved_recipe_builds_the_same_again(tmp_path, store):
    found = with_store(tmp_path, store)
    (tmp_path / "resolved.toml").write_text(dump(found.recipe))
    again = build(load(tmp_path / "resolved.toml"), tmp_path / "unused", quiet)
    assert dump(again.recipe) == dump(found.recipe)
    assert tree.sha256(again.start()) == tree.sha256(found.start())


def test_text_and_store_give_the_same_model(tmp_path, made, store):
    assert tree.sha256(with_store(tmp_path, store).start()) == tree.sha256(made().start())


def test_a_cohort_that_the_clients_cannot_fill_is_refused(made):
    assert made("server.cohort=18").algorithm.sampling.cohort == 18
    with pytest.raises(ConfigError, match=r"server\.cohort = 19: expected between 1 and the 18"):
        made("server.cohort=19")


def test_rows_longer_than_learned_positions_are_refused(made):
    """Later tokens shared the last position in silence: another model than the published one."""
    gpt2 = ("model.name=gpt2", "model.layers=1", "model.heads=2", "model.length=8")
    made(*gpt2, "data.sequence_length=8")
    with pytest.raises(ConfigError, match=r"data\.sequence_length = 9: expected at most 8"):
        made(*gpt2, "data.sequence_length=9")


@pytest.mark.parametrize("path", ["nowhere", "tiny.jsonl"])
def test_what_is_not_a_store_is_refused(tmp_path, tiny_text, path):
    with pytest.raises(CorpusError, match="is not a store"):
        with_store(tmp_path, tmp_path / path)


def test_a_missing_text_is_refused(tmp_path):
    with pytest.raises(CorpusError, match="is neither a file nor a corpus name"):
        build(parse({"data": {"source": "nowhere.jsonl"}}), tmp_path, quiet)


def test_a_name_that_no_file_can_have_is_refused(tmp_path):
    (tmp_path / "long.toml").write_text(f'[data]\nsource = "{"x" * 300}"\n')
    with pytest.raises(CorpusError, match="is neither a file nor a corpus name"):
        build(load(tmp_path / "long.toml"), tmp_path)


def test_settings_arrive_where_they_are_used(made):
    found = made(
        "client.batch_size=3",
        "client.epochs=2",
        "client.max_examples=5",
        "client.max_steps=4",
        "server.sampling=poisson",
        "run.engine=loop",
        "data.layout=windows",
    )
    shape = found.engine.shape
    assert (shape.batch_size, shape.epochs, shape.max_examples, shape.max_steps) == (3, 2, 5, 4)
    assert found.algorithm.sampling.law == "poisson"
    assert isinstance(found.engine, LoopEngine)
    assert isinstance(made().engine, MeshEngine)
    assert found.evaluation.watched.shape[1] == 9
    params = found.start()
    assert {leaf.shape[0] for leaf in jax.tree.leaves(params.embedding)} == {found.store.vocabulary}


def test_windows_have_the_program_of_full_rows(made):
    of = {layout: loss_of(made(f"data.layout={layout}").recipe) for layout in ("lines", "windows")}
    assert of == {"lines": catalog.loss, "windows": catalog.loss_of_full_rows}


def test_no_more_rows_are_watched_than_asked_for(made):
    every = made("server.evaluate_rows=0").evaluation.watched
    few = made("server.evaluate_rows=5").evaluation.watched
    assert len(few) == 5 < len(every)
    assert {row.tobytes() for row in few} <= {row.tobytes() for row in every}


def test_nothing_held_out_is_nothing_watched(made):
    found = made("data.validation=0", "data.test_clients=0")
    assert found.evaluation.watched is None and found.evaluation.baselines([]) == {}
    state = found.round.init(found.start())
    assert found.evaluation.watch(state)["perplexity"] is None


def test_with_a_user_field_a_member_is_a_person_with_all_devices(made, tiny_text, tmp_path):
    rows = [json.loads(line) for line in tiny_text.read_text().splitlines()]
    for number, row in enumerate(rows):
        row["user"] = f"person-{number // 2}"
    tiny_text.write_text("".join(json.dumps(row) + "\n" for row in rows))
    devices, people = made(), made("data.user_field=user")
    assert (devices.population.size, people.population.size) == (18, 9)
    store = people.store
    names = {store.client(n) for n in range(len(store))}
    assert names == {f"person-{n}" for n in range(10)}  # a person is in one split only
    assert people.recipe.data.user_field == store.settings.user_field == "user"
    with pytest.raises(ConfigError, match=r"data\.user_field = 'device'.*made with 'user'"):
        with_store(tmp_path, store.path, user_field="device")


PRIVATE = (
    "server.sampling=poisson",
    "privacy.mechanism=gaussian",
    "privacy.noise_multiplier=1.0",
    "privacy.evaluation_noise=0.01",
)


def test_noisy_figures_are_of_the_training_clients_held_out_text(made):
    found = made(*PRIVATE, "privacy.evaluation_tokens=20")
    state = found.round.init(found.start())
    told = found.private_evaluation.figures(state)
    exact = made("server.evaluate_rows=0").evaluation.watch(state)  # no plan: validation text
    assert told["perplexity"] == pytest.approx(exact["perplexity"], rel=0.02)
    assert told["accuracy"] == pytest.approx(exact["accuracy"], abs=0.02)
    assert found.evaluation.splits() == ["test"]
    again = found.private_evaluation.figures(state)
    assert again["perplexity"] != told["perplexity"]  # noise of its own
    due = [n for n in range(1, 7) if found.private_evaluation.due(n, 6)]
    assert due == [6]


@pytest.mark.parametrize(
    "changes, said",
    [
        (("privacy.evaluation_every=3",), "a multiple of server.evaluate_every, which is 2"),
        (("data.validation=0",), "data.validation above 0"),
        (("privacy.evaluation_noise=0",), "greater than 0"),
    ],
)
def test_a_private_evaluation_that_cannot_be_is_refused(made, changes, said):
    with pytest.raises(ConfigError, match=said):
        made(*PRIVATE, *changes)


TREE = ("federation.levels=[0]", "federation.pool_clients=false", "server.cohort=2")


@pytest.mark.slow
def test_in_a_tree_each_client_counts_with_the_model_of_its_own_place(made):
    found = made(*PRIVATE, *TREE, "privacy.evaluation_tokens=20")
    state = found.round.init(found.start())
    told = found.private_evaluation.figures(state)
    flat = made("server.evaluate_rows=0")  # and all places begin alike
    exact = flat.evaluation.watch(flat.round.init(flat.start()))
    assert told["perplexity"] == pytest.approx(exact["perplexity"], rel=0.02)
    places = [node for node in found.round.config.topology.names if node in found.plans]
    assert len(places) > 1


def test_noisy_figures_beside_noise_at_leaves_are_refused(made):
    leaves = ("federation.levels=[0]", "federation.clip_norm=1", "federation.noise_multiplier=1")
    with pytest.raises(ConfigError, match=r"without one nothing is clipped|not a whole leaf"):
        made(*leaves, "privacy.evaluation_noise=1")


@pytest.mark.slow
def test_noise_found_from_a_target_leaves_room_for_figures_and_vocabulary(made):
    settings = [s for s in PRIVATE if "noise" not in s]
    alone = made(*settings, "privacy.epsilon=4").plan.noise_multiplier
    seen = made(*settings, "privacy.epsilon=4", "privacy.evaluation_noise=2.0").plan
    assert seen.noise_multiplier > alone
    events = [account.event_of(seen, seen.rounds), gaussian_event(2.0)]
    assert 3.99 < compose(events, seen.delta)[0] <= 4
    counted = made(*settings, "privacy.epsilon=30", "data.vocabulary_epsilon=20.0")
    events = [account.event_of(counted.plan, counted.plan.rounds)]
    assert compose(events, counted.plan.delta)[0] < 25
    line = Ledger(counted.store.ledgers[0]).entries()[1]
    events.append(gaussian_event(line["noise_multiplier"]))
    assert 29.9 < compose(events, counted.plan.delta, line["delta"])[0] <= 30


def test_a_private_evaluation_without_a_plan_is_refused(made):
    with pytest.raises(ConfigError, match="without one nothing is clipped"):
        made("privacy.evaluation_noise=1")
    assert made().private_evaluation is None


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "changes, said",
    [
        (
            (
                "privacy.mechanism=gaussian",
                "privacy.noise_multiplier=1",
                "privacy.delta=0.01",
                "server.sampling=poisson",
            ),
            "'synchronous' under a privacy plan: which round an answer falls into",
        ),
        (
            (
                "privacy.mechanism=blt",
                "privacy.noise_multiplier=1",
                "privacy.delta=0.01",
                "server.sampling=spaced",
                "privacy.min_separation=2",
            ),
            "'synchronous' under a privacy plan",
        ),
        (("server.sampling=poisson",), "'fixed' with server.mode"),
        (("server.buffer=5",), "at most server.cohort = 4"),
        (("client.method=scaffold",), "remember nothing"),
        (("wire.upload=uniform-8", "wire.error_feedback=true"), "remember nothing"),
        (("wire.trainable=low-rank",), "a late answer would change another part"),
        (("client.delay=pareto", "client.delay_shape=1"), "above 1.0 with client.delay"),
    ],
)
def test_buffered_rounds_that_cannot_be_are_refused(made, changes, said):
    with pytest.raises(ConfigError, match=said):
        made("server.mode=buffered", *changes)


@pytest.mark.parametrize("change", ["server.buffer=2", "client.delay=pareto"])
def test_settings_of_buffered_rounds_are_refused_without_them(made, change):
    with pytest.raises(ConfigError, match=r"none without server\.mode"):
        made(change)
