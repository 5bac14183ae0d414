"""What a recipe may say: the tables, their settings, and what each setting means.

In:       registries, for settings that name an entry of one.
Out:      `Recipe`, which is frozen and complete, and the tables it is made of.
Promise:  a closed world: a setting has a type, a range, a default and a description; no choice is
          written twice.
Not here: TOML files and errors (`settings.py`), `[federation]` (`federation.py`), what the settings
          do (`build.py`).
"""

from __future__ import annotations

import contextlib
import math
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticKnownError

from fedlm.cohort.delays import DELAYS
from fedlm.cohort.sampling import LAWS
from fedlm.core.errors import either
from fedlm.corpus.rows import RowLayout
from fedlm.corpus.tokenizer import FILE, KINDS, kind_of
from fedlm.engine.catalog import ENGINES
from fedlm.local.train import WEIGHTS
from fedlm.methods.catalog import METHODS
from fedlm.methods.optimizers import CLIENT_OPTIMIZERS, SCHEDULES, SERVER_OPTIMIZERS
from fedlm.models.adapters import QUERIES_AND_VALUES
from fedlm.models.catalog import NAMED
from fedlm.models.cells import MEASURES, RECTIFIERS
from fedlm.models.embedding import Dtype, Positions
from fedlm.models.partial import TRAINABLE
from fedlm.models.transformer import Activation
from fedlm.privacy.catalog import MECHANISMS
from fedlm.recipe.choices import one_of
from fedlm.recipe.federation import (
    Count,
    Decay,
    Delta,
    FederationTable,
    Natural,
    NotNegative,
    Positive,
    Seed,
    Size,
)
from fedlm.record.trackers import TRACKERS
from fedlm.server.robust import RULES

Share = Annotated[float, Field(ge=0, lt=1)]

# The learning rates of members and of the server change over the rounds in the same ways.
Schedule = Annotated[
    str,
    one_of(SCHEDULES),
    Field(description="How `learning_rate` changes over all rounds of the run."),
]
WarmupRounds = Annotated[
    Natural,
    Field(description="Rounds over which `learning_rate` rises linearly; 0 is none."),
]
FinalFraction = Annotated[
    Share,
    Field(
        description="With a schedule that falls: the last learning rate as a fraction of "
        "`learning_rate`."
    ),
]


def _tokenizer(value: str) -> str:
    """Accept a kind of tokenizer, or the path of a file that holds one."""
    if kind_of(value) in (*KINDS, FILE):
        return value
    wanted = either(map(repr, (*KINDS, "PATH/tokenizer.json")))
    raise PydanticKnownError("literal_error", {"expected": wanted})


def _rope_scaling(value: str) -> str:
    """Accept a kind of scaling and its numbers, all of them positive."""
    kind, *numbers = value.split() or [""]
    if len(numbers) == {"linear": 1, "llama3": 4}.get(kind):
        with contextlib.suppress(ValueError):
            found = [float(number) for number in numbers]
            rising = kind == "linear" or found[1] < found[2]
            if rising and all(0 < number < math.inf for number in found):
                return value
    wanted = "'linear FACTOR' or 'llama3 FACTOR LOW HIGH LENGTH', LOW below HIGH"
    raise PydanticKnownError("literal_error", {"expected": wanted})


