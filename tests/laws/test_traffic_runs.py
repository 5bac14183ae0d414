"""Law 3 for what travels: runs with codecs, parts and memories, cut short, end the same."""

import json

import pytest

SETTINGS = {
    "member": ("wire.trainable=member", "wire.trainable_fraction=0.4", "wire.upload=uniform-8"),
    "fixed": ("wire.trainable=fixed", "wire.trainable_fraction=0.4"),
    "feedback": ("wire.upload=topk-0.1", "wire.error_feedback=true"),
    "scaffold": ("client.method=scaffold", "client.learning_rate=0.1", "server.optimizer=fedavg"),
}


def changes(settings):
    return [part for setting in settings for part in ("--set", setting)]


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_a_run_that_was_cut_short_ends_the_same(run_cli, tiny_recipe, tmp_path, name):
    asked = changes(SETTINGS[name])
    whole = run_cli("train", tiny_recipe, *asked, "--out", "whole", "--json").json
    first = run_cli("train", tiny_recipe, *asked, "--out", "cut", "--json")
    assert first.code == 0
    cut = tmp_path / "cut"
    for newer in (p for p in sorted((cut / "checkpoints").iterdir())[1:]):
        newer.unlink()
    for made in ("summary.json", "model.safetensors"):
        (cut / made).unlink()
    again = run_cli("train", tiny_recipe, *asked, "--out", "cut", "--resume", "--json").json
    for fact in ("params_sha256", "perplexity", "upload_bytes", "download_bytes"):
        assert again[fact] == whole[fact], fact


@pytest.mark.slow
def test_a_codec_under_a_plan_keeps_the_bound_and_the_bytes(run_cli, tiny_recipe, tmp_path):
    private = (
        "server.sampling=poisson",
        "privacy.mechanism=gaussian",
        "privacy.noise_multiplier=1",
    )
    told = run_cli(
        "train",
        tiny_recipe,
        *changes(
            (
                *private,
                "wire.upload=uniform-4",
                "wire.trainable=fixed",
                "wire.trainable_fraction=0.5",
            )
        ),
        *("--out", "private", "--json"),
    ).json
    plain = run_cli("train", tiny_recipe, "--out", "plain", "--json").json
    assert told["epsilon"] > 0
    assert told["upload_bytes"] < 0.15 * plain["upload_bytes"]
    lines = (tmp_path / "private" / "journal.jsonl").read_text().splitlines()
    assert json.loads(lines[1])["clip"] == 1.0


@pytest.mark.slow
def test_pretraining_resumes_and_starts_a_federation(run_cli, tiny_recipe, tmp_path):
    """The optimiser's state survives: stopped and resumed, pretraining ends the same."""
    asked = changes(
        (
            "client.optimizer=adam",
            "client.learning_rate=0.01",
            "client.max_steps=3",
            "data.groups=['north']",
        )
    )
    whole = run_cli("pretrain", tiny_recipe, *asked, "--out", "public", "--json").json
    assert whole["upload_bytes"] == whole["download_bytes"] == 0
    assert whole["perplexity"] < whole["start_perplexity"]
    run_cli("pretrain", tiny_recipe, *asked, "--out", "again", "--json")
    again = tmp_path / "again"
    for newer in sorted((again / "checkpoints").iterdir())[1:]:
        newer.unlink()
    (again / "summary.json").unlink()
    resumed = run_cli("pretrain", tiny_recipe, *asked, "--out", "again", "--resume", "--json").json
    assert resumed["params_sha256"] == whole["params_sha256"]
    begun = changes(("model.init_from=public", "data.groups=['south']", "server.rounds=1"))
    warm = run_cli("train", tiny_recipe, *begun, "--json").json
    assert warm["start_perplexity"] < whole["start_perplexity"]


def test_pretraining_refuses_what_is_for_federations(run_cli, tiny_recipe):
    for one, two, words in (
        ("wire.upload=uniform-8", "client.max_steps=3", "no [privacy], no [wire]"),
        ("client.batch_size=4", "client.batch_size=4", "client.max_steps = None"),
        ("data.groups=['east']", "client.max_steps=3", "data.groups = ['east']"),
    ):
        refused = run_cli("pretrain", tiny_recipe, *changes((one, two)))
        assert refused.code == 2 and words in refused.stderr, refused.stderr
