"""A node's secure sums on disk: what was answered is known before the answer leaves.

In:       the questions of a server, in any order, as often as it likes, across kills.
Out:      answers; `FOLDER/RUN.json`, readable by its owner alone.
Promise:  the state after an answer is on the disk before the answer is returned, so that a killed
          node gives the same bytes to the same question and refuses another one; a node that signed
          a list of survivors takes part in no other attempt at that round, so that one round is
          opened at most once; an older session is never answered.
Not here: the answers (`node.py`).

Why a signature binds. An attempt is opened only with the signatures of t nodes, and 2 t > n + m
(`terms.py`): if honest nodes sign in one attempt per round, no two attempts of a round have t
signatures, and the server never has two sums of the same inputs to subtract from each other.

Not defended: a file that is put back from an older copy; what a disk keeps of files that were
replaced. A session's seed is replaced with that of the next session.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from fedlm.core.documents import read_json
from fedlm.core.errors import RecordError
from fedlm.secure import node
from fedlm.secure.keys import IdentityKey, derive
from fedlm.secure.node import SecureNode
from fedlm.secure.terms import SecureError, Session

VERSION = 1
_STATE = [field.name for field in fields(SecureNode) if field.name != "session"]


@dataclass(frozen=True)
class _Held:
    """The last session of a run at this node."""

    round: int
    attempt: int
    session: bytes  # its digest
    state: dict[str, Any]

    @property
    def at(self) -> tuple[int, int]:
        return self.round, self.attempt


class NodeStore:
    """The secure sums of one node; one process at a time opens a folder."""

    def __init__(self, folder: Path, identity: IdentityKey) -> None:
        self.folder, self.identity = folder, identity
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise RecordError(f"{folder} is in use by another process of this node.") from None

    def close(self) -> None:
        """Let another process open the folder."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    # ---- five answers ----------------------------------------------------------------------

    def keys(self, session: Session) -> bytes:
        """Return this node's keys for an attempt, the first time new ones."""
        held = self._held(session)
        if held is None:
            state = node.begin(session, self.identity)
            self._write(state)
        else:
            state = held
        return node.keys(self.identity, state)

    def share(self, session: Session, question: bytes) -> bytes:
        """Return sealed shares for a list of keys."""
        return self._kept(*node.share(self._state(session), question))

    def mask(self, session: Session, question: bytes, vector: np.ndarray) -> bytes:
        """Return the masked vector for the shares of neighbors."""
        return self._kept(*node.mask(self._state(session), question, vector))

    def sign(self, session: Session, question: bytes) -> bytes:
        """Return a signature of a list of survivors."""
        return self._kept(*node.sign(self.identity, self._state(session), question))

    def reveal(self, session: Session, question: bytes) -> bytes:
        """Return one share per neighbor for the signatures of a list of survivors."""
        return self._kept(*node.reveal(self._state(session), question))

    def noise_seed(self, session: Session) -> bytes:
        """Return the secret seed of this node's noise in an attempt, the same one after a kill."""
        return derive(self._state(session).seed, session.digest, b"fedlm secure noise")

    # ---- one state per run -----------------------------------------------------------------

    def _state(self, session: Session) -> SecureNode:
        held = self._held(session)
        if held is None:
            raise SecureError(
                f"attempt {session.attempt} of round {session.round} did not begin at this node, "
                "or its state is lost: begin another attempt."
            )
        return held

    def _held(self, session: Session) -> SecureNode | None:
        """Return the state of a session, None if it may begin; refuse what must not be answered."""
        held = self._read(session.run)
        if held is None or held.at < (session.round, session.attempt):
            if held is not None and held.round == session.round and held.state["survivors"]:
                raise SecureError(
                    f"this node signed the survivors of attempt {held.attempt} of round "
                    f"{held.round}: a round is opened once. Go on with the next round."
                )
            return None
        if held.at > (session.round, session.attempt):
            raise SecureError(
                f"attempt {session.attempt} of round {session.round} is over: this node is at "
                f"attempt {held.attempt} of round {held.round}."
            )
        if held.session != session.digest:
            raise SecureError(
                f"attempt {session.attempt} of round {session.round} began here with other members "
                "or terms: they stay as they are within an attempt."
            )
        state = SecureNode(session, **held.state)
        listed = session.terms.members[state.place : state.place + 1]
        if state.place < 0 or not listed or listed[0].public != self.identity.public:
            raise RecordError(
                f"{self._path(session.run)} is damaged (the place of another member): this node "
                "answers no secure sum of the run."
            )
        return state

    def _kept(self, state: SecureNode, answer: bytes) -> bytes:
        self._write(state)
        return answer

    def _write(self, state: SecureNode) -> None:
        session = state.session
        facts: dict[str, Any] = {name: getattr(state, name) for name in _STATE}
        plain = {k: v.hex() if isinstance(v, bytes) else v for k, v in facts.items()}
        head = {"version": VERSION, "round": session.round, "attempt": session.attempt}
        text = json.dumps({**head, "session": session.digest.hex(), "state": plain})
        write_private(self._path(session.run), text.encode())

    def _path(self, run: str) -> Path:
        return self.folder / f"{run}.json"

    def _read(self, run: str) -> _Held | None:
        path = self._path(run)
        if not path.exists():
            return None
        try:
            facts = read_json(path, "the file", RecordError)
            if facts.keys() != {"version", "round", "attempt", "session", "state"}:
                raise ValueError("other fields")
            state = facts["state"]
            if facts["version"] != VERSION or state.keys() != set(_STATE):
                raise ValueError("another version")
            numbers = [facts["round"], facts["attempt"], state["place"]]
            if any(type(number) is not int for number in numbers):
                raise ValueError("a number is missing")
            read = {k: v if k == "place" else _bytes(v) for k, v in state.items()}
            if len(read["seed"]) != 32:
                raise ValueError("a seed of another length")
            return _Held(facts["round"], facts["attempt"], _bytes(facts["session"]), read)
        except (ValueError, TypeError, AttributeError, KeyError, RecordError) as error:
            raise RecordError(
                f"{path} is damaged ({str(error)[:200]}): this node answers no secure sum of the "
                "run."
            ) from None


def _bytes(text: Any) -> bytes:
    if not isinstance(text, str) or not re.fullmatch(r"([0-9a-f]{2})*", text):
        raise ValueError("not hexadecimal")
    return bytes.fromhex(text)


def write_private(path: Path, data: bytes) -> None:
    """Replace a file by one that only its owner may read; it is on the disk on return."""
    new = path.with_suffix(".new")
    try:
        with contextlib.suppress(FileNotFoundError):
            new.unlink()
        handle = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
        with _opened(path.parent) as folder:
            os.fsync(folder)
    except OSError as error:
        raise RecordError(
            f"{path} could not be written: {error.strerror}. Nothing was sent."
        ) from None


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[int]:
    handle = os.open(folder, os.O_RDONLY)
    try:
        yield handle
    finally:
        os.close(handle)
