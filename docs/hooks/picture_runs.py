"""The runs of the pictures in the documentation: `make pictures` trains those that are missing.

    python docs/hooks/picture_runs.py runs/pictures        # about ten minutes on two cores

Text comes with packages from PyPI: addresses of presidents, and chat ('fedlm[chitchat]').
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
RECIPES = HERE.parents[1] / "recipes"
SMALL = ("data.vocabulary=2000", "model.embedding_size=64", "model.hidden_size=96")
PRIVATE = (
    *SMALL,
    "server.rounds=60",
    "server.evaluate_every=10",
    "server.sampling=poisson",
    "server.cohort=16",
    "privacy.mechanism=gaussian",
    "privacy.clip_norm=0.5",
    "privacy.noise_multiplier=1.5",
    "privacy.delta=1e-4",
    "privacy.canaries=16",
)


def commands(folder: Path) -> dict[Path, list[str]]:
    """Return the command that makes each run, by the file that it leaves last."""
    addresses, chat = (str(RECIPES / name) for name in ("sotu.toml", "chitchat-tree.toml"))
    tree = ("server.rounds=12", "server.evaluate_every=2")
    asked = {
        "cells/report.html": ["sweep", str(HERE / "pictures.toml"), "--out", "cells"],
        "private/summary.json": ["train", addresses, "--out", "private", *changes(PRIVATE)],
        "private/audit.json": ["privacy", "audit", "private"],
        "tree/summary.json": ["train", chat, "--out", "tree", *changes(tree)],
        "demo/simulated/summary.json": ["federation", "demo", "--tree", "--out", "demo"],
    }
    return {folder / last: words for last, words in asked.items()}


def changes(settings: tuple[str, ...]) -> list[str]:
    """Return settings as options of a command."""
    return [word for setting in settings for word in ("--set", setting)]


def main(folder: Path) -> None:
    """Make the runs that are not there."""
    folder.mkdir(parents=True, exist_ok=True)
    for last, words in commands(folder.resolve()).items():
        if not last.is_file():
            print("fedlm", *words)
            subprocess.run([sys.executable, "-m", "fedlm.cli.main", *words], check=True, cwd=folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
