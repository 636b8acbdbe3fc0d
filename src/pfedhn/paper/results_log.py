"""The results log: every cell of Table 1, its costs, its origin and its learning rates."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pfedhn.algorithms import ALGORITHMS
from pfedhn.errors import UserError
from pfedhn.paper.comparison import (
    NOT_RUN,
    OURS,
    compared,
    counts_text,
    finished_entries,
    grouped,
    places_of,
    seeds_text,
    value_text,
)
from pfedhn.paper.drawing import mean_curve
from pfedhn.paper.experiments import RATES_TAKEN_FROM
from pfedhn.paper.pages import filled, markdown, picture
from pfedhn.paper.results_figures import pictured
from pfedhn.paper.stored_tables import SEEDS
from pfedhn.report.entries import Entry, Report, Summary, counted, display_name
from pfedhn.report.pairs import PAIRS_ARE, pairs
from pfedhn.report.tables import bytes_text, number_text, seconds_text, steps_text

NUM_PAPER_RUNS = 3
FAR = 2.0  # points of accuracy: further from the paper than this, a baseline needs an explanation
NOT_TUNED_ALONE = {"pfedhn-shared": "rates of pFedHN+; fixed layers, embeddings and trunk by trials"}

# What a faithful re-implementation of pFedHN reached: accuracy over samples, deviation, number of runs.
REACHED: Mapping[tuple[str, str, int], tuple[float, float | None, int]] = {
    ("pfedhn", "cifar10", 10): (90.65, 0.30, 2),
    ("pfedhn-pc", "cifar10", 10): (92.15, 0.54, 2),
    ("pfedhn", "cifar10", 50): (89.59, 0.83, 3),
    ("pfedhn-pc", "cifar10", 50): (91.00, 0.65, 3),
    ("pfedhn", "cifar10", 100): (88.15, 0.57, 2),
    ("pfedhn-pc", "cifar10", 100): (88.85, 0.22, 2),
    ("pfedhn", "cifar100", 10): (63.0, 3.0, 6),
    ("pfedhn-pc", "cifar100", 10): (66.92, 0.48, 2),
    ("pfedhn", "cifar100", 50): (59.56, 0.17, 3),
    ("pfedhn-pc", "cifar100", 50): (58.45, 2.07, 3),
    ("pfedhn", "cifar100", 100): (53.04, 0.40, 2),
    ("pfedhn-pc", "cifar100", 100): (51.62, 1.00, 2),
    ("pfedhn", "omniglot", 50): (76.0, None, 1),
    ("pfedhn-pc", "omniglot", 50): (83.7, None, 1),
}


@dataclass(frozen=True)
class Bar:
    """What a cell must reach: two standard errors of the difference under the mean it is compared with."""

    mean: float
    num_runs: int
    is_measured: bool  # else the paper's own number
    deviation: float | None
    bound: float | None  # None while there is nothing to compare

    def is_passed(self, ours: Summary) -> bool:
        return self.bound is not None and ours.mean >= self.bound


def bar(entry: Entry) -> Bar | None:
    """r - 2 s sqrt(1/n + 1/n_r): s is the largest deviation that anybody saw. None without a number to compare with."""
    reached, paper = REACHED.get((entry.cell.method, *entry.column)), entry.published
    if reached is not None:
        mean, _, num_runs = reached
    elif paper is not None:
        mean, num_runs = paper[0], NUM_PAPER_RUNS
    else:
        return None
    ours = entry.test("samples")
    deviations = [ours and ours.deviation, reached and reached[1], paper and paper[1]]
    known = [value for value in deviations if value is not None]
    if ours is None or not known:
        return Bar(mean, num_runs, reached is not None, None, None)
    bound = mean - 2 * max(known) * math.sqrt(1 / ours.num_seeds + 1 / num_runs)
    return Bar(mean, num_runs, reached is not None, max(known), bound)


def page(every: Sequence[Report], notes: str, tuning: Sequence[Mapping[str, Any]]) -> str:
    """Write the log, which stands beside the stored results and not on the site."""
    reports = [compared(report) for report in every]
    tables = [part for report, whole in zip(reports, every, strict=True) for part in table_section(report, whole)]
    return filled(
        "log",
        pairs_are=PAIRS_ARE[0].upper() + PAIRS_ARE[1:],
        tables="\n\n".join(tables),
        bars=markdown(bars(every)),
        far=far_section(reports),
        notes=notes.strip(),
        tuning="\n\n".join(tuning_section(tuning)),
    )


def table_section(report: Report, whole: Report) -> list[str]:
    """What there is of a table: its grid, figures, costs, origins and paired differences."""
    parts = [f"## {report.title}", markdown(grid(report))]
    for (dataset, clients), name in pictured(report).items():
        parts.append(picture(name, f"{dataset}, {clients} clients: accuracy against communication", "../docs"))
    if not finished_entries([report]):
        return [*parts, "No run of this table is stored yet."]
    parts += [markdown(costs(report)), markdown(origins(report))]
    for place in places_of([whole]):
        if lines := pairs(whole, place.column, seeds=SEEDS):
            parts += [f"{place.name} clients, ranks and paired differences:", markdown(lines)]
    return parts


def grid(report: Report) -> list[list[str]]:
    """Methods by numbers of clients."""

    def cells(label: str) -> list[str]:
        entries = [report.entry(label, column) for column in report.columns]
        return ["" if entry is None else cell_text(entry) for entry in entries]

    return [["method", *(f"{clients} clients" for _, clients in report.columns)], *grouped(report.labels, cells)]


def cell_text(entry: Entry) -> str:
    ours, difference = entry.test(), entry.difference()
    lines = [entry.diverged_text or NOT_RUN]
    if ours is not None:
        lines = [f"**{number_text(ours)}** ({counts_text(ours, entry)})"]
    if entry.published is not None:
        lines.append("paper {:.2f} ± {:.2f}".format(*entry.published))
    if difference is not None:
        lines.append(f"{difference:+.2f}")
    return "<br>".join(lines)


def costs(report: Report) -> list[list[str]]:
    """Every finished cell: both averages and what it cost."""
    lines = [["method", "clients", "over clients", "over samples", "steps", "sent up", "sent down", "wall time"]]
    for entry in finished_entries([report]):
        scores = [number_text(entry.test("clients")), number_text(entry.test("samples"))]
        sent = [bytes_text(entry.total("bytes_up")), bytes_text(entry.total("bytes_down"))]
        first = [display_name(entry.label), str(entry.cell.clients)]
        lines.append([*first, *scores, steps_text(entry), *sent, seconds_text(entry.total("seconds"))])
    return lines


def origins(report: Report) -> list[list[str]]:
    """How the cells were made; those of a method that were made alike share a line."""
    numbers: dict[tuple[str, ...], list[str]] = {}
    for entry in finished_entries([report]):
        made = display_name(entry.label), rates_text(entry), entry.hardware, commits_text(entry)
        numbers.setdefault(made, []).append(str(entry.cell.clients))
    lines = [["method", "clients", "rates", "hardware", "commit"]]
    return lines + [[made[0], ", ".join(clients), *made[1:]] for made, clients in numbers.items()]


def rates_text(entry: Entry) -> str:
    known = ALGORITHMS[entry.cell.method]
    names = list(ALGORITHMS[known.rates_from].grid if known.rates_from else known.grid)
    settings = next(iter(entry.results.values())).settings
    values = {name: settings[name] for name in names if settings.get(name) is not None}
    listed = ", ".join(f"{name} {value_text(value)}" for name, value in values.items())
    if entry.cell.method in NOT_TUNED_ALONE:
        return f"{listed} ({NOT_TUNED_ALONE[entry.cell.method]})"
    if any(name in entry.cell.settings for name in names):
        source = RATES_TAKEN_FROM.get(f"table1-{entry.cell.dataset}")
        return f"{listed} (tuned)" if source is None else f"{listed} (tuned for {source})"
    return f"{listed} (the authors')" if entry.cell.method in OURS else f"{listed} (not tuned)"


def commits_text(entry: Entry) -> str:
    commits = {str(result.environment.commit) for result in entry.results.values()}
    return ", ".join(sorted(commit[:8] + ("+changes" if "+" in commit else "") for commit in commits))


def bars(reports: Sequence[Report]) -> list[list[str]]:
    lines = [["cell", "r", "of", "s", "bound", "ours, over samples", "reached"]]
    for entry in (entry for report in reports for entry in report.entries if entry.cell.method in OURS):
        found, ours = bar(entry), entry.test("samples")
        if found is None:
            continue
        dataset, clients = entry.column
        source = counted(found.num_runs, "run") + ("" if found.is_measured else " (paper)")
        line = [f"{display_name(entry.label)}, {dataset}, {clients} clients", f"{found.mean:.2f}", source]
        if ours is None or found.bound is None:
            line += [NOT_RUN] * 4
        else:
            line += [f"{found.deviation:.2f}", f"{found.bound:.2f}", f"{number_text(ours)} ({seeds_text(ours)})"]
            line.append("yes" if found.is_passed(ours) else "**no**")
        lines.append(line)
    return lines


def far_from_paper(reports: Sequence[Report]) -> list[Entry]:
    """Baselines whose mean is more than two points above or under the paper's."""
    baselines = [entry for entry in finished_entries(reports) if entry.cell.method not in OURS]
    return [entry for entry in baselines if abs(entry.difference() or 0) > FAR]


