"""Copy the figures of each round to the programs that draw them.

In:       what may be told of a round; the run's directory, name, recipe and first round.
Out:      TensorBoard event files; a Weights & Biases run; an MLflow run.
Promise:  every finite number of a round appears once under the name `round/NAME`; nothing is sent
          over a network unless the user says so; a tracker that fails does not end a run.
Not here: anything the journal does not have: no text, no weights, no code, no terminal output.

A tracker is a copy: the journal is the record of a run. To add one, write a class with `log` and
`close` and name it in `TRACKERS`; if it needs a package, name that in `EXTRAS`.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from fedlm.core.documents import JsonMapping, JsonObject
from fedlm.core.errors import FedlmError, require
from fedlm.core.releasable import Releasable

# Noise can be subtracted if its seed is known, and prompts are text: both stay in the run.
WITHHELD = (("privacy", "seed"), ("federation", "noise_seed"), ("run", "prompts"))
LAST = "round/round"  # metric that marks a round as complete in MLflow
PARAMS_PER_REQUEST = 100  # the limit of an MLflow server


@dataclass(frozen=True, kw_only=True)
class TrackerContext:
    """The facts of a run that a tracker gets before the first round."""

    directory: Path
    name: str
    first_round: int  # 0, or the round at which a resumed run continues
    recipe: JsonObject
    earlier: Sequence[Releasable] = ()  # rounds before the first, each with its number

    def config(self) -> JsonObject:
        """Return the resolved recipe without noise seeds and prompts."""
        tables = {name: dict(table) for name, table in self.recipe.items()}
        for table, setting in WITHHELD:
            tables.get(table, {}).pop(setting, None)
        return tables


class Tracker(Protocol):
    """A program that follows a run, round by round."""

    def log(self, round: int, metrics: Releasable) -> None:
        """Record the metrics of one round."""
        ...

    def close(self) -> None:
        """Write pending metrics and close the tracker."""
        ...


class TensorBoard:
    """Write event files into `RUN/tensorboard`.

    A resumed run adds a file that tells TensorBoard to hide what the older files hold from that
    round on: every round is shown once.
    """

    def __init__(self, context: TrackerContext) -> None:
        from tensorboardX import SummaryWriter  # imported here: it takes a quarter of a second

        folder = context.directory / "tensorboard"
        purged = context.first_round if folder.is_dir() else None  # a run may go on with round 0
        self._writer = SummaryWriter(str(folder), purge_step=purged)

    def log(self, round: int, metrics: Releasable) -> None:
        for name, value in scalars(metrics).items():
            self._writer.add_scalar(name, value, round)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """Write a Weights & Biases run into `RUN/wandb`; `wandb sync` uploads it later.

    The mode is offline unless `WANDB_MODE` says otherwise; the project is `WANDB_PROJECT` or fedlm.
    A resumed run keeps its id. Online it continues the same run, with the rounds that the server
    lacks, since a kill loses the last ones. Offline, where the library cannot add to a run, it
    writes a new folder with all rounds, the earlier ones from the journal: sync the newest folder
    only.
    """

    def __init__(self, context: TrackerContext) -> None:
        # Crash reports go over the network even offline. wandb reads this when it is imported.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb  # an extra

        mode: Any = os.environ.get("WANDB_MODE") or "offline"
        known = _RunId(context.directory / "wandb" / "run-id")
        self._run = wandb.init(
            dir=context.directory,
            project=os.environ.get("WANDB_PROJECT") or "fedlm",
            name=context.name,
            config=context.config(),
            mode=mode,
            id=known.read(),
            resume=None if mode == "offline" else "allow",
            reinit="create_new",  # a notebook may have a run of its own
            settings=wandb.Settings(**_QUIET),
        )
        known.write(self._run.id)
        _catch_up(self, context)

    def log(self, round: int, metrics: Releasable) -> None:
        if round >= self._run.step:  # `step` is the first missing round, also on the server
            self._run.log(scalars(metrics), step=round, commit=True)

    def close(self) -> None:
        self._run.finish()


# Print nothing; do not record terminal output, code, packages or machine load.
_QUIET: JsonObject = {
    "silent": True,
    "console": "off",
    "save_code": False,
    "disable_git": True,
    "x_disable_meta": True,
    "x_disable_stats": True,
    "x_disable_machine_info": True,
    "x_save_requirements": False,
}


class MLflow:
    """Write an MLflow run into the file store `RUN/mlflow`, or to `MLFLOW_TRACKING_URI` if set.

    The experiment is `MLFLOW_EXPERIMENT_NAME` or fedlm; settings are parameters such as
    `server.rounds`. A resumed run continues the same MLflow run, with the rounds it lacks.
    """

    def __init__(self, context: TrackerContext) -> None:
        # MLflow sends telemetry over the network, and refuses a file store unless told to allow it.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow.tracking import MlflowClient  # an extra

        folder = context.directory.resolve() / "mlflow"
        self._client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or folder.as_uri())
        known = _RunId(folder / "run-id")
        run = self._found(known.read()) or self._begin(context)
        self._id: str = run.info.run_id
        self._last = int(run.data.metrics.get(LAST, -1))
        known.write(self._id)
        _catch_up(self, context)

    def _found(self, id: str | None) -> Any:
        """Return the run that an earlier session wrote; None if this store has no such run."""
        from mlflow.exceptions import MlflowException  # an extra

        try:
            run = self._client.get_run(id) if id else None
        except MlflowException:  # MLFLOW_TRACKING_URI has changed
            return None
        if run is not None:
            self._client.update_run(id, status="RUNNING")
        return run

    def _begin(self, context: TrackerContext) -> Any:
        """Create the run, with the recipe as its parameters."""
        from mlflow.entities import Param  # an extra

        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "fedlm"
        experiment = self._client.get_experiment_by_name(name)
        place = experiment.experiment_id if experiment else self._client.create_experiment(name)
        run = self._client.create_run(place, run_name=context.name)
        params = [Param(key, str(value)) for key, value in _flat(context.config())]
        for at in range(0, len(params), PARAMS_PER_REQUEST):
            self._client.log_batch(run.info.run_id, params=params[at : at + PARAMS_PER_REQUEST])
        return run

    def log(self, round: int, metrics: Releasable) -> None:
        if round <= self._last:
            return
        from mlflow.entities import Metric  # an extra

        now = int(time.time() * 1000)
        numbers = scalars({**metrics, "round": round})
        # The number of the round comes last: a round that a kill left incomplete is written again.
        numbers[LAST] = numbers.pop(LAST)
        self._client.log_batch(
            self._id, metrics=[Metric(name, value, now, round) for name, value in numbers.items()]
        )
        self._last = round

    def close(self) -> None:
        self._client.set_terminated(self._id)


TRACKERS: dict[str, Callable[[TrackerContext], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
}
# Tracker name -> the package that the extra of that name installs.
EXTRAS = {"wandb": "wandb", "mlflow": "mlflow"}


def check_installed(names: Iterable[str]) -> None:
    """Refuse trackers whose package is missing, before a run has begun."""
    for name in names:
        found = importlib.util.find_spec(EXTRAS[name]) if name in EXTRAS else None
        # A folder `wandb` or `mlflow` in the working directory is no package: it has no origin.
        there = name not in EXTRAS or (found is not None and found.origin is not None)
        way_out = f"Run pip install 'fedlm[{name}]', or leave it out."
        require(there, "run.trackers", name, "its package to be installed", way_out)


class Trackers:
    """All trackers of a run as one; a tracker that fails is named once and left out."""

    def __init__(
        self, names: Iterable[str], context: TrackerContext, say: Callable[[str], None]
    ) -> None:
        self._say = say
        self._open: dict[str, Tracker] = {}
        for name in dict.fromkeys(names):
            try:
                self._open[name] = TRACKERS[name](context)
            except Exception as error:
                self.close()
                if isinstance(error, FedlmError):
                    raise
                reason = f"a tracker that can start; {name} says: {_line(error)}"
                require(False, "run.trackers", name, reason, "Mend that, or leave it out.")

    def log(self, round: int, metrics: Releasable) -> None:
        """Record the metrics of one round in all trackers."""
        for name, tracker in list(self._open.items()):
            self._try(name, partial(tracker.log, round, metrics))

    def close(self) -> None:
        """Close all trackers."""
        for name, tracker in list(self._open.items()):
            self._try(name, tracker.close)
        self._open.clear()

    def _try(self, name: str, action: Callable[[], None]) -> None:
        try:
            action()
        # Tracker libraries may raise any exception, and none of them should end the run.
        except Exception as error:
            del self._open[name]
            self._say(
                f"Warning: the tracker {name} failed ({_line(error)}) and is left out from here "
                "on; the journal has all rounds."
            )


def scalars(metrics: JsonMapping) -> dict[str, float]:
    """Return the finite numbers of a round under the names that trackers show.

    >>> scalars({"loss": 2.5, "perplexity": float("inf"), "nodes": {}})
    {'round/loss': 2.5}
    """
    return {
        f"round/{name}": value
        for name, value in metrics.items()
        if isinstance(value, (int, float)) and math.isfinite(value)
    }


def _catch_up(tracker: Tracker, context: TrackerContext) -> None:
    """Log the earlier rounds of a resumed run; the tracker skips rounds that it already has."""
    for metrics in context.earlier:
        tracker.log(metrics["round"], metrics)


def _flat(tables: JsonObject) -> Iterator[tuple[str, Any]]:
    """Yield every setting under its `--set` name, with lists and inner tables as JSON."""
    for table, settings in tables.items():
        for name, value in settings.items():
            plain = isinstance(value, (str, int, float))
            yield f"{table}.{name}", value if plain else json.dumps(value)


def _line(error: Exception) -> str:
    """Return the first line of an error's text."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0].rstrip(".")


class _RunId:
    """The id of a run in a tracker's own store, kept in the run directory for a resume."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> str | None:
        found = self._path.read_text(encoding="utf-8").strip() if self._path.is_file() else ""
        return found or None

    def write(self, id: str) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(f"{id}\n", encoding="utf-8")
