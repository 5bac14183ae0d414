"""The privacy ledger: what was released about clients, on disk before anybody can see it.

In:       the plans of a run; every release, before it is published.
Out:      `ledger.jsonl`: a first line with the plans, then one line per release; what all of it
          cost.
Promise:  a line that was appended survives a power cut; no line is ever changed or removed; only
          the owner can read the file; a line that is not understood is refused and never skipped,
          so that a ledger costs at least what its releases cost.
Not here: when to append (`training`), what may be released (`release.py`), the cost of a plan
          (`account.py`).

A line cut short by a crash was never completed, so nothing was released after it. Reading drops
it; the next append ends it with `CUT`, and it stays in the file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import hmac
import json
import math
import os
import re
import secrets
import stat
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedlm.core.documents import JsonMapping, JsonObject
from fedlm.core.durable import CUT, append_bytes, ends_whole, sync_path
from fedlm.core.errors import RecordError
from fedlm.core.words import count
from fedlm.privacy import account, cost
from fedlm.privacy.account import Spent
from fedlm.privacy.catalog import MECHANISMS
from fedlm.privacy.cost import DpEvent
from fedlm.privacy.plan import PrivacyPlan
from fedlm.privacy.selection import LAWS

NAME = "ledger.jsonl"  # in the directory of a run, and of a store whose making cost privacy
Entry = dict[str, Any]
MOST_BYTES = 1 << 28  # of a ledger: two million rounds
MOST_LINE = 1 << 24  # of a line: the plans of twenty thousand nodes
MOST_ROUND = 1 << 31
UNKNOWN = "0" * 64  # the digest of a release whose line was lost
# The way out where a run was copied without what a claim needs.
OWNER = "Bring the file back, or copy the run as its owner: it is readable by nobody else."

_HEX = {"run": re.compile("[0-9a-f]{32}"), "digest": re.compile("[0-9a-f]{64}")}


# ---- lines -------------------------------------------------------------------------------------


def begin_entry(
    plans: Mapping[str, PrivacyPlan],
    *,
    parent: JsonMapping | None = None,
    tokenizer: JsonMapping | None = None,
    assumes: Iterable[str] = (),
) -> Entry:
    """Return the first line of a ledger: a random name of the run, and its plans by node.

    The plan of a flat federation has the empty name. `parent` describes the run that the model was
    taken from, `tokenizer` where the vocabulary came from, `assumes` what the claim takes for
    granted.
    """
    return {
        "kind": "begin",
        "run": secrets.token_hex(16),
        "plans": {node: account.plan_facts(plan) for node, plan in plans.items()},
        "parent": None if parent is None else dict(parent),
        "tokenizer": dict(tokenizer or {}),
        "assumes": list(assumes),
    }


def round_entry(round: int, digest: str) -> Entry:
    """Return the line of one release of a round's noisy sum."""
    return {"kind": "round", "round": round, "digest": digest}


def gaussian_entry(what: str, noise_multiplier: float, delta: float = 0.0) -> Entry:
    """Return the line of another release with Gaussian noise to the same clients.

    Args:
      what: what was released, as `vocabulary`.
      noise_multiplier: the noise's standard deviation over the L2 sensitivity to one client.
      delta: the probability, added on top, that the release is not protected by the noise.
    """
    return {
        "kind": "gaussian",
        "what": what,
        "noise_multiplier": float(noise_multiplier),
        "delta": float(delta),
    }


def selection_entry(plan: PrivacyPlan, rounds: int, law: str, mean: float) -> Entry:
    """Return the line of one release: the best of a random number of runs of a plan.

    Args:
      plan: the plan of each run.
      rounds: the rounds of each run.
      law: the law of the number of runs, by its name in `selection.LAWS`.
      mean: the mean number of runs.
    """
    return {
        "kind": "selection",
        "plan": account.plan_facts(plan),
        "rounds": rounds,
        "law": law,
        "mean": float(mean),
    }


def digest_of(secret: bytes, round: int, exact: bytes) -> bytes:
    """Return the HMAC-SHA256 of a round's exact sum, under a key made from the run's secret.

    It tells two releases of a round apart, and tells nothing else to who has not the secret.
    """
    key = hmac.digest(secret, b"fedlm/ledger", "sha256")
    return hmac.digest(key, round.to_bytes(8, "little") + exact, "sha256")


