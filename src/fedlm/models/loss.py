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

SIZES = 32  # compiled sizes of the products over the vocabulary, a tenth of a second per size


def plain_cross_entropy(
    features: Float[Array, "rows embed"],
    readout: Float[Array, "vocab embed"],
    targets: Int[Array, " rows"],
) -> Float[Array, ""]:
    """Compute `cross_entropy` by its definition; tests compare against it."""
    logs = jax.nn.log_softmax(features @ readout.T)
    nats = -jnp.take_along_axis(logs, targets[:, None], axis=1)[:, 0]
    return jnp.sum(jnp.where(targets != PAD, nats, 0.0))


@jax.custom_vjp
def cross_entropy(
    features: Float[Array, "rows embed"],
    readout: Float[Array, "vocab embed"],
    targets: Int[Array, " rows"],
) -> Float[Array, ""]:
    """Return the sum of nats over the targets that are not PAD.

    The forward pass computes both gradients while the logits are in cache; the logits are not
    kept.

        forward    features (F), readout (W) -> logits = F W^T -> p = softmax(logits) -> nats
                   keeps:  d_F = (p - onehot) W       (rows, embed)
                           d_W = (p - onehot)^T F     (vocab, embed)
                   a row with a PAD target adds nothing to nats, d_F and d_W
        backward   g = d_nats  ->  features: g d_F,  readout: g d_W,  targets: none
    """
    return _forward(features, readout, targets)[0]


def _partition(features, readout, counts):  # type: ignore[no-untyped-def]
    """Return the log partition function of each row and its gradients for features and readout.

    The gradients are computed while the logits are still in cache. The exponentials stay
    unnormalised: dividing a row of `embed` numbers by its sum is far cheaper than dividing a row
    of `vocab` numbers.
    """
    logits = features @ readout.T
    top = jnp.max(logits, axis=1)
    raised = jnp.exp(logits - top[:, None])
    total = jnp.sum(raised, axis=1)
    share = (counts / total)[:, None]
    return jnp.log(total) + top, (raised @ readout) * share, raised.T @ (features * share)


def _forward(features, readout, targets):  # type: ignore[no-untyped-def]
    """Return the sum of nats, and the gradients that `_backward` scales.

    Short rows leave half of a batch empty, and logits are most of the work. So the real targets
    are sorted to the front, and only the first rows, enough to hold them, are multiplied. The
    term of the target's own logit is one row per target, not a matrix: it is added afterwards.
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
    """Return the nats of each target, and whether no other token was more likely."""
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
    """Return the loss of predictions, which may be in any order."""
    count = jnp.sum(targets != PAD).astype(features.dtype)
    return Loss(cross_entropy(features, readout, targets), count)
