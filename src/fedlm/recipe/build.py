"""From a recipe to a run.

In:       a `Recipe`, and where prepared stores are kept.
Out:      a `Run`: population, algorithm, engine, round, evaluation, record.
Promise:  two builds of one recipe are the same run; what cannot work is refused before the first
          round.
Not here: single parts (`parts.py`), trees (`tree.py`), the loop (`run.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from fedlm.cohort.delays import Delays
from fedlm.core.errors import ConfigError
from fedlm.core.types import Engine, Say
from fedlm.corpus import population
from fedlm.corpus.population import Population
from fedlm.corpus.store import Progress, Store
from fedlm.federation.algorithm import Algorithm
from fedlm.federation.buffered_round import Buffer, BufferedRound, Simulated, Waiting
from fedlm.federation.round import FlatRound
from fedlm.models.catalog import ModuleSpec
from fedlm.privacy.evaluation import ScheduledEvaluation
from fedlm.recipe import privacy_plan
from fedlm.recipe.assemble import (
    algorithm_of,
    check_settings,
    pooled_algorithm,
)
from fedlm.recipe.memory import check_memory
from fedlm.recipe.parts import (
    check_base,
    client_rows,
    engine_of,
    evaluation_of,
    frozen_features,
    model_spec,
    open_store,
    people_of,
    pooled_rows,
    resolve,
    shared_parts,
    start_key,
    start_maker,
    training_clients,
)
from fedlm.recipe.private_evaluation import private_evaluation_of
from fedlm.recipe.secure_sums import engine_for, with_centre
from fedlm.recipe.settings import Recipe
from fedlm.recipe.sum_rules import check_sums
from fedlm.recipe.tree import tree_run
from fedlm.record.directory import RunDirectory
from fedlm.run import Evaluation, Run


class OwnParts(NamedTuple):
    """The parts of a flat run that a user gives as Python objects, because no recipe names them."""

    model: ModuleSpec | None = None  # None: the model that the recipe names
    # Fields of `MethodOptions`, in place of those that the recipe gives.
    options: Mapping[str, Any] = MappingProxyType({})
    names: Mapping[str, str] = MappingProxyType({})  # for the header


NO_OWN_PARTS = OwnParts()


def build(
    recipe: Recipe,
    cache: Path,
    progress: Progress = lambda stage, done: None,
    *,
    out: Path = Path(),
    pooled: bool = False,
    own: OwnParts = NO_OWN_PARTS,
    say: Say = lambda text: None,
) -> Run:
    """Open the recipe's store and return its run; with `pooled`, a run of central training."""
    store = open_store(recipe.data, cache, progress, say)
    resolved = resolve(recipe, store)
    if own.model is None:
        check_memory(resolved, model_spec(resolved, store.vocabulary))
    if pooled:
        return pretraining(resolved, store, out=out)
    if resolved.federation is not None:
        return tree_run(resolved, store, out=out)
    return flat_run(resolved, store, out=out, own=own)


