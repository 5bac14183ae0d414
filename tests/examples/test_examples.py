"""The examples run as written, with few rounds."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.models.interop.test_huggingface import write as write_folder
from tests.recipe.test_init_from import words

EXAMPLES = Path(__file__).parents[2] / "examples"
ELSEWHERE = {"onnx_keyboard.py": "record/test_export.py"}  # needs a model that is exported there


def test_every_example_is_run_by_a_test():
    for script in EXAMPLES.glob("*.py"):
        file = Path(__file__).parents[1] / ELSEWHERE.get(script.name, "examples/test_examples.py")
        assert f'"{script.name}"' in file.read_text(encoding="utf-8"), script.name


@pytest.mark.parametrize(
    "script, rounds, words",
    [
        pytest.param(
            "own_text.py",
            2,
            ("round 2: perplexity", "i hope to ...", "report.html"),
            marks=pytest.mark.slow,  # half a minute of compiling
        ),
        pytest.param(
            "private_training.py",
            2,
            ("round 2: perplexity", "epsilon", "- one client with all"),
            marks=pytest.mark.slow,  # it prepares the State of the Union addresses
        ),
        pytest.param(
            "tree.py",
            2,
            ("oslo: perplexity", "cairo: perplexity"),
            marks=pytest.mark.slow,  # half a minute of compiling
        ),
    ],
)
def test_an_example_runs(script, rounds, words, tmp_path):
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / script), str(rounds)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=dict(os.environ),
    )
    assert done.returncode == 0, done.stderr
    for word in words:
        assert word in done.stdout


@pytest.mark.slow
def test_the_demonstration_with_a_model_from_elsewhere_goes_on_where_it_stopped(tmp_path):
    base, text = tmp_path / "base", tmp_path / "text.jsonl"
    write_folder(base, "llama")
    (base / "README.md").write_text("---\ndequantised_from: tiny.gguf\n---\n")
    words().save(str(base / "tokenizer.json"))
    said = "the cat sat\nthe dog ran on the moon\n" * 9
    lines = [json.dumps({"client": f"c{n}", "text": said}) for n in range(80)]
    text.write_text("\n".join(lines))
    command = [sys.executable, str(EXAMPLES / "pretrained.py"), str(tmp_path / "demo"), "--rounds"]
    command += ["2", "--base", str(base), "--text", str(text)]

    def run():
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    done = run()
    assert done.returncode == 0, done.stderr
    assert "noise to signal" in done.stderr and "<- taken" in done.stderr
    for row in ("before", "after", "after, private", "epsilon", "adapters for PEFT", "peak"):
        assert row in done.stdout, row
    assert "made from the GGUF file `tiny.gguf`" in (tmp_path / "demo/peft/README.md").read_text()
    private = json.loads((tmp_path / "demo/private/summary.json").read_text())
    assert 0 < private["epsilon"] <= 8
    again = run()
    assert again.stdout.split("base:")[0] == done.stdout.split("base:")[0]
    assert again.stderr.count("not repeated") == 5
