"""Law 3 for what travels: runs with codecs, parts and memories, cut short, end the same."""

import json

import pytest

SETTINGS = {
    "member": ("wire.train=member", "wire.share=0.4", "wire.upload=uniform-8"),
    "feedback": ("wire.upload=topk-0.1", "wire.error_feedback=true"),
    "scaffold": ("client.method=scaffold", "client.rate=0.1", "server.optimizer=fedavg"),
}


def changes(settings):
    return [part for setting in settings for part in ("--set", setting)]


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


def test_a_codec_under_a_plan_keeps_the_bound_and_the_bytes(run_cli, tiny_recipe, tmp_path):
    private = ("server.sampling=poisson", "privacy.mechanism=gaussian", "privacy.noise=1")
    told = run_cli(
        "train",
        tiny_recipe,
        *changes((*private, "wire.upload=uniform-4", "wire.train=fixed", "wire.share=0.5")),
        *("--out", "private", "--json"),
    ).json
    plain = run_cli("train", tiny_recipe, "--out", "plain", "--json").json
    assert told["epsilon"] > 0
    assert told["upload_bytes"] < 0.15 * plain["upload_bytes"]
    lines = (tmp_path / "private" / "journal.jsonl").read_text().splitlines()
    assert json.loads(lines[1])["clip"] == 1.0
