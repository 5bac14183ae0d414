"""One target per parser: bytes in; values or an error for users out, and nothing else.

In:       bytes that a fuzzer made.
Out:      nothing. Any exception but those a caller expects is a finding.
Promise:  every reader of files, messages and settings has a line in `TARGETS`, with seeds that it
          accepts, so that mutations begin close to what is real.
Not here: making inputs (`fuzz/run.py`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import hashlib
import io
import json
import os
import struct
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.random as jr
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from fedlm import lineage
from fedlm.cohort.sampling import Sampling
from fedlm.core.documents import json_value
from fedlm.core.errors import FedlmError
from fedlm.corpus import sources
from fedlm.corpus.hdf5 import Hdf5Reader
from fedlm.corpus.sources import Document
from fedlm.corpus.store import Store, StoreSettings, write
from fedlm.corpus.tokenizer import fit
from fedlm.corpus.tokenizer_file import load_tokenizer
from fedlm.deploy import certificates as pem
from fedlm.deploy import doctor, history, membership, registration, signing
from fedlm.deploy.flower import parcels as many_parts
from fedlm.deploy.guard import parse_recipe
from fedlm.deploy.node_ledger import NodeLedger, ToldFigures
from fedlm.deploy.policy import POLICY, load_policy
from fedlm.deploy.replies import Answers, Replies
from fedlm.deploy.round_stats import read_rounds
from fedlm.deploy.tables import read_table, write_table
from fedlm.deploy.versions import older_recipe
from fedlm.deploy.word_counts import read_words
from fedlm.deploy.workspace import KitSettings, WorkspaceSettings
from fedlm.engine import evaluate_messages
from fedlm.engine.buffered import outcome_of
from fedlm.engine.counters import Counters
from fedlm.engine.messages import (
    SUMS,
    Hello,
    Payload,
    Refused,
    TrainReply,
    TrainRequest,
    encode_hello,
    encode_reply,
    encode_request,
    read_hello,
    read_reply,
    read_request,
)
from fedlm.models import catalog
from fedlm.models.interop import gguf, huggingface
from fedlm.personal.cache import cache_from, cache_of
from fedlm.personal.neighbours import neighbours_from, neighbours_of
from fedlm.privacy import ledger, spending
from fedlm.privacy.ledger import Ledger, begin_entry, gaussian_entry, round_entry
from fedlm.privacy.plan import PrivacyPlan
from fedlm.recipe.settings import Data, dump, load
from fedlm.recipe.settings import parse as parse_tables
from fedlm.recipe.vocabulary import ORIGIN, vocabulary_of, write_origin
from fedlm.record import checkpoint, report
from fedlm.record.directory import RunDirectory
from fedlm.record.facts import facts_of
from fedlm.record.status import StatusFile, read_status
from fedlm.search import sweep
from fedlm.secure import node as secure_node
from fedlm.secure import server as secure_server
from fedlm.secure.local import made_up_members
from fedlm.secure.members import encode as encode_members
from fedlm.secure.members import first as first_members
from fedlm.secure.members import read as read_members
from fedlm.secure.messages import HEAD
from fedlm.secure.store import NodeStore
from fedlm.secure.terms import Session, Terms
from fedlm.watch.board import Board
from fedlm.wire.catalog import CODECS, named
from fedlm.wire.frame import open_frame, seal_frame

EXPECTED = (FedlmError, Refused, signing.Unsigned)


@dataclasses.dataclass(frozen=True)
class Target:
    """A parser under test."""

    read: Callable[[bytes], Any]
    seeds: Sequence[bytes]

    def try_one(self, data: bytes) -> bool:
        """Read bytes; return whether they were accepted. Let unexpected exceptions pass."""
        try:
            self.read(data)
        except EXPECTED:
            return False
        return True


class Files:
    """A temporary folder with files whose bytes a fuzzer chooses."""

    def __init__(self) -> None:
        # `fuzz/run.py` names the folder of this process, and removes it.
        root = os.environ.get("FEDLM_FUZZ_ROOT")
        self.path = Path(tempfile.mkdtemp(prefix="fedlm-fuzz-", dir=root))

    def put(self, name: str, data: bytes) -> Path:
        """Write a file, anew: an old one may still be mapped."""
        path = self.path / name
        path.unlink(missing_ok=True)
        path.write_bytes(data)
        return path


def file_target(
    name: str, read: Callable[[Path], Any], seeds: Sequence[bytes]
) -> Callable[[], Target]:
    """Return the maker of a target whose parser takes the path of a file."""

    def make() -> Target:
        files = Files()
        return Target(lambda data: read(files.put(name, data)), seeds)

    return make


# ---- settings --------------------------------------------------------------------------------

RECIPE = b"""
[data]
source = "letters.jsonl"
groups = ["north"]
[model]
name = "si-cifg"
embedding_size = 96
[client]
learning_rate = 0.5
[server]
rounds = 10
[privacy]
mechanism = "gaussian"
noise_multiplier = 1.0
delta = 1e-6
[federation]
levels = [0, 1]
[run]
prompts = ["we must"]
\0server.rounds=20\0run.prompts=["a"]\0model.name=lstm"""
SWEEP = b"""
recipe = "base.toml"
target = 120
[axes]
"model.name" = ["si-cifg", "cifg"]
"run.seed" = [0, 1]
[[cases]]
name = "slow"
"client.learning_rate" = 0.5
"""


def recipe() -> Target:
    """Read a recipe, and after null bytes the changes of a command line; save it and read again."""
    files = Files()

    def read(data: bytes) -> None:
        text, *changes = data.split(b"\0")
        made = load(
            files.put("r.toml", text), tuple(c.decode("utf-8", "surrogateescape") for c in changes)
        )
        load(files.put("again.toml", dump(made).encode()))

    return Target(read, [RECIPE, RECIPE.split(b"\0")[0]])


def sweeps() -> Target:
    """Read a sweep file and the recipe of every point."""
    files = Files()
    files.put("base.toml", b"[data]\nsource = 'sotu'\n")

    def read(data: bytes) -> None:
        found = sweep.read_sweep(files.put("s.toml", data))
        for point in found.points[:4]:
            sweep.name_of(point)
            sweep.recipe_of(found, point)

    return Target(read, [SWEEP])


def run_recipe() -> Target:
    """Resume a run whose saved recipe may be anything."""
    files = Files()
    text = dump(parse_tables({}))

    def read(data: bytes) -> None:
        files.put("recipe.toml", data)
        RunDirectory(files.path).claim(text, resume=True)

    return Target(read, [text.encode()])


# ---- text and stores -------------------------------------------------------------------------

LETTERS = [
    Document(f"c{i}", ("land", f"town{i % 2}"), f"first{i} and so on\nlast{i} and so on")
    for i in range(6)
]
LINE = json.dumps({"client": "a", "groups": ["x", "y"], "text": "one\ntwo"}).encode() + b"\n"


def _store(files: Files) -> Store:
    return write(LETTERS, files.path / "store", StoreSettings(vocabulary=50))


def manifest() -> Target:
    """Open a store with any manifest, and use what it says."""
    files = Files()
    made = _store(files)

    def read(data: bytes) -> None:
        files.put("store/store.json", data)
        found = Store(made.path)
        _ = found.settings, found.special, found.vocabulary, found.tokens_sha256, len(found)
        _ = found.tokenizer, found.ledgers, found.training_clients

    return Target(read, [(made.path / "store.json").read_bytes()])


def clients() -> Target:
    """Open a store with any Arrow file, and read all of it."""
    files = Files()
    made = _store(files)
    raw = (made.path / "clients.arrow").read_bytes()

    def read(data: bytes) -> None:
        files.put("store/clients.arrow", data)
        found = Store(made.path)
        for number in range(min(len(found), 100)):
            _ = found.client(number), found.groups(number), found.held_bytes(number)
            _ = found.train(number).sum(), found.held(number).sum()
        _ = found.training_clients, found.test_clients

    return Target(read, [raw])


def tokenizer() -> Target:
    """Load any tokenizer.json; encode and decode with it."""
    files = Files()
    made = [fit(["the cat sat"], kind, 300, True).library.to_str() for kind in ("words", "bpe")]

    def read(data: bytes) -> None:
        load_tokenizer(files.put("tokenizer.json", data), "<bos>", "<eos>")

    return Target(read, [text.encode() for text in made])


def special_tokens() -> Target:
    """Load a tokenizer beside any special_tokens_map.json."""
    files = Files()
    made = fit(["the cat sat"], "words", 300, True).library
    path = files.put("tokenizer.json", made.to_str().encode())
    told = {"bos_token": "<bos>", "eos_token": {"content": "<eos>"}, "unk_token": None}

    def read(data: bytes) -> None:
        files.put("special_tokens_map.json", data)
        load_tokenizer(path)

    return Target(read, [json.dumps(told).encode()])


def _documents(path: Path) -> None:
    for document in sources.read(str(path)):
        "".join([document.client, *document.groups, document.text]).encode()


def _parquet() -> bytes:
    out = io.BytesIO()
    table = {"client": ["a", "b"], "text": ["one", "two"], "groups": [["x"], ["y"]]}
    pq.write_table(pa.table(table), out)
    return out.getvalue()


# ---- records ---------------------------------------------------------------------------------

FLAT = {
    "kind": "round",
    "round": 0,
    "members": 2,
    "loss": 1.5,
    "seconds": 0.25,
    "tokens": 9,
    "upload_bytes": 9,
    "download_bytes": 9,
    "perplexity": 9.5,
}
HEADER: dict[str, Any] = {
    "kind": "header",
    "command": "fedlm train",
    "recipe": {"run": {"seed": 0}, "federation": {"temperature": 1.0}},
    "store": {"clients": 3},
    "parameters": 7,
    "start": {"perplexity": 60.0},
    "start_sha256": "00",
    "versions": {"jax": "0"},
    "tree": {"names": ["world", "a"], "parents": [-1, 0], "left_out": 1},
    "privacy": {"mechanism": "gaussian", "noise_multiplier": 1.0, "clip_norm": 1.0, "clip_noise": 0}
    | {"sampling": {"law": "poisson", "cohort": 2}},
}
FINAL = {
    "kind": "final",
    "test": {
        "perplexity": 9.0,
        "accuracy": 0.1,
        "clients": {"p10": 1.0},
        "groups": [{"a": {"perplexity": 2.0}, "b": {"perplexity": 3.0}}],
        "nodes": [{"name": "a", "perplexity": 2.0, "personal": 1.0, "parent": "world"}],
        "matrix": {"nodes": ["a"], "places": ["a"], "perplexity": [[2.0]]},
    },
    "baselines": {"test": {"unigram": 9.0}},
    "predictions": [{"prompt": "the", "next": [{"word": "cat", "probability": 0.5}]}],
    "privacy": {"sentence": "a claim", "epsilon": 1.0, "delta": 1e-6, "covers": ["a"]},
}
NODES = {"nodes": {"a": {"up_bytes": 3, "backbone_norm": 1.0, "entropy_down": 0.5}}}
NODES |= {"places": {"a": [9.0, 8.0]}, "personal_perplexity": 8.0}  # type: ignore[dict-item]


def _lines(*entries: Any) -> bytes:
    return b"".join(json.dumps(entry).encode() + b"\n" for entry in entries)


def journal() -> Target:
    """Make a report, warnings and figures of any journal."""
    files = Files()

    def read(data: bytes) -> None:
        files.put("journal.jsonl", data)
        facts = facts_of(files.path)
        _ = facts.tokens, facts.evaluated
        if hashlib.sha256(data).digest()[0] < 8:  # a page takes a hundred times as long
            report.report_page([facts])
            report.report_page([facts, facts])

    plain = {k: v for k, v in HEADER.items() if k not in ("tree", "privacy")}
    seeds = [_lines(HEADER, {**FLAT, **NODES}, FINAL), _lines(plain, FLAT, {**FLAT, "round": 1})]
    return Target(read, seeds)


def live_page() -> Target:
    """Show a run with any journal on the live page, in the list and in full."""
    files = Files()
    (files.path / "run").mkdir()
    files.put("run/recipe.toml", dump(parse_tables({})).encode())

    def read(data: bytes) -> None:
        files.put("run/journal.jsonl", data)
        files.put("run/nodes.jsonl", data)
        board = Board(files.path)
        json.dumps([board.rows(), board.details("run"), board.sweeps()])

    return Target(read, [_lines(HEADER, {**FLAT, **NODES}, FINAL), _lines(HEADER, ROUND_STATS)])


def run_status() -> Target:
    """Read any file that says what a run is doing."""
    files = Files()
    made = StatusFile(files.path / "made.json", command="train")
    made.begin()
    seed = (files.path / "made.json").read_bytes()
    return Target(lambda data: read_status(files.put("status.json", data)), [seed])


def _gaussian_plan() -> PrivacyPlan:
    sampling = Sampling(law="poisson", population=100, cohort=10)
    return PrivacyPlan(
        mechanism="gaussian",
        sampling=sampling,
        rounds=10,
        clip_norm=1.0,
        noise_multiplier=1.0,
        delta=1e-6,
    )


def run_ledger() -> Target:
    """Read any ledger of a run, and the plans in it."""
    files = Files()
    begun = begin_entry({"": _gaussian_plan()}) | {"kind": "begin"}
    seed = _lines(begun, round_entry(0, ledger.UNKNOWN), gaussian_entry("vocabulary", 4.0))

    def read(data: bytes) -> None:
        entries = Ledger(files.put("ledger.jsonl", data)).entries()
        if not ledger.plans_of(entries):
            spending.total_spent([entries], 1e-6)
        ledger.rounds_of(entries)

    return Target(read, [seed])


def node_ledger() -> Target:
    """Read any ledger of a node."""
    files = Files()
    made = files.path / "made.jsonl"
    book = NodeLedger(made)
    book.begin_run("0" * 32, _gaussian_plan(), "1" * 32)
    book.answer("0" * 32, 0, "2" * 32, ["a", "b"])
    book.tell_figures("0" * 32, 1, ToldFigures("3" * 32, 2.0, (0.5, -1.0)))
    book.close()

    def read(data: bytes) -> None:
        NodeLedger(files.put("ledger.jsonl", data)).close()

    return Target(read, [made.read_bytes()])


def ancestry() -> Target:
    """Read any record of what a run started from, and count the Gaussian noise in it."""
    files = Files()
    words = [begin_entry({}) | {"kind": "begin"}, gaussian_entry("vocabulary", 4.0)]
    before = lineage.Ancestor(run="1" * 32, name="b", private=True, clients=("a",), entries=words)
    record = lineage.Record(
        run="0" * 32,
        name="r",
        private=True,
        clients=("a",),
        start="",
        vocabulary=(words,),
        ancestors=(before,),
        traced=True,
    )
    lineage.write_lineage(files.path / "made.json", record)
    seed = (files.path / "made.json").read_bytes()

    def read(data: bytes) -> None:
        books = lineage.books_before(lineage.read_lineage(files.put("lineage.json", data)))
        if not any(ledger.plans_of(book) for book in books):
            spending.total_spent(books, 1e-6)

    return Target(read, [seed])


def saved_state() -> Target:
    """Load any checkpoint."""
    like = {"a": np.zeros((2, 3), np.float32), "b": np.zeros(2, np.int32)}
    seed = checkpoint.to_bytes(like, round=3)
    return Target(lambda data: checkpoint.from_bytes(data, like, "checkpoint"), [seed])


def word_cache() -> Target:
    """Load any cache of a member's words."""
    seed = cache_of(np.array([[1, 5, 6], [1, 5, 7]]), 8).to_bytes()
    return Target(lambda data: cache_from(data, 8, "cache"), [seed])


