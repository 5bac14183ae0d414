"""A run is composed: its recipe is a value in headers, and nobody asks of which kind a part is."""

import ast
import re
from pathlib import Path

import fedlm

SRC = Path(fedlm.__file__).parent
FILES = [SRC / "run.py", SRC / "inference.py", *sorted((SRC / "training").glob("*.py"))]
# They write facts of the beginning, before the first round: the journal's header, `lineage.json`.
HEADERS = {"promised", "_begin_lineage"}
WHOLE = {"model_dump", "model_dump_json"}


def readers(source):
    """The functions that read a setting of a recipe, or hand the recipe of a run on."""
    whole = ast.parse(source)
    parent = {child: node for node in ast.walk(whole) for child in ast.iter_child_nodes(node)}

    def function_of(node):
        while not isinstance(node, ast.FunctionDef | ast.Module):
            node = parent[node]
        return getattr(node, "name", "")

    found = set()
    for node in ast.walk(whole):
        of_run = isinstance(node, ast.Attribute) and ast.unparse(node).endswith("run.recipe")
        if not of_run and not (isinstance(node, ast.Name) and node.id == "recipe"):
            continue
        names, last = [], node
        while isinstance(parent[last], ast.Attribute):
            last = parent[last]
            names.append(last.attr)
        call = parent[last]
        dumped = isinstance(call, ast.Call) and ast.unparse(call.func) == "dump"
        if names[-1] not in WHOLE if names else of_run and not dumped:
            found.add(function_of(node))
    return found


def test_only_headers_read_settings():
    assert set().union(*(readers(path.read_text(encoding="utf8")) for path in FILES)) == HEADERS


def test_the_check_notices_a_setting_that_is_read():
    for line in (
        "run.recipe.run.trackers",
        "self.run.recipe.privacy.epsilon",
        "recipe.server.rounds",
        "settings = run.recipe",
        "write(path, run.recipe)",
    ):
        assert readers(f"def played(run, recipe):\n    {line}") == {"played"}, line
    for line in ("dump(run.recipe)", "run.recipe.model_dump(mode='json')", "run.record.recipe"):
        assert not readers(f"def played(run, recipe):\n    {line}"), line


def test_nothing_that_makes_parts_is_imported():
    wanted = {"fedlm.recipe.settings"}  # TOML
    for path in FILES:
        nodes = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.ImportFrom)]
        modules = {n.module for n in nodes if (n.module or "").startswith("fedlm.recipe")}
        assert modules <= wanted, path.name


def test_nobody_asks_of_which_kind_a_part_is():
    """Who carries a run out asks its parts: protocols in `run.py` and `core/types.py`."""
    kinds = re.compile(r"(Round|Engine|Evaluation|Spec)$")
    asked = []
    for room in ("run.py", "training", "federation", "engine", "deploy", "record", "cli"):
        for path in sorted([SRC / room] if room.endswith(".py") else (SRC / room).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf8"))):
                if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance":
                    names = re.findall(r"\w+", ast.unparse(node.args[1]))
                    asked += [(path.name, name) for name in names if kinds.search(name)]
    assert not asked
