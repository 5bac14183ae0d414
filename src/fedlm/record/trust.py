"""Who sees what of a client's text in a run, as rows of a table.

In:       the recipe of a run, as its header holds it, and where its members were.
Out:      rows of words: a party, and what it sees.
Promise:  the rows follow from settings alone; what nobody can promise is in `NOT_DEFENDED`.
Not here: the page that shows them (`report`), why they hold (docs/trust.md).
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from fedlm.core.documents import JsonMapping, read_json
from fedlm.core.errors import RecordError
from fedlm.record.directory import ASSIGNMENTS

HEAD = ("who", "one client's update", "a node's sum", "the round's sum", "a node's figures")
NOT_DEFENDED = (
    "poisoning: masks hide a bad update as well as a good one",
    "denial of service: nodes that stay away lose rounds",
    "side channels: when a node answers, and how long it computes",
    "a server that draws one client alone: without noise at nodes the sum is then its update",
)


class TrustRow(NamedTuple):
    """One party, and what it sees."""

    who: str
    update: str
    node_sum: str
    round_sum: str
    figures: str  # sums over the held-out text of a node, which it tells without masks


NETWORK = TrustRow("readers of the network", *["no (TLS)"] * 4)


class Whereabouts(NamedTuple):
    """Where the members of a run were."""

    network: bool = False  # at nodes, and not in a simulation
    relays: bool = False  # some of those nodes below relays


def whereabouts(folder: Path) -> Whereabouts:
    """Return where the members of the run in a folder were."""
    file = folder / ASSIGNMENTS
    if not file.is_file():
        return Whereabouts()
    try:
        seats = read_json(file, str(file), RecordError)
        return Whereabouts(True, any(seat.get("leaves") for seat in seats))
    except (AttributeError, TypeError, ValueError):
        raise RecordError(f"{file} is damaged: expected a list of nodes.") from None


def trust_rows(recipe: JsonMapping, *, network: bool, relays: bool = False) -> tuple[TrustRow, ...]:
    """Return who sees what in a run, the most trusted first.

    >>> trust_rows({}, network=True)[1].node_sum
    'yes'
    """
    if recipe.get("federation"):
        return _tree_rows(recipe, network, relays)
    wire, privacy = recipe.get("wire", {}), recipe.get("privacy", {})
    secure, mechanism = int(wire.get("secure_nodes", 0) or 0), privacy.get("mechanism")
    at_nodes = mechanism == "distributed"
    each = _sent_one_by_one(recipe)
    if not network:
        whole = "yes: all text is in one place"
        sums = "simulated" if secure else "yes"
        row = TrustRow("whoever runs the simulation", whole, sums, "yes", "yes")
        return (row, _readers(recipe))
    figures = _figures(recipe)
    server = TrustRow(
        "the server",
        "no" if secure else "yes, one by one" if each else "only where a node sends one alone",
        "no" if secure else "yes",
        "only with noise" if at_nodes else "yes, before noise" if mechanism else "yes",
        figures,
    )
    others = TrustRow("other nodes", "no", "no", "no: the model of each round", "no")
    if secure:
        threshold = int(wire.get("secure_threshold", 0) or 0) or max(
            secure // 2 + 1, -(-2 * secure // 3)
        )
        honest = int(privacy.get("honest_nodes", 0) or 0)
        together = f"the server and {threshold - (honest or threshold)} nodes together"
        stay = f"at least {honest or threshold} honest nodes"
        if relays:  # each list of members has its own threshold: the same share of it
            together = "the server and members of its list together"
            stay = f"{honest} honest members" if honest else f"{threshold} in {secure} members"
            stay = f"at least {stay} of each list"
        others = TrustRow(
            together,
            "no",
            f"no: {stay} stay in a sum",
            "only with noise" if at_nodes else "yes",
            figures,
        )
    relay = TrustRow(
        "a relay, of the nodes below it",
        server.update,
        server.node_sum,
        "their sum" + (", only with noise" if at_nodes else ", before noise" if mechanism else ""),
        figures,
    )
    rows = [
        TrustRow(
            "the client's own node", "yes", "its own", "no: the model of each round", "its own"
        ),
        *([relay] if relays else []),
        server,
        others,
        NETWORK,
        _readers(recipe),
    ]
    return tuple(rows)


def _sent_one_by_one(recipe: JsonMapping) -> bool:
    """Return whether nodes send every member's update, and not their sum.

    Updates that are rounded, or that train a part of their own, are not added up at nodes; a rule
    that looks at single updates, or bounds them, needs them at the server.
    """
    wire, server = recipe.get("wire", {}), recipe.get("server", {})
    return (
        wire.get("upload", "float32") != "float32"
        or wire.get("trainable") == "member"
        or server.get("aggregate", "mean") != "mean"
        or bool(server.get("update_norm"))
    )


def _tree_rows(recipe: JsonMapping, network: bool, relays: bool) -> tuple[TrustRow, ...]:
    """Return who sees what of a tree, whose leaves are nodes with all their text as one member.

    A simulation of leaves that keep something holds all of it, its noise too.
    """
    tree = recipe["federation"]
    noisy = bool(tree.get("noise_multiplier", 0))
    stay = tree.get("temperature") == 0
    readers, figures = _readers(recipe), _figures(recipe)
    if not network:
        whole = "yes: all text is in one place"
        return (TrustRow("whoever runs the simulation", whole, "yes", "yes", "yes"), readers)
    change = "of its whole text, clipped and with noise" if noisy else "of its whole text"
    if not noisy and tree.get("clip_norm", 0):
        change += ", clipped"
    if stay:
        change += ", without its personal layers"
    above = "the models of all places, " + ("made of noisy changes" if noisy else "as they are")
    if stay:
        above = "the backbones of all places" + (", made of noisy changes" if noisy else "")
    elif not noisy and tree.get("clip_norm", 0):
        above = "the models of all places, made of clipped changes"
    own = "its own model, which stays there" if noisy or stay else "its own model"
    rows = [
        TrustRow("the client's own node", "yes", "its own", own, "its own"),
        TrustRow("the server", "no", f"the change of each leaf: {change}", above, figures),
        TrustRow("other nodes", "no", "no", "what the server sends them of its models", "no"),
        NETWORK,
        readers,
    ]
    if relays:
        who = "a relay, of the leaves below it"
        rows.insert(1, TrustRow(who, *rows[1][1:3], "what they get", figures))
    return tuple(rows)


def _readers(recipe: JsonMapping) -> TrustRow:
    told = "only with noise" if _protected(recipe) else "what models and figures tell"
    figures = _figures(recipe, told=True)
    return TrustRow("readers of the run", "no", "no", told, figures)


def _protected(recipe: JsonMapping) -> bool:
    """Return whether noise protects clients, or the leaves of a tree."""
    tree, privacy = recipe.get("federation") or {}, recipe.get("privacy", {})
    return bool(tree.get("noise_multiplier", 0) or privacy.get("mechanism"))


def _figures(recipe: JsonMapping, *, told: bool = False) -> str:
    """Say which figures of a node's held-out text leave it, or are `told` of all text.

    Nodes score models unless the recipe names held-out text of the server.
    """
    data, privacy = recipe.get("data", {}), recipe.get("privacy", {})
    hidden = _protected(recipe) and not privacy.get("reveal")
    here = any(data.get(name) for name in ("source", "store", "stores"))
    exact = "of held-out clients" if hidden else "yes"
    parts = [exact] if told or not here else []
    if hidden and privacy.get("evaluation_noise"):
        parts.append("of training clients only with noise")
    return "; ".join(parts) or "no: the server has held-out text of its own"
