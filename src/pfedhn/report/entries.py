"""What is known of the cells of experiments: the rows of every table and figure."""

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
from pfedhn.files import write_atomically
from pfedhn.experiments.spec import Cell, Experiment, dataset_name, distinctions, pretraining_cell
from pfedhn.experiments.build import cell_algorithm
from pfedhn.report.results import Runs, read

from pfedhn.errors import closest


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


class Summary(NamedTuple):
    """A number over seeds."""

    mean: float
    deviation: float | None  # of the sample (n - 1); None for a single seed
    num_seeds: int


def summarize(values: Iterable[float]) -> Summary | None:
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
            return summarize(result["test"]["loss"] for result in self.results.values())
        key = {"clients": "client_mean", "samples": "sample_mean"}[average]
        return summarize(100 * result["test"][key] for result in self.results.values())

    def total(self, key: str) -> Summary | None:
        """Steps, bytes or seconds of a run, with those of the run it starts from."""
        return summarize(result[key] + result.get("pretrain", {}).get(key, 0) for result in self.results.values())

    def difference(self, average: Average = "clients") -> float | None:
        ours = self.test(average)
        return None if ours is None or self.published is None else ours.mean - self.published[0]

    @property
    def seeds_text(self) -> str:
        done = len(self.results)
        if not self.num_planned:
            return ""
        return seeds_count(done) if done == self.num_planned else f"{done} of {seeds_count(self.num_planned)}"

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


def _place(environment: Mapping[str, Any]) -> str:
    """The device and what else of it decides the numbers: of a processor the threads, of a GPU how it multiplies."""
    device = str(environment["device"])
    if not device.startswith("cuda"):
        return f"{device}, {counted(environment['threads'], 'thread')}"
    kind = ", deterministic" if environment.get("deterministic") else ""
    return f"{device.removeprefix('cuda: ')}, {environment.get('precision', 'tf32')}{kind}"


def column_text(column: Column) -> str:
    return f"{column[0]}, {column[1]} clients"


def seeds_count(number: int) -> str:
    return counted(number, "seed")


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


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
