"""`fedlm convert`: a GGUF file as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedlm.cli.console import AsJson, emit, out, talk
from fedlm.publish.formats import convert_gguf


def convert(
    file: Annotated[Path, typer.Argument(help="A GGUF file of Llama architecture.")],
    folder: Annotated[Path, typer.Option("--out", help="The folder to write.")],
    as_json: AsJson = False,
) -> None:
    """Write the model and tokenizer of a GGUF file as a folder that Transformers loads.

    Example: fedlm convert SmolLM2-135M-Instruct.Q4_1.gguf --out smollm2
    """
    with talk.status("converting"):
        weights = convert_gguf(file, folder)
    if as_json:
        emit({"file": str(file), "model": str(weights), "bytes": weights.stat().st_size})
    else:
        out.print(f"model: {weights}; tokenizer: {folder / 'tokenizer.json'}", markup=False)
