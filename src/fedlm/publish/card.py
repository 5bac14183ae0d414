"""The model card that stands beside an exported model.

In:       a finished run, a format.
Out:      Markdown, with the entries that model hubs read at its head.
Promise:  data, rounds, privacy, bytes and perplexity are those of the journal; the licence is the
          one that the base states.
Not here: the files beside it (`formats.py`).
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from fedlm.core.documents import JsonObject
from fedlm.core.words import count
from fedlm.models.interop import gguf
from fedlm.publish.finished_run import FinishedRun
from fedlm.record.facts import SPLITS, Facts, facts_of

CARD, LARGEST_CARD = "README.md", 1 << 20
CONVERTED = "dequantised_from"  # the entry of a converted file's card
FENCE = "---"  # around the entries at the head of a card
WORD = re.compile(r"[A-Za-z][\w.+-]*")  # what YAML reads as text without quotes
LONGEST_ENTRY = 200
LIBRARIES = {"huggingface": "transformers", "peft": "peft", "onnx": "onnx", "onnx-int8": "onnx"}


def card(run: FinishedRun, kind: str, architecture: str | None = None) -> str:
    """Return the model card: data, rounds, privacy, bytes, perplexity, and the base's licence."""
    facts, origin = facts_of(run.directory.path), run.recipe.model.init_from
    licence, (split, told) = licence_of(origin), facts.headline
    head = [FENCE, f"library_name: {LIBRARIES.get(kind, 'fedlm')}", "tags: [fedlm]"]
    head += [f"license: {yaml_text(licence)}"] if licence else []
    head += [f"base_model: {json.dumps(str(origin))}"] if origin else []
    part = facts.header.get("part_of")
    lines = [
        *head,
        FENCE,
        "",
        f"# {plain(run.directory.path.resolve().name)}",
        "",
        f"A `{architecture or run.spec.architecture}` language model, trained by fedlm with "
        "federated averaging on text that stayed where it was written.",
        "",
        *(_of_run(run, facts) if part is None else _of_part(run, part)),
        f"- Perplexity on {SPLITS[split]}: {_figure(told.get('perplexity'))}.",
        *(_privacy(facts.final.get("privacy")) if part is None else _privacy_of_part(part)),
        f"- Base: {_base_words(origin)} Licence of the base: {licence or 'not stated there'}.",
        "- Not for: advice, facts, or text about people; it repeats what was written before it.",
    ]
    return "\n".join(lines) + "\n"


def _of_run(run: FinishedRun, facts: Facts) -> list[str]:
    """Return what a run was trained on, by whom, and what it sent."""
    before = (facts.header.get("start") or {}).get("perplexity")
    after = facts.evaluated[-1]["perplexity"] if facts.evaluated else None
    clients = (facts.header.get("store") or {}).get("clients")
    whose = "a number of clients that is not told" if clients is None else count(clients, "client")
    tree = facts.header.get("tree")
    whom = f"{count(run.recipe.server.cohort, 'client')} each"
    if tree:
        whom = f"of a tree of {count(len(tree['names']), 'place')}"
    return [
        f"- Data: {whose}; tokenizer of {count(run.tokenizer.vocabulary, 'token')}.",
        f'- Rounds: {len(facts.rounds)}, {whom}; `wire.trainable = "{run.recipe.wire.trainable}"`.',
        f"- Bytes uploaded by all {'places' if tree else 'clients'}: {facts.upload_bytes:,.0f}.",
        f"- Perplexity on a fixed sample of {SPLITS[facts.watched]}: {_figure(before)} before, "
        f"{_figure(after)} after.",
    ]


def _of_part(run: FinishedRun, part: JsonObject) -> list[str]:
    """Return which run made the model of a place, a client or a node, and where its facts are."""
    kinds = ("client", "node")
    whose = next((f" of {quoted(part[kind])}" for kind in kinds if part.get(kind)), "")
    rounds = f" in {count(part['rounds'], 'round')}" if "rounds" in part else ""
    return [
        f"- Made by: the run {quoted(part.get('run'))}{rounds}, as the model{whose}; data, bytes "
        "and figures of that run are in its own report.",
        f"- Tokenizer of {count(run.tokenizer.vocabulary, 'token')}; "
        f'`wire.trainable = "{run.recipe.wire.trainable}"`.',
    ]


