"""Compiled programs are kept where only their user can write, and nowhere else."""

import os
import subprocess
import sys

import jax
import pytest

from fedlm.engine import programs
from fedlm.engine.devices import use_devices


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_it_is_the_users_own_folder(cache):
    folder = programs.programs_folder()
    assert folder is not None and folder.is_relative_to(cache / "fedlm")
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_relative_cache_folder_is_not_taken(tmp_path, monkeypatch):
    """A repository that one stands in must not bring compiled code along."""
    monkeypatch.setenv("XDG_CACHE_HOME", ".cache")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    folder = programs.programs_folder()
    assert folder is not None and folder.is_relative_to(tmp_path / "home")
    assert not (tmp_path / ".cache").exists()


@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_a_folder_that_others_can_write_to_is_not_used(cache, level, mode):
    folder = programs.programs_folder()
    [folder, *folder.parents][level].chmod(mode)
    assert programs.programs_folder() is None


def test_a_link_is_not_followed(cache, tmp_path):
    folder = programs.programs_folder()
    folder.rmdir()
    (tmp_path / "elsewhere").mkdir()
    folder.symlink_to(tmp_path / "elsewhere")
    assert programs.programs_folder() is None


def test_no_folder_is_no_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert programs.programs_folder() is None


def test_each_kind_of_processor_has_its_own(cache, monkeypatch):
    here = programs.programs_folder()
    monkeypatch.setattr(programs, "processor", lambda: "another")
    assert programs.programs_folder() != here


def test_the_oldest_programs_go_first(cache, monkeypatch):
    folder = programs.programs_folder()
    for age, name in enumerate(["new", "middle", "old"]):
        (folder / name).write_bytes(b"x" * 400)
        os.utime(folder / name, (1e9 - age, 1e9 - age))
    monkeypatch.setattr(programs, "MOST_BYTES", 800)
    programs.programs_folder()
    assert {path.name for path in folder.iterdir()} == {"new", "middle"}


def test_a_run_keeps_what_it_compiles_in_that_folder(cache, monkeypatch):
    told = {}
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    monkeypatch.setattr(jax.config, "update", told.__setitem__)
    use_devices(3)
    assert told["jax_num_cpu_devices"] == 3
    assert told["jax_compilation_cache_dir"] == str(programs.programs_folder())
    assert told["jax_persistent_cache_min_compile_time_secs"] <= 0.02


@pytest.mark.slow
def test_the_small_programs_that_make_a_model_are_kept_too(tmp_path):
    code = (
        "from fedlm.engine.devices import use_devices; use_devices(1); import jax.random as jr;"
        "jr.uniform(jr.key(0), (30, 20), minval=-0.5, maxval=0.5)"
    )
    other = ("JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "XLA_FLAGS")
    env = {name: value for name, value in os.environ.items() if name not in other}
    subprocess.run(
        [sys.executable, "-c", code], env={**env, "XDG_CACHE_HOME": str(tmp_path)}, check=True
    )
    assert list(tmp_path.glob("fedlm/programs/*/jit__uniform-*"))
