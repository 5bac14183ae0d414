"""The shape of a federation as data.

In:       places with a name and the name of a parent; or the group paths of a store's clients.
Out:      a `Topology`: places in an order in which parents come before their children.
Promise:  one root, no cycle, no unknown parent, no name twice; every place leads to text; a client
          belongs to one place at most. Flat is depth one.
Not here: state (`tree_round.py`), what a place does in a round (`tree_round.py`).

A place that holds text is fed by groups: the names that the store's clients carry. Clients whose
groups feed no place are left out, and how many is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from fedlm.core.errors import ConfigError, nearest, require
from fedlm.core.types import GroupPath

ROOT = "root"
EVERYBODY = "*"  # the group of all clients that feed no other place


@dataclass(frozen=True)
class Place:
    """A node of the tree; `own` are settings that differ from those of its federation."""

    name: str
    parent: str | None
    groups: tuple[str, ...] = ()
    own: tuple[tuple[str, Any], ...] = ()

    def setting(self, name: str, otherwise: Any) -> Any:
        """Return the place's own value of a setting, or the value of its federation."""
        return dict(self.own).get(name, otherwise)


@dataclass(frozen=True)
class Topology:
    """Places, parents before children, and the clients that feed each."""

    places: tuple[Place, ...]
    clients: tuple[tuple[int, ...], ...]  # of each place, positions among the training clients

    def __len__(self) -> int:
        return len(self.places)

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(place.name for place in self.places)

    @cached_property
    def parents(self) -> tuple[int | None, ...]:
        number = {name: i for i, name in enumerate(self.names)}
        return tuple(None if p.parent is None else number[p.parent] for p in self.places)

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        return tuple(
            tuple(i for i, parent in enumerate(self.parents) if parent == node)
            for node in range(len(self))
        )

    @cached_property
    def depths(self) -> tuple[int, ...]:
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent is None else depths[parent] + 1)
        return tuple(depths)

    @cached_property
    def heights(self) -> tuple[int, ...]:
        """The number of levels below each place."""
        heights = [0] * len(self)
        for node in reversed(range(len(self))):
            for child in self.children[node]:
                heights[node] = max(heights[node], heights[child] + 1)
        return tuple(heights)

    @cached_property
    def with_text(self) -> tuple[int, ...]:
        return tuple(i for i, held in enumerate(self.clients) if held)

    def below(self, node: int) -> frozenset[int]:
        """Return a place and all places under it."""
        found = {node}
        for child in self.children[node]:
            found |= self.below(child)
        return frozenset(found)

    def levels(self) -> list[list[int]]:
        """Places by depth, from the root."""
        return [
            [i for i, d in enumerate(self.depths) if d == k] for k in range(max(self.depths) + 1)
        ]

    def picture(self) -> list[str]:
        """Draw the tree, one line per place.

        >>> print("\\n".join(tree([Place("a", None), Place("b", "a", ("x",))], [("x",)]).picture()))
        a
        └─ b (1 client)
        """
        lines: list[str] = []

        def draw(node: int, before: str, mark: str, after: str) -> None:
            held = len(self.clients[node])
            told = f" ({held} client{'s' if held != 1 else ''})" if held else ""
            lines.append(f"{before}{mark}{self.names[node]}{told}")
            last = self.children[node][-1:]
            for child in self.children[node]:
                ends = (child,) == last
                draw(child, before + after, "└─ " if ends else "├─ ", "   " if ends else "│  ")

        draw(0, "", "", "")
        return lines


def tree(places: Iterable[Place], groups: Sequence[GroupPath]) -> Topology:
    """Make a topology from places in any order and the group path of every training client."""
    ordered = _in_order(tuple(places))
    known = sorted({name for path in groups for name in path})
    for place in ordered:
        for name in place.groups:
            if name not in known and name != EVERYBODY:
                raise ConfigError(
                    f"federation: {place.name!r} is fed by the group {name!r}, which no training "
                    f"client of this store has. {nearest(name, known)}"
                )
    made = Topology(ordered, feed(ordered, groups))
    for node, place in enumerate(ordered):
        empty = not any(made.clients[i] for i in made.below(node))
        if empty:
            raise ConfigError(
                f"federation: {place.name!r} is empty: neither it nor a place under it has any "
                "text. Give it groups, or leave it out."
            )
    return made


