"""A client's tokens as rows of a fixed width.

In:       a store, the clients that take part, the length of rows and where rows end.
Out:      rows of `context + sequence_length` tokens; the last `sequence_length` are targets.
Promise:  every token is the target of exactly one row, or lies beyond the end of a line's row;
          the rest of a row is PAD, which is no token of any vocabulary.
Not here: batches of rows (`cohort/packing.py`), tokens on disk (`store.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from jaxtyping import Integer
from numpy.typing import DTypeLike

from fedlm.core.types import PAD, SpecialTokens, TokenRows
from fedlm.corpus.store import Store

RowLayout = Literal["lines", "windows"]


def row_dtype(vocabulary: int) -> Any:
    """Choose the narrowest signed integer that holds every token and PAD.

    >>> row_dtype(32_768).__name__, row_dtype(32_769).__name__
    ('int16', 'int32')
    """
    return np.int16 if vocabulary <= 1 << 15 else np.int32


def cut(
    tokens: Integer[np.ndarray, " n"],
    length: int,
    layout: RowLayout,
    special: SpecialTokens,
    *,
    context: int = 1,
    dtype: DTypeLike = np.int32,
) -> TokenRows:
    """Cut tokens into rows of `context + length` tokens, of which the last `length` are targets.

    `lines` makes one row per line, which begins with BOS and is cut off at `length`. `windows`
    reads the text as one stream: every token is the target of exactly one row, and the tokens
    before a row's targets are its context.

    >>> special = SpecialTokens(bos=1, eos=2, oov=None, reserved=(1, 2))
    >>> cut(np.array([5, 6, 2, 7, 2]), 3, "lines", special).tolist()
    [[1, 5, 6, 2], [1, 7, 2, -1]]
    >>> cut(np.array([5, 6, 2, 7, 2]), 3, "windows", special).tolist()
    [[1, 5, 6, 2], [2, 7, 2, -1]]
    """
    if len(tokens) == 0:
        return np.full((0, context + length), PAD, dtype)
    if layout == "windows":
        count = -(-len(tokens) // length)
        stream = np.full(count * length + context, PAD, dtype)
        stream[:context] = special.bos
        stream[context : context + len(tokens)] = tokens
        return np.lib.stride_tricks.sliding_window_view(stream, context + length)[::length]
    ends = np.flatnonzero(tokens == special.eos) + 1
    if len(ends) == 0 or ends[-1] != len(tokens):
        ends = np.append(ends, len(tokens))
    starts = np.concatenate([[0], ends[:-1]])
    sizes = np.minimum(ends - starts, length)
    rows = np.full((len(starts), context + length), PAD, dtype)
    rows[:, :context] = special.bos
    column = np.arange(length)
    real = column < sizes[:, None]
    rows[:, context:][real] = tokens[(starts[:, None] + column)[real]]
    return rows


@dataclass(frozen=True, kw_only=True)
class ClientRows:
    """The rows of a store's clients; members are numbered by their place in `clients`."""

    store: Store
    clients: Integer[np.ndarray, " members"]
    sequence_length: int
    layout: RowLayout

    def train(self, member: int, context: int = 1) -> TokenRows:
        """Return the rows of a member's training text."""
        return self._cut(self.store.train(int(self.clients[member])), context)

    def held(self, client: int, context: int = 1) -> TokenRows:
        """Return the rows of a client's held-out text; `client` is its number in the store."""
        return self._cut(self.store.held(client), context)

    def _cut(self, tokens: Integer[np.ndarray, " n"], context: int) -> TokenRows:
        length, special = self.sequence_length, self.store.special
        dtype = row_dtype(self.store.vocabulary)
        return cut(tokens, length, self.layout, special, context=context, dtype=dtype)
