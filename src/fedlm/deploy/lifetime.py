"""What a node's clients have spent over all runs, by the node's own ledger.

In:       a node's ledger; a run that is about to begin or to go on.
Out:      an epsilon for the client who spent most; per run, what it cost.
Promise:  a run counts with all rounds that it planned, because it may go on without asking this
          node again; or, where noise is independent from round to round and that is less, with the
          rounds in which the client really took part. Noisy figures count for all clients, as
          often as they were told, and of a run that goes on as often as its recipe plans. A run
          without noise has no finite epsilon.
Not here: the ledger (`node_ledger.py`), the limit (`policy.py`), accounting (`privacy`).

The two ways to count a run with independent noise. Planned: the draw is secret, so chance counts.
By turns: even who knows the draw learns no more than from so many releases with their noise.
Both hold, so the smaller one does.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from fedlm.deploy.node_ledger import WHOLE, NodeLedger, RunEntry
from fedlm.privacy import account, cost
from fedlm.privacy.catalog import MECHANISMS
from fedlm.privacy.evaluation import together
from fedlm.privacy.plan import PrivacyPlan
from fedlm.recipe.private_evaluation import PlannedFigures

SHOWN = 10  # refusals
MOST_KINDS = 16  # different histories of clients that are accounted one by one
NEVER_ASKED = ""  # a client that took part in no round; noisy figures are of it too


class RunTurns(NamedTuple):
    """A run as one client has taken part in it."""

    plan: PrivacyPlan | None  # None: without privacy
    turns: int | None = None  # rounds that it took part in; None: as many as are planned


class GoingOn(NamedTuple):
    """A run that is about to begin or to go on."""

    run: str
    plan: PrivacyPlan
    figures: PlannedFigures | None = None


class Release(NamedTuple):
    """Another release with Gaussian noise to the same clients, as their vocabulary."""

    noise_multiplier: float
    delta: float


class Lifetime(NamedTuple):
    """An epsilon over several runs."""

    epsilon: float
    delta: float | None  # None: nothing was answered
    exact: bool = True  # or not below that of any client


def summary(ledger: NodeLedger, others: Sequence[Release] = ()) -> dict[str, Any]:
    """Return what a ledger shows: runs with their clients' participations, and the lifetime."""
    spent = lifetime(ledger, others=others)
    return {
        "counter": ledger.counter,
        "epsilon": spent.epsilon,
        "delta": spent.delta,
        "epsilon_is_exact": spent.exact,
        "clients": len({client for run in ledger.runs.values() for client in run.turns}),
        "runs": [_run(name, run) for name, run in ledger.runs.items()],
        "refusals": len(ledger.refusals),
        "last_refusals": ledger.refusals[-SHOWN:],
        "lost": [{"since": since, "until": until} for since, until in ledger.lost],
    }


def _run(name: str, run: RunEntry) -> dict[str, Any]:
    plan, counts = run.plan, run.participations()
    most = max(counts, default=0)
    return {
        "run": name,
        "mechanism": None if plan is None else plan.mechanism,
        "rounds_planned": None if plan is None else plan.rounds,
        "rounds_answered": len(run.questions),
        "clients": len(run.turns),
        "most_participations": most,
        "participations": {str(turns): clients for turns, clients in counts.items()},
        "population_believed": None if plan is None else plan.sampling.population,
        "noisy_figures": len(run.figures),
        "delta": None if plan is None else plan.delta,
        "epsilon": math.inf if plan is None else _epsilon(run, RunTurns(plan, most), plan.delta),
    }


def _epsilon(run: RunEntry, share: RunTurns, delta: float) -> float:
    """Return what a run cost the client who took part most."""
    if not run.figures:
        return _cheapest(share, delta)[0]
    return epsilon_of((share,) if share.turns else (), delta, _figures([run]))


def _figures(runs: Iterable[RunEntry], now: GoingOn | None = None) -> tuple[Release, ...]:
    """Return the noisy figures of runs, as the one Gaussian release that they amount to."""
    noises = [told.noise_multiplier for run in runs for told in run.figures.values()]
    if now is not None and now.figures is not None:
        noises.append(now.figures.together)
    return (Release(together(noises), 0.0),) if noises else ()


def lifetime(
    ledger: NodeLedger,
    clients: Iterable[str] | None = None,
    now: GoingOn | None = None,
    others: Sequence[Release] = (),
) -> Lifetime:
    """Return the largest epsilon that one client has spent, among those given or among all.

    `now` is a run that goes on: it counts with all its rounds and noisy figures.
    """
    runs = [run for name, run in ledger.runs.items() if now is None or name != now.run]
    known = {client for run in runs for client in run.turns}
    figures = _figures(runs, now)
    if figures or now is not None:
        known.add(NEVER_ASKED)
    kinds = {tuple(_turns(run, c) for run in runs) for c in (known if clients is None else clients)}
    exact = len(kinds) <= MOST_KINDS
    if not exact:  # who took part as often as anybody, in each run, spent as much as anybody
        kinds = {tuple(map(max, zip(*kinds, strict=True)))}
    more = () if now is None else (RunTurns(now.plan),)
    histories = [
        (
            *(RunTurns(run.plan, turns) for run, turns in zip(runs, kind, strict=True) if turns),
            *more,
        )
        for kind in kinds
    ]
    deltas = [s.plan.delta for shares in histories for s in shares if s.plan is not None]
    deltas += [run.plan.delta for run in runs if run.figures and run.plan is not None]
    if not deltas:
        return Lifetime(math.inf if any(histories) else 0.0, None)
    delta = min(deltas)
    asked = histories or [()]  # where no client is asked, noisy figures are still paid for
    most = max(epsilon_of(shares, delta, (*others, *figures)) for shares in asked)
    return Lifetime(most, delta, exact)


def _turns(run: RunEntry, client: str) -> int:
    """Return how often a client took part in a run; of `WHOLE`, the most of any client."""
    own, whole = len(run.turns.get(client, ())), len(run.turns.get(WHOLE, ()))
    if client == WHOLE:
        return whole + max((len(t) for c, t in run.turns.items() if c != WHOLE), default=0)
    return own + whole


@functools.lru_cache(maxsize=4096)
def epsilon_of(
    shares: tuple[RunTurns, ...], delta: float, others: tuple[Release, ...] = ()
) -> float:
    """Return the epsilon of runs and other releases together, at a delta."""
    if any(share.plan is None for share in shares):
        return math.inf
    events = [_cheapest(share, delta)[1] for share in shares]
    events += [cost.gaussian_event(release.noise_multiplier) for release in others]
    return cost.compose(events, delta, sum(release.delta for release in others))[0]


@functools.lru_cache(maxsize=4096)
def _cheapest(share: RunTurns, delta: float) -> tuple[float, Any]:
    """Return the epsilon and the event of one run for one client, counted in the cheaper way."""
    plan = share.plan
    assert plan is not None
    events = [account.event_of(plan, plan.rounds)]
    by_turns = MECHANISMS[plan.mechanism].turn_event
    if share.turns is not None and by_turns is not None:
        events.append(by_turns(plan, share.turns))
    return min(((cost.compose([e], delta)[0], e) for e in events), key=lambda pair: pair[0])
