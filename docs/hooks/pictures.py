"""Pictures of every page for the documentation: `make pictures`.

    python docs/hooks/pictures.py runs/pictures        # the runs of picture_runs.py

Needs playwright and Chromium (`make test-browser` installs them). It stops if a page asks for
anything beyond this machine.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

from fedlm.publish.formats import write_export
from fedlm.publish.pages import page_of
from fedlm.publish.statement import statement_of
from fedlm.record.directory import RunDirectory
from fedlm.record.statement import statement_page

OUT = Path(__file__).parents[1] / "pictures"
LARGEST = 200_000  # bytes of a picture
WIDE, PHONE = (1000, 760), (420, 860)
HERE = ("http://127.0.0.1:", "file://", "data:", "blob:")
TYPED = "we must protect the "


def main(folder: Path) -> None:
    """Take a picture of every page."""
    with sync_playwright() as play, tempfile.TemporaryDirectory() as made:
        browser = play.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
        )
        live(browser, folder)
        files(browser, folder, Path(made))
        browser.close()


@contextlib.contextmanager
def window(browser: Browser, size: tuple[int, int], *, dark: bool = False) -> Iterator[Page]:
    """Open a window, and stop if its page asks for anything beyond this machine."""
    asked: list[str] = []
    context = browser.new_context(
        viewport={"width": size[0], "height": size[1]}, color_scheme="dark" if dark else "light"
    )
    page = context.new_page()
    page.on("request", lambda request: asked.append(request.url))
    page.set_default_timeout(120_000)
    yield page
    context.close()
    outside = [url for url in asked if not url.startswith(HERE)]
    if outside:
        raise SystemExit(f"a page asked for {outside[0]}")


# ---- the live page -----------------------------------------------------------------------------


def live(browser: Browser, folder: Path) -> None:
    """Start `fedlm watch` over a folder, and take the pictures of its pages."""
    command = [sys.executable, "-m", "fedlm.cli.main", "watch", str(folder), "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    address = server.stdout.readline().strip()
    cells = sorted(path.parent.name for path in (folder / "cells").glob("*/summary.json"))
    first, compared = f"cells%2F{cells[0]}", "/".join(f"cells%2F{name}" for name in cells)
    try:
        for size, dark, kind in ((WIDE, False, ""), (PHONE, True, "-phone")):
            with window(browser, size, dark=dark) as page:
                page.goto(address)
                take(page, f"watch-runs{kind}", "tbody tr")
                place(page, address, f"#/run/{first}", "path.curve")
                take(page, f"watch-run{kind}", "path.curve")
                place(page, address, "#/run/tree", "svg.map")
                take(page, f"watch-tree{kind}", "svg.map", at="h2:has-text('The tree')")
                if kind:
                    continue
                place(page, address, "#/run/demo%2Fnetworked", "svg.map")
                take(page, "watch-federation", "svg.map", at="h2:has-text('The federation')")
                place(page, address, f"#/compare/{compared}", "path.curve")
                take(page, "watch-compare", "path.curve", at=".pair")
                place(page, address, f"#/keyboard/{first}/tree", ".board:nth-child(2) button")
                page.locator("#text").press_sequentially(TYPED)
                done = f".words[data-after={TYPED!r}]"
                page.wait_for_selector(f".board:nth-child(1) {done}")
                take(page, "watch-keyboard", f".board:nth-child(2) {done}")
    finally:
        server.terminate()
        server.wait()


def place(page: Page, address: str, where: str, wanted: str) -> None:
    """Go to a place of the live page and wait for a part of it."""
    page.goto(address.split("?")[0] + where)
    page.wait_for_selector(wanted)


# ---- pages that are files ----------------------------------------------------------------------


def files(browser: Browser, folder: Path, made: Path) -> None:
    """Take the pictures of reports, a statement and an exported keyboard."""
    cells = sorted(path.parent for path in (folder / "cells").glob("*/summary.json"))
    tall = (WIDE[0], 1100)
    for name, text, size, at in (
        ("report", page_of(cells[:1]), tall, ""),
        ("report-phone", page_of(cells[:1]), PHONE, ""),
        ("report-tree", page_of([folder / "tree"]), tall, "h2:has-text('The tree')"),
        ("report-private", page_of([folder / "private"]), tall, "h2:has-text('Privacy')"),
        ("report-compared", page_of(cells), tall, ""),
        ("statement", statement_page(statement_of(folder / "private")), (1000, 1300), ""),
    ):
        file = made / f"{name}.html"
        file.write_text(text, encoding="utf-8")
        with window(browser, size, dark=size == PHONE) as page:
            page.goto(file.as_uri())
            take(page, name, "main", at=at)
            if name == "statement":  # as it is printed
                page.pdf(path=made / "statement.pdf", format="A4")
    write_export(RunDirectory(cells[0]), "web", made / "keyboard")
    with window(browser, PHONE) as page:
        page.goto((made / "keyboard" / "index.html").as_uri())
        page.wait_for_selector("#words button")
        page.locator("#text").press_sequentially(TYPED)
        take(page, "keyboard-phone", f"#words[data-after={TYPED!r}]")


def take(page: Page, name: str, wanted: str, *, at: str = "") -> None:
    """Write one picture, from the top of the page or from a part of it on."""
    page.wait_for_selector(wanted)
    if at:
        page.locator(at).first.evaluate("part => part.scrollIntoView()")
    page.wait_for_timeout(500)
    OUT.mkdir(exist_ok=True)
    path = OUT / f"{name}.png"
    page.screenshot(path=path)
    if path.stat().st_size > LARGEST:
        raise SystemExit(f"{path} has {path.stat().st_size} bytes")
    print(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
