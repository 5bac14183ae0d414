"""From a recipe with a tree to the parts of its run.

In:       a resolved `Recipe` with a `[federation]` table, and a store.
Out:      a `Run` whose round and evaluation are those of a tree.
Promise:  every setting of the table is used once, here; what has no meaning in a tree is refused.
Not here: what the settings may be (`federation.py`), the round (`federation/tree_round.py`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from fedlm.core import tree
from fedlm.core.documents import JsonMapping
from fedlm.core.errors import ConfigError, require
from fedlm.core.keys import generator_for
from fedlm.core.types import Engine, Params, PyTree, Rows, Sampling, ServerMethod
from fedlm.corpus.population import Population
from fedlm.corpus.rows import ClientRows
from fedlm.evaluate.held_out import Held, TextByPlace, TextHere
from fedlm.evaluate.perplexity import Evaluator
from fedlm.federation.algorithm import Algorithm, on_base
from fedlm.federation.leaf import LeafRules
from fedlm.federation.topology import EVERYBODY, Topology, feed
from fedlm.federation.tree_evaluation import TreeEvaluation
from fedlm.federation.tree_round import TreeConfig, add_change, rows_in_memory
from fedlm.federation.tree_rounds import TreeRound
from fedlm.local.train import WEIGHTS, local_training
from fedlm.methods import fedavg
from fedlm.methods.optimizers import schedule, server_optimizer
from fedlm.models import catalog
from fedlm.models.partial import TRAINABLE
from fedlm.models.split import SETTING, personal_layers
from fedlm.privacy import account, release
from fedlm.privacy.plan import PrivacyPlan
from fedlm.recipe import parts, privacy_plan
from fedlm.recipe.assemble import (
    algorithm_of,
    check_settings,
    inner_of,
    loss_of,
    rate_of,
    trained_leaves,
    trained_part,
)
from fedlm.recipe.federation import NODE_WEIGHTS, FederationTable, topology_of
from fedlm.recipe.private_evaluation import private_evaluation_of, refuse_private_evaluation
from fedlm.recipe.settings import Recipe
from fedlm.record.mmap_cache import Shelf
from fedlm.run import Run
from fedlm.wire.dense import dense

IN_A_NETWORKED_TREE = (
    "in a tree over a network, where a place is a node with all its text as one member, and the "
    "noise hides one client: leave [federation] out, and let relays make the tree"
)
# Settings of [wire] that say which part of a model is trained in every round alike.
FROZEN_PART = ("trainable_fraction", "rank", "alpha", "targets", "last_blocks")
NOTHING_HELD = (
    "data.validation: expected held-out text at every leaf of the tree; raise it, or "
    "data.test_clients."
)


# Settings of [server] that take the mean change of a place's clients.
OF_A_SERVER = ("optimizer", "learning_rate", "momentum", "schedule", "warmup_rounds")


def _check_servers(recipe: Recipe) -> None:
    """Refuse settings of a place's own server where the text of a place is one member."""
    settings, usual = settings_of(recipe), type(recipe.server)()
    if not settings.pool_clients:
        return
    for name in OF_A_SERVER:
        value, default = getattr(recipe.server, name), getattr(usual, name)
        there = f"federation.{name} is that of the tree's nodes; or set"
        if name not in type(settings).model_fields:
            there = "The tree's nodes have none; set"
        require(
            value == default,
            f"server.{name}",
            value,
            f"{default!r}, its default, in a tree whose places are one member each",
            f"{there} federation.pool_clients = false.",
        )
    for place in settings.node:
        require(
            place.cohort is None,
            "federation.node.cohort",
            place.cohort,
            "none in a tree whose places are one member each",
            "Set federation.pool_clients = false.",
        )


