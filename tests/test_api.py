"""The Python API trains what the command line trains, and keeps to the same laws."""

import shutil
from dataclasses import replace

import equinox as eqx
import jax
import jax.random as jr
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file

import fedlm
from fedlm.corpus.concat import JoinedStore
from fedlm.record.directory import LOCK
from fedlm.record.journal import read
from fedlm.training.rounds import RoundRecord

TEXT = [(f"c{n}", "the cat sat on the mat\nthe dog ran\n" * 3, ("north",)) for n in range(10)]
SIZES = {"embedding_size": 4, "hidden_size": 6}
PLAN = {"mechanism": "gaussian", "clip_norm": 0.5, "noise_multiplier": 1.0, "delta": 1e-3}


@pytest.fixture(scope="module")
def store():
    return fedlm.prepare(TEXT, vocabulary=20)


def federation(store, rounds=4, model=None, **more):
    spec = model or fedlm.models.cifg(store, **SIZES)
    small = {"client__batch_size": 4, "data__sequence_length": 8}  # quick to compile
    return fedlm.Federation(store, spec, cohort=3, rounds=rounds, **small, **more)


def sha(run):
    return run.summary["params_sha256"]


def test_a_loop_that_was_left_goes_on_where_it_was(store):
    whole, halved = federation(store), federation(store)
    assert [told.number for told in whole.rounds()] == [1, 2, 3, 4]
    for told in halved.rounds():
        if told.number == 2:
            break
    assert not (halved.run.record.path / LOCK).exists(), "another process may go on"
    with pytest.raises(fedlm.ConfigError, match="rounds are missing"):
        halved.finish()
    assert [told.number for told in halved.rounds(1)] == [3]
    assert [told.number for told in halved.rounds()] == [4]
    assert sha(halved.finish()) == sha(whole.finish())


def test_a_finished_run_answers(store, tmp_path):
    fed = federation(store, rounds=2, out=tmp_path / "run")
    for told in fed.rounds():
        assert told.perplexity > 1 and told.epsilon is None
    run = fed.finish()
    assert run.evaluate("test")["perplexity"] == pytest.approx(run.summary["perplexity"])
    assert len(run.predict("the cat", top=2)) == 2
    assert run.report().is_file() and run.export("safetensors", tmp_path / "out").is_file()
    again = fedlm.load_run(tmp_path / "run")
    assert again.summary == run.summary
    assert again.predict("the cat", top=2) == run.predict("the cat", top=2)
    with pytest.raises(fedlm.ConfigError, match=r"model = .*nothing"):
        fedlm.load_run(tmp_path / "run", model=Bigram(jr.normal(jr.key(0), (2, 2))))


def test_a_recipe_from_python_is_that_of_the_command_line(tmp_path, tiny_recipe, trained):
    run = fedlm.train(tiny_recipe, tmp_path / "run", changes=["run.trackers=[]"])
    assert sha(run) == sha(fedlm.load_run(tmp_path / "run"))
    weights = (trained / "runs/tiny/model.safetensors").read_bytes()
    assert (tmp_path / "run/model.safetensors").read_bytes() == weights


class Bigram(eqx.Module):
    """The smallest model: each token's own row of logits."""

    table: jax.Array
    scale: float = 1.0  # not an array: it stays as it is

    def __call__(self, tokens):
        return self.scale * self.table[tokens]


def test_a_module_of_ones_own_learns(store, tmp_path):
    size = store.vocabulary
    model = Bigram(0.1 * jr.normal(jr.key(0), (size, size)))
    method = fedlm.fedavg(client=optax.sgd(2.0), server=optax.sgd(1.0))
    fed = federation(store, rounds=6, model=model, method=method, out=tmp_path / "run")
    figures = [told.perplexity for told in fed.rounds()]
    assert figures[-1] < 0.8 * figures[0]
    run = fed.finish()
    trained = run.evaluate("test")
    assert trained["perplexity"] == pytest.approx(figures[-1], rel=0.5)
    long = "the cat sat on the mat the dog ran on the mat"  # longer than a row
    for text in ("", "the cat", long):
        words = run.predict(text, top=2)
        assert words[0]["probability"] > words[1]["probability"] > 0
    assert run.predict("on the", top=1) == run.predict("dog the", top=1), "a bigram looks back once"
    assert fedlm.load_run(tmp_path / "run", model=model).evaluate("test") == trained
    with pytest.raises(fedlm.ConfigError, match=r"model = None.*equinox module"):
        fedlm.load_run(tmp_path / "run")


