"""A node that is killed at any step: the same bytes, and no second kind of share."""

import json
import stat

import pytest

from fedlm.core.errors import RecordError
from fedlm.secure import messages, server
from fedlm.secure.store import NodeStore
from fedlm.secure.terms import SecureError
from tests.secure.federation import added, identities, session, vectors


class Nodes:
    """Nodes on disk; each is opened anew for every answer, as if it were killed in between."""

    def __init__(self, folder, count=3):
        self.folder, self.count = folder, count

    def ask(self, step, place, s, *question):
        store = NodeStore(self.folder / str(place), identities(self.count)[place])
        try:
            return getattr(store, step)(s, *question)
        finally:
            store.close()

    def twice(self, step, place, s, *question):
        first = self.ask(step, place, s, *question)
        assert self.ask(step, place, s, *question) == first
        return first

    def upto(self, step, s, sent=None, without=()):
        """Go through an attempt; return the server's state and the questions of a step."""
        everybody = range(self.count)
        answers = {i: self.twice("keys", i, s) for i in everybody}
        state, question = server.take_keys(s, answers.items())
        if step == "share":
            return state, dict.fromkeys(everybody, question)
        answers = {i: self.twice("share", i, s, question) for i in everybody}
        state, each = server.take_shares(state, answers.items())
        if step == "mask":
            return state, each
        sent = vectors(self.count) if sent is None else sent
        there = [i for i in everybody if i not in without]
        answers = {i: self.twice("mask", i, s, each[i], sent[i]) for i in there}
        state, question = server.take_masked(state, answers.items())
        if step == "sign":
            return state, dict.fromkeys(there, question)
        answers = {i: self.twice("sign", i, s, question) for i in there}
        state, question = server.take_signatures(state, answers.items())
        return state, dict.fromkeys(there, question)


def test_a_sum_through_nodes_that_are_killed_after_every_answer(tmp_path):
    nodes, s, sent = Nodes(tmp_path), session(3), vectors(3)
    state, ask = nodes.upto("reveal", s, sent, without=[2])
    answers = {i: nodes.twice("reveal", i, s, question) for i, question in ask.items()}
    _, total = server.take_revealed(state, answers.items())
    assert (total == added(sent, [0, 1])).all()


def test_files_are_for_their_owner_alone(tmp_path):
    Nodes(tmp_path).upto("sign", session(3))
    for path in tmp_path.rglob("*"):
        if path.is_file():
            assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_no_vector_is_on_a_nodes_disk(tmp_path):
    """A digest of it is, so that another one is refused: masked vectors can be made again."""
    sent = vectors(3, size=5000)
    Nodes(tmp_path).upto("sign", session(3, size=5000), sent)
    for place in range(3):
        held = b"".join(path.read_bytes() for path in (tmp_path / str(place)).iterdir())
        assert len(held) < 5000
        part = sent[place][:4].tobytes()
        assert part not in held and part.hex().encode() not in held


def test_another_survivor_set_after_a_kill_is_refused(tmp_path):
    nodes, s = Nodes(tmp_path, 5), session(5)
    _, ask = nodes.upto("sign", s)
    nodes.ask("sign", 0, s, ask[0])
    with pytest.raises(SecureError, match="another question needs another attempt"):
        nodes.ask("sign", 0, s, messages.encode_survivors(s, (0, 1, 2)))


def test_a_node_that_signed_takes_part_in_no_other_attempt_at_the_round(tmp_path):
    nodes = Nodes(tmp_path)
    nodes.upto("reveal", session(3))
    with pytest.raises(SecureError, match="a round is opened once"):
        nodes.ask("keys", 0, session(3, attempt=1))
    nodes.ask("keys", 0, session(3, round=4))  # the next round goes on


def test_an_attempt_that_was_not_signed_may_be_given_up_and_is_then_over(tmp_path):
    nodes = Nodes(tmp_path)
    first, again = session(3), session(3, attempt=1)
    _, ask = nodes.upto("sign", first)
    keys = nodes.ask("keys", 0, first)
    assert messages.read_keys(again, nodes.ask("keys", 0, again)).mask not in keys
    for step, question in (("keys", ()), ("sign", (ask[0],))):
        with pytest.raises(SecureError, match="is over"):
            nodes.ask(step, 0, first, *question)
    with pytest.raises(SecureError, match="is over"):
        nodes.ask("keys", 0, session(3, round=2))


def test_an_attempt_keeps_its_terms_and_begins_with_keys(tmp_path):
    nodes = Nodes(tmp_path)
    with pytest.raises(SecureError, match="did not begin"):
        nodes.ask("share", 0, session(3), b"")
    nodes.ask("keys", 0, session(3))
    with pytest.raises(SecureError, match="other members or terms"):
        nodes.ask("keys", 0, session(3, threshold=3))


def test_the_seed_of_noise_is_the_same_after_a_kill_and_another_one_in_another_attempt(tmp_path):
    nodes = Nodes(tmp_path)
    found = []
    for s in (session(3), session(3, attempt=1)):
        nodes.ask("keys", 0, s)
        found.append(nodes.ask("noise_seed", 0, s))
        assert nodes.ask("noise_seed", 0, s) == found[-1]
    assert found[0] != found[1]


@pytest.mark.parametrize(
    "hurt", ["not json", "[]", "{}", "seed", "short", "place", "version", "long"]
)
def test_a_damaged_file_is_an_error_in_one_sentence(tmp_path, hurt):
    nodes, s = Nodes(tmp_path), session(3)
    nodes.ask("keys", 0, s)
    path = next((tmp_path / "0").glob("*.json"))
    facts = json.loads(path.read_text())
    if hurt == "seed":
        facts["state"]["seed"] = "xy"
    if hurt == "short":
        facts["state"]["seed"] = ""
    if hurt == "place":
        facts["state"]["place"] = 1
    if hurt == "version":
        facts["version"] = 2
    text = json.dumps(facts) if hurt in ("seed", "short", "place", "version") else hurt
    path.write_text(" " * (2**26 + 1) if hurt == "long" else text)
    with pytest.raises(RecordError, match="is damaged"):
        nodes.ask("keys", 0, s)


def test_one_process_at_a_time(tmp_path):
    store = NodeStore(tmp_path, identities(3)[0])
    with pytest.raises(RecordError, match="in use"):
        NodeStore(tmp_path, identities(3)[0])
    store.close()
    NodeStore(tmp_path, identities(3)[0]).close()


def test_a_state_is_on_the_disk_before_its_answer_or_there_is_no_answer(tmp_path, monkeypatch):
    nodes, s = Nodes(tmp_path), session(3)
    _, ask = nodes.upto("sign", s)
    before = {path: path.read_bytes() for path in (tmp_path / "0").glob("*.json")}

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("fedlm.secure.store.os.fsync", full)
        with pytest.raises(RecordError, match=r"No space left on device\. Nothing was sent"):
            nodes.ask("sign", 0, s, ask[0])
    assert before == {path: path.read_bytes() for path in (tmp_path / "0").glob("*.json")}
    # What was not answered was not decided: another list may still be signed.
    nodes.ask("sign", 0, s, messages.encode_survivors(s, (0, 1)))
