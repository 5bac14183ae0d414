"""`fedlm predict`: what a trained model would say next."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from fedlm.cli.console import AsJson, BestOption, Client, Node, emit, note, out, talk
from fedlm.core.documents import JsonObject
from fedlm.core.errors import ConfigError, require
from fedlm.core.keys import key_for
from fedlm.core.words import count as words
from fedlm.corpus import tokenizer as tok
from fedlm.corpus.tokenizer import TextTokenizer
from fedlm.corpus.tokenizer_file import load_tokenizer
from fedlm.evaluate.generate import Speaker, sample
from fedlm.inference import open_model, room_for, speak, words_after
from fedlm.personal.model import open_personal
from fedlm.record.directory import RunDirectory


def predict(
    run: Annotated[Path, typer.Argument(help="A run directory, or a Hugging Face folder.")],
    text: Annotated[str | None, typer.Argument(help="A prompt; without it, one per line.")] = None,
    count: Annotated[int, typer.Option(min=1, max=100, help="How many next words.")] = 5,
    length: Annotated[
        int, typer.Option(min=0, max=10_000, help="Also go on for so many tokens.")
    ] = 0,
    temperature: Annotated[float, typer.Option(help="0 always takes the likeliest.")] = 0.8,
    seed: Annotated[int, typer.Option(help="Of the continuation.")] = 0,
    node: Node = "",
    client: Client = "",
    best: BestOption = False,
    as_json: AsJson = False,
) -> None:
    """Show the likeliest next words after a prompt.

    Example: fedlm predict runs/sotu "we must protect the" --length 20

    The model of one node of a tree: fedlm predict runs/world "vi skal" --node Norway
    """
    if temperature < 0:
        raise ConfigError(f"--temperature = {temperature}: expected zero or more.")
    speaker_for, tokenizer = _speaker(run, node, client, best)

    def answer(prompt: str) -> JsonObject:
        found: JsonObject = {
            "prompt": prompt,
            "next": words_after(speaker_for, tokenizer, prompt, count),
        }
        if length:
            tokens = tok.encode_prompt(tokenizer, prompt)
            model = speaker_for(room_for(tokens, length))
            key = key_for(seed, "generate")
            special = tokenizer.special
            said = sample(model, tokens, length, special, temperature=temperature, key=key)
            found["continuation"] = tok.decode(tokenizer, said)
        return found

    def show(found: JsonObject) -> None:
        if as_json:
            return emit(found)
        said = ", ".join(f"{w['word']} {w['probability']:.0%}" for w in found["next"])
        out.print(said)
        if "continuation" in found:
            out.print(f"{found['prompt']} {found['continuation']}")

    if text is not None:
        oov = tokenizer.special.oov
        unknown = 0 if oov is None else tok.encode_prompt(tokenizer, text).count(oov)
        if unknown:
            note(f"{words(unknown, 'word')} of the prompt: not in the vocabulary.")
        return show(answer(text))
    _converse(answer, show)


def _speaker(
    run: Path, node: str, client: str, best: bool
) -> tuple[Callable[[int], Speaker], TextTokenizer]:
    """Return a maker of predictors for a number of tokens, and the tokenizer."""
    if not client:
        params, tokenizer = open_model(run, node=node, best=best)
        return lambda capacity: speak(params, capacity), tokenizer
    require(not (node or best), "--client", client, "neither --node nor --best beside it")
    directory = RunDirectory.existing(run).of_client(client)
    tokenizer = load_tokenizer(directory.tokenizer)
    return open_personal(directory, tokenizer.vocabulary).speaker, tokenizer


def _converse(answer: Any, show: Any) -> None:
    """Answer one prompt per line until the end of input."""
    if sys.stdin.isatty():
        talk.print("A prompt a line; Ctrl-D ends.")
    for line in sys.stdin:
        if line.strip():
            show(answer(line.strip()))
