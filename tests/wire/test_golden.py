"""The bytes of every codec, kept: a change of format cannot pass in silence.

`python -m tests.wire.test_golden` writes them anew and prints what changed; frames that other
machines have stored or are sending would then need a new magic.
"""

import json
from pathlib import Path

import jax.random as jr
import numpy as np
import pytest

from tests.wire.cases import BY_NAME, same_bits

PLACE = Path(__file__).parent / "golden.json"
SENT = {
    "matrix": np.array([[0.5, -1.25, 3.0], [0.0, 1e-3, -2.0]], np.float32),
    "number": np.float32(0.1),
    "vector": np.array([1, -1, 0.25, 0, 0, 7, -0.5, 0.125, -3, 2, 1e-6], np.float32),
}


def frames():
    return {name: codec.encode(SENT, jr.key(42)).hex() for name, codec in BY_NAME.items()}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_the_bytes_are_those_that_were_kept(name):
    kept = json.loads(PLACE.read_text(encoding="utf-8"))[name]
    assert BY_NAME[name].encode(SENT, jr.key(42)).hex() == kept


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_the_kept_bytes_are_read_as_ever(name):
    kept = json.loads(PLACE.read_text(encoding="utf-8"))[name]
    like = {k: np.zeros_like(v) for k, v in SENT.items()}
    same_bits(
        BY_NAME[name].decode(bytes.fromhex(kept), like), BY_NAME[name].apply(SENT, jr.key(42))
    )


if __name__ == "__main__":
    old = json.loads(PLACE.read_text(encoding="utf-8")) if PLACE.exists() else {}
    new = frames()
    print("changed:", *[name for name in sorted(old | new) if old.get(name) != new.get(name)])
    PLACE.write_text(json.dumps(new, indent=1) + "\n", encoding="utf-8")
