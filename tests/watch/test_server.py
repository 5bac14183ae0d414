"""The page over HTTP: who is let in, what is streamed, which buttons do what."""

import contextlib
import fcntl
import http.client
import json
import os
import platform
import signal
import subprocess
import sys
import threading
import time

import pytest

pytest.importorskip("starlette", reason="the page is an extra: pip install 'fedlm[watch]'")

from fedlm.core.errors import ConfigError, RecordError
from fedlm.record.directory import RunDirectory
from fedlm.record.status import Status, StatusFile, is_alive, process_start, read_status
from fedlm.watch.board import Board
from fedlm.watch.control import Control, _wait_for_end, resume_command
from fedlm.watch.guard import PageGuard
from fedlm.watch.server import HttpServer, WatchServer, listen
from tests.conftest import sends_at_once
from tests.watch.runs import lines, make_run, round_line


@contextlib.contextmanager
def serving(folder):
    """A real server on loopback; yields what asks it."""
    with listen("127.0.0.1", 0) as made:
        guard = PageGuard("127.0.0.1", made.getsockname()[1])
        watch = WatchServer(folder, guard)
        server = HttpServer(watch)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [made]})
        thread.start()
        try:
            yield Asker(guard)
        finally:
            watch.ends = server.should_exit = True
            thread.join(10)


class Asker:
    """A browser that may pretend to be somebody else."""

    def __init__(self, guard):
        self.guard = guard
        self.cookie = {"Cookie": f"{guard.cookie}={guard.token}"}
        self.origin = {"Origin": f"http://{guard.hosts[0]}"}

    @contextlib.contextmanager
    def open(self, method, path, body=None, headers=None):
        line = http.client.HTTPConnection("127.0.0.1", self.guard.port, timeout=120)
        with contextlib.closing(line):
            line.putrequest(method, path, skip_host=True)
            for name, value in {"Host": self.guard.hosts[0], **(headers or {})}.items():
                line.putheader(name, value)
            if body is not None:
                line.putheader("Content-Length", str(len(body)))
            line.endheaders(body)
            with line.getresponse() as answer:
                yield answer

    def ask(self, method, path, body=None, headers=None):
        with self.open(method, path, body, headers) as answer:
            return answer.status, answer.read()

    def post(self, path, headers=None, **body):
        data = json.dumps(body).encode()
        status, raw = self.ask(
            "POST", path, data, {**self.cookie, **self.origin, **(headers or {})}
        )
        return status, json.loads(raw) if raw.startswith(b"{") else raw


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("watched")
    make_run(path / "one")
    (make_run(path / "broken") / "journal.jsonl").write_text("{\n{\n")
    return path


@pytest.fixture(scope="module")
def asker(folder):
    with serving(folder) as found:
        yield found


def test_the_token_opens_the_page_and_becomes_a_cookie(asker):
    with asker.open("GET", f"/?token={asker.guard.token}") as answer:
        assert answer.status == 200 and b"fedlm watch" in answer.read()
        cookie, policy = answer.headers["set-cookie"], answer.headers["content-security-policy"]
    assert "HttpOnly" in cookie and "SameSite=strict" in cookie
    assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
    assert asker.ask("GET", "/", headers=asker.cookie)[0] == 200
    assert asker.ask("GET", "/pages/app.js", headers=asker.cookie)[0] == 200


@pytest.mark.parametrize(
    "path, headers",
    [
        ("/", {}),
        ("/?token=wrong", {}),
        ("/events", {}),
        ("/pages/app.js", {}),
        ("/events?token=right", {}),
        ("/", {"Host": "evil.example", "cookie": "right"}),
        ("/", {"Host": "127.0.0.1", "cookie": "right"}),
        ("/events", {"Origin": "http://evil.example", "cookie": "right"}),
        ("/events", {"Origin": "null", "cookie": "right"}),
        ("/events", {"Sec-Fetch-Site": "cross-site", "cookie": "right"}),
        ("/events", {"Sec-Fetch-Site": "same-site", "cookie": "right"}),
    ],
)
def test_whoever_is_not_the_page_is_refused(asker, path, headers):
    headers = dict(headers)
    if headers.pop("cookie", None):
        headers |= asker.cookie
    path = path.replace("token=right", f"token={asker.guard.token}")
    status, said = asker.ask("GET", path, headers=headers)
    assert status == 403 and b"fedlm" not in said.lower().replace(b"fedlm watch printed", b"")


