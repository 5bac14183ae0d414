"""All runs of a folder at a glance, and any of them in full.

In:       a folder, in which runs lie at most three folders deep.
Out:      a row per run; curves, settings, nodes and tree of one run; sweeps.
Promise:  a row costs the two ends of a journal and is read again only when a file changed; curves
          are read on from where they ended. What is damaged gives a sentence in its row. Only what
          journals and status files hold is told; who answered under a privacy plan only where
          `private` says that the reader is the run's owner on this machine.
Not here: the page (`pages/`), the network (`server.py`), stop and resume (`control.py`).
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from fedlm.core.documents import json_value, read_json, read_toml
from fedlm.core.errors import FedlmError, RecordError, damaged, shown
from fedlm.record import journal
from fedlm.record.directory import ASSIGNMENTS, LOCK, PRIVATE_ROUND_STATS, ROUND_STATS, RunDirectory
from fedlm.record.facts import SPLITS
from fedlm.record.status import LIVE, Status, is_alive, read_status
from fedlm.watch.tail import Tail, ends_of

Row = dict[str, Any]
DEEPEST = 3  # folders below the one that is watched
MOST_RUNS = 5_000
SCAN_SECONDS, FRESH_SECONDS = 2.0, 0.3
MOST_POINTS = 1_000  # of a curve
MOST_FRAMES = 120  # rounds of a tree that can be looked at
LEAST_HEARD, MOST_HEARD = 0.02, 12  # attention that is drawn: its weight, and peers of one node
MOST_MEMBERS = 50  # whose own models are offered
RECENT = 6  # rounds from which speed and time left follow
SWEEP = "sweep.json"


def runs_below(folder: Path, deepest: int = DEEPEST) -> Iterator[Path]:
    """Yield the run directories below a folder in order of their names; hidden ones are left out.

    A run's own folders are not searched: the models of a tree's nodes belong to their run.
    """
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return
    names = {entry.name for entry in entries}
    if "recipe.toml" in names and ("journal.jsonl" in names or LOCK in names):
        yield folder
        return
    if deepest:
        for entry in entries:
            if not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False):
                yield from runs_below(Path(entry.path), deepest - 1)


@dataclass
class _Known:
    """A run that was seen, with what was read of it."""

    directory: RunDirectory
    number: int  # decides its colour: the order in which runs were first seen
    name: str = ""
    stamp: Any = None
    row: Row = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    status: Status | None = None
    curves: Curves | None = None
    damage: tuple[Any, str] | None = None  # of the journal, and the sentence about it


class Board:
    """The runs of a folder; every method may be called from any thread."""

    def __init__(self, folder: Path, *, private: bool = True) -> None:
        """Watch a folder; `private`: show who answered also where a privacy plan hides it."""
        self.folder, self.private = folder, private
        self._known: dict[str, _Known] = {}
        self._lock = threading.RLock()
        self._scanned = self._fresh = -SCAN_SECONDS
        self._seen = 0
        self._rows: dict[str, Row] = {}
        self._left: list[str] = []  # runs whose rows are still to be read

    def rows(self, seconds: float = math.inf) -> list[Row]:
        """Return a row per run, at most a third of a second old.

        Of runs that take more than `seconds` to read the rest comes with the next call, so that a
        page over thousands of runs has something to show at once; `unread` says that there is one.
        """
        with self._lock:
            now = time.monotonic()
            if now - self._scanned >= SCAN_SECONDS:
                self._scan()
                self._scanned = now
            if not self._left and now - self._fresh >= FRESH_SECONDS:
                self._left, self._fresh = list(reversed(self._known)), now
            while self._left:
                id = self._left.pop()
                if id in self._known:
                    self._rows[id] = self._row(id, self._known[id])
                if time.monotonic() - now > seconds:
                    break
            return [self._rows[id] for id in self._known if id in self._rows]

    @property
    def unread(self) -> bool:
        """Whether rows are still to be read."""
        return bool(self._left)

    def _scan(self) -> None:
        found: dict[str, RunDirectory] = {}
        for path in runs_below(self.folder):
            name = "." if path == self.folder else path.relative_to(self.folder).as_posix()
            found[name] = RunDirectory(path)
            if len(found) == MOST_RUNS:
                break
        for gone in self._known.keys() - found.keys():
            del self._known[gone]
            self._rows.pop(gone, None)
        for id, directory in found.items():
            if id not in self._known:
                name = directory.path.resolve().name if id == "." else directory.path.name
                self._known[id] = _Known(directory, self._seen, name)
                self._seen += 1

    def find(self, id: str) -> RunDirectory:
        """Return the directory of a run by its name on the page; no other path is ever opened."""
        with self._lock:
            if id not in self._known:
                self._scan()
            if id not in self._known:
                raise RecordError(f"{id!r} is no run of this folder any more.")
            return self._known[id].directory

    def status_of(self, id: str) -> Status | None:
        """Return what a run's process wrote last; None without a status file."""
        path = self.find(id).status
        return read_status(path) if path.is_file() else None

    # ---- one row -------------------------------------------------------------------------

    def _row(self, id: str, known: _Known) -> Row:
        directory = known.directory
        stamp = tuple(
            _stamp(path)
            for path in (directory.journal, directory.status, directory.summary, directory.best)
        )
        if stamp != known.stamp:
            known.stamp = stamp
            try:
                known.status = read_status(directory.status) if stamp[1] else None
                with damaged(str(directory.journal)):
                    known.row, known.settings = glance(directory)
            except FedlmError as error:
                known.row = {**known.row, "problem": str(error)}
        row = {
            "id": id,
            "name": known.name,
            "group": "" if "/" not in id else id.rpartition("/")[0],
            "number": known.number,
            **known.row,
        }
        return row | _state(directory, known.status, row)

    # ---- one run in full -----------------------------------------------------------------

    def details(self, id: str) -> dict[str, Any]:
        """Return curves, settings, federation and tree of a run, with a version that changes."""
        with self._lock:
            directory, known = self.find(id), self._known[id]
            stamp = _stamp(directory.journal)
            if known.damage is None or known.damage[0] != stamp:  # else it was read in vain
                if known.curves is None or known.damage is not None:
                    known.curves, known.damage = Curves(directory, private=self.private), None
                try:
                    with damaged(str(directory.journal)):
                        known.curves.poll()
                        return {"id": id, **known.curves.told()}
                except FedlmError as error:
                    known.damage = (stamp, str(error))
            return {"id": id, "version": known.damage[1], "problem": known.damage[1]}

    def sweeps(self) -> list[dict[str, Any]]:
        """Return folders of several runs, the settings that differ in each, and planned points."""
        with self._lock:
            groups: dict[str, list[str]] = {}
            for id in self._known:
                if "/" in id:
                    groups.setdefault(id.rpartition("/")[0], []).append(id)
            return [self._sweep(name, ids) for name, ids in groups.items()]

    def _sweep(self, name: str, ids: list[str]) -> dict[str, Any]:
        planned = planned_points(self.folder / name / SWEEP)
        settings = {id: self._known[id].settings for id in ids}
        for point in planned:
            settings.setdefault(f"{name}/{point['name']}", point["settings"])
        return {"name": name, "runs": ids, "planned": planned, **differences(settings)}


