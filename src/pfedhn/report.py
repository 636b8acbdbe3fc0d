"""Run directories and files of results -> tables, pictures and one HTML page, wherever and whenever they were made."""

import base64
import csv
import html
import io
import math
import statistics
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy
from numpy.typing import NDArray
from rich import box
from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from pfedhn.checkpoint import write_atomically
from pfedhn.experiment import (
    Cell,
    Experiment,
    cell_algorithm,
    dataset_name,
    distinctions,
    pretraining_cell,
)
from pfedhn.results import Runs, read
from pfedhn.run import RunError
from pfedhn.settings import SettingError, closest

FORMATS = ("md", "csv", "tex", "png", "html")
Average: TypeAlias = Literal["clients", "samples"]
Column: TypeAlias = tuple[str, int]
"""A data set and its number of clients."""

NAMES = {
    "local": "Local",
    "fedavg": "FedAvg",
    "per-fedavg": "Per-FedAvg",
    "fedper": "FedPer",
    "pfedme": "pFedMe",
    "lg-fedavg": "LG-FedAvg",
    "pfedhn": "pFedHN",
    "pfedhn-pc": "pFedHN-PC",
}
# Colours of Okabe and Ito, which colour-blind people can tell apart, and a dash of its own for each besides.
STYLES: dict[str, tuple[str, Any]] = {
    "pfedhn": ("#D55E00", "-"),
    "pfedhn-pc": ("#CC79A7", "-"),
    "local": ("#4D4D4D", (0, (1, 1.2))),
    "fedavg": ("#0072B2", (0, (5, 1.5))),
    "fedper": ("#009E73", (0, (3, 1, 1, 1))),
    "per-fedavg": ("#56B4E9", (0, (7, 2))),
    "pfedme": ("#E69F00", (0, (4, 1, 1, 1, 1, 1))),
    "lg-fedavg": ("#8C6D31", (0, (2, 1))),
}


class Summary(NamedTuple):
    """A number over seeds."""

    mean: float
    deviation: float | None  # of the sample (n - 1); None for a single seed
    num_seeds: int


def summarise(values: Iterable[float]) -> Summary | None:
    found = [float(value) for value in values]
    found = [value for value in found if not math.isnan(value)]  # a federation without test rows has no score
    if not found:
        return None
    has_deviation = len(found) > 1 and all(map(math.isfinite, found))  # a loss may be infinite
    return Summary(statistics.fmean(found), statistics.stdev(found) if has_deviation else None, len(found))


@dataclass(frozen=True)
class Entry:
    """A cell of an experiment and what its runs have found so far."""

    label: str  # the method, and what tells the cell from others of that method
    cell: Cell
    results: Mapping[int, Mapping[str, Any]]  # by seed, of finished runs
    metrics: Mapping[int, Sequence[Mapping[str, Any]]]  # by seed, of all that have begun
    num_planned: int
    published: tuple[float, float] | None = None
    steps_before: int = 0  # of the run it starts from
    title: str = ""  # of its experiment

    @property
    def column(self) -> Column:
        return dataset_name(self.cell), self.cell.clients

    @property
    def has_accuracy(self) -> bool:
        return all("client_mean" in result["test"] for result in self.results.values())

    def test(self, average: Average = "clients") -> Summary | None:
        """Test accuracy in per cent at the chosen round; of a task without accuracy, the loss."""
        if not self.has_accuracy:
            return summarise(result["test"]["loss"] for result in self.results.values())
        key = {"clients": "client_mean", "samples": "sample_mean"}[average]
        return summarise(100 * result["test"][key] for result in self.results.values())

    def total(self, key: str) -> Summary | None:
        """Steps, bytes or seconds of a run, with those of the run it starts from."""
        return summarise(result[key] + result.get("pretrain", {}).get(key, 0) for result in self.results.values())

    def difference(self, average: Average = "clients") -> float | None:
        ours = self.test(average)
        return None if ours is None or self.published is None else ours.mean - self.published[0]

    @property
    def seeds_text(self) -> str:
        done = len(self.results)
        if not self.num_planned:
            return ""
        return _seeds(done) if done == self.num_planned else f"{done} of {_seeds(self.num_planned)}"

    @property
    def hardware(self) -> str:
        return "; ".join(sorted({_place(result["environment"]) for result in self.results.values()}))

    def client_accuracy(self, seed: int) -> NDArray[numpy.float64]:
        """[clients]: each one's own test accuracy in per cent; NaN where it has no test rows."""
        test = self.results[seed]["test"]
        rows = numpy.array(test["client_rows"], dtype=numpy.float64)
        correct = numpy.array(test["clients"], dtype=numpy.float64)
        return 100 * numpy.divide(correct, rows, out=numpy.full_like(rows, numpy.nan), where=rows > 0)

    def curve(self, seed: int, average: Average = "clients") -> dict[int, float]:
        """Communication steps -> test accuracy in per cent (or loss); empty where there are no test rows."""
        key = {"clients": "client_mean", "samples": "sample_mean"}[average]
        values = {
            self.steps_before + record["step"]: 100 * record["test"][key]
            if key in record["test"]
            else record["test"]["loss"]
            for record in self.metrics[seed]
        }
        return {step: value for step, value in values.items() if not math.isnan(value)}


