"""The table of studies: the paper's other experiments, and hospitals."""

from pfedhn.paper import (
    ablation,
    client_map,
    cohort_size,
    communication,
    fixed_representation,
    generalization,
    hospitals,
    hospitals_privacy,
    linear,
    mix_and_match,
    networks,
    norms,
    novel_clients,
    spectral_norm,
    sweeps,
    table2,
)

OF_PAPER = {
    study.name: study
    for study in (
        communication.STUDY,
        linear.STUDY,
        generalization.STUDY,
        table2.STUDY,
        novel_clients.STUDY,
        mix_and_match.STUDY,
        client_map.STUDY,
        sweeps.LOCAL_STEPS,
        sweeps.EMBEDDING_SIZE,
        sweeps.DEPTH,
        spectral_norm.STUDY,
        fixed_representation.STUDY,
        cohort_size.STUDY,
        norms.STUDY,
        *ablation.STUDIES,
    )
}
STUDIES = OF_PAPER | {study.name: study for study in (hospitals.STUDY, hospitals_privacy.STUDY)}
DRAWN = networks.DRAWN
"""Drawn from experiments that are run by their own name."""
