"""A tiny real corpus, a recipe for it, and a way to run commands on them in this process."""

import asyncio
import contextlib
import gc
import hashlib
import io
import json
import os
import runpy
import socket
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

# Tests wait for the compiler more than for what it makes. Before JAX is loaded.
# Without the optimiser, the emitters that go through MLIR and a module of LLVM per core it takes a
# quarter of the time. These are names of XLA in jaxlib 0.10: one that it does not know ends Python.
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_backend_optimization_level=0",
        "--xla_cpu_use_fusion_emitters=false",
        "--xla_cpu_parallel_codegen_split_count=1",
        "--xla_llvm_disable_expensive_passes=true",
    ]
)

import hypothesis
import jax
import numpy as np
import pytest

# Bytecode is kept, whatever the environment says: otherwise each worker, and each command that a
# test starts, compiles all of fedlm again. Git ignores it.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Two lanes, so that a mistake in sharding shows everywhere; before JAX is first used.
jax.config.update("jax_num_cpu_devices", 2)
assert jax.device_count() == 2  # and it stays so: a command run in here cannot change it
jax.config.update("jax_numpy_rank_promotion", "raise")
# The same programs are compiled again and again, here, by the other worker and in the next run.
# They are kept beside those of fedlm itself, in a folder for this kind of processor that does not
# grow without bound. The process that starts the others chooses it; they, and commands that tests
# start, keep to it. An empty folder of one's own is a run that compiles everything.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    # Without the package around it, which takes a second to load.
    programs = runpy.run_path(str(Path(__file__).parents[1] / "src/fedlm/engine/programs.py"))
    folder = programs["programs_folder"]("test-programs")
    if folder is None:
        made = tempfile.TemporaryDirectory(prefix="fedlm-programs-", ignore_cleanup_errors=True)
        folder = made.name
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder)
    # To write a program of one operation takes as long as to compile it once more.
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.02"
kept_from = float(os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", kept_from)
jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
# Which line of Python made an operation is written into every program, and nobody reads it here.
jax.config.update("jax_traceback_in_locations_limit", 0)


# How many examples a property is tried on, where it does not say itself; `make test-all` takes the
# second profile.
hypothesis.settings.register_profile("default run", max_examples=20, deadline=None)
hypothesis.settings.register_profile("all", max_examples=300, deadline=None)
hypothesis.settings.load_profile("default run")


def _sync(file):
    """Check that a file is open, and do not wait for the disk.

    Processes are killed here, and never the machine: what was written stays. Tests of when
    something is synced put their own function in this place.
    """
    os.fstat(file)


os.fsync = _sync


class FilesWithExamples:
    """Look for examples in docstrings only in files that have any: to look costs an import."""

    @pytest.hookimpl(wrapper=True)
    def pytest_collect_file(self, file_path):
        found = yield
        if file_path.suffix == ".py" and b">>> " not in file_path.read_bytes():
            return [each for each in found if type(each) is pytest.Module]  # tests, no examples
        return found


def pytest_configure(config):
    """Look at files outside of this folder too, which hooks of a conftest do not."""
    config.pluginmanager.register(FilesWithExamples())


def pytest_collection_finish():
    """Let the collector of garbage pass over modules and tests, which stay until the end."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


# A process may map 65,530 parts of memory (vm.max_map_count). A compiled program takes up to
# a few thousand, and with none left XLA ends the process by a signal when it compiles the next.
MOST_MAPS = 40_000


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    """Let go of compiled programs before they fill the map of this process."""
    elsewhere = nextitem is None or nextitem.path != item.path
    if (elsewhere or item.get_closest_marker("slow")) and _maps() > MOST_MAPS:
        jax.clear_caches()
        gc.collect()


def _maps():
    try:
        return Path("/proc/self/maps").read_bytes().count(b"\n")
    except OSError:
        return 0  # no Linux: no such limit


def pytest_sessionfinish():
    """Look through the garbage once: pytest does it five times for errors that were not raised."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Keep a few cases of each grid marked `sample(n)` for the default run; the rest are slow.

    Which ones follows from the names of the file and of the case alone: the same everywhere,
    nobody's favourites, and grids of one file over the same cases draw the same ones, so that what
    they compile is compiled once.
    """
    grids = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sample") and not item.get_closest_marker("slow"):
            grids[item.nodeid.split("[")[0]].append(item)
    for cases in grids.values():
        kept = cases[0].get_closest_marker("sample").args[0]
        for case in sorted(cases, key=_place_in_the_draw)[kept:]:
            case.add_marker(pytest.mark.slow)


def _place_in_the_draw(item):
    file, _, name = item.nodeid.partition("::")
    return hashlib.blake2b(f"{file} {name.partition('[')[2]}".encode()).digest()


class WaitlessClock:
    """A clock that moves on by what others sleep.

    Nodes that a test calls in its own thread do nothing while it sleeps: waiting for a deadline or
    for the next look takes no time, and is told like any other.
    """

    def __init__(self):
        self.skipped = 0.0

    def monotonic(self):
        return time.monotonic() + self.skipped

    def sleep(self, seconds):
        self.skipped += seconds


WAITING = ["engine.dispatch", "engine.buffered", "engine.remote", "engine.secure_remote"]
WAITING += ["deploy.registration"]


@pytest.fixture(autouse=True)
def nobody_waits(request, monkeypatch):
    """Let servers wait for nodes in no time, unless they are processes of their own."""
    if not request.node.get_closest_marker("network"):
        clock = WaitlessClock()
        for name in WAITING:
            if module := sys.modules.get(f"fedlm.{name}"):
                monkeypatch.setattr(module, "time", clock)


WORDS = ["the", "a", "cat", "dog", "sun", "moon", "sat", "ran", "saw", "on", "big", "red", "and"]
RECIPE = """
[data]
source = "tiny.jsonl"
vocabulary = 60
sequence_length = 8

[model]
embedding_size = 8
hidden_size = 12

[client]
batch_size = 4

[server]
rounds = 6
cohort = 4
evaluate_every = 2

[run]
devices = 2
checkpoint_every = 2
trackers = []
prompts = ["the cat"]
"""


@dataclass(frozen=True)
class Result:
    """What a command printed, and how it ended."""

    code: int
    stdout: str
    stderr: str

    @property
    def json(self):
        """The one JSON object on stdout."""
        return json.loads(self.stdout)


def call(folder: Path, *args: object, stdin: str = "") -> Result:
    """Runs `fedlm ARGS` in a folder, in this process."""
    from fedlm.cli.main import main  # here, so that a broken door fails only who goes through it

    out, err = io.StringIO(), io.StringIO()
    stdout, stderr = contextlib.redirect_stdout(out), contextlib.redirect_stderr(err)
    with pytest.MonkeyPatch.context() as patch, contextlib.chdir(folder):
        patch.setattr(sys, "argv", ["fedlm", *map(str, args)])
        patch.setattr(sys, "stdin", io.StringIO(stdin))
        with stdout, stderr, pytest.raises(SystemExit) as ended:
            main()
    return Result(ended.value.code or 0, out.getvalue(), err.getvalue())


def write_tiny(folder: Path) -> Path:
    """Twenty clients in two levels of groups, and the recipe beside them."""
    rng = np.random.default_rng(0)
    with open(folder / "tiny.jsonl", "w", encoding="utf-8") as file:
        for number in range(20):
            lines = [" ".join(rng.choice(WORDS, rng.integers(3, 9))) for _ in range(8)]
            groups = ["north" if number % 2 else "south", f"town-{number % 4}"]
            entry = {"client": f"c{number}", "groups": groups, "text": "\n".join(lines)}
            file.write(json.dumps(entry) + "\n")
    (folder / "tiny.toml").write_text(RECIPE, encoding="utf-8")
    return folder / "tiny.toml"


@pytest.fixture
def tiny_recipe(tmp_path):
    """A recipe that trains in a moment."""
    return write_tiny(tmp_path)


@pytest.fixture
def tiny_text(tiny_recipe):
    """The text it trains on."""
    return tiny_recipe.parent / "tiny.jsonl"


@pytest.fixture
def run_cli(tmp_path):
    """`run_cli("train", recipe)`: a command, run in `tmp_path`."""
    return lambda *args, **kwargs: call(tmp_path, *args, **kwargs)


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """A folder with tiny.toml, tiny.jsonl and a finished run in runs/tiny. Not to be changed.

    What the command printed is in stdout.txt.
    """
    folder = tmp_path_factory.mktemp("trained")
    write_tiny(folder)
    done = call(folder, "train", "tiny.toml", "--json")
    assert done.code == 0, done.stderr
    (folder / "stdout.txt").write_text(done.stdout, encoding="utf-8")
    return folder


def sends_at_once(listener):
    """Tell whether connections that asyncio accepts at a socket send small answers at once."""
    seen = []

    class Accepted(asyncio.Protocol):
        def connection_made(self, transport):
            made = transport.get_extra_info("socket")
            seen.append(made.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            transport.close()

    async def connect():
        with listener as made:
            server = await asyncio.get_running_loop().create_server(Accepted, sock=made)
            reader, writer = await asyncio.open_connection(*made.getsockname())
            await reader.read()
            writer.close()
            server.close()

    asyncio.run(connect())
    return bool(seen) and all(seen)
