"""`fedlm federation ...`: a federation over a network, from its operator's side."""

from __future__ import annotations

import importlib.util
import os
import shlex
from pathlib import Path
from typing import Annotated

import typer

from fedlm.cli.console import AsJson, Changes, OutPath, RecipeFile, Resume, emit, note, out, show
from fedlm.cli.train import RUNS, STORES, end, followed, run_path
from fedlm.core.errors import ConfigError
from fedlm.engine.devices import use_devices
from fedlm.recipe.settings import load
from fedlm.record.directory import free_path

app = typer.Typer(
    help="A federation over a network: certificates, server, runs.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
HOME = Annotated[Path, typer.Argument(help="The federation's folder.")]


def needs_flower() -> None:
    """Raise an error that says what to install if Flower is missing; turn its telemetry off."""
    if importlib.util.find_spec("flwr") is None:
        raise ConfigError(
            "a federation over a network needs Flower: install it with pip install "
            "'fedlm[federation]'."
        )
    os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
    os.environ["FLWR_DISABLE_UPDATE_CHECK"] = "1"


@app.command()
def init(
    home: HOME,
    *,
    hosts: Annotated[
        list[str], typer.Option("--host", help="Name or address of the server; may be repeated.")
    ],
    nodes: Annotated[str, typer.Option(help="Names of the nodes: north,south.")],
    name: Annotated[str, typer.Option(help="The federation's name.")] = "",
    port: Annotated[int, typer.Option(help="Where the server listens.")] = 9443,
    bind: Annotated[str, typer.Option(help="The address at which it listens.")] = "0.0.0.0",
    quorum: Annotated[float, typer.Option(help="Share of nodes that must answer a round.")] = 0.5,
    deadline: Annotated[float, typer.Option(help="Seconds that a round waits.")] = 3600.0,
    as_json: AsJson = False,
) -> None:
    """Make a federation: an authority, the server's certificate, a kit for each node.

    Example: fedlm federation init fed --host server.example.org --nodes north,south
    """
    needs_flower()
    from fedlm.deploy import workspace

    names = [part.strip() for part in nodes.split(",") if part.strip()]
    more = {"bind": bind, "quorum": quorum, "deadline": deadline}
    made = workspace.init(home, name or home.name, hosts, port, names, **more)
    kits = {node: str(made.kit(node).path) for node in names}
    if as_json:
        emit({"home": str(home), "address": f"{hosts[0]}:{port}", "kits": kits})
        return
    out.print(f"federation {made.settings.name} at {hosts[0]}:{port}")
    for node, kit in kits.items():
        out.print(f"  {node}: hand over {kit}; there: fedlm node join KIT --store STORE")
    note(f"Start it with:\n  {shlex.join(['fedlm', 'federation', 'serve', str(home)])}")


@app.command()
def serve(home: HOME) -> None:
    """Run the server at which nodes meet, until stopped.

    Example: fedlm federation serve fed
    """
    needs_flower()
    from fedlm.deploy.flower import superlink
    from fedlm.deploy.processes import follow_parent
    from fedlm.deploy.workspace import Workspace

    follow_parent()
    found = Workspace.existing(home)
    note(f"{found.settings.name}: listening at {found.settings.bind}:{found.settings.port}")
    superlink.serve(found)


@app.command()
def train(
    home: HOME,
    recipe: RecipeFile,
    changes: Changes = None,
    out_path: OutPath = None,
    resume: Resume = False,
    as_json: AsJson = False,
) -> None:
    """Train over the nodes of a federation; the server must be running.

    Example: fedlm federation train fed recipe.toml --out runs/first
    """
    needs_flower()
    loaded = load(recipe, tuple(changes or ()))
    use_devices(loaded.run.devices)
    from fedlm.deploy.server_app import train as carry_out
    from fedlm.deploy.workspace import Workspace

    path = run_path(recipe, out_path, resume)
    found = Workspace.existing(home)
    summary = followed(
        lambda watcher: carry_out(
            found, loaded, path, resume=resume, watcher=watcher, stores=STORES
        ),
        loaded.server.rounds,
    )
    end(summary, path, ["federation", "train", str(home)], as_json)


@app.command()
def status(
    home: HOME,
    run: Annotated[Path | None, typer.Option(help="A run directory: who answered in it.")] = None,
    as_json: AsJson = False,
) -> None:
    """Tell which nodes are there, and who answered in a run.

    Example: fedlm federation status fed --run runs/first
    """
    needs_flower()
    from fedlm.deploy.status import nodes_of
    from fedlm.deploy.workspace import Workspace

    found = nodes_of(Workspace.existing(home), run)
    if as_json:
        emit({"home": str(home), "nodes": found})
        return
    head = ["node", "there", "since", "answered", "late", "away", "refused", "garbage", "last"]
    show(f"federation {home}", head, [[n[name] for name in ("name", *head[1:])] for n in found])


@app.command()
def doctor(
    path: Annotated[Path, typer.Argument(help="A federation's folder, or a node's kit.")],
    as_json: AsJson = False,
) -> None:
    """Look for the usual mistakes: names, authorities, clocks, ports, versions.

    Example: fedlm federation doctor kits/north
    """
    needs_flower()
    from fedlm.deploy.doctor import examine

    checks = examine(path)
    sick = [check for check in checks if not check.well]
    if as_json:
        emit({"well": not sick, "checks": [check._asdict() for check in checks]})
    else:
        rows = [[c.what, "well" if c.well else "wrong", c.found] for c in checks]
        show(f"doctor {path}", ["", "", "found"], rows)
        for check in sick:
            out.print(f"{check.what}: {check.way_out}")
    raise typer.Exit(2 if sick else 0)


@app.command()
def demo(
    tree: Annotated[
        bool,
        typer.Option(
            "--tree", help="Relays: two with two nodes each, or as the recipe's [federation] says."
        ),
    ] = False,
    recipe: Annotated[
        Path | None, typer.Argument(help="A TOML file; by default a small one.")
    ] = None,
    changes: Changes = None,
    folder: Annotated[
        Path | None, typer.Option("--out", help="Where everything goes; by default in runs/.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """A whole federation on this machine, over TLS, and the same run in simulation beside it.

    Example: fedlm federation demo --tree
    """
    needs_flower()
    from fedlm.deploy import demo as demos

    asked = demos.recipe() if recipe is None else load(recipe, tuple(changes or ()))
    use_devices(1)  # one lane per process, because all nodes share the machine
    path = (folder or free_path(RUNS, "demo-tree" if tree else "demo")).absolute()
    done = followed(
        lambda watcher: demos.demo(path, asked, as_tree=tree, devices=1, watcher=watcher),
        asked.server.rounds,
    )
    assert done is not None
    if as_json:
        emit(done)
        return
    names = ("rounds", "perplexity", "seconds", "upload_bytes", "params_sha256")
    rows = [[n, *(done[side][n] for side in ("networked", "simulated"))] for n in names]
    show(f"{path}", ["", "over the network", "in simulation"], rows)
    out.print(f"largest difference of a parameter: {done['difference']:.2g}")
