"""The list of members of secure sums: an operator alone changes nothing."""

import json

import pytest

from fedlm.core.errors import ConfigError, RecordError
from fedlm.deploy import member_list, membership, workspace
from fedlm.secure import members
from tests.conftest import call

NAMES = ("east", "north", "south")


@pytest.fixture
def fed(tmp_path):
    made = workspace.init(tmp_path / "fed", "fed", ["127.0.0.1"], 9443, NAMES)
    file, _ = member_list.propose(made)
    for name in NAMES:
        assert member_list.approve(made.kit(name), file).done == "taken"
    return made


def joined(fed, tmp_path, name="west"):
    """Let another node join the federation, but not its list."""
    kit = membership.init_kit(tmp_path / name, name)
    file = membership.add_node(fed, name, (kit.path / "node.pub").read_bytes())
    membership.accept(kit, file)
    return kit


def test_a_change_counts_once_all_members_that_stay_have_signed_it(fed, tmp_path):
    newcomer = joined(fed, tmp_path)
    proposal, _ = member_list.propose(fed)
    approvals = []
    for name in NAMES:
        found = member_list.approve(fed.kit(name), proposal)
        assert (found.done, found.added, found.removed) == ("signed", ("west",), ())
        approvals.append(found.file.rename(tmp_path / f"{name}.json"))
    before = fed.members.read_bytes()
    found, missing = member_list.collect(fed, approvals[:2])
    assert missing == ("south",) and fed.members.read_bytes() == before
    found, missing = member_list.collect(fed, approvals[2:])
    assert not missing and found.number == 1
    for name in NAMES:
        assert member_list.approve(fed.kit(name), fed.members).done == "taken"
        assert member_list.approve(fed.kit(name), fed.members).done == "kept"
    taken = member_list.approve(newcomer, fed.members, found.fingerprint)
    assert taken.done == "taken" and len(taken.list.members) == 4
    with pytest.raises(ConfigError, match="nothing to propose"):
        member_list.propose(fed)


def test_an_operator_alone_cannot_add_a_member(fed, tmp_path):
    """Signed by nobody, by a few, or in the name of others: a kit keeps its list."""
    kit, held = fed.kit("north"), fed.kit("north").members.read_bytes()
    joined(fed, tmp_path)
    proposal, made = member_list.propose(fed)
    stranger = member_list.IdentityKey.generate()
    forged = made
    for name in NAMES:
        forged = forged.approved(name, stranger)
    for sent in (made, forged):
        proposal.write_bytes(members.encode(sent))
        found = member_list.approve(kit, proposal)
        assert found.done == "signed" and kit.members.read_bytes() == held
        assert set(found.list.approvals) == {"north"}
    fed.members.write_bytes(held)
    with pytest.raises(RecordError, match="its identity in the list before did not sign"):
        member_list.collect(fed, [])
    other = members.first(made.members)  # another first list
    proposal.write_bytes(members.encode(other))
    with pytest.raises(RecordError, match="list 0 of the members does not follow list 0"):
        member_list.approve(kit, proposal)


def test_a_first_list_is_for_its_own_federation_and_fingerprint(fed, tmp_path):
    kit = joined(fed, tmp_path)
    with pytest.raises(ConfigError, match="does not list west with the key"):
        member_list.approve(kit, fed.members)
    with pytest.raises(ConfigError, match="--fingerprint = 'abcd': the list in"):
        member_list.approve(fed.kit("north"), fed.members, "abcd")
    with pytest.raises(ConfigError, match="no such file"):
        member_list.approve(kit, tmp_path / "nothing.json")


def test_an_approval_of_another_list_is_refused(fed, tmp_path):
    joined(fed, tmp_path)
    proposal, _ = member_list.propose(fed)
    sent = member_list.approve(fed.kit("north"), proposal).file
    joined(fed, tmp_path, "zeta")
    member_list.propose(fed)
    with pytest.raises(ConfigError, match="approves another list"):
        member_list.collect(fed, [sent])


def test_commands_show_propose_and_approve(fed, tmp_path):
    shown = call(tmp_path, "federation", "members", "fed", "--json")
    assert shown.code == 0 and shown.json["members"] == list(NAMES)
    joined(fed, tmp_path)
    proposed = call(tmp_path, "federation", "members", "fed", "--propose", "--json").json
    assert proposed["number"] == 1
    files = []
    for name in NAMES:
        kit = fed.kit(name).path
        done = call(tmp_path, "node", "approve", kit, proposed["file"], "--json").json
        assert done["done"] == "signed" and done["added"] == ["west"]
        files.append(done["file"])
    assert call(tmp_path, "federation", "approve", "fed", *files, "--json").json["missing"] == []
    said = call(tmp_path, "node", "approve", fed.kit("east").path, fed.members)
    assert "list 1, taken: east, north, south, west" in said.stdout
    bad = call(tmp_path, "node", "approve", fed.kit("east").path, "nothing.json")
    assert bad.code == 2 and "Traceback" not in bad.stderr
    damaged = json.loads(fed.members.read_text())
    fed.members.write_text(json.dumps(damaged | {"number": -1}))
    assert call(tmp_path, "federation", "members", "fed").code == 2
