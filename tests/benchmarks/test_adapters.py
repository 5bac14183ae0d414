"""The share of the probe counts the operations that a step of adapters needs."""

import json

import jax
import pytest

from benchmarks.adapters import token_flops, write_random
from fedlm.models import catalog

SIZES = {"vocab": 50, "embedding_size": 24, "hidden_size": 40, "layers": 3, "heads": 3}
SIZES |= {"key_heads": 1, "head_size": 8, "length": 64, "tied": True}


@pytest.mark.parametrize("forward, backward", [(3, 3), (3, 1), (1, 1)])
def test_a_frozen_weight_costs_two_operations_forward_and_two_backward(tmp_path, forward, backward):
    write_random(tmp_path, SIZES)
    config = json.loads((tmp_path / "config.json").read_text())
    model = catalog.shapes("llama", catalog.Dimensions(**SIZES))
    block = sum(x.size for x in jax.tree.leaves(model.blocks[0]) if x.ndim == 2)
    width, features = 16, 3 * 8
    # Scores and what is seen by them: two products over the row forward, four backward.
    attention = forward * 2 * 2 * width * features + backward * 4 * 2 * width * features
    want = 2 * block * (forward + backward) + attention + 4 * model.stem.embedding.size
    assert token_flops(config, width, forward, backward) == want
