"""Figures for the report.

In:       series of numbers with names.
Out:      HTML fragments that draw them, and the script they need, without any network.
Promise:  the same series give the same fragment.
Not here: which figures a report has (`report.py`).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

Json = dict[str, Any]

COLORS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#4d7c0f")

MOST_MARKERS = 80


class Series(NamedTuple):
    """One line of a figure."""

    name: str
    x: list[float]
    y: list[float]


def script() -> str:
    """Return the script of the drawing library, needed once per page."""
    from plotly.offline import get_plotlyjs  # imported here: loading plotly takes half a second

    return f"<script>{get_plotlyjs()}</script>"


def lines(
    series: list[Series],
    *,
    x: str,
    y: str,
    log_y: bool = False,
    log_x: bool = False,
    marks: dict[str, float] | None = None,
) -> str:
    """Draw curves over a common axis, with horizontal marks for reference values."""
    data: list[Json] = []
    for number, one in enumerate(series):
        mode = "lines+markers" if len(one.x) <= MOST_MARKERS else "lines"
        line = {"color": COLORS[number % len(COLORS)]}
        data.append(_curve(one.x, one.y, mode, line) | {"name": one.name})
    ends = [min(min(s.x) for s in series if s.x), max(max(s.x) for s in series if s.x)]
    for name, value in (marks or {}).items():
        # A trace, not a shape: on a logarithmic axis the label of a shape is misplaced.
        line = {"color": "#6b7280", "dash": "dot"}
        label = {"text": ["", f"{name} {value:.4g}"], "textposition": "top left"}
        data.append(
            _curve(ends, [value, value], "lines+text", line) | label | {"showlegend": False}
        )
    axes = {"xaxis": _axis(x, log_x), "yaxis": _axis(y, log_y)}
    return _fragment(data, axes, len(series) > 1)


def bars(names: list[str], values: list[float], *, y: str) -> str:
    """Draw one bar per name."""
    bar = {"type": "bar", "x": names, "y": values, "marker": {"color": COLORS[0]}}
    return _fragment([bar], {"yaxis": {"title": {"text": y}}}, False)


def _curve(x: list[float], y: list[float], mode: str, line: Json) -> Json:
    return {"type": "scatter", "x": x, "y": y, "mode": mode, "line": line}


def _axis(title: str, log: bool) -> Json:
    return {"title": {"text": title}, "type": "log" if log else "linear"}


@functools.cache
def _template() -> Json:
    """Return the look of all figures."""
    import plotly.io as pio  # imported here: loading plotly takes half a second

    made: Json = pio.templates["plotly_white"].to_plotly_json()
    return made


def _fragment(data: list[Json], axes: Json, legend: bool) -> str:
    """Return a figure as HTML.

    As plain JSON: a figure object checks its template setting by setting, a tenth of a second each
    time, which was a third of a short run.
    """
    import plotly.io as pio  # imported here: loading plotly takes half a second

    layout = {
        "template": _template(),
        "height": 380,
        "margin": {"l": 60, "r": 20, "t": 20, "b": 50},
        "showlegend": legend,
        "legend": {"orientation": "h", "y": -0.2},
    }
    text: str = pio.to_html(
        {"data": data, "layout": layout | axes},
        full_html=False,
        include_plotlyjs=False,
        config={"displayModeBar": False},
        validate=False,
    )
    return text
