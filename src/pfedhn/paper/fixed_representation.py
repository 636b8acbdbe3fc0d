"""Appendix: class proportions as embeddings, which nobody trains, against trained embeddings of the same length.

The paper's "class proportions" and "empirical distribution" are a client's mixture of classes, which sums to 1
(`descriptors = "client"`). Its formula divides each class by its sum over clients (`"class"`), which is run beside it.
"""

from dataclasses import replace
from functools import partial
from typing import Any

from pfedhn.experiments.spec import Cell
from pfedhn.paper import drawing
from pfedhn.paper.experiments import table1_cell
from pfedhn.report.entries import Entry
from pfedhn.report.findings import Finding
from pfedhn.report.study import Found, Study, setting

KINDS = {
    "trained": "trained",
    "class": "fixed: its share of each class",
    "client": "fixed: its mixture of classes",
}
PAPER = {"trained": (84.12, 0.42), "client": (83.92, 0.36)}


def cells() -> tuple[Cell, ...]:
    found = []
    for method in ("pfedhn", "pfedhn-pc", "pfedhn-plus"):
        cell = replace(table1_cell("cifar10", method, 50), partition={"rule": "dirichlet", "alpha": 0.1})
        fixed = replace(cell, settings={**cell.settings, "embedding": "fixed"})
        trained = replace(cell, settings={**cell.settings, "embedding_dim": 10})
        found += [trained, replace(fixed, descriptors="class"), fixed]
    return tuple(found)


def kind(entry: Entry) -> str:
    return entry.cell.descriptors if setting(entry.cell, "embedding") == "fixed" else "trained"


def draw(found: Found) -> Finding:
    def published(entry: Entry) -> str:
        is_known = entry.cell.method == "pfedhn" and not found.is_small
        return drawing.paper_text(PAPER.get(kind(entry)) if is_known else None)

    columns = {"embedding": lambda e: KINDS[kind(e)], "accuracy": drawing.accuracy_text, "paper": published}
    ours = {
        KINDS[kind(entry)]: f"{drawing.accuracy_text(entry, 1)} %"
        for entry in found.entries
        if entry.cell.method == "pfedhn"
    }
    return found.finding(
        "Where something is known of a client, it can stand for a trained embedding; the paper reaches 83.9 % with "
        "class proportions and 84.1 % with trained embeddings. The formula of the paper divides each class by its sum "
        "over clients, which makes numbers so small that a hypernetwork under plain SGD hardly tells clients apart. "
        f"pFedHN here: {drawing.listed(ours)}.",
        [drawing.table(found.entries, columns)],
        {"": partial(picture, found)},
    )


def picture(found: Found) -> Any:
    figure, axes = drawing.titled(7.0, 3.9, found.title)
    labels = {entry.cell.method: entry.label for entry in found.entries}
    methods = list(labels)
    for number, name in enumerate(KINDS):
        mine = [entry for entry in found.entries if kind(entry) == name]
        places = [methods.index(entry.cell.method) + 0.2 * (number - 1) for entry in mine]
        style = {"linestyle": "none", "marker": drawing.MARKERS[number]}
        drawing.accuracies(axes, places, mine, drawing.COLORS[number], KINDS[name], **style)
        if name in PAPER and "pfedhn" in methods and not found.is_small:
            place = methods.index("pfedhn") + 0.2 * (number - 1) + 0.07
            axes.scatter([place], [PAPER[name][0]], marker="x", s=45, color=drawing.PAPER)
    if not found.is_small:
        axes.scatter([], [], marker="x", s=45, color=drawing.PAPER, label=drawing.PAPER_LABEL)
    axes.set_xticks(range(len(methods)), labels.values())
    axes.set_xlim(-0.6, len(methods) - 0.4)
    drawing.finish(axes, "", drawing.ACCURACY)
    return figure


STUDY = Study(
    "fixed-representation",
    "Appendix: fixed against trained embeddings (CIFAR-10, 50 clients, Dirichlet 0.1)",
    cells(),
    draw,
)
