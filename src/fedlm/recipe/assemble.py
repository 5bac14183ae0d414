"""From the tables of a recipe to an `Algorithm`.

In:       a recipe, the sampling law, a privacy plan, the shapes of the model, and how it is made
          where a part of it is held still for the whole run.
Out:      an `Algorithm`.
Promise:  a combination that would not do what it says is refused with the reason.
Not here: what settings are allowed (`settings.py`), stores and evaluation (`parts.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from types import MappingProxyType
from typing import Any

import optax

from fedlm.cohort.delays import DELAYS
from fedlm.core import tree
from fedlm.core.errors import either, require
from fedlm.core.keys import key_for
from fedlm.core.types import LossFn, Params, Sampling, TrainablePart
from fedlm.federation.algorithm import Algorithm, own_rate
from fedlm.local.train import WEIGHTS, local_training
from fedlm.methods import fedavg
from fedlm.methods.catalog import (
    METHODS,
    RelatedSettings,
    check_method_settings,
    method_names,
)
from fedlm.methods.method import MethodOptions
from fedlm.methods.optimizers import (
    Optimizer,
    Rate,
    client_optimizer,
    schedule,
    server_optimizer,
)
from fedlm.models import catalog
from fedlm.models.partial import TRAINABLE, PartKind, PartOptions
from fedlm.privacy.plan import PrivacyPlan
from fedlm.recipe.settings import Recipe
from fedlm.recipe.sum_rules import check_sums
from fedlm.wire.catalog import named
from fedlm.wire.dense import dense

# A codec of zero bytes: text and model are in one place, so nothing is sent.
STAYS = dense()._replace(name="stays", encoded_bytes=lambda like: 0)
# Bytes: the members' memories are kept for every client and saved with every checkpoint.
MOST_REMEMBERED = 2 << 30


def algorithm_of(
    recipe: Recipe,
    participation: Sampling | PrivacyPlan,
    like: Params,
    start: Callable[[], Params],
    *,
    remembered: int | None = None,
    own: Mapping[str, Any] = MappingProxyType({}),
) -> Algorithm:
    """Return the algorithm that a recipe describes.

    `remembered` is the number of clients whose memory is kept here; not given, all. `start` makes
    the model before training: its parameters that are never trained become the algorithm's base.
    `own` are fields of `MethodOptions` in place of those that the recipe gives; an optimiser of
    clients among them has its own learning rate.
    """
    sampling = participation.sampling if isinstance(participation, PrivacyPlan) else participation
    check_recipe(recipe, like, sampling.population if remembered is None else remembered)
    keep = trained_leaves(recipe, like)
    kind = TRAINABLE[recipe.wire.trainable]
    parts = parts_of(recipe, like) if keep is None else (kind.on_base,)
    options = replace(method_options(recipe, sampling, parts), **own)
    clients, server = METHODS[recipe.client.method].build(options)
    return Algorithm(
        participation=participation,
        local=clients[0],
        upload=named("wire.upload", recipe.wire.upload),
        download=named("wire.download", recipe.wire.download),
        server=server,
        canaries=recipe.privacy.canaries,
        turns=clients if len(clients) > 1 else (),
        feedback=recipe.wire.error_feedback,
        rate_of=own_rate if "inner" in own else rate_of(recipe),
        seed=recipe.run.seed,
        make_base=_base_maker(start, keep) if keep else None,
    )


def trained_leaves(recipe: Recipe, like: Params) -> list[bool] | None:
    """Return a flag per leaf, True if it is trained; None unless all rounds train the same part."""
    leaves = TRAINABLE[recipe.wire.trainable].leaves
    if leaves is None:
        return None
    return leaves(like, _part_options(recipe), key_for(recipe.run.seed, "partial"))


def trained_part(recipe: Recipe, like: Params) -> Params:
    """Return the leaves that are trained; all of them unless a part is held still."""
    keep = trained_leaves(recipe, like)
    return like if keep is None else tree.split(like, keep)[0]


def _base_maker(start: Callable[[], Params], keep: list[bool]) -> Callable[[], Params]:
    # Kept here, so that an algorithm with other codecs, as at a node, shares the base.
    return cache(lambda: tree.split(start(), keep)[1])


def loss_of(recipe: Recipe) -> LossFn:
    """Return the loss of a batch, by whether rows are lines or full windows."""
    windows = recipe.data.layout == "windows"
    return catalog.loss_of_full_rows if windows else catalog.loss


def method_options(
    recipe: Recipe, sampling: Sampling, parts: tuple[TrainablePart, ...]
) -> MethodOptions:
    """Return the options from which a federated method is built."""
    client, server = recipe.client, recipe.server
    rate = schedule(
        server.schedule,
        server.learning_rate,
        rounds=server.rounds,
        warmup=server.warmup_rounds,
        end=server.final_fraction,
    )
    return MethodOptions(
        loss=loss_of(recipe),
        inner=inner_of(recipe, 1.0 if METHODS[client.method].takes_rate else None),
        outer=outer_of(recipe, rate),
        base=outer_of(recipe, 1.0),
        client_learning_rate=client.learning_rate,
        server_learning_rate=server.learning_rate,
        weigh=WEIGHTS[client.weight],
        parts=parts,
        proximal=client.proximal,
        weight_decay=client.weight_decay,
        gradient_clip_norm=client.gradient_clip_norm,
        participation=sampling.cohort / sampling.population,
    )


def parts_of(recipe: Recipe, like: Params) -> tuple[TrainablePart, ...]:
    """Return the parts of the model that rounds train in turn."""
    kind = TRAINABLE[recipe.wire.trainable]
    return kind.make(like, _part_options(recipe), key_for(recipe.run.seed, "partial"))


def _part_options(recipe: Recipe) -> PartOptions:
    wire = recipe.wire
    return PartOptions(fraction=wire.trainable_fraction, subsets=wire.subsets, rank=wire.rank)


def pooled_algorithm(recipe: Recipe) -> Algorithm:
    """Return the algorithm of central training.

    Its one member holds all text and keeps its optimiser's state between rounds.
    """
    client, server = recipe.client, recipe.server
    steps = client.max_steps
    require(
        steps is not None, "client.max_steps", steps, "how many steps a round of pretraining has"
    )
    assert steps is not None
    plain = recipe.privacy.mechanism is None and client.method == "fedavg"
    plain = plain and server.mode == "synchronous"
    whole = recipe.wire == type(recipe.wire)() and client.proximal == 0
    require(
        plain and whole,
        "pretraining",
        "this recipe",
        "no [privacy], no [wire] and no client.method: public text is in one place",
    )
    require(
        client.schedule == "constant" and client.warmup_rounds == 0,
        "client.schedule" if client.schedule != "constant" else "client.warmup_rounds",
        client.schedule if client.schedule != "constant" else client.warmup_rounds,
        "none in pretraining: there server.schedule and server.warmup_rounds are those of the "
        "learning rate",
    )
    rate = schedule(
        server.schedule,
        client.learning_rate,
        rounds=server.rounds * steps,
        warmup=server.warmup_rounds * steps,
        end=server.final_fraction,
    )
    inner = inner_of(recipe, rate)
    local = local_training(loss_of(recipe), inner, WEIGHTS["uniform"], remember=True)
    return Algorithm(
        participation=Sampling(law="fixed", population=1, cohort=1),
        local=local,
        upload=STAYS,
        download=STAYS,
        server=fedavg.fedavg_server(optax.sgd(1.0)),
        seed=recipe.run.seed,
    )


def inner_of(recipe: Recipe, rate: Rate | None = None) -> Optimizer:
    """Return a client's optimiser, by default at the rate `client.learning_rate`."""
    client = recipe.client
    return client_optimizer(
        client.optimizer,
        client.learning_rate if rate is None else rate,
        momentum=client.momentum,
        weight_decay=client.weight_decay,
        clip=client.gradient_clip_norm,
    )


