"""A certificate is good for the names it was asked for, under one authority, and nothing else."""

import stat

import pytest

from fedlm.core.errors import ConfigError
from fedlm.deploy import certificates, doctor, workspace
from fedlm.deploy.flower.line import Line


def test_names_and_addresses_are_those_asked_for():
    made = certificates.server(certificates.authority("a"), ["fed.example.org", "10.0.0.7", "::1"])
    assert certificates.names_of(made.certificate) == ["fed.example.org", "10.0.0.7", "::1"]


def test_another_authority_did_not_sign():
    one, other = certificates.authority("a"), certificates.authority("a")
    made = certificates.server(one, ["localhost"]).certificate
    assert certificates.signed_by(made, one.certificate)
    assert not certificates.signed_by(made, other.certificate)


@pytest.mark.parametrize("name", ["köln.example", ""])
def test_a_name_that_is_none_is_refused(name):
    with pytest.raises(ConfigError, match="--host"):
        certificates.server(certificates.authority("a"), [name])


def test_a_long_name_is_cut_where_the_standard_wants_it():
    """It was cut to 64 letters, which may be more than 64 bytes."""
    made = certificates.authority("é" * 300)
    assert certificates.signed_by(made.certificate, made.certificate)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    path = tmp_path_factory.mktemp("workspace") / "fed"
    return workspace.init(path, "fed", ["fed.example.org"], 9443, ["north", "south"])


def test_a_kit_holds_what_its_node_needs(made):
    kit = made.kit("north")
    assert {p.name for p in kit.path.iterdir()} == {
        "ca.pem",
        "node.key",
        "node.pem",
        "node.pub",
        "node.toml",
        "policy.toml",
    }
    assert kit.settings.host == "fed.example.org" and kit.authority == made.authority.read_bytes()
    assert sorted(made.nodes()) == ["north", "south"]


def test_private_files_are_private(made):
    private = [*made.path.rglob("*.key")]
    assert len(private) == 5
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in private)


def test_the_operator_reaches_the_server_from_its_own_machine(made):
    assert "127.0.0.1" in certificates.names_of(made.certificate.read_bytes())


@pytest.mark.parametrize("nodes", [["a", "a"], ["A"], ["../x"], ["-a"]])
def test_names_of_nodes_are_checked(tmp_path, nodes):
    with pytest.raises(ConfigError, match="--nodes"):
        workspace.init(tmp_path / "fed", "fed", ["localhost"], 9443, nodes)


def test_a_folder_is_not_written_over(made):
    with pytest.raises(ConfigError, match="does not exist yet"):
        workspace.init(made.path, "fed", ["localhost"], 9443, ["a"])


def test_the_doctor_finds_open_keys_and_wrong_names(made, tmp_path):
    certificate = made.certificate.read_bytes()
    assert doctor.checked_names(certificate, "fed.example.org").well
    wrong = doctor.checked_names(certificate, "other.example.org")
    assert not wrong.well and "--host other.example.org" in wrong.way_out
    kit = made.kit("south")
    (kit.path / "node.key").chmod(0o644)
    found = {check.what: check for check in doctor._kit(kit)}
    assert not found["node.key"].well and "chmod 600" in found["node.key"].way_out
    assert found["node key"].well and found["authority dates"].well


def test_the_doctor_reads_clocks():
    import datetime as dt

    now = dt.datetime(2026, 5, 1, 12, 0, 30, tzinfo=dt.UTC)
    told = "Fri, 01 May 2026 12:00:{:02d} GMT"
    assert doctor.clock(told.format(28), now).well
    assert not doctor.clock(told.format(5), now).well


def test_the_doctor_finds_a_closed_port(made):
    from fedlm.deploy.processes import free_port

    (check,) = doctor._reach("127.0.0.1", free_port(), made.authority.read_bytes())
    assert not check.well and "federation serve" in check.way_out


def test_a_server_with_an_expired_certificate_does_not_start(run_cli, monkeypatch, tmp_path):
    monkeypatch.setattr(certificates, "SERVER_DAYS", 0)  # it ends now
    workspace.init(tmp_path / "fed", "fed", ["localhost"], 9443, ["north"])
    for damage, words in (
        (None, "cert.pem is valid from"),
        (b"not PEM", "cert.pem is not a certificate"),
    ):
        if damage is not None:
            (tmp_path / "fed" / "server" / "cert.pem").write_bytes(damage)
        result = run_cli("federation", "serve", "fed")
        assert result.code == 2 and words in result.stderr and "Traceback" not in result.stderr


@pytest.mark.parametrize("damaged", [b"\xff\xfe", b"short", b""])
def test_a_damaged_control_key_is_named(tmp_path, damaged):
    """`fedlm federation status` ended in a traceback."""
    made = workspace.init(tmp_path / "fed", "fed", ["localhost"], 9443, ["north"])
    assert len(made.control_secret) == 64
    made.control_key.write_bytes(damaged)
    with pytest.raises(ConfigError, match=r"control\.key"):
        _ = made.control_secret


def test_words_beside_a_certificate_are_not_read():
    """A node accepted an invitation whose authority began with a comment, and could not join."""
    made = certificates.authority("fed")
    Line("localhost", 9443, "# für uns\n".encode() + made.certificate, lambda *request: {})
