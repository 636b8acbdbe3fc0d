"""Figures of a report: how the methods learn, and what each client gets."""

import io
import math
import re
import textwrap
import warnings
from collections.abc import Sequence
from typing import Any, Literal

import numpy
import pandas
from numpy.typing import NDArray

from pfedhn.algorithms import ALGORITHMS
from pfedhn.errors import missing_extra, printable
from pfedhn.report.entries import (
    Average,
    Column,
    Entry,
    Report,
    column_text,
    compare,
    display_name,
    is_squared,
    loss_digits,
    on_common_steps,
)
from pfedhn.report.tables import sentence

ADAPTED = " \N{BLACK DIAMOND}"


def new_figure(width: float, height: float) -> Any:
    """An empty figure, in inches; whoever has no Matplotlib is told how to get it."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise missing_extra("drawing", "report") from error
    return Figure(figsize=(width, height), layout="constrained")


def style(entry: Entry, entries: Sequence[Entry]) -> tuple[str, Any]:
    """The method's color and dash; further cells of a method, and methods without any, take those of absent methods."""
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
    spread: list[float] = []
    for entry in entries:
        if not (curves := entry.all_curves(average)):
            continue
        steps, values = on_common_steps(curves)
        spread += [float(values.min()), float(values.max())]
        color, dash = style(entry, entries)
        if len(curves) > 1:
            axes.fill_between(steps, values.min(0), values.max(0), color=color, alpha=0.15, linewidth=0)
        marker = "o" if len(steps) == 1 else None  # else nobody would see it
        axes.plot(steps, values.mean(0), color=color, linestyle=dash, linewidth=1.8, marker=marker, markersize=4)
        last = float(values.mean(0)[-1])
        if entry.adapts and (adapted := entry.test(average)) is not None:
            last = adapted.mean
            spread.append(last)
            axes.plot(steps[-1:], [last], color=color, marker="D", markersize=5, clip_on=False)
        drawn.append((entry, color, float(steps[-1]), last))
    accuracy = all(entry.has_accuracy for entry in entries)
    axes.set(xlabel="communication steps (one client taking part once)")
    loss = "squared error on test examples" if is_squared(entries) else "test loss"
    axes.set_ylabel(f"test accuracy in %, averaged over {average}" if accuracy else loss)
    tidy(axes)
    if not drawn:
        return
    talking = [step for entry, _, step, _ in drawn if not entry.sends_nothing]
    right = max(talking or [step for _, _, step, _ in drawn]) or 1.0
    axes.set_xlim(0, right)
    if accuracy:
        low = max(lowest_shown([last for *_, last in drawn], min(spread)), 0.0)
        high = min(100.0, max(spread) + max(0.03 * (max(spread) - low), 0.3))
        axes.set_ylim(min(low, high - 1), high)  # if all are at 100 %, a scale needs some height
    elif 0 < 10 * min(spread) < max(spread):
        make_logarithmic(axes)  # a first value far above all that follows would press the rest flat
    for _, color, end, last in drawn:
        if end < right and axes.get_ylim()[0] <= last:  # its last value, so that its name finds it at the edge
            axes.plot([end, right], [last, last], color=color, linestyle=":", linewidth=0.8, alpha=0.7)
    label_ends(axes, drawn)


