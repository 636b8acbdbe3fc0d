"""The paper lets one client take part in a round. What do several cost or gain, and how should their updates join?"""

from dataclasses import replace
from functools import partial
from typing import Any

from pfedhn.experiments.spec import Cell
from pfedhn.report.entries import Entry
from pfedhn.report.findings import Finding
from pfedhn.studies import drawing
from pfedhn.studies.study import Found, Study, known, setting, table1_cell, varied
from pfedhn.studies.sweep import mean_curve

SIZES = (5, 10, 25)
RULES = ("mean", "sum", "size")
NAMES = {"mean": "mean", "sum": "sum", "size": "mean by examples"}


def cells() -> tuple[Cell, ...]:
    found = []
    for method in known("pfedhn", "pfedhn-plus"):
        cell = table1_cell("cifar10", method, 50)
        found.append(cell)
        found += [replace(varied(cell, rule=rule), cohort_size=size) for size in SIZES for rule in RULES]
    return tuple(found)


def size_of(cell: Cell) -> int:
    return cell.cohort_size or 1


def called(entry: Entry) -> str:
    size = size_of(entry.cell)
    return "1 client" if size == 1 else f"{size} clients, {NAMES[setting(entry.cell, 'rule')]}"


def draw(found: Found) -> Finding:
    lines = [["method", "clients per round", "server step", "accuracy", "rounds", "seeds"]]
    for entry in found.entries:
        first = next(iter(entry.results.values()))
        rule = "" if size_of(entry.cell) == 1 else NAMES[setting(entry.cell, "rule")]
        numbers = [drawing.text(drawing.accuracy(entry)), f"{first.rounds:,}", drawing.seeds_of(entry)]
        lines.append([entry.label, str(size_of(entry.cell)), rule, *numbers])
    ours = [entry for entry in found.entries if entry.cell.method == "pfedhn" and drawing.accuracy(entry) is not None]
    said = {called(entry): f"{drawing.text(drawing.accuracy(entry), 1)} %" for entry in ours}
    return Finding(
        found.study.name,
        found.title,
        "All runs have the same communication: a cohort of 25 makes 25 times fewer server steps of 25 updates. pFedHN: "
        f"{drawing.listed(said)}.",
        [(lines, drawing.caption(found.entries, " All have as many communication steps."))],
        {"": partial(picture, found)},
    )


def picture(found: Found) -> Any:
    methods = list(dict.fromkeys(entry.cell.method for entry in found.entries))
    figure, all_axes = drawing.titled(5.4 * len(methods) + 1.6, 4.6, found.title, len(methods), squeeze=False)
    sizes = sorted({size_of(entry.cell) for entry in found.entries})
    for method, axes in zip(methods, all_axes[0], strict=True):
        mine = [entry for entry in found.entries if entry.cell.method == method]
        for entry in mine:
            curve = mean_curve(entry)
            color = drawing.COLORS[sizes.index(size_of(entry.cell)) % 8]
            dash = {"mean": "-", "sum": (0, (4, 1.5)), "size": (0, (1, 1.2))}[setting(entry.cell, "rule")]
            style = {"color": color, "linestyle": dash, "linewidth": 1.6, "label": called(entry)}
            axes.plot(list(curve), list(curve.values()), **style)
        drawing.heading(axes, f"{mine[0].label}: color is the number of clients, dash the server step")
        drawing.finished_axes(axes, "communication steps (one client taking part once)", "test accuracy in %")
    return figure


STUDY = Study(
    "cohort-size",
    "How many clients per round (CIFAR-10, 50 clients)",
    cells(),
    draw,
)
