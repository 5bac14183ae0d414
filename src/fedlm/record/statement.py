"""One page for somebody who signs for a privacy claim.

In:       the facts of a statement, by the names of `StatementFacts`.
Out:      one printable HTML page in plain words.
Promise:  everything on the page is in the facts; every name is escaped.
Not here: how the facts are found (`publish/statement.py`), what an epsilon costs (`privacy`).
"""

from __future__ import annotations

from typing import Any, TypedDict

from fedlm.core.documents import JsonObject
from fedlm.core.words import chance, count, number
from fedlm.record import svg, trust
from fedlm.record.page import bullets, document, heading, paragraph, table
from fedlm.record.svg import escape

PRIORS = (0.01, 0.1, 0.5)


class StatementFacts(TypedDict):
    """What a statement says; also the answer of `--json`."""

    run: str
    sentence: str
    unit: str
    mechanism: str
    sampling: str
    parameters: JsonObject  # by words
    epsilon: float
    delta: float
    accountant: str
    rounds: int
    rounds_epsilon_exact: float  # of the rounds alone, as fedlm accounts for them
    rounds_epsilon_published: float | None  # of the rounds alone, by the conversion of the papers
    odds: list[dict[str, float]]  # prior and the most that it can become
    covers: list[str]
    not_covered: list[str]
    assumptions: list[str]
    trusted: list[str]
    sees: list[list[str]]  # who sees what: rows of `trust.trust_rows`
    audit: JsonObject | None
    ledger_sha256: str
    ledger_lines: int
    model_sha256: str
    versions: JsonObject


def statement_page(told: StatementFacts) -> str:
    """Return the page to sign."""
    title = f"Privacy statement of {told['run']}"
    return document(
        title,
        [
            f"<h1>{escape(title)}</h1>",
            f"<p class='verdict'>{escape(told['sentence'])}</p>",
            *_meaning(told),
            heading("Who is protected, and how"),
            table(
                ["what", "value"],
                [
                    ["protected", told["unit"]],
                    ["mechanism", told["mechanism"]],
                    ["who joins a round", told["sampling"]],
                    *([name, number(value)] for name, value in told["parameters"].items()),
                ],
            ),
            *_two_ways(told),
            heading("What is covered"),
            bullets(told["covers"]),
            heading("What is not covered"),
            bullets(told["not_covered"]),
            heading("Who is trusted"),
            bullets(told["trusted"]),
            table(list(trust.HEAD), told["sees"]),
            heading("It holds if"),
            bullets(told["assumptions"]),
            *_audit(told),
            heading("By which this can be checked"),
            _checked(told),
            "<div class='signs'><p>Name, date</p><p>Signature</p></div>",
        ],
        kind="sheet",
    )


def _meaning(told: StatementFacts) -> list[str]:
    prior, after = told["odds"][-1]["before"], told["odds"][-1]["at_most_after"]
    return [
        heading("What this means"),
        paragraph(
            "Somebody who has everything that was released, whatever else they know, and who "
            f"thinks it {prior:.0%} likely that a given person's text was used, may "
            f"afterwards be {svg.percent(after)} sure at most. This can fail with a chance of "
            f"{chance(told['delta'])} at most (delta)."
        ),
        svg.odds([each["before"] for each in told["odds"]], told["epsilon"]),
    ]


def _two_ways(told: StatementFacts) -> list[str]:
    published = told["rounds_epsilon_published"]
    rows: list[list[Any]] = [
        ["all that is covered", told["epsilon"], told["accountant"]],
        ["the rounds alone, exactly", told["rounds_epsilon_exact"], "as accounted here"],
        [
            "the rounds alone, as papers print it",
            published,
            "Renyi divergences or zCDP, converted: a larger bound for the same noise"
            if published is not None
            else "no published conversion is known for this mechanism",
        ],
    ]
    return [
        heading("Epsilon, two ways"),
        table(["of", "epsilon", "by"], rows),
        paragraph(
            f"At delta {chance(told['delta'])}, after {count(told['rounds'], 'released round')}. "
            "The first line is the one to sign for.",
            "quiet",
        ),
    ]


def _audit(told: StatementFacts) -> list[str]:
    found = told["audit"]
    if found is None:
        return [
            heading("Audit"),
            paragraph(
                "No audit was made. An audit plants clients that are easy to recognise and asks "
                "how well they can be told from others; it can show that an account is wrong, and "
                "never that it is right."
            ),
        ]
    lower, accounted = found["epsilon_lower"], told["epsilon"]
    fits = (
        "It does not contradict the account."
        if lower <= accounted
        else "It contradicts the account: do not sign."
    )
    return [
        heading("Audit"),
        paragraph(
            f"The search for {count(found['canaries'], 'planted client')} shows an epsilon of at "
            f"least {number(lower, 3)}, with {found['confidence']:.0%} confidence, beside the "
            f"account's {number(accounted, 3)}. {fits}"
        ),
    ]


def _checked(told: StatementFacts) -> str:
    rows: list[list[Any]] = [
        ["SHA-256 of the ledger", told["ledger_sha256"]],
        ["lines of the ledger", number(told["ledger_lines"])],
        ["SHA-256 of the model's file", told["model_sha256"]],
        ["versions", ", ".join(f"{name} {v}" for name, v in told["versions"].items())],
    ]
    return table(["what", "value"], rows)