def joined_digest(digests: Sequence[bytes]) -> bytes:
    """Return one digest for the sums that all nodes of a tree made in a round."""
    return digests[0] if len(digests) == 1 else hashlib.sha256(b"".join(digests)).digest()


# ---- the file ----------------------------------------------------------------------------------


class Ledger:
    """An append-only file of releases, which only its owner can read.

    >>> import tempfile
    >>> book = Ledger(Path(tempfile.mkdtemp()) / NAME)
    >>> _ = book.begin(begin_entry({}))
    >>> book.append(gaussian_entry("vocabulary", 4.0))
    >>> [entry["kind"] for entry in book.entries()]
    ['begin', 'gaussian']
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)

    def exists(self) -> bool:
        """Tell whether there is such a file, or anything else in its place."""
        return os.path.lexists(self.path)

    def begin(self, facts: JsonMapping) -> Entry:
        """Make the file with its first line, which `begin_entry` returns; refuse if it exists.

        A crash leaves the whole line or no file.
        """
        entry = _checked({**facts, "kind": "begin"}, f"{self.path}, line 1")
        partial = Ledger(self.path.with_name(f"{self.path.name}.{secrets.token_hex(8)}.part"))
        partial._write(_line(entry), os.O_CREAT | os.O_EXCL)
        try:
            os.link(partial.path, self.path)
            partial.path.unlink()
            sync_path(self.path.parent)
        except OSError as error:
            partial.path.unlink(missing_ok=True)
            raise RecordError(f"ledger {self.path} cannot be made: {error.strerror}.") from None
        return entry

    def append(self, entry: JsonMapping) -> None:
        """Append one line and wait until it is on the disk."""
        checked = _checked(dict(entry), f"{self.path}, a new line")
        if checked["kind"] == "begin":
            raise RecordError(f"{self.path} has begun already: a ledger has one first line.")
        self._write(_line(checked), 0)

    def entries(self) -> list[Entry]:
        """Return all lines in order, the first of them the run's plans."""
        *lines, last = self._read().split(b"\n")
        found = [
            _parsed(line, f"{self.path}, line {number}")
            for number, line in enumerate(lines, start=1)
            if not line.endswith(CUT)
        ]
        # Cut short, unless only its end of line is missing.
        with contextlib.suppress(ValueError, RecursionError):
            json.loads(last)
            found.append(_parsed(last, f"{self.path}, its last line"))
        if not found or found[0]["kind"] != "begin":
            raise RecordError(f"{self.path} does not begin with the plans of a run: it is damaged.")
        if any(entry["kind"] == "begin" for entry in found[1:]):
            raise RecordError(f"{self.path} begins twice: it is damaged.")
        return found

    def _read(self) -> bytes:
        with self._opened(os.O_RDONLY) as file:
            size = os.fstat(file).st_size
            if size > MOST_BYTES:
                raise RecordError(f"{self.path} has {size} bytes, more than a ledger can have.")
            with open(file, "rb", closefd=False) as reader:
                return reader.read(MOST_BYTES)

    def _write(self, line: bytes, flags: int) -> None:
        with self._opened(os.O_RDWR | os.O_APPEND | flags) as file:
            os.fchmod(file, 0o600)
            append_bytes(file, self._ending(file) + line)

    def _ending(self, file: int) -> bytes:
        """Return what ends a last line that a crash cut short; nothing if it is whole."""
        if ends_whole(file):
            return b""
        size = os.fstat(file).st_size
        tail = os.pread(file, MOST_LINE, max(0, size - MOST_LINE)).rpartition(b"\n")[2]
        try:
            json.loads(tail)
        except (ValueError, RecursionError):
            return CUT + b"\n"
        return b"\n"

    @contextlib.contextmanager
    def _opened(self, flags: int) -> Any:
        """Open the file for a block of code; a link is not followed."""
        try:
            file = os.open(self.path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise RecordError(f"ledger {self.path} cannot be opened: {error.strerror}.") from None
        try:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise RecordError(f"ledger {self.path} is not a file.")
            yield file
        except OSError as error:
            raise RecordError(
                f"ledger {self.path} could not be written or read: {error.strerror}. Nothing was "
                "released that it does not hold; repeat with --resume."
            ) from None
        finally:
            os.close(file)


def _line(entry: Entry) -> bytes:
    return json.dumps(entry, allow_nan=False, separators=(", ", ": ")).encode() + b"\n"


def _parsed(line: bytes, where: str) -> Entry:
    if len(line) > MOST_LINE:
        raise RecordError(f"{where}: {len(line)} bytes, more than a line can have.")
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        raise RecordError(f"{where}: not JSON; the ledger is damaged.") from None
    return _checked(entry, where)


def checked_lines(entries: Sequence[Any], where: str) -> list[Entry]:
    """Return the lines of a ledger that stands in another file, read as strictly as its own."""
    found = [_checked(entry, f"{where}, line {number}") for number, entry in enumerate(entries, 1)]
    begun = [number for number, entry in enumerate(found) if entry["kind"] == "begin"]
    if begun != [0]:
        raise RecordError(f"{where}: expected a line of kind 'begin', first and once.")
    return found


def _checked(entry: Any, where: str) -> Entry:
    """Return an entry that has exactly the fields of its kind; refuse any other."""
    kind = entry.get("kind") if isinstance(entry, dict) else None
    if not isinstance(kind, str) or kind not in _FIELDS:
        raise RecordError(
            f"{where}: kind {kind!r} is none of {', '.join(_FIELDS)}; what it cost is not known."
        )
    fields = _FIELDS[kind]
    for name in sorted(fields.keys() ^ (entry.keys() - {"kind"})):
        side = "lacks" if name in fields else "has an unknown"
        raise RecordError(f"{where}: an entry of kind {kind!r} {side} field {name!r}.")
    for name, good in fields.items():
        if not good(entry[name]):
            raise RecordError(f"{where}: {name} = {str(entry[name])[:80]!r} makes no sense.")
    return dict(entry)


def _is_round(value: object) -> bool:
    return type(value) is int and 0 <= value < MOST_ROUND


def _is_number(value: object) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return 0 <= value <= sys.float_info.max  # an int may be larger than any float


def _is_hex(name: str) -> Any:
    return lambda value: isinstance(value, str) and bool(_HEX[name].fullmatch(value))


def _are_plans(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(plan, dict) for plan in value.values())


_FIELDS: dict[str, JsonObject] = {
    "begin": {
        "run": _is_hex("run"),
        "plans": _are_plans,
        "parent": lambda value: value is None or isinstance(value, dict),
        "tokenizer": lambda value: isinstance(value, dict),
        "assumes": lambda value: isinstance(value, list) and all(isinstance(s, str) for s in value),
    },
    "round": {"round": _is_round, "digest": _is_hex("digest")},
    "gaussian": {
        "what": lambda value: isinstance(value, str) and 0 < len(value) <= 200,
        "noise_multiplier": _is_number,
        "delta": lambda value: _is_number(value) and value < 1,
    },
    "selection": {
        "plan": lambda value: isinstance(value, dict),
        "rounds": _is_round,
        "law": lambda value: isinstance(value, str) and value in LAWS,
        "mean": lambda value: _is_number(value) and value >= 1,
    },
}


# ---- what it cost ------------------------------------------------------------------------------


def plans_of(entries: Sequence[Entry]) -> dict[str, PrivacyPlan]:
    """Return the plans of a ledger by node; the plan of a flat federation has the empty name."""
    return {node: account.plan_from(facts) for node, facts in entries[0]["plans"].items()}


def rounds_of(entries: Iterable[Entry]) -> list[int]:
    """Return the numbers of the released rounds in the order of their release."""
    return [entry["round"] for entry in entries if entry["kind"] == "round"]


def extra_releases(rounds: Sequence[int]) -> int:
    """Return how many releases there were besides the first one of each round up to the last."""
    return len(rounds) - len(set(rounds))


def spent_of(entries: Sequence[Entry], delta: float | None = None) -> Spent:
    """Return the cost of everything in a ledger for the clients whom it costs most.

    Args:
      entries: the lines of a ledger.
      delta: the probability at which epsilon is computed; by default that of the plans.

    Raises:
      RecordError: the ledger has no plan and no delta is given.
    """
    chosen = costliest(plans_of(entries).values())
    return max((_spent(plan, entries, delta) for plan in chosen), key=lambda s: s.epsilon)


def spent_by_node(entries: Sequence[Entry], delta: float | None = None) -> dict[str, Spent]:
    """Return the cost of everything in a ledger for the clients of each node."""
    return {node: _spent(plan, entries, delta) for node, plan in plans_of(entries).items()}


def of_run(folder: Path, header: JsonMapping) -> list[Entry]:
    """Return the lines of a private run's ledger.

    Raises:
      RecordError: the run has no privacy plan, or it was copied without its ledger: its journal
        does not tell all that was released.
    """
    if header.get("privacy") is None:
        raise RecordError("the run makes no privacy claim: its recipe has no [privacy] table.")
    book = Ledger(folder / NAME)
    if not book.exists():
        raise RecordError(
            f"{folder} has no {NAME}: what was released about its clients is not known. {OWNER}"
        )
    return book.entries()


def costliest(plans: Iterable[PrivacyPlan]) -> list[PrivacyPlan | None]:
    """Keep, of plans that differ only in population and cohort, the one that samples most.

    A larger share of the population per round never costs less.
    """
    found: dict[PrivacyPlan, PrivacyPlan] = {}
    for plan in plans:
        sampling = dataclasses.replace(plan.sampling, population=0, cohort=0)
        alike = dataclasses.replace(plan, sampling=sampling)
        if alike not in found or _share(plan) > _share(found[alike]):
            found[alike] = plan
    return list(found.values()) or [None]


def _share(plan: PrivacyPlan) -> float:
    return plan.sampling.cohort / plan.sampling.population


def _spent(plan: PrivacyPlan | None, entries: Sequence[Entry], delta: float | None) -> Spent:
    """Return the cost of a plan's rounds and of all other releases in a ledger."""
    if delta is None and plan is None:
        raise RecordError("a ledger without a plan has no delta of its own: give one.")
    at = plan.delta if delta is None and plan is not None else delta
    assert at is not None
    others = [entry for entry in entries if entry["kind"] == "gaussian"]
    return _composed(plan, rounds_of(entries), others, at)


def _composed(
    plan: PrivacyPlan | None, rounds: Sequence[int], others: Sequence[Entry], delta: float
) -> Spent:
    """Return the cost of rounds and Gaussian releases together."""
    if not others:
        assert plan is not None
        return _of_rounds(dataclasses.replace(plan, delta=delta), rounds)
    named = ", ".join(sorted({entry["what"] for entry in others}))
    said = f"{len(others)} releases besides rounds ({named}) are counted"
    alone = () if plan is None else _of_rounds(plan, rounds).assumptions
    events = [cost.gaussian_event(entry["noise_multiplier"]) for entry in others]
    events += [] if plan is None else [released(plan, rounds)]
    epsilon, accountant = cost.compose(events, delta, sum(entry["delta"] for entry in others))
    return Spent(epsilon, delta, None, accountant, (*(alone or (account.UNIT,)), said))


def released(plan: PrivacyPlan, rounds: Sequence[int]) -> DpEvent:
    """Return the event of a plan's releases, of which some may be of the same round."""
    return account.event_of(*_as_one_run(plan, rounds))


def _of_rounds(plan: PrivacyPlan, rounds: Sequence[int]) -> Spent:
    """Return the cost of a plan's releases, of which some may be of the same round."""
    found, extra = _cost(*_as_one_run(plan, rounds)), extra_releases(rounds)
    if not extra:
        return found
    said = f"{count(extra, 'further release')} of rounds whose states were lost: counted"
    return found._replace(assumptions=(*found.assumptions, said))


def _as_one_run(plan: PrivacyPlan, rounds: Sequence[int]) -> tuple[PrivacyPlan, int]:
    """Return a plan, and how many of its rounds, that cost at least what the releases cost.

    Independent noise and draws: every release costs one round, because members and noise of a round
    that is played again are drawn anew (`federation/round.py`). Otherwise each release of round t
    gives row t of the strategy matrix C, applied to what was summed until then, with fresh noise.
    No row adds up entries of different signs (they are positive, or a client meets one of them),
    so one client moves row t by at most |C u|_t, where u marks its rounds, which the sampler draws
    alike every time. With no round released more than k times the squared sum is at most k times
    the largest |C u|^2: that of k runs. Where turns are secret the same holds for every u.
    """
    count = 1 + max(rounds, default=-1)  # a lost line in the middle must not lower the cost
    if plan.sampling.law in MECHANISMS[plan.mechanism].replay_laws:
        return plan, count + extra_releases(rounds)
    noise = plan.noise_multiplier / math.sqrt(max(Counter(rounds).values(), default=1))
    return dataclasses.replace(plan, noise_multiplier=noise), count


@functools.lru_cache(maxsize=1024)
def _cost(plan: PrivacyPlan, rounds: int) -> Spent:
    """Return the cost of rounds; kept, because journal, claim and summary ask for the same."""
    return account.spent(plan, rounds)