class Table(BaseModel):
    """One table of a recipe."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Data(Table):
    """The text, its tokenizer, and the shape of its rows."""

    source: Annotated[str, Field(min_length=1)] | None = Field(
        default=None,
        description="Text to prepare: a corpus name, a `.jsonl`, `.csv`, `.parquet` or TFF `.h5` "
        "file (`.jsonl` and `.csv` also with `.gz`), or a folder.",
    )
    store: Annotated[str, Field(min_length=1)] | None = Field(
        default=None, description="A store made by `fedlm prepare`."
    )
    stores: tuple[str, ...] = Field(
        default=(),
        description="Several stores with one tokenizer (`fedlm prepare --like`), in place of "
        "`store`. The name of a store's folder becomes the first group of its clients.",
    )
    tokenizer: Annotated[str, AfterValidator(_tokenizer)] = Field(
        default="words",
        description="`words`, `bpe` or `bytes`, fitted to the training text; or the path of a "
        "`tokenizer.json` made elsewhere.",
    )
    vocabulary: Annotated[int, Field(ge=5, le=1_000_000)] = Field(
        default=10_000, description="The most entries of the vocabulary, special tokens included."
    )
    vocabulary_epsilon: Positive | None = Field(
        default=None,
        description="`words`, `bpe`: count the vocabulary with noise at this epsilon, so that it "
        "holds only words that many clients share; its cost is added to that of private runs. Not "
        "set: counted without noise, which no privacy claim covers.",
    )
    vocabulary_delta: Delta = Field(
        default=1e-7,
        description="The delta of `vocabulary_epsilon`; half of it is taken from "
        "`privacy.delta`, which must be larger.",
    )
    vocabulary_words: Annotated[int, Field(ge=1, le=100_000)] = Field(
        default=1_000,
        description="With `vocabulary_epsilon`: how many distinct words of a client are counted, "
        "chosen at random.",
    )
    lowercase: bool = Field(default=True, description="Whether text is converted to lower case.")
    layout: RowLayout = Field(
        default="lines",
        description="How text becomes rows: `lines` makes one row per line, begun with BOS; "
        "`windows` cuts the text as one stream, in which every token is a target once.",
    )
    sequence_length: Annotated[int, Field(ge=1, le=65_536)] = Field(
        default=20, description="Target tokens per row."
    )
    test_clients: Share = Field(
        default=0.1, description="Fraction of clients held out whole, for the test split."
    )
    validation: Share = Field(
        default=0.1, description="Fraction of each training client's text held out, from its end."
    )
    split_seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] = Field(
        default=0, description="Seed that decides which clients are held out."
    )
    user_field: Annotated[str, Field(min_length=1)] | None = Field(
        default=None,
        description="The field or column of a `.jsonl`, `.csv` or `.parquet` source that names the "
        "person who wrote. All text of a person becomes one client: for sampling, clipping, "
        "separation and splits. Not set: `client`.",
    )
    text_field: Annotated[str, Field(min_length=1)] | None = Field(
        default=None,
        description="The field or column of such a source that holds the text. Not set: `text`.",
    )
    groups_field: Annotated[str, Field(min_length=1)] | None = Field(
        default=None,
        description="The field or column of such a source that holds the groups. Not set: "
        "`groups`.",
    )
    groups: tuple[str, ...] = Field(
        default=(),
        description="Only clients of these groups take part, in training and evaluation; `[]` is "
        "all clients.",
    )


class Model(Table):
    """The architecture and its sizes; sizes left out come with the model's name."""

    name: Annotated[str, one_of(NAMED)] = Field(
        default="si-cifg",
        description="An architecture or a published size; `fedlm models` lists them.",
    )
    init_from: str | None = Field(
        default=None,
        description="The model that training starts from: a `model.safetensors`, a run directory, "
        "a Hugging Face folder (`config.json` and safetensors) or a GGUF file. The last two decide "
        "name and sizes of the model.",
    )
    base_sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")] | None = Field(
        default=None,
        description="Digest of the frozen part of the model at `init_from`, as a run's adapters "
        "name it; another model there is refused. A server tells it to nodes, which have the model "
        "themselves.",
    )
    base_dtype: Dtype = Field(
        default="float32",
        description='Type of the frozen model under adapters (`wire.trainable = "lora"`): '
        "`bfloat16` takes half the memory.",
    )
    embedding_size: Size | None = Field(default=None, description="Numbers per token embedding.")
    hidden_size: Size | None = Field(
        default=None, description="Units of a recurrent layer, or inside a feed-forward layer."
    )
    layers: Annotated[int, Field(ge=1, le=512)] | None = Field(
        default=None, description="Recurrent layers or decoder blocks."
    )
    heads: Size | None = Field(
        default=None, description="Attention heads; their number must divide `embedding_size`."
    )
    kernel_size: Size | None = Field(
        default=None, description="Taps of a Conformer's convolution, in tokens."
    )
    positions: Positions | None = Field(default=None, description="How attention knows positions.")
    length: Annotated[int, Field(ge=1, le=1 << 20)] | None = Field(
        default=None, description="Learned positions: how many there are, in tokens."
    )
    vocab: Annotated[int, Field(ge=1, le=1 << 24)] | None = Field(
        default=None,
        description="Rows of the embedding, if there are more than the tokenizer has tokens; "
        "published models round them up.",
    )
    activation: Activation | None = Field(
        default=None,
        description="Transformer, MPT, GPT-2, GPT-NeoX: activation of a feed-forward layer; `gelu` "
        "is computed by the hyperbolic tangent.",
    )
    norm_epsilon: Positive | None = Field(
        default=None,
        description="Llama, MPT, GPT-2, GPT-NeoX: the number under the root of a norm.",
    )
    key_heads: Size | None = Field(
        default=None,
        description="Llama: heads of keys and values, which divide `heads`; not set: as many as "
        "`heads`.",
    )
    head_size: Size | None = Field(
        default=None,
        description="Llama: numbers per head; not set: `embedding_size` over `heads`.",
    )
    rope_theta: Positive | None = Field(
        default=None, description="Llama, GPT-NeoX: base of the periods of rotary positions."
    )
    rope_scaling: Annotated[str, AfterValidator(_rope_scaling)] | None = Field(
        default=None,
        description="Llama, GPT-NeoX: slower turning of rotary positions, as models for long rows "
        "have it: `linear FACTOR` or `llama3 FACTOR LOW HIGH LENGTH`.",
    )
    rotary_fraction: Annotated[float, Field(gt=0, le=1)] | None = Field(
        default=None, description="GPT-NeoX: the part of a head that rotary positions turn."
    )
    parallel: bool | None = Field(
        default=None, description="GPT-NeoX: whether attention and feed-forward read the same."
    )
    qkv_bias: bool | None = Field(
        default=None, description="Llama: whether queries, keys and values have biases, as Qwen2's."
    )
    out_bias: bool | None = Field(
        default=None, description="Llama: whether attention's second product has a bias."
    )
    mlp_bias: bool | None = Field(
        default=None, description="Llama: whether feed-forward layers have biases."
    )
    tied: bool | None = Field(
        default=None,
        description="Llama, GPT-NeoX: whether the embedding is also the output matrix.",
    )
    guessing: bool | None = Field(
        default=None,
        description="Whether a fresh decoder begins at the cost of guessing, as recurrent models "
        "do. Left out: those of published sizes do.",
    )
    cell_layer_norm: bool | None = Field(
        default=None, description="Whether a recurrent cell applies layer norm to each gate."
    )
    remat: bool | None = Field(
        default=None,
        description="Decoders: whether a block is computed again for its gradient, in place of "
        "keeping all it computed: for long rows.",
    )
    dtype: Dtype | None = Field(
        default=None,
        description="Type of features and products while a model is trained; a feature in "
        "`bfloat16` takes half the bytes of one in `float32`, the default. Parameters, optimisers, "
        "losses and sums of updates are float32 in both, and so is evaluation.",
    )
    si_measure: Annotated[str, one_of(MEASURES)] | None = Field(
        default=None,
        description="SI-CIFG: the measure of a vector that it is divided by. `p8` and "
        "`p16` are p-norms, smooth bounds of the largest magnitude.",
    )
    si_floor: Positive | None = Field(
        default=None, description="SI-CIFG: the least number that a vector is divided by."
    )
    si_candidate: bool | None = Field(
        default=None, description="SI-CIFG: whether the candidate is divided by its measure."
    )
    si_state: bool | None = Field(
        default=None, description="SI-CIFG: whether the emitted state is divided by its measure."
    )
    si_rectifier: Annotated[str, one_of(RECTIFIERS)] | None = Field(
        default=None,
        description="SI-CIFG: what makes a gate positive. `soft` has a round corner, whose width "
        "grows with the gate, and a bounded gradient.",
    )
    si_scaled_floor: NotNegative | None = Field(
        default=None,
        description="SI-CIFG: the least number that a gate is divided by, as a share of its "
        "largest magnitude before it was made positive; 0 is the published rule.",
    )
    si_row_floor: NotNegative | None = Field(
        default=None,
        description="Scale-invariant attention: the fraction of the largest possible scores that "
        "is added to a row's sum before the row is divided by it; it keeps nearly empty rows "
        "stable. 0 is the published rule.",
    )


