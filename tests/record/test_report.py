"""A report is a function of journals, and a page that asks nobody for anything."""

import re
import shutil

import pytest

from fedlm.core.errors import RecordError
from fedlm.core.releasable import make_releasable
from fedlm.record import report
from fedlm.record.facts import facts_of
from fedlm.record.journal import Journal
from fedlm.record.report import Beside

RECIPE = {"model": {"name": "si-cifg"}, "client": {"learning_rate": 0.5}}
COUNTED = {"unigram": 300.0, "bigram": 120.0, "trigram": 90.0}
LARGEST_PAGE = 300_000
HOSTILE = "<script>alert('x')</script>"


def write(folder, rounds=4, final=True, worse=0.0, closing=None, **header):
    """The journal of a run as `fedlm train` writes it."""
    folder.mkdir(exist_ok=True)
    journal = Journal(folder / "journal.jsonl")
    facts = {"command": "fedlm train x.toml", "recipe": RECIPE, "parameters": 868}
    journal.append(
        make_releasable("header", dict(**{**facts, "start": {"perplexity": 321.5}, **header}))
    )
    for number in range(rounds):
        seen = {"perplexity": 100.0 - number + worse, "accuracy": 0.1} if number % 2 else {}
        moved = {"upload_bytes": 1e6 * (number + 1), "download_bytes": 2e6 * (number + 1)}
        facts = {"members": 4, "tokens": 50, "loss": 3.5, "seconds": 0.25, **moved, **seen}
        journal.append(make_releasable("round", dict(round=number, **facts)))
    if final:
        figures = {"perplexity": 87.65 + worse, "accuracy": 0.125, "tokens": 70}
        quantiles = {"p10": 60.0, "p25": 70.0, "p50": 80.0, "p75": 90.0, "p90": 110.0}
        clients = {**quantiles, "mean_of_worst_10_percent": 160.0, "clients": 1.0}
        test = {**figures, "clients": clients, "groups": [{"north": figures, HOSTILE: figures}]}
        told = {"test": test, "baselines": {"test": COUNTED}, **(closing or {})}
        journal.append(make_releasable("final", told))
    return folder


def page_of(*folders, **beside):
    return report.report_page([facts_of(folder) for folder in folders], Beside(**beside))


def said(page):
    """The words of a page, without tags."""
    body = page.partition("<body>")[2]
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", re.sub(r"<style>.*?</style>", "", body)))


def test_a_real_run_is_told_by_its_journal_alone(trained, tmp_path):
    run = trained / "runs" / "tiny"
    (tmp_path / "tiny").mkdir()
    shutil.copy(run / "journal.jsonl", tmp_path / "tiny")
    page = page_of(tmp_path / "tiny")
    for words in ("How good is that?", "counting triples of words", "Groups, level 2", "the cat"):
        assert words in said(page)
    made = (run / "report.html").read_text(encoding="utf-8")
    assert said(page).split("Settings")[0] == said(made).split("Settings")[0]
    assert "Settings that differ from the defaults" in made
    assert "<td>model.hidden_size</td><td>12</td>" in made
    changed = made.partition("Settings that differ")[2].partition("<details>")[0]
    assert "client.momentum" not in changed and "client.momentum" in made
    assert len(made) < 100_000


def test_the_verdict_comes_first_and_says_all_four_things(tmp_path):
    words = said(page_of(write(tmp_path / "one")))
    assert words.index("one si-cifg of 868 parameters was trained for 4 rounds") < 40
    for part in (
        "On the text of held-out clients it reaches perplexity 87.7",
        "3% better than counting triples of words (90)",
        "It cost 4.0 MB up and 8.0 MB down and 1.0 s.",
        "It promises no privacy.",
    ):
        assert part in words, part


def test_the_curve_can_be_switched_between_axes_without_a_script(tmp_path):
    page = page_of(write(tmp_path / "one"))
    for name in ("rounds", "bytes", "bytes of one member", "seconds"):
        assert f"over {name}</label>" in page
    assert "over epsilon" not in page and "training loss</label>" in page
    assert page.count("type='radio'") == 5 and page.count(" checked>") == 1
    assert "trigram 90" in page.partition("<svg")[2].partition("</svg>")[0]
    other = page_of(write(tmp_path / "two", closing={"validation": {"perplexity": 55.5}}))
    assert "trigram 90" not in other.partition("<svg")[2].partition("</svg>")[0]  # of other text


def test_the_two_kinds_of_held_out_text_have_two_names(tmp_path):
    both = {"validation": {"perplexity": 55.5, "accuracy": 0.1}}
    words = said(page_of(write(tmp_path / "one", closing=both)))
    assert "perplexity, held-out clients" in words
    assert "perplexity, held-out text of training clients" in words
    assert "Perplexity on held-out text of training clients" in words  # the curve


def test_who_is_served_badly_is_said(tmp_path):
    words = said(page_of(write(tmp_path / "one")))
    assert "Of 1 client (held-out clients), half see a perplexity below 80" in words
    assert "The worst served tenth see 160 on average, 2 times the median." in words


