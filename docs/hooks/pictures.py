"""Pictures of the live page for the documentation: `make pictures`.

    python docs/hooks/pictures.py runs        # a folder with finished runs, one of them a tree

Needs playwright and Chromium (`make test-browser` installs them).
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

OUT = Path(__file__).parents[1] / "pictures"
LARGEST = 150_000  # bytes of a picture


def main(folder: Path) -> None:
    """Start `fedlm watch` over a folder, and take a picture of every page."""
    command = [sys.executable, "-m", "fedlm.cli.main", "watch", str(folder), "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    address = server.stdout.readline().strip()
    try:
        with sync_playwright() as play:
            program = shutil.which("chromium")
            browser = play.chromium.launch(executable_path=program, args=["--no-sandbox"])
            for dark in (False, True):
                scheme = "dark" if dark else "light"
                size = {"width": 400 if dark else 1100, "height": 760}
                page = browser.new_context(viewport=size, color_scheme=scheme).new_page()
                take_all(page, address, "-phone" if dark else "")
            browser.close()
    finally:
        server.terminate()
        server.wait()


def take_all(page: Page, address: str, kind: str) -> None:
    """Take the pictures of one screen."""
    page.goto(address)
    page.wait_for_selector("tbody tr")
    names = page.eval_on_selector_all("tbody th a", "all => all.map(a => a.getAttribute('href'))")
    ids = [name.removeprefix("#/run/") for name in names]
    take(page, f"watch-runs{kind}", "tbody tr")
    trees = [id for id in ids if has(page, address, id, "svg.map")]
    plain = [id for id in ids if id not in trees]
    show(page, address, f"#/run/{plain[-1]}", "path.curve")
    take(page, f"watch-run{kind}", "path.curve")
    show(page, address, f"#/compare/{'/'.join(plain[:4])}", "path.curve")
    take(page, f"watch-compare{kind}", "path.curve")
    if trees:
        size = page.viewport_size or {"width": 850, "height": 760}
        # Many thin curves make a large file: a smaller window.
        page.set_viewport_size({**size, "width": min(850, size["width"])})
        show(page, address, f"#/run/{trees[0]}", "svg.map")
        page.locator("svg.map").scroll_into_view_if_needed()
        take(page, f"watch-tree{kind}", "svg.map")
        page.set_viewport_size(size)
    show(page, address, f"#/keyboard/{plain[-1]}", ".words button")
    page.locator("#text").press_sequentially("we must protect the ")
    page.wait_for_timeout(1500)
    take(page, f"watch-keyboard{kind}", ".words button")


def has(page: Page, address: str, id: str, wanted: str) -> bool:
    """Return whether a run's page shows something."""
    show(page, address, f"#/run/{id}", "summary")
    return page.locator(wanted).count() > 0


def show(page: Page, address: str, place: str, wanted: str) -> None:
    """Go to a place of the page and wait for a part of it."""
    page.goto(address.split("?")[0] + place)
    page.wait_for_selector(wanted, timeout=120_000)


def take(page: Page, name: str, wanted: str) -> None:
    """Write one picture."""
    page.wait_for_selector(wanted)
    page.wait_for_timeout(400)
    OUT.mkdir(exist_ok=True)
    path = OUT / f"{name}.png"
    page.screenshot(path=path)
    assert path.stat().st_size < LARGEST, f"{path} has {path.stat().st_size} bytes"
    print(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