def tree_run(
    recipe: Recipe,
    store: Any,
    *,
    out: Path,
    members: Population | None = None,
    engine: Callable[[Algorithm, Topology], Engine] | None = None,
    text: Callable[[Algorithm, Topology, PrivacyPlan | None], TextByPlace] | None = None,
    nothing_held: Callable[[Topology, JsonMapping], str] = lambda topology, held: NOTHING_HELD,
    tokens: Callable[[int], int] | None = None,
) -> Run:
    """Return the run of a tree.

    Its members are the store's clients, or `members`, which `engine` reaches elsewhere; `tokens`
    tells how many each of these trains on. It is evaluated on the store's held-out text, or on
    `text` elsewhere. `nothing_held` words the error for a tree without held-out text.
    """
    check_settings(recipe)
    _check_servers(recipe)
    settings, people = settings_of(recipe), parts.people_of(recipe, store, members)
    if people.elsewhere:
        refuse_private_evaluation(recipe, IN_A_NETWORKED_TREE)
    rows, ledgers, size = people.rows, people.ledgers, people.population.size
    topology = topology_of(settings, people.population.group_paths())
    start = parts.start_maker(recipe, store)
    algorithm = people.work(tree_algorithm(recipe, store, topology, out, ledgers, start))
    parts.check_base(recipe, algorithm)
    made = (
        engine(algorithm, topology)
        if engine
        else parts.engine_of(recipe, algorithm, rows_by_number(rows, topology))
    )
    counts = tokens or people.population.tokens
    config = tree_config(recipe, store, algorithm, topology, size, counts, out, ledgers, start)
    config = replace(config, **_at_home(config, people.elsewhere))
    plans = _plans(config, leaf_plan(recipe, len(topology.with_text)))
    plan = next(iter(plans.values()), None)
    sent = trained_part(recipe, parts.model_spec(recipe, store.vocabulary).shapes())
    round = TreeRound(
        config=config,
        engine=made,
        algorithm=algorithm,
        model_bytes=lambda way: getattr(algorithm, way).encoded_bytes(sent),
        secret=lambda: privacy_plan.new_secret(recipe.privacy),
        # Nodes that keep their own models draw their own noise: its secret is theirs alone.
        leaf_secret=lambda: bytes(16) if config.models_at_home else _leaf_secret(settings),
        plan=plan,
    )
    return Run(
        population=people.population,
        algorithm=algorithm,
        engine=made,
        round=round,
        evaluation=_evaluation(recipe, rows, algorithm, config, plan, text, nothing_held),
        private_evaluation=private_evaluation_of(
            recipe, rows, plan, round.models, places=_places(topology)
        ),
        node_recipes={
            name: node_recipe(recipe, topology, node, here=not people.elsewhere)
            for node, name in enumerate(topology.names)
        },
        start=start,
        **parts.shared_parts(recipe, store, plans, out),
    )


def node_recipe(recipe: Recipe, topology: Topology, node: int, *, here: bool) -> Recipe:
    """Return the recipe under which a node's model is judged by itself: on the text below it.

    If the text is not `here`, the recipe names none. It is a recipe for looking at a model: it has
    no plan, because the plan is that of the whole tree.
    """
    below = topology.below(node)
    groups = sorted({group for n in below for group in topology.places[n].groups})
    clients = sum(len(topology.clients[n]) for n in below)
    told = () if not here or EVERYBODY in groups else tuple(groups)
    data = recipe.data.model_copy(update={"groups": told})
    return parts.recipe_to_look_at(recipe.model_copy(update={"data": data}), clients)


def _places(topology: Topology) -> dict[str, tuple[int, ...]]:
    """Return the clients of every place that has text, by the name of its model."""
    return {topology.names[node]: topology.clients[node] for node in topology.with_text}


def settings_of(recipe: Recipe) -> FederationTable:
    """Return the recipe's `[federation]` table."""
    assert recipe.federation is not None
    return recipe.federation


def rows_by_number(rows: ClientRows, topology: Topology) -> Rows:
    """Return a function from member number to rows.

    Numbers below the number of clients are clients; the next ones are nodes with all their text.
    """
    clients = len(rows.clients)

    def rows_of(member: int) -> np.ndarray:
        if member < clients:
            return rows.train(member)
        return np.concatenate([rows.train(c) for c in topology.clients[member - clients]])

    return rows_of


# ---- the algorithm and the rules of a round ------------------------------------------------


def tree_algorithm(
    recipe: Recipe,
    store: Any,
    topology: Topology,
    out: Path,
    ledgers: Sequence[Path],
    start: Callable[[], Params],
) -> Algorithm:
    """Return the algorithm of a tree's members, after checking that its settings fit a tree."""
    settings, privacy = settings_of(recipe), recipe.privacy
    require(
        privacy.mechanism is None or not settings.pool_clients,
        "privacy.mechanism",
        privacy.mechanism,
        "federation.pool_clients = false: it protects clients, and a pooled node has none",
        "federation.noise_multiplier protects a node's text as a whole.",
    )
    require(privacy.canaries == 0, "privacy.canaries", privacy.canaries, "0 in a tree")
    shapes = parts.model_spec(recipe, store.vocabulary).shapes()
    return leaf_algorithm(recipe, _participation(recipe, topology, out, ledgers), shapes, start)


