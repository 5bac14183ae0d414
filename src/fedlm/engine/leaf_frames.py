"""What a leaf that keeps its own model is sent to begin a round, as one frame.

In:       a `LeafStart`; bytes from anywhere.
Out:      bytes; a `LeafStart` whose every part has the shapes of the leaf's own model.
Promise:  anything else than the parts of this model is a `WireError`; no size is trusted before it
          is checked against the bytes that arrived.
Not here: what a leaf does with it (`federation/leaf.py`), formats of the parts (`wire`).

A head in JSON names the parts and their sizes; the parts follow, each a frame by itself: the
backbone by the download codec, personal layers as plain numbers.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import PRNGKeyArray

from fedlm.core.errors import WireError
from fedlm.core.types import Codec, Params
from fedlm.federation import layer_attention
from fedlm.federation.layer_attention import Layers, Residual
from fedlm.federation.leaf import LeafRules, LeafStart

MAGIC = b"FLLEAF1\n"
LONGEST_HEAD = 1 << 20
_SIZE = struct.Struct("<I")
_WHOLE = ("own", "parent", "origin")  # parts that hold all personal layers


def encode(above: LeafStart, download: Codec, exact: Codec, key: PRNGKeyArray) -> bytes:
    """Return what a leaf is sent as bytes."""
    parts: list[tuple[str, str, int, bytes]] = [
        ("backbone", "", 0, download.encode(above.backbone, key))
    ]
    for name in _WHOLE:
        layers = getattr(above, name)
        if layers is not None:
            parts.append((name, "", 0, exact.encode(_ordered(layers), key)))
    for one in above.residuals:
        parts.append(("residual", one.layer, one.origin, exact.encode(one.values, key)))
    head = json.dumps([[*told, len(frame)] for *told, frame in parts]).encode()
    return b"".join([MAGIC, _SIZE.pack(len(head)), head, *(frame for *_, frame in parts)])


def decode(data: bytes, rules: LeafRules, like: Params, download: Codec, exact: Codec) -> LeafStart:
    """Return what bytes tell a leaf with a model of these shapes, or raise `WireError`."""
    shapes = layer_attention.personal_of(rules.personal_layers, _zeros(like))
    backbone_like = layer_attention.backbone_of(rules.personal_layers, like)
    found: dict[str, Any] = {}
    residuals = []
    for name, layer, origin, frame in _parts(data):
        if name == "residual":
            if layer not in shapes:
                raise WireError(f"a residual is of {layer[:80]!r}, which is no layer here.")
            residuals.append(Residual(layer, origin, [exact.decode(frame, shapes[layer])]))
        elif name in found:
            raise WireError(f"the start of a leaf has two parts {name!r}.")
        elif name == "backbone":
            found[name] = download.decode(frame, backbone_like)
        else:
            found[name] = exact.decode(frame, _ordered(shapes))
    if "backbone" not in found:
        raise WireError("the start of a leaf has no backbone.")
    if rules.layers_stay == ("parent" in found) or (residuals and rules.layers_stay):
        raise WireError("the start of a leaf does not fit its temperature.")
    return LeafStart(residuals=tuple(residuals), **found)


def _parts(data: bytes) -> list[tuple[str, str, int, bytes]]:
    start = len(MAGIC) + _SIZE.size
    if len(data) < start or data[: len(MAGIC)] != MAGIC:
        raise WireError("this is not the start of a leaf that keeps its own model.")
    (size,) = _SIZE.unpack_from(data, len(MAGIC))
    if not size <= min(LONGEST_HEAD, len(data) - start):
        raise WireError(f"the head of a leaf's start has {size} bytes.")
    try:
        head = json.loads(data[start : start + size])
    except (ValueError, RecursionError):
        raise WireError("the head of a leaf's start is not JSON.") from None
    kinds = (str, str, int, int)
    if type(head) is not list or not all(
        type(row) is list and [type(v) for v in row] == list(kinds) for row in head
    ):
        raise WireError("the head of a leaf's start is no list of parts.")
    found, at = [], start + size
    for name, layer, origin, length in head:
        if name not in ("backbone", "residual", *_WHOLE) or not 0 <= length <= len(data) - at:
            raise WireError(f"the start of a leaf has a part {name[:80]!r} of {length} bytes.")
        found.append((name, layer, origin, bytes(data[at : at + length])))
        at += length
    if at != len(data):
        raise WireError("the start of a leaf is longer than its parts.")
    return found


def _ordered(layers: Mapping[str, np.ndarray]) -> Layers:
    return {layer: np.asarray(layers[layer]) for layer in sorted(layers)}


def _zeros(like: Params) -> Params:
    return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), like)
