"""How much of what a round computes on real text is padding: `python -m benchmarks.padding`.

    python -m benchmarks.padding --source ../shared/data/irc-ubuntu.jsonl.gz [--batch 16]

The cohort is that of `benchmarks.peers`, the model CIFG at the Stack Overflow shape. A column is a
place in a batch; each product of a step takes some of them, and some of those hold no target. The
last line weighs products by their arithmetic.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.peers.workload import PLANS, Plan, batched, cohort, store_for
from fedlm.core.types import PAD
from fedlm.models import loss, recurrent
from fedlm.models.packing import choices, pack


def batches(plan: Plan, source: str) -> list[np.ndarray]:
    """All batches of a round."""
    store = store_for(plan, source, Path(".fedlm/stores"))
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
        "the loss": (least(columns, loss.SIZES, real).sum(), 3 * plan.vocab * plan.embedding_size),
        "the loop over time": (size.sum(), 2 * (gates + project)),
        "before and after it": (
            least(columns, recurrent.SIZES, size).sum(),
            4 * gates + project,
        ),
    }
    return {name: (int(n), real.sum() / n, work) for name, (n, work) in parts.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", required=True, help="a corpus, as in data.source")
    parser.add_argument("--workload", choices=PLANS, default="cifg-large")
    parser.add_argument("--batch", type=int, default=16)
    asked = parser.parse_args()
    plan = replace(PLANS[asked.workload], batch=asked.batch)
    parts = computed(plan, batches(plan, asked.source))
    print(f"{plan.members} clients, batches of {plan.batch} rows of up to {plan.length} tokens\n")
    print("| part | columns computed | without a target |\n|---|---|---|")
    for name, (columns, full, _) in parts.items():
        print(f"| {name} | {columns:,} | {1 - full:.1%} |")
    work = sum(columns * each for columns, _, each in parts.values())
    needed = sum(columns * full * each for columns, full, each in parts.values())
    print(f"| all products, by arithmetic | | {1 - needed / work:.1%} |")


if __name__ == "__main__":
    main()
