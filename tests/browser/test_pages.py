"""Reports, comparisons, statements and exported keyboards in a real browser."""

import http.server
import re
import threading
from functools import partial
from pathlib import Path

import pytest

from fedlm.inference import Typist, open_model
from fedlm.publish.formats import write_export
from fedlm.record.directory import RunDirectory
from tests.browser.conftest import WORDS
from tests.browser.test_watch import problems, wait

RUNTIME = Path(__file__).parents[2] / ".browser" / "node_modules" / "onnxruntime-web" / "dist"
NAMES = ["report", "comparison", "tree", "private", "statement", "keyboard"]
LARGEST = 300_000  # bytes of a page


@pytest.mark.parametrize("name", NAMES)
def test_a_page_is_accessible_in_light_and_dark_wide_and_narrow(pages, open_page, axe, name):
    for scheme in ("light", "dark"):
        for width in (1200, 400):
            page = open_page(
                pages[name].as_uri(),
                allowed=pages[name].parent.as_uri(),
                color_scheme=scheme,
                viewport={"width": width, "height": 800},
            )
            for folded in page.locator("details").all():
                folded.evaluate("d => { d.open = true; }")
            assert not (found := problems(page, axe)), (scheme, width, found)
            wide = page.evaluate("document.documentElement.scrollWidth")
            assert wide <= width + 1, (scheme, wide)


@pytest.mark.parametrize("name", ["report", "comparison", "tree", "private", "statement"])
def test_a_page_is_small_and_switches_its_axis_without_a_script(pages, open_page, name):
    assert pages[name].stat().st_size < LARGEST
    page = open_page(pages[name].as_uri(), allowed=pages[name].parent.as_uri())
    for choice in page.locator(".switch").all():
        buttons = choice.locator("> label").all()
        shown = set()
        for button in buttons:
            button.click()
            (panel,) = [p for p in choice.locator("> .panel").all() if p.is_visible()]
            shown.add(panel.get_attribute("class"))
        assert len(shown) == len(buttons) > 1


def test_a_statement_is_one_sheet_of_paper(pages, open_page):
    page = open_page(pages["statement"].as_uri(), allowed=pages["statement"].parent.as_uri())
    for paper in ("A4", "Letter"):
        assert sheets(page.pdf(format=paper)) == 1, paper


def sheets(pdf):
    """Return the number of pages of a PDF file."""
    return len(re.findall(rb"/Type\s*/Page\b", pdf))


@pytest.mark.parametrize("kind", ["web", "web-int8"])
@pytest.mark.parametrize("run", ["cifg", "transformer"])
def test_an_exported_keyboard_types_as_the_model_does(real, tmp_path, open_page, run, kind):
    """From disk and from any web server: recurrent models alone, others by onnxruntime-web."""
    if run == "transformer" and not RUNTIME.is_dir():
        pytest.skip(f"no onnxruntime-web: {WORDS}")
    runtime = RUNTIME if run == "transformer" else None
    directory = RunDirectory(real / "runs" / run)
    write_export(directory, kind, tmp_path, onnxruntime=runtime)
    typist = Typist(*open_model(directory.path))
    handler = partial(Quiet, directory=tmp_path)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        served = f"http://127.0.0.1:{server.server_port}/index.html"
        for address, allowed in (
            ((tmp_path / "index.html").as_uri(), tmp_path.as_uri()),
            (served, None),
        ):
            page = open_page(address, allowed=allowed)
            page.wait_for_selector("#words button")
            for text in ("the people of the united st", "we have no "):
                page.locator("#text").fill("")
                page.locator("#text").press_sequentially(text)
                wait(page, f"document.querySelector('#words').dataset.after === {text!r}")
                shown = page.eval_on_selector_all(
                    "#words button", "all => all.map((b) => b.firstChild.textContent)"
                )
                ours = [word for word, _ in typist.suggest(text, 3)]
                if kind == "web":
                    assert shown == ours, (address, text)
                else:  # rounded weights may change the order of words that are alike
                    assert len(shown) == len(ours) and ours[0] in shown, (address, text)
        server.shutdown()


class Quiet(http.server.SimpleHTTPRequestHandler):
    """A web server of files, without its log."""

    def log_message(self, *args):
        """Say nothing."""
