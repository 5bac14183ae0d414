"""Published protocols: the named model, and cells that go on and are kept."""

import json

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from benchmarks import protocols
from benchmarks.cells import Cells
from benchmarks.protocols import METHODS, SMOKE, WHOLE, CharacterLstm, Work, tell


def test_the_model_has_the_size_of_the_protocol():
    """90 characters: embedding, two layers, readout."""
    model = jax.eval_shape(lambda: CharacterLstm(90, WHOLE, jr.key(0)))
    assert sum(x.size for x in jax.tree.leaves(model)) == 720 + 271_360 + 525_312 + 23_130


def test_a_layer_computes_what_equinox_computes_step_by_step():
    model = CharacterLstm(20, SMOKE, jr.key(1))
    tokens = np.random.default_rng(0).integers(0, 20, (3, 5))
    rows = []
    for row in tokens:
        x = [model.embedding[token] for token in row]
        for cell in model.cells:
            state, out = (jnp.zeros(SMOKE.units), jnp.zeros(SMOKE.units)), []
            for each in x:
                state = cell(each, state)
                out.append(state[0])
            x = out
        rows.append(jnp.stack([model.readout(h) for h in x]))
    np.testing.assert_allclose(eqx.filter_jit(model)(tokens), jnp.stack(rows), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:JAX already runs")
def test_methods_are_played_kept_and_told(tmp_path, monkeypatch):
    rows = [{"client": f"c{n}", "text": "to be or not to be\n" * 9} for n in range(4)]
    text = tmp_path / "plays.jsonl"
    text.write_text("".join(json.dumps(row) + "\n" for row in rows))
    work = Work(Cells(tmp_path / "kept"), tmp_path / "runs", text, SMOKE)
    for method in METHODS:
        work.make(method, 0)
    told = tell(work)
    assert all(method in told for method in METHODS) and "2" in told
    facts = work.kept("FedAdam", 0)
    assert len(facts["curve"]) == 2 and 0 <= facts["accuracy"] <= 1
    monkeypatch.setitem(protocols.METHODS, "FedAdam", {**METHODS["FedAdam"], "server__beta2": 0.5})
    assert work.digest("FedAdam", 0) != facts["digest"]
