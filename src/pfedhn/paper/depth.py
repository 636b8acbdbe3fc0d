"""Appendix C: how deep the hypernetwork should be."""

from pfedhn.paper.experiments import table1_cell
from pfedhn.report.findings import Finding
from pfedhn.studies.study import Found, Study, known, varied
from pfedhn.studies.sweep import sweep

VALUES = (1, 2, 3, 4, 5)


def draw(found: Found) -> Finding:
    return sweep(
        found,
        "num_hidden",
        "hidden layers of the hypernetwork",
        "Three or four hidden layers do best in the paper.",
        {3: (88.38, None), 4: (88.42, None)},
    )


STUDY = Study(
    "depth",
    "Appendix C: accuracy against the depth of the hypernetwork (CIFAR-10, 50 clients)",
    tuple(
        varied(table1_cell("cifar10", method, 50), num_hidden=value)
        for method in known("pfedhn", "pfedhn-plus")
        for value in VALUES
    ),
    draw,
)
