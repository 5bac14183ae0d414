"""What a recipe may say of a federation of federations: `[federation]`.

In:       the table; the group paths of a store's training clients.
Out:      a checked `Topology`.
Promise:  a closed world, like every table; a tree that is none is refused before the first round.
Not here: what the settings do (`branches.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from fedlm.core.errors import ConfigError
from fedlm.federation import topology
from fedlm.federation.topology import Path, Place, Topology

Outer = Literal["fedavg", "fedavgm", "nesterov", "fedadam", "fedyogi", "fedadagrad"]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Decay = Annotated[float, Field(ge=0, lt=1)]


class Node(BaseModel):
    """A place of a tree that is written out; what is left out is as in `[federation]`."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    name: str
    parent: str | None = None
    groups: tuple[str, ...] = ()
    optimizer: Outer | None = None
    learning_rate: Positive | None = None
    momentum: Decay | None = None
    cohort: Annotated[int, Field(ge=1)] | None = None
    weight: Positive | None = None  # how much it counts at its parent

    @field_validator("groups", mode="before")
    @classmethod
    def _as_tuple(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value


class Federation(BaseModel):
    """The tree, and how its nodes work together."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    levels: tuple[int, ...] | None = None  # levels of the store's groups that become levels here
    node: tuple[Node, ...] = ()  # or the tree, written out
    only: tuple[str, ...] = ()  # places to keep, with those above them
    moves: tuple[str, ...] = ()  # "place > parent": put under another parent
    pool_clients: bool = True  # a node's text is one member; else its clients are a federation
    personal_layers: str = "last 0.3"  # which layers are a node's own; see models/split.py
    temperature: Annotated[float, Field(ge=0)] = 0.1  # of attention; inf is the mean, 0 keeps self
    compare: Literal["start", "root"] = "start"  # what changes of personal layers are measured from
    residuals: Annotated[int, Field(ge=0)] = 1  # layers sent up per layer and node
    sync_every: Annotated[int, Field(ge=1)] = 1  # rounds of a federation to one of that above it
    order: Literal["levels", "together"] = "levels"
    warmup_steps: Annotated[int, Field(ge=0)] = (
        0  # steps over which a leaf's rate rises in each round
    )
    keep_optimizer: bool = False  # a leaf's optimiser goes on where it stopped the round before
    # From the root down; the last repeats.
    optimizer: Annotated[tuple[Outer, ...], Field(min_length=1)] = ("nesterov", "fedavg")
    learning_rate: Annotated[tuple[Positive, ...], Field(min_length=1)] = (0.7, 1.0)
    momentum: Annotated[tuple[Decay, ...], Field(min_length=1)] = (0.9,)
    weight: Literal["uniform", "tokens"] = "uniform"  # how much a node counts at its parent
    clip_norm: NotNegative = 0.0  # the longest change that leaves a leaf; 0 is any
    noise_multiplier: NotNegative = 0.0  # on what leaves a leaf, in multiples of the clip
    noise_seed: Annotated[int, Field(ge=0, lt=1 << 63)] | None = None  # unsafe: others know it
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5  # at which the report tells an epsilon
    resident: Annotated[int, Field(ge=0)] = 0  # models of nodes in memory at once; 0 is all

    @field_validator("optimizer", "learning_rate", "momentum", mode="before")
    @classmethod
    def _by_depth(cls, value: Any) -> Any:
        """One value for all depths may be written without brackets; 1 means 1.0."""
        values = value if isinstance(value, (tuple, list)) else (value,)
        return tuple(float(v) if type(v) is int else v for v in values)

    def at_depth(self, name: str, depth: int) -> Any:
        """The value of a setting that is given from the root down."""
        values = getattr(self, name)
        return values[min(depth, len(values) - 1)]


def topology_of(federation: Federation, groups: Sequence[Path]) -> Topology:
    """The tree of a recipe, for the clients of a store."""
    if (federation.levels is None) == (not federation.node):
        raise ConfigError(
            "[federation]: expected either levels (grown from the store's groups) or node (a tree "
            "that is written out), and not both."
        )
    if federation.levels is not None:
        places = topology.grown(federation.levels, groups)
    else:
        places = tuple(_place(node) for node in federation.node)
    places = topology.only(places, federation.only)
    return topology.tree(topology.moved(places, _moves(federation)), groups)


def _place(node: Node) -> Place:
    shape = ("name", "parent", "groups")
    own = tuple((k, v) for k, v in node if v is not None and k not in shape)
    return Place(node.name, node.parent, node.groups, own)


def _moves(federation: Federation) -> dict[str, str]:
    moves = {}
    for move in federation.moves:
        name, arrow, parent = (part.strip() for part in move.partition(">"))
        if not (name and arrow and parent):
            raise ConfigError(f"federation.moves = {move!r}: expected 'place > parent'.")
        moves[name] = parent
    return moves
