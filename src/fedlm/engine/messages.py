"""What crosses the network: a round's question and its answer, as Flower records.

In:       a question or an answer; records from anywhere.
Out:      records; a question or an answer that was checked.
Promise:  the payload is the codec's frame and nothing else; whatever does not have exactly the
          expected names, types and sizes is a `WireError`; no text can be part of an answer.
Not here: what a frame holds (`wire`), sending (`flower.py`).
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from fedlm.core.errors import WireError

VERSION = 2
SUMS = ("weight", "nats", "tokens", "steps", "refused", "unclipped")
LONGEST_RECIPE = 1 << 16
LONGEST_FRAME = 1 << 40
MOST_MEMBERS = 1 << 20
# Of an answer, beside its frames: names, identities of objects and seven numbers a member.
MOST_BESIDE, MOST_BESIDE_MEMBER = 1 << 16, 1 << 10
_STYPE = "fedlm.frame"


@dataclass(frozen=True, kw_only=True)
class TrainRequest:
    """What a server asks of a node in a round.

    Either members train on a client's text each, from the same parameters; or, in a tree, a
    member stands for all the text of its node, which trains under a number of its own, from
    parameters of its own.
    """

    recipe: str  # TOML
    round: int
    first: int  # the number of the node's first member, over the whole federation
    population: int  # of the whole federation
    text: str  # the fingerprint of the node's text when the run began
    members: tuple[int, ...]  # numbers over the whole federation, ascending
    clip_norm: float  # the longest update that a member may send; infinite without a plan
    each: bool  # every member's update by itself, or only their sum
    longest: int  # bytes: no frame of an answer can be longer
    frames: tuple[bytes, ...]  # the parameters: one frame, or with `numbers` one a member
    numbers: tuple[int, ...] = ()  # under which the whole text of each member's node trains

    @property
    def wanted(self) -> int:
        """How many frames an answer for all members holds."""
        return len(self.members) if self.each else 1

    @property
    def most_bytes(self) -> int:
        """An answer that is larger is none."""
        each = self.longest + self.longest // 1024 + MOST_BESIDE_MEMBER
        return self.wanted * each + MOST_BESIDE

    @property
    def digest(self) -> str:
        """A fingerprint of all of it."""
        facts = {**asdict(self), "frames": [hashlib.sha256(f).hexdigest() for f in self.frames]}
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class TrainReply:
    """What a node answers: frames with what they sum up, or why not."""

    round: int
    members: tuple[int, ...]  # for whom it speaks: all who were asked, or those a relay reached
    frames: tuple[bytes, ...] = ()
    sums: tuple[Mapping[str, float], ...] = ()  # as many as frames; names as in SUMS
    refusal: str = ""


def ask(question: TrainRequest) -> RecordDict:
    """A question as records."""
    facts = ConfigRecord(
        {
            "version": VERSION,
            "recipe": question.recipe,
            "round": question.round,
            "first": question.first,
            "population": question.population,
            "text": question.text,
            "members": list(question.members),
            "numbers": list(question.numbers),
            "clip_norm": question.clip_norm,
            "each": question.each,
            "longest": question.longest,
        }
    )
    return RecordDict({"question": facts, "frames": _frames(question.frames)})


def read_request(records: RecordDict) -> TrainRequest:
    """Records as a question."""
    facts = _facts(records, "question")
    recipe = _of(facts, "recipe", str)
    members, numbers = _numbers(facts, "members"), _numbers(facts, "numbers", rising=False)
    frames = _read_frames(records, len(numbers) or 1)
    clip_norm, each = _of(facts, "clip_norm", float), _of(facts, "each", bool)
    first, population = _count(facts, "first"), _count(facts, "population")
    longest = _count(facts, "longest")
    if len(recipe) > LONGEST_RECIPE:
        raise WireError(f"question holds a recipe of {len(recipe)} characters.")
    if not clip_norm > 0 or longest > LONGEST_FRAME:
        raise WireError(f"question holds the limit {clip_norm} and frames of {longest} bytes.")
    if not all(first <= member < population for member in members):
        raise WireError("question names members that are not there.")
    if numbers and not _are_places(numbers, members, population, each):
        raise WireError("question holds numbers that are none of places.")
    return TrainRequest(
        recipe=recipe,
        round=_count(facts, "round"),
        first=first,
        population=population,
        text=_of(facts, "text", str),
        members=members,
        clip_norm=clip_norm,
        each=each,
        longest=longest,
        frames=frames,
        numbers=numbers,
    )


def _are_places(
    numbers: tuple[int, ...], members: tuple[int, ...], population: int, each: bool
) -> bool:
    """One for each member, each another, beyond those of clients; updates come one by one."""
    known = all(population <= number < population + MOST_MEMBERS for number in numbers)
    return each and known and len(set(numbers)) == len(numbers) == len(members)


def tell(answer: TrainReply) -> RecordDict:
    """An answer as records."""
    facts: dict[str, Any] = {
        "version": VERSION,
        "round": answer.round,
        "members": list(answer.members),
        "refusal": answer.refusal[:1000],
    }
    facts.update({name: [float(part[name]) for part in answer.sums] for name in SUMS})
    return RecordDict({"answer": ConfigRecord(facts), "frames": _frames(answer.frames)})


def read_reply(records: RecordDict, question: TrainRequest) -> TrainReply:
    """Records as the answer to a question."""
    facts = _facts(records, "answer")
    refusal = _of(facts, "refusal", str)
    if refusal:
        kept = "".join(c if c.isprintable() else " " for c in refusal[:1000])
        return TrainReply(round=question.round, members=question.members, refusal=kept)
    members = _numbers(facts, "members")
    known = members and set(members) <= set(question.members)
    if _count(facts, "round") != question.round or not known:
        raise WireError("answer is to another question.")
    wanted = len(members) if question.each else 1
    frames = _read_frames(records, wanted)
    if max(map(len, frames)) > question.longest:
        raise WireError(f"answer holds a frame of more than {question.longest} bytes.")
    columns = {name: _reals(facts, name, wanted) for name in SUMS}
    sums = tuple({name: columns[name][i] for name in SUMS} for i in range(wanted))
    return TrainReply(round=question.round, members=members, frames=frames, sums=sums)


def _frames(frames: Any) -> ArrayRecord:
    # As arrays of bytes: chunks of those travel one by one, and a frame for all nodes once.
    return ArrayRecord(
        {str(i): Array("uint8", (len(f),), _STYPE, bytes(f)) for i, f in enumerate(frames)}
    )


def _read_frames(records: RecordDict, wanted: int) -> tuple[bytes, ...]:
    found = records.get("frames")
    if not isinstance(found, ArrayRecord) or list(found) != [str(i) for i in range(wanted)]:
        raise WireError(f"message does not hold exactly {wanted} frames.")
    for array in found.values():
        if array.stype != _STYPE or array.dtype != "uint8" or array.shape != (len(array.data),):
            raise WireError("message holds something else than frames.")
    return tuple(array.data for array in found.values())


def _facts(records: RecordDict, name: str) -> ConfigRecord:
    found = records.get(name)
    if set(records) != {name, "frames"} or not isinstance(found, ConfigRecord):
        raise WireError(f"message is not a fedlm {name}.")
    if found.get("version") != VERSION:
        raise WireError(f"message has version {found.get('version')!r}: this fedlm is {VERSION}.")
    return found


def _of(facts: ConfigRecord, name: str, kind: type) -> Any:
    value = facts.get(name)
    if type(value) is not kind:
        raise WireError(f"message has no {name!r} of type {kind.__name__}.")
    return value


def _count(facts: ConfigRecord, name: str) -> int:
    value: int = _of(facts, name, int)
    if value < 0:
        raise WireError(f"message says {name} = {value}.")
    return value


def _numbers(facts: ConfigRecord, name: str, *, rising: bool = True) -> tuple[int, ...]:
    values: Any = facts.get(name)
    if not isinstance(values, list) or len(values) > MOST_MEMBERS:
        raise WireError(f"message has no list {name!r}.")
    whole = all(type(v) is int for v in values)
    if not whole or (rising and not all(a < b for a, b in itertools.pairwise(values))):
        raise WireError(f"message has a list {name!r} that does not rise.")
    return tuple(values)


def _reals(facts: ConfigRecord, name: str, wanted: int) -> list[float]:
    values: Any = facts.get(name)
    if not isinstance(values, list) or len(values) != wanted:
        raise WireError(f"message does not hold {wanted} values of {name!r}.")
    if not all(type(v) is float and math.isfinite(v) and v >= 0 for v in values):
        raise WireError(f"message holds a {name!r} that is not a size.")
    return values
