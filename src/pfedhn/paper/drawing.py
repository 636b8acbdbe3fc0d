"""The one style of the studies' figures and tables."""

import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy

from pfedhn.algorithms import ALGORITHMS
from pfedhn.report.entries import Entry, Summary, counted, summarize
from pfedhn.report.figures import new_figure, tidy
from pfedhn.report.findings import Lines
from pfedhn.report.tables import number_text

# Okabe and Ito, which color-blind people can tell apart; the first three are the darkest.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#4D4D4D", "#8C6D31")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
PAPER = "#4D4D4D"
PAPER_LABEL = "the paper"
ACCURACY = "test accuracy in %"
UNKNOWN = Summary(math.nan, None, 0)


def titled(width: float, height: float, title: str, columns: int = 1, lines: int = 1, **more: Any) -> tuple[Any, Any]:
    """A figure with a title, and its axes."""
    figure = new_figure(width, height)
    axes = figure.subplots(lines, columns, **more)
    figure.suptitle("\n".join(textwrap.wrap(title, int(10 * width))), x=0.012, ha="left", fontsize=11.5, weight="bold")
    return figure, axes


def color_of(method: str, number: int = 0) -> str:
    """A method's own color, or one by number."""
    return ALGORITHMS[method].color or COLORS[number % len(COLORS)]


def errorbar(axes: Any, x: Sequence[float], values: Sequence[Summary], color: str, label: str, **more: Any) -> None:
    """Means over seeds, and their sample deviation if there are several."""
    has_spread = any(value.deviation is not None for value in values)
    spread = [value.deviation or 0.0 for value in values] if has_spread else None
    style = {"marker": "o", "linewidth": 1.8, "markersize": 5.5, "capsize": 3.5, **more}
    axes.errorbar(x, [value.mean for value in values], yerr=spread, color=color, label=label, **style)


def accuracies(axes: Any, x: Sequence[float], entries: Sequence[Entry], color: str, label: str, **more: Any) -> None:
    """The test accuracy of each entry, with its sample deviation."""
    errorbar(axes, x, [accuracy(entry) for entry in entries], color, label, **more)


def curve(axes: Any, values: Mapping[Any, float], color: str, label: str, **more: Any) -> None:
    """A line through numbers, by communication step or another scale."""
    axes.plot(list(values), list(values.values()), color=color, label=label, **{"linewidth": 1.7, **more})


def finish(axes: Any, xlabel: str, ylabel: str, heading: str = "", legend: bool = True) -> None:
    """Name the axes; above them stands what is seen, beside them what the marks are."""
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    if heading:
        axes.set_title(heading, loc="left", fontsize=10)
    tidy(axes)
    if legend and (named := legend_of([axes])):
        axes.legend(named.values(), named, frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def legend_of(all_axes: Iterable[Any]) -> dict[str, Any]:
    """What is drawn in some axes, each by its name once; the paper comes last."""
    named = {
        label: handle for axes in all_axes for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    return dict(sorted(named.items(), key=lambda pair: pair[0] == PAPER_LABEL))


def accuracy(entry: Entry, clients: Sequence[int] | None = None) -> Summary:
    """Test accuracy over seeds, in percent, of all clients or of some; NaN without test examples."""
    if clients is None:
        return entry.test() or UNKNOWN
    return over_seeds(float(numpy.nanmean(entry.client_accuracy(seed)[list(clients)])) for seed in entry.results)


def over_seeds(values: Iterable[float]) -> Summary:
    return summarize(values) or UNKNOWN


def accuracy_text(entry: Entry, digits: int = 2) -> str:
    return number_text(accuracy(entry), digits)


def mean_curve(entry: Entry) -> dict[int, float]:
    """Accuracy by communication step: the mean over the seeds."""
    return mean_of([entry.curve(seed) for seed in entry.curves])


def mean_of(curves: Sequence[Mapping[int, float]]) -> dict[int, float]:
    """The mean of some curves at the steps that all of them have."""
    steps = sorted(set.intersection(*map(set, curves))) if curves else []
    return {step: sum(curve[step] for curve in curves) / len(curves) for step in steps}


def by_method(entries: Iterable[Entry]) -> dict[str, list[Entry]]:
    """The entries of each method, on the seeds that all of these have."""
    found: dict[str, list[Entry]] = {}
    for entry in entries:
        found.setdefault(entry.cell.method, []).append(entry)
    return {method: on_common_seeds(mine) for method, mine in found.items()}


def on_common_seeds(entries: Sequence[Entry]) -> list[Entry]:
    """Only the seeds that all entries have, so that no difference is one of seeds; all of them if none is common."""
    common = set.intersection(*(set(entry.results) for entry in entries))
    if not common:
        return list(entries)
    return [
        replace(
            entry,
            results={seed: result for seed, result in entry.results.items() if seed in common},
            curves={seed: curve for seed, curve in entry.curves.items() if seed in common},
        )
        for entry in entries
    ]


def table(entries: Sequence[Entry], columns: Mapping[str, Callable[[Entry], str]], more: str = "") -> tuple[Lines, str]:
    """A line for each entry: its method, these columns and its number of seeds; and a caption that ends with `more`."""
    lines = [["method", *columns, "seeds"]]
    for entry in entries:
        lines.append([entry.label, *(text(entry) for text in columns.values()), str(len(entry.results))])
    return lines, caption(entries, more)


def paper_text(value: tuple[float, float | None] | None) -> str:
    return "" if value is None else number_text(Summary(*value, 3))


def caption(entries: Sequence[Entry], more: str = "") -> str:
    """What the numbers of a table are, and the hardware of their runs."""
    seeds = sorted({len(entry.results) for entry in entries if entry.results})
    places = sorted({entry.hardware for entry in entries if entry.hardware})
    spread = "mean ± standard deviation over seeds" if seeds and seeds[-1] > 1 else "one seed"
    counts = f" ({' or '.join(counted(number, 'seed') for number in seeds)})" if seeds and seeds[-1] > 1 else ""
    where = f" Hardware: {'; '.join(places)}." if places else ""
    return f"Test accuracy in % over clients, at the round chosen on validation; {spread}{counts}.{more}{where}"


def listed(values: Mapping[str, str]) -> str:
    """ "83.1 % with 1, 88.2 % with 50": parts of a sentence."""
    return ", ".join(f"{value} with {name}" for name, value in values.items())
