"""Whether federating pays: cells in order of worth, equal care, tables from kept cells alone."""

import itertools
import math

import numpy as np
import pytest

from benchmarks import pays
from benchmarks.cells import Cells
from benchmarks.pays import CHOSEN, HEADLINE, LOCAL, SIDES, Cell, Size


def facts(cell, leaves, doubtful=()):
    """A kept cell of two leaves: the same figures for every way, but what was chosen is better."""
    ways = (pays.CENTRAL,) if cell.side == pays.CENTRAL else pays.WAYS

    def each(scale):
        return {
            leaf: {w: scale * found * (0.9 if w == CHOSEN else 1.0) for w in (*ways, CHOSEN)}
            for leaf, found in leaves.items()
        }

    shown = (*ways[:2], CHOSEN)
    blocks = {
        leaf: {pays.TARGETS: [1] * 40, **{way: [math.log(x)] * 40 for way in shown}}
        for leaf, x in leaves.items()
    }
    for leaf in doubtful:
        blocks[leaf][CHOSEN] = [(-1) ** n * 9.0 for n in range(40)]
    return {
        "blocks": blocks,
        "leaves": each(1.0), "choose": each(cell.rate * 1000), "tokens_per_leaf": 1e6 * cell.share,
        "rounds": 8,
    }  # fmt: skip


def test_the_cells_of_most_worth_come_first_and_none_twice():
    cells = pays.ordered(lambda cell: True)
    assert len(set(cells)) == len(cells) == 2 * 5 * len(SIDES) * 2 * 3
    first = cells[: 2 * len(HEADLINE)]
    assert {(c.corpus, c.seed, c.rate) for c in first} == {("mixgenre", 0, 0.003)}
    assert [c.share for c in first] == [0.1] * len(HEADLINE) + [1.0] * len(HEADLINE)
    assert [c.side for c in first[: len(HEADLINE)]] == list(HEADLINE)


@pytest.mark.parametrize("corpus, side", list(itertools.product(pays.CORPORA, SIDES)))
def test_every_side_gets_the_same_care(corpus, side):
    recipe = pays.recipe_of(Cell(corpus, 0.1, side, 0.001, 2), Size())
    assert recipe.federation.keep_optimizer and recipe.client.weight_decay == pays.WEIGHT_DECAY
    assert recipe.client.optimizer in ("adamw", "muon") and recipe.client.learning_rate == 0.001
    assert (recipe.server.rounds, recipe.server.patience, recipe.run.seed) == (96, 4, 2)
    assert recipe.run.devices == 1 and recipe.server.evaluate_rows == 0, "all sides see all rows"


def test_a_digest_knows_all_that_decides_a_cell():
    cell = Cell("mixgenre", 0.1, "WorldLM", 0.003, 0)
    others = [
        Cell("eltec", 0.1, "WorldLM", 0.003, 0), Cell("mixgenre", 0.3, "WorldLM", 0.003, 0),
        Cell("mixgenre", 0.1, "flat Nesterov", 0.003, 0), Cell("mixgenre", 0.1, LOCAL, 0.003, 0),
        Cell("mixgenre", 0.1, "WorldLM", 0.001, 0), Cell("mixgenre", 0.1, "WorldLM", 0.003, 1),
    ]  # fmt: skip
    digests = [pays.digest_of(each, Size()) for each in (cell, *others)]
    assert len({*digests, pays.digest_of(cell, Size(rounds=8))}) == len(others) + 2


def test_the_table_is_made_of_kept_cells_and_gives_no_side_more_rates(tmp_path):
    cells, size = Cells(tmp_path), Size()
    assert "No cell" in pays.tell(cells, size)

    def keep(side, rate, leaves, seed=0, doubtful=()):
        cell = Cell("mixgenre", 0.1, side, rate, seed)
        cells.write(cell.name, pays.digest_of(cell, size), facts(cell, leaves, doubtful))

    keep(LOCAL, 0.003, {"a": 10.0, "b": 8.0})
    keep("WorldLM", 0.003, {"a": 9.0, "b": 12.0})
    keep("WorldLM", 0.001, {"a": 1.0, "b": 1.0})
    table = pays.tell(cells, size)
    lines = {line.split(" | ")[2]: line.split(" | ") for line in table.splitlines() if "|" in line}
    assert lines["local, personal"][5:10] == ["8.1", "-", "-", "-", "-"]
    assert lines["local"][5:10] == ["9.0", "-11%", "-", "0 of 2", "2 of 2"]
    told = lines["WorldLM"][4:10]
    assert told == ["1", "10.5", "-29%", "-", "0 of 2", "1 of 2"], "local was not given the rate"
    assert lines["WorldLM, personal"][5:10] == ["9.4", "-16%", "-16%", "1 of 2", "1 of 2"]
    assert (tmp_path / "mixgenre.svg").read_text().startswith("<svg xmlns")

    keep("WorldLM", 0.003, {"a": 9.0, "b": 12.0}, doubtful=["b"])
    table = pays.tell(cells, size)
    lines = {line.split(" | ")[2]: line.split(" | ") for line in table.splitlines() if "|" in line}
    assert lines["WorldLM, personal"][8:10] == ["1 of 2", "0 of 2"], "b is not sure"
    keep(LOCAL, 0.001, {"a": 5.0, "b": 5.0})
    table = pays.tell(cells, size)
    lines = {line.split(" | ")[2]: line.split(" | ") for line in table.splitlines() if "|" in line}
    told = lines["WorldLM"][4:10]
    assert told == ["2", "1.0", "78%", "-", "2 of 2", "0 of 2"], "both have two rates"


