"""Who is absent and who is hostile in the measurement, and that its attacks are attacks."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.hostile_nodes import ATTACKS, attackers, away
from fedlm.core.errors import WireError
from fedlm.core.keys import key_for
from fedlm.engine.bounds import Bounds
from fedlm.engine.messages import SUMS, TrainReply, TrainRequest, encode_reply, read_reply
from fedlm.wire.dense import dense

NAMES = [f"n{number:02d}" for number in range(56)]
LIKE = {"w": np.zeros(3, np.float32)}
FRAME = dense().encode({"w": np.ones(3, np.float32)}, key_for(0, "upload"))
REQUEST = TrainRequest(
    run="0" * 32,
    recipe="",
    round=7,
    first=3,
    population=9,
    text="",
    members=(3,),
    clip_norm=np.inf,
    each=False,
    longest=len(FRAME),
    frames=(b"",),
)
SUMS_SENT = {**dict.fromkeys(SUMS, 1.0), "refused": 0.0}
REPLY = TrainReply(round=7, members=(3,), frames=(FRAME,), sums=(SUMS_SENT,))


def attacked(name):
    algorithm = SimpleNamespace(upload=dense())
    work = SimpleNamespace(algorithm=algorithm, sent_like=LIKE)
    worker = SimpleNamespace(first=replace(REPLY, round=0), _work=lambda request: work)
    reply = ATTACKS[name](worker, REQUEST, REPLY)
    return read_reply(encode_reply(reply), REQUEST)


def test_shares_are_exact_and_drawn_from_the_seed():
    assert away(NAMES, 0, seed=0) == set(), "programs are compiled"
    rounds = [away(NAMES, round, seed=0) for round in range(1, 6)]
    assert {len(one) for one in rounds} == {17} and len(set(map(frozenset, rounds))) == 5
    assert rounds[0] == away(NAMES, 1, seed=0) != away(NAMES, 1, seed=1)
    bad = attackers(NAMES, seed=0)
    assert len(bad) == 11 and set(bad.values()) == set(ATTACKS)
    assert list(bad.values()).count("huge update") == 3


@pytest.mark.parametrize("name", ["wrong round", "oversized", "replay"])
def test_a_reply_to_another_question_is_refused(name):
    with pytest.raises(WireError):
        attacked(name)


def test_a_frame_of_noise_is_refused():
    with pytest.raises(WireError):
        dense().decode(attacked("garbage frame").frames[0], LIKE)


def test_a_frame_without_finite_numbers_is_well_formed():
    sent = dense().decode(attacked("not finite").frames[0], LIKE)["w"]
    assert not np.isfinite(sent).any()  # `RemoteEngine` looks at the numbers


def test_a_huge_update_is_well_formed():
    assert np.array_equal(
        dense().decode(attacked("huge update").frames[0], LIKE)["w"], [-100.0] * 3
    )


def test_an_absurd_weight_is_refused_and_an_absurd_loss_is_cut():
    bounds = Bounds(weight=1.0, tokens=10.0, steps=10.0, nats_per_token=5.0)
    with pytest.raises(WireError, match="weight"):
        bounds.checked(attacked("weight or loss 1e300").sums[0], 1)
    loss = ATTACKS["weight or loss 1e300"](None, replace(REQUEST, round=8), REPLY)
    assert bounds.checked(loss.sums[0], 1)["nats"] == 5.0
