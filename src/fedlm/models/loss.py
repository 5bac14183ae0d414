"""Next-token loss in nats, with as few passes over the logits as it can make.

In:       features of every position, the output matrix, target tokens.
Out:      the sum of nats and the number of targets that count.
Promise:  equal to the plain log-softmax loss in value and gradient; a PAD target is inert.
Not here: perplexity (`evaluate/perplexity.py`).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fedlm.core.types import PAD, Loss


def plain_cross_entropy(
    features: Float[Array, "rows embed"],
    readout: Float[Array, "vocab embed"],
    targets: Int[Array, " rows"],
) -> Float[Array, ""]:
    """The definition: the oracle of `cross_entropy`."""
    logs = jax.nn.log_softmax(features @ readout.T)
    nats = -jnp.take_along_axis(logs, targets[:, None], axis=1)[:, 0]
    return jnp.sum(jnp.where(targets != PAD, nats, 0.0))


@jax.custom_vjp
def cross_entropy(
    features: Float[Array, "rows embed"],
    readout: Float[Array, "vocab embed"],
    targets: Int[Array, " rows"],
) -> Float[Array, ""]:
    """Sum of nats over the targets that are not PAD."""
    return _forward(features, readout, targets)[0]


def _exponentials(features, readout, targets):  # type: ignore[no-untyped-def]
    logits = features @ readout.T
    top = jnp.max(logits, axis=1)
    at_target = jnp.take_along_axis(logits, targets[:, None], axis=1)[:, 0]
    raised = jnp.exp(logits - top[:, None])
    total = jnp.sum(raised, axis=1)
    counts = (targets != PAD).astype(features.dtype)
    nats = jnp.sum(counts * (jnp.log(total) + top - at_target))
    return nats, raised, total, counts


def _forward(features, readout, targets):  # type: ignore[no-untyped-def]
    """Loss and both gradients while the logits are still in cache.

    The exponentials stay unnormalised: dividing a row of `embed` numbers by its sum is
    far cheaper than dividing a row of `vocab` numbers.
    """
    nats, raised, total, counts = _exponentials(features, readout, targets)
    rows = jnp.arange(targets.shape[0])
    raised = raised.at[rows, targets].add(-total, unique_indices=True, mode="promise_in_bounds")
    share = (counts / total)[:, None]
    d_features = (raised @ readout) * share
    d_readout = raised.T @ (features * share)
    return nats, (d_features, d_readout)


def _backward(gradients, cotangent):  # type: ignore[no-untyped-def]
    d_features, d_readout = gradients
    return d_features * cotangent, d_readout * cotangent, None


cross_entropy.defvjp(_forward, _backward)


def scores(
    features: Float[Array, "rows embed"],
    readout: Float[Array, "vocab embed"],
    targets: Int[Array, " rows"],
) -> tuple[Float[Array, " rows"], Int[Array, " rows"]]:
    """Nats of each target, and the most likely token at its position."""
    logits = features @ readout.T
    top = jnp.max(logits, axis=1)
    at_target = jnp.take_along_axis(logits, targets[:, None], axis=1)[:, 0]
    total = jnp.sum(jnp.exp(logits - top[:, None]), axis=1)
    nats = jnp.log(total) + top - at_target
    return jnp.where(targets != PAD, nats, 0.0), jnp.argmax(logits, axis=1)


def token_loss(features: Float[Array, "batch seq embed"], readout, targets) -> Loss:  # type: ignore[no-untyped-def]
    """The loss of a batch of rows."""
    flat = features.reshape(-1, features.shape[-1])
    count = jnp.sum(targets != PAD).astype(features.dtype)
    return Loss(cross_entropy(flat, readout, targets.reshape(-1)), count)
