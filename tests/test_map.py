"""The map is true: every module and function that docs/map.md names is there."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src" / "fedlm"
MAP = (ROOT / "docs" / "map.md").read_text(encoding="utf8")
ROOMS = {path.name for path in SRC.iterdir() if path.is_dir()} | {"lineage"}


def rows(title):
    """The second column of the tables under a heading."""
    section = MAP.split(f"\n## {title}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if re.match(r"\| (?!step|file|---)", line)]
    return [line.split(" | ")[1] for line in lines]


def defined(file):
    """All names that a module defines, methods and fields included."""
    nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf8"))))
    names = {n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    return names | {n.id for n in nodes if isinstance(n, ast.Name)}


def is_there(name):
    """Whether `room.module`, or `room.module.name`, or `room.*.name` is in the package."""
    room, *rest = name.split(".")
    if not rest:
        return (SRC / room).is_dir() or (SRC / f"{room}.py").is_file()
    if rest[0] == "*":
        return any(rest[1] in defined(file) for file in (SRC / room).glob("*.py"))
    for depth in range(len(rest), -1, -1):
        path = SRC.joinpath(room, *rest[:depth])
        file = path if path.is_dir() else path.with_suffix(".py")
        if file.exists():
            left = rest[depth:]
            return not left or (file.is_file() and set(left) <= defined(file))
    return False


def test_the_journeys_name_what_is_there():
    titles = ("A round, as flowing data", "A private round", "A round of a tree")
    for title in (*titles, "A round over a network"):
        named = [n for row in rows(title) for n in re.findall(r"`([a-z_]+(?:\.[\w*]+)+)`", row)]
        assert len(named) >= 5, title
        missing = [n for n in named if n.split(".")[0] in ROOMS and not is_there(n)]
        assert not missing, (title, missing)
        unknown = [n for n in named if n.split(".")[0] not in ROOMS]
        assert not unknown, (title, unknown)


def test_the_check_notices_what_is_not_there():
    assert is_there("federation.tree_round.down") and is_there("engine.*.total")
    assert not is_there("federation.tree_round.sideways") and not is_there("engine.sending")


def test_the_registries_of_how_to_add_are_there():
    told = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf8")
    found = re.findall(r"((?:`[A-Z_]+`(?:, )?)+) of `([\w/]+\.py)`", told)
    assert len(found) >= 15
    for names, module in found:
        folder = ROOT if module.startswith("fuzz/") else SRC
        assert set(re.findall(r"[A-Z_]+", names)) <= defined(folder / module), module


def test_every_room_has_its_promise():
    table = MAP.split("| room | promise")[1].split("\n\n")[0]
    told = {Path(link).stem for link in re.findall(r"\]\(\.\./src/fedlm/([\w.]+)\)", table)}
    rooms = {p.name for p in SRC.iterdir() if p.is_dir() and (p / "__init__.py").is_file()}
    modules = {p.stem for p in SRC.glob("*.py")} - {"__init__"}
    assert rooms | modules <= told, rooms | modules - told
