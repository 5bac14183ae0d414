"""Everybody gets a model: the shared one and its own, as runs that the usual commands take."""

from dataclasses import replace

import numpy as np
import pytest

import fedlm
from fedlm.core import tree
from fedlm.deploy import delivery
from fedlm.deploy.delivery import deliver, keep_models
from fedlm.deploy.node_worker import Worker
from fedlm.deploy.policy import Policy, Refusal
from fedlm.engine.counters import Counters
from fedlm.engine.evaluate_messages import EVALUATE_REQUEST, read_evaluate_request
from fedlm.evaluate.held_out import Ask
from fedlm.inference import load_params
from fedlm.training import train
from tests.conftest import call
from tests.deploy.local import LocalTransport
from tests.deploy.test_evaluation import (  # noqa: F401
    TREE,
    folder,
    networked,
    parts,
    relayed,
    simulated,
    store,
    towns,
)
from tests.deploy.test_places import rounds

RUN = "ab" * 16


@pytest.fixture(scope="module")
def finished(folder, towns, tmp_path_factory):  # noqa: F811
    """A tree over nodes that was trained, with the folder of each node's models."""
    kits = tmp_path_factory.mktemp("kits")
    nodes = {
        town: Worker(store, Policy(), models=kits / town / "models", name=town)
        for town, store in towns.items()  # noqa: F811
    }
    (folder / "nowhere" / "held_out.json").unlink(missing_ok=True)
    run = networked(folder, nodes, "server.rounds=1", table=TREE, run_id=RUN)
    (folder / "nowhere" / "held_out.json").unlink()  # or the folder is not free
    summary = train(run)
    assert summary["nodes"][0]["bits_per_byte"] > 0
    return run, nodes, kits


def sent(run, nodes, away=(), **more):
    transport = LocalTransport(nodes, away=away)
    counters, said = Counters(), []
    assignments = {leaf.assignment for leaf in run.evaluation.text.places.values()}
    kept = deliver(
        run,
        tuple(sorted(assignments, key=lambda assignment: assignment.first)),
        transport,
        run_id=RUN,
        counters=counters,
        deadline=60.0,
        say=said.append,
        **more,
    )
    return kept, said


def test_nodes_hold_the_shared_model_and_their_own(finished, towns):  # noqa: F811
    run, nodes, kits = finished
    kept, said = sent(run, nodes, away=["town-3"])
    assert kept == ["town-0", "town-1", "town-2"]
    assert any("town-3" in line and "deliver" in line for line in said)
    assert not (kits / "town-3").exists()
    kept, _ = sent(run, nodes, only="town-3")
    assert kept == ["town-3"]
    model, size = run.recipe.model, run.store.vocabulary
    for town in towns:
        here = kits / town / "models" / RUN[:8]
        assert [path.name for path in (here / "nodes").iterdir()] == [town]
        for mine, theirs in (("", ""), (town, f"the {town}")):
            path = here / "nodes" / mine if mine else here
            got = load_params(model, size, path / "model.safetensors")
            gave = load_params(model, size, run.record.weights_of(theirs))
            assert tree.sha256(got) == tree.sha256(gave)
    again, _ = sent(run, nodes)
    assert again == sorted(towns)  # the same models again: no question of a run is another one


def test_a_node_asks_judges_and_exports_what_it_was_given(finished, folder):  # noqa: F811
    run, nodes, kits = finished
    sent(run, nodes)
    here = kits / "town-0" / "models" / RUN[:8]
    loaded = fedlm.load_run(here / "nodes" / "town-0")
    split = run.evaluation.splits()[0]
    figures = loaded.evaluate(split)
    at_end = {n["name"]: n for n in fedlm.load_run(run.record.path).summary["nodes"]}
    assert figures["perplexity"] == pytest.approx(at_end["the town-0"]["perplexity"], rel=1e-6)
    assert figures["bits_per_byte"] == pytest.approx(at_end["the town-0"]["bits_per_byte"])
    asked = call(here.parent, "predict", here, "the cat", "--node", "town-0", "--json")
    assert asked.code == 0 and len(asked.json["next"]) == 5, asked.stderr
    done = call(here.parent, "evaluate", here, "--split", split, "--json")
    assert done.code == 0 and done.json["perplexity"] > 1, done.stderr
    done = call(here.parent, "export", here, "--node", "town-0", "--json")
    assert done.code == 0 and (here / "nodes" / "town-0" / "export").is_dir(), done.stderr
    assert loaded.predict("the cat")[0]["word"] == asked.json["next"][0]["word"]


