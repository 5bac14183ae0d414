"""Small drawings for pages: curves, bars, heat maps, trees, flows, odds.

In:       numbers with names.
Out:      SVG text whose colours and letters are those of the page (`page.py`).
Promise:  the same numbers give the same text; every name is escaped; no script, no outside request;
          a curve of any length is at most `MOST_POINTS` points; a run has one colour wherever its
          number is the same, and the colours are Okabe and Ito's, which colour-blind people tell
          apart, with a mark and a dash of its own for each.
Not here: which drawings a page has (`report.py`, `comparison.py`, `statement.py`).
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from fedlm.core.words import number

WIDTH = 640
MOST_POINTS, MOST_MARKS, MOST_ROWS, MOST_CELLS = 240, 32, 60, 30
# Okabe and Ito (2008), those that are seen best on white and on black first.
COLOURS = (
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#f0e442",
)  # fmt: skip
DASHES = ("", "7 4", "2 3", "9 3 2 3")
SHAPES = ("circle", "square", "triangle", "diamond")
CORNERS: dict[str, tuple[tuple[float, float], ...]] = {
    "square": ((-1, -1), (1, -1), (1, 1), (-1, 1)),
    "triangle": ((0, -1.2), (1.1, 0.9), (-1.1, 0.9)),
    "diamond": ((0, -1.3), (1.3, 0), (0, 1.3), (-1.3, 0)),
}
LEFT, RIGHT, TOP, BOTTOM = 70, 18, 16, 50


class Series(NamedTuple):
    """One line of a chart, perhaps with a band from `low` to `high` around it."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    colour: int = 0
    low: Sequence[float] = ()
    high: Sequence[float] = ()


class Dot(NamedTuple):
    """One mark of a scatter chart; a hollow one is not on the front."""

    name: str
    x: float
    y: float
    colour: int = 0
    filled: bool = True


def escape(value: object) -> str:
    """Return any text as text of a page, also within an attribute.

    >>> escape("<script>")
    '&lt;script&gt;'
    """
    return html.escape(str(value), quote=True)


def picture(height: float, title: str, body: str, *, width: float = WIDTH) -> str:
    """Return a drawing that scales with the page, and its title for those who do not see it."""
    return (
        f"<svg viewBox='0 0 {width:g} {height:g}' role='img' aria-label='{escape(title)}'>"
        f"<title>{escape(title)}</title>{body}</svg>"
    )


# Of drawings that stand alone; those of a page have its style.
ALONE = (
    "text{font:13px system-ui,sans-serif;fill:#16191d}text.small{font-size:11.5px}"
    "text.quiet{fill:#535c68}.grid{stroke:#d5dae0}.rule{stroke:#535c68}"
    ".mark{stroke:#535c68;stroke-dasharray:3 4}.curve{fill:none;stroke:var(--c);stroke-width:2}"
    ".band{fill:var(--c);fill-opacity:.15}"
    ".dot{fill:var(--c)}.hollow{fill:#fff;stroke:var(--c);stroke-width:2}"
    ".front{fill:none;stroke:#535c68;stroke-width:1.5;stroke-dasharray:6 4}"
)


def alone(drawing: str, width: float, height: float) -> str:
    """Return a drawing as a file of its own, on white, which needs no page around it."""
    colours = "".join(f".c{i}{{--c:{value}}}" for i, value in enumerate(COLOURS))
    head = f"<svg xmlns='http://www.w3.org/2000/svg' width='{width:g}' height='{height:g}' "
    style = f"<style>{ALONE}{colours}</style>"
    return drawing.replace("<svg ", head, 1).replace("<title>", f"{style}<title>", 1)


