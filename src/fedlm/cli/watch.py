"""`fedlm watch`: all runs of a folder on a local page, live."""

from __future__ import annotations

import contextlib
import importlib.util
from pathlib import Path
from typing import Annotated

import typer

from fedlm.cli.console import note, out
from fedlm.cli.train import RUNS
from fedlm.core.errors import ConfigError, require
from fedlm.watch.guard import is_loopback

PORT = 7333


def watch(
    folder: Annotated[Path, typer.Argument(help="The folder with runs.")] = RUNS,
    port: Annotated[int, typer.Option(help="Where to listen; 0 takes any free port.")] = PORT,
    host: Annotated[
        str, typer.Option(help="The address to listen at; others than loopback are not encrypted.")
    ] = "127.0.0.1",
) -> None:
    """Show all runs of a folder on a page, live: figures, curves, stop and resume, a keyboard.

    Example: fedlm watch runs
    """
    if any(importlib.util.find_spec(name) is None for name in ("starlette", "uvicorn")):
        raise ConfigError(
            "the page needs a web server: install it with pip install 'fedlm[watch]'."
        )
    require(folder.is_dir(), "FOLDER", str(folder), "a folder with runs", "Train one first.")
    require(0 <= port < 1 << 16, "--port", port, "a port, or 0 for any free one")
    from fedlm.watch.server import serve  # here, because it needs an extra: starlette, uvicorn

    if not is_loopback(host):
        note(
            f"--host {host}: whoever can reach this machine and has the address below can stop "
            "runs, and nothing on the way is encrypted."
        )

    def said(address: str) -> None:
        out.print(address)
        note(f"{folder}: open the address above; Ctrl-C ends the page, not the runs.")

    with contextlib.suppress(KeyboardInterrupt):
        serve(folder, host, port, said)
