"""Should these members federate? A short run on their own text that answers.

In:       a store, a recipe for the federation, shares of the members' text, a budget in minutes.
Out:      per share the perplexity of local training, of the federation, and of the federation made
          personal; who would be hurt; a sentence; a page.
Promise:  every side tries as many settings, and own steps at a second, smaller rate; all stop
          early by the same text, and are judged by a part of each member's held-out text that
          nothing else saw; the members and that text are the same at every share; stopped at any
          moment, it goes on where it was.
Not here: the ways of a personal model (`personal/ways.py`), the page (`record/advice.py`).

| text of a member | local | federation | personal |
|---|---|---|---|
| training text, or a share of it | learns, twice | learns, with that of all members | learns |
| first half of the held-out text | decides | decides | decides |
| second half | the figure | the figure | the figure |
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedlm.core.documents import read_json
from fedlm.core.durable import write_atomically
from fedlm.core.errors import ConfigError, RecordError, require
from fedlm.core.late import late
from fedlm.core.types import PAD, Params
from fedlm.core.words import count, number
from fedlm.corpus.store import Store, same_vocabulary, write_tokens
from fedlm.inference import load_params
from fedlm.methods.optimizers import client_optimizer
from fedlm.models import catalog
from fedlm.personal.members import OwnText, member_called, members_of
from fedlm.personal.model import Personal, Rows, Scorer, mixture_perplexity
from fedlm.personal.ways import (
    LONG_PASS,
    PARTS,
    Attempt,
    TrainedModel,
    Workshop,
    federated,
    finetune,
    mix_weights,
)
from fedlm.recipe import parts
from fedlm.recipe.assemble import loss_of
from fedlm.recipe.build import build
from fedlm.recipe.settings import Recipe, dump
from fedlm.record.advice import advice_page
from fedlm.record.facts import facts_of
from fedlm.record.journal import dumps
from fedlm.run import Run
from fedlm.search import splits
from fedlm.search.sweep import FAILED, markdown, train_point
from fedlm.training import Watcher

scipy = late("scipy")  # up to a second

PLAN, ANSWER, TABLE, PAGE = "advise.json", "advice.json", "table.md", "report.html"
LOCAL, FEDERATED, PERSONAL = "local", "federated", "personal"
SIDES = (LOCAL, FEDERATED, PERSONAL)
# So many settings are tried by every side, around the rates of the recipe; the first is its own.
SCALES = (1.0, 1 / 3)
WEIGHT_DECAY, CLIP, LOCAL_RATE, PERSONAL_RATE = 0.1, 1.0, 0.003, 0.001  # of AdamW
FEWEST_STEPS = 400  # that a member may take, however short its text is: it stops by itself
DRAWN = 4  # times as many members are looked at as are scored: some have too little text
FEWEST = 2  # members that an answer is made of
FEWEST_CLEAR = 4  # members, from which on a difference may be called one
DOUBT = 0.05  # how often a difference is called one where there is none
# Of a run whose best model is what counts.
RUN: dict[str, dict[str, Any]] = {
    "run": {"keep_best": True, "trackers": (), "baselines": False, "prompts": ()},
    "server": {"evaluate_rows": 0},
}


@dataclass(frozen=True, kw_only=True)
class Question:
    """Everything that decides an answer, except the time limit."""

    store: Path
    recipe: Recipe
    shares: tuple[float, ...]  # of each member's training text, the largest first
    members: int  # the most that are scored
    by_group: bool = False  # a member is a first group of the store, with all its clients
    passes: int = 20
    patience: int = 3

    def facts(self) -> dict[str, Any]:
        """Return what must be the same when a search for an answer goes on."""
        return {
            "store": str(self.store.resolve()),
            "clients_sha256": Store(self.store).manifest["clients_sha256"],
            "recipe_sha256": hashlib.sha256(dump(self.recipe).encode()).hexdigest(),
            "shares": list(self.shares),
            "members": self.members,
            "by": "group" if self.by_group else "client",
            "passes": self.passes,
            "patience": self.patience,
            # All that decides how a member trains alone, whose score is kept.
            "local_training": [
                *(LOCAL_RATE, PERSONAL_RATE, *SCALES, WEIGHT_DECAY, CLIP),
                *(FEWEST_STEPS, LONG_PASS, PARTS),
            ],
            "local_ways": ["first rate", "both rates", "weights"],
            "personal_ways": ["federated", "finetune", "weights", "both rates"],
        }


def ask(
    store: Path,
    recipe: Recipe,
    *,
    shares: Sequence[float] = (1.0, 0.3, 0.1),
    members: int = 12,
    by_group: bool = False,
) -> Question:
    """Return a question, or raise `ConfigError` about what cannot be answered."""
    require(
        bool(shares) and all(0 < share <= 1 for share in shares),
        "--shares",
        ",".join(f"{share:g}" for share in shares),
        "shares of the text, above 0 and at most 1, with commas",
    )
    require(
        recipe.federation is None,
        "[federation]",
        "a tree",
        "a recipe of a flat federation",
        "For organisations use --by group: the members are then the first groups of the store.",
    )
    require(
        recipe.privacy.mechanism is None,
        "privacy.mechanism",
        recipe.privacy.mechanism,
        "none: figures of single members are compared, which no noise covers",
        "Ask without a plan first; noise makes a federation worse, never better.",
    )
    require(
        recipe.model.init_from is None,
        "model.init_from",
        recipe.model.init_from,
        "nothing: local training and the federation both begin with a fresh model",
    )
    require(
        (store / "store.json").is_file(),
        "STORE",
        str(store),
        "a folder made by fedlm prepare",
        f"Make one: fedlm prepare {store} --out STORE." if store.exists() else "",
    )
    ordered = tuple(sorted({1.0, *shares}, reverse=True))
    return Question(store=store, recipe=recipe, shares=ordered, members=members, by_group=by_group)


# ---- the members' text -------------------------------------------------------------------------


def store_at(question: Question, share: float, out: Path) -> Path:
    """Return the store whose members have a share of their training text, and all held-out text.

    The whole text of clients is the user's own store, which so counts the runs on it.
    """
    if share == 1 and not question.by_group:
        return question.store
    path = out / "stores" / f"{share:g}"
    if not path.exists():
        cut_store(Store(question.store), share, path, by_group=question.by_group)
    return path


def cut_store(whole: Store, share: float, path: Path, *, by_group: bool = False) -> None:
    """Write a store of a share of each training client's text, the same held-out text and words.

    With `by_group` a client of it is a first group of the store, with the text of all its clients.
    """
    dtype = whole.train(int(whole.training_clients[0])).dtype
    owners = _owners(whole) if by_group else _clients(whole)
    rows = (_shortened(whole, name, group, share) for name, group in owners)
    write_tokens(rows, path, same_vocabulary(whole), whole.settings, dtype)


def _clients(store: Store) -> Iterator[tuple[str, list[int]]]:
    for n in map(int, store.training_clients):
        yield store.client(n), [n]


def _owners(store: Store) -> Iterator[tuple[str, list[int]]]:
    """Yield the first groups of a store and the numbers of their training clients."""
    found: dict[str, list[int]] = {}
    for n in map(int, store.training_clients):
        for name in store.groups(n)[:1]:
            found.setdefault(name, []).append(n)
    require(
        len(found) > 1,
        "--by",
        "group",
        f"a store with at least two groups; this one has {len(found)}",
        "fedlm prepare --groups-field names them.",
    )
    yield from sorted(found.items())


def _shortened(store: Store, name: str, clients: list[int], share: float) -> dict[str, Any]:
    """Return a member's row of a store: the beginning of each of its clients' text."""
    train = [store.train(n) for n in clients]
    return {
        "client": name,
        "groups": list(store.groups(clients[0])),
        "train": np.concatenate([x[: math.ceil(share * len(x))] for x in train]),
        "held": np.concatenate([store.held(n) for n in clients]),
        "test": False,
        "held_bytes": sum(store.held_bytes(n) for n in clients),
    }


# ---- one share of the text -----------------------------------------------------------------------


@dataclass(frozen=True)
class Clock:
    """When the minutes are over, and whether somebody asked to stop."""

    seconds: float | None
    asked: Callable[[], bool]
    began: float

    def until(self, part: float) -> Callable[[], bool]:
        """Return a test whether a part of the time has passed, or a stop was asked for."""
        end = math.inf if self.seconds is None else self.began + part * self.seconds
        return lambda: self.asked() or time.monotonic() >= end

    def check(self) -> None:
        """Raise `KeyboardInterrupt` if somebody asked to stop."""
        if self.asked():
            raise KeyboardInterrupt


def cell_recipe(question: Question, path: Path, scale: float) -> Recipe:
    """Return the recipe of the federation on a store, at a multiple of its server's rate."""
    base = question.recipe
    size = len(Store(path).training_clients)
    updates = {
        "data": {"store": str(path.resolve()), "source": None, "stores": ()},
        **RUN,
    }
    updates["server"] = {
        **RUN["server"],
        "learning_rate": scale * base.server.learning_rate,
        "cohort": min(base.server.cohort, size),
    }
    tables = {
        name: getattr(base, name).model_copy(update=update) for name, update in updates.items()
    }
    given = tables["data"].model_dump(include={"store", "layout", "sequence_length"})
    tables["data"] = type(base.data)(**given)  # all else is the store's
    return base.model_copy(update=tables)


