"""The section of a report about a tree.

In:       the journal of a run whose header holds a tree.
Out:      HTML: the tree as a picture with perplexity, traffic and routes, the matrix of nodes and
          places and the attention between nodes as heat maps, curves per leaf, warnings.
Promise:  every number is in the journal or computed from it; the failure signs that are known
          (a backbone that diverges, attention that collapses) are said in plain words.
Not here: the rest of the page and privacy, also that of the leaves (`report.py`).
"""

from __future__ import annotations

from collections import Counter

from fedlm.core.documents import JsonObject
from fedlm.core.words import count, size
from fedlm.record import svg
from fedlm.record.facts import Facts
from fedlm.record.page import folded, heading, paragraph, switch, table
from fedlm.record.svg import Series, TreeNode

# A backbone diverges if its norm grows to LONGER times that of the first round, or if receiving it
# makes the perplexity of the leaves WORSE times as high.
LONGER, WORSE = 10.0, 2.0
# Entropy below ALONE: every node attends to itself only; above EVEN: all peers count alike.
ALONE, EVEN = 0.02, 0.98
MOST_CURVES = 8
MOST_COLUMNS, MOST_NODES = 20, 200  # of a table


def warned(run: Facts) -> list[str]:
    """Return the warnings about a tree, for the top of the page."""
    return [paragraph(f"Warning: {w}", "warning") for w in warnings(run.header, run.rounds)]


def section(run: Facts) -> list[str]:
    """Return the part of the page about the tree, or nothing for a flat run."""
    tree = run.header.get("tree")
    if tree is None:
        return []
    found, routes = run.headline[1], routed(run.rounds)
    nodes = reported_nodes(tree, run.rounds, found)
    parts = [
        heading("The tree"),
        svg.tree_drawing(nodes, routes, title="the tree of nodes"),
        paragraph(
            "Bars: perplexity of a node's model on the held-out text below it; squares: after its "
            "own steps. Branches are as thick as what travels on them."
            + (" Arcs: layers that were sent on as residuals." if routes else ""),
            "quiet",
        ),
        _numbers(nodes, found),
    ]
    if tree.get("left_out"):
        parts.append(paragraph(f"{count(tree['left_out'], 'client')} feed no place: left out."))
    parts += _curves(run.rounds)
    matrix = found.get("matrix")
    if matrix:
        parts.append("<h3>Perplexity of every node on the held-out text of every place</h3>")
        drawn = svg.heat_map(
            matrix["nodes"], matrix["places"], matrix["perplexity"], title="perplexity", log=True
        )
        parts.append(drawn)
        rows = [[n, *v] for n, v in zip(matrix["nodes"], matrix["perplexity"], strict=True)]
        if len(matrix["places"]) <= MOST_COLUMNS:
            parts.append(folded("As a table", table(["node", *matrix["places"]], rows)))
    return parts + _attention(tree, run.rounds) + _routes(run.rounds, routes)


def reported_nodes(tree: JsonObject, rounds: list[JsonObject], found: JsonObject) -> list[TreeNode]:
    """Return the nodes of a tree with their perplexity and the bytes they sent and received."""
    scores = {node["name"]: node for node in found.get("nodes") or []}
    made = []
    for name, parent in zip(tree["names"], tree["parents"], strict=True):
        score = scores.get(name, {})
        up, down = (_sum(rounds, name, way) for way in ("up_bytes", "down_bytes"))
        told = "" if parent is None else f"↑ {size(up)} ↓ {size(down)}"
        value, own = score.get("perplexity"), score.get("personal")
        made.append(TreeNode(name, parent, value, told, own, up, down))
    return made


def _numbers(nodes: list[TreeNode], found: JsonObject) -> str:
    """Return the picture of the tree as a table, with bits per byte where they are known."""
    bits = {node["name"]: node.get("bits_per_byte") for node in found.get("nodes") or []}
    head = ["node", "perplexity", "after own steps", "bits per byte", "sent up", "sent down"]
    rows = [
        [n.name, n.value, n.own, bits.get(n.name), size(n.up), size(n.down)]
        for n in nodes[:MOST_NODES]
    ]
    return folded("Nodes as a table", table(head, rows))


def _sum(rounds: list[JsonObject], name: str, what: str) -> int:
    return sum(r.get("nodes", {}).get(name, {}).get(what, 0) for r in rounds)


