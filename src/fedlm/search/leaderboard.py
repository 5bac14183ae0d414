"""A leaderboard that anyone can join: recipes on fixed text, by perplexity, epsilon and bytes.

In:       tracks with their limits; entries, which are recipes: those that come with fedlm, and
          files that a user names.
Out:      a run directory per entry and seed, one JSON object, one table, one drawing with the
          Pareto front.
Promise:  text, tokenizer and splits of a track are fixed, and an entry that changes them is refused
          before anything is trained; the figure is of clients that nothing else saw, the same for
          all tracks of a corpus; an entry beyond a limit is shown and not ranked; a finished run is
          not run again, one that was stopped goes on.
Not here: training (`training`), drawing (`record/leaderboard.py`).

| track | text | limit |
|---|---|---|
| plain | sotu, chitchat | none |
| private | chitchat | epsilon 8 at delta 0.0004, for all text of a client |
| 10mb | sotu, chitchat | ten million bytes up per client, the mean over all training clients |
"""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedlm.core.documents import read_json
from fedlm.core.durable import write_atomically
from fedlm.core.errors import ConfigError, RecordError, require
from fedlm.core.words import number
from fedlm.inference import load_params
from fedlm.recipe import shipped
from fedlm.recipe.build import build
from fedlm.recipe.settings import Data, Recipe, dump, load, with_defaults
from fedlm.record.comparison import beats
from fedlm.record.directory import RunDirectory
from fedlm.record.facts import facts_of
from fedlm.record.journal import dumps
from fedlm.record.leaderboard import drawing
from fedlm.run import Run
from fedlm.search import splits
from fedlm.search.sweep import FAILED, markdown, train_point
from fedlm.training import Watcher

FOLDER = "leaderboard"  # of shipped recipes
BOARD, TABLE, PICTURE = "leaderboard.json", "leaderboard.md", "leaderboard.svg"

# What every entry of a corpus has in common; an entry may leave it out.
TEXT: dict[str, dict[str, Any]] = {
    "sotu": {
        "source": "sotu",
        "tokenizer": "words",
        "vocabulary": 5000,
        "layout": "windows",
        "sequence_length": 32,
        "test_clients": 0.1,
        "validation": 0.1,
    },
    "chitchat": {
        "source": "chitchat",
        "tokenizer": "words",
        "vocabulary": 4000,
        "layout": "lines",
        "sequence_length": 20,
        "test_clients": 0.1,
        "validation": 0.1,
    },
}


@dataclass(frozen=True, kw_only=True)
class Track:
    """A limit, and the text on which entries are compared under it."""

    corpora: tuple[str, ...]
    limit: str  # in words
    epsilon: float = math.inf
    delta: float = 1.0
    upload_bytes: float = math.inf  # per client, in the whole run

    def fault(self, row: dict[str, Any]) -> str | None:
        """Say which limit a result exceeds; None if it keeps them."""
        if row["epsilon"] is None and self.epsilon < math.inf:
            return "no privacy plan"
        if self.epsilon < math.inf and row["epsilon"] > self.epsilon:
            return f"epsilon {number(row['epsilon'])} is above {self.epsilon:g}"
        if self.epsilon < math.inf and row["delta"] > self.delta:
            return f"delta {row['delta']:g} is above {self.delta:g}"
        if row["upload_per_client"] > self.upload_bytes:
            return f"{row['upload_per_client'] / 1e6:.1f} MB up per client"
        return None


TRACKS: dict[str, Track] = {
    "plain": Track(corpora=("sotu", "chitchat"), limit="none"),
    "private": Track(
        corpora=("chitchat",), limit="epsilon 8 at delta 0.0004", epsilon=8.0, delta=4e-4
    ),
    "10mb": Track(corpora=("sotu", "chitchat"), limit="10 MB up per client", upload_bytes=10e6),
}


@dataclass(frozen=True)
class BoardEntry:
    """A recipe on a track."""

    track: str
    name: str
    recipe: Recipe

    @property
    def corpus(self) -> str:
        return str(self.recipe.data.source)

    def at(self, seed: int) -> Recipe:
        """Return the recipe with a seed, without what only costs time."""
        run = self.recipe.run.model_copy(
            update={"seed": seed, "trackers": (), "baselines": False, "prompts": ()}
        )
        return self.recipe.model_copy(update={"run": run})


def shipped_entries(only: Sequence[str] = ()) -> list[BoardEntry]:
    """Return the entries that come with fedlm, perhaps of some tracks only."""
    root = shipped.recipes_folder()
    files = [] if root is None else sorted((root / FOLDER).glob("*/*.toml"))
    return [
        entry_of(file, file.parent.name) for file in files if file.parent.name in (only or TRACKS)
    ]