def own_neighbours() -> Target:
    """Load any features of a member's text; what is accepted gives chances."""
    rng = np.random.default_rng(0)
    made = neighbours_of(rng.normal(size=(20, 3)), rng.integers(0, 8, 20), 8)
    assert made is not None

    def read(data: bytes) -> None:
        found = neighbours_from(data, 8, 3, "neighbours").next(np.zeros(3, np.float32))
        assert np.isclose(found.sum(), 1.0)

    return Target(read, [made.to_bytes()])


# ---- federations -----------------------------------------------------------------------------


def federation_file() -> Target:
    """Read any federation.toml, node.toml and policy.toml."""
    files = Files()
    seeds = [
        b'name = "fed"\nhost = "localhost"\nport = 9443\nquorum = 0.5\ndeadline = 60\n',
        b'federation = "fed"\nname = "north"\nhost = "localhost"\nport = 9443\n',
        "".join(
            line.removeprefix("# ") + "\n" for line in POLICY.splitlines() if " = " in line
        ).encode(),
    ]

    def read(data: bytes) -> None:
        path = files.put("x.toml", data)
        for kind in (WorkspaceSettings, KitSettings):
            with contextlib.suppress(FedlmError):
                read_table(path, kind)
                return
        load_policy(path)

    return Target(read, seeds)


