"""A transport to nodes whose fedlm is one version older: each is spoken to in its own version.

In:       requests of this version; replies of this one or the one before.
Out:      requests as each node understands them; replies of this version.
Promise:  a node of the version before takes part in everything that its version knows; what it does
          not know is not sent, and becomes its refusal, with the way out. A node of the next
          version understands this one by itself.
Not here: which facts a version added (`engine/messages.py`).

`settings_before.txt` lists the settings of a recipe that the version before knew. A recipe for such
a node is sent without newer settings, if they are as they are where nobody sets them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib.resources import files
from typing import Any

import tomli_w

from fedlm.core.documents import toml_tables
from fedlm.core.errors import WireError
from fedlm.engine.dispatch import Presence, Transport, Undelivered
from fedlm.engine.messages import COMPATIBLE, REFUSAL, VERSION, Payload, at_version, encode_refusal
from fedlm.recipe.settings import Recipe, dump

BEFORE = COMPATIBLE[0]


class VersionedTransport:
    """A transport that finds out which version each node speaks, and keeps to it."""

    def __init__(self, inner: Transport) -> None:
        self.inner = inner
        self._older: set[int] = set()  # nodes that speak the version before
        self._sent: dict[str, tuple[int, Payload, int]] = {}  # until a reply came
        self._moved: dict[str, str] = {}  # a message that was sent again, in another version
        self._refused: dict[str, Payload] = {}  # what a node could not have understood

    def send(self, node_id: int, payload: Payload, round: int) -> str:
        """Send a payload as its node understands it."""
        if node_id in self._older:
            try:
                payload = older(payload)
            except WireError as error:
                message_id = f"unsent-{len(self._refused)}-{round}"
                self._refused[message_id] = encode_refusal(
                    f"this node has an older fedlm: {error} Install the server's there."
                )
                return message_id
        message_id = self.inner.send(node_id, payload, round)
        if message_id and node_id not in self._older:
            self._sent[message_id] = (node_id, payload, round)
        return message_id

    def fetch(self, message_id: str, max_bytes: int) -> Payload | None:
        """Return a reply in this version; repeat a request for a node of the older version."""
        if message_id in self._refused:
            return self._refused.pop(message_id)
        found = self.inner.fetch(self._moved.get(message_id, message_id), max_bytes)
        if found is None:
            return None
        sent = self._sent.pop(message_id, None)
        if sent is not None and found.kind == REFUSAL and found.facts.get("version") == BEFORE:
            node_id, payload, round = sent
            self._older.add(node_id)
            again = self.send(node_id, payload, round)
            if not again:
                raise Undelivered(message_id)
            if again in self._refused:
                return self._refused.pop(again)
            self._moved[message_id] = again
            return None
        self._moved.pop(message_id, None)
        return at_version(found, VERSION)

    def presence(self) -> dict[str, Presence]:
        """Return the presence of each registered node by name."""
        return self.inner.presence()


def older(payload: Payload) -> Payload:
    """Return a request as the version before writes it, or raise `WireError`."""
    told = at_version(payload, BEFORE)
    if "recipe" not in told.facts:
        return told
    return replace(told, facts={**told.facts, "recipe": older_recipe(told.facts["recipe"])})


def older_recipe(text: str) -> str:
    """Return a recipe without the settings that the version before did not know."""
    tables = toml_tables(text, "the recipe", WireError)
    usual = toml_tables(dump(Recipe()), "the recipe", WireError)
    known = set(files("fedlm.deploy").joinpath("settings_before.txt").read_text().split())
    return tomli_w.dumps({name: _known(name, of, usual, known) for name, of in tables.items()})


def _known(
    table: str, settings: Mapping[str, Any], usual: Mapping[str, Any], known: set[str]
) -> dict[str, Any]:
    kept = {}
    for name, value in settings.items():
        if f"{table}.{name}" in known:
            kept[name] = value
        elif usual.get(table, {}).get(name) != value:
            raise WireError(f"its version has no setting {table}.{name}.")
    return kept
