"""What a recipe may say of a federation of federations: `[federation]`.

In:       the table; the group paths of a store's training clients.
Out:      a checked `Topology`.
Promise:  a closed world, like every table; a tree that is none is refused before the first round.
Not here: what the settings do (`tree.py`, `federation/tree_round.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from fedlm.core.errors import ConfigError
from fedlm.core.types import GroupPath
from fedlm.federation import topology
from fedlm.federation.topology import Place, Topology
from fedlm.federation.tree_round import Compare, Order
from fedlm.methods.optimizers import SERVER_OPTIMIZERS
from fedlm.recipe.choices import one_of

Outer = Annotated[str, one_of(SERVER_OPTIMIZERS)]
# The weight of a node at its parent, from the tokens below it; None: all nodes count alike.
NODE_WEIGHTS: dict[str, Callable[[int], float] | None] = {"uniform": None, "tokens": float}
# Every number has an end: one that a stranger chose must not overflow what is made from it.
LARGEST_COUNT, LARGEST_SIZE = (1 << 31) - 1, 1 << 20
LARGEST_FLOAT = 1e30  # far inside float32
Count = Annotated[int, Field(ge=1, le=LARGEST_COUNT)]
Natural = Annotated[int, Field(ge=0, le=LARGEST_COUNT)]
Size = Annotated[int, Field(ge=1, le=LARGEST_SIZE)]  # of something that is held in memory
LevelNumber = Annotated[int, Field(ge=-LARGEST_SIZE, le=LARGEST_SIZE)]
Positive = Annotated[float, Field(gt=0, le=LARGEST_FLOAT, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, le=LARGEST_FLOAT, allow_inf_nan=False)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Delta = Annotated[float, Field(gt=0, lt=1)]
Seed = Annotated[int, Field(ge=0, lt=1 << 63)]


class NodeTable(BaseModel):
    """A node of a tree that is written out; settings left out are as in `[federation]`."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    name: str = Field(description="The name of the place.")
    parent: str | None = Field(
        default=None, description="The place above it; not set: it is the root."
    )
    groups: tuple[str, ...] = Field(
        default=(),
        description='Groups of clients whose text it holds; `"*"` is all that no other place has.',
    )
    optimizer: Outer | None = Field(default=None, description="Its own server optimiser.")
    learning_rate: Positive | None = Field(
        default=None, description="Its own learning rate of the server's steps."
    )
    momentum: Decay | None = Field(
        default=None, description="Its own momentum of the server's steps."
    )
    cohort: Size | None = Field(
        default=None, description="Members per round of its own federation of clients."
    )
    weight: Positive | None = Field(default=None, description="How much it counts at its parent.")

    @field_validator("groups", mode="before")
    @classmethod
    def _as_tuple(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value


class FederationTable(BaseModel):
    """The table `[federation]`: the tree, and how its nodes work together."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    levels: tuple[LevelNumber, ...] | None = Field(
        default=None,
        description="Levels of the clients' groups that become levels of the tree: `[0, 1]` is the "
        "coarse group over the next one, `[]` a single place with all text.",
    )
    node: tuple[NodeTable, ...] = Field(
        default=(), description="The tree written out, in place of `levels`."
    )
    only: tuple[str, ...] = Field(
        default=(), description="Places to keep, with those above them; `[]` is all."
    )
    moves: tuple[str, ...] = Field(
        default=(), description='`"place > parent"` puts a place under another parent.'
    )
    pool_clients: bool = Field(
        default=True,
        description="Whether the text of a place is one member; otherwise its clients are members "
        "of a federation of their own, with `[server]` and `[privacy]`.",
    )
    personal_layers: str = Field(
        default="last 0.3",
        description="Which layers each node keeps for itself: `none`, `all`, `last FRACTION` of "
        "the blocks and the norm after them, `kv`, or leaf names with `*`; `+ embedding` adds the "
        "embedding.",
    )
    temperature: Annotated[float, Field(ge=0)] = Field(
        default=0.1,
        description="Temperature of the attention that mixes personal layers: `inf` is their mean, "
        "0 keeps each node's own.",
    )
    compare: Compare = Field(
        default="start",
        description="What changes of personal layers are measured from, to find nodes that are "
        "alike: where all began, or the root's present layers.",
    )
    residuals: Natural = Field(
        default=1,
        description="Personal layers that each node sends up because they fit worst, per layer; 0 "
        "is none.",
    )
    sync_every: Count = Field(
        default=1, description="Rounds of a federation per round of the federation above it."
    )
    order: Order = Field(
        default="levels",
        description="Whether nodes with text train level by level, or all together in one batch.",
    )
    warmup_steps: Natural = Field(
        default=0,
        description="Steps over which a leaf's learning rate rises in each round; 0 is none.",
    )
    keep_optimizer: bool = Field(
        default=False,
        description="Whether a leaf's optimiser continues with its state of the round before.",
    )
    optimizer: Annotated[tuple[Outer, ...], Field(min_length=1)] = Field(
        default=("nesterov", "fedavg"),
        description="Server optimisers of the nodes, from the root down; the last repeats.",
    )
    learning_rate: Annotated[tuple[Positive, ...], Field(min_length=1)] = Field(
        default=(0.7, 1.0),
        description="Learning rates of the nodes' server steps, from the root down; the last "
        "repeats.",
    )
    momentum: Annotated[tuple[Decay, ...], Field(min_length=1)] = Field(
        default=(0.9,),
        description="Momenta of the nodes' server steps, from the root down; the last repeats.",
    )
    weight: Annotated[str, one_of(NODE_WEIGHTS)] = Field(
        default="uniform",
        description="How much a node counts at its parent: all alike, or by its tokens.",
    )
    clip_norm: NotNegative = Field(
        default=0.0,
        description="The longest change that leaves a leaf, as an L2 norm; 0 is no bound.",
    )
    noise_multiplier: NotNegative = Field(
        default=0.0,
        description="Standard deviation of the noise on what leaves a leaf, in multiples of "
        "`clip_norm`; 0 is none.",
    )
    noise_seed: Seed | None = Field(
        default=None,
        description="Seed of that noise, for tests. Unsafe: whoever knows it can subtract the "
        "noise. Not set: the system's entropy.",
    )
    delta: Delta = Field(
        default=1e-5, description="The delta at which the report states what that noise is worth."
    )
    resident: Natural = Field(
        default=0,
        description="If the tree has more nodes than this, their models are kept in a memory-"
        "mapped file (in `TMPDIR`); 0 keeps all in memory.",
    )

    @field_validator("optimizer", "learning_rate", "momentum", mode="before")
    @classmethod
    def _by_depth(cls, value: Any) -> Any:
        """Return the values per depth as a tuple, integers as floats; a single value is for all."""
        values = value if isinstance(value, (tuple, list)) else (value,)
        return tuple(float(v) if type(v) is int else v for v in values)

    def at_depth(self, name: str, depth: int) -> Any:
        """Return a setting's value at a depth; values are listed from the root down."""
        values = getattr(self, name)
        return values[min(depth, len(values) - 1)]


def topology_of(federation: FederationTable, groups: Sequence[GroupPath]) -> Topology:
    """Return the tree of a recipe over clients with these group paths."""
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


def _place(node: NodeTable) -> Place:
    shape = ("name", "parent", "groups")
    own = tuple((k, v) for k, v in node if v is not None and k not in shape)
    return Place(node.name, node.parent, node.groups, own)


def _moves(federation: FederationTable) -> dict[str, str]:
    moves = {}
    for move in federation.moves:
        name, arrow, parent = (part.strip() for part in move.partition(">"))
        if not (name and arrow and parent):
            raise ConfigError(f"federation.moves = {move!r}: expected 'place > parent'.")
        moves[name] = parent
    return moves
