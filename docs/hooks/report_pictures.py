"""Pictures of reports and of a statement for the documentation; `make pictures` takes them too.

    python docs/hooks/report_pictures.py runs        # a folder with finished runs

Needs Chromium alone (`apt-get install chromium`).
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from fedlm.core.errors import RecordError
from fedlm.publish.pages import page_of
from fedlm.publish.statement import statement_of
from fedlm.record import statement
from fedlm.record.facts import facts_of

OUT = Path(__file__).parents[1] / "pictures"
LARGEST = 150_000  # bytes of a picture
WIDE, PHONE = (900, 1000), (420, 900)
SECONDS = 120  # for one picture


def main(folder: Path) -> None:
    """Take pictures of a run, a tree, a comparison and a statement, of those that are there."""
    facts = {path.parent: facts_of(path.parent) for path in sorted(folder.glob("*/journal.jsonl"))}
    flat = [run for run, found in facts.items() if "tree" not in found.header]
    trees = [run for run, found in facts.items() if "tree" in found.header]
    longest = sorted(flat, key=lambda run: -len(facts[run].rounds))
    if longest:
        take("report", page_of(longest[:1]), WIDE)
        take("report-phone", page_of(longest[:1]), PHONE, dark=True)
    if trees:
        take("report-tree", page_of(trees[:1]), WIDE, at="The tree")
    tokens: dict[str, list[Path]] = {}  # runs whose perplexities can be compared
    for run in flat:
        of = (facts[run].header.get("store") or {}).get("tokenizer_sha256", "")
        tokens.setdefault(of, []).append(run)
    alike = max(tokens.values(), key=len, default=[])
    if len(alike) > 1:
        take("report-compared", page_of(alike), WIDE)
    for run, found in facts.items():
        if found.epsilon is not None:
            take("statement", statement.page(statement_of(run)), WIDE)
            break


def take(name: str, text: str, size: tuple[int, int], *, dark: bool = False, at: str = "") -> None:
    """Write one picture, of a page from a heading on."""
    if at:  # a page without what is above the heading
        top, _, rest = text.partition("<main>")
        text = f"{top}<main>{rest[rest.index(f'<h2>{at}</h2>') :]}"
    program = shutil.which("chromium")
    if program is None:
        raise RecordError("chromium is not there: run apt-get install chromium.")
    OUT.mkdir(exist_ok=True)
    path = OUT / f"{name}.png"
    with tempfile.TemporaryDirectory() as home:
        (Path(home) / "page.html").write_text(text, encoding="utf-8")
        scheme = ["--blink-settings=preferredColorScheme=0"] if dark else []
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", *scheme]
        options += [f"--user-data-dir={home}/profile", f"--window-size={size[0]},{size[1]}"]
        asked = [program, *options, f"--screenshot={path}", f"file://{home}/page.html"]
        subprocess.run(asked, check=True, capture_output=True, timeout=SECONDS)
    assert path.stat().st_size < LARGEST, f"{path} has {path.stat().st_size} bytes"
    print(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
