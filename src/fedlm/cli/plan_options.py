"""The options that describe a privacy plan, for all commands that take one.

In:       options of a command line.
Out:      a `PrivacyPlan`, or one sentence about the option that is missing or wrong.
Promise:  a field of `PlanOptions` is an option of every command that `takes_plan` decorates.
Not here: what a plan costs (`privacy/account.py`).
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, TypeVar, get_type_hints

import typer

from fedlm.cohort.sampling import LAWS
from fedlm.core.errors import ConfigError, either, nearest, require
from fedlm.core.types import Sampling
from fedlm.privacy.catalog import MECHANISMS, with_setting
from fedlm.privacy.plan import PrivacyPlan

T = TypeVar("T")


def _help_of(setting: str, text: str) -> str:
    """Return the help of a setting, preceded by the mechanisms that have it."""
    return f"{', '.join(with_setting(setting))}: {text}"


def _usual_laws() -> str:
    """Return the usual sampling laws with their mechanisms, for the help."""
    usual: dict[str, list[str]] = {}
    for name, entry in MECHANISMS.items():
        usual.setdefault(entry.laws[0], []).append(name)
    return ", ".join(f"{law} ({', '.join(names)})" for law, names in usual.items())


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """The options that describe a plan, but for its noise."""

    mechanism: Annotated[
        str | None, typer.Option("--mechanism", help=f"One of {', '.join(MECHANISMS)}.")
    ] = None
    rounds: Annotated[int | None, typer.Option("--rounds", help="Rounds of training.")] = None
    delta: Annotated[
        float | None, typer.Option("--delta", help="Well below one in the clients.")
    ] = None
    cohort: Annotated[int | None, typer.Option("--cohort", help="Clients per round.")] = None
    population: Annotated[int | None, typer.Option("--population", help="Clients there are.")] = (
        None
    )
    sampling: Annotated[
        str | None,
        typer.Option(
            "--sampling",
            help=f"How cohorts are drawn: one of {', '.join(LAWS)}; by default {_usual_laws()}.",
        ),
    ] = None
    min_separation: Annotated[
        int,
        typer.Option("--min-separation", help="Rounds strictly between two turns of a client."),
    ] = 0
    max_participations: Annotated[
        int,
        typer.Option(
            "--max-participations", help="Turns of a client; 0: as the separation has it."
        ),
    ] = 0
    clip_norm: Annotated[
        float, typer.Option("--clip-norm", help="L2 bound of an update; epsilon is free of it.")
    ] = 1.0
    bands: Annotated[
        int,
        typer.Option(
            "--bands", help=_help_of("bands", "bands of the matrix; 0: min separation + 1.")
        ),
    ] = 0
    buffers: Annotated[
        int, typer.Option("--buffers", help=_help_of("buffers", "copies of the model remembered."))
    ] = 3
    honest_nodes: Annotated[
        int,
        typer.Option(
            "--honest-nodes", help=_help_of("honest_nodes", "nodes that keep their noise secret.")
        ),
    ] = 0
    restart_every: Annotated[
        int,
        typer.Option(
            "--restart-every",
            help=_help_of("restart_every", "rounds after which noise begins anew; 0: never."),
        ),
    ] = 0

    def plan(self, noise_multiplier: float) -> PrivacyPlan:
        """Return the privacy plan that the options describe."""
        name, rounds = given("--mechanism", self.mechanism), given("--rounds", self.rounds)
        require(
            name in MECHANISMS, "--mechanism", name, "a known mechanism", nearest(name, MECHANISMS)
        )
        return PrivacyPlan(
            mechanism=name,
            sampling=self._drawn(name, rounds),
            rounds=rounds,
            delta=given("--delta", self.delta),
            noise_multiplier=noise_multiplier,
            clip_norm=self.clip_norm,
            bands=self.bands,
            buffers=self.buffers,
            honest_nodes=self.honest_nodes,
            restart_every=self.restart_every,
        )

    def _drawn(self, name: str, rounds: int) -> Sampling:
        """Return how cohorts are drawn."""
        cohort, population, most = self.cohort, self.population, self.max_participations
        laws, chance = MECHANISMS[name].laws, MECHANISMS[name].chance_laws
        if laws == chance:  # otherwise the check of the plan says more
            wanted = f"{either(laws)} for {name}"
            require(self.sampling in (None, *laws), "--sampling", self.sampling, wanted)
        if (self.sampling or laws[0]) in chance:
            cohort, population = given("--cohort", cohort), given("--population", population)
        # The cost of other pairs depends on how clients may join, not on their number; without the
        # option, enough clients are assumed.
        cohort = 1 if cohort is None else cohort
        enough = cohort * max(self.min_separation + 1, -(-rounds // most) if most > 0 else 1)
        return Sampling(
            law=self.sampling or laws[0],
            cohort=cohort,
            population=enough if population is None else population,
            min_separation=self.min_separation,
            max_participations=most,
        )


def takes_plan(command: Callable[..., None]) -> Callable[..., None]:
    """Let a command that takes `options: PlanOptions` have an option for each of their fields."""
    signature = inspect.signature(command, eval_str=True)
    hints = get_type_hints(PlanOptions, include_extras=True)
    fields = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=hints[field.name],
        )
        for field in dataclasses.fields(PlanOptions)
    ]

    @functools.wraps(command)
    def called(**told: object) -> None:
        options = {field.name: told.pop(field.name) for field in fields}
        command(options=PlanOptions(**options), **told)  # type: ignore[arg-type]

    own = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in signature.parameters.values()
        if parameter.name != "options"
    ]
    shown = [*own[:1], *fields, *own[1:]]
    called.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
    called.__annotations__ = {parameter.name: parameter.annotation for parameter in shown}
    return called


def given(option: str, value: T | None) -> T:
    """Return the value of an option without a default; refuse to go on without it."""
    if value is None:
        raise ConfigError(f"{option} is missing: give it, or the directory of a run.")
    return value
