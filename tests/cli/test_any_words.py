"""Any words after `fedlm`: an answer or one sentence, and never a traceback or a hang.

Every command is walked: each of its arguments and options gets each nasty value in turn, the others
stay as they should be where a command would then be refused or short. `make fuzz` does the same
with the contents of files (`fuzz/targets.py`).
"""

import contextlib
import io
import itertools
import json
import random
import shutil
import signal
import sys

import pytest

from fedlm.cli.main import commands, main

SECONDS = 120  # that one command may take, on a busy machine
NASTY = ["", " ", "-", "--", "absent", "a\nb", "\udcff\udcfe", "\x1b[31m", "é" * 300, "a" * 5000]
NASTY += [
    "-1",
    "0",
    "9" * 400,
    "1e400",
    "-inf",
    "nan",
    "[" * 3000,
    '{"a":' * 500,
    "a=b=c",
    "=",
    ".",
]
FILES = {
    "empty": b"",
    "noise": bytes(random.Random(0).randbytes(3000)),
    "digits.toml": b"[server]\nrounds = " + b"9" * 5000,
    "deep.toml": b"x = " + b"[" * 5000,
    "types.toml": b"server = 3\n[[model]]\n[client.learning_rate]\nx = 1\n",
    "deep.json": b'{"a":' * 9000,
    "null.jsonl": b"null\n[]\n{}\n3\n",
    "bom.jsonl": b"\xff\xfe\x00{",
}
# Commands that would go on for long or for ever if nothing were refused: what they want is absent.
ENDLESS = {"watch", "federation demo"}
# A command that needs no words at all and trains for hours: it is told to train what is not there.
UNASKED = {"bench-quality": {"--only": "--only=absent"}}
TEXTS = {"prepare", "new", "node words"}
RUNS = {"evaluate", "predict", "report", "export", "privacy epsilon", "privacy audit"}
RUNS |= {"privacy statement"}


def leaves(found, path=()):
    """Yield every command with its path."""
    for name, inner in getattr(found, "commands", {}).items():
        yield from leaves(inner, (*path, name))
    if not hasattr(found, "commands"):
        yield " ".join(path), found


COMMANDS = dict(leaves(commands()))


def cases(path, command, run):
    """Yield the words of every case of a command."""
    right = str(run) if path in RUNS else "text.jsonl" if path in TEXTS else "absent"
    places = [param for param in command.params if param.param_type_name == "argument"]
    options = [param for param in command.params if param.param_type_name == "option"]
    options = [param for param in options if not getattr(param, "is_flag", False)]
    needed = {
        param.opts[0]: f"{param.opts[0]}={1 if param.type.name in ('integer', 'float') else 'made'}"
        for param in options
        if param.required
    } | UNASKED.get(path, {})
    plain = [right for param in places if param.required or path in ENDLESS]
    for place in range(len(places)):
        for value in (*NASTY, *FILES, "folder", "loop"):
            if path in ENDLESS and value in ("", ".", "folder"):
                continue
            filled = [*plain[:place], value, *plain[place + 1 :]]
            yield [*path.split(), *needed.values(), "--", *filled]
    for option, value in itertools.product(options, (*NASTY, "noise", "folder", "loop")):
        name = option.opts[0]
        yield [*path.split(), *{**needed, name: f"{name}={value}"}.values(), "--", *plain]
    yield [*path.split(), "--nonsense"]
    yield [*path.split(), *["absent"] * 9]


def ended(folder, words):
    """Run `fedlm WORDS` in this process with streams as a terminal has them."""
    stdout = io.TextIOWrapper(io.BytesIO(), "utf-8")
    stderr = io.TextIOWrapper(io.BytesIO(), "utf-8", errors="backslashreplace")

    def late(*_):
        raise TimeoutError(f"{words} has not ended after {SECONDS} seconds")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        with pytest.MonkeyPatch.context() as patch, contextlib.chdir(folder):
            patch.setattr(sys, "argv", ["fedlm", *words])
            patch.setattr(sys, "stdin", io.StringIO(""))
            streams = contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr)
            with streams[0], streams[1], pytest.raises(SystemExit) as left:
                main()
            stdout.flush()
            stderr.flush()
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    return left.value.code or 0, stderr.buffer.getvalue().decode()


@pytest.fixture
def folder(tmp_path):
    for name, raw in FILES.items():
        (tmp_path / name).write_bytes(raw)
    rows = [{"client": f"c{n}", "text": f"the cat {n} sat\non the mat\nand ran"} for n in range(9)]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "journal.jsonl").write_bytes(FILES["null.jsonl"])
    (tmp_path / "folder" / "recipe.toml").write_bytes(FILES["types.toml"])
    (tmp_path / "loop").symlink_to("loop")
    return tmp_path


def check(path, folder, run, chosen):
    wrong, before = [], {entry.name for entry in folder.iterdir()}
    for words in chosen:
        copy = shutil.copytree(run, folder / "run") if path in RUNS else run
        words = [str(copy) if word == str(run) else word for word in words]
        try:
            code, said = ended(folder, words)
        except BaseException as error:  # what a user would see as a traceback
            wrong.append((words, repr(error)[:300]))
        else:
            if code not in (0, 1, 2) or "Traceback" in said or (code == 2 and not said.strip()):
                wrong.append((words, code, said[-300:]))
        for entry in folder.iterdir():
            if entry.name not in before:
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    shown = "\n".join(str([str(part)[:200] for part in case]) for case in wrong[:20])
    assert not wrong, f"{len(wrong)} of {len(chosen)}:\n{shown}"


@pytest.mark.slow
@pytest.mark.parametrize("path", COMMANDS)
def test_no_words_end_in_a_traceback(path, folder, trained):
    run = trained / "runs" / "tiny"
    check(path, folder, run, list(cases(path, COMMANDS[path], run)))


def test_a_few_words_of_some_commands_end_in_no_traceback(folder, trained):
    run, rng = trained / "runs" / "tiny", random.Random(0)
    for path in rng.sample([path for path in COMMANDS if path not in RUNS], 12):
        check(path, folder, run, rng.sample(list(cases(path, COMMANDS[path], run)), 2))