def differences(settings: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the settings in which runs differ, and each run's values of them."""
    names = sorted({name for of in settings.values() for name in of})
    told = {name: {str(of[name]) for of in settings.values() if name in of} for name in names}
    head = [name for name in names if len(told[name]) > 1]
    return {
        "head": head,
        "values": {id: [_plain(of.get(name)) for name in head] for id, of in settings.items()},
    }


def planned_points(path: Path) -> list[dict[str, Any]]:
    """Return the points that a sweep wrote down before its first run; none if there are none."""
    if not path.is_file():
        return []
    try:
        points = read_json(path, str(path), RecordError)["points"]
        return [{"name": str(p["name"]), "settings": dict(p["settings"])} for p in points]
    except (FedlmError, LookupError, TypeError, ValueError):
        return []


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, (int, float, str)) else str(value)


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _state(directory: RunDirectory, status: Status | None, row: Row) -> Row:
    """Return the state of a run in a word and a sentence, and what can be done with it."""
    ended = directory.summary.is_file()
    python = bool(row.get("custom"))
    if status is None:
        state, doing = ("finished", "") if ended else ("stopped", "It wrote no status file.")
        live = False
    else:
        live = status.state in LIVE and is_alive(status)
        state, doing = status.state, status.doing
        if status.state in LIVE and not live:
            state, doing = "killed", "Its process ended without a word."
    if ended and not live:
        state, doing = "finished", ""
    told = status if live else None
    rounds = max(row.get("rounds") or 0, (told.rounds if told else 0))
    left = None
    if live and row.get("round_seconds") and rounds:
        left = row["round_seconds"] * max(0, rounds - row.get("round", 0))
    return {
        "state": state,
        "doing": doing,
        "follows": told.follows if told else "",
        "updated": status.updated if status else None,
        "live": live,
        "rounds": rounds or None,
        "left": left,
        "can_stop": live,
        "can_resume": not live and not ended and not python,
    }


