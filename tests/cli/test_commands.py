"""Every command does what its help says, and its JSON is all there is on stdout."""

import io
import json
import re
import shutil
from importlib.metadata import version

import pytest
from rich.console import Console

from fedlm.cli.console import bar
from fedlm.cli.train import PlainProgress, RoundWords
from fedlm.core.keys import key_for
from fedlm.inference import load_params
from fedlm.privacy.release import release
from fedlm.recipe.build import build
from fedlm.recipe.settings import load

COMMANDS = (
    *("prepare", "train", "evaluate", "predict", "report", "sweep", "models"),
    *("advise", "bench-quality"),
)
SUMMARY = {
    *("run", "rounds", "perplexity", "accuracy", "tokens", "upload_bytes", "download_bytes"),
    *("epsilon", "delta", "params", "params_sha256", "seconds", "clients_per_second"),
}


@pytest.fixture
def run(trained):
    """The finished run, absolute."""
    return trained / "runs" / "tiny"


def good(result):
    assert result.code == 0, result.stderr
    assert "Traceback" not in result.stderr
    return result


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(run_cli, command):
    shown = good(run_cli(command, "--help")).stdout
    assert re.search(rf"Example: fedlm {command}\b", shown)
    assert "--json" in shown


def test_help_names_every_command(run_cli):
    shown = good(run_cli("--help")).stdout
    assert all(re.search(rf"^\s+{command}\b", shown, re.M) for command in COMMANDS)


def test_prepare_makes_a_store_that_a_recipe_can_name(run_cli, tiny_text, tiny_recipe, tmp_path):
    asked = ("prepare", tiny_text, "--vocabulary", 60)
    facts = good(run_cli(*asked, "--out", "stores/tiny", "--json")).json
    assert facts["store"] == "stores/tiny" and facts["clients"] == 20
    assert facts["train_clients"] + facts["test_clients"] == 20
    table = good(run_cli(*asked, "--out", "stores/again"))
    assert "train_tokens" in table.stdout and "data.store = 'stores/again'" in table.stderr
    one, two = (tmp_path / "stores" / name / "clients.arrow" for name in ("tiny", "again"))
    assert one.read_bytes() == two.read_bytes()

    text = tiny_recipe.read_text().replace('source = "tiny.jsonl"', 'store = "stores/tiny"')
    (tmp_path / "stored.toml").write_text(text.replace("vocabulary = 60", ""))
    stored = good(run_cli("train", "stored.toml", "--json")).json
    plain = good(run_cli("train", tiny_recipe, "--json")).json
    assert stored["params_sha256"] == plain["params_sha256"]
    assert good(run_cli("train", "stored.toml", "--json", "--resume")).json == stored


@pytest.mark.slow
def test_prepare_makes_up_clients_that_train(run_cli, tiny_recipe, tmp_path):
    asked = ("prepare", "synthetic:stackoverflow", "--vocabulary", 60, "--clients", 12)
    facts = good(run_cli(*asked, "--groups", "2,2", "--out", "many", "--json")).json
    assert (facts["clients"], facts["test_clients"], facts["vocabulary"]) == (12, 1, 60)
    text = tiny_recipe.read_text().replace('source = "tiny.jsonl"', 'store = "many"')
    (tmp_path / "many.toml").write_text(text.replace("vocabulary = 60", ""))
    assert good(run_cli("train", "many.toml", "--set", "server.rounds=2", "--json")).json["rounds"]


def test_train_prints_one_json_object_with_the_summary(trained, run):
    printed = (trained / "stdout.txt").read_text()
    assert printed.count("\n") == 1
    summary = json.loads(printed)
    assert set(summary) >= SUMMARY
    assert summary["run"] == "runs/tiny" and summary["rounds"] == 6
    assert summary["perplexity"] > 1 and 0 <= summary["accuracy"] <= 1
    assert summary["tokens"] > 0 and summary["seconds"] > 0 and summary["clients_per_second"] > 0
    assert summary["epsilon"] is None and summary["delta"] is None
    assert re.fullmatch("[0-9a-f]{64}", summary["params_sha256"])
    assert json.loads((run / "summary.json").read_text()) == summary
    assert not list(trained.rglob("*.part"))


def test_reported_bytes_are_real_bytes(trained, run, tmp_path):
    made = build(load(run / "recipe.toml"), tmp_path, lambda stage, done: None)
    params = load_params(made.recipe.model, made.store.vocabulary, run / "model.safetensors")
    sent = len(made.algorithm.upload.encode(params, key_for(0, "upload")))
    received = len(made.algorithm.download.encode(params, key_for(0, "upload")))
    summary = json.loads((run / "summary.json").read_text())
    assert summary["upload_bytes"] == 6 * 4 * sent
    assert summary["download_bytes"] == 6 * 4 * received


