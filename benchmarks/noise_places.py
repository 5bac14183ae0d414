"""Noise at the server, at nodes or at clients, at equal epsilon: what each costs in perplexity.

In:       the chat users of `irc-ubuntu`, an epsilon, seeds.
Out:      a table: the noise in a round's sum, noise over signal, the chosen settings, perplexity.
Promise:  all sides have the same users, model, rounds and cohorts, the same number of settings to
          choose from, and the same epsilon per user; what chooses settings are other held-out
          users, and another seed, than those of the table. Runs that are done are not repeated:
          the same command goes on where it was stopped.
Not here: the mechanisms (`privacy`), secure sums (`secure`).

    python -m benchmarks.noise_places --data ../shared/data
    python -m benchmarks.noise_places --data ../shared/data --sides "node sums"

No side counts on who is drawn being a secret: a user takes part in exactly `--passes` rounds, far
apart. `server` adds normal noise to the exact sum. `nodes` is `privacy.mechanism = "distributed"`:
five nodes of a secure sum add discrete shares, of which three are counted on. In `clients` each
user hides its own update with the noise that alone is enough: the sum of B such updates is the sum
of the updates and one normal vector of B times the variance, and is simulated as that. `node sums`
is the same for five nodes that add noise for themselves because nobody masks their sums.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

import fedlm
from fedlm.core.durable import write_atomically
from fedlm.corpus.store import Store
from fedlm.evaluate.perplexity import total_sums
from fedlm.privacy import account
from fedlm.recipe.build import flat_run
from fedlm.recipe.parts import resolve
from fedlm.recipe.settings import parse
from fedlm.record.facts import facts_of
from fedlm.search.sweep import markdown

NODES, STAY, HONEST = 5, 4, 3
RATES, CLIPS = (0.03, 0.01, 0.1), (0.3, 1.0)
TUNED_WITH = 1000  # the seed of the search; no seed of the table
SIDES = ("none", "server", "nodes", "node sums", "clients")
SIDES_SHOWN = ["none", "server", "nodes", "clients"]
WORDS = {
    "none": "clip alone",
    "server": "server: central Gaussian",
    "nodes": f"nodes: distributed discrete Gaussian, {HONEST} of {NODES} counted on",
    "node sums": f"nodes: each of {NODES} hides its own sum",
    "clients": "clients: local Gaussian",
}
HEAD = [
    "noise at",
    "epsilon",
    "noise of a round's sum, in clips",
    "noise over signal",
    "rate, clip",
]
HEAD += ["perplexity", "seeds"]


def store_at(asked: argparse.Namespace) -> Store:
    """Return the prepared text; one user in six is held out."""
    path = asked.out / "store"
    if path.exists():
        return Store(path)
    settings = {"tokenizer": "words", "vocabulary": asked.vocabulary}
    source = asked.data / "irc-ubuntu.jsonl.gz"
    return fedlm.prepare(str(source), path, test_clients=0.16, validation=0.0, **settings)


def tables(
    asked: argparse.Namespace, store: Store, side: str, rate: float, clip: float, seed: int
) -> dict[str, Any]:
    """Return the recipe of one run."""
    clients = len(store.training_clients)
    cohort = clients * asked.passes // asked.rounds
    private: dict[str, Any] = {
        "mechanism": "toeplitz",
        "bands": 1,  # the identity: noise that is independent from round to round
        "clip_norm": clip,
        "delta": asked.delta,
        "min_separation": asked.rounds // asked.passes - 1,
        "max_participations": asked.passes,
    }
    wire: dict[str, Any] = {}
    if side == "nodes":
        del private["bands"]
        private |= {"mechanism": "distributed", "epsilon": asked.epsilon, "honest_nodes": HONEST}
        wire = {
            "upload": f"secure-22-clip{clip:g}-members{2 * cohort}",
            "secure_nodes": NODES,
            "secure_threshold": STAY,
        }
    else:
        others = {"none": 0, "server": 1, "node sums": NODES, "clients": cohort}[side]
        private["noise_multiplier"] = multiplier(asked, clients, cohort) * math.sqrt(others)
    return {
        "data": {"store": str(store.path), "layout": "lines", "sequence_length": 20},
        "model": {
            "name": "si-cifg",
            "embedding_size": asked.embedding_size,
            "hidden_size": asked.hidden_size,
        },
        "client": {
            "learning_rate": 0.5,
            "batch_size": 16,
            "max_examples": 32,
            "weight": "uniform",
        },
        "server": {
            "optimizer": "fedadam",
            "learning_rate": rate,
            "rounds": asked.rounds,
            "cohort": cohort,
            "sampling": "spaced",
            "evaluate_every": asked.rounds,
            "evaluate_rows": 200,
        },
        "privacy": private,
        "wire": wire,
        "run": {
            "seed": seed,
            "devices": 1,
            "trackers": (),
            "baselines": False,
            "checkpoint_every": asked.rounds,
            "keep_checkpoints": 1,
        },
    }


def multiplier(asked: argparse.Namespace, clients: int, cohort: int) -> float:
    """Return the noise, in clips, that alone hides one user's rounds at the wanted epsilon."""
    spaced = fedlm.Sampling(
        law="spaced",
        population=clients,
        cohort=cohort,
        min_separation=asked.rounds // asked.passes - 1,
        max_participations=asked.passes,
    )
    plan = fedlm.PrivacyPlan(
        mechanism="toeplitz",
        bands=1,
        sampling=spaced,
        rounds=asked.rounds,
        clip_norm=1.0,
        noise_multiplier=1.0,
        delta=asked.delta,
    )
    return float(account.calibrate(plan, asked.epsilon))


