"""Three organisations with their own languages, by the documented commands, from init to models.

Each has a folder and, where namespaces can be made, a network of its own that reaches the server
and nothing else. Afterwards the server's folder is searched for their text (`leaks.py`).
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

import fedlm
from fedlm.corpus.store import Store
from fedlm.deploy.flower.forget import SECONDS
from fedlm.deploy.processes import Child, children, free_port
from fedlm.recipe.parts import model_spec
from fedlm.recipe.settings import load
from fedlm.wire.dense import dense
from tests.deploy.leaks import Search
from tests.deploy.watched_node import FRAMES

pytestmark = [pytest.mark.network, pytest.mark.slow]

WORDS = {
    "english": "the cat sat on a mat and dog ran home when rain fell over small green hills",
    "norsk": "katten satt på matten og hunden løp hjem da regnet kom over små grønne åser",
    "suomi": "kissa istui matolla ja koira juoksi kotiin kun vesi putosi vihreiden kukkuloiden yli",
}
CLIENTS = 20
RECIPE = """
[data]
sequence_length = 8
layout = "windows"

[model]
name = "cifg"
embedding_size = 8
hidden_size = 12

[client]
batch_size = 4
learning_rate = 0.5

[server]
rounds = 2
cohort = 12
evaluate_every = 1

[run]
devices = 1
trackers = []
"""
PRIVATE = """
[privacy]
mechanism = "gaussian"
noise_multiplier = 1.0
clip_norm = 0.3
delta = 0.01
"""
TREE = """
[federation]
personal_layers = "last 0.5"

[[federation.node]]
name = "world"
""" + "".join(
    f'\n[[federation.node]]\nname = "{name.title()}"\nparent = "world"\ngroups = ["{name}"]\n'
    for name in WORDS
)
BUDGET = ("--epsilon", "40", "--delta", "0.001", "--words", "40")


def secret(name, number):
    """A word that one client alone has."""
    return f"hemmelig{name}{'abcdefghijklmnopqrst'[number]}x"


def write_text(folder, name):
    rng, words = np.random.default_rng(len(name)), WORDS[name].split()
    folder.mkdir()
    with open(folder / "letters.jsonl", "w", encoding="utf-8") as file:
        for number in range(CLIENTS):
            lines = [" ".join(rng.choice(words, 7)) for _ in range(20)]
            lines[3] += f" {secret(name, number)}"
            entry = {"client": f"person-{name}-{number:02}", "text": "\n".join(lines)}
            file.write(json.dumps(entry, ensure_ascii=False) + "\n")


# ---- networks ------------------------------------------------------------------------------------


@contextlib.contextmanager
def networks(names):
    """The words before a command of each, and the server's address; loopback without privileges."""
    spaces = {name: f"fedlm-{os.getpid()}-{name[:3]}" for name in ("server", *names)}
    made = []

    def ip(*words):
        subprocess.run(["ip", *words], check=True, capture_output=True)

    try:
        try:
            for space in spaces.values():
                ip("netns", "add", space)
                made.append(space)
                ip("-n", space, "link", "set", "lo", "up")
            server = spaces["server"]
            ip("-n", server, "link", "add", "meet", "type", "bridge")
            ip("-n", server, "addr", "add", "10.77.0.1/24", "dev", "meet")
            ip("-n", server, "link", "set", "meet", "up")
            for number, name in enumerate(names, 2):
                ends = ("peer", "name", "wire0", "netns", spaces[name])
                ip("-n", server, "link", "add", f"to{number}", "type", "veth", *ends)
                ip("-n", server, "link", "set", f"to{number}", "master", "meet", "up")
                ip("-n", spaces[name], "addr", "add", f"10.77.0.{number}/24", "dev", "wire0")
                ip("-n", spaces[name], "link", "set", "wire0", "up")
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"no namespaces ({error}): processes on loopback")
            yield dict.fromkeys(spaces, ()), "127.0.0.1"
            return
        yield {n: ("ip", "netns", "exec", space) for n, space in spaces.items()}, "10.77.0.1"
    finally:
        for space in made:
            subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)


