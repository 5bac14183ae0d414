"""The table of who sees what follows the settings of a run."""

import json

import pytest

from fedlm.core.errors import RecordError
from fedlm.record.directory import ASSIGNMENTS
from fedlm.record.trust import HEAD, trust_rows, whereabouts

SECURE = {"wire": {"secure_nodes": 5, "secure_threshold": 4, "upload": "secure-20-clip1-members9"}}
NOISY = {**SECURE, "privacy": {"mechanism": "distributed", "honest_nodes": 3}}


def row(who, recipe, network=True, **more):
    return next(r for r in trust_rows(recipe, network=network, **more) if r.who.startswith(who))


@pytest.mark.parametrize(
    "recipe, update, node_sum, round_sum",
    [
        ({}, "only where a node sends one alone", "yes", "yes"),
        ({"wire": {"upload": "uniform-8"}}, "yes, one by one", "yes", "yes"),
        ({"wire": {"trainable": "member"}}, "yes, one by one", "yes", "yes"),
        ({"server": {"aggregate": "median"}}, "yes, one by one", "yes", "yes"),
        ({"server": {"update_norm": 1.0}}, "yes, one by one", "yes", "yes"),
        ({"server": {"aggregate": "mean"}, "wire": {"trainable": "all"}}, "only", "yes", "yes"),
        ({"privacy": {"mechanism": "tree"}}, "only where", "yes", "yes, before noise"),
        (SECURE, "no", "no", "yes"),
        ({**SECURE, "privacy": {"mechanism": "gaussian"}}, "no", "no", "yes, before noise"),
        (NOISY, "no", "no", "only with noise"),
    ],
)
def test_what_the_server_sees(recipe, update, node_sum, round_sum):
    found = row("the server", recipe)
    assert len(found) == len(HEAD)
    assert found.update.startswith(update)
    assert (found.node_sum, found.round_sum) == (node_sum, round_sum)


HIDDEN = {"mechanism": "gaussian"}
WITH_NOISE = "of held-out clients; of training clients only with noise"


@pytest.mark.parametrize(
    "recipe, figures",
    [
        ({}, "yes"),
        ({"data": {"store": "held-out"}}, "no: the server has held-out text of its own"),
        ({"privacy": HIDDEN}, "of held-out clients"),
        ({"privacy": {**HIDDEN, "reveal": True, "evaluation_noise": 2.0}}, "yes"),
        ({"privacy": {**HIDDEN, "evaluation_noise": 2.0}}, WITH_NOISE),
        ({**SECURE, "privacy": {**HIDDEN, "evaluation_noise": 2.0}}, WITH_NOISE),
        (
            {"data": {"store": "x"}, "privacy": {**HIDDEN, "evaluation_noise": 2.0}},
            "of training clients only with noise",
        ),
        ({"federation": {"noise_multiplier": 2.0, "clip_norm": 1.0}}, "of held-out clients"),
    ],
)
def test_which_figures_leave_a_node(recipe, figures):
    """Without masks, also beside secure sums: a relay and the server see those of each node."""
    assert row("the server", recipe).figures == figures
    assert row("a relay", recipe, relays=True).figures == figures
    assert row("the client's own node", recipe).figures == "its own"
    assert row("readers of the network", recipe).figures == "no (TLS)"


def test_how_many_nodes_may_work_together_with_the_server():
    assert row("the server and 1 nodes together", NOISY).round_sum == "only with noise"
    assert row("the server and 0 nodes together", SECURE).round_sum == "yes"


@pytest.mark.parametrize(
    "recipe, node_sum, round_sum, stay",
    [
        ({}, "yes", "their sum", None),
        (SECURE, "no", "their sum", "at least 4 in 5 members of each list"),
        (
            {**SECURE, "privacy": {"mechanism": "gaussian"}},
            "no",
            "their sum, before noise",
            "at least 4 in 5 members of each list",
        ),
        (NOISY, "no", "their sum, only with noise", "at least 3 honest members of each list"),
    ],
)
def test_what_a_relay_sees(recipe, node_sum, round_sum, stay):
    found = row("a relay", recipe, relays=True)
    assert (found.node_sum, found.round_sum) == (node_sum, round_sum)
    assert not any(r.who.startswith("a relay") for r in trust_rows(recipe, network=True))
    if stay:
        together = row("the server and members of its list", recipe, relays=True)
        assert together.node_sum == f"no: {stay} stay in a sum"


def test_where_members_were_is_read_from_the_run(tmp_path):
    assert whereabouts(tmp_path) == (False, False)
    for leaves, relays in (([], False), ([["b", 2]], True)):
        (tmp_path / ASSIGNMENTS).write_text(json.dumps([{"name": "a", "leaves": leaves}]))
        assert whereabouts(tmp_path) == (True, relays)
    (tmp_path / ASSIGNMENTS).write_text("[7]")
    with pytest.raises(RecordError, match="is damaged"):
        whereabouts(tmp_path)


def test_a_simulation_hides_nothing_from_who_runs_it():
    assert row("whoever runs", NOISY, network=False).update.startswith("yes")


@pytest.mark.parametrize(
    "tree, change, models",
    [
        ({"temperature": 0.1}, "of its whole text", "as they are"),
        ({"clip_norm": 1.0}, "of its whole text, clipped", "made of clipped changes"),
        (
            {"clip_norm": 1.0, "noise_multiplier": 2.0},
            "of its whole text, clipped and with noise",
            "the models of all places, made of noisy changes",
        ),
        (
            {"temperature": 0},
            "of its whole text, without its personal layers",
            "the backbones of all places",
        ),
        (
            {"temperature": 0, "clip_norm": 1.0, "noise_multiplier": 2.0},
            "clipped and with noise, without its personal layers",
            "the backbones of all places, made of noisy changes",
        ),
    ],
)
def test_what_the_root_of_a_tree_sees(tree, change, models):
    found = row("the server", {"federation": tree})
    assert found.update == "no"
    assert found.node_sum.endswith(change) and found.round_sum.endswith(models)
    own = row("the client's own node", {"federation": tree}).round_sum
    kept = tree.get("temperature") == 0 or "noise_multiplier" in tree
    assert ("stays there" in own) == kept
    below = row("a relay", {"federation": tree}, relays=True)
    assert below.node_sum == found.node_sum
    noisy = "noise_multiplier" in tree
    assert ("only with noise" in row("readers of the run", {"federation": tree}).round_sum) == noisy
