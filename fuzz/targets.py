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
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.random as jr
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from fedlm import lineage, sweep
from fedlm.cohort.sampling import Sampling
from fedlm.core.documents import json_value
from fedlm.core.errors import FedlmError
from fedlm.corpus import sources
from fedlm.corpus.sources import Document
from fedlm.corpus.store import Store, StoreSettings, write
from fedlm.corpus.tokenizer import fit
from fedlm.corpus.tokenizer_file import load_tokenizer
from fedlm.deploy import registration, status
from fedlm.deploy.certificates import authority, check_current, load_private
from fedlm.deploy.guard import parse_recipe
from fedlm.deploy.node_ledger import NodeLedger
from fedlm.deploy.policy import POLICY, load_policy
from fedlm.deploy.tables import read_table
from fedlm.deploy.word_counts import read_words
from fedlm.deploy.workspace import KitSettings, WorkspaceSettings
from fedlm.engine import evaluate_messages
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
from fedlm.models.interop import huggingface
from fedlm.privacy import ledger
from fedlm.privacy.ledger import Ledger, begin_entry, gaussian_entry, round_entry
from fedlm.privacy.plan import PrivacyPlan
from fedlm.recipe.settings import dump, load
from fedlm.recipe.settings import parse as parse_tables
from fedlm.record.facts import facts_of
from fedlm.record import checkpoint, report
from fedlm.record.directory import RunDirectory
from fedlm.secure import node as secure_node
from fedlm.secure import server as secure_server
from fedlm.secure.local import made_up_members, terms_for
from fedlm.secure.members import encode as encode_members
from fedlm.secure.members import first as first_members
from fedlm.secure.members import read as read_members
from fedlm.secure.messages import HEAD
from fedlm.secure.store import NodeStore
from fedlm.secure.terms import Session
from fedlm.wire.catalog import CODECS, named
from fedlm.wire.frame import open_frame, seal_frame

EXPECTED = (FedlmError, Refused)
# The folder of this process, which `fuzz/run.py` makes and removes.
ROOT = os.environ.get("FEDLM_FUZZ_ROOT")


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
        self.path = Path(tempfile.mkdtemp(prefix="fedlm-fuzz-", dir=ROOT))

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
            report.page([facts])
            report.page([facts, facts])

    plain = {k: v for k, v in HEADER.items() if k not in ("tree", "privacy")}
    seeds = [_lines(HEADER, {**FLAT, **NODES}, FINAL), _lines(plain, FLAT, {**FLAT, "round": 1})]
    return Target(read, seeds)


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
        ledger.plans_of(entries)
        ledger.rounds_of(entries)

    return Target(read, [seed])


def node_ledger() -> Target:
    """Read any ledger of a node."""
    files = Files()
    made = files.path / "made.jsonl"
    book = NodeLedger(made)
    book.begin_run("0" * 32, _gaussian_plan(), "1" * 32)
    book.answer("0" * 32, 0, "2" * 32, ["a", "b"])
    book.close()

    def read(data: bytes) -> None:
        NodeLedger(files.put("ledger.jsonl", data)).close()

    return Target(read, [made.read_bytes()])


def ancestry() -> Target:
    """Read any record of what a run started from."""
    files = Files()
    record = lineage.Record(
        run="0" * 32,
        name="r",
        private=True,
        clients=("a",),
        start="",
        vocabulary=(),
        ancestors=(),
        traced=True,
    )
    lineage.write(files.path / "made.json", record)
    seed = (files.path / "made.json").read_bytes()
    return Target(lambda data: lineage.read(files.put("lineage.json", data)), [seed])


def saved_state() -> Target:
    """Load any checkpoint."""
    like = {"a": np.zeros((2, 3), np.float32), "b": np.zeros(2, np.int32)}
    seed = checkpoint.to_bytes(like, round=3)
    return Target(lambda data: checkpoint.from_bytes(data, like, "checkpoint"), [seed])


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
        load_policy(path)

    return Target(read, seeds)


