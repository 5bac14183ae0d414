"""What a private vocabulary costs in perplexity.

In:       a corpus of chat users, an epsilon for the vocabulary or none, rounds of training.
Out:      a table: words that passed, how much of the held-out text they are, and how well a model
          with that vocabulary predicts the text of held-out clients.
Promise:  all runs of a corpus have the same clients, splits, model, rates, rounds and seeds, and
          train without noise: the vocabulary alone differs. What was trained is not trained again:
          the same command goes on where it was stopped.
Not here: noise in training (`fedlm train` with a `[privacy]` table).

    python -m benchmarks.private_vocabulary --rounds 400
    python -m benchmarks.private_vocabulary --rounds 2 --corpora chitchat --epsilons none 1

Perplexities of different word vocabularies are not comparable, because rare words hide in one OOV
token. What is comparable: `right`, the share of all held-out words, unknown ones included, that are
the model's first guess; and for BPE the bits per byte, and the same as perplexity per word.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import numpy as np

import fedlm
from fedlm.api import TrainedRun
from fedlm.core.durable import write_atomically
from fedlm.corpus.store import Store
from fedlm.evaluate.perplexity import total_sums

CORPORA = {"irc-ubuntu": "../shared/data/irc-ubuntu.jsonl.gz", "chitchat": "chitchat"}
VOCABULARY = {"words": 4000, "bpe": 2000}
RATES = {"irc-ubuntu": (0.5, 0.02), "chitchat": (1.0, 0.04)}  # of clients and server: recipes/
HEAD = ("corpus", "tokenizer", "epsilon", "seed", "passed", "entries", "unknown", "perplexity")
HEAD = (*HEAD, "right", "bits per byte", "perplexity per word")


def store_at(out: Path, corpus: str, kind: str, epsilon: float | None, source: str) -> Store:
    """Return the prepared text; a vocabulary is drawn once, and kept."""
    path = out / "stores" / f"{corpus}-{kind}-{epsilon or 'none'}"
    if path.exists():
        return Store(path)
    settings: dict[str, Any] = {"tokenizer": kind, "vocabulary": VOCABULARY[kind]}
    if epsilon is not None:
        settings["vocabulary_epsilon"] = epsilon
    return fedlm.prepare(source, path, test_clients=0.1, validation=0.0, **settings)


def trained(store: Store, corpus: str, kind: str, seed: int, asked: argparse.Namespace) -> Any:
    """Train a small model on a store, or go on with it."""
    client, server = RATES[corpus]
    tables = {
        "data": {
            "store": str(store.path),
            "layout": "lines" if kind == "words" else "windows",
            "sequence_length": 20 if kind == "words" else 32,
        },
        "model": {"name": "si-cifg", "embedding_size": 96, "hidden_size": asked.hidden_size},
        "client": {"learning_rate": client, "batch_size": 16, "max_examples": 128},
        "server": {
            "optimizer": "fedadam",
            "learning_rate": server,
            "schedule": "linear",
            "rounds": asked.rounds,
            "cohort": 20,
            "evaluate_every": max(1, asked.rounds // 10),
            "evaluate_rows": 1000,
        },
        "run": {"seed": seed, "trackers": (), "baselines": False, "checkpoint_every": 50},
    }
    out = asked.out / "runs" / f"{store.path.name}-{seed}-{asked.rounds}"
    return fedlm.train(tables, out, resume=out.exists())


def figures_of(run: TrainedRun, store: Store, kind: str) -> dict[str, Any]:
    """Return the comparable figures on the text of held-out clients."""
    scores: Any = run.run.evaluation
    rows, owners = scores.text["test"].rows(1)
    sums = total_sums(scores.evaluator(run._models()[""], rows))
    unknown = sums.tokens - sums.known
    found: dict[str, Any] = {
        "passed": store.manifest["tokenizer_from"].get("words_passed"),
        "entries": store.vocabulary,
        "unknown": unknown / (sums.words + unknown),
        "perplexity": math.exp(sums.nats / sums.tokens),
    }
    if kind == "words":
        return {**found, "right": sums.correct_words / (sums.words + unknown)}
    size = sum(store.held_bytes(int(n)) for n in np.unique(owners))
    words = sum(_words(store, int(n)) for n in np.unique(owners))
    return {
        **found,
        "bits per byte": sums.nats / math.log(2) / size,
        "perplexity per word": math.exp(sums.nats / words),
    }


def _words(store: Store, client: int) -> int:
    """Count the words of a held-out client: those that blanks or line ends separate."""
    library = store.tokenizer.library
    return len(library.decode(store.held(client).tolist(), skip_special_tokens=True).split())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--corpora", nargs="+", default=list(CORPORA), choices=list(CORPORA))
    parser.add_argument("--kinds", nargs="+", default=list(VOCABULARY), choices=list(VOCABULARY))
    parser.add_argument("--epsilons", nargs="+", default=["none", "2", "1", "0.5"])
    parser.add_argument("--data", type=Path, default=None, help="the folder of irc-ubuntu")
    parser.add_argument("--out", type=Path, default=Path("runs/private-vocabulary"))
    asked = parser.parse_args()
    print(f"| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}")
    for corpus in asked.corpora:
        source = CORPORA[corpus]
        if asked.data is not None and corpus != "chitchat":
            source = str(asked.data / Path(source).name)
        for kind in asked.kinds:
            for epsilon in asked.epsilons:
                value = None if epsilon == "none" else float(epsilon)
                store = store_at(asked.out, corpus, kind, value, source)
                for seed in range(asked.seeds):
                    row = result(store, corpus, kind, seed, asked)
                    named = {"corpus": corpus, "tokenizer": kind, "epsilon": epsilon, "seed": seed}
                    print_row({**named, **row})


def result(
    store: Store, corpus: str, kind: str, seed: int, asked: argparse.Namespace
) -> dict[str, Any]:
    """Return the figures of one run; they are kept beside its directory."""
    file = asked.out / f"{store.path.name}-{seed}-{asked.rounds}.json"
    if not file.is_file():
        run = trained(store, corpus, kind, seed, asked)
        if run is None:
            raise SystemExit("stopped; the same command goes on.")
        write_atomically(file, json.dumps(figures_of(run, store, kind)).encode())
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def print_row(row: dict[str, Any]) -> None:
    cells = [row.get(name) for name in HEAD]
    shown = ["-" if c is None else f"{c:.4g}" if isinstance(c, float) else str(c) for c in cells]
    print(f"| {' | '.join(shown)} |", flush=True)


if __name__ == "__main__":
    main()
