"""Runs that train adapters: the frozen model is held once, and only B is trained and sent."""

import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from fedlm import lineage
from fedlm.core import tree
from fedlm.core.errors import ConfigError, RecordError
from fedlm.deploy.local import check_deployable
from fedlm.federation.round import server_half, start_of_round
from fedlm.inference import load_params
from fedlm.models.adapters import merged
from fedlm.recipe.build import build
from fedlm.recipe.federation import FederationTable
from fedlm.recipe.settings import load
from fedlm.record.directory import adapter_beside
from fedlm.training import Watcher, start_sha256, train

LORA = (
    "model.name=llama", "model.layers=2", "model.heads=2", "model.embedding_size=8",
    "wire.trainable=lora", "wire.rank=2", "wire.last_blocks=1", "server.rounds=2",
    "run.baselines=false", "run.prompts=[]",
)  # fmt: skip
PRIVATE = (
    "privacy.mechanism=blt", "privacy.noise_multiplier=0.5", "privacy.min_separation=1",
    "server.sampling=spaced", "client.weight=uniform", "privacy.seed=3",
)  # fmt: skip
TRAINED = {f"blocks.1.attention.{part}.lora_b" for part in ("query", "value")}


@pytest.fixture
def made(tiny_recipe, tmp_path):
    """`made("table.key=value", ...)`: a run of the tiny recipe that trains adapters."""
    return lambda *changes, out="run": build(
        load(tiny_recipe, (*LORA, *changes)), tmp_path / "stores", out=tmp_path / out
    )


def test_only_b_is_trained_kept_and_sent(made):
    run = made()
    summary = train(run)
    path = run.record.path
    for checkpoint in sorted((path / "checkpoints").iterdir()):
        held = load_file(checkpoint)
        assert {n.removeprefix("params.") for n in held if n.startswith("params.")} == TRAINED
        assert sum(x.size for x in held.values()) < run.model.parameters
    start, weights = run.start(), load_file(path / "model.safetensors")
    before = tree.named_leaves(merged(start))
    changed = {name for name in before if not np.array_equal(before[name], weights[name])}
    assert changed == {name.replace("lora_b", "weight") for name in TRAINED}
    alone = load_file(adapter_beside(run.record.weights))
    for name, x in tree.named_leaves(start).items():
        assert "lora_" not in name or np.array_equal(alone[name], x) == (name not in TRAINED)
    sent = sum(tree.named_leaves(start)[name].nbytes for name in TRAINED)
    members = 2 * run.recipe.server.cohort
    assert members * sent <= summary["upload_bytes"] < members * (sent + 300)
    whole = load_params(run.recipe.model, run.store.vocabulary, run.record.weights)
    found = run.evaluation.of_models({"": whole}, run.evaluation.splits()[0])
    assert found["perplexity"] == pytest.approx(summary["perplexity"], rel=1e-5)
    # Or a private run from this model would call it public.
    child = made(f"model.init_from={path}", out="child")
    assert start_sha256(child) in lineage.read_lineage(path / lineage.FILE).models