def test_the_server_can_look_at_every_model_without_text(finished):
    run, _, _ = finished
    path = run.record.path
    assert len(fedlm.load_run(path / "nodes" / "the town-1").predict("the cat")) == 5
    assert len(call(path, "predict", path, "the", "--node", "the town-1", "--json").json) == 2
    done = call(path, "evaluate", path)
    assert done.code == 2 and "at its nodes" in done.stderr


def test_through_relays_too_and_no_disk_is_filled(
    finished,
    folder,  # noqa: F811
    towns,  # noqa: F811
    tmp_path,
    monkeypatch,
):
    run, nodes, _ = finished
    seen = []

    def town(payload):
        if payload.kind == EVALUATE_REQUEST:
            seen.append(read_evaluate_request(payload))
        return nodes["town-0"](payload)

    sent(run, {**nodes, "town-0": town})
    request = next(asked for asked in seen if asked.splits == ("own",))
    work = nodes["town-0"]._work(request)
    monkeypatch.setattr(delivery, "MOST_RUNS", 1)
    for number, name in enumerate(("c" * 32, "d" * 32)):
        other = replace(request, run=name)
        if number:
            with pytest.raises(Refusal, match="keeps the models of 1 runs"):
                keep_models(tmp_path / "models", "town-0", work, towns["town-0"], other)
        else:
            keep_models(tmp_path / "models", "town-0", work, towns["town-0"], other)
    (tmp_path / "models" / "another").mkdir()  # a run that is kept may be kept again all the same
    keep_models(
        tmp_path / "models", "town-0", work, towns["town-0"], replace(request, run="c" * 32)
    )
    over = networked(folder, relayed(tmp_path, nodes), "server.rounds=1", table=TREE, run_id=RUN)
    kept, _ = sent(over, relayed_again(over))
    assert kept == [f"relay/{town}" for town in sorted(towns)]


def relayed_again(over):
    return over.engine.transport.nodes


def test_nodes_score_and_keep_models_with_layers_that_only_they_have(
    folder,  # noqa: F811
    store,  # noqa: F811
    towns,  # noqa: F811
    tmp_path,
):
    """At temperature zero: figures as received and after own steps are the simulation's."""
    changes = ("federation.temperature=0", "server.evaluate_rows=5")
    simulation = simulated(folder, store, *changes, table=TREE)
    here, _ = rounds(simulation, 2)
    workers = {
        town: Worker(text, Policy(), models=tmp_path / town, name=town)
        for town, text in towns.items()
    }
    over = networked(folder, workers, *changes, table=TREE, run_id=RUN)
    there, _ = rounds(over, 2)
    watched = [run.evaluation.watch(state) for run, state in ((simulation, here), (over, there))]
    assert watched[0]["places"].keys() == watched[1]["places"].keys()
    np.testing.assert_allclose(*([*w["places"].values()] for w in watched), rtol=1e-12)
    config, models = over.round.config, over.round.models(there)
    for place, leaf in over.evaluation.text.places.items():
        town, model = leaf.path[-1], models[config.topology.names[place]]
        assert over.evaluation.text.keep(2, "own", [model], [Ask(place, 0)]) == [place]
        file = tmp_path / town / RUN[:8] / "nodes" / town / "model.safetensors"
        got = load_params(over.recipe.model, over.store.vocabulary, file)
        own = here.nodes[place].params  # its layers after its last steps, on the newest backbone
        assert tree.sha256(config.personal(got)) == tree.sha256(config.personal(own))
        assert tree.sha256(config.backbone(got)) == tree.sha256(config.backbone(model))
        assert tree.sha256(config.personal(got)) != tree.sha256(config.personal(model))
