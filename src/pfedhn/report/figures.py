"""Figures of a report: how the methods learn, and what each client gets."""

import io
import math
import re
import textwrap
import warnings
from collections.abc import Sequence
from typing import Any

import numpy
from numpy.typing import NDArray

from pfedhn.algorithms import ALGORITHMS
from pfedhn.errors import missing_extra, printable
from pfedhn.report.entries import Average, Column, Entry, Report, column_text, compare, display_name
from pfedhn.report.tables import sentence


def new_figure(width: float, height: float) -> Any:
    """An empty figure, in inches; whoever has no Matplotlib is told how to get it."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise missing_extra("drawing", "report") from error
    return Figure(figsize=(width, height), layout="constrained")


def style(entry: Entry, entries: Sequence[Entry]) -> tuple[str, Any]:
    """The method's own color and dash; cells of one method, and methods without any, go through the others'."""
    styles = {name: (known.color, known.dash) for name, known in ALGORITHMS.items() if known.color is not None}
    alike = [other.label for other in entries if other.cell.method == entry.cell.method]
    if entry.cell.method in styles and alike[0] == entry.label:
        return styles[entry.cell.method]
    taken = {other.cell.method for other in entries}
    free = [style for method, style in styles.items() if method not in taken] or list(styles.values())
    return free[[other.label for other in entries].index(entry.label) % len(free)]


def plot_curves(axes: Any, entries: Sequence[Entry], average: Average = "clients") -> None:
    """Accuracy against communication steps: the mean of the seeds, and a band from the lowest to the highest."""
    drawn: list[tuple[Entry, str, float, float]] = []
    for entry in entries:
        curves = [curve for seed in entry.curves if (curve := entry.curve(seed, average))]
        if not curves:
            continue
        steps = sorted(set.intersection(*(set(curve) for curve in curves)))
        values = numpy.array([[curve[step] for step in steps] for curve in curves])
        color, dash = style(entry, entries)
        if len(curves) > 1:
            axes.fill_between(steps, values.min(0), values.max(0), color=color, alpha=0.15, linewidth=0)
        axes.plot(steps, values.mean(0), color=color, linestyle=dash, linewidth=1.8)
        end, last = float(steps[-1]), float(values.mean(0)[-1])
        if entry.sends_nothing:  # however long the others talk, it stays there
            axes.axhline(last, color=color, linestyle=dash, linewidth=0.9)
            end = 0.0
        drawn.append((entry, color, end, last))
    accuracy = all(entry.has_accuracy for entry in entries)
    axes.set(xlabel="communication steps (one client taking part once)")
    axes.set_ylabel(f"test accuracy in %, averaged over {average}" if accuracy else "test loss")
    tidy(axes)
    if not drawn:
        return
    axes.set_xlim(left=0)
    if accuracy:
        _show_upper_part(axes, entries, average)
    _label_ends(axes, drawn)


MANY_EVALUATIONS = 20


def _show_upper_part(axes: Any, entries: Sequence[Entry], average: Average) -> None:
    """Every run starts near chance; leave that to the first steps and give the height to where they differ."""
    curves = [entry.curve(seed, average) for entry in entries for seed in entry.curves]
    if max(map(len, curves)) < MANY_EVALUATIONS:
        return  # a short run is mostly its start
    late = [value for curve in curves for step, value in curve.items() if step >= 0.15 * max(curve)]
    lowest, highest = min(late), max(late)
    margin = max(0.06 * (highest - lowest), 0.5)
    axes.set_ylim(max(0.0, lowest - margin), min(100.0, highest + margin))


def _label_ends(axes: Any, drawn: Sequence[tuple[Entry, str, float, float]]) -> None:
    """Each line's name at its end, pushed apart where they would overlap."""
    low, high = axes.get_ylim()
    height = axes.figure.get_size_inches()[1] * 0.75
    gap = (high - low) * 0.17 / height
    ordered = sorted(drawn, key=lambda item: item[3])
    places: list[float] = []
    for *_, value in ordered:
        places.append(max(value, places[-1] + gap) if places else max(value, low))
    # What was pushed over the top comes down again, and pushes the ones under it.
    for number in reversed(range(len(places))):
        limit = high if number == len(places) - 1 else places[number + 1] - gap
        places[number] = min(places[number], limit)
    right = max(step for _, _, step, _ in drawn) or axes.get_xlim()[1]
    for (entry, color, step, value), place in zip(ordered, places, strict=True):
        axes.annotate(
            display_name(entry.label),
            xy=(step or right, value),  # a line across the figure ends with it
            xytext=(right * 1.025, place),
            color=color,
            fontsize=9.5,
            fontweight="bold",
            va="center",
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": color,
                "linewidth": 0.6,
                "alpha": 0.6,
                "relpos": (0, 0.5),
                "shrinkA": 2,
                "shrinkB": 0,
            },
        )


def plot_clients(axes: Any, entries: Sequence[Entry], against: Entry | None = None) -> None:
    """A dot for each client and seed at its own test accuracy, a bar at the mean; below, who beats training alone."""
    entries = [entry for entry in entries if entry.test() is not None and entry.has_accuracy]
    labels = []
    lowest = 100.0
    for place, entry in enumerate(entries):
        values = numpy.concatenate([entry.client_accuracy(seed) for seed in entry.results])
        values = values[~numpy.isnan(values)]
        lowest = min(lowest, float(values.min(initial=100.0)))
        color, _ = style(entry, entries)
        sideways, up = _piles(values)
        axes.scatter(place + sideways, values + up, s=9, color=color, alpha=0.6, linewidths=0)
        mean = entry.test()
        assert mean is not None
        axes.plot([place - 0.42, place + 0.42], [mean.mean] * 2, color="black", linewidth=1.8, zorder=3)
        labels.append("\n".join([display_name(entry.label), f"{mean.mean:.1f} %", *_counts_text(entry, against)]))
    axes.set_xticks(range(len(labels)), labels, fontsize=9)
    axes.set_xlim(-0.55, len(labels) - 0.45)
    axes.set_ylabel("a client's own test accuracy in %")
    axes.set_yticks(range(0, 101, 10))
    axes.set_ylim(10 * math.floor(lowest / 10) - 2, 107)
    tidy(axes)
    axes.grid(axis="x", visible=False)


