"""How local steps amplify rounding: what two engines may differ by after many steps.

    python -m benchmarks.rounding [--seeds 5] [--rate 0.1] [--steps 32] [--only si-cifg]

Two copies of a model, one ten-millionth apart, take the same SGD steps on random tokens. The table
shows how far apart they are, relative to the parameters: median over seeds, largest in brackets.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from fedlm.core import tree
from fedlm.core.keys import generator_for, key_for
from fedlm.core.types import Params
from fedlm.models import catalog

SIZE = catalog.Dimensions(
    vocab=500, embedding_size=48, hidden_size=192, layers=2, heads=4, kernel_size=7
)
CASES = {
    "lstm": SIZE,
    "cifg": SIZE,
    "si-cifg": SIZE,
    **{
        f"si-cifg, {label}": replace(SIZE, **options)
        for label, options in {
            "by L2": {"si_measure": "l2"},
            "by RMS": {"si_measure": "rms"},
            "by p-norm 16": {"si_measure": "p16"},
            "by p-norm 8": {"si_measure": "p8"},
            "scaled floor 0.1": {"si_scaled_floor": 0.1},
            "soft rectifier": {"si_rectifier": "soft"},
            "p-norm 16, soft": {"si_measure": "p16", "si_rectifier": "soft"},
            "p-norm 8, soft": {"si_measure": "p8", "si_rectifier": "soft"},
            "state as it is": {"si_state": False},
            "state as it is, p-norm 8, soft": {
                "si_state": False,
                "si_measure": "p8",
                "si_rectifier": "soft",
            },
        }.items()
    },
    "transformer": SIZE,
    "conformer": SIZE,
    "si-transformer": SIZE,
    "si-transformer, row floor 0": replace(SIZE, si_row_floor=0.0),
    "si-conformer": SIZE,
    "si-conformer, row floor 0": replace(SIZE, si_row_floor=0.0),
}


def nearby(model: Params, seed: int) -> Params:
    """Every weight one part in ten million away, up or down."""
    rng = generator_for(seed, "evaluate", round=1)
    return jax.tree.map(lambda x: x * (1 + 1e-7 * rng.choice([-1.0, 1.0], x.shape)), model)


@jax.jit  # once per model, whatever the seed
def step(model: Params, tokens: jax.Array, rate: float) -> Params:
    """Take one step of SGD on the mean loss."""

    def mean(model: Params) -> jax.Array:
        nats, count = catalog.loss(model, tokens)
        return nats / count

    return jax.tree.map(lambda x, g: x - rate * g, model, jax.grad(mean)(model))


def distances(name: str, size: catalog.Dimensions, seed: int, rate: float, steps: int) -> list:
    """Relative distance of the two copies after every step."""
    one = catalog.make(name, size, key_for(seed, "init"))
    two = nearby(one, seed)
    rng = generator_for(seed, "evaluate")
    found = []
    for _ in range(steps):
        tokens = jnp.asarray(rng.integers(4, size.vocab, (16, 21)), jnp.int32)
        one, two = step(one, tokens, rate), step(two, tokens, rate)
        apart = tree.squared_norm(tree.sub(one, two)) / tree.squared_norm(one)
        found.append(float(jnp.sqrt(apart)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rate", type=float, default=0.1)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--only", default="", help="models whose name begins so")
    args = parser.parse_args()
    shown = [n for n in (1, 4, 8, 16, 32, 64) if n <= args.steps]
    print(f"client rate {args.rate:g}, {args.seeds} seeds\n")
    print("| model | " + " | ".join(f"after {n}" for n in shown) + " |")
    print("|---|" + "---|" * len(shown))
    for label, size in CASES.items():
        if not label.startswith(args.only):
            continue
        name = label.split(",")[0]
        runs = np.array(
            [distances(name, size, s, args.rate, args.steps) for s in range(args.seeds)]
        )
        cells = [f"{np.median(runs[:, n - 1]):.0e} ({runs[:, n - 1].max():.0e})" for n in shown]
        print(f"| {label} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
