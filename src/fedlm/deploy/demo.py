"""A whole federation on one machine: certificates, server, nodes, a run, and its simulation.

In:       a recipe and an empty folder.
Out:      the summaries of both runs, and how far their models are apart.
Promise:  the same recipe and seed, over TLS and in one program; every process is ended.
Not here: any of its parts.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from fedlm.asked import load_params
from fedlm.core import tree
from fedlm.corpus.deal import deal
from fedlm.deploy import home as homes
from fedlm.deploy import server_app
from fedlm.deploy.home import Home
from fedlm.deploy.processes import Child, children, free_port, wait_for_port
from fedlm.recipe.build import build, open_store
from fedlm.recipe.settings import Recipe, parse
from fedlm.record.directory import RunDirectory
from fedlm.train import Watcher
from fedlm.train import train as simulate

NODES = ("east", "north", "west")
TREE = {"one": ("east", "north"), "two": ("south", "west")}
Start = Callable[[list[str], str], Child]


def recipe(source: str = "sotu") -> Recipe:
    """Small enough for a minute of work."""
    return parse(
        {
            "data": {"source": source, "vocabulary": 2000, "length": 16},
            "model": {"name": "cifg", "embed": 32, "units": 48},  # SI-CIFG would amplify rounding
            "client": {"batch": 16, "max_examples": 64},
            "server": {"rounds": 5, "cohort": 6, "evaluate_every": 5, "evaluate_rows": 500},
            "run": {"tensorboard": False, "baselines": False},
        }
    )


def demo(
    folder: Path, asked: Recipe, *, as_tree: bool, devices: int, watcher: Watcher
) -> dict[str, Any]:
    """Trains over a network of processes here, then in simulation, and compares."""
    folder.mkdir(parents=True)
    whole = open_store(asked.data, folder / "text")
    names = [n for part in TREE.values() for n in part] if as_tree else list(NODES)
    deal(whole, _dealt_names(as_tree) if as_tree else names, folder / "stores")
    watcher.say(f"text dealt to {len(names)} nodes; the server keeps held-out clients only")
    at_server = _with_store(asked, folder / "stores" / "server")
    with children() as started:

        def start(arguments: list[str], log: str) -> Child:
            started.append(Child(arguments, folder / f"{log}.log", folder))
            return started[-1]

        top = (_start_tree if as_tree else _start_flat)(folder, start, devices)
        networked = server_app.train(
            top,
            at_server,
            folder / "networked",
            resume=False,
            watcher=watcher,
            stores=folder / "text",
        )
    watcher.say("the same recipe in simulation")
    experiment = build(_with_store(asked, whole.path), folder / "text", lambda stage, done: None)
    run = RunDirectory(folder / "simulated")
    simulated = simulate(experiment, run, resume=False, watcher=watcher)
    if networked is None or simulated is None:
        return {"networked": networked, "simulated": simulated, "difference": None}
    apart = difference(folder / "networked", folder / "simulated", experiment)
    return {"networked": networked, "simulated": simulated, "difference": apart}


def _with_store(asked: Recipe, path: Path) -> Recipe:
    data = {**asked.data.model_dump(exclude_none=True), "store": str(path)}
    data.pop("source", None)
    return asked.model_copy(update={"data": type(asked.data)(**data)})


def _dealt_names(as_tree: bool) -> list[str]:
    """Members are numbered by relay, then by node: the text is dealt in that order."""
    return [f"{top}-{below}" for top, part in TREE.items() for below in part]


def _federation(folder: Path, name: str, nodes: tuple[str, ...], start: Start) -> Home:
    port = free_port()
    made = homes.init(folder / name, name, ["127.0.0.1"], port, nodes, bind="127.0.0.1")
    wait_for_port(port, start(["federation", "serve", str(made.path)], f"{name}-server"))
    return made


def _join(start: Start, home: Home, node: str, store: Path, devices: int) -> None:
    kit = str(home.kit(node).path)
    lanes = ["--devices", str(devices)]
    start(["node", "join", kit, "--store", str(store), *lanes], f"{home.path.name}-{node}")


def _start_flat(folder: Path, start: Start, devices: int) -> Home:
    home = _federation(folder, "federation", NODES, start)
    for name in NODES:
        _join(start, home, name, folder / "stores" / name, devices)
    return home


def _start_tree(folder: Path, start: Start, devices: int) -> Home:
    above = _federation(folder, "world", tuple(TREE), start)
    for relay, nodes in TREE.items():
        below = _federation(folder, relay, nodes, start)
        for name in nodes:
            _join(start, below, name, folder / "stores" / f"{relay}-{name}", devices)
        kit = str(above.kit(relay).path)
        start(["node", "relay", kit, "--home", str(below.path)], f"{relay}-relay")
    return above


def difference(one: Path, other: Path, experiment: Any) -> float:
    """The largest difference between the parameters of two runs."""
    model, size = experiment.recipe.model, experiment.store.vocabulary
    a, b = (load_params(model, size, RunDirectory(p).weights) for p in (one, other))
    pairs = zip(tree.named_leaves(a).values(), tree.named_leaves(b).values(), strict=True)
    return max(float(np.max(np.abs(np.asarray(x) - np.asarray(y)), initial=0.0)) for x, y in pairs)
