"""How well models predict a node's own held-out text, as sums.

In:       the work of a run at this node, an `EvaluateRequest` that was admitted.
Out:      sums for each ask; or one noisy sum over the node's training clients.
Promise:  the rows are those that a simulation would score: of a flat federation the node's part of
          one sample over all nodes' text, of a tree the node's own sample; text of fewer clients
          than the node's policy wants behind a figure counts as if it were not there; nats count
          up to the bound that the server checks. Of training clients under a plan nothing leaves
          but a sum of bounded vectors with noise, whose secret is used for no other sum.
Not here: whether the question may be answered (`guard.py`), figures
          (`engine/remote_evaluation.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from fedlm.core import tree
from fedlm.core.errors import WireError
from fedlm.core.keys import generator_for
from fedlm.deploy.local import NodeWork
from fedlm.engine.evaluate_messages import SUMS, EvaluateRequest
from fedlm.evaluate.clients import by_owner
from fedlm.evaluate.held_out import NO_MODEL
from fedlm.evaluate.perplexity import MOST_NATS, Sums, total_sums
from fedlm.federation.tree_evaluation import MATRIX_ROWS
from fedlm.recipe.private_evaluation import noisy_figures
from fedlm.recipe.tree import sampled_rows
from fedlm.wire.dense import dense


def node_sums(
    work: NodeWork,
    request: EvaluateRequest,
    least: int,
    own: Callable[[Any], Any] | None = None,
) -> tuple[Mapping[str, float], ...]:
    """Return the sums of each ask of a request; `own` puts this node's own layers into models."""
    _check_kind(work, request)
    models: dict[int, Any] = {}
    found: list[Mapping[str, float]] = []
    for number, split, model, most, offset in zip(
        request.numbers,
        request.splits,
        request.models,
        request.rows,
        request.offsets,
        strict=True,
    ):
        text = work.held_out[split]
        if text.size.clients < least:
            found.append(dict.fromkeys(SUMS, 0.0))
        elif model == NO_MODEL:
            found.append({**_zeros(), **_floats(text.size._asdict())})
        else:
            if model not in models:
                models = {model: whole_model(work, request.frames[model], own)}  # one at a time
            kept = _rows(work, request, split, number, offset)[: most or None]
            found.append(_scored(work, models[model], split, kept, least))
    return tuple(found)


def noisy_sum(
    work: NodeWork, request: EvaluateRequest, secret: bytes, *, whole: bool
) -> list[float]:
    """Return the noisy sum over all training clients.

    If the `whole` store is one member, the plan promises that member: all its text counts as that
    of one client. A node without validation text answers too, with noise alone.
    """
    _check_kind(work, request)
    rows, owners = work.held_out["validation"].rows(1)
    each = [Sums(**_zeros())]
    if len(rows):
        scored = work.evaluator()(whole_model(work, request.frames[0]), rows)
        each = list(by_owner(scored, np.zeros_like(owners) if whole else owners).values())
    nats, tokens, right = np.array([(s.nats, s.tokens, s.correct) for s in each], np.float64).T
    made = noisy_figures(work.recipe, work.vocabulary)
    numbers: list[float] = made.noisy_sum(nats, tokens, right, secret).tolist()
    return numbers


def _check_kind(work: NodeWork, request: EvaluateRequest) -> None:
    if work.leaf != any(request.numbers):
        raise WireError("the request and its recipe disagree on whether there is a tree.")
    if not set(request.rows) <= ({0, MATRIX_ROWS} if work.leaf else {0}):
        raise WireError("the request is for first rows that its recipe does not lead to.")


def whole_model(work: NodeWork, frame: bytes, own: Callable[[Any], Any] | None = None) -> Any:
    """Return the model of a frame, with the part that this node has itself.

    `own` puts this node's own layers into what was sent.
    """
    sent = dense().decode(frame, work.model_like)
    return tree.join(own(sent) if own else sent, work.algorithm.base)


def _rows(
    work: NodeWork, request: EvaluateRequest, split: str, number: int, offset: int
) -> np.ndarray:
    """Return the places of the rows that a simulation would score."""
    here = np.arange(work.held_out[split].size.rows)
    if work.leaf:
        return sampled_rows(work.recipe, here, number - request.population)
    most = work.recipe.server.evaluate_rows
    if request.phase == "final" or not most or request.total <= most:
        return here
    if offset + len(here) > request.total:
        raise WireError("the text of all nodes is said to be smaller than that of this node.")
    rng = generator_for(work.seed, "evaluate")
    drawn = np.sort(rng.choice(request.total, most, replace=False)) - offset
    return drawn[(drawn >= 0) & (drawn < len(here))]


def _scored(
    work: NodeWork, params: Any, split: str, kept: np.ndarray, least: int
) -> Mapping[str, float]:
    text = work.held_out[split]
    rows, owners = text.rows(1)
    clients, left = len(np.unique(owners[kept])), len(np.unique(np.delete(owners, kept)))
    # The rows that are left out are told, too, by whoever has the figure of all rows.
    if clients < least or not clients or 0 < left < least:
        return dict.fromkeys(SUMS, 0.0)
    each = work.evaluator()(params, rows[kept])
    # A model that diverged: as bad as can be told. What is not a number counts the same.
    nats, known = (np.nan_to_num(x, nan=np.inf) for x in (each.nats, each.known_nats))
    nats = np.clip(nats, 0.0, each.tokens * MOST_NATS)
    sums = total_sums(each._replace(nats=nats, known_nats=np.clip(known, 0.0, nats)))
    size = text.size
    whole = len(kept) == size.rows
    counts = {"rows": len(kept), "bytes": size.bytes if whole else 0, "clients": clients}
    return {**_floats(sums._asdict()), **_floats(counts)}


def _zeros() -> dict[str, float]:
    return dict.fromkeys(Sums._fields, 0.0)


def _floats(values: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items()}