SEATS = [{"name": "north", "first": 0, "clients": 3, "text": "ab", "leaves": [["a", 3]]}]
ROUND_STATS = {
    "round": 0,
    "answered": ["north"],
    "late": [],
    "away": [],
    "refused": [],
    "garbage": [],
}


def request_recipe() -> Target:
    """Parse the recipe of a request, and write it for a node of the version before."""

    def read(data: bytes) -> None:
        text = data.decode("utf-8", "replace")
        parse_recipe(text)
        older_recipe(text)

    return Target(read, [b"[server]\nrounds = 10\n", RECIPE.split(b"\0")[0]])


REQUEST = TrainRequest(
    run="0123456789abcdef" * 2,
    recipe="[run]\nseed = 1",
    round=3,
    first=10,
    population=40,
    text="abc",
    members=(11, 13),
    clip_norm=1.0,
    each=True,
    longest=10,
    frames=(b"parameters",),
)


EVALUATION = evaluate_messages.EvaluateRequest(
    run="0123456789abcdef" * 2,
    recipe="[run]\nseed = 1",
    round=3,
    phase="final",
    first=10,
    population=40,
    text="abc",
    total=9,
    members=(11, 11),
    numbers=(0, 0),
    splits=("test", "validation"),
    models=(0, 0),
    rows=(0, 0),
    offsets=(0, 4),
    frames=(b"parameters",),
)
NOISY_EVALUATION = dataclasses.replace(
    EVALUATION,
    phase="noisy",
    total=0,
    members=(10, 13),
    splits=("validation", "validation"),
    offsets=(0, 0),
)
WORDS = {
    "format": 1,
    "kind": "bpe",
    "lowercase": True,
    "origin": dict.fromkeys(
        ("epsilon", "delta", "noise_multiplier", "threshold", "threshold_delta"), 0.5
    )
    | {"words_per_client": 10},
    "words": [["cat", 2.5]],
}
SURVEY = {"test": {"0": [2, 10, 40, 1]}}


