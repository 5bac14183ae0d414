"""Where a run's model came from, and which runs a store has seen.

In:       a run that begins: its store, the model it starts from, its ledger.
Out:      `lineage.json` in the run directory and, in the store, `ledgers/<run>.json` and
          `ledgers/<run>.jsonl`; the claim of a run; what all runs on a store cost together.
Promise:  a start model that fedlm trained is recognised by its parameters, wherever its file was
          copied, as long as the run directory is beside it or the store has seen the run; its
          releases are counted if it learned from some of the same clients, and without a privacy
          plan there is then no finite epsilon. What is not recognised is named as assumed public.
          A run counts for its store also after its directory is gone.
Not here: what releases cost (`privacy/spending.py`), the words (`privacy/claim.py`).

Clients are the same if their names are. A run keeps the smallest hashes of its clients' names, so
that stores which share one client in fifty or more are found to overlap, whatever their vocabulary.
"""

from __future__ import annotations

import contextlib
import hashlib
import heapq
import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from fedlm.core.documents import JsonMapping, JsonObject
from fedlm.core.durable import write_atomically
from fedlm.core.errors import RecordError
from fedlm.core.words import count
from fedlm.corpus.store import Store
from fedlm.privacy import account, ledger, spending, vocabulary
from fedlm.privacy.account import Spent
from fedlm.privacy.claim import Claim, Context, claim_of
from fedlm.privacy.ledger import Entry, Ledger, begin_entry, round_entry

FILE = "lineage.json"
REGISTER = "ledgers"  # the folder of a store in which its runs are registered
OWN = "own "  # before the hash of a model that a leaf keeps to itself
SKETCH = 256  # hashes of client names: two stores that share 2% of them share five, on average
MOST_BYTES = 1 << 27
WHAT = {"evaluation": "noisy figures of training clients' held-out text"}
ELSEWHERE = "runs on copies of this store, on other stores of the same clients, or over a network"

Texts = tuple[str, ...]


def _read_strictly(entries: list[Entry]) -> list[Entry]:
    """Return the lines of a ledger as `Ledger` would read them; refuse what it would refuse."""
    try:
        return ledger.checked_lines(entries, "a ledger in it")
    except RecordError as error:
        raise ValueError(str(error)) from None


LedgerLines = Annotated[list[Entry], AfterValidator(_read_strictly)]
PerhapsLines = Annotated[list[Entry], AfterValidator(lambda e: _read_strictly(e) if e else e)]
Books = tuple[LedgerLines, ...]
RunName = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]


class Kept(BaseModel):
    """A part of a file that says where a run came from."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class Ancestor(Kept):
    """A run that another one started from, with its ledger."""

    run: RunName
    name: str
    private: bool
    clients: Texts
    entries: PerhapsLines  # none of a run without a plan
    vocabulary: Books = ()


class Record(Kept):
    """What one run learned from, and which models it released."""

    run: RunName
    name: str  # its directory
    private: bool
    clients: Texts  # the smallest hashes of the names of its clients
    start: str  # what it started from: empty for a fresh model
    models: Texts = ()  # hashes of the parameters of its models, some after `OWN`
    vocabulary: Books = ()  # ledgers of the store's vocabulary
    ancestors: Annotated[tuple[Ancestor, ...], Field(strict=False)] = ()  # the run before, and on
    traced: bool = True  # whether the whole way back to a fresh model is known


# ---- clients -----------------------------------------------------------------------------------


def sketch(names: Iterable[str]) -> tuple[str, ...]:
    """Return the smallest hashes of names: a sample by which overlapping sets are recognised."""
    hashes = {hashlib.sha256(b"fedlm client " + name.encode()).hexdigest()[:16] for name in names}
    return tuple(heapq.nsmallest(SKETCH, hashes))


def overlap(a: Sequence[str], b: Sequence[str]) -> bool:
    """Return whether two sets of clients have members in common, as far as sketches tell."""
    return not set(a).isdisjoint(b)


def clients_of(store: Store) -> tuple[str, ...]:
    """Return the sketch of a store's training clients."""
    return sketch(store.client(int(number)) for number in store.training_clients)


# ---- the file ----------------------------------------------------------------------------------


def write_lineage(path: Path, record: Record) -> None:
    """Write a record into a file that only its owner can read."""
    write_atomically(path, record.model_dump_json().encode(), private=True)


