"""A library that costs is loaded when it is first used, and is then itself."""

import sys

import pytest

from fedlm.core.late import late


def test_nothing_is_loaded_before_an_attribute_is_asked_for():
    sys.modules.pop("colorsys", None)
    colours = late("colorsys")
    assert "colorsys" not in sys.modules
    assert colours.rgb_to_hls is __import__("colorsys").rgb_to_hls


def test_a_module_that_is_not_there_is_missed_when_it_is_used():
    missing = late("no_such_module")
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        missing.anything  # noqa: B018
