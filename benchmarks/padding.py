"""How much of what a round computes on real text is padding: `python -m benchmarks.padding`.

    python -m benchmarks.padding --source ../shared/data/irc-ubuntu.jsonl.gz [--batch 16]

The cohort is that of `benchmarks.peers`, the model CIFG at the Stack Overflow shape. A column is a
place in a batch; each product of a step takes some of them, and some of those hold no target. The
last line weighs products by their arithmetic.

A second table counts, over the first 100 rounds of cohorts of several sizes, how long a lane waits
for the other one at the end of a round, in targets; a step counts as some of them (`STEP_COST`).
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.peers.workload import PLANS, Plan, batched, cohort, store_for
from fedlm.cohort.packing import STEP_COST, count_batches, load_of, spread
from fedlm.cohort.sampling import draw, no_history
from fedlm.core.keys import generator_for
from fedlm.core.types import PAD, Sampling
from fedlm.corpus.rows import ClientRows
from fedlm.corpus.store import Store
from fedlm.models import loss, recurrent
from fedlm.models.packing import choices, pack


def batches(plan: Plan, store: Store) -> list[np.ndarray]:
    """All batches of a round."""
    return [batch for member, rows in cohort(plan, store) for batch in batched(plan, member, rows)]


def least(columns: int, sizes: int, used: np.ndarray) -> np.ndarray:
    """The sizes that are chosen for so many columns in use."""
    choice = np.array(choices(columns, sizes))
    return choice[np.searchsorted(choice, used)]


def computed(plan: Plan, rows: list[np.ndarray]) -> dict[str, tuple[int, float, int]]:
    """Columns that each part computes, how many hold a target, and weights a column meets."""
    targets = [batch[:, 1:] for batch in rows]
    columns = targets[0].size
    real = np.array([int(np.sum(t != PAD)) for t in targets])
    packed = jax.jit(pack)
    size = np.array([int(packed(jnp.asarray(t)).size) for t in targets])
    gates, project = (
        3 * plan.hidden_size * plan.embedding_size,
        plan.hidden_size * plan.embedding_size,
    )
    parts = {
        "places in batches": (columns * len(targets), 0),
        "the loss": (least(columns, loss.LOSSES, real).sum(), 3 * plan.vocab * plan.embedding_size),
        "the loop over time": (size.sum(), 2 * (gates + project)),
        "before and after it": (
            least(columns, recurrent.SIZES, size).sum(),
            4 * gates + project,
        ),
    }
    return {name: (int(n), real.sum() / n, work) for name, (n, work) in parts.items()}


def cost(batches: np.ndarray) -> int:
    """What a member's batches cost, in targets."""
    return int(np.sum(batches[:, :, 1:] != PAD)) + STEP_COST * len(batches)


def waiting(plan: Plan, store: Store, size: int, lanes: int, rounds: int = 100) -> float:
    """The part of all lanes' time in which one waits for the longest, over rounds."""
    clients = store.training_clients
    law = Sampling(law="fixed", population=len(clients), cohort=size)
    rows = ClientRows(store=store, clients=clients, sequence_length=plan.length, layout="lines")
    busy = whole = 0
    for number in range(rounds):
        rng = generator_for(plan.seed, "cohort", round=number)
        members = draw(law, rng, number, no_history(law))
        text = [rows.train(int(m)) for m in members]
        steps = [count_batches(len(r), plan.shape) for r in text]
        loads = [load_of(r, n, plan.shape) for r, n in zip(text, steps, strict=True)]
        chunks = spread(steps, loads, lanes, sum(steps))
        real = [cost(batched(plan, int(m), r)) for m, r in zip(members, text, strict=True)]
        times = [sum(real[s.place] for s in lane) for lane in chunks[0]]
        busy, whole = busy + sum(times), whole + lanes * max(times)
    return 1 - busy / whole


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", required=True, help="a corpus, as in data.source")
    parser.add_argument("--workload", choices=PLANS, default="cifg-large")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--cohorts", type=int, nargs="*", default=[4, 10, 20, 50, 100])
    parser.add_argument("--lanes", type=int, default=2)
    asked = parser.parse_args()
    plan = replace(PLANS[asked.workload], batch=asked.batch)
    store = store_for(plan, asked.source, Path(".fedlm/stores"))
    parts = computed(plan, batches(plan, store))
    print(f"{plan.members} clients, batches of {plan.batch} rows of up to {plan.length} tokens\n")
    print("| part | columns computed | without a target |\n|---|---|---|")
    for name, (columns, full, _) in parts.items():
        print(f"| {name} | {columns:,} | {1 - full:.1%} |")
    work = sum(columns * each for columns, _, each in parts.values())
    needed = sum(columns * full * each for columns, full, each in parts.values())
    print(f"| all products, by arithmetic | | {1 - needed / work:.1%} |")
    print(f"\n| cohort | time in which one of {asked.lanes} lanes waits for another |\n|---|---|")
    for size in asked.cohorts:
        print(f"| {size} | {waiting(plan, store, size, asked.lanes):.1%} |")


if __name__ == "__main__":
    main()
