"""Next-token loss in nats, with as few passes over the logits as it can make.

In:       features of every position, the output matrix, target tokens.
Out:      the sum of nats and the number of targets that count.
Promise:  equal to the plain log-softmax loss in value and gradient; a PAD target is inert.
Not here: perplexity (`evaluate/perplexity.py`).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from fedlm.core.types import PAD, Loss
from fedlm.models.layers import wide
from fedlm.models.packing import choices, dense_zero, enough, leading

LOSSES = 32  # compiled sizes of the products over the vocabulary, a tenth of a second per size
# The most logits that are held at once, 128 MiB in float32; more rows are taken in several blocks.
MOST_LOGITS = 1 << 25
# The logits of a block of `scores`, 4 MiB in float32, which stay in cache; at least of 64 rows.
SCORED_LOGITS = 1 << 20


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def cross_entropy(
    features: Float[Array, "rows embed"],
    readout: Float[Array, "vocab embed"],
    targets: Int[Array, " rows"],
    choice: tuple[int, ...] | None = None,
) -> Float[Array, ""]:
    """Return the sum of nats over the targets that are not PAD.

    The forward pass computes both gradients while the logits are in cache; the logits are not
    kept, and at most `MOST_LOGITS` of them are held at a time. Its products are compiled for
    each of the numbers of rows to choose from, the last of which are all rows.

        forward    features (F), readout (W) -> logits = F W^T -> p = softmax(logits) -> nats
                   keeps:  d_F = (p - onehot) W       (rows, embed)
                           d_W = (p - onehot)^T F     (vocab, embed), unless W is frozen
                   a row with a PAD target adds nothing to nats, d_F and d_W
        backward   g = d_nats  ->  features: g d_F,  readout: g d_W,  targets: none
    """
    return _both(features, readout, targets, choice, trained=False)[0]


def _in_blocks(compute, vocab, *x):  # type: ignore[no-untyped-def]
    """Apply `compute` to blocks of rows whose logits are few enough.

    It returns arrays over rows, and a sum over rows or None.
    """
    rows, block = x[0].shape[0], max(1, MOST_LOGITS // vocab)
    if rows <= block:
        return compute(*x)
    blocks = -(-rows // block)
    block = -(-rows // blocks)  # even blocks

    def cut(part):  # type: ignore[no-untyped-def]
        beyond = ((0, blocks * block - rows), *((0, 0) for _ in part.shape[1:]))
        return jnp.pad(part, beyond).reshape(blocks, block, *part.shape[1:])

    def step(total, part):  # type: ignore[no-untyped-def]
        made, more = compute(*part)
        return jax.tree.map(jnp.add, total, more), made

    cuts = tuple(map(cut, x))
    like = jax.eval_shape(compute, *(part[0] for part in cuts))[1]
    none = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), like)
    total, made = jax.lax.scan(step, none, cuts)
    return jax.tree.map(lambda y: y.reshape(-1, *y.shape[2:])[:rows], made), total


def _partition(features, readout, counts, size, trained):  # type: ignore[no-untyped-def]
    """Return gradients and log partition functions of the first `size` rows, and zero for others.

    The last column of the first result is the log partition function of each row, the others are
    its gradient for features; the second is the gradient for the readout. They are computed while
    the logits are still in cache. The exponentials stay unnormalised: dividing a row of `embed`
    numbers by its sum is far cheaper than dividing a row of `vocab` numbers.

    XLA takes about 30 ms to compile each kernel of each size, so there are four: one cuts out rows
    (`packing.leading`), one makes exponentials, one shares, one the first result.
    """
    exact = partial(jnp.matmul, preferred_element_type=wide(features.dtype))

    def of(size, features, counts):  # type: ignore[no-untyped-def]
        beyond = (0, features.shape[0] - size)
        logits = exact(leading(features, counts, size), readout.T)
        top = jnp.max(logits, axis=1)
        raised = jnp.exp(logits - top[:, None])
        total = jnp.sum(raised, axis=1)
        # Divided after padding: a quotient is no part of the kernel that cuts rows out.
        share = counts / jnp.pad(total, beyond, constant_values=1.0)
        raised = raised.astype(features.dtype)
        d_readout = exact(raised.T, leading(features, share, size)) if trained else None
        d_features = exact(raised, readout) * share[:size, None]
        made = jnp.concatenate([d_features, (jnp.log(total) + top)[:, None]], axis=1)
        return jnp.pad(made, (beyond, (0, 0))), d_readout

    vocab = readout.shape[0]
    if size <= MOST_LOGITS // vocab:
        return of(size, features, counts)
    made, d_readout = _in_blocks(
        lambda *x: of(x[0].shape[0], *x), vocab, features[:size], counts[:size]
    )
    return jnp.pad(made, ((0, features.shape[0] - size), (0, 0))), d_readout


def _forward(features, readout, targets, choice):  # type: ignore[no-untyped-def]
    return _both(features.value, readout.value, targets.value, choice, trained=readout.perturbed)


def _both(features, readout, targets, choice, trained):  # type: ignore[no-untyped-def]
    """Return the sum of nats, and the gradients that `_backward` scales.

    Short rows leave half of a batch empty, and logits are most of the work. So the real targets
    are sorted to the front, and only the first rows, enough to hold them, are multiplied. The
    term of the target's own logit is one row per target, not a matrix: it is added afterwards.
    """
    choice = choice or choices(targets.shape[0], LOSSES)
    if len(choice) > 1:
        order = jnp.argsort(targets == PAD, stable=True)
        features, targets = features[order], targets[order]
    short, exact = (features.dtype, readout.dtype), wide(features.dtype)
    counts = (targets != PAD).astype(exact)
    wanted = readout[targets]

    def first(size):  # type: ignore[no-untyped-def]
        return _partition(features, readout, counts, size, trained)

    made, d_readout = enough(jnp.sum(targets != PAD), choice, first)
    d_features, logs = made[:, :-1], made[:, -1]
    features = features.astype(exact)
    nats = jnp.sum(counts * (logs - jnp.sum(features * wanted, axis=1)))
    d_features = d_features - wanted * counts[:, None]
    if trained:
        d_readout = d_readout.at[targets].add(-features * counts[:, None])
    if len(choice) > 1:
        d_features = jnp.zeros_like(d_features).at[order].set(d_features, unique_indices=True)
    d_readout = d_readout.astype(short[1]) if trained else None
    return nats, (d_features.astype(short[0]), d_readout)


def _backward(_choice, gradients, cotangent):  # type: ignore[no-untyped-def]
    d_features, d_readout = gradients
    cotangent = dense_zero(cotangent)
    d_features, d_readout = (
        None if d is None else d * cotangent.astype(d.dtype) for d in (d_features, d_readout)
    )
    return d_features, d_readout, None


cross_entropy.defvjp(_forward, _backward, symbolic_zeros=True)


def scores(
    features: Float[Array, "rows embed"],
    readout: Float[Array, "vocab embed"],
    targets: Int[Array, " rows"],
) -> tuple[Float[Array, " rows"], Bool[Array, " rows"]]:
    """Return the nats of each target, and whether no other token was more likely.

    Where all tokens are equally likely, as a dead model has it, no target counts as found.

    Real targets are sorted to the front, and a loop takes them in blocks until none is left. Its
    length is data, so PAD costs nothing and one size is compiled; it has no gradient.
    """
    rows, vocab = targets.shape[0], readout.shape[0]
    block = min(rows, max(1, min(MOST_LOGITS, max(SCORED_LOGITS, 64 * vocab)) // vocab))
    beyond = -rows % block
    real = targets != PAD
    order = jnp.argsort(~real, stable=True)
    wanted = jnp.pad(targets[order], (0, beyond), constant_values=PAD)
    order = jnp.pad(order, (0, beyond))

    def step(i, made):  # type: ignore[no-untyped-def]
        of = jax.lax.dynamic_slice_in_dim(wanted, i * block, block)
        logits = features[jax.lax.dynamic_slice_in_dim(order, i * block, block)] @ readout.T
        top = jnp.max(logits, axis=1)
        at_target = jnp.take_along_axis(logits, of[:, None], axis=1)[:, 0]
        spread = jnp.sum(jnp.exp(logits - top[:, None]), axis=1)  # all equal: `vocab`
        nats = jnp.log(spread) + top - at_target
        right = (of != PAD) & (at_target >= top) & (spread < vocab)
        found = jnp.where(of != PAD, nats, 0.0), right
        return tuple(
            jax.lax.dynamic_update_slice_in_dim(whole, part, i * block, axis=0)
            for whole, part in zip(made, found, strict=True)
        )

    none = jnp.zeros(rows + beyond, features.dtype), jnp.zeros(rows + beyond, bool)
    nats, right = jax.lax.fori_loop(0, (jnp.sum(real) + block - 1) // block, step, none)
    back = jnp.argsort(order[:rows])  # where each row's result stands
    return nats[back], right[back]


def token_loss(
    features: Float[Array, "rows embed"],
    readout: Float[Array, "vocab embed"],
    targets: Int[Array, " rows"],
    choice: tuple[int, ...] | None = None,
) -> Loss:
    """Return the loss of predictions, which may be in any order."""
    return Loss(
        cross_entropy(features, readout, targets, choice), count_targets(targets, features.dtype)
    )


def count_targets(targets: Int[Array, "..."], dtype: Any) -> Float[Array, ""]:
    """Return how many targets count, in the type of sums over such features."""
    return jnp.sum(targets != PAD).astype(wide(dtype))