def evaluation_messages() -> Target:
    """Read any facts and frames as a question about held-out text, and as its answer."""

    def read(data: bytes) -> None:
        head, *frames = data.split(b"\0")
        told = json_value(head, "a message", FedlmError)
        if not isinstance(told, dict) or not isinstance(told.get("facts"), dict):
            return
        payload = Payload(str(told.get("kind")), told["facts"], tuple(frames))
        for reader in (
            evaluate_messages.read_evaluate_request,
            lambda p: evaluate_messages.read_evaluate_reply(p, EVALUATION),
            lambda p: evaluate_messages.read_evaluate_reply(p, NOISY_EVALUATION),
        ):
            with contextlib.suppress(*EXPECTED):
                reader(payload)

    sums = dict.fromkeys(evaluate_messages.SUMS, 1.0)
    reply = evaluate_messages.EvaluateReply(round=3, phase="final", asks=(0, 1), sums=(sums, sums))
    numbers = dict.fromkeys(evaluate_messages.NOISY, -1.5)
    noisy = dataclasses.replace(reply, phase="noisy", sums=(numbers, numbers))
    made = [
        evaluate_messages.encode_evaluate_request(EVALUATION),
        evaluate_messages.encode_evaluate_reply(reply),
        evaluate_messages.encode_evaluate_request(NOISY_EVALUATION),
        evaluate_messages.encode_evaluate_reply(noisy),
    ]
    seeds = [
        b"\0".join([json.dumps({"kind": p.kind, "facts": dict(p.facts)}).encode(), *p.frames])
        for p in made
    ]
    return Target(read, seeds)


