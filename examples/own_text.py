"""Train on your own text, in ten lines: clients and their text go in, a model comes out.

python examples/own_text.py [ROUNDS]
"""

import sys

import fedlm

TEXT = [
    (f"letter {n}", f"dear friend,\ni hope to see you on day {n % 7}.\n" * 20) for n in range(40)
]
ROUNDS = int(sys.argv[1]) if len(sys.argv) > 1 else 30

store = fedlm.prepare(TEXT, vocabulary=200)
model = fedlm.models.si_cifg(store, embedding_size=32, hidden_size=64)
federation = fedlm.Federation(store, model, cohort=8, rounds=ROUNDS)
for told in federation.rounds():
    print(f"round {told.number}: perplexity {told.perplexity:.1f}")
run = federation.finish()
print("i hope to ...", [word["word"] for word in run.predict("i hope to", top=3)])
print(run.report())