def glance(directory: RunDirectory) -> tuple[Row, dict[str, Any]]:
    """Return the figures of a run from the two ends of its journal, and its flat settings."""
    if not directory.journal.is_file():
        return {}, {}
    path = directory.journal
    first, lines = ends_of(path, word=b'"perplexity"')
    if not first:
        return {}, {}
    header = _entry(first, f"{path}, line 1")
    if header["kind"] != "header":
        raise RecordError(f"{path}: its journal has no header; the journal is damaged.")
    entries = _last_entries(lines, f"{path}, near its end")
    rounds = [entry for entry in entries if entry["kind"] == "round"]
    final: dict[str, Any] = next((e for e in reversed(entries) if e["kind"] == "final"), {})
    recipe = header.get("recipe", {})
    last = rounds[-1] if rounds else {}
    recent = [r for r in rounds[-RECENT:] if r["round"]] or rounds  # the first one compiles
    seconds = sum(r.get("seconds", 0.0) for r in recent)
    members = sum(r.get("members", 0) for r in recent)
    figures = final.get("test") or final.get("validation") or {}
    row = {
        "round": last["round"] + 1 if rounds else 0,
        "rounds": _planned(directory, recipe),
        "loss": last.get("loss"),
        "perplexity": figures.get("perplexity") or _latest(rounds, "perplexity"),
        "held_out": _held_out(final),
        "start_perplexity": header.get("start", {}).get("perplexity"),
        "clients_per_second": members / seconds if seconds else None,
        "round_seconds": seconds / len(recent) if recent else None,
        "upload_bytes": last.get("upload_bytes"),
        "download_bytes": last.get("download_bytes"),
        "epsilon": (final.get("privacy") or {}).get("epsilon") or _latest(rounds, "epsilon"),
        "private": header.get("privacy") is not None,
        "budget": header.get("privacy_budget"),
        "custom": bool(header.get("custom")),
        "model": recipe.get("model", {}).get("name"),
        "parameters": header.get("parameters"),
        "problem": None,
    }
    return row, {f"{t}.{k}": v for t, of in recipe.items() for k, v in of.items()}


def _planned(directory: RunDirectory, before: dict[str, Any]) -> int | None:
    """Return how many rounds a run is to have, by its recipe, which an extension writes anew."""
    try:
        recipe = read_toml(directory.recipe, str(directory.recipe), RecordError)
    except RecordError:
        recipe = {}
    rounds = (recipe or before).get("server", {}).get("rounds")
    if rounds is not None and (type(rounds) is not int or rounds < 0):
        raise RecordError(f"{directory.path}: server.rounds = {shown(rounds, 80)} makes no sense.")
    return rounds


def _held_out(final: dict[str, Any]) -> str | None:
    """Return whose text the last perplexity is of."""
    return next((words for split, words in SPLITS.items() if final.get(split)), None)


