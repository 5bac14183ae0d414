"""A node carries out what its policy allows, and says what it does not."""

import pytest

from fedlm.core.errors import ConfigError
from fedlm.deploy.policy import POLICY, Policy, Refusal, check_cost, check_policy, load_policy
from fedlm.recipe.privacy_plan import plan_of, sampling_of
from fedlm.recipe.settings import parse

PLAIN = parse({"server": {"cohort": 10}})
PRIVATE = parse(
    {
        "server": {"cohort": 10, "rounds": 20, "sampling": "poisson"},
        "privacy": {"mechanism": "gaussian", "noise_multiplier": 4.0, "delta": 1e-4},
    }
)


def verdict(policy, recipe, parameters=1000):
    plan = plan_of(recipe, sampling_of(recipe, 1000))
    check_policy(policy, recipe, plan, parameters, clients=100)


@pytest.mark.parametrize(
    "policy",
    [
        Policy(),
        Policy(smallest_cohort=10),
        Policy(allowed_models=("si-cifg",)),
        Policy(largest_parameters=1000),
    ],
)
def test_what_is_allowed_is_done(policy):
    verdict(policy, PLAIN)


@pytest.mark.parametrize(
    "policy, why",
    [
        (Policy(smallest_cohort=11), "cohort"),
        (Policy(allowed_models=("lstm",)), "model.name"),
        (Policy(largest_parameters=999), "parameters"),
        (Policy(require_privacy=True), "noise"),
        (Policy(largest_epsilon=100.0), "noise"),
    ],
)
def test_what_is_not_allowed_is_refused_with_its_reason(policy, why):
    with pytest.raises(Refusal, match=why):
        verdict(policy, PLAIN)


def test_epsilon_is_worked_out_here():
    verdict(Policy(largest_epsilon=8.0, require_privacy=True), PRIVATE)
    with pytest.raises(Refusal, match="epsilon"):
        verdict(Policy(largest_epsilon=0.01), PRIVATE)


@pytest.mark.parametrize("change", [{"seed": 0}, {"reveal": True}])
def test_a_plan_that_is_undone_is_no_plan(change):
    privacy = {**PRIVATE.privacy.model_dump(exclude_none=True), **change}
    recipe = PRIVATE.model_copy(update={"privacy": type(PRIVATE.privacy)(**privacy)})
    with pytest.raises(Refusal, match="undo"):
        verdict(Policy(require_privacy=True), recipe)


def test_steps_are_counted():
    check_cost(Policy(largest_steps=5), 5, 0, 0)
    with pytest.raises(Refusal, match="6 steps"):
        check_cost(Policy(largest_steps=5), 6, 0, 0)


def test_files_are_read_strictly(tmp_path):
    file = tmp_path / "policy.toml"
    assert load_policy(file) == Policy()
    file.write_text(POLICY)
    assert load_policy(file) == Policy()
    file.write_text('allowed_models = ["si-cifg"]\nlargest_epsilon = 8\n')
    assert load_policy(file) == Policy(allowed_models=("si-cifg",), largest_epsilon=8.0)
    file.write_text("smalest_cohort = 3\n")
    with pytest.raises(ConfigError, match="Did you mean 'smallest_cohort'"):
        load_policy(file)
    file.write_text('smallest_cohort = "many"\n')
    with pytest.raises(ConfigError, match="smallest_cohort = 'many'"):
        load_policy(file)


def test_a_policy_that_is_not_there_allows_nothing(tmp_path):
    """A node that was joined with a misspelt --policy had none, not even that of its kit."""
    kit = tmp_path / "policy.toml"
    kit.write_text("require_privacy = true\n")
    with pytest.raises(ConfigError, match=r"--policy = .*strickt\.toml.*expected a file"):
        load_policy(kit, tmp_path / "strickt.toml")
    kit.unlink()
    kit.symlink_to(tmp_path / "gone.toml")
    with pytest.raises(ConfigError, match=r"KIT/policy\.toml"):
        load_policy(kit)
