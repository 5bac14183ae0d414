"""`fedlm advise`: should these members federate?"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from fedlm.cli.console import AsJson, Changes, emit, note, out, show
from fedlm.cli.train import RUNS, polite_stop
from fedlm.cli.tune import note_figures
from fedlm.core.errors import ConfigError, require
from fedlm.engine.devices import use_devices
from fedlm.recipe.settings import load
from fedlm.search import advise as answers


def advise(
    store: Annotated[Path, typer.Argument(help="A store made by fedlm prepare.")],
    recipe: Annotated[
        Path, typer.Option(help="Model and federation to ask about; its [data] names rows alone.")
    ] = Path("advise"),
    changes: Changes = None,
    by: Annotated[
        str, typer.Option(help="client, or group: a member is all clients of a first group.")
    ] = "client",
    shares: Annotated[
        str, typer.Option(help="Of each member's text, with commas; all of it is always asked.")
    ] = "1,0.3,0.1",
    members: Annotated[int, typer.Option(min=2, max=10_000, help="The most to be scored.")] = 12,
    minutes: Annotated[
        float | None, typer.Option(help="The most minutes of this call; a later one goes on.")
    ] = None,
    out_path: Annotated[
        Path | None, typer.Option("--out", help="The folder of the answer; goes on if it is there.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say whether members of STORE are better off together than alone, by a short run.

    Local training, a federation, and the federation made personal are compared on text that none
    of them saw, at the text that members have now and at shares of it.

    Example: fedlm advise my-store --minutes 10

    Example: fedlm advise my-store --by group --shares 1,0.1
    """
    require(
        minutes is None or 0 < minutes < float("inf"), "--minutes", minutes, "a positive number"
    )
    require(by in ("client", "group"), "--by", by, "'client' or 'group'")
    made = load(recipe, tuple(changes or ()))
    question = answers.ask(
        store, made, shares=_shares(shares), members=members, by_group=by == "group"
    )
    folder = out_path or RUNS / f"{store.resolve().name}-advice"
    use_devices(made.run.devices)
    with polite_stop() as stop:
        try:
            answer = answers.advise(
                question, folder, minutes=minutes, watcher=note_figures, stop=stop.is_set
            )
        except KeyboardInterrupt:
            note(f"Stopped; go on with the same command:\n  {shlex.join(['fedlm', *sys.argv[1:]])}")
            raise typer.Exit(130) from None
    if as_json:
        return emit({"advice": str(folder), **answer})
    head, rows = answers.advice_table([answers.ShareLine(**line) for line in answer["lines"]])
    show(f"{store}: perplexity on text that decided nothing", head, rows)
    for said in answer["answer"]:
        out.print(said)
    if answer["missing"]:
        shown = ", ".join(f"{share:.0%}" for share in answer["missing"])
        out.print(
            f"Not answered within the minutes: {shown} of the text; the same command goes on."
        )
    out.print(f"report: {folder / answers.PAGE}")


def _shares(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ConfigError(
            f"--shares = {text!r}: expected numbers with commas: 1,0.3,0.1."
        ) from None
