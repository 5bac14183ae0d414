"""Figures for the report.

In:       series of numbers with names.
Out:      HTML fragments that draw them, and the script they need, without any network.
Promise:  the same series give the same fragment.
Not here: which figures a report has (`report.py`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

COLORS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#4d7c0f")

MOST_MARKERS = 80


class Series(NamedTuple):
    """One line of a figure."""

    name: str
    x: list[float]
    y: list[float]


def script() -> str:
    """The drawing library, once a page."""
    from plotly.offline import get_plotlyjs  # in here: loading plotly takes half a second

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
    """Curves over a common axis, with horizontal marks for reference values."""
    import plotly.graph_objects as go  # in here: loading plotly takes half a second

    figure = go.Figure()
    for number, one in enumerate(series):
        mode = "lines+markers" if len(one.x) <= MOST_MARKERS else "lines"
        color = COLORS[number % len(COLORS)]
        figure.add_trace(go.Scatter(x=one.x, y=one.y, name=one.name, mode=mode, line_color=color))
    ends = [min(min(s.x) for s in series if s.x), max(max(s.x) for s in series if s.x)]
    for name, value in (marks or {}).items():
        # A trace, not a shape: on a logarithmic axis the label of a shape goes astray.
        figure.add_trace(
            go.Scatter(
                x=ends,
                y=[value, value],
                mode="lines+text",
                text=["", f"{name} {value:.4g}"],
                textposition="top left",
                line={"color": "#6b7280", "dash": "dot"},
                showlegend=False,
            )
        )
    figure.update_xaxes(title=x, type="log" if log_x else "linear")
    figure.update_yaxes(title=y, type="log" if log_y else "linear")
    return _fragment(figure, len(series) > 1)


def bars(names: list[str], values: list[float], *, y: str) -> str:
    """One bar a name."""
    import plotly.graph_objects as go  # in here: loading plotly takes half a second

    figure = go.Figure(go.Bar(x=names, y=values, marker_color=COLORS[0]))
    figure.update_yaxes(title=y)
    return _fragment(figure, False)


def _fragment(figure: Any, legend: bool) -> str:
    figure.update_layout(
        template="plotly_white",
        height=380,
        margin={"l": 60, "r": 20, "t": 20, "b": 50},
        showlegend=legend,
        legend={"orientation": "h", "y": -0.2},
    )
    text: str = figure.to_html(
        full_html=False, include_plotlyjs=False, config={"displayModeBar": False}
    )
    return text
