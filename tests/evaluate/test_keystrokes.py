"""Keys that suggestions save, counted by hand."""

import numpy as np
import pytest

from fedlm.core.keys import key_for
from fedlm.core.types import PAD
from fedlm.corpus import tokenizer as tok
from fedlm.evaluate.keystrokes import TypedWord, keystrokes
from fedlm.inference import Typist, keystrokes_on, typed_words
from fedlm.models import catalog

HELLO = [TypedWord("hello", True), TypedWord("world", False), TypedWord(".", True, False)]


@pytest.mark.parametrize(
    "shown, keys, tapped",
    [
        (lambda n, typed: [], 13, 0),  # hello_ world ._
        (lambda n, typed: ["hello", "world"], 1 + 1 + 2, 2),  # at once
        (lambda n, typed: ["world"] if typed == "wor" else [], 6 + 4 + 2, 1),  # after three letters
        (lambda n, typed: ["a", "b", "c", "hello", "world"], 13, 0),  # only three are shown
        (lambda n, typed: ["."], 13, 0),  # marks are typed
        (lambda n, typed: ["hello"] if n else [], 13, 0),  # the right word at the wrong place
    ],
)
def test_keys_are_counted_as_by_hand(shown, keys, tapped):
    found = keystrokes(HELLO, shown)
    assert (found.with_suggestions, found.without, found.words) == (keys, 13, 2)
    assert found.tapped == tapped and found.saved == pytest.approx(1 - keys / 13)


def test_an_empty_text_saves_nothing():
    assert keystrokes([], lambda n, typed: []).saved is None


@pytest.fixture(scope="module")
def typist():
    tokenizer = tok.from_words(["cat", "car", "sat", "the", ".", "dog"], lowercase=True)
    size = catalog.Dimensions(vocab=tokenizer.vocabulary, embedding_size=4, hidden_size=4)
    return Typist(catalog.make("cifg", size, key_for(0, "init")), tokenizer)


def test_tokens_are_words_as_somebody_types_them(typist):
    tokens = [int(t) for t in tok.encode(typist.tokenizer, "The cat sat.\nzebra dog", np.int64)]
    words = [tuple(word) for _, word in typed_words(typist, tokens)]
    assert words == [
        ("the", True, True), ("cat", True, True), ("sat", False, True), (".", False, False),
        ("\n", False, False), ("<oov>", True, False), ("dog", False, True), ("\n", False, False),
    ]  # fmt: skip


def test_words_begin_as_the_text_ends(typist):
    for text, begun in [
        ("the ca", "ca"),
        ("the CA", "ca"),
        ("the ", ""),
        ("", ""),
        ("'ca", "ca"),
        ("the ca\n", ""),
    ]:
        found = typist.suggest(text)
        assert all(word.startswith(begun) for word, _ in found), (text, found)
        assert [p for _, p in found] == sorted((p for _, p in found), reverse=True)
        assert "." not in [word for word, _ in found]
    assert {word for word, _ in typist.suggest("the ca")} == {"cat", "car"}
    assert typist.suggest("the zebr") == []


def test_typing_costs_a_step_per_new_word_and_going_back_none(typist):
    steps, model = [], typist._model

    def counted(state, token):
        steps.append(token)
        return model.advance(state, token)

    typist._path.clear()
    typist._model = model._replace(advance=counted)
    told = {}
    keys = {"": 1, "t": 0, "the": 0, "the ": 1, "the c": 0, "the ca": 0, "the cat ": 1}
    for text, new in [*keys.items(), ("the ", 0), ("the c", 0), ("the cat ", 1)]:
        before = len(steps)
        assert typist.suggest(text) == told.setdefault(text, typist.suggest(text))
        assert len(steps) - before == new, text
    typist._model = model


def test_a_model_that_knows_the_text_saves_keys(typist):
    """The figure is that of the suggestions: all words at once, or none."""
    rows = np.asarray([[1, 7, 4, 6, 2, PAD], [1, 7, 5, 2, PAD, PAD]])  # the cat sat; the car
    params = typist_params(typist)
    found = keystrokes_on(params, typist.tokenizer, rows)
    assert found["words"] == 5 and found["without"] == 12 + 8
    assert found["with_suggestions"] <= found["without"]
    every = {w for _, word in typed_words(typist, [7, 4, 6, 2]) for w in [word.text]}
    assert every == {"the", "cat", "sat", "\n"}


def typist_params(typist):
    size = catalog.Dimensions(vocab=typist.tokenizer.vocabulary, embedding_size=4, hidden_size=4)
    return catalog.make("cifg", size, key_for(0, "init"))
