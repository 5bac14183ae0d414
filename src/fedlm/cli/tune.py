"""`fedlm tune`: the best settings of a recipe, by successive halving."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from fedlm.cli.console import AsJson, Changes, RecipeFile, emit, note, out, show
from fedlm.cli.train import RUNS, STORES, polite_stop
from fedlm.core.errors import ConfigError, require
from fedlm.core.releasable import Releasable
from fedlm.engine.devices import use_devices
from fedlm.search.space import axes_of
from fedlm.search.tune import search_settings
from fedlm.search.tune_plan import Search, cost, plan_search
from fedlm.search.tune_results import BEST, TABLE, Found, as_facts, trial_table
from fedlm.training import Watcher


def tune(
    recipe: RecipeFile,
    over: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TABLE.KEY=VALUES",
            help="A setting to try: values with commas, or a range low..high:count.",
        ),
    ] = None,
    changes: Changes = None,
    seeds: Annotated[str | None, typer.Option(help="Of every point, with commas.")] = None,
    points: Annotated[int | None, typer.Option(min=1, help="The most points.")] = None,
    keep_one_in: Annotated[
        int | None,
        typer.Option(min=1, max=100, help="Keep one in N points after each rung; 1 keeps all."),
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="The most rounds of all runs together.")
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(help="The most minutes of all runs together.")
    ] = None,
    epsilon: Annotated[
        float | None,
        typer.Option(help="The most that all runs on the store may cost a client together."),
    ] = None,
    out_path: Annotated[
        Path | None, typer.Option("--out", help="The folder of its runs; goes on if it is there.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Find good rates, clips and server settings for RECIPE.

    Many points are trained for a short while, the best of them go on, and a recipe is written.

    Example: fedlm tune recipes/sotu.toml --over client.learning_rate=0.1..3:4 --rounds 500
    """
    for name, value in (("--minutes", minutes), ("--epsilon", epsilon)):
        require(value is None or 0 < value < float("inf"), name, value, "a positive number")
    axes = axes_of(over or [])
    search = plan_search(
        recipe,
        tuple(changes or ()),
        over=axes or None,
        seeds=None if seeds is None else seeds_of(seeds),
        points=points,
        keep_one_in=keep_one_in,
        rounds=rounds,
        minutes=minutes,
        epsilon=epsilon,
    )
    folder = out_path or RUNS / f"{recipe.stem}-tune"
    use_devices(search.base().run.devices)
    steps = " -> ".join(f"{rung.points} x {rung.rounds} rounds" for rung in search.rungs)
    played = cost(search.rungs) * len(search.seeds)
    note(f"{folder}: {steps}; {played} rounds in all, {len(search.seeds)} seed(s) each.")
    with polite_stop() as stop:
        try:
            found = search_settings(search, folder, STORES, note_figures, stop.is_set)
        except KeyboardInterrupt:
            note(f"Stopped; go on with the same command:\n  {shlex.join(['fedlm', *sys.argv[1:]])}")
            raise typer.Exit(130) from None
    if as_json:
        emit(as_facts(search, found, folder))
        return
    _print(search, found, folder)


def seeds_of(text: str) -> tuple[int, ...]:
    """Read seeds with commas, or raise `ConfigError`."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and part.isascii() and len(part) < 19 for part in parts):
        raise ConfigError(f"--seeds = {text!r}: expected whole numbers with commas, as in 0,1,2.")
    return tuple(int(part) for part in parts)


def note_figures(label: str) -> Watcher:
    """Say which run begins, and return a watcher that says its perplexities."""
    note(label)

    def on_round(facts: Releasable) -> None:
        if facts.get("perplexity") is not None:
            note(f"  round {facts['round'] + 1}, perplexity {facts['perplexity']:.1f}")

    return Watcher(round=on_round)


def _print(search: Search, found: Found, folder: Path) -> None:
    head, rows = trial_table(search, found)
    show(f"{folder}: perplexity on {found.chosen_by}", head, rows)
    if not found.complete:
        out.print("The budget ended before the best points were trained to the end.")
    for line in found.edges:
        out.print(line)
    if found.last is not None:
        out.print(f"on text that chose nothing: perplexity {found.last['mean']:.2f}")
    if found.spent is not None:
        out.print(f"privacy: {found.spent}")
    out.print(f"recipe: {folder / BEST}; table: {folder / TABLE}")