def leaf_algorithm(
    recipe: Recipe,
    participation: Sampling | PrivacyPlan,
    shapes: Params,
    start: Callable[[], Params],
) -> Algorithm:
    """Return the algorithm of a node that trains on its pooled text or with its clients.

    `start` makes the model before training; what of it is never trained is held once for all nodes.
    """
    settings, client = settings_of(recipe), recipe.client
    made = algorithm_of(recipe, participation, shapes, start)
    steps, keep = settings.warmup_steps, settings.keep_optimizer
    for name, value in (("warmup_steps", steps), ("keep_optimizer", keep)):
        require(
            not value or settings.pool_clients,
            f"federation.{name}",
            value,
            "pool_clients = true: it is the optimiser of a node that trains on its own text",
        )
    if not settings.pool_clients:
        return made
    kind = TRAINABLE[recipe.wire.trainable]
    frozen = ("trainable", *FROZEN_PART) if kind.leaves is not None else ()
    allowed = ("upload", "download", *frozen)
    held = {name: getattr(recipe.wire, name) for name in allowed}
    require(
        recipe.wire == type(recipe.wire)(**held) and client.method == "fedavg",
        "federation.pool_clients",
        True,
        "of [wire] the codecs alone, or a part that is the same in every round (wire.trainable = "
        "'lora' or 'fixed'), and no client.method beside it: nodes send each other whole parts of "
        "models",
    )
    # A rate that rises within a round is the optimiser's own; then the round gives its factor.
    rises = schedule("constant", client.learning_rate, rounds=steps, warmup=steps, end=0.0)
    inner, weigh = inner_of(recipe, rises if steps else 1.0), WEIGHTS[client.weight]
    trains = {} if made.make_base is None else {"part": kind.on_base}
    local = local_training(
        loss_of(recipe),
        inner,
        weigh,
        **trains,
        proximal=client.proximal,
        remember=keep,
    )
    return replace(made, local=local, rate_of=rate_of(recipe, 1.0 if steps else None))


def _participation(
    recipe: Recipe, topology: Topology, out: Path, ledgers: Sequence[Path]
) -> Sampling | PrivacyPlan:
    """Return the plan or sampling law of the smallest federation of clients in the tree.

    A client is drawn most often there. Where text is pooled, all nodes join every round.
    """
    if settings_of(recipe).pool_clients:
        nodes = len(topology.with_text)
        return Sampling(law="fixed", population=nodes, cohort=nodes)
    held = min(len(topology.clients[n]) for n in topology.with_text)
    return _participation_of(recipe, held, recipe.server.cohort, out, ledgers)


def _participation_of(
    recipe: Recipe, held: int, cohort: int, out: Path, ledgers: Sequence[Path]
) -> Sampling | PrivacyPlan:
    server = recipe.server.model_copy(update={"cohort": min(cohort, held)})
    alone = recipe.model_copy(update={"server": server})
    return privacy_plan.participation_of(alone, held, out, ledgers)


def _plans(config: TreeConfig, leaves: PrivacyPlan | None) -> dict[str, PrivacyPlan]:
    """Return the plan of the leaves, or those of all federations of clients, the dearest first."""
    if leaves is not None:
        return {"": leaves}
    inner = zip(config.topology.names, config.algorithms, strict=True)
    plans = {name: a.plan for name, a in inner if a is not None and a.plan is not None}
    return account.dearest_first(plans)


def tree_config(
    recipe: Recipe,
    store: Any,
    algorithm: Algorithm,
    topology: Topology,
    clients: int,
    tokens: Callable[[int], int] | None,
    out: Path,
    ledgers: Sequence[Path],
    start: Callable[[], Params],
) -> TreeConfig:
    """Return the configuration of the tree's rounds."""
    settings, nodes = settings_of(recipe), range(len(topology))
    shapes = parts.model_spec(recipe, store.vocabulary).shapes()
    _check_leaf_noise(settings, topology)
    require(
        recipe.privacy.mechanism is None or NODE_WEIGHTS[settings.weight] is None,
        "federation.weight",
        settings.weight,
        "'uniform' under [privacy]: how many tokens the clients of a place have is a fact of their "
        "text, and a weight shows it",
        "A weight that is written at a [[federation.node]] may stay.",
    )
    shelf, many = Shelf(), 0 < settings.resident < len(topology)

    def rest(node: int, part: PyTree) -> PyTree:
        """Put a part of a node on disk if the tree has more nodes than `resident`."""
        return shelf.put(node, part) if many else part

    return TreeConfig(
        topology=topology,
        personal_layers=_personal_layers(recipe, shapes),
        seed=recipe.run.seed,
        temperature=settings.temperature,
        compare=settings.compare,
        residuals=0 if settings.temperature == 0 else settings.residuals,
        sync_every=settings.sync_every,
        order=settings.order,
        servers=tuple(_outer(recipe, topology, node) for node in nodes),
        weights=tuple(_weight(settings, topology, tokens, node) for node in nodes),
        pool_clients=settings.pool_clients,
        init_memory=_never if algorithm.memory_at_nodes else _memory_maker(algorithm),
        rest=rest,
        rest_sum=shelf.put if many else add_change,
        rest_rows=shelf.rows if many else rows_in_memory,
        clients=clients,
        algorithms=tuple(
            _inner(recipe, topology, shapes, node, out, ledgers, start) for node in nodes
        ),
        clip_norm=settings.clip_norm,
        noise_multiplier=settings.noise_multiplier,
        edge_bytes=dense().encoded_bytes,
        counts_frames=settings.pool_clients and recipe.wire != type(recipe.wire)(),
    )


