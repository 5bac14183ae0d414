"""From the tables of a recipe to an `Algorithm`.

In:       a recipe, the sampling law, a privacy plan, the shapes of the model.
Out:      an `Algorithm`.
Promise:  a combination that would not do what it says is refused with the reason.
Not here: what settings are allowed (`settings.py`), stores and evaluation (`build.py`).
"""

from __future__ import annotations

import jax.random as jr

from fedlm.core import tree
from fedlm.core.errors import require
from fedlm.core.keys import key_for
from fedlm.core.types import ClientMethod, Params, Sampling, ServerMethod, TrainablePart
from fedlm.federation.algorithm import Algorithm
from fedlm.federation.optimizers import (
    Optimizer,
    Rate,
    client_optimizer,
    schedule,
    server_optimizer,
)
from fedlm.local import methods
from fedlm.local.train import WEIGHTS, local_training
from fedlm.models import catalog
from fedlm.models.partial import drawn_subset, low_rank, own_subset
from fedlm.privacy.plan import PrivacyPlan
from fedlm.recipe.settings import Recipe
from fedlm.server import step
from fedlm.wire.catalog import named
from fedlm.wire.dense import dense

# Text and model are in one place: nothing travels.
STAYS = dense()._replace(name="stays", encoded_bytes=lambda like: 0)
# What members remember is kept for every client, and saved with every checkpoint.
MOST_REMEMBERED = 2 << 30


def algorithm_of(recipe: Recipe, participation: Sampling | PrivacyPlan, like: Params) -> Algorithm:
    """Everything that a round needs to know."""
    sampling = participation.sampling if isinstance(participation, PrivacyPlan) else participation
    check(recipe, sampling, like)
    locals_ = [local_of(recipe, portion) for portion in portions_of(recipe, like)]
    return Algorithm(
        participation=participation,
        local=locals_[0],
        upload=named("wire.upload", recipe.wire.upload),
        download=named("wire.download", recipe.wire.download),
        server=server_of(recipe, sampling),
        canaries=recipe.privacy.canaries,
        turns=tuple(locals_) if len(locals_) > 1 else (),
        feedback=recipe.wire.error_feedback,
        seed=recipe.run.seed,
    )


def portions_of(recipe: Recipe, like: Params) -> list[TrainablePart]:
    """What is trained, one a kind of round."""
    wire, seed = recipe.wire, recipe.run.seed
    if wire.trainable == "fixed":
        return [drawn_subset(like, wire.trainable_fraction, key_for(seed, "partial"))]
    if wire.trainable == "round":
        key = key_for(seed, "partial")
        return [drawn_subset(like, wire.trainable_fraction, k) for k in jr.split(key, wire.subsets)]
    if wire.trainable == "member":
        return [own_subset(wire.trainable_fraction)]
    return [low_rank(like, wire.rank)] if wire.trainable == "low-rank" else [TrainablePart()]


def local_of(recipe: Recipe, portion: TrainablePart) -> ClientMethod:
    """What a member does."""
    client, weigh = recipe.client, WEIGHTS[recipe.client.weight]
    inner = inner_of(recipe)
    if client.method == "mimelite":
        return methods.mimelite(catalog.loss, base_of(recipe), client.learning_rate, weigh)
    if client.method == "scaffold":
        return methods.scaffold(catalog.loss, client.learning_rate, weigh)
    if client.method == "feddyn":
        return methods.feddyn(catalog.loss, inner, client.proximal, weigh)
    return local_training(catalog.loss, inner, weigh, portion=portion, proximal=client.proximal)


def pooled_algorithm(recipe: Recipe) -> Algorithm:
    """Central training: one member that holds all text and remembers its optimiser's state."""
    client, server = recipe.client, recipe.server
    steps = client.max_steps
    require(
        steps is not None, "client.max_steps", steps, "how many steps a round of pretraining has"
    )
    assert steps is not None
    plain = recipe.privacy.mechanism is None and client.method == "fedavg"
    whole = recipe.wire == type(recipe.wire)() and client.proximal == 0
    require(
        plain and whole,
        "pretraining",
        "this recipe",
        "no [privacy], no [wire] and no client.method: public text is in one place",
    )
    rate = schedule(
        server.schedule,
        client.learning_rate,
        rounds=server.rounds * steps,
        warmup=server.warmup_rounds * steps,
        end=server.final_fraction,
    )
    local = local_training(catalog.loss, inner_of(recipe, rate), WEIGHTS["uniform"], remember=True)
    return Algorithm(
        participation=Sampling(law="fixed", population=1, cohort=1),
        local=local,
        upload=STAYS,
        download=STAYS,
        server=step.plain(server_optimizer("fedavg", 1.0, momentum=0.0, beta2=0.0, epsilon=1.0)),
        seed=recipe.run.seed,
    )


