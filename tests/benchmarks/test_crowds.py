"""The law of larger crowds: points that can be begun, a fit that finds its law, tables of files."""

import math

import pytest

from benchmarks import crowds
from benchmarks.cells import Cells
from benchmarks.crowds import COHORT, MODELS, RATES, Point, fitted, points, recipe_of

NOISE = 0.8


@pytest.mark.parametrize("model", MODELS)
def test_a_stand_in_has_the_noise_of_its_crowd_and_all_else_is_equal(model):
    for point in points(model):
        recipe = recipe_of(point, NOISE, RATES[0], 0)
        noise = recipe.privacy.noise_multiplier / recipe.server.cohort
        wanted = NOISE / point.stands_for if point.stands_for else 0.0
        assert noise == pytest.approx(wanted, rel=1e-5)
        assert recipe.privacy.min_separation == recipe.server.rounds - 1, "each client joins once"
        assert recipe.server.rounds * recipe.server.cohort <= crowds.CLIENTS
        assert recipe.privacy.clip_norm == 0.1 and recipe.data.vocabulary == 1500


def test_the_multiplier_of_an_epsilon_is_that_of_the_account():
    found = [crowds.multiplier(epsilon) for epsilon in (4.0, 8.0)]
    assert found == [1.405, 0.7954]


def test_a_wrong_law_does_not_fit():
    noise = [0.0, 0.001, 0.01, 0.03, 0.1]
    made = [math.exp(4 + 9 * s**0.8) for s in noise]
    law = fitted(noise, made)
    assert [law(s) for s in noise] == pytest.approx(made, rel=1e-6) and law.power == 0.8
    other = [90.0, 200.0, 91.0, 300.0, 95.0]
    law = fitted(noise, other)
    assert max(abs(math.log(law(s) / p)) for s, p in zip(noise, other, strict=True)) > 0.3


def test_tables_are_made_of_kept_points_alone(tmp_path):
    cells = Cells(tmp_path)
    assert "No point" in crowds.tell(cells)
    for point in points("cifg"):
        sigma = NOISE / point.stands_for if point.stands_for else 0.0
        # Stand-ins are a tenth better than the crowds that they stand for.
        found = math.exp(4.5 + 8 * sigma) * (1.1 if point.cohort < COHORT else 1.0)
        facts = {
            "model": "cifg", "cohort": point.cohort, "stands_for": point.stands_for,
            "noise_multiplier": NOISE, "last": [found] * 3, "noise_to_signal": [1.0] * 3,
        }  # fmt: skip
        cells.write(point.name, crowds.digest_of(point, NOISE), facts)
    said = crowds.tell(cells)
    line = next(line for line in said.splitlines() if line.startswith("| cifg | 622 |"))
    told = line.strip(" |").split(" | ")[5:8]
    crowd, stand_in, law = (float(cell.split(" ±")[0]) for cell in told)
    assert (crowd, stand_in) == (187.8, 170.7) and law == pytest.approx(170.7, rel=0.01)
    assert said.count("| cifg | 1,000,000 |") == 1
    assert (tmp_path / "crowds.svg").read_text().startswith("<svg")


def test_a_point_of_other_noise_is_another_point():
    point = Point("cifg", 75, 75)
    assert crowds.digest_of(point, 0.5) != crowds.digest_of(point, 0.6)
