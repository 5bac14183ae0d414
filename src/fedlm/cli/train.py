"""`fedlm train` and `fedlm pretrain`: a recipe to a trained model."""

from __future__ import annotations

import shlex
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import jax
import typer

from fedlm.cli.console import (
    PLAIN_SECONDS,
    AsJson,
    Changes,
    OutPath,
    RecipeFile,
    Resume,
    bar,
    emit,
    note,
    out,
    scored_words,
    show,
    talk,
)
from fedlm.core import tree as trees
from fedlm.core.releasable import Releasable
from fedlm.core.words import count, duration, size
from fedlm.engine import multihost
from fedlm.engine.devices import use_devices
from fedlm.privacy import release
from fedlm.recipe.assemble import trained_leaves
from fedlm.recipe.build import build
from fedlm.recipe.settings import Recipe, load
from fedlm.record.directory import free_path, newest_path
from fedlm.run import Run
from fedlm.training import Summary, Watcher, follow
from fedlm.training import train as carry_out

UNSAFE = "is fixed: whoever knows it can subtract the noise. Unsafe for release."
RUNS, STORES = Path("runs"), Path(".fedlm/stores")
COMPILING = "compiling, the first round takes longest"


def train(
    recipe: RecipeFile,
    changes: Changes = None,
    out_path: OutPath = None,
    resume: Resume = False,
    coordinator: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Where process 0 listens; auto under SLURM."),
    ] = None,
    processes: Annotated[int | None, typer.Option(help="How many run together.")] = None,
    process: Annotated[int | None, typer.Option(help="Which one this is, from 0.")] = None,
    patience: Annotated[int, typer.Option(help="Seconds to wait for a silent process.")] = 60,
    as_json: AsJson = False,
) -> None:
    """Train the federation described in RECIPE.

    Example: fedlm train recipes/sotu.toml --set server.rounds=50 --out runs/short
    """
    place = multihost.place_of(coordinator, processes, process, patience)
    loaded = load(recipe, tuple(changes or ()))
    use_devices(loaded.run.devices)
    path = run_path(recipe, out_path, resume)
    with multihost.joined_processes(place, note):
        writes = multihost.first_process()
        summary = _with_progress(loaded, path, resume) if writes else _follow(loaded)
    if not writes:
        raise typer.Exit(130 if summary is None else 0)
    where = "" if place is None else ", as every process was started"
    end(summary, path, ["train"], as_json, where)


def pretrain(
    recipe: RecipeFile,
    changes: Changes = None,
    out_path: OutPath = None,
    resume: Resume = False,
    as_json: AsJson = False,
) -> None:
    """Train the model of RECIPE on pooled public text, to start a federation from.

    A round is client.max_steps steps of client.optimizer on batches drawn from all text;
    server.schedule, warmup_rounds and final_fraction shape client.learning_rate. Then set
    model.init_from to the run.

    Example: fedlm pretrain recipes/irc-pretrain.toml --out runs/public
    """
    loaded = load(recipe, tuple(changes or ()))
    use_devices(loaded.run.devices or 1)
    path = run_path(recipe, out_path, resume)
    summary = _with_progress(loaded, path, resume, pooled=True)
    end(summary, path, ["pretrain"], as_json)


def run_path(recipe: Path, asked: Path | None, resume: bool) -> Path:
    """Return the run directory: as asked, or one with the recipe's name.

    With `resume` it is the newest directory of that name, else a new one.
    """
    stem = recipe.parent.name if recipe.name == "recipe.toml" else recipe.stem
    return asked or (newest_path if resume else free_path)(RUNS, stem)


def end(
    summary: Summary | None, path: Path, command: list[str], as_json: bool, where: str = ""
) -> None:
    """Print the summary; if the run was stopped, print the command to resume it and exit."""
    if summary is None:
        again = [*command, str(path / "recipe.toml"), "--out", str(path), "--resume"]
        repeat = shlex.join(["fedlm", *again])
        note(f"Stopped; a checkpoint is in {path}. Go on with{where}:\n  {repeat}")
        raise typer.Exit(130)
    if as_json:
        emit(summary)
    else:
        print_summary(summary)


