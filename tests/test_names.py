"""Every name in the code has a meaning.

Shapes in annotations (`Float[Array, "batch seq"]`) look like names that nobody defined, so linters
are told to ignore such names everywhere. Here only those inside of strings are.
"""

import ast
import json
import subprocess
import sys
from pathlib import Path

HOUSE = Path(__file__).parents[1]


def strings(tree):
    """Return the places of all strings, as first and last line and column."""
    found = [n for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    return [((n.lineno, n.col_offset), (n.end_lineno, n.end_col_offset)) for n in found]


def undefined(*folders):
    """Return the names that nobody defined, outside of strings."""
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821", "--quiet"]
    done = subprocess.run(
        [*command, "--output-format", "json", *map(str, folders)], capture_output=True, text=True
    )
    found, known = [], {}
    for told in json.loads(done.stdout):
        file, place = told["filename"], told["location"]
        if file not in known:
            known[file] = strings(ast.parse(Path(file).read_text(encoding="utf-8")))
        at = (place["row"], place["column"] - 1)
        if not any(begin <= at < end for begin, end in known[file]):
            found.append(f"{file}:{place['row']}: {told['message']}")
    return found


def test_all_names_are_defined():
    assert undefined(HOUSE / "src", HOUSE / "benchmarks", HOUSE / "tests", HOUSE / "fuzz") == []


def test_a_name_that_nobody_defined_is_found(tmp_path):
    file = tmp_path / "lost.py"
    file.write_text(
        'from jaxtyping import Array, Float\n\n\ndef f(x: Float[Array, "batch"]):\n    return y\n'
    )
    (found,) = undefined(file)
    assert "lost.py:5" in found and "`y`" in found
