"""Nodes and servers one version apart work together, or say what to do."""

from dataclasses import replace

import pytest

from fedlm.core.errors import WireError
from fedlm.deploy import versions
from fedlm.deploy.local import redacted
from fedlm.deploy.versions import BEFORE, VersionedTransport, older_recipe
from fedlm.engine import messages
from fedlm.engine.dispatch import TRAINING, Dispatch, Quorum, RoundStats
from fedlm.engine.messages import (
    REFUSAL,
    SUMS,
    TRAIN_REQUEST,
    VERSION,
    Hello,
    Payload,
    TrainReply,
    TrainRequest,
    at_version,
    encode_hello_request,
    encode_request,
    read_hello,
    respond,
)
from fedlm.recipe.settings import Recipe, dump, parse
from tests.deploy.local import LocalTransport

REQUEST = TrainRequest(
    run="0" * 32,
    recipe=redacted(Recipe()),
    round=1,
    first=0,
    population=1,
    text="",
    members=(0,),
    clip_norm=1.0,
    each=False,
    longest=100,
    frames=(b"parameters",),
)


def today(payload):
    """A node of this version."""

    def train(request):
        sums = (dict.fromkeys(SUMS, 1.0),)
        return TrainReply(round=request.round, members=request.members, frames=(b"x",), sums=sums)

    hello = lambda: Hello(1, "", "", "0")  # noqa: E731
    return respond(payload, hello=hello, train=train, say=lambda text: None)


def yesterday(payload):
    """A node of the version before, which reads its own version alone and knows no new settings."""
    if payload.facts["version"] != BEFORE:
        return Payload(REFUSAL, {"version": BEFORE, "reason": "expected another version."})
    assert not set(messages.ADDED.get(payload.kind) or {}) & payload.facts.keys()
    reply = today(payload)
    assert reply.facts["version"] == BEFORE
    return reply


def tomorrow(payload):
    """A node of the next version, which understands this one and answers in it."""
    assert payload.facts["version"] == VERSION
    return today(payload)


def round_of(request=REQUEST, **nodes):
    stats = RoundStats(1)
    transport = VersionedTransport(LocalTransport(nodes))
    asked = {name: request for name in nodes}
    dispatch = Dispatch(
        transport, Quorum(quorum=0.1, deadline=5.0), asked, stats, exchange=TRAINING
    )
    for name, _ in dispatch.replies():
        stats.answered.append(name)
    return stats, transport


@pytest.mark.parametrize("node", [yesterday, today, tomorrow])
def test_one_version_apart_works(node):
    stats, transport = round_of(a=node, b=today)
    assert stats.answered == ["a", "b"] and not stats.refused and not stats.garbage
    message = transport.send(2, encode_hello_request(), 0)
    reply = None
    while reply is None:
        reply = transport.fetch(message, 1000)
    assert read_hello(reply).clients == 1


def test_an_older_node_is_asked_in_vain_once_only():
    _, transport = round_of(a=yesterday)
    assert len(transport.inner.sent) == 2
    transport.send(2, encode_request(REQUEST), 2)
    assert [p.facts["version"] for _, p in transport.inner.sent.values()] == [5, 4, 4]


def test_what_an_older_node_does_not_know_is_its_refusal_with_the_way_out():
    wanting = replace(REQUEST, remembered=(0,))
    stats, _ = round_of(wanting, a=yesterday, b=today)
    assert stats.answered == ["b"]
    assert "'remembered'" in stats.refused["a"] and "Install" in stats.refused["a"]


def test_a_recipe_is_sent_without_settings_that_nobody_set(monkeypatch):
    told = redacted(Recipe())
    short = older_recipe(told)
    before = parse_names(short)
    known = versions.files("fedlm.deploy").joinpath("settings_before.txt").read_text().split()
    assert before <= set(known) and before < parse_names(told)
    assert dump(parse(versions.toml_tables(short, "", WireError))) == dump(
        parse(versions.toml_tables(told, "", WireError))
    ), "left out, they are as they were"


def parse_names(text):
    tables = versions.toml_tables(text, "", WireError)
    return {f"{table}.{name}" for table, of in tables.items() for name in of}


def test_a_new_setting_that_is_set_needs_the_new_version():
    text = redacted(Recipe())
    (new, *_) = sorted(parse_names(text) - parse_names(older_recipe(text)))
    table, _, name = new.partition(".")
    tables = versions.toml_tables(text, "", WireError)
    tables[table][name] = "another value"
    with pytest.raises(WireError, match=f"no setting {new}"):
        older_recipe(versions.tomli_w.dumps(tables))


@pytest.mark.parametrize("version", [VERSION + 1, BEFORE - 1, "5", None, True])
def test_versions_further_apart_say_what_to_do(version):
    payload = Payload(TRAIN_REQUEST, {**encode_request(REQUEST).facts, "version": version})
    reply = today(payload)
    assert reply.kind == REFUSAL and reply.facts["version"] == VERSION
    assert "Install the same fedlm" in reply.facts["reason"]


def test_a_message_survives_the_version_before():
    payload = encode_request(REQUEST)
    assert at_version(at_version(payload, BEFORE), VERSION) == payload
    with pytest.raises(WireError, match="has no 'evaluate_request'"):
        at_version(Payload("evaluate_request", {"version": VERSION}), BEFORE)
