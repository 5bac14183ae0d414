"""What a report says of a tree is in its journal, and failure is said in plain words."""

import pytest

from fedlm.record import svg, tree_report
from fedlm.record.facts import Facts

TREE = {"names": ["root", "a", "b"], "parents": [None, 0, 0], "left_out": 2}


def header(temperature=0.1):
    return {"tree": TREE, "recipe": {"federation": {"temperature": temperature}}}


def rounds(norm=(1.0, 1.2), came=10.0, own=9.0, entropy=0.5):
    sent = {"up_bytes": 2_000_000, "down_bytes": 1_000_000}
    leaf = {**sent, "entropy_down": entropy, "self_weight": 0.8}
    ways = [{"layer": "last", "from": "a", "to": "b", "likeness": {"b": 0.25}}]
    return [
        {
            "round": number,
            "perplexity": came,
            "personal_perplexity": own,
            "places": {"a": [came, own], "b": [came, own]},
            "nodes": {"root": {"backbone_norm": length}, "a": leaf, "b": leaf},
            "routes": ways if number else [],
        }
        for number, length in enumerate(norm)
    ]


def test_the_picture_has_perplexity_and_traffic_on_it():
    found = {"nodes": [{"name": "a", "perplexity": 12.345, "personal": 11.0}]}
    root, a, b = tree_report.reported_nodes(TREE, rounds(), found)
    assert (root.name, root.parent, root.said) == ("root", None, "")
    assert (a.value, a.own, a.said) == (12.345, 11.0, "↑ 4.0 MB ↓ 2.0 MB")
    assert (b.value, b.up, b.down) == (None, 4_000_000, 2_000_000)
    drawn = svg.tree_drawing([root, a, b], tree_report.routed(rounds()), title="tree")
    assert drawn.count("class='branch'") == 2 and drawn.count("class='arc'") == 1
    assert ">12.3</text>" in drawn and "a, after own steps: 11" in drawn


@pytest.mark.parametrize(
    "facts, said",
    [
        ({}, []),
        ({"norm": (1.0, 11.0)}, ["the backbone of root is 11 times as long"]),
        ({"came": 30.0}, ["leaves get 3.3 times worse"]),
        ({"entropy": 0.001}, ["every node keeps to itself"]),
        ({"entropy": 0.999}, ["all peers count alike"]),
    ],
)
def test_known_signs_of_failure_are_said(facts, said):
    found = tree_report.warnings(header(), rounds(**facts))
    assert len(found) == len(said)
    for words, wanted in zip(found, said, strict=True):
        assert wanted in words


def test_a_temperature_that_asks_for_the_mean_or_for_itself_is_no_collapse():
    assert not tree_report.warnings(header(None), rounds(entropy=1.0))  # infinity, in a journal
    assert not tree_report.warnings(header(0.0), rounds(entropy=0.0))
    assert not tree_report.warnings({"recipe": {}}, rounds(norm=(1.0, 99.0)))


def run(rounds, final, head=None):
    return Facts("run", header() if head is None else head, rounds, final)


def test_the_section_names_routes_and_what_was_left_out():
    matrix = {"nodes": ["root", "a", "b"], "places": ["a", "b"], "perplexity": [[1.0, 2.0]] * 3}
    final = {"validation": {"matrix": matrix, "nodes": []}}
    text = "".join(tree_report.section(run(rounds(), final)))
    for words in ("1 layer was routed", "2 clients feed no place"):
        assert words in text
    assert tree_report.section(run(rounds(), final, {"recipe": {}})) == []


def test_attention_is_a_heat_map_of_who_listens_to_whom():
    played = rounds()
    played[-1]["nodes"]["a"]["attention_down"] = {"a": 0.75, "root": 0.25}
    played[-1]["nodes"]["root"]["attention_up"] = {"root": 0.5, "a": 0.375, "b": 0.125}
    text = "".join(tree_report.section(run(played, {})))
    assert "Attention going down: rows listen to columns" in text
    assert "<title>a, root: 0.25</title>" in text and "<title>root, b: 0.125</title>" in text
    # The largest weight of a map is its darkest cell.
    assert "class='h9'><title>a, a: 0.75</title>" in text


def test_names_of_nodes_are_text():
    tree = {"names": ["<script>", "a"], "parents": [None, 0]}
    head = {"tree": tree, "recipe": {"federation": {}}}
    assert "<script" not in "".join(tree_report.section(run(rounds(), {}, head)))
