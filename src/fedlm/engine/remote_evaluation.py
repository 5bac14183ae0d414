"""Models scored at the nodes that hold the text, and their figures made here.

In:       models, a transport, the nodes of a run.
Out:      sums per node and model; noisy sums per node; the figures of a flat federation.
Promise:  no text is needed here; the figures are those of one text that consists of all nodes'
          held-out text in the order of the assignments; sums count only up to what the recipe and
          the node's own announcement make possible; a node that does not answer, or answers
          nonsense, is left out and named, and never ends the run.
Not here: scoring (`deploy/node_worker.py`), the figures of a tree
          (`federation/tree_evaluation.py`), what noisy sums mean (`privacy/evaluation.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from fedlm.core.errors import ConfigError, WireError
from fedlm.core.keys import key_for
from fedlm.core.types import Codec, FederationState, Figures, Params
from fedlm.engine.counters import Counters
from fedlm.engine.dispatch import Dispatch, Quorum, RoundStats, Transport
from fedlm.engine.evaluate_messages import (
    EVALUATION,
    NOISY,
    SPLITS,
    EvaluateReply,
    EvaluateRequest,
    check_announced,
    sums_of,
)
from fedlm.engine.remote import Leaf
from fedlm.evaluate.held_out import NO_MODEL, Ask, Held, Phase
from fedlm.evaluate.perplexity import Sums, bits_per_byte, figures

Survey = dict[str, dict[int, Held]]
"""How much held-out text each place announced, by split."""
ELSEWHERE = (
    "the held-out text of this run is at its nodes: the figures of its end are in its report, and "
    "fedlm evaluate scores the models that nodes were given there."
)
NOTHING = Sums(*(0.0 for _ in Sums._fields))


@dataclass(frozen=True, kw_only=True)
class HeldOutAtNodes:
    """The held-out text at nodes: the server asks for scores, and never sees the text."""

    transport: Transport | None  # None: nobody can be asked, as of a run that is over
    places: Mapping[int, Leaf]  # the nodes with text, in the order of their members
    in_tree: bool  # each is a place of a tree, by its number there, and scored by itself
    run: str
    recipe: str
    population: int
    exact: Codec
    quorum: Quorum
    counters: Counters
    # Keep the survey, so that a resumed run has the same.
    load: Callable[[], Survey | None] = lambda: None
    save: Callable[[Survey], None] = lambda survey: None
    splits: Sequence[str] = SPLITS  # whose figures may be told
    say: Callable[[str], None] = lambda text: None
    reasons: dict[str, str] = field(default_factory=dict)  # why nodes told nothing, by name

    @cached_property
    def survey(self) -> Survey:
        """How much held-out text each place has, by split; asked once per run."""
        known = self.load()
        if known is not None:
            return known
        asks = [Ask(place) for place in self.places]
        found: Survey = {}
        for split in self.splits:
            replies = self._ask(0, "survey", split, (), asks)
            found[split] = {
                ask.place: Held(*(int(part[name]) for name in Held._fields))
                for ask, part in zip(asks, replies, strict=True)
                if part is not None and part["rows"]
            }
        self.save(found)
        return found

    def scores(
        self, round: int, phase: Phase, split: str, models: Sequence[Params], asks: Sequence[Ask]
    ) -> list[Sums]:
        """Return the sums of models on the text of places; zeros for a place that said nothing."""
        held = self.survey[split]
        wanted = [ask for ask in asks if ask.place in held]
        all_rows = phase == "final" and not self.in_tree

        def announced(ask: Ask, part: Mapping[str, float]) -> None:
            check_announced(part, held[ask.place], all_rows=all_rows)

        found = self._ask(round, phase, split, models, wanted, announced) if wanted else []
        known = dict(zip(wanted, found, strict=True))
        parts = (known.get(ask) for ask in asks)
        return [NOTHING if part is None else sums_of(part) for part in parts]

    def keep(
        self, round: int, role: str, models: Sequence[Params], asks: Sequence[Ask]
    ) -> list[int]:
        """Send models to places, which keep them, and return the places that did."""
        found = self._ask(round, "keep", role, models, asks) if asks else []
        return [ask.place for ask, part in zip(asks, found, strict=True) if part is not None]

    def noisy_sums(
        self, round: int, model: Params, check: Callable[[np.ndarray, int], None]
    ) -> dict[str, np.ndarray]:
        """Return the noisy sums over the training clients of each node that gave one, by its path.

        All nodes are asked, so that who answers tells of no draw. `check` raises `WireError` for a
        sum that so many clients cannot have: its node is left out and named.
        """
        asks = [Ask(place, 0) for place in self.places]

        def take(ask: Ask, part: Mapping[str, float]) -> None:
            check(np.array([part[name] for name in NOISY]), self.places[ask.place].clients)

        found = self._ask(round, "noisy", "validation", (model,), asks, take)
        return {
            "/".join(self.places[ask.place].path): np.array([part[name] for name in NOISY])
            for ask, part in zip(asks, found, strict=True)
            if part is not None
        }

    # ---- one question ------------------------------------------------------------------

    def _ask(
        self,
        round: int,
        phase: Phase,
        split: str,
        models: Sequence[Params],
        asks: Sequence[Ask],
        check: Callable[[Ask, Mapping[str, float]], None] = lambda ask, part: None,
    ) -> list[Mapping[str, float] | None]:
        """Return what was answered to each ask, in their order, if `check` does not object."""
        if self.transport is None:
            raise ConfigError(ELSEWHERE)
        requests = dict(self._requests(round, phase, split, asks))
        used = {name: sorted({ask.model for _, ask in own}) for name, (_, own) in requests.items()}

        def frames(names: Sequence[str]) -> Iterator[tuple[str, tuple[bytes, ...]]]:
            for name in names:
                own = (models[m] for m in used[name] if m != NO_MODEL)
                yield name, tuple(self.exact.encode(m, key_for(0, "download")) for m in own)

        stats = RoundStats(round)
        dispatch = Dispatch(
            self.transport,
            self.quorum,
            {name: request for name, (request, _) in requests.items()},
            stats,
            frames=frames,
            exchange=EVALUATION,
        )
        found: list[Mapping[str, float] | None] = [None] * len(asks)
        for name, reply in dispatch.replies():
            stats.answered.append(name)
            self.counters.hear(name, reply.counter)
            self._take(name, reply, requests[name][1], check, found, stats)
        self._tell(phase, stats)
        return found

    def _requests(
        self, round: int, phase: Phase, split: str, asks: Sequence[Ask]
    ) -> Iterator[tuple[str, tuple[EvaluateRequest, list[tuple[int, Ask]]]]]:
        """Yield the request to each node at the meeting point, with the asks that are in it."""
        held = self.survey[split] if phase in ("watch", "final") else {}
        offsets, total = {}, 0
        for place in self.places:
            offsets[place] = total
            total += held[place].rows if place in held else 0
        by_name: dict[str, list[tuple[int, Ask]]] = {}
        for at, ask in enumerate(asks):
            name = self.places[ask.place].assignment.name
            by_name.setdefault(name, []).append((at, ask))
        for name, unordered in by_name.items():
            own = sorted(unordered, key=lambda p: (self.places[p[1].place].first, p[1].model))
            assignment = self.places[own[0][1].place].assignment
            used = sorted({ask.model for _, ask in own})
            request = EvaluateRequest(
                run=self.run,
                recipe=self.recipe,
                round=round,
                phase=phase,
                first=assignment.first,
                population=self.population,
                text=assignment.text,
                total=0 if self.in_tree else total,
                members=tuple(self.places[ask.place].first for _, ask in own),
                numbers=tuple(self.population + ask.place if self.in_tree else 0 for _, ask in own),
                splits=(split,) * len(own),
                models=tuple(
                    NO_MODEL if ask.model == NO_MODEL else used.index(ask.model) for _, ask in own
                ),
                rows=tuple(ask.rows for _, ask in own),
                offsets=tuple(0 if self.in_tree else offsets[ask.place] for _, ask in own),
                counter=self.counters.of(name),
            )
            yield name, (request, own)

    def _take(
        self,
        name: str,
        reply: EvaluateReply,
        own: list[tuple[int, Ask]],
        check: Callable[[Ask, Mapping[str, float]], None],
        found: list[Mapping[str, float] | None],
        stats: RoundStats,
    ) -> None:
        """Keep the sums of a reply that pass a check."""
        for at, part in zip(reply.asks, reply.sums, strict=True):
            place, ask = own[at]
            try:
                check(ask, part)
                found[place] = part
            except WireError as error:
                stats.garbage[name] = str(error)

    def _tell(self, phase: Phase, stats: RoundStats) -> None:
        """Say which nodes are missing in a figure: all are asked, so this tells of no draw."""
        reasons = {**stats.refused, **stats.garbage}
        self.reasons.update(reasons)
        for name, reason in reasons.items():
            self.say(f"{_what(phase)}: {name}: {reason}")
        missing = [name for name in (*stats.away, *stats.late) if name not in reasons]
        if missing:
            self.say(f"{_what(phase)}: without {', '.join(missing)}")


def _what(phase: Phase) -> str:
    return "models for nodes" if phase == "keep" else f"evaluation ({phase})"


def added(parts: Sequence[Sums]) -> Sums:
    """Return the sums over several texts, as columns of one row."""
    return Sums(*([float(sum(column))] for column in zip(*(parts or [NOTHING]), strict=True)))


@dataclass(frozen=True, kw_only=True)
class NodeEvaluation:
    """Evaluation of the model of a flat federation on the held-out text of its nodes."""

    held_out: HeldOutAtNodes
    params: Callable[[FederationState], Params]  # the trained part of a state's model
    watch_split: tuple[str, ...]

    def splits(self) -> list[str]:
        """Return the splits that hold text, the headline split first."""
        return [split for split in self.held_out.splits if self.held_out.survey.get(split)]

    def watch(self, state: FederationState) -> Figures:
        """Return perplexity and accuracy on the sample that a simulation would draw."""
        split = next((split for split in self.watch_split if split in self.splits()), None)
        if split is None:
            return {"perplexity": None, "accuracy": None}
        found = figures(added(list(self._scores(state, "watch", split).values())))
        if not found["tokens"]:
            return {"perplexity": None, "accuracy": None}
        return {"perplexity": found["perplexity"], "accuracy": found["accuracy"]}

    def final(self, state: FederationState, split: str) -> Figures:
        """Return all figures of a state on one split: overall, and per node as a group."""
        scores, held = self._scores(state, "final", split), self.held_out.survey[split]
        answered = {place: sums for place, sums in scores.items() if sums.tokens}
        whole = _with_bytes(list(answered.values()), [held[place] for place in answered])
        by_node = {
            "/".join(self.held_out.places[place].path): _with_bytes([sums], [held[place]])
            for place, sums in answered.items()
        }
        return {**whole, "clients": {}, "groups": [by_node]}

    def _scores(self, state: FederationState, phase: Phase, split: str) -> dict[int, Sums]:
        asks = [Ask(place, 0) for place in self.held_out.survey[split]]
        models = (self.params(state),)
        found = self.held_out.scores(int(state.round), phase, split, models, asks)
        return {ask.place: sums for ask, sums in zip(asks, found, strict=True)}

    def of_models(self, models: Mapping[str, Params], split: str) -> Figures:
        """Raise `ConfigError`: saved models are scored where the text is."""
        raise ConfigError(ELSEWHERE)

    def rows(self, split: str | None = None) -> None:
        """Return nothing: the text is at nodes."""

    def baselines(self, splits: list[str]) -> Figures:
        """Return nothing: there is no training text to count here."""
        return {}


def _with_bytes(parts: Sequence[Sums], held: Sequence[Held]) -> dict[str, float]:
    """Return the figures of sums, with bits per byte if every text tells its bytes."""
    sums, size = added(parts), sum(text.bytes for text in held)
    found = figures(sums)
    if all(text.bytes for text in held):
        found |= bits_per_byte(sums, sum(text.tokens for text in held), size)
    return found
