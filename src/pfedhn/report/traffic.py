"""Accuracy against bytes: what the best methods reach with how much communication."""

import textwrap
from collections.abc import Sequence
from typing import Any

import numpy

from pfedhn.report.entries import Column, Entry, Report, display_name, on_common_steps
from pfedhn.report.figures import ADAPTED, label_ends, lowest_shown, make_logarithmic, new_figure, style, tidy
from pfedhn.storage.schema import Curve

NUM_BEST = 10
EMPHASIZED = "pfedhn-plus"


def best_of(report: Report, column: Column) -> list[Entry]:
    """The methods of a column that communicate and end highest, best first."""
    talking = [entry for entry in report.in_column(column) if entry.results and not entry.sends_nothing]
    return sorted(talking, key=lambda entry: -_accuracy(entry))[:NUM_BEST]


def _accuracy(entry: Entry) -> float:
    found = entry.test()
    assert found is not None
    return found.mean


def chosen_so_far(curve: Curve) -> list[float]:
    """At each evaluation, the test accuracy over clients of the round that validation has chosen by then, in %."""
    assert curve.validation.sample_mean is not None
    assert curve.test.client_mean is not None
    values: list[float] = []
    best = -1.0
    for score, accuracy in zip(curve.validation.sample_mean, curve.test.client_mean, strict=True):
        values.append(values[-1] if score <= best else 100 * accuracy)
        best = max(best, score)
    return values


def megabytes(entry: Entry, seed: int, step: int) -> float:
    """What a client has sent and received on average after some communication steps, which all cost the same."""
    result = entry.results[seed]
    before = 0 if result.pretrain is None else result.pretrain.bytes_up + result.pretrain.bytes_down
    own = (result.bytes_up + result.bytes_down) * step / result.steps
    return (before + own) / entry.cell.clients / 1e6


def mean_line(entry: Entry) -> dict[float, float]:
    """Megabytes per client -> accuracy of the round chosen so far: the mean over seeds."""
    seeds = [seed for seed in entry.curves if seed in entry.results]
    if not seeds:
        return {}
    curves = [dict(zip(entry.curves[s].step, chosen_so_far(entry.curves[s]), strict=True)) for s in seeds]
    steps, values = on_common_steps(curves)
    sizes = [float(numpy.mean([megabytes(entry, seed, step) for seed in seeds])) for step in steps]
    return dict(zip(sizes, values.mean(0).tolist(), strict=True))


def megabytes_to(entry: Entry, accuracy: float) -> float | None:
    """With how many megabytes per client the mean over seeds first reaches an accuracy; None if it never does."""
    return next((size for size, value in mean_line(entry).items() if value >= accuracy), None)


def accuracy_at(entry: Entry, size: float) -> float:
    """What the mean over seeds has reached with so many megabytes per client."""
    return max((value for other, value in mean_line(entry).items() if other <= size), default=0.0)


def plot_traffic(axes: Any, report: Report, column: Column) -> None:
    """A line for each of the best methods, and the level that training alone reaches without a byte."""
    entries = best_of(report, column)
    drawn = []
    for entry in entries:
        color, dash = style(entry, entries)
        last = _accuracy(entry)
        line = mean_line(entry)
        end = max(line)
        sizes = [size for size in line if size > 0]
        width, order = (3.0, 3) if entry.label == EMPHASIZED else (1.6, 2)
        values = [line[size] for size in sizes]
        axes.plot(sizes, values, color=color, linestyle=dash, linewidth=width, zorder=order)
        if entry.adapts:  # before the end nobody has measured what the clients' own steps would give
            axes.plot([end], [last], color=color, marker="D", markersize=6, clip_on=False, zorder=4)
        drawn.append((entry, color, end, last))
    make_logarithmic(axes, "x", (1.0, 2.0, 5.0))
    ends = [value for *_, value in drawn]
    right = max(end for _, _, end, _ in drawn)
    axes.set_xlim(right / 60, right)
    axes.set_ylim(lowest_shown(ends, 0.0), max(ends) + 0.6)
    alone = report.entry("local", column)
    if alone is not None and alone.results and (level := _accuracy(alone)) > axes.get_ylim()[0]:
        axes.axhline(level, color="#4D4D4D", linestyle=(0, (1, 1.2)), linewidth=1.2)
        axes.annotate(
            f"{display_name('local')} {level:.1f}, 0 MB",
            xy=(0.97, level),
            xycoords=axes.get_yaxis_transform(),
            xytext=(0, -4),
            textcoords="offset points",
            ha="right",
            va="top",
            color="#4D4D4D",
            fontsize=9,
        )
    tidy(axes)
    label_ends(axes, drawn)
    axes.set_xlabel("megabytes per client, sent and received")


def draw_traffic(places: Sequence[tuple[Report, Column, str]], sentence: str) -> Any:
    """A figure: for each column, under its name, the best methods' accuracy against bytes; below it what to see."""
    figure = new_figure(5.6 * len(places), 5.0)
    all_axes = figure.subplots(1, len(places), squeeze=False)[0]
    for axes, (report, column, name) in zip(all_axes, places, strict=True):
        plot_traffic(axes, report, column)
        num_methods = len([entry for entry in report.in_column(column) if entry.results])
        axes.set_title(f"{name}: the {len(best_of(report, column))} best of {num_methods}", loc="left", fontsize=10.5)
    all_axes[0].set_ylabel("test accuracy in %, of the round\nthat validation has chosen so far")
    figure.suptitle("What methods reach with how much communication", x=0.012, ha="left", fontsize=13, weight="bold")
    notes = [sentence]
    if any(entry.adapts for report, column, _ in places for entry in best_of(report, column)):
        notes.append(
            f"{ADAPTED.strip()} after 50 steps of each client's own from the model it is served, unless validation "
            "fell; known at the end only. Lines show accuracy before those steps; some are below the picture."
        )
    text = "\n".join(line for note in notes for line in textwrap.wrap(note, 66 * len(places)))
    figure.supxlabel(text, x=0.012, ha="left", fontsize=10)
    return figure
