"""What a vocabulary tells about clients, and what is said of it beside an epsilon."""

import pytest

from fedlm.privacy.vocabulary import assumptions, uncovered

COUNTED = {"kind": "counted"}


@pytest.mark.parametrize(
    "origin, said",
    [
        (COUNTED, "counted on the clients' text without noise: the epsilon does not cover it"),
        (None, "not recorded: the epsilon does not cover it"),
        ({"kind": "like", "store": "s", "of": COUNTED}, "of the store 's'; there, the vocabulary"),
        ({"kind": "file", "name": "t.json", "sha256": "ab" * 32}, "'t.json' (sha256 abababababab"),
    ],
    ids=["counted", "unknown", "like", "file"],
)
def test_a_claim_says_where_the_vocabulary_came_from(origin, said):
    (sentence,) = assumptions({"store": {"tokenizer_from": origin}})
    assert said in sentence and "does not cover it" in sentence
    warned = uncovered({"store": {"tokenizer_from": origin}})
    assert warned == (() if origin and origin["kind"] == "file" else (sentence,))


def test_of_a_public_vocabulary_there_is_nothing_to_say():
    assert assumptions({"store": {"tokenizer_from": {"kind": "public"}}}) == ()
