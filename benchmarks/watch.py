"""How quick the live page and its keyboard are.

    python -m benchmarks.watch                 # 500 runs, and one with 10,000 rounds
    python -m benchmarks.watch --keyboard      # only the keyboard, 1.4 million parameters

With playwright and Chromium (`make test-browser` installs them) it also prints what a reader sees:
the time from opening the address until something is painted, until the first and all rows, or the
curve of 10,000 rounds, are there; and the time from a key to the words above the text field.
Time only a machine that does nothing else; seconds of computing are right on a busy one too.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import fedlm
from fedlm.inference import Typist, open_model
from fedlm.watch.board import Board
from fedlm.watch.guard import PageGuard
from fedlm.watch.server import HttpServer, WatchServer, listen

RUNS, ROUNDS, LONG = 500, 200, 10_000
KEYS = 400


def make_run(path: Path, rounds: int) -> None:
    """Write a run directory with a journal of so many rounds."""
    path.mkdir(parents=True)
    (path / "recipe.toml").write_text("")
    recipe = {f"table{t}": {f"setting{s}": s / 7 for s in range(12)} for t in range(7)}
    header = {
        "kind": "header",
        "recipe": {**recipe, "server": {"rounds": rounds}, "model": {"name": "si-cifg"}},
        "start": {"perplexity": 5000.0},
        "parameters": 1_412_250,
    }
    lines = [header]
    for n in range(rounds):
        lines.append(
            {
                "kind": "round", "round": n, "refused": 0, "steps": 80, "tokens": 12_345,
                "members": 20, "loss": 9.0 * 0.9995**n, "seconds": 0.93,
                "upload_bytes": 5_600_000 * (n + 1), "download_bytes": 5_600_000 * (n + 1),
                "unclipped": 20, **({"perplexity": 5000.0 * 0.9996**n} if n % 10 == 9 else {}),
            }
        )  # fmt: skip
    (path / "journal.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


class Timed:
    """The seconds of a block, on the clock and of this process: they part where others compute."""

    def __enter__(self) -> Timed:
        self._began = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        self.wall = time.perf_counter() - self._began[0]
        self.cpu = time.process_time() - self._began[1]

    def __str__(self) -> str:
        return f"{self.wall:.3f} s ({self.cpu:.3f} s of computing)"


def reading(folder: Path) -> None:
    """Print the time to read all rows, to read them again, and to read the long run."""
    board = Board(folder)
    with Timed() as first:
        rows = board.rows()
    board._fresh = -1.0
    with Timed() as again:
        board.rows()
    with Timed() as long:
        board.details("long")
    with Timed() as unchanged:
        board.details("long")
    print(f"{len(rows)} rows: first {first}, unchanged {again}", flush=True)
    print(f"{LONG:,} rounds: first {long}, unchanged {unchanged}", flush=True)


SEEN = """window.seen = [];
new MutationObserver(() => seen.push([performance.now(),
  document.querySelectorAll('tbody tr').length, document.querySelector('path.curve') !== null]))
  .observe(document, {childList: true, subtree: true})"""
PAINTED = (
    "performance.getEntriesByName('first-contentful-paint').map((entry) => entry.startTime)[0]"
)
LOADS = 5


@contextmanager
def browsing(folder: Path) -> Iterator[tuple[WatchServer, PageGuard, Any] | None]:
    """Serve a folder and open a browser; None, and a word, where there is none."""
    program = shutil.which("chromium")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        program = None
    if program is None:
        print("no chromium, or no playwright: make test-browser installs them")
        yield None
        return
    with listen("127.0.0.1", 0) as made, sync_playwright() as play:
        guard = PageGuard("127.0.0.1", made.getsockname()[1])
        watch = WatchServer(folder, guard)
        server = HttpServer(watch)
        serving = threading.Thread(target=server.run, kwargs={"sockets": [made]}, daemon=True)
        serving.start()
        options = ["--no-sandbox", "--disable-gpu"]
        browser = play.chromium.launch(executable_path=program, args=options)
        yield watch, guard, browser
        browser.close()
        watch.ends = server.should_exit = True
        serving.join(10)


def painting(folder: Path) -> None:
    """Print the time until a browser shows anything, the first rows, all rows, and the curve."""
    with browsing(folder) as opened:
        if opened is None:
            return
        watch, guard, browser = opened
        for what, place, stages in [
            (f"{RUNS + 1} runs", "#/", {"first rows": (1, 1), "all rows": (1, RUNS + 1)}),
            (f"{LONG:,} rounds", "#/run/long", {"curve": (2, True)}),
        ]:
            found: dict[str, list[float]] = {}
            for _ in range(LOADS):
                page = browser.new_page()
                page.add_init_script(SEEN)  # the page's policy forbids eval, not this
                watch.board._known.clear()  # as if it had just been started
                watch.board._rows.clear()
                watch.board._scanned = watch.board._fresh = -1e9
                page.goto(f"{guard.address}{place}", wait_until="commit")
                last = list(stages.values())[-1]
                while not any(now[last[0]] >= last[1] for now in page.evaluate("seen")):
                    time.sleep(0.2)
                found.setdefault("first paint", []).append(page.evaluate(PAINTED))
                for name, (column, least) in stages.items():
                    when = next(now[0] for now in page.evaluate("seen") if now[column] >= least)
                    found.setdefault(name, []).append(when)
                page.close()
            told = (f"{name} {np.median(ms) / 1000:.2f} s" for name, ms in found.items())
            print(f"in the browser, {what}: {', '.join(told)} (medians of {LOADS})", flush=True)


RECIPE = {
    "data": {"source": "sotu", "tokenizer": "words", "vocabulary": 10_000, "layout": "windows"},
    "model": {"name": "si-cifg"},
    "server": {"rounds": 1, "cohort": 2},
    "client": {"max_examples": 8},
}


TYPED = """window.typed = []; window.shown = [];
document.addEventListener('input', () => typed.push(performance.now()), true);
new MutationObserver(() => shown.push(performance.now()))
  .observe(document, {subtree: true, attributes: true, attributeFilter: ['data-after']})"""
TEXT = (
    "we must protect the people of the united states and their government from every danger that "
    "the congress can foresee. " * 4
)[:KEYS]


def typing(folder: Path) -> None:
    """Print how long a key takes: in the model, and in a browser from the key to the words."""
    run = fedlm.train(RECIPE, out=folder / "typed")
    typist = Typist(*open_model(run.path))
    typist.suggest("")  # compiles
    of_model, computed, of_browser = [], [], []
    for length in range(1, len(TEXT) + 1):
        with Timed() as key:
            typist.suggest(TEXT[:length])
        of_model.append(1000 * key.wall)
        computed.append(1000 * key.cpu)
    with browsing(folder) as opened:
        if opened is not None:
            _, guard, browser = opened
            page = browser.new_page()
            page.add_init_script(TYPED)
            page.goto(f"{guard.address}#/keyboard/typed")
            page.wait_for_selector(".words button")
            before = page.evaluate("shown.length")
            for number, letter in enumerate(TEXT, 1):
                page.keyboard.type(letter) if number > 1 else page.locator("#text").type(letter)
                while page.evaluate("shown.length") < before + number:
                    time.sleep(0.01)
            pairs = zip(page.evaluate("typed"), page.evaluate("shown")[before:], strict=True)
            of_browser = [shown - typed for typed, shown in pairs]
    count = json.loads((run.path / "journal.jsonl").open().readline())["parameters"]
    print(f"{count:,} parameters, {len(TEXT)} keys:")
    named = {"model": of_model, "model, computing": computed, "browser, to the words": of_browser}
    for name, each in named.items():
        if each:
            middle, late = np.percentile(each, [50, 95])
            print(f"  {name}: median {middle:.1f} ms, 95th {late:.1f} ms")


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--keyboard", action="store_true")
    if not parser.parse_args().keyboard:
        with tempfile.TemporaryDirectory() as folder:
            for n in range(RUNS):
                make_run(Path(folder) / f"run-{n:03d}", ROUNDS)
            make_run(Path(folder) / "long", LONG)
            reading(Path(folder))
            painting(Path(folder))
    with tempfile.TemporaryDirectory() as folder:
        typing(Path(folder))


if __name__ == "__main__":
    main()
