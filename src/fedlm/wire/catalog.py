"""Codecs by name.

In:       a name and options, as a recipe has them.
Out:      a `Codec`.
Promise:  an unknown name or option is refused with the nearest known one.
Not here: what a codec does (one file a family).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from fedlm.core.errors import ConfigError, nearest
from fedlm.core.types import Codec
from fedlm.wire.dense import bfloat16, dense
from fedlm.wire.entropy import deflated
from fedlm.wire.quantize import uniform
from fedlm.wire.rotate import drive
from fedlm.wire.sparse import topk
from fedlm.wire.ternary import ternary

CODECS: dict[str, Callable[..., Codec]] = {
    "float32": dense,
    "bfloat16": bfloat16,
    "uniform": uniform,
    "ternary": ternary,
    "drive": drive,
    "topk": topk,
}


def codec(name: str, *, deflate: bool = False, **options: Any) -> Codec:
    """The codec of a name; `deflate` adds entropy coding to any of them.

    >>> codec("uniform", bits=4).name, codec("ternary", deflate=True).name
    ('uniform-4', 'ternary-2.5+zlib')
    """
    if name not in CODECS:
        raise ConfigError(f"wire.codec = {name!r}: no such codec. {nearest(name, CODECS)}")
    known = list(inspect.signature(CODECS[name]).parameters)
    for option in options:
        if option not in known:
            hint = nearest(option, [*known, "deflate"])
            raise ConfigError(f"wire.{option}: {name!r} has no such option. {hint}")
    made = CODECS[name](**options)
    return deflated(made) if deflate else made
