"""Everybody gets a model: the shared one, and in a tree the one of its own place.

In:       at the server, a finished run and a transport; at a node, a request that carries a model.
Out:      at the node, `KIT/models/RUN`, a run directory with the shared model, and in a tree
          `KIT/models/RUN/nodes/NAME` with the node's own.
Promise:  a node gets the shared model and its own, nobody else's; it judges them on its own text;
          who is away gets them when asked for again; the same models give the same files. Where
          nodes have the frozen part themselves, the trained one alone is sent.
Not here: carrying requests (`engine/remote_evaluation.py`), run directories
          (`training/node_runs.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fedlm.core import tree
from fedlm.core.errors import WireError
from fedlm.core.types import Params
from fedlm.corpus.store import Store
from fedlm.deploy.local import NodeWork, told_to_nodes
from fedlm.deploy.networked_run import homes_of
from fedlm.deploy.node_evaluation import whole_model
from fedlm.deploy.policy import Refusal
from fedlm.deploy.registration import as_told
from fedlm.engine.counters import Counters
from fedlm.engine.dispatch import Assignment, Quorum, Transport
from fedlm.engine.evaluate_messages import EvaluateRequest
from fedlm.engine.remote import Leaf, leaves_of
from fedlm.engine.remote_evaluation import HeldOutAtNodes
from fedlm.evaluate.held_out import Ask
from fedlm.inference import load_params
from fedlm.models.partial import TRAINABLE
from fedlm.recipe import parts
from fedlm.recipe.assemble import trained_part
from fedlm.record.checkpoint import arrays_in
from fedlm.record.directory import RunDirectory, adapter_beside
from fedlm.record.facts import facts_of
from fedlm.run import Run
from fedlm.training.node_runs import write_run
from fedlm.wire.dense import dense

MODELS = "models"  # the folder of a kit in which a node keeps what it was given
MOST_RUNS = 64  # whose models a node keeps: a server must not fill its disk
SHORT = 8  # digits of a run's name


# ---- the server's side ---------------------------------------------------------------------------


def deliver(
    run: Run,
    assignments: tuple[Assignment, ...],
    transport: Transport,
    *,
    run_id: str,
    counters: Counters,
    deadline: float,
    only: str = "",
    say: Callable[[str], None] = lambda text: None,
) -> list[str]:
    """Send the models of a finished run to the nodes that are there; return who keeps them.

    With `only`, the name of a node, nobody else is asked.
    """
    in_tree = run.round.topology is not None
    places, names = _places(run, assignments)
    online = {name for name, node in transport.presence().items() if node.online}
    asked = [
        place
        for place, leaf in places.items()
        if leaf.assignment.name in online and only in ("", leaf.path[-1])
    ]
    missing = sorted(
        "/".join(leaf.path)
        for place, leaf in places.items()
        if place not in asked and only in ("", leaf.path[-1])
    )
    text = HeldOutAtNodes(
        transport=transport,
        places=places,
        in_tree=in_tree,
        run=run_id,
        recipe=as_told(run.record.path, told_to_nodes(run.recipe, run.algorithm)),
        population=run.population.size,
        exact=dense(),
        quorum=Quorum(quorum=1e-6, deadline=deadline),  # one answer is enough
        counters=counters,
        say=say,
    )
    rounds = len(facts_of(run.record.path).rounds)
    kept = text.keep(rounds, "shared", [_model(run, "")], [Ask(place, 0) for place in asked])
    if in_tree and kept:
        own = [_model(run, names[place]) for place in kept]
        kept = text.keep(rounds, "own", own, [Ask(place, at) for at, place in enumerate(kept)])
    if missing:
        say(f"not there to take their models: {', '.join(missing)} (fedlm federation deliver)")
    return sorted("/".join(places[place].path) for place in kept)


def _model(run: Run, name: str) -> Params:
    """Return a model of a finished run, or the part of it that nodes do not have."""
    recipe, file = run.recipe, run.record.weights_of(name)
    if TRAINABLE[recipe.wire.trainable].leaves is None:
        return load_params(recipe.model, run.store.vocabulary, file)
    alone = adapter_beside(file)
    kept = alone if alone.is_file() else file
    arrays = arrays_in(kept.read_bytes(), str(kept)).state
    like = trained_part(recipe, run.model.shapes())
    return tree.with_leaves(like, {leaf: arrays[leaf] for leaf in tree.named_leaves(like)})


def _places(
    run: Run, assignments: tuple[Assignment, ...]
) -> tuple[dict[int, Leaf], dict[int, str]]:
    """Return the nodes with text by place, and the names of places in a tree."""
    leaves = leaves_of(assignments)
    topology, clients = run.round.topology, run.population.size
    if topology is None:
        return dict(enumerate(leaves)), {}
    homes = homes_of(topology, leaves, clients)
    order = sorted(homes, key=lambda number: homes[number].first)
    places = {number - clients: homes[number] for number in order}
    return places, {place: topology.names[place] for place in places}


# ---- the node's side -----------------------------------------------------------------------------


def keep_models(
    folder: Path,
    node: str,
    work: NodeWork,
    store: Store,
    request: EvaluateRequest,
    with_own: Callable[[Params], Params] | None = None,
) -> list[Path]:
    """Write the models of a request as run directories, and return these.

    `with_own` puts the personal layers that only this node has into the model of its place.
    """
    recipe = work.recipe
    whole = RunDirectory(folder / request.run[:SHORT])
    others = [path for path in folder.glob("*/") if path != whole.path]
    if len(others) >= MOST_RUNS and not whole.path.is_dir():
        raise Refusal(f"this node keeps the models of {MOST_RUNS} runs: it has so many already.")
    data = type(recipe.data)(
        store=str(store.path.resolve()),
        sequence_length=recipe.data.sequence_length,
        layout=recipe.data.layout,
    )
    clients = len(store.training_clients)
    own = parts.recipe_to_look_at(recipe.model_copy(update={"data": data}), clients)
    if TRAINABLE[recipe.wire.trainable].leaves is not None:  # adapters are exported for their base
        own = own.model_copy(update={"model": recipe.model, "wire": recipe.wire})
    own = parts.resolve(own, store)
    written = []
    for role, model in zip(request.splits, request.models, strict=True):
        if role == "own" and recipe.federation is None:
            raise WireError("the request has a model for a place of a tree: there is none.")
        directory = whole if role == "shared" else whole.node(node)
        mine = with_own if role == "own" else None
        params = whole_model(work, request.frames[model], mine)
        # Layers that only this node has are without noise; what came from above has it.
        covered = None if work.plan is None else mine is None
        write_run(
            directory,
            params,
            own,
            store,
            rounds=request.round,
            final={},
            part_of={
                "run": request.run,
                "node": node if role == "own" else "",
                "private": False,  # to this node, whose text it is
                "covered": covered,
            },
        )
        written.append(directory.path)
    return written
