"""The SuperLink's database: made whole, upgraded whole, or made again.

In:       the path of the database, from nowhere, an older flwr, a newer one or a crash.
Out:      a database with the tables of the installed flwr.
Promise:  at every moment there is a whole database under that name, or none: changes are made to a
          copy beside it, which is renamed; a database that cannot be used is put aside, and a new
          one takes its place. It holds registrations, which come from the workspace again, and
          messages on their way, which are sent again; nothing else is lost with it.
Not here: what is in it (flwr), the registrations (`client.py`).

Flower runs its migrations in the database itself: a process that was killed in the first of them
left one that no SuperLink opened again. Written for flwr 1.41 (`flwr.supercore.state.alembic`); can
go once flwr makes its first migration in one transaction.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sqlite3
from collections.abc import Callable
from pathlib import Path

from alembic.script import ScriptDirectory
from flwr.supercore.state.alembic.utils import build_alembic_config, run_migrations
from sqlalchemy import create_engine, event

from fedlm.core.durable import sync_path

UNFINISHED, DAMAGED = ".unfinished-", ".damaged-"
BESIDE = ("", "-wal", "-shm")  # SQLite's own files beside a database


def make_ready(path: Path, say: Callable[[str], None]) -> None:
    """Make the database usable, whatever is there."""
    for left in path.parent.glob(f"{path.name}{UNFINISHED}*"):
        left.unlink(missing_ok=True)
    try:
        if path.exists():
            if _revisions(path) == _newest():
                return
            _replace(path, like=path)
            say("the server's database was upgraded for the installed flwr")
        else:
            _replace(path)
    except (Exception, SystemExit) as error:  # flwr ends the process for tables that it dislikes
        if not path.exists():
            raise
        aside = _put_aside(path)
        say(
            f"the server's database cannot be used ({_brief(error)}). It is now {aside}, and a new "
            "one takes its place: nodes are registered from their keys, and a run goes on with "
            "--resume."
        )
        _replace(path)


def _replace(path: Path, like: Path | None = None) -> None:
    """Make a database beside a path, empty or from another one, and rename it."""
    made = path.with_name(f"{path.name}{UNFINISHED}{secrets.token_hex(4)}")
    os.close(os.open(made, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))  # it holds updates
    try:
        if like is not None:
            with (
                contextlib.closing(sqlite3.connect(like)) as old,
                contextlib.closing(sqlite3.connect(made)) as new,
            ):
                old.backup(new)
        engine = create_engine(f"sqlite:///{made}")
        event.listen(engine, "connect", _hurry)
        try:
            run_migrations(engine)
        finally:
            engine.dispose()
        if _revisions(made) != _newest():
            raise ValueError("its tables are not those of the installed flwr")
        sync_path(made)
        for end in BESIDE[1:]:
            path.with_name(path.name + end).unlink(missing_ok=True)
            made.with_name(made.name + end).unlink(missing_ok=True)
        os.replace(made, path)
    finally:
        made.unlink(missing_ok=True)
    sync_path(path.parent)


def _hurry(connection: sqlite3.Connection, _: object) -> None:
    """Turn off SQLite's syncs while a new database is made; the finished file is synced once."""
    connection.execute("PRAGMA synchronous = OFF")
    connection.execute("PRAGMA journal_mode = MEMORY")


def _revisions(path: Path) -> set[str]:
    """Return the revisions of a database's tables; raise if it is no whole database."""
    with contextlib.closing(sqlite3.connect(path)) as database:
        (found,) = database.execute("PRAGMA quick_check(1)").fetchone()
        if found != "ok":
            raise ValueError(str(found))
        return {row for (row,) in database.execute("SELECT version_num FROM alembic_version")}


def _newest() -> set[str]:
    engine = create_engine("sqlite://")
    return set(ScriptDirectory.from_config(build_alembic_config(engine)).get_heads())


def _put_aside(path: Path) -> Path:
    aside = path.with_name(f"{path.name}{DAMAGED}{secrets.token_hex(4)}")
    for end in BESIDE:
        with contextlib.suppress(FileNotFoundError):
            os.replace(path.with_name(path.name + end), aside.with_name(aside.name + end))
    return aside


def _brief(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