def inner_of(recipe: Recipe, rate: Rate | None = None) -> Optimizer:
    """What a member descends with."""
    client = recipe.client
    return client_optimizer(
        client.optimizer,
        client.learning_rate if rate is None else rate,
        momentum=client.momentum,
        weight_decay=client.weight_decay,
        clip=client.gradient_clip_norm,
    )


def base_of(recipe: Recipe) -> Optimizer:
    """MimeLite: the server's optimiser at rate one, as members use it."""
    server = recipe.server
    return server_optimizer(
        server.optimizer,
        1.0,
        momentum=server.momentum,
        beta2=server.beta2,
        epsilon=server.adam_epsilon,
    )


def server_of(recipe: Recipe, sampling: Sampling) -> ServerMethod:
    """What the server sends, and how it steps."""
    server, client = recipe.server, recipe.client
    part = sampling.cohort / sampling.population
    if client.method == "mimelite":
        return step.mimelite(base_of(recipe), server.learning_rate)
    if client.method == "feddyn":
        return step.feddyn(client.proximal, part)
    rate = schedule(
        server.schedule,
        server.learning_rate,
        rounds=server.rounds,
        warmup=server.warmup_rounds,
        end=server.final_fraction,
    )
    outer = server_optimizer(
        server.optimizer,
        rate,
        momentum=server.momentum,
        beta2=server.beta2,
        epsilon=server.adam_epsilon,
    )
    return step.scaffold(outer, part) if client.method == "scaffold" else step.plain(outer)


# ---- what does not go together -----------------------------------------------------------


def check(recipe: Recipe, sampling: Sampling, like: Params) -> None:
    """Refuses tables that would not do together what each says."""
    _check_method(recipe)
    _check_wire(recipe)
    if recipe.privacy.mechanism is not None:
        _check_private(recipe)
    remembered = 4 * tree.size(like) * sampling.population
    if recipe.wire.error_feedback or recipe.client.method in ("scaffold", "feddyn"):
        require(
            remembered <= MOST_REMEMBERED,
            "client.method" if not recipe.wire.error_feedback else "wire.error_feedback",
            recipe.client.method if not recipe.wire.error_feedback else True,
            f"at most {MOST_REMEMBERED >> 20} MiB for what {sampling.population} clients remember, "
            f"not {remembered >> 20} MiB",
            "Take a smaller model or fewer clients.",
        )


def _check_method(recipe: Recipe) -> None:
    client, server, wire = recipe.client, recipe.server, recipe.wire
    if client.method == "fedavg":
        return
    require(
        wire.trainable == "all" and not wire.error_feedback,
        "client.method",
        client.method,
        "'fedavg' where wire.trainable is not 'all' or wire.error_feedback is on",
    )
    if client.method == "feddyn":
        require(client.proximal > 0, "client.proximal", client.proximal, "FedDyn's alpha, above 0")
        return
    require(client.proximal == 0, "client.proximal", client.proximal, f"0 with {client.method!r}")
    require(
        client.optimizer == "sgd" and client.gradient_clip_norm == 0,
        "client.optimizer",
        client.optimizer,
        f"'sgd' without client.gradient_clip_norm: {client.method!r} defines the member's step",
    )
    require(
        client.method == "scaffold" or server.schedule == "constant",
        "server.schedule",
        server.schedule,
        "'constant' with 'mimelite'",
    )


def _check_wire(recipe: Recipe) -> None:
    wire = recipe.wire
    upload = named("wire.upload", wire.upload)
    named("wire.download", wire.download)
    partly = wire.trainable in ("fixed", "round", "member")
    require(
        partly == (wire.trainable_fraction < 1),
        "wire.trainable_fraction",
        wire.trainable_fraction,
        "below 1 with wire.trainable = 'fixed', 'round' or 'member', and 1 otherwise",
    )
    require(
        wire.trainable != "member" or upload.by_leaf,
        "wire.upload",
        wire.upload,
        "a codec that takes leaf by leaf with wire.trainable = 'member': drive mixes all leaves",
    )
    require(
        not wire.error_feedback or wire.trainable in ("all", "fixed"),
        "wire.error_feedback",
        True,
        "wire.trainable = 'all' or 'fixed': what was left out must be trained next time",
    )


def _check_private(recipe: Recipe) -> None:
    require(
        recipe.client.method == "fedavg",
        "client.method",
        recipe.client.method,
        "'fedavg' under a privacy plan: what other methods send beside a change has no bound",
    )
    require(
        not recipe.wire.error_feedback,
        "wire.error_feedback",
        True,
        "off under a privacy plan: a client's text would enter later rounds than its own",
    )
    require(
        recipe.wire.trainable != "low-rank",
        "wire.trainable",
        "low-rank",
        "another part under a privacy plan: the bound is on the factors, noise on the matrices",
    )
    require(
        recipe.privacy.canaries == 0 or recipe.wire.trainable == "all",
        "privacy.canaries",
        recipe.privacy.canaries,
        "0 unless wire.trainable = 'all': a canary moves the whole model",
    )
