"""Errors that a user can act on.

    FedlmError                 any error whose text is for the user        exit 2
      ConfigError              a setting is unknown, mistyped or out of range
      CorpusError              text or a store that cannot be used
      RecordError              a run directory or checkpoint that cannot be used
      WireError                bytes that are not a well-formed frame
      EngineError              a member's work could not be done
      DivergenceError          training stopped: loss or parameters are not finite

In:       a setting, its value, the expected value, a way out.
Out:      one sentence, always of the same form.
Promise:  every user-facing error is a `FedlmError`; its text names the thing to change.
Not here: catching (`cli/main.py`).
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterable, Iterator


class FedlmError(Exception):
    """Any error that the user can act on; its text says what to change.

    A program that trains many runs catches this one and goes on; other exceptions are faults of
    fedlm.

    >>> import fedlm
    >>> try:
    ...     fedlm.load_run("no/such/run")
    ... except fedlm.FedlmError as error:
    ...     print(type(error).__name__, error.exit_code)
    RecordError 2
    """

    exit_code = 2


class ConfigError(FedlmError):
    """An error about a setting that is unknown, mistyped or out of range.

    >>> import fedlm
    >>> fedlm.train({"server": {"cohrt": 5}}, "runs/none")
    Traceback (most recent call last):
    fedlm.core.errors.ConfigError: [server] has no setting 'cohrt'. Did you mean 'cohort'?
    """


class CorpusError(FedlmError):
    """An error about text, or a store made from text, that cannot be used.

    >>> import fedlm
    >>> fedlm.prepare([])
    Traceback (most recent call last):
    fedlm.core.errors.CorpusError: the source holds no client: there is nothing to prepare.
    """


class RecordError(FedlmError):
    """An error about a run directory, journal or checkpoint that cannot be used.

    >>> import fedlm
    >>> fedlm.load_run("no/such/run")
    Traceback (most recent call last):
    fedlm.core.errors.RecordError: no/such/run is not a run directory: it has no recipe.toml.
    """


class WireError(FedlmError):
    """An error about bytes that are not a well-formed frame.

    >>> from fedlm.wire.frame import open_frame
    >>> open_frame(b"no frame", "float32")
    Traceback (most recent call last):
    fedlm.core.errors.WireError: payload is not a fedlm frame: it does not begin with FLM1.
    """


class EngineError(FedlmError):
    """An error about a member whose work could not be done.

    Its text names the member and the cause; the rounds that were recorded before it stay.

    >>> import fedlm, optax
    >>> def broken(gradients, state, params=None):
    ...     raise ValueError("no step is known.")
    >>> store = fedlm.prepare([(f"c{n}", "the cat sat on the mat\\n" * 4) for n in range(8)])
    >>> model = fedlm.models.cifg(store, embedding_size=4, hidden_size=4)
    >>> client = optax.GradientTransformation(optax.sgd(0.5).init, broken)
    >>> method = fedlm.fedavg(client=client, server=optax.sgd(1.0))
    >>> fed = fedlm.Federation(store, model, cohort=7, rounds=1, method=method, run__engine="loop")
    >>> list(fed.rounds())
    Traceback (most recent call last):
    fedlm.core.errors.EngineError: member 0 failed in round 0: no step is known.
    """


class DivergenceError(FedlmError):
    """The error that stops training when the loss or the parameters are no longer finite.

    What was saved before stays in the run directory.

    >>> import fedlm
    >>> store = fedlm.prepare([(f"c{n}", "the cat sat on the mat\\n" * 4) for n in range(8)])
    >>> model = fedlm.models.cifg(store, embedding_size=4, hidden_size=4)
    >>> fed = fedlm.Federation(store, model, cohort=2, rounds=2, server__learning_rate=1e30)
    >>> list(fed.rounds())
    Traceback (most recent call last):
    fedlm.core.errors.DivergenceError: round ...; training stopped. Usual causes: ...
    """


def require(ok: bool, setting: str, value: object, wanted: str, way_out: str = "") -> None:
    """Raise a `ConfigError` about a setting, in the form common to all of them, unless `ok`.

    >>> require(False, "server.cohort", 0, "a positive number")
    Traceback (most recent call last):
    fedlm.core.errors.ConfigError: server.cohort = 0: expected a positive number.
    """
    if not ok:
        raise ConfigError(f"{setting} = {shown(value)}: expected {wanted}. {way_out}".strip())


# What code that trusts a document may raise when the document is not what it seems.
SURPRISES = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError)


@contextlib.contextmanager
def damaged(what: str, error: type[FedlmError] = RecordError) -> Iterator[None]:
    """Turn whatever a document of wrong types makes of a block of code into one sentence.

    >>> with damaged("run/journal.jsonl"):
    ...     sum(["7"])
    Traceback (most recent call last):
    fedlm.core.errors.RecordError: run/journal.jsonl is damaged: unsupported operand type(s) ...
    """
    try:
        yield
    except SURPRISES as problem:
        reason = " ".join(str(problem).split())[:200] or type(problem).__name__
        raise error(f"{what} is damaged: {reason}.") from problem


@contextlib.contextmanager
def library_errors(
    what: str, way_out: str, error: type[FedlmError] = CorpusError
) -> Iterator[None]:
    """Turn any error of a library into one sentence: the problem, its reason, a way out."""
    try:
        yield
    except FedlmError:
        raise
    except BaseException as problem:
        # A panic of Rust code is a BaseException, but not an Exception.
        if not isinstance(problem, Exception) and type(problem).__name__ != "PanicException":
            raise
        reason = " ".join(str(problem).split())[:200]
        raise error(f"{what} ({reason}). {way_out}") from None


def shown(value: object, most: int = 200) -> str:
    """Return a value as an error message shows it, cut off where it is long.

    >>> shown("x" * 100, 10)
    "'xxxxxx..."
    """
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits, or deep nesting
        text = f"a {type(value).__name__} too long to show"
    return text if len(text) <= most else f"{text[: most - 3]}..."


def either(names: Iterable[object]) -> str:
    """Join the possible choices for an error message.

    >>> either(["adam", "sgd", "yogi"])
    'adam, sgd or yogi'
    """
    *others, last = map(str, names)
    return f"{', '.join(others)} or {last}" if others else last


def nearest(word: str, known: Iterable[str]) -> str:
    """Return the hint that ends an error message about an unknown name.

    >>> nearest("adm", ["adam", "sgd"])
    "Did you mean 'adam'?"
    """
    names = list(known)
    near = difflib.get_close_matches(word, names, n=1)
    return f"Did you mean {near[0]!r}?" if near else f"Known: {', '.join(names)}."
