"""Commands and Python of README and quickstart run as they stand there, on text made here."""

import contextlib
import gzip
import importlib.util
import json
import re
import shlex
import shutil
from pathlib import Path

import pytest

from tests.conftest import RECIPE, call

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
QUICKSTART = (ROOT / "docs/index.md").read_text(encoding="utf-8")
pytestmark = pytest.mark.slow  # whole runs


def block(heading: str, language: str = "", page: str = README) -> str:
    """Return the first fenced block under a heading."""
    section = page.split(f"## {heading}\n", 1)[1]
    found = re.search(rf"^```{language}\n(.*?)^```$", section, re.M | re.S)
    return found.group(1)


def commands(heading: str) -> list[list[str]]:
    """Return the arguments of every fedlm command in a block, without comments."""
    lines = [line.split("   #")[0].split("    #")[0] for line in block(heading).splitlines()]
    words = [shlex.split(line) for line in lines if line.strip()]
    assert words and all(each[0] == "fedlm" for each in words)
    return [each[1:] for each in words]


@pytest.fixture
def letters(tmp_path):
    with gzip.open(tmp_path / "letters.jsonl.gz", "wt", encoding="utf-8") as file:
        for number in range(12):
            text = "i hope to see you soon\nthe cat sat on the mat\n" * (3 + number % 3)
            file.write(json.dumps({"client": f"c{number}", "text": text}) + "\n")
    return tmp_path


def test_your_own_text(letters):
    recipe = RECIPE.replace('source = "tiny.jsonl"\nvocabulary = 60\n', "")
    (letters / "recipe.toml").write_text(recipe, encoding="utf-8")
    for words in commands("Your own text"):
        if words[0] == "report":  # it compares with a run that the reader already has
            other = ["train", "recipe.toml", "--set", "data.store=stores/letters"]
            assert call(letters, *other, "--set", "run.seed=1", "--out", "runs/other").code == 0
        done = call(letters, *words)
        assert done.code == 0, (words, done.stderr)
    assert (letters / "compare.html").is_file()
    assert list(letters.glob("runs/letters/**/*.onnx")) or list(letters.glob("**/*.onnx"))


def test_from_python(letters):
    readme = block("From Python", "python")
    quickstart = block("Use it from Python", "python", QUICKSTART)
    small = {"hidden_size=256": "hidden_size=8", "rounds=500": "rounds=2", "cohort=50": "cohort=5"}
    for number, code in enumerate({readme, quickstart}):  # one, as long as they are the same
        for written, used in small.items():
            assert written in code
            code = code.replace(written, used)
        folder = letters / f"page{number}"
        folder.mkdir()
        shutil.copy(letters / "letters.jsonl.gz", folder)
        with contextlib.chdir(folder):
            exec(compile(code, "page", "exec"), {})
        assert (folder / "out/model.safetensors").is_file()


def test_privacy(tmp_path):
    calibrate, train, epsilon = commands("Privacy")
    assert call(tmp_path, *calibrate).code == 0
    if importlib.util.find_spec("chitchat_dataset") is None:
        pytest.skip("the private recipe wants the chitchat extra, which is not installed")
    train[1] = str(Path(__file__).parents[2] / train[1])
    done = call(tmp_path, *train, "--set", "server.rounds=2")
    assert done.code == 0, done.stderr
    assert call(tmp_path, *epsilon).code == 0
