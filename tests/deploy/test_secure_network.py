"""Secure sums over TLS: processes are killed at every step, and no disk but a node's has an update.

A run in which no round was lost ends in the very model of its simulation.
"""

import json
import os
import threading
import time

import numpy as np
import pytest

from fedlm.corpus.shard import deal
from fedlm.corpus.store import Store
from fedlm.deploy import member_list, workspace
from fedlm.deploy.node import work
from fedlm.deploy.node_ledger import NodeLedger
from fedlm.deploy.processes import Child, children, free_port, wait_for_port
from fedlm.deploy.round_stats import rounds_of
from fedlm.deploy.secure_worker import node_sum, vector_of
from fedlm.engine.secure_messages import read_secure_request
from fedlm.recipe.build import build
from fedlm.recipe.settings import dump, load
from fedlm.training import train as simulate
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
FLAT = dict.fromkeys(NAMES, ())
RELAYED = {"east": (), "hub": ("one", "three", "two"), "west": ()}
DISTRIBUTED = (
    "privacy.mechanism=distributed",
    "privacy.honest_nodes=2",
    "privacy.clip_norm=0.5",
    "privacy.noise_multiplier=1.0",
    "server.sampling=fixed",
    "wire.upload=secure-18-clip0.5-members32",
)


class World:
    """A federation whose roles are processes to be killed; `network` has nodes by relay.

    Nodes that nobody kills are threads of this process: their imports would be most of a test.
    """

    def __init__(self, folder, started, network, *changes, patient=True, killed=()):
        """With `patient` every list waits for all its members, so that nobody is left out."""
        self.folder, self.started, self.roles, self.network = folder, started, {}, network
        self.killed, self.threads, self.stop = killed, [], threading.Event()
        self.leaves = [f"{at}-{n}" if n else at for at, of in network.items() for n in of or ("",)]
        n = len(self.leaves)
        sums = (f"wire.secure_nodes={n}", f"wire.secure_threshold={n if patient else 3}")
        self.settings = (*SETTINGS, *sums, *changes)
        write_tiny(folder)
        run = build(
            load(folder / "tiny.toml", self.settings), folder / "text", lambda stage, done: None
        )
        deal(Store(run.store.path), self.leaves, folder / "stores")
        self.homes = {"": self._home("fed", tuple(network))}
        self.homes |= {at: self._home(at, names) for at, names in network.items() if names}
        self.fed = self.homes[""]

    def _home(self, name, nodes):
        made = workspace.init(
            self.folder / name,
            name,
            ["127.0.0.1"],
            free_port(),
            nodes,
            bind="127.0.0.1",
            quorum=1.0,
            deadline=LONGEST,
        )
        file, _ = member_list.propose(made)
        for node in nodes:
            member_list.approve(made.kit(node), file)
        return made

    def recipe(self, *changes):
        text = (self.folder / "tiny.toml").read_text()
        store = self.folder / "stores" / "server"
        text = text.replace('source = "tiny.jsonl"', f'store = "{store}"')
        (self.folder / "at.toml").write_text(text)
        self.settings = (*self.settings, *changes)
        (self.folder / "at.toml").write_text(dump(load(self.folder / "at.toml", self.settings)))

    def kit(self, leaf):
        relay, _, name = leaf.rpartition("-")
        return self.homes[relay].kit(name)

    def begin(self):
        """Start everything: servers, relays, nodes, the run."""
        for home in self.homes:
            self.start(f"{home}-server")
        for role in (*(home for home in self.homes if home), *self.leaves, "train"):
            self.start(role)

    def start(self, role):
        if role == "train":
            where = str(self.fed.path), "at.toml", "--out", "run", "--resume"
            arguments = ["federation", "train", *where]
        elif role.endswith("-server"):
            arguments = ["federation", "serve", str(self.homes[role[:-7]].path)]
        elif role in self.homes:
            home = str(self.homes[role].path)
            arguments = ["node", "relay", str(self.fed.kit(role).path), "--home", home]
        else:
            kit, store = self.kit(role).path, self.folder / "stores" / role
            if role not in self.killed:
                return self._thread(kit, store)
            arguments = ["node", "join", str(kit), "--store", str(store), "--devices", "1"]
        self.roles[role] = Child(arguments, self.folder / f"{role}.log", self.folder)
        self.started.append(self.roles[role])
        if role.endswith("-server"):
            port = self.homes[role[:-7]].settings.port
            wait_for_port(port, self.roles[role], LONGEST)

    def _thread(self, kit, store):
        how = {"whole": False, "say": lambda text: None, "stop": self.stop.is_set}
        self.threads.append(threading.Thread(target=work, args=(kit, store, None), kwargs=how))
        self.threads[-1].start()

    def end(self):
        self.stop.set()
        for thread in self.threads:
            thread.join(60)

    def again(self, role):
        """Kill a process, and start it again."""
        self.roles[role].kill()
        self.start(role)

    def wait(self, ready, what):
        ends = time.monotonic() + LONGEST
        while not ready():
            dead = not self.roles["train"].alive and not ready()
            assert time.monotonic() < ends and not dead, (what, self.roles["train"].tail())
            time.sleep(0.02)

    def until(self, round, step, home=""):
        """Wait until the server of a federation has come to a step of a round."""
        self.wait(lambda: self._at(round, step, home), f"{step} of round {round} {home}")

    def _at(self, round, step, home):
        run = self.folder / "run"
        try:
            file = run / "secure.json"
            if home:
                name = (run / "run.id").read_text().strip()
                file = self.homes[home].path / "server" / "sums" / f"{name}.json"
            told = json.loads(file.read_text())
        except (OSError, ValueError):
            return False
        return told["round"] > round or (told["round"] == round and step in told["lists"])

    def ended(self, rounds):
        """Wait for the end of the run; return its summary, and how many rounds were lost."""
        assert self.roles["train"].process.wait(LONGEST) == 0, self.roles["train"].tail()
        told = rounds_of(self.folder / "run")
        assert [entry["round"] for entry in told] == list(range(rounds))
        summary = json.loads((self.folder / "run" / "summary.json").read_text())
        return summary, sum(bool(entry["lost"]) for entry in told)

    def simulated(self):
        """Return the summary of the same recipe in simulation."""
        recipe = load(self.folder / "tiny.toml", self.settings)
        return simulate(build(recipe, self.folder / "text", out=self.folder / "simulated"))


