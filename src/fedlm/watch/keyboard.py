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

from fedlm.inference import Typist, open_model
from fedlm.watch.board import Board

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
        directory = self.board.find(id)
        weights = directory.of_node(node).weights_to_use(best=kind == "best")
        key = (weights, weights.stat().st_mtime_ns)
        if key not in self._models:
            self._models[key] = Typist(*open_model(directory.path, node, best=kind == "best"))
        self._models.move_to_end(key)
        while len(self._models) > MOST_MODELS:
            self._models.popitem(last=False)
        return self._models[key]
