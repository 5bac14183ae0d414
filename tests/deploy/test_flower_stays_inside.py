"""Every import of flwr is in deploy/flower, and only a connection loads it."""

import ast
from pathlib import Path

import fedlm

SRC = Path(fedlm.__file__).parent
OUTSIDE = [p for p in sorted(SRC.rglob("*.py")) if SRC / "deploy" / "flower" not in p.parents]


def imported(path):
    text = path.read_text(encoding="utf8")
    if "flwr" not in text:  # no need to parse it
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def test_nothing_else_imports_flwr():
    names = {str(p.relative_to(SRC)): {n.split(".")[0] for n in imported(p)} for p in OUTSIDE}
    assert [name for name, modules in names.items() if "flwr" in modules] == []