def _last_entries(lines: list[bytes], where: str) -> list[dict[str, Any]]:
    """Return the last entries of a journal, and before them those alone that a row needs.

    Reading all lines of a window would take most of the time of a folder with many runs.
    """
    last = [_entry(line, where) for line in lines[-RECENT - 2 :]]
    wanted = [
        name.encode()
        for name in ("perplexity", "epsilon")
        if not any(entry.get(name) is not None for entry in last)
    ]
    found: list[dict[str, Any]] = []
    for line in reversed(lines[: -RECENT - 2]):
        if not wanted:
            break
        hits = [name for name in wanted if b'"' + name + b'"' in line]
        if hits:
            entry = _entry(line, where)
            found.append(entry)
            wanted = [n for n in wanted if n not in hits or entry.get(n.decode()) is None]
    return [*reversed(found), *last]


def _entry(line: bytes, where: str) -> dict[str, Any]:
    try:
        value = json_value(line, "", RecordError)
    except RecordError:
        raise RecordError(f"{where}: not JSON; the journal is damaged.") from None
    return journal.checked(value, where)


def _latest(rounds: list[dict[str, Any]], name: str) -> Any:
    return next((r[name] for r in reversed(rounds) if r.get(name) is not None), None)


# ---- one run in full -----------------------------------------------------------------------

CURVES = ("loss", "perplexity", "epsilon", "upload_bytes", "clip_norm", "personal_perplexity")
OF_A_NODE = ("self_weight", "entropy_down", "entropy_up", "agreement", "loss", "backbone_norm")


class Curves:
    """Everything that a run's page shows, read on as the journal grows."""

    def __init__(self, directory: RunDirectory, *, private: bool) -> None:
        self.directory, self._journal = directory, Tail(directory.journal)
        self._federation = FederationView(directory, private=private)
        self._private = private
        self._clear()
        self._version = 0

    def _clear(self) -> None:
        self.header: dict[str, Any] = {}
        self.final: dict[str, Any] = {}
        self.events: list[dict[str, Any]] = []
        self.points: list[list[Any]] = []  # number of the round, seconds so far, CURVES
        self.frames: list[dict[str, Any]] = []
        self.moved: dict[str, list[float]] = {}  # by node of a tree: bytes up, bytes down
        self._seconds = 0.0

    def poll(self) -> None:
        """Take what was added to the journal and to the list of who answered."""
        news = self._journal.poll()
        if news.again:
            self._clear()
        for number, entry in news.entries:
            self._take(journal.checked(entry, f"{self.directory.journal}, line {number}"))
        changed = self._federation.poll()
        self._version += bool(news.entries or news.again or changed)

    def _take(self, entry: dict[str, Any]) -> None:
        if entry["kind"] == "header":
            self.header = entry
        elif entry["kind"] == "final":
            self.final = entry
        elif entry["kind"] in ("extended", "stopped"):
            self.events.append(entry)
        elif entry["kind"] == "round":
            self._seconds += entry.get("seconds", 0.0)
            self.points.append(
                [entry["round"] + 1, self._seconds, *(entry.get(name) for name in CURVES)]
            )
            if "tree" in self.header:
                self._take_frame(entry)

    def _take_frame(self, entry: dict[str, Any]) -> None:
        nodes, places = entry.get("nodes") or {}, entry.get("places") or {}
        for name, of in nodes.items():
            moved = self.moved.setdefault(name, [0.0, 0.0])
            moved[0] += of.get("up_bytes", 0)
            moved[1] += of.get("down_bytes", 0)
        listens = [
            [name, peer, round(float(weight), 3), way]
            for name, of in nodes.items()
            for way in ("down", "up")
            for peer, weight in loudest(of.get(f"attention_{way}") or {}, name)
        ]
        routes: dict[tuple[str, str], int] = {}
        for way in entry.get("routes") or []:
            edge = (str(way["from"]), str(way["to"]))
            routes[edge] = routes.get(edge, 0) + 1
        frame = {
            "round": entry["round"] + 1,
            "nodes": {
                name: {k: of[k] for k in (*OF_A_NODE, "missed") if of.get(k) is not None}
                for name, of in nodes.items()
            },
            "places": {name: list(pair) for name, pair in places.items()},
            "listens": listens,  # who, to whom, how much, and whether going down or up
            "bytes": {
                name: [of.get("up_bytes", 0), of.get("down_bytes", 0)] for name, of in nodes.items()
            },
            "routes": [[a, b, n] for (a, b), n in routes.items()],
        }
        self.frames.append(frame)
        if len(self.frames) > 2 * MOST_FRAMES:  # every second one of the older half goes
            half = len(self.frames) // 2
            self.frames = self.frames[:half:2] + self.frames[half:]

    def told(self) -> dict[str, Any]:
        """Return what the page draws."""
        header, recipe = self.header, self.header.get("recipe", {})
        tree = header.get("tree")
        return {
            "version": self._version,
            "columns": ["round", "seconds", *CURVES],
            "points": thinned(self.points, MOST_POINTS),
            "start_perplexity": header.get("start", {}).get("perplexity"),
            "baselines": self.final.get("baselines") or {},
            "settings": {f"{t}.{k}": _plain(v) for t, of in recipe.items() for k, v in of.items()},
            "privacy": (self.final.get("privacy") or {}).get("sentence"),
            "mechanism": (header.get("privacy") or {}).get("mechanism"),
            "predictions": self.final.get("predictions") or [],
            "events": [
                {k: v for k, v in e.items() if not isinstance(v, dict)} for e in self.events
            ],
            "command": header.get("command"),
            "tree": None if tree is None else self._tree(tree),
            "federation": self._federation.told(),
            "models": models_of(self.directory, private=self._private),
            "report": self.directory.report.is_file(),
        }

    def _tree(self, tree: dict[str, Any]) -> dict[str, Any]:
        final = self.final.get("test") or self.final.get("validation") or {}
        scores = {
            n["name"]: [n.get("perplexity"), n.get("personal")] for n in final.get("nodes", [])
        }
        return {
            "names": list(tree["names"]),
            "parents": list(tree["parents"]),
            "frames": self.frames[-MOST_FRAMES:],
            "final": scores,
            "moved": self.moved,
        }


