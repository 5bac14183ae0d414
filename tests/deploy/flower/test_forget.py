"""A deleted answer is in no file of the database; without care it stays in two."""

import pytest
import sqlalchemy
from sqlalchemy import event, text

from fedlm.deploy.flower.forget import empty_log, overwrite_deleted

SENT = b"the sum of a node, before noise" * 3000


@pytest.mark.parametrize("careful", [True, False])
def test_what_was_deleted_is_gone(tmp_path, careful):
    path = tmp_path / "link.db"
    engine = sqlalchemy.create_engine(f"sqlite:///{path}")
    # As SQLite is by default; Debian's is built to overwrite.
    event.listen(engine, "connect", lambda c, _: c.execute("PRAGMA secure_delete = OFF"))
    if careful:
        event.listen(engine, "connect", overwrite_deleted)
    with engine.connect() as base:  # stays open, as that of a server
        base.execute(text("pragma journal_mode = wal"))
        base.execute(text("create table t (x blob)"))
        base.execute(text("insert into t values (:x)"), {"x": SENT})
        base.commit()
        assert empty_log(path) and found(tmp_path)  # in the pages
        base.execute(text("insert into t values (:x)"), {"x": SENT})
        base.commit()
        base.execute(text("delete from t"))
        base.commit()
        assert found(tmp_path)  # in the log
        assert empty_log(path) and (tmp_path / "link.db-wal").stat().st_size == 0
        assert found(tmp_path) is not careful


def found(folder):
    return any(SENT[:62] in path.read_bytes() for path in folder.iterdir())


def test_a_missing_database_is_not_made(tmp_path):
    assert not empty_log(tmp_path / "none.db")
    assert list(tmp_path.iterdir()) == []
