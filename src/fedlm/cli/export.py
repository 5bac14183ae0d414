"""`fedlm export`: a trained model for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedlm.cli.console import AsJson, BestOption, Client, Node, emit, note, out, talk
from fedlm.cli.evaluate import run_of
from fedlm.core.documents import JsonObject
from fedlm.core.errors import FedlmError, either, require
from fedlm.core.words import count, number
from fedlm.engine.devices import use_devices
from fedlm.evaluate.perplexity import Evaluator, figures
from fedlm.inference import load_params
from fedlm.personal.model import mixture_of
from fedlm.publish.formats import FORMATS, write_export
from fedlm.recipe.settings import load
from fedlm.record.directory import RunDirectory
from fedlm.record.export import perplexity_by_onnx

COST_ROWS = 256  # held-out rows by which int8 weights are compared with float32


def export(
    run: Annotated[Path, typer.Argument(help="A run directory.")],
    kind: Annotated[
        str, typer.Option("--format", help=f"What to write: {either(FORMATS)}.")
    ] = "safetensors",
    folder: Annotated[
        Path | None, typer.Option("--out", help="Where to; by default RUN/export.")
    ] = None,
    node: Node = "",
    client: Client = "",
    best: BestOption = False,
    onnxruntime: Annotated[
        Path | None,
        typer.Option(
            help="A folder with onnxruntime-web (its dist), for web pages of models that are not "
            "recurrent."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write the model and its tokenizer where other programs can load them.

    `onnx` is one step of the model, its state as inputs and outputs; `onnx-int8` has weights of a
    quarter of the size and prints what that costs. `huggingface` is a folder for Transformers,
    adapters merged; `peft` are the adapters alone; `web` and `web-int8` are a page with a keyboard
    that needs no server: recurrent models are computed by the page itself, others by the
    onnxruntime-web that --onnxruntime names. Every export has a model card, README.md.

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
        file = write_export(directory, kind, target, best=best, onnxruntime=onnxruntime)
    cost = _int8_cost(directory, file, best) if kind == "onnx-int8" else {}
    if as_json:
        emit(
            {
                "run": str(run),
                "format": kind,
                "model": str(file),
                "bytes": file.stat().st_size,
                **cost,
            }
        )
    else:
        tokenizer = target / "tokenizer.json"
        words = f"; tokenizer: {tokenizer}" if tokenizer.is_file() else ""
        out.print(f"model: {file}{words}", markup=False)
        if cost:
            before, after = cost["perplexity_float32"], cost["perplexity_int8"]
            out.print(
                f"int8 weights: perplexity {number(after)} instead of {number(before)} on "
                f"{count(cost['rows'], 'held-out row')}"
            )


def _int8_cost(directory: RunDirectory, file: Path, best: bool) -> JsonObject:
    """Return perplexity with float32 and with int8 weights on the same held-out rows.

    Nothing where the text is not here, or may not be told of.
    """
    recipe = load(directory.recipe)
    use_devices(recipe.run.devices)
    try:
        run = run_of(recipe, directory)
    except FedlmError as error:
        note(f"What int8 costs is not known, because the text is not here: {error}")
        return {}
    watched = run.evaluation.rows()
    if watched is None:
        note("What int8 costs is not known: no held-out text may be scored here.")
        return {}
    rows = watched[:COST_ROWS]
    params = load_params(recipe.model, run.store.vocabulary, directory.weights_to_use(best=best))
    scored = Evaluator(run.model.score, run.store.special, any_width=True)
    before = figures(scored(params, rows))["perplexity"]
    after = perplexity_by_onnx(file.read_bytes(), rows)
    return {"perplexity_float32": before, "perplexity_int8": after, "rows": len(rows)}
