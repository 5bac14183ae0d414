"""The command line: registers commands, and turns errors into exit codes.

In:       arguments.
Out:      exit code 0, or the code of the error with its sentence on stderr.
Promise:  a user's error never shows a traceback.
Not here: what commands do (one file each).
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable
from functools import cache
from typing import Annotated

import typer

from fedlm.cli import (
    advise,
    bench_quality,
    convert,
    evaluate,
    export,
    federation,
    models,
    new,
    node,
    personalize,
    predict,
    prepare,
    privacy,
    report,
    sweep,
    train,
    tune,
    watch,
)
from fedlm.cli.console import note
from fedlm.core.errors import FedlmError

# Typer escapes "[" of its own words for rich, also where rich draws nothing: "\\[default: 0.1]".
typer.core.HAS_RICH = False
app = typer.Typer(
    name="fedlm",
    help="Train language models on text that may not leave where it was written.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"fedlm {importlib.metadata.version('fedlm')}")
        raise typer.Exit()


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Train language models on text that may not leave where it was written."""


for command in (prepare.prepare, train.train, train.pretrain, evaluate.evaluate, predict.predict):
    app.command()(command)
app.command()(new.new)
app.command()(personalize.personalize)
app.command()(report.report)
app.command()(watch.watch)
app.command()(export.export)
app.command()(convert.convert)
app.command()(sweep.sweep)
app.command()(tune.tune)
app.command()(advise.advise)
app.command()(bench_quality.bench_quality)
app.command()(models.models)
app.add_typer(privacy.app, name="privacy")
app.add_typer(federation.app, name="federation")
app.add_typer(node.app, name="node")


@cache
def commands() -> Callable[[], object]:
    """Return the tree of all commands, made once per process: it takes 80 ms."""
    return typer.main.get_command(app)


def main() -> None:
    """Run the `fedlm` command."""
    try:
        commands()()  # handles mistyped options, interrupts and closed pipes itself
    except FedlmError as error:
        note(f"fedlm: {error}")
        sys.exit(error.exit_code)
    except OSError as error:
        where = "" if error.filename is None else f"{error.filename}: "
        note(f"fedlm: {where}{error.strerror or error}.")
        sys.exit(FedlmError.exit_code)
    except UnicodeEncodeError as error:  # of a name: text that is read is checked where it is read
        near = str(error.object)[max(0, error.start - 20) : error.end + 20]
        note(f"fedlm: {near!a}: expected a name in UTF-8. Choose another.")
        sys.exit(FedlmError.exit_code)
    except MemoryError:
        note("fedlm: there is not enough memory for this here: lower the sizes, or free some.")
        sys.exit(FedlmError.exit_code)


if __name__ == "__main__":
    main()
