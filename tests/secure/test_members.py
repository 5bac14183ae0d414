"""The list of members: who must approve a change, and what a server cannot do to it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedlm.core.errors import RecordError
from fedlm.secure import members as lists
from fedlm.secure.keys import IdentityKey
from fedlm.secure.terms import Member
from tests.secure.federation import identities, people

STRANGER = IdentityKey.generate()
OLD = lists.first(people(5)[0])
NEW = Member("node-9", STRANGER.public)


def approved(change, names):
    who = dict(zip((m.name for m in OLD.members), identities(), strict=True))
    for name in names:
        change = change.approved(name, who[name])
    return change


NAMES = [member.name for member in OLD.members]


def test_all_who_stay_approve_and_the_list_goes_on():
    joined = approved(lists.proposed(OLD, [*OLD.members, NEW]), NAMES)
    lists.check_next(OLD, joined)
    left = approved(lists.proposed(OLD, OLD.members[:4]), NAMES[:4])
    lists.check_next(OLD, left)  # the one that leaves need not sign
    assert joined.fingerprint != OLD.fingerprint and len(OLD.fingerprint.split()) == 8


@pytest.mark.parametrize("missing", range(5))
def test_one_member_that_stays_and_did_not_approve_is_enough_to_refuse(missing):
    some = [name for place, name in enumerate(NAMES) if place != missing]
    change = approved(lists.proposed(OLD, [*OLD.members, NEW]), some)
    with pytest.raises(RecordError, match=f"not approved by {NAMES[missing]}"):
        lists.check_next(OLD, change)


def test_a_server_cannot_add_a_node_or_exchange_a_key():
    forged = lists.proposed(OLD, [*OLD.members, NEW])
    for name in [*NAMES, "node-9"]:
        with pytest.raises(RecordError, match="did not sign"):
            lists.check_next(OLD, forged.approved(name, STRANGER))
    exchanged = [Member(NAMES[0], STRANGER.public), *OLD.members[1:]]
    change = approved(lists.proposed(OLD, exchanged), NAMES[1:])
    with pytest.raises(RecordError, match="not approved by node-0"):
        lists.check_next(OLD, change)
    with pytest.raises(RecordError, match="did not sign"):
        lists.check_next(OLD, change.approved(NAMES[0], STRANGER))
    lists.check_next(OLD, approved(change, NAMES[:1]))  # with the old key


def test_few_cannot_leave_out_many():
    two = approved(lists.proposed(OLD, OLD.members[:2]), NAMES[:2])
    with pytest.raises(RecordError, match="approved by 2 of 5: more than half"):
        lists.check_next(OLD, two)
    lists.check_next(OLD, approved(lists.proposed(OLD, OLD.members[:2]), NAMES[:3]))


def test_approvals_are_for_one_list_and_lists_follow_each_other():
    joined = approved(lists.proposed(OLD, [*OLD.members, NEW]), NAMES)
    other = lists.MemberList(1, OLD.members[:4], OLD.digest, joined.approvals)
    with pytest.raises(RecordError, match="did not sign"):
        lists.check_next(OLD, other)
    again = lists.proposed(joined, OLD.members)
    for before, after in ((OLD, again), (joined, joined), (joined, OLD)):
        with pytest.raises(RecordError, match="does not follow"):
            lists.check_next(before, after)


@pytest.mark.parametrize(
    "wrong",
    [
        [Member("a b", STRANGER.public)],
        [Member("../x", STRANGER.public)],
        [Member("x", STRANGER.public), Member("x", OLD.members[0].public)],
        [Member("x", STRANGER.public), Member("y", STRANGER.public)],
        [Member("x", b"\x05" + bytes(48))],
        [],
    ],
)
def test_a_list_that_makes_no_sense_is_refused(wrong):
    with pytest.raises(RecordError, match="not well-formed"):
        lists.first(wrong)


def test_a_list_comes_back_from_its_bytes_and_from_no_others():
    made = approved(lists.proposed(OLD, [*OLD.members, NEW]), NAMES)
    data = lists.encode(made)
    assert lists.read(data) == made
    for wrong in (data[:-1], data + b" ", data.replace(b"node-9", b"node-0"), b"[]", b"\xff", b""):
        with pytest.raises(RecordError):
            lists.read(wrong)


@given(st.binary(max_size=100))
def test_noise_is_no_list(data):
    with pytest.raises(RecordError, match="list of members"):
        lists.read(data)
