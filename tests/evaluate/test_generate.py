"""What the model would say next."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from fedlm.core.types import SpecialTokens
from fedlm.evaluate.generate import next_words, read_prompt, sample, speaker
from fedlm.inference import speak
from fedlm.models import catalog
from fedlm.models.adapters import Adapters, adapt, merged
from tests.models.test_adapters import moved

VOCAB = 10
OWN = SpecialTokens(bos=1, eos=2, oov=3, reserved=(0, 1, 2, 3))


def parrot():
    """A model that expects the number after the last one, and counts how often it is asked."""

    def start(batch):
        return jnp.zeros((), jnp.int32)

    def advance(params, state, token):
        logits = jnp.where(jnp.arange(VOCAB)[None, :] == (token[:, None] + 1) % VOCAB, 5.0, 0.0)
        return state + 1, logits

    return speaker(None, start, advance)


def test_a_prompt_costs_one_step_a_token():
    state, _ = read_prompt(parrot(), [4, 5, 6], OWN.bos)
    assert int(state) == 4  # BOS and three tokens


def test_the_likeliest_word_comes_first_and_specials_never():
    words = next_words(parrot(), [4, 5], 20, OWN)
    assert words[0][0] == [6]
    assert words[0][1] == max(chance for _, chance in words)
    assert {w[0] for w, _ in words} == set(range(4, VOCAB))
    after_bos = next_words(parrot(), [], 20, OWN)
    assert OWN.bos + 1 == OWN.eos and all(w[0] >= 4 for w, _ in after_bos)


def test_subwords_are_put_together():
    (word, chance), *_ = next_words(parrot(), [4], 1, OWN, lambda t: t in (6, 7))
    assert word == [5, 6, 7]
    likely = np.exp(5.0) / (np.exp(5.0) + VOCAB - 1)
    np.testing.assert_allclose(chance, likely**3, rtol=1e-5)


def test_greedy_is_the_likeliest_and_sampling_follows_its_key():
    assert sample(parrot(), [4], 3, OWN, temperature=0.0, key=jr.key(0)) == [5, 6, 7]
    draws = [sample(parrot(), [4], 12, OWN, temperature=3.0, key=jr.key(k)) for k in (0, 0, 1)]
    assert draws[0] == draws[1] != draws[2]
    assert all(t >= 4 or t == OWN.eos for t in draws[0] + draws[2])


def test_any_tokens_can_be_special():
    """The first one begins a text, the last is reserved, the others are words."""
    special = SpecialTokens(bos=0, eos=VOCAB - 1, oov=None, reserved=(0, VOCAB - 1))
    assert next_words(parrot(), [], 1, special)[0][0] == [1]
    assert {w[0] for w, _ in next_words(parrot(), [], 20, special)} == set(range(1, VOCAB - 1))
    said = sample(parrot(), [7], 2, special, temperature=0.0, key=jr.key(0))
    assert said == [8, 9]


@pytest.mark.slow
def test_a_cache_of_grouped_queries_says_what_whole_rows_say():
    """One step per token, with adapters apart or merged, against all rows computed anew."""
    size = catalog.Dimensions(
        vocab=VOCAB, embedding_size=16, hidden_size=20, layers=2, heads=4, key_heads=2
    )
    plain = catalog.make("llama", size, jr.key(1))
    model = moved(adapt(plain, Adapters(rank=2, last_blocks=1), jr.key(2)), 3.0)
    whole, prompt = [OWN.bos, 4, 5], [4, 5]
    barred = [t for t in OWN.reserved if t != OWN.eos]
    anew = jax.jit(catalog.logits)
    for last in range(2, 8):
        row = np.array([whole + [0] * (9 - len(whole))])  # nothing sees what comes later
        logits = np.array(anew(model, row)[0, last])
        logits[barred] = -np.inf
        whole.append(int(np.argmax(logits)))
    for asked in (model, merged(model)):
        said = sample(speak(asked, 16), prompt, 6, OWN, temperature=0.0, key=jr.key(0))
        assert said == whole[3:]
    assert len(set(whole[3:])) > 1
