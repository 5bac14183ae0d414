"""Commands of a federation: what they make, and one sentence where they cannot."""

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
