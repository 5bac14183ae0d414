"""`fedlm evaluate`: perplexity and accuracy of a run, per client and per group."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedlm.cli.console import (
    AsJson,
    BestOption,
    Client,
    Node,
    emit,
    evaluating,
    note,
    show,
    talk,
)
from fedlm.cli.federation import needs_flower
from fedlm.cli.train import STORES
from fedlm.core.documents import JsonObject
from fedlm.core.errors import ConfigError, require
from fedlm.engine.devices import use_devices
from fedlm.engine.remote_evaluation import ELSEWHERE
from fedlm.inference import keystrokes_on, load_models, load_params
from fedlm.personal.members import member_called
from fedlm.personal.model import Scorer, mixture_perplexity, open_personal
from fedlm.privacy import release
from fedlm.recipe.build import build
from fedlm.recipe.parts import names_no_text
from fedlm.recipe.settings import Recipe, load
from fedlm.record.directory import ASSIGNMENTS, RunDirectory
from fedlm.record.facts import SPLITS, facts_of
from fedlm.run import Run
from fedlm.training import check_same

FIGURES = {
    "perplexity": "perplexity",
    "perplexity_known_words": "perplexity, without unknown words",
    "accuracy": "accuracy",
    "accuracy_known_words": "accuracy, without unknown words and ends",
    "tokens": "tokens",
    "bits_per_byte": "bits per byte",
}
CLIENTS = {
    "p10": "a tenth below",
    "p25": "a quarter below",
    "p50": "median",
    "p75": "three quarters below",
    "p90": "nine tenths below",
    "mean_of_worst_10_percent": "worst served tenth, mean",
    "clients": "clients",
}


def evaluate(
    run: Annotated[Path, typer.Argument(help="A run directory.")],
    split: Annotated[str, typer.Option(help="test (held-out clients) or validation.")] = "test",
    node: Node = "",
    client: Client = "",
    best: BestOption = False,
    keystrokes: Annotated[
        bool, typer.Option("--keystrokes", help="Also count the keys that three suggestions save.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Score a trained model on held-out text.

    Example: fedlm evaluate runs/sotu --split validation --json
    """
    if split not in ("test", "validation"):
        raise ConfigError(f"--split = {split!r}: expected test or validation.")
    if client:
        alone = not (node or best or keystrokes)
        require(alone, "--client", client, "neither --node, --best nor --keystrokes beside it")
        return _evaluate_client(run, client, as_json)
    directory = RunDirectory.existing(run).of_node(node)
    weights = directory.weights_to_use(best=best)
    check_told(directory)
    with evaluating():
        made = _same_run(directory)
        split = _allowed(made, split)
        model, size = made.recipe.model, made.store.vocabulary
        models = load_models(model, size, directory, [name for name in made.round.names if name])
        if "" in made.round.names:
            models[""] = load_params(model, size, weights)
        found: JsonObject = {"run": str(run), "split": split}
        found |= made.evaluation.of_models(models, split)
        if keystrokes:
            held = made.evaluation.rows(split)
            if held is None:
                raise ConfigError("--keystrokes: expected a flat run whose text is here.")
            found["keystrokes"] = keystrokes_on(models[""], made.store.tokenizer, held)
    if as_json:
        emit(found)
        return
    if "matrix" in found:
        _show_tree(found)
        return
    rows = [[words, found[name]] for name, words in FIGURES.items() if name in found]
    show(f"{run}, {SPLITS[split]}", ["", "value"], rows)
    if keystrokes:
        told = found["keystrokes"]
        saved = "-" if told["saved"] is None else f"{told['saved']:.1%}"
        rows = [["keys saved", saved], ["keys with three suggestions", told["with_suggestions"]]]
        rows += [["keys without", told["without"]], ["words", told["words"]]]
        rows += [["words that were tapped", told["tapped"]]]
        show("keystrokes", ["", "value"], rows)
    if found["clients"]:
        shown = {words: found["clients"].get(name) for name, words in CLIENTS.items()}
        show("perplexity over clients", list(shown), [shown.values()])
    for depth, groups in enumerate(found["groups"]):
        names = ["perplexity", "accuracy", "tokens", "bits_per_byte"]
        rows = [[g, *(f.get(name) for name in names)] for g, f in groups.items()]
        head = ["group", *(FIGURES[name] for name in names)]
        show(f"groups, level {depth + 1}", head, rows)


def _evaluate_client(path: Path, name: str, as_json: bool) -> None:
    """Score a member's own model on its held-out text that chose nothing."""
    directory = RunDirectory.existing(path)
    own = directory.of_client(name)
    with talk.status("evaluating"):
        made = _same_run(directory)
        member = member_called(made, name)
        model = open_personal(own, made.store.vocabulary)
        nats = model.nats(member.report, Scorer())
    found = {"run": str(path), "client": name, "way": model.way, "note": model.note}
    figures = {**found, "perplexity": mixture_perplexity(nats, member.report)}
    if as_json:
        emit(figures)
    else:
        show(f"{path}, {name}", ["", "value"], [[k, v] for k, v in figures.items()])


def _same_run(directory: RunDirectory) -> Run:
    """Return the run of a directory, if its text and recipe are still those that it was of."""
    recipe = load(directory.recipe)
    use_devices(recipe.run.devices)
    made = run_of(recipe, directory)
    check_same(made)
    return made


def check_told(directory: RunDirectory) -> None:
    """Raise `ConfigError` for a model of a private tree: the tree's plan says what may be told."""
    part = facts_of(directory.path).header.get("part_of") or {}
    if part.get("private"):
        raise ConfigError(
            f"{directory.path} is a model of the private run {part.get('run')}: its figures are "
            "those that the report of that run tells."
        )


def _allowed(run: Run, split: str) -> str:
    """Return the split to score: the one asked for, or the only one of a tree.

    Raise `ConfigError` if the run has no such split, or its privacy plan forbids it.
    """
    told = run.evaluation.splits()
    if split in told:
        return split
    if len(run.round.names) > 1 and told:
        note(f"Not every leaf has {SPLITS[split]}: this is of {SPLITS[told[0]]}.")
        return told[0]
    why = "a privacy plan tells figures of held-out clients only" if release.hides(run.plan) else ""
    raise ConfigError(
        f"--split = {split!r}: expected {' or '.join(told) or 'a run with held-out text'}. {why}"
    )


def run_of(recipe: Recipe, directory: RunDirectory) -> Run:
    """Return the run of a directory, with the members at its nodes if it ran over a network."""
    if names_no_text(recipe.data):
        raise ConfigError(ELSEWHERE)
    if not (directory.path / ASSIGNMENTS).is_file():
        return build(recipe, STORES, out=directory.path)
    needs_flower()
    from fedlm.deploy.server_app import again  # flwr costs a second

    return again(recipe, directory, STORES)


def _show_tree(found: JsonObject) -> None:
    """Print the figures of every node on its own text and on the text of every place."""
    rows = [
        [n["name"], n["perplexity"], n.get("bits_per_byte"), n["parent"]] for n in found["nodes"]
    ]
    head = ["node", "perplexity", "bits per byte", "parent"]
    show(f"{found['run']}, {SPLITS[found['split']]}", head, rows)
    matrix = found["matrix"]
    rows = [[n, *v] for n, v in zip(matrix["nodes"], matrix["perplexity"], strict=True)]
    show("each node on the text of each place", ["node", *matrix["places"]], rows)
