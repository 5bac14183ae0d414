"""`fedlm report`: an HTML page of one run, or a comparison of several."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedlm.cli.console import AsJson, emit, out
from fedlm.publish.pages import page_of
from fedlm.record.directory import RunDirectory
from fedlm.record.page import write_page


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run directories.")],
    page: Annotated[
        Path | None, typer.Option("--out", help="The page; by default in the run, or report.html.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make a page of one run, or compare several.

    Example: fedlm report runs/si-cifg runs/cifg --out compare.html
    """
    made = page_of([RunDirectory.existing(run).path for run in runs])
    path = page or (RunDirectory(runs[0]).report if len(runs) == 1 else Path("report.html"))
    write_page(path, made)
    if as_json:
        emit({"report": str(path), "runs": [str(run) for run in runs]})
    else:
        out.print(f"report: {path}")