def _with_progress(
    recipe: Recipe, path: Path, resume: bool, *, pooled: bool = False
) -> Summary | None:
    with talk.status("preparing") as status:
        tell = lambda stage, done: status.update(f"preparing: {stage} {done or ''}")  # noqa: E731
        run = build(recipe, STORES, tell, out=path, pooled=pooled, say=note)
    multihost.meet()  # from here on, the other processes find the prepared store
    facts = run.store.manifest
    tokens = "" if release.hides(run.plan) else f", {count(facts['train_tokens'], 'token')} in all"
    note(
        f"{_model_words(run)}; {run.population.size:,} of "
        f"{facts['train_clients']:,} training clients{tokens}; "
        f"store {run.store.path}; run {path}"
    )
    tree = run.recipe.federation
    if run.recipe.privacy.seed is not None:
        note(f"privacy.seed {UNSAFE}")
    if tree is not None and tree.noise_multiplier > 0 and tree.noise_seed is not None:
        note(f"federation.noise_seed {UNSAFE}")
    return followed(
        lambda watcher: carry_out(run, resume=resume, watcher=watcher), run.cadence.rounds
    )


def _model_words(run: Run) -> str:
    """Return the name of a run's model, its size, and how much of it is trained if not all."""
    shapes = run.model.shapes()
    keep = trained_leaves(run.recipe, shapes)
    words = f"{run.recipe.model.name}, {run.model.parameters:,} parameters"
    return (
        words if keep is None else f"{words}, {trees.size(trees.split(shapes, keep)[0]):,} trained"
    )


def followed(train: Callable[[Watcher], Summary | None], rounds: int) -> Summary | None:
    """Train with a progress bar on stderr; on Ctrl-C, stop after the current round."""
    if not talk.is_terminal:
        lines = PlainProgress(rounds)
        with polite_stop() as stop:
            told = Watcher(say=note, begin=lines.begin, round=lines.round, scored=lines.scored)
            return train(replace(told, stop=stop.is_set))
    progress, said = bar(), RoundWords()
    task = progress.add_task("", total=rounds, said=COMPILING)

    def begin(first: int, rounds: int, perplexity: float | None) -> None:
        said.perplexity = perplexity
        progress.update(task, completed=first)

    def on_round(facts: Releasable) -> None:
        progress.update(task, completed=facts["round"] + 1, said=said.after(facts))

    def scored(done: int, rows: int) -> None:
        progress.update(task, said=scored_words(done, rows))

    with polite_stop() as stop, progress:
        told = Watcher(say=note, begin=begin, round=on_round, scored=scored)
        return train(replace(told, stop=stop.is_set))


class RoundWords:
    """What is said of a round, in 48 columns."""

    def __init__(self) -> None:
        self.members = self.seconds = 0.0
        self.perplexity: float | None = None

    def after(self, facts: Releasable) -> str:
        """Return loss or epsilon, the latest perplexity and the speed after a round."""
        self.members += facts["members"]
        self.seconds += facts["seconds"]
        if facts.get("perplexity") is not None:
            self.perplexity = facts["perplexity"]
        words = [f"loss {facts['loss']:.3f}"] if "loss" in facts else []
        if facts.get("epsilon") is not None:
            words = [f"epsilon {facts['epsilon']:.2f}"]
        words += [] if self.perplexity is None else [f"perplexity {self.perplexity:.1f}"]
        return ", ".join([*words, f"{self.members / max(self.seconds, 1e-9):.1f} clients/s"])


