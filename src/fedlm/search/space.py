"""The settings that a search tries, and their values.

In:       `table.key=value,value` or `table.key=low..high:count`; a recipe.
Out:      axes, the points of their product, and where the best point lies on an edge.
Promise:  the same texts and seed give the same points; each setting is named once.
Not here: how long points are trained (`tune_plan.py`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping

from fedlm.core.errors import require
from fedlm.core.keys import generator_for
from fedlm.recipe.settings import Recipe, parse_value
from fedlm.search.sweep import Point

AxisValues = tuple[object, ...]
Axes = Mapping[str, AxisValues]
RANGE = ".."  # between the ends of a range, whose values are evenly spaced in their logarithm
RANGE_VALUES, MOST_VALUES, MOST_POINTS = 5, 100, 10_000

# What is tried if nothing is said: around the published rates of each optimiser.
CLIENT_RATES: dict[str, tuple[float, ...]] = {
    "sgd": (0.1, 0.3, 1.0),
    "momentum": (0.01, 0.03, 0.1),
    "adam": (0.0003, 0.001, 0.003),
    "adamw": (0.0003, 0.001, 0.003),
    "muon": (0.0003, 0.001, 0.003),
}
SERVER_RATES: dict[str, tuple[float, ...]] = {
    "fedavg": (0.3, 1.0),
    "fedavgm": (0.1, 0.3, 1.0),
    "nesterov": (0.1, 0.3, 1.0),
    "fedadam": (0.003, 0.01, 0.03),
    "fedyogi": (0.003, 0.01, 0.03),
    "fedadagrad": (0.01, 0.03, 0.1),
}
# Under a plan nearly all updates are as long as the clip, and the server's step is its rate times
# the clip: at 0.1 a rate of one is too little (docs/results.md). Momentum of 0.9 adds up ten steps.
PRIVATE_SERVER_RATES = SERVER_RATES | {
    "fedavg": (30.0, 80.0, 200.0),
    "fedavgm": (3.0, 8.0, 20.0),
    "nesterov": (3.0, 8.0, 20.0),
}
CLIPS = (0.0, 1.0)
PRIVATE_CLIPS = (0.03, 0.1, 0.3)


def axis_of(text: str) -> tuple[str, AxisValues]:
    """Read `table.key=value,value` or `table.key=low..high:count`.

    >>> axis_of("client.learning_rate=0.1,1")
    ('client.learning_rate', (0.1, 1))
    >>> axis_of("client.learning_rate=0.01..1:3")
    ('client.learning_rate', (0.01, 0.1, 1.0))
    """
    name, equals, values = text.partition("=")
    name = name.strip()
    require(
        bool(equals) and "." in name and bool(values.strip()),
        "--over",
        text,
        "table.key=value,value or table.key=low..high, as in client.learning_rate=0.1,0.3,1",
    )
    return name, _values(name, values)


def axes_of(texts: Iterable[str]) -> dict[str, AxisValues]:
    """Read several settings to try, each of which may be named once."""
    axes: dict[str, AxisValues] = {}
    for text in texts:
        name, values = axis_of(text)
        require(name not in axes, "over", text, "each setting once")
        axes[name] = values
    return axes


def _values(name: str, text: str) -> AxisValues:
    """Return the values of a setting to try, from the text of a list or of a range."""
    what = f"over {name}"
    if RANGE in text:
        return _spaced(what, text)
    given = [parse_value(part.strip(), what) for part in text.split(",") if part.strip()]
    values = tuple(v for n, v in enumerate(given) if v not in given[:n])  # a list has no hash
    require(0 < len(values) <= MOST_VALUES, what, text, f"one to {MOST_VALUES} different values")
    return values


def _spaced(what: str, text: str) -> tuple[float, ...]:
    """Return numbers evenly spaced in their logarithm, of two digits where they still differ."""
    ends, colon, many = text.partition(":")
    low_text, _, high_text = ends.partition(RANGE)
    try:
        low, high, count = float(low_text), float(high_text), int(many) if colon else RANGE_VALUES
    except ValueError:
        low = high = count = 0
    require(
        0 < low < high < math.inf and 2 <= count <= MOST_VALUES,
        what,
        text,
        f"two positive numbers, the lower first, and perhaps 2 to {MOST_VALUES} values: 0.01..1:5",
    )
    exact = [low * (high / low) ** (n / (count - 1)) for n in range(count)]
    rounded = tuple(float(f"{x:.2g}") for x in exact)
    return rounded if len(set(rounded)) == count else tuple(exact)


def default_axes(recipe: Recipe) -> dict[str, AxisValues]:
    """Return the settings to try if nothing is said, by the recipe's optimisers."""
    axes: dict[str, AxisValues] = {"client.learning_rate": CLIENT_RATES[recipe.client.optimizer]}
    private = recipe.privacy.mechanism is not None
    if recipe.federation is None:
        rates = PRIVATE_SERVER_RATES if private else SERVER_RATES
        axes["server.learning_rate"] = rates[recipe.server.optimizer]
    if private:
        axes["privacy.clip_norm"] = PRIVATE_CLIPS
    else:
        axes["client.gradient_clip_norm"] = CLIPS
    return axes


def all_points(axes: Axes) -> list[Point]:
    """Return the product of all axes; refuse more points than anybody would try."""
    count = math.prod(map(len, axes.values()))
    require(
        count <= MOST_POINTS, "over", count, f"at most {MOST_POINTS:,} points: name fewer values"
    )
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def draw_points(product: list[Point], most: int, seed: int) -> tuple[Point, ...]:
    """Return so many points, drawn at random, in the order of the product."""
    if most >= len(product):
        return tuple(product)
    chosen = generator_for(seed, "tune").choice(len(product), most, replace=False)
    return tuple(product[n] for n in sorted(chosen))


def edges(axes: Axes, best: Point) -> list[str]:
    """Say for which settings the best value is the least or largest of those tried.

    >>> edges({"client.learning_rate": (0.1, 0.3, 1.0)}, {"client.learning_rate": 1.0})
    ['client.learning_rate = 1.0 is the largest value tried: the best may lie beyond it.']
    """
    told = []
    for name, values in axes.items():
        numbers = [v for v in values if isinstance(v, (int, float)) and not isinstance(v, bool)]
        if len(numbers) < 2 or len(numbers) < len(values):
            continue
        # Nothing lies beyond a least value of zero, which turns a setting off.
        ends = {max(numbers): "largest"} | ({} if min(numbers) == 0 else {min(numbers): "least"})
        if best[name] in ends:
            told.append(
                f"{name} = {best[name]} is the {ends[best[name]]} value tried: the best may lie "
                "beyond it."
            )
    return told
