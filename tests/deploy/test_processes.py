"""Commands in processes of their own: what they load."""

from pathlib import Path

import pytest

from fedlm.deploy.processes import Child

ROOT = Path(__file__).parents[2]


@pytest.fixture
def ended(tmp_path):
    """Start a child and wait until it has ended."""

    def run(*arguments, **more):
        child = Child(list(arguments), tmp_path / "log", **more)
        code = child.process.wait(60)
        return code, (tmp_path / "log").read_text()

    return run


def test_a_command_of_fedlm_loads_nothing_from_the_folder_that_it_runs_in(ended, tmp_path):
    (tmp_path / "typer.py").write_text("raise SystemExit('loaded')")
    code, said = ended("--help", cwd=tmp_path)
    assert code == 0 and "Usage: " in said, said


def test_a_benchmark_starts_its_own_processes(ended):
    """Every path of its own folder was left out for them, too."""
    code, said = ended("--help", cwd=ROOT, module="benchmarks.hostile_nodes")
    assert code == 0, said