def result(
    asked: argparse.Namespace, store: Store, side: str, rate: float, clip: float, seed: int
) -> dict[str, Any]:
    """Train, go on, or only read; return the perplexity on both halves of the held-out users."""
    name = f"{side.replace(' ', '-')}-{rate:g}-{clip:g}-{seed}"
    file, out = asked.out / f"{name}.json", asked.out / "runs" / name
    if not file.is_file():
        began = time.monotonic()
        made = tables(asked, store, side, rate, clip, seed)
        found: dict[str, Any]
        try:
            run = fedlm.train(made, out, resume=out.exists())
        except fedlm.DivergenceError:
            found = dict.fromkeys(("tuning", "perplexity"), math.inf)
            found |= dict.fromkeys(("noise", "noise_to_signal"), math.nan)
        else:
            if run is None:
                raise SystemExit("stopped; the same command goes on.")
            found = figures_of(run)
        found["seconds"] = time.monotonic() - began
        write_atomically(file, json.dumps(found).encode())
        print(f"  {name}: {found['tuning']:.1f}, {found['seconds']:.0f} s", flush=True)
    return dict(json.loads(file.read_text()))


def figures_of(run: Any) -> dict[str, Any]:
    """Return perplexities of a run, and the noise that its plan added."""
    scores: Any = run.run.evaluation
    rows, owners = scores.text["test"].rows(1)
    model = run._models()[""]
    halves = {}
    for name, half in (("tuning", 0), ("perplexity", 1)):
        sums = total_sums(scores.evaluator(model, rows[owners % 2 == half]))
        halves[name] = math.exp(min(sums.nats / sums.tokens, 700.0))
    plan, size = run.run.plan, run.summary["params"]
    rounds = facts_of(run.path).rounds
    excess = statistics.mean(float(line.get("noise_excess", 1.0)) for line in rounds)
    more = math.sqrt(excess)
    return {
        **halves,
        "epsilon": run.summary["epsilon"],
        "noise": more * plan.noise_multiplier,
        "noise_to_signal": more * plan.noise_to_signal(size),
        "params": size,
        "cohort": plan.sampling.cohort,
    }


def unigram(asked: argparse.Namespace, store: Store) -> float:
    """Return the perplexity of word frequencies of the training text, on held-out users."""
    made = tables(asked, store, "none", RATES[0], CLIPS[0], 0)
    made |= {"privacy": {}, "run": {**made["run"], "baselines": True}}
    made["server"] = {**made["server"], "sampling": "fixed"}
    run = flat_run(resolve(parse(made), store), store, out=Path())
    return float(run.evaluation.baselines(["test"])["test"]["unigram"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--out", type=Path, default=Path("runs/noise-places"))
    parser.add_argument("--epsilon", type=float, default=8.0)
    parser.add_argument("--delta", type=float, default=1e-5)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--passes", type=int, default=1, help="rounds of one user")
    parser.add_argument("--vocabulary", type=int, default=1000)
    parser.add_argument("--embedding-size", type=int, default=16)
    parser.add_argument("--hidden-size", type=int, default=32)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES_SHOWN)
    asked = parser.parse_args()
    began = time.monotonic()
    asked.out.mkdir(parents=True, exist_ok=True)
    store, rows = store_at(asked), []
    # All sides in turn, so that a command that is stopped has tried as much of each.
    tried: dict[str, dict[tuple[float, float], float]] = {side: {} for side in asked.sides}
    for rate, clip in itertools.product(RATES, CLIPS):
        for side in asked.sides:
            found = result(asked, store, side, rate, clip, TUNED_WITH)
            tried[side][rate, clip] = found["tuning"]
    best = {side: min(of, key=lambda pair: of[pair]) for side, of in tried.items()}
    done: dict[str, list[dict[str, Any]]] = {side: [] for side in asked.sides}
    for seed in range(asked.seeds):
        for side in asked.sides:
            done[side].append(result(asked, store, side, *best[side], seed))
    for side, runs in done.items():
        rows.append([WORDS[side], *cells(asked, side, runs, *best[side])])
    one = runs[0]
    print(
        f"{len(store.training_clients)} users, cohorts of {one.get('cohort')}, {asked.rounds} "
        f"rounds, {asked.passes} per user, {one.get('params')} parameters, delta {asked.delta:g}; "
        f"unigrams {unigram(asked, store):.1f}"
    )
    print(markdown(HEAD, rows))
    print(f"{time.monotonic() - began:.0f} s in this process")


def cells(
    asked: argparse.Namespace, side: str, runs: list[dict[str, Any]], rate: float, clip: float
) -> list[Any]:
    """Return the figures of a row."""
    found = [run["perplexity"] for run in runs]
    lost = not all(map(math.isfinite, found))
    spread = f" ± {statistics.stdev(found):.1f}" if len(found) > 1 and not lost else ""
    return [
        "none" if side == "none" else f"{asked.epsilon:g}",
        f"{runs[0]['noise']:.2f}",
        f"{runs[0]['noise_to_signal']:.2f}",
        f"{rate:g}, {clip:g}",
        "lost" if lost else f"{statistics.mean(found):.1f}{spread}",
        len(found),
    ]


if __name__ == "__main__":
    main()
