"""The Python API trains what the command line trains, and keeps to the same laws."""

import equinox as eqx
import jax
import jax.random as jr
import optax
import pytest

import fedlm
from fedlm.record.directory import LOCK
from fedlm.record.journal import read

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
    trained = fed.finish().evaluate("test")
    assert trained["perplexity"] == pytest.approx(figures[-1], rel=0.5)
    assert fedlm.load_run(tmp_path / "run", model=model).evaluate("test") == trained
    with pytest.raises(fedlm.ConfigError, match=r"model = None.*equinox module"):
        fedlm.load_run(tmp_path / "run")


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
