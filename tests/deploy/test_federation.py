"""A federation over TLS on loopback: equal to its simulation, and closed to strangers."""

import shutil
import stat
import threading
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.proto.message_pb2 import Metadata
from flwr.proto.node_pb2 import Node

from fedlm.core.errors import EngineError
from fedlm.corpus.shard import deal
from fedlm.corpus.store import Store
from fedlm.deploy import certificates, doctor, server_app, status, workspace
from fedlm.deploy.flower.client import SuperLinkClient
from fedlm.deploy.flower.supernode import Stale, SuperNode, serve
from fedlm.deploy.node_ledger import NodeLedger
from fedlm.deploy.node_worker import Worker
from fedlm.deploy.policy import Policy
from fedlm.deploy.processes import Child, children, free_port, wait_for_port
from fedlm.deploy.workspace import Kit
from fedlm.recipe.build import build
from fedlm.recipe.settings import load
from fedlm.record.facts import facts_of
from fedlm.training import Watcher
from fedlm.training import train as simulate
from tests.conftest import write_tiny

pytestmark = [
    pytest.mark.network,
    # Sockets that the libraries below close when they are collected.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
SETTINGS = ("server.rounds=3", "server.cohort=6", "run.engine=loop", "wire.upload=uniform-8")
NODES = ("north", "south")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a store, its parts, and a server that is running."""
    folder = tmp_path_factory.mktemp("federation")
    write_tiny(folder)
    build(load(folder / "tiny.toml"), folder / "text", lambda stage, done: None)
    deal(Store(next((folder / "text").iterdir())), NODES, folder / "stores")
    port = free_port()
    made = workspace.init(
        folder / "fed", "fed", ["127.0.0.1"], port, NODES, bind="127.0.0.1", quorum=0.5
    )
    with children() as started:
        started.append(Child(["federation", "serve", str(made.path)], folder / "server.log"))
        wait_for_port(port, started[0])
        yield folder, made


@contextmanager
def joined(folder: Path, made: workspace.Workspace, wrap=None):
    """Both nodes at work, each in a thread: what they do is the same, and one import serves."""
    stop, threads, ledgers = threading.Event(), [], []
    for name in NODES:
        ledgers.append(NodeLedger(made.kit(name).ledger))
        worker = Worker(Store(folder / "stores" / name), Policy(), ledger=ledgers[-1])
        answer = wrap(worker) if wrap and name == "south" else worker
        node = SuperNode(made.kit(name))
        node.join(stop.is_set, patient=True)
        work = {"say": lambda text: None, "stop": stop.is_set}
        threads.append(threading.Thread(target=serve, args=(node, answer), kwargs=work))
        threads[-1].start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(30)
        for ledger in ledgers:
            ledger.close()


def recipe_at(folder, store, *changes):
    text = (folder / "tiny.toml").read_text()
    text = text.replace('source = "tiny.jsonl"', f'store = "{store}"').replace(
        "vocabulary = 60", ""
    )
    (folder / "at.toml").write_text(text)
    return load(folder / "at.toml", (*SETTINGS, *changes))


def over_the_network(folder, made, run, *changes, resume=False):
    recipe = recipe_at(folder, folder / "stores" / "server", *changes)
    said = []
    done = server_app.train(
        made,
        recipe,
        folder / run,
        resume=resume,
        watcher=Watcher(say=said.append),
        stores=folder / "text",
    )
    return done, said


def in_simulation(folder, run, *changes):
    store = next((folder / "text").iterdir())
    recipe = recipe_at(folder, store, *changes)
    return simulate(build(recipe, folder / "text", out=folder / run))


def test_a_federation_is_its_simulation(place):
    folder, made = place
    with joined(folder, made):
        networked, _ = over_the_network(folder, made, "networked")
        lines = {n["name"]: n for n in status.nodes_of(made, folder / "networked")}
    simulated = in_simulation(folder, "simulated")
    assert networked["params_sha256"] == simulated["params_sha256"]
    assert networked["upload_bytes"] == simulated["upload_bytes"]
    assert networked["perplexity"] == pytest.approx(simulated["perplexity"])
    assert (folder / "networked" / "report.html").is_file()
    assert lines["north"]["there"] == lines["south"]["there"] == "yes"
    assert lines["north"]["answered"] == 3 and lines["north"]["garbage"] == 0


def turned_away(kit):
    """The sentence with which a node is not let in."""
    node = SuperNode(Kit(kit))
    with pytest.raises(EngineError) as error:
        node.join(lambda: False, patient=False)
    node.leave()
    return str(error.value)


def test_an_unregistered_node_is_refused(place, tmp_path):
    _, made = place
    shutil.copytree(made.kit("north").path, tmp_path / "kit")
    private, _ = certificates.node_key()
    (tmp_path / "kit" / "node.key").write_bytes(private)
    assert "refused this node" in turned_away(tmp_path / "kit")


def test_a_server_of_another_authority_is_refused(place, tmp_path):
    _, made = place
    shutil.copytree(made.kit("north").path, tmp_path / "kit")
    (tmp_path / "kit" / "ca.pem").write_bytes(certificates.authority("fed").certificate)
    assert "certificate" in turned_away(tmp_path / "kit")
    found = {check.what: check for check in doctor.examine(tmp_path / "kit")}
    assert not found["tls"].well and "another authority" in found["tls"].way_out


def test_nobody_runs_the_federation_without_its_key(place, tmp_path):
    _, made = place
    shutil.copytree(made.path, tmp_path / "fed", ignore=shutil.ignore_patterns("link.db*"))
    (tmp_path / "fed" / "server" / "control.key").write_text("0" * 64)
    client = SuperLinkClient(workspace.Workspace(tmp_path / "fed"), timeout=1.0)
    with pytest.raises(EngineError, match="403"):
        client.register()
    client.close()


def test_a_node_answers_for_itself_alone(place):
    """As another node, or as the server that puts questions to others: flwr would believe it."""
    _, made = place
    node = SuperNode(made.kit("north"))
    node.join(lambda: False, patient=True)
    own = Node(node_id=node.node_id)
    for sender, answers in ((node.node_id + 1, "question"), (1, "")):
        head = Metadata(src_node_id=sender, reply_to_message_id=answers)
        message = ProtoMessage(metadata=head)
        with pytest.raises(Stale, match="403"):
            node.call("PushMessages", PushMessagesRequest(node=own, messages_list=[message]))
    node.leave()


def test_the_doctor_finds_a_healthy_federation_healthy(place):
    _, made = place
    for path in (made.path, made.kit("north").path):
        assert [check for check in doctor.examine(path) if not check.well] == []


def test_a_tampered_frame_is_counted_and_not_used(place):
    folder, made = place

    def tampering(worker):
        def answer(payload):
            reply = worker(payload)
            flipped = tuple(frame[:-1] + bytes([frame[-1] ^ 1]) for frame in reply.frames)
            return replace(reply, frames=flipped)

        return answer

    with joined(folder, made, tampering):
        done, said = over_the_network(folder, made, "tampered", "wire.upload=float32")
        lines = {n["name"]: n for n in status.nodes_of(made, folder / "tampered")}
    assert done["rounds"] == 3
    assert lines["south"]["garbage"] == 3 and "checksum" in lines["south"]["last"]
    assert any("south" in text for text in said)


PRIVATE = (
    "server.sampling=poisson",
    "privacy.mechanism=gaussian",
    "privacy.noise_multiplier=1",
    "privacy.clip_norm=0.1",
    "privacy.delta=0.01",
    "privacy.seed=1",
)


@pytest.mark.slow
def test_a_private_run_tells_nobody_who_answered(place):
    folder, made = place
    with joined(folder, made):
        figures = ("privacy.evaluation_noise=0.05", "privacy.evaluation_tokens=8")
        networked, said = over_the_network(folder, made, "private", *PRIVATE, *figures)
        lines = {n["name"]: n for n in status.nodes_of(made, folder / "private")}
    assert networked["params_sha256"] == in_simulation(folder, "alone", *PRIVATE)["params_sha256"]
    private = folder / "private" / "private/nodes.jsonl"
    assert stat.S_IMODE(private.stat().st_mode) == 0o600
    public = (folder / "private" / "nodes.jsonl").read_text()
    assert public.splitlines() == [f'{{"round": {n}, "nodes": 2}}' for n in range(3)]
    assert not any(name in text for text in said for name in NODES if "round" in text)
    run = (folder / "private" / "run.id").read_text()
    for name in NODES:
        ledger = NodeLedger(made.kit(name).ledger, read_only=True)
        assert len(ledger.runs[run].questions) == lines[name]["answered"]
        assert [told.noise_multiplier for told in ledger.runs[run].figures.values()] == [0.05]
    told = facts_of(folder / "private").rounds[-1]["private_validation"]
    assert set(told["nodes"]) == set(NODES) and told["perplexity"] > 1  # all were asked
    assert sum(lines[name]["answered"] for name in NODES) > 0
