"""Several runs on one page.

In:       the facts of runs.
Out:      one HTML page: who is best, a table with spread over seeds and baselines, one chart with
          a band per setting, the front of perplexity, epsilon and bytes, settings that differ.
Promise:  runs that differ in their seed alone are one line with a band; a run or a group of seeds
          has the same colour in every chart; perplexities of different texts or tokenizers are
          never ranked without a word.
Not here: the page of one run (`report.py`), drawing (`svg.py`).
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from fedlm.core.words import count, duration, number, size
from fedlm.record import svg
from fedlm.record.facts import AXES, SPLITS, Facts
from fedlm.record.page import document, heading, paragraph, switch, table
from fedlm.record.settings import SEED, Tables, differing, flat, shown_setting
from fedlm.record.svg import Dot, Series, escape

# The end of a run's name that tells its seed: `-s1`, `,run.seed=1`, `-1`.
SEEDED = re.compile(r"[-_,. ]?(?:run\.)?(?:seed|s)?[-_=]?\d+$")
MOST_NAMED = 12  # runs beside their colours; more are told by the table


class Group(NamedTuple):
    """Runs that differ in their seed alone."""

    name: str
    runs: tuple[Facts, ...]
    colour: int

    def values(self, of: str, split: str) -> list[float]:
        """Return a figure of every run, without those that lack it."""
        found = [figure(run, of, split) for run in self.runs]
        return [v for v in found if v is not None and math.isfinite(v)]


def figure(run: Facts, of: str, split: str) -> float | None:
    """Return a figure of a run at its end, or the last one on the way for its perplexity."""
    value = (run.final.get(split) or {}).get(of)
    if value is None and of == "perplexity" and not run.final and run.evaluated:
        value = run.evaluated[-1]["perplexity"] if run.watched == split else None
    return value if isinstance(value, (int, float)) else None


def comparison_page(runs: Sequence[Facts], defaults: Tables) -> str:
    """Return the comparison of several runs."""
    groups, split = grouped(runs), common_split(runs)
    of = "perplexity" if same_tokens(runs) else "bits_per_byte"
    title = f"{count(len(runs), 'run')} compared"
    parts = [
        f"<h1>{escape(title)}</h1>",
        f"<p class='verdict'>{comparison_verdict(groups, split, of)}</p>",
        *_warnings(runs, split),
        *_table(groups, split),
        *_curves(groups, split),
        *(_front(groups, split) if of == "perplexity" else []),
        *_differences(groups, defaults),
    ]
    return document(title, parts)


def grouped(runs: Sequence[Facts]) -> list[Group]:
    """Gather runs that differ in their seed alone."""
    found: dict[str, list[Facts]] = {}
    for run in runs:
        settings = {k: v for k, v in flat(run.recipe).items() if k != SEED}
        found.setdefault(json.dumps(settings, sort_keys=True, default=str), []).append(run)
    # Runs whose seeds are equal too are repetitions; each stays a run of its own.
    groups: list[list[Facts]] = []
    for alike in found.values():
        seeds = [str(flat(run.recipe).get(SEED)) for run in alike]
        groups += [alike] if len(set(seeds)) == len(seeds) else [[run] for run in alike]
    names = told_apart([_name(group) for group in groups])
    return [
        Group(name if names.count(name) == 1 else group[0].name, tuple(group), i)
        for i, (name, group) in enumerate(zip(names, groups, strict=True))
    ]


def told_apart(names: Sequence[str]) -> list[str]:
    """Return names without the parts between commas that all of them have, as points of a sweep do.

    >>> told_apart(["CIFG,rounds=60,seed=0", "SI-CIFG,rounds=60,seed=0"])
    ['CIFG', 'SI-CIFG']
    """
    parts = [name.split(",") for name in names]
    common = set(parts[0]).intersection(*parts[1:]) if len(parts) > 1 else set()
    short = [",".join(part for part in of if part not in common) for of in parts]
    return short if all(short) and len(set(short)) == len(short) else list(names)


def _name(runs: Sequence[Facts]) -> str:
    """Return what the names of runs have in common."""
    if len(runs) == 1:
        return runs[0].name
    stems = {SEEDED.sub("", run.name) for run in runs}
    return stems.pop() if len(stems) == 1 else runs[0].name


def common_split(runs: Sequence[Facts]) -> str:
    """Return the kind of held-out text by which all runs can be compared, the first of them."""
    for split in SPLITS:
        if all(figure(run, "perplexity", split) is not None for run in runs):
            return split
    return max(SPLITS, key=lambda s: sum(figure(run, "perplexity", s) is not None for run in runs))


def same_tokens(runs: Sequence[Facts]) -> bool:
    """Return whether all runs predict the same tokens, so that perplexities can be compared."""
    return len({(run.header.get("store") or {}).get("tokenizer_sha256") for run in runs}) == 1


def comparison_verdict(groups: Sequence[Group], split: str, of: str = "perplexity") -> str:
    """Say which is best, by how much, and what it cost."""
    scored = [
        (statistics.fmean(found), group) for group in groups if (found := group.values(of, split))
    ]
    if of != "perplexity" and len(scored) < len(groups):
        return (
            "These runs cannot be ranked: their tokenizers differ, and not all of them have bits "
            "per byte."
        )
    if not scored:
        return "No run has been evaluated yet."
    scored.sort(key=lambda pair: pair[0])
    best, first = scored[0]
    text = "the text of held-out clients" if split == "test" else SPLITS[split]
    said = (
        f"On {text}, <b>{escape(first.name)}</b> is best: {of.replace('_', ' ')} "
        f"<b>{escape(mean_and_spread(first.values(of, split)))}</b>, for "
        f"{escape(_money(first))}."
    )
    if len(scored) > 1:
        other, second = scored[1]
        apart = _apart(first.values(of, split), second.values(of, split))
        much = f"{other / best - 1:.1%} worse" if other < 2 * best else _times(other / best)
        said += f" Next is {escape(second.name)}, {much}{escape(apart)}."
    return said


def _times(ratio: float) -> str:
    return f"{number(ratio, 2)} times as high"


def _apart(a: list[float], b: list[float]) -> str:
    """Say whether seeds alone could make such a difference."""
    if len(a) < 2 or len(b) < 2:
        return (
            "; one seed each says little about so small a difference"
            if (abs(a[0] - b[0]) < 0.02 * a[0])
            else ""
        )
    noise = math.sqrt(statistics.variance(a) / len(a) + statistics.variance(b) / len(b))
    away = abs(statistics.fmean(a) - statistics.fmean(b))
    return "" if away > 2 * noise else ", which seeds alone could make"


def _money(group: Group) -> str:
    epsilon = [run.epsilon for run in group.runs]
    promise = "no privacy" if None in epsilon else f"epsilon {number(max(map(float, epsilon)), 3)}"  # type: ignore[arg-type]
    moved = statistics.fmean(run.upload_bytes for run in group.runs)
    return f"{size(moved)} uploaded and {promise}"


def _warnings(runs: Sequence[Facts], split: str) -> list[str]:
    said = []
    stores = [run.header.get("store") or {} for run in runs]
    if not same_tokens(runs):
        said.append(
            "These runs have different tokenizers: their perplexities are not comparable. Bits per "
            "byte are."
        )
    else:
        known = {store.get("clients_sha256") for store in stores} - {None}
        if len(known) > 1:
            said.append("These runs learned from different texts.")
    missing = [run.name for run in runs if figure(run, "perplexity", split) is None]
    if missing:
        names = ", ".join(missing[:5]) + (" and others" if len(missing) > 5 else "")
        said.append(f"No figure on {SPLITS[split]}: {names}.")
    return [paragraph(words, "warning") for words in said]


def mean_and_spread(values: Sequence[float], digits: int = 4) -> str:
    """Return the mean, with the standard deviation over seeds if there are several.

    >>> mean_and_spread([10.0, 12.0]), mean_and_spread([])
    ('11 ± 1.4', '-')
    """
    if not values:
        return "-"
    mean = number(statistics.fmean(values), digits)
    return mean if len(values) == 1 else f"{mean} ± {number(statistics.stdev(values), 2)}"


def _table(groups: Sequence[Group], split: str) -> list[str]:
    seeds = any(len(group.runs) > 1 for group in groups)
    private = any(run.header.get("privacy") is not None for g in groups for run in g.runs)
    bits = any(group.values("bits_per_byte", split) for group in groups)
    head = ["run", *(["seeds"] if seeds else []), "rounds", "perplexity", "accuracy"]
    head += [*(["bits per byte"] if bits else []), *(["epsilon"] if private else [])]
    head += ["uploaded", "time", "parameters"]

    def row(group: Group) -> list[Any]:
        first = group.runs[0]
        accuracy = group.values("accuracy", split)
        epsilon = [run.epsilon for run in group.runs]
        told = None if None in epsilon else max(float(e) for e in epsilon if e is not None)
        return [
            group.name,
            *([len(group.runs)] if seeds else []),
            len(first.rounds),
            mean_and_spread(group.values("perplexity", split)),
            f"{statistics.fmean(accuracy):.1%}" if accuracy else "-",
            *([mean_and_spread(group.values("bits_per_byte", split))] if bits else []),
            *([told] if private else []),
            size(statistics.fmean(run.upload_bytes for run in group.runs)),
            duration(statistics.fmean(run.seconds for run in group.runs)),
            first.header.get("parameters"),
        ]

    def mean(group: Group) -> float:
        found = group.values("perplexity", split)
        return statistics.fmean(found) if found else math.inf

    best = sorted(groups, key=mean)
    rows = [row(group) for group in best]
    for name, value in baseline_rows(groups, split):
        blank: list[Any] = [""] * len(head)
        blank[0], blank[head.index("perplexity")] = name, value
        rows.append(blank)
    spread = " Spread is the standard deviation over seeds." if seeds else ""
    words = f"Perplexity and accuracy on {SPLITS[split]}, the best first.{spread}"
    return [table(head, rows), paragraph(words, "quiet")]


def baseline_rows(groups: Sequence[Group], split: str) -> list[tuple[str, str]]:
    """Return what counting reaches on the same text, as a range where the texts differ."""
    found: dict[str, list[float]] = {}
    for run in (run for group in groups for run in group.runs):
        for name, value in ((run.final.get("baselines") or {}).get(split) or {}).items():
            if isinstance(value, (int, float)):
                found.setdefault(name, []).append(value)
    return [
        (
            f"{name}, counted",
            number(min(values))
            if max(values) - min(values) <= 1e-6 * max(values)
            else f"{number(min(values))} to {number(max(values))}",
        )
        for name, values in found.items()
    ]


# ---- charts ------------------------------------------------------------------------------------


def band(group: Group, axis: str) -> Series | None:
    """Return the mean curve of a group over an axis, and the band of its seeds."""
    curves = [run.over(axis) for run in group.runs]
    curves = [curve for curve in curves if curve[0]]
    if not curves:
        return None
    if len(curves) == 1:
        return Series(group.name, *curves[0], group.colour)
    if axis == "round":  # the rounds that all seeds were evaluated after
        common = sorted(set.intersection(*(set(x) for x, _ in curves)))
        by_round = [dict(zip(x, y, strict=True)) for x, y in curves]
        x, columns = list(common), [[each[r] for each in by_round] for r in common]
    else:
        shortest = min(len(x) for x, _ in curves)
        x = [statistics.fmean(c[0][i] for c in curves) for i in range(shortest)]
        columns = [[c[1][i] for c in curves] for i in range(shortest)]
    if not x:
        return None
    mean = [statistics.fmean(column) for column in columns]
    low, high = [min(column) for column in columns], [max(column) for column in columns]
    return Series(group.name, x, mean, group.colour, low, high)


def _curves(groups: Sequence[Group], split: str) -> list[str]:
    panels = []
    marks: dict[str, float] = {}
    watched = {run.watched for group in groups for run in group.runs}
    if len(watched) == 1:
        for name, value in baseline_rows(groups, watched.copy().pop()):
            text = value.replace(",", "")
            if "to" not in text.split():
                marks[name.removesuffix(", counted")] = float(text)
    for axis, (name, words) in AXES.items():
        series = [curve for group in groups if (curve := band(group, axis)) is not None]
        if series:
            drawn = svg.lines(series, x=words, y="perplexity", log_y=True, marks=marks)
            panels.append((f"over {name}", drawn))
    if not panels:
        return [heading("How they learned"), paragraph("No round has been evaluated yet.")]
    which = " and ".join(SPLITS[s] for s in SPLITS if s in watched)
    banded = any(len(group.runs) > 1 for group in groups)
    said = f"Perplexity on {which}, scored in training."
    said += " A band reaches from the best seed to the worst." if banded else ""
    said += " These are two kinds of text: compare curves of one kind." if len(watched) > 1 else ""
    return [
        heading("How they learned"),
        svg.legend([(group.name, group.colour) for group in groups[:MOST_NAMED]]),
        switch("axis", panels),
        paragraph(said, "quiet"),
    ]


class RunCost(NamedTuple):
    """What a group reaches and costs; less is better in all three."""

    perplexity: float
    epsilon: float  # infinity without a promise
    upload_bytes: float


def cost_of(group: Group, split: str) -> RunCost | None:
    """Return the mean perplexity and bytes of a group, and its largest epsilon."""
    found = group.values("perplexity", split)
    if not found:
        return None
    epsilon = [math.inf if run.epsilon is None else run.epsilon for run in group.runs]
    moved = statistics.fmean(run.upload_bytes for run in group.runs)
    return RunCost(statistics.fmean(found), max(epsilon), moved)


def on_front(costs: Sequence[RunCost]) -> list[bool]:
    """Return which points no other point beats: as good everywhere and better somewhere.

    >>> on_front([RunCost(10, 1, 5), RunCost(9, 1, 5), RunCost(12, 0.5, 9)])
    [False, True, True]
    """
    return [not any(beats(other, one) for other in costs) for one in costs]


def beats(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    """Return whether `a` is as small as `b` everywhere, and smaller somewhere."""
    return a != b and all(x <= y for x, y in zip(a, b, strict=True))


def _front(groups: Sequence[Group], split: str) -> list[str]:
    known = [(group, cost) for group in groups if (cost := cost_of(group, split)) is not None]
    if len(known) < 2:
        return []
    costs = [cost for _, cost in known]
    front = on_front(costs)
    panels = []
    if len({cost.upload_bytes for cost in costs}) > 1:
        points = [
            Dot(group.name, cost.upload_bytes / 1e6, cost.perplexity, group.colour, best)
            for (group, cost), best in zip(known, front, strict=True)
            if cost.upload_bytes > 0
        ]
        drawn = svg.scatter(points, x="MB uploaded by all members", y="perplexity", log_x=True)
        panels.append(("over bytes", drawn))
    finite = [
        Dot(group.name, cost.epsilon, cost.perplexity, group.colour, best)
        for (group, cost), best in zip(known, front, strict=True)
        if math.isfinite(cost.epsilon)
    ]
    if len({point.x for point in finite}) > 1:
        panels.append(("over epsilon", svg.scatter(finite, x="epsilon", y="perplexity")))
    names = [group.name for (group, _), best in zip(known, front, strict=True) if best]
    beaten = [group.name for (group, _), best in zip(known, front, strict=True) if not best]
    said = f"No other run beats {_list(names)} in perplexity, epsilon and bytes at once."
    said += f" Another one is at least as good in all three as {_list(beaten)}." if beaten else ""
    charts = [switch("front", panels)] if panels else []
    return [heading("What is worth its price?"), paragraph(said), *charts]


def _list(names: Sequence[str]) -> str:
    shown_ = list(names[:MOST_NAMED])
    more = len(names) - len(shown_)
    return ", ".join(shown_) + (f" and {more} more" if more else "")


def _differences(groups: Sequence[Group], defaults: Tables) -> list[str]:
    names = differing([group.runs[0].recipe for group in groups])
    if not names:
        return [heading("Where the recipes differ"), paragraph("In no setting but the seed.")]
    usual = flat(defaults)
    rows = [
        [name, *(shown_setting(flat(g.runs[0].recipe).get(name, "-")) for g in groups)]
        + ([shown_setting(usual.get(name, "-"))] if usual else [])
        for name in names
    ]
    head = ["setting", *(group.name for group in groups), *(["default"] if usual else [])]
    return [heading("Where the recipes differ"), table(head, rows)]
