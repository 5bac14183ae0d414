"""The arrays of a model under other names and in other layouts.

In:       a table of names, arrays by name.
Out:      the leaves of a fedlm model, or the arrays that other programs expect.
Promise:  reading undoes writing, to the bit; a shape that does not fit and a number that is not
          finite are refused by the name of their array.
Not here: the tables (`huggingface.py`, `gguf.py`).

Layouts of one array that holds several of ours (rows are outputs, as in fedlm):

    stacked        all rows of the first, then all rows of the second, ...
    interleaved    for each head: its rows of the first, its rows of the second, ...
    transposed     (in, out) where fedlm has (out, in)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from fedlm.core import tree
from fedlm.core.errors import ConfigError
from fedlm.core.types import Params

AGAIN = "Fetch the model again, with all of its files."


@dataclass(frozen=True)
class Tensor:
    """One array of another program, and the leaves of ours that it holds."""

    theirs: str  # `{i}` stands for the number of a block
    ours: tuple[str, ...]
    interleaved: bool = False
    transposed: bool = False

    def join(self, parts: Sequence[np.ndarray], heads: int) -> np.ndarray:
        """Return their array, made of our leaves."""
        if self.interleaved:
            split = [x.reshape(heads, -1, *x.shape[1:]) for x in parts]
            whole = np.stack(split, axis=1).reshape(-1, *parts[0].shape[1:])
        else:
            whole = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=0)
        return whole.T if self.transposed else whole

    def split(self, whole: np.ndarray, rows: Sequence[int], heads: int) -> list[np.ndarray]:
        """Return our leaves, which have so many rows each, out of their array."""
        whole = whole.T if self.transposed else whole
        if self.interleaved:
            split = whole.reshape(heads, len(rows), -1, *whole.shape[1:])
            return [split[:, n].reshape(rows[n], *whole.shape[1:]) for n in range(len(rows))]
        return np.split(whole, np.cumsum(rows)[:-1], axis=0)

    def shape(self, parts: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """Return the shape of their array, given the shapes of our leaves."""
        whole = (sum(shape[0] for shape in parts), *parts[0][1:])
        return whole[::-1] if self.transposed else whole


def numbered(table: Sequence[Tensor], like: Params) -> Iterator[tuple[Tensor, list[str]]]:
    """Yield a table's entries with block numbers filled in, if the model has such leaves."""
    names = tree.named_leaves(like)
    for entry in table:
        for i in range(len(like.blocks) if "{i}" in entry.theirs else 1):
            ours = [name.replace("{i}", str(i)) for name in entry.ours]
            if all(name in names for name in ours):
                yield (
                    Tensor(
                        entry.theirs.replace("{i}", str(i)),
                        tuple(ours),
                        entry.interleaved,
                        entry.transposed,
                    ),
                    ours,
                )


def read(
    table: Sequence[Tensor],
    like: Params,
    heads: int,
    shape_of: Callable[[str], tuple[int, ...]],
    array_of: Callable[[str], np.ndarray],
    where: str,
) -> Params:
    """Return the model with shapes `like`, out of arrays with other names and layouts."""
    wanted, leaves = tree.named_leaves(like), {}
    for entry, ours in numbered(table, like):
        shapes = [wanted[name].shape for name in ours]
        found, expected = tuple(shape_of(entry.theirs)), entry.shape(shapes)
        if found != expected:
            raise ConfigError(
                f"{where}: tensor {entry.theirs!r} is {list(found)}, but its settings say "
                f"{list(expected)}. Settings and weights are of different models. {AGAIN}"
            )
        array = array_of(entry.theirs)
        if not np.isfinite(array).all():
            raise ConfigError(
                f"{where}: tensor {entry.theirs!r} holds numbers that are not finite in float32, "
                f"with which nothing can be computed. {AGAIN}"
            )
        parts = entry.split(array, [shape[0] for shape in shapes], heads)
        for name, part in zip(ours, parts, strict=True):
            leaves[name] = jnp.asarray(np.ascontiguousarray(part, np.float32))
    missing = sorted(wanted.keys() - leaves.keys())
    assert not missing, missing  # a table covers its architecture
    return tree.with_leaves(like, leaves)


def write(table: Sequence[Tensor], params: Params, heads: int) -> dict[str, np.ndarray]:
    """Return the arrays of a model under other names and in other layouts."""
    leaves = {name: np.asarray(x) for name, x in tree.named_leaves(params).items()}
    made, used = {}, set[str]()
    for entry, ours in numbered(table, params):
        used.update(ours)
        whole = entry.join([leaves[name] for name in ours], heads)
        made[entry.theirs] = np.ascontiguousarray(whole, np.float32)
    assert used == leaves.keys(), leaves.keys() - used
    return made


def names(table: Sequence[Tensor], like: Params) -> set[str]:
    """Return the names of all arrays that the other program has for such a model."""
    return {entry.theirs for entry, _ in numbered(table, like)}


def modules(table: Sequence[Tensor], params: Params) -> Mapping[str, Tensor]:
    """Return, for the name of each of our linear layers, the entry of its weight."""
    found = {}
    for entry, ours in numbered(table, params):
        for name in ours:
            if name.endswith(".weight"):
                found[name.removesuffix(".weight")] = entry
    return found
