"""The table of memory per device is made from compiled programs, of which nothing is run."""

from dataclasses import replace

from benchmarks.sharding import bytes_of, lane_program
from fedlm.core import tree
from fedlm.models import catalog


def test_two_devices_need_about_half_of_one_each():
    size = replace(catalog.NAMED["mpt"].size, vocab=4096, embedding_size=128, layers=1, heads=4)
    like = catalog.shapes("mpt", size)
    one, two = (
        bytes_of(lane_program(like, "sgd", (4, 16), shards).memory_analysis()) for shards in (1, 2)
    )
    whole = 4 * tree.size(like)
    assert 2 * whole <= one["state"] < 2.1 * whole, "the member's parameters and the sum"
    assert two["state"] < 0.55 * one["state"] and two["all"] < 0.65 * one["all"]
