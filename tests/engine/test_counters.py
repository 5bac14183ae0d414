"""How far nodes came is written so that no link is followed and nothing is half there."""

import pytest

from fedlm.core.errors import RecordError
from fedlm.engine.counters import Counters


def test_a_link_that_waits_for_the_new_file_is_not_followed(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "counters.json.part").symlink_to(victim)
    Counters(tmp_path / "counters.json").hear("north", 3)
    assert victim.read_text() == "precious"
    assert Counters(tmp_path / "counters.json").of("north") == 3
    assert (tmp_path / "counters.json").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "text", ["[]", '{"a": "3"}', '{"a": -1}', "[" * 9999, '{"a": ' + "9" * 400]
)
def test_a_damaged_file_is_one_sentence(tmp_path, text):
    (tmp_path / "counters.json").write_text(text)
    with pytest.raises(RecordError, match=r"counters\.json is damaged"):
        Counters(tmp_path / "counters.json")
