"""Section 3: what crosses the wire is the target network, however large the hypernetwork on the server is."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch.utils import _pytree as pytree

from pfedhn.experiments.spec import Cell
from pfedhn.report.entries import Entry, summarize
from pfedhn.report.findings import Finding
from pfedhn.studies import drawing
from pfedhn.studies.study import Finished, Found, Study, known, on_digits, setting, table1_cell, varied

WIDTHS = (10, 100, 1_000)  # of the trunk; the head, nearly all of it, grows alike. The paper's is 100.


def compute(finished: Finished) -> Mapping[str, Any]:
    """The weights of the hypernetwork and of the target network."""
    run = finished.run
    return {
        "hypernetwork": sum(leaf.numel() for leaf in pytree.tree_leaves(finished.shared().phi)),
        "target": sum(shape.numel() for shape in run.simulation.model_of(0).shapes.values()),
    }


ABOUT = " Bytes: both ways, of one client. Time: beside other runs on the same device."


def draw(found: Found) -> Finding:
    rows: list[tuple[Entry, Mapping[str, Any]]] = [
        (entry, next(iter(analyses.values()))) for entry in found.entries if (analyses := found.analyses(entry.cell))
    ]
    smallest = min((values["hypernetwork"] for _, values in rows), default=1)
    lines = [["method", "width", "hypernetwork", "growth", "bytes per round", "accuracy", "ms per round", "seeds"]]
    for entry, values in rows:
        size = values["hypernetwork"]
        numbers = [f"{size:,}", f"{size / smallest:.0f}x", f"{round(bytes_a_round(entry)):,}"]
        more = [drawing.text(drawing.accuracy(entry)), drawing.text(drawing.milliseconds(entry), 1)]
        width = str(setting(entry.cell, "hidden_dim"))
        lines.append([entry.label, width, *numbers, *more, drawing.seeds_of(entry)])
    sent = sorted({round(bytes_a_round(entry)) for entry, _ in rows if entry.cell.method == "pfedhn"})
    growth = max((values["hypernetwork"] for _, values in rows), default=1) / smallest
    return Finding(
        found.study.name,
        found.title,
        f"The hypernetwork grows {growth:.0f} times, and a round still carries "
        f"{' or '.join(f'{value:,}' for value in sent) or 'unknown'} bytes: the target network down, its update up.",
        [
            (
                lines,
                drawing.caption(
                    [entry for entry, _ in rows],
                    " Bytes: both ways, of one client. Time: with other runs on the same device.",
                ),
            )
        ],
        {"": partial(picture, found.title, rows)} if rows else {},
    )


def bytes_a_round(entry: Entry) -> float:
    """What one client's part in a round weighs, both ways."""
    value = summarize((result.bytes_down + result.bytes_up) / result.steps for result in entry.results.values())
    assert value is not None
    return value.mean


def picture(title: str, rows: list[tuple[Entry, Mapping[str, Any]]]) -> Any:
    figure, (left, right) = drawing.titled(10.5, 4.2, title, 2)
    for number, method in enumerate(dict.fromkeys(entry.cell.method for entry, _ in rows)):
        mine = [(entry, values["hypernetwork"]) for entry, values in rows if entry.cell.method == method]
        sizes = [float(size) for _, size in mine]
        color, label = drawing.color_of(method, number), mine[0][0].label
        style = {"color": color, "label": label, "marker": drawing.MARKERS[number]}
        left.plot(sizes, [bytes_a_round(entry) / 1e3 for entry, _ in mine], **style)
        means = [summary for entry, _ in mine if (summary := drawing.accuracy(entry)) is not None]
        drawing.errorbar(right, sizes, means, color, label, marker=drawing.MARKERS[number])
        if number == 0:
            left.plot(
                sizes, [4 * size / 1e3 for size in sizes], color=drawing.PAPER, linestyle=":", label="if it were sent"
            )
    for axes in (left, right):
        axes.set_xscale("log")
    left.set_yscale("log")
    drawing.heading(left, "what a round carries for one client, both ways")
    drawing.finished_axes(left, "weights of the hypernetwork", "kB a round")
    drawing.heading(right, "and what it is good for")
    drawing.finished_axes(right, "weights of the hypernetwork", "test accuracy in %", legend=False)
    return figure


def small(cell: Cell) -> Cell:
    width = setting(cell, "hidden_dim")
    return replace(on_digits(cell), steps=24, settings={**on_digits(cell).settings, "hidden_dim": max(2, width // 5)})


STUDY = Study(
    "communication",
    "Section 3: bytes per round while the hypernetwork grows (CIFAR-10, 50 clients)",
    tuple(
        varied(table1_cell("cifar10", method, 50), hidden_dim=width)
        for method in known("pfedhn", "pfedhn-pc", "pfedhn-plus")
        for width in WIDTHS
    ),
    draw,
    compute,
    small,
)
