"""Several stores as one: the same clients, with the store's name as their first group."""

import numpy as np
import pytest

from fedlm.core.errors import CorpusError
from fedlm.corpus.concat import JoinedStore
from fedlm.corpus.shard import deal
from fedlm.corpus.store import StoreSettings, write
from tests.corpus.test_store import LETTERS, SETTINGS


@pytest.fixture
def whole(tmp_path):
    return write(LETTERS, tmp_path / "whole", SETTINGS)


@pytest.fixture
def parts(whole, tmp_path):
    return deal(whole, ("east", "north", "west"), tmp_path / "dealt")


def test_parts_joined_are_the_whole(whole, parts):
    joined = JoinedStore([parts[name].path for name in ("east", "north", "west", "server")])
    numbers = [*whole.training_clients, *whole.test_clients]
    assert len(joined) == len(numbers) == joined.manifest["clients"]
    for name in ("train_clients", "test_clients", "train_tokens", "held_tokens"):
        assert joined.manifest[name] == whole.manifest[name], name
    for here, there in enumerate(map(int, numbers)):
        assert joined.client(here) == whole.client(there)
        assert joined.groups(here)[1:] == whole.groups(there)
        np.testing.assert_array_equal(joined.train(here), whole.train(there))
        np.testing.assert_array_equal(joined.held(here), whole.held(there))
    assert list(joined.test_clients) == list(range(len(whole.training_clients), len(joined)))
    owners = [joined.groups(int(n))[0] for n in joined.training_clients]
    assert owners == sorted(owners) and set(owners) == {"east", "north", "west"}
    joined.verify()


def test_other_text_is_another_store(parts):
    east, west = (parts[name].path for name in ("east", "west"))
    one, two = JoinedStore([east, west]), JoinedStore([west, east])
    assert one.manifest["clients_sha256"] != two.manifest["clients_sha256"]


def test_what_does_not_fit_together_is_refused(parts, tmp_path):
    east = parts["east"].path
    other = write(LETTERS, tmp_path / "other", StoreSettings(vocabulary=20))
    with pytest.raises(CorpusError, match="has another tokenizer"):
        JoinedStore([east, other.path])
    with pytest.raises(CorpusError, match="two stores are called 'east'"):
        JoinedStore([east, east])
    with pytest.raises(CorpusError, match="is not a store"):
        JoinedStore([east, tmp_path / "nowhere"])
