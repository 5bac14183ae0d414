"""A store with a private vocabulary: what is in it, what it cost, and what is refused."""

import json
import stat

import pytest

import fedlm
from fedlm import lineage
from fedlm.core.errors import ConfigError, CorpusError
from fedlm.corpus.concat import JoinedStore
from fedlm.corpus.shard import deal
from fedlm.corpus.sources import Document
from fedlm.corpus.store import Store, StoreSettings, vocabulary_like, write
from fedlm.privacy.cost import compose, gaussian_event
from fedlm.privacy.ledger import Ledger, spent_of

# Each client writes three words that all share, and two that nobody else writes.
OWN = ["".join(chr(ord("a") + int(digit)) for digit in f"{n:03d}") for n in range(400)]
CLIENTS = [(f"c{n}", f"the cat sat x{own} y{own}.\n" * 4) for n, own in enumerate(OWN)]


@pytest.fixture(scope="module", params=["words", "bpe"])
def store(request, tmp_path_factory):
    out = tmp_path_factory.mktemp("private") / "store"
    return fedlm.prepare(CLIENTS, out, tokenizer=request.param, vocabulary_epsilon=2.0)


def test_only_words_that_many_clients_share_are_in_the_vocabulary(store):
    origin = store.manifest["tokenizer_from"]
    assert origin["kind"] == "private" and origin["words_passed"] == 4  # and the full stop
    known = set(store.tokenizer.library.get_vocab())
    assert {"the", "cat", "sat"} <= {word.removeprefix("Ġ") for word in known}
    assert not any(word.lstrip("Ġ").startswith(("xa", "ya")) for word in known)


def test_what_it_cost_is_in_a_ledger_that_only_its_owner_reads(store):
    (file,) = store.ledgers
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    begin, line = Ledger(file).entries()
    assert begin["plans"] == {} and begin["tokenizer"] == store.manifest["tokenizer_from"]
    assert "counted on the clients' text with noise: epsilon 2.0" in begin["assumes"][0]
    assert line["what"] == "vocabulary" and line["delta"] == 0.5e-7
    assert line["noise_multiplier"] == store.manifest["tokenizer_from"]["noise_multiplier"]
    # The bound by zCDP is a little above the exact epsilon that the noise was made for.
    assert 1.9 < spent_of([begin, line], 1e-7).epsilon < 2.4


def test_the_cost_goes_where_the_vocabulary_goes(store, tmp_path):
    parts = deal(store, ["a", "b"], tmp_path)
    letters = [Document(client, (), text) for client, text in CLIENTS[:9]]
    like = write(letters, tmp_path / "like", StoreSettings(), vocabulary=vocabulary_like(store))
    whole = store.ledgers[0].read_bytes()
    for part in (*parts.values(), like):
        assert [file.read_bytes() for file in part.ledgers] == [whole]
    joined = JoinedStore([parts["a"].path, like.path])
    assert len(joined.ledgers) == 2 and joined.manifest["tokenizer_from"]["kind"] == "private"
    like.ledgers[0].unlink()
    with pytest.raises(CorpusError, match=r"has no ledger\.jsonl: what its vocabulary cost"):
        _ = Store(like.path).ledgers


def test_another_preparation_draws_other_noise(tmp_path):
    settings = {"vocabulary_epsilon": 2.0, "vocabulary_words": 5}
    made = [fedlm.prepare(CLIENTS, tmp_path / name, **settings) for name in ("a", "b")]
    assert made[0].ledgers[0].read_bytes() != made[1].ledgers[0].read_bytes()
    words = [list(store.tokenizer.library.get_vocab()) for store in made]
    assert set(words[0]) == set(words[1])


@pytest.mark.parametrize(
    "settings, said",
    [
        ({"vocabulary_epsilon": 0.0}, "vocabulary_epsilon = 0.0: expected greater than 0"),
        ({"vocabulary_epsilon": 1.0, "vocabulary_delta": 1.0}, "vocabulary_delta = 1.0"),
        ({"vocabulary_words": 5}, "data.vocabulary_epsilon beside it"),
        ({"vocabulary_epsilon": 1.0, "tokenizer": "bytes"}, "which counts no text. Leave it out"),
    ],
)
def test_settings_that_promise_nothing_are_refused(settings, said):
    with pytest.raises(ConfigError, match=said.replace(".", r"\.")):
        fedlm.prepare(CLIENTS[:3], **settings)


def test_a_text_whose_words_nobody_shares_is_refused_and_the_cost_is_said():
    with pytest.raises(CorpusError, match="This attempt has cost the same epsilon"):
        fedlm.prepare(CLIENTS[:10], vocabulary_epsilon=0.1)


def test_an_attempt_in_which_no_word_passed_is_counted_by_the_next_store(tmp_path):
    out = tmp_path / "store"
    for _ in range(2):
        with pytest.raises(CorpusError, match="which the next store in its place will count"):
            fedlm.prepare(CLIENTS[:10], out, vocabulary_epsilon=0.1)
    assert stat.S_IMODE((tmp_path / "store.attempts").stat().st_mode) == 0o700
    made = fedlm.prepare(CLIENTS[:10], out, tokenizer="bytes")
    assert not (tmp_path / "store.attempts").exists()
    entries = [Ledger(path).entries() for path in made.ledgers]
    lines = [entry for book in entries for entry in book[1:]]
    assert [line["what"] for line in lines] == ["vocabulary"] * 2
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in made.ledgers)
    noise, delta = lines[0]["noise_multiplier"], 2 * lines[0]["delta"]
    alone = compose([gaussian_event(noise)] * 2, 1e-5, delta)[0]
    assert lineage.spent_on(made, 1e-5).epsilon == pytest.approx(alone)
    taken = tmp_path / "taken"
    taken.mkdir()
    vocabulary_like(made).write_ledger(taken)
    assert len(list(taken.iterdir())) == 2, "they go with a tokenizer that is taken over"


def test_prepare_tells_how_many_words_passed_and_what_they_cost(run_cli, tmp_path):
    entries = [json.dumps({"client": c, "text": t}) for c, t in CLIENTS]
    (tmp_path / "text.jsonl").write_text("\n".join(entries))
    done = run_cli("prepare", "text.jsonl", "--out", "store", "--vocabulary-epsilon", 2)
    assert done.code == 0, done.stderr
    said = " ".join(done.stderr.split())
    assert "4 words passed the threshold; another preparation costs as much again" in said
    assert "with noise: epsilon 2.0 at delta 1e-07 by itself" in said
    again = ("prepare", "text.jsonl", "--out", "other", "--like", "store")
    refused = run_cli(*again, "--vocabulary-epsilon", 2)
    assert refused.code == 2 and "--vocabulary-epsilon = 2.0: expected nothing" in refused.stderr
    assert run_cli(*again).code == 0
    refused = run_cli(
        "prepare",
        "synthetic:stackoverflow",
        "--out",
        "s",
        "--clients",
        9,
        "--vocabulary-epsilon",
        2,
    )
    assert refused.code == 2