def test_train_ends_in_a_table_and_takes_a_new_directory(run_cli, tiny_recipe, tmp_path):
    changes = ("--set", "server.rounds=2", "--set", "run.trackers=['tensorboard']")
    for name in ("tiny", "tiny-2"):
        done = good(run_cli("train", tiny_recipe, *changes))
        for words in ("trigram, counted", "trained, held-out clients", "2 rounds", "the cat ..."):
            assert words in done.stdout
        assert f"report: runs/{name}/report.html" in done.stdout
        assert list((tmp_path / "runs" / name / "tensorboard").glob("events*"))
    again = good(run_cli("train", tiny_recipe, *changes, "--resume"))
    assert "runs/tiny-2 is complete; nothing is left to train" in again.stderr


@pytest.mark.slow
def test_text_of_which_nothing_is_held_out_trains_without_figures(run_cli, tiny_recipe):
    nothing = ("--set", "data.validation=0", "--set", "data.test_clients=0")
    done = good(run_cli("train", tiny_recipe, *nothing, "--set", "server.rounds=2"))
    assert "2 rounds" in done.stdout and "accuracy" not in done.stdout
    again = good(run_cli("train", tiny_recipe, *nothing, "--set", "server.rounds=2", "--json"))
    assert again.json["perplexity"] is None and again.json["baselines"] is None


def test_evaluate_repeats_the_figures_of_the_run(run_cli, run):
    summary = json.loads((run / "summary.json").read_text())
    found = good(run_cli("evaluate", run, "--json")).json
    assert found["perplexity"] == summary["perplexity"] and found["split"] == "test"
    found = good(run_cli("evaluate", run, "--split", "validation", "--json")).json
    assert found["perplexity"] == summary["validation_perplexity"]
    assert set(found["groups"][0]) == {"north", "south"} and len(found["groups"][1]) == 4
    shown = good(run_cli("evaluate", run, "--split", "validation")).stdout
    assert "perplexity over clients" in shown and "town-3" in shown


def test_names_are_shown_as_they_are(run_cli, tiny_recipe, tiny_text):
    text = tiny_text.read_text().replace("north", "[/north]").replace("south", ":cat: [red]")
    tiny_text.write_text(text)
    good(run_cli("train", tiny_recipe, "--set", "server.rounds=2", "--out", "runs/[b]"))
    shown = good(run_cli("evaluate", "runs/[b]", "--split", "validation")).stdout
    assert "[/north]" in shown and ":cat: [red]" in shown and "runs/[b]" in shown


def test_predict_answers_a_text_and_lines(run_cli, run):
    found = good(run_cli("predict", run, "the cat", "--count", 3, "--json")).json
    assert found["prompt"] == "the cat" and len(found["next"]) == 3
    chances = [word["probability"] for word in found["next"]]
    assert chances == sorted(chances, reverse=True) and 0 < sum(chances) < 1
    told = json.loads((run / "summary.json").read_text())["predictions"][0]
    assert told["next"][:3] == found["next"]

    lines = good(run_cli("predict", run, "--json", stdin="the cat\n\na dog\n")).stdout
    prompts = [json.loads(line)["prompt"] for line in lines.splitlines()]
    assert prompts == ["the cat", "a dog"]
    spoken = good(run_cli("predict", run, stdin="the cat\n")).stdout
    assert spoken.startswith(found["next"][0]["word"]) and spoken.count("%") == 5


def test_predict_goes_on_the_same_way_for_the_same_seed(run_cli, run):
    ask = ("predict", run, "the cat", "--length", 12, "--json", "--seed")
    one, two, three = (good(run_cli(*ask, seed)).json["continuation"] for seed in (0, 0, 1))
    assert one == two != three


def test_report_draws_one_run_and_compares_two(run_cli, run, tmp_path):
    for name in ("one", "two"):
        shutil.copytree(run, tmp_path / name)
    (tmp_path / "one" / "report.html").unlink()
    assert "report: one/report.html" in good(run_cli("report", "one")).stdout
    assert "<h1>one</h1>" in (tmp_path / "one" / "report.html").read_text(encoding="utf-8")
    assert good(run_cli("report", "one", "two", "--json")).json["report"] == "report.html"
    assert "2 runs compared" in (tmp_path / "report.html").read_text(encoding="utf-8")
    good(run_cli("report", "one", "two", "--out", "new/folder/page.html"))
    assert (tmp_path / "new/folder/page.html").is_file()


