"""Which settings of secure sums and robust rules go together.

In:       a recipe.
Out:      nothing, or one refusal: the first rule that its settings do not keep.
Promise:  a recipe that passes can be summed as it says, flat or over a network.
Not here: the sums themselves (`secure_sums.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

from fedlm.core.errors import require
from fedlm.methods.catalog import METHODS, method_names
from fedlm.models.partial import TRAINABLE
from fedlm.privacy.catalog import MECHANISMS
from fedlm.recipe.settings import Recipe
from fedlm.secure.terms import least_neighbors
from fedlm.wire.catalog import named
from fedlm.wire.fixed_point import check_additive, grid_of


class SumRule(NamedTuple):
    """A rule that settings keep, with the words of its refusal."""

    kept: bool
    setting: str
    value: object
    wanted: str
    way_out: str = ""


def check_sums(recipe: Recipe, *, network: bool = False) -> None:
    """Refuse settings of secure sums and robust rules that exclude each other."""
    for rule in itertools.chain(
        _robust_rules(recipe), _flat_rules(recipe), _noise_rules(recipe), _sum_rules(recipe)
    ):
        require(*rule)
    if network and recipe.wire.secure_nodes:
        require(
            recipe.privacy.mechanism is not None or recipe.run.checkpoint_every == 1,
            "run.checkpoint_every",
            recipe.run.checkpoint_every,
            "1 with secure sums over a network: a node answers for its last round only, so that a "
            "server that is killed must not fall back by more",
        )


def _robust_settings(recipe: Recipe) -> dict[str, object]:
    """Return the settings by which a server looks at single updates, where they are set."""
    rule, norm = recipe.server.aggregate, recipe.server.update_norm
    found: dict[str, object] = {} if rule == "mean" else {"server.aggregate": rule}
    return found if norm is None else {**found, "server.update_norm": norm}


def _robust_rules(recipe: Recipe) -> Iterator[SumRule]:
    private, secure = recipe.privacy.mechanism is not None, bool(recipe.wire.secure_nodes)
    for name, value in _robust_settings(recipe).items():
        plain = "'mean'" if name == "server.aggregate" else "nothing"
        yield SumRule(
            not private,
            name,
            value,
            f"{plain} under a privacy plan, whose claim is about sums of updates",
            "privacy.clip_norm bounds updates there.",
        )
        yield SumRule(
            not secure,
            name,
            value,
            f"{plain} with wire.secure_nodes: secure sums hide the updates it looks at",
        )
        yield _one_change_rule(recipe, name)
    yield SumRule(
        recipe.server.aggregate == "trimmed-mean" or recipe.server.trim == 0.1,
        "server.trim",
        recipe.server.trim,
        "0.1, its default, unless server.aggregate = 'trimmed-mean'",
    )


def _one_change_rule(recipe: Recipe, beside: str) -> SumRule:
    """Return the rule of whatever takes all that a member sends for one change of the model."""
    return SumRule(
        METHODS[recipe.client.method].one_change,
        "client.method",
        recipe.client.method,
        f"{method_names(lambda m: m.one_change)} with {beside}: other methods send statistics "
        "and counts beside a change",
    )


def _flat_rules(recipe: Recipe) -> Iterator[SumRule]:
    """Yield what all but a plain sum want: a flat run in rounds, in which all train one part."""
    secure = ["wire.secure_nodes"] if recipe.wire.secure_nodes else []
    for name in [*_robust_settings(recipe), *secure]:
        flat, part = recipe.federation is None, recipe.wire.trainable
        yield SumRule(flat, name, True, "nothing beside [federation]: flat runs only")
        waits = recipe.server.mode == "synchronous"
        yield SumRule(waits, name, True, "nothing with server.mode = 'buffered'")
        yield SumRule(
            not TRAINABLE[part].by_member,
            "wire.trainable",
            part,
            f"a part that all members of a round train alike, with {name}",
        )
        yield SumRule(
            not TRAINABLE[part].exact_mean,
            "wire.trainable",
            part,
            f"a part whose updates are added as they are sent, with {name}",
        )


def _noise_rules(recipe: Recipe) -> Iterator[SumRule]:
    """Yield what noise wants that nodes add."""
    mechanism, nodes = recipe.privacy.mechanism, recipe.wire.secure_nodes
    if mechanism is None or not MECHANISMS[mechanism].at_nodes:
        return
    yield SumRule(
        bool(nodes),
        "privacy.mechanism",
        mechanism,
        "wire.secure_nodes beside it: each node of a secure sum adds a share of the noise",
        "Or privacy.mechanism = 'gaussian', where the server adds it.",
    )


def check_honest_nodes(n: int, threshold: int, honest: int) -> None:
    """Refuse a number of honest nodes that a list of `n` nodes cannot promise."""
    for rule in _honest_rules(n, threshold, honest):
        require(*rule)


def _honest_rules(n: int, threshold: int, honest: int) -> Iterator[SumRule]:
    yield SumRule(
        1 <= honest <= threshold,
        "privacy.honest_nodes",
        honest,
        f"1 to {threshold}, because so many of {n} nodes stay in a sum (wire.secure_threshold)",
    )
    yield SumRule(
        threshold + honest > n,
        "privacy.honest_nodes",
        honest,
        f"at least {n - threshold + 1}: {threshold - honest} nodes in league with the server could "
        f"make {n} nodes sign two lists of survivors",
        "Raise it, or raise wire.secure_threshold.",
    )


def _neighbor_rule(n: int, threshold: int, recipe: Recipe) -> SumRule:
    """Return the rule of a graph that neither absences nor a server that lies cut into parts."""
    k, honest = recipe.wire.secure_neighbors, recipe.privacy.honest_nodes
    colluders = threshold - honest if honest else 0
    least = least_neighbors(n, threshold, colluders)
    return SumRule(
        k == 0 or (least <= k < n and k % 2 == 0),
        "wire.secure_neighbors",
        k,
        f"0 (all others), or an even number from {least + least % 2} to {n - 1}: with "
        f"{n - threshold} nodes absent and {colluders} in league with the server, fewer could be "
        "cut apart, and the sum of a part learned",
        "Raise it, or raise wire.secure_threshold.",
    )


def _sum_rules(recipe: Recipe) -> Iterator[SumRule]:
    """Yield what a secure sum wants."""
    wire, n = recipe.wire, recipe.wire.secure_nodes
    if not n:
        unused = {
            "secure_threshold": wire.secure_threshold,
            "secure_rotation": wire.secure_rotation,
            "secure_neighbors": wire.secure_neighbors,
        }
        for name, value in unused.items():
            only = f"{type(value)()} without wire.secure_nodes"
            yield SumRule(not value, f"wire.{name}", value, only)
        return
    codec = named("wire.upload", wire.upload)
    check_additive("wire.upload", codec)
    yield SumRule(
        n >= 3, "wire.secure_nodes", n, "0 or at least 3: of two, each knows the other's part"
    )
    threshold = secure_threshold_of(recipe)
    yield SumRule(
        n // 2 < threshold <= n,
        "wire.secure_threshold",
        threshold,
        f"{n // 2 + 1} to {n}, more than half of wire.secure_nodes",
    )
    if recipe.privacy.mechanism and MECHANISMS[recipe.privacy.mechanism].at_nodes:
        yield from _honest_rules(n, threshold, recipe.privacy.honest_nodes)
    yield _neighbor_rule(n, threshold, recipe)
    yield SumRule(
        recipe.privacy.mechanism is not None or recipe.client.weight == "uniform",
        "client.weight",
        recipe.client.weight,
        "'uniform' with wire.secure_nodes: weights would need a range of their own",
    )
    yield _one_change_rule(recipe, "wire.secure_nodes")
    yield SumRule(
        not METHODS[recipe.client.method].keeps_client_state,
        "client.method",
        recipe.client.method,
        "a method whose clients remember nothing, with wire.secure_nodes",
    )
    yield SumRule(
        not wire.error_feedback,
        "wire.error_feedback",
        True,
        "off with wire.secure_nodes: rounding leaves nothing behind on average",
    )
    yield SumRule(
        recipe.privacy.clip_quantile == 0,
        "privacy.clip_quantile",
        recipe.privacy.clip_quantile,
        "0 with wire.secure_nodes: the range of the sum is fixed before the first round",
    )
    most = grid_of(codec).members
    yield SumRule(
        recipe.server.cohort <= most,
        "server.cohort",
        recipe.server.cohort,
        f"at most {most}, the members of wire.upload = {wire.upload!r}",
    )


def secure_threshold_of(recipe: Recipe, members: int = 0) -> int:
    """Return how many members of a list must stay: the setting's share of them, or two thirds."""
    n = recipe.wire.secure_nodes
    whole = recipe.wire.secure_threshold or max(n // 2 + 1, -(-2 * n // 3))
    if members in (0, n):
        return whole
    return max(members // 2 + 1, -(-whole * members // n))
