"""Section 3: what crosses the wire is the target network, however large the hypernetwork on the server is."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch.utils import _pytree as pytree

from pfedhn.experiments.spec import Cell
from pfedhn.paper.experiments import table1_cell
from pfedhn.report.entries import Entry, summarize
from pfedhn.report.figures import make_logarithmic
from pfedhn.report.findings import Finding
from pfedhn.studies import drawing
from pfedhn.studies.finished import Finished
from pfedhn.studies.study import Found, Study, known, on_digits, setting, varied

WIDTHS = (10, 100, 1_000)  # of the trunk; the head, nearly all of it, grows alike. The paper's is 100.


def compute(finished: Finished) -> Mapping[str, Any]:
    """The weights of the hypernetwork and of the target network."""
    run = finished.run
    return {
        "hypernetwork": sum(leaf.numel() for leaf in pytree.tree_leaves(finished.shared().phi)),
        "target": sum(shape.numel() for shape in run.plan.model_of(0).shapes.values()),
    }


def draw(found: Found) -> Finding:
    rows: list[tuple[Entry, Mapping[str, Any]]] = [
        (entry, next(iter(analyses.values()))) for entry in found.entries if (analyses := found.analyses(entry.cell))
    ]
    smallest: dict[str, int] = {}  # hypernetwork of each method
    for entry, values in rows:
        size = values["hypernetwork"]
        smallest[entry.cell.method] = min(size, smallest.get(entry.cell.method, size))
    lines = [["method", "width", "hypernetwork", "growth", "bytes per round", "accuracy", "ms per round", "seeds"]]
    for entry, values in rows:
        size = values["hypernetwork"]
        numbers = [f"{size:,}", f"{size / smallest[entry.cell.method]:.0f}x", f"{round(bytes_a_round(entry)):,}"]
        more = [drawing.text(drawing.accuracy(entry)), drawing.text(drawing.milliseconds(entry), 1)]
        width = str(setting(entry.cell, "hidden_dim"))
        lines.append([entry.label, width, *numbers, *more, drawing.seeds_of(entry)])
    plain = [(entry, values["hypernetwork"]) for entry, values in rows if entry.cell.method == "pfedhn"]
    sent = sorted({round(bytes_a_round(entry)) for entry, _ in plain})
    growth = max((size / smallest["pfedhn"] for _, size in plain), default=1)
    reached = {
        f"{size / 1e6:.3g} million weights": f"{drawing.text(drawing.accuracy(entry), 1)} %" for entry, size in plain
    }
    return Finding(
        found.study.name,
        found.title,
        f"The hypernetwork grows {growth:.0f} times, and a round still carries "
        f"{' or '.join(f'{value:,}' for value in sent) or 'unknown'} bytes: the target network down, its update up. "
        f"pFedHN has {drawing.listed(reached) or 'not been run yet'}.",
        [
            (
                lines,
                drawing.caption(
                    [entry for entry, _ in rows],
                    " Width: of the hypernetwork's hidden layers. Bytes: both ways, of one client. Time: with other "
                    "runs on the same device.",
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
        sizes = [size / 1e6 for _, size in mine]
        color, label = drawing.color_of(method, number), mine[0][0].label
        # The lines are nearly the same: a mark that is drawn later is smaller.
        style = {
            "color": color,
            "label": label,
            "marker": drawing.MARKERS[number],
            "markersize": max(4, 10 - 3 * number),
        }
        left.plot(sizes, [bytes_a_round(entry) / 1e6 for entry, _ in mine], **style)
        means = [summary for entry, _ in mine if (summary := drawing.accuracy(entry)) is not None]
        drawing.errorbar(right, sizes, means, color, label, marker=drawing.MARKERS[number])
    sizes = sorted(values["hypernetwork"] / 1e6 for _, values in rows)
    both_ways = [2 * 4 * size for size in sizes]
    left.plot(sizes, both_ways, color=drawing.PAPER, linestyle=":", label="if the hypernetwork\nwere sent")
    for axes in (left, right):
        make_logarithmic(axes, "x")
    make_logarithmic(left)
    drawing.heading(left, "what a round carries for one client, both ways")
    drawing.finished_axes(left, "weights of the hypernetwork, in millions", "MB per round")
    drawing.heading(right, "what a larger hypernetwork is worth")
    drawing.finished_axes(right, "weights of the hypernetwork, in millions", "test accuracy in %", legend=False)
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