def rate_of(recipe: Recipe, learning_rate: float | None = None) -> Callable[[int], float]:
    """Return the clients' learning rate by round: of the recipe, or another on its schedule."""
    client = recipe.client
    rate = schedule(
        client.schedule,
        client.learning_rate if learning_rate is None else learning_rate,
        rounds=recipe.server.rounds,
        warmup=client.warmup_rounds,
        end=client.final_fraction,
    )
    return (lambda round: float(rate(round))) if callable(rate) else (lambda round: rate)


def outer_of(recipe: Recipe, rate: Rate) -> Optimizer:
    """Return the server's optimiser at a learning rate."""
    server = recipe.server
    return server_optimizer(
        server.optimizer,
        rate,
        momentum=server.momentum,
        beta2=server.beta2,
        epsilon=server.adam_epsilon,
    )


# ---- settings that exclude each other -----------------------------------------------------------


def check_recipe(recipe: Recipe, like: Params, clients: int) -> None:
    """Raise `ConfigError` if settings contradict each other, or so many clients remember much."""
    check_settings(recipe)
    method, feedback = recipe.client.method, recipe.wire.error_feedback
    if feedback or METHODS[method].keeps_client_state:
        keep = trained_leaves(recipe, like)
        trained = like if keep is None else tree.split(like, keep)[0]
        remembered = 4 * tree.size(trained) * clients
        require(
            remembered <= MOST_REMEMBERED,
            "wire.error_feedback" if feedback else "client.method",
            True if feedback else method,
            f"at most {MOST_REMEMBERED >> 20} MiB for what {clients} clients remember, "
            f"not {remembered >> 20} MiB",
            "Take a smaller model or fewer clients.",
        )


