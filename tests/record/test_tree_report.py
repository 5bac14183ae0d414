"""What a report says of a tree is in its journal, and failure is said in plain words."""

import pytest

from fedlm.record import tree_report
from fedlm.record.report import table

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
    lines = tree_report.picture(TREE, rounds(), found)
    assert lines[0] == "root" and lines[1].startswith("├─ a  perplexity 12.3")
    assert lines[1].endswith("after own steps 11.0  up 4.0 MB, down 2.0 MB")
    assert lines[2] == "└─ b  up 4.0 MB, down 2.0 MB"


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


def test_the_section_names_routes_and_what_was_left_out():
    matrix = {"nodes": ["root", "a", "b"], "places": ["a", "b"], "perplexity": [[1.0, 2.0]] * 3}
    final = {"validation": {"matrix": matrix, "nodes": []}}
    text = "".join(tree_report.section(header(), rounds(), final, table))
    for words in ("1 layers were routed", "2 clients feed no place"):
        assert words in text
    assert tree_report.section({"recipe": {}}, rounds(), final, table) == []