@dataclass(frozen=True)
class Report:
    """Entries that stand in one table: no two of one method, data set and number of clients."""

    title: str
    entries: list[Entry] = field(default_factory=list)

    @property
    def columns(self) -> list[Column]:
        return list(dict.fromkeys(entry.column for entry in self.entries))

    @property
    def labels(self) -> list[str]:
        return list(dict.fromkeys(entry.label for entry in self.entries))

    def entry(self, label: str, column: Column) -> Entry | None:
        return next((entry for entry in self.entries if (entry.label, entry.column) == (label, column)), None)

    def in_column(self, column: Column) -> list[Entry]:
        return [entry for entry in self.entries if entry.column == column]

    @property
    def has_published(self) -> bool:
        return any(entry.published is not None for entry in self.entries)

    @property
    def measure(self) -> str:
        return "test accuracy in %" if all(entry.has_accuracy for entry in self.entries) else "test loss"


def collect(paths: Iterable[Path]) -> list[Report]:
    """What lies in run directories and files of results. Those of one experiment are put together, seed by seed."""
    return to_reports(runs for path in paths for runs in read(path))


def to_reports(sources: Iterable[Runs]) -> list[Report]:
    found: list[tuple[Experiment, list[Runs]]] = []
    for runs in sources:
        same = next((parts for experiment, parts in found if experiment == runs.experiment), None)
        if same is None:
            found.append((runs.experiment, [runs]))
        else:
            same.append(runs)
    reports: list[Report] = []
    for experiment, parts in found:
        entries = _entries(experiment, parts)
        taken = {(entry.label, entry.column) for entry in entries}
        home = next((r for r in reports if not taken & {(e.label, e.column) for e in r.entries}), None)
        title = experiment.title or experiment.name
        if home is None:
            reports.append(Report(title, entries))
        else:
            number = reports.index(home)
            reports[number] = Report(f"{home.title}; {title}", [*home.entries, *entries])
    return reports


def asked_for(report: Report) -> Report:
    """Without the methods and columns of which nothing was asked for, as `--only` leaves many."""
    planned = [entry for entry in report.entries if entry.num_planned]
    labels, columns = {entry.label for entry in planned}, {entry.column for entry in planned}
    return replace(report, entries=[e for e in report.entries if e.label in labels and e.column in columns])


def _entries(experiment: Experiment, parts: Sequence[Runs]) -> list[Entry]:
    entries = []
    cells = _seeds_of_cells(experiment, {name for part in parts for name in part.planned})
    for cell, different, seeds in zip(experiment.cells, distinctions(experiment.cells), cells, strict=True):
        results: dict[int, Mapping[str, Any]] = {}
        metrics: dict[int, Sequence[Mapping[str, Any]]] = {}
        for seed, name in seeds.items():
            for part in parts:
                if name in part.results:
                    results.setdefault(seed, part.results[name])
                if name in part.metrics:
                    metrics.setdefault(seed, part.metrics[name])
        label = " ".join([cell.method, *(f"{name}={value}" for name, value in different.items())])
        published = experiment.published
        known = published.get(f"{cell.method}/{cell.dataset}/{cell.clients}") or published.get(
            f"{cell.method}/{cell.clients}"
        )
        before = pretraining_cell(experiment, cell).steps if cell.pretrain is not None else 0
        title = experiment.title or experiment.name
        entries.append(Entry(label, cell, dict(sorted(results.items())), metrics, len(seeds), known, before, title))
    return entries


