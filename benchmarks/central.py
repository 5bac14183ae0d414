"""One model on the text of every leaf of a tree: for centralised runs, which have no leaves.

In:       a finished run, and a recipe with a tree over the same text.
Out:      the model's perplexity on each leaf's held-out rows, those that the tree is judged on.
Promise:  the same rows, tokens and mean over leaves as a run of that recipe.
Not here: training.

    python -m benchmarks.central runs/eltec-methods/centralised,run.seed=0 recipes/eltec-tree.toml
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from fedlm.cli.train import STORES
from fedlm.evaluate.perplexity import figures
from fedlm.inference import load_params
from fedlm.recipe.build import build
from fedlm.recipe.settings import load
from fedlm.record.directory import RunDirectory


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("recipe", type=Path)
    asked = parser.parse_args()
    tree = build(load(asked.recipe), STORES, lambda stage, done: None)
    directory = RunDirectory.existing(asked.run).finished()
    assert directory.tokenizer.read_bytes() == (tree.store.path / "tokenizer.json").read_bytes()
    model = load(directory.recipe).model
    params = load_params(model, tree.store.vocabulary, directory.weights)
    scores: Any = tree.evaluation
    names = scores.config.topology.names
    found = {
        names[n]: figures(scores.evaluator(params, rows))["perplexity"]
        for n, rows in scores.held.items()
    }
    print("  ".join(f"{name} {value:.0f}" for name, value in found.items()))
    print(f"mean over leaves {np.mean(list(found.values())):.1f}")


if __name__ == "__main__":
    main()