def _privacy_of_part(part: JsonObject) -> list[str]:
    """Return whether the claim of the run that made a model covers the model."""
    planned = part.get("private") or part.get("covered") is not None
    if not planned:
        return _privacy(None)
    if part.get("client") or part.get("covered") is False:
        return [
            "- Privacy: no promise covers this model: its own layers are as its owner's text made "
            f"them, without noise. The claim of the run {quoted(part.get('run'))} is of what left "
            "them."
        ]
    return [
        f"- Privacy: the claim of the run {quoted(part.get('run'))}, in the words of its report."
    ]


def _figure(value: float | None) -> str:
    return "not told" if value is None else f"{value:.2f}"


def _privacy(claim: JsonObject | None) -> list[str]:
    """Return the run's claim in its own words, with what it does not cover."""
    if claim is None:
        return ["- Privacy: no privacy plan, and no promise."]
    return [
        f"- Privacy: {claim['sentence']}",
        *(f"  - Not covered: {words}" for words in claim["not_covered"]),
        *(f"  - Assumed: {words}" for words in claim["assumptions"]),
    ]


def _base_words(origin: str | None) -> str:
    if origin is None:
        return "none; the model began from random numbers."
    if origin.endswith(gguf.SUFFIX):
        return f"`{Path(origin).name}`, a GGUF file made into float32; a quantised one lost digits."
    made = _front_matter(Path(origin), "dequantised_from")
    if made is None:
        return f"`{Path(origin).name}`."
    return (
        f"`{Path(origin).name}`, made from the GGUF file `{made}`: its quantised weights lost "
        "digits, and the adapters fit the float32 numbers that they stand for. They belong on that "
        "folder, and not on the model before it was quantised."
    )


def licence_of(origin: str | None) -> str | None:
    """Return the licence that a base states, in its model card or its GGUF settings."""
    if origin is None:
        return None
    path = Path(origin)
    if path.suffix == gguf.SUFFIX and path.is_file():
        return one_line(gguf.stated_licence(path) or "")
    return _front_matter(path, "license")


def yaml_text(value: str) -> str:
    """Return a value as YAML reads it: in quotes unless it is a plain word.

    >>> yaml_text("apache-2.0"), yaml_text("mine: [")
    ('apache-2.0', '"mine: ["')
    """
    return value if WORD.fullmatch(value) else json.dumps(value)


def is_ours(folder: Path) -> bool:
    """Return whether the model card of a folder was written by `card`, or for a converted file."""
    file = folder / CARD
    if not file.is_file() or file.stat().st_size > LARGEST_CARD:
        return False
    head = file.read_text(encoding="utf-8", errors="replace").split(FENCE)[1:2]
    lines = head[0].splitlines() if head else []
    return "tags: [fedlm]" in lines or any(line.startswith(f"{CONVERTED}:") for line in lines)


def plain(name: object) -> str:
    """Return a name on one line, without what Markdown or HTML would read as its own.

    >>> plain("eve`\\n# Privacy <b>")
    'eve # Privacy b'
    """
    return one_line(re.sub(r"[`<>\[\]|*]", "", str(name))) or "-"


def quoted(name: object) -> str:
    """Return a name as Markdown shows it letter by letter."""
    return f"`{plain(name)}`"


def one_line(value: str) -> str | None:
    """Return a text of somebody else on one line, cut where it is long; None if it is empty."""
    return " ".join(value.split())[:LONGEST_ENTRY] or None


def _front_matter(folder: Path, name: str) -> str | None:
    """Return an entry at the head of a folder's model card; None if there is none."""
    file = folder / CARD
    if not file.is_file() or file.stat().st_size > LARGEST_CARD:
        return None
    first, *lines = file.read_text(encoding="utf-8", errors="replace").splitlines() or [""]
    for line in lines if first.strip() == FENCE else ():
        if line.strip() == FENCE:
            break
        if line.startswith(f"{name}:"):
            return one_line(line.removeprefix(f"{name}:").strip().strip("\"'"))
    return None