def _seeds_of_cells(experiment: Experiment, planned: set[str]) -> list[dict[int, str]]:
    """For each cell, the planned seeds and the names of their runs; seeds may have been given on the command line."""
    seeds = sorted({int(name.rpartition("-seed")[2]) for name in planned})
    runs = Experiment(experiment.name, experiment.cells, tuple(seeds)).runs()
    return [
        {seed: name for name, (owner, seed) in runs.items() if owner is cell and name in planned}
        for cell in experiment.cells
    ]


def number_text(value: Summary | None, digits: int = 2) -> str:
    if value is None:
        return ""
    spread = "" if value.deviation is None else f" ± {value.deviation:.{digits}f}"
    return f"{value.mean:.{digits}f}{spread}"


def accuracy_text(entry: Entry, average: Average = "clients") -> str:
    """Mean and deviation, and how many seeds stand behind it where that is not what was planned, or only one."""
    value = entry.test(average)
    if value is None:
        return ""
    note = f" ({entry.seeds_text})" if value.num_seeds == 1 or value.num_seeds != entry.num_planned else ""
    return number_text(value) + note


def bytes_text(value: Summary | None) -> str:
    if value is None:
        return ""
    size, units = value.mean, ["B", "kB", "MB", "GB", "TB"]
    while size >= 999.5 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{size:.0f} {units[0]}" if size >= 99.5 or units[0] == "B" else f"{size:.1f} {units[0]}"


def seconds_text(value: Summary | None) -> str:
    if value is None:
        return ""
    seconds = value.mean
    if seconds < 99.5:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02d} min"


def steps_text(entry: Entry) -> str:
    """A run that starts from another counts the steps of both."""
    own = summarise(result["steps"] for result in entry.results.values())
    if own is None:
        return ""
    return f"{entry.steps_before:,} + {own.mean:,.0f}" if entry.steps_before else f"{own.mean:,.0f}"


def _place(environment: Mapping[str, Any]) -> str:
    """The device and what else of it decides the numbers: of a processor the threads, of a GPU how it multiplies."""
    device = str(environment["device"])
    if not device.startswith("cuda"):
        return f"{device}, {_count(environment['threads'], 'thread')}"
    kind = ", deterministic" if environment.get("deterministic") else ""
    return f"{device.removeprefix('cuda: ')}, {environment.get('precision', 'tf32')}{kind}"


def column_text(column: Column) -> str:
    return f"{column[0]}, {column[1]} clients"


def _seeds(number: int) -> str:
    return _count(number, "seed")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def grid(report: Report, average: Average = "clients", columns: Sequence[Column] | None = None) -> list[list[str]]:
    """Rows of methods, columns of (data set, clients); under ours, where there is one, the published number.

    columns: only these, and the methods that have a cell there.
    """
    columns = report.columns if columns is None else columns
    lines = [["method", *map(column_text, columns)]]
    for label in report.labels:
        entries = [report.entry(label, column) for column in columns]
        if any(entries):
            texts = ["" if entry is None else "\n".join(_with_published(entry, average)) for entry in entries]
            lines.append([label, *texts])
    return lines


def _with_published(entry: Entry, average: Average) -> list[str]:
    lines = [accuracy_text(entry, average)]
    if entry.published is not None:
        mean, deviation = entry.published
        difference = entry.difference(average)
        lines.append(f"paper {mean:.2f} ± {deviation:.2f}")
        lines.append("" if difference is None else f"{difference:+.2f}")
    return lines


