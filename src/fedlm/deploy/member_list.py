"""Who takes part in secure sums: a list that changes only if its members approve.

In:       a workspace with the public keys of its nodes; kits; files that operator and nodes send.
Out:      `members.json` at the operator and in each kit; proposals and approvals.
Promise:  a kit takes the first list that its owner gives it, and afterwards only lists that follow
          and that the members of the list before signed; so an operator alone adds nobody and
          exchanges no key.
Not here: what makes a list valid (`secure/members.py`), how files travel.

    operator    fedlm federation members HOME --propose        writes members.json, the first list
    node        fedlm node approve KIT members.json            takes it; compare the fingerprint

    operator    fedlm federation members HOME --propose        writes members.proposed.json
    node        fedlm node approve KIT members.proposed.json   signs it: approval.json goes back
    operator    fedlm federation approve HOME approval.json... once all have signed: members.json
    node        fedlm node approve KIT members.json            takes it
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from fedlm.core.durable import write_atomically
from fedlm.core.errors import ConfigError, RecordError
from fedlm.deploy import history
from fedlm.deploy.workspace import Kit, Workspace
from fedlm.secure import members
from fedlm.secure.keys import IdentityKey, public_from_pem
from fedlm.secure.members import MemberList
from fedlm.secure.terms import Member

PROPOSED = "members.proposed.json"
APPROVAL = "approval.json"


class Approval(NamedTuple):
    """What `fedlm node approve` did with a list."""

    done: str  # "taken", "signed" or "kept": it has the list already
    list: MemberList
    file: Path  # the kit's list, or the approval to send back
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    rekeyed: tuple[str, ...] = ()


def read_list(file: Path) -> MemberList | None:
    """Read a list; None if there is none."""
    try:
        return members.read(file.read_bytes(), str(file)) if file.exists() else None
    except OSError as error:
        raise RecordError(f"{file} is not readable: {error.strerror}.") from None


def given_list(file: Path) -> MemberList:
    """Read a list that somebody sent."""
    found = read_list(file)
    if found is None:
        raise ConfigError(f"{file}: there is no such file; expected a list of members.")
    return found


def current(workspace: Workspace) -> MemberList:
    """Return the list of a federation that makes secure sums."""
    found = read_list(workspace.members)
    if found is None:
        raise ConfigError(
            f"{workspace.members} is missing: secure sums need a list of members. Make it with "
            f"fedlm federation members {workspace.path} --propose, and let each node approve it."
        )
    return found


# ---- at the operator -----------------------------------------------------------------------


def propose(workspace: Workspace) -> tuple[Path, MemberList]:
    """Write the list of all nodes that may join: the first one, or the next, to be approved."""
    wanted = [Member(name, public_from_pem(key)) for name, key in workspace.nodes().items()]
    before = read_list(workspace.members)
    if before is None:
        file, made = workspace.members, members.first(wanted)
    elif tuple(sorted(wanted)) == before.members:
        raise ConfigError(f"{workspace.members} lists all nodes already: nothing to propose.")
    else:
        file, made = workspace.path / PROPOSED, members.proposed(before, wanted)
    write_atomically(file, members.encode(made))
    history.note(workspace.history, "members", number=made.number, list=made.digest.hex())
    return file, made


def collect(workspace: Workspace, files: Iterable[Path]) -> tuple[MemberList, tuple[str, ...]]:
    """Add approvals to a proposal; once all have signed it becomes the list.

    Returns:
      The list, and the members whose approval is missing.
    """
    before, file = current(workspace), workspace.path / PROPOSED
    proposal = given_list(file)
    for path in files:
        sent = given_list(path)
        if sent.digest != proposal.digest:
            raise ConfigError(
                f"{path} approves another list than {file}: ask its node to approve this one."
            )
        proposal = replace(proposal, approvals={**proposal.approvals, **sent.approvals})
    staying = {m.name for m in before.members} & {m.name for m in proposal.members}
    missing = tuple(sorted(staying - proposal.approvals.keys()))
    if not missing:
        members.check_next(before, proposal)
        kept = workspace.path / "removed" / f"members.{before.number}.json"
        kept.parent.mkdir(exist_ok=True)
        write_atomically(kept, members.encode(before))
        write_atomically(workspace.members, members.encode(proposal))
        file.unlink()
        history.note(workspace.history, "approve", number=proposal.number)
    else:
        write_atomically(file, members.encode(proposal))
    return proposal, missing


# ---- at the node ---------------------------------------------------------------------------


def approve(kit: Kit, file: Path, fingerprint: str = "") -> Approval:
    """Take the first list, or one that all have signed; sign one that is proposed.

    With `fingerprint`, as another member tells it, a list with another one is refused.
    """
    sent, held = given_list(file), read_list(kit.members)
    if fingerprint and "".join(fingerprint.split()).lower() != sent.fingerprint.replace(" ", ""):
        raise ConfigError(
            f"--fingerprint = {fingerprint!r}: the list in {file} has {sent.fingerprint!r}. Ask "
            "the other members which list they have."
        )
    name, identity = kit.settings.name, IdentityKey.from_pem(kit.key)
    own = {member.name: member.public for member in sent.members}.get(name)
    if held is None and own != identity.public:
        raise ConfigError(
            f"{file} does not list {name} with the key of {kit.path}: it is of another federation, "
            "or somebody else has this name there."
        )
    if held is None or sent.digest == held.digest:
        if held is None:
            write_atomically(kit.members, members.encode(sent))
        return Approval("taken" if held is None else "kept", sent, kit.members)
    try:
        members.check_next(held, sent)
    except RecordError:
        return _signed(kit, name, identity, held, sent)
    write_atomically(kit.members, members.encode(sent))
    return Approval("taken", sent, kit.members, *_changes(held, sent))


def _signed(
    kit: Kit, name: str, identity: IdentityKey, held: MemberList, sent: MemberList
) -> Approval:
    """Sign a list that follows the kit's own; what others signed stays in the approval."""
    if sent.number != held.number + 1 or sent.previous != held.digest:
        members.check_next(held, sent)  # says that it does not follow
    known = {member.name: member.public for member in held.members}
    if known.get(name) != identity.public:
        raise ConfigError(
            f"{kit.members} does not list {name} with the key of {kit.path}: approve changes "
            "before another key is taken into use."
        )
    signed = replace(sent, approvals={}).approved(name, identity)
    file = kit.path / APPROVAL
    write_atomically(file, members.encode(signed))
    return Approval("signed", signed, file, *_changes(held, sent))


def _changes(
    before: MemberList, after: MemberList
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Return who is new, who is gone, and who has another key."""
    old = {member.name: member.public for member in before.members}
    new = {member.name: member.public for member in after.members}
    other = tuple(sorted(n for n in old.keys() & new.keys() if old[n] != new[n]))
    return tuple(sorted(new.keys() - old.keys())), tuple(sorted(old.keys() - new.keys())), other
