"""A recipe, carried out over a federation's nodes.

In:       a federation's folder, a recipe, a run directory.
Out:      what `fedlm train` leaves: journal, checkpoints, report, model, summary.
Promise:  the same loop, round and record as in simulation, with the nodes in place of the mesh;
          nodes keep their seats for the whole run, so that members keep their numbers; a run that
          was killed goes on from its checkpoint.
Not here: the loop (`run.py`), sending (`engine/flower.py`).
"""

from __future__ import annotations

import fcntl
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx
from flwr.app import ConfigRecord, Message, RecordDict

from fedlm.core.errors import ConfigError, EngineError, RecordError
from fedlm.core.types import Engine, Sampling
from fedlm.deploy.client_app import HELLO
from fedlm.deploy.home import Home
from fedlm.deploy.operator import Operator, presence
from fedlm.engine.flower import FlowerEngine, GridPost, Patience, Post, Seat, Tally
from fedlm.recipe import promise
from fedlm.recipe.build import Experiment, open_store, resolve
from fedlm.recipe.settings import Recipe, dump
from fedlm.record.checkpoint import write_atomically
from fedlm.record.directory import RunDirectory
from fedlm.train import Summary, Watcher
from fedlm.train import train as carry_out
from fedlm.wire.dense import dense

SEATS, TALLIES = "seats.json", "nodes.jsonl"
HELLO_SECONDS = 20.0


@dataclass(frozen=True)
class Deployed(Experiment):
    """An experiment whose members live at nodes; the store here holds held-out text alone."""

    post: Any = None
    seats: tuple[Seat, ...] = ()
    patience: Patience = field(default_factory=Patience)
    tell: Callable[[Tally], None] = lambda tally: None

    @cached_property
    def sampling(self) -> Sampling:
        return promise.sampling_of(self.recipe, sum(seat.clients for seat in self.seats))

    @cached_property
    def engine(self) -> Engine:
        return FlowerEngine(
            self.algorithm,
            self.post,
            self.seats,
            recipe=self.question_recipe,
            seed=self.recipe.run.seed,
            exact=dense(),
            patience=self.patience,
            tell=self.tell,
        )

    @cached_property
    def question_recipe(self) -> str:
        """The recipe as nodes are told it: no paths, no secret, the noise that was found."""
        recipe, privacy = self.recipe, self.recipe.privacy
        if self.plan is not None:
            # That a seed is fixed is told, so that a policy can refuse it; not which one.
            fixed = None if privacy.seed is None else 0
            noise = self.plan.noise_multiplier
            privacy = privacy.model_copy(update={"noise": noise, "seed": fixed})
        return dump(
            recipe.model_copy(
                update={
                    "data": recipe.data.model_copy(update={"source": None, "store": None}),
                    "model": recipe.model.model_copy(update={"init_from": None}),
                    "run": recipe.run.model_copy(update={"devices": 0, "prompts": ()}),
                    "privacy": privacy,
                }
            )
        )

    def baselines(self, splits: Any) -> dict[str, dict[str, float]]:
        """None: n-grams would have to be counted on text that is elsewhere."""
        return {}


def train(
    home: Home, recipe: Recipe, path: Path, *, resume: bool, watcher: Watcher, stores: Path
) -> Summary | None:
    """Trains over the nodes to the end; None if the watcher stopped it before."""
    settings = home.settings
    patience = Patience(quorum=settings.quorum, deadline=settings.deadline or float("inf"))
    directory = RunDirectory(path)
    with _alone(home), _sentences(), _running(home) as post:
        base = build_base(recipe, stores)
        goes_on = directory.claim(dump(base.recipe), resume=resume)
        seats = _kept_seats(directory) if goes_on else None
        if seats is None:
            seats = seat_all(post, sorted(home.nodes()), base, watcher.say)
            text = json.dumps([seat._asdict() for seat in seats], indent=2)
            write_atomically(directory.path / SEATS, text.encode())
        experiment = Deployed(
            base.recipe,
            base.store,
            post=post,
            seats=seats,
            patience=patience,
            tell=lambda tally: _record(directory, tally, watcher.say),
        )
        _ = experiment.algorithm, experiment.rounds
        return carry_out(experiment, directory, resume=True, watcher=watcher)  # claimed above