SEATS = [{"name": "north", "first": 0, "clients": 3, "text": "ab", "leaves": [["a", 3]]}]
TALLIES = {"round": 0, "answered": ["north"], "late": [], "away": [], "refused": [], "garbage": []}


def request_recipe() -> Target:
    """Parse the recipe of a request."""
    text = RECIPE.split(b"\0")[0]
    return Target(lambda data: parse_recipe(data.decode("utf-8", "replace")), [text])


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
            evaluate_messages.read_request,
            lambda p: evaluate_messages.read_reply(p, EVALUATION),
        ):
            with contextlib.suppress(*EXPECTED):
                reader(payload)

    sums = dict.fromkeys(evaluate_messages.SUMS, 1.0)
    reply = evaluate_messages.EvaluateReply(round=3, phase="final", asks=(0, 1), sums=(sums, sums))
    made = [evaluate_messages.encode_request(EVALUATION), evaluate_messages.encode_reply(reply)]
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
    """Decode any body, with a right checksum, by each family of codecs."""
    like = {"a": np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4), "b": np.ones(3, "float32")}
    names = [example for family in CODECS.values() for example in family.examples]
    codecs = [named("wire.upload", name) for name in (*names, "uniform-8+zlib")]
    sent = [codec.encode(jax.tree.map(jax.numpy.asarray, like), jr.key(0)) for codec in codecs]
    bodies = [bytes(open_frame(raw, c.name)) for raw, c in zip(sent, codecs, strict=True)]

    def read(data: bytes) -> None:
        for codec in codecs:
            with contextlib.suppress(*EXPECTED):
                codec.decode(data, like)
            with contextlib.suppress(*EXPECTED):
                codec.decode(seal_frame(codec.name, data), like)

    return Target(read, [*sent, *bodies])


def certificates() -> Target:
    """Read any PEM as a certificate and as a key."""
    files = Files()
    made = authority("fed")

    def read(data: bytes) -> None:
        try:
            check_current(files.put("cert.pem", data))
        except FedlmError:
            load_private(data)

    return Target(read, [made.certificate, made.key])


# ---- secure sums -----------------------------------------------------------------------------


def secure_sums() -> Target:
    """Give any bytes, also behind a right head, to every step of a node and of the server."""
    members, identities = made_up_members(3)
    session = Session(terms_for(members, 4, 8), "5ec05ec0", 0, 0)
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
    heads = [bytes(seed[:HEAD]) for seed in seeds]

    def read(data: bytes) -> None:
        for step in steps:
            with contextlib.suppress(*EXPECTED):
                step(data)
        for head in heads:
            for step in steps:
                with contextlib.suppress(*EXPECTED):
                    step(head + data)

    return Target(read, [*seeds, *(seed[HEAD:] for seed in seeds)])


def secure_state() -> Target:
    """Read any file as a node's state of its secure sums."""
    files = Files()
    members, identities = made_up_members(3)
    session = Session(terms_for(members, 4, 8), "5ec05ec0", 0, 0)
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
    "ledger": run_ledger,
    "node-ledger": node_ledger,
    "lineage": ancestry,
    "checkpoint": saved_state,
    "federation-file": federation_file,
    "seats": file_target("seats.json", registration.load_assignments, [json.dumps(SEATS).encode()]),
    "counters": file_target("counters.json", Counters, [b'{"north": 3}']),
    "rounds": file_target("rounds.jsonl", status.read_rounds, [_lines(TALLIES, TALLIES)]),
    "request-recipe": request_recipe,
    "messages": messages,
    "evaluation-messages": evaluation_messages,
    "survey": file_target("held_out.json", registration.load_survey, [json.dumps(SURVEY).encode()]),
    "words": file_target("words.json", read_words, [json.dumps(WORDS).encode()]),
    "frames": frames,
    "certificates": certificates,
    "config": config,
    "secure-sums": secure_sums,
    "secure-state": secure_state,
    "member-list": member_list,
}
