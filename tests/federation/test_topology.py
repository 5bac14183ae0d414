"""A tree is a tree, text belongs to one place, and what is none is refused by name."""

import pytest

from fedlm.core.errors import ConfigError
from fedlm.federation.topology import ROOT, Place, grown, moved, only, tree

GROUPS = [("north", "oslo"), ("north", "bergen"), ("south", "rome"), ("south", "rome")]


def test_a_tree_grows_from_groups_and_keeps_its_clients():
    made = tree(grown((0, 1), GROUPS), GROUPS)
    assert made.names == ("root", "north", "oslo", "bergen", "south", "rome")
    assert made.parents == (None, 0, 1, 1, 0, 4)
    assert made.depths == (0, 1, 2, 2, 1, 2) and made.heights == (2, 1, 0, 0, 1, 0)
    assert made.clients == ((), (), (0,), (1,), (), (2, 3))
    assert made.below(1) == {1, 2, 3} and made.with_text == (2, 3, 5)
    assert made.levels() == [[0], [1, 4], [2, 3, 5]]


def test_flat_is_depth_one_and_a_single_place_holds_everybody():
    flat = tree(grown((1,), GROUPS), GROUPS)
    assert flat.names == ("root", "oslo", "bergen", "rome") and max(flat.depths) == 1
    alone = tree(grown((), GROUPS), [*GROUPS, ()])
    assert alone.names == (ROOT,) and alone.clients == ((0, 1, 2, 3, 4),)


def test_the_most_special_group_decides_and_the_rest_is_left_out():
    places = [Place("all", None, ("north",)), Place("capital", "all", ("oslo",))]
    made = tree(places, GROUPS)
    assert made.clients == ((1,), (0,))  # the south feeds no place


def test_a_place_can_be_put_under_another_parent_and_others_left_out():
    places = grown((0, 1), GROUPS)
    made = tree(moved(places, {"oslo": "south"}), GROUPS)
    assert made.places[made.names.index("oslo")].parent == "south"
    few = tree(only(places, ["rome"]), GROUPS)
    assert few.names == ("root", "south", "rome")


def test_a_moved_place_that_leaves_an_empty_parent_is_refused():
    with pytest.raises(ConfigError, match="'south' is empty"):
        tree(moved(grown((0, 1), GROUPS), {"rome": "north"}), GROUPS)


@pytest.mark.parametrize(
    "places, said",
    [
        ([Place("a", None), Place("b", "c", ("rome",)), Place("c", "b")], "b, c form a cycle"),
        ([Place("a", "a", ("rome",))], "one place without a parent"),
        ([Place("a", None, ("rome",)), Place("b", None, ("oslo",))], "one place without a parent"),
        ([Place("a", None), Place("b", "x", ("rome",))], "the parent 'x' of 'b' is not there"),
        ([Place("a", None, ("rome",)), Place("a", None)], "two places are named 'a'"),
        ([Place("a", None, ("romee",))], "which no training client.*Did you mean 'rome'"),
        ([Place("a", None, ("rome",)), Place("b", "a")], "'b' is empty"),
        ([Place("a", None, ("rome",)), Place("b", "a", ("rome",))], "feeds both 'a' and 'b'"),
        ([], "one place without a parent"),
    ],
)
def test_what_is_no_tree_is_refused(places, said):
    with pytest.raises(ConfigError, match=said):
        tree(places, GROUPS)


@pytest.mark.parametrize(
    "make, said",
    [
        (lambda: grown((2,), GROUPS), "levels below 2"),
        (lambda: grown((0, 1), [*GROUPS, ("south", "oslo")]), "'oslo' lies under"),
        (lambda: only(grown((0, 1), GROUPS), ["paris"]), "no place 'paris'"),
        (lambda: moved(grown((0, 1), GROUPS), {"rome": "west"}), "no place 'west'"),
    ],
)
def test_groups_and_names_that_do_not_fit_are_refused(make, said):
    with pytest.raises(ConfigError, match=said):
        make()