@pytest.mark.slow
def test_a_module_of_ones_own_is_exported_to_onnx(store, tmp_path):
    pytest.importorskip("jax2onnx")
    runtime = pytest.importorskip("onnxruntime")
    model = Bigram(0.1 * jr.normal(jr.key(0), (store.vocabulary, store.vocabulary)))
    run = outcome(store, model=model)
    file = run.export("onnx", tmp_path / "out")
    rows = np.arange(16, dtype=np.int32).reshape(2, 8) % store.vocabulary
    (logits,) = runtime.InferenceSession(file).run(None, {"tokens": rows})
    weights = load_file(run.path / "model.safetensors")["table"]
    assert np.allclose(logits, weights[rows], atol=1e-6)


def test_a_private_federation_wants_its_directory(store):
    with pytest.raises(fedlm.ConfigError, match=r"out = None.*on record before"):
        federation(store, privacy=PLAN, server__sampling="poisson")


@pytest.mark.slow
def test_a_private_federation_tells_no_loss(store, tmp_path):
    out = tmp_path / "private"
    fed = federation(store, rounds=2, privacy=PLAN, server__sampling="poisson", out=out)
    for told in fed.rounds():
        lines = [e for e in read(out / "journal.jsonl") if e["kind"] == "round"]
        assert lines[-1]["round"] + 1 == told.number, "on record before it is yielded"
        assert told.loss is None and told.epsilon > 0
    run = fed.finish()
    assert fedlm.epsilon(run.path).epsilon == run.summary["epsilon"] == told.epsilon


def test_what_prepare_would_not_use_is_refused():
    for name, value in {"sequence_length": 5, "groups": ("north",), "store": "elsewhere"}.items():
        with pytest.raises(
            fedlm.ConfigError, match=rf"^{name} = .*: expected nothing.*data__{name}"
        ):
            fedlm.prepare(TEXT, **{name: value})
    for name in ("user_field", "text_field", "groups_field"):
        with pytest.raises(fedlm.ConfigError, match=rf"^{name} = 'x': expected nothing for pairs"):
            fedlm.prepare(TEXT, **{name: "x"})
    with pytest.raises(fedlm.ConfigError, match="Did you mean 'vocabulary'"):
        fedlm.prepare(TEXT, vocabulry=20)


@pytest.mark.parametrize(
    "pair", ["abc", ("ann",), ("ann", 3), ("ann", "text", "north"), ("ann", "text", (), 1)]
)
def test_text_that_is_no_pair_is_refused(pair):
    with pytest.raises(fedlm.CorpusError, match=r"^item 1 of the text is .*: expected \(client"):
        fedlm.prepare([("bob", "the dog ran"), pair])


def test_rounds_are_counted_from_one(store):
    with pytest.raises(fedlm.ConfigError, match=r"^count = 0: expected at least 1"):
        list(federation(store).rounds(0))


def test_changes_are_of_a_recipe_file(store, tmp_path):
    with pytest.raises(fedlm.ConfigError, match=r"^changes = .*: expected nothing"):
        fedlm.train(tables_of(store), tmp_path / "run", changes=["server.rounds=1"])


# ---- one composition ---------------------------------------------------------------------------

USED = {  # settings of tables that Federation has no argument for, each with a value of its own
    "client__learning_rate": 0.1,
    "client__optimizer": "adam",
    "client__gradient_clip_norm": 0.01,
    "client__weight": "uniform",
    "client__proximal": 1.0,
    "client__method": "mimelite",
    "server__optimizer": "fedavgm",
    "server__learning_rate": 0.3,
    "server__schedule": "linear",
    "server__beta2": 0.5,
    "wire__trainable": "low-rank",
    "federation__levels": (0,),
}


