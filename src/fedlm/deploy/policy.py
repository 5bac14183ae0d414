"""What a node lets be done with its text.

In:       a policy file, and a recipe that a server would like to have carried out.
Out:      nothing, or a `Refusal` with the sentence that the server is told.
Promise:  a recipe is carried out only if every line of the policy allows it; an unknown line is
          an error and not a permission.
Not here: whether a question fits its recipe (`question.py`), what was answered before
          (`node_ledger.py`), training (`node_worker.py`), what a plan claims (`privacy`).
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from pydantic import Field

from fedlm.cohort.sampling import LAWS
from fedlm.core.errors import ConfigError, FedlmError, require
from fedlm.deploy.tables import read_table
from fedlm.privacy import account
from fedlm.privacy.cost import compose, gaussian_event
from fedlm.privacy.plan import PrivacyPlan
from fedlm.recipe.private_evaluation import PlannedFigures, planned_figures
from fedlm.recipe.settings import Recipe, Table

POLICY = """\
# What this node lets be done with its text. A recipe or a question that breaks a line is refused,
# and the server is told which. Lines that are left out allow everything, but see single_updates and
# the last three.

# smallest_cohort = 10           # members of a round, over the whole federation
# single_updates = false         # may the update of one client leave this node by itself? Left out:
#                                # only if smallest_cohort is left out or 1
# smallest_evaluation = 5        # clients behind a figure of this node's text; left out: as many as
#                                # smallest_cohort
# require_secure_sums = true     # sums under masks: no server sees this node's own
# smallest_sum = 5               # nodes that stay in a secure sum: the least threshold of a recipe
# smallest_part = 2              # clients of this node in a secure sum, or none; left out: 2 where
#                                # single updates may not leave and nodes add no noise, else 1
# require_privacy = true         # a differential privacy mechanism with noise
# largest_epsilon = 8.0          # what one run may spend on one client; implies the above
# largest_lifetime_epsilon = 20.0  # what all runs together may, by this node's own ledger
# largest_delta = 1e-6           # of a run; left out, with an epsilon: below one in the population
# smallest_population = 1000     # clients of the whole federation, as the server tells
# largest_population = 5000      # clients of the whole federation, as you know it: chance counts in
#                                # an epsilon up to here; left out: up to the clients of this node
# allowed_models = ["si-cifg"]   # names as fedlm models lists them
# largest_parameters = 30000000
# largest_steps = 200            # local steps of one client in one round; left out: 100000
# largest_memory = 4.0           # GB, by an estimate; left out: the memory of this machine
# longest_seconds = 600.0        # for one question; left out: an hour
# tell_tokens = true             # tell the server how many tokens this node trains on, which a tree
#                                # with federation.weight = "tokens" needs; left out: no
"""


class Refusal(FedlmError):
    """A recipe that this node does not carry out, or a question that it does not answer."""


class Policy(Table):
    """The settings of `policy.toml`."""

    smallest_cohort: Annotated[int, Field(ge=1)] | None = None
    single_updates: bool | None = None
    smallest_evaluation: Annotated[int, Field(ge=1)] | None = None
    require_secure_sums: bool = False
    smallest_sum: Annotated[int, Field(ge=1)] | None = None
    smallest_part: Annotated[int, Field(ge=1)] | None = None
    require_privacy: bool = False
    largest_epsilon: Annotated[float, Field(gt=0)] | None = None
    largest_lifetime_epsilon: Annotated[float, Field(gt=0)] | None = None
    largest_delta: Annotated[float, Field(gt=0, lt=1)] | None = None
    smallest_population: Annotated[int, Field(ge=1)] | None = None
    largest_population: Annotated[int, Field(ge=1)] | None = None
    allowed_models: tuple[str, ...] | None = None
    largest_parameters: Annotated[int, Field(ge=1)] | None = None
    largest_steps: Annotated[int, Field(ge=1)] = 100_000  # of a client in a round
    largest_memory: Annotated[float, Field(gt=0)] | None = None  # GB
    longest_seconds: Annotated[float, Field(gt=0, le=1e7)] = 3600.0
    tell_tokens: bool = False

    @property
    def limits_epsilon(self) -> bool:
        """Whether some line limits an epsilon."""
        return self.largest_epsilon is not None or self.largest_lifetime_epsilon is not None

    @property
    def allows_single_updates(self) -> bool:
        """Whether the update of one client may leave the node by itself."""
        if self.single_updates is None:
            return (self.smallest_cohort or 1) == 1
        return self.single_updates

    def least_part(self, *, noise_at_nodes: bool) -> int:
        """Return the least number of this node's clients in a secure sum that has any of them.

        A server that draws one client alone opens its update: nobody but the server sees how many
        members other nodes have. Noise at nodes covers a client that is alone.
        """
        if self.smallest_part is not None:
            return self.smallest_part
        return 1 if noise_at_nodes or self.allows_single_updates else 2

    @property
    def least_evaluated(self) -> int:
        """The least number of held-out clients behind a figure that leaves the node."""
        return self.smallest_evaluation or self.smallest_cohort or 1


def load_policy(kit: Path, named: Path | None = None) -> Policy:
    """Read the policy that is named, or a kit's own; a kit without one allows everything.

    Raises:
      ConfigError: what is named, or stands in the kit, is no file: what an operator meant to forbid
        would be allowed.
    """
    path = named or kit
    if named is None and not os.path.lexists(kit):
        return Policy()
    option = "KIT/policy.toml" if named is None else "--policy"
    require(path.is_file(), option, str(path), "a file with what this node allows")
    return read_table(path, Policy)


def check_policy(
    policy: Policy, recipe: Recipe, plan: PrivacyPlan | None, parameters: int, clients: int
) -> None:
    """Raise `Refusal` if the policy of a node with so many `clients` does not allow a recipe."""
    # The root of a tree sees the update of each single place.
    asked = recipe.server.cohort if recipe.federation is None else 1
    least = policy.smallest_cohort
    if least is not None and asked < least:
        what = "server.cohort" if recipe.federation is None else "[federation]: members of a sum"
        raise Refusal(f"{what} = {asked}: this node wants at least {least}.")
    if policy.require_secure_sums and not recipe.wire.secure_nodes:
        raise Refusal("wire.secure_nodes = 0: this node wants secure sums.")
    allowed = policy.allowed_models
    if allowed is not None and recipe.model.name not in allowed:
        raise Refusal(f"model.name = {recipe.model.name!r}: this node allows {', '.join(allowed)}.")
    most = policy.largest_parameters
    if most is not None and parameters > most:
        raise Refusal(f"the model has {parameters:,} parameters: this node allows {most:,}.")
    if policy.require_privacy or policy.limits_epsilon or policy.largest_delta is not None:
        _check_privacy(policy, recipe, plan, clients)


def believed(policy: Policy, plan: PrivacyPlan, clients: int) -> PrivacyPlan:
    """Return a plan with the population that a node with so many `clients` believes in.

    A larger population makes it less likely that a client is drawn, and so an epsilon smaller. The
    server alone knows the population: what it says counts up to the policy's own number, or up to
    the node's own clients.
    """
    sampling = plan.sampling
    if not LAWS[sampling.law].by_chance:  # who may join is counted, not how likely it is
        return plan
    least = sampling.cohort * (sampling.min_separation + 1)
    most = max(policy.largest_population or clients, least)
    return replace(plan, sampling=replace(sampling, population=min(sampling.population, most)))


def check_cost(policy: Policy, steps: int, memory: float, here: float) -> None:
    """Raise `Refusal` if a question costs more than the policy allows.

    Args:
      policy: the policy.
      steps: local steps of the client that takes the most.
      memory: bytes, by an estimate.
      here: bytes that this machine has, which count if the policy does not say.
    """
    if steps > policy.largest_steps:
        raise Refusal(
            f"a client would take {steps} steps in a round: this node allows "
            f"{policy.largest_steps}. Lower client.max_examples or client.epochs."
        )
    most = here if policy.largest_memory is None else policy.largest_memory * 1e9
    if memory > most:
        raise Refusal(
            f"this would take about {memory / 1e9:.3g} GB of memory: this node allows "
            f"{most / 1e9:.3g}. Lower client.batch_size, data.sequence_length or the model's sizes."
        )


def _check_privacy(policy: Policy, recipe: Recipe, plan: PrivacyPlan | None, clients: int) -> None:
    if plan is None or plan.noise_multiplier <= 0:
        raise Refusal("privacy.mechanism: this node wants a mechanism with noise.")
    if plan.reveal or recipe.privacy.seed is not None:
        raise Refusal("privacy.reveal and privacy.seed: this node wants neither; they undo noise.")
    most = policy.largest_delta
    if most is None and policy.limits_epsilon:
        most = 1 / plan.sampling.population
    if most is not None and plan.delta > most:
        raise Refusal(f"privacy.delta = {plan.delta:g}: this node allows {most:.3g}.")
    if policy.largest_epsilon is not None:
        figures = planned_figures(recipe, plan)
        _check_epsilon(policy.largest_epsilon, plan, believed(policy, plan, clients), figures)


def _check_epsilon(
    most: float, plan: PrivacyPlan, known: PrivacyPlan, figures: PlannedFigures | None
) -> None:
    try:
        spent = account.spent(known, known.rounds).epsilon
        if figures is not None and spent <= most:
            events = [account.event_of(known, known.rounds), gaussian_event(figures.together)]
            spent = compose(events, known.delta)[0]
    except ConfigError as error:
        raise Refusal(
            f"no epsilon for the population that this node believes in: {error}"
        ) from None
    if not spent <= most:
        raise Refusal(
            f"the run would spend epsilon {spent:.3g} on a client"
            + (", with its noisy figures" if figures is not None else "")
            + f": this node allows {most:g}."
            + _doubt(plan, known)
        )


def _doubt(plan: PrivacyPlan, known: PrivacyPlan) -> str:
    """Return a sentence on the population, where the node believes in a smaller one."""
    if known.sampling.population == plan.sampling.population:
        return ""
    return (
        f" It counts on {known.sampling.population} clients, not on {plan.sampling.population}: "
        "largest_population in its policy says how many there are."
    )
