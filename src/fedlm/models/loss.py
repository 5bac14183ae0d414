"""Next-token loss in nats, with as few passes over the logits as it can make.

In:       features of every position, the output matrix, target tokens.
Out:      the sum of nats and the number of targets that count.
Promise:  equal to the plain log-softmax loss in value and gradient; a PAD target is inert.
Not here: perplexity (`evaluate/perplexity.py`).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from fedlm.core.types import PAD, Loss
from fedlm.models.packing import FEWEST_COLUMNS, enough

SIZES = 32  # of the products over the vocabulary: each takes a tenth of a second to compile


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


def _partition(features, readout, counts):  # type: ignore[no-untyped-def]
    """Its logarithm in each row, and both gradients while the logits are still in cache.

    The exponentials stay unnormalised: dividing a row of `embed` numbers by its sum is
    far cheaper than dividing a row of `vocab` numbers.
    """
    logits = features @ readout.T
    top = jnp.max(logits, axis=1)
    raised = jnp.exp(logits - top[:, None])
    total = jnp.sum(raised, axis=1)
    share = (counts / total)[:, None]
    return jnp.log(total) + top, (raised @ readout) * share, raised.T @ (features * share)


def _forward(features, readout, targets):  # type: ignore[no-untyped-def]
    """Real targets first, and products over as many rows as are enough for them.

    Short rows leave half of a batch empty; logits are most of the work, so the empty part is
    not computed. What a target takes from its own word is a row, not a matrix: added after.
    """
    rows = targets.shape[0]
    if rows >= FEWEST_COLUMNS:
        order = jnp.argsort(targets == PAD, stable=True)
        features, targets = features[order], targets[order]
    counts = (targets != PAD).astype(features.dtype)
    wanted = readout[targets]

    def first(size):  # type: ignore[no-untyped-def]
        logs, d_first, d_readout = _partition(features[:size], readout, counts[:size])
        beyond = (0, rows - size)
        return jnp.pad(logs, beyond), jnp.pad(d_first, (beyond, (0, 0))), d_readout

    logs, d_features, d_readout = enough(jnp.sum(targets != PAD), rows, first, SIZES)
    nats = jnp.sum(counts * (logs - jnp.sum(features * wanted, axis=1)))
    d_features = d_features - wanted * counts[:, None]
    d_readout = d_readout.at[targets].add(-features * counts[:, None])
    if rows >= FEWEST_COLUMNS:
        d_features = jnp.zeros_like(d_features).at[order].set(d_features, unique_indices=True)
    return nats, (d_features, d_readout)


def _backward(gradients, cotangent):  # type: ignore[no-untyped-def]
    d_features, d_readout = gradients
    return d_features * cotangent, d_readout * cotangent, None


cross_entropy.defvjp(_forward, _backward)


def scores(
    features: Float[Array, "rows embed"],
    readout: Float[Array, "vocab embed"],
    targets: Int[Array, " rows"],
) -> tuple[Float[Array, " rows"], Bool[Array, " rows"]]:
    """Nats of each target, and whether no other token was more likely."""
    logits = features @ readout.T
    top = jnp.max(logits, axis=1)
    at_target = jnp.take_along_axis(logits, targets[:, None], axis=1)[:, 0]
    total = jnp.sum(jnp.exp(logits - top[:, None]), axis=1)
    nats = jnp.log(total) + top - at_target
    real = targets != PAD
    return jnp.where(real, nats, 0.0), real & (at_target >= top)


def token_loss(
    features: Float[Array, "rows embed"],
    readout: Float[Array, "vocab embed"],
    targets: Int[Array, " rows"],
) -> Loss:
    """The loss of predictions in any order."""
    count = jnp.sum(targets != PAD).astype(features.dtype)
    return Loss(cross_entropy(features, readout, targets), count)
