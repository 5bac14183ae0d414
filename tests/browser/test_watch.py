"""The live page in a real browser, over real runs."""

import contextlib
import http.server
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from functools import partial

import pytest

from fedlm.core.errors import RecordError
from fedlm.deploy.server_app import record_nodes
from fedlm.engine.dispatch import RoundStats
from fedlm.inference import Typist, open_model
from fedlm.record.directory import RunDirectory
from fedlm.record.status import LIVE, read_status
from tests.browser.conftest import RECIPE, watching, window
from tests.watch.runs import make_run, round_line

TREE = {"tree": {"names": ["root", "north", "south"], "parents": [-1, 0, 0]}}
NODES = {
    "root": {"up_bytes": 0, "down_bytes": 0, "agreement": 0.5, "attention_up": {"north": 0.6}},
    "north": {"up_bytes": 7000, "down_bytes": 9, "self_weight": 0.4,
              "attention_down": {"north": 0.4, "root": 0.6}},
    "south": {"up_bytes": 7, "down_bytes": 9, "self_weight": 0.8, "missed": True},
}  # fmt: skip
WAY = {"layer": 0, "from": "north", "to": "south", "likeness": {"south": 0.5}}


@pytest.fixture(scope="module")
def watched(tmp_path_factory, real):
    """A folder with one run of every kind, watched."""
    folder = tmp_path_factory.mktemp("watched")
    os.symlink(real / "runs" / "cifg", folder / "link")  # links are not followed
    make_run(folder / "plain", rounds=8)
    (make_run(folder / "broken") / "journal.jsonl").write_text("{\n{\n")
    make_run(folder / "script", header={"recipe": {"model": {"name": "<script>alert(1)</script>"}}})
    make_run(folder / "tree", rounds=0, header=TREE, more=[
        round_line(n, nodes=NODES, routes=[WAY], places={"north": [50.0 - n, 40.0]})
        for n in range(5)])  # fmt: skip
    networked = RunDirectory(make_run(folder / "networked"))
    for n in range(2):
        stats = RoundStats(n, ["north"], late=["south"], refused={"east": "no"})
        stats.moved("north", up=1500, down=2500)
        record_nodes(networked, stats, None, 3, lambda words: None)
    for rate in (0.1, 0.2):
        make_run(folder / "grid" / f"rate={rate}", header={"recipe": {"client": {"rate": rate}}})
    with watching(folder) as address:
        yield address


@pytest.fixture(scope="module")
def typed(real):
    with watching(real / "runs") as address:
        yield address


def train(folder, *more):
    """Start a run of many short rounds, as a person does."""
    command = [sys.executable, "-m", "fedlm.cli.main", "train", "addresses.toml"]
    return subprocess.Popen(
        [*command, "--out", "runs/one", "--set", "server.rounds=100000", *more],
        cwd=folder,
    )


def wait(page, words):
    """Wait until an expression is true, asked from outside: the page's policy forbids eval."""
    for _ in range(1200):
        if page.evaluate(words):
            return
        page.wait_for_timeout(200)
    raise AssertionError(f"{words} is still false: {page.locator('main').inner_text()[:500]}")


ROUND = "Number(document.querySelector('.figures dd')?.textContent.split(' ')[0].replace(',', ''))"
STATE = "document.querySelector('main .state')?.textContent"


# ---- a run at work ---------------------------------------------------------------------------


