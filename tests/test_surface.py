"""The public surface is a list with a test."""

import inspect

import fedlm


def public():
    """Return every public object by its name, without modules."""
    found = {name: getattr(fedlm, name) for name in fedlm.__all__ if name != "models"}
    inner = {f"models.{name}": getattr(fedlm.models, name) for name in fedlm.models.__all__}
    return {**found, **inner}


def test_public_names_are_listed_once_and_sorted():
    assert fedlm.__all__ == sorted(set(fedlm.__all__), key=str.casefold)
    assert fedlm.models.__all__ == sorted(set(fedlm.models.__all__), key=str.casefold)
    assert all(hasattr(fedlm, name) for name in fedlm.__all__)


def test_every_public_name_has_an_example_that_runs():
    documents = {name: inspect.getdoc(value) or "" for name, value in public().items()}
    assert not [name for name, text in documents.items() if ">>>" not in text]
    assert not [name for name, text in documents.items() if "+SKIP" in text]


def test_every_public_function_says_what_it_takes():
    functions = {name: value for name, value in public().items() if inspect.isfunction(value)}
    assert not [name for name, value in functions.items() if "Args:" not in inspect.getdoc(value)]
    for kind in (fedlm.Federation, fedlm.TrainedRun, fedlm.Store):
        members = {name: value for name, value in vars(kind).items() if not name.startswith("_")}
        assert not [name for name, value in members.items() if not inspect.getdoc(value)], kind


def test_every_record_says_what_its_fields_are():
    records = (fedlm.Averaging, fedlm.PrivacyPlan, fedlm.RoundReport, fedlm.Sampling)
    for kind in (*records, fedlm.TrainedRun, fedlm.models.ModelSpec):
        names = list(inspect.get_annotations(kind))
        assert not [name for name in names if f"\n  {name}: " not in inspect.getdoc(kind)], kind
