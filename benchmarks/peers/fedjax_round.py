"""FedJAX's federated averaging on the same workload.

In:       a workload folder.
Out:      turns (`turns.py`).
Promise:  FedJAX is used as it is published: its algorithm, optimizers, dataset class and client
          loop. Names that newer JAX versions dropped are given back before it is imported.
Not here: fedlm.

Its training batches are always full, filled up with repeated examples; to see the same data as
everybody, its own `batch` view is used instead, whose last batch is as small as it is.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from turns import Turns, load, versions

for _home, _name, _value in (
    (jax, "tree_map", jax.tree_util.tree_map),
    (jax, "tree_leaves", jax.tree_util.tree_leaves),
    (jnp, "NINF", -jnp.inf),
):
    if not hasattr(_home, _name):
        setattr(_home, _name, _value)

import fedjax  # noqa: E402
from fedjax.algorithms import fed_avg  # noqa: E402

Params = dict[str, jax.Array]


# ---- the models, in plain JAX -----------------------------------------------------------------


def lstm(z: jax.Array, c: jax.Array) -> tuple[jax.Array, jax.Array]:
    i, f, o, g = jnp.split(z, 4, axis=-1)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(c), c


def cifg(z: jax.Array, c: jax.Array) -> tuple[jax.Array, jax.Array]:
    f, o, g = jnp.split(z, 3, axis=-1)
    keep = jax.nn.sigmoid(f)
    c = keep * c + (1.0 - keep) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(c), c


def si_cifg(z: jax.Array, c: jax.Array) -> tuple[jax.Array, jax.Array]:
    def bound(x: jax.Array) -> jax.Array:
        return x / jnp.maximum(jnp.max(jnp.abs(x), axis=-1, keepdims=True), 1e-6)

    f, o, g = jnp.split(z, 3, axis=-1)
    keep = bound(jax.nn.relu(f))
    c = keep * c + (1.0 - keep) * bound(g)
    return bound(jax.nn.relu(o)) * bound(c), c


CELLS = {"lstm": lstm, "cifg": cifg, "si-cifg": si_cifg}


def recurrent(params: Params, tokens: jax.Array, said: dict[str, Any]) -> jax.Array:
    """Features of every position: time-major unclipped, inputs multiplied before the loop."""
    cell = CELLS[said["architecture"]]
    w_h, project = params["layers.0.w_h"], params["layers.0.project"]
    x = params["embedding"][tokens.T]
    z_x = x @ params["layers.0.w_x"].T + params["layers.0.bias"]

    def advance(carry, z):  # type: ignore[no-untyped-def]
        h, c = carry
        m, c = cell(z + h @ w_h.T, c)
        h = m @ project.T
        return (h, c), h

    start = jnp.zeros((x.shape[1], x.shape[2])), jnp.zeros((x.shape[1], project.shape[1]))
    return jax.lax.scan(advance, start, z_x)[1].swapaxes(0, 1)


def waves(length: int, embed: int) -> np.ndarray:
    """Sines and cosines of falling frequency."""
    half = embed // 2
    rates = np.exp(-np.log(10_000.0) * np.arange(half) / max(1, half - 1))
    angles = np.arange(length)[:, None] * rates[None, :]
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)


def decoder(params: Params, tokens: jax.Array, said: dict[str, Any]) -> jax.Array:
    """A pre-norm Transformer."""
    embed, heads = said["embedding_size"], said["heads"]
    batch, length = tokens.shape

    def linear(x: jax.Array, at: str) -> jax.Array:
        return x @ params[f"{at}.weight"].T + params[f"{at}.bias"]

    def norm(x: jax.Array, at: str) -> jax.Array:
        x = jax.nn.standardize(x, axis=-1, epsilon=1e-5)
        return x * params[f"{at}.gain"] + params[f"{at}.shift"]

    def split(x: jax.Array) -> jax.Array:
        return x.reshape(batch, length, heads, embed // heads)

    x = params["stem.embedding"][tokens] * embed**0.5 + waves(length, embed)
    for layer in range(said["layers"]):
        at = f"blocks.{layer}"
        y = norm(x, f"{at}.norm_attention")
        q, k, v = (split(linear(y, f"{at}.attention.{part}")) for part in ("query", "key", "value"))
        seen = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + linear(seen.reshape(batch, length, embed), f"{at}.attention.out")
        y = norm(x, f"{at}.norm_feedforward")
        y = jax.nn.gelu(linear(y, f"{at}.feedforward.up"))
        x = x + linear(y, f"{at}.feedforward.down")
    return norm(x, "last")


def make_nats(said: dict[str, Any]):  # type: ignore[no-untyped-def]
    """Nats of every target of a batch, and whether it counts: PAD does not."""
    attentive = said["architecture"] == "transformer"
    features = decoder if attentive else recurrent
    readout = "stem.embedding" if attentive else "embedding"

    def nats_of(params: Params, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        targets = tokens[:, 1:]
        logits = features(params, tokens[:, :-1], said) @ params[readout].T
        logs = jax.nn.log_softmax(logits)
        nats = -jnp.take_along_axis(logs, targets[..., None], axis=-1)[..., 0]
        return nats, targets != 0

    return nats_of


def make_loss(said: dict[str, Any]):  # type: ignore[no-untyped-def]
    """Mean nats over the targets of a batch that are not PAD."""
    nats_of = make_nats(said)

    def loss(params: Params, batch: dict[str, jax.Array], rng: jax.Array) -> jax.Array:
        nats, counts = nats_of(params, batch["tokens"])
        return jnp.sum(nats * counts) / jnp.maximum(jnp.sum(counts), 1)

    return loss


# ---- the federation, in FedJAX ----------------------------------------------------------------


class Unpadded(fedjax.ClientDataset):
    """One epoch in the given order; the last batch is as small as it is."""

    def shuffle_repeat_batch(self, hparams=None, **kwargs):  # type: ignore[no-untyped-def]
        return self.batch(batch_size=hparams.batch_size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    asked = parser.parse_args()
    work = load(asked.folder)
    said = work.settings
    algorithm = fed_avg.federated_averaging(
        jax.grad(make_loss(said)),
        client_optimizer=fedjax.optimizers.sgd(said["rate"]),
        server_optimizer=fedjax.optimizers.sgd(1.0),
        client_batch_hparams=fedjax.ShuffleRepeatBatchHParams(batch_size=said["batch"]),
    )
    key = jax.random.PRNGKey(0)
    clients = [
        (name, Unpadded({"tokens": rows}), key)
        for name, rows in zip(said["names"], work.rows, strict=True)
    ]
    state = algorithm.init({name: jnp.asarray(value) for name, value in work.params.items()})
    facts = {"versions": versions("fedjax", "jax"), "devices": jax.device_count()}
    turns = Turns(work.params, facts)
    while turns.begins():
        state, diagnostics = algorithm.apply(state, clients)
        jax.block_until_ready((state.params, diagnostics))
        params = state.params
        turns.ends(lambda p=params: {name: np.asarray(leaf) for name, leaf in p.items()})


if __name__ == "__main__":
    main()
