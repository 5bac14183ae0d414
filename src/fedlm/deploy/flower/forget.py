"""What nodes sent is gone from the SuperLink's files once it was fetched.

In:       the database of a SuperLink.
Out:      nothing; deleted rows are overwritten, and the write-ahead log is emptied now and then.
Promise:  an answer that was deleted is in no file of the database after `SECONDS` at most, while
          the server runs or after it was stopped in good order.
Not here: when the SuperLink deletes an answer (flwr does, after it was fetched); blocks of a disk
          that no file holds any more.

SQLite leaves what was deleted in its pages, and in its log until that is written over: the sums of
nodes, without any noise, would lie in the server's folder for as long as it is there.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from pathlib import Path
from typing import Any

from sqlalchemy import event
from sqlalchemy.engine import Engine

SECONDS = 2.0


def overwrite_deleted(connection: Any, record: Any) -> None:
    """Have SQLite overwrite with zeros what a connection deletes."""
    if isinstance(connection, sqlite3.Connection):
        connection.execute("PRAGMA secure_delete = ON")


def empty_log(database: Path) -> bool:
    """Write the log of a database into it and cut the log to nothing; return whether it worked."""
    with contextlib.suppress(sqlite3.Error):
        connection = sqlite3.connect(f"file:{database}?mode=rw", timeout=1.0, uri=True)
        with contextlib.closing(connection):
            busy, *_ = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            return not busy
    return False


def forget_deleted(database: Path) -> None:
    """Keep a database, which this process is about to open, free of what was deleted from it."""
    event.listen(Engine, "connect", overwrite_deleted)
    never = threading.Event()

    def again_and_again() -> None:
        while not never.wait(SECONDS):
            empty_log(database)

    threading.Thread(target=again_and_again, daemon=True).start()
