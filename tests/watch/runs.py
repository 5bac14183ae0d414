"""Run directories made by hand, as runs leave them."""

import json

HEADER = {
    "kind": "header",
    "command": "fedlm train recipe.toml",
    "recipe": {"server": {"rounds": 10}, "model": {"name": "cifg"}},
    "start": {"perplexity": 100.0},
    "parameters": 12,
}


def round_line(number, **more):
    """A line of a round, with a perplexity after every second one."""
    told = {"perplexity": 90.0 - number} if number % 2 else {}
    return {
        "kind": "round", "round": number, "seconds": 0.5, "members": 4, "loss": 4.0 - number / 100,
        "upload_bytes": 100 * (number + 1), "download_bytes": 50 * (number + 1), **told, **more,
    }  # fmt: skip


def lines(*entries):
    return "".join(json.dumps(entry) + "\n" for entry in entries)


def make_run(path, rounds=3, header=None, more=()):
    """A run directory with a journal of so many rounds."""
    path.mkdir(parents=True)
    (path / "recipe.toml").write_text("")
    journal = [{**HEADER, **(header or {})}, *map(round_line, range(rounds)), *more]
    (path / "journal.jsonl").write_text(lines(*journal))
    return path
