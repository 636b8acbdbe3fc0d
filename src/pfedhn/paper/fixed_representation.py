"""Appendix: class proportions as embeddings, which nobody trains, against trained embeddings of the same length.

The paper's "class proportions" and "empirical distribution" are a client's mixture of classes, which sums to 1
(`descriptors = "client"`). Its formula divides each class by its sum over clients (`"class"`), which is run beside it.
"""

from dataclasses import replace
from functools import partial
from typing import Any

from pfedhn.experiments.spec import Cell
from pfedhn.paper.experiments import table1_cell
from pfedhn.report.entries import Entry
from pfedhn.report.findings import Finding
from pfedhn.studies import drawing
from pfedhn.studies.study import Found, Study, known, setting

KINDS = {
    "trained": "trained",
    "class": "fixed: its share of each class",
    "client": "fixed: its mixture of classes",
}
PAPER = {"trained": (84.12, 0.42), "client": (83.92, 0.36)}


def cells() -> tuple[Cell, ...]:
    found = []
    for method in known("pfedhn", "pfedhn-pc", "pfedhn-plus"):
        cell = replace(table1_cell("cifar10", method, 50), partition={"rule": "dirichlet", "alpha": 0.1})
        fixed = replace(cell, settings={**cell.settings, "embedding": "fixed"})
        found += [
            replace(cell, settings={**cell.settings, "embedding_dim": 10}),
            replace(fixed, descriptors="class"),
            fixed,
        ]
    return tuple(found)


def kind(cell: Cell) -> str:
    return cell.descriptors if setting(cell, "embedding") == "fixed" else "trained"


def draw(found: Found) -> Finding:
    lines = [["method", "embedding", "accuracy", "paper", "seeds"]]
    for entry in found.entries:
        paper = PAPER.get(kind(entry.cell)) if entry.cell.method == "pfedhn" and not found.is_small else None
        numbers = [drawing.text(drawing.accuracy(entry)), drawing.paper_text(paper), drawing.seeds_of(entry)]
        lines.append([entry.label, KINDS[kind(entry.cell)], *numbers])
    ours = {
        KINDS[kind(entry.cell)]: f"{drawing.text(drawing.accuracy(entry), 1)} %"
        for entry in found.entries
        if entry.cell.method == "pfedhn"
    }
    return Finding(
        found.study.name,
        found.title,
        "Where something is known of a client, it can stand for a trained embedding; the paper reaches 83.9 % with "
        "class proportions and 84.1 % with trained embeddings. The formula of the paper divides each class by its sum "
        "over clients, which makes numbers so small that a hypernetwork under plain SGD hardly tells clients apart. "
        f"pFedHN here: {drawing.listed(ours)}.",
        [(lines, drawing.caption(found.entries))],
        {"": partial(picture, found)},
    )


def picture(found: Found) -> Any:
    figure, axes = drawing.titled(7.0, 3.9, found.title)
    methods = list(dict.fromkeys(entry.cell.method for entry in found.entries))
    for number, name in enumerate(KINDS):
        mine: list[Entry] = [entry for entry in found.entries if kind(entry.cell) == name]
        places = [methods.index(entry.cell.method) + 0.2 * (number - 1) for entry in mine]
        means = [summary for entry in mine if (summary := drawing.accuracy(entry)) is not None]
        style = {"linestyle": "none", "marker": drawing.MARKERS[number]}
        drawing.errorbar(axes, places, means, drawing.COLORS[number], KINDS[name], **style)
        if name in PAPER and "pfedhn" in methods and not found.is_small:
            place = methods.index("pfedhn") + 0.2 * (number - 1) + 0.07
            axes.scatter([place], [PAPER[name][0]], marker="x", s=45, color=drawing.PAPER)
    if not found.is_small:
        axes.scatter([], [], marker="x", s=45, color=drawing.PAPER, label=drawing.PAPER_LABEL)
    labels = {entry.cell.method: entry.label for entry in found.entries}
    axes.set_xticks(range(len(methods)), [labels[method] for method in methods])
    axes.set_xlim(-0.6, len(methods) - 0.4)
    drawing.finished_axes(axes, "", "test accuracy in %")
    return figure


STUDY = Study(
    "fixed-representation",
    "Appendix: fixed against trained embeddings (CIFAR-10, 50 clients, Dirichlet 0.1)",
    cells(),
    draw,
)