class Client(Table):
    """The training of a member in a round."""

    optimizer: Annotated[str, one_of(CLIENT_OPTIMIZERS)] = Field(
        default="sgd",
        description="The optimiser of a member's local steps. `muon` makes the steps of inner "
        "matrices orthogonal, and is `adamw` for embeddings and vectors.",
    )
    learning_rate: Positive = Field(default=0.5, description="Learning rate of a member's steps.")
    momentum: Decay = Field(default=0.9, description="Momentum of the optimiser `momentum`.")
    weight_decay: NotNegative = Field(
        default=0.0, description="Weight decay of the optimisers `adamw` and `muon`."
    )
    schedule: Schedule = "constant"
    warmup_rounds: WarmupRounds = 0
    final_fraction: FinalFraction = 0.0
    gradient_clip_norm: NotNegative = Field(
        default=0.0,
        description="Largest L2 norm of a batch's gradient, for stability; it gives no privacy. 0 "
        "is no bound.",
    )
    batch_size: Size = Field(default=16, description="Rows per step.")
    epochs: Size = Field(default=1, description="Passes over a member's rows in a round.")
    max_examples: Count | None = Field(
        default=None, description="The most rows that a member uses in a round; not set: all."
    )
    max_steps: Count | None = Field(
        default=None,
        description="The most steps that a member takes in a round; not set: no limit.",
    )
    weight: Annotated[str, one_of(WEIGHTS)] = Field(
        default="examples",
        description="How much a member counts in the mean: by its rows, by its target tokens, or "
        "all alike.",
    )
    method: Annotated[str, one_of(METHODS)] = Field(
        default="fedavg",
        description="The federated method. With `mimelite` members step with the server's "
        "optimiser, and `server.learning_rate` 1 is usual; `scaffold` and `feddyn` keep a state "
        "per client; `fedadamw` averages the second moments of the members' `adamw`.",
    )
    proximal: NotNegative = Field(
        default=0.0,
        description="Strength of the pull towards the server's model: FedProx's mu with `fedavg`, "
        "FedDyn's alpha with `feddyn`; with `fedadamw` its alpha, how much of the last global step "
        "each step adds. 0 is none.",
    )
    delay: Annotated[str, one_of(DELAYS)] = Field(
        default="none",
        description="With `server.mode` `buffered`, in a simulation: the law of the time that a "
        "member takes to answer. It moves the run's clock, not its wall time.",
    )
    delay_seconds: Positive = Field(default=1.0, description="The mean of that time.")
    delay_shape: Positive = Field(
        default=1.5,
        description="`lognormal`: the standard deviation of the logarithm; `pareto`: the power by "
        "which long delays get rare, above 1.",
    )
    delay_by: Literal["turn", "client"] = Field(
        default="turn",
        description="Whether a delay is drawn anew for each turn of a client, or once, so that "
        "some clients are always slow.",
    )


