"""Rows that are scored together, cut and spread over lanes have the sums of plain scoring."""

from collections import Counter

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from fedlm.core.types import PAD, SpecialTokens
from fedlm.evaluate.held_out import Ask, TextHere
from fedlm.evaluate.ngrams import NGrams
from fedlm.evaluate.perplexity import Evaluator, Sums, row_sums, total_sums
from fedlm.evaluate.progress import listening
from fedlm.models import catalog

SPECIAL = SpecialTokens(bos=1, eos=2, oov=3, reserved=(0, 1, 2, 3))
VOCAB, WIDTH = 40, 21


SIZE = catalog.Dimensions(vocab=VOCAB, embedding_size=8, hidden_size=12, layers=1, heads=2)


def ragged(count, seed=0):
    """Rows of chat: most are short, some are full, and one holds nothing."""
    rng = np.random.default_rng(seed)
    rows = rng.integers(2, VOCAB, (count, WIDTH)).astype(np.int16)
    lengths = np.minimum(1 + rng.geometric(0.2, count), WIDTH)
    rows[:, 0] = 1
    rows[np.arange(WIDTH)[None] >= lengths[:, None]] = PAD
    rows[count // 2] = PAD
    return rows


def plain(params, rows):
    """All rows at full width in one batch, with a softmax over every place."""

    def score(params, tokens):
        logs = jax.nn.log_softmax(catalog.logits(params, jnp.maximum(tokens[:, :-1], 0)))
        targets = jnp.maximum(tokens[:, 1:], 0)
        return -jnp.take_along_axis(logs, targets[..., None], -1)[..., 0], jnp.argmax(
            logs, -1
        ) == targets

    found = jax.jit(lambda p, r: row_sums(score, SPECIAL, p, r))(params, rows.astype(np.int32))
    return Sums(*(np.asarray(column, np.float64) for column in found))


@pytest.mark.parametrize("name", ["cifg", "transformer"])
def test_packing_and_lanes_change_no_sum_and_no_order(name):
    params, rows = catalog.make(name, SIZE, jr.key(0)), ragged(600)
    wanted = plain(params, rows)
    assert wanted.tokens.std() > 1
    for lanes in (1, 2):
        score = Evaluator(
            catalog.score, SPECIAL, any_width=True, devices=jax.local_devices()[:lanes]
        )
        widths = {width for _, width in score._batches(rows, 1)}
        assert len(widths) > 1  # short rows are scored apart from long ones
        for found, column in zip(score(params, rows), wanted, strict=True):
            np.testing.assert_allclose(found, column, rtol=2e-5, atol=1e-5)
    few = score(params, rows[:5])
    for found, column in zip(few, wanted, strict=True):
        np.testing.assert_allclose(found, column[:5], rtol=2e-5, atol=1e-5)


def test_rows_of_similar_length_leave_little_empty():
    rows, score = ragged(6000), Evaluator(catalog.score, SPECIAL, any_width=True)
    cuts = list(score._batches(rows, 1))
    assert sorted(np.concatenate([numbers for numbers, _ in cuts])) == list(range(6000))
    places = sum(score._size(len(rows), width, 1) * (width - 1) for _, width in cuts)
    targets = np.count_nonzero(rows[:, 1:] != PAD)
    assert targets < 0.3 * rows[:, 1:].size and places < 0.6 * rows[:, 1:].size
    full = ragged(6000)
    full[full == PAD] = 7
    assert {width for _, width in score._batches(full, 1)} == {WIDTH}  # one program for windows


def test_a_batch_of_a_large_model_is_small_so_that_progress_is_told():
    score = Evaluator(catalog.score, SPECIAL, devices=jax.local_devices()[:1])
    places = {
        n: {(width - 1) * score._size(10_000, width, n) for width in (21, 33, 129, 513)}
        for n in (1_000_000, 24_000_000, 400_000_000)
    }
    assert min(places[1_000_000]) >= 1900 and max(places[1_000_000]) == 16 * 512
    assert max(places[24_000_000]) <= 2048 / 3
    assert max(places[400_000_000]) == 512, "a row at least"
    assert score._size(5, 21, 24_000_000) == 16 and score._size(5, 513, 24_000_000) == 1


def test_a_score_that_knows_one_length_gets_rows_of_that_length():
    seen = []

    def score(params, rows):
        seen.append(rows.shape[1])
        return params * jnp.ones(rows[:, 1:].shape), rows[:, 1:] == 5

    Evaluator(score, SPECIAL)(jnp.float32(0.5), ragged(600))
    assert set(seen) == {WIDTH}


def test_progress_tells_every_row_once():
    def score(params, rows):
        return params * jnp.ones(rows[:, 1:].shape), rows[:, 1:] == 5

    rows, heard = ragged(700), []
    judge = Evaluator(score, SPECIAL, any_width=True)
    silent = judge(jnp.float32(0.5), rows)
    with listening(lambda *told: heard.append(told)):
        told = judge(jnp.float32(0.5), rows)
    assert total_sums(told) == total_sums(silent)
    assert len(heard) > 1 and heard[-1] == (700, 700) and heard == sorted(heard)
    assert {rows for _, rows in heard} == {700}
    judge(jnp.float32(0.5), rows)
    assert heard[-1] == (700, 700)  # nobody listens any more
    text = TextHere(evaluator=lambda: judge, rows={"test": {0: rows, 1: rows[:30]}}, survey={})
    heard.clear()
    with listening(lambda *told: heard.append(told)):
        text.scores(0, "watch", "test", [jnp.float32(0.5)], [Ask(0, 0), Ask(1, 0), Ask(0, 0, 16)])
    assert {rows for _, rows in heard} == {746} and heard[-1] == (746, 746)


def test_levels_of_n_grams_are_counts():
    rows = np.random.default_rng(1).integers(4, 9, (60, 9))
    made = NGrams([rows], 9, SPECIAL)
    triples = Counter((*map(int, r[i : i + 3]),) for r in rows for i in range(7))
    pairs = Counter()
    for (_, b, c), n in triples.items():
        pairs[b, c] += n
    kinds = Counter((b, c) for _, b, c in triples)
    for level, wanted in ((made.bigram, pairs), (made.bigram_kinds, kinds)):
        found = {
            (int(k) // 9, int(k) % 9): int(n) for k, n in zip(level.keys, level.counts, strict=True)
        }
        assert found == wanted
        totals, followers = Counter(), Counter(b for b, _ in wanted)
        for (b, _), n in wanted.items():
            totals[b] += n
        assert dict(zip(level.contexts, level.context_total, strict=True)) == totals
        assert dict(zip(level.contexts, level.context_kinds, strict=True)) == followers
