"""`fedlm sweep`: many runs of one recipe, and one table of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedlm.cli.console import AsJson, emit, note, out, show
from fedlm.cli.train import RUNS, STORES, polite_stop
from fedlm.core.durable import write_atomically
from fedlm.core.releasable import Releasable
from fedlm.engine.devices import use_devices
from fedlm.publish.pages import page_of
from fedlm.search import sweep as sweeps
from fedlm.training import Watcher


def sweep(
    file: Annotated[Path, typer.Argument(help="A sweep file; see docs/settings.md.")],
    out_path: Annotated[
        Path | None, typer.Option("--out", help="The folder of its runs; goes on if it is there.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run every point of a sweep and compare them in one table and one report.

    Example: fedlm sweep recipes/sweeps/irc-grid.toml
    """
    plan = sweeps.read_sweep(file)
    folder = out_path or RUNS / file.stem
    use_devices(sweeps.recipe_of(plan, plan.points[0]).run.devices)
    if plan.selection is not None:
        return _select(plan, folder, as_json)
    with polite_stop() as stop:

        def watch(label: str) -> Watcher:
            note(label)

            def on_round(facts: Releasable) -> None:
                if facts.get("perplexity") is not None:
                    said = f"round {facts['round'] + 1}, perplexity {facts['perplexity']:.1f}"
                    note(f"{label}, {said}")

            return Watcher(say=note, round=on_round, stop=stop.is_set)

        results = sweeps.carry_out(plan, folder, STORES, watch)
    head, rows = sweeps.sweep_table(plan, results)
    write_atomically(folder / "table.md", sweeps.markdown(head, rows).encode())
    page = page_of([r.path for r in results])
    write_atomically(folder / "report.html", page.encode())
    total = sweeps.privacy_sentence([result.path for result in results])
    if as_json:
        emit({"sweep": str(folder), "head": head, "rows": rows, "privacy": total})
    else:
        show(str(folder), head, rows)
        if total is not None:
            out.print(f"privacy: {total}")
        out.print(f"table: {folder / 'table.md'}; report: {folder / 'report.html'}")


def _select(plan: sweeps.Sweep, folder: Path, as_json: bool) -> None:
    """Carry out a private selection and print its one result; the number of runs is secret."""
    note("Selecting: a random number of runs, of which nothing but the best is shown.")
    with polite_stop() as stop:
        best = sweeps.select(plan, folder, STORES, stop.is_set)
    if best is None:
        note("The law drew no run, or none ended: nothing is released, and the draw counts.")
        raise typer.Exit(1)
    facts = {"best": str(best.path), "point": best.point, "perplexity": best.perplexity}
    if as_json:
        emit({**facts, "privacy": best.claim.facts})
        return
    show(str(folder), ["what", "value"], [[name, str(value)] for name, value in facts.items()])
    out.print(f"privacy: {best.claim.sentence}")
    for line in best.claim.covers:
        out.print(f"  covers {line}")