def messages() -> Target:
    """Read any facts and frames as each kind of message."""

    def read(data: bytes) -> None:
        head, *frames = data.split(b"\0")
        told = json_value(head, "a message", FedlmError)
        if not isinstance(told, dict) or not isinstance(told.get("facts"), dict):
            return
        payload = Payload(str(told.get("kind")), told["facts"], tuple(frames))
        readers: list[Callable[[Payload], Any]] = [
            read_request,
            read_hello,
            lambda p: read_reply(p, REQUEST),
        ]
        for reader in readers:
            with contextlib.suppress(*EXPECTED):
                reader(payload)

    reply = TrainReply(
        round=3,
        members=(11, 13),
        frames=(b"one", b"two"),
        sums=(dict.fromkeys(SUMS, 1.0), dict.fromkeys(SUMS, 2.0)),
    )
    fields = Hello._fields
    known = {"clients": 3, "tokenizer": "ab", "text": "cd", "version": "0", "counter": 0}
    hello = Hello(**{name: known[name] for name in fields if name in known})
    made = [encode_request(REQUEST), encode_reply(reply), encode_hello(hello)]
    seeds = [
        b"\0".join([json.dumps({"kind": p.kind, "facts": dict(p.facts)}).encode(), *p.frames])
        for p in made
    ]
    return Target(read, seeds)


def frames() -> Target:
    """Decode any body by the codec that the first byte names, with and without a right head."""
    like = {"a": np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4), "b": np.ones(3, "float32")}
    names = [example for family in CODECS.values() for example in family.examples]
    codecs = [named("wire.upload", name) for name in (*names, "uniform-8+zlib")]
    sent = [codec.encode(jax.tree.map(jax.numpy.asarray, like), jr.key(0)) for codec in codecs]
    bodies = [bytes(open_frame(raw, c.name)) for raw, c in zip(sent, codecs, strict=True)]

    def read(data: bytes) -> None:
        codec = codecs[data[0] % len(codecs)] if data else codecs[0]
        with contextlib.suppress(*EXPECTED):
            codec.decode(data[1:], like)
        codec.decode(seal_frame(codec.name, data[1:]), like)

    return Target(read, [bytes([i % len(codecs)]) + raw for i, raw in enumerate((*bodies, *sent))])


def certificates() -> Target:
    """Read any PEM as a certificate, as a key, and as the public half of one."""
    files = Files()
    made = pem.authority("fed")

    def read(data: bytes) -> None:
        accepted = 0
        for reader in (
            lambda: pem.check_current(files.put("cert.pem", data)),
            lambda: pem.names_of(data),
            lambda: pem.public_key_of(data),
            lambda: pem.load_private(data),
            lambda: pem.check_public(data),
        ):
            with contextlib.suppress(FedlmError):
                reader()
                accepted += 1
        if not accepted:
            raise FedlmError

    return Target(read, [made.certificate, made.key, pem.node_key()[1]])


def invitation() -> Target:
    """Accept any invitation into a kit."""
    files = Files()
    kit = membership.init_kit(files.path / "kit", "north")
    made = pem.authority("fed")
    told = membership.Invitation(
        federation="fed",
        name="north",
        host="localhost",
        port=9443,
        authority=made.certificate.decode("ascii"),
        certificate=pem.node(made, "north", (kit.path / "node.pub").read_bytes()).decode("ascii"),
    )
    write_table(files.path / "made.toml", told)

    def read(data: bytes) -> None:
        membership.accept(kit, files.put("invitation.toml", data))

    return Target(read, [(files.path / "made.toml").read_bytes()])


def actions() -> Target:
    """Read any history of a federation."""
    files = Files()
    history.note(files.path / "made.jsonl", "add-node", node="north")
    history.note(files.path / "made.jsonl", "renew", server=["localhost"])

    def read(data: bytes) -> None:
        for entry in history.read(files.put("history.jsonl", data)):
            _ = entry["time"], entry["user"], entry["action"]

    return Target(read, [(files.path / "made.jsonl").read_bytes()])


def signatures() -> Target:
    """Check any headers, a line each, as those of a signed request."""
    private, public = pem.node_key()
    identity = signing.Identity("north", public, time.time() + 1e9)
    verifier = signing.Verifier(lambda: {signing.key_id(public): identity})
    key = pem.load_private(private)
    made = signing.sign(key, public, "POST", "/x", b"body", signing.new_process())
    seed = "\n".join(f"{name}: {value}" for name, value in made.items()).encode()

    def read(data: bytes) -> None:
        lines = [line.partition(b": ") for line in data.split(b"\n")]
        verifier.check("POST", "/x", {name: value for name, _, value in lines}, 4)

    return Target(read, [seed])


