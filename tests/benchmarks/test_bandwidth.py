"""Large models under a small bandwidth: equal care, public vocabulary, tables from kept files."""

import gzip
import json
from pathlib import Path

import pytest

from benchmarks import bandwidth
from benchmarks.bandwidth import RATES, SIDES, SMOKE, WHOLE, Work
from benchmarks.cells import Cells
from benchmarks.public import divide
from fedlm.core.errors import ConfigError
from fedlm.recipe.settings import load


def recipes():
    return [bandwidth.federated(side, RATES[0], WHOLE.rounds, WHOLE, ()) for side in SIDES]


def test_sides_differ_in_model_codec_and_published_rates_alone():
    made = recipes()
    assert len({r.data.model_dump_json() for r in made}) == 1
    assert len({r.server.model_dump_json() for r in made}) == 1
    assert len({(r.client.max_examples, r.client.batch_size, r.run.seed) for r in made}) == 1
    public = {
        side.model: bandwidth.pretraining(side.model, WHOLE, Path("x.jsonl")) for side in SIDES
    }
    assert {r.server.rounds * r.client.max_steps for r in public.values()} == {WHOLE.steps}
    assert len({r.data.model_dump_json() for r in public.values()}) == 1


def test_a_digest_knows_what_decides_a_side_and_not_where_files_lie(monkeypatch, tmp_path):
    side, other = SIDES[0], SIDES[1]
    before = bandwidth.digest_of(side, WHOLE)
    assert bandwidth.digest_of(other, WHOLE) != before
    assert bandwidth.digest_of(side, WHOLE._replace(steps=100)) != before
    assert bandwidth.digest_of(side, WHOLE._replace(tried=5)) != before
    monkeypatch.chdir(tmp_path)
    assert bandwidth.digest_of(side, WHOLE) == before
    monkeypatch.setattr(bandwidth, "PRETRAIN_RATES", {side.model: 0.1})
    assert bandwidth.digest_of(side, WHOLE) != before


@pytest.fixture
def text(tmp_path, monkeypatch):
    """Four clients of a public and a private year."""
    rows = [
        {"client": f"c{n}", "groups": [year], "text": f"said in {year}"}
        for n, year in enumerate(("2004", "2008", "2009", "2018"))
    ]
    file = tmp_path / "irc.jsonl.gz"
    with gzip.open(file, "wt") as out:
        out.writelines(json.dumps(row) + "\n" for row in rows)

    def from_there(path, changes=()):
        return load(path, (f"data.source={file}", *changes))

    monkeypatch.setattr(bandwidth, "load", from_there)
    return tmp_path


def test_public_and_private_years_are_files_of_their_own(text):
    recipe = bandwidth.load(bandwidth.PUBLIC)
    public, private = divide(recipe, text / "out")

    def clients(file):
        return [json.loads(line)["client"] for line in file.read_text().splitlines()]

    assert (clients(public), clients(private)) == (["c0", "c1"], ["c2", "c3"])
    public.write_text("kept\n")
    assert divide(recipe, text / "out") == (public, private)
    assert public.read_text() == "kept\n", "written once"
    data = recipe.data.model_copy(update={"groups": ("2009",)})
    other, _ = divide(recipe.model_copy(update={"data": data}), text / "out")
    assert clients(other) == ["c2"], "other groups, another file"
    with pytest.raises(ConfigError, match=r"no client for public\.jsonl"):
        data = recipe.data.model_copy(update={"groups": ("1999",)})
        divide(recipe.model_copy(update={"data": data}), text / "out")


def test_the_years_that_are_public_decide_a_digest(text, monkeypatch):
    before, there = bandwidth.digest_of(SIDES[0], WHOLE), bandwidth.load
    monkeypatch.setattr(
        bandwidth, "load", lambda path, more=(): there(path, ('data.groups=["2004"]', *more))
    )
    assert bandwidth.digest_of(SIDES[0], WHOLE) != before


def test_the_table_is_made_of_kept_sides(tmp_path):
    work = Work(Cells(tmp_path), tmp_path / "runs", SMOKE)
    assert "No side" in bandwidth.tell(work)
    for side, last, best in ((SIDES[0], 80.0, 75.0), (SIDES[1], None, None)):
        facts = {
            "member_bytes": 2e6,
            "upload_bytes": 20_000_000,
            "parameters": 4_700_000,
            "rounds": 10,
            "start": 200.0,
            "last": last,
            "best": best,
            "rate": 0.003,
            "seconds": 360.0,
            "curve": [[5, 100, 120.0], [10, 200, 75.0]],
        }
        work.cells.write(side.name, bandwidth.digest_of(side, SMOKE), facts)
    _, _, first, second = bandwidth.tell(work).splitlines()
    assert first.startswith("| small LSTM, full | 4.7M | 2.00 | 20 | 200.0 | 80.0 | 75.0 | 10 |")
    assert "| diverged |" in second
    assert (tmp_path / "bytes.svg").read_text().startswith("<svg xmlns")
