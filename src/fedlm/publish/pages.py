"""Reports of runs, with what only the rooms above journals know.

In:       run directories.
Out:      the report of one run, or the comparison of several, as one HTML page.
Promise:  of a run under a privacy plan a page holds only what `privacy/release.py` allows, whatever
          its journal holds; settings are shown beside their defaults.
Not here: what a page says (`record/report.py`, `record/comparison.py`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fedlm.core.documents import JsonMapping
from fedlm.models.catalog import NAMED
from fedlm.privacy import account
from fedlm.privacy.plan import PrivacyPlan
from fedlm.privacy.release import recall, release
from fedlm.recipe.federation import FederationTable
from fedlm.recipe.settings import Recipe
from fedlm.record import report
from fedlm.record.facts import Facts, facts_of
from fedlm.record.journal import dumps
from fedlm.record.report import Beside
from fedlm.record.trust import whereabouts

Tables = dict[str, dict[str, Any]]


def page_of(paths: Iterable[Path]) -> str:
    """Return the report of one run directory, or the comparison of several."""
    folders = [Path(path) for path in paths]
    runs = [releasable_facts(path) for path in folders]
    beside = Beside(defaults=defaults_of(runs[0].recipe), members=whereabouts(folders[0]))
    return report.report_page(runs, beside)


def releasable_facts(path: Path) -> Facts:
    """Read the journal of a run, without anything that its privacy plan does not allow."""
    facts = facts_of(path)
    if facts.header.get("privacy") is None:
        return facts
    return allowed(facts, account.plan_from(facts.header["privacy"]))


def allowed(facts: Facts, plan: PrivacyPlan) -> Facts:
    """Return the facts that a plan allows to release."""
    return Facts(
        facts.name,
        dict(release(plan, "header", facts.header)),
        [dict(recall(plan, entry)) for entry in facts.rounds],
        dict(release(plan, "final", facts.final)),
        [{"kind": entry["kind"], **release(plan, entry["kind"], entry)} for entry in facts.history],
    )


def defaults_of(recipe: Mapping[str, JsonMapping]) -> Tables:
    """Return the settings of a recipe as they would be if nobody had set them.

    The sizes of a model are those that come with its name.
    """
    tables = Recipe().model_dump(mode="json")
    tables["federation"] = {
        name: field.get_default(call_default_factory=True)
        for name, field in FederationTable.model_fields.items()
        if not field.is_required()
    }
    named = recipe.get("model", {}).get("name")
    if isinstance(named, str) and named in NAMED:
        size = NAMED[named].size
        tables["model"] |= {
            name: getattr(size, name)
            for name, value in tables["model"].items()
            if value is None and hasattr(size, name)
        } | {"name": tables["model"]["name"]}
    plain: Tables = json.loads(dumps(tables))  # as a journal has them: lists, no infinity
    return plain
