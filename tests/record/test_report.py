"""A report is a function of journals, and a page that needs no network."""

import re
import shutil

import pytest

from fedlm.core.errors import RecordError
from fedlm.core.releasable import make_releasable
from fedlm.record import report
from fedlm.record.journal import Journal

RECIPE = {"model": {"name": "si-cifg"}, "client": {"learning_rate": 0.5}}


def write(folder, rounds=4, final=True, **header):
    """The journal of a run as `fedlm train` writes it."""
    folder.mkdir(exist_ok=True)
    journal = Journal(folder / "journal.jsonl")
    facts = {"command": "fedlm train x.toml", "recipe": RECIPE, "parameters": 868}
    journal.append(
        make_releasable("header", dict(**{**facts, "start": {"perplexity": 321.5}, **header}))
    )
    for number in range(rounds):
        seen = {"perplexity": 100.0 - number, "accuracy": 0.1} if number % 2 else {}
        moved = {"upload_bytes": 1e6 * (number + 1), "download_bytes": 2e6 * (number + 1)}
        facts = {"members": 4, "tokens": 50, "loss": 3.5, "seconds": 0.25, **moved, **seen}
        journal.append(make_releasable("round", dict(round=number, **facts)))
    if final:
        figures = {"perplexity": 87.65, "accuracy": 0.125, "clients": {"p50": 80.0}}
        journal.append(
            make_releasable(
                "final", dict(test={**figures, "groups": [{"north": figures, "<i>": figures}]})
            )
        )
    return folder


def page_of(*folders):
    return report.page([report.facts_of(folder) for folder in folders])


def without_ids(page):
    """Figures carry a random id each; everything else is to be the same."""
    return re.sub(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "ID", page)


def body(page):
    return page.partition("<body>")[2]


def test_a_real_run_is_told_by_its_journal_alone(trained, tmp_path):
    run = trained / "runs" / "tiny"
    (tmp_path / "tiny").mkdir()
    shutil.copy(run / "journal.jsonl", tmp_path / "tiny")
    page = page_of(tmp_path / "tiny")
    assert without_ids(page) == without_ids((run / "report.html").read_text(encoding="utf-8"))
    for words in ("Beside what counting reaches", "trigram", "by group, level 2", "the cat"):
        assert words in page
    assert "<td>model.hidden_size</td><td>12</td>" in page


def test_one_run_has_its_table_curves_and_way_to_repeat(tmp_path):
    page = body(page_of(write(tmp_path / "one")))
    row = r"<tr><td>one</td><td class='n'>4</td><td class='n'>87.65</td><td class='n'>0.125</td>"
    assert re.search(row, page)
    assert "<td class='n'>4</td><td class='n'>8</td><td class='n'>1</td>" in page  # MB and seconds
    for title in ("over rounds", "Over megabytes uploaded", "Over seconds", "Training loss"):
        assert title in page
    assert page.count("Plotly.newPlot") == 6  # five curves and the groups
    assert "fedlm train x.toml" in page


def test_several_runs_are_compared(tmp_path):
    other = {**RECIPE, "client": {"learning_rate": 0.25}}
    runs = write(tmp_path / "one"), write(tmp_path / "two", recipe=other)
    page = body(page_of(*runs))
    assert "2 runs compared" in page and "Where the recipes differ" in page
    assert "<th>run</th><th>client.learning_rate</th></tr>" in page  # and nothing else differs
    assert "<td>two</td><td>0.25</td>" in page
    assert page.count("Plotly.newPlot") == 5
    assert all(page.count(f'"name":"{name}"') == 5 for name in ("one", "two"))


def test_a_page_of_several_is_made_from_journals_alone(tmp_path):
    runs = [write(tmp_path / name) for name in ("one", "two")]
    copies = []
    for run in runs:
        (run / "summary.json").write_text("{}")
        copies.append(tmp_path / "copies" / run.name)
        copies[-1].mkdir(parents=True)
        shutil.copy(run / "journal.jsonl", copies[-1])
    assert without_ids(page_of(*copies)) == without_ids(page_of(*runs))


def test_a_page_needs_no_network(tmp_path):
    page = page_of(write(tmp_path / "one"))
    tags = re.findall(r"<(?:script|link|img|iframe)\b[^>]*>", body(page))
    assert tags and not [tag for tag in tags if "http" in tag or "src" in tag or "href" in tag]
    head = page.partition("<body>")[0]
    assert not re.search(r"<script[^>]*\bsrc\s*=", head) and "<link" not in head[:5000]
    assert len(head) > 1_000_000  # the drawing library is in the page


def test_an_unfinished_run_has_a_page_too(tmp_path):
    page = body(page_of(write(tmp_path / "one", rounds=2, final=False)))
    assert "<td class='n'>99</td>" in page  # the last perplexity on the way
    page = body(page_of(write(tmp_path / "two", rounds=0, final=False)))
    assert "No round has been evaluated yet." in page


def test_what_the_journal_says_is_text_not_markup(tmp_path):
    run = write(tmp_path / "<b>", command="fedlm train '<script>x</script>'")
    page = body(page_of(run))
    assert "<h1>&lt;b&gt;</h1>" in page and "<script>x</script>" not in page


def test_null_figures_do_not_stop_a_page(tmp_path):
    run = write(tmp_path / "one", start={"perplexity": None}, final=False)
    Journal(run / "journal.jsonl").append(
        make_releasable("final", dict(test={"perplexity": None}, baselines={}))
    )
    assert "<td class='n'>-</td>" in body(page_of(run))


def test_curves_count_rounds_from_one_and_add_seconds_up(tmp_path):
    facts = report.facts_of(write(tmp_path / "one"))
    assert facts.over("round") == ("one", [2, 4], [99.0, 97.0])
    assert facts.over("seconds") == ("one", [0.5, 1.0], [99.0, 97.0])
    assert facts.over("upload_bytes") == ("one", [2.0, 4.0], [99.0, 97.0])


def test_a_journal_without_header_is_refused(tmp_path):
    Journal(tmp_path / "journal.jsonl").append(make_releasable("round", dict(round=0)))
    with pytest.raises(RecordError, match="its journal has no header"):
        report.facts_of(tmp_path)


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
    }
    line = {"round": 4, "members": 4, "seconds": 0.25, "upload_bytes": 1, "download_bytes": 1}
    made = make_releasable("round", {**line, "private_validation": told})
    Journal(folder / "journal.jsonl").append(made)
    page = page_of(folder)
    assert "Held-out text of training clients, with noise" in page
    for value in ("77.25", "1.5", "80.5", "2.5"):
        assert f"<td class='n'>{value}</td>" in page
    assert "at most 50 tokens, with noise of 5 times" in page
    assert "with noise" not in page_of(write(tmp_path / "other"))
