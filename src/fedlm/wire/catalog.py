"""Codecs by name.

In:       a name and options, as in a recipe.
Out:      a `Codec`.
Promise:  an unknown name or option is refused with the nearest known one; one line in `CODECS`
          adds a family.
Not here: the codecs themselves (one file per family).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from fedlm.core.by_value import by_value
from fedlm.core.errors import ConfigError, nearest
from fedlm.core.types import Codec
from fedlm.wire.dense import bfloat16, dense
from fedlm.wire.entropy import deflated
from fedlm.wire.fixed_point import secure
from fedlm.wire.quantize import uniform
from fedlm.wire.rotation import drive
from fedlm.wire.ternary import ternary
from fedlm.wire.top_k import topk

Option = tuple[str, str, Callable[[str], Any]]


class Family(NamedTuple):
    """A family of codecs: the function that makes one, and the options in its name.

    `options` lists, in the order of the name, each option with the pattern of its text and the
    function that reads it: `("clip", "[0-9.]+", float)` reads the 2.5 of `ternary-2.5`.
    """

    make: Callable[..., Codec]
    options: tuple[Option, ...] = ()
    examples: tuple[str, ...] = ()


_BITS: Option = ("bits", r"\d{1,2}", int)
_TENSOR_BLOCK: Option = ("block", r"block\d{1,9}", lambda text: int(text[5:]))
_CLIP: Option = ("clip", r"\d+(\.\d+)?", float)
_SCALE: Option = ("scale", "mse|unbiased", str)
_BLOCK: Option = ("block", r"\d{1,9}", int)
_SHARE: Option = ("share", r"\d*\.?\d+", float)
_BOUND: Option = ("clip", r"clip\d+(\.\d+)?", lambda text: float(text[4:]))
_MEMBERS: Option = ("members", r"members\d{1,9}", lambda text: int(text[7:]))
_VALUES: Option = ("values", "float32|float16", str)
CODECS: dict[str, Family] = {
    "float32": Family(dense, (), ("float32",)),
    "bfloat16": Family(bfloat16, (), ("bfloat16",)),
    "uniform": Family(uniform, (_BITS, _TENSOR_BLOCK), ("uniform-8", "uniform-8-block256")),
    "ternary": Family(ternary, (_CLIP,), ("ternary-2.5",)),
    "drive": Family(drive, (_SCALE, _BLOCK), ("drive-mse-4096",)),
    "topk": Family(topk, (_SHARE, _VALUES), ("topk-0.01-float32",)),
    "secure": Family(secure, (_BITS, _BOUND, _MEMBERS), ("secure-20-clip1-members100",)),
}


def codec(name: str, *, deflate: bool = False, **options: Any) -> Codec:
    """Make a codec of a family; `deflate` adds entropy coding.

    >>> codec("uniform", bits=4).name, codec("ternary", deflate=True).name
    ('uniform-4', 'ternary-2.5+zlib')
    """
    if name not in CODECS:
        raise ConfigError(f"there is no codec {name!r}. {nearest(name, CODECS)}")
    known = list(inspect.signature(CODECS[name].make).parameters)
    for option in options:
        if option not in known:
            hint = nearest(option, [*known, "deflate"])
            raise ConfigError(f"the codec {name!r} has no option {option!r}. {hint}")
    return _made(CODECS[name].make, tuple(sorted(options.items())), deflate)


@by_value
def _made(make: Callable[..., Codec], options: tuple[tuple[str, Any], ...], deflate: bool) -> Codec:
    made = make(**dict(options))
    return deflated(made) if deflate else made


def named(setting: str, text: str) -> Codec:
    """Make the codec with a name as in frames; options left out have the family's defaults.

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
        examples = [repr(name) for known in CODECS.values() for name in known.examples]
        raise ConfigError(
            f"{setting} = {text!r}: expected a name like {', '.join(examples)}, with '+zlib' "
            "behind it to deflate."
        )
    try:
        return codec(family, deflate=bool(plus), **parsed)
    except ConfigError as error:  # it names the option, which is a part of the codec's name
        raise ConfigError(f"{setting} = {text!r}: {error}") from None


def _options(family: str, rest: list[str]) -> dict[str, Any] | None:
    forms = CODECS[family].options
    if len(rest) > len(forms):
        return None
    found = {}
    for text, (option, form, read) in zip(rest, forms, strict=False):
        if not re.fullmatch(form, text):
            return None
        found[option] = read(text)
    return found