def test_models_lists_sizes(run_cli):
    rows = good(run_cli("models", "--json")).json["models"]
    assert {"cifg", "lstm", "si-cifg"} <= {row["name"] for row in rows}
    assert all(row["parameters"] > 1_000_000 for row in rows)
    assert "si-cifg" in good(run_cli("models")).stdout


SWEEP = """
recipe = "tiny.toml"
target = 1000
[axes]
"client.learning_rate" = [0.5, 1e30]
"run.seed" = [0, 1]
"""


@pytest.mark.slow
def test_a_sweep_runs_every_point_once(run_cli, tiny_recipe, tmp_path):
    (tmp_path / "grid.toml").write_text(SWEEP)
    done = good(run_cli("sweep", "grid.toml", "--json"))
    points = re.findall(r"^point (\d) of 4: client\.learning_rate=[^ ]*$", done.stderr, re.M)
    assert points == ["1", "2", "3", "4"]
    assert done.stdout.count("\n") == 1
    head, rows = done.json["head"], done.json["rows"]
    assert (
        head[:3] == ["client.learning_rate", "seeds", "test perplexity"]
        and "rounds to 1000" in head
    )
    assert [row[:2] for row in rows] == [[0.5, 2], [1e30, 2]]
    assert "±" in rows[0][2] and rows[0][-1] == "no" and rows[1][-1] == "2 of 2"
    folder = tmp_path / "runs" / "grid"
    assert {p.name for p in folder.iterdir() if p.is_dir()} == {
        f"client.learning_rate={rate},run.seed={seed}" for rate in (0.5, 1e30) for seed in (0, 1)
    }
    assert (folder / "table.md").read_text().count("\n") == 4

    journals = {p: p.stat().st_mtime_ns for p in folder.rglob("journal.jsonl")}
    again = good(run_cli("sweep", "grid.toml"))
    assert "2 of 2" in again.stdout and "round 2" not in again.stderr
    assert {p: p.stat().st_mtime_ns for p in folder.rglob("journal.jsonl")} == journals

    tiny_recipe.write_text(tiny_recipe.read_text().replace("hidden_size = 12", "hidden_size = 13"))
    other = run_cli("sweep", "grid.toml")
    assert other.code == 2 and "model.hidden_size is 12 there and 13 here" in other.stderr


def test_the_version_is_told(run_cli):
    result = run_cli("--version")
    assert result.code == 0 and result.stdout == f"fedlm {version('fedlm')}\n"


def test_progress_in_a_file_is_lines_of_eighty_columns(capsys):
    lines = PlainProgress(3, seconds=0.0)
    lines.begin(0, 3, 12345.6)
    for number in range(3):
        facts = {"round": number, "members": 400, "seconds": 0.01, "loss": 12.3456, "epsilon": None}
        figures = {"perplexity": 12345.6, "epsilon": 123.45} if number == 2 else {}
        lines.round(release(None, "round", {**facts, **figures}))
    said = capsys.readouterr().err.splitlines()
    assert said[0] == ("round 0 of 3, perplexity 12345.6; compiling, the first round takes longest")
    assert [line.split(":")[0] for line in said[1:]] == [f"round {n} of 3" for n in (1, 2, 3)]
    assert max(map(len, said)) <= 80 and "epsilon 123.45, perplexity 12345.6" in said[3]


def test_the_progress_bar_fits_into_eighty_columns():
    console = Console(file=io.StringIO(), width=80, force_terminal=True)
    words = RoundWords()
    facts = {"round": 1, "members": 400, "seconds": 1.0, "epsilon": 12.34, "perplexity": 1234.5}
    progress = bar()
    progress.add_task(
        "", total=1000, completed=999, said=words.after(release(None, "round", facts))
    )
    console.print(progress.get_renderable())
    printed = console.file.getvalue()
    assert printed.count("\n") == 1 and "perplexity 1234.5" in printed and "…" not in printed


def test_a_long_evaluation_says_how_far_it_has_come_where_output_is_a_file(capsys):
    lines = PlainProgress(4, seconds=0.0)
    lines.scored(1500, 20_000)
    quiet = PlainProgress(4)
    quiet.scored(1500, 20_000)  # too soon
    assert capsys.readouterr().err == "evaluating: 1,500 of 20,000 rows\n"
