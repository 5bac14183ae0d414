"""The drawing of `fedlm bench-quality`: perplexity over bytes, with the Pareto front.

In:       rows of the board.
Out:      one SVG file that stands alone, a chart per text.
Promise:  a function of the rows; names are escaped; it needs no page around it.
Not here: the board (`search/leaderboard.py`), how marks are drawn (`svg.py`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from fedlm.core.words import number
from fedlm.record import svg
from fedlm.record.svg import WIDTH, Dot

HEIGHT = 330
TRACK_COLOURS = {"plain": 0, "private": 1, "10mb": 2}


def drawing(rows: Sequence[dict[str, Any]]) -> str:
    """Return one chart per text, one below the other."""
    texts = list(dict.fromkeys(row["corpus"] for row in rows))
    body = ""
    for place, corpus in enumerate(texts):
        shown = [r for r in rows if r["corpus"] == corpus and r["perplexity"] is not None]
        top = place * (HEIGHT + 40)
        chart = svg.scatter(
            [_point(row) for row in shown],
            x="MB up per client",
            y="perplexity",
            log_x=True,
            height=HEIGHT,
        )
        inner = re.sub(r"^<svg[^>]*>|</svg>$", "", chart)
        body += svg.text(20, top + 24, f"{corpus}: the dashed line joins the front")
        body += f"<g transform='translate(0 {top + 32})'>{inner}</g>"
    height = max(1, len(texts)) * (HEIGHT + 40)
    whole = svg.picture(height, "leaderboard: perplexity over upload, by text", body)
    return svg.alone(whole, WIDTH, height)


def _point(row: dict[str, Any]) -> Dot:
    private = "" if row["epsilon"] is None else f", ε {number(row['epsilon'], 2)}"
    return Dot(
        f"{row['entry']}{private}",
        max(row["upload_per_client"] / 1e6, 1e-6),
        row["perplexity"],
        TRACK_COLOURS.get(row["track"], 3),
        bool(row["front"]),
    )