class Server(Table):
    """The server's step with a cohort's mean change, and the number of rounds."""

    optimizer: Annotated[str, one_of(SERVER_OPTIMIZERS)] = Field(
        default="fedadam", description="The optimiser that takes the mean change for a gradient."
    )
    learning_rate: Positive = Field(
        default=0.01, description="Learning rate of the server's steps."
    )
    momentum: Decay = Field(
        default=0.9,
        description="Momentum of `fedavgm` and `nesterov`; beta1 of `fedadam` and `fedyogi`.",
    )
    beta2: Decay = Field(
        default=0.99, description="Decay of the second moment in `fedadam` and `fedyogi`."
    )
    adam_epsilon: Positive = Field(
        default=1e-5,
        description="What `fedadam`, `fedyogi` and `fedadagrad` add to the denominator of a step.",
    )
    schedule: Schedule = "constant"
    warmup_rounds: WarmupRounds = 0
    final_fraction: FinalFraction = 0.0
    rounds: Annotated[int, Field(ge=1, le=10_000_000)] = Field(
        default=100, description="Rounds of training."
    )
    cohort: Size = Field(
        default=20,
        description="Members per round; with other `sampling` than `fixed` and `spaced`, the "
        "expected number.",
    )
    sampling: Annotated[str, one_of(LAWS)] = Field(
        default="fixed",
        description="How members are drawn: a `fixed` number without replacement; `poisson`, each "
        "client by its own coin; `spaced`, after a turn a client rests for "
        "`privacy.min_separation` rounds; `cyclic-poisson`, groups of clients take turns, with as "
        "many rounds in between, and each client of the group joins by its own coin; "
        "`balls-in-bins`, each client falls by chance into one of `privacy.min_separation` + 1 "
        "bins, which take turns.",
    )
    mode: Literal["synchronous", "buffered"] = Field(
        default="synchronous",
        description="Whether a round waits for its whole cohort, or, `buffered`, for the first "
        "`buffer` answers; the others go on and count in a later round.",
    )
    buffer: Count | None = Field(
        default=None,
        description="`buffered`: answers (one per member) after which the server steps, at most "
        "`cohort`; not set: all.",
    )
    largest_staleness: Annotated[int, Field(ge=0, le=1000)] = Field(
        default=10,
        description="`buffered`: the most rounds by which an answer may be late; what is older is "
        "given up. So many older models are kept.",
    )
    staleness_exponent: NotNegative = Field(
        default=0.5,
        description="`buffered`: an answer that is s rounds late counts (1 + s) to the power of "
        "minus this; 0 counts all alike.",
    )
    grace_seconds: NotNegative = Field(
        default=0.0,
        description="`buffered`: how long the server still waits for others once `buffer` answers "
        "are in.",
    )
    aggregate: Annotated[str, one_of(RULES)] = Field(
        default="mean",
        description="How updates become one change: their `mean`; or, where single updates may be "
        "looked at, a centre that few liars cannot move: `median` of each value, `trimmed-mean`, "
        "`geometric-median`.",
    )
    trim: Annotated[float, Field(gt=0, lt=0.5)] = Field(
        default=0.1, description="`trimmed-mean`: the part of values that is cut on each side."
    )
    update_norm: Positive | None = Field(
        default=None,
        description="The longest update, as an L2 norm, that counts in full without a privacy "
        "plan; longer ones are shortened to it. Not set: no bound.",
    )
    evaluate_every: Count = Field(default=10, description="Rounds between two evaluations.")
    patience: Natural = Field(
        default=0,
        description="Early stopping: end the run after so many evaluations without a lower "
        "perplexity on held-out text, of those figures that may be told; 0 never does. The best "
        "model on the way is kept, as with `run.keep_best`.",
    )
    evaluate_rows: Natural = Field(
        default=2_000, description="Held-out rows scored on the way; 0 is all."
    )