def _outer(recipe: Recipe, topology: Topology, node: int) -> ServerMethod:
    """Return the method by which a node applies its children's mean change."""
    settings, server = settings_of(recipe), recipe.server
    place, depth = topology.places[node], topology.depths[node]

    def said(name: str) -> Any:
        return place.setting(name, settings.at_depth(name, depth))

    return fedavg.fedavg_server(
        server_optimizer(
            said("optimizer"),
            said("learning_rate"),
            momentum=said("momentum"),
            beta2=server.beta2,
            epsilon=server.adam_epsilon,
        )
    )


def _at_home(config: TreeConfig, elsewhere: bool) -> dict[str, Any]:
    """Return the `TreeConfig` overrides for leaves that keep their own models at their nodes."""
    if not elsewhere or not config.leaf.keeps:
        return {}
    return {"models_at_home": True, "init_memory": _never}


def leaf_rules(recipe: Recipe, shapes: Params) -> LeafRules:
    """Return what a leaf of a recipe's tree mixes into its layers, and what may leave it."""
    settings = settings_of(recipe)
    return LeafRules(
        personal_layers=_personal_layers(recipe, shapes),
        temperature=settings.temperature,
        clip_norm=settings.clip_norm,
        noise_multiplier=settings.noise_multiplier,
    )


def _personal_layers(recipe: Recipe, shapes: Params) -> tuple[str | None, ...]:
    """Return the personal layer of each leaf that is trained, None where it is backbone."""
    rule, keep = settings_of(recipe).personal_layers, trained_leaves(recipe, shapes)
    layers = personal_layers(list(tree.named_leaves(shapes)), rule)
    if keep is None:
        return layers
    found = tuple(layer for layer, trains in zip(layers, keep, strict=True) if trains)
    require(
        not any(layers) or any(found),
        SETTING,
        rule,
        f"layers with leaves that wire.trainable = {recipe.wire.trainable!r} trains: what is "
        "frozen is the same at every node",
        "'none' keeps nothing apart, 'all' every trained leaf.",
    )
    return found


def _memory_maker(algorithm: Algorithm) -> Callable[[Params], Any] | None:
    """Return how a leaf's optimiser begins, from the trained part of a model; None if not kept."""
    init = algorithm.local.init_memory
    return None if init is None else lambda params: init(on_base(algorithm.base, params))


def _never(params: Params) -> np.ndarray:
    """Return the round of the last turn of a node that keeps its memory itself: none yet."""
    return np.asarray(-1, np.int32)


def _weight(
    settings: FederationTable,
    topology: Topology,
    tokens: Callable[[int], int] | None,
    node: int,
) -> float:
    """Return the weight of a node in the mean at its parent."""
    weight, weigh = 1.0, NODE_WEIGHTS[settings.weight]
    if weigh is not None:
        assert tokens is not None
        below = topology.below(node)
        weight = weigh(sum(tokens(c) for n in below for c in topology.clients[n]))
    return float(topology.places[node].setting("weight", weight))


def _inner(
    recipe: Recipe,
    topology: Topology,
    shapes: Params,
    node: int,
    out: Path,
    ledgers: Sequence[Path],
    start: Callable[[], Params],
) -> Algorithm | None:
    """Return the algorithm of a node's own clients; None if it has none or pools their text.

    Its privacy plan is computed for the number of these clients.
    """
    held = len(topology.clients[node])
    if not held or settings_of(recipe).pool_clients:
        return None
    cohort = topology.places[node].setting("cohort", recipe.server.cohort)
    joins = _participation_of(recipe, held, cohort, out, ledgers)
    return algorithm_of(recipe, joins, shapes, start)


# ---- noise on what leaves a leaf -----------------------------------------------------------


