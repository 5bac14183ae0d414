"""What a recipe may say.

In:       a TOML file, and changes from the command line.
Out:      a frozen, complete `Recipe`.
Promise:  a closed world: an unknown key is refused with the nearest known one, a value out of
          range with what was wanted; the resolved recipe, saved and read again, is the same.
Not here: what the settings do (`build.py`).
"""

from __future__ import annotations

import os
import tomllib
import typing
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError

from fedlm.core.errors import ConfigError, nearest
from fedlm.corpus.sources import CORPORA
from fedlm.corpus.tokenizer import FILE, KINDS, kind_of
from fedlm.models.catalog import NAMED
from fedlm.recipe.federation import Federation, Node
from fedlm.record.trackers import TRACKERS

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, lt=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Count = Annotated[int, Field(ge=1)]

# Settings that had another name before 0.1.0; an old recipe is told the new one.
RENAMED = {
    "data.length": "sequence_length",
    "model.embed": "embedding_size",
    "model.units": "hidden_size",
    "model.kernel": "kernel_size",
    "client.rate": "learning_rate",
    "client.clip": "gradient_clip_norm",
    "client.batch": "batch_size",
    "server.rate": "learning_rate",
    "server.epsilon": "adam_epsilon",
    "server.warmup": "warmup_rounds",
    "server.end": "final_fraction",
    "privacy.clip": "clip_norm",
    "privacy.noise": "noise_multiplier",
    "wire.train": "trainable",
    "wire.share": "trainable_fraction",
    "federation.key": "personal_layers",
    "federation.pool": "pool_clients",
    "federation.every": "sync_every",
    "federation.warmup": "warmup_steps",
    "federation.rate": "learning_rate",
    "federation.clip": "clip_norm",
    "federation.noise": "noise_multiplier",
    "federation.node.rate": "learning_rate",
    "federation.node.share": "weight",
    "run.tensorboard": "trackers",
}


def _tokenizer(value: str) -> str:
    """Accept a kind of tokenizer, or the path of a file that holds one."""
    if kind_of(value) not in (*KINDS, FILE):
        wanted = "'words', 'bpe', 'bytes' or 'PATH/tokenizer.json'"
        raise PydanticCustomError("literal_error", "Input should be {wanted}", {"wanted": wanted})
    return value


class Table(BaseModel):
    """One table of a recipe."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Data(Table):
    """Which text, in which tokens, in rows of which shape."""

    source: str | None = None  # a corpus name, a file or a folder
    store: str | None = None  # a store made by `fedlm prepare`
    stores: tuple[str, ...] = ()  # or several; a store's name is a group of its clients
    # words, bpe or bytes are fitted to the text; or the path of a tokenizer.json made elsewhere
    tokenizer: Annotated[str, AfterValidator(_tokenizer)] = "words"
    vocabulary: Annotated[int, Field(ge=5, le=1_000_000)] = 10_000
    lowercase: bool = True
    layout: Literal["lines", "windows"] = "lines"
    sequence_length: Annotated[int, Field(ge=1, le=65_536)] = 20
    test_clients: Share = 0.1
    validation: Share = 0.1
    split_seed: int = 0
    groups: tuple[str, ...] = ()  # only clients of these groups take part; none named: all


class Model(Table):
    """Which architecture, of which size; what is left out comes with the name."""

    name: Literal[*NAMED] = "si-cifg"  # type: ignore[valid-type]
    init_from: str | None = None  # a model.safetensors, or a run directory, to start from
    embedding_size: Count | None = None
    hidden_size: Count | None = None  # of a recurrent layer, or inside a feed-forward
    layers: Annotated[int, Field(ge=1, le=512)] | None = None
    heads: Count | None = None
    kernel_size: Count | None = None  # taps of a Conformer's convolution
    positions: Literal["learned", "sinusoidal", "alibi", "none"] | None = None
    cell_layer_norm: bool | None = None
    si_measure: Literal["max", "l2", "rms", "none"] | None = None  # what SI-CIFG divides by
    si_floor: Positive | None = None  # the least it divides by
    si_candidate: bool | None = None  # whether the candidate is divided
    si_state: bool | None = None  # whether the emitted state is
    si_row_floor: NotNegative | None = None  # steadies nearly empty rows of invariant attention


class Client(Table):
    """What a member does in a round."""

    optimizer: Literal["sgd", "momentum", "adam", "adamw"] = "sgd"
    learning_rate: Positive = 0.5
    momentum: Decay = 0.9
    weight_decay: NotNegative = 0.0
    gradient_clip_norm: NotNegative = 0.0  # bound on the gradient norm; 0 is off
    batch_size: Count = 16
    epochs: Count = 1
    max_examples: Count | None = None
    max_steps: Count | None = None
    weight: Literal["examples", "tokens", "uniform"] = "examples"
    method: Literal["fedavg", "mimelite", "scaffold", "feddyn"] = "fedavg"
    proximal: NotNegative = 0.0  # pull towards the server's model: FedProx's mu, FedDyn's alpha


class Server(Table):
    """What the server does with a cohort's mean change, and how often."""

    optimizer: Literal["fedavg", "fedavgm", "nesterov", "fedadam", "fedyogi", "fedadagrad"] = (
        "fedadam"
    )
    learning_rate: Positive = 0.01
    momentum: Decay = 0.9
    beta2: Decay = 0.99
    adam_epsilon: Positive = 1e-5
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_rounds: Annotated[int, Field(ge=0)] = 0
    final_fraction: Share = 0.0
    rounds: Count = 100
    cohort: Count = 20
    sampling: Literal["fixed", "poisson", "spaced"] = "fixed"
    evaluate_every: Count = 10
    evaluate_rows: Annotated[int, Field(ge=0)] = 2_000  # validation rows; 0 is all


