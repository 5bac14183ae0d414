"""The error of private evaluation against the truth.

In:       real clients of heavy-tailed sizes, scored by a unigram model of all their words.
Out:      a table: the exact figures, those of clients cut to so many tokens, and the root mean
          square error of noisy ones, beside the standard error that they tell.
Promise:  the released figures are those of `privacy/evaluation.py`; nothing is trained.
Not here: which cadence a run has (`fedlm train`).

    python -m benchmarks.private_evaluation
"""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path

import numpy as np

from fedlm.corpus import sources
from fedlm.corpus.gather import gather_clients
from fedlm.corpus.tokenizer import encode, fit
from fedlm.privacy.evaluation import PrivateEvaluation

CORPORA = {"irc-ubuntu": "../shared/data/irc-ubuntu.jsonl.gz", "chitchat": "chitchat"}
VOCABULARY = 4000


def scored(source: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return nats, tokens and right guesses per client under a unigram model of all words."""
    clients = gather_clients(sources.read(source))
    tokenizer = fit((c.text for c in clients), "words", VOCABULARY, lowercase=True)
    coded = [encode(tokenizer, c.text, np.int64) for c in clients]
    coded = [tokens for tokens in coded if len(tokens)]
    counts = np.bincount(np.concatenate(coded), minlength=tokenizer.vocabulary) + 1.0
    nats = -np.log(counts / counts.sum())
    best = int(counts.argmax())
    columns = [(nats[t].sum(), len(t), np.sum(t == best)) for t in coded]
    found = np.array(columns, np.float64).T
    return found[0], found[1], found[2]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--corpora", nargs="+", default=list(CORPORA), choices=list(CORPORA))
    parser.add_argument("--noises", nargs="+", type=float, default=[2.0, 5.0, 10.0, 20.0])
    parser.add_argument("--tokens", nargs="+", type=int, default=[50, 200])
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--data", type=Path, default=None, help="the folder of irc-ubuntu")
    asked = parser.parse_args()
    head = ["corpus", "clients", "noise", "tokens a client", "perplexity", "cut", "error", "told"]
    head += ["accuracy", "cut", "error", "told", "median", "error"]
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for corpus in asked.corpora:
        source = CORPORA[corpus]
        if asked.data is not None and corpus != "chitchat":
            source = str(asked.data / Path(source).name)
        nats, tokens, right = scored(source)
        for most in asked.tokens:
            for noise in asked.noises:
                cells = row(nats, tokens, right, noise, most, asked.repeats)
                print(f"| {corpus} | {len(tokens)} | {noise:g} | {most} | {' | '.join(cells)} |")


def row(
    nats: np.ndarray, tokens: np.ndarray, right: np.ndarray, noise: float, most: int, repeats: int
) -> list[str]:
    """Return one line of the table."""
    made = PrivateEvaluation(noise_multiplier=noise, tokens=most, most_nats=math.log(VOCABULARY))
    found = [made.release(nats, tokens, right, os.urandom(16)) for _ in range(repeats)]
    short = np.minimum(tokens, most) / tokens
    cut = (tokens * short).sum()
    cells = []
    for name, exact, after in (
        ("perplexity", nats.sum() / tokens.sum(), (nats * short).sum() / cut),
        ("accuracy", right.sum() / tokens.sum(), (right * short).sum() / cut),
    ):
        whole, target = (math.exp(v) if name == "perplexity" else v for v in (exact, after))
        values = [f[name] for f in found if f[name] is not None]
        told = [f[f"{name}_error"] for f in found if f[name] is not None]
        cells += [f"{whole:.4g}", f"{target:.4g}"]
        cells += [f"{rms(values, target):.2g}", f"{np.mean(told):.2g}"] if values else ["-", "-"]
    median = math.exp(np.median(nats / tokens))
    values = [f["clients"]["p50"] for f in found if f["clients"]["p50"] is not None]
    return [*cells, f"{median:.4g}", f"{rms(values, median):.2g}" if values else "-"]


def rms(values: list[float], truth: float) -> float:
    return float(np.sqrt(np.mean((np.array(values) - truth) ** 2)))


if __name__ == "__main__":
    main()
