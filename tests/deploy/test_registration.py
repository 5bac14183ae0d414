"""Every node is heard before a run begins, however slow the server is."""

from types import SimpleNamespace

import pytest

from fedlm.deploy import registration
from fedlm.deploy.networked_run import networked_run
from fedlm.engine.dispatch import Assignment, Presence
from fedlm.engine.messages import Hello, encode_hello
from fedlm.recipe.parts import open_store, resolve
from fedlm.recipe.settings import dump, load, parse
from tests.conftest import write_tiny

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


def test_nodes_of_a_run_are_told_the_same_recipe_after_an_upgrade(tmp_path):
    text = dump(parse({"client": {"learning_rate": 0.5}}))
    assert registration.as_told(tmp_path, text) == text
    before = text.replace("secure_neighbors = 0\n", "")  # as a version without it would write it
    assert before != text
    registration.keep_told(tmp_path, before)
    registration.keep_told(tmp_path, text)  # it is kept once
    assert registration.as_told(tmp_path, text) == before
    other = dump(parse({"client": {"learning_rate": 0.25}}))
    assert registration.as_told(tmp_path, other) == other


def test_questions_carry_the_recipe_that_was_kept(tmp_path):
    write_tiny(tmp_path)
    recipe = load(tmp_path / "tiny.toml")
    store = open_store(recipe.data, tmp_path / "text")
    resolved = resolve(recipe, store)
    nodes = (Assignment("north", 0, 4), Assignment("south", 4, 4))
    text = networked_run(resolved, store, nodes, tmp_path / "run").engine.recipe
    before = text.replace("secure_neighbors = 0\n", "")
    assert before != text
    (tmp_path / "run").mkdir()
    registration.keep_told(tmp_path / "run", before)
    assert networked_run(resolved, store, nodes, tmp_path / "run").engine.recipe == before