def check_settings(recipe: Recipe) -> None:
    """Raise `ConfigError` if settings contradict each other, whatever the model and its clients.

    It is asked before a privacy plan is made, because that may take minutes.
    """
    check_method_settings(recipe.client.method, related_to_method(recipe))
    _check_wire(recipe)
    _check_mode(recipe)
    check_sums(recipe)
    if recipe.privacy.mechanism is not None:
        _check_private(recipe)


def _check_mode(recipe: Recipe) -> None:
    """Raise `ConfigError` for settings that buffered rounds do not go together with, or need."""
    server, client, wire = recipe.server, recipe.client, recipe.wire
    if server.mode == "synchronous":
        for name, given in (("server.buffer", server.buffer), ("client.delay", client.delay)):
            only = "none without server.mode = 'buffered': a synchronous round waits for everybody"
            require(given in (None, "none"), name, given, only)
        return
    require(
        recipe.privacy.mechanism is None,
        "server.mode",
        server.mode,
        "'synchronous' under a privacy plan: which round an answer falls into depends on how long "
        "its client trains, and so on its text; every accounting here covers cohorts that are "
        "drawn without looking at text",
    )
    require(
        recipe.federation is None,
        "server.mode",
        server.mode,
        "'synchronous' beside [federation]: the levels of a tree run at their own pace with "
        "federation.sync_every",
    )
    require(
        server.sampling == "fixed",
        "server.sampling",
        server.sampling,
        "'fixed' with server.mode = 'buffered': the other laws are those of privacy plans",
    )
    require(
        server.buffer is None or server.buffer <= server.cohort,
        "server.buffer",
        server.buffer,
        f"at most server.cohort = {server.cohort}, the members that are at work at once",
    )
    keeps = METHODS[client.method].keeps_client_state
    require(
        not keeps and not wire.error_feedback,
        "client.method" if keeps else "wire.error_feedback",
        client.method if keeps else True,
        "a method whose clients remember nothing, with server.mode = 'buffered': what a client "
        "remembers is corrected by the server's next step, which here comes without it",
    )
    require(
        METHODS[client.method].one_change,
        "client.method",
        client.method,
        f"{method_names(lambda m: m.one_change)} with server.mode = 'buffered': the discount of a "
        "late answer is that of a change, and other methods send statistics and counts beside it",
    )
    require(
        TRAINABLE[wire.trainable].outlives_round,
        "wire.trainable",
        wire.trainable,
        f"{_kinds(lambda k: k.outlives_round)} with server.mode = 'buffered': a late answer would "
        "change another part than the round does",
    )
    least = DELAYS[client.delay].above
    require(
        least is None or client.delay_shape > least,
        "client.delay_shape",
        client.delay_shape,
        f"above {least} with client.delay = {client.delay!r}",
    )