class Privacy(Table):
    """The privacy promised to each client; without a mechanism there is no promise.

    >>> Privacy(mechanism="gaussian", clip_norm=0.5, noise_multiplier=1.0).reveal
    False
    """

    mechanism: Annotated[str, one_of(MECHANISMS)] | None = Field(
        default=None,
        description="The noise on each sum: `gaussian` with `server.sampling` `poisson`, "
        "`fixed` or `balls-in-bins`; `distributed`, of which each node of a secure sum adds a "
        "share, with `fixed` or `spaced`; the others with `spaced`, `banded` also with "
        "`cyclic-poisson` or `balls-in-bins`.",
    )
    clip_norm: Positive = Field(
        default=1.0, description="The longest update that one client may send, as an L2 norm."
    )
    noise_multiplier: NotNegative | None = Field(
        default=None,
        description="Standard deviation of the noise on each sum, in multiples of `clip_norm`; not "
        "set: found from `epsilon`.",
    )
    epsilon: Positive | None = Field(
        default=None,
        description="What rounds, noisy figures, a private vocabulary and the start model may "
        "spend together. With `noise_multiplier` given too, the run stops before the round that "
        "would exceed it, and keeps its model.",
    )
    delta: Annotated[float, Field(ge=-1e30, le=1e30)] = Field(
        default=1e-6,
        description="The delta of the claim, above 0 and well below one in the number of clients.",
    )
    min_separation: Natural = Field(
        default=0,
        description="`spaced`, `cyclic-poisson`, `balls-in-bins`: rounds strictly between two "
        "turns of a client.",
    )
    max_participations: Natural = Field(
        default=0,
        description="`spaced`: turns of a client in the whole run; 0 is as many as the separation "
        "allows.",
    )
    restart_every: Natural = Field(
        default=0,
        description="`tree`, `banded`, `toeplitz`, `blt`: rounds after which noise begins anew; "
        "0 is never.",
    )
    bands: Natural = Field(
        default=0,
        description="`banded`, `toeplitz`: bands of the matrix; 0 is `min_separation` + 1.",
    )
    buffers: Size = Field(
        default=3,
        description="`blt`: how many copies of the model the noise remembers, at most 10.",
    )
    honest_nodes: Annotated[int, Field(ge=0, le=1024)] = Field(
        default=0,
        description="`distributed`: how many of the nodes that stay in a secure sum keep their "
        "noise to themselves; theirs alone is the plan's noise. At most "
        "`wire.secure_threshold`; the claim holds against the server and all other nodes together.",
    )
    clip_quantile: Share = Field(
        default=0.0,
        description="`gaussian`, and `tree`, `banded`, `toeplitz` and `blt` with `restart_every`: "
        "the fraction of updates that an adaptive clip norm leaves unclipped; 0 keeps the clip "
        "norm fixed.",
    )
    clip_rate: Positive = Field(
        default=0.2,
        description="How fast an adaptive clip norm moves: after each round, or with "
        "`restart_every` after each restart, it is multiplied by "
        "exp(-clip_rate × (unclipped fraction - clip_quantile)).",
    )
    clip_noise: NotNegative | None = Field(
        default=None,
        description="Standard deviation of the noise on how many updates were unclipped in a "
        "round, or with `restart_every` in a restart; it spends a part of the same budget. Not "
        "set: a twentieth of `server.cohort`, times the rounds of a restart.",
    )
    evaluation_noise: Positive | None = Field(
        default=None,
        description="Report figures of training clients' held-out text with noise of this standard "
        "deviation, in multiples of what one client can change; every report is paid in the "
        "ledger. Over a network each node adds this noise to its own sums. Not set: no figures "
        "of training clients.",
    )
    evaluation_every: Natural = Field(
        default=0,
        description="With `evaluation_noise`: rounds between two reports; 0 is one, at the end.",
    )
    evaluation_tokens: Count = Field(
        default=50,
        description="With `evaluation_noise`: the most tokens with which a client counts.",
    )
    canaries: Natural = Field(
        default=0,
        description="Further clients that send a random direction, for `fedlm privacy audit`; 0 is "
        "none.",
    )
    seed: Seed | None = Field(
        default=None,
        description="Seed of noise and cohorts, for tests. Unsafe: whoever knows it can subtract "
        "the noise. Not set: the system's entropy.",
    )
    reveal: bool = Field(
        default=False,
        description="Whether the journal also holds losses and counts without noise; no claim "
        "covers them.",
    )