def command(folder, *words, before=()):
    """Runs a command of fedlm to its end in a folder, and returns what it printed as JSON."""
    environment = {**os.environ, "XLA_FLAGS": ""}
    done = subprocess.run(
        [*before, sys.executable, "-m", "fedlm.cli.main", *map(str, words), "--json"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=900,  # a busy machine; alone each takes half a minute at most
    )
    assert done.returncode == 0, f"{words}: {done.stdout[-500:]}{done.stderr[-2000:]}"
    return json.loads(done.stdout)


def wait_for(address, port, before, child):
    knock = f"import socket; socket.create_connection(({address!r}, {port}), 1)"
    for _ in range(120):
        words = [*before, sys.executable, "-c", knock]
        if subprocess.run(words, capture_output=True, check=False).returncode == 0:
            return
        assert child.alive, child.tail()
        time.sleep(0.5)
    raise AssertionError("the server does not listen")


# ---- the story -----------------------------------------------------------------------------------


def join_by_invitation(folder, server, name):
    """A node makes its own key; its public half goes to the operator, an invitation comes back."""
    command(folder, "node", "init", "kit", "--name", name)
    shutil.copyfile(folder / "kit" / "node.pub", server / f"{name}.pub")
    told = command(server, "federation", "add-node", "fed", name, "--key", f"{name}.pub")
    shutil.copytree((server / told["invitation"]).parent, folder / "invitation")
    accepted = command(folder, "node", "accept", "kit", "invitation")
    assert accepted["authority"] == told["authority"]


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    """Folders of the server and of all organisations after a private and a plain tree run."""
    base = tmp_path_factory.mktemp("three")
    server = base / "server"
    server.mkdir()
    for name in WORDS:
        write_text(base / name, name)
    with networks(tuple(WORDS)) as (before, address), children() as started:
        sent = []
        for name in WORDS:  # at each organisation
            command(base / name, "node", "words", "letters.jsonl", "--out", "words", *BUDGET)
            sent.append(f"{name}.json")
            shutil.copyfile(base / name / "words" / "words.json", server / sent[-1])
        command(server, "federation", "tokenizer", *sent, "--out", "tokenizer", "--vocabulary", 400)
        port = free_port()
        start = ("federation", "init", "fed", "--host", address, "--port", port)
        command(server, *start, "--quorum", 1, "--tokenizer", "tokenizer/tokenizer.json")
        for name in WORDS:
            join_by_invitation(base / name, server, name)
            like = ("--like", "kit/tokenizer/tokenizer.json", "--words", "words")
            command(base / name, "prepare", "letters.jsonl", "--out", "store", *like)
        serve = Child(
            ["federation", "serve", "fed"], server / "serve.log", server, before=before["server"]
        )
        started.append(serve)
        wait_for(address, port, before["server"], serve)
        for name in WORDS:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv(FRAMES, str(base / name / "frames"))
                patch.setenv("PYTHONPATH", str(Path(__file__).parent))
                join = ["node", "join", "kit", "--store", "store", "--devices", "1"]
                log = base / name / "join.log"
                node = Child(join, log, base / name, "watched_node", before=before[name])
            started.append(node)
        time.sleep(5)
        assert all(node.alive for node in started), [node.tail() for node in started]
        told = {}
        for run, table in (("private", PRIVATE), ("tree", TREE)):
            (server / f"{run}.toml").write_text(RECIPE + table)
            train = ("federation", "train", "fed", f"{run}.toml", "--out", f"runs/{run}")
            told[run] = command(server, *train, before=before["server"])
        time.sleep(2 * SECONDS)  # until the server has forgotten what it passed on
    return base, server, told


def test_everybody_holds_the_shared_model_and_its_own(story, tmp_path):
    base, server, told = story
    nodes = {node["name"]: node for node in told["tree"]["nodes"]}
    run = (server / "runs" / "tree" / "run.id").read_text()[:8]
    for name in WORDS:
        models = base / name / "kit" / "models" / run
        own = command(base / name, "evaluate", models, "--node", name)
        assert own["perplexity"] == pytest.approx(nodes[name.title()]["perplexity"], rel=1e-5)
        assert own["bits_per_byte"] == pytest.approx(nodes[name.title()]["bits_per_byte"], rel=1e-5)
        exported = command(base / name, "export", models, "--node", name, "--out", "exported")
        assert Path(base / name / exported["model"]).stat().st_size > 1000
        word = fedlm.load_run(models / "nodes" / name).predict(WORDS[name].split()[0])
        assert len(word) == 5
    private = (server / "runs" / "private" / "run.id").read_text()[:8]
    shared = {(base / n / "kit/models" / private / "model.safetensors").read_bytes() for n in WORDS}
    assert len(shared) == 1


def searched(base, runs=("private", "tree")):
    """A search for all that three organisations wrote, and for what their nodes sent in runs."""
    known = {(base / "server/runs" / run / "run.id").read_text()[:8] for run in runs}
    search, stores = Search(), {name: Store(base / name / "store") for name in WORDS}
    written = {
        name: set(np.concatenate([store.train(int(n)) for n in store.training_clients]).tolist())
        for name, store in stores.items()
    }
    for name, store in stores.items():
        with open(base / name / "letters.jsonl", encoding="utf-8") as file:
            for number, line in enumerate(file):
                entry = json.loads(line)
                search.text(entry["text"], f"text of {entry['client']}")
                search.word(entry["client"])
                search.word(secret(name, number))
        for number in range(len(store)):
            search.numbers(store.train(number), f"training tokens of {store.client(number)}")
            search.numbers(store.held(number), f"held-out tokens of {store.client(number)}")
        rare = written[name] - set().union(*(written[n] for n in WORDS if n != name))
        assert len(rare) >= 10
        for frame in (base / name / "frames").iterdir():
            if frame.name[:8] in known:
                rows = embedding(base, store, frame)
                for token in sorted(rare):
                    search.row(rows[token], f"what {name} sent of the embedding of token {token}")
    return search


def embedding(base, store, frame):
    recipe = load(base / "server" / "runs" / "tree" / "recipe.toml")
    like = model_spec(recipe, store.vocabulary).shapes()
    sent = dense().decode(frame.read_bytes(), like)
    (found,) = (x for x in jax.tree.leaves(sent) if x.shape == (store.vocabulary, 8))
    return np.asarray(found)


def test_nothing_of_their_text_is_in_the_servers_files(story, tmp_path):
    base, server, _ = story
    search = searched(base)
    assert search.leaks(server) == []
    keys = [(base / name / "kit" / "node.key").read_bytes() for name in WORDS]
    files = [file.read_bytes() for file in server.rglob("*") if file.is_file()]
    assert not any(key in file for key in keys for file in files), "private keys stay at nodes"
    # The same search finds each kind of leak.
    planted = {
        "norsk sent of the embedding": next((base / "norsk" / "frames").iterdir()),
        "tokens of person-suomi": base / "suomi" / "store" / "clients.arrow",
        "text of person-english": base / "english" / "letters.jsonl",
    }
    for what, file in planted.items():
        (tmp_path / "leak").write_bytes(b"a byte before" + file.read_bytes())
        assert any(what in leak for leak in search.leaks(tmp_path)), what