def make_logarithmic(axes: Any, letter: Literal["x", "y"] = "y", steps: Sequence[float] = (1.0, 3.0)) -> None:
    """A logarithmic scale whose numbers are written out, at these steps in each power of ten."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set(**{f"{letter}scale": "log"})
    axis = {"x": axes.xaxis, "y": axes.yaxis}[letter]
    axis.set_major_locator(LogLocator(subs=steps))
    axis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}")
    axis.set_minor_formatter(NullFormatter())
    axes.minorticks_off()


def lowest_shown(ends: Sequence[float], least: float) -> float:
    """The lower end of the scale: it follows the methods that compete, so one far behind them may leave it."""
    if len(ends) < 3:
        return least
    ordered = sorted(ends, reverse=True)
    best, middle = ordered[0], ordered[(len(ordered) - 1) // 2]
    return max(least, middle - 2 * (best - middle) - 5)


def label_ends(axes: Any, drawn: Sequence[tuple[Entry, str, float, float]]) -> None:
    """Write each line's name and last value beside the figure, pushed apart if they would overlap.

    `axes` have their final limits; `drawn` are the lines' entries, colors and ends.
    """
    low, high = axes.get_ylim()
    to_scale, from_scale = (math.log10, lambda place: 10**place) if axes.get_yscale() == "log" else (float, float)
    gap = (to_scale(high) - to_scale(low)) * 0.17 / (axes.figure.get_size_inches()[1] * 0.75)
    ordered = sorted(drawn, key=lambda item: item[3])
    heights = [to_scale(max(value, low)) for *_, value in ordered]
    places = [from_scale(place) for place in spaced(heights, gap, to_scale(low), to_scale(high))]
    beside = axes.get_yaxis_transform()  # the width of the axes across, its values up
    digits = 1 if all(entry.has_accuracy for entry, *_ in drawn) else loss_digits(entry for entry, *_ in drawn)
    for (entry, color, _, value), place in zip(ordered, places, strict=True):
        line = {"arrowstyle": "-", "color": color, "linewidth": 0.8, "relpos": (0, 0.5), "shrinkA": 1, "shrinkB": 0}
        is_below = value < low
        axes.annotate(
            f"{display_name(entry.label)} {value:.{digits}f}{ADAPTED * entry.adapts}{' (below)' if is_below else ''}",
            xy=(1.0, max(value, low)),
            xycoords=beside,
            xytext=(1.04, place),
            textcoords=beside,
            color=color,
            fontsize=9,
            fontweight="bold",
            va="center",
            annotation_clip=False,
            arrowprops=None if is_below else line,
        )


def spaced(values: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Rising values moved as little as possible so that they lie at least `gap` apart, between `low` and `high`.

    Values that come too close move as a block, to both sides.
    """
    from sklearn.isotonic import isotonic_regression

    shifts = gap * numpy.arange(len(values))
    places = isotonic_regression(numpy.asarray(values, dtype=numpy.float64) - shifts)
    return [float(place) for place in numpy.clip(places, low, high - shifts[-1]) + shifts]


def plot_clients(axes: Any, entries: Sequence[Entry], against: Entry | None = None) -> None:
    """A dot for each client and seed (or for all folds together) at its own test accuracy, and a bar at the mean.

    Below, it says who beats training alone.
    """
    labels: list[str] = []
    lowest = 100.0
    finished = [(entry, mean) for entry in entries if (mean := entry.test()) is not None and entry.has_accuracy]
    for place, (entry, mean) in enumerate(finished):
        values = entry.all_client_scores()
        values = values[~numpy.isnan(values)]
        lowest = min(lowest, float(values.min(initial=100.0)))
        color, _ = style(entry, [other for other, _ in finished])
        axes.scatter(place + _side_by_side(values), values, s=9, color=color, alpha=0.6, linewidths=0, clip_on=False)
        axes.plot([place - 0.42, place + 0.42], [mean.mean] * 2, color="black", linewidth=1.8, zorder=3)
        name = re.sub(r" (?=\S+=)", "\n", printable(display_name(entry.label)))  # settings under the method
        lines = [name, f"{mean.mean:.1f} %"]
        if against is not None and entry.label == against.label:
            lines += ["", "(alone)", ""]
        elif against is not None and (counts := compare(entry, against)) is not None:
            lines += [f"{counts.better} better", f"{counts.same} same", f"{counts.worse} worse"]
        labels.append("\n".join(lines))
    axes.set_xticks(range(len(labels)), labels, fontsize=9)
    axes.set_xlim(-0.55, len(labels) - 0.45)
    axes.set_ylabel("a client's own test accuracy in %")
    axes.set_yticks(range(0, 101, 10))
    axes.set_ylim(min(10 * math.floor(lowest / 10), 90), 100)
    tidy(axes)
    axes.grid(axis="x", visible=False)


def _side_by_side(values: NDArray[numpy.float64]) -> NDArray[numpy.float64]:
    """Offsets of dots: those of similar height stand side by side around the middle, closer if there are many."""
    levels = pandas.Series(values).round()
    counts = levels.map(levels.value_counts())
    apart = (0.8 / counts).clip(upper=0.038)
    return numpy.asarray(apart * (levels.groupby(levels).cumcount() - (counts - 1) / 2))