def _in_order(places: tuple[Place, ...]) -> tuple[Place, ...]:
    """Sort places so that parents come before children; refuse places that form no tree."""
    by_name: dict[str, Place] = {}
    for place in places:
        if place.name in by_name:
            raise ConfigError(f"federation: two places are named {place.name!r}.")
        by_name[place.name] = place
    for place in places:
        if place.parent is not None and place.parent not in by_name:
            raise ConfigError(
                f"federation: the parent {place.parent!r} of {place.name!r} is not there. "
                f"{nearest(place.parent, by_name)}"
            )
    roots = [place for place in places if place.parent is None]
    ordered: list[Place] = []

    def visit(place: Place) -> None:
        ordered.append(place)
        for child in places:
            if child.parent == place.name:
                visit(child)

    for root in roots[:1]:
        visit(root)
    lost = [place.name for place in places if place not in ordered]
    if len(roots) == 1 and lost:
        raise ConfigError(f"federation: {', '.join(lost)} form a cycle: their parents never end.")
    require(
        len(roots) == 1,
        "federation.node",
        [root.name for root in roots],
        "one place without a parent, the root",
    )
    return tuple(ordered)


def feed(places: tuple[Place, ...], groups: Sequence[GroupPath]) -> tuple[tuple[int, ...], ...]:
    """Assign each client to the place that its most specific group feeds."""
    owner: dict[str, int] = {}
    for node, place in enumerate(places):
        for name in place.groups:
            if name in owner:
                raise ConfigError(
                    f"federation: the group {name!r} feeds both {places[owner[name]].name!r} and "
                    f"{place.name!r}: text belongs to one place."
                )
            owner[name] = node
    fed: list[list[int]] = [[] for _ in places]
    for client, path in enumerate(groups):
        for name in (*reversed(path), EVERYBODY):
            if name in owner:
                fed[owner[name]].append(client)
                break
    return tuple(tuple(clients) for clients in fed)


def grown(levels: Sequence[int], groups: Sequence[GroupPath]) -> tuple[Place, ...]:
    """Make places from the group paths: one level of the tree per named level.

    >>> [p.name for p in grown((0, 1), [("north", "oslo"), ("south", "rome")])]
    ['root', 'north', 'south', 'oslo', 'rome']
    """
    deepest = min((len(path) for path in groups), default=0)
    for level in levels:
        require(
            0 <= level < deepest,
            "federation.levels",
            list(levels),
            f"levels below {deepest}: every training client of this store has {deepest} groups",
        )
    if not levels:
        return (Place(ROOT, None, (EVERYBODY,)),)
    made: dict[str, Place] = {ROOT: Place(ROOT, None)}
    for depth, level in enumerate(levels):
        above = levels[depth - 1] if depth else None
        for path in groups:
            name, parent = path[level], ROOT if above is None else path[above]
            fed = (name,) if depth + 1 == len(levels) else ()
            if made.setdefault(name, Place(name, parent, fed)).parent != parent:
                raise ConfigError(
                    f"federation.levels: the group {name!r} lies under {made[name].parent!r} and "
                    f"under {parent!r}: such a tree must be written out with federation.node."
                )
    return tuple(made.values())


def only(places: Iterable[Place], names: Sequence[str]) -> tuple[Place, ...]:
    """Keep the places with these names and their ancestors; without names, keep all."""
    by_name = {place.name: place for place in places}
    kept: set[str] = set()
    for name in names:
        if name not in by_name:
            raise ConfigError(f"federation.only: no place {name!r}. {nearest(name, by_name)}")
        at: str | None = name
        while at is not None and at not in kept:
            kept.add(at)
            at = by_name[at].parent
    return tuple(p for p in by_name.values() if not names or p.name in kept)


def moved(places: Iterable[Place], moves: Mapping[str, str]) -> tuple[Place, ...]:
    """Move places to other parents, to test robustness against a wrong tree."""
    by_name = {place.name: place for place in places}
    for name, parent in moves.items():
        for said in (name, parent):
            if said not in by_name:
                raise ConfigError(f"federation.moves: no place {said!r}. {nearest(said, by_name)}")
    return tuple(
        replace(place, parent=moves.get(place.name, place.parent)) for place in by_name.values()
    )
