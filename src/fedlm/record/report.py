"""The report of one run, from its journal alone.

In:       the facts of a run; what its readers know beside them (default settings, who is trusted).
Out:      one HTML page: a verdict in a sentence, then curve, samples, privacy, clients, groups,
          tree, traffic, settings.
Promise:  every number on the page is in the journal or computed from it; held-out clients and
          held-out text of training clients are never called by one name.
Not here: several runs (`comparison.py`), the tree (`tree_report.py`), drawing (`svg.py`), which
          facts may be told (`privacy/release.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fedlm.core.documents import JsonMapping
from fedlm.core.errors import damaged
from fedlm.core.words import chance, count, duration, number, size
from fedlm.record import comparison, svg, tree_report, trust
from fedlm.record.facts import AXES, SPLITS, Facts
from fedlm.record.page import (
    bullets,
    document,
    folded,
    heading,
    paragraph,
    switch,
    table,
    tiles,
)
from fedlm.record.settings import Tables, changed_rows
from fedlm.record.svg import Bar, Flow, Series, escape

# Noisy figures of training clients, by their names in a journal.
NOISY = {
    "perplexity": "perplexity",
    "accuracy": "accuracy",
    "p10": "a tenth of clients below",
    "p50": "median client",
    "p90": "nine tenths below",
}
COUNTED = {
    "unigram": "counting words",
    "bigram": "counting pairs of words",
    "trigram": "counting triples of words",
}
MOST_GROUPS = 60
FLOAT32 = 4


@dataclass(frozen=True)
class Beside:
    """What a page shows beside journals."""

    defaults: Tables = field(default_factory=dict)  # of settings; empty: all settings are shown
    members: trust.Whereabouts = field(default_factory=trust.Whereabouts)


def report_page(runs: list[Facts], beside: Beside = Beside()) -> str:  # noqa: B008
    """Return the page of one run, or the comparison of several."""
    with damaged(f"the journal of {', '.join(run.name for run in runs)}"):
        if len(runs) == 1:
            return document(runs[0].name, _one_run(runs[0], beside))
        return comparison.comparison_page(runs, beside.defaults)


def _one_run(run: Facts, beside: Beside) -> list[str]:
    return [
        f"<h1>{escape(run.name)}</h1>",
        f"<p class='verdict'>{verdict(run)}</p>",
        tiles(_tiles(run)),
        *tree_report.warned(run),
        *_curve(run),
        *_counting(run),
        *_samples(run),
        *_privacy(run, beside),
        *_noisy_figures(run),
        *_clients(run),
        *_groups(run),
        *tree_report.section(run),
        *_traffic(run),
        *_settings(run, beside.defaults),
    ]


# ---- the verdict -------------------------------------------------------------------------------


def verdict(run: Facts) -> str:
    """Say what was trained, how good it is beside counting, what it cost and what it promises."""
    return " ".join([_what(run), _how_good(run), _cost(run), _promise(run)])


def _what(run: Facts) -> str:
    model = run.recipe.get("model", {}).get("name", "a model")
    sized = run.header.get("parameters")
    size_ = f" of {count(sized, 'parameter')}" if sized else ""
    who, plan = run.header.get("store", {}).get("train_clients"), run.header.get("privacy")
    if who is None and isinstance(plan, dict):
        who = plan.get("sampling", {}).get("population")
    whose = f" on the text of {count(who, 'client')}" if who else ""
    nodes = (run.header.get("tree") or {}).get("names")
    where = f", in a tree of {count(len(nodes), 'node')}" if nodes else ""
    state = "was trained for" if run.final else "has been trained for"
    return (
        f"<b>{escape(model)}</b>{escape(size_)} {state} {escape(count(len(run.rounds), 'round'))}"
        f"{escape(whose)}{escape(where)}."
    )


def _how_good(run: Facts) -> str:
    split, found = run.headline
    reached = found.get("perplexity")
    if reached is None:
        if not run.evaluated:
            return "No round has been evaluated yet."
        split, reached = run.watched, run.evaluated[-1]["perplexity"]
    said = f"On {whose_text(split)} it reaches perplexity <b>{escape(number(reached, 3))}</b>"
    counted = (run.final.get("baselines") or {}).get(split) or {}
    best = min(
        ((v, k) for k, v in counted.items() if isinstance(v, (int, float))), default=(None, "")
    )
    if best[0]:
        ratio, name = reached / best[0], COUNTED.get(best[1], best[1])
        how = f"{abs(1 - ratio):.0%} {'better' if ratio < 1 else 'worse'} than"
        if 0.98 <= ratio <= 1.02:
            how = "as good as"
        elif ratio >= 2:
            how = f"{number(ratio, 2)} times as high as"
        return f"{said}, <b>{how}</b> {escape(name)} ({escape(number(best[0], 3))})."
    start = (run.header.get("start") or {}).get("perplexity")
    before = f", from {escape(number(start, 3))} before training" if start else ""
    return f"{said}{before}."


def whose_text(split: str) -> str:
    """Return in full which text a figure is of."""
    return "the text of held-out clients" if split == "test" else SPLITS[split]


def _cost(run: Facts) -> str:
    if not run.rounds:
        return ""
    moved = f"{size(run.upload_bytes)} up and {size(run.download_bytes)} down"
    return escape(f"It cost {moved} and {duration(run.seconds)}.")


def _promise(run: Facts) -> str:
    plan, claim = run.header.get("privacy"), run.final.get("privacy")
    if plan is None:
        return "It promises no privacy."
    epsilon = run.epsilon
    if claim is None:
        so_far = f" So far epsilon is {number(epsilon, 3)}." if epsilon is not None else ""
        return escape(f"What it promises is claimed when it ends.{so_far}")
    if epsilon is None:
        return "<b>It promises no finite epsilon.</b>"
    unit = "client" if plan.get("unit", "client") == "client" else "leaf"
    return (
        f"It promises every {unit} <b>epsilon {escape(number(epsilon, 3))}</b> at delta "
        f"{escape(chance(claim['delta']))}."
    )


def _tiles(run: Facts) -> list[tuple[str, str]]:
    shown = []
    for split, words in SPLITS.items():
        found = run.final.get(split) or {}
        if found.get("perplexity") is not None:
            shown.append((number(found["perplexity"], 3), f"perplexity, {words}"))
    split, found = run.headline
    if found.get("accuracy") is not None:
        shown.append((f"{found['accuracy']:.1%}", f"next words right, {SPLITS[split]}"))
    if found.get("bits_per_byte") is not None:
        shown.append((number(found["bits_per_byte"], 3), "bits per byte"))
    if run.header.get("privacy") is not None:
        epsilon = run.epsilon
        told = number(epsilon, 3) if epsilon is not None else "none"
        shown.append((told, "epsilon: what is promised" if run.final else "epsilon so far"))
    if run.rounds:
        shown.append((size(run.upload_bytes), "uploaded by all members"))
        shown.append((duration(run.seconds), f"for {count(len(run.rounds), 'round')}"))
    if run.tokens:
        shown.append((number(run.tokens), "tokens trained on"))
    return shown


# ---- sections ----------------------------------------------------------------------------------


def _curve(run: Facts) -> list[str]:
    parts = [heading("How it learned")]
    if not run.evaluated:
        return [*parts, paragraph("No round has been evaluated yet.")]
    counted = (run.final.get("baselines") or {}).get(run.watched) or {}
    marks = {name: v for name, v in counted.items() if isinstance(v, (int, float))}
    y = "perplexity"
    panels = []
    for axis, (name, words) in AXES.items():
        x, values = run.over(axis)
        if x:
            curve = [Series(run.name, x, values)]
            drawn = svg.lines(curve, x=words, y=y, log_y=True, marks=marks)
            panels.append((f"over {name}", drawn))
    told = [r for r in run.rounds if r.get("loss") is not None]
    if told and len(told) == len(run.rounds):
        loss = Series("loss", [r["round"] + 1 for r in told], [r["loss"] for r in told])
        drawn = svg.lines([loss], x="rounds", y="training loss, nats per token")
        panels.append(("training loss", drawn))
    parts.append(switch("axis", panels))
    which = f"Perplexity on {whose_text(run.watched)}, on a logarithmic scale; lower is better."
    rows = run.recipe.get("server", {}).get("evaluate_rows")
    sampled = f" In training a fixed sample of {count(rows, 'row')} is scored." if rows else ""
    return [*parts, paragraph(which + sampled, "quiet")]


def _counting(run: Facts) -> list[str]:
    counted = run.final.get("baselines") or {}
    splits = [s for s in SPLITS if (run.final.get(s) or {}).get("perplexity") is not None]
    if not any(counted.get(split) for split in splits):
        return []
    rows: list[list[Any]] = [
        [words, *((counted.get(s) or {}).get(name) for s in splits)]
        for name, words in COUNTED.items()
    ]
    rows.append(["this run", *(run.final[s]["perplexity"] for s in splits)])
    return [
        heading("How good is that?"),
        table(["perplexity of", *(SPLITS[s] for s in splits)], rows),
        paragraph(
            "Counting is done on the same training text, all in one place; a federated model that "
            "does not beat it has learned little.",
            "quiet",
        ),
    ]


def _samples(run: Facts) -> list[str]:
    parts = []
    for prompt in run.final.get("predictions") or []:
        said = "".join(
            f"<span>{escape(w['word'])} <i class='quiet'>{w['probability']:.0%}</i></span>"
            for w in prompt["next"]
        )
        parts.append(f"<p class='sample'><b>{escape(prompt['prompt'])}</b> … {said}</p>")
    return [heading("What it says next"), *parts] if parts else []


def _privacy(run: Facts, beside: Beside) -> list[str]:
    """State the privacy claim in plain words, as it was made when the run ended."""
    plan, parts = run.header.get("privacy"), [heading("Privacy")]
    if plan is None:
        parts.append(paragraph("This run makes no privacy claim."))
        return [*parts, *_trust(run, beside)]
    claim, last = run.final.get("privacy"), run.rounds[-1] if run.rounds else {}
    if claim is None:
        parts.append(paragraph("The run has not ended, so nothing is claimed yet."))
        return [*parts, *_trust(run, beside)]
    parts.append(f"<p><b>{escape(claim['sentence'])}</b></p>")
    if claim.get("epsilon") is not None:
        parts.append(svg.odds((0.01, 0.1, 0.5), float(claim["epsilon"])))
        parts.append(
            paragraph(
                "How sure somebody may become at most that a given client took part, whatever "
                "else they know, from how sure they were before.",
                "quiet",
            )
        )
    for title, name in (
        ("It covers:", "covers"),
        ("It does not cover:", "not_covered"),
        ("It holds if:", "assumptions"),
    ):
        if claim.get(name):
            parts.append(f"<p>{title}</p>{bullets(claim[name])}")
    return [*parts, *_trust(run, beside), folded("Mechanism", _mechanism(run, plan, claim, last))]


def _trust(run: Facts, beside: Beside) -> list[str]:
    rows = trust.trust_rows(run.recipe, **beside.members._asdict())
    body = table(list(trust.HEAD), rows) + bullets(trust.NOT_DEFENDED)
    return [folded("Who sees what, and what is not defended", body)]


def _mechanism(run: Facts, plan: JsonMapping, claim: JsonMapping, last: JsonMapping) -> str:
    noisy = plan.get("clip_noise") and plan.get("noise_multiplier")
    share = f"share of updates within the clip, {'with' if noisy else 'without'} noise"
    sampling, leaf = plan["sampling"], plan.get("unit") == "leaf"
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
        ["epsilon by the published conversion", claim.get("published_epsilon")],
        ["computed by", claim.get("accountant", "-")],
    ]
    return table(["what", "value"], rows)


def _noisy_figures(run: Facts) -> list[str]:
    """Show the noisy figures of training clients, each with its standard error."""
    told = [
        (r["round"] + 1, r["private_validation"])
        for r in run.rounds
        if isinstance(r.get("private_validation"), dict)
    ]
    if not told:
        return []
    last = told[-1][1]
    rows = []
    for after, figures in told:
        flat = {**figures, **figures["clients"]}
        pairs = [(flat[name], flat[f"{name}_error"]) for name in NOISY]
        rows.append([after, *(value for pair in pairs for value in pair)])
    head = ["after round", *(word for title in NOISY.values() for word in (title, "error"))]
    return [
        heading("Held-out text of training clients, with noise"),
        paragraph(
            f"Sums over clients, each with at most {count(last['tokens_per_client'], 'token')}, "
            f"with noise of {number(last['noise_multiplier'])} times what one client can change. "
            "Errors are standard errors of the noise. Every line is a release that epsilon counts."
        ),
        table(head, rows),
        *_noisy_nodes(last.get("nodes")),
    ]


def _noisy_nodes(nodes: JsonMapping | None) -> list[str]:
    """Show the last noisy figures of each node, which are computed from the same release."""
    if not nodes:
        return []
    names = ("perplexity", "perplexity_error", "accuracy", "accuracy_error")
    rows = [[node, *(of[name] for name in names)] for node, of in nodes.items()]
    return [
        paragraph("The last of them by node, where the noise leaves a figure:"),
        table(["node", "perplexity", "error", "accuracy", "error"], rows),
    ]


def _clients(run: Facts) -> list[str]:
    split, found = run.headline
    told = found.get("clients") or {}
    quantiles = {name: told[name] for name in ("p10", "p25", "p50", "p75", "p90") if name in told}
    worst = told.get("mean_of_worst_10_percent")
    if len(quantiles) < 5 or not quantiles["p50"]:
        return []
    whose = "held-out clients" if split == "test" else "training clients, on their held-out text"
    total = told.get("clients")
    many = f"Of {count(total, 'client')}" if total else "Of all clients"
    said = (
        f"{many} ({whose}), half see a perplexity below {number(quantiles['p50'], 3)}, and one in "
        f"ten sees more than {number(quantiles['p90'], 3)}."
    )
    marks = {"best served tenth below": quantiles["p10"]}
    if worst is not None:
        ratio = worst / quantiles["p50"]
        times = f", {number(ratio, 2)} times the median" if ratio > 1.1 else ""
        said += f" The worst served tenth see {number(worst, 3)} on average{times}."
        marks = {"worst served tenth, mean": worst, **marks}
    drawn = svg.quantile_box(quantiles, marks, f"perplexity over {whose}")
    return [heading("Who is served badly?"), paragraph(said), drawn]


def _groups(run: Facts) -> list[str]:
    parts: list[str] = []
    split, found = run.headline
    for depth, groups in enumerate(found.get("groups") or []):
        if not 1 < len(groups) <= MOST_GROUPS:
            continue
        worst = sorted(groups.items(), key=lambda item: -(item[1].get("perplexity") or 0))
        rows = [Bar(name, g.get("perplexity"), 0, _tokens(g.get("tokens"))) for name, g in worst]
        parts.append(f"<h3>Groups, level {depth + 1}: perplexity, worst first</h3>")
        parts.append(svg.bars(rows, title=f"perplexity by group, level {depth + 1}"))
        bits = [Bar(name, g.get("bits_per_byte"), 2) for name, g in worst]
        if all(bar.value is not None for bar in bits):  # comparable between languages
            drawn = svg.bars(bits, title=f"bits per byte by group, level {depth + 1}")
            parts.append("<h3>Bits per byte, comparable between languages</h3>" + drawn)
    if not parts:
        return []
    return [heading("Groups"), paragraph(f"Figures of {whose_text(split)}.", "quiet"), *parts]


def _tokens(value: Any) -> str:
    return f"({count(value, 'token')})" if isinstance(value, (int, float)) else ""


def _traffic(run: Facts) -> list[str]:
    parameters, rounds = run.header.get("parameters"), len(run.rounds)
    members = sum(r.get("members", 0) for r in run.rounds)
    if not (parameters and rounds and members and run.upload_bytes) or run.header.get("tree"):
        return []
    full = parameters * FLOAT32
    flows = []
    for name, total in (("up", run.upload_bytes), ("down", run.download_bytes)):
        each = total / members
        share = each / full
        whole = f"{size(total)} in all" + ("" if share > 0.99 else f", {share:.0%} of the model")
        flows.append(Flow(name, share, f"{size(each)} per member and round", whole))
    cohort = members / rounds
    who = "client" if not run.header.get("part_of") else "member"
    wire = run.recipe.get("wire", {})
    codecs = [f"{way}: {wire[way]}" for way in ("upload", "download") if wire.get(way)]
    return [
        heading("Traffic"),
        svg.flow(f"{count(round(cohort, 1), who)} per round", "server", flows),
        paragraph(
            f"An arrow is as thick as its share of the whole model, which has {size(full)} in "
            f"float32. Codecs: {', '.join(codecs) or 'none'}.",
            "quiet",
        ),
    ]


def _settings(run: Facts, defaults: Tables) -> list[str]:
    parts: list[str] = []
    if run.history:
        parts += [heading("History"), bullets(_event(entry) for entry in run.history)]
    rows, others = changed_rows(run.recipe, defaults)
    title = "Settings that differ from the defaults" if defaults else "Settings"
    parts += [heading(title), table(["setting", "value", "default"], rows)]
    if others:
        parts.append(folded("All other settings", table(["setting", "value"], others)))
    parts.append(heading("How to repeat it"))
    parts.append(f"<pre>{escape(run.header.get('command', ''))}</pre>")
    versions = run.header.get("versions") or {}
    made = table(["what", "version"], [[k, str(v)] for k, v in versions.items()])
    parts.append(folded("Made with", made))
    return parts


def _event(entry: JsonMapping) -> str:
    if entry["kind"] == "extended":
        return f"Extended from {entry.get('before')} to {count(entry['rounds'], 'round')}."
    return (
        f"Stopped early after round {entry['round'] + 1}: no better perplexity in "
        f"{count(entry.get('patience') or 0, 'evaluation')}."
    )
