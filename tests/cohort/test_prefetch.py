import threading
import time

import pytest

from fedlm.cohort.prefetch import prefetch


def threads():
    return [t for t in threading.enumerate() if t.name == "fedlm-prefetch"]


def eventually(condition, seconds=10.0):
    """Whether a condition comes true; never waits for a fixed time."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.001)
    return condition()


@pytest.mark.parametrize("depth", [1, 2, 5])
@pytest.mark.parametrize("rounds", [range(0), range(1), range(3, 40), range(10, 0, -3)])
def test_values_are_those_of_a_plain_loop(rounds, depth):
    assert list(prefetch(lambda r: r * r, rounds, depth)) == [r * r for r in rounds]
    assert threads() == []


def test_nothing_is_a_value_like_any_other():
    assert list(prefetch(lambda r: None, range(3))) == [None] * 3


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_is_raised_at_its_place_and_ends_the_work(error):
    made, seen = [], []

    def make(r):
        made.append(r)
        if r == 3:
            raise error("round three")
        return r

    with pytest.raises(error, match="round three"):
        for value in prefetch(make, range(10), depth=5):
            seen.append(value)
    assert seen == [0, 1, 2]
    assert made == [0, 1, 2, 3]
    assert threads() == []


@pytest.mark.parametrize("taken", [1, 4])
def test_leaving_early_stops_the_thread(taken):
    made = []
    values = prefetch(lambda r: made.append(r) or r, range(10**9))
    assert [next(values) for _ in range(taken)] == list(range(taken))
    assert len(threads()) == 1
    values.close()
    assert threads() == []
    assert len(made) <= taken + 2


def test_an_error_of_the_consumer_stops_the_thread():
    with pytest.raises(RuntimeError, match="mine"):
        for _ in (values := prefetch(lambda r: r, range(10**9))):
            raise RuntimeError("mine")
    values.close()
    assert threads() == []


@pytest.mark.parametrize("depth", [1, 3])
def test_the_next_values_are_made_while_one_is_used_but_not_many(depth):
    made = []
    values = prefetch(lambda r: made.append(r) or r, range(100), depth)
    for taken in range(1, 5):
        next(values)
        ahead = taken + depth + 1  # those that wait, and one that waits for a place
        assert eventually(lambda ahead=ahead: len(made) == ahead)
    assert not eventually(lambda: len(made) > ahead, seconds=0.05)
    values.close()


def test_nothing_is_made_before_the_first_is_asked_for():
    made = []
    values = prefetch(made.append, range(3))
    assert made == [] and threads() == []
    values.close()


def test_values_are_made_on_another_thread_in_order():
    makers = list(prefetch(lambda r: (r, threading.current_thread().name), range(5)))
    assert makers == [(r, "fedlm-prefetch") for r in range(5)]
