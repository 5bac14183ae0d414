"""`fedlm federation ...`: a federation over a network, from its operator's side."""

from __future__ import annotations

import importlib.util
import os
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from fedlm.cli.console import AsJson, Changes, OutPath, RecipeFile, Resume, emit, note, out, show
from fedlm.cli.train import RUNS, STORES, end, followed, run_path
from fedlm.core.errors import ConfigError, require
from fedlm.deploy import history as log
from fedlm.deploy import member_list, membership, workspace
from fedlm.deploy.certificates import check_current
from fedlm.deploy.processes import follow_parent
from fedlm.deploy.signing import key_id
from fedlm.deploy.word_counts import join_words
from fedlm.deploy.workspace import Workspace
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
    nodes: Annotated[
        str,
        typer.Option(
            help="Nodes whose keys are made here: north,south. Others make their own "
            "(fedlm node init)."
        ),
    ] = "",
    name: Annotated[str, typer.Option(help="The federation's name.")] = "",
    port: Annotated[int, typer.Option(help="Where the server listens.")] = 9443,
    bind: Annotated[str, typer.Option(help="The address at which it listens.")] = "0.0.0.0",
    quorum: Annotated[float, typer.Option(help="Share of nodes that must answer a round.")] = 0.5,
    deadline: Annotated[float, typer.Option(help="Seconds that a round waits.")] = 3600.0,
    tokenizer: Annotated[
        Path | None, typer.Option(help="A tokenizer.json, which the kits will carry.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make a federation: an authority, the server's certificate, a kit for each node.

    Example: fedlm federation init fed --host server.example.org --nodes north,south
    """
    needs_flower()

    names = [part.strip() for part in nodes.split(",") if part.strip()]
    more = {"bind": bind, "quorum": quorum, "deadline": deadline}
    made = workspace.init(home, name or home.name, hosts, port, names, tokenizer=tokenizer, **more)
    kits = {node: str(made.kit(node).path) for node in names}
    if as_json:
        emit({"home": str(home), "address": f"{hosts[0]}:{port}", "kits": kits})
        return
    out.print(f"federation {made.settings.name} at {hosts[0]}:{port}")
    for node, kit in kits.items():
        out.print(f"  {node}: hand over {kit}; there: fedlm node join KIT --store STORE")
    if not kits:
        out.print("  nodes: fedlm node init KIT there, then fedlm federation add-node here")
    note(f"Start it with:\n  {shlex.join(['fedlm', 'federation', 'serve', str(home)])}")


@app.command()
def tokenizer(
    words: Annotated[list[Path], typer.Argument(help="The files words.json that nodes sent.")],
    out_path: Annotated[Path, typer.Option("--out", help="The tokenizer's folder; a new one.")],
    *,
    vocabulary: Annotated[int, typer.Option(help="Entries, specials included.")] = 10_000,
    as_json: AsJson = False,
) -> None:
    """Make the federation's tokenizer from words that nodes counted with noise.

    Example: fedlm federation tokenizer north/words.json south/words.json --out tokenizer
    """

    made = join_words(words, out_path, vocabulary)
    facts = {"tokenizer": str(out_path / "tokenizer.json"), "vocabulary": made.tokenizer.vocabulary}
    if as_json:
        emit({**facts, "origin": made.origin})
        return
    out.print(f"{facts['tokenizer']}: {facts['vocabulary']:,} entries")
    note(
        f"It costs a client epsilon {made.origin['epsilon']:g} at delta "
        f"{made.origin['delta']:g} at most; kits carry it with\n  fedlm federation init HOME "
        f"--tokenizer {facts['tokenizer']} ..."
    )


@app.command()
def serve(home: HOME) -> None:
    """Run the server at which nodes meet, until stopped.

    Example: fedlm federation serve fed
    """
    needs_flower()
    from fedlm.deploy.flower import superlink  # flwr costs a second

    follow_parent()
    found = Workspace.existing(home)
    for file in (found.authority, found.certificate):
        check_current(file)
    note(f"{found.settings.name}: listening at {found.settings.bind}:{found.settings.port}")
    superlink.serve(found, note)


NAME = Annotated[str, typer.Argument(help="The node's name.")]
KEY = Annotated[Path, typer.Option(help="The file node.pub that the node sent.")]


@app.command("add-node")
def add_node(home: HOME, name: NAME, *, key: KEY, as_json: AsJson = False) -> None:
    """Let a node join that made its own key; its private key stays there.

    Example: fedlm federation add-node fed north --key north.pub
    """
    needs_flower()

    found = Workspace.existing(home)
    _invite(found, name, membership.add_node(found, name, _public(key)), as_json)


@app.command("remove-node")
def remove_node(home: HOME, name: NAME, as_json: AsJson = False) -> None:
    """Turn a node away from now on, also in a run that is going on.

    Example: fedlm federation remove-node fed north
    """
    needs_flower()

    gone = membership.remove_node(Workspace.existing(home), name)
    if as_json:
        emit({"home": str(home), "node": name, "kept": str(gone)})
        return
    out.print(f"{name} is turned away from now on; what was kept of it is in {gone}")


@app.command()
def renew(
    home: HOME,
    name: Annotated[str, typer.Argument(help="A node; left out: the server and all nodes.")] = "",
    hosts: Annotated[
        list[str] | None,
        typer.Option("--host", help="The server's new name or address; may be repeated."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make certificates with a new date: of a node, or of the server and all nodes.

    With --host the server has moved to another name, and nodes accept new invitations.

    Example: fedlm federation renew fed north
    """
    needs_flower()

    found = Workspace.existing(home)
    if name and hosts:
        raise ConfigError("--host: expected no node beside it: the server moves for all of them.")
    if not name:
        membership.renew_server(found, hosts or ())
    made = {n: membership.renew_node(found, n) for n in ([name] if name else found.nodes())}
    if as_json:
        emit({"home": str(home), "invitations": {n: str(file) for n, file in made.items()}})
        return
    for node, file in made.items():
        out.print(f"{node}: send {file}; there: fedlm node accept KIT FILE")
    if not name:
        note("The server has a new certificate: start fedlm federation serve again.")


@app.command()
def rotate(
    home: HOME,
    name: Annotated[str, typer.Argument(help="A node; left out: the server.")] = "",
    key: Annotated[
        Path | None, typer.Option(help="The node's next public key, from fedlm node rotate.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Replace a key: that of a node, or the server's own and the control key.

    Example: fedlm federation rotate fed north --key north.pub.next
    """
    needs_flower()

    found = Workspace.existing(home)
    if name:
        if key is None:
            raise ConfigError(
                f"--key: expected the next public key of {name}, which fedlm node rotate makes."
            )
        _invite(found, name, membership.rotate_node(found, name, _public(key)), as_json)
        return
    membership.renew_server(found)
    membership.rotate_control(found)
    if as_json:
        emit({"home": str(home), "rotated": ["cert.key", "control.key"]})
        return
    out.print("The server has a new key and control key: start fedlm federation serve again.")


@app.command()
def members(
    home: HOME,
    propose: Annotated[
        bool, typer.Option("--propose", help="Write a list of all nodes, for members to approve.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show who takes part in secure sums, or propose another list.

    Example: fedlm federation members fed --propose
    """
    needs_flower()

    found = Workspace.existing(home)
    if propose:
        file, shown = member_list.propose(found)
    else:
        file, shown = found.members, member_list.current(found)
    names = [member.name for member in shown.members]
    if as_json:
        facts = {"number": shown.number, "members": names, "fingerprint": shown.fingerprint}
        emit({"home": str(home), "file": str(file), **facts})
        return
    out.print(f"list {shown.number}: {', '.join(names)}")
    out.print(f"  fingerprint {shown.fingerprint}")
    if propose:
        out.print(f"send {file} to every node; there: fedlm node approve KIT {file.name}")


@app.command()
def approve(
    home: HOME,
    files: Annotated[list[Path], typer.Argument(help="The files approval.json that nodes sent.")],
    as_json: AsJson = False,
) -> None:
    """Take in what members signed; a list that all have signed counts from then on.

    Example: fedlm federation approve fed north/approval.json south/approval.json
    """
    needs_flower()

    found = Workspace.existing(home)
    shown, missing = member_list.collect(found, files)
    if as_json:
        emit({"home": str(home), "number": shown.number, "missing": list(missing)})
        return
    if missing:
        out.print(f"list {shown.number} still needs the approval of {', '.join(missing)}")
        return
    out.print(f"list {shown.number} counts from now on; fingerprint {shown.fingerprint}")
    out.print(f"send {found.members} to every node; there: fedlm node approve KIT members.json")


@app.command()
def history(home: HOME, as_json: AsJson = False) -> None:
    """Who did what to a federation: nodes added and removed, keys, servers, runs.

    Example: fedlm federation history fed
    """
    needs_flower()

    entries = log.read(Workspace.existing(home).history)
    if as_json:
        emit({"home": str(home), "history": entries})
        return
    named = ("time", "user", "action", "after")
    rows = [
        [
            e["time"],
            e["user"],
            e["action"],
            ", ".join(f"{k} {str(v)[:16]}" for k, v in e.items() if k not in named),
        ]
        for e in entries
    ]
    show(f"history {home}", ["time", "user", "action", ""], rows)


def _public(key: Path) -> bytes:
    try:
        return key.read_bytes()
    except OSError as error:
        raise ConfigError(f"--key = {str(key)!r} is not readable: {error.strerror}.") from None


def _invite(found: Any, name: str, file: Path, as_json: bool) -> None:

    authority = key_id(found.authority.read_bytes())
    if as_json:
        emit({"node": name, "invitation": str(file), "authority": authority})
        return
    out.print(f"{name}: send {file}; there: fedlm node accept KIT {file.name}")
    out.print(f"  and tell them on another channel that the authority is {authority[:32]}")


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
    from fedlm.deploy.server_app import train as carry_out  # flwr costs a second

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
def deliver(
    home: HOME,
    run: Annotated[Path, typer.Argument(help="A finished run of this federation.")],
    node: Annotated[str, typer.Option("--node", help="Only to this node; left out: to all.")] = "",
    as_json: AsJson = False,
) -> None:
    """Send nodes the models of a finished run: the shared one, and in a tree their own.

    Example: fedlm federation deliver fed runs/first --node north
    """
    needs_flower()
    from fedlm.deploy.server_app import deliver_again  # flwr costs a second

    kept = deliver_again(Workspace.existing(home), run, only=node, stores=STORES, say=note)
    if as_json:
        emit({"run": str(run), "nodes": kept})
        return
    out.print(f"nodes that have their models: {', '.join(kept) or 'none'}")


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
    from fedlm.deploy.status import nodes_of  # flwr costs a second

    found = nodes_of(Workspace.existing(home), run)
    if as_json:
        emit({"home": str(home), "nodes": found})
        return
    head = [
        "node",
        "there",
        "since",
        "answered",
        "late",
        "away",
        "refused",
        "garbage",
        "aside",
        "last",
    ]
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
    from fedlm.deploy.doctor import examine  # flwr costs a second

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
            "--tree",
            help="Relays: two with two nodes each, with --secure one with three beside two nodes, "
            "or as the recipe's [federation] says.",
        ),
    ] = False,
    secure: Annotated[
        bool, typer.Option("--secure", help="Secure sums: the server sees no node's update.")
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

    Example: fedlm federation demo --secure --tree
    """
    needs_flower()
    from fedlm.deploy import demo as demos  # flwr costs a second

    require(
        recipe is not None or not changes,
        "--set",
        " ".join(changes or ()),
        "a RECIPE that it changes: without one the demonstration has its own",
    )
    if recipe is None:
        asked = demos.recipe(secure=secure, as_tree=tree)
    else:
        asked = load(recipe, tuple(changes or ()))
    use_devices(1)  # one lane per process, because all nodes share the machine
    path = (folder or free_path(RUNS, f"demo{'-tree' * tree}{'-secure' * secure}")).absolute()
    done = followed(
        lambda watcher: demos.demo(
            path, asked, as_tree=tree, secure=secure, devices=1, watcher=watcher
        ),
        asked.server.rounds,
    )
    if done is None or done["difference"] is None:
        note("The demonstration was stopped; there is nothing to compare.")
        raise typer.Exit(130)
    if as_json:
        emit(done)
        return
    names = ("rounds", "perplexity", "seconds", "upload_bytes", "params_sha256")
    rows = [[n, *(done[side][n] for side in ("networked", "simulated"))] for n in names]
    show(f"{path}", ["", "over the network", "in simulation"], rows)
    out.print(f"largest difference of a parameter: {done['difference']:.2g}")
    if secure:
        out.print(f"members of the secure sums: fingerprint {done['fingerprint']}")
