"""`fedlm node ...`: an organisation's side of a federation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedlm.cli.console import note
from fedlm.cli.train import polite_stop
from fedlm.engine.devices import use_devices

app = typer.Typer(
    help="An organisation's side of a federation.", no_args_is_help=True, rich_markup_mode=None
)


@app.callback()
def _node() -> None:
    """An organisation's side of a federation."""


@app.command()
def join(
    kit: Annotated[Path, typer.Argument(help="The folder that the operator handed over.")],
    *,
    store: Annotated[Path, typer.Option(help="The client store, made by fedlm prepare.")],
    policy: Annotated[
        Path | None, typer.Option(help="What is allowed; by default policy.toml in the kit.")
    ] = None,
    whole: Annotated[
        bool, typer.Option("--whole", help="The store is one member, not one per client.")
    ] = False,
    devices: Annotated[int, typer.Option(help="Lanes on this machine; 0 is one per core.")] = 0,
) -> None:
    """Take part in a federation with the text of a store, until stopped.

    Example: fedlm node join kits/north --store stores/letters
    """
    from fedlm.cli.federation import needs_flower

    needs_flower()
    use_devices(devices)
    from fedlm.deploy.node import work

    with polite_stop() as stop:
        work(kit, store, policy, whole=whole, say=note, stop=stop.is_set)


@app.command()
def relay(
    kit: Annotated[Path, typer.Argument(help="A kit of the federation above.")],
    *,
    home: Annotated[Path, typer.Option(help="The folder of the federation below.")],
) -> None:
    """Join a federation with the nodes of another one, whose server must be running.

    Example: fedlm node relay kits/europe --home europe
    """
    from fedlm.cli.federation import needs_flower

    needs_flower()
    from fedlm.deploy.node import relay as pass_on

    with polite_stop() as stop:
        pass_on(kit, home, say=note, stop=stop.is_set)
