"""The section of a report about a tree.

In:       the journal of a run whose header holds a tree.
Out:      HTML: the tree with perplexity and traffic, the matrix of nodes and places, attention,
          routes of residuals, warnings.
Promise:  every number is in the journal or computed from it; the failure signs that are known
          (a backbone that diverges, attention that collapses) are said in plain words.
Not here: the rest of the page and privacy, also that of the leaves (`report.py`).
"""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Callable
from typing import Any

from fedlm.record import plots
from fedlm.record.plots import Series

HtmlTable = Callable[[list[str], list[list[Any]]], str]
# A backbone diverges if its norm grows to LONGER times that of the first round, or if receiving it
# makes the perplexity of the leaves WORSE times as high.
LONGER, WORSE = 10.0, 2.0
# Entropy below ALONE: every node attends to itself only; above EVEN: all peers count alike.
ALONE, EVEN = 0.02, 0.98


def section(
    header: dict[str, Any], rounds: list[dict[str, Any]], final: dict[str, Any], table: HtmlTable
) -> list[str]:
    """Return the part of the page about the tree, or nothing for a flat run."""
    tree = header.get("tree")
    if tree is None:
        return []
    parts = ["<h2>The tree</h2>"]
    parts += [f"<p><b>Warning:</b> {html.escape(w)}</p>" for w in warnings(header, rounds)]
    found = final.get("test") or final.get("validation") or {}
    parts.append(f"<pre>{html.escape(chr(10).join(picture(tree, rounds, found)))}</pre>")
    if tree.get("left_out"):
        parts.append(f"<p>{tree['left_out']} clients feed no place and were left out.</p>")
    parts += _curves(rounds)
    if found.get("matrix"):
        matrix = found["matrix"]
        parts.append("<h2>Perplexity of every node on the text of every place</h2>")
        rows = [[n, *v] for n, v in zip(matrix["nodes"], matrix["perplexity"], strict=True)]
        parts.append(table(["node", *matrix["places"]], rows))
    return parts + _attention(rounds, table) + _routes(rounds, table)


def picture(tree: dict[str, Any], rounds: list[dict[str, Any]], found: dict[str, Any]) -> list[str]:
    """Draw the tree, one line per node, with perplexity and total bytes sent and received."""
    names, parents = tree["names"], tree["parents"]
    scores = {node["name"]: node for node in found.get("nodes") or []}
    sent = {n: [_sum(rounds, n, way) for way in ("up_bytes", "down_bytes")] for n in names}
    lines: list[str] = []

    def draw(node: int, before: str, mark: str, after: str) -> None:
        score = scores.get(names[node], {})
        told = [f"{before}{mark}{names[node]}"]
        if score.get("perplexity") is not None:
            told.append(f"perplexity {score['perplexity']:.1f}")
        if score.get("bits_per_byte") is not None:
            told.append(f"{score['bits_per_byte']:.3f} bits per byte")
        if score.get("personal") is not None:
            told.append(f"after own steps {score['personal']:.1f}")
        if node:
            told.append(
                "up {:.1f} MB, down {:.1f} MB".format(*(b / 1e6 for b in sent[names[node]]))
            )
        lines.append("  ".join(told))
        children = [i for i, parent in enumerate(parents) if parent == node]
        for child in children:
            ends = child == children[-1]
            draw(child, before + after, "└─ " if ends else "├─ ", "   " if ends else "│  ")

    draw(0, "", "", "")
    return lines


def _sum(rounds: list[dict[str, Any]], name: str, what: str) -> int:
    return sum(r.get("nodes", {}).get(name, {}).get(what, 0) for r in rounds)


def warnings(header: dict[str, Any], rounds: list[dict[str, Any]]) -> list[str]:
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


def _curves(rounds: list[dict[str, Any]]) -> list[str]:
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
            name, steps, [sum(p[i] for p in r["places"].values()) / len(r["places"]) for r in seen]
        )
        for name, i in kinds
    ]
    each = [
        Series(place, steps, [r["places"][place][0] for r in seen]) for place in seen[-1]["places"]
    ]
    return [
        "<h2>What a leaf receives, and what it makes of it</h2>",
        plots.lines(mean, x="round", y="perplexity, mean over leaves", log_y=True),
        "<h2>Each leaf, as received</h2>",
        plots.lines(each, x="round", y="perplexity", log_y=True),
    ]


def _attention(rounds: list[dict[str, Any]], table: HtmlTable) -> list[str]:
    last = rounds[-1].get("nodes", {}) if rounds else {}
    names = ("self_weight", "entropy_down", "entropy_up", "agreement")
    rows = [
        [name, *(node.get(n) for n in names)]
        for name, node in last.items()
        if any(node.get(n) is not None for n in names)
    ]
    head = ["node", "weight of self", "entropy going down", "going up", "agreement of children"]
    return ["<h2>Attention in the last round</h2>", table(head, rows)] if rows else []


def _routes(rounds: list[dict[str, Any]], table: HtmlTable) -> list[str]:
    ways = [way for r in rounds for way in r.get("routes", [])]
    if not ways:
        return []
    counts = Counter((way["from"], way["to"]) for way in ways)
    alike: dict[tuple[str, str], list[float]] = {}
    for way in ways:
        alike.setdefault((way["from"], way["to"]), []).append(way["likeness"][way["to"]])
    rows = [[a, b, n, sum(alike[a, b]) / n] for (a, b), n in counts.most_common(30)]
    return [
        f"<h2>Residuals</h2><p>{len(ways)} layers were routed; the most frequent ways:</p>",
        table(["from", "to", "layers", "mean likeness"], rows),
    ]
