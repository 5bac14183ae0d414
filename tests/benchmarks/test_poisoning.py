"""Who is hostile in the measurement of robust rules, and what these members send."""

import math

import jax
import numpy as np

from benchmarks.poisoning import ATTACKS, Poisoned, told
from fedlm.core.types import Cohort, Start
from fedlm.engine.robust import flattened
from tests.engine.test_secure import LIKE, MEMBERS, Given, sent, update


def arrived(attack, share, round=3, seed=0):
    given = {int(m): update(sent(m)) for m in MEMBERS}
    engine = Poisoned(Given(given), ATTACKS[attack], share, seed)
    honest = {m: flattened(u.delta) for m, u in given.items()}
    found = engine.updates(Start(LIKE), Cohort(round, MEMBERS))
    return honest, {a.member: flattened(a.update.delta) for a in found}


def test_exactly_the_share_is_hostile_and_drawn_from_round_and_seed():
    def liars(**more):
        honest, found = arrived("other sign", 0.25, **more)
        return {m for m in honest if not np.array_equal(honest[m], found[m])}

    assert [len(liars(round=r)) for r in range(6)] == [2] * 6
    assert len({frozenset(liars(round=r)) for r in range(6)}) > 1
    assert liars() == liars() and any(liars(round=r) != liars(round=r, seed=1) for r in range(4))
    honest, found = arrived("other sign", 0.0)
    assert all(np.array_equal(honest[m], found[m]) for m in honest)


def test_attacks_are_what_their_names_say():
    for attack, factor in (("-100 times", 100.0), ("other sign", 1.0)):
        honest, found = arrived(attack, 1.0)
        for member in honest:
            np.testing.assert_allclose(found[member], -factor * honest[member], rtol=1e-6)
    honest, found = arrived("noise, 10 times as long", 1.0)
    for member, vector in honest.items():
        np.testing.assert_allclose(
            np.linalg.norm(found[member]), 10 * np.linalg.norm(vector), rtol=1e-5
        )
        cosine = vector @ found[member] / np.linalg.norm(vector) / np.linalg.norm(found[member])
        assert abs(cosine) < 0.9
    assert len(jax.tree.leaves(LIKE)) == 2


def test_a_lost_run_is_said():
    assert told([math.inf, math.inf]) == "lost" and told([math.inf, 30.0]) == "lost 1 of 2"
    assert told([30.0, 32.0]) == "31 ± 1" and told([30.4]) == "30"
