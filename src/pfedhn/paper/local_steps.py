"""Appendix C: what several local steps in a round are worth, against the plain chain rule (one step)."""

from dataclasses import replace

from pfedhn.experiments.spec import Cell
from pfedhn.paper.experiments import table1_cell
from pfedhn.report.findings import Finding
from pfedhn.studies.study import Found, Study, known, on_digits, setting, varied
from pfedhn.studies.sweep import sweep

VALUES = (1, 25, 50, 100, 200)


def draw(found: Found) -> Finding:
    return sweep(
        found,
        "local_steps",
        "local steps in a round",
        "One local step is the plain chain rule. In the paper, several of them learn faster and end higher, and how "
        "many matters little.",
        {50: (88.38, 0.29)},
    )


def small(cell: Cell) -> Cell:
    return replace(
        on_digits(cell), settings={**cell.settings, "local_steps": max(1, setting(cell, "local_steps") // 10)}
    )


STUDY = Study(
    "local-steps",
    "Appendix C: accuracy against local steps (CIFAR-10, 50 clients)",
    tuple(
        varied(table1_cell("cifar10", method, 50), local_steps=value)
        for method in known("pfedhn", "pfedhn-plus")
        for value in VALUES
    ),
    draw,
    small=small,
)
