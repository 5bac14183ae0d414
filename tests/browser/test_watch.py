"""The live page in a real browser."""

import os
import signal
import subprocess
import sys
import time

import pytest

from fedlm.publish.formats import write_export
from fedlm.record.directory import RunDirectory
from fedlm.record.status import read_status
from tests.browser.conftest import watching
from tests.watch.runs import lines, make_run, round_line

TREE = {"tree": {"names": ["root", "north", "south"], "parents": [-1, 0, 0]}}
NODES = {
    "root": {"up_bytes": 0, "down_bytes": 0, "agreement": 0.5},
    "north": {"up_bytes": 7, "down_bytes": 9, "self_weight": 0.4},
    "south": {"up_bytes": 7, "down_bytes": 9, "self_weight": 0.8, "missed": True},
}
WAY = {"layer": 0, "from": "north", "to": "south", "likeness": {"south": 0.5}}
TALLY = {
    "round": 0, "answered": ["north"], "late": ["south"], "away": [], "refused": {"east": "no"},
    "garbage": {}, "up_bytes": 5, "down_bytes": 6,
}  # fmt: skip


@pytest.fixture(scope="module")
def watched(tmp_path_factory, trained):
    """A folder with one run of every kind, watched."""
    folder = tmp_path_factory.mktemp("watched")
    os.symlink(trained / "runs" / "tiny", folder / "link")  # links are not followed
    make_run(folder / "plain", rounds=8)
    (make_run(folder / "broken") / "journal.jsonl").write_text("{\n{\n")
    make_run(folder / "script", header={"recipe": {"model": {"name": "<script>alert(1)</script>"}}})
    make_run(folder / "tree", rounds=0, header=TREE, more=[
        round_line(n, nodes=NODES, routes=[WAY], places={"north": [50.0 - n, 40.0]})
        for n in range(5)])  # fmt: skip
    networked = make_run(folder / "networked")
    (networked / "nodes.jsonl").write_text(lines(TALLY, {**TALLY, "round": 1}))
    for rate in (0.1, 0.2):
        make_run(folder / "grid" / f"rate={rate}", header={"recipe": {"client": {"rate": rate}}})
    with watching(folder) as address:
        yield address


@pytest.fixture(scope="module")
def typed(trained):
    with watching(trained / "runs") as address:
        yield address


def train(folder, *more):
    """Start a run of many short rounds."""
    command = [sys.executable, "-m", "fedlm.cli.main", "train", "tiny.toml", "--out", "runs/one"]
    return subprocess.Popen(
        [*command, "--set", "server.rounds=4000", "--set", "run.devices=1", *more],
        cwd=folder,
        stderr=subprocess.DEVNULL,
    )


def wait(page, words):
    """Wait until an expression is true, asked from outside: the page's policy forbids eval."""
    for _ in range(1200):
        if page.evaluate(words):
            return
        page.wait_for_timeout(200)
    raise AssertionError(f"{words} is still false: {page.locator('main').inner_text()[:500]}")


ROUND = "Number(document.querySelector('.figures dd').textContent.split(' ')[0].replace(',', ''))"
STATE = "document.querySelector('main .state').textContent"


def test_the_page_follows_a_run_stops_it_and_resumes_it(tiny_recipe, open_page):
    folder = tiny_recipe.parent
    (folder / "runs").mkdir()
    with watching(folder / "runs") as address:
        page = open_page(address)
        wait(page, "document.querySelector('main').textContent.includes('No run is here yet')")
        process = train(folder)
        try:
            page.click("a:has-text('one')")  # it appears by itself
            wait(page, f"{STATE} === 'training' && {ROUND} > 2")
            before = page.evaluate(ROUND)
            wait(page, f"{ROUND} > {before + 3}")  # and goes on
            process.kill()
            process.wait()
            wait(page, f"{STATE} === 'killed'")
            page.click("text=Resume")
            wait(page, f"{STATE} === 'training' && {ROUND} > {before}")
            page.click("text=Stop after this round")
            wait(page, f"{STATE} === 'stopped'")
            assert read_status(folder / "runs" / "one" / "status.json").state == "stopped"
            page.click("text=Resume")
            wait(page, f"{STATE} === 'training'")
        finally:
            process.kill()
            status = read_status(folder / "runs" / "one" / "status.json")
            if status.pid != process.pid:
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


def test_runs_are_compared_by_a_click(watched, open_page):
    page = open_page(watched)
    page.check("[aria-label='Compare plain']")
    page.check("[aria-label='Compare grid/rate=0.1']")
    page.click("text=Compare 2 runs")
    page.wait_for_selector("text=Settings that differ")
    wait(page, "document.querySelectorAll('path.curve').length === 4")
    strokes = page.eval_on_selector_all(
        "path.curve", "all => all.map(p => p.getAttribute('class'))"
    )
    assert len(set(strokes)) == 2  # one colour per run, the same in both charts


def test_a_tree_moves_with_its_rounds(watched, open_page):
    page = open_page(f"{watched}#/run/tree")
    page.wait_for_selector("svg.map")
    assert "perplexity 46" in page.get_attribute("svg.map", "aria-label")
    page.locator("input[type=range]").fill("1")
    wait(
        page,
        "document.querySelector('svg.map').getAttribute('aria-label').includes('perplexity 49')",
    )
    assert page.locator("svg.map path.route").count() == 1


def test_a_federation_has_a_map(watched, open_page):
    page = open_page(f"{watched}#/run/networked")
    page.wait_for_selector("svg.map")
    said = page.get_attribute("svg.map", "aria-label")
    for words in ("north answered", "south late", "east refused"):
        assert words in said


def test_a_suggestion_appears_after_each_key(typed, open_page):
    page = open_page(f"{typed}#/keyboard/tiny")
    page.wait_for_selector(".words button")
    text = ""
    for key in "the ca":
        page.locator("#text").press("Space" if key == " " else key)
        text += key
        wait(page, f"document.querySelector('.words').dataset.after === {text!r}")
        assert page.locator(".words button").count() >= 1
    page.locator(".words button").first.click()
    wait(page, "document.querySelector('#text').value === 'the cat '")


def test_an_exported_keyboard_needs_no_server(trained, tmp_path, open_page):
    write_export(RunDirectory(trained / "runs" / "tiny"), "web-int8", tmp_path)
    page = open_page((tmp_path / "index.html").as_uri(), allowed=tmp_path.as_uri())
    page.wait_for_selector("#words button")
    page.locator("#text").press_sequentially("the ca")
    wait(page, "document.querySelector('#words').dataset.after === 'the ca'")
    assert page.locator("#words button").first.inner_text().startswith("cat")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1200, 400])
def test_the_pages_are_accessible(watched, typed, open_page, axe, scheme, width):
    options = {"color_scheme": scheme, "viewport": {"width": width, "height": 800}}
    places = [f"{watched}#/", f"{watched}#/run/tree", f"{watched}#/run/networked",
              f"{watched}#/run/broken", f"{watched}#/compare/plain/tree",
              f"{typed}#/keyboard/tiny"]  # fmt: skip
    for place in places:
        page = open_page(place, **options)
        page.wait_for_selector("main h1")
        time.sleep(1.5)
        page.evaluate(axe)
        found = page.evaluate("axe.run().then(r => r.violations)")
        serious = [
            (v["id"], n["html"][:200])
            for v in found
            if v["impact"] in ("serious", "critical")
            for n in v["nodes"]
        ]
        assert not serious, (place, serious)
        wide = page.evaluate("document.documentElement.scrollWidth")
        assert wide <= width + 1, (place, wide)
