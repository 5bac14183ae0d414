"""Nodes make their own keys, and come and go; who did what is on record."""

import datetime as dt
import json
import stat

import pytest
from cryptography import x509

from fedlm.core.errors import ConfigError, RecordError, WireError
from fedlm.deploy import certificates, doctor, history, membership, workspace
from fedlm.deploy.membership import Identities
from fedlm.deploy.signing import key_id


@pytest.fixture
def home(tmp_path):
    return workspace.init(tmp_path / "fed", "fed", ["fed.example.org"], 9443, [])


def invited(home, tmp_path, name="north"):
    kit = membership.init_kit(tmp_path / f"kit-{name}", name)
    public = (kit.path / "node.pub").read_bytes()
    return kit, membership.add_node(home, name, public)


def test_a_private_key_never_leaves_its_node(home, tmp_path):
    kit, invitation = invited(home, tmp_path)
    private = (kit.path / "node.key").read_bytes()
    assert stat.S_IMODE((kit.path / "node.key").stat().st_mode) == 0o600
    taken = membership.accept(kit, invitation)
    assert (taken.name, taken.host, taken.port) == ("north", "fed.example.org", 9443)
    assert kit.settings.federation == "fed" and kit.authority == home.authority.read_bytes()
    assert workspace.Kit.existing(kit.path).key == private
    files = [path for path in home.path.rglob("*") if path.is_file()]
    assert files and not any(private in path.read_bytes() for path in files)


def test_only_the_nodes_of_the_workspace_count_and_at_once(home, tmp_path):
    identities = Identities(home, seconds=0.0)
    assert identities() == {}
    kit, _ = invited(home, tmp_path)
    own = key_id((kit.path / "node.pub").read_bytes())
    assert identities()[own].name == "north"
    year = dt.timedelta(days=365).total_seconds()
    assert year < identities()[own].until - dt.datetime.now().timestamp() < 3 * year
    membership.remove_node(home, "north")
    assert identities() == {} and home.nodes() == {}
    (home.path / "nodes" / "half").mkdir()  # without a key
    assert identities() == {}


def test_a_key_is_rotated_without_a_gap_at_the_node(home, tmp_path):
    kit, invitation = invited(home, tmp_path)
    membership.accept(kit, invitation)
    before = kit.key
    public = membership.rotate_kit(kit)
    assert kit.key == before, "the old one is used until the operator has taken the next"
    again = membership.rotate_node(home, "north", public.read_bytes())
    assert [i.name for i in Identities(home)().values()] == ["north"]
    assert key_id(public.read_bytes()) in Identities(home)()
    membership.accept(kit, again)
    assert kit.key != before and not public.exists()
    assert certificates.public_pem(certificates.load_private(kit.key)) == home.nodes()["north"]


def test_a_renewed_certificate_has_a_later_end_and_the_same_key(home, tmp_path):
    kit, invitation = invited(home, tmp_path)
    membership.accept(kit, invitation)
    old = (kit.path / "node.pem").read_bytes()
    membership.accept(kit, membership.renew_node(home, "north"))
    new = (kit.path / "node.pem").read_bytes()
    assert old != new and certificates.public_key_of(old) == certificates.public_key_of(new)
    server = home.certificate.read_bytes(), home.certificate_key.read_bytes()
    membership.renew_server(home)
    assert home.certificate.read_bytes() != server[0]
    assert home.certificate_key.read_bytes() != server[1]
    assert certificates.names_of(home.certificate.read_bytes()) == certificates.names_of(server[0])
    assert stat.S_IMODE(home.certificate_key.stat().st_mode) == 0o600
    control = home.control_key.read_text()
    membership.rotate_control(home)
    assert home.control_key.read_text() != control


def test_a_server_moves_to_another_name(home, tmp_path):
    kit, invitation = invited(home, tmp_path)
    membership.accept(kit, invitation)
    membership.renew_server(home, ["new.example.org"])
    membership.accept(kit, membership.renew_node(home, "north"))
    assert kit.settings.host == home.settings.host == "new.example.org"
    names = certificates.names_of(home.certificate.read_bytes())
    assert "new.example.org" in names and "fed.example.org" not in names and "127.0.0.1" in names


def test_an_invitation_is_for_one_key_and_of_its_authority(home, tmp_path):
    _, invitation = invited(home, tmp_path)
    other = membership.init_kit(tmp_path / "other", "north")
    with pytest.raises(ConfigError, match="for another key"):
        membership.accept(other, invitation)
    text = invitation.read_text()
    foreign = certificates.authority("fed").certificate.decode()
    own = home.authority.read_text()
    forged = tmp_path / "forged.toml"
    forged.write_text(text.replace(json.dumps(own)[1:-1], json.dumps(foreign)[1:-1]))
    if forged.read_text() == text:  # written as a text of several lines
        forged.write_text(text.replace(own.strip(), foreign.strip()))
    assert forged.read_text() != text
    with pytest.raises(ConfigError, match="not signed by the authority"):
        membership.accept(other, forged)


