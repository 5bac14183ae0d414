"""A node's own ledger: which clients it answered for, in which run and round, to which question.

In:       every question that the node is about to answer, every one that it refused.
Out:      `KIT/ledger.jsonl`; whether a question may be answered; what took part in what.
Promise:  a line is on the disk before the answer leaves, and no line is ever changed or removed;
          only the owner can read the file, and one process at a time writes it; a run has one
          answer per round: the same question may be answered again, another one may not; a client
          keeps to the separation and the participations of the run's plan; noisy figures of all
          clients are one line per round, with their noise; the counter grows with every line, so
          that an older copy of the file is noticed by who remembers the counter.
Not here: what the policy allows (`policy.py`), what it all cost (`lifetime.py`).

Clients are named by salted hashes of their names, so that a store that is prepared again has the
same ones. A line cut short by a crash was never completed, so nothing was answered after it.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import json
import math
import os
import re
import secrets
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from fedlm.core.durable import CUT, append_bytes, ends_whole, sync_path
from fedlm.core.errors import RecordError
from fedlm.deploy.policy import Refusal
from fedlm.engine.messages import MOST_COUNTER
from fedlm.privacy.account import plan_facts, plan_from
from fedlm.privacy.plan import PrivacyPlan

NAME = "ledger.jsonl"
WHOLE = "*"  # a member that is all clients of a store
MOST_REFUSALS = 10_000  # lines: a server that asks without end must not fill the disk
LONGEST_REASON = 1000
_HEX = re.compile("[0-9a-f]+")
_FIELDS: dict[str, dict[str, Any]] = {
    "begin": {"salt": str},
    "run": {"run": str, "plan": (dict, type(None)), "about": str},
    "answer": {"run": str, "round": int, "clients": list, "question": str},
    "evaluation": {"run": str, "about": str, "round": int, "what": str, "question": str},
    "figures": {
        "run": str,
        "round": int,
        "question": str,
        "noise_multiplier": float,
        "numbers": list,
    },
    "refusal": {"run": str, "round": int, "reason": str},
    "lost": {"since": int},
}


class ToldFigures(NamedTuple):
    """Noisy figures of all clients that a node told after a round."""

    question: str  # a fingerprint
    noise_multiplier: float
    numbers: tuple[float, ...]  # as they left; of a relay none, which passes on those of its nodes


@dataclass
class RunEntry:
    """What a node answered in one run."""

    plan: PrivacyPlan | None  # as far as the node believes it; None: no privacy
    about: str  # a fingerprint of what must not change within a run
    questions: dict[int, str] = field(default_factory=dict)  # fingerprints by round
    turns: dict[str, list[int]] = field(default_factory=dict)  # rounds by client
    figures: dict[int, ToldFigures] = field(default_factory=dict)  # by round

    def participations(self) -> dict[int, int]:
        """Return the number of clients by how often they took part."""
        return dict(sorted(Counter(map(len, self.turns.values())).items()))


class NodeLedger:
    """The ledger of a node; without a path it is kept in memory alone, for simulations."""

    def __init__(self, path: Path | None = None, *, read_only: bool = False) -> None:
        """Open a ledger, or begin one; another process that writes it is an error.

        Raises:
          RecordError: the file is damaged, or another process has it open.
        """
        self.path, self.counter, self.salt = path, -1, ""
        self.runs: dict[str, RunEntry] = {}
        self.evaluations: dict[tuple[str, int, str], str] = {}  # fingerprints of questions
        self._abouts: dict[str, str] = {}  # of runs that asked for figures
        self.refusals: list[dict[str, Any]] = []
        self.lost: list[tuple[int, int]] = []  # counters between which lines are missing
        self._file = -1
        if path is not None and not read_only:
            self._file = _locked(path)
        try:
            self._begin(path, read_only)
        except BaseException:
            self.close()  # a refused ledger stays free for whoever repairs it
            raise

    def _begin(self, path: Path | None, read_only: bool) -> None:
        for entry in [] if path is None else _entries(path):
            self._take(entry)
        if self.counter < 0:
            if read_only:
                raise RecordError(f"{path}: this node has answered nothing yet: it has no ledger.")
            self._append({"kind": "begin", "salt": secrets.token_hex(16)})

    def close(self) -> None:
        """Let another process write the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def client(self, name: str) -> str:
        """Return the name of a client in this ledger."""
        return self.fingerprint(name)[:16]

    def fingerprint(self, text: str) -> str:
        """Return a hash with this ledger's salt: nobody without it can test a guess."""
        return hmac.digest(bytes.fromhex(self.salt), text.encode(), "sha256").hex()

    def leaf_secret(self, run: str, round: int, question: str) -> int:
        """Return the secret of the noise on what leaves a leaf of a tree in answer to a question.

        The same question never gets other noise, and no other question gets the same: two runs
        that clip differently would send one change with one noise at two scales, and their
        difference would be the change itself.
        """
        return int.from_bytes(self._secret_of("a leaf", run, round, question), "little")

    def figures_secret(self, run: str, round: int, question: str) -> bytes:
        """Return the secret of the noise of one answer with noisy figures: 16 bytes.

        It depends on all that is asked, so that no two different questions ever share it: their
        difference would be exact. An answer that was told is in this ledger, and leaves again as
        it was; one that a kill kept from it has left nobody, and is made again with this noise.
        """
        return self._secret_of("figures", run, round, question)

    def _secret_of(self, what: str, run: str, round: int, question: str) -> bytes:
        """Return 16 bytes from the salt: a ledger that knows of an answer makes them again."""
        address = f"noise of {what}|{run}|{round}|{question}".encode()
        return hmac.digest(bytes.fromhex(self.salt), address, "sha256")[:16]

    # ---- what may be answered ----------------------------------------------------------

    def check_counter(self, counter: int) -> None:
        """Raise `Refusal` if the server remembers a later state of this ledger."""
        if counter > self.counter:
            where = "KIT" if self.path is None else str(self.path.parent)
            raise Refusal(
                f"the ledger of this node is at {self.counter} and the server remembers "
                f"{counter}: it is an older copy, and what was answered since is not in it. "
                "Nothing is answered until the operator of the node brings the newest copy back, "
                f"or runs fedlm node ledger {where} --confirm {counter} there."
            )

    def check(
        self, run: str, about: str, round: int, question: str, clients: Iterable[str], most: float
    ) -> bool:
        """Raise `Refusal` if a run has no room for a question; return whether it is a new one.

        Args:
          run: the name of the run.
          about: a fingerprint of what must not change within the run.
          round: the number of the round.
          question: a fingerprint of all that is asked.
          clients: who is asked, by their names in this ledger.
          most: rounds that one client can take part in.
        """
        self._check_about(run, about)
        entry = self.runs.get(run)
        if entry is None:
            return True
        if entry.plan is None:  # nothing is promised: an answer is entered, so that it shows
            return entry.questions.get(round) != question
        if round in entry.questions:
            if entry.questions[round] != question:
                raise Refusal(
                    f"round {round} of run {run[:8]} was answered, to another question: a round "
                    "is answered once. Begin another run."
                )
            return False
        _check_turns(entry, entry.plan, round, clients, most)
        return True

    # ---- what is written ---------------------------------------------------------------

    def begin_run(self, run: str, plan: PrivacyPlan | None, about: str) -> None:
        """Enter a run before its first question is answered."""
        if run not in self.runs:
            facts = None if plan is None else plan_facts(plan)
            self._append({"kind": "run", "run": run, "plan": facts, "about": about})

    def answer(self, run: str, round: int, question: str, clients: Iterable[str]) -> None:
        """Enter an answer before it leaves."""
        who = sorted(clients)
        self._append(
            {"kind": "answer", "run": run, "round": round, "clients": who, "question": question}
        )

    def evaluate(
        self, run: str, about: str, round: int, what: str, question: str, *, once: bool
    ) -> None:
        """Enter the answer to a question about held-out text before it leaves.

        Raises `Refusal` if it must be answered `once` and was, to another question.
        """
        self._check_about(run, about)
        known = self.evaluations.get((run, round, what))
        if once and known not in (None, question):
            raise Refusal(
                f"{what} after round {round} of run {run[:8]} was answered, to another question: "
                "under a plan it is answered once. Begin another run."
            )
        if known != question:
            facts = {"about": about, "round": round, "what": what, "question": question}
            self._append({"kind": "evaluation", "run": run, **facts})

    def figures_told(self, run: str, about: str, round: int, question: str) -> ToldFigures | None:
        """Return the noisy figures that were told to a question; None if it is a new one.

        Raises `Refusal` if others were told after the round.
        """
        self._check_about(run, about)
        known = self.runs[run].figures.get(round) if run in self.runs else None
        if known is not None and known.question != question:
            raise Refusal(
                f"noisy figures after round {round} of run {run[:8]} were asked for in another "
                "question: they are told once. Begin another run."
            )
        return known

    def tell_figures(self, run: str, round: int, told: ToldFigures) -> None:
        """Enter noisy figures of all clients, in a run that began here, before they leave."""
        facts = {**told._asdict(), "numbers": list(told.numbers)}
        self._append({"kind": "figures", "run": run, "round": round, **facts})

    def _check_about(self, run: str, about: str) -> None:
        """Raise `Refusal` if a run has another recipe, population or place than before."""
        entry = self.runs.get(run)
        known = self._abouts.get(run, about) if entry is None else entry.about
        if known != about:
            raise Refusal(
                f"run {run[:8]} began here with another recipe, population or place: a run keeps "
                "its own. Begin another run."
            )

    def refuse(self, run: str, round: int, reason: str) -> None:
        """Enter a refusal, unless there are very many."""
        if len(self.refusals) < MOST_REFUSALS:
            reason = reason[:LONGEST_REASON]
            self._append({"kind": "refusal", "run": run, "round": round, "reason": reason})

    def confirm(self, counter: int) -> None:
        """Go on from the counter that a server remembers, though lines before it are missing."""
        if not self.counter < counter <= MOST_COUNTER:
            raise RecordError(
                f"--confirm {counter}: expected the number in the refusal, above {self.counter}, "
                "where this ledger is."
            )
        self._append({"kind": "lost", "since": self.counter}, counter=counter)

    def _append(self, entry: dict[str, Any], counter: int | None = None) -> None:
        entry = {"counter": self.counter + 1 if counter is None else counter, **entry}
        if self.path is not None:
            _write(self._file, self.path, json.dumps(entry, allow_nan=False).encode() + b"\n")
        self._take(entry)

    def _take(self, entry: Mapping[str, Any]) -> None:
        """Take a line that is well-formed, if it fits those before it."""
        kind, counter = entry["kind"], entry["counter"]
        follows = counter > self.counter if kind == "lost" else counter == self.counter + 1
        if not follows or (kind == "begin") != (counter == 0):
            raise RecordError(
                f"{self.path}: line with counter {counter} does not follow {self.counter}: the "
                "ledger is damaged."
            )
        if kind == "begin":
            self.salt = entry["salt"]
        elif kind == "run":
            plan = None if entry["plan"] is None else plan_from(entry["plan"])
            self.runs[entry["run"]] = RunEntry(plan, entry["about"])
        elif kind in ("answer", "figures") and entry["run"] not in self.runs:
            raise RecordError(f"{self.path}: an answer in a run that did not begin.")
        elif kind == "figures":
            told = {name: entry[name] for name in ToldFigures._fields}
            told["numbers"] = tuple(told["numbers"])
            self.runs[entry["run"]].figures[entry["round"]] = ToldFigures(**told)
        elif kind == "answer":
            run = self.runs[entry["run"]]
            run.questions[entry["round"]] = entry["question"]
            for client in entry["clients"]:
                run.turns.setdefault(client, []).append(entry["round"])
        elif kind == "evaluation":
            self.evaluations[entry["run"], entry["round"], entry["what"]] = entry["question"]
            self._abouts[entry["run"]] = entry["about"]
        elif kind == "refusal":
            self.refusals.append({name: entry[name] for name in _FIELDS["refusal"]})
        else:
            self.lost.append((entry["since"], counter))
        self.counter = counter


