"""What one question may cost a node: seconds, memory, steps.

In:       a recipe, the store's text, who is asked; work to be done.
Out:      an estimate of steps and bytes; the result of the work, or a `Refusal`.
Promise:  an estimate is made from numbers alone, before anything of that size exists; work that
          takes longer than it may is stopped, and the caller goes on; nothing else is begun while
          work that could not be stopped yet is still going on.
Not here: which costs are allowed (`policy.py`).
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple, TypeVar

import jax
import numpy as np

from fedlm.cohort.packing import count_batches
from fedlm.corpus.rows import row_dtype
from fedlm.corpus.store import Store
from fedlm.deploy.policy import Refusal
from fedlm.models.catalog import ARCHITECTURES, ModelSpec
from fedlm.recipe.memory import FLOAT
from fedlm.recipe.parts import batch_spec
from fedlm.recipe.settings import Recipe

T = TypeVar("T")
GRACE = 5.0  # seconds in which stopped work may end
# Copies of the parameters while a lane trains: the model that came and the one that is trained, a
# gradient, two moments of an optimiser, the update, its codec's copy, the sum.
COPIES = 8
# Numbers per token and layer that are kept for the gradient, in units of its widths.
KEPT = 12
CHUNK = 256  # batches of a lane that the mesh engine prepares at a time


class WorkCost(NamedTuple):
    """What a question would cost."""

    steps: int  # of the member that takes the most
    memory: int  # bytes, roughly


def cost_of(
    recipe: Recipe, spec: ModelSpec, store: Store, members: Iterable[Iterable[int]]
) -> WorkCost:
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
    memory = text + lanes * FLOAT * (kept + COPIES * spec.parameters)
    return WorkCost(max(batches, default=0), memory)


def count_rows(recipe: Recipe, store: Store, client: int) -> int:
    """Count the rows of a client's training text without making them."""
    tokens = store.train(client)
    if recipe.data.layout == "windows":
        return -(-len(tokens) // recipe.data.sequence_length)
    return int(np.count_nonzero(tokens == store.special.eos)) + 1


# ---- time ----------------------------------------------------------------------------------


class _Stopped(BaseException):
    """Raised inside work that took too long; not an `Exception`, so that nothing swallows it."""


class _Work(threading.Thread):
    """A call in a thread of its own, which can be stopped between two lines of Python."""

    def __init__(self, call: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self.call = call
        self.result: object = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.result = self.call()
        except BaseException as error:  # it is raised again where the result is waited for
            self.error = error

    def stop(self) -> None:
        assert self.ident is not None
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(self.ident), ctypes.py_object(_Stopped)
        )


_lock = threading.Lock()
_busy: list[_Work] = []  # work that was stopped and has not ended yet


def within(seconds: float, call: Callable[[], T], *, grace: float = GRACE) -> T:
    """Return the result of a call, or raise `Refusal` if it takes longer than `seconds`.

    The call is stopped then, as soon as it is back from any library; it must write no files that
    others rely on. Until it has ended, further calls are refused.
    """
    with _lock:
        _busy[:] = [work for work in _busy if work.is_alive()]
        if _busy:
            raise Refusal("this node is still busy with a question that took too long.")
    work = _Work(call)
    work.start()
    work.join(seconds)
    if work.is_alive():
        with _lock:
            _busy.append(work)
        work.stop()
        work.join(grace)
        raise Refusal(
            f"this takes longer than {seconds:g} seconds: this node allows no more "
            "(longest_seconds in its policy)."
        )
    if work.error is not None:
        raise work.error
    return work.result  # type: ignore[return-value]