def related_to_method(recipe: Recipe) -> RelatedSettings:
    """Return the settings with which a method must be compatible."""
    client, server, wire = recipe.client, recipe.server, recipe.wire
    return RelatedSettings(
        optimizer=client.optimizer,
        gradient_clip_norm=client.gradient_clip_norm,
        proximal=client.proximal,
        schedule=server.schedule,
        warmup_rounds=server.warmup_rounds,
        client_schedule=client.schedule,
        client_warmup_rounds=client.warmup_rounds,
        trainable=wire.trainable,
        error_feedback=wire.error_feedback,
        private=recipe.privacy.mechanism is not None,
    )


def _check_wire(recipe: Recipe) -> None:
    wire, kind = recipe.wire, TRAINABLE[recipe.wire.trainable]
    upload = named("wire.upload", wire.upload)
    named("wire.download", wire.download)
    require(
        kind.takes_fraction == (wire.trainable_fraction < 1),
        "wire.trainable_fraction",
        wire.trainable_fraction,
        f"below 1 with wire.trainable = {_kinds(lambda k: k.takes_fraction)}, and 1 otherwise",
    )
    require(
        upload.by_leaf or not kind.by_member,
        "wire.upload",
        wire.upload,
        f"a codec that takes leaf by leaf with wire.trainable = {wire.trainable!r}: drive mixes "
        "all leaves",
    )
    require(
        kind.takes_feedback or not wire.error_feedback,
        "wire.error_feedback",
        True,
        f"wire.trainable = {_kinds(lambda k: k.takes_feedback)}: what was left out must be trained "
        "next time",
    )

    server, steps = recipe.server, (recipe.server.optimizer, recipe.server.learning_rate)
    require(
        not kind.exact_mean
        or (
            steps == ("fedavg", 1.0) and (server.schedule, server.warmup_rounds) == ("constant", 0)
        ),
        "server.optimizer",
        server.optimizer,
        f"'fedavg' with server.learning_rate = 1 and no schedule beside wire.trainable = "
        f"{wire.trainable!r}: what the mean factors lack is added exactly",
    )
    require(
        not kind.exact_mean or (recipe.federation is None and recipe.model.base_dtype == "float32"),
        "wire.trainable",
        wire.trainable,
        "'lora' in a tree, or with model.base_dtype other than 'float32'",
    )


def _kinds(has: Callable[[PartKind], bool]) -> str:
    """Return the names of the trainable parts with a property, for an error message."""
    return either(repr(name) for name, kind in TRAINABLE.items() if has(kind))


def _check_private(recipe: Recipe) -> None:
    require(
        not recipe.wire.error_feedback,
        "wire.error_feedback",
        True,
        "off under a privacy plan: a client's text would enter later rounds than its own",
    )
    require(
        TRAINABLE[recipe.wire.trainable].may_be_private,
        "wire.trainable",
        recipe.wire.trainable,
        "another part under a privacy plan: the bound is on the factors, noise on the matrices",
    )
    require(
        recipe.privacy.canaries == 0 or recipe.wire.trainable == "all",
        "privacy.canaries",
        recipe.privacy.canaries,
        "0 unless wire.trainable = 'all': a canary moves the whole model",
    )
