"""Which leaves are backbone, shared by a federation, and which are personal layers of a node.

In:       the names of a model's leaves, and a rule.
Out:      for each leaf the personal layer that it belongs to, or None for the backbone.
Promise:  every leaf is in one part; the same names and rule give the same split.
Not here: what is done with the parts (`federation/tree_round.py`, `federation/layer_attention.py`).

Rules: `none`, `all`, `last SHARE` (the last share of the blocks, at least one, and the norm after
them), `kv` (key and value projections of every block), or leaf names with `*`, divided by
commas. `+ embedding` adds the embedding and all other leaves before the first block.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence

from fedlm.core.errors import ConfigError, nearest, require

SETTING = "federation.personal_layers"
WANTED = "none, all, kv, last SHARE as in 'last 0.3', or names with *; and perhaps '+ embedding'"
_NUMBERED = re.compile(r"^(\w+\.\d+)(\.|$)")
EMBEDDING = ("stem.*", "embedding")


def layer_of(name: str) -> str:
    """Return the layer of a leaf: its block, or the first part of its name.

    >>> [layer_of(n) for n in ("blocks.2.feedforward.up.weight", "last.scale", "embedding")]
    ['blocks.2', 'last', 'embedding']
    """
    numbered = _NUMBERED.match(name)
    return numbered.group(1) if numbered else name.split(".")[0]


def personal_layers(names: Sequence[str], rule: str) -> tuple[str | None, ...]:
    """Return the personal layer of each leaf, or None if the leaf belongs to the backbone.

    >>> personal_layers(["stem.embedding", "blocks.0.up", "blocks.1.up", "last.scale"], "last 0.5")
    (None, None, 'blocks.1', 'last')
    """
    parts = [part.strip() for part in rule.split("+")]
    base, more = parts[0], parts[1:]
    require(more in ([], ["embedding"]) and bool(base), SETTING, rule, WANTED)
    patterns = list(_patterns(names, base, rule))
    if more:
        patterns += EMBEDDING
    found = tuple(
        layer_of(name) if any(fnmatch.fnmatchcase(name, p) for p in patterns) else None
        for name in names
    )
    if base != "none" and not any(found):
        raise ConfigError(
            f"{SETTING} = {rule!r}: this model has no such leaf; it has {', '.join(names[:6])}, ..."
        )
    return found


def _patterns(names: Sequence[str], base: str, rule: str) -> Sequence[str]:
    if base == "none":
        return ()
    if base == "all":
        return ("*",)
    if base == "kv":
        return ("*.attention.key.*", "*.attention.value.*", "*.attention.key", "*.attention.value")
    if not base.startswith("last "):
        require("*" in base or base in names, SETTING, rule, WANTED)
        patterns = [part.strip() for part in base.split(",")]
        for pattern in patterns:  # a layer that is mistyped would leave its node
            if not fnmatch.filter(names, pattern):
                hint = nearest(pattern, names[:50])
                raise ConfigError(f"{SETTING} = {rule!r}: no leaf is called {pattern!r}. {hint}")
        return patterns
    try:
        share = float(base.removeprefix("last "))
    except ValueError:
        share = -1.0
    require(0 < share <= 1, SETTING, rule, WANTED)
    blocks = list(dict.fromkeys(layer_of(n) for n in names if _NUMBERED.match(n)))
    count = max(1, round(share * len(blocks)))
    return [*(f"{block}.*" for block in blocks[-count:]), "last.*"]
