"""Law 10, by force: kills at every durable write, lanes that change, members that stay away.

An observer copies all that others can read at every such moment. What it saw is what was released;
the ledger holds exactly that, and costs at least what an account by brute force says.
"""

import functools
import itertools
from collections import Counter

import numpy as np
import pytest
from scipy.stats import norm

from fedlm.privacy.account import spent
from fedlm.privacy.catalog import MECHANISMS
from fedlm.privacy.ledger import Ledger, spent_of
from tests.privacy.crashes import Disk, Killed, Observer, go_on, released, runs_of
from tests.privacy.plans import AT_NODES, PLANS
from tests.privacy.test_ledger import epsilon_of_gaussian, placements, rows_of

ROUNDS = 6
KILLS = 200
ALL = PLANS | AT_NODES
EACH = -(-KILLS // len(ALL))
# Four nodes, each of which adds a share of the noise to its sum: a grid on which shares fit.
AT_FOUR_NODES = ("wire.secure_nodes=4", "wire.upload=secure-18-clip0.1-members32")
# At most so many moments between two kills; a round has about fifteen.
SOON = 30


def settings_of(name):
    """The recipe of a small plan, with a cohort and a separation that eighteen clients can keep."""
    plan = ALL[name]
    own = [
        f"privacy.{field}={getattr(plan, field)}" for field in MECHANISMS[plan.mechanism].settings
    ]
    return (
        f"privacy.mechanism={plan.mechanism}",
        f"server.sampling={plan.sampling.law}",
        f"privacy.min_separation={plan.sampling.min_separation}",
        f"server.rounds={ROUNDS}",
        "privacy.noise_multiplier=2.0",
        "privacy.clip_norm=0.1",
        "server.cohort=3",
        *(AT_FOUR_NODES if name in AT_NODES else ()),
        *own,
    )


# ---- an account by brute force -------------------------------------------------------------------


@functools.cache
def epsilon_of_sampled(noise, rate, releases, delta, step=1e-3):
    """A lower bound of the epsilon of releases in which one client is there by a coin.

    The privacy loss of one release on a grid, rounded down; its sum over releases by convolution.
    """
    grid = np.arange(-12, 12, 1e-4)  # what is cut off would only add
    with_it = rate * norm.pdf(grid, 1 / noise) + (1 - rate) * norm.pdf(grid)
    loss = np.log(with_it) - norm.logpdf(grid)
    found = 0.0
    for sign, density in ((1, with_it), (-1, norm.pdf(grid))):
        at = np.floor(sign * loss / step).astype(int)
        least = at.min()
        one = np.bincount(at - least, weights=density * 1e-4)
        size = 1 << (len(one) * releases).bit_length()
        total = np.fft.irfft(np.fft.rfft(one, size) ** releases, size)
        losses = (np.arange(size) + least * releases) * step
        order = np.arange(0, losses.max(), step)
        excess = [np.sum(total * np.maximum(0, 1 - np.exp(e - losses))) for e in order[::100]]
        above = order[::100][np.asarray(excess) > delta + 1e-9]
        found = max(found, above.max(initial=0.0))
    return float(found)


def least_epsilon(plan, rounds):
    """What the observed releases of a plan cost at least."""
    if not rounds:
        return 0.0
    noise = plan.noise_multiplier
    if MECHANISMS[plan.mechanism].at_nodes:  # no chance of staying out helps: the server draws
        spaced = plan.sampling.law == "spaced"
        ways = placements(plan.sampling, plan.rounds) if spaced else [np.ones(plan.rounds)]
        return epsilon_of_gaussian(max(np.sqrt(w[rounds].sum()) for w in ways) / noise, plan.delta)
    if plan.sampling.law in MECHANISMS[plan.mechanism].replay_laws:
        rate = plan.sampling.cohort / plan.sampling.population
        return epsilon_of_sampled(noise, rate, len(rounds), plan.delta)
    if plan.sampling.law != "spaced":  # the chance of staying out helps; its own tests have it
        return spent(plan, 1 + max(rounds)).epsilon
    moved = max(
        sum(float(np.sum((rows_of(plan, r) @ joins) ** 2)) for r in rounds)
        for joins in placements(plan.sampling, plan.rounds)
    )
    return epsilon_of_gaussian(np.sqrt(moved) / noise, plan.delta)


@pytest.mark.slow
def test_the_account_by_brute_force_rejects_a_wrong_one():
    """It is near what is known, from below, and above what less noise or fewer rounds cost."""
    from dp_accounting import get_epsilon_gaussian

    from fedlm.privacy.cost import compose, sampled_event

    def poisson(*of):
        return compose([sampled_event(*of)], 1e-5)[0]

    exact = get_epsilon_gaussian(2.0, 1e-5)
    assert epsilon_of_gaussian(0.5, 1e-5) == pytest.approx(exact, abs=1e-4)
    known = poisson(1.0, 0.2, 4)
    assert 0.9 * known < epsilon_of_sampled(1.0, 0.2, 4, 1e-5) <= known
    assert epsilon_of_sampled(1.0, 0.2, 4, 1e-5) > poisson(1.0, 0.2, 3)


# ---- chaos ---------------------------------------------------------------------------------------


def chaos(runs, folder, rng, kills):
    """Kills runs of a plan until so many kills have hit; returns how many runs that took."""
    hit, number = 0, 0
    while hit < kills:
        out, number = folder / f"run-{number}", number + 1
        observer = Observer(out)
        disk, done = Disk(observer, rng), None
        while done is None:
            run = runs[rng.integers(len(runs))]
            moments = int(rng.integers(1, SOON)) if hit < kills else 0
            away = np.random.default_rng(rng.integers(1 << 32)) if rng.random() < 0.5 else None
            try:
                with disk.watched(moments):
                    done = go_on(run, out, rng=away)
            except Killed:
                hit += 1
            check(run.plan, out, observer)
        assert observer.rounds == released(out) == list(range(ROUNDS))
        assert len(observer.models) == 1
        assert done["epsilon"] == spent_of(Ledger(out / "ledger.jsonl").entries()).epsilon
    return number


def check(plan, out, observer):
    """The ledger, if it has begun, costs at least what was seen."""
    observer.look()
    if not (out / "ledger.jsonl").exists():
        assert not observer.seen
        return
    entries = Ledger(out / "ledger.jsonl").entries()
    assert spent_of(entries).epsilon >= least_epsilon(plan, observer.rounds) - 1e-6


def test_every_mechanism_is_here():
    assert {plan.mechanism for plan in ALL.values()} == set(MECHANISMS)
    assert EACH * len(ALL) >= KILLS


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_an_observer_sees_what_the_ledger_holds_and_no_more(name, tmp_path):
    rng = np.random.default_rng(list(ALL).index(name))
    runs = runs_of(tmp_path, *settings_of(name))
    chaos(runs, tmp_path, rng, EACH)


@pytest.mark.slow
def test_twelve_kills(tmp_path):
    """The same, in short."""
    chaos(runs_of(tmp_path, *settings_of("tree")), tmp_path, np.random.default_rng(1), 12)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gaussian", "blt"])
def test_lost_states_cost_at_least_what_was_seen(name, tmp_path):
    """After each kill the newest states are lost, too."""
    rng = np.random.default_rng(7)
    runs = runs_of(tmp_path, *settings_of(name))
    out = tmp_path / "run"
    observer, done = Observer(out), None
    disk = Disk(observer, rng)
    for attempt in itertools.count():
        run = runs[rng.integers(len(runs))]
        try:
            with disk.watched(int(rng.integers(SOON, 3 * SOON)) if attempt < 4 else 0):
                done = go_on(run, out)
        except Killed:
            states = sorted((out / "checkpoints").glob("round-*"), reverse=True)
            for path in states[: min(len(states) - 1, int(rng.integers(1, 3)))]:
                path.unlink()
        check(run.plan, out, observer)
        if done is not None:
            break
    paid = released(out)
    if MECHANISMS[run.plan.mechanism].independent:
        # A kill between ledger and journal, and the loss of that state: paid for, seen by nobody.
        assert not Counter(observer.rounds) - Counter(paid)
        assert len(observer.rounds) > ROUNDS
    else:
        assert len(set(paid)) == len(paid) and set(observer.rounds) <= set(paid)
        assert done["rounds"] < len(paid)