def loudest(attention: dict[str, Any], own: str) -> list[tuple[str, float]]:
    """Return the peers that a node listens to most, without itself.

    >>> loudest({"a": 0.5, "b": 0.4, "c": 0.001}, "a")
    [('b', 0.4)]
    """
    heard = [(p, w) for p, w in attention.items() if p != own and w >= LEAST_HEARD]
    return sorted(heard, key=lambda pair: -pair[1])[:MOST_HEARD]


def thinned(points: list[list[Any]], most: int) -> list[list[Any]]:
    """Return at most about `most` points: every so many, those with a perplexity first.

    >>> thinned([[1, None], [2, 7.0], [3, None]], 2)
    [[1, None], [2, 7.0], [3, None]]
    """
    if len(points) <= 2 * most:
        return points
    every = -(-len(points) // most)
    at = CURVES.index("perplexity") + 2
    scored = [n for n, point in enumerate(points) if point[at] is not None]
    some = -(-len(scored) // most) or 1
    kept = {*range(0, len(points), every), *scored[::some], len(points) - 1}
    return [points[n] for n in sorted(kept)]


def models_of(directory: RunDirectory, *, private: bool = True) -> list[dict[str, str]]:
    """Return the models of a run that can be typed with: its own, its nodes', those of members.

    The model from which it began is one of them, where a recipe names it. Members are named for the
    run's owner alone.
    """
    found = []
    if directory.weights.is_file():
        found.append({"node": "", "kind": "last", "name": "trained model"})
    if directory.best.is_file():
        found.append({"node": "", "kind": "best", "name": "best on the way"})
    for weights in sorted(directory.path.glob("nodes/*/model.safetensors")):
        name = unquote(weights.parent.name)
        found.append({"node": name, "kind": "last", "name": f"node {name}"})
    if private:
        for weights in sorted(directory.path.glob("clients/*/model.safetensors"))[:MOST_MEMBERS]:
            name = unquote(weights.parent.name)
            found.append({"node": name, "kind": "personal", "name": f"personal model of {name}"})
    start = pretrained_of(directory)
    if start is not None:
        found.append({"node": "", "kind": "pretrained", "name": f"pretrained, {start.name}"})
    return found


def pretrained_of(directory: RunDirectory) -> Path | None:
    """Return the folder of the model from which a run began; None if it began from random numbers.

    A run, or a folder of Hugging Face's format.
    """
    try:
        named = directory.read_recipe().get("model", {}).get("init_from")
        status = read_status(directory.status) if directory.status.is_file() else None
    except FedlmError:
        return None
    if not isinstance(named, str) or not named:
        return None
    path = Path(status.folder if status is not None else ".") / named
    there = (path / "model.safetensors").is_file()
    return path if there else None


# ---- a federation over a network -----------------------------------------------------------

OUTCOMES = ("answered", "late", "away", "refused", "garbage", "aside")


class FederationView:
    """Who answered in a run over a network, as far as the reader may know."""

    def __init__(self, directory: RunDirectory, *, private: bool) -> None:
        self.directory = directory
        # A server that was killed, or whose disk was full, may leave a torn line between others.
        files = [ROUND_STATS, PRIVATE_ROUND_STATS] if private else [ROUND_STATS]
        self._tails = [Tail(directory.path / name, passes_over=True) for name in files]
        self._clear()

    def _clear(self) -> None:
        self.counts: dict[str, dict[str, int]] = {}
        self.last: dict[str, Any] = {}
        self.rounds = 0
        self.nodes: int | None = None
        self.bytes = [0, 0]
        self.edges: dict[str, list[int]] = {}  # bytes up and down, by node
        self._heard: set[int] = set()

    def poll(self) -> bool:
        """Take the rounds that were added; return whether there were any."""
        changed = False
        for tail in self._tails:
            try:
                news = tail.poll()
            except FedlmError:
                continue  # another one's file
            if news.again:
                self._clear()
            changed = changed or bool(news.entries or news.again)
            for _, entry in news.entries:
                self._take(entry)
        return changed

    def _take(self, entry: Any) -> None:
        if not isinstance(entry, dict) or type(entry.get("round")) is not int:
            return
        if isinstance(entry.get("nodes"), int):
            self.nodes = entry["nodes"]
        self.rounds = max(self.rounds, entry["round"] + 1)
        if "answered" not in entry:
            return  # under a plan: how many nodes there are, and no more
        if entry["round"] not in self._heard:
            self._heard.add(entry["round"])
            for outcome in OUTCOMES:
                for name in entry.get(outcome) or ():
                    of = self.counts.setdefault(str(name), {})
                    of[outcome] = of.get(outcome, 0) + 1
            for at, way in enumerate(("up_bytes", "down_bytes")):
                self.bytes[at] += int(entry.get(way) or 0)
            for name, moved in dict(entry.get("edges") or {}).items():
                before = self.edges.get(str(name), [0, 0])
                self.edges[str(name)] = [a + int(b) for a, b in zip(before, moved, strict=True)]
        self.last = {
            "round": entry["round"] + 1,
            "seconds": entry.get("seconds"),
            "of": {str(name): outcome for outcome in OUTCOMES for name in entry.get(outcome) or ()},
            "said": {
                str(name): str(why)[:300]
                for what in ("refused", "garbage")
                for name, why in dict(entry.get(what) or {}).items()
            },
        }

    def told(self) -> dict[str, Any] | None:
        """Return nodes, relays, counts and bytes; None if the run has no nodes."""
        if not self.rounds and not (self.directory.path / ASSIGNMENTS).is_file():
            return None
        named = bool(self.counts) or self.nodes is None
        return {
            "nodes": self.nodes,
            "named": named,
            "seats": self._seats() if named else [],
            "counts": self.counts,
            "last": self.last,
            "rounds": self.rounds,
            "bytes": self.bytes,
            "edges": self.edges,
        }

    def _seats(self) -> list[dict[str, Any]]:
        """Return the nodes of the run, and of a relay the nodes below it."""
        try:
            path = self.directory.path / ASSIGNMENTS
            return [
                {"name": str(e["name"]), "below": [str(leaf[0]) for leaf in e.get("leaves") or ()]}
                for e in read_json(path, str(path), RecordError)
            ]
        except (FedlmError, LookupError, TypeError, ValueError, AttributeError):
            return [{"name": name, "below": []} for name in sorted(self.counts)]
