"""Everything a round needs to know, and what follows from it on both sides.

In:       the parts that a recipe chose.
Out:      an `Algorithm`; the key and the shapes that server and members derive alike.
Promise:  engines and the loop read it and add nothing.
Not here: what a member does with it (`member.py`), what the server does (`round.py`), which parts
          have which names (`methods`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from fedlm.core.keys import key_for
from fedlm.core.types import ClientMethod, Codec, Sampling, ServerMethod, Update
from fedlm.privacy.noise import Noise, silent
from fedlm.privacy.plan import PrivacyPlan

SILENT = silent()


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """Everything a round needs to know; engines and the loop read it and add nothing.

    Under a plan, `noise` is in units of the clip, every weight is one and the denominator fixed.
    """

    sampling: Sampling
    local: ClientMethod
    upload: Codec
    download: Codec
    server: ServerMethod
    plan: PrivacyPlan | None = None
    noise: Noise = SILENT
    canaries: int = 0  # the last numbers of the population: they send a direction, for audits
    turns: tuple[ClientMethod, ...] = ()  # instead of `local` where rounds train different parts
    feedback: bool = False  # members add to an update what the codec left out of their last one
    seed: int = 0  # of what both sides derive

    def local_of(self, round: int) -> ClientMethod:
        """What a member does in a round."""
        return self.turns[round % len(self.turns)] if self.turns else self.local

    @property
    def remembers(self) -> bool:
        """Whether members keep anything between their turns."""
        return self.feedback or self.local.init_memory is not None

    @property
    def expands_first(self) -> bool:
        """Whether noise goes on the whole model, because rounds or members differ in their part."""
        return bool(self.turns) or self.local.draw is not None


def round_key(algorithm: Algorithm, round: int) -> PRNGKeyArray:
    """What the server and all members of a round derive the same choices from."""
    return key_for(algorithm.seed, "partial", round=round)


def update_like(algorithm: Algorithm, sent: Any, round: int = 0) -> Update:
    """The shapes of a member's update, without training one."""
    local = algorithm.local_of(round)

    def work(sent: Any) -> Update:
        key = key_for(0, "partial")  # only shapes count
        shared = local.shared(sent, key)
        client_state = None if local.init_memory is None else local.init_memory(shared)
        return local.finish(shared, local.init(shared, key, client_state), jnp.zeros(()))

    made: Update = jax.eval_shape(work, sent)
    return made
