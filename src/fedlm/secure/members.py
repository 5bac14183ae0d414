"""The federation's list of members, which changes only if its members approve.

In:       members with their identity keys; the signatures of those who approve.
Out:      a list of a certain number, with the digest of the list before it; bytes, and back.
Promise:  a list is accepted only if every member that stays, and at least a majority of the list
          before it, signed it; numbers rise by one; so neither a server nor an operator can add a
          node or exchange a key.
Not here: where a kit keeps its list, who asks whom to sign.

The first list is the one exception: nobody was there to approve it. It is compared out of band, by
its `fingerprint`, as one compares the keys of a messenger.

A member that leaves need not sign, because it may be gone; more than half of the list before must
still agree, so that few cannot leave out many. A member that exchanges its key signs with the old
one.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fedlm.core.documents import json_value
from fedlm.core.errors import RecordError
from fedlm.secure.keys import SIGNATURE_BYTES, IdentityKey, digest, is_public, verified
from fedlm.secure.terms import MOST_MEMBERS, Member

VERSION = 1
MOST_BYTES = 1 << 20
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True)
class MemberList:
    """One list of a federation's members.

    Attributes:
      number: 0 for the first list, then one more for each change.
      members: in the order of names.
      previous: the digest of the list before; 32 zero bytes for the first.
      approvals: signatures of this list by the identities of the list before, by name.
    """

    number: int
    members: tuple[Member, ...]
    previous: bytes = bytes(32)
    approvals: Mapping[str, bytes] = field(default_factory=dict)

    @functools.cached_property
    def digest(self) -> bytes:
        """The SHA-256 of number, members and the list before, which is what approvals sign."""
        parts = [part for m in self.members for part in (m.name.encode(), m.public)]
        return digest(b"fedlm member list 1", self.number.to_bytes(8, "big"), self.previous, *parts)

    @property
    def fingerprint(self) -> str:
        """A short form of the digest, to compare by voice."""
        text = self.digest.hex()[:32]
        return " ".join(text[at : at + 4] for at in range(0, 32, 4))

    def approved(self, name: str, identity: IdentityKey) -> MemberList:
        """Return the list with one more approval."""
        return replace(self, approvals={**self.approvals, name: identity.sign(self.digest)})


def first(members: Iterable[Member]) -> MemberList:
    """Return the first list of a federation."""
    return _well_formed(MemberList(0, tuple(sorted(members))))


def proposed(before: MemberList, members: Iterable[Member]) -> MemberList:
    """Return the next list, which nobody has approved yet."""
    return _well_formed(MemberList(before.number + 1, tuple(sorted(members)), before.digest))


def check_next(before: MemberList, after: MemberList) -> None:
    """Raise `RecordError` unless the members of one list approved the next."""
    _well_formed(after)
    if after.number != before.number + 1 or after.previous != before.digest:
        raise RecordError(
            f"list {after.number} of the members does not follow list {before.number} of this kit: "
            "bring the lists in between, or ask the other members which one they have."
        )
    old = {member.name: member.public for member in before.members}
    for name, signature in after.approvals.items():
        if name not in old or not verified(old[name], signature, after.digest):
            raise RecordError(
                f"list {after.number} of the members has an approval in the name of {name[:64]!r} "
                "that its identity in the list before did not sign."
            )
    staying = old.keys() & {member.name for member in after.members}
    missing = sorted(staying - after.approvals.keys())
    if missing:
        raise RecordError(
            f"list {after.number} of the members is not approved by {', '.join(missing[:8])}: "
            "every member that stays must sign a change."
        )
    if 2 * len(after.approvals) <= len(old):
        raise RecordError(
            f"list {after.number} of the members is approved by {len(after.approvals)} of "
            f"{len(old)}: more than half must sign a change."
        )


def _well_formed(found: MemberList) -> MemberList:
    names = [member.name for member in found.members]
    keys = [member.public for member in found.members]
    good = (
        1 <= len(names) <= MOST_MEMBERS
        and names == sorted(set(names))
        and len(set(keys)) == len(keys)
        and all(map(_NAME.fullmatch, names))
        and all(map(is_public, keys))
    )
    if not good:
        raise RecordError(
            f"list {found.number} of the members is not well-formed: expected different names of "
            "letters, digits, dots and dashes, in order, each with a P-384 key of its own."
        )
    return found


# ---- bytes ---------------------------------------------------------------------------------------


def encode(found: MemberList) -> bytes:
    """Write a list as JSON, always the same for the same list."""
    facts = {
        "version": VERSION,
        "number": found.number,
        "previous": found.previous.hex(),
        "members": {member.name: member.public.hex() for member in found.members},
        "approvals": {name: found.approvals[name].hex() for name in sorted(found.approvals)},
    }
    return json.dumps(facts, indent=1).encode() + b"\n"


def read(data: bytes, where: str = "the list of members") -> MemberList:
    """Read a list; anything that `encode` would not have written is a `RecordError`."""
    try:
        if len(data) > MOST_BYTES:
            raise ValueError("too long")
        facts: dict[str, Any] = json_value(data, where, RecordError)
        number, previous = facts["number"], bytes.fromhex(facts["previous"])
        members = [Member(name, bytes.fromhex(key)) for name, key in facts["members"].items()]
        approvals = {name: bytes.fromhex(s) for name, s in facts["approvals"].items()}
        if type(number) is not int or not 0 <= number < 2**32 or len(previous) != 32:
            raise ValueError("a number that makes no sense")
        if any(len(signature) != SIGNATURE_BYTES for signature in approvals.values()):
            raise ValueError("an approval of another length")
        found = MemberList(number, tuple(members), previous, approvals)
        if encode(found) != data:
            raise ValueError("not written by fedlm")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise RecordError(f"{where} is damaged: {str(error)[:100]}.") from None
    return _well_formed(found)
