"""A server's database is whole under its name, or not there; a damaged one is made again."""

import contextlib
import sqlite3
import stat

import pytest
from alembic import command
from flwr.supercore.state.alembic.utils import build_alembic_config
from sqlalchemy import create_engine

from fedlm.deploy.flower import database

pytestmark = pytest.mark.filterwarnings("ignore:No path_separator:DeprecationWarning")  # flwr's
BASELINE = "8e65d8ae60b0"  # the oldest tables that flwr upgrades


@pytest.fixture
def path(tmp_path):
    return tmp_path / "link.db"


def tables(path):
    with contextlib.closing(sqlite3.connect(path)) as found:
        names = found.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        return {name for (name,) in names}


def ready(path):
    said = []
    database.make_ready(path, said.append)
    assert {"node", "run", "objects"} <= tables(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not list(path.parent.glob(f"*{database.UNFINISHED}*"))
    return said


def at_revision(path, revision):
    engine = create_engine(f"sqlite:///{path}")
    command.upgrade(build_alembic_config(engine), revision)
    engine.dispose()
    path.chmod(0o600)


def test_a_database_is_made_once(path):
    assert ready(path) == []
    before = path.read_bytes()
    assert ready(path) == [] and path.read_bytes() == before


class Killed(BaseException):
    """As if the process had been killed here."""


def test_a_first_start_that_was_killed_starts_again(path, monkeypatch):
    def killed(engine):
        with engine.begin() as connection:
            connection.exec_driver_sql("CREATE TABLE node (half INT)")
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(database, "run_migrations", killed)
        database.make_ready(path, print)
    assert not path.exists(), "nothing half made has its name"
    (path.parent / f"link.db{database.UNFINISHED}0").write_bytes(b"of a killed process")
    assert ready(path) == []


def half_made(path):
    """What a killed first start of Flower itself leaves: tables without their revision."""
    at_revision(path, BASELINE)
    with contextlib.closing(sqlite3.connect(path)) as found, found:
        found.execute("DROP TABLE alembic_version")
        found.execute("DROP TABLE run")


def of_a_newer_flwr(path):
    at_revision(path, BASELINE)
    with contextlib.closing(sqlite3.connect(path)) as found, found:
        found.execute("UPDATE alembic_version SET version_num = 'ffffffffffff'")


def flipped(path):
    database.make_ready(path, print)
    content = bytearray(path.read_bytes())
    content[4096 : 4096 + 2048] = b"\xff" * 2048
    path.write_bytes(content)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "damage",
    [
        half_made,
        of_a_newer_flwr,
        flipped,
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"no database at all" * 1000),
    ],
)
def test_a_damaged_database_is_put_aside_and_made_again(path, damage):
    damage(path)
    path.chmod(0o600)
    (said,) = ready(path)
    assert "cannot be used" in said and "--resume" in said
    assert len(list(path.parent.glob(f"link.db{database.DAMAGED}*"))) == 1
    assert ready(path) == []


def test_tables_of_an_older_flwr_are_upgraded_with_what_they_hold(path):
    at_revision(path, BASELINE)
    with contextlib.closing(sqlite3.connect(path)) as found, found:
        columns = [row[1] for row in found.execute("PRAGMA table_info(node)")]
        row = {"node_id": 7, "owner_aid": "a", "status": "registered"}
        kept = {name: value for name, value in row.items() if name in columns}
        marks = ", ".join("?" * len(kept))
        found.execute(
            f"INSERT INTO node ({', '.join(kept)}) VALUES ({marks})", tuple(kept.values())
        )
    (said,) = ready(path)
    assert "upgraded" in said
    with contextlib.closing(sqlite3.connect(path)) as found:
        assert found.execute("SELECT node_id FROM node").fetchall() == [(7,)]
