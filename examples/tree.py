"""Train a tree of federations: each town has its own layers, all share one backbone.

python examples/tree.py [ROUNDS]
"""

import sys
import tempfile

import fedlm

ROUNDS = int(sys.argv[1]) if len(sys.argv) > 1 else 20
HABITS = {"oslo": "we ski in the snow", "rome": "we sit in the sun", "cairo": "we walk in the sand"}
TEXT = [
    (f"{town} {n}", f"{habit} and eat {'fish' if n % 2 else 'bread'} today.\n" * 15, (town,))
    for town, habit in HABITS.items()
    for n in range(12)
]

store = fedlm.prepare(TEXT, vocabulary=100)
run = fedlm.train(
    {
        "data": {"store": str(store.path), "sequence_length": 12},
        "model": {"name": "mpt", "embedding_size": 32, "hidden_size": 64, "layers": 2, "heads": 2},
        "client": {"optimizer": "adam", "learning_rate": 0.003, "max_steps": 8},
        "server": {"rounds": ROUNDS, "evaluate_every": max(1, ROUNDS // 4)},
        "federation": {"levels": (0,), "personal_layers": "last 0.5"},
        "run": {"baselines": False, "trackers": ()},
    },
    out=tempfile.mkdtemp() + "/tree",
    progress=True,
)
for node in run.summary["nodes"]:
    print(f"{node['name']}: perplexity {node['perplexity']:.2f}")
