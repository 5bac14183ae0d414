"""Next words and continuations of a prompt.

In:       a model's two verbs (start, advance), a prompt of tokens, the special tokens.
Out:      the most likely next words, or a sampled continuation.
Promise:  one step of the model per token; specials are never offered as words; the same key
          gives the same continuation.
Not here: text (the caller encodes and decodes).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from fedlm.core.types import Params, SpecialTokens

SpeakerState = Any
LONGEST_WORD = 12  # in tokens


class Speaker(NamedTuple):
    """A model with its parameters bound, which gives logits token by token."""

    start: Callable[[], SpeakerState]
    advance: Callable[[SpeakerState, int], tuple[SpeakerState, Float[Array, " vocab"]]]


def speaker(
    params: Params,
    start: Callable[[int], SpeakerState],
    advance: Callable[[Params, SpeakerState, Array], Any],
) -> Speaker:
    """Return a speaker for one row at a time, compiled once.

    The parameters are an argument of the program: as a part of it, a large model would be copied
    into each.
    """
    step = jax.jit(advance)
    # Where the parameters are, or the second token would compile the step again.
    where = next((getattr(x, "sharding", None) for x in jax.tree.leaves(params)), None)

    def one(state: SpeakerState, token: int) -> tuple[SpeakerState, Array]:
        state, logits = step(params, state, jnp.asarray([token], jnp.int32))
        return state, logits[0]

    return Speaker(lambda: jax.device_put(start(1), where), one)


def read_prompt(
    model: Speaker, prompt: Sequence[int], bos: int
) -> tuple[SpeakerState, Float[Array, " vocab"]]:
    """Return the state and the logits after BOS and the prompt."""
    state, logits = model.advance(model.start(), bos)
    for token in prompt:
        state, logits = model.advance(state, token)
    return state, logits


_chances = jax.jit(jax.nn.softmax)  # one program in place of five


def next_words(
    model: Speaker,
    prompt: Sequence[int],
    count: int,
    special: SpecialTokens,
    goes_on: Callable[[int], bool] = lambda token: False,
) -> list[tuple[list[int], float]]:
    """Return the likeliest next words and their probabilities.

    A word starts with one token. The likeliest next token is added as long as `goes_on` says that
    it continues the word (never, for a vocabulary of whole words).
    """
    state, logits = read_prompt(model, prompt, special.bos)
    chances = np.asarray(_chances(logits))
    order = np.argsort(-chances, kind="stable")
    words = order[~np.isin(order, special.reserved)][:count]
    return [_finish_word(model, state, int(t), float(chances[t]), goes_on) for t in words]


def _finish_word(
    model: Speaker, state: SpeakerState, token: int, chance: float, goes_on: Any
) -> Any:
    word = [token]
    while len(word) < LONGEST_WORD:
        state, logits = model.advance(state, word[-1])
        chances = np.asarray(_chances(logits))
        token = int(np.argmax(chances))
        if not goes_on(token):
            break
        word.append(token)
        chance *= float(chances[token])
    return word, chance


@partial(jax.jit, static_argnums=0)
def _draw(
    greedy: bool,
    logits: Float[Array, " vocab"],
    barred: Bool[np.ndarray, " vocab"],
    temperature: float,
    key: PRNGKeyArray,
) -> Int[Array, ""]:
    """Draw a token that is not barred, or take the likeliest one."""
    open_ = jnp.where(barred, -jnp.inf, logits)
    return jnp.argmax(open_) if greedy else jr.categorical(key, open_ / temperature)


def sample(
    model: Speaker,
    prompt: Sequence[int],
    length: int,
    special: SpecialTokens,
    *,
    temperature: float,
    key: PRNGKeyArray,
) -> list[int]:
    """Sample a continuation; a temperature of zero always takes the likeliest token."""
    state, logits = read_prompt(model, prompt, special.bos)
    barred = np.isin(np.arange(logits.shape[0]), special.reserved)
    barred[special.eos] = False
    said: list[int] = []
    for k in jr.split(key, length):
        token = int(_draw(temperature <= 0, logits, barred, temperature, k))
        said.append(token)
        state, logits = model.advance(state, token)
    return said
