"""Facts that may leave a run: the only type that its outputs accept.

In:       a kind of fact and the facts, from `privacy/release.py` alone.
Out:      a read-only mapping.
Promise:  journal, terminal, trackers and reports accept no other type, and only
          `privacy/release.py` calls `make_releasable` (a test checks it) and so decides which
          facts may leave a run.
Not here: the rule (`privacy/release.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from fedlm.core.documents import JsonMapping

Kind = Literal["header", "round", "final", "reply", "nodes", "extended", "stopped"]
_KEY = object()


class Releasable(Mapping[str, Any]):
    """Facts that may leave a run; only `fedlm.privacy.release.release` makes them."""

    def __init__(self, kind: Kind, facts: JsonMapping, *, key: object) -> None:
        if key is not _KEY:
            raise TypeError("only fedlm.privacy.release.release makes what may be told.")
        self.kind, self._facts = kind, dict(facts)

    def __getitem__(self, name: str) -> Any:
        return self._facts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._facts)

    def __len__(self) -> int:
        return len(self._facts)

    def __repr__(self) -> str:
        return f"Releasable({self.kind!r}, {self._facts!r})"


def make_releasable(kind: Kind, facts: JsonMapping) -> Releasable:
    """Mark facts as releasable; only `privacy/release.py` may call this."""
    return Releasable(kind, facts, key=_KEY)