def entry_of(file: Path, track: str) -> BoardEntry:
    """Read and check an entry, or raise `ConfigError`."""
    require(track in TRACKS, "--track", track, f"one of {', '.join(TRACKS)}")
    recipe = load(file)
    corpus = recipe.data.source
    require(
        corpus in TRACKS[track].corpora,
        "data.source",
        corpus,
        f"one of {', '.join(TRACKS[track].corpora)} on the track {track!r}",
    )
    fixed = Data(**TEXT[str(corpus)])
    for name in Data.model_fields:
        wanted, given = getattr(fixed, name), getattr(recipe.data, name)
        require(
            name not in recipe.data.model_fields_set or given == wanted,
            f"data.{name}",
            given,
            f"{wanted!r}, as all entries on {corpus} have it",
            "Leave the setting out.",
        )
    _check(recipe)
    return BoardEntry(track, file.stem, recipe.model_copy(update={"data": fixed}))


def _check(recipe: Recipe) -> None:
    require(recipe.federation is None, "[federation]", "a tree", "a flat federation")
    require(
        recipe.model.init_from is None,
        "model.init_from",
        recipe.model.init_from,
        "nothing: entries begin with a fresh model, so that anybody can repeat them",
    )
    require(
        recipe.privacy.seed is None and not recipe.privacy.reveal,
        "privacy.seed, privacy.reveal",
        (recipe.privacy.seed, recipe.privacy.reveal),
        "neither: a claim does not hold with them",
    )


# ---- the runs ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class EntryRun:
    """The result of one run of an entry."""

    seed: int
    perplexity: float | None  # of the last clients; None if it diverged
    looked_at: float | None  # of the text that rounds are scored on
    epsilon: float | None
    delta: float | None
    upload_bytes: float
    download_bytes: float
    clients: int
    rounds: int
    parameters: int
    seconds: float
    params_sha256: str | None


def play_entry(
    entry: BoardEntry, seed: int, out: Path, stores: Path, watcher: Callable[[str], Watcher]
) -> EntryRun | None:
    """Train an entry, or go on with it; None if it was stopped before its end."""
    path = run_path(out, entry, seed)
    whole = build(entry.at(seed), stores, out=path)
    run = splits.without_last_clients(whole)
    if not _over(path):
        said = watcher(f"{entry.track}/{entry.name} on {entry.corpus}, seed {seed}")
        if not train_point(run, said) or not _over(path):
            return None
    else:
        # Raises if the recipe differs.
        RunDirectory(path).claim(dump(run.recipe), resume=True, complete=with_defaults)
    return _result(whole, path, seed)


def run_path(out: Path, entry: BoardEntry, seed: int) -> Path:
    """Return the run directory of an entry; an entry that is changed has another one."""
    digest = hashlib.sha256(dump(entry.at(0)).encode()).hexdigest()[:8]
    return out / "runs" / entry.track / f"{entry.name}-{digest}-s{seed}"


def _over(path: Path) -> bool:
    return (path / "summary.json").is_file() or (path / FAILED).is_file()


def _result(whole: Run, path: Path, seed: int) -> EntryRun:
    facts, directory = facts_of(path), RunDirectory(path)
    private = facts.final.get("privacy") or {}
    found = None
    if directory.weights.is_file():
        model = load_params(whole.recipe.model, whole.store.vocabulary, directory.weights)
        found = splits.last_clients(whole).of_models({"": model}, "test")["perplexity"]
    seen = [told["perplexity"] for told in facts.evaluated]
    return EntryRun(
        seed=seed,
        perplexity=found,
        looked_at=seen[-1] if seen else None,
        epsilon=private.get("epsilon"),
        delta=private.get("delta"),
        clients=whole.population.size,
        rounds=len(facts.rounds),
        parameters=whole.model.parameters,
        upload_bytes=facts.upload_bytes,
        download_bytes=facts.download_bytes,
        seconds=float(sum(told["seconds"] for told in facts.rounds)),
        params_sha256=_summary(directory).get("params_sha256"),
    )


def _summary(directory: RunDirectory) -> dict[str, Any]:
    """Return the summary of a finished run; an empty one of a run that diverged."""
    if not directory.summary.is_file():
        return {}
    found = read_json(directory.summary, str(directory.summary), RecordError)
    return found if isinstance(found, dict) else {}


# ---- the board -----------------------------------------------------------------------------------


