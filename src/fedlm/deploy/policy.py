"""What a node lets be done with its text.

In:       a policy file, and a recipe that a server would like to have carried out.
Out:      nothing, or a `Refusal` with the sentence that the server is told.
Promise:  a recipe is carried out only if every line of the policy allows it; an unknown line is
          an error and not a permission.
Not here: training (`node_worker.py`), what a plan claims (`privacy`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from fedlm.core.errors import FedlmError
from fedlm.deploy.tables import read_table
from fedlm.privacy.plan import PrivacyPlan
from fedlm.recipe.settings import Recipe, Table

POLICY = """\
# What this node lets be done with its text. A recipe that breaks a line is refused, and the server
# is told which. Lines that are left out allow everything.

# smallest_cohort = 10          # members of a round, over the whole federation
# require_privacy = true        # a differential privacy mechanism with noise
# largest_epsilon = 8.0         # what the whole run may spend on one client; implies the above
# allowed_models = ["si-cifg"]  # names as fedlm models lists them
# largest_steps = 200           # local steps of one client in one round
# largest_parameters = 30000000
"""


class Refusal(FedlmError):
    """A recipe that this node does not carry out."""


class Policy(Table):
    """The settings of `policy.toml`."""

    smallest_cohort: Annotated[int, Field(ge=1)] | None = None
    require_privacy: bool = False
    largest_epsilon: Annotated[float, Field(gt=0)] | None = None
    allowed_models: tuple[str, ...] | None = None
    largest_steps: Annotated[int, Field(ge=1)] | None = None
    largest_parameters: Annotated[int, Field(ge=1)] | None = None


def load_policy(path: Path | None) -> Policy:
    """Reads a node's policy; without a file everything is allowed."""
    return Policy() if path is None or not path.is_file() else read_table(path, Policy)


def check_policy(policy: Policy, recipe: Recipe, plan: PrivacyPlan | None, parameters: int) -> None:
    """Refuses a recipe that the policy does not allow."""
    # The root of a tree sees what each place learned by itself.
    asked = recipe.server.cohort if recipe.federation is None else 1
    least = policy.smallest_cohort
    if least is not None and asked < least:
        what = "server.cohort" if recipe.federation is None else "[federation]: members of a sum"
        raise Refusal(f"{what} = {asked}: this node wants at least {least}.")
    allowed = policy.allowed_models
    if allowed is not None and recipe.model.name not in allowed:
        raise Refusal(f"model.name = {recipe.model.name!r}: this node allows {', '.join(allowed)}.")
    most = policy.largest_parameters
    if most is not None and parameters > most:
        raise Refusal(f"the model has {parameters:,} parameters: this node allows {most:,}.")
    if policy.require_privacy or policy.largest_epsilon is not None:
        _check_privacy(policy, recipe, plan)


def check_steps(policy: Policy, steps: int) -> None:
    """Refuses more local work than the policy allows."""
    if policy.largest_steps is not None and steps > policy.largest_steps:
        raise Refusal(
            f"a client would take {steps} steps in a round: this node allows "
            f"{policy.largest_steps}. Lower client.max_steps or client.epochs."
        )


def _check_privacy(policy: Policy, recipe: Recipe, plan: PrivacyPlan | None) -> None:
    if plan is None or plan.noise_multiplier <= 0:
        raise Refusal("privacy.mechanism: this node wants a mechanism with noise.")
    if plan.reveal or recipe.privacy.seed is not None:
        raise Refusal("privacy.reveal and privacy.seed: this node wants neither; they undo noise.")
    if policy.largest_epsilon is None:
        return
    from fedlm.privacy import account  # it imports dp_accounting, which takes a second

    spent = account.spent(plan, recipe.server.rounds).epsilon
    if not spent <= policy.largest_epsilon:
        raise Refusal(
            f"the run would spend epsilon {spent:.3g} on a client: this node allows "
            f"{policy.largest_epsilon:g}."
        )
