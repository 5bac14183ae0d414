"""The spread of the figures over clients and groups.

In:       sums per row, and the owner of each row.
Out:      quantiles of client perplexity, the worst tenth, and figures per group.
Promise:  a client's perplexity is over all its rows; groups partition the rows.
Not here: scoring (`perplexity.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedlm.evaluate.perplexity import Sums, figures, perplexity_of

QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9)


def by_owner(sums: Sums, owners: Sequence[int] | np.ndarray) -> dict[int, Sums]:
    """Return the sums of each owner, by owner number."""
    names, index = np.unique(np.asarray(owners), return_inverse=True)
    columns = [np.bincount(index, weights=column, minlength=len(names)) for column in sums]
    return {int(n): Sums(*(float(c[i]) for c in columns)) for i, n in enumerate(names)}


def client_figures(sums: Sums, owners: Sequence[int] | np.ndarray) -> dict[str, float]:
    """Return perplexity quantiles over clients, and the mean of the worst tenth.

    Each client counts once.
    """
    index = np.unique(np.asarray(owners), return_inverse=True)[1]
    nats, tokens = (np.bincount(index, weights=column) for column in (sums.nats, sums.tokens))
    some = tokens > 0
    values = np.sort([perplexity_of(*of) for of in zip(nats[some], tokens[some], strict=True)])
    if len(values) == 0:
        return {}
    out = {f"p{round(100 * q)}": float(np.quantile(values, q)) for q in QUANTILES}
    worst = values[-max(1, len(values) // 10) :]
    return {**out, "mean_of_worst_10_percent": float(np.mean(worst)), "clients": float(len(values))}


def group_figures(
    sums: Sums, groups: Sequence[tuple[str, ...]], depth: int = 0
) -> dict[str, dict[str, float]]:
    """Return the figures of each group, at one depth of the rows' group paths."""
    names = [g[depth] if len(g) > depth else "(none)" for g in groups]
    kinds = sorted(set(names))
    number = {name: i for i, name in enumerate(kinds)}
    parts = by_owner(sums, [number[n] for n in names])
    return {name: figures(Sums(*([v] for v in parts[number[name]]))) for name in kinds}
