"""The run directory: all files of a run in one place.

In:       a path and the resolved recipe as text.
Out:      the places of recipe, journal, checkpoints, weights, tokenizer, report.
Promise:  a directory never mixes two recipes; nothing in it is overwritten by another run.
Not here: the content of those files (their own modules).
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from fedlm.core.errors import RecordError
from fedlm.record.checkpoint import write_atomically


@dataclass(frozen=True)
class RunDirectory:
    """The paths of the files of a run."""

    path: Path

    @property
    def recipe(self) -> Path:
        return self.path / "recipe.toml"

    @property
    def journal(self) -> Path:
        return self.path / "journal.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def weights(self) -> Path:
        return self.path / "model.safetensors"

    def weights_of(self, node: str) -> Path:
        """Return the path of a node's model, or of the federation's model if the name is empty."""
        # Node names come from the corpus: a slash in a name must not lead to another folder.
        file = f"{quote(node, safe=' ')}.safetensors"
        return self.path / "nodes" / file if node else self.weights

    @property
    def tokenizer(self) -> Path:
        return self.path / "tokenizer.json"

    @property
    def special_tokens(self) -> Path:
        """The names of the tokenizer's special tokens, in a file that Hugging Face reads too."""
        return self.path / "special_tokens_map.json"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    def claim(self, recipe: str, *, resume: bool) -> bool:
        """Take the directory for this recipe, and return True if it holds a run to resume."""
        if not self.path.exists() or (self.path.is_dir() and self._is_bare()):
            self._begin(recipe)
            return False
        if not self.recipe.is_file():
            raise RecordError(f"{self.path} is not a run directory: give another --out.")
        there = self._read_recipe()
        if there != tomllib.loads(recipe):
            raise RecordError(
                f"{self.path} holds another recipe ({difference(there, tomllib.loads(recipe))}): "
                "give another --out."
            )
        if not resume:
            raise RecordError(
                f"{self.path} holds this run already: add --resume to go on, or give another --out."
            )
        return True

    def _is_bare(self) -> bool:
        """Tell whether the directory is empty, or holds only leftovers of a killed first write."""
        return all(entry.name.endswith(".part") for entry in self.path.iterdir())

    def _read_recipe(self) -> dict[str, Any]:
        try:
            return tomllib.loads(self.recipe.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise RecordError(f"{self.recipe} is damaged: {error}. Give another --out.") from None

    def _begin(self, recipe: str) -> None:
        write_atomically(self.recipe, recipe.encode())

    def finished(self) -> RunDirectory:
        """Return the directory itself, or refuse if the run has not finished."""
        if not self.weights.is_file():
            raise RecordError(
                f"{self.path} holds no trained model yet: finish it with "
                f"fedlm train {self.recipe} --out {self.path} --resume."
            )
        return self

    @classmethod
    def existing(cls, path: Path) -> RunDirectory:
        """Return the directory at a path, or refuse if it holds no run."""
        found = cls(Path(path))
        if not found.recipe.is_file():
            raise RecordError(f"{path} is not a run directory: it has no recipe.toml.")
        return found


def adapter_beside(weights: Path) -> Path:
    """Return the path of the adapters of a model, beside its weights.

    >>> adapter_beside(Path("run/model.safetensors")).name
    'model.adapter.safetensors'
    """
    return weights.with_suffix(".adapter.safetensors")


def difference(there: dict[str, Any], here: dict[str, Any]) -> str:
    """Describe the first setting in which two recipes differ."""
    for table in sorted(there.keys() | here.keys()):
        a, b = there.get(table, {}), here.get(table, {})
        for name in sorted(a.keys() | b.keys()):
            if a.get(name) != b.get(name):
                return f"{table}.{name} is {a.get(name)!r} there and {b.get(name)!r} here"
    return "no setting differs"


def free_path(root: Path, stem: str) -> Path:
    """Return the first of `root/stem`, `root/stem-2`, `root/stem-3`, ... that does not exist."""
    number, path = 1, root / stem
    while path.exists():
        number += 1
        path = root / f"{stem}-{number}"
    return path


def newest_path(root: Path, stem: str) -> Path:
    """Return the last of `root/stem`, `root/stem-2`, ... that exists, else `root/stem`."""
    number, path = 1, root / stem
    while (root / f"{stem}-{number + 1}").exists():
        number += 1
        path = root / f"{stem}-{number}"
    return path
