"""What the machine can do, and how to time several things fairly.

In:       functions to time.
Out:      medians and spread, taken in turns, and the rate of a plain matrix product between them.
Promise:  every contender sees the same weather: one call each, in turns, after one warm-up.
Not here: what is timed.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp


def machine() -> str:
    """The facts that a number means nothing without."""
    model = platform.processor() or platform.machine()
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    cores = len(os.sched_getaffinity(0))
    return f"{model}, {cores} cores, {jax.device_count()} lanes, jax {jax.__version__}"


def matmul_gflops(size: int = 1024, repeats: int = 8) -> float:
    """The best rate of a float32 product of square matrices, in GFLOP/s."""
    a = jnp.ones((size, size))
    product = jax.jit(lambda x: x @ x)
    product(a).block_until_ready()
    best = float("inf")
    for _ in range(repeats):
        began = time.perf_counter()
        product(a).block_until_ready()
        best = min(best, time.perf_counter() - began)
    return 2 * size**3 / best / 1e9


def in_turns(
    contenders: dict[str, Callable[[], object]], repeats: int
) -> tuple[dict[str, list[float]], list[float]]:
    """Seconds of each contender, and the matrix-product rate before each turn."""
    for run in contenders.values():
        jax.block_until_ready(run())
    times: dict[str, list[float]] = {name: [] for name in contenders}
    rates = []
    for _ in range(repeats):
        rates.append(matmul_gflops())
        for name, run in contenders.items():
            began = time.perf_counter()
            jax.block_until_ready(run())
            times[name].append(time.perf_counter() - began)
    return times, rates


def spread(values: list[float]) -> str:
    """Median, lowest and highest."""
    return f"{statistics.median(values):.3g} ({min(values):.3g}-{max(values):.3g})"