class Wire(Table):
    """The part of the model that is trained and sent, and its encoding."""

    upload: str = Field(
        default="float32",
        description="Codec of updates, by its name in frames, such as `uniform-8`.",
    )
    download: str = Field(default="float32", description="Codec of what members start from.")
    trainable: Annotated[str, one_of(TRAINABLE)] = Field(
        default="all",
        description="Which part of the model members train: `all`; `fixed`, one subset of its "
        "tensors; `round`, subsets that take turns; `member`, each member its own subset in each "
        "round; `low-rank`, factors of its matrices, drawn anew in each round; `lora`, adapters on "
        "a frozen model; `lora-both`, both factors of adapters, for comparison: the server adds "
        "what the mean factors lack to the model.",
    )
    trainable_fraction: Annotated[float, Field(gt=0, le=1)] = Field(
        default=1.0,
        description="`fixed`, `round`, `member`: the fraction that trains of what may be held "
        "still (matrices, embeddings and gains); biases and shifts always train.",
    )
    subsets: Size = Field(
        default=4, description="`round`: how many subsets take turns; each is a compiled program."
    )
    rank: Size = Field(
        default=8, description="`low-rank`, `lora`, `lora-both`: the rank of a matrix's update."
    )
    alpha: Positive = Field(
        default=16.0,
        description="`lora`, `lora-both`: a matrix changes by `alpha` / `rank` times B A.",
    )
    targets: Annotated[tuple[str, ...], Field(min_length=1)] = Field(
        default=QUERIES_AND_VALUES,
        description="`lora`, `lora-both`: names of the linear layers with an adapter, with `*`.",
    )
    last_blocks: Natural = Field(
        default=0,
        description="`lora`, `lora-both`: only so many blocks have adapters, from the end; blocks "
        "before them need no backward pass. 0 is all blocks.",
    )
    secure_nodes: Annotated[int, Field(ge=0, le=1024)] = Field(
        default=0,
        description="How many nodes add up their clients' updates in a secure sum, of which the "
        "server sees the sum alone; 0 is none. A simulation deals its clients to so many nodes; "
        "over a network it is the number of members on the federation's list, with relays that of "
        "all nodes that hold text. Needs a codec that adds up, such as "
        "`secure-20-clip1-members100`.",
    )
    secure_threshold: Annotated[int, Field(ge=0, le=1024)] = Field(
        default=0,
        description="`secure_nodes`: how many nodes must stay until a sum is opened; 0 is two "
        "thirds of them. With relays the same share of each list of members.",
    )
    secure_neighbors: Annotated[int, Field(ge=0, le=1022)] = Field(
        default=0,
        description="`secure_nodes`: with how many others a node agrees on masks, an even number; "
        "0 is with all. Fewer cost less where there are hundreds of nodes; so few that the nodes "
        "that may be absent could cut the others apart are refused.",
    )
    secure_rotation: bool = Field(
        default=False,
        description="`secure_nodes`: whether updates are rotated before they are rounded, all of a "
        "round in the same way: values become alike, so that the codec's `clip` may be much "
        "smaller than an update's norm.",
    )
    error_feedback: bool = Field(
        default=False,
        description="Whether members add what the codec left out to their next update; it is kept "
        "for every client.",
    )