class Privacy(Table):
    """What is promised to each client; without a mechanism, nothing is."""

    mechanism: Literal["gaussian", "tree", "banded", "toeplitz", "blt"] | None = None
    clip_norm: Positive = 1.0  # the longest update one client may send
    noise_multiplier: NotNegative | None = (
        None  # in multiples of the clip; left out, found from epsilon
    )
    epsilon: Positive | None = None  # what the whole run may spend; it stops before passing it
    delta: float = 1e-6  # checked with the rest of the plan
    min_separation: Annotated[int, Field(ge=0)] = 0  # rounds strictly between two turns
    max_participations: Annotated[int, Field(ge=0)] = 0  # 0: as many as the separation allows
    restart_every: Annotated[int, Field(ge=0)] = 0
    bands: Annotated[int, Field(ge=0)] = 0
    buffers: Count = 3
    clip_quantile: Share = 0.0  # let the clip follow this quantile of update lengths; 0: fixed
    clip_rate: Positive = 0.2
    clip_noise: NotNegative | None = None  # on how many were let through; a twentieth of a cohort
    canaries: Annotated[int, Field(ge=0)] = 0  # clients that send a known direction, for audits
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] | None = None  # unsafe: a seed others know
    reveal: bool = False  # record sums without noise; no claim covers them


class Wire(Table):
    """What travels: which part of the model is trained, and in which bytes it is sent."""

    upload: str = "float32"  # a codec by its name in frames: uniform-8, ternary-2.5+zlib, ...
    download: str = "float32"
    trainable: Literal["all", "fixed", "round", "member", "low-rank"] = "all"
    trainable_fraction: Annotated[float, Field(gt=0, le=1)] = (
        1.0  # of what may be held still: how much trains
    )
    subsets: Count = 4  # round: how many subsets take turns
    rank: Count = 8  # low-rank: of a matrix's update
    error_feedback: bool = False  # members add what the codec left out to their next update


class Run(Table):
    """How the run is carried out; nothing here changes what is learned but the seed."""

    seed: Annotated[int, Field(ge=0, lt=1 << 63)] = 0
    engine: Literal["mesh", "loop"] = "mesh"
    devices: Annotated[int, Field(ge=0)] = 0  # lanes on this machine; 0 is one a core
    checkpoint_every: Count = 10
    keep_checkpoints: Count = 3
    trackers: tuple[Literal[*TRACKERS], ...] = Field(  # type: ignore[valid-type]
        default=("tensorboard",), description="programs that get a copy of each round's figures"
    )
    baselines: bool = True  # count n-gram models for comparison at the end
    prompts: tuple[str, ...] = ()


class Recipe(Table):
    """A whole experiment."""

    data: Data = Data()
    model: Model = Model()
    client: Client = Client()
    server: Server = Server()
    privacy: Privacy = Privacy()
    wire: Wire = Wire()
    federation: Federation | None = None  # a tree; without it the federation is flat
    run: Run = Run()


def load(path: Path, changes: tuple[str, ...] = ()) -> Recipe:
    """A recipe file with changes `table.key=value` applied."""
    try:
        text = Path(path).read_bytes().decode("utf-8")
    except OSError as error:
        raise ConfigError(f"recipe {path} is not readable: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"recipe {path} is not valid UTF-8.") from None
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"recipe {path} is not valid TOML: {error}.") from None
    for change in changes:
        _apply(tables, change)
    recipe = parse(tables)
    return _relative_to(recipe, Path(path).parent)