def tables_of(store, **settings):
    """Return the tables of the recipe that `federation` composes."""
    tables = {
        "data": {"store": str(store.path), "sequence_length": 8},
        "model": {"name": "cifg", **SIZES},
        "client": {"batch_size": 4},
        "server": {"cohort": 3, "rounds": 2},
        "wire": {},
        "run": {"baselines": False, "trackers": ()},
    }
    for name, value in settings.items():
        table, key = name.split("__")
        tables.setdefault(table, {})[key] = value
    return tables


def outcome(store, **settings):
    fed = federation(store, rounds=2, **settings)
    for _ in fed.rounds():
        pass
    return fed.finish()


@pytest.mark.parametrize("settings", [{}, {n: USED[n] for n in ("client__optimizer",)}])
def test_a_federation_is_the_recipe_of_the_same_tables(store, tmp_path, settings):
    run = fedlm.train(tables_of(store, **settings), tmp_path / "run")
    made = outcome(store, out=tmp_path / "federation", **settings)
    assert sha(made) == sha(run)
    assert fedlm.load_run(tmp_path / "federation").summary == made.summary
    again = fedlm.train(tmp_path / "federation/recipe.toml", tmp_path / "again")
    assert sha(again) == sha(made), "the recipe that it saved repeats the run"


@pytest.mark.slow
@pytest.mark.parametrize("name", USED)
def test_every_setting_is_used(store, tmp_path, name):
    settings = {name: USED[name], **({"wire__rank": 1} if name == "wire__trainable" else {})}
    made = sha(outcome(store, **settings))
    assert made != sha(outcome(store))
    assert made == sha(fedlm.train(tables_of(store, **settings), tmp_path / "run"))


METHOD = fedlm.fedavg(client=optax.sgd(0.5), server=optax.adam(0.01))


def test_what_a_method_decides_is_not_given_twice(store):
    decided = [name for name in USED if not name.startswith("wire")]
    further = ["client__momentum", "client__schedule", "server__adam_epsilon", "server__momentum"]
    for name in decided + further:
        with pytest.raises(fedlm.ConfigError, match=rf"^{name} = .*: expected .*method=.*\.$"):
            federation(store, method=METHOD, **{name: USED.get(name, 0.5)})


def test_optimisers_that_a_recipe_can_name_train_what_it_trains(store):
    own = fedlm.fedavg(client=optax.sgd(0.5), server=optax.adam(0.01, b2=0.99, eps=1e-5))
    given, named = outcome(store, method=own), outcome(store)
    assert sha(given) == sha(named)
    assert given.run.custom == {"method": "Averaging"} and not named.run.custom


def test_a_method_weighs_clients_as_it_says(store):
    method = fedlm.fedavg(optax.sgd(0.5), optax.sgd(1.0), weight="tokens", proximal=0.1)
    client = federation(store, method=method).run.recipe.client
    assert (client.weight, client.proximal) == ("tokens", 0.1), "the header tells what was done"
    with pytest.raises(fedlm.ConfigError, match=r"client\.weight = 'token'"):
        federation(store, method=fedlm.fedavg(optax.sgd(0.5), optax.sgd(1.0), weight="token"))


def test_error_feedback_reaches_optimisers_of_ones_own(store):
    lossy = {"method": METHOD, "upload": "uniform-4"}
    fed = federation(store, wire__error_feedback=True, **lossy)
    assert fed.run.algorithm.feedback and fed.run.algorithm.remembers
    refused = {"wire__error_feedback": True, "server__mode": "buffered"}
    with pytest.raises(fedlm.ConfigError, match=r"wire\.error_feedback = True.*remembers"):
        federation(store, **lossy, **refused)