def flat_run(
    recipe: Recipe,
    store: Store,
    *,
    out: Path,
    members: Population | None = None,
    engine: Callable[[Algorithm], Engine] | None = None,
    waiting: Callable[[Engine, Buffer], Waiting] | None = None,
    evaluation: Callable[[Algorithm], Evaluation] | None = None,
    private_evaluation: Callable[[Algorithm], ScheduledEvaluation | None] | None = None,
    own: OwnParts = NO_OWN_PARTS,
) -> Run:
    """Return the run of a flat federation.

    Its members are the store's clients, or `members`, which `engine` reaches elsewhere; there
    `waiting` makes what waits for their answers in buffered rounds. It is evaluated on the store's
    held-out text, or by `evaluation` of its algorithm. Noisy figures are of the training clients
    here, or those of `private_evaluation`; where members are elsewhere there are no others. Parts
    of a user's `own` take the place of the recipe's.
    """
    check_settings(recipe)
    people = people_of(recipe, store, members)
    if people.elsewhere:
        check_sums(recipe, network=True)
    size, rows = people.population.size, people.rows
    spec, start = own.model or model_spec(recipe, store.vocabulary), start_maker(recipe, store)
    if own.model is not None:
        start = partial(own.model.init, start_key(recipe))
    participation = privacy_plan.participation_of(recipe, size, out, people.ledgers)
    kept, shapes = 0 if people.elsewhere else None, spec.shapes()
    algorithm = people.work(
        algorithm_of(recipe, participation, shapes, start, remembered=kept, own=own.options)
    )
    check_base(recipe, algorithm)
    directory = RunDirectory(out)
    frozen = None if engine else frozen_features(recipe, algorithm, rows.train, directory.frozen)
    made = (
        with_centre(recipe, algorithm, engine(algorithm))
        if engine
        else engine_for(
            recipe, algorithm, lambda trained: engine_of(recipe, trained, rows.train, frozen)
        )
    )
    count = engine is None and recipe.run.baselines
    round = round_of(recipe, algorithm, made, waiting)
    noisy = private_evaluation(algorithm) if private_evaluation else None
    if not people.elsewhere:
        noisy = private_evaluation_of(recipe, rows, algorithm.plan, round.models, score=spec.score)
    return Run(
        population=people.population,
        algorithm=algorithm,
        engine=made,
        round=round,
        evaluation=evaluation(algorithm)
        if evaluation
        else evaluation_of(
            recipe,
            rows,
            algorithm.plan,
            round.models,
            count=count,
            score=spec.score,
            # A finished run has forgotten its features, and its model may be a merged one.
            frozen=None if directory.summary.is_file() else frozen,
        ),
        start=start,
        private_evaluation=noisy,
        custom=own.names,
        **{**shared_parts(recipe, store, algorithm.plans, out), "model": spec},
    )


def run_to_look_at(recipe: Recipe, store: Store, population_size: int, *, out: Path) -> Run:
    """Return the run of a model whose text is elsewhere: it can be asked, and not trained."""
    alone = recipe.model_copy(update={"federation": None})
    size = max(population_size, recipe.server.cohort)
    members = population.of_paths([("elsewhere",)] * size)
    return flat_run(
        alone,
        store,
        out=out,
        members=members,
        engine=lambda algorithm: engine_of(alone, algorithm, _no_rows),
    )


def _no_rows(member: int) -> Any:
    raise ConfigError("the text of this run is elsewhere: it cannot be trained here.")


def pretraining(recipe: Recipe, store: Store, *, out: Path) -> Run:
    """Return a run of central training, with one member that holds all text."""
    rows = client_rows(recipe, store, training_clients(recipe, store))
    algorithm = pooled_algorithm(recipe)
    engine = engine_of(recipe, algorithm, pooled_rows(rows))
    round = round_of(recipe, algorithm, engine)
    return Run(
        population=population.pooled(),
        algorithm=algorithm,
        engine=engine,
        round=round,
        evaluation=evaluation_of(recipe, rows, None, round.models, count=recipe.run.baselines),
        start=start_maker(recipe, store),
        command="pretrain",
        **shared_parts(recipe, store, {}, out),
    )


def round_of(
    recipe: Recipe,
    algorithm: Algorithm,
    engine: Engine,
    waiting: Callable[[Engine, Buffer], Waiting] | None = None,
) -> FlatRound | BufferedRound:
    """Return the rounds of a flat federation, which wait for all of a cohort or for a part."""
    flat = FlatRound(
        algorithm=algorithm,
        engine=engine,
        seed=recipe.run.seed,
        secret=lambda: privacy_plan.new_secret(recipe.privacy),
    )
    server, client = recipe.server, recipe.client
    if server.mode == "synchronous":
        return flat
    buffer = Buffer(
        size=server.buffer,
        largest_staleness=server.largest_staleness,
        exponent=server.staleness_exponent,
        grace=server.grace_seconds,
    )
    delays = Delays(
        law=client.delay,
        seconds=client.delay_seconds,
        shape=client.delay_shape,
        by_client=client.delay_by == "client",
        seed=recipe.run.seed,
    )
    simulated = Simulated(engine=engine, grace=buffer.grace)
    return BufferedRound(
        flat=flat,
        buffer=buffer,
        waiting=waiting(engine, buffer) if waiting else simulated,
        delays=delays.of,
    )
