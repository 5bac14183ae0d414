"""`fedlm evaluate`: perplexity and accuracy of a run, per client and per group."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fedlm.cli.console import AsJson, emit, show, talk
from fedlm.cli.federation import needs_flower
from fedlm.cli.train import STORES
from fedlm.core.errors import ConfigError
from fedlm.engine.devices import use_devices
from fedlm.inference import load_params
from fedlm.privacy import release
from fedlm.recipe.build import build
from fedlm.recipe.settings import Recipe, load
from fedlm.record.directory import RunDirectory
from fedlm.run import Run
from fedlm.training import check_same


def evaluate(
    run: Annotated[Path, typer.Argument(help="A run directory.")],
    split: Annotated[str, typer.Option(help="test (held-out clients) or validation.")] = "test",
    as_json: AsJson = False,
) -> None:
    """Score a trained model on held-out text.

    Example: fedlm evaluate runs/sotu --split validation --json
    """
    if split not in ("test", "validation"):
        raise ConfigError(f"--split = {split!r}: expected test or validation.")
    directory = RunDirectory.existing(run).finished()
    recipe = load(directory.recipe)
    use_devices(recipe.run.devices)
    with talk.status("evaluating"):
        made = _run_of(recipe, directory)
        check_same(made)
        split = _allowed(made, split)
        models = {
            name: load_params(recipe.model, made.store.vocabulary, directory.weights_of(name))
            for name in made.round.names
        }
        found: dict[str, Any] = {"run": str(run), "split": split}
        found |= made.evaluation.of_models(models, split)
    if as_json:
        emit(found)
        return
    if "matrix" in found:
        _show_tree(found)
        return
    names: tuple[str, ...] = (
        "perplexity",
        "perplexity_no_oov",
        "accuracy",
        "accuracy_no_oov_eos",
        "tokens",
    )
    names += ("bits_per_byte",) if "bits_per_byte" in found else ()
    show(f"{run}, {split}", ["", "value"], [[name, found[name]] for name in names])
    if found["clients"]:
        show("perplexity over clients", list(found["clients"]), [found["clients"].values()])
    for depth, groups in enumerate(found["groups"]):
        rows = [[g, f["perplexity"], f["accuracy"], f["tokens"]] for g, f in groups.items()]
        show(f"groups, level {depth + 1}", ["group", "perplexity", "accuracy", "tokens"], rows)


def _allowed(run: Run, split: str) -> str:
    """The split that was asked for; a tree has one, and a plan leaves training clients alone."""
    told = run.evaluation.splits()
    if split in told:
        return split
    if len(run.round.names) > 1 and told:
        return told[0]
    why = "a privacy plan tells figures of held-out clients only" if release.hides(run.plan) else ""
    raise ConfigError(
        f"--split = {split!r}: expected {' or '.join(told) or 'a run with held-out text'}. {why}"
    )


def _run_of(recipe: Recipe, directory: RunDirectory) -> Run:
    """The run that the directory holds; over a network it had the nodes that its seats name."""
    if not (directory.path / "seats.json").is_file():
        return build(recipe, STORES, out=directory.path)
    needs_flower()
    from fedlm.deploy.server_app import again

    return again(recipe, directory, STORES)


def _show_tree(found: dict[str, Any]) -> None:
    """Every node on its own text, and on that of every place."""
    rows = [[n["name"], n["perplexity"], n["parent"]] for n in found["nodes"]]
    show(f"{found['run']}, {found['split']}", ["node", "perplexity", "parent"], rows)
    matrix = found["matrix"]
    rows = [[n, *v] for n, v in zip(matrix["nodes"], matrix["perplexity"], strict=True)]
    show("each node on the text of each place", ["node", *matrix["places"]], rows)