def warnings(header: JsonObject, rounds: list[JsonObject]) -> list[str]:
    """Return a warning for each known sign of failure in the journal."""
    said: list[str] = []
    if not rounds or "tree" not in header:
        return said
    first, last = rounds[0].get("nodes", {}), rounds[-1].get("nodes", {})
    for name, node in last.items():
        before, now = first.get(name, {}).get("backbone_norm"), node.get("backbone_norm")
        if before and now and now > LONGER * before:
            said.append(
                f"the backbone of {name} is {now / before:.0f} times as long as after the first "
                "round: it diverges. Lower federation.learning_rate or federation.momentum."
            )
    seen = [r for r in rounds if r.get("personal_perplexity")]
    if seen and seen[-1]["perplexity"] > WORSE * seen[-1]["personal_perplexity"]:
        ratio = seen[-1]["perplexity"] / seen[-1]["personal_perplexity"]
        said.append(
            f"leaves get {ratio:.1f} times worse when they receive the federation's backbone: "
            "their texts pull it apart. Put more layers into federation.personal_layers."
        )
    spread = [n["entropy_down"] for n in last.values() if n.get("entropy_down") is not None]
    temperature = header["recipe"]["federation"].get("temperature") or 0.0
    if spread and 0 < temperature < 1e6:
        mean = sum(spread) / len(spread)
        if mean < ALONE:
            said.append(f"attention collapsed: every node keeps to itself (entropy {mean:.3f}).")
        elif mean > EVEN:
            said.append(f"attention collapsed: all peers count alike (entropy {mean:.3f}).")
    return said


def _curves(rounds: list[JsonObject]) -> list[str]:
    scored = (r for r in rounds if r.get("places"))  # without rounds in which a leaf was away
    seen = [r for r in scored if all(p[0] is not None for p in r["places"].values())]
    if not seen:
        return []
    steps = [float(r["round"] + 1) for r in seen]
    kinds = [("as received", 0), ("after own steps", 1)]
    if any(place[1] is None for r in seen for place in r["places"].values()):
        kinds = kinds[:1]  # leaves whose own models stay private
    mean = [
        Series(
            name,
            steps,
            [sum(p[i] for p in r["places"].values()) / len(r["places"]) for r in seen],
            i,
        )
        for name, i in kinds
    ]
    each = [
        Series(place, steps, [r["places"][place][0] for r in seen], i)
        for i, place in enumerate(list(seen[-1]["places"])[:MOST_CURVES])
        if all(place in r["places"] for r in seen)
    ]
    panels = []
    for name, series in (("mean over leaves", mean), ("each leaf, as received", each)):
        drawn = svg.lines(series, x="rounds", y="perplexity", log_y=True)
        panels.append((name, svg.legend([(s.name, s.colour) for s in series]) + drawn))
    return ["<h3>What a leaf receives, and what it makes of it</h3>", switch("leaf", panels)]


def _attention(tree: JsonObject, rounds: list[JsonObject]) -> list[str]:
    """Show who listened to whom in the last round, and how evenly."""
    last = rounds[-1].get("nodes", {}) if rounds else {}
    parts: list[str] = []
    for way, title in (("attention_down", "going down"), ("attention_up", "going up")):
        told = {name: node[way] for name, node in last.items() if node.get(way)}
        heard = [name for name in tree["names"] if any(name in of for of in told.values())]
        if told:
            cells = [[of.get(name) for name in heard] for of in told.values()]
            title = f"attention {title}: rows listen to columns"
            parts.append(f"<h3>Attention {title.removeprefix('attention ')}</h3>")
            parts.append(svg.heat_map(list(told), heard, cells, title=title, digits=2))
    names = ("self_weight", "entropy_down", "entropy_up", "agreement")
    rows = [
        [name, *(node.get(n) for n in names)]
        for name, node in last.items()
        if any(node.get(n) is not None for n in names)
    ]
    head = ["node", "weight of self", "entropy going down", "going up", "agreement of children"]
    if rows:
        parts.append(folded("Attention in the last round, as a table", table(head, rows)))
    return parts


def routed(rounds: list[JsonObject]) -> Counter[tuple[str, str]]:
    """Return how many layers were sent on as residuals, by where from and where to."""
    return Counter((way["from"], way["to"]) for r in rounds for way in r.get("routes", []))


def _routes(rounds: list[JsonObject], counts: Counter[tuple[str, str]]) -> list[str]:
    if not counts:
        return []
    alike: dict[tuple[str, str], list[float]] = {}
    for way in (way for r in rounds for way in r.get("routes", [])):
        alike.setdefault((way["from"], way["to"]), []).append(way["likeness"][way["to"]])
    rows = [[a, b, n, sum(alike[a, b]) / n] for (a, b), n in counts.most_common(30)]
    total = count(sum(counts.values()), "layer")
    verb = "was" if sum(counts.values()) == 1 else "were"
    body = table(["from", "to", "layers", "mean likeness"], rows)
    return [folded(f"{total} {verb} routed as residuals; the most frequent ways", body)]
