"""Commands of a federation: what they make, and one sentence where they cannot."""

import socket

import pytest

from tests.cli.test_bad_input import refused


def test_init_makes_kits(run_cli, tmp_path):
    made = run_cli(
        *("federation", "init", "fed", "--host", "fed.example.org", "--nodes", "a, b", "--json")
    )
    assert made.code == 0, made.stderr
    assert made.json == {
        "home": "fed",
        "address": "fed.example.org:9443",
        "kits": {"a": "fed/nodes/a", "b": "fed/nodes/b"},
    }
    assert (tmp_path / "fed" / "authority" / "ca.pem").is_file()
    again = run_cli("federation", "init", "fed", "--host", "x.org", "--nodes", "a")
    refused(again, "HOME = 'fed'", "does not exist yet")
    (tmp_path / "fed" / "federation.toml").write_text("quorom = 1.0\n")
    refused(run_cli("federation", "serve", "fed"), "federation.toml", "'quorum'")


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    "command, words",
    [
        (("init", "fed", "--host", "a.org", "--nodes", "A"), ("--nodes = 'A'", "small letters")),
        (("init", "fed", "--host", "a.org", "--nodes", "a,a"), ("--nodes", "different names")),
        (("add-node", "nowhere", "a", "--key", "x"), ("nowhere is not a federation",)),
        (("remove-node", "nowhere", "a"), ("nowhere is not a federation",)),
        (("renew", "nowhere"), ("nowhere is not a federation",)),
        (("rotate", "nowhere"), ("nowhere is not a federation",)),
        (("history", "nowhere"), ("nowhere is not a federation",)),
        (("init", "fed", "--host", "a.org", "--nodes", "a", "--quorum", "2"), ("quorum = 2.0",)),
        (("serve", "nowhere"), ("nowhere is not a federation", "federation init")),
        (("train", "nowhere", "tiny.toml"), ("nowhere is not a federation",)),
        (("status", "nowhere"), ("nowhere is not a federation",)),
        (("doctor", "nowhere"), ("nowhere is not a federation",)),
    ],
)
def test_what_is_no_federation(run_cli, tiny_recipe, command, words):
    refused(run_cli("federation", *command), *words)


def test_a_server_that_cannot_start_says_why(run_cli, tmp_path, monkeypatch):
    from fedlm.deploy import certificates, membership, workspace

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        made = workspace.init(tmp_path / "fed", "fed", ["x.org"], port, [], bind="127.0.0.1")
        refused(run_cli("federation", "serve", "fed"), f"port = {port}", "another server")
    made.certificate_key.write_text("no key")
    refused(run_cli("federation", "serve", "fed"), "no certificate and its key", "renew")
    monkeypatch.setattr(certificates, "SERVER_DAYS", 0)
    membership.renew_server(made)
    refused(run_cli("federation", "serve", "fed"), "today is", "federation renew")


def test_keys_are_made_at_nodes(run_cli, tmp_path):
    """The documented way, command by command."""
    assert run_cli("federation", "init", "fed", "--host", "fed.example.org").code == 0
    node = run_cli("node", "init", "kit", "--name", "north", "--json")
    assert node.json == {"kit": "kit", "name": "north", "key": "kit/node.pub"}
    key = ("--key", "kit/node.pub")
    added = run_cli("federation", "add-node", "fed", "north", *key, "--json").json
    taken = run_cli("node", "accept", "kit", added["invitation"], "--json").json
    assert taken["authority"] == added["authority"] and taken["federation"] == "fed"
    refused(run_cli("federation", "add-node", "fed", "north", *key), "not taken", "rotate")
    refused(run_cli("federation", "rotate", "fed", "north"), "--key", "fedlm node rotate")
    assert run_cli("federation", "renew", "fed", "--host", "new.example.org").code == 0
    assert run_cli("node", "accept", "kit", "fed/nodes/north").code == 0, "a folder is taken too"
    assert "new.example.org" in (tmp_path / "kit" / "node.toml").read_text()
    following = run_cli("node", "rotate", "kit", "--json").json["key"]
    assert run_cli("federation", "rotate", "fed", "north", "--key", following).code == 0
    assert run_cli("node", "accept", "kit", "fed/nodes/north").code == 0
    assert run_cli("federation", "rotate", "fed").code == 0
    assert run_cli("federation", "remove-node", "fed", "north").code == 0
    refused(run_cli("federation", "remove-node", "fed", "north"), "north is no node of fed")
    told = run_cli("federation", "history", "fed", "--json").json["history"]
    actions = [entry["action"] for entry in told]
    assert actions[:2] == ["init", "add-node"] and actions[-1] == "remove-node"
    assert run_cli("federation", "history", "fed").code == 0


def test_what_is_no_kit(run_cli):
    refused(
        run_cli("node", "join", "nowhere", "--store", "x", "--devices", 2),
        "nowhere is not a node's kit",
    )
    refused(run_cli("node", "relay", "nowhere", "--home", "x"), "nowhere is not a node's kit")


def test_a_tokenizer_is_taken_over(run_cli, tiny_text):
    first = run_cli("prepare", tiny_text, "--out", "one", "--vocabulary", 30, "--json").json
    other = run_cli("prepare", tiny_text, "--out", "two", "--like", "one", "--json").json
    assert other["tokenizer_sha256"] == first["tokenizer_sha256"]
    assert other["settings"]["vocabulary"] == 30


def test_a_demonstration_of_its_own_has_nothing_to_change(run_cli):
    """The settings were left out without a word."""
    found = run_cli("federation", "demo", "--set", "server.rounds=1")
    assert found.code == 2 and "--set = 'server.rounds=1': expected a RECIPE" in found.stderr


def test_a_demonstration_that_was_stopped_compares_nothing(run_cli, monkeypatch):
    stopped = {"networked": {"rounds": 3}, "simulated": None, "difference": None}
    monkeypatch.setattr("fedlm.deploy.demo.demo", lambda *args, **options: stopped)
    monkeypatch.setattr("fedlm.cli.federation.use_devices", lambda devices: None)
    found = run_cli("federation", "demo", "--json")
    assert found.code == 130 and not found.stdout
    assert "was stopped" in found.stderr