@pytest.fixture
def world(tmp_path):
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    made = []

    def make(*more, **how):
        made.append(World(tmp_path, started, *more, **how))
        return made[-1]

    with children() as started:
        yield make
        for one in made:
            one.end()


def plain_vectors(world):
    """What each node adds up in round 0, before masks: trained once more, in this process."""
    whole = Store(next(path for path in (world.folder / "text").iterdir() if path.is_dir()))
    changes = [change for change in world.settings if change not in SETTINGS]
    fed = federation(
        whole, world.folder / "tiny.toml", world.folder / "again", *changes, names=world.leaves
    )
    transport, found = fed.transport(), {}
    played(fed.run(transport), 1)
    for name, payload in transport.sent.values():
        if payload.facts.get("step") == "mask":
            request, worker = read_secure_request(payload), fed.workers[name]
            work = worker._work(request)
            vector = vector_of(work, 0)
            total = node_sum(work, request, vector)
            found[name] = vector.integers.wrapped(total.codes)  # neither counts nor noise
    assert set(found) == set(world.leaves)
    return found


def search_for_updates(world, vectors, bits):
    """What must not be on a server's disk: plain vectors, nodes' secrets, text and tokens."""
    search = Search()
    for name, words in vectors.items():
        if words.any():
            search.numbers(words[:400].astype(np.uint64), f"the vector of {name}", distinct=4)
            search.packed(pack(words[:400], bits), f"the vector of {name}")
    for name in world.leaves:
        store = Store(world.folder / "stores" / name)
        for number in store.training_clients:
            search.numbers(np.asarray(store.train(int(number)))[:60], f"tokens of {name}")
        for file in (world.kit(name).path / "secure").glob("*.json"):
            seed = json.loads(file.read_text())["state"]["seed"]
            search.word(seed)
            search._as_bytes(bytes.fromhex(seed), f"the seed of {name}", 16)
    return search


def check_disks(world, vectors, bits, sums):
    """No server's disk has a vector, a secret or a sum of `sums`; what is planted is found."""
    search = search_for_updates(world, vectors, bits)
    for what, names in sums.items():
        total = sum(vectors[name].astype(np.uint64) for name in names) % 2**bits
        search.numbers(total[:400], what, distinct=4)
        search.packed(pack(total[:400].astype(np.uint32), bits), what)
    folders = [home.path / "server" for home in world.homes.values()]
    for folder in (*folders, world.folder / "run"):
        assert search.leaks(folder) == []
    leaf = next(name for name in world.leaves if vectors[name].any())
    state = next((world.kit(leaf).path / "secure").glob("*.json"))
    secret = bytes.fromhex(json.loads(state.read_text())["state"]["seed"])
    planted(world.folder / "run", secret, "gzip")
    (world.folder / "run" / "other").write_bytes(pack(vectors[leaf][:99], bits))
    found = search.leaks(world.folder / "run")
    assert any(f"vector of {leaf}" in leak for leak in found)
    assert any(f"the seed of {leaf}" in leak for leak in found)


