"""Several runs on one page: seeds as bands, a front, and no ranking of what is not comparable."""

import itertools
import math

from fedlm.record import comparison
from fedlm.record.comparison import RunCost, on_front
from fedlm.record.facts import facts_of
from tests.record.test_report import RECIPE, page_of, said, write


def recipe(rate=0.5, seed=0):
    return {**RECIPE, "client": {"learning_rate": rate}, "run": {"seed": seed}}


def seeds(folder, name, rate, worse):
    return [
        write(folder / f"{name}-s{seed}", recipe=recipe(rate, seed), worse=worse + seed)
        for seed in range(3)
    ]


def test_seeds_are_one_line_with_a_band(tmp_path):
    runs = [*seeds(tmp_path, "fast", 0.5, 0.0), *seeds(tmp_path, "slow", 0.1, 20.0)]
    groups = comparison.grouped([facts_of(run) for run in runs])
    assert [(g.name, len(g.runs), g.colour) for g in groups] == [("fast", 3, 0), ("slow", 3, 1)]
    curve = comparison.band(groups[0], "round")
    assert (curve.x[1], curve.low[1], curve.y[1], curve.high[1]) == (2, 99.0, 100.0, 101.0)
    page = page_of(*runs)
    assert "6 runs compared" in page and page.count("class='band c0'") == 4
    words = said(page)
    assert "fast is best: perplexity 88.65 ± 1 , for 4.0 MB uploaded and no privacy" in words
    assert "Next is slow, 22.6% worse." in words
    assert "client.learning_rate 0.5 0.1" in words and "run.seed" not in words


def test_the_best_by_its_mean_comes_first(tmp_path):
    """A lucky seed put a line first that the verdict above the table called worse."""
    for name, rate, worse in (("lucky", 0.5, (-30.0, 30.0)), ("steady", 0.1, (-5.0, -5.0))):
        for seed, by in enumerate(worse):
            write(tmp_path / f"{name}-s{seed}", recipe=recipe(rate, seed), worse=by)
    words = said(page_of(*sorted(tmp_path.iterdir())))
    assert "steady is best" in words
    assert words.index("steady 2 ") < words.index("lucky 2 ")


def test_a_difference_that_seeds_could_make_is_called_so(tmp_path):
    runs = [*seeds(tmp_path, "a", 0.5, 0.0), *seeds(tmp_path, "b", 0.1, 0.5)]
    assert "which seeds alone could make" in said(page_of(*runs))


def test_repetitions_of_one_seed_stay_runs_of_their_own(tmp_path):
    runs = [facts_of(write(tmp_path / name, recipe=recipe())) for name in ("one", "two")]
    assert [g.name for g in comparison.grouped(runs)] == ["one", "two"]


def test_runs_are_compared_with_counting(tmp_path):
    words = said(page_of(write(tmp_path / "one"), write(tmp_path / "two", worse=2.0)))
    assert "trigram, counted 90" in words and "0.125" not in words and "12.5%" in words


def test_different_tokenizers_are_not_ranked_by_perplexity(tmp_path):
    runs = [
        write(tmp_path / name, store={"tokenizer_sha256": name}, closing=closing)
        for name, closing in (("one", None), ("two", None))
    ]
    words = said(page_of(*runs))
    assert "These runs cannot be ranked: their tokenizers differ" in words
    assert "is best" not in words
    told = [{"test": {"perplexity": p, "bits_per_byte": b}} for p, b in ((10.0, 2.0), (20.0, 1.5))]
    runs = [
        write(tmp_path / name, store={"tokenizer_sha256": name}, closing=closing)
        for name, closing in zip(("three", "four"), told, strict=True)
    ]
    assert "four is best: bits per byte 1.5" in said(page_of(*runs))


def test_the_front_is_what_brute_force_says():
    """A point is on the front if no other is at least as good everywhere and better somewhere."""
    values = [
        RunCost(*point) for point in itertools.product((1.0, 2.0), (0.5, math.inf), (3.0, 4.0))
    ]
    assert [v for v, best in zip(values, on_front(values), strict=True) if best] == [values[0]]
    trade = [
        RunCost(1.0, math.inf, 9.0),
        RunCost(2.0, 1.0, 9.0),
        RunCost(3.0, 1.0, 1.0),
        RunCost(3.0, 2.0, 1.0),
    ]
    assert on_front(trade) == [True, True, True, False]
    assert on_front([RunCost(1.0, 1.0, 1.0)] * 2) == [True, True]


def test_the_page_names_the_front_and_the_beaten(tmp_path):
    runs = [
        write(tmp_path / name, worse=worse, closing=None, recipe=recipe(rate))
        for name, worse, rate in (("good", 0.0, 0.5), ("bad", 9.0, 0.25))
    ]
    words = said(page_of(*runs))
    assert "No other run beats good in perplexity, epsilon and bytes at once." in words
    assert "Another one is at least as good in all three as bad." in words


def test_many_runs_have_a_small_page(tmp_path):
    runs = [
        write(tmp_path / f"run{i}x", worse=float(i), recipe=recipe(0.01 * i)) for i in range(40)
    ]
    assert len(page_of(*runs)) < 300_000
