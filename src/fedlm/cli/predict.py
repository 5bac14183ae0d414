"""`fedlm predict`: what a trained model would say next."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from fedlm.cli.console import AsJson, BestOption, Node, emit, out, talk
from fedlm.core.errors import ConfigError
from fedlm.core.keys import key_for
from fedlm.corpus import tokenizer as tok
from fedlm.evaluate.generate import sample
from fedlm.inference import open_model, room_for, speak
from fedlm.inference import predict as next_words


def predict(
    run: Annotated[Path, typer.Argument(help="A run directory, or a Hugging Face folder.")],
    text: Annotated[str | None, typer.Argument(help="A prompt; without it, one a line.")] = None,
    count: Annotated[int, typer.Option(min=1, max=100, help="How many next words.")] = 5,
    length: Annotated[
        int, typer.Option(min=0, max=10_000, help="Also go on for so many tokens.")
    ] = 0,
    temperature: Annotated[float, typer.Option(help="0 always takes the likeliest.")] = 0.8,
    seed: Annotated[int, typer.Option(help="Of the continuation.")] = 0,
    node: Node = "",
    best: BestOption = False,
    as_json: AsJson = False,
) -> None:
    """Show the likeliest next words after a prompt.

    Example: fedlm predict runs/sotu "we must protect the" --length 20

    The model of one node of a tree: fedlm predict runs/world "vi skal" --node Norway
    """
    if temperature < 0:
        raise ConfigError(f"--temperature = {temperature}: expected zero or more.")
    params, tokenizer = open_model(run, node=node, best=best)

    def answer(prompt: str) -> dict[str, Any]:
        found: dict[str, Any] = {
            "prompt": prompt,
            "next": next_words(params, tokenizer, prompt, count),
        }
        if length:
            tokens = tok.encode_prompt(tokenizer, prompt)
            model = speak(params, room_for(tokens, length))
            key = key_for(seed, "generate")
            special = tokenizer.special
            said = sample(model, tokens, length, special, temperature=temperature, key=key)
            found["continuation"] = tok.decode(tokenizer, said)
        return found

    def show(found: dict[str, Any]) -> None:
        if as_json:
            return emit(found)
        said = ", ".join(f"{w['word']} {w['probability']:.0%}" for w in found["next"])
        out.print(said)
        if "continuation" in found:
            out.print(f"{found['prompt']} {found['continuation']}")

    if text is not None:
        return show(answer(text))
    _converse(answer, show)


def _converse(answer: Any, show: Any) -> None:
    """Answer one prompt per line until the end of input."""
    if sys.stdin.isatty():
        talk.print("A prompt a line; Ctrl-D ends.")
    for line in sys.stdin:
        if line.strip():
            show(answer(line.strip()))
