"""Processes that are killed: a run ends as if nothing had happened."""

import json
import os
import time

import numpy as np
import pytest

from fedlm.corpus.shard import deal
from fedlm.corpus.store import Store
from fedlm.deploy import workspace
from fedlm.deploy.demo import demo
from fedlm.deploy.processes import Child, children, free_port, wait_for_port
from fedlm.deploy.round_stats import read_rounds
from fedlm.recipe.build import build
from fedlm.recipe.settings import dump, load
from fedlm.training import Watcher
from fedlm.training import train as simulate
from tests.conftest import write_tiny

pytestmark = [
    pytest.mark.network,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
LONGEST = 900.0  # a bound on a hang, not on speed
SETTINGS = (
    "server.cohort=6",
    "run.engine=loop",
    "wire.upload=uniform-8",
    "run.checkpoint_every=1",
)


@pytest.fixture
def world(tmp_path):
    """A place for processes, all of which end with the test."""
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    with children() as started:
        yield Processes(tmp_path, started)


class Processes:
    """A federation of two nodes, perhaps one behind a relay, each role a process to be killed."""

    def __init__(self, folder, started):
        self.folder, self.started, self.roles = folder, started, {}
        write_tiny(folder)
        build(load(folder / "tiny.toml"), folder / "text", lambda stage, done: None)
        self.store = next((folder / "text").iterdir())
        deal(Store(self.store), ("north", "south"), folder / "stores")

    def found(self, relayed=False, **more):
        names = ("north", "relay") if relayed else ("north", "south")
        self.workspaces = {"server": self._workspace("fed", names, **more)}
        self.kits = {name: self.workspaces["server"].kit(name) for name in names}
        if relayed:
            self.workspaces["below"] = self._workspace("below", ("south",), **more)
            self.kits["south"] = self.workspaces["below"].kit("south")

    def _workspace(self, name, nodes, **more):
        options = {"bind": "127.0.0.1", "quorum": 1.0, **more}
        return workspace.init(
            self.folder / name, name, ["127.0.0.1"], free_port(), nodes, **options
        )

    def start(self, role):
        fed = str(self.workspaces["server"].path)
        arguments = {
            "train": ["federation", "train", fed, "at.toml", "--out", "run", "--resume"],
            **{
                name: ["federation", "serve", str(made.path)]
                for name, made in self.workspaces.items()
            },
        }.get(role)
        if role == "relay":
            below = str(self.workspaces["below"].path)
            arguments = ["node", "relay", str(self.kits[role].path), "--home", below]
        if arguments is None:
            kit, store = str(self.kits[role].path), str(self.folder / "stores" / role)
            arguments = ["node", "join", kit, "--store", store, "--devices", "1"]
        self.roles[role] = Child(arguments, self.folder / f"{role}.log", self.folder)
        self.started.append(self.roles[role])
        if role in self.workspaces:
            wait_for_port(self.workspaces[role].settings.port, self.roles[role], LONGEST)

    def recipe(self, store, name="at.toml", rounds=8):
        text = (self.folder / "tiny.toml").read_text()
        text = text.replace('source = "tiny.jsonl"', f'store = "{store}"')
        changed = load(self._write(name, text), (*SETTINGS, f"server.rounds={rounds}"))
        self._write(name, dump(changed))
        return changed

    def _write(self, name, text):
        (self.folder / name).write_text(text)
        return self.folder / name

    def rounds(self):
        file = self.folder / "run" / "journal.jsonl"
        lines = file.read_text().splitlines() if file.is_file() else []
        return sum('"kind": "round"' in line for line in lines)

    def wait(self, ready, what):
        ends = time.monotonic() + LONGEST
        while not ready():
            ended = not self.roles["train"].alive and not ready()
            assert time.monotonic() < ends and not ended, (what, self.roles["train"].tail())
            time.sleep(0.1)

    def summary(self):
        self.wait(lambda: not self.roles["train"].alive, "training ends")
        assert (self.folder / "run" / "summary.json").is_file(), self.roles["train"].tail()
        return json.loads((self.folder / "run" / "summary.json").read_text())

    def simulated(self):
        recipe, out = self.recipe(self.store, "sim.toml"), self.folder / "simulated"
        return simulate(build(recipe, self.folder, out=out))


FLAT = ("server", "north", "south", "train")
RELAYED = ("server", "below", "north", "relay", "south", "train")


@pytest.mark.parametrize("roles", [FLAT, RELAYED], ids=["flat", "relayed"])
def test_each_role_is_killed_in_turn(world, roles):
    world.found(relayed="relay" in roles)
    world.recipe(world.folder / "stores" / "server")
    for role in roles:
        world.start(role)
    for after, role in enumerate(reversed(roles), 1):
        world.wait(lambda after=after: world.rounds() >= after, f"round {after}")
        world.roles[role].kill()
        world.start(role)
    assert world.summary()["params_sha256"] == world.simulated()["params_sha256"]


def test_an_absent_node_is_passed_over_and_used_again(world):
    world.found(quorum=0.5)
    world.recipe(world.folder / "stores" / "server", rounds=100_000)  # it comes back in time
    for role in ("server", "north", "south", "train"):
        world.start(role)
    world.wait(lambda: world.rounds() >= 1, "a round")
    world.roles["south"].kill()
    stats = lambda: read_rounds(world.folder / "run" / "nodes.jsonl")  # noqa: E731
    world.wait(lambda: any(t["away"] == ["south"] for t in stats()), "it is missed")
    missed = min(t["round"] for t in stats() if "south" in t["away"])
    world.start("south")
    back = lambda: any("south" in t["answered"] for t in stats() if t["round"] > missed)  # noqa: E731
    world.wait(back, "it is used again")
    assert world.roles["train"].alive, world.roles["train"].tail()


@pytest.mark.parametrize("as_tree", [False, True], ids=["flat", "tree"])
def test_the_demonstration_shows_no_difference(world, as_tree):
    recipe = load(world.folder / "tiny.toml", ("server.rounds=2", "server.cohort=9"))
    shown = demo(world.folder / "demo", recipe, as_tree=as_tree, devices=1, watcher=Watcher())
    assert shown["networked"]["rounds"] == 2
    assert shown["difference"] < 5e-6  # sums of float32 in another order, over two rounds
    assert np.isfinite(shown["networked"]["perplexity"])
