"""Backbone and personal layers: every leaf in one part, by share, by projection or by name."""

import pytest

from fedlm.core import tree
from fedlm.core.errors import ConfigError
from fedlm.models import catalog
from fedlm.models.split import personal_layers

SIZE = catalog.Dimensions(
    vocab=20, embedding_size=8, hidden_size=8, layers=10, heads=2, kernel_size=3
)


def split(rule, architecture="mpt"):
    names = list(tree.named_leaves(catalog.shapes(architecture, SIZE)))
    return dict(zip(names, personal_layers(names, rule), strict=True))


@pytest.mark.parametrize("share, blocks", [("0.1", 1), ("0.3", 3), ("0.5", 5), ("0.01", 1)])
def test_the_last_share_of_blocks_and_the_norm_after_them(share, blocks):
    found = {layer for layer in split(f"last {share}").values() if layer}
    assert found == {"last", *(f"blocks.{i}" for i in range(10 - blocks, 10))}


def test_the_embedding_stays_in_the_backbone_unless_asked_for():
    assert split("last 0.3")["stem.embedding"] is None
    assert split("last 0.3 + embedding")["stem.embedding"] == "stem"
    assert split("none + embedding", "si-cifg")["embedding"] == "embedding"


def test_projections_and_names():
    found = [name for name, layer in split("kv").items() if layer]
    assert len(found) == 20 and all(".key." in n or ".value." in n for n in found)
    assert [n for n, layer in split("blocks.1.norm_*, last.*").items() if layer] == [
        "blocks.1.norm_attention.gain",
        "blocks.1.norm_feedforward.gain",
        "last.gain",
    ]


@pytest.mark.sample(4)
@pytest.mark.parametrize("architecture", sorted(catalog.ARCHITECTURES))
def test_all_is_all_and_none_is_none_of_every_architecture(architecture):
    assert all(split("all", architecture).values())
    assert not any(split("none", architecture).values())
    some = split("last 0.3", architecture)
    assert any(some.values()) and not all(some.values())


@pytest.mark.parametrize(
    "rule",
    ["", "last", "last 2", "last x", "lst 0.3", "kv + head", "nothing.*", "blocks.1.*, block.2.*"],
)
def test_a_rule_that_is_none_is_refused(rule):
    with pytest.raises(ConfigError, match=r"federation\.personal_layers"):
        split(rule)
