"""What holding a part of the model still saves in time: `python -m benchmarks.partial`.

The step of a member that trains everything, beside those of members that train a drawn part (the
same for all, so that its program leaves the rest of the backward pass out), a part of their own
(one program for all parts, which leaves nothing out), and low-rank factors. One lane, in turns.

    python -m benchmarks.partial [--repeats 15] [--share 0.4]
"""

from __future__ import annotations

import argparse
import statistics

import jax

jax.config.update("jax_num_cpu_devices", 1)

import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402

from benchmarks.probe import in_turns, machine  # noqa: E402
from fedlm.core import tree  # noqa: E402
from fedlm.core.keys import generator_for, key_for  # noqa: E402
from fedlm.core.types import TrainablePart  # noqa: E402
from fedlm.local.train import local_training  # noqa: E402
from fedlm.models import catalog  # noqa: E402
from fedlm.models.partial import drawn_subset, low_rank, own_subset, subset  # noqa: E402

VOCAB = 4000
SIZES = {
    "transformer": catalog.Dimensions(
        vocab=VOCAB, embedding_size=128, hidden_size=512, layers=6, heads=4
    ),
    "lstm": catalog.Dimensions(vocab=VOCAB, embedding_size=128, hidden_size=512, layers=1),
}


def step_of(name: str, portion: TrainablePart, batch: jax.Array):  # type: ignore[no-untyped-def]
    """One member's step, compiled, and how much of the model it trains."""
    params = catalog.make(name, SIZES[name], key_for(0, "init"))
    local = local_training(catalog.loss, optax.sgd(0.1), part=portion)
    ground = local.shared(params, key_for(0, "partial"))
    carry = local.init(ground, key_for(0, "upload"), None, jnp.ones(()))
    run = jax.jit(local.step)
    share = tree.size(carry.params) / tree.size(params)
    if carry.mask is not None:
        sizes = [leaf.size for leaf in jax.tree.leaves(carry.params)]
        share = sum(s * float(m) for s, m in zip(sizes, carry.mask, strict=True)) / sum(sizes)
    return (lambda: run(ground, carry, batch)), share


def last_blocks(like):  # type: ignore[no-untyped-def]
    """The upper half of the blocks and what comes after them: nothing below needs a gradient."""
    names = list(tree.named_leaves(like))
    return subset([n.startswith(("blocks.3", "blocks.4", "blocks.5", "last")) for n in names])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--share", type=float, default=0.4)
    asked = parser.parse_args()
    rng = generator_for(0, "evaluate")
    batch = jnp.asarray(rng.integers(4, VOCAB, (16, 21)), jnp.int32)
    print(f"{machine()}; batch 16, length 20; median of {asked.repeats} turns (lowest-highest)\n")
    print(
        "| model | trains | of the parameters | ms a step | of a whole step |\n" + "|---" * 5 + "|"
    )
    for name, size in SIZES.items():
        like = catalog.shapes(name, size)
        drawn = drawn_subset(like, asked.share, key_for(0, "partial"))
        cases = {"everything": TrainablePart(), "a drawn part": drawn}
        cases |= {"the upper half of the blocks": last_blocks(like)} if name != "lstm" else {}
        cases |= {
            "a part of its own": own_subset(asked.share),
            "factors, rank 8": low_rank(like, 8),
        }
        made = {what: step_of(name, portion, batch) for what, portion in cases.items()}
        times, _ = in_turns({what: run for what, (run, _) in made.items()}, asked.repeats)
        whole = times["everything"]
        for what, taken in times.items():
            ratio = statistics.median(a / b for a, b in zip(taken, whole, strict=True))
            ms = [1e3 * t for t in taken]
            middle = f"{statistics.median(ms):.1f} ({min(ms):.1f}-{max(ms):.1f})"
            print(f"| {name} | {what} | {made[what][1]:.0%} | {middle} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
