"""What a run is doing now, in one small file."""

import json
import os
import subprocess
import sys
import time

import pytest

from fedlm.core.errors import RecordError
from fedlm.record.status import StatusFile, is_alive, process_start, read_status


def test_a_status_is_read_back_as_it_was_told(tmp_path):
    file = StatusFile(tmp_path / "status.json", command="pretrain")
    file.begin()
    file._wrote -= 0.1
    file.tell(state="training", doing="waiting for\nsweden,  40 s", round=3, rounds=9)
    found = read_status(tmp_path / "status.json")
    assert (found.state, found.doing, found.round, found.rounds) == (
        "training", "waiting for sweden, 40 s", 3, 9
    )  # fmt: skip
    assert (found.command, found.pid, found.folder) == ("pretrain", os.getpid(), os.getcwd())
    assert is_alive(found) and found.updated >= found.started
    assert list(tmp_path.iterdir()) == [tmp_path / "status.json"]  # nothing half-written


def test_nothing_is_written_before_the_directory_is_the_runs(tmp_path):
    """A second `fedlm train` on the same directory is refused: it leaves the first one's status."""
    file = StatusFile(tmp_path / "status.json", command="train")
    file.tell(state="failed", doing="another process trains here")
    assert not (tmp_path / "status.json").exists()


def test_rounds_are_written_now_and_then_and_changes_of_state_at_once(tmp_path):
    path = tmp_path / "status.json"
    file = StatusFile(path, command="train")
    file.begin()
    for number in range(200):
        file.tell(round=number)
    assert read_status(path).round == 0  # within half a second nothing else was written
    file._wrote -= 0.1
    file.tell(state="training", round=200)
    assert read_status(path).round == 200
    file._wrote = time.monotonic() - 1.0
    file.tell(round=201)
    assert read_status(path).round == 201


def test_a_full_disk_ends_no_run(tmp_path):
    file = StatusFile(tmp_path / "file" / "status.json", command="train")
    (tmp_path / "file").write_text("not a folder")
    file.begin()
    file.tell(state="training")


@pytest.mark.parametrize(
    "change, words",
    [
        ({"pid": "7"}, "pid"),
        ({"state": "thinking"}, "state"),
        ({"round": -1}, "round"),
        ({"command": "rm"}, "command"),
        ({"also": 1}, "also"),
        ({"doing": "x" * 501}, "doing"),
    ],
)
def test_a_damaged_status_gives_a_sentence(tmp_path, change, words):
    path = tmp_path / "status.json"
    StatusFile(path, command="train").begin()
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(RecordError, match=words):
        read_status(path)


@pytest.mark.parametrize("raw", [b"", b"{", b"\xff", b"[" * 9999, b"null"])
def test_any_bytes_give_a_sentence(tmp_path, raw):
    (tmp_path / "status.json").write_bytes(raw)
    with pytest.raises(RecordError, match=r"status\.json"):
        read_status(tmp_path / "status.json")


def test_an_ended_process_is_not_alive(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    began = process_start(process.pid)
    assert began
    process.stdin.close()
    while process_start(process.pid):  # it stays as a zombie until it is waited for
        time.sleep(0.01)
    process.wait()
    assert process_start(process.pid) == ""
