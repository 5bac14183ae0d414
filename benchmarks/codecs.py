"""Size, error and speed of every codec: `python -m benchmarks.codecs [millions of values]`.

The update is Laplace noise in three tensors of a language model's shapes (an embedding, a
matrix, a bias). Speeds are of float32 input, in MB/s, medians of turns in which every codec and
a plain copy of the same memory are run one after the other; an idle machine is assumed. The
first turn compiles and is left out.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import jax
import numpy as np

from fedlm.core.keys import generator_for, key_for
from fedlm.core.types import Codec
from fedlm.wire.catalog import codec

CODECS = [
    codec("float32"),
    codec("bfloat16"),
    codec("uniform", bits=16),
    codec("uniform", bits=8),
    codec("uniform", bits=8, block=256),
    codec("uniform", bits=6),
    codec("uniform", bits=4),
    codec("uniform", bits=2),
    codec("uniform", bits=1),
    codec("ternary"),
    codec("drive"),
    codec("drive", scale="unbiased"),
    codec("topk", share=0.01),
    codec("topk", share=0.01, values="float16"),
    codec("uniform", bits=8, deflate=True),
    codec("uniform", bits=4, deflate=True),
    codec("ternary", deflate=True),
]
TURNS = 7


def made_update(values: int) -> dict[str, np.ndarray]:
    rng = generator_for(0, "generate")
    shapes = {"embedding": (values // 2 // 96, 96), "kernel": (values // 2 // 512, 512)}
    update = {n: rng.laplace(scale=1e-3, size=s).astype(np.float32) for n, s in shapes.items()}
    return update | {"bias": rng.laplace(scale=1e-2, size=670).astype(np.float32)}


def seconds(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - began


def one_turn(update: dict[str, jax.Array], times: dict[str, list[float]]) -> None:
    key = key_for(0, "upload")
    source = np.concatenate([np.ravel(x) for x in update.values()])
    target = np.empty_like(source)
    for c in CODECS:
        times["copy"].append(seconds(lambda: np.copyto(target, source)))
        payload = c.encode(update, key)
        times[f"{c.name} encode"].append(seconds(lambda c=c: c.encode(update, key)))
        times[f"{c.name} decode"].append(seconds(lambda c=c, p=payload: c.decode(p, update)))
        apply = jax.jit(c.apply)
        apply(update, key)
        times[f"{c.name} apply"].append(seconds(lambda a=apply: a(update, key)))


def relative_error(c: Codec, update: dict[str, jax.Array]) -> float:
    found = c.apply(update, key_for(0, "upload"))
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(update), strict=True)
    wrong = sum(float(np.sum((np.asarray(x) - np.asarray(y)) ** 2)) for x, y in pairs)
    return (wrong / sum(float(np.sum(np.asarray(x) ** 2)) for x in update.values())) ** 0.5


def main() -> None:
    millions = float(sys.argv[1]) if len(sys.argv) > 1 else 4.0
    update = jax.device_put(made_update(int(millions * 1e6)))
    values = sum(x.size for x in update.values())
    names = [f"{c.name} {verb}" for c in CODECS for verb in ("encode", "decode", "apply")]
    times: dict[str, list[float]] = {name: [] for name in ["copy", *names]}
    for turn in range(TURNS + 1):
        one_turn(update, times)
        if turn == 0:
            times = {name: [] for name in times}
    rate = {name: 4e-6 * values / statistics.median(found) for name, found in times.items()}
    print(f"{values:,} values; a copy of them runs at {rate['copy']:,.0f} MB/s.\n")
    print("| codec | bits a value | relative error | gain | encode | decode | apply |")
    print("|---|---|---|---|---|---|---|")
    for c in CODECS:
        bits = 8 * len(c.encode(update, key_for(0, "upload"))) / values
        speeds = " | ".join(f"{rate[f'{c.name} {v}']:,.0f}" for v in ("encode", "decode", "apply"))
        error = relative_error(c, update)
        print(f"| `{c.name}` | {bits:.3f} | {error:.4f} | {c.norm_gain:.4g} | {speeds} |")


if __name__ == "__main__":
    main()
