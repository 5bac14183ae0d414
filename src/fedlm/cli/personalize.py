"""`fedlm personalize`: a member's own model, made from the federation's."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedlm.cli.console import AsJson, emit, note, out, show, talk
from fedlm.cli.train import STORES
from fedlm.core.documents import JsonObject
from fedlm.core.errors import ConfigError, require
from fedlm.engine.devices import use_devices
from fedlm.methods.optimizers import CLIENT_OPTIMIZERS
from fedlm.personal import choose
from fedlm.personal.members import member_called, member_names, members_of
from fedlm.personal.ways import WAYS
from fedlm.recipe.build import build
from fedlm.recipe.parts import names_no_text
from fedlm.recipe.settings import load
from fedlm.record.directory import ASSIGNMENTS, RunDirectory
from fedlm.run import Run
from fedlm.training import check_same


def personalize(
    run: Annotated[Path, typer.Argument(help="A finished run.")],
    client: Annotated[
        str | None, typer.Option("--client", help="A client, or a leaf of a tree: keep its model.")
    ] = None,
    everybody: Annotated[
        bool, typer.Option("--all", help="A table over all members; no model is kept.")
    ] = False,
    ways: Annotated[str, typer.Option(help=f"With commas, of: {', '.join(WAYS)}.")] = ",".join(
        WAYS
    ),
    split: Annotated[
        str, typer.Option(help="--all: validation (members that trained) or test (new clients).")
    ] = "validation",
    most: Annotated[
        int | None, typer.Option(min=1, help="--all: so many members, drawn at random.")
    ] = None,
    optimizer: Annotated[
        str | None, typer.Option(help="Of own steps; by default client.optimizer.")
    ] = None,
    learning_rate: Annotated[
        float | None, typer.Option(help="Of own steps; by default client.learning_rate.")
    ] = None,
    passes: Annotated[
        int, typer.Option(min=1, max=10_000, help="The most passes over a member's text.")
    ] = 10,
    patience: Annotated[
        int, typer.Option(min=1, max=10_000, help="Passes to wait for a better score.")
    ] = 2,
    as_json: AsJson = False,
) -> None:
    """Make the model of one member its own, or show what that would bring to all of them.

    Each member chooses among several ways on text that it held out.

    Example: fedlm personalize runs/sotu --client 1862-Lincoln-1

    Example: fedlm personalize runs/sotu --all --most 20
    """
    require(everybody != (client is not None), "--client", client, "either --client NAME or --all")
    require(
        learning_rate is None or 0 < learning_rate < 1e30,
        "--learning-rate",
        learning_rate,
        "a positive number",
    )
    require(
        optimizer is None or optimizer in CLIENT_OPTIMIZERS,
        "--optimizer",
        optimizer,
        f"one of {', '.join(CLIENT_OPTIMIZERS)}",
    )
    names = choose.check_ways([part.strip() for part in ways.split(",") if part.strip()])
    made = _open(run)
    if client is None:
        member_names(made, split)  # refuses what may not be told, before anything is trained
    shop = choose.shop_of(
        made,
        optimizer=optimizer,
        learning_rate=learning_rate,
        passes=passes,
        patience=patience,
    )
    if client is not None:
        member = member_called(made, client)
        with talk.status(f"personalizing {client}"):
            outcome = choose.personalize(choose.shop_for(made, shop, member), member, names)
            path = choose.save_outcome(made, outcome)
        return _print_one(choose.outcome_facts(outcome, path), as_json)
    outcomes, without = [], 0
    for member in members_of(made, split, most):
        if not member.enough:
            without += 1
            continue
        outcomes.append(choose.personalize(choose.shop_for(made, shop, member), member, names))
        last = outcomes[-1]
        note(f"{last.name}: {last.way}, {last.perplexity['federated']:.1f} -> {last.own:.1f}")
    if not outcomes:
        raise ConfigError(
            f"--all: {'no member' if most is None else f'none of the {without} members drawn'} of "
            f"{run} has text to learn from and two held-out rows; raise data.validation"
            f"{'' if most is None else ' or --most'}."
        )
    _print_all(run, outcomes, without, as_json)


def _open(path: Path) -> Run:
    directory = RunDirectory.existing(path).finished()
    recipe = load(directory.recipe)
    if names_no_text(recipe.data) or (directory.path / ASSIGNMENTS).is_file():
        raise ConfigError(
            f"{path}: the text of its members is at nodes; expected a run whose text is here."
        )
    use_devices(recipe.run.devices)
    with talk.status("opening"):
        made = build(recipe, STORES, out=directory.path)
        check_same(made)
    return made


def _print_one(facts: JsonObject, as_json: bool) -> None:
    if as_json:
        return emit(facts)
    rows = [
        [way, value, "chosen" if way == facts["way"] else ""]
        for way, value in facts["by_way"].items()
    ]
    show(
        f"{facts['client']}: perplexity on text that chose nothing", ["way", "perplexity", ""], rows
    )
    out.print(f"{facts['way']} ({facts['note']}): {facts['model']}")


def _print_all(run: Path, outcomes: list[choose.Personalized], without: int, as_json: bool) -> None:
    lines = choose.outcome_table(outcomes)
    if as_json:
        return emit(
            {
                "run": str(run),
                "members": len(outcomes),
                "without_text": without,
                "ways": [vars(line) for line in lines],
                "by_member": [choose.outcome_facts(outcome) for outcome in outcomes],
            }
        )
    head = ["way", "mean perplexity", "over all tokens", "hurt", "worse than alone", "chosen by"]
    rows = [
        [
            line.way,
            line.perplexity,
            line.together,
            f"{line.hurt:.0%}",
            "-" if line.hurt_alone is None else f"{line.hurt_alone:.0%}",
            f"{line.taken:.0%}",
        ]
        for line in lines
    ]
    show(f"{run}: {len(outcomes)} members, on text that chose nothing", head, rows)
    if without:
        out.print(f"{without} members have too little held-out text.")