def test_the_page_follows_a_run_stops_it_and_resumes_it(tmp_path, open_page):
    (tmp_path / "addresses.toml").write_text(RECIPE, encoding="utf-8")
    runs = tmp_path / "runs"
    runs.mkdir()
    with watching(runs) as address:
        page = open_page(address)
        wait(page, "document.querySelector('main').textContent.includes('No run is here yet')")
        process = train(tmp_path)
        try:
            wait(page, "document.querySelector('tbody a') !== null")  # it appears by itself
            page.click("tbody a:has-text('one')")
            wait(page, f"{STATE} === 'training' && {ROUND} > 2")
            before = page.evaluate(ROUND)
            wait(page, f"{ROUND} > {before + 3}")  # and goes on
            process.kill()
            process.wait()
            wait(page, f"{STATE} === 'killed'")
            page.click("button:has-text('Resume')")
            wait(page, f"{STATE} === 'training' && {ROUND} > {before}")
            page.click("button:has-text('Stop after this round')")
            wait(page, f"{STATE} === 'stopped'")
            assert read_status(runs / "one" / "status.json").state == "stopped"
            page.click("button:has-text('Resume')")
            wait(page, f"{STATE} === 'training'")
            os.kill(read_status(runs / "one" / "status.json").pid, signal.SIGKILL)
            wait(page, f"{STATE} === 'killed'")
            shutil.rmtree(runs / "one")  # and once more from the beginning, with other settings
            process = train(tmp_path, "--set", "server.rounds=99999")
            again = "document.querySelector('.figures dd')?.textContent.includes('of 99999')"
            wait(page, f"{STATE} === 'training' && {again} && {ROUND} > 0")
            wait(page, "document.querySelectorAll('path.curve').length > 0")
        finally:
            process.kill()
            process.wait()
            with contextlib.suppress(RecordError, ProcessLookupError):  # a run that was resumed
                status = read_status(runs / "one" / "status.json")
                if status.pid != process.pid and status.state in LIVE:
                    os.kill(status.pid, signal.SIGKILL)


def test_a_damaged_journal_shows_a_sentence(watched, open_page):
    page = open_page(watched)
    page.wait_for_selector("text=the journal is damaged")
    assert "Traceback" not in page.content()
    page.goto(f"{watched}#/run/broken")
    page.wait_for_selector(".problem")
    assert page.locator("main h1").inner_text() == "broken"


def test_names_are_text_and_never_code(watched, open_page):
    page = open_page(f"{watched}#/run/script")
    page.click("summary:has-text('Settings')")
    page.wait_for_selector("td:has-text('<script>alert(1)</script>')")
    assert page.locator("main script").count() == 0


# ---- nobody else is asked --------------------------------------------------------------------


def test_a_planted_request_is_noticed(browser, tmp_path):
    """The check behind `open_page` fails for a page that asks somebody else."""
    (tmp_path / "page.html").write_text(
        "<!doctype html><title>x</title><script>new Image().src = 'http://192.0.2.1/x.png';"
        "</script>"
    )
    handler = partial(http.server.SimpleHTTPRequestHandler, directory=tmp_path)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/page.html"
        with window(browser, address) as (_, asked):
            assert asked.outside == ["http://192.0.2.1/x.png"]
        with window(browser, (tmp_path / "page.html").as_uri(), tmp_path.as_uri()) as (_, asked):
            assert asked.outside == ["http://192.0.2.1/x.png"]
        server.shutdown()


def test_nothing_can_be_fetched_from_elsewhere(watched, browser):
    """Besides not asking, the page may not: its policy forbids it."""
    page = browser.new_page()
    page.goto(watched)
    why = page.evaluate("fetch('http://127.0.0.1:9/').then(() => 'fetched', e => e.message)")
    assert why != "fetched"
    refused = page.evaluate(
        """() => new Promise((done) => {
            document.addEventListener('securitypolicyviolation', (e) => done(e.blockedURI));
            const image = new Image(); image.src = 'http://localhost:9/x.png';
            document.body.append(image);
        })"""
    )
    assert "localhost:9" in refused
    page.close()


# ---- pictures of runs ------------------------------------------------------------------------


def test_runs_are_compared_by_a_click(typed, open_page):
    page = open_page(typed)
    page.check("[aria-label='Compare cifg']")
    page.check("[aria-label='Compare transformer']")
    page.click("text=Compare 2 runs")
    page.wait_for_selector("text=Settings that differ")
    wait(page, "document.querySelectorAll('path.curve').length === 4")
    strokes = page.eval_on_selector_all(
        "path.curve", "all => all.map(p => p.getAttribute('class'))"
    )
    assert len(set(strokes)) == 2  # one colour per run, the same in both charts
    page.wait_for_selector("th:has-text('model.name')")