class PlainProgress:
    """Progress as lines, where the output is a file: one per evaluation, at most one in a while."""

    def __init__(self, rounds: int, seconds: float = PLAIN_SECONDS) -> None:
        self.rounds, self.every = rounds, seconds
        self.words, self.told = RoundWords(), time.monotonic()

    def begin(self, first: int, rounds: int, perplexity: float | None) -> None:
        """Say where the run begins, and why nothing is seen for a while."""
        self.rounds, self.words.perplexity = rounds, perplexity
        start = "" if perplexity is None else f", perplexity {perplexity:.1f}"
        note(f"round {first} of {rounds}{start}; {COMPILING}")

    def round(self, facts: Releasable) -> None:
        """Say how a round went, if it is time."""
        said, now = self.words.after(facts), time.monotonic()
        last = facts["round"] + 1 == self.rounds
        if last or now - self.told >= self.every:
            self.told = now
            note(f"round {facts['round'] + 1} of {self.rounds}: {said}")

    def scored(self, done: int, rows: int) -> None:
        """Say how many rows of held-out text were scored, if it is time."""
        now = time.monotonic()
        if now - self.told >= self.every:
            self.told = now
            note(scored_words(done, rows))


def _follow(recipe: Recipe) -> Summary | None:
    """Train as a process that is not the first; return an empty summary, None if stopped."""
    multihost.meet()
    run = build(recipe, STORES)
    note(f"process {jax.process_index()} of {jax.process_count()}: at work for process 0")
    with polite_stop() as stop:
        return {} if follow(run, Watcher(stop=stop.is_set)) else None


class polite_stop:
    """A context in which a first Ctrl-C or SIGTERM lets the round end; a second stops at once."""

    def __enter__(self) -> threading.Event:
        self.event = threading.Event()
        if threading.current_thread() is threading.main_thread():
            self.before = {s: signal.signal(s, self._ask) for s in (signal.SIGINT, signal.SIGTERM)}
        else:
            self.before = {}
        return self.event

    def _ask(self, number: int, frame: Any) -> None:
        if self.event.is_set():
            raise KeyboardInterrupt
        note("Stopping after this round; once more stops at once.")
        self.event.set()

    def __exit__(self, *error: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)


def print_summary(summary: Summary) -> None:
    """Print the summary of a finished run as text."""
    counted = summary.get("baselines") or {}
    rows: list[list[Any]] = [["start", summary["start_perplexity"], ""]]
    final = summary["perplexity"]
    for name, value in counted.items():
        rows.append([f"{name}, counted", value, f"{final / value:.2f}" if final else "-"])
    whose = "trained, mean over leaves" if summary.get("nodes") else "trained, held-out clients"
    rows.append([whose, final, ""])
    if summary.get("validation_perplexity") and not summary.get("nodes"):
        rows.append(["trained, held-out text", summary["validation_perplexity"], ""])
    show(f"{summary['run']}: perplexity", ["model", "perplexity", "trained / this"], rows)
    if summary.get("nodes"):
        parts = ("name", "perplexity", "personal", "parent")
        head = ["node", "perplexity", "after own steps", "parent"]
        show(
            "nodes, on the text below them", head, [[n[p] for p in parts] for n in summary["nodes"]]
        )
    accuracy = "" if summary["accuracy"] is None else f"; accuracy {summary['accuracy']:.1%}"
    moved = f"{size(summary['upload_bytes'])} up, {size(summary['download_bytes'])} down"
    learned = "" if summary["tokens"] is None else f", {count(summary['tokens'], 'token')}"
    speed = summary["clients_per_second"]
    rate = "" if speed is None else f" ({speed:.1f} clients/s)"
    rounds = count(summary["rounds"], "round")
    out.print(f"{rounds}{learned} in {duration(summary['seconds'])}{rate};")
    out.print(f"{moved}{accuracy}")
    if summary.get("best"):
        best = summary["best"]
        out.print(
            f"best on the way: perplexity {best['perplexity']:.1f} after round {best['round']} "
            "(--best)"
        )
    if summary.get("privacy"):
        out.print(f"privacy: {summary['privacy']}")
    for prompt in summary.get("predictions") or []:
        said = ", ".join(f"{w['word']} {w['probability']:.0%}" for w in prompt["next"])
        out.print(f"  {prompt['prompt']} ... {said}")
    out.print(f"report: {summary['report']}")
