"""Where a local step's time goes, on one core: each part beside what its products alone would take.

    taskset -c 0 python -m benchmarks.parts [--name cifg] [--units 670] [--vocab 10000]

A batch of 16 rows of 20 tokens: full, with the row lengths of chat, and a single short row. *Floor*
is the time of the part's products at the rate of a 1024 x 1024 float32 product.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.probe import machine, matmul_gflops
from fedlm.core.keys import key_for
from fedlm.core.types import PAD
from fedlm.models import catalog
from fedlm.models.loss import cross_entropy
from fedlm.models.packing import pack, widths
from fedlm.models.recurrent import Slots, sequence

BATCH, LENGTH = 16, 20


def batches(vocab: int) -> dict[str, jnp.ndarray]:
    """Rows of the lengths that a case is about; PAD after the end."""
    rng = np.random.default_rng(0)
    lengths = {
        "full": np.full(BATCH, LENGTH),
        "ragged": np.minimum(LENGTH, rng.geometric(1 / 10, BATCH)),
        "one short row": np.array([10] + [0] * (BATCH - 1)),
    }
    rows = rng.integers(4, vocab, (BATCH, LENGTH + 1))
    place = np.arange(LENGTH + 1)
    return {
        case: jnp.asarray(np.where((place <= longest[:, None]) & (longest[:, None] > 0), rows, PAD))
        for case, longest in lengths.items()
    }


def milliseconds(compute: Callable[..., object], *args: object) -> float:
    """The best of nine, after one to compile."""
    run = jax.jit(compute)
    jax.block_until_ready(run(*args))
    times = []
    for _ in range(9):
        began = time.perf_counter()
        jax.block_until_ready(run(*args))
        times.append(time.perf_counter() - began)
    return 1e3 * min(times)


def parts(model: catalog.Params, tokens: jnp.ndarray) -> dict[str, tuple[float, float]]:
    """Milliseconds of each part, and its floating-point operations."""
    layer, embed = model.layers[0], model.embedding.shape[1]
    packing = pack(tokens[:, 1:])
    columns = BATCH * LENGTH
    inputs = 0.1 * jnp.ones((columns, embed))
    features, targets = 0.01 * jnp.ones((columns, embed)), tokens[:, 1:].reshape(-1)
    real, used = float(jnp.sum(targets != PAD)), float(packing.size)
    weights = layer.w_x.size + layer.w_h.size + layer.project.size

    def through(layer):  # type: ignore[no-untyped-def]
        return jnp.sum(jnp.sin(sequence(model.cell, Slots(widths(BATCH)), packing, inputs, layer)))

    def loss(model):  # type: ignore[no-untyped-def]
        return catalog.loss(model, tokens).nats

    def step(model):  # type: ignore[no-untyped-def]
        return jax.tree.map(lambda p, g: p - 0.1 * g, model, jax.grad(loss)(model))

    readout = model.readout
    head = jax.grad(lambda f, r: cross_entropy(f, r, targets), (0, 1))
    return {
        "cross-entropy, both ways": (
            milliseconds(head, features, readout),
            6 * readout.size * real,
        ),
        "sequence, forward": (milliseconds(through, layer), 2 * weights * used),
        "sequence, both ways": (milliseconds(jax.grad(through), layer), 6 * weights * used),
        "whole step": (
            milliseconds(step, model),
            6 * (readout.size * real + weights * used),
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name", default="cifg")
    parser.add_argument("--units", type=int, default=670)
    parser.add_argument("--vocab", type=int, default=10_000)
    asked = parser.parse_args()
    size = catalog.Dimensions(vocab=asked.vocab, hidden_size=asked.units)
    model = catalog.make(asked.name, size, key_for(0, "init"))
    print(f"{machine()}; {asked.name}, {asked.units} units, {asked.vocab:,} words\n")
    print("| batch | part | ms | floor | ms / floor |\n|---|---|---|---|---|")
    for case, tokens in batches(asked.vocab).items():
        rate = matmul_gflops()
        for part, (took, work) in parts(model, tokens).items():
            floor = work / rate / 1e6
            print(
                f"| {case} | {part} | {took:.1f} | {floor:.1f} | {took / floor:.2f} |", flush=True
            )


if __name__ == "__main__":
    main()