def federation(
    question: Question,
    path: Path,
    folder: Path,
    watcher: Callable[[str], Watcher],
    over: Sequence[Callable[[], bool]],
) -> tuple[Run, dict[str, Any]]:
    """Train the federation at every rate, and return the run that scored best and its facts."""
    found: list[tuple[float, Run, dict[str, Any]]] = []
    ended = []
    for scale, too_late in zip(SCALES, over, strict=True):
        out = folder / f"federation-{scale:.2g}"
        run = by_first_halves(build(cell_recipe(question, path, scale), path.parent, out=out))
        rate = run.recipe.server.learning_rate
        if not (_ended(run) or too_late()):
            said = replace(watcher(f"the federation at server rate {number(rate)}"), stop=too_late)
            train_point(run, said)
        ended.append(_ended(run))
        if run.record.best.is_file() and not (out / FAILED).is_file():
            rounds = facts_of(out)
            best = min(told["perplexity"] for told in rounds.evaluated)
            about = {"rounds": len(rounds.rounds), "server_rate": rate}
            found.append((best, run, about))
    if not found:
        raise ConfigError(
            "--minutes: expected enough for the first evaluation of the federation; call it again "
            "with more, or with --set server.evaluate_every=5."
            if not all(ended)
            else f"server.learning_rate = {question.recipe.server.learning_rate:g}: the federation "
            "diverged; expected a lower rate, or a client.gradient_clip_norm."
        )
    _, run, about = min(found, key=lambda each: each[0])
    return run, {**about, "complete": all(ended)}