def far_section(reports: Sequence[Report]) -> str:
    if not finished_entries(reports):
        return "No baseline is stored yet."
    lines = [["method", "data set", "clients", "ours", "paper", "difference", "there after"]]
    for entry in far_from_paper(reports):
        dataset, clients = entry.column
        mean, deviation = entry.published or (math.nan, math.nan)
        line = [display_name(entry.label), dataset, str(clients), number_text(entry.test())]
        lines.append([*line, f"{mean:.2f} ± {deviation:.2f}", f"{entry.difference():+.2f}", steps_to(entry, mean)])
    if len(lines) == 1:
        return f"No baseline that was run differs from the paper by more than {FAR:g} points."
    about = f"""All cells that differ by more than {FAR:g} points; explanations follow the table. *There after* says
when the mean of our test curves first reaches the paper's number, in communication steps."""
    return f"{about}\n\n{markdown(lines)}"


def steps_to(entry: Entry, accuracy: float) -> str:
    """When the mean of an entry's curves first reaches an accuracy, of the steps there are."""
    curve = mean_curve(entry)
    reached = next((step for step, value in curve.items() if value >= accuracy), None)
    return "never" if reached is None else f"{reached:,} of {max(curve):,}"


def tuning_section(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Every point that was tried, from the files that `pfedhn tune` writes."""
    if not records:
        return ["No tuning is stored yet."]
    parts = []
    for record in records:
        heading = f"### {record['experiment']}"
        if heading not in parts:
            parts.append(heading)
        for method, found in record["methods"].items():
            names = list(found["points"][0]["rates"])
            stages = {
                stage: next(point[stage]["steps"] for point in found["points"] if point[stage])
                for stage in ("first", "finals")
                if any(point[stage] for point in found["points"])
            }
            lines = [[*names, *(f"{steps:,} steps" for steps in stages.values()), ""]]
            for point in found["points"]:
                rates = [value_text(point["rates"][name]) for name in names]
                lines.append([*rates, *(score_text(point[stage]) for stage in stages), "chosen" * point["chosen"]])
            seeds = ", ".join(map(str, found["seeds"]))
            parts.append(f"{display_name(method)}, validation accuracy over samples (seeds {seeds}):")
            parts.append(markdown(lines))
    return parts


def score_text(stage: Mapping[str, Any] | None) -> str:
    if stage is None:
        return ""
    return "diverged" if stage["score"] is None else f"{100 * stage['score']:.2f}"


def read_tuning(folder: Path) -> list[dict[str, Any]]:
    records = []
    for file in sorted(folder.glob("tuning-*.json"), key=lambda file: file.stem):
        try:
            record = json.loads(file.read_text())
            tuning_section([record])
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise UserError(f"{file} is no record of `pfedhn tune` ({type(error).__name__}: {error}).") from None
        records.append(record)
    return records