@pytest.mark.slow
def test_a_run_keeps_the_frozen_part_in_memory_once(made):
    run = made()
    held, start = tree.named_leaves(run.algorithm.base), tree.named_leaves(run.start())
    assert start.keys() - held.keys() == TRAINED
    assert all(held[name] is start[name] for name in held)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param((), id="plain"),
        pytest.param(("wire.upload=uniform-8",), id="codec"),
        pytest.param(PRIVATE, id="private"),
        pytest.param(("model.base_dtype=bfloat16",), id="bfloat16"),
    ],
)
@pytest.mark.slow
def test_both_engines_and_a_resumed_run_end_alike(made, changes):
    def stopped():
        seen = []
        return Watcher(round=seen.append, stop=lambda: bool(seen))

    whole = train(made(*changes, out="whole"))
    part = made(*changes, out="part")
    assert train(part, watcher=stopped()) is None
    resumed = train(made(*changes, out="part"), resume=True)
    assert resumed["params_sha256"] == whole["params_sha256"]
    if changes == PRIVATE:
        return  # the noise follows from the bits of the sum, in which engines differ
    looped = made(*changes, "run.engine=loop", out="loop")
    train(looped)
    a, b = (load_file(adapter_beside(made(out=out).record.weights)) for out in ("whole", "loop"))
    for name in a:
        np.testing.assert_allclose(a[name], b[name], rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_the_noise_is_on_b_alone(made):
    run = made(*PRIVATE, "server.rounds=1")
    train(run)
    lines = (run.record.path / "journal.jsonl").read_text().splitlines()
    told = json.loads(lines[1])
    size = sum(x.size for x in jax.tree.leaves(run.round.init(run.start()).params))
    assert told["noise_to_signal"] == pytest.approx(run.plan.noise_to_signal(size))
    assert size == 2 * 8 * 2


@pytest.mark.slow
def test_another_base_does_not_go_on(made, tmp_path):
    def stopped():
        return Watcher(stop=lambda: True)

    train(made("wire.trainable=all", "server.rounds=1", out="first"))
    train(made("wire.trainable=all", "server.rounds=1", "run.seed=5", out="other"))
    weights = tmp_path / "first" / "model.safetensors"
    begun = f"model.init_from={weights}"
    assert train(made(begun), watcher=stopped()) is None
    weights.write_bytes((tmp_path / "other" / "model.safetensors").read_bytes())
    with pytest.raises(RecordError, match="checkpoints hold the trained part alone"):
        train(made(begun), resume=True)


def test_settings_that_need_adapters_or_forbid_them(made):
    with pytest.raises(ConfigError, match=r"model\.base_dtype = 'bfloat16': expected 'float32'"):
        made("wire.trainable=all", "model.base_dtype=bfloat16")
    check_deployable(made().recipe)
    check_deployable(made().recipe.model_copy(update={"federation": FederationTable(levels=(0,))}))
    with pytest.raises(ConfigError, match=r"wire\.trainable_fraction"):
        made("wire.trainable_fraction=0.5")


@pytest.mark.slow
def test_nodes_of_a_tree_train_adapters(tiny_recipe, tmp_path):
    tiny_recipe.write_text(
        tiny_recipe.read_text() + "\n[federation]\npool_clients = false\nlevels = [0]\n"
    )
    run = build(load(tiny_recipe, LORA), tmp_path / "stores", out=tmp_path / "run")
    assert train(run)
    before = tree.named_leaves(merged(run.start()))
    for file in (run.record.path / "nodes").glob("*[!r].safetensors"):
        after = load_file(file)
        if "lora_a" in next(iter(after)):
            continue
        changed = {name for name in before if not np.array_equal(before[name], after[name])}
        assert changed <= {name.replace("lora_b", "weight") for name in TRAINED}


# ---- both factors ------------------------------------------------------------------------------

BOTH = (
    "wire.trainable=lora-both", "server.optimizer=fedavg", "server.learning_rate=1.0",
    "client.epochs=2",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["mesh", "loop"])
def test_the_mean_of_both_factors_is_exact(made, engine):
    """After a round the model is the mean of the members' merged models, and no other mean is."""
    run = made(*BOTH, f"run.engine={engine}")
    before, members = run.round.init(run.start()), np.arange(4)
    for number in range(2):  # in the second round B does not begin from zero
        start = start_of_round(run.algorithm, before, members)
        gathered = run.engine.total(start, run.engine.prepare(number, members))
        after = server_half(run.algorithm, before, gathered.total, members)
        arrived = list(run.engine.updates(start, run.engine.prepare(number, members)))
        whole = run.round.models(before)[""].blocks[1].attention.value
        weights = np.array([float(one.update.weight) for one in arrived])
        products = []
        for one in arrived:
            d = one.update.delta.blocks[1].attention.value
            moved = (whole.lora_b + d.lora_b) @ (whole.lora_a + d.lora_a)
            products.append(whole.weight + whole.scale * moved)
        wanted = np.tensordot(weights / weights.sum(), np.array(products), 1)
        found = merged(run.round.models(after)[""]).blocks[1].attention.value.weight
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
        naive = run.round.models(after)[""].blocks[1].attention.value
        lost = whole.weight + naive.scale * naive.lora_b @ naive.lora_a - wanted
        assert np.abs(lost).max() > 1e-5, "without the residual the mean is not exact"
        before = after


def test_both_factors_are_refused_where_they_are_not_exact(made):
    for changes, words in (
        ((*BOTH, *PRIVATE), "another part under a privacy plan"),
        ((*BOTH, "server.optimizer=fedadam"), r"'fedavg' with server\.learning_rate = 1"),
        ((*BOTH, "wire.error_feedback=true"), r"wire\.error_feedback"),
        ((*BOTH, "model.base_dtype=bfloat16"), r"wire\.trainable"),
    ):
        with pytest.raises(ConfigError, match=words):
            made(*changes)
    with pytest.raises(ConfigError, match="'lora' over a network"):
        check_deployable(made(*BOTH).recipe)


@pytest.mark.slow
def test_a_run_of_both_factors_ends_with_a_merged_model_alone(made):
    run = made(*BOTH)
    summary = train(run)
    assert summary["perplexity"] < summary["start_perplexity"]
    assert not adapter_beside(run.record.weights).exists()
    sent = 4 * sum((8 + 8) * 2 for _ in TRAINED)  # A and B of rank 2, two layers of 8 by 8
    members = 2 * run.recipe.server.cohort
    assert members * sent <= summary["upload_bytes"] < members * (sent + 400)
    assert summary["download_bytes"] > 2 * summary["upload_bytes"] / 2


# ---- asked, and as personal layers ---------------------------------------------------------------


@pytest.mark.slow
def test_such_a_run_is_asked_and_scored_by_commands(tiny_recipe, run_cli):
    settings = [part for change in LORA for part in ("--set", change)]
    done = run_cli("train", str(tiny_recipe), *settings, "--out", "run", "--json")
    summary = json.loads(done.stdout)
    found = json.loads(run_cli("evaluate", "run", "--json").stdout)
    assert found["perplexity"] == pytest.approx(summary["perplexity"], rel=1e-5)
    said = json.loads(run_cli("predict", "run", "the cat", "--length", "5", "--json").stdout)
    assert len(said["next"]) == 5 and said["continuation"]


@pytest.mark.slow
def test_adapters_are_personal_layers_of_a_tree(tiny_recipe, tmp_path):
    tiny_recipe.write_text(
        tiny_recipe.read_text()
        + "\n[federation]\npool_clients = false\nlevels = [0]\ntemperature = 0.0\n"
        + "personal_layers = '*.lora_b'\n"
    )
    changes = (*LORA, "client.max_steps=2")
    run = build(load(tiny_recipe, changes), tmp_path / "stores", out=tmp_path / "run")
    assert train(run)
    root, *others = (load_file(run.record.weights_of(name)) for name in run.round.names)
    changed = {n for n in root for other in others if not np.array_equal(root[n], other[n])}
    assert changed == {name.replace("lora_b", "weight") for name in TRAINED}
