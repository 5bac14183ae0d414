"""Tiny models of every family that Transformers has, as fedlm writes them."""

from dataclasses import replace

from fedlm.core.keys import key_for
from fedlm.models import catalog

SIZE = catalog.Dimensions(
    vocab=40, embedding_size=16, hidden_size=64, layers=2, heads=4, length=24, norm_epsilon=1e-5
)
FAMILIES = {
    "llama": ("llama", replace(SIZE, hidden_size=24, key_heads=2, tied=False, rope_theta=500.0)),
    "llama-tied": ("llama", replace(SIZE, hidden_size=24, head_size=6)),
    "llama-biased": (
        "llama",
        replace(SIZE, hidden_size=24, qkv_bias=True, out_bias=True, mlp_bias=True),
    ),
    "llama-linear": ("llama", replace(SIZE, hidden_size=24, rope_scaling="linear 3.0")),
    "llama-long": (
        "llama",
        # Of the pairs that a head turns, the first lies between the bounds.
        replace(SIZE, heads=2, hidden_size=24, rope_scaling="llama3 8.0 1.0 4.0 16.0"),
    ),
    "qwen2": ("llama", replace(SIZE, hidden_size=24, key_heads=2, qkv_bias=True)),
    "gpt2": ("gpt2", SIZE),
    "gpt_neox": ("gpt-neox", replace(SIZE, tied=False, activation="gelu-exact", heads=2)),
    "gpt_neox-serial": ("gpt-neox", replace(SIZE, tied=False, parallel=False, rotary_fraction=0.5)),
    "mpt": ("mpt", replace(SIZE, activation="gelu-exact", heads=2)),
    "transformer": ("transformer", replace(SIZE, positions="learned")),
}


def model(name):
    """The architecture, the size and a model whose every leaf matters, also biases and gains."""
    import jax
    import jax.random as jr

    architecture, size = FAMILIES[name]
    made = catalog.make(architecture, size, key_for(1, "init"))
    leaves, structure = jax.tree.flatten(made)
    keys = jr.split(key_for(2, "init"), len(leaves))
    moved = [x + 0.1 * jr.normal(k, x.shape) for x, k in zip(leaves, keys, strict=True)]
    return architecture, size, jax.tree.unflatten(structure, moved)