def details(report: Report, average: Average = "clients", column: Column | None = None) -> list[list[str]]:
    """A row per cell: both averages, what was published, how many seeds, and what it cost.

    column: only the cells of one, beside a grid that says what was published.
    """
    loss = report.measure == "test loss"
    extra: list[tuple[str, Callable[[Entry], str]]] = []
    if column is None and len({dataset for dataset, _ in report.columns}) > 1:
        extra.append(("data set", lambda entry: entry.column[0]))
    if column is None and len({clients for _, clients in report.columns}) > 1:
        extra.append(("clients", lambda entry: str(entry.column[1])))
    numbers: list[tuple[str, Callable[[Entry], str]]] = [
        ("over clients", lambda entry: number_text(entry.test("clients"))),
        ("over samples", lambda entry: number_text(entry.test("samples"))),
    ]
    if loss:
        numbers = [("test loss", lambda entry: number_text(entry.test(), 4))]
    if report.has_published and len(report.columns) == 1 and column is None:  # else the grid has them
        numbers += [
            ("paper", lambda entry: "" if entry.published is None else "{:.2f} ± {:.2f}".format(*entry.published)),
            ("difference", lambda entry: _signed(entry.difference(average))),
        ]
    fields: list[tuple[str, Callable[[Entry], str]]] = [
        ("method", lambda entry: entry.label),
        *extra,
        *numbers,
        ("seeds", lambda entry: entry.seeds_text.removesuffix(" seeds").removesuffix(" seed")),
        ("steps", steps_text),
        ("up", lambda entry: bytes_text(entry.total("bytes_up"))),
        ("down", lambda entry: bytes_text(entry.total("bytes_down"))),
        ("time", lambda entry: seconds_text(entry.total("seconds"))),
    ]
    # Beside a grid, which has a place for every cell, only what was asked for.
    entries = [entry for entry in report.entries if entry.num_planned or len(report.columns) == 1]
    if column is not None:
        entries = [entry for entry in entries if entry.column == column]
    return [[name for name, _ in fields], *([show(entry) for _, show in fields] for entry in entries)]


def _signed(value: float | None) -> str:
    return "" if value is None else f"{value:+.2f}"


def caption(report: Report, average: Average | None = None) -> str:
    """What the numbers are, and where they were made."""
    over = f", averaged over {average}" if average and report.measure != "test loss" else ""
    text = (
        f"{report.measure.capitalize()}{over}, at the round chosen on validation; mean ± sample deviation over seeds."
    )
    singles = [entry.label for entry in report.entries if len(entry.results) == 1]
    if singles:
        text += " A number without ± comes from a single seed."
    places = sorted({entry.hardware for entry in report.entries if entry.hardware})
    return text + (f" Hardware: {'; '.join(places)}." if places else " No run is finished yet.")


def to_terminal(report: Report, average: Average = "clients") -> Group:
    """Tables for a terminal: the grid where there is much to compare, then the details of every column with a run."""
    parts: list[Any] = []
    if len(report.columns) > 1 or report.has_published:
        title: str | None = report.title
        for dataset in dict.fromkeys(dataset for dataset, _ in report.columns):  # more would not fit side by side
            columns = [column for column in report.columns if column[0] == dataset]
            parts.append(_rich_table(grid(report, average, columns), title))
            title = None
        parts.append(Text(caption(report, average), style="dim"))
        for column in report.columns:
            if any(entry.metrics for entry in report.in_column(column)):
                parts += ["", _rich_table(details(report, average, column), column_text(column))]
    else:
        title = f"{report.title} ({column_text(report.columns[0])})" if report.columns else report.title
        parts.append(_rich_table(details(report, average), title))
        parts.append(Text(caption(report), style="dim"))
    return Group(*parts)


