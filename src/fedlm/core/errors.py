"""Errors that a person can act on.

    FedlmError                 any error with a sentence for its reader   exit 2
      ConfigError              a setting is unknown, mistyped or out of range
      CorpusError              text or a store that cannot be used
      RecordError              a run directory or checkpoint that cannot be used
      WireError                bytes that are not a frame of ours
      EngineError              a member's work could not be done
      DivergenceError          training stopped because the model left the finite world

In:       a setting, its value, what was wanted, the way out.
Out:      one sentence of one form.
Promise:  every user-facing error is a `FedlmError`; its text names what to change.
Not here: catching (`cli/main.py`).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class FedlmError(Exception):
    """An error whose text is meant for the person who typed the command."""

    exit_code = 2


class ConfigError(FedlmError):
    """A setting that is unknown, mistyped or out of range."""


class CorpusError(FedlmError):
    """Text, or a store made from text, that cannot be used."""


class RecordError(FedlmError):
    """A run directory, journal or checkpoint that cannot be used."""


class WireError(FedlmError):
    """Bytes that are not a well-formed frame."""


class EngineError(FedlmError):
    """A member's work could not be done."""


class DivergenceError(FedlmError):
    """Training stopped because loss or parameters left the finite world."""


def require(ok: bool, setting: str, value: object, wanted: str, way_out: str = "") -> None:
    """Raises unless `ok`, in the one form that every error about a setting takes.

    >>> require(False, "server.cohort", 0, "a positive number")
    Traceback (most recent call last):
    fedlm.core.errors.ConfigError: server.cohort = 0: expected a positive number.
    """
    if not ok:
        raise ConfigError(f"{setting} = {value!r}: expected {wanted}. {way_out}".strip())


def either(names: Iterable[object]) -> str:
    """List what may be chosen, for an error.

    >>> either(["adam", "sgd", "yogi"])
    'adam, sgd or yogi'
    """
    *others, last = map(str, names)
    return f"{', '.join(others)} or {last}" if others else last


def nearest(word: str, known: Iterable[str]) -> str:
    """The hint that ends a sentence about an unknown name.

    >>> nearest("adm", ["adam", "sgd"])
    "Did you mean 'adam'?"
    """
    names = list(known)
    near = difflib.get_close_matches(word, names, n=1)
    return f"Did you mean {near[0]!r}?" if near else f"Known: {', '.join(names)}."