def read_lineage(path: Path) -> Record:
    """Read a record; refuse a damaged one, whose epsilon would not be known."""
    try:
        if path.stat().st_size > MOST_BYTES:
            raise RecordError(f"{path} is damaged: it is too large.")
        return Record.model_validate_json(path.read_bytes())
    except OSError as error:
        raise RecordError(f"{path} is not readable: {error.strerror}.") from None
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise RecordError(f"{path} is damaged: {where}: {first['msg']}.") from None


# ---- the beginning of a run --------------------------------------------------------------------


def begin_lineage(
    folder: Path,
    store: Store,
    *,
    run: str,
    private: bool,
    start_sha256: str,
    start: str,
    elsewhere: Iterable[str] = (),
    register: bool = True,
) -> Record:
    """Write down what a run learns from and starts from, and register it in its store.

    Args:
      folder: the run directory.
      store: the store it learns from.
      run: its random name.
      private: whether it has a privacy plan.
      start_sha256: the hash of the parameters that it starts from.
      start: the path of a start model, `python` for one that a program made; empty if it is fresh.
      elsewhere: the names of nodes that hold the text, if the store does not.
      register: whether the store counts it; not a candidate of a private selection.
    """
    names = list(elsewhere)
    found, traced = _trace(start_sha256, start, store)
    record = Record(
        run=run,
        name=str(folder),
        private=private,
        clients=sketch(names) if names else clients_of(store),
        start=start,
        vocabulary=tuple(Ledger(path).entries() for path in store.ledgers),
        ancestors=found,
        traced=traced or not start,
    )
    write_lineage(folder / FILE, record)
    if register and not names:
        _register(store, record)
    return record


def register_again(folder: Path, store: Store) -> None:
    """Register a run that goes on, because its store may have been prepared again since."""
    if (folder / FILE).is_file():
        _register(store, read_lineage(folder / FILE))


def begin_selection(
    folder: Path, store: Store, entry: Entry, *, start_sha256: str, start: str
) -> None:
    """Count a private selection for its store, before its first run."""
    book = Ledger(folder / ledger.NAME)
    if not book.exists():
        folder.mkdir(parents=True, exist_ok=True)
        book.begin(begin_entry({}))
    # It is missing where a kill came before it, and another one if the sweep has changed since.
    if json.loads(json.dumps(entry)) not in book.entries():
        book.append(entry)
    run = book.entries()[0]["run"]
    if not (folder / FILE).is_file():
        begin_lineage(folder, store, run=run, private=True, start_sha256=start_sha256, start=start)
    copies(store, book.entries())


def new_run() -> str:
    """Return a random name for a run that has no ledger of its own."""
    return str(begin_entry({})["run"])


def _stores(store: Store) -> list[Path]:
    parts: Sequence[Store] = getattr(store, "parts", (store,))
    return [part.path for part in parts]


def _register(store: Store, record: Record) -> None:
    for path in _stores(store):
        folder = path / REGISTER
        with contextlib.suppress(OSError, RecordError):
            folder.mkdir(mode=0o700, exist_ok=True)
            write_lineage(folder / f"{record.run}.json", record)
            if not record.private:
                book = Ledger(folder / f"{record.run}.jsonl")
                if not book.exists():
                    book.begin({**begin_entry({}), "run": record.run})
                    book.append(round_entry(0, ledger.UNKNOWN))


def copies(store: Store, entries: Sequence[Entry]) -> list[Ledger]:
    """Return the ledger's copies in its store, after bringing them up to date.

    A crash between the two may leave a copy a line behind. A store that cannot be written has none.

    Raises:
      RecordError: the store has counted releases that the ledger lacks, as after a restored backup.
    """
    found = []
    for path in _stores(store):
        book = Ledger(path / REGISTER / f"{entries[0]['run']}.jsonl")
        counted = book.entries() if book.exists() else []
        if counted[: len(entries)] != list(entries)[: len(counted)] or len(counted) > len(entries):
            raise RecordError(
                f"{path} has counted {len(counted) - 1} releases of this run and its ledger has "
                f"{len(entries) - 1}: the run directory is an older copy. Bring back the newest "
                "one, or begin another run with another --out."
            )
        with contextlib.suppress(OSError, RecordError):
            book.path.parent.mkdir(mode=0o700, exist_ok=True)
            if not book.exists():
                book.begin(entries[0])
            for entry in entries[len(book.entries()) :]:
                book.append(entry)
            found.append(book)
    return found


