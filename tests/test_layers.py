"""The direction of imports: rooms do not talk sideways, and data flows one way."""

import ast
import functools
import importlib
import re
import subprocess
import sys
from pathlib import Path

SRC = Path(__file__).parents[1] / "src" / "fedlm"
STATIONS = {
    "corpus",
    "cohort",
    "models",
    "local",
    "privacy",
    "wire",
    "server",
    "evaluate",
    "record",
}
BELOW = {"core", "methods", "secure", "federation", "engine"} | STATIONS
MAY_IMPORT = {
    "core": {"core"},
    **{room: {"core", room} for room in STATIONS},
    "methods": {"core", "local", "methods"},
    # Sums of packed integers under masks; it knows nothing of models, rounds or noise.
    "secure": {"core", "wire", "secure"},
    "federation": {
        "core",
        "cohort",
        "evaluate",
        "local",
        "privacy",
        "secure",
        "server",
        "federation",
    },
    "engine": {"core", "cohort", "evaluate", "federation", "secure", "engine"},
    # `run` names the parts of a run; `recipe` makes them.
    "run.py": {"core", "corpus", "federation", "models", "privacy", "record"},
    "recipe": {"recipe", "run"} | BELOW,
    # `training` carries a run out, `api` and `search` make and train runs; above are only doors.
    "inference.py": {"core", "recipe"} | STATIONS,
    # `lineage` reads what runs left in their directories and stores.
    "lineage.py": {"core", "corpus", "privacy", "record"},
    # `publish` makes what others get of a finished run: pages, a statement, a model's files.
    "publish": {"core", "inference", "lineage", "recipe", "publish"} | STATIONS,
    "training": {"inference", "lineage", "publish", "recipe", "run", "training"} | BELOW,
    # `personal` makes models of single members from a finished run.
    "personal": {"inference", "lineage", "recipe", "run", "training", "personal"} | BELOW,
    # `search` makes and trains many runs.
    "search": {"inference", "lineage", "personal", "recipe", "run", "training", "search"} | BELOW,
    "api.py": {"inference", "lineage", "publish", "recipe", "run", "training"} | BELOW,
    "__init__.py": {"api", "models", "run", "recipe"} | BELOW,
    # The live page: it reads what runs leave, asks their models, and starts `fedlm ... --resume`.
    "watch": {"core", "inference", "record", "watch"},
    # The two doors: `deploy` for processes, `cli` for people, who start those processes.
    "deploy": {"inference", "recipe", "run", "training", "deploy"} | BELOW,
    "cli": {"inference", "lineage", "publish", "recipe", "run", "training"}
    | {"personal", "search", "deploy", "watch", "cli"}
    | BELOW,
}
FILES = sorted(SRC.rglob("*.py"))


def room_of(path):
    return path.relative_to(SRC).parts[0]


@functools.cache
def parsed(path):
    return ast.parse(path.read_text(encoding="utf8"))


def imported(path):
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("fedlm"):
            names = (
                [node.module] if node.module != "fedlm" else [f"fedlm.{a.name}" for a in node.names]
            )
            yield from (n.split(".")[1] for n in names)
        elif isinstance(node, ast.Import):
            yield from (a.name.split(".")[1] for a in node.names if a.name.startswith("fedlm."))


def test_a_room_imports_only_what_it_may():
    wrong = {
        str(path.relative_to(SRC)): sorted(set(imported(path)) - MAY_IMPORT[room_of(path)])
        for path in FILES
    }
    assert not {path: rooms for path, rooms in wrong.items() if rooms}


def test_every_module_says_what_it_is():
    assert not [path for path in FILES if not ast.get_docstring(parsed(path))]


def test_every_module_can_be_imported():
    for path in FILES:
        parts = path.relative_to(SRC.parent).with_suffix("").parts
        importlib.import_module(".".join(parts).removesuffix(".__init__"))


STAGES = (
    # what is imported, one after the other, and what that must not load
    (("fedlm",), {"dp_accounting", "flwr", "h5py", "jax_privacy", "pandas", "scipy"}),
    (("fedlm",), {"typer"}),
    # A plan, its noise and the command line need no accountant.
    (
        ("fedlm.privacy.account", "fedlm.privacy.correlated", "fedlm.cli.main"),
        {"dp_accounting", "jax_privacy", "scipy", "flwr"},
    ),
    # What a node and a server do could run over another transport.
    (
        (
            "fedlm.engine.remote",
            "fedlm.engine.dispatch",
            "fedlm.deploy.node_worker",
            "fedlm.deploy.relay",
        ),
        {"flwr"},
    ),
)


def test_importing_stays_light():
    """In one process, because each costs two seconds: what is loaded early is loaded later too."""
    code = "import importlib, sys\n"
    for modules, _ in STAGES:
        code += f"for m in {modules}: importlib.import_module(m)\n"
        code += "print(*{m.split('.')[0] for m in sys.modules})\n"
    told = subprocess.check_output([sys.executable, "-c", code], text=True).splitlines()
    for (modules, never), loaded in zip(STAGES, told, strict=True):
        assert never.isdisjoint(loaded.split()), modules


def test_only_keys_draw_randomness():
    """Law 9: no code path draws except through a key that names purpose, round and member."""
    banned = ("np.random.seed", "np.random.default_rng", "import random", "jr.key(", "PRNGKey(")
    for path in FILES:
        if path.name == "keys.py":
            continue
        text = path.read_text(encoding="utf8")
        found = [b for b in banned if b in text]
        # Shapes are found by tracing with a key whose value is never used.
        assert not found or (path.name == "catalog.py" and found == ["jr.key("]), (path, found)


def test_every_name_is_defined():
    """Shapes in strings are no names, so the linter's own rule is off; here they are left out."""
    options = ["check", "--isolated", "--select", "F821", "--output-format", "concise"]
    found = subprocess.run(
        [sys.executable, "-m", "ruff", *options, str(SRC)],
        capture_output=True,
        text=True,
    ).stdout
    undefined = []
    for line in found.splitlines():
        place = re.match(r"(.+?):(\d+):(\d+): F821", line)
        if place is None:
            continue
        text = Path(place[1]).read_text(encoding="utf-8").splitlines()[int(place[2]) - 1]
        if text[: int(place[3]) - 1].count('"') % 2 == 0:  # not inside a string
            undefined.append(line)
    assert not undefined
