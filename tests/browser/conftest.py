"""A real browser, and the live page in it; skipped with a word where there is none."""

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

AXE = Path(__file__).parents[2] / ".browser" / "node_modules" / "axe-core" / "axe.min.js"
WORDS = "make test-browser installs it"


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in Path(item.fspath).parents:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def browser():
    """Debian's Chromium."""
    sync_api = pytest.importorskip("playwright.sync_api", reason=f"no playwright: {WORDS}")
    program = shutil.which("chromium")
    if program is None:
        pytest.skip(f"no chromium: {WORDS}")
    with sync_api.sync_playwright() as play:
        # Containers have no user namespaces for the sandbox; the pages are our own.
        found = play.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def open_page(browser):
    """Opens an address; afterwards no request has gone elsewhere, and no script has failed."""
    contexts, asked, failed = [], [], []

    def open_(address, allowed=None, **options):
        context = browser.new_context(**options)
        contexts.append(context)
        home = urlsplit(address)
        page = context.new_page()
        page.on(
            "request", lambda r: asked.append((r.url, allowed or f"{home.scheme}://{home.netloc}/"))
        )
        page.on("websocket", lambda w: asked.append((w.url, "no websocket")))
        page.on("pageerror", lambda error: failed.append(str(error)))
        page.set_default_timeout(120_000)
        page.goto(address)
        return page

    yield open_
    for context in contexts:
        context.close()
    assert asked and not [url for url, home in asked if not url.startswith((home, "data:"))]
    assert not failed


@contextlib.contextmanager
def watching(folder):
    """`fedlm watch` over a folder, as a process; yields the address."""
    process = subprocess.Popen(
        [sys.executable, "-m", "fedlm.cli.main", "watch", str(folder), "--port", "0"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    try:
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.wait(30)
        process.stdout.close()


@pytest.fixture(scope="session")
def axe():
    """The accessibility checker, as text."""
    if not AXE.is_file():
        pytest.skip(f"no axe-core: {WORDS}")
    return AXE.read_text(encoding="utf-8")