def build_base(recipe: Recipe, stores: Path) -> Experiment:
    """The recipe with the server's own store: tokenizer, and held-out text to watch."""
    store = open_store(recipe.data, stores, lambda stage, done: None)
    return Experiment(resolve(recipe, store), store)


@contextmanager
def _running(home: Home) -> Iterator[Post]:
    operator = Operator(home)
    try:
        operator.register()
        with operator.run() as grid:
            yield GridPost(grid, presence)
    finally:
        operator.close()


@contextmanager
def _alone(home: Home) -> Iterator[None]:
    """One run at a time: two would take each other's nodes."""
    with open(home.path / "server" / "train.lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise EngineError(f"another run of {home.path} is going on.") from None
        yield


@contextmanager
def _sentences() -> Iterator[None]:
    """What the network says, in words."""
    try:
        yield
    except httpx.TransportError as error:
        raise EngineError(
            f"the server is gone: {error}. Start fedlm federation serve again and go on with "
            "--resume."
        ) from None
    except httpx.HTTPStatusError as error:
        raise EngineError(
            f"the server answered {error.response.status_code} to {error.request.url.path}: this "
            "run is over there. Go on with --resume."
        ) from None


# ---- who takes part ------------------------------------------------------------------------


def _kept_seats(directory: RunDirectory) -> tuple[Seat, ...] | None:
    """The seats that were given out when the run began."""
    file = directory.path / SEATS
    if not file.is_file():
        return None
    try:
        return tuple(Seat(**seat) for seat in json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise RecordError(f"{file} is damaged: {error}.") from None


def seat_all(
    post: Post, names: Sequence[str], experiment: Experiment, say: Callable[[str], None]
) -> tuple[Seat, ...]:
    """Waits for every node, hears what it has, and numbers the members in the order of names."""
    hellos: dict[str, ConfigRecord] = {}
    sent: dict[str, tuple[str, float]] = {}
    told = -1
    while len(hellos) < len(names):
        there = {n: p for n, p in post.presence().items() if p.online and n in names}
        for name in there.keys() - hellos.keys():
            identity, at = sent.get(name, ("", 0.0))
            if time.monotonic() - at > HELLO_SECONDS or not at:
                sent[name] = _say_hello(post, there[name].node_id), time.monotonic()
                continue
            reply = post.fetch(identity) if identity else None
            if reply is not None:
                hellos[name] = _hello(name, reply, experiment)
        if len(hellos) > told:
            told = len(hellos)
            missing = ", ".join(sorted(set(names) - hellos.keys()))
            say(f"{told} of {len(names)} nodes are here" + (missing and f"; waiting for {missing}"))
        time.sleep(0.2)
    first, seats = 0, []
    for name in names:
        clients = int(str(hellos[name]["clients"]))
        seats.append(Seat(name, first, clients, str(hellos[name]["text"])))
        first += clients
    return tuple(seats)


def _say_hello(post: Post, node_id: int) -> str:
    message = Message(RecordDict(), node_id, HELLO, group_id="hello")
    return next(iter(post.grid.push_messages([message]))) or ""  # type: ignore[attr-defined]


def _hello(name: str, reply: Message, experiment: Experiment) -> ConfigRecord:
    facts = reply.content.get("hello") if reply.has_content() else None
    if not isinstance(facts, ConfigRecord) or type(facts.get("clients")) is not int:
        raise EngineError(f"node {name} did not say who it is.")
    clients = facts["clients"]
    if not isinstance(clients, int) or not 1 <= clients <= 1 << 40:
        raise EngineError(f"node {name} says that it has {clients!r} clients.")
    if facts.get("tokenizer") != experiment.store.manifest["tokenizer_sha256"]:
        raise ConfigError(
            f"node {name} has another tokenizer than the server's store "
            f"{experiment.store.path}: its tokens mean other words. Prepare its store with "
            "fedlm prepare --like, from the server's store."
        )
    return facts


def _record(directory: RunDirectory, tally: Tally, say: Callable[[str], None]) -> None:
    """A line a round on who answered; beside the journal, which tells of the model alone."""
    with open(directory.path / TALLIES, "a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(tally)) + "\n")
    for name, reason in {**tally.refused, **tally.garbage}.items():
        say(f"round {tally.round}: {name}: {reason}")
    missing = [*tally.away, *tally.late]
    if missing:
        say(f"round {tally.round}: without {', '.join(missing)}")
