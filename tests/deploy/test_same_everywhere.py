"""One recipe and seed: in two engines, over TLS, and over a tree of relays, the same model."""

import json

import jax
import numpy as np
import pytest

from fedlm.deploy.demo import demo, largest_difference
from fedlm.inference import load_params
from fedlm.recipe.build import build
from fedlm.recipe.settings import load
from fedlm.record.directory import RunDirectory
from fedlm.training import Watcher
from fedlm.training import train as simulate
from tests.conftest import write_tiny

pytestmark = [
    pytest.mark.network,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
SMALL = ("model.name=cifg", "server.rounds=2", "run.prompts=[]", "run.devices=1")
# Members train leaves of their own, so that frames travel one by one, whole. The rate matters:
# at the default of 0.5 loop and mesh end 1.6e-6 apart here, at 0.1 5e-8; why is not known.
BY_MEMBER = (
    "wire.trainable=member",
    "wire.trainable_fraction=0.5",
    "server.cohort=9",
    "client.learning_rate=0.1",
)
PLACE = '[[federation.node]]\nname = "{}"\n'
TREE = (
    '\n[federation]\npersonal_layers = "last 0.5"\n'
    + PLACE.format("world")
    + "".join(PLACE.format(side) + 'parent = "world"\n' for side in ("north", "south"))
    + "".join(
        PLACE.format(f"the {town}") + f'parent = "{side}"\ngroups = ["{town}"]\n'
        for town, side in {
            "town-0": "south",
            "town-1": "north",
            "town-2": "south",
            "town-3": "north",
        }.items()
    )
)


def largest(made, run):
    """The largest parameter of a run."""
    weights = RunDirectory(run).weights
    params = load_params(made.recipe.model, made.store.vocabulary, weights)
    return max(float(np.max(np.abs(x))) for x in jax.tree.leaves(params))


def test_one_recipe_four_ways(tmp_path):
    recipe = load(write_tiny(tmp_path), (*SMALL, *BY_MEMBER, "run.engine=loop"))
    shown = {
        name: demo(tmp_path / name, recipe, as_tree=name == "tree", devices=1, watcher=Watcher())
        for name in ("flat", "tree")
    }
    # The same programs ran, and frames were added in the same order.
    ways = [done[side] for done in shown.values() for side in ("networked", "simulated")]
    prints = {way["params_sha256"] for way in ways}
    assert len(prints) == 1
    meshed = load(tmp_path / "tiny.toml", (*SMALL, *BY_MEMBER))
    made = build(meshed, tmp_path / "text", out=tmp_path / "mesh")
    simulate(made)
    apart = largest_difference(tmp_path / "mesh", tmp_path / "tree" / "networked", made)
    assert apart <= 1e-6 * largest(made, tmp_path / "mesh")


def test_a_tree_of_places_over_relays(tmp_path):
    path = write_tiny(tmp_path)
    path.write_text(path.read_text() + TREE)
    recipe = load(path, (*SMALL, "data.test_clients=0.5"))
    shown = demo(tmp_path / "demo", recipe, as_tree=True, devices=1, watcher=Watcher())
    assert shown["networked"]["rounds"] == 2
    assert shown["networked"]["nodes"][0]["name"] == "world"
    assert shown["difference"] < 1e-6
    assignments = json.loads((tmp_path / "demo" / "networked" / "seats.json").read_text())
    assert [assignment["name"] for assignment in assignments] == ["north", "south"]
    assert [path for path, _ in assignments[0]["leaves"]] == ["town-1", "town-3"]
    nodes = [shown[side]["nodes"] for side in ("networked", "simulated")]
    for here, there in zip(*nodes, strict=True):  # scored at nodes, and in one place
        assert here["name"] == there["name"]
        assert here["perplexity"] == pytest.approx(there["perplexity"], rel=1e-4)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(("client.method=scaffold", "wire.upload=uniform-8"), id="scaffold"),
        pytest.param(("server.mode=buffered", "wire.upload=uniform-8"), id="waiting for all"),
    ],
)
def test_what_is_remembered_or_waited_for_over_tls(tmp_path, changes):
    """To the bit of the simulation: clients' memories at nodes; answers that wait on disk."""
    recipe = load(write_tiny(tmp_path), (*SMALL, "server.cohort=9", "run.engine=loop", *changes))
    shown = demo(tmp_path / "demo", recipe, as_tree=False, devices=1, watcher=Watcher())
    assert shown["networked"]["params_sha256"] == shown["simulated"]["params_sha256"]


def test_a_buffered_run_over_tls(tmp_path):
    changes = ("server.mode=buffered", "server.buffer=2", "server.rounds=4", "server.cohort=9")
    recipe = load(write_tiny(tmp_path), (*SMALL, *changes))
    shown = demo(tmp_path / "demo", recipe, as_tree=False, devices=1, watcher=Watcher())
    journal = tmp_path / "demo" / "networked" / "journal.jsonl"
    rounds = [json.loads(line) for line in journal.read_text().splitlines()[1:-1]]
    assert shown["networked"]["rounds"] == 4 == len(rounds)
    assert all(facts["members"] >= 2 for facts in rounds)
    assert all(int(began) <= facts["round"] for facts in rounds for began in facts["answers"])


def test_secure_sums_flat_relayed_and_simulated_to_the_bit(tmp_path):
    secure = ("wire.upload=secure-24-clip1-members8", "client.weight=uniform")
    secure += ("run.checkpoint_every=1", "run.engine=loop", "wire.secure_threshold=3")
    prints = set()
    for name, nodes in (("flat", 4), ("tree", 5)):
        told = (*SMALL, *secure, f"wire.secure_nodes={nodes}")
        recipe = load(write_tiny(tmp_path), told)
        done = demo(
            tmp_path / name,
            recipe,
            as_tree=name == "tree",
            secure=True,
            devices=1,
            watcher=Watcher(),
        )
        assert done["difference"] == 0.0 and len(done["fingerprint"]) == 39
        prints |= {done[side]["params_sha256"] for side in ("networked", "simulated")}
    assert len(prints) == 1
