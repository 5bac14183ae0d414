"""Benchmarks are run by hand and rarely: what they name in the package must still be there."""

import ast
import importlib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "benchmarks").rglob("*.py"))


def names_of(text):
    """`(module, name)` for all that a file takes from the package, also through a module's name."""
    nodes, modules = list(ast.walk(ast.parse(text))), {}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "fedlm":
            for alias in node.names:
                yield node.module, alias.name
                modules[alias.asname or alias.name] = (node.module, alias.name)
    for node in (node for node in nodes if isinstance(node, ast.Attribute)):
        of = getattr(node.value, "id", None)
        if of in modules and isinstance(found := found_in(*modules[of]), ModuleType):
            yield found.__name__, node.attr


def found_in(home, name):
    module = importlib.import_module(home)
    if hasattr(module, name):
        return getattr(module, name)
    try:
        return importlib.import_module(f"{home}.{name}")
    except ModuleNotFoundError:
        return None


def missing(text):
    return {each for each in names_of(text) if found_in(*each) is None}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_a_benchmark_names_is_there(path):
    assert not missing(path.read_text())


def test_a_name_that_is_gone_is_found():
    text = "from fedlm.models import loss, gone\nfrom fedlm.core import keys as k\n"
    text += "loss.LOSSES, loss.SIZES, k.key_for, k.x"
    assert missing(text) == {
        ("fedlm.models", "gone"),
        ("fedlm.models.loss", "SIZES"),
        ("fedlm.core.keys", "x"),
    }