def test_a_setting_with_an_argument_of_its_own_is_refused(store):
    for name, value in {
        "server__cohort": 5,
        "server__rounds": 5,
        "run__seed": 1,
        "wire__upload": "uniform-8",
        "data__store": "elsewhere",
        "data__source": "sotu",
        "model__name": "lstm",
        "model__hidden_size": 8,
        "tune__points": 3,
    }.items():
        with pytest.raises(fedlm.ConfigError, match=rf"^{name} = .*: expected nothing.*\.$"):
            federation(store, **{name: value})


def test_models_and_methods_are_those_of_fedlm_or_optax_and_equinox(store):
    with pytest.raises(fedlm.ConfigError, match=r"^method = 'scaffold': .*client__method"):
        federation(store, method="scaffold")
    with pytest.raises(fedlm.ConfigError, match=r"^hiden_size = 3: .*Did you mean 'hidden_size'"):
        fedlm.models.cifg(store, hiden_size=3)
    with pytest.raises(
        fedlm.ConfigError, match=r"model = 'cifg': expected a model of fedlm\.models"
    ):
        federation(store, model="cifg")


def test_several_stores_read_as_one_are_all_trained_on(store, tmp_path):
    paths = [shutil.copytree(store.path, tmp_path / name) for name in ("east", "west")]
    run = federation(JoinedStore(paths)).run
    assert run.population.size == 2 * len(store.training_clients)
    assert run.recipe.data.stores == tuple(map(str, paths)) and run.recipe.data.store is None


def test_a_federation_begins_with_the_model_of_another_run(store, tmp_path):
    first = outcome(store, out=tmp_path / "run")
    again = federation(store, model__init_from=str(first.path)).run
    before = load_file(first.path / "model.safetensors")
    assert np.array_equal(again.start().embedding, before["embedding"])


def test_settings_are_written_as_table_and_key(store):
    with pytest.raises(fedlm.ConfigError, match=r"learning_rate = 0\.1: expected .*table__key"):
        federation(store, learning_rate=0.1)
    with pytest.raises(fedlm.ConfigError, match=r"Did you mean 'learning_rate'"):
        federation(store, client__lerning_rate=0.1)
    with pytest.raises(fedlm.ConfigError, match=r"data\.lowercase = False: the store"):
        federation(store, data__lowercase=False)


def test_a_module_has_no_settings_of_a_named_model(store):
    model = Bigram(jr.normal(jr.key(0), (store.vocabulary, store.vocabulary)))
    for name, value in {"model__init_from": "x", "wire__trainable": "lora"}.items():
        with pytest.raises(fedlm.ConfigError, match=rf"^{name} = .*: expected .*module.*\.$"):
            federation(store, model=model, **{name: value})


def test_a_module_learns_by_the_settings_of_a_recipe(store):
    model = Bigram(0.1 * jr.normal(jr.key(0), (store.vocabulary, store.vocabulary)))
    plain, faster = (outcome(store, model=model, **more) for more in ({}, {"client__epochs": 3}))
    assert sha(plain) != sha(faster) != sha(outcome(store, model=model, server__optimizer="fedavg"))
    assert plain.run.custom == {"model": "ModuleSpec"}


CANARIES = {**PLAN, "canaries": 5, "seed": 1}


@pytest.mark.parametrize("method", [None, METHOD])
def test_canaries_are_drawn_and_train_nothing(store, tmp_path, method):
    more = {"server__sampling": "poisson", "method": method, "out": tmp_path / "run"}
    fed = federation(store, rounds=4, privacy=CANARIES, **more)
    assert fed.run.algorithm.canaries == 5
    assert fed.run.algorithm.sampling.population == fed.run.population.size + 5
    assert [told.number for told in fed.rounds()] == [1, 2, 3, 4]


