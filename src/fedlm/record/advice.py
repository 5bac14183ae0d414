"""The page of `fedlm advise`: whether to federate, drawn.

In:       an answer as one JSON object, and its table.
Out:      one HTML page: the sentences, a curve per side over the tokens of a member, the table, who
          gains and who loses.
Promise:  a function of the answer; names are escaped.
Not here: how the answer is found (`search/advise.py`), drawing (`svg.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedlm.core.words import count
from fedlm.record import svg
from fedlm.record.page import bullets, document, folded, heading, paragraph, table
from fedlm.record.svg import Bar, Series

NAMES = {
    "local": "a model of one's own text alone",
    "federated": "the federation's model",
    "personal": "the federation's model, made personal",
}


def advice_page(answer: dict[str, Any], head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return the page of an answer."""
    first, *others = answer["answer"]
    lines = answer["lines"]
    about = (
        f"{count(answer['population'], 'member')} take part, {lines[0]['members']} of them were "
        "scored, each on the second half of its held-out text, which decided nothing. Perplexities "
        "are geometric means over members; all sides have the same tokenizer."
    )
    parts = [
        "<h1>Should we federate?</h1>",
        paragraph(first, "verdict"),
        bullets(others),
        heading("Perplexity and how much text a member has"),
        *_curves(lines),
        table(head, rows),
        paragraph(about, "quiet"),
        heading("Member by member, with all text"),
        _members(answer["shares"][0]["members"]),
        folded("All figures of members", _all(answer["shares"])),
    ]
    return document("Should we federate?", parts)


def _curves(lines: Sequence[dict[str, Any]]) -> list[str]:
    """Draw a curve per side; below two shares there is no curve."""
    if len(lines) < 2:
        return []
    rising = sorted(lines, key=lambda line: line["tokens"])
    drawn = [
        Series(said, [x["tokens"] for x in rising], [x["perplexity"][side] for x in rising], colour)
        for colour, (side, said) in enumerate(NAMES.items())
    ]
    chart = svg.lines(
        drawn, x="tokens per member", y="perplexity", log_x=True, log_y=True, height=340
    )
    return [svg.legend([(one.name, one.colour) for one in drawn]), chart]


def _members(members: Sequence[dict[str, Any]]) -> str:
    """Draw how far each member is from local training, those who gain most first."""
    apart = sorted(
        (m["perplexity"]["personal"] / m["perplexity"]["local"] - 1, m["name"]) for m in members
    )
    bars = [
        Bar(
            name, abs(change) * 100, 1 if change > 0 else 2, "% worse" if change > 0 else "% better"
        )
        for change, name in apart
    ]
    return svg.bars(bars, title="the personalised federation against local training, by member")


def _all(shares: Sequence[dict[str, Any]]) -> str:
    head = ["text", "member", "tokens", *NAMES, "how it was made"]
    rows = [
        [
            f"{share['share']:.0%}",
            m["name"],
            m["tokens"],
            *(m["perplexity"][side] for side in NAMES),
            f"local: {m['note']['local']}; personal: {m['note']['personal']}",
        ]
        for share in shares
        for m in share["members"]
    ]
    return table(head, rows)
