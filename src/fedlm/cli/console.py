"""How commands talk: results on stdout, everything else on stderr.

In:       results, figures, stages.
Out:      a table or one JSON object on stdout; progress and talk on stderr.
Promise:  with --json, stdout holds one JSON object and nothing else.
Not here: what the figures mean.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)
from rich.status import Status
from rich.table import Table
from rich.text import Text

from fedlm.core.words import number
from fedlm.evaluate.progress import listening
from fedlm.record.journal import dumps

# Names come from text that others wrote: what would move a cursor, or write a title, is shown.
UNSEEN = {
    code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"
}


def visible(said: str) -> str:
    r"""Return text with control characters as their codes.

    >>> visible("a\x1b[2Jb")
    'a\\x1b[2Jb'
    """
    return said.translate(UNSEEN)


def plain(said: Any) -> Any:
    """Return text that rich shows as it is, without markup; None and what is drawn as they are."""
    return Text(visible(said)) if isinstance(said, str) else said


class Stage(Status):
    """What is going on at the moment, in words that may hold names."""

    def __init__(self, said: Any, **options: Any) -> None:
        super().__init__(plain(said), **options)

    def update(self, status: Any = None, **options: Any) -> None:
        super().update(plain(status), **options)


class Talk(Console):
    """A console that sends no control character of a name to the terminal."""

    def print(self, *objects: Any, **options: Any) -> None:
        super().print(*(visible(o) if isinstance(o, str) else o for o in objects), **options)

    def status(self, status: Any, **options: Any) -> Stage:
        return Stage(status, console=self, **options)


class Output(Talk):
    """The console of results: on a terminal it breaks lines between words, in a file it does not.

    A line that begins with two blanks and `fedlm` is a command to copy: it stays one line.
    """

    def print(self, *objects: Any, **options: Any) -> None:
        command = isinstance(objects[0], str) and objects[0].startswith("  fedlm ")
        super().print(*objects, **{"soft_wrap": command or not self.is_terminal, **options})


PLAIN_SECONDS = 10.0  # between two lines of progress in a file

# Names of clients, groups and files are shown as they are, brackets and colons included.
talk = Talk(stderr=True, highlight=False, markup=False, emoji=False)
out = Output(highlight=False, markup=False, emoji=False)

AsJson = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")]
Node = Annotated[str, typer.Option("--node", help="A node of the run's tree: its own model.")]
Client = Annotated[
    str, typer.Option("--client", help="A member whose own model fedlm personalize made.")
]
RecipeFile = Annotated[
    Path, typer.Argument(help="A TOML file, or the name of a recipe that comes with fedlm: sotu.")
]
Changes = Annotated[
    list[str] | None, typer.Option("--set", metavar="TABLE.KEY=VALUE", help="Change a setting.")
]
OutPath = Annotated[
    Path | None, typer.Option("--out", help="The run directory; by default a new one in runs/.")
]
BestOption = Annotated[
    bool, typer.Option("--best", help="Take the best model on the way, not the last one.")
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on where the run stopped.")]


def emit(value: object) -> None:
    """Print a value as one JSON object on stdout."""
    typer.echo(dumps(value))


def note(text: str) -> None:
    """Print sentences on stderr, on a terminal broken between words.

    A line that begins with a blank is a command to copy: it stays one line.
    """
    for line in text.split("\n"):
        talk.print(line, soft_wrap=line.startswith(" ") or not talk.is_terminal)


def scored_words(done: int, rows: int) -> str:
    """Say how far an evaluation has come, in 48 columns."""
    return f"evaluating: {done:,} of {rows:,} rows"


@contextlib.contextmanager
def evaluating() -> Iterator[None]:
    """Show on stderr how many rows of held-out text a block of code has scored."""
    told = time.monotonic()
    with talk.status("evaluating") as status:

        def tell(done: int, rows: int) -> None:
            nonlocal told
            status.update(scored_words(done, rows))
            if not talk.is_terminal and time.monotonic() - told >= PLAIN_SECONDS:
                told = time.monotonic()
                note(scored_words(done, rows))

        with listening(tell):
            yield


def show(title: str, head: Iterable[str], rows: Iterable[Iterable[object]]) -> None:
    """Print a table on stdout; a cell that does not fit goes on in the next line, uncut."""
    drawn = Table(title=visible(title), title_justify="left", title_style="bold")
    for place, name in enumerate(head):
        drawn.add_column(visible(name), justify="left" if place == 0 else "right", overflow="fold")
    for row in rows:
        drawn.add_row(*(text(value) for value in row))
    out.print(drawn)


def text(value: object) -> str:
    """Return a value as text for a table."""
    return visible(number(value))


def bar() -> Progress:
    """Return the progress bar of rounds."""
    return Progress(
        TextColumn("round"),
        MofNCompleteColumn(),
        BarColumn(bar_width=6),
        TextColumn("{task.fields[said]}", markup=False),
        TimeRemainingColumn(compact=True),
        console=talk,
    )