def add_models(folder: Path, store: Store, models: Iterable[str], own: Iterable[str] = ()) -> None:
    """Add the hashes of a run's models to its record, before the models are written.

    `own` are models that leaves keep to themselves, which carry no noise.
    """
    if not (folder / FILE).is_file():
        return
    record = read_lineage(folder / FILE)
    marked = [f"{OWN}{sha256}" for sha256 in own]
    every = tuple(dict.fromkeys([*record.models, *models, *marked]))
    record = record.model_copy(update={"models": every})
    write_lineage(folder / FILE, record)
    for path in _stores(store):
        copy = path / REGISTER / f"{record.run}.json"
        with contextlib.suppress(OSError, RecordError):
            if copy.is_file():
                write_lineage(copy, record)


# ---- the model before training -----------------------------------------------------------------


def _trace(start_sha256: str, start: str, store: Store) -> tuple[tuple[Ancestor, ...], bool]:
    """Return the runs that a start model came from, and whether all of them are known."""
    for record, book in _candidates(start, store):
        if start_sha256 in record.models:
            return (_as_ancestor(record, book), *record.ancestors), record.traced
        if f"{OWN}{start_sha256}" in record.models:
            return (_exact(record, "private"), *record.ancestors), record.traced
    # In a run's directory lie its models, also where their hash is not known: as a member's own
    # model, or one that was written by an older version.
    for below, record, book in _beside(start):
        made = _exact(record, below) if below else _as_ancestor(record, book)
        return (made, *record.ancestors), record.traced
    return (), False


def _candidates(start: str, store: Store) -> Iterator[tuple[Record, Ledger]]:
    """Yield the runs that may have made a start model, those of its own folder first."""
    yield from ((record, book) for _, record, book in _beside(start))
    registers = [path / REGISTER for path in _stores(store)]
    registers += sorted(registers[0].parent.parent.glob(f"*/{REGISTER}"))
    for file in (file for register in registers for file in sorted(register.glob("*.json"))):
        with contextlib.suppress(RecordError):
            yield read_lineage(file), Ledger(file.with_suffix(".jsonl"))


def _beside(start: str) -> Iterator[tuple[str, Record, Ledger]]:
    """Yield the runs in whose directories a start model lies, the nearest first.

    With each comes the folder of the model within the run's: empty if it is the run's own.
    """
    path = Path(start)
    if start and path.exists():
        folder = path if path.is_dir() else path.parent
        for near in (folder, folder.parent, folder.parent.parent):  # the last: of RUN/nodes/NAME
            if (near / FILE).is_file():
                below = "" if near == folder else os.path.relpath(folder, near)
                yield below, read_lineage(near / FILE), Ledger(near / ledger.NAME)


def _exact(record: Record, part: str) -> Ancestor:
    """Return a run as the source of a model of its own without noise."""
    name = f"{record.name}/{part}"
    return Ancestor(run=record.run, name=name, private=False, clients=record.clients, entries=[])


def _as_ancestor(record: Record, book: Ledger) -> Ancestor:
    entries = book.entries() if book.exists() else []
    return Ancestor(
        run=record.run,
        name=record.name,
        private=record.private,
        clients=record.clients,
        entries=entries,
        vocabulary=record.vocabulary,
    )


# ---- the claim of a run ------------------------------------------------------------------------


def claim_of_run(folder: Path, header: JsonMapping) -> Claim:
    """Return the claim of a run from its ledger, its lineage and the header of its journal.

    Raises:
      RecordError: the run has no privacy plan, or a file is damaged or missing.
    """
    entries = ledger.of_run(folder, header)
    plan, record = account.plan_from(header["privacy"]), lineage_of(folder)
    context = _context(record, header, plan.unit)
    counted = Counter(entry["what"] for entry in entries if entry["kind"] == "gaussian")
    more = tuple(
        f"{n} {WHAT.get(what, f'noisy releases for {what}')}" for what, n in counted.items()
    )
    context = context._replace(covered=(*context.covered, *more))
    spent = ledger.spent_of(entries)
    if not context.broken and plan.unit == "client":
        spent = _with_others(record, entries, spent)
    spent = spent._replace(assumptions=_assumptions(spent, header, context))
    claim = claim_of(spent, plan, len(ledger.rounds_of(entries)), context)
    if "privacy_nodes" not in header or math.isinf(claim.epsilon):
        return claim
    nodes = {
        node: _with_others(record, _of_node(entries, node), found).epsilon
        for node, found in ledger.spent_by_node(entries).items()
    }
    return claim._replace(nodes=nodes)