def server_answer() -> Target:
    """Read any bytes as what a server tells a node of itself."""
    told = {"name": "north", "fedlm": "0.1.0", "protocol": 5}
    seeds = [json.dumps(told).encode(), json.dumps({"reason": "the clock differs"}).encode()]

    def read(data: bytes) -> None:
        with contextlib.suppress(FedlmError):
            doctor.read_answer(401, data)
        doctor.read_answer(200, data)

    return Target(read, seeds)


def parcels() -> Target:
    """Read any bytes as the table of a body of many parts, of any length."""
    entries = [many_parts.entry_of(b"one"), many_parts.Entry(5, b"x" * 32)]
    seeds = [many_parts.write_table(entries[:1]), many_parts.write_table(entries)]

    def read(data: bytes) -> None:
        with contextlib.suppress(FedlmError):
            many_parts.read_table(data, 90)
        many_parts.read_table(data)

    return Target(read, seeds)


def kept_replies() -> Target:
    """Read any facts of a reply that a relay or a buffered round has kept on disk."""
    files = Files()
    kept = Replies(files.path / "round")
    reply = TrainReply(round=3, members=(11,), frames=(b"one",), sums=(dict.fromkeys(SUMS, 1.0),))
    sums = dict.fromkeys(evaluate_messages.SUMS, 1.0)
    answer = evaluate_messages.EvaluateReply(round=3, phase="final", asks=(0,), sums=(sums,))
    kept.write("north", reply)
    kept.write("south", answer)
    seeds = [(files.path / "round" / f"{n}.json").read_bytes() for n in ("north", "south")]

    def read(data: bytes) -> None:
        files.put("round/north.json", data)
        with contextlib.suppress(FedlmError):
            kept.read("north", evaluate_messages.EvaluateReply)
        kept.read("north", TrainReply)

    return Target(read, seeds)


def taken_answers() -> Target:
    """Read any file that says which answers a buffered round took."""
    files = Files()
    answers = Answers(files.path, rounds_kept=3)
    seed = {"landed": [[3, "north"]], "lost": [[2, "south"]], "clock": 1.5}

    def read(data: bytes) -> None:
        files.put("taken-00000003.json", data)
        found = answers.taken(3)
        assert found is not None
        outcome_of(found, {(3, "north"), (2, "south")})

    return Target(read, [json.dumps(seed).encode()])


def flower_message() -> Target:
    """Put any objects together to a Flower message, and read it as a payload."""
    # The extra `federation`; imported here so that other targets run without it.
    from flwr.app import Message, RecordDict
    from flwr.app.message import make_message
    from flwr.supercore.inflatable.inflatable_object import iterate_object_tree

    from fedlm.deploy.flower.pull import Missing, assemble
    from fedlm.deploy.flower.push import push
    from fedlm.deploy.flower.records import Sender, from_records, request_message, to_records

    asked = request_message(Payload("train_request", {"round": 1}), 77, 1, Sender(1, 1, 1))
    payload = Payload("train_reply", {"round": 1, "sums": [1.0, 2.0]}, (b"one", b"two"))
    reply = Message(to_records(payload), reply_to=make_message(asked.metadata, RecordDict()))
    objects: dict[str, bytes] = {}
    trees: list[Any] = []

    def announce(head: Any, tree: Any) -> Any:
        trees.append(tree)
        return [part.object_id for part in iterate_object_tree(tree)], objects.__setitem__

    push(reply, announce)
    names = list(objects)

    def read(data: bytes) -> None:
        said, at = {}, 0
        for name in names:
            size = int.from_bytes(data[at : at + 4], "big")
            said[name] = data[at + 4 : at + 4 + size]
            at += 4 + size
        try:
            from_records(assemble(trees[0], said.__getitem__, 1 << 16).content)
        except Missing:
            return

    seed = b"".join(len(raw).to_bytes(4, "big") + raw for raw in objects.values())
    return Target(read, [seed])


# ---- secure sums -----------------------------------------------------------------------------


