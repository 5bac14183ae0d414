"""A run that cannot fit is refused with the estimate, before anything is allocated."""

import jax
import pytest

from fedlm.core.errors import ConfigError
from fedlm.corpus.store import Store
from fedlm.recipe import memory
from fedlm.recipe.memory import check_memory, free_bytes, needed_bytes, training_cost
from fedlm.recipe.parts import model_spec
from fedlm.recipe.settings import parse

GB = 10**9


def checked(**tables):
    recipe = parse({name: dict(table) for name, table in tables.items()})
    check_memory(recipe, model_spec(recipe, 1000))


@pytest.mark.parametrize("size", [10**6, 2**20])
@pytest.mark.parametrize("name", ["si-cifg", "transformer", "lstm"])
def test_an_embedding_that_no_machine_holds_is_refused_with_the_estimate(name, size):
    with pytest.raises(ConfigError) as refused:
        checked(model={"name": name, "embedding_size": size, "hidden_size": size, "heads": 1})
    assert "needs at least" in str(refused.value) and "are free here" in str(refused.value)
    assert "parameters" in str(refused.value)


def test_batches_that_no_machine_holds_are_refused_too():
    with pytest.raises(ConfigError, match=r"client\.batch_size is 1000000"):
        checked(client={"batch_size": 10**6, "epochs": 10**6})


def test_what_fits_passes(monkeypatch):
    checked(model={"embedding_size": 8, "hidden_size": 8})
    monkeypatch.setattr(memory, "free_bytes", lambda: None)  # a system that tells nothing
    checked(model={"embedding_size": 10**6, "hidden_size": 10**6})


def test_the_estimate_counts_the_copies_of_trained_parameters():
    recipe = parse({"data": {"sequence_length": 9}, "client": {"batch_size": 5, "epochs": 2}})
    assert needed_bytes(recipe, 1000, 0, lanes=2) == 1000 * 4 * 10 + 2 * 5 * 10 * 2
    assert needed_bytes(recipe, 0, 1000, lanes=2) == 1000 * 4 + 200
    half = parse({"model": {"base_dtype": "bfloat16"}})
    frozen = [needed_bytes(r, 0, 10**6, 1) for r in (parse({}), half)]
    assert frozen[0] - frozen[1] == 2 * 10**6


def test_a_frozen_base_costs_a_node_no_copies_of_a_trained_model(trained):
    """A node with 8 GB must not refuse adapters on a model of 135 million numbers."""
    store = Store(next((trained / ".fedlm" / "stores").iterdir()))
    size = {"name": "llama", "layers": 30, "heads": 9, "key_heads": 3, "vocab": 49152}
    size |= {"embedding_size": 576, "hidden_size": 1536}
    client = {"batch_size": 8, "max_steps": 3}
    common = {"model": size, "client": client, "data": {"sequence_length": 64}}
    whole = parse(common)
    alone = parse({**common, "wire": {"trainable": "lora", "rank": 8}})
    costs = []
    for recipe in (whole, alone):
        spec = model_spec(recipe, store.vocabulary)
        costs.append(training_cost(recipe, spec, store, [[0]]).memory)
    lanes = jax.local_device_count()
    assert costs[0] - costs[1] > lanes * 6 * 4 * 134_000_000
    assert costs[1] > (lanes + 1) * 4 * 134_000_000, "but a base is not free"


def test_a_container_has_less_than_its_machine(monkeypatch, tmp_path):
    whole = free_bytes()
    (tmp_path / "max").write_text(str(3 * GB))
    (tmp_path / "used").write_text(str(2 * GB))
    monkeypatch.setattr(memory, "LIMITS", ((tmp_path / "max", tmp_path / "used"),))
    assert free_bytes() == min(GB, whole)
    (tmp_path / "max").write_text("max\n")
    assert free_bytes() > GB