def test_a_mixture_of_two_models_is_told_apart(tmp_path):
    cells, size = Cells(tmp_path), Size()
    for side, logits in ((LOCAL, 9.0), ("WorldLM", 4.0)):
        cell = Cell("mixgenre", 0.1, side, 0.003, 0)
        made = facts(cell, {"a": 10.0, "b": 10.0})
        for which in ("leaves", "choose"):
            for ways in made[which].values():
                ways.update({way: 8.0 for way in pays.WAYS}, logits=logits)
                ways[CHOSEN] = min(8.0, logits)
        cells.write(cell.name, pays.digest_of(cell, size), made)
    table = pays.tell(cells, size)
    lines = {line.split(" | ")[2]: line.split(" | ") for line in table.splitlines() if "|" in line}
    assert lines["WorldLM, personal"][6:8] == ["50%", "0%"], "one model gains nothing"


def test_a_rate_that_follows_a_cosine_ends_at_a_tenth():
    found = [pays.cosine(x / 100) for x in range(101)]
    assert found[0] == 0 and max(found) > 0.99 and abs(found[-1] - 0.1) < 1e-9
    top = found.index(max(found))
    assert top == 5 and found[top:] == sorted(found[top:], reverse=True)


def test_two_models_at_a_prediction_have_lines_of_their_own(tmp_path):
    """They are told beside each other, and cells that were made before they were there stay."""
    cells, size = Cells(tmp_path), Size()

    def keep(side, mixed):
        cell = Cell("mixgenre", 0.1, side, 0.003, 0)
        made = facts(cell, {"a": 10.0, "b": 8.0})
        for leaf, ways in made["leaves"].items() if mixed else ():
            ways[pays.MIXED] = made["choose"][leaf][pays.MIXED] = mixed
            made["blocks"][leaf][pays.MIXED] = [math.log(mixed)] * 40
        cells.write(cell.name, pays.digest_of(cell, size), made)

    keep(LOCAL, None)
    keep("WorldLM", None)
    keep("flat Nesterov", 5.0)
    keep(pays.TWICE, 6.0)
    told = [line.split(" | ")[2:9] for line in pays.tell(cells, size).splitlines() if "%" in line]
    lines = {label: (perplexity, better) for label, _, _, perplexity, _, _, better in told}
    assert lines["flat Nesterov, trained on, and a local model"] == ("5.0", "2 of 2")
    assert lines["two local models, personal"] == ("6.0", "2 of 2")
    assert lines["WorldLM, personal"] == ("8.1", "0 of 2")
    assert "WorldLM, trained on, and a local model" not in lines


def test_a_leaf_counts_only_where_its_rows_agree():
    """The error is that of the ratio of sums over blocks, and knows that rows are paired."""
    rng = np.random.default_rng(0)
    count = rng.integers(200, 400, 40)
    hard = rng.normal(4.0, 1.0, 40)  # of both models: some text is harder

    def told(apart):
        nats = list(count * (hard + apart))
        return {"blocks": {"a": {pays.TARGETS: list(count), CHOSEN: nats}}}

    alone = told(0.0)
    assert pays.error_of(told(-0.1), CHOSEN, alone, "a") < 1e-9, "as much in every block"
    noise = rng.normal(0.0, 0.2, 40)
    error = pays.error_of(told(noise), CHOSEN, alone, "a")
    assert 0.5 < error / (0.2 / math.sqrt(40)) < 1.5
    again = [float(np.sum(count * rng.normal(0.0, 0.2, 40)) / count.sum()) for _ in range(2000)]
    assert 0.7 < np.std(again) / error < 1.4


def test_patience_in_steps_is_that_of_the_rounds_and_looks_come_within_a_pass():
    for batches, look in ((16, 4), (145, 36), (1457, 128)):
        steps = min(pays.STEPS, batches)
        found, patient = pays.looks(steps, batches)
        assert found == look <= max(1, batches // 4)
        rounds = pays.PATIENCE * pays.EVERY * steps
        assert rounds <= found * patient < rounds + found