def with_names(chart: str, names: Sequence[tuple[str, int]], height: float) -> str:
    """Return a chart as a file of its own, its curves' names below it."""
    inner = chart[chart.index(">") + 1 : -len("</svg>")]
    rows = "".join(
        f"<g transform='translate({LEFT} {height + 22 * (i + 1)})'>"
        f"<path d='M0 -4H30' class='curve {colour(c)}'{_dash(c)}/>{_mark(15, -4, c, '')}"
        f"{text(38, 0, name)}</g>"
        for i, (name, c) in enumerate(names)
    )
    whole = height + 22 * (len(names) + 1)
    return alone(picture(whole, ", ".join(name for name, _ in names), inner + rows), WIDTH, whole)


def text(
    x: float, y: float, said: object, *, anchor: str = "start", kind: str = "", turn: float = 0
) -> str:
    """Return one line of letters."""
    turned = f" transform='rotate({turn:g} {x:.1f} {y:.1f})'" if turn else ""
    named = f" class='{kind}'" if kind else ""
    return (
        f"<text x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}'{named}{turned}>{escape(said)}</text>"
    )


def line(x1: float, y1: float, x2: float, y2: float, kind: str = "grid") -> str:
    """Return a straight line."""
    return f"<line x1='{x1:.1f}' y1='{y1:.1f}' x2='{x2:.1f}' y2='{y2:.1f}' class='{kind}'/>"


def box(x: float, y: float, width: float, height: float, kind: str, said: str = "") -> str:
    """Return a rectangle, perhaps with words that show when it is pointed at."""
    inner = f"<title>{escape(said)}</title>" if said else ""
    size = f"x='{x:.1f}' y='{y:.1f}' width='{max(width, 0):.1f}' height='{max(height, 0):.1f}'"
    return (
        f"<rect {size} class='{kind}'>{inner}</rect>"
        if inner
        else (f"<rect {size} class='{kind}'/>")
    )


def shorten(name: object, most: int) -> str:
    """Return a name that fits.

    >>> shorten("a long name", 7)
    'a long…'
    """
    said = str(name)
    return said if len(said) <= most else f"{said[: most - 1]}…"


def colour(number: int) -> str:
    """Return the class of a run's colour."""
    return f"c{number % len(COLOURS)}"


def legend(names: Sequence[tuple[str, int]]) -> str:
    """Return the names of runs beside their colours, marks and dashes."""
    items = "".join(
        f"<li><svg viewBox='0 0 34 12' class='key' aria-hidden='true'>"
        f"<path d='M1 6H33' class='curve {colour(c)}'{_dash(c)}/>{_mark(17, 6, c, '')}</svg>"
        f"{escape(name)}</li>"
        for name, c in names
    )
    return f"<ul class='legend'>{items}</ul>"


# ---- axes --------------------------------------------------------------------------------------


class Axis(NamedTuple):
    """Where a value is on the drawing, and the values that are written beside it."""

    at: Callable[[float], float]
    ticks: list[float]


def axis(values: Iterable[float], start: float, end: float, *, log: bool = False) -> Axis:
    """Return an axis that holds all values, from `start` to `end` on the drawing."""
    found = [float(v) for v in values if math.isfinite(v) and (v > 0 or not log)]
    low, high = (min(found), max(found)) if found else (1.0, 2.0)
    if log:
        low, high = low / 1.04, high * 1.04
        a, b = math.log(low), math.log(high)
        return Axis(
            lambda v: start + (end - start) * (math.log(max(v, low)) - a) / (b - a),
            log_ticks(low, high),
        )
    if high <= low:
        low, high = low - 0.5 * (abs(low) or 1), high + 0.5 * (abs(high) or 1)
    ticks = linear_ticks(low, high)
    return Axis(lambda v: start + (end - start) * (v - low) / (high - low), ticks)


