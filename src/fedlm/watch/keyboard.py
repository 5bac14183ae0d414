"""Suggestions of trained models for the page's text field.

In:       a run of the board, a model of it, and the text so far.
Out:      three words.
Promise:  a model is read once and kept while few are in use; a key costs at most a step per new
          token; a model that changed on disk is read again.
Not here: how a word is found (`inference.py`).
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

from fedlm.core.errors import RecordError
from fedlm.inference import Typist, open_model
from fedlm.record.directory import RunDirectory
from fedlm.watch.board import Board, pretrained_of

SUGGESTIONS = 3
MOST_MODELS = 6  # in memory


class Keyboard:
    """The models that are typed with."""

    def __init__(self, board: Board) -> None:
        self.board = board
        self._models: OrderedDict[Any, Typist] = OrderedDict()
        self._lock = threading.Lock()

    def suggest(self, id: str, node: str, kind: str, text: str) -> list[dict[str, Any]]:
        """Return the likeliest words at the end of a text, with their probabilities."""
        with self._lock:  # a typist remembers where it is: one question at a time
            found = self._model(id, node, kind).suggest(text, SUGGESTIONS)
        return [{"word": word, "probability": chance} for word, chance in found]

    def _model(self, id: str, node: str, kind: str) -> Typist:
        directory, best = self.board.find(id), kind == "best"
        if kind == "personal":
            directory, node = self._personal(directory, node), ""
        elif kind == "pretrained":
            directory, node = self._pretrained(directory), ""
        else:
            directory = directory.of_node(node)
        weights = directory.weights_to_use(best=best)
        key = (weights, weights.stat().st_mtime_ns)
        if key not in self._models:
            self._models[key] = Typist(*open_model(directory.path, best=best))
        self._models.move_to_end(key)
        while len(self._models) > MOST_MODELS:
            self._models.popitem(last=False)
        return self._models[key]

    def _personal(self, directory: RunDirectory, name: str) -> RunDirectory:
        if not self.board.private:
            raise RecordError("models of members are for the run's owner, on this machine.")
        return directory.of_client(name)

    def _pretrained(self, directory: RunDirectory) -> RunDirectory:
        start = pretrained_of(directory)
        if start is None:
            raise RecordError(f"{directory.path}: the model from which it began is not here.")
        return RunDirectory(start)
