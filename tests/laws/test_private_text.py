"""What leaves a private run tells nothing exact about one client's text, and says what it shows."""

import hashlib
import json

import pytest

from fedlm.core.errors import RecordError
from fedlm.corpus.split import held_out_clients
from fedlm.privacy.cost import epsilon_of_rho, rho_of
from fedlm.privacy.ledger import Ledger, spent_of
from fedlm.privacy.release import HEADER
from fedlm.recipe.build import build
from fedlm.recipe.settings import dump, load
from fedlm.record.facts import facts_of
from fedlm.training import check_same, header_of
from fedlm.training.begin import begin
from tests.conftest import write_tiny

PRIVATE = (
    "server.sampling=poisson",
    "privacy.mechanism=gaussian",
    "privacy.noise_multiplier=1.0",
    "server.rounds=1",
)


def change_a_client(text, said):
    """Replaces the text of the first training client."""
    entries = [json.loads(line) for line in text.read_text().splitlines()]
    test = held_out_clients([entry["client"] for entry in entries], 0.1, 0)
    found = next(entry for entry in entries if entry["client"] not in test)
    found["text"] = said
    text.write_text("".join(json.dumps(entry) + "\n" for entry in entries))


def begun_at(folder, *changes):
    """Begins the run of a folder, and plays no round."""
    recipe = load(folder / "tiny.toml", (*PRIVATE, *changes))
    run = build(recipe, folder / "stores", out=folder / "run")
    begin(run, run.record.claim(dump(run.recipe), resume=False), lambda text: None)
    return run


def test_headers_of_texts_that_differ_in_one_client_differ_in_the_salted_hash_alone(tmp_path):
    headers = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write_tiny(tmp_path / name)
        if name == "two":
            change_a_client(tmp_path / name / "tiny.jsonl", "something else\nentirely " * 9)
        headers.append(
            facts_of(begun_at(tmp_path / name, "data.tokenizer=bytes").record.path).header
        )
    for header in headers:
        assert len(header["store"].pop("salted_sha256")) == 64
        del header["command"], header["recipe"]["data"]["source"]  # paths of the two folders
    assert headers[0] == headers[1]


def test_a_private_run_finds_a_changed_text_by_its_salted_hash_alone(tmp_path):
    write_tiny(tmp_path)
    run = begun_at(tmp_path)
    assert run.record.salt.stat().st_mode & 0o777 == 0o600
    header = facts_of(run.record.path).header
    assert "clients_sha256" not in header["store"]
    check_same(run)
    # Another text, whose store is whole: its manifest names its own bytes.
    file = run.store.path / "clients.arrow"
    other = file.read_bytes() + b"\0"
    file.unlink()  # the old bytes are still mapped
    file.write_bytes(other)
    run.store.manifest["clients_sha256"] = hashlib.sha256(other).hexdigest()
    with pytest.raises(RecordError, match="another text"):
        check_same(run)
    run.record.salt.unlink()
    with pytest.raises(RecordError, match=r"text\.salt is not readable .*bring the file back"):
        check_same(run)


def test_no_fact_of_the_header_is_lost_without_a_decision(tmp_path):
    """A new fact is to be put on the list of `privacy/release.py`, or to be left out."""
    write_tiny(tmp_path)
    run = begun_at(tmp_path, "data.tokenizer=bytes")
    facts = header_of(run, run.round.init(run.start()))
    assert set(facts) <= HEADER and {"tree", "privacy_nodes"} <= HEADER


@pytest.mark.slow
def test_a_word_of_one_client_is_announced_beside_every_epsilon(run_cli, tmp_path):
    recipe = write_tiny(tmp_path)
    change_a_client(tmp_path / "tiny.jsonl", "the xylograph\nthe cat\na dog")
    settings = [part for change in PRIVATE for part in ("--set", change)]
    done = run_cli("train", recipe, *settings, "--out", "run", "--json")
    assert done.code == 0, done.stderr
    assert "tokens in all" not in done.stderr and "the epsilon does not cover it" in done.stderr
    assert "xylograph" in (tmp_path / "run" / "tokenizer.json").read_text()
    said = "counted on the clients' text without noise: the epsilon does not cover it"
    claim = facts_of(tmp_path / "run").final["privacy"]
    epsilon = run_cli("privacy", "epsilon", "run", "--json").json
    for told in (claim, epsilon):
        assert any(said in sentence for sentence in told["not_covered"])
        assert not any(said in sentence for sentence in told["assumptions"])
    assert said.replace("'", "&#x27;") in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.slow
def test_vocabulary_and_evaluation_are_parts_of_what_a_run_spent(run_cli, tmp_path):
    """Each is a line of a ledger, and the epsilon of the run counts them."""
    recipe = write_tiny(tmp_path)
    noisy = ("data.vocabulary_epsilon=20.0", "server.rounds=4", "server.evaluate_every=2")
    noisy += ("privacy.evaluation_noise=2.0", "privacy.evaluation_every=2")
    settings = [part for change in (*PRIVATE, *noisy) for part in ("--set", change)]
    done = run_cli("train", recipe, *settings, "--out", "run", "--json")
    assert done.code == 0, done.stderr
    run = tmp_path / "run"
    entries = Ledger(run / "ledger.jsonl").entries()
    lines = [entry for entry in entries if entry["kind"] == "gaussian"]
    told = [r for r in facts_of(run).rounds if "private_validation" in r]
    assert [line["what"] for line in lines] == ["evaluation"] * 2
    assert [r["round"] for r in told] == [1, 3]
    claim = run_cli("privacy", "epsilon", "run", "--json").json
    evaluated = epsilon_of_rho(2 * rho_of(1.0, 2.0), 1e-6)
    rounds = spent_of([entry for entry in entries if entry not in lines]).epsilon
    assert claim["epsilon"] > 15 > max(evaluated, rounds)  # the vocabulary is counted too
    assert spent_of(entries).epsilon > max(evaluated, rounds)
    assert "2 noisy figures of training clients' held-out text" in claim["covers"]
    assert any("with noise: epsilon 20.0" in said for said in claim["assumptions"])
    assert "Held-out text of training clients, with noise" in (run / "report.html").read_text()
