"""A module outside of fedlm adds one of each kind by one registry line, and recipes use them."""

import importlib
import json
import re
import sys

import equinox as eqx
import pytest

from fedlm.cohort.delays import DELAYS
from fedlm.cohort.sampling import LAWS
from fedlm.core.keys import key_for
from fedlm.corpus.sources import CORPORA, READERS, Document, read
from fedlm.engine.catalog import ENGINES
from fedlm.local.train import WEIGHTS
from fedlm.methods.catalog import METHODS
from fedlm.methods.optimizers import CLIENT_OPTIMIZERS, SCHEDULES, SERVER_OPTIMIZERS
from fedlm.models.catalog import ARCHITECTURES, NAMED, PUBLISHED, Dimensions, make
from fedlm.models.cells import MEASURES, RECTIFIERS
from fedlm.models.interop import huggingface
from fedlm.models.interop.families import FAMILIES
from fedlm.models.partial import TRAINABLE
from fedlm.personal.ways import WAYS
from fedlm.privacy.catalog import MECHANISMS
from fedlm.publish.formats import FORMATS
from fedlm.recipe.federation import NODE_WEIGHTS
from fedlm.record.trackers import TRACKERS
from fedlm.server.robust import RULES
from fedlm.wire.catalog import CODECS

REGISTRIES = {
    "server.optimizer": SERVER_OPTIMIZERS,
    "server.schedule": SCHEDULES,
    "server.sampling": LAWS,
    "client.optimizer": CLIENT_OPTIMIZERS,
    "client.weight": WEIGHTS,
    "client.method": METHODS,
    "client.delay": DELAYS,
    "federation.weight": NODE_WEIGHTS,
    "model.name": ARCHITECTURES,
    "model.si_measure": MEASURES,
    "model.si_rectifier": RECTIFIERS,
    "privacy.mechanism": MECHANISMS,
    "wire.upload": CODECS,
    "wire.trainable": TRAINABLE,
    "data.source": CORPORA,
    "run.engine": ENGINES,
    "run.trackers": TRACKERS,
    "server.aggregate": RULES,
    "files": READERS,
    "published sizes": PUBLISHED,
    "families": FAMILIES,
    "formats": FORMATS,
    "ways": WAYS,
}
MODULE = r"""
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedlm.cohort.delays import DELAYS, DelayLaw
from fedlm.cohort.sampling import LAWS, Law
from fedlm.corpus.sources import CORPORA, READERS, Document
from fedlm.engine.catalog import ENGINES
from fedlm.engine.loop import LoopEngine
from fedlm.local.train import WEIGHTS
from fedlm.methods import fedavg
from fedlm.methods.catalog import METHODS
from fedlm.methods.method import Method
from fedlm.methods.optimizers import CLIENT_OPTIMIZERS, SCHEDULES, SERVER_OPTIMIZERS
from fedlm.models.catalog import ARCHITECTURES, PUBLISHED, Dimensions, Named, from_cell
from fedlm.models.cells import MEASURES, RECTIFIERS
from fedlm.models.interop.families import FAMILIES
from fedlm.models.partial import TRAINABLE, PartKind, subset
from fedlm.personal.ways import WAYS, federated
from fedlm.privacy.catalog import MECHANISMS
from fedlm.privacy.gaussian import GAUSSIAN
from fedlm.publish.formats import FORMATS
from fedlm.recipe.federation import NODE_WEIGHTS
from fedlm.record.trackers import TRACKERS
from fedlm.server.robust import RULES
from fedlm.wire.catalog import CODECS, Family
from fedlm.wire.dense import dense

SEEN = []  # rounds that the tracker saw


@dataclass(frozen=True)
class Leaky:
    gates: int = 2

    def step(self, z, c):
        forget, new = z
        keep = jax.nn.sigmoid(forget)
        c = keep * c + (1.0 - keep) * jnp.tanh(new)
        return c, c


def half_of_fedavg(options):
    clients, _ = fedavg.build_fedavg(options)
    return clients, fedavg.fedavg_server(optax.sgd(0.5))


def letters():
    for number in range(12):
        yield Document(f"writer-{number}", ("all",), "the cat sat\na dog ran\n" * (number + 3))


def shouted(path):
    yield Document(path.stem, (), path.read_text().upper())


def first_leaf(like, options, key):
    leaves = jax.tree.leaves(like)
    return (subset([number == 0 for number in range(len(leaves))]),)


class Listener:
    def __init__(self, context):
        pass

    def log(self, round, metrics):
        SEEN.append(round)

    def close(self):
        SEEN.append("closed")


class SlowEngine(LoopEngine):
    pass


SERVER_OPTIMIZERS["mine"] = lambda rate, b1, b2, eps: optax.rmsprop(rate, decay=b2, eps=eps)
SCHEDULES["mine"] = lambda rate, rounds, end: optax.exponential_decay(rate, rounds, 0.5)
LAWS["mine"] = Law(lambda sampling, rng, round, history: np.arange(sampling.cohort))
CLIENT_OPTIMIZERS["mine"] = lambda rate, momentum, decay: optax.lion(rate)
WEIGHTS["mine"] = lambda examples, tokens: jnp.sqrt(tokens)
METHODS["mine"] = Method(build=half_of_fedavg, one_change=True)
DELAYS["mine"] = DelayLaw(lambda rng, shape: float(rng.uniform(0.5, 1.5)))
NODE_WEIGHTS["mine"] = lambda tokens: tokens**0.5
ARCHITECTURES["mine"] = from_cell(lambda size: Leaky())
MEASURES["mine"] = lambda x, floor: x / jnp.maximum(jnp.sum(jnp.abs(x), 1, keepdims=True), floor)
RECTIFIERS["mine"] = jnp.abs
PUBLISHED["mine-tiny"] = Named("si-cifg", Dimensions(embedding_size=6, hidden_size=6))
FAMILIES["mine"] = replace(FAMILIES["gpt2"], model="MineForCausalLM")
MECHANISMS["mine"] = replace(GAUSSIAN, clip_moves="never")
CODECS["mine"] = Family(lambda: dense()._replace(name="mine"))
TRAINABLE["mine"] = PartKind(make=first_leaf)
CORPORA["mine"] = letters
ENGINES["mine"] = SlowEngine
TRACKERS["mine"] = Listener
RULES["mine"] = lambda updates, trim: np.quantile(updates, 0.5, axis=0)
READERS[".shout"] = shouted
FORMATS["mine"] = lambda run: {"weights.bin": run.weights.read_bytes()}
WAYS["mine"] = federated
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """The module, imported; the registries are as before when the test ends."""
    before = {name: dict(registry) for name, registry in REGISTRIES.items()}
    (tmp_path / "extensions_of_mine.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("extensions_of_mine")
    del sys.modules["extensions_of_mine"]
    for name, registry in REGISTRIES.items():
        registry.clear()
        registry.update(before[name])


def trained(run_cli, recipe, out, *settings):
    """The summary of a run of two rounds."""
    common = ("server.rounds=2", "run.baselines=false", *settings)
    changes = [part for setting in common for part in ("--set", setting)]
    done = run_cli("train", recipe, *changes, "--out", out, "--json")
    assert done.code == 0, done.stderr
    return done.json


def header(folder):
    with open(folder / "journal.jsonl", encoding="utf-8") as file:
        return json.loads(file.readline())


def test_each_kind_takes_one_line(mine):
    lines = [line for line in MODULE.splitlines() if re.match(r"[A-Z_]+\[", line)]
    assert len(lines) == len(REGISTRIES)
    for registry in REGISTRIES.values():
        assert list(registry)[-1] in ("mine", "mine-tiny", ".shout")
    assert {"mine", "mine-tiny"} <= set(NAMED)


def test_a_recipe_of_new_parts(mine, run_cli, tiny_recipe, tmp_path):
    """A corpus, cell, optimisers, schedule, weight, law, trainable part, codec and tracker."""
    settings = [f"{name}=mine" for name in REGISTRIES if "." in name]
    left_out = ("client.method", "privacy.mechanism", "run.engine", "run.trackers")
    left_out += ("server.aggregate", "client.delay", "federation.weight")
    left_out += ("model.si_measure", "model.si_rectifier")
    settings = [s for s in settings if s.split("=")[0] not in left_out]
    summary = trained(
        run_cli, tiny_recipe, "new", *settings, "run.trackers=['mine']", "server.cohort=2"
    )
    assert summary["rounds"] == 2 and summary["perplexity"] > 0
    assert mine.SEEN == [0, 1, "closed"]
    said = header(tmp_path / "new")["recipe"]
    for setting in settings:
        table, name = setting.removesuffix("=mine").split(".")
        assert said[table][name] == "mine"


def test_a_recipe_with_a_new_method_engine_and_rule(mine, run_cli, tiny_recipe, tmp_path):
    chosen = ("client.method=mine", "run.engine=mine", "server.aggregate=mine")
    summary = trained(run_cli, tiny_recipe, "method", *chosen)
    assert summary["rounds"] == 2
    exported = run_cli("export", "method", "--format", "mine", "--out", "exported", "--json")
    assert exported.code == 0, exported.stderr
    weights = (tmp_path / "method" / "model.safetensors").read_bytes()
    assert (tmp_path / "exported" / "weights.bin").read_bytes() == weights
    refused = run_cli(
        "train", tiny_recipe, "--set", "client.method=mine", "--set", "client.proximal=1"
    )
    assert "client.proximal = 1.0: expected 0 with 'mine'" in refused.stderr


def test_a_recipe_with_a_new_size_and_new_parts_of_a_cell(mine, run_cli, tiny_recipe, tmp_path):
    tiny_recipe.write_text(re.sub(r"(?m)^(embedding|hidden)_size.*", "", tiny_recipe.read_text()))
    chosen = ("model.name=mine-tiny", "model.si_measure=mine", "model.si_rectifier=mine")
    late = ("client.delay=mine", "server.mode=buffered", "server.buffer=2")
    assert trained(run_cli, tiny_recipe, "sizes", *chosen, *late)["rounds"] == 2
    model = header(tmp_path / "sizes")["recipe"]["model"]
    assert (model["hidden_size"], model["si_measure"]) == (6, "mine")


def test_a_tree_with_a_new_weight_of_nodes(mine, run_cli, tiny_recipe):
    tree = ("federation.levels=[0]", "federation.personal_layers=none")
    found = {
        weight: trained(run_cli, tiny_recipe, weight, *tree, f"federation.weight={weight}")
        for weight in ("mine", "tokens")
    }
    assert found["mine"]["params_sha256"] != found["tokens"]["params_sha256"]


def test_a_folder_of_a_new_family(mine, tmp_path):
    size = Dimensions(vocab=9, embedding_size=4, hidden_size=8, layers=1, heads=2, length=5)
    model = make("gpt2", size, key_for(0, "init"))
    config = huggingface.config_of("mine", size, {})
    (tmp_path / huggingface.CONFIG).write_text(json.dumps(config))
    (tmp_path / huggingface.WEIGHTS).write_bytes(huggingface.weights_of("mine", size, model))
    assert huggingface.read_base(tmp_path).architecture == "gpt2"
    assert eqx.tree_equal(huggingface.load(tmp_path, size), model)


@pytest.mark.slow
def test_a_recipe_with_a_new_mechanism(mine, run_cli, tiny_recipe):
    plan = ("server.sampling=poisson", "privacy.noise_multiplier=1", "privacy.seed=5")
    new = trained(run_cli, tiny_recipe, "new", *plan, "privacy.mechanism=mine")
    old = trained(run_cli, tiny_recipe, "old", *plan, "privacy.mechanism=gaussian")
    for name in ("params_sha256", "epsilon"):
        assert new[name] == old[name] is not None
    assert run_cli("privacy", "epsilon", "new", "--json").json["mechanism"] == "mine"


def test_a_file_with_a_new_ending(mine, tmp_path):
    (tmp_path / "note.shout").write_text("hello")
    assert list(read(tmp_path / "note.shout")) == [Document("note", (), "HELLO")]
