"""A run directory never mixes two recipes."""

import os
import threading
import tomllib

import pytest

from fedlm.core.errors import RecordError
from fedlm.recipe.settings import dump, parse
from fedlm.record.directory import RunDirectory, difference, free_path, newest_path

RECIPE = dump(parse({"client": {"learning_rate": 0.5}, "run": {"prompts": ["the cat"]}}))


def changed(**tables):
    return dump(
        parse({"client": {"learning_rate": 0.5}, "run": {"prompts": ["the cat"]}, **tables})
    )


@pytest.fixture
def claimed(tmp_path):
    directory = RunDirectory(tmp_path / "run")
    assert directory.claim(RECIPE, resume=False) is False
    return directory


def test_a_new_directory_is_made_and_holds_the_recipe(tmp_path):
    directory = RunDirectory(tmp_path / "runs" / "deep" / "run")
    assert directory.claim(RECIPE, resume=False) is False
    assert directory.recipe.read_text() == RECIPE
    assert [p.name for p in directory.path.iterdir()] == ["recipe.toml"]


@pytest.mark.parametrize("resume", [False, True])
def test_an_empty_directory_is_taken(tmp_path, resume):
    assert RunDirectory(tmp_path).claim(RECIPE, resume=resume) is False


def test_a_directory_whose_first_write_was_killed_is_taken(tmp_path):
    (tmp_path / "recipe.toml.part").write_text(RECIPE[:10])
    directory = RunDirectory(tmp_path)
    with directory.locked():
        assert directory.claim(RECIPE, resume=True) is False
    assert [p.name for p in tmp_path.iterdir()] == ["recipe.toml"]


def test_the_same_recipe_goes_on_only_when_asked_to(claimed):
    assert claimed.claim(RECIPE, resume=True) is True
    with pytest.raises(RecordError, match="holds this run already: add --resume to go on"):
        claimed.claim(RECIPE, resume=False)


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize(
    "tables, words",
    [
        (
            {"client": {"learning_rate": 0.25}},
            r"client\.learning_rate is 0\.5 there and 0\.25 here",
        ),
        ({"run": {"seed": 1}}, r"run\.prompts is \['the cat'\] there and \[\] here"),
        ({"server": {"rounds": 7}}, r"server\.rounds is 100 there and 7 here"),
        ({"data": {"source": "x"}}, r"data\.source is None there and 'x' here"),
    ],
)
def test_another_recipe_is_refused_by_the_first_setting(claimed, tables, words, resume):
    with pytest.raises(RecordError, match=f"another recipe \\({words}\\): give another --out"):
        claimed.claim(changed(**tables), resume=resume)
    assert claimed.recipe.read_text() == RECIPE


def test_the_difference_is_found_across_tables():
    there, here = tomllib.loads(RECIPE), tomllib.loads(changed(model={"hidden_size": 3}))
    assert difference(there, here) == "model.hidden_size is None there and 3 here"
    assert difference(there, there) == "no setting differs"
    assert difference({}, {"a": {"b": 1}}) == "a.b is None there and 1 here"
    assert difference({"a": "x", "b": "y"}, {"a": "x", "b": "z"}) == "b is 'y' there and 'z' here"


def test_a_directory_of_something_else_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(RecordError, match="is not a run directory: give another --out"):
        RunDirectory(tmp_path).claim(RECIPE, resume=True)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_file_in_its_place_is_refused(tmp_path):
    (tmp_path / "run").write_text("precious")
    with pytest.raises(RecordError, match="is not a run directory"):
        RunDirectory(tmp_path / "run").claim(RECIPE, resume=False)
    with pytest.raises(RecordError, match="could not be written: Not a directory"):
        RunDirectory(tmp_path / "run" / "deeper").claim(RECIPE, resume=False)
    assert (tmp_path / "run").read_text() == "precious"


def test_a_damaged_recipe_is_named(claimed):
    claimed.recipe.write_text("[data")
    with pytest.raises(RecordError, match=r"recipe\.toml is not valid TOML"):
        claimed.claim(RECIPE, resume=True)


def test_only_a_run_is_opened_as_one(tmp_path, claimed):
    assert RunDirectory.existing(claimed.path) == claimed
    with pytest.raises(RecordError, match=r"is not a run directory: it has no recipe\.toml"):
        RunDirectory.existing(tmp_path / "missing")


def test_an_unfinished_run_says_how_to_finish_it(claimed):
    with pytest.raises(RecordError, match="no trained model yet: finish it with fedlm train"):
        claimed.finished()
    claimed.weights.write_bytes(b"weights")
    assert claimed.finished() is claimed


def test_a_free_path_is_one_that_is_not_there(tmp_path):
    assert free_path(tmp_path, "tiny") == tmp_path / "tiny"
    for expected in ("tiny", "tiny-2", "tiny-3"):
        path = free_path(tmp_path, "tiny")
        assert path == tmp_path / expected
        path.mkdir()
    (tmp_path / "tiny-4").write_text("a file counts too")
    assert free_path(tmp_path, "tiny") == tmp_path / "tiny-5"


def test_the_newest_path_is_the_last_that_is_there(tmp_path):
    assert newest_path(tmp_path, "tiny") == tmp_path / "tiny"
    for _ in range(3):
        free_path(tmp_path, "tiny").mkdir()
    assert newest_path(tmp_path, "tiny") == tmp_path / "tiny-3"
    assert newest_path(tmp_path, "other") == tmp_path / "other"


# ---- one at a time -----------------------------------------------------------------------------


def test_a_directory_is_locked_for_others_and_not_for_who_holds_it(tmp_path):
    directory, refused = RunDirectory(tmp_path / "run"), []

    def other():
        try:
            with RunDirectory(tmp_path / "run" / ".." / "run").locked():
                refused.append("let in")
        except RecordError as error:
            refused.append(str(error))

    with directory.locked():
        with directory.locked():  # a server locks it, and so does the training that it starts
            assert directory.claim(RECIPE, resume=False) is False
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert f"is being trained by another process (pid {os.getpid()})" in refused[0]
    assert [path.name for path in directory.path.iterdir()] == ["recipe.toml"]
    other()
    assert refused[1:] == ["let in"]


def test_a_lock_left_by_a_killed_process_holds_nobody_up(tmp_path):
    (tmp_path / ".lock").write_text("99999999")
    directory = RunDirectory(tmp_path)
    with directory.locked():
        assert directory.claim(RECIPE, resume=False) is False


def test_a_lock_is_put_into_no_other_directory(tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    with (
        pytest.raises(RecordError, match="is not a run directory"),
        RunDirectory(tmp_path).locked(),
    ):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    with (
        pytest.raises(RecordError, match="could not be written: Not a directory"),
        RunDirectory(tmp_path / "thesis.tex" / "deeper").locked(),
    ):
        pass
    (tmp_path / "thesis.tex").unlink()
    (tmp_path / ".lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RecordError, match="could not be written"), RunDirectory(tmp_path).locked():
        pass
    assert not (tmp_path / "elsewhere").exists()