def lineage_of(folder: Path) -> Record:
    """Return the record of a run; refuse a copy without it, whose whole cost is not known."""
    if not (folder / FILE).is_file():
        raise RecordError(
            f"{folder} has no {FILE}: what its vocabulary and the model that it started from cost "
            f"its clients is not known. {ledger.OWNER}"
        )
    return read_lineage(folder / FILE)


def _of_node(entries: list[Entry], node: str) -> list[Entry]:
    """Return the ledger of a tree as that of one node's clients."""
    begun = entries[0]
    return [{**begun, "plans": {node: begun["plans"][node]}}, *entries[1:]]


def claim_of_selection(folder: Path, header: JsonMapping) -> Claim:
    """Return the claim of a private selection from its ledger, its lineage and a run's header."""
    entries = Ledger(folder / ledger.NAME).entries()
    told = next(entry for entry in entries if entry["kind"] == "selection")
    plan, record = account.plan_from(told["plan"]), lineage_of(folder)
    alone = account.spent(plan, told["rounds"])
    context = _context(record, header, plan.unit)
    released = (
        f"the best of a random number of runs ({told['law']}, {told['mean']:g} on average) of "
        f"{count(told['rounds'], 'round')}, chosen by held-out clients; the others, "
        "and their number, stay secret"
    )
    spent = alone._replace(epsilon=math.inf)
    if not context.broken:
        found = spending.total_spent([entries], plan.delta)
        spent = _with_others(record, entries, found._replace(assumptions=alone.assumptions))
    return claim_of(spent, plan, told["rounds"], context._replace(released=released))


def _assumptions(spent: Spent, header: JsonMapping, context: Context) -> tuple[str, ...]:
    """Return what a claim assumes, with who counts as a client and where words came from."""
    said = dict.fromkeys((*spent.assumptions, *vocabulary.assumptions(header)))
    return tuple(each for each in said if each not in context.uncovered)


def _with_others(record: Record, entries: list[Entry], own: Spent) -> Spent:
    """Return the cost of a run together with its vocabulary and the runs it started from."""
    books = books_before(record)
    if not books and not any(entry["kind"] == "gaussian" for entry in entries):
        return own
    found = spending.total_spent([entries, *books], own.delta)
    return found._replace(assumptions=own.assumptions)


def books_before(record: Record) -> list[list[Entry]]:
    """Return the ledgers of a run's vocabulary and of the runs on its clients before it."""
    same = [each for each in record.ancestors if overlap(each.clients, record.clients)]
    books = [each.entries for each in same if each.entries]
    return [*books, *record.vocabulary, *(book for each in same for book in each.vocabulary)]


def _context(record: Record, header: JsonMapping, unit: str) -> Context:
    covered: list[str] = []
    uncovered, broken = list(vocabulary.uncovered(header)), list[str]()
    if record.vocabulary and unit == "client":
        covered.append("the vocabulary, counted with noise")
    elif record.vocabulary:
        uncovered.append("the vocabulary, whose noise hides one client and not a whole leaf")
    for each in record.ancestors:
        told = _kinship(each, record, unit)
        (broken if told[0] else covered if told[1] else uncovered).append(told[2])
    if not record.traced:
        uncovered.append(_assumed(record.start))
    evaluated = bool(header.get("start", {}).get("perplexity"))
    return Context(
        tuple(covered),
        tuple(uncovered),
        tuple(broken),
        bool(header.get("unsafe_seed")),
        evaluated,
    )


def _kinship(each: Ancestor, record: Record, unit: str) -> tuple[bool, bool, str]:
    """Return whether an ancestor leaves no finite epsilon, whether it is counted, and the words."""
    if not overlap(each.clients, record.clients):
        return (
            False,
            False,
            f"the clients of {each.name}, whose model this run started from: other people, as far "
            "as their names tell",
        )
    kept = each.private and each.entries and not spending.made_no_promise(each.entries)
    if kept and unit == "client":
        return False, True, f"what {each.name} released, whose model this run started from"
    why = "has no privacy plan" if not each.private else "has no ledger, or told exact sums"
    why = "whose plan does not say what it cost a whole leaf" if kept else why
    return (
        True,
        False,
        f"training started from the model of {each.name}, which learned from some of the same "
        f"clients and {why}",
    )