def _check_leaf_noise(settings: FederationTable, topology: Topology) -> None:
    """Raise `ConfigError` if noise and clips at the leaves would not protect as promised."""
    require(
        settings.noise_multiplier == 0 or settings.clip_norm > 0,
        "federation.clip_norm",
        settings.clip_norm,
        "a positive length: noise is in multiples of it",
    )
    require(
        settings.clip_norm == 0 or settings.pool_clients,
        "federation.clip_norm",
        settings.clip_norm,
        "pool_clients = true: where clients are members, [privacy] protects each of them",
    )
    require(
        settings.noise_multiplier == 0 or len(topology) > 1,
        "federation.noise_multiplier",
        settings.noise_multiplier,
        "a tree with places above its leaves: a single place sends nothing, so its model would be "
        "saved without noise",
        "Give [federation] levels or nodes, or leave the noise out.",
    )
    require(
        settings.noise_multiplier == 0 or NODE_WEIGHTS[settings.weight] is None,
        "federation.weight",
        settings.weight,
        "'uniform' beside federation.noise_multiplier: how many tokens a leaf has is a fact of its "
        "text, and a weight shows it",
    )
    inner = [topology.names[n] for n in topology.with_text if topology.children[n]]
    require(
        settings.clip_norm == 0 or not inner,
        "federation.clip_norm",
        settings.clip_norm,
        f"text at leaves alone: {', '.join(inner)} would send children what nobody clipped",
    )


def _leaf_secret(settings: FederationTable) -> bytes:
    if not settings.noise_multiplier:
        return bytes(16)
    seed = settings.noise_seed
    return os.urandom(16) if seed is None else seed.to_bytes(16, "little")


def leaf_plan(recipe: Recipe, leaves: int) -> PrivacyPlan | None:
    """Return what noise at so many leaves promises to each leaf; None without such noise."""
    settings = settings_of(recipe)
    if not settings.noise_multiplier:
        return None
    return PrivacyPlan(
        mechanism="gaussian",
        sampling=Sampling(law="poisson", population=leaves, cohort=leaves),
        rounds=recipe.server.rounds,
        clip_norm=settings.clip_norm,
        noise_multiplier=settings.noise_multiplier,
        delta=settings.delta,
        unit="leaf",
    )


# ---- evaluation ----------------------------------------------------------------------------


def _evaluation(
    recipe: Recipe,
    rows: ClientRows,
    algorithm: Algorithm,
    config: TreeConfig,
    plan: PrivacyPlan | None,
    elsewhere: Callable[[Algorithm, Topology, PrivacyPlan | None], TextByPlace] | None,
    nothing_held: Callable[[Topology, JsonMapping], str],
) -> TreeEvaluation:
    """Return the evaluation of a tree.

    It uses the splits that the plan allows and in which every node with text holds some out.
    """
    topology = config.topology
    if elsewhere is None:
        text: TextByPlace = _text_here(recipe, rows, topology)
    else:
        text = elsewhere(algorithm, topology, plan)
    told = release.splits(plan, list(text.survey))
    whole = [split for split in told if set(topology.with_text) <= set(text.survey[split])]
    if not whole and not release.hides(plan):
        raise ConfigError(nothing_held(topology, text.survey))
    return TreeEvaluation(
        config=config,
        told=tuple(whole),
        text=text,
        own_models_stay=release.own_models_stay(plan),
        # Nodes that score models have what is frozen themselves.
        base=(lambda: algorithm.base) if elsewhere is None else (lambda: None),
    )


def _text_here(recipe: Recipe, rows: ClientRows, topology: Topology) -> TextHere:
    """Return the held-out text of each node with text, from this process's store."""
    found: dict[str, dict[int, np.ndarray]] = {}
    survey: dict[str, dict[int, Held]] = {}
    for split, owners in parts.owners_of(recipe, rows.store, rows.clients).items():
        fed = feed(topology.places, [rows.store.groups(int(n)) for n in owners])
        found[split], survey[split] = {}, {}
        for node in topology.with_text:
            text = parts.held_out_text(recipe, rows, owners[np.asarray(fed[node], int)])
            here = sampled_rows(recipe, text.rows(1)[0], node)
            if len(here):
                found[split][node], survey[split][node] = here, text.size
    evaluator = cache(lambda: Evaluator(catalog.score, rows.store.special, any_width=True))
    return TextHere(evaluator=evaluator, rows=found, survey=survey)


def sampled_rows(recipe: Recipe, rows: np.ndarray, node: int) -> np.ndarray:
    """Return the held-out rows on which a node is scored, at most `server.evaluate_rows`."""
    most = recipe.server.evaluate_rows
    if not most or len(rows) <= most:
        return rows
    rng = generator_for(0, "evaluate", member=node)
    return rows[np.sort(rng.choice(len(rows), most, replace=False))]
