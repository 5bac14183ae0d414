"""The state of the source, in one table: sizes, classes, imports, names and `Any`.

    python -m benchmarks.house [REVISION]... [--names] [--any]

A column per git revision, then one for the working tree; two revisions of the past are compared by
naming both. Nothing is run or imported: files are read and parsed. `--names` also lists public
names that several modules define, `--any` the modules that say `Any` most often.

    python -m benchmarks.house 0e45d1c
"""

from __future__ import annotations

import argparse
import ast
import io
import statistics
import subprocess
import tarfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
ADAPTER = "deploy/flower/"
RUNS = ("Experiment", "Run")  # the class of a run before and after it was composed
ENGINES = ("Engine", "Starts")
PLAIN_DICTS = ("dict[str, Any]", "Mapping[str, Any]")
Function = ast.FunctionDef | ast.AsyncFunctionDef
Trees = dict[str, tuple[int, ast.Module]]  # module -> its lines, its syntax


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("revisions", nargs="*", help="git revisions to compare with")
    parser.add_argument("--names", action="store_true", help="list names defined more than once")
    parser.add_argument("--any", action="store_true", help="list modules that say Any most often")
    options = parser.parse_args()
    here = parsed(on_disk())
    columns = {name: parsed(of_revision(name)) for name in options.revisions} | {"now": here}
    print(table({name: measures(trees) for name, trees in columns.items()}))
    if options.names:
        for name, modules in sorted(defined_twice(here).items()):
            print(f"{name}: {', '.join(modules)}")
    if options.any:
        counts = Counter({module: any_count(tree) for module, (_, tree) in here.items()})
        for module, count in counts.most_common(40):
            print(f"{count:4} {module}")


def on_disk() -> Iterator[tuple[str, str]]:
    folder = ROOT / "src" / "fedlm"
    for path in sorted(folder.rglob("*.py")):
        yield path.relative_to(folder).as_posix(), path.read_text(encoding="utf8")


def of_revision(revision: str) -> Iterator[tuple[str, str]]:
    command = ["git", "-C", str(ROOT), "archive", revision, "src/fedlm"]
    with tarfile.open(fileobj=io.BytesIO(subprocess.check_output(command))) as archive:
        for member in archive:
            if member.name.endswith(".py") and (file := archive.extractfile(member)) is not None:
                yield member.name.removeprefix("src/fedlm/"), file.read().decode()


def parsed(files: Iterator[tuple[str, str]]) -> Trees:
    return {module: (len(text.splitlines()), ast.parse(text)) for module, text in files}


def measures(trees: Trees) -> dict[str, str]:
    """Measure what the table shows of one state of the source."""
    modules = {module: tree for module, (_, tree) in trees.items()}
    bodies = sorted(body(node) for tree in modules.values() for node in functions(tree))
    inside = [node for tree in modules.values() for node in imports_inside(tree)]
    outside = sum(
        flwr_imports(tree) for module, tree in modules.items() if not module.startswith(ADAPTER)
    )
    return {
        "files": f"{len(trees):,}",
        "lines": f"{sum(lines for lines, _ in trees.values()):,}",
        "functions": f"{len(bodies):,}",
        "median and p90 body of a function, in lines": (
            f"{statistics.median_low(bodies)}, {bodies[int(0.9 * len(bodies))]}"
        ),
        "classes of runs": str(len(runs(modules))),
        "classes of engines": str(len(engines(modules))),
        "imports inside functions": str(len(inside)),
        "imports of flwr outside its adapter": str(outside),
        "public names that several modules define, commands left out": str(
            len(defined_twice(trees))
        ),
        "`Any` in annotations": str(sum(any_count(tree) for tree in modules.values())),
        "names that stand for `Any`, in annotations": str(alias_count(modules)),
    }


def functions(tree: ast.Module) -> Iterator[Function]:
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def body(function: Function) -> int:
    """Count the lines of a function without its signature and docstring."""
    first = function.body[0]
    documented = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    lines = (function.end_lineno or 0) - first.lineno + 1
    return lines - ((first.end_lineno or 0) - first.lineno + 1) * documented


def classes(modules: dict[str, ast.Module]) -> Iterator[tuple[ast.ClassDef, list[str]]]:
    for tree in modules.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                yield node, [ast.unparse(base).split(".")[-1].split("[")[0] for base in node.bases]


def runs(modules: dict[str, ast.Module]) -> set[str]:
    """Name the class of a run and all that inherit from it."""
    found = {node.name for node, bases in classes(modules) if node.name in RUNS and not bases}
    while True:
        more = {node.name for node, bases in classes(modules) if found & set(bases)} - found
        if not more:
            return found
        found |= more


def engines(modules: dict[str, ast.Module]) -> set[str]:
    """Name the classes that are engines, protocols left out."""
    return {
        node.name
        for node, bases in classes(modules)
        if node.name.endswith(ENGINES) and "Protocol" not in bases and not node.name.startswith("_")
    }


def imports_inside(tree: ast.Module) -> list[ast.stmt]:
    return [
        node
        for function in functions(tree)
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]


def flwr_imports(tree: ast.Module) -> int:
    names = [
        name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (
            [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else [alias.name for alias in node.names]
        )
    ]
    return sum(name.split(".")[0] == "flwr" for name in names)


def defined_twice(trees: Trees) -> dict[str, list[str]]:
    """Map each public name that several modules define to those modules."""
    where: dict[str, list[str]] = defaultdict(list)
    for module, (_, tree) in trees.items():
        if module.startswith("cli/"):
            continue  # a command is called as what it does
        for name in set(definitions(tree)):
            if not name.startswith("_"):
                where[name].append(module)
    return {name: modules for name, modules in where.items() if len(modules) > 1}


def definitions(tree: ast.Module) -> Iterator[str]:
    """Name the functions, classes and types at the top of a module; constants are their file's."""
    for node in tree.body:
        if isinstance(node, Function | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [target.id for target in targets if isinstance(target, ast.Name)]
            yield from (name for name in names if name[0].isupper() and not name.isupper())


def any_count(tree: ast.Module) -> int:
    return sum(isinstance(node, ast.Name) and node.id == "Any" for node in ast.walk(tree))


def alias_count(modules: dict[str, ast.Module]) -> int:
    """Count uses of types that are only names for `Any`, as `Params`: words to a reader alone."""
    values = {
        target.id: ast.unparse(node.value)
        for tree in modules.values()
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }
    found = {"Any"}
    while more := {name for name, value in values.items() if value in found} - found:
        found |= more
    found |= {name for name, value in values.items() if value in PLAIN_DICTS}
    return sum(
        isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in found - {"Any"}
        for tree in modules.values()
        for node in ast.walk(tree)
    )


def table(columns: dict[str, dict[str, str]]) -> str:
    """Lay out measures as a Markdown table, a column per state of the source."""
    rows = next(iter(columns.values()))
    lines = [f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    lines += [
        f"| {row} | {' | '.join(column[row] for column in columns.values())} |" for row in rows
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
