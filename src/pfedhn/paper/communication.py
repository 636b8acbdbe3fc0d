"""Section 3: what crosses the wire is the target network, however large the hypernetwork on the server is."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch.utils import _pytree as pytree

from pfedhn.experiments.finished import Finished
from pfedhn.experiments.spec import Cell
from pfedhn.paper import drawing
from pfedhn.paper.experiments import table1_cell
from pfedhn.report.entries import Entry, summarize
from pfedhn.report.figures import make_logarithmic
from pfedhn.report.findings import Finding
from pfedhn.report.study import Found, Study, on_digits, setting, varied
from pfedhn.report.tables import number_text

WIDTHS = (10, 100, 1_000)  # of the trunk; the head, nearly all of it, grows alike. The paper's is 100.


def compute(finished: Finished) -> Mapping[str, Any]:
    """Count the weights of the hypernetwork."""
    return {"hypernetwork": sum(leaf.numel() for leaf in pytree.tree_leaves(finished.shared().phi))}


def size_of(found: Found, entry: Entry) -> int:
    """The number of weights of the hypernetwork."""
    return int(next(iter(found.analyses(entry.cell).values()))["hypernetwork"])


def bytes_a_round(entry: Entry) -> float:
    """What one client's part in a round weighs, both ways."""
    value = summarize((result.bytes_down + result.bytes_up) / result.steps for result in entry.results.values())
    assert value is not None
    return value.mean


def milliseconds(entry: Entry) -> str:
    """Wall time of a round, evaluation included."""
    return number_text(summarize(1e3 * result.seconds / result.rounds for result in entry.results.values()), 1)


CAPTION = (
    " Width: of the hypernetwork's hidden layers. Bytes: both ways, of one client. Time: with other runs on the same "
    "device."
)


def draw(found: Found) -> Finding:
    entries = [entry for entry, _ in found.computed]
    smallest: dict[str, int] = {}  # hypernetwork of each method
    for entry in entries:
        smallest[entry.cell.method] = min(size_of(found, entry), smallest.get(entry.cell.method, size_of(found, entry)))

    def growth(entry: Entry) -> float:
        return size_of(found, entry) / smallest[entry.cell.method]

    columns = {
        "width": lambda entry: str(setting(entry.cell, "hidden_dim")),
        "hypernetwork": lambda entry: f"{size_of(found, entry):,}",
        "growth": lambda entry: f"{growth(entry):.0f}x",
        "bytes per round": lambda entry: f"{round(bytes_a_round(entry)):,}",
        "accuracy": drawing.accuracy_text,
        "ms per round": milliseconds,
    }
    plain = [entry for entry in entries if entry.cell.method == "pfedhn"]
    sent = sorted({round(bytes_a_round(entry)) for entry in plain})
    reached = {
        f"{size_of(found, entry) / 1e6:.3g} million weights": f"{drawing.accuracy_text(entry, 1)} %" for entry in plain
    }
    return found.finding(
        f"The hypernetwork grows {max(map(growth, plain), default=1):.0f} times, and a round still carries "
        f"{' or '.join(f'{value:,}' for value in sent) or 'unknown'} bytes: the target network down, its update up. "
        f"pFedHN has {drawing.listed(reached) or 'not been run yet'}.",
        [drawing.table(entries, columns, CAPTION)],
        {"": partial(picture, found, entries)} if entries else {},
    )


def picture(found: Found, entries: Sequence[Entry]) -> Any:
    figure, (left, right) = drawing.titled(10.5, 4.2, found.title, 2)
    for number, method in enumerate(dict.fromkeys(entry.cell.method for entry in entries)):
        mine = [entry for entry in entries if entry.cell.method == method]
        sizes = [size_of(found, entry) / 1e6 for entry in mine]
        color, label, marker = drawing.color_of(method, number), mine[0].label, drawing.MARKERS[number]
        # The lines are nearly the same: a mark that is drawn later is smaller.
        style = {"color": color, "label": label, "marker": marker, "markersize": max(4, 10 - 3 * number)}
        left.plot(sizes, [bytes_a_round(entry) / 1e6 for entry in mine], **style)
        drawing.accuracies(right, sizes, mine, color, label, marker=marker)
    sizes = sorted(size_of(found, entry) / 1e6 for entry in entries)
    both_ways = [2 * 4 * size for size in sizes]
    left.plot(sizes, both_ways, color=drawing.PAPER, linestyle=":", label="if the hypernetwork\nwere sent")
    for axes in (left, right):
        make_logarithmic(axes, "x")
    make_logarithmic(left)
    xlabel = "weights of the hypernetwork, in millions"
    drawing.finish(left, xlabel, "MB per round", "what a round carries for one client, both ways")
    drawing.finish(right, xlabel, drawing.ACCURACY, "what a larger hypernetwork is worth", legend=False)
    return figure


def small(cell: Cell) -> Cell:
    reduced, width = on_digits(cell), setting(cell, "hidden_dim")
    return replace(reduced, steps=24, settings={**reduced.settings, "hidden_dim": max(2, width // 5)})


STUDY = Study(
    "communication",
    "Section 3: bytes per round while the hypernetwork grows (CIFAR-10, 50 clients)",
    tuple(
        varied(table1_cell("cifar10", method, 50), hidden_dim=width)
        for method in ("pfedhn", "pfedhn-pc", "pfedhn-plus")
        for width in WIDTHS
    ),
    draw,
    compute,
    small,
)