def _apply(tables: dict[str, Any], change: str) -> None:
    name, equals, value = change.partition("=")
    table, dot, key = name.strip().partition(".")
    if not (equals and dot and key and table):
        raise ConfigError(f"--set {change!r}: expected table.key=value, as in server.rounds=50.")
    held = tables.setdefault(table, {})
    if not isinstance(held, dict):
        raise ConfigError(f"--set {change!r}: {table!r} is not a table of this recipe.")
    held[key] = _value(value.strip())


def _value(text: str) -> Any:
    """A TOML value; anything that is not one is a string, so quotes are not needed."""
    try:
        return tomllib.loads(f"x = {text}")["x"]
    except tomllib.TOMLDecodeError:
        return text


def parse(tables: dict[str, Any]) -> Recipe:
    """Tables to a recipe, or one sentence about the first thing that is wrong."""
    try:
        return Recipe.model_validate(_floats(tables))
    except ValidationError as error:
        raise ConfigError(_sentence(error.errors()[0])) from None


def _floats(tables: dict[str, Any]) -> dict[str, Any]:
    """TOML tells 1 from 1.0; a person who writes `rate = 1` means 1.0. Lists become tuples."""
    out: dict[str, Any] = {}
    for name, table in tables.items():
        field = Recipe.model_fields.get(name)
        if field is None or not isinstance(table, dict):
            out[name] = table
            continue
        known = _fields(name)
        out[name] = {k: _as_declared(known.get(k), v) for k, v in table.items()}
    return out


def _fields(table: str) -> dict[str, Any]:
    """The settings of a table, also of one that may be left out."""
    kind = Recipe.model_fields[table].annotation
    options = [k for k in typing.get_args(kind) if k is not type(None)]
    return dict((options[0] if options else kind).model_fields)  # type: ignore[union-attr]


def _as_declared(field: Any, value: Any) -> Any:
    if isinstance(value, list):
        return tuple(value)
    if field is not None and type(value) is int and field.annotation in (float, float | None):
        return float(value)
    return value


def _sentence(error: Any) -> str:
    place = [str(part) for part in error["loc"]]
    if error["type"] == "extra_forbidden":
        if len(place) == 1 or place[0] not in Recipe.model_fields:
            return f"there is no table [{place[0]}]. {nearest(place[0], Recipe.model_fields)}"
        if place[:2] == ["federation", "node"] and len(place) > 2:
            known: Any = Node.model_fields
        else:
            known = _fields(place[0])
        at = ".".join(p for p in place[:-1] if not p.isdigit())
        if f"{at}.{place[-1]}" in RENAMED:
            return f"[{at}] {place[-1]} is now called {RENAMED[f'{at}.{place[-1]}']!r}."
        return f"[{at}] has no setting {place[-1]!r}. {nearest(place[-1], known)}"
    wanted = error["msg"].removeprefix("Input should be ").removeprefix("a valid ")
    wanted = "a list" if error["type"] == "tuple_type" else wanted
    value = error["input"]
    hint = ""
    if error["type"] == "literal_error" and isinstance(value, str):
        options = [o.strip(" '") for o in wanted.replace(" or ", ", ").split(",")]
        near = nearest(value, options)
        hint = f" {near}" if near.startswith("Did") else ""
    return f"{'.'.join(place[:2])} = {value!r}: expected {wanted}.{hint}"


def _relative_to(recipe: Recipe, folder: Path) -> Recipe:
    """Paths are looked for beside the recipe, then here; the resolved recipe has them absolute."""
    data = recipe.data
    changed: dict[str, Any] = {
        name: _absolute(value, folder)
        for name, value in (("source", data.source), ("store", data.store))
        if value is not None and not (name == "source" and value in CORPORA)
    }
    if data.tokenizer.endswith(".json"):
        changed["tokenizer"] = _absolute(data.tokenizer, folder)
    if data.stores:
        changed["stores"] = tuple(_absolute(path, folder) for path in data.stores)
    # Built from what was written, so that it stays known which settings were given.
    given = {k: v for k, v in data if k in data.model_fields_set}
    tables: dict[str, Table] = {"data": Data(**{**given, **changed})}
    if recipe.model.init_from is not None:
        start = _absolute(recipe.model.init_from, folder)
        tables["model"] = recipe.model.model_copy(update={"init_from": start})
    return recipe.model_copy(update=tables)


def _absolute(path: str, folder: Path) -> str:
    beside = folder / path
    return os.path.abspath(beside if beside.exists() else path)


def dump(recipe: Recipe) -> str:
    """The resolved recipe as TOML; what is None is left out, as TOML has no null."""
    tables = recipe.model_dump(mode="python", exclude_none=True)
    return tomli_w.dumps({k: {n: _toml(v) for n, v in t.items()} for k, t in tables.items()})


def _toml(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _toml(part) for name, part in value.items()}
    return [_toml(part) for part in value] if isinstance(value, tuple) else value
