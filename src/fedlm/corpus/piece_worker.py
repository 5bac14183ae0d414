"""A process that cuts text into pieces, begun by `piece_workers.py`.

In:       pickled tasks on stdin; an open file that holds the text; the number of this process.
Out:      pickled blocks on stdout, in the same order.
Promise:  it ends when its stdin does, and never writes anything else to stdout.
Not here: how text is cut (`pieces.py`).
"""

from __future__ import annotations

import os
import pickle
import signal
import sys

from fedlm.corpus.pieces import PieceCutter


def serve(file: int, number: int) -> None:
    """Answer tasks until there are no more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that asks decides
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    cutter = PieceCutter(file, number)
    while True:
        try:
            task = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        pickle.dump(cutter.cut(task), answers, pickle.HIGHEST_PROTOCOL)
        answers.flush()