def _ended(run: Run) -> bool:
    return run.record.summary.is_file() or (run.record.path / FAILED).is_file()


def by_first_halves(run: Run) -> Run:
    """Return the run, scored on the half of each member's held-out text that may choose."""
    return replace(run, evaluation=splits.first_halves(run.evaluation))


@dataclass(frozen=True)
class Score:
    """One member: its text, and the perplexity of each side on text that chose nothing."""

    name: str
    tokens: int  # to learn from
    perplexity: dict[str, float]  # by side
    note: dict[str, str]
    report_tokens: int

    def facts(self) -> dict[str, Any]:
        return dict(vars(self))


class Bench:
    """The programs that all members and shares have in common."""

    def __init__(self, question: Question) -> None:
        self.question = question
        self.scorer = Scorer()
        self._shop: Workshop | None = None

    def shop(self, run: Run, model: Any) -> Workshop:
        """Return the workshop of a federation's model; its steps are AdamW's, at rate one."""
        if self._shop is None:
            client = run.recipe.client
            spec = parts.model_spec(run.recipe, run.store.vocabulary)
            self._shop = Workshop(
                federated=model,
                fresh=lambda: catalog.make(
                    spec.architecture, spec.size, parts.start_key(run.recipe)
                ),
                optimizer=client_optimizer("adamw", 1.0, weight_decay=WEIGHT_DECAY, clip=CLIP),
                vocabulary=run.store.vocabulary,
                batch_size=client.batch_size,
                passes=self.question.passes,
                patience=self.question.patience,
                seed=run.recipe.run.seed,
                scorer=self.scorer,
                loss=loss_of(run.recipe),
            )
        made = self._shop.at_scale(1.0)
        made.federated = model
        return made


