"""The project's second demo: prognosis in hospitals that keep their patients' data.

48 hospitals of the International Stroke Trial and four of the Heart Disease data train together, with the defaults that
an experiment file of two lines gets. Hospitals of the trial with 20 to 49 patients join afterwards.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean as mean
from typing import Any

import numpy
from numpy.typing import NDArray

from pfedhn.experiments.grid import from_table
from pfedhn.experiments.spec import Cell
from pfedhn.experiments.tables import with_table_defaults
from pfedhn.paper import drawing
from pfedhn.paper.hospital_numbers import MAPPED, YARDSTICKS, compute
from pfedhn.report.entries import Column, Entry, Report, Summary, counted, display_name, summarize, to_reports
from pfedhn.report.findings import Finding, Lines
from pfedhn.report.measures_table import NEEDS_ALL, Measured, measured
from pfedhn.report.study import Found, Study
from pfedhn.report.tables import number_text
from pfedhn.report.verdict import Verdict, to_text, verdicts

NAME = "hospitals"
READ: Mapping[str, Mapping[str, Any]] = {"stroke": {"min_examples": 50}, "heart": {}}
SIZES: Mapping[str, Sequence[int]] = {
    "stroke": (
        *(247, 168, 160, 152, 148, 135, 124, 121, 120, 117, 112, 110, 96, 95, 93, 87, 87, 85, 84, 80, 77, 67, 65, 64),
        *(64, 63, 63, 62, 62, 62, 61, 58, 57, 56, 55, 55, 55, 54, 54, 54, 53, 53, 52, 51, 50, 50, 50, 50),
    ),
    "heart": (303, 294, 200, 123),
}
"""The patients of each hospital that trains, where the files are not there."""

SMALL_CLIENTS = {"stroke": 12, "heart": 4}
MADE_UP = "pfedhn.paper.hospital_numbers:made_up"
DATA = {"stroke": "Stroke trial", "heart": "Heart disease"}
FEDAVG = "fedavg"
COMPARED = ("local", FEDAVG, "own-base-rate", "own-linear", "pooled-linear-client")  # in the sentence


def cells(data_dir: Path | None = None) -> tuple[Cell, ...]:
    """Every method on both data sets, with the settings that a file with nothing but the data gets.

    Args:
        data_dir: The folder of the data, whose number of hospitals counts.
    """
    found: list[Cell] = []
    for dataset, read in READ.items():
        table = {"dataset": dataset, "read": dict(read)}
        cell = Cell(dataset=dataset, read=read)
        found += from_table(with_table_defaults(table, cell, data_dir, SIZES[dataset]), NAME).cells
    return tuple(found)


def on_made_up(cell: Cell) -> Cell:
    """A cell on made-up hospitals, in a few steps."""
    clients = SMALL_CLIENTS[cell.dataset]
    short: dict[str, Any] = {"clients": clients, "steps": 5 * clients, "evaluate_every": clients, "patience": None}
    return replace(cell, dataset=MADE_UP, read={}, settings={**cell.settings, "local_steps": 5}, **short)


Numbers = Mapping[int, Mapping[str, Any]]
"""What was computed from the runs of a cell, by seed."""


def draw(found: Found) -> Finding:
    """Say what to use, and show measures, new hospitals, calibration and the generated intercepts."""
    reports = to_reports(found.runs)
    computed: dict[Column, dict[str, tuple[Entry, Numbers]]] = {}
    for entry, numbers in found.computed:
        computed.setdefault(entry.column, {})[entry.cell.method] = entry, numbers
    judged = {(one.dataset, one.clients): one for report in reports for one in verdicts(report)}
    said = [advice(verdict) for verdict in judged.values()]
    tables = [(measures(report, column), MEASURES) for report in reports for column in report.columns]
    figures: dict[str, Callable[[], Any]] = {}
    for column, methods in computed.items():
        recommended = judged[column].recommended if column in judged else None
        if lines := new_lines(methods):
            said.append(new_sentence(methods, recommended))
            tables.append((lines, NEW))
        if MAPPED in methods and any("new" in values["map"] for values in methods[MAPPED][1].values()):
            said.append(map_sentence(methods[MAPPED][1]))
            figures["map"] = partial(map_picture, methods[MAPPED][1])
    if computed:
        figures["calibration"] = partial(calibration_picture, computed, judged)
    return found.finding("\n\n".join(filter(None, said)), [table for table in tables if table[0]], figures)


def name_of(column: Column) -> str:
    return f"{DATA.get(column[0], 'Made-up table')}, {column[1]} hospitals"


def advice(verdict: Verdict) -> str:
    """What to use, and its gain over a few others."""
    shown = tuple(difference for difference in verdict.differences if difference.name in COMPARED)
    sentences = to_text(replace(verdict, differences=shown, failures=(), suggestions=()))
    return f"{name_of((verdict.dataset, verdict.clients))}: {' '.join(sentences)}"


MEASURES = (
    "Measures on test examples: accuracy in % is the mean over hospitals, the others are over patients. Mean ± "
    "standard deviation over seeds, each of which splits the patients anew. Lines with * need all data in one place."
)
SHOWN = {"auc": "AUC", "log_loss": "log loss", "calibration_error": "calibration error"}


def measures(report: Report, column: Column) -> Lines:
    """A line for each method and yardstick."""
    heading = [name_of(column), "accuracy", *SHOWN.values(), "seeds"]
    lines = [[*_cells(one), str(len(one.scores))] for one in measured(report, column)]
    return [heading, *lines] if lines else []


def _cells(one: Measured) -> list[str]:
    over = one.over("examples")
    return [
        one.label,
        number_text(_percent(one.over("clients").get("accuracy")), 1),
        *(number_text(over.get(name), 3) for name in SHOWN),
    ]


def _percent(value: Summary | None) -> Summary | None:
    if value is None:
        return None
    return value._replace(mean=100 * value.mean, deviation=None if value.deviation is None else 100 * value.deviation)


NEW = (
    "Hospitals that did not train; 70 % of their patients are for learning, 15 % choose round and learning rate for "
    "all of them together, and 15 % are the test. Accuracy in % is the mean over hospitals, AUC and log loss are over "
    "patients. Before: with the shared model and an average embedding. Local is left out: it has no model for them. "
    "Mean ± standard deviation over seeds. Lines with * need the patients of the training hospitals in one place."
)


def new_numbers(numbers: Numbers) -> dict[int, Mapping[str, Any]]:
    return {seed: values["new"] for seed, values in numbers.items() if "new" in values}


def new_lines(methods: Mapping[str, tuple[Entry, Numbers]]) -> Lines:
    """A line for each method that has something for new hospitals, then the yardsticks."""
    lines: list[list[str]] = []
    yardsticks: dict[int, Mapping[str, Any]] = {}
    for entry, numbers in methods.values():
        new = new_numbers(numbers)
        yardsticks |= {seed: values["yardsticks"] for seed, values in new.items()}
        if new and entry.cell.method != "local":
            scores = [values["after"] for values in new.values()]
            before = _over(values["before"]["log_loss"] for values in new.values())
            lines.append([entry.label, *_score_cells(scores), "" if entry.cell.method == FEDAVG else before])
    for name, needs_all in YARDSTICKS.items() if lines else ():
        label = name + (NEEDS_ALL if needs_all else "")
        lines.append([label, *_score_cells([values[name] for values in yardsticks.values()]), ""])
    return [["new hospitals", "accuracy", "AUC", "log loss", "log loss before"], *lines] if lines else []


def _score_cells(scores: Sequence[Mapping[str, Any]]) -> list[str]:
    accuracies = number_text(drawing.over_seeds(100 * one["accuracy"] for one in scores), 1)
    return [accuracies, *(_over(one[name] for one in scores) for name in ("auc", "log_loss"))]


def _over(values: Iterable[float | None]) -> str:
    return number_text(summarize(value for value in values if value is not None), 3)


def new_sentence(methods: Mapping[str, tuple[Entry, Numbers]], recommended: str | None) -> str:
    """What new hospitals get of the recommended method, or else of the one whose embeddings are shown."""
    joining = {method: found for method, found in methods.items() if method not in ("local", FEDAVG)}
    if not joining:
        return ""
    entry, numbers = joining.get(recommended or "", next(iter(joining.values())))
    new = list(new_numbers(numbers).values())
    means = {name: mean(values["yardsticks"][name]["log_loss"] for values in new) for name in YARDSTICKS}
    _, alone, _, intercept = means.values()
    before, after = (mean(values[when]["log_loss"] for values in new) for when in ("before", "after"))
    return (
        f"{new[0]['hospitals']} new hospitals with few patients join with {entry.label}: learning what is personal "
        f"brings their log loss from {before:.3f} to {after:.3f}. A logistic regression of each alone has {alone:.3f}, "
        f"and a pooled one with an own intercept {intercept:.3f}."
    )


def map_sentence(numbers: Numbers) -> str:
    return (
        f"The intercepts that {display_name(MAPPED)} generates go with the hospitals' outcome rates: their rank "
        f"correlation is {mean(map(rank_correlation, numbers.values())):.2f}."
    )


def rank_correlation(values: Mapping[str, Any]) -> float:
    """Between the generated intercepts of the hospitals that trained and their outcome rates."""
    from scipy.stats import rankdata

    both = [rankdata(values["map"][name]) for name in ("intercept", "rate")]
    if any(numpy.ptp(ranks) == 0 for ranks in both):
        return 0.0  # nothing was generated yet
    return float(numpy.corrcoef(*both)[0, 1])


def map_picture(numbers: Numbers) -> Any:
    """Every hospital of one seed: its generated intercept and its outcome rate."""
    seed, values = next(iter(numbers.items()))
    correlation, event = rank_correlation(values), values["event"]
    verb = "follow" if correlation > CLEAR else "hardly follow"
    title = f"The intercepts of embeddings {verb} the hospitals' outcome rates"
    figure, axes = drawing.titled(7.6, 4.8, title)
    middle = mean(values["map"]["intercept"])
    groups = [("trained", values["map"], "o", drawing.COLORS[0], 46)]
    if "new" in values["map"]:
        groups.insert(0, ("joined later", values["map"]["new"], "D", "#B0B0B0", 24))
    for name, group, marker, color, area in groups:
        x, y = numpy.array(group["intercept"]) - middle, 100 * numpy.array(group["rate"])
        label = f"{len(x)} hospitals that {name}"
        axes.scatter(x, y, s=area, marker=marker, color=color, edgecolors="white", linewidths=0.6, label=label)
    heading = f"rank correlation of those that trained: {correlation:.2f}; one seed ({seed})"
    drawing.finish(
        axes, "generated intercept, log odds from the mean", f"patients in training data\n{event}, in %", heading
    )
    return figure


CLEAR = 0.5  # a rank correlation
LEAST_IN_BIN = 15  # patients


def calibration_picture(
    computed: Mapping[Column, Mapping[str, tuple[Entry, Numbers]]], judged: Mapping[Column, Verdict]
) -> Any:
    """Predicted against observed risk: the recommended method, FedAvg and the hospitals' own base rates."""
    shown = {column: _calibrated(methods, judged.get(column)) for column, methods in computed.items()}
    gaps = [gap(next(iter(lines.values()))[0]) for lines in shown.values()]
    title = f"Predicted risks are at most {max(gaps):.0f} points off, on average over patients"
    figure, all_axes = drawing.titled(4.9 * len(shown), 5.6, title, len(shown), sharey=True, squeeze=False)
    for axes, (column, lines) in zip(all_axes[0], shown.items(), strict=True):
        axes.plot([0, 100], [0, 100], color=drawing.PAPER, linewidth=0.9, linestyle=":")
        for label, (summed, color, marker) in lines.items():
            patients, predicted, observed = (summed[name] for name in ("patients", "predicted", "observed"))
            is_shown = patients >= LEAST_IN_BIN
            count = patients[is_shown]
            x, y = 100 * predicted[is_shown] / count, 100 * observed[is_shown] / count
            axes.plot(x, y, color=color, linewidth=1.4, alpha=0.8)
            area = 14 + 220 * count / max(1, patients.sum())
            axes.scatter(x, y, s=area, color=color, marker=marker, label=f"{label}: {gap(summed):.1f} points off")
        event = next(iter(next(iter(computed[column].values()))[1].values()))["event"]
        axes.set(xlim=(0, 100), ylim=(0, 100))
        drawing.finish(axes, f"predicted risk: {event}, in %", "", name_of(column), legend=False)
        axes.legend(frameon=False, fontsize=8.5, loc="upper left")
    all_axes[0, 0].set_ylabel("observed, in %")
    seeds = max(len(numbers) for methods in computed.values() for _, numbers in methods.values())
    figure.supxlabel(
        f"Ten bins of predicted risk over the test patients of {counted(seeds, 'seed')} together; larger marks are "
        f"more patients, bins with fewer than {LEAST_IN_BIN} are left out.",
        x=0.012,
        ha="left",
        fontsize=8.5,
    )
    return figure


