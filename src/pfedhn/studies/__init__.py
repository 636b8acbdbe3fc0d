"""Studies: experiments with an analysis of their finished runs. The paper's are in `pfedhn.paper`."""

import importlib
from collections.abc import Mapping, Sequence
from functools import cache

from pfedhn.report.findings import Finding
from pfedhn.report.results import Runs
from pfedhn.studies.finished import Finished
from pfedhn.studies.study import SMALL, Found, Study

PAPER = "pfedhn.paper"

__all__ = ["Finding", "Finished", "Found", "Study", "findings", "studies"]


@cache
def studies() -> Mapping[str, Study]:
    """Every named study of the package."""
    found: Mapping[str, Study] = importlib.import_module(f"{PAPER}.studies").STUDIES
    return found


def findings(runs: Sequence[Runs], own: Sequence[Study] = ()) -> list[Finding]:
    """Draw the findings of the package's studies, found by the experiment's name, and of the user's own."""
    drawn: Mapping[str, Study] = importlib.import_module(f"{PAPER}.networks").DRAWN
    known = {**studies(), **drawn, **{study.name: study for study in own}}
    found: list[Finding] = []
    for name in dict.fromkeys(part.experiment.name for part in runs):
        study = known.get(name.removesuffix(SMALL))
        mine = [part for part in runs if part.experiment.name == name]
        if study is not None and any(part.results for part in mine):
            found.append(study.draw(Found(study, mine, [part for part in runs if part.experiment.name != name])))
    return found
