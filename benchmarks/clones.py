"""How much of what a federation gives is averaging? A leaf, federated with copies of itself.

In:       leaves of `mixgenre-en` at a share of their text.
Out:      a small file per leaf in `benchmarks/results/clones`; a table of those files, beside the
          local side and the federation of all leaves that `pays.py` keeps.
Promise:  the federation of copies has the recipe, the care and the figures of `pays.py`; members
          differ in the order of their rows alone. What it gives beyond local training is owed to
          averaging and the server's optimiser; what the federation of all leaves gives beyond that
          is owed to the text of the others, and to a mean over more models.
Not here: sides and care (`pays.py`).

    python -m benchmarks.clones --share 0.1 --leaves encyclopedia chat-irc
    python -m benchmarks.clones --table
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import pays
from benchmarks.cells import RESULTS, Cells, Facts, claimed, facts_digest, work_folder
from benchmarks.pays import CHOSEN, LOCAL, SHARES, STORES, Bench, Cell, Place, Size
from fedlm.core.documents import read_json
from fedlm.core.errors import RecordError
from fedlm.corpus.store import Store, same_vocabulary, write_tokens
from fedlm.engine.devices import use_devices
from fedlm.recipe.build import build
from fedlm.search.sweep import markdown

COPIES = 4
SIDE = "flat Nesterov"
LEAVES = ("encyclopedia", "chat-irc")
HEAD = ["text", "leaf", "local", "local, personal", f"{COPIES} copies of itself, as received"]
HEAD += ["fine-tuned", "personal", "all leaves, as received", "fine-tuned", "personal"]


def cell_of(share: float, side: str = SIDE) -> Cell:
    """Return the cell of `pays.py` that a leaf is compared with."""
    return Cell("mixgenre", share, side, pays.RATES[0], pays.SEEDS[0])


def name_of(share: float, leaf: str) -> str:
    return f"{share:g} {leaf}"


def digest_of(share: float, size: Size) -> str:
    """Return the digest of all that decides the cells of a share."""
    return facts_digest({"like": pays.digest_of(cell_of(share), size), "copies": COPIES})


def copied(store: Store, leaf: str) -> Iterator[dict[str, Any]]:
    """Yield the clients of a leaf again and again, each time as those of a leaf of its own."""
    own = [n for n in map(int, store.training_clients) if store.groups(n)[0] == leaf]
    for copy in range(COPIES):
        for n in own:
            yield {
                "client": f"{store.client(n)} #{copy}",
                "groups": [copy_name(leaf, copy)],
                "train": store.train(n),
                "held": store.held(n),
                "test": False,
                "held_bytes": store.held_bytes(n),
            }


def copy_name(leaf: str, copy: int) -> str:
    return f"{leaf}-{copy}"


def federated_with_itself(bench: Bench, share: float, leaf: str) -> Facts:
    """Train the federation of a leaf's copies, and let one of them make its model its own."""
    cell = cell_of(share)
    whole = pays.prepare(cell, bench.size, bench.out)
    member = next(member for member in whole.members if member.name == leaf)
    store = whole.run.store
    assert isinstance(store, Store)
    folder = work_folder(bench.out, f"clones {name_of(share, leaf)}", digest_of(share, bench.size))
    if not (folder / "store").exists():
        dtype = store.train(int(store.training_clients[0])).dtype
        rows = copied(store, leaf)
        write_tokens(rows, folder / "store", same_vocabulary(store), store.settings, dtype)
    recipe = whole.run.recipe
    data = recipe.data.model_copy(update={"store": str((folder / "store").resolve())})
    run = build(recipe.model_copy(update={"data": data}), STORES, out=folder / "run")
    return pays.federation(bench, cell, Place(run, [replace(member, node=copy_name(leaf, 0))]))


def make(bench: Bench, share: float, leaf: str, cells: Cells) -> None:
    """Make one cell and keep it."""
    print(name_of(share, leaf), flush=True)
    began = time.process_time()
    found = federated_with_itself(bench, share, leaf)
    facts = {
        "share": share,
        "leaf": leaf,
        "copies": COPIES,
        **found,
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

        def shown(facts: Facts | None, *ways: str, leaf: str = leaf) -> list[str]:
            found = facts["leaves"].get(leaf, {}) if facts else {}
            return [f"{found[way]:.1f}" if way in found else "-" for way in ways]

        three = ("federated", "finetune", CHOSEN)
        figures = shown(local, *three[1:]) + shown(own, *three) + shown(every, *three)
        rows.append([f"{share:.0%}", leaf, *figures])
    return markdown(HEAD, rows) if rows else f"No cell is kept yet in {cells.folder}.\n"


def main() -> None:
    """Make the cells that are missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--share", type=float, choices=SHARES, default=0.1)
    parser.add_argument("--leaves", nargs="+", default=list(LEAVES))
    parser.add_argument("--out", type=Path, default=Path("runs/pays"), help="where runs are")
    parser.add_argument("--results", type=Path, default=RESULTS / "clones")
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
            with claimed(asked.out / f"clones-{asked.share:g}-{leaf}") as mine:
                kept = cells.read(name_of(asked.share, leaf), digest_of(asked.share, size))
                if mine and kept is None:
                    make(bench, asked.share, leaf, cells)
    print(tell(cells, Cells(RESULTS / "pays"), size), end="")


if __name__ == "__main__":
    main()
