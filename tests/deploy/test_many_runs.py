"""A node that serves run after run, for months: it keeps the programs of its latest runs alone."""

import gc
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from fedlm.core.program_cache import keep_programs, kept_programs
from fedlm.corpus.store import Store
from fedlm.deploy import node
from fedlm.deploy.networked_run import networked_run
from fedlm.deploy.node_worker import MOST_KEPT
from fedlm.recipe.build import build, flat_run
from fedlm.recipe.parts import resolve
from fedlm.recipe.settings import load
from tests.conftest import write_tiny
from tests.deploy.local import LocalTransport, workers

RUNS = 6


def test_a_maker_of_programs_keeps_the_latest_as_many_as_the_process_was_told():
    made = kept_programs(lambda name: [name])
    first = [made(name) for name in "abc"]
    assert made("b") is first[1]
    before = keep_programs(2)
    try:
        assert made("c") is first[2] and made("b") is first[1], "the latest asked for"
        assert made("a") is not first[0]
        assert made("c") is not first[2], "a is one of two now"
    finally:
        assert keep_programs(before) == 2


def test_a_node_keeps_the_programs_of_its_latest_runs_alone(tmp_path):
    before = keep_programs(9)
    try:
        with pytest.raises(Exception, match="kit"):
            node.work(tmp_path / "kit", tmp_path, None, whole=False, say=print, stop=lambda: True)
        assert keep_programs(9) == MOST_KEPT
    finally:
        keep_programs(before)


def live_programs() -> int:
    """Count the compiled programs of a node; the server's half runs in this process too."""
    gc.collect()
    alive = jax.devices()[0].client.live_executables()
    names = [module.name for program in alive for module in program.hlo_modules()]
    return sum(name != "jit__server_step" for name in names)


def serve_runs(folder: Path) -> None:
    """Be a node that is asked by runs with other recipes; print its live programs after each."""
    write_tiny(folder)
    build(load(folder / "tiny.toml"), folder / "stores", lambda stage, done: None)
    store = Store(next((folder / "stores").iterdir()))
    made, assignments, _ = workers(store, folder / "dealt", ("north",))
    keep_programs(MOST_KEPT)
    for number in range(RUNS):
        changes = ("run.devices=1", f"client.learning_rate={0.5 + number / 100}")
        recipe = load(folder / "tiny.toml", changes)
        whole = flat_run(resolve(recipe, store), store, out=folder)
        over = networked_run(
            whole.recipe,
            store,
            assignments,
            folder,
            transport=LocalTransport(made),
            run_id=f"{number:032x}",
        )
        state = over.round.init(over.start())
        for played in over.round.play(state, range(2)):
            state = played.state
        del over, whole, state, played
        print(live_programs(), flush=True)


@pytest.mark.slow
def test_runs_with_other_recipes_leave_no_programs_behind(tmp_path):
    """Before, each left four programs and 25 MB, up to 32 recipes of each kind."""
    code = "import sys; from pathlib import Path; from tests.deploy.test_many_runs import *; "
    command = [sys.executable, "-c", code + "serve_runs(Path(sys.argv[1]))", str(tmp_path)]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stderr
    alive = [int(line) for line in done.stdout.split()]
    assert len(alive) == RUNS and alive[0] > 4
    assert len(set(alive[MOST_KEPT:])) == 1, alive
