"""The table of who sees what follows the settings of a run."""

import pytest

from fedlm.record.trust import HEAD, trust_rows

SECURE = {"wire": {"secure_nodes": 5, "secure_threshold": 4, "upload": "secure-20-clip1-members9"}}
NOISY = {**SECURE, "privacy": {"mechanism": "distributed", "honest_nodes": 3}}


def row(who, recipe, network=True):
    return next(r for r in trust_rows(recipe, network=network) if r.who.startswith(who))


@pytest.mark.parametrize(
    "recipe, update, node_sum, round_sum",
    [
        ({}, "only where a node sends one alone", "yes", "yes"),
        ({"wire": {"upload": "uniform-8"}}, "yes, one by one", "yes", "yes"),
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


def test_how_many_nodes_may_work_together_with_the_server():
    assert row("the server and 1 nodes together", NOISY).round_sum == "only with noise"
    assert row("the server and 0 nodes together", SECURE).round_sum == "yes"


def test_a_simulation_hides_nothing_from_who_runs_it():
    assert row("whoever runs", NOISY, network=False).update.startswith("yes")
