"""The paper's other experiments: the table of its studies, each in a file."""

from pfedhn.paper import (
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
    norms,
    novel_clients,
    spectral_norm,
    table2,
)

STUDIES = {
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
