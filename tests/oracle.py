"""Definitions, closed forms and a NumPy FedAvg, independent of `src`."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np

PAD = -1


def cifg_step(x, h, c, w_x, w_h, bias, project):
    """One step of CIFG by its published equations, for one row."""
    f, o, g = np.split(w_x @ x + w_h @ h + bias, 3)
    keep = 1 / (1 + np.exp(-f))
    c = keep * c + (1 - keep) * np.tanh(g)
    return project @ ((1 / (1 + np.exp(-o))) * np.tanh(c)), c


def si_cifg_step(x, h, c, w_x, w_h, bias, project):
    """One step of SI-CIFG by its published equations, for one row."""

    def max_n(v):
        top = np.max(np.abs(v))
        return v / top if top > 0 else v

    f, o, g = np.split(w_x @ x + w_h @ h + bias, 3)
    keep = max_n(np.maximum(f, 0))
    c = keep * c + (1 - keep) * max_n(g)
    return project @ (max_n(np.maximum(o, 0)) * max_n(c)), c


def lstm_step(x, h, c, w_x, w_h, bias, project):
    """One step of LSTM by its published equations, for one row."""
    i, f, o, g = np.split(w_x @ x + w_h @ h + bias, 4)

    def sigmoid(v):
        return 1 / (1 + np.exp(-v))

    c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
    return project @ (sigmoid(o) * np.tanh(c)), c


STEPS = {"cifg": cifg_step, "lstm": lstm_step, "si-cifg": si_cifg_step}


def quadratic_descent(start, targets, rate):
    """Plain SGD on 0.5 * (w - t)^2, one target a step: the end point in closed form."""
    w = start
    for t in targets:
        w = w - rate * (w - t)
    return w


def plain_cross_entropy(features, readout, targets):
    """The sum of nats over the targets that are not PAD, by its definition."""
    logs = jax.nn.log_softmax(features @ readout.T)
    nats = -jnp.take_along_axis(logs, targets[:, None], axis=1)[:, 0]
    return jnp.sum(jnp.where(targets != PAD, nats, 0.0))


def sensitivity_of_matrix(matrix, min_separation, max_participations):
    """The squared sensitivity of a matrix by trying every placement of participations.

    No two columns may have a negative product; then equal contributions are the worst.
    """
    gram = matrix.T @ matrix
    if (gram < -1e-9).any():
        raise ValueError("columns with negative products need more than equal contributions")
    rounds = matrix.shape[1]
    most = -(-rounds // (min_separation + 1))
    most = min(most, max_participations) if max_participations else most
    return max(
        float(gram[np.ix_(chosen, chosen)].sum())
        for count in range(1, most + 1)
        for chosen in itertools.combinations(range(rounds), count)
        if all(b - a > min_separation for a, b in itertools.pairwise(chosen))
    )
