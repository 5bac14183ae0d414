"""Codecs by name.

In:       a name and options, as a recipe has them.
Out:      a `Codec`.
Promise:  an unknown name or option is refused with the nearest known one.
Not here: what a codec does (one file a family).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

from fedlm.core.errors import ConfigError, nearest
from fedlm.core.types import Codec
from fedlm.wire.dense import bfloat16, dense
from fedlm.wire.entropy import deflated
from fedlm.wire.quantize import uniform
from fedlm.wire.rotation import drive
from fedlm.wire.ternary import ternary
from fedlm.wire.top_k import topk

CODECS: dict[str, Callable[..., Codec]] = {
    "float32": dense,
    "bfloat16": bfloat16,
    "uniform": uniform,
    "ternary": ternary,
    "drive": drive,
    "topk": topk,
}


def codec(name: str, *, deflate: bool = False, **options: Any) -> Codec:
    """The codec of a family; `deflate` adds entropy coding to any of them.

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


def named(setting: str, text: str) -> Codec:
    """The codec that frames call `text`; what the text leaves out is the family's default.

    >>> named("wire.upload", "uniform-8-block256+zlib").name
    'uniform-8-block256+zlib'
    >>> named("wire.upload", "topk").name
    'topk-0.01-float32'
    """
    plain, plus, coder = text.partition("+")
    family, *rest = plain.split("-")
    if family not in CODECS:
        raise ConfigError(f"{setting} = {text!r}: no such codec. {nearest(family, CODECS)}")
    parsed = _options(family, rest)
    if parsed is None or (plus and coder != "zlib"):
        raise ConfigError(
            f"{setting} = {text!r}: expected a name like {', '.join(map(repr, EXAMPLES))}, with "
            "'+zlib' behind it to deflate."
        )
    return codec(family, deflate=bool(plus), **parsed)


EXAMPLES = (
    "float32",
    "bfloat16",
    "uniform-8",
    "uniform-8-block256",
    "ternary-2.5",
    "drive-mse-4096",
    "topk-0.01-float32",
)
# How the options of a family stand in its names, in order.
_FORMS: dict[str, list[tuple[str, str, Callable[[str], Any]]]] = {
    "uniform": [("bits", r"\d{1,2}", int), ("block", r"block\d{1,9}", lambda t: int(t[5:]))],
    "ternary": [("clip", r"\d+(\.\d+)?", float)],
    "drive": [("scale", "mse|unbiased", str), ("block", r"\d{1,9}", int)],
    "topk": [("share", r"\d*\.?\d+", float), ("values", "float32|float16", str)],
}


def _options(family: str, rest: list[str]) -> dict[str, Any] | None:
    forms = _FORMS.get(family, [])
    if len(rest) > len(forms):
        return None
    found = {}
    for text, (option, form, read) in zip(rest, forms, strict=False):
        if not re.fullmatch(form, text):
            return None
        found[option] = read(text)
    return found
