"""How much memory a run needs at the least, beside what is free.

In:       a recipe, the shapes of its model, the number of lanes.
Out:      bytes, needed and there; an error before anything is allocated.
Promise:  the estimate is a lower bound, so that no run is refused that would fit: it counts the
          copies of the parameters that any run holds, and the rows of one member's batches.
Not here: what a question costs a node at the most (`deploy/limits.py`), what runs took
          (`benchmarks/memory.py`).

Measured with a model of 26 million parameters, FedAdam and two lanes: 62 bytes per parameter, of
which this estimate counts 40.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import numpy as np

from fedlm.core import tree
from fedlm.core.errors import ConfigError
from fedlm.models.catalog import ModelSpec
from fedlm.recipe.settings import Recipe

FLOAT = 4
SERVER_COPIES = 4  # start, state, sum, next state
LANE_COPIES = 3  # a member's parameters, gradient, change
LIMITS = (  # of a container; the first that is there counts beside the machine's memory
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ),
)


def check_memory(recipe: Recipe, spec: ModelSpec) -> None:
    """Raise `ConfigError` if this machine has less memory free than the run needs."""
    free = free_bytes()
    if free is None:
        return
    lanes = recipe.run.devices or len(os.sched_getaffinity(0))
    adapts = spec.adapters is not None
    trained = tree.size(spec.shapes()) - spec.parameters if adapts else spec.parameters
    need = needed_bytes(recipe, trained, spec.parameters if adapts else 0, lanes)
    if need > free:
        raise ConfigError(
            f"this run needs at least {_gigabytes(need)} of memory, and {_gigabytes(free)} are "
            f"free here: its model has {spec.parameters:,} parameters, client.batch_size is "
            f"{recipe.client.batch_size} and there are {lanes} lanes. Lower one of them "
            "(model.embedding_size, model.hidden_size, model.layers, client.batch_size, "
            "run.devices)."
        )


def needed_bytes(recipe: Recipe, trained: int, frozen: int, lanes: int) -> int:
    """Return the least number of bytes for so many trained and frozen parameters."""
    itemsize = 2 if recipe.model.base_dtype == "bfloat16" else FLOAT
    client, row = recipe.client, (recipe.data.sequence_length + 1) * np.int16().itemsize
    steps = min(client.epochs, client.max_steps or client.epochs)
    batches = steps * client.batch_size * row
    return trained * FLOAT * (SERVER_COPIES + lanes * LANE_COPIES) + frozen * itemsize + batches


def free_bytes() -> int | None:
    """Return the memory that is free for this process, in bytes; None if nobody says."""
    found = [free for free in (_of_machine(), _of_container()) if free is not None]
    return min(found, default=None)


def most_bytes() -> int:
    """Return the memory that this process may ever use, in bytes."""
    found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for most, _ in LIMITS:
        with contextlib.suppress(OSError, ValueError):  # not there, or "max"
            found = min(found, int(most.read_text(encoding="ascii")))
    return found


def _of_machine() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        facts = dict(line.split(":", 1) for line in lines)
        return sum(int(facts[name].split()[0]) for name in ("MemAvailable", "SwapFree")) * 1024
    except (OSError, ValueError, KeyError, IndexError):
        return None


def _of_container() -> int | None:
    for most, used in LIMITS:
        try:
            return max(0, int(most.read_text()) - int(used.read_text()))
        except (OSError, ValueError):  # not there, or "max"
            continue
    return None


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:,.1f} GB"