class RunTable(Table):
    """The execution of a run; only the seed changes the trained model by more than rounding."""

    seed: Seed = Field(
        default=0, description="Seed of everything random, except what a privacy plan hides."
    )
    engine: Annotated[str, one_of(ENGINES)] = Field(
        default="mesh",
        description="`mesh`: one compiled program over all devices; `loop`: member by member, slow "
        "and obvious.",
    )
    devices: Natural = Field(default=0, description="Devices on this machine; 0 is one per core.")
    shard: Count = Field(
        default=1,
        description="How many devices share one model, where one has too little memory for it; "
        "they train a member together. The number of devices must be a multiple of it.",
    )
    cache_frozen: Annotated[int, Field(ge=0, le=1 << 30)] = Field(
        default=0,
        description="Adapters in the last blocks only (`wire.last_blocks`): megabytes of disk in "
        "the run's directory for what the blocks below give for each client's rows, so that later "
        "steps need not compute it again. It is removed at the end. 0 is none.",
    )
    frozen_folder: str | None = Field(
        default=None,
        description="A folder for `cache_frozen` in place of the run's directory, for several runs "
        "with the same base and text. It is not removed at the end, and tells "
        "of text: only its owner can read it.",
    )
    checkpoint_every: Count = Field(
        default=10,
        description="Rounds between two checkpoints; under a privacy plan every round is saved.",
    )
    keep_checkpoints: Count = Field(
        default=3, description="How many of the newest checkpoints are kept."
    )
    keep_best: bool = Field(
        default=False,
        description="Whether the model with the lowest perplexity on held-out text on the way is "
        "kept too, for `--best` of `fedlm predict`, `evaluate` and `export`; in a tree, the best "
        "that each place received, by its own text.",
    )
    trackers: tuple[Annotated[str, one_of(TRACKERS)], ...] = Field(
        default=("tensorboard",), description="Programs that get a copy of each round's figures."
    )
    baselines: bool = Field(
        default=True, description="Whether n-gram models are counted at the end, for comparison."
    )
    prompts: tuple[str, ...] = Field(
        default=(), description="Texts whose next words are shown at the end."
    )


