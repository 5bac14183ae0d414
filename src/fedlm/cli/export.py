"""`fedlm export`: a trained model for other programs."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from fedlm.cli.console import AsJson, emit, out, talk
from fedlm.corpus import tokenizer_file
from fedlm.inference import load_params
from fedlm.models import catalog
from fedlm.recipe.settings import load
from fedlm.record.checkpoint import write_atomically
from fedlm.record.directory import RunDirectory
from fedlm.record.export import write_onnx


class Format(StrEnum):
    """What other programs read."""

    safetensors = "safetensors"
    onnx = "onnx"


def export(
    run: Annotated[Path, typer.Argument(help="A run directory.")],
    kind: Annotated[Format, typer.Option("--format", help="What to write.")] = Format.safetensors,
    folder: Annotated[
        Path | None, typer.Option("--out", help="Where to; by default RUN/export.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write the model and its tokenizer where other programs can load them.

    Example: fedlm export runs/sotu --format onnx --out sotu-onnx
    """
    directory = RunDirectory.existing(run).finished()
    target = folder or directory.path / "export"
    recipe = load(directory.recipe)
    tokenizer = tokenizer_file.load_tokenizer(directory.tokenizer)
    file = target / f"model.{kind.value}"
    target.mkdir(parents=True, exist_ok=True)
    if kind is Format.safetensors:
        write_atomically(file, directory.weights.read_bytes())
    else:
        params = load_params(recipe.model, tokenizer.vocabulary, directory.weights)
        with talk.status("converting"):
            write_onnx(
                lambda tokens: catalog.logits(params, tokens), recipe.data.sequence_length, file
            )
    write_atomically(target / "tokenizer.json", directory.tokenizer.read_bytes())
    named = tokenizer_file.special_tokens_map(tokenizer)
    write_atomically(target / directory.special_tokens.name, named)
    if as_json:
        emit(
            {
                "run": str(run),
                "format": kind.value,
                "model": str(file),
                "bytes": file.stat().st_size,
            }
        )
    else:
        out.print(f"model: {file}; tokenizer: {target / 'tokenizer.json'}", markup=False)