def test_a_change_needs_our_origin(asker):
    body = b'{"id": "one"}'
    for origin in ({}, {"Origin": "http://evil.example"}, {"Origin": "null"}):
        for path in ("/stop", "/resume", "/suggest"):
            assert asker.ask("POST", path, body, {**asker.cookie, **origin})[0] == 403
    assert asker.ask("GET", "/stop", headers={**asker.cookie, **asker.origin})[0] == 405


@pytest.mark.parametrize("name", ["../server.py", "..%2fserver.py", "nothing.js", "%00.js", "."])
def test_only_files_of_the_page_are_served(asker, name):
    assert asker.ask("GET", f"/pages/{name}", headers=asker.cookie)[0] == 404


def test_wrong_requests_give_a_sentence(asker):
    assert asker.post("/stop", id="../x")[0] == 400
    assert "no run" in asker.post("/stop", id="../x")[1]["error"]
    assert "nothing to stop" in asker.post("/stop", id="one")[1]["error"]
    assert "id" in asker.post("/stop", name="one")[1]["error"]
    assert "text" in asker.post("/suggest", id="one")[1]["error"]
    assert "no trained model" in asker.post("/suggest", id="one", text="a")[1]["error"]
    assert asker.post("/suggest", id="one", text="a" * 100_000)[0] == 400
    assert asker.ask("POST", "/stop", b"\xff{", {**asker.cookie, **asker.origin})[0] == 400


def events(answer, count):
    found, kind = [], None
    while len(found) < count:
        line = answer.readline().decode().rstrip("\n")
        if line.startswith("event: "):
            kind = line[7:]
        elif line.startswith("data: "):
            found.append((kind, json.loads(line[6:])))
    return found


def test_the_stream_sends_what_changes(tmp_path):
    path = make_run(tmp_path / "one", rounds=2)
    (make_run(tmp_path / "broken") / "journal.jsonl").write_text("{\n{\n")
    with (
        serving(tmp_path) as asker,
        asker.open("GET", "/events?run=one&run=gone", headers=asker.cookie) as answer,
    ):
        assert answer.headers["content-type"].startswith("text/event-stream")
        (_, board), (_, one), (_, gone) = events(answer, 3)
        rows = {row["id"]: row for row in board["rows"]}
        assert "damaged" in rows["broken"]["problem"] and rows["one"]["round"] == 2
        assert len(one["points"]) == 2 and "no run" in gone["problem"]
        with open(path / "journal.jsonl", "a") as file:
            file.write(lines(round_line(2)))
        (_, board), (_, one) = events(answer, 2)
        assert [row["id"] for row in board["rows"]] == ["one"]  # the other did not change
        assert board["rows"][0]["round"] == 3 and len(one["points"]) == 3


def test_small_answers_are_sent_at_once():
    """A connection of the page does not wait for others' acknowledgements (Nagle)."""
    assert sends_at_once(listen("127.0.0.1", 0))


def test_a_taken_port_gives_a_sentence():
    with listen("127.0.0.1", 0) as made, pytest.raises(ConfigError, match="--port"):
        listen("127.0.0.1", made.getsockname()[1])


# ---- buttons -------------------------------------------------------------------------------

RUN = """
import fcntl, os, signal, sys, time
lock = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
fcntl.flock(lock, fcntl.LOCK_EX)
os.write(lock, str(os.getpid()).encode())
def stop(number, frame):
    raise SystemExit(7)
signal.signal(signal.SIGINT, stop)
print("here", flush=True)
while True:  # a signal that comes just before a sleep is handled after it
    time.sleep(0.1)
"""


