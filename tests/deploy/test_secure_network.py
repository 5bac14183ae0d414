"""Secure sums over TLS: processes are killed, and the server's disk holds no update."""

import json
import os
import time

import numpy as np
import pytest

from fedlm.corpus.shard import deal
from fedlm.corpus.store import Store
from fedlm.deploy import member_list, workspace
from fedlm.deploy.processes import Child, children, free_port, wait_for_port
from fedlm.deploy.secure_worker import node_sum, vector_of
from fedlm.deploy.tallies import read_rounds
from fedlm.engine.secure_messages import read_request
from fedlm.recipe.build import build
from fedlm.recipe.settings import dump, load
from fedlm.wire.pack import pack
from tests.conftest import write_tiny
from tests.deploy.leaks import Search, planted
from tests.deploy.secure import NAMES, SETTINGS, federation, played

pytestmark = [
    pytest.mark.network,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
LONGEST = 1800.0  # a bound on a hang, not on speed


class World:
    """A federation of four nodes, each role a process to be killed."""

    def __init__(self, folder, started):
        self.folder, self.started, self.roles = folder, started, {}
        write_tiny(folder)
        run = build(load(folder / "tiny.toml", SETTINGS), folder / "text", lambda stage, done: None)
        deal(Store(run.store.path), NAMES, folder / "stores")
        self.fed = workspace.init(
            folder / "fed",
            "fed",
            ["127.0.0.1"],
            free_port(),
            NAMES,
            bind="127.0.0.1",
            quorum=1.0,
            deadline=300.0,
        )
        file, _ = member_list.propose(self.fed)
        for name in NAMES:
            member_list.approve(self.fed.kit(name), file)

    def recipe(self, *changes):
        text = (self.folder / "tiny.toml").read_text()
        store = self.folder / "stores" / "server"
        text = text.replace('source = "tiny.jsonl"', f'store = "{store}"')
        (self.folder / "at.toml").write_text(text)
        (self.folder / "at.toml").write_text(
            dump(load(self.folder / "at.toml", (*SETTINGS, *changes)))
        )

    def start(self, role):
        fed = str(self.fed.path)
        if role == "train":
            arguments = ["federation", "train", fed, "at.toml", "--out", "run", "--resume"]
        elif role == "server":
            arguments = ["federation", "serve", fed]
        else:
            store = str(self.folder / "stores" / role)
            kit = str(self.fed.kit(role).path)
            arguments = ["node", "join", kit, "--store", store, "--devices", "1"]
        self.roles[role] = Child(arguments, self.folder / f"{role}.log", self.folder)
        self.started.append(self.roles[role])
        if role == "server":
            wait_for_port(self.fed.settings.port, self.roles[role], LONGEST)

    def kill(self, role):
        self.roles[role].kill()

    def wait(self, ready, what):
        ends = time.monotonic() + LONGEST
        while not ready():
            dead = not self.roles["train"].alive and not ready()
            assert time.monotonic() < ends and not dead, (what, self.roles["train"].tail())
            time.sleep(0.02)

    def at(self, round, step):
        """Whether the server has come to a step of a round."""
        try:
            told = json.loads((self.folder / "run" / "secure.json").read_text())
        except (OSError, ValueError):
            return False
        return told["round"] > round or (told["round"] == round and step in told["lists"])


@pytest.fixture
def world(tmp_path):
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    with children() as started:
        yield World(tmp_path, started)


def plain_vectors(world):
    """What each node adds up in round 0, before masks: trained once more, in this process."""
    whole = Store(next(path for path in (world.folder / "text").iterdir() if path.is_dir()))
    fed = federation(whole, world.folder / "tiny.toml", world.folder / "again")
    transport, found = fed.transport(), {}
    played(fed.run(transport), 1)
    for name, payload in transport.sent.values():
        if payload.facts.get("step") == "mask":
            request, worker = read_request(payload), fed.workers[name]
            work = worker._work(request)
            found[name] = node_sum(work, request, vector_of(work, 0)).words()
    assert set(found) == set(NAMES)
    return found


def search_for_updates(world, vectors):
    """What must not be on the server's disk: plain vectors, nodes' secrets, text and tokens."""
    search = Search()
    for name, words in vectors.items():
        search.numbers(words[:400].astype(np.uint64), f"the vector of {name}")
        search._as_bytes(pack(words[:400], 24), f"the vector of {name}, packed", 24)
    for name in NAMES:
        store = Store(world.folder / "stores" / name)
        for number in store.training_clients:
            search.numbers(np.asarray(store.train(int(number)))[:60], f"tokens of {name}")
        for file in (world.fed.kit(name).path / "secure").glob("*.json"):
            seed = json.loads(file.read_text())["state"]["seed"]
            search.word(seed)
            search._as_bytes(bytes.fromhex(seed), f"the seed of {name}", 16)
    return search


def test_kills_at_every_step_lose_no_round_and_leave_no_secret_on_the_servers_disk(world):
    world.recipe("server.rounds=5")
    for role in ("server", *NAMES, "train"):
        world.start(role)
    # A node is killed and started again, the server's program is killed at each later step.
    world.wait(lambda: world.at(0, "share"), "shares of round 0")
    world.kill("north")
    world.start("north")
    for round, step in ((1, "keys"), (2, "share"), (3, "mask"), (3, "sign")):
        world.wait(lambda: world.at(round, step), f"{step} of round {round}")  # noqa: B023
        world.kill("train")
        world.start("train")
    world.wait(lambda: world.at(4, "keys"), "round 4")
    world.kill("server")
    world.start("server")
    ended = world.roles["train"].process.wait(LONGEST)
    assert ended == 0, world.roles["train"].tail()
    rounds = read_rounds(world.folder / "run" / "nodes.jsonl")
    assert [entry["round"] for entry in rounds] == list(range(5))
    assert sum(bool(entry["lost"]) for entry in rounds) <= 1
    assert (world.folder / "run" / "secure.json").stat().st_mode & 0o77 == 0

    vectors = plain_vectors(world)
    search = search_for_updates(world, vectors)
    for folder in (world.fed.path / "server", world.folder / "run"):
        assert search.leaks(folder) == []
    seed = next((world.fed.kit("east").path / "secure").glob("*.json"))
    secret = bytes.fromhex(json.loads(seed.read_text())["state"]["seed"])
    planted(world.folder / "run", secret, "gzip")
    (world.folder / "run" / "other").write_bytes(pack(vectors["west"][:99], 24))
    assert any("vector of west" in leak for leak in search.leaks(world.folder / "run"))
    assert any("the seed of east" in leak for leak in search.leaks(world.folder / "run"))