def tidy(axes: Any) -> None:
    """The one style of all figures: a light grid behind, no box."""
    axes.grid(color="#E6E6E6", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(length=0, labelsize=9)


def draw_curves(report: Report, column: Column, average: Average = "clients") -> Any | None:
    """A figure; None if no run has begun."""
    entries = [entry for entry in report.in_column(column) if entry.all_curves()]
    if not entries:
        return None
    titles = dict.fromkeys(entry.title for entry in report.in_column(column))
    lines: list[str] = [line for title in titles for line in textwrap.wrap(title, 72)]
    longest = max(len(entry.label) for entry in entries)  # each line has its name beside the figure
    figure = new_figure(max(8.0, 5.0 + 0.09 * longest), max(4.8, 0.24 * len(entries) + 0.2 * len(lines)))
    axes = figure.subplots()
    plot_curves(axes, report.in_column(column), average)
    lines.append(column_text(column))
    if any(entry.adapts for entry in entries):
        lines.append(f"{ADAPTED.strip()} after the clients' own steps, unless validation fell; lines are before them")
    axes.set_title("\n".join(lines), loc="left", fontsize=11)
    return figure


def draw_clients(report: Report, column: Column) -> Any | None:
    """A figure; None if no run is finished, or none has accuracies."""
    entries = [entry for entry in report.in_column(column) if entry.test() is not None and entry.has_accuracy]
    if not entries:
        return None
    figure = new_figure(max(5.0, 1.5 * len(entries) + 1), 5.0)
    axes = figure.subplots()
    alone = report.entry("local", column)
    plot_clients(axes, entries, alone if alone in entries else None)
    axes.set_title(f"{column_text(column)}: every client's own test accuracy", loc="left", fontsize=11)
    return figure


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
        f"dot: one of {column[1]} clients of one seed; bar: mean",
        loc="left",
        fontsize=10,
    )
    figure.suptitle(report.title, x=0.012, ha="left", fontsize=15, fontweight="bold")
    figure.supxlabel("\n".join(textwrap.wrap(sentence(report), 150)), x=0.012, ha="left", fontsize=10.5)
    return to_png(figure)


def to_png(figure: Any, is_dark: bool = False) -> bytes:
    """A figure as PNG; for a dark page its ground is transparent and its colors are light."""
    if is_dark:
        _for_dark_pages(figure)
    return _saved(figure, format="png", dpi=150, transparent=is_dark)


def to_svg(figure: Any, is_dark: bool = False) -> bytes:
    """A figure as SVG on a transparent ground, the same bytes from the same numbers."""
    import matplotlib

    if is_dark:
        _for_dark_pages(figure)
    with matplotlib.rc_context({"svg.hashsalt": "pfedhn", "svg.fonttype": "none"}):
        content = _saved(figure, format="svg", metadata={"Date": None}, transparent=True)
    # A hundredth of a point is enough, and half the file; numbers between tags are words of the figure.
    return re.sub(rb"<[^>]*>", lambda tag: re.sub(rb"(\d\.\d\d)\d+", rb"\1", tag[0]), content)


def _for_dark_pages(figure: Any) -> None:
    """Every color of a figure as it is seen on a dark ground: grays turned round, dark hues mixed with white."""
    kept = {figure.patch, *(axes.patch for axes in figure.axes)}
    kept |= {text for axes in figure.axes if axes.images for text in axes.texts}  # its ground is the image
    for artist in figure.findobj(lambda artist: artist not in kept):
        found = {}  # all are read before one is written: a mark without its own color has that of its line
        for name in ("color", "facecolor", "edgecolor", "markerfacecolor", "markeredgecolor"):
            if hasattr(artist, f"get_{name}") and hasattr(artist, f"set_{name}"):
                found[name] = getattr(artist, f"get_{name}")()
        for name, value in found.items():
            if not (isinstance(value, str) and value in ("none", "auto", "inherit")):
                getattr(artist, f"set_{name}")(_on_dark(value))
    for axes in figure.axes:
        for spine in axes.spines.values():
            spine.set_edgecolor("#8A9099")
        for text in axes.texts:
            if (arrow := getattr(text, "arrow_patch", None)) is not None:
                arrow.set_color(text.get_color())


def _on_dark(color: Any) -> Any:
    from matplotlib.colors import to_rgba_array

    colors = to_rgba_array(color)
    rgb = colors[:, :3]
    is_gray = (numpy.ptp(rgb, axis=1) < 0.08)[:, None]
    light = rgb @ [0.3, 0.59, 0.11]
    white = numpy.clip(0.6 - light, 0, 1)[:, None]
    colors[:, :3] = numpy.where(is_gray, 0.1 + 0.82 * (1 - rgb), rgb + (1 - rgb) * white)
    return colors[0] if len(colors) == 1 else colors


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


def figures_of(reports: Sequence[Report], average: Average = "clients") -> dict[str, Any]:
    """Figures by the names of their files: for each data set and number of clients, the curves and the clients."""
    drawn: dict[str, Any] = {}
    for number, report in enumerate(reports, 1):
        for column in report.columns:
            name = re.sub(r"[^\w.=+-]+", "_", column[0])[:80]  # of a file now
            ending = f"{name}-{column[1]}" + (f"-{number}" if len(reports) > 1 else "")
            drawn[f"curves-{ending}"] = draw_curves(report, column, average)
            drawn[f"clients-{ending}"] = draw_clients(report, column)
    return {name: figure for name, figure in drawn.items() if figure is not None}
