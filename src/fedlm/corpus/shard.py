"""One store, split into a part per node.

In:       a store and the names of parts, perhaps with the clients of each part.
Out:      one store per name; the held-out clients are split like the others, or are a store of
          their own.
Promise:  every training client is in exactly one part, in the order of the numbers in the
          whole store, so that the parts, read in the order of their names, give members the same
          numbers; all parts have the tokenizer of the whole, and its cost.
Not here: preparing text (`store.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedlm.core.errors import require
from fedlm.corpus.store import Store, same_vocabulary, write_tokens


def deal(
    store: Store, names: Sequence[str], out: Path, held: str | None = "server"
) -> dict[str, Store]:
    """Split the training clients evenly into a store per name.

    The test clients are written to `held`, or split in the same way if that is None.
    """
    clients = store.training_clients
    require(
        0 < len(names) <= len(clients),
        "nodes",
        len(names),
        f"between 1 and the {len(clients)} training clients of this store",
    )
    pieces = np.array_split(clients, len(names))
    if held is None:
        others = np.array_split(store.test_clients, len(names))
        pieces = [np.sort(np.concatenate(both)) for both in zip(pieces, others, strict=True)]
    return deal_parts(store, dict(zip(sorted(names), pieces, strict=True)), out, held)


def deal_parts(
    store: Store, parts: Mapping[str, np.ndarray], out: Path, held: str | None = "server"
) -> dict[str, Store]:
    """Write a store `out/NAME` of the clients of each name; `held` gets the test clients."""
    made = {name: _write(store, numbers, out / name) for name, numbers in parts.items()}
    if held is not None:
        made[held] = _write(store, store.test_clients, out / held, learns=False)
    return made


def _write(store: Store, numbers: np.ndarray, out: Path, *, learns: bool = True) -> Store:
    dtype, test = store.train(0).dtype, set(store.test_clients.tolist())

    def rows() -> Iterator[dict[str, Any]]:
        for number in map(int, numbers):
            yield {
                "client": store.client(number),
                "groups": list(store.groups(number)),
                "train": store.train(number),
                "held": store.held(number),
                "test": number in test,
                "held_bytes": store.held_bytes(number),
            }

    made = same_vocabulary(store)
    return write_tokens(rows(), out, made, store.settings, dtype, learns=learns)
