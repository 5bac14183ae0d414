"""Whatever a command prints on a terminal of eighty columns fits into it."""

import re

import pytest

from fedlm.cli import console
from fedlm.cli.main import commands
from fedlm.models.catalog import listing
from tests.conftest import call

WIDE = 80
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def lines(printed):
    """What stands on the terminal, without colours and movements of the cursor."""
    return [line.rstrip() for line in re.split(r"[\r\n]", CONTROL.sub("", printed))]


def too_long(printed):
    """Lines over eighty columns; a command to copy stays one line, and the terminal breaks it."""
    return [line for line in lines(printed) if len(line) > WIDE and not line.startswith("  fedlm ")]


@pytest.fixture
def terminal(monkeypatch):
    """Commands that run in this process print to a terminal of eighty columns."""
    monkeypatch.setenv("COLUMNS", str(WIDE))
    for each in (console.talk, console.out):
        monkeypatch.setattr(each, "_force_terminal", True)
        monkeypatch.setattr(each, "_width", WIDE)


def paths(found, path=()):
    yield path
    for name, below in getattr(found, "commands", {}).items():
        yield from paths(below, (*path, name))


@pytest.mark.sample(10)
@pytest.mark.parametrize("path", list(paths(commands())), ids=" ".join)
def test_the_help_of_every_command(path, terminal, tmp_path):
    told = call(tmp_path, *path, "--help")
    assert told.code == 0 and told.stdout.startswith("Usage: ")
    assert not too_long(told.stdout + told.stderr)


def test_no_name_and_no_count_of_a_model_is_cut_off(terminal, tmp_path):
    told = call(tmp_path, "models")
    assert told.code == 0 and not too_long(told.stdout)
    words = {word for line in lines(told.stdout) for word in line.split()}
    for row in listing():
        assert {row["name"], row["architecture"], f"{row['parameters']:,}"} <= words


def test_sentences_and_tables(terminal, capsys):
    sentence = "a run of many words " * 20
    console.note(sentence)
    console.out.print(sentence)
    console.out.print(f"  - {sentence}")
    path = "/" + "/".join(["some-folder"] * 20)
    console.out.print(f"report: {path}")
    head = ["name", *(f"column {n}" for n in range(9))]
    console.show(sentence, head, [[path, *range(10**6, 10**6 + 9)], ["b", *[sentence] * 9]])
    console.show("", ["", "value"], [["a", 1.5], [sentence, path]])
    printed = capsys.readouterr()
    assert not too_long(printed.out + printed.err)
    assert path in "".join(lines(printed.out))
    assert "…" not in printed.out, "a figure that is cut off is another figure"


def test_commands_to_copy_and_files_are_not_broken(monkeypatch, terminal, capsys):
    command = f"  fedlm train {'x' * 90} --out run"
    console.note(command)
    console.out.print(command)
    assert capsys.readouterr() == (command + "\n", command + "\n")
    monkeypatch.setattr(console.out, "_force_terminal", False)
    console.out.print("word " * 40)
    assert capsys.readouterr().out.count("\n") == 1


@pytest.mark.slow
def test_what_commands_print(terminal, trained, tmp_path):
    run, text = trained / "runs" / "tiny", trained / "tiny.jsonl"
    private = ("--rounds", 100, "--population", 10_000, "--cohort", 100, "--noise-multiplier", 1)
    for words in (
        ("models",),
        ("evaluate", run),
        ("predict", run, "the cat"),
        ("report", run, "--out", tmp_path / "page.html"),
        ("export", run, "--out", tmp_path / "exported"),
        ("prepare", text, "--out", tmp_path / "store"),
        ("new", text, "--out", tmp_path / "mine.toml"),
        ("train", trained / "tiny.toml", "--set", "server.rounds=2", "--out", tmp_path / "other"),
        ("privacy", "epsilon", "--mechanism", "gaussian", *private, "--delta", 1e-6),
        ("privacy", "epsilon", run),
        ("federation", "init", tmp_path / "fed", "--host", "localhost"),
        ("node", "init", tmp_path / "kit", "--name", "north"),
        ("federation", "add-node", tmp_path / "fed", "north", "--key", tmp_path / "kit/node.pub"),
        ("federation", "history", tmp_path / "fed"),
        ("federation", "doctor", tmp_path / "fed"),
        ("train", "nowhere.toml"),
    ):
        told = call(trained, *words)
        assert "Traceback" not in told.stderr
        assert not too_long(told.stdout + told.stderr), words


def test_names_write_nothing_but_letters_to_a_terminal(terminal, capsys):
    """A client's name, which a stranger chose, set the title of the window; markup ended it all."""
    name = "a[/b]\x1b]0;pwn\x07\x85\x0b"
    with console.talk.status(f"personalizing {name}") as status:
        status.update(f"still personalizing {name}")
        console.note(name)
    console.show(name, ["client", name], [[name, 1]])
    told = capsys.readouterr()
    for printed in (told.out, told.err):
        assert "\x1b]" not in printed and not set("\x07\x85\x0b") & set(printed)
    assert told.err.count("a[/b]\\x1b]0;pwn\\x07\\x85\\x0b") == 1
    assert "\\x1b]0;pwn" in "".join(lines(told.out))
