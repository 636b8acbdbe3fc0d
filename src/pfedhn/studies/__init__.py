"""The rest of the paper: every study is one file of one form, and this is the table of them."""

from collections.abc import Sequence

from pfedhn.report.findings import Finding
from pfedhn.report.results import Runs
from pfedhn.studies import (
    ablation,
    client_map,
    cohort_size,
    communication,
    depth,
    embedding_size,
    fixed_representation,
    generalization,
    linear,
    local_steps,
    mix_and_match,
    networks,
    norms,
    novel_clients,
    spectral_norm,
    table2,
)
from pfedhn.studies.study import SMALL, Finished, Found, Study

STUDIES: dict[str, Study] = {
    study.name: study
    for study in (
        communication.STUDY,
        linear.STUDY,
        generalization.STUDY,
        table2.STUDY,
        novel_clients.STUDY,
        mix_and_match.STUDY,
        client_map.STUDY,
        local_steps.STUDY,
        embedding_size.STUDY,
        depth.STUDY,
        spectral_norm.STUDY,
        fixed_representation.STUDY,
        cohort_size.STUDY,
        norms.STUDY,
        *ablation.STUDIES,
    )
}

DRAWN: dict[str, Study] = {study.name: study for study in networks.STUDIES}
"""What is drawn of experiments that are run by their own name."""

__all__ = ["DRAWN", "STUDIES", "Finding", "Finished", "Found", "Study", "findings"]


def findings(runs: Sequence[Runs], own: Sequence[Study] = ()) -> list[Finding]:
    """What studies show of runs: those of the package by the name of the experiment, and a person's own."""
    known = {**STUDIES, **DRAWN, **{study.name: study for study in own}}
    found: list[Finding] = []
    for name in dict.fromkeys(part.experiment.name for part in runs):
        study = known.get(name.removesuffix(SMALL))
        mine = [part for part in runs if part.experiment.name == name]
        if study is not None and any(part.results for part in mine):
            found.append(study.draw(Found(study, mine, [part for part in runs if part.experiment.name != name])))
    return found