@pytest.fixture
def at_work(tmp_path):
    """A process that holds a run, as `fedlm train` does: its lock and its status name it."""
    path = make_run(tmp_path / "one")
    words = [sys.executable, "-S", "-c", RUN, str(path / ".lock")]
    process = subprocess.Popen(words, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"here\n"
    now = time.time()
    status = Status(
        pid=process.pid, process=process_start(process.pid), state="training", folder="/",
        started=now, updated=now,
    )  # fmt: skip
    (path / "status.json").write_text(status.model_dump_json())
    yield path, process
    process.kill()
    process.wait()
    process.stdout.close()


def test_stop_is_ctrl_c_for_the_process_of_that_run_alone(at_work):
    path, process = at_work
    control, status = Control(Board(path.parent)), read_status(path / "status.json")

    def pretend(**changes):
        (path / "status.json").write_text(status.model_copy(update=changes).model_dump_json())

    pretend(pid=os.getpid(), process=process_start(os.getpid()))  # somebody else's number
    with pytest.raises(RecordError, match="not locked by"):
        control.stop("one")
    pretend(process="1")  # the number of an earlier process
    with pytest.raises(RecordError, match="another one"):
        control.stop("one")
    assert process.poll() is None
    pretend()
    assert "stops" in control.stop("one")
    assert process.wait(120) == 7


def test_a_run_that_said_its_last_word_is_waited_for(at_work):
    """Its process takes a while to end, and holds the lock until then."""
    path, process = at_work
    status = read_status(path / "status.json").model_copy(update={"state": "stopped"})
    timer = threading.Timer(0.5, process.kill)
    timer.start()
    _wait_for_end(status, process)
    assert process.poll() is not None and not is_alive(status)
    timer.join()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the number of a system call")
def test_a_child_whose_main_thread_is_gone_is_waited_for(at_work):
    """Such a process counts as gone by its number, and cannot be reaped yet."""
    path, _ = at_work
    code = (
        "import threading, time, ctypes; threading.Thread(target=time.sleep, args=(1,)).start(); "
    )
    code += "ctypes.CDLL(None).syscall(60, 0)"  # the main thread ends alone
    child = subprocess.Popen([sys.executable, "-S", "-c", code])
    while process_start(child.pid):
        time.sleep(0.01)
    gone = read_status(path / "status.json").model_copy(update={"pid": child.pid, "process": "1"})
    assert child.poll() is None
    _wait_for_end(gone, child)
    assert child.poll() is not None


@pytest.mark.parametrize("locked", [False, True], ids=["no lock", "the lock of another one"])
def test_a_process_that_holds_no_lock_is_not_stopped(tmp_path, locked):
    """Whoever writes into a run directory could name any process of its reader there."""
    path = make_run(tmp_path / "one")
    holder = os.open(path / ".lock", os.O_RDWR | os.O_CREAT)
    if locked:
        fcntl.flock(holder, fcntl.LOCK_EX)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        StatusFile(path / "status.json", command="train").begin()
        named = {"pid": child.pid, "process": process_start(child.pid)}
        told = read_status(path / "status.json").model_copy(update=named)
        (path / "status.json").write_text(told.model_dump_json())
        (path / ".lock").write_text(f"{child.pid}\n")
        with pytest.raises(RecordError, match="is not locked by"):
            Control(Board(tmp_path)).stop("one")
        assert child.poll() is None
    finally:
        os.close(holder)
        child.kill()
        child.wait()


def test_a_run_that_ended_cannot_be_stopped(at_work):
    path, process = at_work
    process.send_signal(signal.SIGKILL)  # it leaves its lock and its status
    process.wait()
    with pytest.raises(RecordError, match="ended"):
        Control(Board(path.parent)).stop("one")


def test_a_status_file_chooses_no_program_and_no_option(tmp_path):
    now = time.time()
    status = Status(pid=1, process="1", folder="/", started=now, updated=now,
                    command="federation train", home="--help")  # fmt: skip
    words = resume_command(RunDirectory(tmp_path), status)
    assert words[:4] == [sys.executable, "-P", "-m", "fedlm.cli.main"]
    assert words[4:6] == ["federation", "train"] and words[6].endswith("/--help")
    assert words[6].startswith("/")


def test_a_resumed_run_loads_no_module_of_the_folder_that_its_status_names(tmp_path):
    """`python -m` looks into its working folder first, which somebody else may have filled."""
    for name in ("typer", "fedlm", "numpy"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'loaded')!r}, 'w')")
    words = resume_command(RunDirectory(tmp_path), None)
    subprocess.run([*words[:4], "--version"], cwd=tmp_path, check=True, capture_output=True)
    assert not (tmp_path / "loaded").exists()


@pytest.mark.slow
def test_a_resumption_that_fails_says_why(tmp_path):
    path = make_run(tmp_path / "one")
    (path / "recipe.toml").write_text("[server]\ncohrt = 1\n")
    StatusFile(path / "status.json", command="train").begin()
    control = Control(Board(tmp_path))
    assert "goes on" in control.resume("one")
    with pytest.raises(RecordError, match="already"):
        control.resume("one")
    control._begun["one"].wait(300)
    assert "cohort" in control.failures()["one"]
    (path / "summary.json").write_text("{}")
    with pytest.raises(RecordError, match="complete"):
        control.resume("one")