def _counts_text(entry: Entry, against: Entry | None) -> list[str]:
    """How many clients do better than alone, all seeds together."""
    if against is None:
        return []
    if entry.label == against.label:
        return ["", "(alone)", ""]
    counts = compare(entry, against)
    if counts is None:
        return []
    return [f"{counts.better} better", f"{counts.same} same", f"{counts.worse} worse"]


def _piles(values: NDArray[numpy.float64]) -> tuple[NDArray[numpy.float64], NDArray[numpy.float64]]:
    """Places for dots of like height: side by side around the middle, and in rows above where there are many."""
    row_length, apart = 21, 0.038
    sideways, up = numpy.zeros(len(values)), numpy.zeros(len(values))
    levels = numpy.round(values)
    for level in numpy.unique(levels):
        members = numpy.flatnonzero(levels == level)
        for start in range(0, len(members), row_length):
            row = members[start : start + row_length]
            sideways[row] = apart * (numpy.arange(len(row)) - (len(row) - 1) / 2)
            up[row] = 1.1 * (start // row_length)
    return sideways, up


def tidy(axes: Any) -> None:
    """The one style of all figures: a light grid behind, no box."""
    axes.grid(color="#E6E6E6", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(length=0, labelsize=9)


def draw_curves(report: Report, column: Column, average: Average = "clients", dpi: int = 150) -> bytes | None:
    """None where no run has begun."""
    if not any(entry.curve(seed) for entry in report.in_column(column) for seed in entry.curves):
        return None
    figure = new_figure(8.0, 4.8)
    axes = figure.subplots()
    plot_curves(axes, report.in_column(column), average)
    titles = dict.fromkeys(entry.title for entry in report.in_column(column))
    axes.set_title("\n".join([*titles, column_text(column)]), loc="left", fontsize=11)
    return to_png(figure, dpi)


def draw_clients(report: Report, column: Column) -> bytes | None:
    """None where no run is finished, or none has accuracies."""
    entries = [entry for entry in report.in_column(column) if entry.test() is not None and entry.has_accuracy]
    if not entries:
        return None
    figure = new_figure(max(5.0, 1.5 * len(entries) + 1), 5.0)
    axes = figure.subplots()
    alone = report.entry("local", column)
    plot_clients(axes, entries, alone if alone in entries else None)
    axes.set_title(f"{column_text(column)}: every client's own test accuracy", loc="left", fontsize=11)
    return to_png(figure)


def draw_demo(report: Report) -> bytes:
    """The demo's figure: how the methods learn, and what each client gets in the end."""
    column = report.columns[0]
    entries = report.in_column(column)
    figure = new_figure(13.0, 6.4)
    left, right = figure.subplots(1, 2)
    plot_curves(left, entries)
    left.set_title("How the methods learn\nline: mean of the seeds; band: lowest to highest", loc="left", fontsize=10)
    plot_clients(right, entries, report.entry("local", column))
    right.set_title(
        "What each client gets, and how many do better than alone\n"
        f"dot: one of {column[1]} clients of one seed, piled where equal; bar: mean",
        loc="left",
        fontsize=10,
    )
    figure.suptitle(report.title, x=0.012, ha="left", fontsize=15, fontweight="bold")
    figure.supxlabel("\n".join(textwrap.wrap(sentence(report), 150)), x=0.012, ha="left", fontsize=10.5)
    return to_png(figure)


def to_png(figure: Any, dpi: int = 150) -> bytes:
    """A figure as PNG."""
    return _saved(figure, format="png", dpi=dpi)


def to_svg(figure: Any) -> bytes:
    """A figure as SVG, the same bytes from the same numbers."""
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "pfedhn", "svg.fonttype": "none"}):
        return _saved(figure, format="svg", metadata={"Date": None})


def _saved(figure: Any, **how: Any) -> bytes:
    from matplotlib.text import Text

    for text in figure.findobj(Text):  # titles and names are words, also those with a dollar sign
        text.set_parse_math(False)
        text.set_text(printable(text.get_text()))
    stream = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from")  # a box stands for a letter that no font has
        figure.savefig(stream, **how)
    return stream.getvalue()


def figures_of(reports: Sequence[Report], average: Average = "clients") -> dict[str, bytes]:
    """PNG images by file name: for each data set and number of clients, the curves and the clients."""
    drawn: dict[str, bytes] = {}
    for number, report in enumerate(reports):
        for column in report.columns:
            name = re.sub(r"[^\w.=+-]+", "_", column[0])[:80]  # of a file now
            ending = "-".join([name, str(column[1]), *([str(number + 1)] if len(reports) > 1 else [])])
            curves, clients = draw_curves(report, column, average), draw_clients(report, column)
            if curves is not None:
                drawn[f"curves-{ending}.png"] = curves
            if clients is not None:
                drawn[f"clients-{ending}.png"] = clients
    return drawn
