"""A user's error is one sentence and exit code 2, and costs nothing that was there."""

import json
import os
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from fedlm.corpus.store import Store
from tests.conftest import call, write_tiny
from tests.models.interop.test_huggingface import write as write_folder
from tests.recipe.test_init_from import words as word_tokenizer


def refused(result, *words):
    """Exit code 2, the sentence as the last line of stderr, no traceback, nothing on stdout."""
    assert result.code == 2, result.stderr
    assert "Traceback" not in result.stderr and result.stdout == ""
    said = [line for line in result.stderr.splitlines() if line.startswith("fedlm: ")]
    assert len(said) == 1 and result.stderr.rstrip().endswith(said[0])
    for word in words:
        assert word in said[0]


def content(folder):
    """Return the contents of all files but the one that says what a run is doing now."""
    found = (p for p in folder.rglob("*") if p.is_file() and p.name != "status.json")
    return {p: p.read_bytes() for p in found}


def write_text(path, *clients):
    lines = [json.dumps({"client": name, "text": text}) for name, text in clients]
    path.write_text("".join(line + "\n" for line in lines))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the tiny recipe, in which every run is refused: its store is made once."""
    made = tmp_path_factory.mktemp("refused")
    write_tiny(made)
    return made


@pytest.mark.parametrize(
    "change, words",
    [
        ("server.round=5", ("[server] has no setting 'round'", "'rounds'")),
        ("sever.rounds=5", ("there is no table [sever]", "'server'")),
        ("client.learning_rate=-1", ("client.learning_rate = -1: expected greater than 0",)),
        ("model.name=gpt9", ("model.name = 'gpt9': expected 'lstm', 'cifg'",)),
        ("rounds=5", ("expected table.key=value",)),
        ("server.cohort=19", ("server.cohort = 19", "the 18 training clients")),
        ("data.source=nowhere.jsonl", ("nowhere.jsonl", "neither a file nor a corpus name")),
        ('data.source=""', ("data.source = '': expected text that is not empty",)),
        ("data.store=nowhere", ("expected one of data.source",)),
        ("run.devices=3", ("run.devices = 3", "already runs with 2 devices")),
    ],
)
def test_a_setting_that_cannot_be(folder, change, words):
    refused(call(folder, "train", "tiny.toml", "--set", change, "--json"), *words)
    assert not (folder / "runs").exists()


APART = ("server.sampling=spaced", "server.cohort=2", "privacy.min_separation=3")
TREE = (*APART, "privacy.mechanism=tree", "privacy.noise_multiplier=1")
POISSON = ("server.sampling=poisson", "privacy.mechanism=gaussian", "privacy.noise_multiplier=1")


@pytest.mark.sample(16)
@pytest.mark.parametrize(
    "settings, words",
    [
        ((*TREE, "privacy.delta=0"), ("privacy.delta = 0.0: expected a probability above 0",)),
        ((*TREE, "privacy.delta=-1e-6"), ("privacy.delta = -1e-06: expected a probability",)),
        ((*TREE, "privacy.delta=nan"), ("privacy.delta = nan: expected",)),
        (
            ("privacy.noise_multiplier=1",),
            ("privacy.noise_multiplier = 1.0", "privacy.mechanism beside it"),
        ),
        (("wire.upload=uniform8",), ("wire.upload = 'uniform8': no such codec", "'uniform'")),
        (("wire.upload=uniform-17",), ("wire.upload = 'uniform-17': bits = 17: expected 1 to 16",)),
        (("wire.download=topk-x",), ("wire.download = 'topk-x': expected a name like",)),
        (("wire.trainable=member",), ("wire.trainable_fraction = 1.0: expected below 1 with",)),
        (
            ("wire.trainable_fraction=0.5",),
            ("wire.trainable_fraction = 0.5: expected below 1 with",),
        ),
        (
            ("wire.trainable=member", "wire.trainable_fraction=0.5", "wire.upload=drive"),
            ("wire.upload = 'drive'", "mixes all leaves"),
        ),
        (
            ("wire.trainable=round", "wire.trainable_fraction=0.5", "wire.error_feedback=true"),
            ("wire.error_feedback = True", "'all', 'fixed' or 'lora'"),
        ),
        (("client.method=feddyn",), ("client.proximal = 0.0: expected FedDyn's alpha",)),
        (
            ("client.method=scaffold", "client.gradient_clip_norm=1"),
            ("client.gradient_clip_norm = 1.0: expected 0", "'scaffold' defines the member's step"),
        ),
        (("client.method=mimelite", "wire.trainable=low-rank"), ("client.method = 'mimelite'",)),
        ((*TREE, "client.method=scaffold"), ("client.method = 'scaffold'", "has no bound")),
        ((*TREE, "wire.error_feedback=true"), ("wire.error_feedback = True: expected off under",)),
        (
            (*TREE, "wire.trainable=low-rank"),
            ("wire.trainable = 'low-rank': expected another part",),
        ),
        (("privacy.epsilon=1",), ("privacy.epsilon = 1.0", "privacy.mechanism beside it")),
        (("privacy.canaries=5",), ("privacy.canaries = 5", "privacy.mechanism beside it")),
        (APART, ("privacy.min_separation = 3", "privacy.mechanism beside it")),
        (APART[:2], ("server.sampling = 'spaced'", "privacy.mechanism and")),
        ((*TREE, "privacy.clip_norm=0"), ("privacy.clip_norm = 0: expected greater than 0",)),
        ((*TREE, "privacy.clip_norm=inf"), ("privacy.clip_norm = inf: expected a finite number",)),
        (
            (*TREE, "privacy.noise_multiplier=-1"),
            ("privacy.noise_multiplier = -1: expected greater than or equal",),
        ),
        (TREE[:-1], ("privacy.noise_multiplier = None", "Or set privacy.epsilon")),
        (
            (*TREE[:-1], "privacy.epsilon=1e-9", "privacy.delta=1e-12"),
            ("privacy.epsilon = 1e-09", "some noise can meet"),
        ),
        pytest.param(
            (*POISSON, "privacy.epsilon=1e-3"),
            ("privacy.epsilon = 0.001", "the first costs"),
            marks=pytest.mark.slow,  # it composes many distributions
        ),
        ((*TREE, "privacy.min_separation=9"), ("privacy.min_separation = 9", "at most 8")),
        ((*TREE, "privacy.max_participations=1", "server.rounds=20"), ("at least 3, because",)),
        ((*APART, *POISSON[1:]), ("privacy.mechanism = 'gaussian'", "leaves no such chance")),
        ((*TREE, "server.sampling=poisson"), ("privacy.mechanism = 'tree': expected gaussian",)),
        ((*POISSON, "privacy.min_separation=3"), ("privacy.min_separation = 3: expected 0 when",)),
        ((*TREE, "client.weight=examples"), ("client.weight = 'examples'", "Leave it out.")),
        ((*TREE, "privacy.clip_quantile=0.5"), ("privacy.clip_quantile = 0.5: expected 0 with",)),
        ((*POISSON, "privacy.clip_quantile=0.5", "privacy.clip_noise=0.4"), ("more than half of",)),
        ((*TREE, "privacy.mechanism=trees"), ("privacy.mechanism = 'trees'", "'tree'")),
        ((*TREE, "privacy.bands=2"), ("privacy.bands = 2", "'banded' or 'toeplitz'")),
        ((*TREE, "privacy.canaries=-1"), ("privacy.canaries = -1",)),
        ((*TREE, "privacy.sed=1"), ("[privacy] has no setting 'sed'", "'seed'")),
    ],
)
def test_a_promise_that_cannot_be_kept(folder, settings, words):
    changes = [part for setting in settings for part in ("--set", setting)]
    refused(call(folder, "train", "tiny.toml", *changes, "--json"), *words)
    assert not (folder / "runs").exists()


def test_a_recipe_that_is_not_there_or_not_toml(run_cli, tmp_path):
    refused(run_cli("train", "none.toml"), "none.toml is not readable: No such file")
    (tmp_path / "bad.toml").write_text("[data\n")
    refused(run_cli("train", "bad.toml"), "bad.toml is not valid TOML", "line 1")


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "raw, words",
    [
        (b"", ("the source holds no client",)),
        (b"\n\n", ("the source holds no client",)),
        (b'{"client": "a", "text": " "}\n', ("none of the 1 clients", "has any text")),
        (b'{"client": "a", "text": "hi"}\n{"client": "\xff"}\n', ("line 2", "not valid UTF-8")),
        (b'{"client": "a", "text": "hi"}\n{"client": \n', ("line 2", "not JSON")),
        (b'{"client": "a"}\n', ("line 1", "'text'")),
        (b"[1]\n", ("line 1", "expected an object")),
    ],
)
def test_text_that_cannot_be_used(run_cli, tiny_recipe, tiny_text, tmp_path, raw, words):
    tiny_text.write_bytes(raw)
    refused(run_cli("prepare", tiny_text, "--out", "store"), *words)
    assert not (tmp_path / "store").exists()
    refused(run_cli("train", tiny_recipe), *words)
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_file()) == ["tiny.jsonl", "tiny.toml"]
    assert not list(tmp_path.rglob("store.json")) and not (tmp_path / "runs").exists()


def test_a_client_without_text_is_left_out(run_cli, tiny_text):
    with open(tiny_text, "a") as file:
        file.write(json.dumps({"client": "silent", "text": " \n\n"}) + "\n")
    done = run_cli("prepare", tiny_text, "--out", "store", "--json")
    assert done.code == 0 and done.json["clients"] == 20


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "source, option, words",
    [
        ("synthetic:stackoverflw", (), "Did you mean 'stackoverflow'?"),
        ("synthetic:stackoverflow", ("--clients", 0), "--clients = 0: expected at least one"),
        ("synthetic:stackoverflow", ("--groups", "8;50"), "--groups = '8;50': expected how many"),
        ("synthetic:stackoverflow", ("--tokenizer", "bpe"), "--tokenizer = 'bpe': expected words"),
        ("tiny.jsonl", ("--clients", 5), "--clients = 5: expected nothing for this source"),
        ("tiny.jsonl", ("--groups", "8"), "--groups = '8': expected nothing for this source"),
    ],
)
def test_clients_that_cannot_be_made_up(run_cli, tiny_text, tmp_path, source, option, words):
    refused(run_cli("prepare", source, "--out", "store", *option), words)
    assert not (tmp_path / "store").exists()


def test_a_store_that_is_there_already(run_cli, tiny_text, tmp_path):
    assert run_cli("prepare", tiny_text, "--out", "store").code == 0
    before = content(tmp_path)
    refused(run_cli("prepare", tiny_text, "--out", "store"), "store exists already")
    assert content(tmp_path) == before


def test_a_store_of_another_tokenizer(run_cli, tiny_text, tiny_recipe, tmp_path):
    assert run_cli("prepare", tiny_text, "--out", "store", "--tokenizer", "bytes").code == 0
    text = tiny_recipe.read_text().replace('source = "tiny.jsonl"', 'store = "store"')
    tiny_recipe.write_text(text.replace("vocabulary = 60", 'tokenizer = "words"'))
    refused(run_cli("train", tiny_recipe), "data.tokenizer = 'words'", "was made with 'bytes'")


@pytest.fixture
def ended(trained, tmp_path):
    """A copy of the finished run in runs/tiny; its text is where it was."""
    return shutil.copytree(trained / "runs" / "tiny", tmp_path / "runs" / "tiny")


def test_a_run_directory_that_is_taken(run_cli, trained, ended):
    before = content(ended)
    out = ("--out", ended)
    fewer = ("train", trained / "tiny.toml", "--set", "server.rounds=2", *out)
    refused(run_cli(*fewer), "server.rounds is 6 there and 2 here")
    other = ("train", trained / "tiny.toml", "--set", "client.epochs=2", *out)
    refused(run_cli(*other, "--resume"), "holds another recipe")
    refused(run_cli("train", ended / "recipe.toml", *out), "add --resume to go on")
    assert content(ended) == before


def test_a_run_whose_recipe_or_text_was_changed_does_not_go_on(
    run_cli, tiny_text, tiny_recipe, tmp_path
):
    assert run_cli("train", tiny_recipe, "--set", "server.rounds=2").code == 0
    ended = tmp_path / "runs" / "tiny"
    (ended / "summary.json").unlink()
    resume = ("train", ended / "recipe.toml", "--out", ended, "--resume")
    recipe = (ended / "recipe.toml").read_text()
    (ended / "recipe.toml").write_text(recipe.replace("rate = 0.5", "rate = 0.6"))
    before = content(ended)
    refused(
        run_cli(*resume),
        "begun with another recipe",
        "client.learning_rate is 0.5 there and 0.6 here",
    )
    assert content(ended) == before
    (ended / "recipe.toml").write_text(recipe)
    text = tiny_text.read_text().replace("cat", "?").replace("dog", "cat").replace("?", "dog")
    tiny_text.write_text(text)
    refused(run_cli(*resume), "begun on another text")
    refused(run_cli("evaluate", ended), "begun on another text")


def test_one_flipped_bit_of_the_text_is_noticed_at_the_start_and_on_resume(
    run_cli, tiny_recipe, tmp_path
):
    assert run_cli("train", tiny_recipe, "--set", "server.rounds=2").code == 0
    ended = tmp_path / "runs" / "tiny"
    (file,) = tmp_path.glob(".fedlm/stores/*/clients.arrow")
    whole = file.read_bytes()
    at = whole.rindex(Store(file.parent).held(0).tobytes())
    file.unlink()  # the old bytes are still mapped
    file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    words = ("clients.arrow is not what was written", "Prepare the store again")
    refused(run_cli("train", tiny_recipe, "--out", "other"), *words)
    assert not (tmp_path / "other" / "journal.jsonl").exists()
    (ended / "summary.json").unlink()
    refused(run_cli("train", ended / "recipe.toml", "--out", ended, "--resume"), *words)
    refused(run_cli("evaluate", ended), *words)


@pytest.mark.parametrize("command", ["evaluate", "predict", "report"])
def test_what_is_not_a_run(run_cli, tmp_path, command):
    refused(run_cli(command, tmp_path), "is not a run directory: it has no recipe.toml")


def test_a_run_without_a_model(run_cli, ended):
    (ended / "model.safetensors").unlink()
    refused(run_cli("evaluate", ended), "holds no trained model yet", "--resume")
    refused(run_cli("predict", ended, "the"), "holds no trained model yet")


def test_damaged_weights_and_a_damaged_journal(run_cli, ended):
    weights = ended / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    refused(run_cli("predict", ended, "the"), "model.safetensors is damaged")
    (ended / "journal.jsonl").write_text("{\n{}\n")
    refused(run_cli("report", ended), "journal.jsonl, line 1: not JSON")


def test_values_that_options_do_not_take(run_cli, ended):
    refused(run_cli("evaluate", ended, "--split", "train"), "--split = 'train': expected test or")
    refused(run_cli("predict", ended, "x", "--temperature", -1), "expected zero or more")


@pytest.mark.parametrize("args", [["train"], ["train", "--rounds", "3", "x"], ["tain"]])
def test_a_command_that_is_not_one(run_cli, args):
    result = run_cli(*args)
    assert result.code == 2 and "Traceback" not in result.stderr and result.stdout == ""
    assert "Error: " in result.stderr


@pytest.mark.sample(1)
@pytest.mark.parametrize("change", ["client.learning_rate=1e9", "client.learning_rate=1e30"])
def test_a_model_that_diverges(run_cli, tiny_recipe, tmp_path, change):
    result = run_cli("train", tiny_recipe, "--set", change, "--out", "run", "--json")
    refused(
        result,
        "round ",
        "client.learning_rate or server.learning_rate too high",
        "checkpoint is kept",
    )
    # Checkpoints of a loss that runs away would push out those from before.
    kept = sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir())
    assert kept == ["round-000000.safetensors"]
    assert not (tmp_path / "run" / "model.safetensors").exists()
    changed = ("--set", change, "--out", "run", "--resume")
    refused(run_cli("train", tiny_recipe, *changed), "training stopped")


@pytest.mark.slow
def test_a_server_step_out_of_the_finite_world_in_the_last_round(run_cli, tiny_recipe, tmp_path):
    settings = ("optimizer=fedavg", "learning_rate=1e30", "rounds=1")
    changes = [part for setting in settings for part in ("--set", f"server.{setting}")]
    result = run_cli(
        "train", tiny_recipe, *changes, "--set", "client.learning_rate=5e9", "--out", "run"
    )
    refused(result, "round 0: the parameters are not finite")
    assert not (tmp_path / "run" / "model.safetensors").exists()


def test_output_where_nothing_can_be_written(run_cli, tiny_recipe, tiny_text, ended, tmp_path):
    (tmp_path / "file").write_text("in the way")
    before = content(tmp_path)
    refused(run_cli("train", tiny_recipe, "--out", "file"), "file is not a run directory")
    refused(run_cli("train", tiny_recipe, "--out", "file/run"), "Not a directory")
    refused(run_cli("report", ended, "--out", "file/page.html"), "could not be written")
    refused(run_cli("prepare", tiny_text, "--out", "file/store"), "file")
    after = {p: raw for p, raw in content(tmp_path).items() if ".fedlm" not in p.parts}
    assert after == {p: raw for p, raw in before.items() if ".fedlm" not in p.parts}


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "text, words",
    [
        ("[axes", "is not valid TOML"),
        ("recipes = 3", "has no setting 'recipes'. Did you mean 'recipe'?"),
        ("[axes]", "expected recipe = a path"),
        ("recipe = 'tiny.toml'\naxes = 3", "axes = 3: expected a table"),
        ("recipe = 'tiny.toml'\n[axes]\n'run.seed' = 3", "axes.run.seed = 3: expected a list"),
        ("recipe = 'tiny.toml'\ncases = []", "cases = []: expected"),
        (
            "recipe = 'tiny.toml'\naxes = {'run.seed' = [1]}\ncases = [{'run.seed' = 2}]",
            "run.seed is set by a case and by an axis",
        ),
        ("recipe = 'tiny.toml'\ntarget = 'low'", "target = 'low': expected a perplexity"),
        ("recipe = 'tiny.toml'\n[axes]\n'run.seeds' = [3]", "Did you mean 'seed'?"),
    ],
)
def test_a_sweep_that_cannot_be(run_cli, tiny_recipe, tmp_path, text, words):
    (tmp_path / "grid.toml").write_text(text)
    refused(run_cli("sweep", "grid.toml"), words)
    assert not (tmp_path / "runs").exists()


# ---- models from elsewhere ---------------------------------------------------------------------


def _config(base, **changes):
    told = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**told, **changes}))


def _not_finite(base):
    arrays = load_file(base / "model.safetensors")
    arrays["model.norm.weight"] = np.full_like(arrays["model.norm.weight"], np.nan)
    save_file(arrays, base / "model.safetensors")


def _sparse(base):
    with open(base / "huge.safetensors", "wb") as file:
        file.truncate(1 << 40)  # takes no place on the disk


BROKEN_BASES = {
    "settings of another kind": (
        lambda base: _config(base, model_type=["llama"]), "",
        ("config.json: model_type = ['llama'] is not supported",),
    ),
    "heads that do not fit": (
        lambda base: _config(base, num_attention_heads=3), "",
        ("config.json: 3 heads share 2 keys", "Fetch the model again"),
    ),
    "numbers that are none": (
        _not_finite, "", ("tensor 'model.norm.weight' holds numbers that are not finite",),
    ),
    "weights without their folder": (
        lambda base: None, "model.safetensors",
        ("model.init_from = ", "was not written by fedlm", "a folder with config.json"),
    ),
    "a folder without settings": (
        lambda base: (base / "config.json").unlink(), "",
        ("was not written by fedlm", "a folder with config.json"),
    ),
    "a pickle": (
        lambda base: (base / "pytorch_model.bin").write_bytes(b"\x80\x02" * 50),
        "pytorch_model.bin", ("this may be a pickle", "save_pretrained"),
    ),
    "a file of a terabyte": (
        _sparse, "huge.safetensors", ("has 1,099,511,627,776 bytes, and the model of this",),
    ),
    "a pipe": (
        lambda base: os.mkfifo(base / "pipe.gguf"), "pipe.gguf", ("is no regular file",),
    ),
    "no such file": (lambda base: None, "none.gguf", ("none.gguf is not readable",)),
}  # fmt: skip


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """A folder with a recipe that takes its model, and its tokens, from elsewhere."""
    made = tmp_path_factory.mktemp("elsewhere")
    recipe = write_tiny(made)
    text = recipe.read_text().replace("vocabulary = 60", 'tokenizer = "tokenizer.json"')
    before, after = text.split("[model]")
    recipe.write_text(before + "[client]" + after.split("[client]")[1])
    word_tokenizer().save(str(made / "tokenizer.json"))
    return made


def test_a_node_does_not_join_with_a_base_that_is_none(elsewhere, tmp_path):
    join = ("node", "join", "kit", "--store", "store", "--base")
    refused(call(elsewhere, *join, "nowhere"), "--base = 'nowhere': expected a model.safetensors")
    write_folder(tmp_path / "base", model_type="bert")
    refused(call(elsewhere, *join, tmp_path / "base"), "config.json: model_type = 'bert'")


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", BROKEN_BASES)
def test_a_model_from_elsewhere_that_cannot_be_read(elsewhere, tmp_path, name):
    breaks, file, said = BROKEN_BASES[name]
    write_folder(tmp_path / "base")
    breaks(tmp_path / "base")
    given = f"model.init_from={tmp_path / 'base' / file}"
    refused(call(elsewhere, "train", "tiny.toml", "--set", given, "--json"), *said)


def test_nothing_of_a_user_is_overwritten(run_cli, trained, tmp_path):
    """`export` replaced a README, `report` the training text."""
    run = trained / "runs" / "tiny"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "README.md").write_text("my own notes")
    write_text(tmp_path / "letters.jsonl", ("ann", "precious"))
    before = content(tmp_path)
    refused(run_cli("export", run, "--out", "mine"), "--out = 'mine'", "a new folder")
    refused(run_cli("export", run, "--out", run), "--out", "a new folder")
    for page in (("report", run), ("report", run, run)):
        refused(run_cli(*page, "--out", "letters.jsonl"), "--out = 'letters.jsonl'", "a new file")
    assert content(tmp_path) == before
    for _ in range(2):  # what fedlm has made may be made again
        assert run_cli("export", run, "--out", "made").code == 0
        assert run_cli("report", run, "--out", "page.html").code == 0


def test_a_store_that_exists_is_refused_before_the_text_is_read(run_cli, tmp_path):
    write_text(tmp_path / "letters.jsonl", ("ann", "a b"), ("bob", "c d"))
    (tmp_path / "store").mkdir()
    found = run_cli("prepare", "letters.jsonl", "--out", "store")
    refused(found, "exists already")
    assert "vocabulary" not in found.stderr


def test_a_setting_may_be_left_out_on_the_command_line(run_cli, tmp_path):
    write_tiny(tmp_path)
    everything = ("--out", "store", "--test-clients", "0.1", "--vocabulary", "60")
    assert run_cli("prepare", "tiny.jsonl", *everything).code == 0
    mine = ("--set", "data.source=", "--set", "data.store=store", "--set", "data.vocabulary=")
    few = ("--set", "server.rounds=1", "--set", "server.evaluate_every=1")
    done = run_cli("train", "tiny.toml", *mine, *few, "--out", "run", "--json")
    assert done.code == 0, done.stderr
    refused(run_cli("train", "tiny.toml", "--set", "data.sources="), "no setting 'sources'")


def test_help_is_written_for_people(run_cli):
    for command in (("prepare",), ("privacy", "epsilon"), ("federation", "init")):
        said = run_cli(*command, "--help").stdout
        assert "[required]" in said or "[default:" in said
        assert "\\[" not in said
