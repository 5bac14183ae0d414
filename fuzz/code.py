"""Tell which code a target of the fuzzer runs, so that its result counts only for that code.

In:       the sources in `src/`, `fuzz/targets.py` and `fuzz/run.py`.
Out:      a hash per target.
Promise:  the hash covers the runner, the target with all that it uses of `fuzz/targets.py`, and
          every module of fedlm that can be reached from there by imports, also those inside
          functions, loaded late or run as a process, with the data beside them. A change of any
          of them makes earlier results void; a change of a command or of another parser does not.
          Of a target that `fuzz/targets.py` does not have, it covers everything.
Not here: results (`fuzz/run.py`).

The package's own `__init__` is left out, unless a module takes a name from it: it imports
everything for users of Python, and nothing that a parser does comes from there. Libraries are left
out too: `constraints.txt` says which were meant, and a new one is a reason for `--again`.
"""

from __future__ import annotations

import ast
import copy
import functools
import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

HERE = Path(__file__).parent
PACKAGE = "fedlm"


@functools.cache
def modules(src: Path) -> dict[str, Path]:
    """Return the file of every module in a folder of sources."""
    found = {}
    for path in sorted(src.rglob("*.py")):
        parts = path.relative_to(src).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(tree: ast.AST, src: Path) -> Iterator[str]:
    """Yield the modules of fedlm that a piece of code imports, anywhere in it."""
    known = modules(src)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name in known)
        elif isinstance(node, ast.ImportFrom):
            for name in node.names:
                inner = f"{node.module}.{name.name}"
                if inner in known or node.module in known:
                    yield inner if inner in known else str(node.module)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            # A module that is loaded late (`core/late.py`), or a file that is run as a process.
            if node.value in known and node.value != PACKAGE:
                yield node.value
            elif node.value.endswith(".py"):
                yield from (name for name, path in known.items() if path.name == node.value)


def reached(start: Iterable[str], src: Path) -> set[str]:
    """Return modules and all that they import, directly or not, with the packages they are in."""
    known, seen, left = modules(src), set[str](), list(start)
    while left:
        name = left.pop()
        if name in seen:
            continue
        seen.add(name)
        outer = name.rpartition(".")[0]
        if outer and outer != PACKAGE:
            left.append(outer)
        left += _imports_of(known[name].read_bytes(), src)
    return seen


@functools.cache
def _imports_of(raw: bytes, src: Path) -> tuple[str, ...]:
    return tuple(imported(ast.parse(raw), src))


@functools.cache
def _parsed(raw: bytes) -> ast.Module:
    return ast.parse(raw)


def used(name: str, path: Path) -> list[ast.AST] | None:
    """Return the parts of a file of targets that a target uses, or None if it is not there."""
    defined: dict[str, list[ast.AST]] = {}
    targets: dict[str, ast.AST] = {}
    for line in _parsed(path.read_bytes()).body:
        for bound, part in _bound(line):
            defined.setdefault(bound, []).append(part)
            if bound == "TARGETS" and isinstance(table := getattr(line, "value", None), ast.Dict):
                pairs = zip(table.keys, table.values, strict=True)
                targets = {str(k.value): v for k, v in pairs if isinstance(k, ast.Constant)}
    if name not in targets:
        return None
    found: list[ast.AST] = []
    left: list[ast.AST] = [targets[name]]
    while left:
        node = left.pop()
        if node in found:
            continue
        found.append(node)
        names = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
        left += [other for each in sorted(names) for other in defined.get(each, [])]
    return sorted(found, key=lambda node: (node.lineno, node.col_offset))  # type: ignore[attr-defined]


def _bound(node: ast.stmt) -> Iterator[tuple[str, ast.AST]]:
    """Yield the names that a statement of a module binds, each with the part that binds it."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        for name in node.names:
            one = copy.copy(node)
            one.names = [name]
            yield (name.asname or name.name).split(".")[0], one
    elif isinstance(node, ast.FunctionDef | ast.ClassDef):
        yield node.name, node
    else:  # an assignment, also to a part of a value; of other statements every name
        places = getattr(node, "targets", [getattr(node, "target", node)])
        walked = (part for place in places for part in ast.walk(place))
        yield from ((part.id, node) for part in walked if isinstance(part, ast.Name))


def fingerprint(name: str, root: Path = HERE.parent) -> str:
    """Return the hash of all code that a target runs.

    >>> fingerprint("signatures") == fingerprint("recipe")
    False
    """
    src, fuzz = root / "src", root / "fuzz"
    known, parts = modules(src), used(name, fuzz / "targets.py")
    found = hashlib.sha256()
    if parts is None:
        paths = [*known.values(), *sorted(fuzz.glob("*.py"))]
    else:
        start = {module for part in parts for module in imported(part, src)}
        paths = [known[module] for module in sorted(reached(start, src))]
        beside = (p for folder in {path.parent for path in paths} for p in folder.iterdir())
        paths += sorted(p for p in beside if p.is_file() and p.suffix != ".py")  # data of modules
        paths.append(fuzz / "run.py")
        found.update("\n".join(ast.unparse(part) for part in parts).encode())
    for path in paths:
        found.update(path.read_bytes())
    return found.hexdigest()[:16]
