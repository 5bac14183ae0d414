"""Would a leaf alone do as well as from a federation's model if it were more patient?

In:       leaves of `mixgenre-en` at a share of their text, and their models of `pays.py`.
Out:      a small file per leaf in `benchmarks/results/patience`; a table of those files, beside the
          lines of `pays.py`.
Promise:  the best model of a leaf's first run goes on at the same rate with four times the
          patience, then at the smaller rate as in `pays.py`; by the rows to choose by the better
          of that and the model of `pays.py` counts, with a cache. So what a federation's model
          gives beyond it is not owed to local training that was stopped too early.
Not here: sides and care (`pays.py`), copies of a leaf in place of others (`clones.py`).

    python -m benchmarks.patience --share 1.0 --leaves code-python chat-irc
    python -m benchmarks.patience --table
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from pathlib import Path

from benchmarks import pays
from benchmarks.cells import RESULTS, Cells, Facts, claimed, facts_digest
from benchmarks.clones import LEAVES, SIDE, cell_of, name_of
from benchmarks.pays import CHOSEN, LOCAL, SHARES, TRAINED_ON, Bench, Size
from fedlm.core.documents import read_json
from fedlm.core.errors import RecordError
from fedlm.engine.devices import use_devices
from fedlm.personal.ways import Attempt, finetune_and_cache
from fedlm.search.sweep import markdown

PATIENT = 4  # times the patience of `pays.py`
HEAD = ["text", "leaf", "local, personal", "local, patient", f"{SIDE}, trained on"]


def digest_of(share: float, size: Size) -> str:
    """Return the digest of all that decides the cells of a share."""
    return facts_digest({"like": pays.digest_of(cell_of(share, LOCAL), size), "patience": PATIENT})


def make(bench: Bench, share: float, leaf: str, cells: Cells) -> None:
    """Go on with a leaf's first run, more patiently, then at the smaller rate; keep the figures."""
    print(name_of(share, leaf), flush=True)
    began, cell = time.process_time(), cell_of(share, LOCAL)
    place = pays.prepare(cell, bench.size, bench.out)
    member = next(member for member in place.members if member.name == leaf)
    usual, first = (f(bench, cell, place, member) for f in (pays.both_runs, pays.trained_alone))
    batches = pays.batches_of(member.own, place)
    patient = bench.shop(place, cell.rate, batches)
    patient.patience *= PATIENT
    more = patient.train(
        first.params, member.own, member.choose, member.number, after=math.ceil(first.passes)
    )
    shop = bench.shop(place, pays.OWN_RATE * cell.rate, batches)
    passes = first.passes + more.passes
    last = shop.train(
        more.params, member.own, member.choose, member.number, after=math.ceil(passes)
    )
    at = Attempt(shop, member.own, member.choose, member.number)
    at.__dict__["tuned"] = min(
        (usual, last), key=lambda one: shop.perplexity(one.params, member.choose)
    )
    facts = {
        "share": share,
        "leaf": leaf,
        "patient": bench.report(finetune_and_cache(at), member),
        "passes": [first.passes, more.passes, last.passes],
        "core_seconds": time.process_time() - began,
    }
    cells.write(name_of(share, leaf), digest_of(share, bench.size), facts)


def tell(cells: Cells, kept: Cells, size: Size) -> str:
    """Return the table of what is kept."""
    rows = []
    for file in sorted(cells.folder.glob("*.json")):
        told = read_json(file, str(file), RecordError)
        share, leaf = told["share"], told["leaf"]
        own = cells.read(name_of(share, leaf), digest_of(share, size))
        sides = [cell_of(share, side) for side in (LOCAL, SIDE)]
        local, every = (kept.read(cell.name, pays.digest_of(cell, size)) for cell in sides)

        def shown(facts: Facts | None, way: str, leaf: str = leaf) -> str:
            found = facts["leaves"].get(leaf, {}) if facts else {}
            return f"{found[way]:.1f}" if way in found else "-"

        again = f"{own['patient']:.1f}" if own else "-"
        figures = [shown(local, CHOSEN), again, shown(every, TRAINED_ON)]
        rows.append([f"{share:.0%}", leaf, *figures])
    return markdown(HEAD, rows) if rows else f"No cell is kept yet in {cells.folder}.\n"


def main() -> None:
    """Make the cells that are missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--share", type=float, choices=SHARES, default=1.0)
    parser.add_argument("--leaves", nargs="+", default=list(LEAVES))
    parser.add_argument("--out", type=Path, default=Path("runs/pays"), help="where runs are")
    parser.add_argument("--results", type=Path, default=RESULTS / "patience")
    parser.add_argument("--table", action="store_true", help="only the table, from kept results")
    parser.add_argument("--smoke", action="store_true", help="two rounds, kept not")
    asked = parser.parse_args()
    if asked.smoke:
        use_devices(1)
        with tempfile.TemporaryDirectory(prefix="fedlm-smoke-") as folder:
            cells = Cells(Path(folder) / "kept")
            make(Bench(pays.SMOKE, Path(folder)), 0.01, asked.leaves[0], cells)
            print(tell(cells, cells, pays.SMOKE), end="")
        return
    cells, size = Cells(asked.results), Size()
    if not asked.table:
        use_devices(1)
        bench = Bench(size, asked.out)
        for leaf in asked.leaves:
            with claimed(asked.out / f"patience-{asked.share:g}-{leaf}") as mine:
                kept = cells.read(name_of(asked.share, leaf), digest_of(asked.share, size))
                if mine and kept is None:
                    make(bench, asked.share, leaf, cells)
    print(tell(cells, Cells(RESULTS / "pays"), size), end="")


if __name__ == "__main__":
    main()
