"""Appendix C: how long a client's embedding should be."""

from pfedhn.paper.experiments import table1_cell
from pfedhn.report.findings import Finding
from pfedhn.studies.study import Found, Study, known, varied
from pfedhn.studies.sweep import sweep

VALUES = (5, 15, 25, 35)


def draw(found: Found) -> Finding:
    return sweep(
        found,
        "embedding_dim",
        "length of an embedding",
        "In the paper, the length of an embedding matters little.",
    )


STUDY = Study(
    "embedding-size",
    "Appendix C: accuracy against the length of the embedding (CIFAR-10, 50 clients)",
    tuple(
        varied(table1_cell("cifar10", method, 50), embedding_dim=value)
        for method in known("pfedhn", "pfedhn-plus")
        for value in VALUES
    ),
    draw,
)
