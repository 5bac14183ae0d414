"""Every node is heard before a run begins, however slow the server is."""

from types import SimpleNamespace

import pytest

from fedlm.deploy import registration
from fedlm.engine.dispatch import Presence
from fedlm.engine.messages import Hello, encode_hello

NAMES = [f"n{number:02d}" for number in range(30)]


class SlowTransport:
    """Takes a second for every call; a node replies after half a minute."""

    def __init__(self, lost=()):
        self.now, self.asked, self.lost = 0.0, [], set(lost)

    def _pass(self):
        self.now += 1.0
        assert self.now < 2000, "it would go on for ever"

    def presence(self):
        self._pass()
        return {name: Presence(number, True, "") for number, name in enumerate(NAMES)}

    def send(self, node_id, payload, round):
        self._pass()
        self.asked.append((NAMES[node_id], self.now))
        return str(len(self.asked) - 1)

    def fetch(self, message_id, max_bytes):
        self._pass()
        _, at = self.asked[int(message_id)]
        if self.now < at + 30 or message_id in self.lost:
            return None
        return encode_hello(Hello(2, "text", "tokenizer", "1"))


@pytest.mark.parametrize("lost", [(), ("3",)], ids=["all arrive", "one is lost"])
def test_many_nodes_are_heard_through_a_slow_server(lost, monkeypatch):
    transport = SlowTransport(lost)
    clock = SimpleNamespace(monotonic=lambda: transport.now, sleep=lambda seconds: None)
    monkeypatch.setattr(registration, "time", clock)
    found = registration.assign_members(transport, NAMES, lambda name, hello: None, lambda s: None)
    assert [a.name for a in found] == NAMES and [a.first for a in found] == list(range(0, 60, 2))
    assert len(transport.asked) < 3 * len(NAMES), "a node is not asked again at every look"
