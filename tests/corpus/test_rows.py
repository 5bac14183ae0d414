"""A client's tokens as rows: every target once, in order, and padding that is no token."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedlm.core.types import PAD, SpecialTokens
from fedlm.corpus.rows import ClientRows, cut, row_dtype
from fedlm.corpus.store import write
from fedlm.corpus.tokenizer import OWN
from tests.corpus.test_store import LETTERS, SETTINGS

BOS, EOS = OWN.bos, OWN.eos

words = st.lists(st.integers(4, 60_000), min_size=1, max_size=12)
texts = st.lists(words, max_size=8)  # lines of words
lengths = st.integers(1, 9)
contexts = st.integers(1, 3)


def stream(lines, dtype=np.uint16):
    return np.array([t for line in lines for t in [*line, EOS]], dtype)


def real(targets):
    return targets[targets != PAD].tolist()


@given(texts, lengths, contexts)
@settings(deadline=None)
def test_in_windows_every_token_is_a_target_once_and_follows_what_came_before(
    lines, length, context
):
    tokens = stream(lines)
    rows = cut(tokens, length, "windows", OWN, context=context)
    assert rows.shape == (-(-len(tokens) // length), context + length)
    assert rows.dtype == np.int32
    assert real(rows[:, context:].ravel()) == tokens.tolist()
    before = [BOS] * context + tokens.tolist()
    for number, row in enumerate(rows):
        assert row[:context].tolist() == before[number * length :][:context]


@given(texts, lengths, contexts)
@settings(deadline=None)
def test_in_lines_every_line_is_a_row_that_begins_afresh_and_is_cut_off(lines, length, context):
    rows = cut(stream(lines), length, "lines", OWN, context=context)
    assert rows.shape == (len(lines), context + length)
    for row, line in zip(rows, lines, strict=True):
        assert (row[:context] == BOS).all()
        assert real(row[context:]) == [*line, EOS][:length]


@given(texts, lengths, st.sampled_from(["lines", "windows"]))
@settings(deadline=None)
def test_padding_comes_last_in_a_row(lines, length, layout):
    for row in cut(stream(lines), length, layout, OWN):
        assert PAD not in row[: np.count_nonzero(row != PAD)]


def test_longer_contexts_reach_further_back():
    tokens = np.array([5, 6, EOS, 7, EOS])
    assert cut(tokens, 2, "windows", OWN).tolist() == [[1, 5, 6], [6, 2, 7], [7, 2, -1]]
    assert cut(tokens, 2, "windows", OWN, context=2).tolist() == [
        [1, 1, 5, 6],
        [5, 6, 2, 7],
        [2, 7, 2, -1],
    ]
    assert cut(tokens, 2, "lines", OWN, context=2).tolist() == [[1, 1, 5, 6], [1, 1, 7, 2]]


def test_a_text_that_ends_within_a_line_loses_nothing():
    tokens = np.array([5, EOS, 6, 7])
    assert cut(tokens, 3, "lines", OWN).tolist() == [[1, 5, 2, -1], [1, 6, 7, -1]]
    assert cut(np.array([6]), 3, "lines", OWN).tolist() == [[1, 6, -1, -1]]


@pytest.mark.parametrize("layout", ["lines", "windows"])
def test_no_text_is_no_rows(layout):
    rows = cut(np.zeros(0, np.uint16), 5, layout, OWN, context=2, dtype=np.int16)
    assert rows.shape == (0, 7) and rows.dtype == np.int16


@pytest.mark.parametrize("layout", ["lines", "windows"])
@pytest.mark.parametrize("vocabulary", [32_768, 32_769, 65_536, 70_000])
def test_rows_hold_the_last_token_of_a_vocabulary_and_padding(layout, vocabulary):
    tokens = np.array([0, vocabulary - 1, EOS], np.uint32)
    rows = cut(tokens, 4, layout, OWN, dtype=row_dtype(vocabulary))
    assert rows.tolist() == [[BOS, 0, vocabulary - 1, EOS, PAD]]
    assert rows.itemsize == (2 if vocabulary <= 32_768 else 4)


def test_rows_begin_and_end_with_the_tokens_of_the_vocabulary():
    """One token that both begins and ends a text, as GPT-2 has it, and token 0 as a word."""
    both = SpecialTokens(bos=9, eos=9, oov=None, reserved=(9,))
    assert cut(np.array([0, 1, 9, 2, 9]), 3, "lines", both).tolist() == [
        [9, 0, 1, 9],
        [9, 2, 9, -1],
    ]
    apart = SpecialTokens(bos=7, eos=8, oov=0, reserved=(0, 7, 8))
    assert cut(np.array([1, 8, 2, 8]), 3, "lines", apart).tolist() == [[7, 1, 8, -1], [7, 2, 8, -1]]


@pytest.mark.parametrize("layout", ["lines", "windows"])
def test_members_are_numbered_by_place_and_clients_as_in_the_store(layout, tmp_path):
    store = write(LETTERS, tmp_path / "s", SETTINGS)
    clients = store.training_clients[2:]
    rows = ClientRows(store=store, clients=clients, sequence_length=4, layout=layout)
    client = int(store.training_clients[3])
    np.testing.assert_array_equal(rows.train(1), cut(store.train(client), 4, layout, OWN))
    wider = cut(store.held(client), 4, layout, OWN, context=2)
    np.testing.assert_array_equal(rows.held(client, 2), wider)
    assert rows.train(0).dtype == rows.held(0).dtype == np.int16
