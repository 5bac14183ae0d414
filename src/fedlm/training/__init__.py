"""A run, carried out in its directory: begun or resumed, played round by round, closed."""

from __future__ import annotations

from fedlm.training.begin import check_same, header_of, promised, start_sha256
from fedlm.training.carry_out import finish, play, train
from fedlm.training.close import Summary
from fedlm.training.processes import follow
from fedlm.training.watcher import Watcher

__all__ = [
    "Summary",
    "Watcher",
    "check_same",
    "finish",
    "follow",
    "header_of",
    "play",
    "promised",
    "start_sha256",
    "train",
]