Summed = dict[str, NDArray[numpy.float64]]


def _calibrated(
    methods: Mapping[str, tuple[Entry, Numbers]], verdict: Verdict | None
) -> dict[str, tuple[Summed, str, str]]:
    """The bins, color and marker of what is drawn, by its label; the recommended method first."""
    recommended = None if verdict is None else verdict.recommended
    first = recommended if recommended is not None and recommended in methods else next(iter(methods))
    lines = {}
    for number, method in enumerate(dict.fromkeys(name for name in (first, FEDAVG) if name in methods)):
        entry, numbers = methods[method]
        lines[entry.label] = summed(numbers, "model"), drawing.color_of(method, number), drawing.MARKERS[number]
    lines["own base rate"] = summed(methods[first][1], "base rate"), "#9A9A9A", "D"
    return lines


def summed(numbers: Numbers, name: str) -> Summed:
    """The bins of all seeds together."""
    parts = [values["calibration"][name] for values in numbers.values()]
    return {key: numpy.sum([part[key] for part in parts], axis=0).astype(numpy.float64) for key in parts[0]}


def gap(bins: Summed) -> float:
    """The mean distance between predicted and observed risk over patients, in points."""
    return float(100 * numpy.abs(bins["predicted"] - bins["observed"]).sum() / max(1.0, bins["patients"].sum()))


STUDY = Study(
    NAME,
    "Hospitals: 48 of the International Stroke Trial, and four with heart patients",
    cells(),
    draw,
    compute,
    on_made_up,
    cells_for=cells,
)