def test_only_settings_that_differ_are_shown(tmp_path):
    usual = {"model": {"name": "si-cifg"}, "client": {"learning_rate": 0.1}}
    page = page_of(write(tmp_path / "one"), defaults=usual)
    shown, _, folded = page.partition("Settings that differ")[2].partition("<details>")
    assert "<td>client.learning_rate</td><td>0.5</td><td>0.1</td>" in shown
    assert "model.name" not in shown and "<td>model.name</td>" in folded


def test_traffic_is_shown_beside_the_whole_model(tmp_path):
    words = said(page_of(write(tmp_path / "one")))
    assert "up: 250.0 kB per member and round" in words and "4 clients per round" in words
    assert "the whole model, which has 3.5 kB in float32" in words


def test_a_page_asks_nobody_for_anything(tmp_path):
    page = page_of(write(tmp_path / "one"), write(tmp_path / "two", worse=1.0))
    for made in (page, page_of(tmp_path / "one")):
        assert not re.search(r"<(script|link|img|iframe|object|embed|base|form)\b", made)
        assert not re.search(r"(href|src|action|srcset)\s*=|url\(|@import|https?:", made)
        assert "default-src 'none'" in made and len(made) < LARGEST_PAGE
        assert "prefers-color-scheme:dark" in made and "@media print" in made


def test_what_files_say_is_text_and_not_markup(tmp_path):
    prompts = [{"prompt": HOSTILE, "next": [{"word": HOSTILE, "probability": 0.5}]}]
    hostile = {"predictions": prompts}
    recipe = {"data": {"source": HOSTILE}, HOSTILE: {HOSTILE: HOSTILE}, "wire": {"upload": HOSTILE}}
    made = [
        write(tmp_path / name, recipe={**recipe, "model": {name: name}}, closing=hostile)
        for name in ("<b>", f"<script>{'x' * 20}")
    ]
    for page in (page_of(made[0]), page_of(*made)):
        assert "<script" not in page and "<b></" not in page
        assert "&lt;script&gt;" in page


def test_an_unfinished_run_has_a_page_too(tmp_path):
    words = said(page_of(write(tmp_path / "one", rounds=2, final=False)))
    assert "has been trained for 2 rounds" in words and "reaches perplexity 99" in words
    words = said(page_of(write(tmp_path / "two", rounds=0, final=False)))
    assert "No round has been evaluated yet." in words


def test_null_figures_do_not_stop_a_page(tmp_path):
    run = write(tmp_path / "one", start={"perplexity": None}, final=False)
    Journal(run / "journal.jsonl").append(
        make_releasable("final", dict(test={"perplexity": None}, baselines={}))
    )
    assert "reaches perplexity 97" in said(page_of(run))


def test_a_long_run_has_a_small_page(tmp_path):
    run = write(tmp_path / "one", rounds=10_000, final=False)
    assert len(page_of(run)) < LARGEST_PAGE


def test_curves_count_rounds_from_one_and_add_seconds_up(tmp_path):
    facts = facts_of(write(tmp_path / "one"))
    assert facts.over("round") == ([0, 2, 4], [321.5, 99.0, 97.0])
    assert facts.over("seconds") == ([0.5, 1.0], [99.0, 97.0])
    assert facts.over("upload_bytes") == ([2.0, 4.0], [99.0, 97.0])
    assert facts.over("member_bytes") == ([0.5, 1.0], [99.0, 97.0])


def test_a_journal_without_header_is_refused(tmp_path):
    Journal(tmp_path / "journal.jsonl").append(make_releasable("round", dict(round=0)))
    with pytest.raises(RecordError, match="its journal has no header"):
        facts_of(tmp_path)


def test_figures_of_earlier_versions_are_read_under_their_new_names(tmp_path):
    old = {
        "perplexity": 9.0,
        "perplexity_no_oov": 8.0,
        "clients": {"p50": 7.0, "worst_tenth": 11.0},
    }
    found = facts_of(write(tmp_path / "one", closing={"test": old})).final["test"]
    assert found["perplexity_known_words"] == 8.0
    assert found["clients"] == {"p50": 7.0, "mean_of_worst_10_percent": 11.0}


def test_noisy_figures_stand_beside_their_errors(tmp_path):
    folder = write(tmp_path / "run", final=False)
    figures = {"perplexity": 77.25, "perplexity_error": 1.5, "accuracy": 0.25}
    clients = {"p10": 60.5, "p10_error": 4.5, "p50": 80.5, "p50_error": 2.5}
    told = {
        **figures,
        "accuracy_error": None,
        "clients": {**clients, "p90": None, "p90_error": None},
        "noise_multiplier": 5.0,
        "tokens_per_client": 50,
        "nodes": {"north": {**dict.fromkeys(figures, 66.5), "accuracy_error": None}},
    }
    line = {"round": 4, "members": 4, "seconds": 0.25, "upload_bytes": 1, "download_bytes": 1}
    made = make_releasable("round", {**line, "private_validation": told})
    Journal(folder / "journal.jsonl").append(made)
    page = page_of(folder)
    assert "Held-out text of training clients, with noise" in page
    assert "<td>north</td>" in page  # from the same release
    for value in ("77.25", "1.5", "80.5", "2.5", "66.5"):
        assert f"<td class='n'>{value}</td>" in page
    assert "at most 50 tokens, with noise of 5 times" in page
    assert "with noise" not in page_of(write(tmp_path / "other"))
