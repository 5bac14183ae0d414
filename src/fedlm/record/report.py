"""A report from journals alone.

In:       the journals of one run or of several.
Out:      one HTML page that needs no network.
Promise:  every number on the page is in a journal or computed from it.
Not here: drawing (`plots.py`), live objects of any kind.
"""

from __future__ import annotations

import html
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedlm.core.errors import RecordError, damaged
from fedlm.record import journal, plots, tree_report
from fedlm.record.plots import Series

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
       color: #111827; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; } th, td { padding: .25rem .9rem .25rem 0; text-align: left; }
td.n { text-align: right; font-variant-numeric: tabular-nums; }
tr + tr { border-top: 1px solid #e5e7eb; }
code, pre { background: #f3f4f6; border-radius: 4px; padding: .1rem .3rem; }
pre { padding: .7rem; overflow: auto; }
.wide { overflow-x: auto; }
"""


# Noisy figures of training clients, by their names in a journal.
NOISY = {
    "perplexity": "perplexity",
    "accuracy": "accuracy",
    "p10": "a tenth of clients below",
    "p50": "median client",
    "p90": "nine tenths below",
}


@dataclass
class Facts:
    """The facts of one run, from its journal."""

    name: str
    header: dict[str, Any]
    rounds: list[dict[str, Any]] = field(default_factory=list)
    final: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)  # extended or stopped early

    @property
    def rounds_planned(self) -> int | None:
        """How many rounds the run was extended to last; None if it never was."""
        found = [entry["rounds"] for entry in self.history if entry["kind"] == "extended"]
        return found[-1] if found else None

    @property
    def stopped_after(self) -> int | None:
        """After how many rounds the run stopped early; None if it did not."""
        if not self.history or self.history[-1]["kind"] != "stopped":
            return None
        return int(self.history[-1]["round"]) + 1

    @property
    def evaluated(self) -> list[dict[str, Any]]:
        return [r for r in self.rounds if r.get("perplexity") is not None]

    @property
    def tokens(self) -> int | None:
        """The number of training tokens, or None for a private run, which does not tell it."""
        if any("tokens" not in r for r in self.rounds):
            return None
        return sum(r["tokens"] for r in self.rounds)

    @property
    def member_bytes(self) -> list[float]:
        """The mean upload per member in each round, in bytes."""
        totals = [0, *(r["upload_bytes"] for r in self.rounds)]
        came = [max(1, r["members"]) for r in self.rounds]
        return [(b - a) / n for a, b, n in zip(totals, totals[1:], came, strict=False)]

    def over(self, axis: str) -> Series:
        """Return perplexity over an axis.

        The axes are rounds, seconds, epsilon, megabytes uploaded by all members, and megabytes
        uploaded by a member of every round.
        """
        elapsed = list(itertools.accumulate(r["seconds"] for r in self.rounds))
        each = list(itertools.accumulate(self.member_bytes))
        x = {
            "round": lambda i, r: r["round"] + 1,
            "seconds": lambda i, r: elapsed[i],
            "upload_bytes": lambda i, r: r["upload_bytes"] / 1e6,
            "a member": lambda i, r: each[i] / 1e6,
            "epsilon": lambda i, r: r.get("epsilon"),
        }[axis]
        points = [
            (x(i, r), r["perplexity"])
            for i, r in enumerate(self.rounds)
            if r.get("perplexity") is not None and x(i, r) is not None
        ]
        return Series(self.name, [p[0] for p in points], [p[1] for p in points])


def facts_of(path: Path) -> Facts:
    """Read the journal of a run directory."""
    entries = list(journal.read(Path(path) / "journal.jsonl"))
    if not entries or entries[0]["kind"] != "header":
        raise RecordError(f"{path}: its journal has no header, so there is nothing to report.")
    facts = Facts(Path(path).name, entries[0])
    for entry in entries[1:]:
        if entry["kind"] == "round":
            facts.rounds.append(entry)
        elif entry["kind"] == "final":
            facts.final = entry
        elif entry["kind"] in ("extended", "stopped"):
            facts.history.append(entry)
    return facts


def page(runs: list[Facts]) -> str:
    """Return the whole report as an HTML page."""
    with damaged(f"the journal of {', '.join(run.name for run in runs)}"):
        return _page(runs)


def _page(runs: list[Facts]) -> str:
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs compared"
    parts = [f"<h1>{html.escape(title)}</h1>", _overview(runs)]
    parts += _curves(runs)
    if len(runs) == 1:
        parts += _one_run(runs[0])
    else:
        parts += ["<h2>Where the recipes differ</h2>", _differences(runs)]
    body = "\n".join(parts)
    return (
        f"<!doctype html>\n<html lang='en'><head><meta charset='utf-8'><title>{html.escape(title)}"
        f"</title><style>{STYLE}</style>{plots.script()}</head><body>{body}</body></html>\n"
    )


def table(head: list[str], rows: Iterable[Iterable[Any]]) -> str:
    """Return an HTML table with numbers aligned to the right."""

    def cell(value: Any) -> str:
        if value is None:
            return "<td class='n'>-</td>"
        if isinstance(value, float):
            return (
                f"<td class='n'>{value:,.4g}</td>"
                if value < 1e4
                else f"<td class='n'>{value:,.0f}</td>"
            )
        if isinstance(value, int):
            return f"<td class='n'>{value:,}</td>"
        return f"<td>{html.escape(str(value))}</td>"

    top = "".join(f"<th>{html.escape(h)}</th>" for h in head)
    lines = "".join("<tr>" + "".join(cell(v) for v in row) + "</tr>" for row in rows)
    return f"<div class='wide'><table><tr>{top}</tr>{lines}</table></div>"


def _overview(runs: list[Facts]) -> str:
    head = ["run", "rounds", "test perplexity", "test accuracy", "validation perplexity"]
    head += ["bits per byte"]
    head += ["epsilon", "tokens", "MB up", "MB down", "seconds", "parameters"]

    def row(run: Facts) -> list[Any]:
        test, validation = run.final.get("test") or {}, run.final.get("validation") or {}
        last = run.rounds[-1] if run.rounds else {}
        watched = run.evaluated[-1]["perplexity"] if run.evaluated else None
        return [
            run.name,
            len(run.rounds),
            test.get("perplexity"),
            test.get("accuracy"),
            validation.get("perplexity") or watched,
            test.get("bits_per_byte") or validation.get("bits_per_byte"),
            (run.final.get("privacy") or {}).get("epsilon"),
            run.tokens,
            last.get("upload_bytes", 0) / 1e6,
            last.get("download_bytes", 0) / 1e6,
            sum(r["seconds"] for r in run.rounds),
            run.header.get("parameters"),
        ]

    return table(head, [row(run) for run in runs])


def _curves(runs: list[Facts]) -> list[str]:
    drawn = [run for run in runs if run.evaluated]
    if not drawn:
        return ["<p>No round has been evaluated yet.</p>"]
    marks = runs[0].final.get("baselines", {}).get("validation") if len(runs) == 1 else None
    start = runs[0].header.get("start") if len(runs) == 1 else None
    parts = ["<h2>Validation perplexity over rounds</h2>"]
    curve = [run.over("round") for run in drawn]
    if start and start.get("perplexity"):
        curve = [Series(c.name, [0, *c.x], [start["perplexity"], *c.y]) for c in curve]
    parts.append(plots.lines(curve, x="round", y="perplexity", log_y=True, marks=marks))
    parts.append("<h2>Over megabytes uploaded</h2>")
    parts.append(
        plots.lines(
            [run.over("upload_bytes") for run in drawn], x="MB uploaded", y="perplexity", log_y=True
        )
    )
    parts.append("<h2>Over megabytes uploaded by a client that joins every round</h2>")
    parts.append(
        plots.lines([run.over("a member") for run in drawn], x="MB", y="perplexity", log_y=True)
    )
    parts.append("<h2>Over seconds of training</h2>")
    parts.append(
        plots.lines([run.over("seconds") for run in drawn], x="seconds", y="perplexity", log_y=True)
    )
    spent = [curve for curve in (run.over("epsilon") for run in drawn) if curve.x]
    if spent:
        parts.append("<h2>Over epsilon spent</h2>")
        parts.append(plots.lines(spent, x="epsilon", y="perplexity", log_y=True))
    told = [run for run in drawn if all("loss" in r for r in run.rounds)]
    losses = [
        Series(run.name, [r["round"] + 1 for r in run.rounds], [r["loss"] for r in run.rounds])
        for run in told
    ]
    if losses:
        parts.append("<h2>Training loss of the cohort</h2>")
        parts.append(plots.lines(losses, x="round", y="nats per token"))
    return parts


def _privacy(run: Facts) -> list[str]:
    """State the privacy claim in plain words, as it was made when the run ended."""
    plan = run.header.get("privacy")
    if plan is None:
        return ["<h2>Privacy</h2><p>This run makes no privacy claim.</p>"]
    claim, last = run.final.get("privacy"), run.rounds[-1] if run.rounds else {}
    if claim is None:
        return ["<h2>Privacy</h2><p>The run has not ended, so nothing is claimed yet.</p>"]
    parts = [f"<h2>Privacy</h2><p><b>{html.escape(claim['sentence'])}</b></p>"]
    for title, name in (
        ("It covers:", "covers"),
        ("It does not cover:", "not_covered"),
        ("It holds if:", "assumptions"),
    ):
        words = "".join(f"<li>{html.escape(str(w))}</li>" for w in claim.get(name) or ())
        parts.append(f"<p>{title}</p><ul>{words}</ul>" if words else "")
    noisy = plan["clip_noise"] and plan["noise_multiplier"]
    share = f"share of updates within the clip, {'with' if noisy else 'without'} noise"
    sampling = plan["sampling"]
    leaf = plan.get("unit") == "leaf"
    rows = [
        ["mechanism", plan["mechanism"]],
        ["who joins a round", "every leaf" if leaf else sampling["law"]],
        ["noise, in multiples of the clip", plan["noise_multiplier"]],
        ["clip, last round", last.get("clip_norm", plan["clip_norm"])],
        [share, last.get("unclipped_share")],
        ["length of the noise over the longest mean change", last.get("noise_to_signal")],
        ["fixed denominator", None if leaf else sampling["cohort"]],
        ["budget", run.header.get("privacy_budget")],
        ["canaries, for audits", run.header.get("canaries") or None],
        ["computed by", claim.get("accountant", "-")],
    ]
    return [*parts, table(["what", "value"], rows)]


def _noisy_figures(run: Facts) -> list[str]:
    """Show the noisy figures of training clients, each with its standard error."""
    told = [(r["round"] + 1, r["private_validation"]) for r in run.rounds if _has_noisy(r)]
    if not told:
        return []
    last = told[-1][1]
    rows = []
    for number, figures in told:
        flat = {**figures, **figures["clients"]}
        pairs = [(flat[name], flat[f"{name}_error"]) for name in NOISY]
        rows.append([number, *(value for pair in pairs for value in pair)])
    head = ["after round", *(word for title in NOISY.values() for word in (title, "error"))]
    return [
        "<h2>Held-out text of training clients, with noise</h2>",
        f"<p>Sums over clients, each with at most {last['tokens_per_client']} tokens, with noise "
        f"of {last['noise_multiplier']:g} times what one client can change. Errors are standard "
        "errors of the noise. Every line is a release that epsilon counts.</p>",
        table(head, rows),
    ]


def _has_noisy(round: dict[str, Any]) -> bool:
    return isinstance(round.get("private_validation"), dict)


def _one_run(run: Facts) -> list[str]:
    parts = tree_report.section(run.header, run.rounds, run.final, table)
    parts += _privacy(run)
    parts += _noisy_figures(run)
    baselines = run.final.get("baselines") or {}
    if baselines:
        parts.append("<h2>Beside what counting reaches</h2>")
        rows = [
            [name, *(baselines.get(split, {}).get(name) for split in ("test", "validation"))]
            for name in ("unigram", "bigram", "trigram")
        ]
        trained = [(run.final.get(s) or {}).get("perplexity") for s in ("test", "validation")]
        parts.append(table(["model", "test", "validation"], [*rows, ["this run", *trained]]))
    test = run.final.get("test") or run.final.get("validation") or {}
    if test.get("clients"):
        parts.append("<h2>Perplexity over clients</h2>")
        parts.append(table(list(test["clients"]), [list(test["clients"].values())]))
    for depth, groups in enumerate(test.get("groups") or []):
        if 1 < len(groups) <= 60:
            parts.append(f"<h2>Perplexity by group, level {depth + 1}</h2>")
            values = [g["perplexity"] for g in groups.values()]
            parts.append(plots.bars(list(groups), values, y="perplexity"))
            bits = [g.get("bits_per_byte") for g in groups.values()]
            if all(value is not None for value in bits):  # comparable between languages
                parts.append(plots.bars(list(groups), bits, y="bits per byte"))
    for prompt in run.final.get("predictions") or []:
        said = ", ".join(f"{w['word']} {w['probability']:.0%}" for w in prompt["next"])
        parts.append(f"<p><b>{html.escape(prompt['prompt'])}</b> … {html.escape(said)}</p>")
    if run.history:
        said = "".join(f"<li>{html.escape(_event(entry))}</li>" for entry in run.history)
        parts.append(f"<h2>History</h2><ul>{said}</ul>")
    parts.append("<h2>How to repeat it</h2>")
    parts.append(f"<pre>{html.escape(run.header.get('command', ''))}</pre>")
    parts.append("<h2>Settings</h2>")
    parts.append(_settings(run))
    versions = run.header.get("versions", {})
    parts.append("<h2>Made with</h2>")
    parts.append(table(["what", "version"], [[k, str(v)] for k, v in versions.items()]))
    return parts


def _event(entry: dict[str, Any]) -> str:
    if entry["kind"] == "extended":
        return f"Extended from {entry.get('before')} to {entry['rounds']} rounds."
    return (
        f"Stopped early after round {entry['round'] + 1}: no better perplexity in "
        f"{entry.get('patience')} evaluations."
    )


def _settings(run: Facts) -> str:
    recipe = run.header.get("recipe", {})
    rows = [[f"{t}.{k}", str(v)] for t, keys in recipe.items() for k, v in keys.items()]
    return table(["setting", "value"], rows)


def _differences(runs: list[Facts]) -> str:
    flat = [
        {f"{t}.{k}": v for t, keys in run.header.get("recipe", {}).items() for k, v in keys.items()}
        for run in runs
    ]
    names = sorted(set().union(*flat))
    differing = [n for n in names if len({str(f.get(n)) for f in flat}) > 1]
    rows = [
        [run.name, *(str(f.get(n, "-")) for n in differing)]
        for run, f in zip(runs, flat, strict=True)
    ]
    return table(["run", *differing], rows)