def _assumed(start: str) -> str:
    if start == "python":
        return "the start model, which was given from Python: assumed public"
    return f"the start model {start}, or what it was made from: assumed public"


# ---- all runs on a store -----------------------------------------------------------------------


class StoreSpending(NamedTuple):
    """What all known runs on a store cost one of its clients."""

    epsilon: float  # infinity as soon as one of them has no privacy plan
    delta: float | None
    private_runs: int
    other_runs: int  # without a plan, or with exact sums told
    private_epsilon: float | None  # of the vocabulary and the private runs alone
    accountant: str
    runs: tuple[JsonObject, ...]  # each by name, with its own epsilon
    not_covered: tuple[str, ...] = ()


def spent_on(
    store: Store, delta: float | None = None, further: Iterable[list[Entry]] = ()
) -> StoreSpending:
    """Return what all runs that the store has seen cost together, with its vocabulary.

    `further` are ledgers of runs that are only planned.
    """
    books = [*(Ledger(path).entries() for path in store.ledgers), *further]
    plain, private, told = 0, 0, []
    runs = [run for path in _stores(store) for run in _registered_in(path)]
    opened = {run.file.stem for run in runs if run.is_open}
    for run in runs:
        lost, more = _before(run, opened)
        own = math.inf if run.is_open else spending.total_spent([run.entries], delta).epsilon
        count = None if run.is_open else len(ledger.rounds_of(run.entries))
        told.append({"run": run.name, "rounds": count, "epsilon": own})
        plain, private = plain + run.is_open + lost, private + (not run.is_open)
        books += [*more, *([] if run.is_open else [run.entries])]
    at = delta if delta is not None else spending.largest_delta(books)
    found = None
    if at is not None:
        found = spending.total_spent(books, at) if books else Spent(0.0, at, None, "nothing", ())
    alone = None if found is None else found.epsilon
    whole = math.inf if plain else (0.0 if alone is None else alone)
    how = "none" if found is None else found.accountant
    left = (*vocabulary.uncovered({"store": store.manifest}), ELSEWHERE)
    return StoreSpending(whole, at, private, plain, alone, how, tuple(told), left)


class RegisteredRun(NamedTuple):
    """What a store has on record of one of its runs; a kill or a full disk may have cut it."""

    file: Path  # of its ledger
    entries: list[Entry]  # of its ledger, as far as it is there
    record: Record | None

    @property
    def is_open(self) -> bool:
        """Whether the run promised nothing, or what it promised is not known any more."""
        if self.record is None or not self.entries:
            return True
        return not self.record.private or spending.made_no_promise(self.entries)

    @property
    def name(self) -> str:
        return self.file.stem if self.record is None else self.record.name


def _registered_in(store: Path) -> Iterator[RegisteredRun]:
    """Yield the runs of a store: each has a record there, and a ledger."""
    folder = store / REGISTER
    for name in sorted({f.stem for kind in ("json", "jsonl") for f in folder.glob(f"*.{kind}")}):
        record, book = folder / f"{name}.json", Ledger(folder / f"{name}.jsonl")
        yield RegisteredRun(
            book.path,
            book.entries() if book.exists() else [],
            read_lineage(record) if record.is_file() else None,
        )


def _before(run: RegisteredRun, opened: set[str]) -> tuple[int, list[list[Entry]]]:
    """Return the number of a run's ancestors of unbounded cost, and the ledgers of the others.

    One that is registered as open here is counted there. A model without noise of a private run
    is not.
    """
    record = run.record
    if record is None:
        return 0, []
    elsewhere = [each for each in record.ancestors if each.run not in opened]
    lost = sum(_kinship(each, record, "client")[0] for each in elsewhere)
    return lost, [b for b in books_before(record) if not spending.made_no_promise(b)]


def spent_together(folders: Iterable[Path]) -> Spent | None:
    """Return what private runs cost together, with their vocabularies and the runs before them.

    None if no run among them is private.
    """
    books: list[list[Entry]] = []
    broken = False
    for folder in folders:
        book = Ledger(folder / ledger.NAME)
        if not book.exists():
            continue
        books.append(book.entries())
        if not books[-1][1:] and not (folder / FILE).is_file():
            continue  # killed before its first release
        record = lineage_of(folder)
        books += books_before(record)
        broken |= any(_kinship(each, record, "client")[0] for each in record.ancestors)
    if not books:
        return None
    found = spending.total_spent(books)
    return found._replace(epsilon=math.inf) if broken else found