def test_kills_at_every_step_change_no_bit_and_leave_no_secret_on_the_servers_disk(world):
    made = world(FLAT, killed=("north",))
    made.recipe("server.rounds=5")
    made.begin()
    # A node is killed and started again, the server's program is killed at each later step.
    made.until(0, "share")
    made.again("north")
    for round, step in ((1, "keys"), (2, "share"), (3, "mask"), (3, "sign")):
        made.until(round, step)
        made.again("train")
    made.until(4, "keys")
    made.again("-server")
    summary, lost = made.ended(5)
    assert lost == 0 and summary["params_sha256"] == made.simulated()["params_sha256"]
    assert (made.folder / "run" / "secure.json").stat().st_mode & 0o77 == 0
    check_disks(made, plain_vectors(made), 24, {})


def test_a_node_that_is_gone_for_good_at_a_step_is_left_out_and_the_run_goes_on(world):
    made = world(FLAT, patient=False, killed=("north",))
    made.recipe("server.rounds=3")
    made.begin()
    made.until(1, "share")  # shares of its masks are out: the others open them, or its own
    made.roles["north"].kill()
    _, lost = made.ended(3)
    told = rounds_of(made.folder / "run")
    assert lost == 0
    assert [len(entry["answered"]) for entry in told] in ([4, 3, 3], [4, 4, 3])
    assert "north" not in told[2]["answered"] and told[2]["away"] == ["north"]


def test_a_relay_killed_at_every_step_changes_no_bit_and_keeps_no_sum_on_its_disk(world):
    made = world(RELAYED, killed=("hub-two",))
    made.recipe("server.rounds=6")
    made.begin()
    for round, step in enumerate(("keys", "share", "mask", "sign")):
        made.until(round, step, "hub")
        made.again("hub")
    made.until(4, "share", "hub")
    made.again("hub-two")
    made.until(4, "sign")  # the relay has given its vector above
    made.again("hub")
    made.until(5, "share")
    made.again("train")
    made.until(5, "share", "hub")
    made.again("hub-server")
    summary, lost = made.ended(6)
    assert lost == 0 and summary["params_sha256"] == made.simulated()["params_sha256"]
    below = [name for name in made.leaves if name.startswith("hub-")]
    check_disks(made, plain_vectors(made), 24, {"the sum below hub": below})
    assert "a relay, of the nodes below it" in (made.folder / "run" / "report.html").read_text()


@pytest.mark.parametrize("network", [FLAT, RELAYED], ids=["flat", "relayed"])
def test_noise_of_nodes_over_tls_is_in_every_ledger_and_no_sum_without_it_on_a_disk(world, network):
    made = world(network, *DISTRIBUTED, "privacy.evaluation_noise=0.05")
    made.recipe("server.rounds=2")
    made.begin()
    made.until(0, "mask")
    made.again("train")
    _, lost = made.ended(2)
    assert lost == 0
    journal = (made.folder / "run" / "journal.jsonl").read_text().splitlines()
    rounds = [json.loads(line) for line in journal if '"noise_excess"' in line]
    assert [entry["noise_excess"] for entry in rounds] == [len(made.leaves) / 2] * 2
    nodes = {leaf.replace("-", "/") for leaf in made.leaves}
    assert set(rounds[-1]["private_validation"]["nodes"]) == nodes
    made.end()  # its ledgers are read
    asked = 0
    for leaf in made.leaves:
        ledger = NodeLedger(made.kit(leaf).ledger, read_only=True)
        (entry,) = ledger.runs.values()
        assert entry.plan.mechanism == "distributed" and entry.plan.honest_nodes == 2
        assert sorted(entry.questions) == [0, 1] and list(entry.figures) == [2]
        asked += sum(map(len, entry.turns.values()))
    assert asked == 2 * load(made.folder / "at.toml").server.cohort
    check_disks(made, plain_vectors(made), 18, {"the sum without noise": made.leaves})
