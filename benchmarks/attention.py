"""How attention spreads when query and key weights are rescaled: plain against scale-invariant.

    python -m benchmarks.attention [RUN_PLAIN RUN_INVARIANT]

Without runs, fresh models; with two finished runs, what they learned. For each factor the query
and key weights of every block are multiplied by it; a row of attention is described by its entropy
over the tokens it may see, as a share of the largest possible, and by its largest weight, after
the row is brought to sum one.
"""

from __future__ import annotations

import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from fedlm.core import tree
from fedlm.core.keys import key_for
from fedlm.corpus import tokenizer_file
from fedlm.inference import load_params
from fedlm.models import catalog
from fedlm.models.packed_layout import Whole
from fedlm.recipe.settings import load
from fedlm.record.directory import RunDirectory

FACTORS = (0.1, 0.5, 1.0, 2.0, 10.0)
SIZE = catalog.Dimensions(vocab=4000, embedding_size=96, hidden_size=384, layers=2, heads=4)


def models(runs: list[str]) -> dict[str, object]:
    """Two models to compare."""
    if not runs:
        names = ("transformer", "si-transformer")
        return {name: catalog.make(name, SIZE, key_for(0, "init")) for name in names}
    found = {}
    for run in runs:
        directory = RunDirectory.existing(Path(run)).finished()
        vocabulary = tokenizer_file.load_tokenizer(directory.tokenizer).vocabulary
        model = load(directory.recipe).model
        found[model.name] = load_params(model, vocabulary, directory.weights)
    return found


def rescaled(model: object, factor: float) -> object:
    """Query and key weights, biases included, times a factor."""
    leaves = tree.named_leaves(model)
    return tree.with_leaves(
        model,
        {n: x * factor if ".query." in n or ".key." in n else x for n, x in leaves.items()},
    )


def spread(model: object, tokens: jnp.ndarray) -> tuple[float, float]:
    """Mean share of the largest entropy, and mean largest weight, over blocks, heads and rows."""
    x = model.stem(tokens)
    shares, tops = [], []
    for block in model.blocks:
        weights = np.asarray(block.attention.weights(block.norm_attention(x)), np.float64)
        weights = weights / np.maximum(weights.sum(axis=-1, keepdims=True), 1e-30)
        entropy = -np.sum(weights * np.log(np.maximum(weights, 1e-30)), axis=-1)
        most = np.log(np.arange(1, weights.shape[-1] + 1))
        shares.append(np.mean(entropy[..., 1:] / most[1:]))
        tops.append(np.mean(weights.max(axis=-1)[..., 1:]))
        x = block(x, Whole())
    return float(np.mean(shares)), float(np.mean(tops))


def main() -> None:
    tokens = jnp.asarray(np.random.default_rng(0).integers(4, 2000, (64, 20)), jnp.int32)
    print("| model | factor on queries and keys | entropy, share of largest | largest weight |")
    print("|---|---|---|---|")
    for name, model in models(sys.argv[1:]).items():
        for factor in FACTORS:
            entropy, top = spread(rescaled(model, factor), tokens)
            print(f"| {name} | {factor:g} | {entropy:.3f} | {top:.3f} |")


if __name__ == "__main__":
    main()
