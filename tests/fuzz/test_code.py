"""A result of the fuzzer counts as long as the code of its target is what it was, and no longer."""

from pathlib import Path

import pytest

from fuzz.code import fingerprint, imported, modules, reached, used
from fuzz.targets import TARGETS

ROOT = Path(__file__).parents[2]
TREE = {
    "src/fedlm/__init__.py": "from fedlm.command import run",
    "src/fedlm/command.py": "from fedlm.letters import read\ndef run(): ...",
    "src/fedlm/letters.py": "from fedlm.core import text\ndef read(data): return text.plain(data)",
    "src/fedlm/stamps.py": "def read(data):\n    from fedlm.ink import colour\n    colour(data)",
    "src/fedlm/ink.py": "print = late('fedlm.press')\nMILL = 'mill.py'",
    "src/fedlm/press.py": "",
    "src/fedlm/mill.py": "",
    "src/fedlm/core/__init__.py": "",
    "src/fedlm/core/text.py": "def plain(data): return data",
    "src/fedlm/core/words.txt": "a",
    "fuzz/run.py": "",
    "fuzz/targets.py": """
from fedlm import letters, stamps
SEEDS = {}
SEEDS["letters"] = b"dear"
SEEDS |= {}
STAMP = b"1d"
def letter(): return letters.read, SEEDS
def stamp(): return stamps.read, STAMP
TARGETS: dict = {"letter": letter, "stamp": stamp}
""",
}


@pytest.fixture
def tree(tmp_path):
    for name, text in TREE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    "changed, void",
    [
        ("src/fedlm/letters.py", {"letter"}),
        ("src/fedlm/core/text.py", {"letter"}),  # imported by the parser
        ("src/fedlm/core/words.txt", {"letter"}),  # data beside it
        ("src/fedlm/ink.py", {"stamp"}),  # imported in a function
        ("src/fedlm/press.py", {"stamp"}),  # loaded late
        ("src/fedlm/mill.py", {"stamp"}),  # run as a process
        ("src/fedlm/command.py", set()),
        ("src/fedlm/__init__.py", set()),
        ("fuzz/run.py", {"letter", "stamp"}),
    ],
)
def test_a_change_makes_the_results_of_those_who_run_it_void(tree, changed, void):
    before = {name: fingerprint(name, tree) for name in ("letter", "stamp")}
    (tree / changed).write_text(TREE[changed] + "\n# another line")
    modules.cache_clear()
    after = {name: fingerprint(name, tree) for name in ("letter", "stamp")}
    assert {name for name in before if before[name] != after[name]} == void


@pytest.mark.parametrize(
    "old, new, void",
    [
        ('b"dear"', 'b"dearest"', {"letter"}),
        ('b"1d"', 'b"2d"', {"stamp"}),
        ("import letters, stamps", "import letters, stamps, command", set()),
        ("\nSEEDS = {}", "\n\n# why\nSEEDS = {}", set()),
    ],
)
def test_a_change_of_one_target_leaves_the_others(tree, old, new, void):
    before = {name: fingerprint(name, tree) for name in ("letter", "stamp")}
    text = TREE["fuzz/targets.py"]
    assert old in text
    (tree / "fuzz/targets.py").write_text(text.replace(old, new))
    after = {name: fingerprint(name, tree) for name in ("letter", "stamp")}
    assert {name for name in before if before[name] != after[name]} == void


def test_code_of_a_target_that_is_not_listed_is_everything(tree):
    before = fingerprint("other", tree)
    (tree / "src/fedlm/command.py").write_text("")
    assert fingerprint("other", tree) != before


def test_every_target_reaches_its_parser_and_no_command():
    src = ROOT / "src"
    parsers = {
        "recipe": "recipe.settings",
        "clients": "corpus.store",
        "hdf5": "corpus.hdf5_worker",
        "gguf": "models.interop.gguf",
        "flower-message": "deploy.flower.pull",
        "parcels": "deploy.flower.parcels",
        "secure-sums": "secure.shamir",
        "frames": "wire.frame",
        "signatures": "deploy.signing",
    }
    for name in TARGETS:
        parts = used(name, ROOT / "fuzz" / "targets.py")
        found = reached({m for part in parts for m in imported(part, src)}, src)
        assert f"fedlm.{parsers.get(name, 'core.errors')}" in found
        assert not any(module.startswith("fedlm.cli") for module in found)