def _check_turns(
    entry: RunEntry, plan: PrivacyPlan, round: int, clients: Iterable[str], most: float
) -> None:
    """Raise `Refusal` if a client would take part too often, or too soon again."""
    apart = plan.sampling.min_separation
    for client in clients:
        turns = entry.turns.get(client, ())
        if len(turns) + 1 > most:
            raise Refusal(
                f"a client took part in {len(turns)} rounds of this run: its plan lets it take "
                f"part in {most:g}."
            )
        close = [other for other in turns if abs(round - other) <= apart]
        if close:
            raise Refusal(
                f"a client took part in round {close[0]}: the plan wants {apart} rounds "
                f"between it and the next, and round {round} is asked for."
            )


def about(*parts: object) -> str:
    """Return a fingerprint of what must not change within a run."""
    return hashlib.sha256(json.dumps([str(part) for part in parts]).encode()).hexdigest()


# ---- the file ------------------------------------------------------------------------------


def _locked(path: Path) -> int:
    """Open a ledger for this process alone, readable by its owner alone."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        file = os.open(path, flags, 0o600)
    except OSError as error:
        raise RecordError(f"{path} cannot be written: {error.strerror}.") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        raise RecordError(
            f"{path} is in use: another process of this node runs. Stop it first."
        ) from None
    os.fchmod(file, 0o600)
    sync_path(path.parent)
    return file


def _write(file: int, path: Path, line: bytes) -> None:
    try:
        append_bytes(file, line if ends_whole(file) else CUT + b"\n" + line)
    except OSError as error:
        raise RecordError(
            f"{path} could not be written: {error.strerror}. Nothing was answered."
        ) from None


def _entries(path: Path) -> Iterable[dict[str, Any]]:
    """Yield the well-formed lines of a ledger; any other line is an error."""
    try:
        data = path.read_bytes() if path.exists() else b""
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {error.strerror}.") from None
    *lines, _ = data.split(b"\n")  # what follows the last end of line was never completed
    for number, line in enumerate(lines, 1):
        if not line.endswith(CUT):
            yield _checked(line, f"{path}, line {number}")


def _checked(line: bytes, where: str) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        raise RecordError(f"{where}: not JSON; the ledger is damaged.") from None
    fields = _FIELDS.get(str(entry.get("kind"))) if isinstance(entry, dict) else None
    if fields is None or entry.keys() != {"kind", "counter", *fields}:
        raise RecordError(f"{where}: not a line of a node's ledger; it is damaged.")
    for name, kind in {"counter": int, **fields}.items():
        value = entry[name]
        good = isinstance(value, kind) and not isinstance(value, bool)
        if kind is int:
            good = good and value >= 0
        if kind is float:
            good = good and 0 < value < math.inf
        if name in ("run", "salt", "question", "about"):
            good = good and _HEX.fullmatch(value) is not None
        fine = _is_number if name == "numbers" else _is_text
        if not good or (kind is list and not all(map(fine, value))):
            raise RecordError(f"{where}: {name} = {str(value)[:80]!r} makes no sense.")
    return dict(entry)


def _is_number(value: Any) -> bool:
    return isinstance(value, float) and math.isfinite(value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)
