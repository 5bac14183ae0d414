"""`fedlm export`: a trained model for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedlm import exporting
from fedlm.cli.console import AsJson, BestOption, Client, Node, emit, note, out, talk
from fedlm.core.errors import either, require
from fedlm.personal.model import mixture_of
from fedlm.record.directory import RunDirectory


def export(
    run: Annotated[Path, typer.Argument(help="A run directory.")],
    kind: Annotated[
        str, typer.Option("--format", help=f"What to write: {either(exporting.FORMATS)}.")
    ] = "safetensors",
    folder: Annotated[
        Path | None, typer.Option("--out", help="Where to; by default RUN/export.")
    ] = None,
    node: Node = "",
    client: Client = "",
    best: BestOption = False,
    as_json: AsJson = False,
) -> None:
    """Write the model and its tokenizer where other programs can load them.

    `huggingface` is a folder for Transformers, adapters merged; `peft` are the adapters alone;
    `web` and `web-int8` are a page with a keyboard that computes by itself, for recurrent models.

    Example: fedlm export runs/sotu --format onnx --out sotu-onnx
    """
    directory = RunDirectory.existing(run).of_node(node)
    if client:
        require(not (node or best), "--client", client, "neither --node nor --best beside it")
        directory = RunDirectory.existing(run).of_client(client)
        mixed = mixture_of(directory.path)
        if mixed is not None:
            note(f"The model of {client} also has {mixed}, which other programs cannot load.")
    target = folder or directory.path / "export"
    with talk.status("converting"):
        file = exporting.write(directory, kind, target, best=best)
    if as_json:
        emit(
            {
                "run": str(run),
                "format": kind,
                "model": str(file),
                "bytes": file.stat().st_size,
            }
        )
    else:
        tokenizer = target / "tokenizer.json"
        words = f"; tokenizer: {tokenizer}" if tokenizer.is_file() else ""
        out.print(f"model: {file}{words}", markup=False)