def _rich_table(lines: Sequence[Sequence[str]], title: str | None) -> Table:
    heading = None if title is None else escape(title)
    table = Table(title=heading, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for number, name in enumerate(lines[0]):
        # Where a terminal is narrow, steps may break once ("5,000 + 1,000"), and a method before its settings
        # ("pfedhn lr=0.01"): all else is read worse in two parts.
        is_whole = name in ("up", "down", "time", "seeds", "over clients", "over samples")
        is_whole |= number == 0 and not any(" " in line[0] for line in lines)
        table.add_column(escape(name), justify="left" if number == 0 else "right", no_wrap=is_whole, overflow="fold")
    for line in lines[1:]:
        table.add_row(*(escape(cell).replace(" + ", " +\N{NO-BREAK SPACE}") for cell in line))
    return table


def to_markdown(reports: Sequence[Report], average: Average = "clients") -> str:
    parts = []
    for report in reports:
        parts.append(f"## {report.title}")
        if len(report.columns) > 1:
            parts += [_markdown_table(grid(report, average)), caption(report, average)]
        parts += [_markdown_table(details(report, average)), caption(report)]
        if commands := _commands(report):
            parts += ["Each run again:", "```sh\n" + "\n".join(commands) + "\n```"]
    return "\n\n".join(parts) + "\n"


def _markdown_table(lines: Sequence[Sequence[str]]) -> str:
    def row(cells: Iterable[str]) -> str:
        return "| " + " | ".join(cell.replace("|", r"\|").replace("\n", "<br>") for cell in cells) + " |"

    rule = "|" + "|".join("---" if number == 0 else "---:" for number in range(len(lines[0]))) + "|"
    return "\n".join([row(lines[0]), rule, *map(row, lines[1:])])


def _commands(report: Report) -> list[str]:
    return [result["command"] for entry in report.entries for result in entry.results.values() if result["command"]]


def to_csv(reports: Sequence[Report]) -> str:
    """A line per cell, all numbers unrounded."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(
        ["method", "dataset", "clients", "seeds", "planned_seeds"]
        + [f"{name}_{part}" for name in ("over_clients", "over_samples", "loss") for part in ("mean", "deviation")]
        + ["published_mean", "published_deviation", "difference_over_clients", "difference_over_samples"]
        + ["steps", "bytes_up", "bytes_down", "seconds", "hardware"]
    )
    for entry in (entry for report in reports for entry in report.entries):
        averages: tuple[Average, ...] = ("clients", "samples")
        accuracies = [entry.test(average) if entry.has_accuracy else None for average in averages]
        loss = summarise(result["test"]["loss"] for result in entry.results.values())
        cells: list[Any] = [entry.label, *entry.column, len(entry.results), entry.num_planned]
        for value in (*accuracies, loss):
            cells += ["", ""] if value is None else [value.mean, "" if value.deviation is None else value.deviation]
        cells += [*(entry.published or ("", ""))]
        cells += [entry.difference(average) if entry.has_accuracy else None for average in averages]
        for key in ("steps", "bytes_up", "bytes_down", "seconds"):
            total = entry.total(key)
            cells.append(None if total is None else total.mean)
        writer.writerow([*cells, entry.hardware])
    return stream.getvalue()


def to_latex(reports: Sequence[Report], average: Average = "clients") -> str:
    """For each report a table of accuracies and one of what they cost; needs \\usepackage{booktabs}."""
    return "\n".join(make(report, average) for report in reports for make in (_latex_grid, _latex_details))


def _latex_grid(report: Report, average: Average) -> str:
    names = list(dict.fromkeys(dataset for dataset, _ in report.columns))
    spans = [[column for column in report.columns if column[0] == name] for name in names]
    columns = [column for span in spans for column in span]
    rows = [
        ["", *(rf"\multicolumn{{{len(span)}}}{{c}}{{{_latex(span[0][0])}}}" for span in spans)],
        ["Clients", *(str(clients) for _, clients in columns)],
    ]
    num_heading_rows = len(rows)
    for label in report.labels:
        entries = [report.entry(label, column) for column in columns]
        rows.append([_latex(display_name(label)), *(_latex_accuracy(entry, average) for entry in entries)])
        if any(entry is not None and entry.published for entry in entries):
            rows.append([r"\quad published", *map(_latex_published, entries)])
        if any(entry is not None and entry.difference(average) is not None for entry in entries):
            differences = [None if entry is None else entry.difference(average) for entry in entries]
            rows.append([r"\quad difference", *("" if d is None else f"${d:+.2f}$" for d in differences)])
    heading = f"{_latex(report.title)}. {_latex(caption(report, average))}"
    return _latex_table(heading, "c" * len(columns), rows, num_heading_rows)


def _latex_details(report: Report, average: Average) -> str:
    first, *lines = details(report, average)
    lines = [[display_name(line[0]), *line[1:]] for line in lines]
    rows = [[_latex(cell) for cell in line] for line in [first, *lines]]
    heading = f"{_latex(report.title)}: both averages, and the cost of a run. {_latex(caption(report))}"
    return _latex_table(heading, "r" * (len(first) - 1), rows, 1)


def _latex_table(heading: str, columns: str, rows: Sequence[Sequence[str]], num_heading_rows: int) -> str:
    lines = [" & ".join(row) + r" \\" for row in rows]
    lines.insert(num_heading_rows, r"\midrule")
    return "\n".join(
        [
            *(r"\begin{table}", r"\centering", rf"\caption{{{heading}}}", rf"\begin{{tabular}}{{l{columns}}}"),
            *(r"\toprule", *lines, r"\bottomrule", r"\end{tabular}", r"\end{table}", ""),
        ]
    )


def _latex_accuracy(entry: Entry | None, average: Average) -> str:
    """The number of seeds beside it where it is not what was planned, as in every other format."""
    if entry is None or (value := entry.test(average)) is None:
        return ""
    return _latex_number(value) + accuracy_text(entry, average).removeprefix(number_text(value))


def _latex_published(entry: Entry | None) -> str:
    return "" if entry is None or entry.published is None else "${:.2f} \\pm {:.2f}$".format(*entry.published)


def _latex_number(value: Summary) -> str:
    spread = "" if value.deviation is None else rf" \pm {value.deviation:.2f}"
    return f"${value.mean:.2f}{spread}$"


def _latex(text: str) -> str:
    special = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$"}
    return "".join(special.get(letter, "\\" + letter if letter in "&%$#_{}" else letter) for letter in text)


def display_name(label: str) -> str:
    method, _, rest = label.partition(" ")
    return f"{NAMES.get(method, method)} {rest}".strip()


class Comparison(NamedTuple):
    """How many clients do better, the same and worse than with another method; all seeds together."""

    better: int
    same: int
    worse: int
    num_seeds: int

    @property
    def total(self) -> int:
        return self.better + self.same + self.worse


def compare(entry: Entry, other: Entry) -> Comparison | None:
    """Client by client on the same rows; seeds in which the two had different splits are left out."""
    better = same = worse = num_seeds = 0
    for seed in entry.results.keys() & other.results.keys():
        mine, theirs = entry.results[seed], other.results[seed]
        if mine["partition_sha256"] != theirs["partition_sha256"]:
            continue
        num_seeds += 1
        difference = entry.client_accuracy(seed) - other.client_accuracy(seed)
        better += int((difference > 0).sum())
        same += int((difference == 0).sum())
        worse += int((difference < 0).sum())
    return Comparison(better, same, worse, num_seeds) if num_seeds else None


def sentence(report: Report) -> str:
    """What a comparison with a hypernetwork shows in the first column; empty where its numbers cannot say it."""
    column = report.columns[0]
    ours, alone, shared = (report.entry(method, column) for method in ("pfedhn", "local", "fedavg"))
    if ours is None or alone is None or not (ours.results and alone.results and ours.has_accuracy):
        return ""
    numbers = [(ours, "pFedHN"), (alone, "a model trained alone")]
    if shared is not None and shared.results:
        numbers.append((shared, "FedAvg's one shared model"))
    parts = []
    for entry, whose in numbers:
        value = entry.test()
        assert value is not None
        parts.append(f"{value.mean:.1f} % with {whose}")
    listed = f"{', '.join(parts[:-1])} and {parts[-1]}"
    where = f"With {column_text(column)}, on average" if len(report.columns) > 1 else "On average"
    text = f"{where}, a client's own test accuracy is {listed}"
    counts = compare(ours, alone)
    if counts is not None:
        whose = f" ({counts.num_seeds} seeds together)" * (counts.num_seeds > 1)
        text += (
            f"; of {counts.total} clients{whose}, {counts.better} do better with pFedHN than alone, "
            f"{counts.same} the same and {counts.worse} worse"
        )
    return text + "."


def _figure(width: float, height: float) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("drawing needs matplotlib: pip install 'pfedhn[report]'") from error
    return Figure(figsize=(width, height), layout="constrained")


def _colour(entry: Entry, entries: Sequence[Entry]) -> tuple[str, Any]:
    """The method's own; cells of one method, and methods we do not know, go through the others."""
    alike = [other.label for other in entries if other.cell.method == entry.cell.method]
    if entry.cell.method in STYLES and alike[0] == entry.label:
        return STYLES[entry.cell.method]
    free = [style for method, style in STYLES.items() if method not in {other.cell.method for other in entries}]
    styles = free or list(STYLES.values())
    return styles[[other.label for other in entries].index(entry.label) % len(styles)]


def plot_curves(axes: Any, entries: Sequence[Entry], average: Average = "clients") -> None:
    """Accuracy against communication steps: the mean of the seeds, and a band from the lowest to the highest."""
    drawn: list[tuple[Entry, str, float, float]] = []
    for entry in entries:
        curves = [curve for seed in entry.metrics if (curve := entry.curve(seed, average))]
        if not curves:
            continue
        steps = sorted(set.intersection(*(set(curve) for curve in curves)))
        values = numpy.array([[curve[step] for step in steps] for curve in curves])
        colour, dash = _colour(entry, entries)
        if len(curves) > 1:
            axes.fill_between(steps, values.min(0), values.max(0), color=colour, alpha=0.15, linewidth=0)
        axes.plot(steps, values.mean(0), color=colour, linestyle=dash, linewidth=1.8)
        end, last = float(steps[-1]), float(values.mean(0)[-1])
        if not cell_algorithm(entry.cell).communicates:  # however long the others talk, it stays there
            axes.axhline(last, color=colour, linestyle=dash, linewidth=0.9)
            end = 0.0
        drawn.append((entry, colour, end, last))
    accuracy = all(entry.has_accuracy for entry in entries)
    axes.set(xlabel="communication steps (one client taking part once)")
    axes.set_ylabel(f"test accuracy in %, averaged over {average}" if accuracy else "test loss")
    _tidy(axes)
    if not drawn:
        return
    axes.set_xlim(left=0)
    if accuracy:
        _show_upper_part(axes, entries, average)
    _label_ends(axes, drawn)


MANY_EVALUATIONS = 20


def _show_upper_part(axes: Any, entries: Sequence[Entry], average: Average) -> None:
    """Every run starts near chance; leave that to the first steps and give the height to where they differ."""
    curves = [entry.curve(seed, average) for entry in entries for seed in entry.metrics]
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
    for (entry, colour, step, value), place in zip(ordered, places, strict=True):
        axes.annotate(
            display_name(entry.label),
            xy=(step or right, value),  # a line across the picture ends with it
            xytext=(right * 1.025, place),
            color=colour,
            fontsize=9.5,
            fontweight="bold",
            va="center",
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": colour,
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
        colour, _ = _colour(entry, entries)
        sideways, up = _piles(values)
        axes.scatter(place + sideways, values + up, s=9, color=colour, alpha=0.6, linewidths=0)
        mean = entry.test()
        assert mean is not None
        axes.plot([place - 0.42, place + 0.42], [mean.mean] * 2, color="black", linewidth=1.8, zorder=3)
        labels.append("\n".join([display_name(entry.label), f"{mean.mean:.1f} %", *_counts_text(entry, against)]))
    axes.set_xticks(range(len(labels)), labels, fontsize=9)
    axes.set_xlim(-0.55, len(labels) - 0.45)
    axes.set_ylabel("a client's own test accuracy in %")
    axes.set_yticks(range(0, 101, 10))
    axes.set_ylim(10 * math.floor(lowest / 10) - 2, 107)
    _tidy(axes)
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


def _tidy(axes: Any) -> None:
    axes.grid(color="#E6E6E6", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(length=0, labelsize=9)


def draw_curves(report: Report, column: Column, average: Average = "clients", dpi: int = 150) -> bytes | None:
    """None where no run has begun."""
    if not any(entry.curve(seed) for entry in report.in_column(column) for seed in entry.metrics):
        return None
    figure = _figure(8.0, 4.8)
    axes = figure.subplots()
    plot_curves(axes, report.in_column(column), average)
    titles = dict.fromkeys(entry.title for entry in report.in_column(column))
    axes.set_title("\n".join([*titles, column_text(column)]), loc="left", fontsize=11)
    return _png(figure, dpi)


def draw_clients(report: Report, column: Column) -> bytes | None:
    """None where no run is finished, or none has accuracies."""
    entries = [entry for entry in report.in_column(column) if entry.test() is not None and entry.has_accuracy]
    if not entries:
        return None
    figure = _figure(max(5.0, 1.5 * len(entries) + 1), 5.0)
    axes = figure.subplots()
    alone = report.entry("local", column)
    plot_clients(axes, entries, alone if alone in entries else None)
    axes.set_title(f"{column_text(column)}: every client's own test accuracy", loc="left", fontsize=11)
    return _png(figure)


def draw_demo(report: Report) -> bytes:
    """The demo's picture: how the methods learn, and what each client gets in the end."""
    column = report.columns[0]
    entries = report.in_column(column)
    figure = _figure(13.0, 6.4)
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
    return _png(figure)


def _png(figure: Any, dpi: int = 150) -> bytes:
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=dpi)
    return stream.getvalue()


def to_html(reports: Sequence[Report], pictures: Mapping[str, bytes], average: Average = "clients") -> str:
    """One page that holds everything, pictures too."""
    parts = []
    for report in reports:
        parts.append(f"<h1>{html.escape(report.title)}</h1>")
        if said := sentence(report) if report.columns else "":
            parts.append(f"<p class=said>{html.escape(said)}</p>")
        if len(report.columns) > 1:
            parts += [_html_table(grid(report, average)), f"<p>{html.escape(caption(report, average))}</p>"]
        parts += [_html_table(details(report, average)), f"<p>{html.escape(caption(report))}</p>"]
    for name, content in pictures.items():
        data = base64.b64encode(content).decode()
        parts.append(f'<img alt="{html.escape(name)}" src="data:image/png;base64,{data}">')
    commands = [command for report in reports for command in _commands(report)]
    if commands:
        listed = html.escape("\n".join(commands))
        parts.append(f"<details><summary>The command for each run</summary><pre>{listed}</pre></details>")
    return HTML_PAGE.format(title=html.escape("; ".join(report.title for report in reports)), body="\n".join(parts))


HTML_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
body {{ font: 16px/1.45 system-ui, sans-serif; max-width: 64rem; margin: 2rem auto; padding: 0 1rem; color: #222 }}
h1 {{ font-size: 1.4rem }}
table {{ border-collapse: collapse; margin: 1rem 0 }}
th, td {{ padding: .35rem .8rem; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap }}
th:first-child, td:first-child {{ text-align: left }}
thead th {{ border-bottom: 2px solid #222 }}
img {{ max-width: 100%; display: block; margin: 1.5rem 0 }}
pre {{ overflow-x: auto; background: #f6f6f6; padding: .8rem }}
.said {{ font-size: 1.1rem }}
.tables {{ overflow-x: auto }}
</style>
{body}
</html>
"""


def _html_table(lines: Sequence[Sequence[str]]) -> str:
    def row(cells: Iterable[str], tag: str) -> str:
        inner = "".join(f"<{tag}>{html.escape(cell).replace(chr(10), '<br>')}</{tag}>" for cell in cells)
        return f"<tr>{inner}</tr>"

    body = "\n".join(row(line, "td") for line in lines[1:])
    return f"<div class=tables><table><thead>{row(lines[0], 'th')}</thead><tbody>{body}</tbody></table></div>"


def pictures_of(reports: Sequence[Report], average: Average = "clients") -> dict[str, bytes]:
    """PNG images by file name: for each data set and number of clients, the curves and the clients."""
    drawn: dict[str, bytes] = {}
    for number, report in enumerate(reports):
        for column in report.columns:
            ending = "-".join([column[0], str(column[1]), *([str(number + 1)] if len(reports) > 1 else [])])
            curves, clients = draw_curves(report, column, average), draw_clients(report, column)
            if curves is not None:
                drawn[f"curves-{ending}.png"] = curves
            if clients is not None:
                drawn[f"clients-{ending}.png"] = clients
    return drawn


def check_formats(names: Iterable[str]) -> None:
    for name in names:
        if name not in FORMATS:
            raise SettingError(f"there is no format {name!r}; {closest(name, FORMATS)}")


def write(
    reports: Sequence[Report], out: Path, formats: Sequence[str] = FORMATS, average: Average = "clients"
) -> list[Path]:
    """Write the report in the formats asked for; returns the files."""
    check_formats(formats)
    if not reports:
        raise RunError("there is nothing to report; name a directory that `pfedhn run` made.")
    pictures = pictures_of(reports, average) if {"png", "html"} & set(formats) else {}
    files: dict[str, bytes] = {}
    if "md" in formats:
        files["report.md"] = to_markdown(reports, average).encode()
    if "csv" in formats:
        files["report.csv"] = to_csv(reports).encode()
    if "tex" in formats:
        files["report.tex"] = to_latex(reports, average).encode()
    if "png" in formats:
        files |= pictures
    if "html" in formats:
        files["report.html"] = to_html(reports, pictures, average).encode()
    out.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        write_atomically(out / name, content)
    return [out / name for name in files]
