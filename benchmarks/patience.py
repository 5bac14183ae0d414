"""Would a leaf alone do as well as from a federation's model if it were more patient?

In:       leaves of `mixgenre-en` at a share of their text, and their models of `pays.py`.
Out:      a small file per leaf in `benchmarks/results/patience`; a table of those files, beside the
          lines of `pays.py`.
Promise:  the best model of a leaf's run at the first rate, from a fresh model or from the
          federation's, goes on at that rate with four times the patience, then at the smaller
          rate as in `pays.py`; by the rows to choose by the better of that and the model of
          `pays.py` counts, with a cache.
Not here: sides and care (`pays.py`), copies of a leaf in place of others (`clones.py`).

    python -m benchmarks.patience --share 1.0 --leaves code-python chat-irc
    python -m benchmarks.patience --table
"""

from __future__ import annotations

import argparse
import itertools
import math
import tempfile
import time
from pathlib import Path

from benchmarks import pays
from benchmarks.cells import RESULTS, Cells, claimed, facts_digest, plain_name
from benchmarks.clones import LEAVES, SIDE, cell_of, name_of
from benchmarks.pays import CHOSEN, LOCAL, SHARES, TRAINED_ON, Bench, Cell, Place, Size
from fedlm.core.documents import read_json
from fedlm.core.errors import RecordError
from fedlm.engine.devices import use_devices
from fedlm.inference import load_params
from fedlm.personal.members import OwnText
from fedlm.personal.ways import Attempt, TrainedModel, finetune_and_cache
from fedlm.search.sweep import markdown

PATIENT = 4  # times the patience of `pays.py`
HEAD = ["text", "leaf", "local, personal", "local, patient", f"{SIDE}, trained on", "patient"]


def digest_of(share: float, side: str, size: Size) -> str:
    """Return the digest of all that decides the cells of a share."""
    return facts_digest({"like": pays.digest_of(cell_of(share, side), size), "patience": PATIENT})


def make(bench: Bench, share: float, leaf: str, side: str, cells: Cells) -> None:
    """Go on with a leaf's first run, more patiently, then at the smaller rate; keep the figures."""
    name = f"{name_of(share, leaf)} {side}"
    print(name, flush=True)
    began, cell = time.process_time(), cell_of(share, side)
    place = pays.prepare(cell, bench.size, bench.out)
    member = next(member for member in place.members if member.name == leaf)
    usual, first = (local_runs if side == LOCAL else runs_on_federated)(bench, cell, place, member)
    batches = pays.batches_of(member.own, place)
    patient = bench.shop(place, cell.rate, batches)
    patient.patience *= PATIENT
    shop = bench.shop(place, pays.OWN_RATE * cell.rate, batches)
    model, passes = first, [first.passes]
    for each in (patient, shop):
        after = math.ceil(sum(passes))
        model = each.train(model.params, member.own, member.choose, member.number, after=after)
        passes.append(model.passes)
    at = Attempt(shop, member.own, member.choose, member.number)
    at.__dict__["tuned"] = min(
        (usual, model), key=lambda one: shop.perplexity(one.params, member.choose)
    )
    facts = {
        "share": share,
        "leaf": leaf,
        "patient": bench.report(finetune_and_cache(at), member),
        "passes": passes,
        "core_seconds": time.process_time() - began,
    }
    cells.write(name, digest_of(share, side, bench.size), facts)


Runs = tuple[TrainedModel, TrainedModel]
"""A leaf's model after both runs, and after the first."""


def local_runs(bench: Bench, cell: Cell, place: Place, member: OwnText) -> Runs:
    """Return a leaf's models of its own text alone."""
    both = pays.both_runs(bench, cell, place, member)
    return both, pays.trained_alone(bench, cell, place, member)


def runs_on_federated(bench: Bench, cell: Cell, place: Place, member: OwnText) -> Runs:
    """Return a leaf's models from the federation's, which `pays.py` must have trained."""
    weights = pays.best_weights(place.run.record, member.node)
    model = load_params(place.run.recipe.model, place.run.store.vocabulary, weights)
    both = pays.trained_on(bench, cell, place, member, model)
    return both, pays.trained_on(bench, cell, place, member, model, runs=1)


def tell(cells: Cells, kept: Cells, size: Size) -> str:
    """Return the table of what is kept."""
    told = [read_json(file, str(file), RecordError) for file in cells.folder.glob("*.json")]
    rows = []
    for share, leaf in sorted({(each["share"], each["leaf"]) for each in told}):
        figures = []
        for side, way in ((LOCAL, CHOSEN), (SIDE, TRAINED_ON)):
            cell = cell_of(share, side)
            usual = kept.read(cell.name, pays.digest_of(cell, size)) or {"leaves": {}}
            name = f"{name_of(share, leaf)} {side}"
            own = cells.read(name, digest_of(share, side, size)) or {}
            figures += [usual["leaves"].get(leaf, {}).get(way), own.get("patient")]
        shown = ["-" if each is None else f"{each:.1f}" for each in figures]
        rows.append([f"{share:.0%}", leaf, *shown])
    return markdown(HEAD, rows) if rows else f"No cell is kept yet in {cells.folder}.\n"


def main() -> None:
    """Make the cells that are missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--share", type=float, choices=SHARES, default=1.0)
    parser.add_argument("--leaves", nargs="+", default=list(LEAVES))
    parser.add_argument("--sides", nargs="+", default=[LOCAL, SIDE], choices=[LOCAL, SIDE])
    parser.add_argument("--out", type=Path, default=Path("runs/pays"), help="where runs are")
    parser.add_argument("--results", type=Path, default=RESULTS / "patience")
    parser.add_argument("--table", action="store_true", help="only the table, from kept results")
    parser.add_argument("--smoke", action="store_true", help="two rounds, kept not")
    asked = parser.parse_args()
    if asked.smoke:
        use_devices(1)
        with tempfile.TemporaryDirectory(prefix="fedlm-smoke-") as folder:
            cells = Cells(Path(folder) / "kept")
            make(Bench(pays.SMOKE, Path(folder)), 0.01, asked.leaves[0], LOCAL, cells)
            print(tell(cells, cells, pays.SMOKE), end="")
        return
    cells, size = Cells(asked.results), Size()
    if not asked.table:
        use_devices(1)
        bench = Bench(size, asked.out)
        for leaf, side in itertools.product(asked.leaves, asked.sides):
            with claimed(asked.out / f"patience-{asked.share:g}-{leaf}-{plain_name(side)}") as mine:
                digest = digest_of(asked.share, side, size)
                kept = cells.read(f"{name_of(asked.share, leaf)} {side}", digest)
                if mine and kept is None:
                    make(bench, asked.share, leaf, side, cells)
    print(tell(cells, Cells(RESULTS / "pays"), size), end="")


if __name__ == "__main__":
    main()
