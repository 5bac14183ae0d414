"""A page for people: one file that needs no network, no script and no drawing library.

In:       a title and parts of HTML.
Out:      an HTML document for screens (light and dark, wide and narrow) and for paper.
Promise:  a page asks nobody for anything: its policy forbids scripts and every request; tables
          escape what they are given; a page takes the place of no file but an earlier page.
Not here: drawings (`svg.py`), what a page says (`report.py`, `comparison.py`, `statement.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from fedlm.core.durable import write_atomically
from fedlm.core.errors import require
from fedlm.core.words import NOTHING, number
from fedlm.record.svg import COLOURS, escape

_COLOURS = "".join(f".c{i}{{--c:{value}}}" for i, value in enumerate(COLOURS))
_SHADES = "".join(f".h{i}{{fill:#0072b2;fill-opacity:{0.06 + 0.094 * i:.2f}}}" for i in range(10))
STYLE = (
    """
:root{--ink:#16191d;--paper:#fff;--soft:#f3f5f7;--line:#d5dae0;--quiet:#535c68;--warn:#8a3b00}
@media (prefers-color-scheme:dark){:root{--ink:#e9ecef;--paper:#14171b;--soft:#1f242a;
--line:#3a424c;--quiet:#aab3be;--warn:#f2a65a}}
*{box-sizing:border-box}
html{color-scheme:light dark}
body{font:16px/1.5 system-ui,sans-serif;max-width:54rem;margin:0 auto;padding:1.5rem 1rem 4rem;
color:var(--ink);background:var(--paper);overflow-wrap:anywhere}
h1{font-size:1.35rem;margin:0 0 .5rem;overflow-wrap:anywhere}
h2{font-size:1.15rem;margin:2.6rem 0 .6rem;padding-top:.8rem;border-top:1px solid var(--line)}
h3{font-size:1rem;margin:1.4rem 0 .4rem}
p{margin:.5rem 0}
.verdict{font-size:1.2rem;line-height:1.45;margin:.3rem 0 1rem}
.warning{border-left:4px solid var(--warn);padding:.3rem .8rem;background:var(--soft)}
.quiet,text.quiet{color:var(--quiet);fill:var(--quiet)}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(9.5rem,1fr));gap:.6rem;
margin:1rem 0;padding:0;list-style:none}
.tiles li{background:var(--soft);border-radius:8px;padding:.6rem .8rem}
.tiles b{display:block;font-size:1.35rem;font-variant-numeric:tabular-nums}
.tiles span{font-size:.85rem;color:var(--quiet);display:block}
.wide{overflow-x:auto}
.wide:focus-visible{outline:3px solid #0072b2;outline-offset:2px}
table{border-collapse:collapse;font-size:.92rem;overflow-wrap:break-word}
th,td{padding:.3rem 1rem .3rem 0;text-align:left;vertical-align:top}
th{color:var(--quiet);font-weight:600}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}
td:first-child,th:first-child{min-width:7rem}
tr+tr{border-top:1px solid var(--line)}
code,pre{background:var(--soft);border-radius:4px;padding:.1rem .3rem;overflow-wrap:anywhere}
pre{padding:.7rem;white-space:pre-wrap}
summary{cursor:pointer;color:var(--quiet)}
.sample{background:var(--soft);border-radius:8px;padding:.5rem .8rem;margin:.5rem 0}
.sample span{display:inline-block;margin-right:.9rem}
.switch{margin:.4rem 0}
.switch>input{position:absolute;opacity:0}
.switch>label{display:inline-block;padding:.25rem .8rem;margin:0 .3rem .4rem 0;cursor:pointer;
border:1px solid var(--line);border-radius:999px;font-size:.9rem}
.switch>input:checked+label{background:var(--ink);color:var(--paper)}
.switch>input:focus-visible+label{outline:3px solid #0072b2;outline-offset:2px}
.switch>.panel{display:none}
.legend{list-style:none;padding:0;margin:.2rem 0;display:flex;flex-wrap:wrap;gap:.2rem 1.2rem;
font-size:.9rem}
.legend li{display:flex;align-items:center;gap:.4rem;overflow-wrap:anywhere}
svg{display:block;width:100%;height:auto;max-width:46rem;font:13px system-ui,sans-serif}
svg.key{width:34px;height:12px;flex:none}
svg text{fill:var(--ink)} svg text.small{font-size:11.5px} svg text.quiet{fill:var(--quiet)}
svg text.inked{fill:#fff}
.grid{stroke:var(--line)} .rule{stroke:var(--quiet)} .strong{stroke:var(--ink);stroke-width:2.5}
.mark{stroke:var(--quiet);stroke-dasharray:2 4}
.curve{fill:none;stroke:var(--c);stroke-width:2.4;stroke-linejoin:round}
.band{fill:var(--c);fill-opacity:.18} .dot,.fill{fill:var(--c)}
.soft{fill:var(--c);fill-opacity:.3} .hollow{fill:var(--paper);stroke:var(--c);stroke-width:2}
.front{fill:none;stroke:var(--quiet);stroke-width:1.5;stroke-dasharray:6 4}
.branch{fill:none;stroke:var(--quiet);stroke-opacity:.6} .outline{fill:none;stroke:var(--line)}
.card{fill:var(--soft);stroke:var(--line)} .arc{fill:none;stroke:#d55e00;stroke-opacity:.75}
.arrow{fill:#d55e00}
.signs{display:grid;grid-template-columns:1fr 1fr;gap:2.5rem;margin-top:3rem}
.signs p{border-top:1px solid var(--ink);padding-top:.3rem;font-size:.85rem}
@media (max-width:600px){body{font-size:15px}.verdict{font-size:1.08rem}
svg{font-size:19px}svg text.small{font-size:16px}th,td{padding-right:.7rem}}
@media print{:root{--ink:#000;--paper:#fff;--soft:#f3f3f3;--line:#bbb;--quiet:#444;--warn:#000}
body{max-width:none;padding:0;font-size:11pt}h2{break-after:avoid;margin-top:1.2rem}
svg,table,.tiles,.sample{break-inside:avoid}.switch>label{display:none}
.switch>input:checked+label{display:inline-block;border:0;background:none;color:#000;padding:0}
details>summary{display:none}.screen{display:none}*{print-color-adjust:exact;
-webkit-print-color-adjust:exact}@page{margin:12mm}
.sheet{font-size:7.8pt;line-height:1.25}.sheet .verdict{font-size:10pt;margin:.2rem 0}
.sheet h1{font-size:12pt}.sheet h2{font-size:9.5pt;margin:.35rem 0 .1rem;padding-top:.15rem}
.sheet p{margin:.15rem 0}.sheet ul{margin:.1rem 0;padding-left:1.1rem}.sheet h2{overflow:hidden}
.sheet svg{float:right;width:7.5cm;margin-left:.6rem}
.sheet table{font-size:7.6pt}.sheet td,.sheet th{padding:.08rem .8rem .08rem 0}
.sheet .signs{margin-top:1.2rem}.sheet .signs p{font-size:7.8pt}}
"""
    + _COLOURS
    + _SHADES
).strip()
# Scripts, styles from elsewhere, pictures, fonts, frames: nothing may be fetched.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


# By which a page of fedlm is known when another one is to take its place.
OPENING = (
    "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
    f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
)


def document(title: str, parts: Iterable[str], kind: str = "") -> str:
    """Return a whole page; one of the kind `sheet` is printed on one sheet of paper."""
    head = (
        "<meta name='viewport' content='width=device-width,initial-scale=1'>"
        "<meta name='color-scheme' content='light dark'>"
        f"<title>{escape(title)}</title><style>{STYLE}</style>"
    )
    body = "\n".join(part for part in parts if part)
    opened = f"<main class='{kind}'>" if kind else "<main>"
    return f"{OPENING}{head}</head><body>{opened}{body}</main></body></html>\n"


def write_page(path: Path, page: str) -> None:
    """Write a page where there is none, or an earlier one; refuse any other file."""
    if path.is_file():
        with open(path, "rb") as file:
            before = file.read(len(OPENING))
        require(
            before in (b"", OPENING.encode()),
            "--out",
            str(path),
            "a new file, or a page that fedlm has written",
        )
    write_atomically(path, page.encode())


def heading(title: str) -> str:
    """Return the title of a section."""
    return f"<h2>{escape(title)}</h2>"


def paragraph(said: str, kind: str = "") -> str:
    """Return a paragraph of plain text."""
    return f"<p class='{kind}'>{escape(said)}</p>" if kind else f"<p>{escape(said)}</p>"


def bullets(lines: Iterable[object]) -> str:
    """Return a list of plain sentences."""
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f"<ul>{items}</ul>" if items else ""


def tiles(facts: Sequence[tuple[str, str]]) -> str:
    """Return the few numbers that are read first, each with its meaning below it."""
    items = "".join(f"<li><b>{escape(v)}</b><span>{escape(k)}</span></li>" for v, k in facts)
    return f"<ul class='tiles'>{items}</ul>"


def table(head: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    """Return a table with numbers aligned to the right."""
    body = [list(row) for row in rows]

    def is_number(value: object) -> bool:
        return isinstance(value, (int, float)) and not isinstance(value, bool)

    def cell(value: object) -> str:
        if value is None:
            return f"<td class='n'>{NOTHING}</td>"
        if is_number(value):
            return f"<td class='n'>{escape(number(value))}</td>"
        return f"<td>{escape(value)}</td>"

    right = [any(is_number(row[i]) for row in body if i < len(row)) for i in range(len(head))]
    top = "".join(
        f"<th scope='col'{' class=n' if n else ''}>{escape(h)}</th>"
        for h, n in zip(head, right, strict=True)
    )
    lines = "".join("<tr>" + "".join(cell(v) for v in row) + "</tr>" for row in body)
    # On a narrow screen it is scrolled by itself, with keys too.
    named = escape(f"table of {', '.join(head)}")
    return (
        f"<div class='wide' role='group' tabindex='0' aria-label='{named}'><table><thead>"
        f"<tr>{top}</tr></thead><tbody>{lines}</tbody></table></div>"
    )


def switch(group: str, panels: Sequence[tuple[str, str]]) -> str:
    """Return panels of which one is shown, chosen by buttons above them, without a script."""
    if len(panels) == 1:
        return panels[0][1]
    rules = "".join(
        f"#{group}-{i}:checked~.{group}-{i}{{display:block}}" for i in range(len(panels))
    )
    buttons = "".join(
        f"<input type='radio' name='{group}' id='{group}-{i}'{' checked' if i == 0 else ''}>"
        f"<label for='{group}-{i}'>{escape(name)}</label>"
        for i, (name, _) in enumerate(panels)
    )
    shown = "".join(
        f"<div class='panel {group}-{i}'>{body}</div>" for i, (_, body) in enumerate(panels)
    )
    return (
        f"<style>{rules}</style><div class='switch' role='group' aria-label='axis'>{buttons}{shown}"
        "</div>"
    )


def folded(title: str, body: str) -> str:
    """Return a part that is shown when it is asked for."""
    return f"<details><summary>{escape(title)}</summary>{body}</details>" if body else ""
