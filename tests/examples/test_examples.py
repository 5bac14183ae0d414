"""The examples run as written, with few rounds."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


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