class Tune(Table):
    """What `fedlm tune` tries, and how much of it; training does not read this table."""

    over: tuple[str, ...] = Field(
        default=(),
        description="The settings to try, each as `table.key=value,value` or, for numbers evenly "
        "spaced in their logarithm, `table.key=low..high:count`. `[]`: rates and clips that are "
        "usual for the optimisers.",
    )
    points: Count | None = Field(
        default=None,
        description="The most points, drawn at random from all combinations; not set: all.",
    )
    keep_one_in: Annotated[int, Field(ge=1, le=100)] = Field(
        default=3,
        description="After each rung one in so many points goes on, and is trained so many times "
        "as long; 1 trains all points to the end.",
    )
    seeds: tuple[Seed, ...] = Field(
        default=(), description="The seeds of every point; `[]` is that of `run.seed`."
    )
    rounds: Count | None = Field(
        default=None,
        description="The most rounds that all runs play together; fewer points are tried where it "
        "is too little for all. Not set: no limit.",
    )
    minutes: Positive | None = Field(
        default=None, description="The most minutes that all runs train together."
    )
    epsilon: Positive | None = Field(
        default=None,
        description="The most that all runs on the store, before and in the search, may cost a "
        "client together; a search that would cost more is refused.",
    )


class Recipe(Table):
    """All settings of an experiment, one table per attribute; the TOML of a recipe is one.

    >>> recipe = Recipe.model_validate({"data": {"source": "sotu"}, "server": {"cohort": 20}})
    >>> recipe.server.cohort, recipe.model.name
    (20, 'si-cifg')
    """

    data: Data = Field(default=Data(), description="Which text, in which tokens and rows.")
    model: Model = Field(default=Model(), description="Which architecture, of which size.")
    client: Client = Field(default=Client(), description="What a member does in a round.")
    server: Server = Field(default=Server(), description="What the server does, and how often.")
    privacy: Privacy = Field(default=Privacy(), description="What is promised to each client.")
    wire: Wire = Field(default=Wire(), description="What travels, in which bytes.")
    federation: FederationTable | None = Field(
        default=None, description="A tree of federations; without it the federation is flat."
    )
    tune: Tune | None = Field(default=None, description="What `fedlm tune` tries.")
    run: RunTable = Field(default=RunTable(), description="How the run is carried out.")