def test_a_plan_made_before_is_the_plan_of_the_federation(store, tmp_path):
    clients = fedlm.Sampling(law="poisson", population=len(store.training_clients), cohort=3)
    plan = fedlm.PrivacyPlan(sampling=clients, rounds=4, **PLAN)
    fed = federation(store, privacy=plan, out=tmp_path / "run")
    assert fed.run.plan == plan
    by_settings = federation(store, privacy=PLAN, server__sampling="poisson", out=tmp_path / "run")
    assert by_settings.run.plan == plan
    for name, changed in {
        "rounds": replace(plan, rounds=5),
        "cohort": replace(plan, sampling=replace(clients, cohort=4)),
        "population": replace(plan, sampling=replace(clients, population=1000)),
        "unit": replace(plan, unit="leaf"),
    }.items():
        with pytest.raises(fedlm.ConfigError, match=rf"^privacy\.{name} = .*: expected .*\.$"):
            federation(store, privacy=changed, out=tmp_path / "run")
    with pytest.raises(fedlm.ConfigError, match=r"server__sampling = .*the argument privacy"):
        federation(store, privacy=plan, server__sampling="fixed", out=tmp_path / "run")
    with pytest.raises(fedlm.ConfigError, match=r"^privacy = 'gaussian': expected .*\.$"):
        federation(store, privacy="gaussian", out=tmp_path / "run")


def test_a_directory_that_was_refused_is_not_gone_on_with(store, tmp_path):
    """The same cell of a notebook, run again, went on with somebody else's run."""
    first = federation(store, out=tmp_path / "run")
    list(first.rounds(2))
    again = federation(store, out=tmp_path / "run")
    for _ in range(2):
        with pytest.raises(fedlm.FedlmError, match="--resume"):
            list(again.rounds(1))
    assert [told.number for told in again.rounds(1, resume=True)] == [3]
    assert [told.number for told in again.rounds(1)] == [4]


def test_a_state_is_saved_after_every_round(store):
    """A loop that was left began anew, for ever."""
    with pytest.raises(fedlm.ConfigError, match="run__checkpoint_every = 10"):
        federation(store, run__checkpoint_every=10)


def test_a_run_of_ones_own_method_goes_on_only_where_it_is_known(store, tmp_path):
    """Its recipe cannot name the optimisers: `fedlm train --resume` took those of the recipe."""
    method = fedlm.fedavg(client=optax.sgd(0.5), server=optax.adam(0.3))
    list(federation(store, out=tmp_path / "run", method=method).rounds(2))
    with pytest.raises(fedlm.FedlmError, match="other parts than a recipe can name"):
        fedlm.train(tmp_path / "run" / "recipe.toml", tmp_path / "run", resume=True)


def test_nobody_has_held_out_text_and_noisy_figures_are_none(tmp_path):
    """Whether anybody has is one client more or less: it ended a private run in a traceback."""
    short = fedlm.prepare([(f"c{n}", "hi\n") for n in range(8)], out=tmp_path / "s")
    privacy = fedlm.Privacy(**PLAN, evaluation_noise=1.0)
    more = {"privacy": privacy, "server__sampling": "poisson", "out": tmp_path / "run"}
    run = federation(short, rounds=2, **more).run
    figures = run.private_evaluation.figures(run.round.init(run.start()))
    assert "perplexity" in str(figures)


def test_finishing_too_early_releases_nothing(store, tmp_path, monkeypatch):
    """Killed between ledger and journal, a run was scored, and paid for, as if it were over."""
    privacy = fedlm.Privacy(**PLAN, evaluation_noise=1.0)
    more = {"privacy": privacy, "server__sampling": "poisson", "out": tmp_path / "run"}
    made = federation(store, server__evaluate_every=4, **more)
    record = RoundRecord.record

    def killed(self, told):
        if told["round"] == 1:
            raise KeyboardInterrupt
        return record(self, told)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(RoundRecord, "record", killed)
        list(made.rounds())
    before = (tmp_path / "run" / "ledger.jsonl").read_bytes()
    with pytest.raises(fedlm.ConfigError, match="rounds are missing"):
        federation(store, server__evaluate_every=4, **more).finish()
    assert (tmp_path / "run" / "ledger.jsonl").read_bytes() == before