def linear_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Return round values between two numbers.

    >>> linear_ticks(0, 100)
    [0.0, 20.0, 40.0, 60.0, 80.0, 100.0]
    """
    span = high - low
    if not (math.isfinite(span) and span > 0):
        return [low]
    rough = span / (most - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(s * power for s in (1, 2, 2.5, 5, 10) if s * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [
        round(i * step, 12)
        for i in range(first, first + most + 2)
        if i * step <= high + 1e-9 * span
    ]


def log_ticks(low: float, high: float, most: int = 7) -> list[float]:
    """Return round values of a logarithmic axis.

    >>> log_ticks(50, 2100), log_ticks(61, 98)
    ([50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0], [70.0, 80.0, 90.0])
    """
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1, 1.5, 2, 3, 4, 5, 6, 8), (1, 2, 5), (1,)):
        found = [s * 10.0**p for p in powers for s in steps if low <= s * 10.0**p <= high]
        if len(found) <= most:
            break
    if len(found) < 3:  # too narrow for powers of ten
        return [tick for tick in linear_ticks(low, high) if tick > 0]
    return found[:: -(-len(found) // most)]


# ---- curves ------------------------------------------------------------------------------------


def lines(
    series: Sequence[Series],
    *,
    x: str,
    y: str,
    log_x: bool = False,
    log_y: bool = False,
    marks: Mapping[str, float] | None = None,
    height: float = 330,
) -> str:
    """Draw curves over one axis, with dotted lines for values to compare with."""
    series = [_thinned(one) for one in series if len(one.x)]
    heights = [v for one in series for v in (*one.y, *one.low, *one.high)]
    heights += [v for mark in (marks or {}).values() for v in (mark, 0.93 * mark)]  # room for names
    across = axis((v for one in series for v in one.x), LEFT, WIDTH - RIGHT, log=log_x)
    down = axis(heights, height - BOTTOM, TOP, log=log_y)
    body = _frame(across, down, x, y, height)
    for one in series:
        if one.low:
            ends = [(across.at(a), down.at(b)) for a, b in zip(one.x, one.low, strict=True)]
            back = [(across.at(a), down.at(b)) for a, b in zip(one.x, one.high, strict=True)]
            body += f"<path d='{_path([*ends, *back[::-1]])}Z' class='band {colour(one.colour)}'/>"
    for one in series:
        points = [(across.at(a), down.at(b)) for a, b in zip(one.x, one.y, strict=True)]
        body += f"<path d='{_path(points)}' class='curve {colour(one.colour)}'{_dash(one.colour)}/>"
        if len(points) <= MOST_MARKS:
            for (a, b), px, py in zip(points, one.x, one.y, strict=True):
                body += _mark(a, b, one.colour, f"{one.name}: {number(py)} at {number(px)}")
    body += _marked(marks or {}, down)
    names = ", ".join(one.name for one in series)
    return picture(height, f"{y} over {x}: {names}", body)


def scatter(
    points: Sequence[Dot], *, x: str, y: str, log_x: bool = False, height: float = 330
) -> str:
    """Draw one mark per point; filled ones are on the front, and a line joins them."""
    across = axis((p.x for p in points), LEFT + 14, WIDTH - RIGHT - 60, log=log_x)
    down = axis((p.y for p in points), height - BOTTOM - 8, TOP + 10, log=True)
    body = _frame(across, down, x, y, height)
    front = sorted((across.at(p.x), down.at(p.y)) for p in points if p.filled)
    if len(front) > 1:
        body += f"<path d='{_path(front)}' class='front'/>"
    for p in points:
        a, b = across.at(p.x), down.at(p.y)
        said = f"{p.name}: {y} {number(p.y)}, {x} {number(p.x)}"
        body += _mark(a, b, p.colour, said, size=6, hollow=not p.filled)
        body += text(a + 9, b - 7, shorten(p.name, 22), kind="small")
    return picture(height, f"{y} over {x}", body)


def _thinned(one: Series) -> Series:
    """Return a curve of at most `MOST_POINTS` points, its last one among them."""
    every = -(-len(one.x) // MOST_POINTS)
    kept = sorted({*range(0, len(one.x), every), len(one.x) - 1})

    def pick(values: Sequence[float]) -> list[float]:
        return [values[i] for i in kept] if len(values) else []

    return one._replace(x=pick(one.x), y=pick(one.y), low=pick(one.low), high=pick(one.high))


def _frame(across: Axis, down: Axis, x: str, y: str, height: float) -> str:
    bottom = height - BOTTOM
    body = ""
    for value in down.ticks:
        body += line(LEFT, down.at(value), WIDTH - RIGHT, down.at(value))
        body += text(LEFT - 8, down.at(value) + 4, number(value, 3), anchor="end")
    for value in across.ticks:
        body += line(across.at(value), bottom, across.at(value), bottom + 5, "rule")
        body += text(across.at(value), bottom + 20, number(value, 3), anchor="middle")
    body += line(LEFT, bottom, WIDTH - RIGHT, bottom, "rule")
    body += text((LEFT + WIDTH - RIGHT) / 2, height - 8, x, anchor="middle", kind="quiet")
    middle = (TOP + bottom) / 2
    return body + text(16, middle, y, anchor="middle", kind="quiet", turn=-90)


def _marked(marks: Mapping[str, float], down: Axis) -> str:
    """Draw values to compare with, their names moved apart where they would meet."""
    body, above = "", -math.inf
    for name, value in sorted(marks.items(), key=lambda mark: down.at(mark[1])):
        at = down.at(value)
        body += line(LEFT, at, WIDTH - RIGHT, at, "mark")
        place = max(at - 4, above + 15)
        above = place
        body += text(WIDTH - RIGHT, place, f"{name} {number(value, 3)}", anchor="end", kind="quiet")
    return body


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in points)


def _dash(number: int) -> str:
    dash = DASHES[number // len(COLOURS) % len(DASHES)]
    return f" stroke-dasharray='{dash}'" if dash else ""


def _mark(
    x: float, y: float, number: int, said: str, *, size: float = 3.6, hollow: bool = False
) -> str:
    """Return a mark whose shape and colour belong to a run."""
    kind = f"class='{'hollow' if hollow else 'dot'} {colour(number)}'"
    title = f"<title>{escape(said)}</title>" if said else ""
    shape = SHAPES[number % len(SHAPES)]
    if shape == "circle":
        return f"<circle cx='{x:.1f}' cy='{y:.1f}' r='{size:g}' {kind}>{title}</circle>"
    corners = CORNERS[shape]
    places = " ".join(f"{x + a * size:.1f},{y + b * size:.1f}" for a, b in corners)
    return f"<polygon points='{places}' {kind}>{title}</polygon>"


# ---- bars --------------------------------------------------------------------------------------


class Bar(NamedTuple):
    """One bar, with words after its value."""

    name: str
    value: float | None
    colour: int = 0
    said: str = ""


def bars(rows: Sequence[Bar], *, title: str) -> str:
    """Draw one lying bar per name, from zero."""
    most = (
        max((v for v in (row.value for row in rows) if v is not None and _shown(v)), default=1.0)
        or 1.0
    )
    left, room, step = 200, 230, 26
    body = ""
    for i, row in enumerate(rows):
        y = 4 + i * step
        body += text(left - 8, y + 15, shorten(row.name, 19), anchor="end")
        if not _shown(row.value):
            body += text(left, y + 15, "-")
            continue
        assert row.value is not None
        width = room * max(row.value, 0) / most
        body += box(left, y + 2, width, step - 8, f"fill {colour(row.colour)}", row.name)
        said = f"{number(row.value, 3)}{f'  {row.said}' if row.said else ''}"
        body += text(left + width + 7, y + 15, said)
    return picture(8 + step * len(rows), title, body)


def _shown(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def quantile_box(quantiles: Mapping[str, float], marks: Mapping[str, float], title: str) -> str:
    """Draw how values lie: a box from the lower to the upper quarter, whiskers, named values."""
    values = [*quantiles.values(), *marks.values()]
    across = axis(values, 30, WIDTH - 30, log=True)
    p = {name: across.at(value) for name, value in quantiles.items()}
    body = ""
    low = 24 * len(marks)  # names of marks above, each in a line of its own
    for tick in across.ticks:
        body += line(across.at(tick), low + 30, across.at(tick), low + 76)
        body += text(across.at(tick), low + 96, number(tick, 3), anchor="middle", kind="quiet")
    body += line(p["p10"], low + 54, p["p90"], low + 54, "rule")
    body += box(p["p25"], low + 40, p["p75"] - p["p25"], 28, "soft c0", "the middle half")
    body += line(p["p50"], low + 34, p["p50"], low + 74, "strong")
    body += text(p["p50"], low + 22, f"median {number(quantiles['p50'], 3)}", anchor="middle")
    for i, (name, value) in enumerate(marks.items()):
        at = across.at(value)
        body += _mark(at, low + 54, 1, f"{name}: {number(value)}", size=5)
        end, aside = ("end", -6) if at > 0.5 * WIDTH else ("start", 6)
        body += text(at + aside, 18 + 24 * i, f"{name} {number(value, 3)}", anchor=end)
        body += line(at, 6 + 24 * i, at, low + 48)
    body += text(WIDTH / 2, low + 120, "perplexity of a client", anchor="middle", kind="quiet")
    return picture(low + 128, title, body)


# ---- heat maps ---------------------------------------------------------------------------------


def heat_map(
    rows: Sequence[str],
    columns: Sequence[str],
    values: Sequence[Sequence[float | None]],
    *,
    title: str,
    log: bool = False,
    digits: int = 3,
) -> str:
    """Draw a table of values as shades; a darker cell is a larger value."""
    many = len(rows) > MOST_CELLS or len(columns) > MOST_CELLS
    rows, columns = rows[:MOST_CELLS], columns[:MOST_CELLS]
    cells = [list(row[: len(columns)]) for row in values[: len(rows)]]
    known = [v for row in cells for v in row if v is not None and math.isfinite(v)]
    known = [v for v in known if v > 0] if log else known
    scale = (lambda v: math.log(max(v, 1e-30))) if log else (lambda v: v)
    low, high = (min(map(scale, known)), max(map(scale, known))) if known else (0.0, 1.0)
    left, top = 150.0, 92.0
    wide = min(96.0, (WIDTH - left - 40) / max(len(columns), 1))
    tall = 24.0
    body = ""
    for j, name in enumerate(columns):
        said, turn = (shorten(name, 16), -35) if wide >= 34 else (shorten(name, 13), -70)
        body += text(left + (j + 0.5) * wide, top - 8, said, turn=turn, kind="small")
    for i, (name, row) in enumerate(zip(rows, cells, strict=False)):
        y = top + i * tall
        body += text(left - 8, y + 16, shorten(name, 20), anchor="end")
        for j, value in enumerate(row):
            if value is None or not math.isfinite(value):
                continue
            share = (scale(value) - low) / (high - low) if high > low else 0.5
            shade = min(9, max(0, int(10 * share)))
            said = f"{name}, {columns[j]}: {number(value)}"
            x = left + j * wide
            body += box(x + 1, y + 1, wide - 2, tall - 2, f"h{shade}", said)
            if wide >= 34:
                kind = "small inked" if shade > 4 else "small"
                body += text(
                    x + wide / 2, y + 16, number(value, digits), anchor="middle", kind=kind
                )
    end = top + tall * len(rows)
    if many:
        body += text(left, end + 16, f"the first {MOST_CELLS} of each", kind="quiet small")
    return picture(end + (22 if many else 6), title, body)


# ---- trees and flows ---------------------------------------------------------------------------


class TreeNode(NamedTuple):
    """A node of a drawn tree: its place, its value, and what flows to its parent and back."""

    name: str
    parent: int | None
    value: float | None = None
    said: str = ""
    own: float | None = None  # a second value, marked on the bar
    up: float = 0.0
    down: float = 0.0


def tree_drawing(
    nodes: Sequence[TreeNode], routes: Mapping[tuple[str, str], int], *, title: str
) -> str:
    """Draw a tree: a row per node, its value as a bar, branches as thick as what flows on them.

    Routes are drawn at the right side as arcs from one node to another.
    """
    order = _rows_of(nodes)[:MOST_ROWS]
    row_of = {node: row for row, (node, _) in enumerate(order)}
    most_bytes = max((node.up + node.down for node in nodes), default=0) or 1.0
    known = [v for n in nodes for v in (n.value, n.own) if v is not None and math.isfinite(v)]
    most = max(known, default=1.0) or 1.0
    step, indent, bar_at, bar_room = 30.0, 20.0, 230.0, 140.0
    body = ""
    for node, depth in order:
        one, y = nodes[node], 18 + step * row_of[node]
        x = 14 + indent * depth
        if one.parent is not None and one.parent in row_of:
            above = 18 + step * row_of[one.parent]
            thick = 1.2 + 5 * math.sqrt((one.up + one.down) / most_bytes)
            d = f"M{x - indent:.1f} {above:.1f}V{y:.1f}H{x:.1f}"
            body += f"<path d='{d}' class='branch' stroke-width='{thick:.1f}'/>"
    for node, depth in order:
        one, y = nodes[node], 18 + step * row_of[node]
        x = 14 + indent * depth
        body += _mark(x, y, 0, one.name, size=5)
        body += text(x + 11, y + 5, shorten(one.name, 24))
        if one.value is not None and math.isfinite(one.value):
            width = bar_room * one.value / most
            body += box(bar_at, y - 8, width, 16, "soft c0", one.name)
            body += text(bar_at + 5, y + 5, number(one.value, 3))
        if one.own is not None and math.isfinite(one.own):
            at = bar_at + bar_room * one.own / most
            body += _mark(at, y, 1, f"{one.name}, after own steps: {number(one.own)}", size=4)
        body += text(bar_at + bar_room + 12, y + 5, one.said, kind="small")
    named = {nodes[node].name: row for node, row in row_of.items()}
    body += _arcs(routes, named, step)
    left_out = len(nodes) - len(order)
    if left_out:
        body += text(14, 24 + step * len(order), f"and {left_out} more nodes", kind="quiet")
    return picture(24 + step * (len(order) + bool(left_out)), title, body)


def _rows_of(nodes: Sequence[TreeNode]) -> list[tuple[int, int]]:
    """Return the nodes in the order of their rows, each with its depth."""
    children: dict[int | None, list[int]] = {}
    for index, node in enumerate(nodes):
        children.setdefault(node.parent, []).append(index)
    found: list[tuple[int, int]] = []
    waiting = [(root, 0) for root in reversed(children.get(None, []))]
    while waiting:  # a node has one parent, so it comes once
        index, depth = waiting.pop()
        found.append((index, depth))
        waiting += [(child, depth + 1) for child in reversed(children.get(index, []))]
    return found


def _arcs(routes: Mapping[tuple[str, str], int], rows: Mapping[str, int], step: float) -> str:
    """Draw the most frequent routes between rows."""
    known = {way: n for way, n in routes.items() if way[0] in rows and way[1] in rows}
    most, body, x = max(known.values(), default=1), "", WIDTH - 46
    for (a, b), n in sorted(known.items(), key=lambda way: -way[1])[:16]:
        y1, y2 = (18 + step * rows[name] for name in (a, b))
        reach = x + min(40, 8 + abs(y2 - y1) / 4)
        d = f"M{x} {y1:.1f}Q{reach:.1f} {(y1 + y2) / 2:.1f} {x} {y2:.1f}"
        said = f"{a} to {b}: {n} layers"
        body += (
            f"<path d='{d}' class='arc' stroke-width='{1 + 3 * n / most:.1f}'>"
            f"<title>{escape(said)}</title></path><circle cx='{x}' cy='{y2:.1f}' r='3' "
            "class='arrow'/>"
        )
    return body


class Flow(NamedTuple):
    """What goes one way between members and the server."""

    name: str
    share: float  # of the whole model
    said: str
    whole: str


def flow(left: str, right: str, flows: Sequence[Flow]) -> str:
    """Draw what travels between members and server, as thick as its share of the whole model."""
    full, top = 46.0, 10.0
    body = ""
    for i, one in enumerate(flows):
        y = top + i * 78
        thick = max(2.0, full * min(one.share, 1.0))
        body += box(128, y, WIDTH - 256, full, "outline", one.whole)
        body += box(128, y + (full - thick) / 2, WIDTH - 256, thick, f"soft {colour(i)}", one.said)
        tip = WIDTH - 128 if i == 0 else 128
        way = 12 if i == 0 else -12
        middle = y + full / 2
        body += (
            f"<polygon points='{tip},{middle - 9} {tip + way},{middle} {tip},{middle + 9}' "
            f"class='dot {colour(i)}'/>"
        )
        body += text(WIDTH / 2, y + full / 2 + 5, f"{one.name}: {one.said}", anchor="middle")
        body += text(WIDTH / 2, y + full + 17, one.whole, anchor="middle", kind="quiet small")
    height = top + 78 * len(flows)
    for x, said in ((4, left), (WIDTH - 108, right)):
        body += box(x, top, 104, height - top - 32, "card")
        words, middle = _wrapped(said, 10), (top + height - 32) / 2
        for j, word in enumerate(words):
            at = middle + 5 + 21 * (j - (len(words) - 1) / 2)
            body += text(x + 52, at, word, anchor="middle")
    return picture(height, f"{left} and {right}: what travels between them", body)


def _wrapped(said: str, most: int) -> list[str]:
    rows = [""]
    for word in said.split():
        rows = (
            [*rows[:-1], f"{rows[-1]} {word}".strip()]
            if len(rows[-1]) + len(word) < most
            else ([*rows, word])
        )
    return rows


# ---- odds --------------------------------------------------------------------------------------


def posterior(prior: float, epsilon: float) -> float:
    """Return the most that somebody who believed `prior` may believe after all releases.

    >>> round(posterior(0.5, math.log(3)), 2)
    0.75
    """
    odds = math.exp(min(epsilon, 700.0)) * prior / (1 - prior)
    return odds / (1 + odds)


def odds(priors: Sequence[float], epsilon: float) -> str:
    """Draw how sure an attacker may become at most, from how sure he was before."""
    left, room, step = 190.0, 270.0, 52.0
    body = ""
    for share in (0, 0.25, 0.5, 0.75, 1):
        x = left + room * share
        body += line(x, 14, x, 18 + step * len(priors))
        body += text(x, 36 + step * len(priors), f"{share:.0%}", anchor="middle", kind="quiet")
    for i, prior in enumerate(priors):
        y, after = 24 + step * i, posterior(prior, epsilon)
        body += text(left - 10, y + 14, f"thought {percent(prior)} before", anchor="end")
        body += box(left, y, room * after, 20, "soft c1", f"at most {percent(after)}")
        body += box(left, y, room * prior, 20, "fill c0", f"{percent(prior)} before")
        at, said = left + room * after, f"at most {percent(after)} after"
        body += text(at + 8, y + 15, said)
    return picture(46 + step * len(priors), "how sure an attacker may become", body)


def percent(share: float) -> str:
    """Return a share in percent, without calling something certain that is not.

    >>> percent(0.5), percent(0.9999), percent(0.0123)
    ('50%', 'more than 99.9%', '1.2%')
    """
    if share > 0.999:
        return "more than 99.9%" if share < 1 else "100%"
    return f"{share:.1%}" if share < 0.1 or share > 0.99 else f"{share:.0%}"
