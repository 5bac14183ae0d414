"""How quick the live page and its keyboard are.

    python -m benchmarks.watch                 # 500 runs, and one with 10,000 rounds
    python -m benchmarks.watch --keyboard      # only the keyboard, 1.4 million parameters

With playwright and Chromium (`make test-browser` installs them) it also prints what a reader sees:
the time from opening the address until all rows, or the curve of 10,000 rounds, are on the screen.
Time only a machine that does nothing else; seconds of computing are right on a busy one too.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

from fedlm.core.keys import key_for
from fedlm.corpus import tokenizer as tok
from fedlm.inference import Typist
from fedlm.models import catalog
from fedlm.watch.board import Board
from fedlm.watch.guard import Guard
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


def painting(folder: Path) -> None:
    """Print the time until a browser shows the table, and the long run's curve."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        print("no playwright: make test-browser installs it")
        return
    program = shutil.which("chromium")
    if program is None:
        print("no chromium: make test-browser installs it")
        return
    with listen("127.0.0.1", 0) as made, sync_playwright() as play:
        guard = Guard("127.0.0.1", made.getsockname()[1])
        watch = WatchServer(folder, guard)
        server = HttpServer(watch)
        threading.Thread(target=server.run, kwargs={"sockets": [made]}, daemon=True).start()
        browser = play.chromium.launch(
            executable_path=program, args=["--no-sandbox", "--disable-gpu"]
        )
        page = browser.new_page()
        page.goto("about:blank")
        for what, place, wanted in [
            (f"{RUNS + 1} runs", "#/", f"document.querySelectorAll('tbody tr').length > {RUNS}"),
            (f"{LONG:,} rounds", "#/run/long", "document.querySelector('path.curve') !== null"),
        ]:
            watch.board._known.clear()  # as if it had just been started
            watch.board._rows.clear()
            watch.board._scanned = watch.board._fresh = -1e9
            began = time.perf_counter()
            page.goto(f"{guard.address}{place}", wait_until="commit")
            while not page.evaluate(wanted):  # from outside: the page's policy forbids eval
                time.sleep(0.005)
            print(f"on the screen, {what}: {time.perf_counter() - began:.2f} s", flush=True)
            page.goto("about:blank")
        browser.close()
        watch.ends = server.should_exit = True


def typing() -> None:
    """Print how long a key takes with a model of 1.4 million parameters."""
    rng = np.random.default_rng(0)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    words = sorted({"".join(rng.choice(letters, rng.integers(2, 9))) for _ in range(11_000)})[
        :9_996
    ]
    tokenizer = tok.from_words(words, lowercase=True)
    size = catalog.Dimensions(vocab=tokenizer.vocabulary)
    typist = Typist(catalog.make("si-cifg", size, key_for(0, "init")), tokenizer)
    text = " ".join(rng.choice(words, 200))[:KEYS]
    typist.suggest("")  # compiles
    taken, computed = [], []
    for length in range(1, len(text) + 1):
        with Timed() as key:
            typist.suggest(text[:length])
        taken.append(1000 * key.wall)
        computed.append(1000 * key.cpu)
    count = catalog.count("si-cifg", size)
    print(f"{count:,} parameters, {len(taken)} keys:")
    for name, each in (("on the clock", taken), ("computing", computed)):
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
    typing()


if __name__ == "__main__":
    main()
