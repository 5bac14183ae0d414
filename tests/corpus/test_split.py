import random

from hypothesis import example, given, settings
from hypothesis import strategies as st

from fedlm.corpus.split import cut_tail, held_out_clients

shares = st.floats(0.01, 0.99)
words = st.text("abcé", min_size=1, max_size=8)
lines = st.lists(words, min_size=1, max_size=6).map(" ".join)


@given(names=st.sets(st.text(max_size=5), max_size=30), share=shares, seed=st.integers(0, 9))
@example(names={"only"}, share=0.99, seed=0)
@example(names=set(), share=0.5, seed=0)
@settings(deadline=None)
def test_a_share_holds_out_about_itself_at_least_one_and_never_all(names, share, seed):
    held = held_out_clients(names, share, seed)
    assert held <= names
    assert len(held) < max(len(names), 1)
    if len(names) > 1:
        assert len(held) >= 1
        assert abs(len(held) - share * len(names)) <= 1


def test_the_share_of_zero_holds_out_nobody():
    assert held_out_clients("abc", 0.0, seed=0) == frozenset()


@given(st.sets(st.text(max_size=5), max_size=30), shares, st.randoms(use_true_random=False))
@settings(deadline=None)
def test_who_is_held_out_does_not_depend_on_order_or_repetition(names, share, chance):
    order = [*names, *names]
    chance.shuffle(order)
    assert held_out_clients(order, share, seed=3) == held_out_clients(names, share, seed=3)


def test_another_seed_holds_out_others_and_a_larger_share_only_adds():
    names = [f"client {i}" for i in range(200)]
    chosen = [held_out_clients(names, 0.2, seed) for seed in range(5)]
    assert len(set(chosen)) == 5
    assert held_out_clients(names, 0.1, 0) < chosen[0] < held_out_clients(names, 0.5, 0)


def test_every_client_is_held_out_equally_often():
    names = [f"client {i}" for i in range(20)]
    rounds = 1000
    counts = [
        sum(n in held_out_clients(names, 0.25, seed) for seed in range(rounds)) for n in names
    ]
    # Five standard deviations of a binomial count.
    assert all(abs(c - rounds / 4) < 5 * (rounds * 0.25 * 0.75) ** 0.5 for c in counts)


@given(st.lists(lines, min_size=2, max_size=30), shares, st.sampled_from(["\n", "\r\n", "\n \n"]))
@settings(deadline=None)
def test_lines_are_kept_whole_in_order_and_in_one_part_only(parts, share, joint):
    train, tail = cut_tail(joint.join(parts), share)
    assert train.split("\n") + tail.split("\n") == parts


@given(st.lists(words, min_size=2, max_size=30), shares)
@settings(deadline=None)
def test_a_single_line_is_cut_between_words_and_loses_none(parts, share):
    train, tail = cut_tail("\n" + "  ".join(parts) + "\n", share)
    assert train.split(" ") + tail.split(" ") == parts


@given(st.lists(lines, min_size=2, max_size=30), shares)
@settings(deadline=None)
def test_no_other_cut_between_lines_is_closer_to_the_share(parts, share):
    _, tail = cut_tail("\n".join(parts), share)
    total = sum(map(len, parts))
    missed = [abs(sum(map(len, parts[at:])) - share * total) for at in range(1, len(parts))]
    assert abs(len(tail.replace("\n", "")) - share * total) <= min(missed) + 1e-6


def test_the_tail_of_a_long_text_is_near_its_share():
    chance = random.Random(0)
    text = "\n".join("x" * chance.randint(1, 80) for _ in range(2000))
    for share in (0.05, 0.1, 0.5):
        _, tail = cut_tail(text, share)
        assert abs(len(tail) / len(text) - share) < 0.002


def test_only_line_ends_end_lines():
    """The same ones as the tokenizer's, so that cutting adds no line."""
    assert cut_tail("a\u2028b\x0bc\nd\x85e", 0.4) == ("a\u2028b\x0bc", "d\x85e")


def test_what_cannot_be_cut_trains():
    assert cut_tail("word", 0.9) == ("word", "")
    assert cut_tail(" \n ", 0.5) == ("", "")
    assert cut_tail("", 0.5) == ("", "")


def test_no_share_leaves_the_text_as_it_is():
    assert cut_tail("a  b\r\n\r\nc", 0.0) == ("a  b\r\n\r\nc", "")
