"""A model and what belongs to it as a run directory of its own.

In:       a model, the recipe under which it can be judged, where its tokenizer is, facts.
Out:      a directory that `predict`, `evaluate`, `export` and `fedlm.load_run` take.
Promise:  the recipe is written last, so that the directory is a run only once it is whole; it
          claims nothing of its own: a privacy claim is that of the run which made the model.
Not here: runs that are trained in their directory (`carry_out.py`), sending models to nodes
          (`deploy`).
"""

from __future__ import annotations

import platform
from importlib.metadata import version
from pathlib import Path

from fedlm.core import tree
from fedlm.core.documents import JsonMapping
from fedlm.core.durable import write_atomically
from fedlm.core.types import Params
from fedlm.corpus.store import Store
from fedlm.corpus.tokenizer_file import special_tokens_map
from fedlm.models.adapters import factors, merged, without_adapters
from fedlm.privacy.plan import PrivacyPlan
from fedlm.privacy.release import release
from fedlm.recipe.settings import Recipe, dump
from fedlm.record import checkpoint
from fedlm.record.directory import RunDirectory, adapter_beside
from fedlm.record.journal import Journal, dumps
from fedlm.run import Run

NOTHING_TOLD = {"perplexity": None, "accuracy": None}


def write_trained(run: Run, path: Path, params: Params, *, private: bool = False) -> None:
    """Write a model that a run has trained, with the settings of the run's recipe."""
    model, vocabulary = run.recipe.model.model_dump_json(), run.store.vocabulary
    write_weights(path, params, model, vocabulary, adapters=run.outputs.adapters, private=private)


def write_weights(
    path: Path,
    params: Params,
    model: str,
    vocabulary: int,
    *,
    adapters: bool = True,
    private: bool = False,
) -> None:
    """Write a model as safetensors by leaf name, with its settings as JSON in the metadata.

    Adapters are merged into the model and, with `adapters`, written once more alone, beside it.
    """
    data = checkpoint.to_bytes(merged(params), model=model, vocabulary=vocabulary)
    write_atomically(path, data, private=private)
    alone = factors(params) if adapters else {}
    if alone:
        base = tree.sha256(without_adapters(params))
        data = checkpoint.to_bytes(alone, base=base)
        write_atomically(adapter_beside(path), data, private=private)


def write_run(
    directory: RunDirectory,
    params: Params,
    recipe: Recipe,
    store: Store,
    *,
    rounds: int,
    final: JsonMapping,
    part_of: JsonMapping,
    plan: PrivacyPlan | None = None,
) -> None:
    """Write a model as a finished run.

    Args:
      directory: where to; what an earlier call left there is replaced.
      params: the model.
      recipe: the resolved recipe by which the directory is opened.
      store: the tokenizer, and the text that the recipe names.
      rounds: how many were played.
      final: the figures of the end, by split.
      part_of: what the run which made the model is called, and whether it had a privacy plan.
      plan: that plan, where what is written here may be told.
    """
    directory.path.mkdir(parents=True, exist_ok=True)
    directory.recipe.unlink(missing_ok=True)
    model = recipe.model.model_dump_json()
    write_weights(directory.weights, params, model, store.vocabulary)
    tokenizer = (store.path / "tokenizer.json").read_bytes()
    write_atomically(directory.tokenizer, tokenizer)
    write_atomically(directory.special_tokens, special_tokens_map(store.tokenizer))
    directory.journal.unlink(missing_ok=True)
    journal = Journal(directory.journal)
    header = {
        "command": f"fedlm evaluate {directory.path}",
        "recipe": recipe.model_dump(mode="json", exclude_none=True),
        "store": {k: v for k, v in store.manifest.items() if k != "settings"},
        "parameters": tree.size(without_adapters(params)),
        "start": NOTHING_TOLD,
        "part_of": {**part_of, "rounds": rounds},
        "versions": {"python": platform.python_version(), "fedlm": version("fedlm")},
    }
    journal.append(release(plan, "header", header))
    journal.append(release(plan, "final", dict(final)))
    journal.sync()
    told = dict(release(plan, "final", dict(final)))
    headline = told.get("test") or told.get("validation") or {}
    summary = {
        "run": str(directory.path),
        "rounds": rounds,
        "perplexity": headline.get("perplexity"),
        "accuracy": headline.get("accuracy"),
        "bits_per_byte": headline.get("bits_per_byte"),
        "params_sha256": tree.sha256(merged(params)),
        "part_of": dict(part_of),
    }
    write_atomically(directory.summary, (dumps(summary) + "\n").encode())
    write_atomically(directory.recipe, dump(recipe).encode())