def score_member(shop: Workshop, member: OwnText, kept: Score | None) -> Score:
    """Make a member's model by every side, each at every rate, then look at the text of the report.

    The local training of a `kept` score is not repeated.
    """

    shop = with_enough_steps(shop, member)

    def at(rate: float) -> list[Attempt]:
        each = [shop.at_scale(rate * scale) for scale in SCALES]
        return [Attempt(one, member.own, member.choose, member.number) for one in each]

    def best(models: Sequence[tuple[Attempt, Personal]]) -> Personal:
        return min(models, key=lambda pair: pair[0].score(pair[1]))[1]

    made: dict[str, Personal] = {}
    own = at(PERSONAL_RATE)
    pairs = list(zip(at(LOCAL_RATE), own, strict=True))
    if kept is None:
        made[LOCAL] = best([(later, local_of(first, later)) for first, later in pairs])
    made[FEDERATED] = federated(own[0])
    made[PERSONAL] = best(
        [
            *((one, way(one)) for one in own for way in (federated, finetune, mix_weights)),
            *((later, trained_twice(first, later, shop.federated)) for first, later in pairs),
        ]
    )
    scored = {
        side: mixture_perplexity(model.nats(member.report, shop.scorer), member.report)
        for side, model in made.items()
    }
    notes = {side: model.note for side, model in made.items()}
    if kept is not None:
        scored, notes = {**kept.perplexity, **scored}, {**kept.note, **notes}
    return Score(
        member.name,
        _targets(member.own),
        {side: scored[side] for side in SIDES},
        {side: notes[side] for side in SIDES},
        _targets(member.report),
    )


