"""The one style of the studies' figures, and the few forms that several of them share."""

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pfedhn.algorithms import ALGORITHMS
from pfedhn.report.entries import Entry, Summary, counted, summarize
from pfedhn.report.figures import new_figure, tidy
from pfedhn.report.tables import number_text

# Okabe and Ito, which color-blind people can tell apart; the first three are the darkest.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#4D4D4D", "#8C6D31")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
PAPER = "#4D4D4D"
PAPER_LABEL = "the paper"


def titled(width: float, height: float, title: str, columns: int = 1, lines: int = 1, **more: Any) -> tuple[Any, Any]:
    """A figure with a title, and its axes."""
    figure = new_figure(width, height)
    axes = figure.subplots(lines, columns, **more)
    figure.suptitle("\n".join(textwrap.wrap(title, int(10 * width))), x=0.012, ha="left", fontsize=11.5, weight="bold")
    return figure, axes


def color_of(method: str, number: int = 0) -> str:
    """A method's own color, or one by number."""
    own = ALGORITHMS[method].color if method in ALGORITHMS else None
    return own or COLORS[number % len(COLORS)]


def errorbar(axes: Any, x: Sequence[float], values: Sequence[Summary], color: str, label: str, **more: Any) -> None:
    """Means over seeds, and their sample deviation where there are several."""
    has_spread = any(value.deviation is not None for value in values)
    spread = [value.deviation or 0.0 for value in values] if has_spread else None
    style = {"marker": "o", "linewidth": 1.8, "markersize": 5.5, "capsize": 3.5, **more}
    axes.errorbar(x, [value.mean for value in values], yerr=spread, color=color, label=label, **style)


def heading(axes: Any, text: str) -> None:
    """What is seen in one part of a figure."""
    axes.set_title(text, loc="left", fontsize=10)


def finished_axes(axes: Any, xlabel: str, ylabel: str, legend: bool = True) -> None:
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    tidy(axes)
    if legend and (named := legend_of([axes])):
        axes.legend(named.values(), named, frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def legend_of(all_axes: Iterable[Any]) -> dict[str, Any]:
    """What is drawn in some axes, each by its name once; the paper comes last."""
    named = {
        label: handle for axes in all_axes for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    return dict(sorted(named.items(), key=lambda pair: pair[0] == PAPER_LABEL))


def accuracy(entry: Entry, clients: Sequence[int] | None = None) -> Summary | None:
    """Test accuracy over seeds, in percent; of some clients only where they are named."""
    if clients is None:
        return entry.test()
    values = [entry.client_accuracy(seed)[list(clients)] for seed in entry.results]
    return summarize(float(part[part == part].mean()) for part in values)


def milliseconds(entry: Entry) -> Summary | None:
    """Wall time of a round, evaluation included."""
    return summarize(1e3 * result.seconds / result.rounds for result in entry.results.values())


def on_common_seeds(entries: Sequence[Entry]) -> list[Entry]:
    """Only the seeds that all have, so that no difference is one of seeds; all of them where none is common."""
    have = [entry for entry in entries if entry.results]
    common = set.intersection(*(set(entry.results) for entry in have)) if have else set()
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


def seeds_of(entry: Entry) -> str:
    return str(len(entry.results))


def text(value: Summary | None, digits: int = 2) -> str:
    return "" if value is None else number_text(value, digits)


def paper_text(value: tuple[float, float | None] | None) -> str:
    if value is None:
        return ""
    mean, deviation = value
    return f"{mean:.2f}" if deviation is None else f"{mean:.2f} ± {deviation:.2f}"


def caption(entries: Sequence[Entry], more: str = "") -> str:
    """What the numbers of a table are, and where they were made."""
    seeds = sorted({len(entry.results) for entry in entries if entry.results})
    places = sorted({entry.hardware for entry in entries if entry.hardware})
    spread = "mean ± standard deviation over seeds" if seeds and seeds[-1] > 1 else "one seed"
    counts = f" ({' or '.join(counted(number, 'seed') for number in seeds)})" if seeds and seeds[-1] > 1 else ""
    where = f" Hardware: {'; '.join(places)}." if places else ""
    return f"Test accuracy in % over clients, at the round chosen on validation; {spread}{counts}.{more}{where}"


def listed(values: Mapping[str, str]) -> str:
    """ "83.1 % with 1, 88.2 % with 50": parts of a sentence."""
    return ", ".join(f"{value} with {name}" for name, value in values.items())