@dataclass
class Leaderboard:
    """The results so far, in the order in which entries were played."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    def add(self, entry: BoardEntry, runs: Sequence[EntryRun]) -> None:
        """Add an entry's row: means over its seeds."""
        first = runs[0]
        found = [run.perplexity for run in runs]
        whole = [p for p in found if p is not None and math.isfinite(p)]
        ok = len(whole) == len(found)
        row: dict[str, Any] = {
            "track": entry.track,
            "corpus": entry.corpus,
            "entry": entry.name,
            "model": entry.recipe.model.name,
            "parameters": first.parameters,
            "seeds": len(runs),
            "perplexity": statistics.fmean(whole) if ok else None,
            "spread": statistics.stdev(whole) if ok and len(whole) > 1 else None,
            "epsilon": None if first.epsilon is None else max(run.epsilon or 0.0 for run in runs),
            "delta": first.delta,
            "upload_per_client": statistics.fmean(r.upload_bytes / r.clients for r in runs),
            "download_per_client": statistics.fmean(r.download_bytes / r.clients for r in runs),
            "rounds": first.rounds,
            "seconds": statistics.fmean(run.seconds for run in runs),
            "runs": [vars(run) for run in runs],
        }
        row["fault"] = TRACKS[entry.track].fault(row) if ok else "diverged"
        self.rows.append(row)

    def ranked(self) -> list[dict[str, Any]]:
        """Return the rows by track and corpus, the best first, each with whether it is on a front.

        An entry is on the front of its corpus if no other has a perplexity, an epsilon and an
        upload that are all as low, and one of them lower.
        """
        order = list(TRACKS)
        rows = [{**row, "front": is_on_front(row, self.rows)} for row in self.rows]
        return sorted(
            rows,
            key=lambda r: (
                list(TEXT).index(r["corpus"]),
                order.index(r["track"]),
                r["fault"] is not None,
                math.inf if r["perplexity"] is None else r["perplexity"],
            ),
        )

    def facts(self) -> dict[str, Any]:
        """Return the board as one JSON object."""
        tracks = {name: {"text": list(t.corpora), "limit": t.limit} for name, t in TRACKS.items()}
        return {"tracks": tracks, "entries": self.ranked(), "missing": self.missing}


AXES = ("perplexity", "epsilon", "upload_per_client")


def is_on_front(row: dict[str, Any], rows: Iterable[dict[str, Any]]) -> bool:
    """Return whether no other result on the same text is better in one way and worse in none.

    Four digits count: noise that is found for epsilon 8 ends at 7.9997 or 7.99999.
    """

    def place(of: dict[str, Any]) -> tuple[float, ...]:
        return tuple(math.inf if of[axis] is None else float(f"{of[axis]:.4g}") for axis in AXES)

    if row["perplexity"] is None or row["fault"] is not None:
        return False
    own = place(row)
    others = (place(r) for r in rows if r["corpus"] == row["corpus"] and r["fault"] is None)
    return not any(beats(other, own) for other in others)


def board_table(rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return the head and the rows of the table."""
    head = ["text", "track", "entry", "perplexity", "epsilon", "MB up per client"]
    head += ["MB down per client", "seconds", "parameters", "seeds", "front"]
    return head, [
        [
            row["corpus"],
            row["track"],
            row["entry"],
            _figure(row),
            "-" if row["epsilon"] is None else number(row["epsilon"], 3),
            f"{row['upload_per_client'] / 1e6:.2f}",
            f"{row['download_per_client'] / 1e6:.2f}",
            f"{row['seconds']:.0f}",
            f"{row['parameters']:,}",
            str(row["seeds"]),
            row["fault"] or ("yes" if row["front"] else "no"),
        ]
        for row in rows
    ]


def short_table(rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return the table without its less important columns, to fit into eighty characters."""
    head, whole = board_table(rows)
    kept = [head.index(name) for name in ("perplexity", "epsilon", "MB up per client", "seconds")]
    names = (f"{row['track']}/{row['entry']}" for row in rows)
    fronts = ("limit" if row["fault"] else "yes" if row["front"] else "no" for row in rows)
    return ["entry", "perplexity", "epsilon", "MB up", "s", "front"], [
        [name, *(of[place] for place in kept), front]
        for name, of, front in zip(names, whole, fronts, strict=True)
    ]


def _figure(row: dict[str, Any]) -> str:
    if row["perplexity"] is None:
        return "-"
    spread = "" if row["spread"] is None else f" ± {row['spread']:.1f}"
    return f"{row['perplexity']:.1f}{spread}"


def play_board(
    entries: Sequence[BoardEntry],
    seeds: Sequence[int],
    out: Path,
    stores: Path,
    watcher: Callable[[str], Watcher],
    stop: Callable[[], bool] = lambda: False,
) -> Leaderboard:
    """Play every entry that is not finished, and write the board after each.

    A stop that is asked for ends it; what is missing is named.
    """
    if not entries:
        raise ConfigError("--only: there is no entry on these tracks; name one with --entry.")
    board = Leaderboard()
    for entry in entries:
        runs = []
        for seed in seeds:
            fresh = not _over(run_path(out, entry, seed))
            if stop() and fresh:
                break
            done = play_entry(
                entry, seed, out, stores, lambda label: replace(watcher(label), stop=stop)
            )
            if done is None:
                break
            runs.append(done)
        if len(runs) == len(seeds):
            board.add(entry, runs)
        else:
            board.missing.append(f"{entry.track}/{entry.name}")
        write_board(board, out)
    return board


def write_board(board: Leaderboard, out: Path) -> None:
    """Write the JSON object, the table and the drawing."""
    rows = board.ranked()
    write_atomically(out / BOARD, (dumps(board.facts()) + "\n").encode())
    write_atomically(out / TABLE, markdown(*board_table(rows)).encode())
    write_atomically(out / PICTURE, drawing(rows).encode())
