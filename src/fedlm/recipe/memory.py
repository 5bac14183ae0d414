"""How much memory training needs: at the least, roughly at the most, and how much there is.

In:       a recipe, the shapes of its model, the number of lanes; for the most, who is trained.
Out:      bytes, needed and there; an error before anything is allocated.
Promise:  both estimates are made from numbers alone, before anything of that size exists.
          `needed_bytes` is a lower bound, so that no run is refused that would fit: it counts the
          copies of the parameters that any run holds, and the rows of one member's batches.
          `training_cost` is what a node compares with its policy: it also counts activations, and
          the text of all who are asked.
Not here: what a node allows (`deploy/policy.py`), what runs took (`benchmarks/memory.py`).

Measured with a model of 26 million parameters, FedAdam and two lanes: 62 bytes per parameter, of
which this estimate counts 40.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from fedlm.cohort.packing import count_batches
from fedlm.core import tree
from fedlm.core.errors import ConfigError
from fedlm.corpus.rows import row_dtype
from fedlm.corpus.store import Store
from fedlm.models.catalog import ARCHITECTURES, ModelSpec
from fedlm.recipe.parts import batch_spec
from fedlm.recipe.settings import Recipe

FLOAT = 4
SERVER_COPIES = 4  # start, state, sum, next state
LANE_COPIES = 3  # a member's parameters, gradient, change
# Copies of the parameters while a lane trains: the model that came and the one that is trained, a
# gradient, two moments of an optimiser, the update, its codec's copy, the sum.
COPIES = 8
# Numbers per token and layer that are kept for the gradient, in units of its widths.
KEPT = 12
CHUNK = 256  # batches of a lane that the mesh engine prepares at a time
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
    devices = recipe.run.devices or len(os.sched_getaffinity(0))
    lanes = max(1, devices // recipe.run.shard)
    need = needed_bytes(recipe, *_trained_and_frozen(spec), lanes)
    if need > free:
        raise ConfigError(
            f"this run needs at least {_gigabytes(need)} of memory, and {_gigabytes(free)} are "
            f"free here: its model has {spec.parameters:,} parameters, client.batch_size is "
            f"{recipe.client.batch_size} and there are {lanes} lanes. Lower one of them "
            "(model.embedding_size, model.hidden_size, model.layers, client.batch_size, "
            "run.devices)."
        )


def _trained_and_frozen(spec: ModelSpec) -> tuple[int, int]:
    """Return how many parameters are trained, and how many are frozen under adapters."""
    if spec.adapters is None:
        return spec.parameters, 0
    return tree.size(spec.shapes()) - spec.parameters, spec.parameters


def needed_bytes(recipe: Recipe, trained: int, frozen: int, lanes: int) -> int:
    """Return the least number of bytes for so many trained and frozen parameters."""
    itemsize = _frozen_bytes(recipe)
    client, row = recipe.client, (recipe.data.sequence_length + 1) * np.int16().itemsize
    steps = min(client.epochs, client.max_steps or client.epochs)
    batches = steps * client.batch_size * row
    return trained * FLOAT * (SERVER_COPIES + lanes * LANE_COPIES) + frozen * itemsize + batches


def _frozen_bytes(recipe: Recipe) -> int:
    """Return the bytes of a number that is frozen."""
    return 2 if recipe.model.base_dtype == "bfloat16" else FLOAT


class TrainingCost(NamedTuple):
    """What training would cost."""

    steps: int  # of the member that takes the most
    memory: int  # bytes, roughly


def training_cost(
    recipe: Recipe, spec: ModelSpec, store: Store, members: Iterable[Iterable[int]]
) -> TrainingCost:
    """Estimate the cost of training, where each member has the text of some clients."""
    shape, data, lanes = batch_spec(recipe), recipe.data, jax.local_device_count()
    rows = [sum(count_rows(recipe, store, client) for client in clients) for clients in members]
    batches = [count_batches(count, replace(shape, max_steps=None)) for count in rows]
    width = (data.sequence_length + 1) * np.dtype(row_dtype(store.vocabulary)).itemsize
    text = width * (sum(rows) + shape.batch_size * (sum(batches) + lanes * CHUNK))
    size = spec.size
    attention = size.heads * data.sequence_length if ARCHITECTURES[spec.architecture].attends else 0
    widths = size.embedding_size + size.hidden_size
    per_token = 2 * size.vocab + size.layers * (KEPT * widths + attention)
    kept = shape.batch_size * data.sequence_length * per_token
    trained, frozen = _trained_and_frozen(spec)
    lane = FLOAT * (kept + COPIES * trained) + _frozen_bytes(recipe) * frozen
    memory = text + lanes * lane + FLOAT * frozen  # a base is in float32 while it is read
    return TrainingCost(max(batches, default=0), memory)


def count_rows(recipe: Recipe, store: Store, client: int) -> int:
    """Count the rows of a client's training text without making them."""
    tokens = store.train(client)
    if recipe.data.layout == "windows":
        return -(-len(tokens) // recipe.data.sequence_length)
    return int(np.count_nonzero(tokens == store.special.eos)) + 1


# ---- what there is ---------------------------------------------------------------------------


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