def secure_sums() -> Target:
    """Give any bytes to the step that the first two name, also behind a right head."""
    members, identities = made_up_members(3)
    terms = Terms(members=members, threshold=2, bits=8, size=4)
    session = Session(terms, "5ec05ec0", 0, 0)
    states = {i: secure_node.begin(session, identities[i]) for i in range(3)}
    steps: list[Callable[[bytes], Any]] = []
    seeds: list[bytes] = []

    def all_answer(ask: Callable[[int], tuple[Any, bytes]]) -> dict[int, bytes]:
        answers = {}
        for place in states:
            states[place], answers[place] = ask(place)
        seeds.append(answers[0])
        return answers

    def enter(take: Callable[..., Any], answers: dict[int, bytes], *before: Any) -> Any:
        steps.append(lambda data: take(*before, {**answers, 0: data}.items()))
        return take(*before, answers.items())

    vector = np.arange(4, dtype=np.uint32)
    answers = {i: secure_node.keys(identities[i], states[i]) for i in states}
    at, question = enter(secure_server.take_keys, answers, session)
    first = dict(states)
    steps.append(lambda data: secure_node.share(first[0], data))
    seeds += [answers[0], question]
    answers = all_answer(lambda i: secure_node.share(states[i], question))
    at, each = enter(secure_server.take_shares, answers, at)
    second = dict(states)
    steps.append(lambda data: secure_node.mask(second[0], data, vector))
    answers = all_answer(lambda i: secure_node.mask(states[i], each[i], vector))
    at, survivors = enter(secure_server.take_masked, answers, at)
    third = dict(states)
    steps.append(lambda data: secure_node.sign(identities[0], third[0], data))
    answers = all_answer(lambda i: secure_node.sign(identities[i], states[i], survivors))
    at, signatures = enter(secure_server.take_signatures, answers, at)
    fourth = dict(states)
    steps.append(lambda data: secure_node.reveal(fourth[0], data))
    answers = all_answer(lambda i: secure_node.reveal(states[i], signatures))
    enter(secure_server.take_revealed, answers, at)
    seeds += [each[0], survivors, signatures]
    heads = [b"", *(bytes(seed[:HEAD]) for seed in seeds)]

    def read(data: bytes) -> None:
        which = int.from_bytes(data[:2], "big")
        steps[which % len(steps)](heads[which // 16 % len(heads)] + data[2:])

    first_bytes = [which.to_bytes(2, "big") for which in range(16 * len(heads))]
    return Target(
        read,
        [
            which + seed[HEAD if number >= 16 else 0 :]
            for number, which in enumerate(first_bytes)
            if number % 16 < len(steps)
            for seed in [seeds[number % 16 % len(seeds)]]
        ],
    )


def secure_state() -> Target:
    """Read any file as a node's state of its secure sums."""
    files = Files()
    members, identities = made_up_members(3)
    terms = Terms(members=members, threshold=2, bits=8, size=4)
    session = Session(terms, "5ec05ec0", 0, 0)
    store = NodeStore(files.path, identities[0])
    store.keys(session)
    seed = (files.path / "5ec05ec0.json").read_bytes()

    def read(data: bytes) -> None:
        files.put("5ec05ec0.json", data)
        store.keys(session)

    return Target(read, [seed])


def member_list() -> Target:
    """Read any bytes as a federation's list of members."""
    members, identities = made_up_members(3)
    listed = first_members(members)
    return Target(
        read_members,
        [encode_members(listed), encode_members(listed.approved("node-0", identities[0]))],
    )


# ---- models made elsewhere -------------------------------------------------------------------

LLAMA = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}


def config() -> Target:
    """Read the sizes of a model from any config.json."""
    files = Files()

    def read(data: bytes) -> None:
        files.put("config.json", data)
        huggingface.read_base(files.path)

    return Target(read, [json.dumps(LLAMA).encode()])


TINY = catalog.Dimensions(
    vocab=8, embedding_size=8, hidden_size=16, layers=1, heads=2, key_heads=1, length=64, tied=False
)


def _llama() -> Any:
    """Return a tiny model of zeros."""
    return jax.tree.map(lambda x: np.zeros(x.shape, np.float32), catalog.shapes("llama", TINY))


def _shards_of(files: Files) -> Callable[[], Any]:
    """Return the reader of the weights in a folder; tracing its model would take all the time."""
    family, like = huggingface.FAMILIES["llama"], catalog.shapes("llama", TINY)
    return lambda: huggingface.read_weights(files.path, family, like, TINY)


def weights() -> Target:
    """Load any model.safetensors beside a right config.json."""
    files = Files()
    files.put("config.json", json.dumps(huggingface.config_of("llama", TINY, {})).encode())
    seed = huggingface.weights_of("llama", TINY, _llama())

    shards = _shards_of(files)

    def read(data: bytes) -> None:
        files.put("model.safetensors", data)
        shards()

    return Target(read, [seed])


def weights_index() -> Target:
    """Load a model whose index of files may say anything."""
    files = Files()
    files.put("config.json", json.dumps(huggingface.config_of("llama", TINY, {})).encode())
    files.put("model.safetensors", huggingface.weights_of("llama", TINY, _llama()))

    shards = _shards_of(files)

    def read(data: bytes) -> None:
        files.put("model.safetensors.index.json", data)
        shards()

    return Target(read, [b'{"weight_map": {"lm_head.weight": "model.safetensors"}}'])


def _gguf_file() -> bytes:
    """Return a GGUF file (version 3) of a tiny model, with its tokenizer."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    def listed(kind: int, items: list[bytes]) -> bytes:
        return struct.pack("<IIQ", 9, kind, len(items)) + b"".join(items)

    numbers = {
        "llama.embedding_length": 8,
        "llama.feed_forward_length": 16,
        "llama.block_count": 1,
        "llama.attention.head_count": 2,
        "llama.attention.head_count_kv": 1,
        "llama.context_length": 64,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }
    words = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
    }
    tokens = ["<s>", "</s>", "a", "b", "ab", "c", "1", "2"]
    kinds = listed(5, [struct.pack("<i", kind) for kind in (3, 3, 1, 1, 1, 1, 1, 1)])
    facts = {
        **{name: struct.pack("<I", 8) + text(value) for name, value in words.items()},
        **{name: struct.pack("<II", 4, value) for name, value in numbers.items()},
        "llama.attention.layer_norm_rms_epsilon": struct.pack("<If", 6, 1e-5),
        "tokenizer.ggml.tokens": listed(8, [text(token) for token in tokens]),
        "tokenizer.ggml.merges": listed(8, [text("a b")]),
        "tokenizer.ggml.token_type": kinds,
    }
    arrays = gguf.tensors.write(gguf.TABLE, _llama(), TINY.heads)
    infos, at = [], 0
    for name, array in arrays.items():
        shape = array.shape[::-1]
        infos.append(text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, 0, at))
        at += -(-array.nbytes // 32) * 32
    head = b"GGUF" + struct.pack("<IQQ", 3, len(arrays), len(facts))
    head += b"".join(text(name) + value for name, value in facts.items()) + b"".join(infos)
    body = b"".join(array.tobytes() + bytes(-array.nbytes % 32) for array in arrays.values())
    return head + bytes(-len(head) % 32) + body


def gguf_file() -> Target:
    """Read sizes, weights and tokenizer from any GGUF file."""
    import gguf as library  # noqa: F401  the extra `gguf`; without it the target is left out

    files, like = Files(), catalog.shapes("llama", TINY)
    readers: list[Callable[[Path], Any]] = [
        gguf.tokenizer_of,
        gguf.read_base,
        lambda path: gguf.read_weights(path, TINY, like),
    ]

    def read(data: bytes) -> None:
        readers[zlib.crc32(data) % len(readers)](files.put("m.gguf", data))

    return Target(read, [_gguf_file()])


def hdf5() -> Target:
    """Read any HDF5 file as text of Stack Overflow."""
    import h5py  # the extra `hdf5`; without it the target is left out

    files = Files()
    seeds = []
    for version in ("earliest", "latest"):
        path = files.path / f"{version}.h5"
        with h5py.File(path, "w", libver=version) as made:
            made["examples/a/tokens"] = ["one two", "three"]
        seeds.append(path.read_bytes())
    reader = Hdf5Reader(seconds=1.0)  # one process for all files, until one of them ends it

    def read(data: bytes) -> None:
        for client, lines in reader.clients(files.put("t.h5", data)):
            "".join([client, *lines]).encode()

    return Target(read, seeds)


def tokenizer_origin() -> Target:
    """Read any file that says where the tokenizer beside it came from."""
    files = Files()
    made = fit(["the cat sat"], "words", 300, True).library
    path = files.put("tokenizer.json", made.to_str().encode())
    given = load_tokenizer(path, "<bos>", "<eos>")
    write_origin(path, {"kind": "private", **WORDS["origin"]})
    seed = (files.path / ORIGIN).read_bytes()

    def read(data: bytes) -> None:
        files.put(ORIGIN, data)
        vocabulary_of(Data(tokenizer=str(path)), given)

    return Target(read, [seed])


# One line per parser; whoever adds a reader of files, messages or settings adds a line.
TARGETS: dict[str, Callable[[], Target]] = {
    "recipe": recipe,
    "sweep": sweeps,
    "run-recipe": run_recipe,
    "manifest": manifest,
    "clients": clients,
    "tokenizer": tokenizer,
    "special-tokens": special_tokens,
    "jsonl": file_target("t.jsonl", _documents, [LINE * 2]),
    "jsonl-gz": file_target("t.jsonl.gz", _documents, [gzip.compress(LINE, mtime=0)]),
    "csv": file_target("t.csv", _documents, [b"client,groups,text\na,x > y,one\nb,,two\n"]),
    "parquet": file_target("t.parquet", _documents, [_parquet()]),
    "journal": journal,
    "live-page": live_page,
    "status": run_status,
    "ledger": run_ledger,
    "node-ledger": node_ledger,
    "lineage": ancestry,
    "checkpoint": saved_state,
    "word-cache": word_cache,
    "own-neighbours": own_neighbours,
    "federation-file": federation_file,
    "seats": file_target("seats.json", registration.load_assignments, [json.dumps(SEATS).encode()]),
    "counters": file_target("counters.json", Counters, [b'{"north": 3}']),
    "rounds": file_target("rounds.jsonl", read_rounds, [_lines(ROUND_STATS, ROUND_STATS)]),
    "request-recipe": request_recipe,
    "messages": messages,
    "evaluation-messages": evaluation_messages,
    "survey": file_target("held_out.json", registration.load_survey, [json.dumps(SURVEY).encode()]),
    "words": file_target("words.json", read_words, [json.dumps(WORDS).encode()]),
    "frames": frames,
    "certificates": certificates,
    "invitation": invitation,
    "history": actions,
    "signatures": signatures,
    "server-answer": server_answer,
    "parcels": parcels,
    "kept-replies": kept_replies,
    "taken-answers": taken_answers,
    "flower-message": flower_message,
    "tokenizer-origin": tokenizer_origin,
    "config": config,
    "weights": weights,
    "weights-index": weights_index,
    "gguf": gguf_file,
    "hdf5": hdf5,
    "secure-sums": secure_sums,
    "secure-state": secure_state,
    "member-list": member_list,
}
