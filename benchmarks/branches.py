"""Tables of a sweep over trees: methods, leaves, traffic, residuals.

In:       the folder of a sweep whose points are trees (`fedlm sweep` made it).
Out:      Markdown on stdout, from journals alone.
Promise:  every figure is a mean over the seeds that are finished, with their spread.
Not here: training.

    python -m benchmarks.branches runs/eltec-methods
    python -m benchmarks.branches runs/eltec-swap --routes
"""

from __future__ import annotations

import argparse
import re
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from fedlm.record.facts import Facts, facts_of
from fedlm.search.sweep import markdown, over_seeds


def finished(folder: Path) -> dict[str, list[Facts]]:
    """The runs of a sweep that came to their end, by name without the seed."""
    found: dict[str, list[Facts]] = defaultdict(list)
    for path in sorted(folder.glob("*/summary.json"), key=lambda p: p.stat().st_mtime):
        run = facts_of(path.parent)
        found[re.sub(r",?run\.seed=\d+", "", run.name)].append(run)
    return found


def last(run: Facts) -> dict[str, Any]:
    return run.final.get("test") or run.final.get("validation") or {}


def leaves(run: Facts) -> dict[str, float]:
    """Places that hold text, as they are received."""
    held = {n for n, c in zip(tree(run)["names"], tree(run)["clients"], strict=True) if c}
    return {n["name"]: n["perplexity"] for n in last(run)["nodes"] if n["name"] in held}


def tree(run: Facts) -> dict[str, Any]:
    return dict(run.header["tree"])


def per_round(run: Facts, way: str) -> dict[str, float]:
    """Mean bytes of each node in a round."""
    total: Counter[str] = Counter()
    for entry in run.rounds:
        for name, node in entry["nodes"].items():
            total[name] += node[way]
    return {name: size / len(run.rounds) for name, size in total.items()}


def methods(runs: dict[str, list[Facts]]) -> str:
    head = ["method", "seeds", "as received", "after own steps", "received / own", "worst leaf"]
    head += ["kB up a leaf and round", "kB down"]
    rows = []
    for name, group in runs.items():
        found = [last(run) for run in group]
        came = [f["perplexity"] for f in found]
        own = [f["personal_perplexity"] for f in found]
        traffic = [
            sum(per_round(run, way)[n] for run in group for n in leaves(run))
            / sum(len(leaves(run)) for run in group)
            for way in ("up_bytes", "down_bytes")
        ]
        rows.append(
            [
                name,
                len(group),
                over_seeds(came),
                over_seeds(own),
                over_seeds([a / b for a, b in zip(came, own, strict=True)], 2),
                over_seeds([max(leaves(run).values()) for run in group]),
                *(f"{size / 1e3:.0f}" for size in traffic),
            ]
        )
    return markdown(head, rows)


def by_leaf(runs: dict[str, list[Facts]]) -> str:
    names = list(dict.fromkeys(n for group in runs.values() for r in group for n in leaves(r)))
    rows = []
    for name, group in runs.items():
        means = [[leaves(run).get(n) for run in group] for n in names]
        rows.append([name, *("-" if None in m else over_seeds(m, 0).split(" ")[0] for m in means)])
    return markdown(["method", *names], rows)


def routes(run: Facts) -> str:
    """Where residuals went, and how alike they were."""
    ways = [way for entry in run.rounds for way in entry["routes"]]
    alike: dict[tuple[str, str], list[float]] = defaultdict(list)
    for way in ways:
        alike[way["from"], way["to"]].append(way["likeness"][way["to"]])
    rows = [
        [a, b, len(found), f"{sum(found) / len(found):.2f}"]
        for (a, b), found in sorted(alike.items(), key=lambda item: -len(item[1]))
    ]
    return markdown(["from", "to", "layers", "mean likeness"], rows)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--routes", action="store_true", help="also where residuals went")
    asked = parser.parse_args()
    runs = finished(asked.folder)
    print(methods(runs))
    print(by_leaf(runs))
    if asked.routes:
        for name, group in runs.items():
            print(f"{name}\n\n{routes(group[0])}")


if __name__ == "__main__":
    main()