def with_enough_steps(shop: Workshop, member: OwnText) -> Workshop:
    """Return the workshop with as many passes as `FEWEST_STEPS` take over a member's text."""
    batches = max(1, -(-len(member.own) // shop.batch_size))
    made = shop.at_scale(shop.scale)
    made.passes = max(shop.passes, math.ceil(FEWEST_STEPS / batches))
    return made


def trained_twice(first: Attempt, later: Attempt, start: Params | None = None) -> Personal:
    """Train on a member's own text, then on at a smaller rate; from a fresh model, or from `start`.

    Both sides get both runs: else a comparison would mistake a schedule of rates for what the
    others' text is worth, or hide it.
    """
    if start is None:
        begun, of = first.alone, "a fresh"
    else:
        begun = first.shop.train(start, first.own, first.choose, first.member)
        of = "the federation's"
    ended = later.shop.train(
        begun.params, later.own, later.choose, later.member, after=begun.passes
    )
    note = f"{begun.passes:.3g} passes from {of} model, {ended.passes:.3g} at the smaller rate"
    return Personal(LOCAL if start is None else "both rates", ended.params, note=note)


def local_of(first: Attempt, later: Attempt) -> Personal:
    """Return the best of a member's own text: after the first rate, both, or a point between."""
    twice = trained_twice(first, later)
    shop = later.shop.at_scale(later.shop.scale)
    shop.federated = first.alone.params
    at = Attempt(shop, later.own, later.choose, later.member)
    at.__dict__["tuned"] = TrainedModel(twice.params, 0)
    found = mix_weights(at)
    return Personal(LOCAL, found.params, note=twice.note)


def _targets(rows: Rows) -> int:
    return int(np.count_nonzero(rows[:, 1:] != PAD))


# ---- the answer ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class ShareLine:
    """One share of the text, over all members that were scored."""

    share: float
    tokens: float  # per member, the mean
    members: int
    perplexity: dict[str, float]  # by side, the geometric mean over members
    gain: dict[str, float]  # by side but local: how far below local, a share of its perplexity
    error: dict[str, float]  # the standard error of the logarithm of that
    hurt: dict[str, float]  # the share of members who are better off alone
    rounds: int
    complete: bool

    def facts(self) -> dict[str, Any]:
        return dict(vars(self))


def line_of(share: float, scores: Sequence[Score], about: dict[str, Any]) -> ShareLine:
    """Return the figures of one share of the text."""
    logs = {side: [math.log(s.perplexity[side]) for s in scores] for side in SIDES}
    apart = {
        side: [a - b for a, b in zip(logs[side], logs[LOCAL], strict=True)]
        for side in (FEDERATED, PERSONAL)
    }
    return ShareLine(
        share=share,
        tokens=statistics.fmean(s.tokens for s in scores),
        members=len(scores),
        perplexity={side: math.exp(statistics.fmean(found)) for side, found in logs.items()},
        gain={side: 1 - math.exp(statistics.fmean(x)) for side, x in apart.items()},
        error={
            side: statistics.stdev(x) / math.sqrt(len(x)) if len(x) > 1 else math.inf
            for side, x in apart.items()
        },
        hurt={side: statistics.fmean(d > 1e-9 for d in x) for side, x in apart.items()},
        rounds=int(about["rounds"]),
        complete=bool(about["complete"]),
    )


def sentences(lines: Sequence[ShareLine], about: dict[str, Any]) -> list[str]:
    """Say in words what the figures show, and how far they can be trusted."""
    first = lines[0]
    gain, error = first.gain[PERSONAL], first.error[PERSONAL]
    apart = abs(math.log1p(-min(gain, 0.999999)))
    clear = first.members >= FEWEST_CLEAR and apart > errors_apart(first.members) * error
    hurt = round(first.hurt[PERSONAL] * first.members)
    who = f"{hurt} of {count(first.members, 'member')} would be better off alone"
    verdict = "Federate, and personalise" if gain > 0 else "Better alone"
    verdict = verdict if clear else "No clear difference"
    told = [
        f"{verdict}: with {number(round(first.tokens))} tokens per member, the perplexity of the "
        f"personalised federation is {_percent(gain)} that of a model of one's own text alone "
        f"({who})."
    ]
    if first.gain[FEDERATED] < 0 < gain:
        told.append(
            "It is the personal steps that make it pay: the federation's model as it is would be "
            f"{_percent(first.gain[FEDERATED])} local training."
        )
    told += [
        f"With {line.share:.0%} of the text it would be {_percent(line.gain[PERSONAL])} local "
        f"training, with {round(line.hurt[PERSONAL] * line.members)} of "
        f"{count(line.members, 'member')} better off alone."
        for line in lines[1:]
    ]
    told.append(
        f"A short run: one seed, {count(first.rounds, 'round')} of at most "
        f"{about['cohort']} members, a model of {number(about['parameters'])} parameters, "
        f"{len(SCALES)} rates per side. A longer run, another model or other rates may move it."
    )
    if not first.complete:
        told.append(
            "The minutes were over before the federation stopped improving, so that it is shown "
            "worse than it is: call it again with more."
        )
    return told


def errors_apart(members: int) -> float:
    """Return how many standard errors a mean over few members may be off by chance (Student).

    >>> round(errors_apart(4), 2), round(errors_apart(100), 2)
    (3.18, 1.98)
    """
    return float(scipy.stats.t.ppf(1 - DOUBT / 2, members - 1))


def _percent(gain: float) -> str:
    return f"{abs(gain):.0%} {'below' if gain >= 0 else 'above'}"


def advise(
    question: Question,
    out: Path,
    *,
    minutes: float | None = None,
    watcher: Callable[[str], Watcher] = lambda label: Watcher(),
    stop: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Answer a question, or go on with it, and return the answer as one JSON object.

    The answer, its table and its page are also files in `out`.

    Raises:
      KeyboardInterrupt: `stop` asked for it; the same call goes on later.
      ConfigError: members have no held-out text, or the minutes are too few for an answer.
      RecordError: `out` holds another question.
    """
    began = time.monotonic()
    _claim(question, out)
    bench = Bench(question)
    clock = Clock(None if minutes is None else 60 * minutes, stop, began)
    names = _names(question, out)
    lines: list[ShareLine] = []
    cells: list[dict[str, Any]] = []
    about: dict[str, Any] = {}
    for place, share in enumerate(question.shares):
        cell = out / "shares" / f"{share:g}"
        over = clock.until((place + 1) / len(question.shares))
        clock.check()
        if place and over():
            break
        path = store_at(question, share, out)
        part = 1 / len(question.shares)
        times = [clock.until(part * (place + (n + 1) / 4)) for n in range(len(SCALES))]
        try:
            run, facts = federation(question, path, cell, watcher, times)
        finally:
            clock.check()  # a stop that was asked for is no mistake in the minutes
        found = _score_all(bench, run, names, cell, watcher, over)
        clock.check()
        if len(found) < FEWEST:
            break
        done = {**facts, "complete": facts["complete"] and len(found) == len(names)}
        about = about or {
            "parameters": run.model.parameters,
            "cohort": run.recipe.server.cohort,
            "population": len(run.store.training_clients),
        }
        lines.append(line_of(share, found, done))
        cells.append({**done, "share": share, "members": [s.facts() for s in found]})
    if not lines:
        raise ConfigError(
            f"--minutes {minutes:g}: expected enough to score {FEWEST} members; call it again with "
            "more: what was done is kept."
        )
    answer = {
        "store": str(question.store),
        "by": "group" if question.by_group else "client",
        **about,
        "answer": sentences(lines, about),
        "lines": [line.facts() for line in lines],
        "missing": [share for share in question.shares if share not in [x.share for x in lines]],
        "seconds": round(time.monotonic() - began, 1),
        "shares": cells,
    }
    head, rows = advice_table(lines)
    write_atomically(out / ANSWER, (dumps(answer) + "\n").encode())
    write_atomically(out / TABLE, markdown(head, rows).encode())
    write_atomically(out / PAGE, advice_page(answer, head, rows).encode())
    return answer


def advice_table(lines: Sequence[ShareLine]) -> tuple[list[str], list[list[Any]]]:
    """Return the head and the rows of the table."""
    head = ["text", "tokens per member", *SIDES, "below local", "hurt, federated", "hurt, personal"]
    rows = [
        [
            f"{line.share:.0%}",
            number(round(line.tokens)),
            *(f"{line.perplexity[side]:.1f}" for side in SIDES),
            f"{line.gain[PERSONAL]:.0%}",
            f"{line.hurt[FEDERATED]:.0%}",
            f"{line.hurt[PERSONAL]:.0%}",
        ]
        for line in lines
    ]
    return head, rows


def _names(question: Question, out: Path) -> list[str]:
    """Return the members that are scored: drawn at random among those with enough text."""
    least = store_at(question, question.shares[-1], out)
    run = build(cell_recipe(question, least, 1.0), least.parent, out=out / "none")
    drawn = members_of(run, "validation", DRAWN * question.members)
    found = [member.name for member in drawn if member.enough]
    every = max(1, len(found) // question.members)
    found = found[::every][: question.members]
    require(
        len(found) >= FEWEST,
        "STORE",
        str(question.store),
        f"at least {FEWEST} members with text to learn from and two held-out rows each; "
        f"{len(found)} of those looked at have them",
        "Prepare it with a larger --validation, or leave out the smallest --shares.",
    )
    return found


def _score_all(
    bench: Bench,
    run: Run,
    names: Sequence[str],
    cell: Path,
    watcher: Callable[[str], Watcher],
    over: Callable[[], bool],
) -> list[Score]:
    """Score every member, or so many as there is time for, but no fewer than an answer needs."""
    digest = hashlib.sha256(run.record.best.read_bytes()).hexdigest()[:16]
    model = load_params(run.recipe.model, run.store.vocabulary, run.record.best)
    shop, found = bench.shop(run, model), []
    for place, name in enumerate(names):
        file = cell / "members" / f"{place}.json"
        kept = _read_score(file, name)
        if kept is not None and kept[0] == digest:
            found.append(kept[1])
            continue
        if len(found) >= FEWEST and over():
            break
        member = member_called(run, name)
        scored = score_member(shop, member, None if kept is None else kept[1])
        told = {"model": digest, **scored.facts()}
        write_atomically(file, (dumps(told) + "\n").encode(), private=True)
        found.append(scored)
        each = ", ".join(f"{side} {scored.perplexity[side]:.1f}" for side in SIDES)
        watcher(f"member {place + 1} of {len(names)}, {name}: {each}")
    return found


def _read_score(file: Path, name: str) -> tuple[str, Score] | None:
    """Return a member's kept score and the model that it is of; None without one."""
    if not file.is_file():
        return None
    told = read_json(file, str(file), RecordError)
    try:
        digest = told.pop("model")
        kept = Score(**told)
    except (AttributeError, KeyError, TypeError):
        raise RecordError(f"{file} is damaged: remove it, and repeat.") from None
    return (digest, kept) if kept.name == name else None


def _claim(question: Question, out: Path) -> None:
    """Take a folder for this question, or go on with it; refuse the folder of another one."""
    file, facts = out / PLAN, json.loads(json.dumps(question.facts()))
    if file.is_file():
        there = read_json(file, str(file), RecordError)
        if there != facts:
            there = there if isinstance(there, dict) else {}
            differ = [name for name in facts if facts[name] != there.get(name)]
            raise RecordError(
                f"{out} holds another question ({', '.join(differ) or 'damaged'} differs): give "
                "another --out."
            )
        return
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RecordError(f"{out} is not the folder of a question: give another --out.")
    write_atomically(file, (dumps(facts) + "\n").encode())