def test_a_sweep_is_a_table(watched, open_page):
    page = open_page(watched)
    page.wait_for_selector("h2:has-text('grid')")
    page.wait_for_selector("th:has-text('rate')")


def test_a_tree_moves_with_its_rounds(watched, open_page):
    page = open_page(f"{watched}#/run/tree")
    page.wait_for_selector("svg.map")
    assert "perplexity 46" in page.get_attribute("svg.map", "aria-label")
    page.locator("input[type=range]").fill("1")
    moved = "document.querySelector('svg.map').getAttribute('aria-label').includes('{}')"
    wait(page, moved.format("perplexity 49"))
    assert page.locator("svg.map path.route").count() == 1
    assert page.locator("svg.map path.hears").count() == 1
    assert page.locator("svg.map path.heard").count() == 1
    assert "sent 7.0 kB up" in page.locator("svg.map").inner_html()
    page.click("text=Play the rounds")
    wait(page, moved.format("perplexity 46"))


def test_a_federation_has_a_map_with_bytes_per_edge(watched, open_page):
    page = open_page(f"{watched}#/run/networked")
    page.wait_for_selector("svg.map")
    said = page.get_attribute("svg.map", "aria-label")
    for words in ("north answered", "south late", "east refused"):
        assert words in said
    assert "↑ 3.0 kB  ↓ 5.0 kB" in page.locator("svg.map").text_content()


# ---- the keyboard ----------------------------------------------------------------------------


def test_suggestions_of_the_trained_model_appear_after_each_key(real, typed, open_page):
    """Key by key what the run's own model says, in the same order: real text, a real server."""
    typist = Typist(*open_model(real / "runs" / "cifg"))
    page = open_page(f"{typed}#/keyboard/cifg")
    page.wait_for_selector(".words button")
    text, seen = "", set()
    for key in "the people of the united st":
        page.locator("#text").press("Space" if key == " " else key)
        text += key
        wait(page, f"document.querySelector('.words').dataset.after === {text!r}")
        shown = page.eval_on_selector_all(
            ".words button", "all => all.map((b) => b.firstChild.textContent)"
        )
        assert shown == [word for word, _ in typist.suggest(text, 3)], text
        seen.add(tuple(shown))
    assert len(seen) > 5  # what is typed decides
    assert shown[0] == "states"  # it has learned something
    page.locator(".words button").first.click()
    wait(page, "document.querySelector('#text').value === 'the people of the united states '")


def test_models_stand_side_by_side(typed, open_page):
    page = open_page(f"{typed}#/keyboard/cifg/transformer")
    wait(page, "document.querySelectorAll('.board .words button').length === 6")
    page.locator("#text").press_sequentially("we")
    wait(page, "[...document.querySelectorAll('.words')].every(w => w.dataset.after === 'we')")


# ---- everybody can use it --------------------------------------------------------------------


def problems(page, axe):
    """What the accessibility checker finds, down to the moderate."""
    page.evaluate(axe)
    return [
        (found["id"], node["html"][:200])
        for found in page.evaluate("axe.run().then(r => r.violations)")
        if found["impact"] != "minor"
        for node in found["nodes"]
    ]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1200, 400])
def test_the_pages_are_accessible(watched, typed, open_page, axe, scheme, width):
    options = {"color_scheme": scheme, "viewport": {"width": width, "height": 800}}
    of_all = ("", "run/tree", "run/networked", "run/broken", "compare/plain/tree", "compare")
    places = [f"{watched}#/{place}" for place in (*of_all, "keyboard")]
    places += [f"{typed}#/{place}/cifg" for place in ("run", "keyboard")]
    for place in places:
        page = open_page(place, **options)
        page.wait_for_selector("main h1")
        time.sleep(1.5)
        assert not (found := problems(page, axe)), (place, found)
        wide = page.evaluate("document.documentElement.scrollWidth")
        assert wide <= width + 1, (place, wide)
