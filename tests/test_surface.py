"""The public surface is a list with a test."""

import fedlm


def test_public_names_are_listed_once_and_sorted():
    assert fedlm.__all__ == sorted(set(fedlm.__all__), key=str.casefold)
    assert all(hasattr(fedlm, name) for name in fedlm.__all__)


def test_every_public_name_has_an_example_that_runs():
    modules = {"models"}
    missing = [
        name
        for name in fedlm.__all__
        if name not in modules and ">>>" not in (getattr(fedlm, name).__doc__ or "")
    ]
    assert not missing