@pytest.mark.parametrize(
    "name, key, words",
    [
        ("A", None, "small letters"),
        ("../x", None, "small letters"),
        ("north", None, "not taken"),
        ("south", "north", "a key of its own"),
        ("south", b"no key", "node.pub"),
    ],
)
def test_what_cannot_be_added(home, tmp_path, name, key, words):
    kit, _ = invited(home, tmp_path)
    public = certificates.node_key()[1] if key is None else key
    if key == "north":
        public = (kit.path / "node.pub").read_bytes()
    with pytest.raises(ConfigError, match=words):
        membership.add_node(home, name, public)
    assert list(home.nodes()) == ["north"]


def test_an_authority_that_is_kept_offline_is_asked_for(home, tmp_path):
    (home.path / "authority" / "ca.key").rename(tmp_path / "ca.key")
    with pytest.raises(ConfigError, match="bring the authority's key back"):
        membership.add_node(home, "north", certificates.node_key()[1])
    assert home.nodes() == {}


def test_who_did_what_is_on_record_and_shows_changes(home, tmp_path):
    invited(home, tmp_path)
    membership.renew_node(home, "north")
    membership.remove_node(home, "north")
    found = history.read(home.history)
    assert [e["action"] for e in found] == ["init", "add-node", "renew", "remove-node"]
    assert all(entry["user"] and entry["time"] for entry in found)
    assert stat.S_IMODE(home.history.stat().st_mode) == 0o600
    lines = home.history.read_text().splitlines(keepends=True)
    for changed in (lines[:1] + lines[2:], [lines[0].replace("fed", "fad", 1), *lines[1:]]):
        home.history.write_text("".join(changed))
        with pytest.raises(RecordError, match="line 2 does not follow"):
            history.read(home.history)


@pytest.mark.parametrize("pem", [b"", b"\xff", b"-----BEGIN CERTIFICATE-----\nAAAA\n"])
def test_a_damaged_certificate_is_found_and_named(home, pem):
    """Found by `make fuzz`: the doctor and renewals died of it."""
    for reader in (certificates.names_of, certificates.public_key_of, certificates.until):
        with pytest.raises(ConfigError, match="is not a certificate"):
            reader(pem)
    home.certificate.write_bytes(pem)
    with pytest.raises(ConfigError, match="is not a certificate"):
        membership.renew_server(home)
    found = {check.what: check for check in doctor._workspace(home)}
    assert not found["certificate"].well and "renew" in found["certificate"].way_out
    assert "signature" not in found and found["history"].well
    assert not doctor.handshake("localhost", 1, pem)[0][0].well


@pytest.mark.parametrize("line", ['{"after": "%s"}', '{"after": "%s", "time": 1, "user": []}'])
def test_a_history_without_its_facts_is_refused(home, line):
    home.history.write_text(line % history.START + "\n")
    with pytest.raises(RecordError, match="line 1 does not follow"):
        history.read(home.history)


@pytest.mark.parametrize(
    "told", ["{}", "[]", '{"name": "a", "fedlm": "0", "protocol": 1e400}', '{"reason": []}']
)
def test_a_server_that_answers_nonsense_is_refused(told):
    """Found by `make fuzz`: an answer without a name ended the doctor."""
    with pytest.raises(WireError, match="the answer is damaged"):
        doctor.read_answer(200, told.encode())


def test_a_node_certificate_signs_nothing_and_serves_nobody(home, tmp_path):
    invited(home, tmp_path)
    pem = (home.kit("north").path / "node.pem").read_bytes()
    found = x509.load_pem_x509_certificate(pem)
    assert not found.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    purpose = found.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert [use._name for use in purpose] == ["clientAuth"]


def test_the_doctor_finds_what_is_about_to_end_and_what_was_copied(home, tmp_path, monkeypatch):
    invited(home, tmp_path)
    well = {check.what: check for check in doctor._workspace(home)}
    assert all(check.well for check in well.values()) and "certificate of north dates" in well
    monkeypatch.setattr(certificates, "NODE_DAYS", 20)
    monkeypatch.setattr(certificates, "SERVER_DAYS", 0)
    membership.renew_node(home, "north")
    membership.renew_server(home)
    home.sightings.write_text('{"north": 1.0}')
    home.history.write_text(home.history.read_text().replace("init", "unit", 1))
    monkeypatch.setattr(doctor, "LEAST_FREE", 1 << 60)
    sick = {check.what: check for check in doctor._workspace(home) if not check.well}
    assert sick.keys() == {
        "certificate dates",
        "certificate of north dates",
        "kits",
        "history",
        "disk",
    }
    assert "ends in 19 days" in sick["certificate of north dates"].found
    assert sick["certificate of north dates"].way_out.endswith(f"renew {home.path} north")
    assert "rotate" in sick["kits"].way_out
