"""The cells of experiments and what their runs found: the input of every table and figure."""

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import numpy
from numpy.typing import NDArray

from pfedhn.algorithms import ALGORITHMS
from pfedhn.experiments.spec import (
    Cell,
    Experiment,
    RunSpec,
    cell_names,
    dataset_name,
    distinctions,
    method_name,
    pretraining_cell,
)
from pfedhn.models import squared_error
from pfedhn.report.results import Runs, read
from pfedhn.storage.schema import Curve, Moment, Result, Yardstick
from pfedhn.system.environment import Environment
from pfedhn.system.reference import name_of

Value = TypeVar("Value")

Average: TypeAlias = Literal["clients", "samples"]

CostKind: TypeAlias = Literal["steps", "bytes_up", "bytes_down", "seconds"]

Column: TypeAlias = tuple[str, int]
"""A data set and its number of clients."""

SQUARED_ERROR = name_of(squared_error)

MEANS: dict[Average, str] = {"clients": "client_mean", "samples": "sample_mean"}


class Summary(NamedTuple):
    """A number over seeds."""

    mean: float
    deviation: float | None  # of the sample (n - 1); None for a single seed
    num_seeds: int


def summarize(values: Iterable[float]) -> Summary | None:
    found = [float(value) for value in values]
    found = [value for value in found if not math.isnan(value)]  # a federation without test examples has no score
    if not found:
        return None
    has_deviation = len(found) > 1 and all(map(math.isfinite, found))  # a loss may be infinite
    return Summary(statistics.fmean(found), statistics.stdev(found) if has_deviation else None, len(found))


@dataclass(frozen=True)
class Entry:
    """A cell of an experiment and what its runs have found so far."""

    label: str  # the method, and what tells the cell from others of that method
    cell: Cell
    results: Mapping[int, Result]  # by seed, of finished runs
    curves: Mapping[int, Curve]  # by seed, of all that have begun
    num_planned: int
    published: tuple[float, float] | None = None
    steps_before: int = 0  # of the run it starts from
    title: str = ""  # of its experiment
    histories: Mapping[int, Sequence[Moment]] = field(default_factory=dict)  # by seed, of runs in directories
    client_names: Sequence[str] | None = None
    is_squared: bool = False  # for a task without accuracy: whether the loss is the squared error
    running: frozenset[int] = frozenset()  # the seeds that a process is at work on
    diverged: frozenset[int] = frozenset()  # the seeds whose runs diverged

    @property
    def column(self) -> Column:
        return dataset_name(self.cell), self.cell.clients

    @property
    def has_begun(self) -> bool:
        return bool(self.results or self.curves)

    @property
    def has_accuracy(self) -> bool:
        if self.results:
            return all(result.test.has_accuracy for result in self.results.values())
        return all(curve.test.client_mean is not None for curve in self.curves.values())

    def scores(self, average: Average = "clients") -> dict[int, float]:
        """By seed, the test accuracy in percent at the chosen round; of a task without accuracy, the loss."""
        if not self.has_accuracy:
            return {seed: result.test.loss for seed, result in self.results.items()}
        return {seed: 100 * getattr(result.test, MEANS[average]) for seed, result in self.results.items()}

    def test(self, average: Average = "clients") -> Summary | None:
        """Summarize the scores over seeds."""
        return summarize(self.scores(average).values())

    def loss_over_clients(self) -> Summary | None:
        """Average the clients' own test losses, each client counting the same, of a task without accuracy."""
        found = [means[~numpy.isnan(means)] for means in map(self.client_scores, self.results)]
        return summarize(float(means.mean()) for means in found if len(means))

    def root(self) -> Summary | None:
        """The root of a regression's mean squared error over all test examples, in the unit of the labels."""
        return summarize(math.sqrt(result.test.loss) for result in self.results.values())

    def total(self, cost: CostKind) -> Summary | None:
        """Steps, bytes or seconds of a run, with those of the run it starts from."""
        both = [(result, result.pretrain) for result in self.results.values()]
        return summarize(sum(getattr(part, cost) for part in parts if part is not None) for parts in both)

    def difference(self, average: Average = "clients") -> float | None:
        ours = self.test(average)
        return None if ours is None or self.published is None else ours.mean - self.published[0]

    @property
    def seeds_text(self) -> str:
        if not self.num_planned:
            return ""
        done, planned = len(self.results), counted(self.num_planned, "seed")
        return planned if done == self.num_planned else f"{done} of {planned}"

    @property
    def diverged_text(self) -> str:
        return f"{len(self.diverged)} diverged" if self.diverged else ""

    @property
    def hardware(self) -> str:
        return "; ".join(sorted({_place(result.environment) for result in self.results.values()}))

    @property
    def sends_nothing(self) -> bool:
        """Whether its finished runs sent nothing over the wire."""
        return bool(self.results) and not any(result.bytes_up or result.bytes_down for result in self.results.values())

    @property
    def adapts(self) -> bool:
        """Whether clients of its finished runs fine-tuned at the chosen round, which no curve shows."""
        return bool(self.results) and all(result.unadapted is not None for result in self.results.values())

    def client_scores(self, seed: int) -> NDArray[numpy.float64]:
        """[clients]: each one's test accuracy in percent, or its loss; NaN without test examples."""
        return self.pooled_scores([seed])

    def pooled_scores(self, seeds: Iterable[int]) -> NDArray[numpy.float64]:
        """[clients]: each one's score over its test examples of several seeds together, such as those of all folds."""
        tests = [self.results[seed].test for seed in seeds]
        examples = numpy.array([test.client_examples for test in tests], dtype=numpy.float64).sum(0)
        means: NDArray[numpy.float64] = numpy.array([test.clients for test in tests]).sum(0) / numpy.where(
            examples > 0, examples, numpy.nan
        )
        return 100 * means if self.has_accuracy else means

    def all_client_scores(self) -> NDArray[numpy.float64]:
        """The scores of every client with each seed, one after the other; of folds, over all of them together."""
        if self.cell.folds is not None:
            return self.pooled_scores(self.results)
        return numpy.concatenate([self.client_scores(seed) for seed in self.results])

    client_accuracy = client_scores  # for methods that are known to have one

    def curve(self, seed: int, average: Average = "clients") -> dict[int, float]:
        """Communication steps -> test accuracy in percent (or loss); empty without test examples."""
        curve = self.curves[seed]
        means: Sequence[float] | None = getattr(curve.test, MEANS[average])
        values = [100 * mean for mean in means] if means is not None else curve.test.loss or ()
        pairs = zip(curve.step, values, strict=True)
        return {self.steps_before + step: value for step, value in pairs if not math.isnan(value)}

    def all_curves(self, average: Average = "clients") -> list[dict[int, float]]:
        """The curves of every seed with test examples."""
        return [curve for seed in self.curves if (curve := self.curve(seed, average))]


def on_common_steps(curves: Sequence[Mapping[int, float]]) -> tuple[list[int], NDArray[numpy.float64]]:
    """The steps that all curves have, and [curves, steps]: their values there."""
    steps = sorted(set.intersection(*map(set, curves)))
    return steps, numpy.array([[curve[step] for step in steps] for curve in curves])


@dataclass(frozen=True)
class Report:
    """Entries that stand in one table: no two of one method, data set and number of clients."""

    title: str
    entries: list[Entry] = field(default_factory=list)
    experiments: tuple[Experiment, ...] = ()  # that its entries are of
    yardsticks: Mapping[str, tuple[Yardstick, ...]] = field(default_factory=dict)  # by the split's checksum

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
    def has_accuracy(self) -> bool:
        return all(entry.has_accuracy for entry in self.entries)

    @property
    def has_folds(self) -> bool:
        return any(entry.cell.folds is not None for entry in self.entries)

    @property
    def is_squared(self) -> bool:
        """Whether its measure is the squared error, of which a root is easier to read."""
        return is_squared(self.entries)

    @property
    def measure(self) -> str:
        if self.has_accuracy:
            return "test accuracy in %"
        return "squared error on test examples" if self.is_squared else "test loss"


def collect(paths: Iterable[Path]) -> list[Report]:
    """What lies in run directories and files of results. Those of one experiment are put together, seed by seed."""
    return to_reports(runs for path in paths for runs in read(path))


def to_reports(sources: Iterable[Runs]) -> list[Report]:
    """Join the runs of one experiment, and put experiments into one table if no two of their entries share a place."""
    found: list[Runs] = []
    for runs in sources:
        same = next((n for n, other in enumerate(found) if other.experiment == runs.experiment), None)
        if same is None:
            found.append(runs)
        else:
            found[same] = found[same].joined(runs)
    reports: list[Report] = []
    for runs, entries in zip(found, _told_apart(list(map(_entries, found))), strict=True):
        taken = {(entry.label, entry.column) for entry in entries}
        homes = [n for n, r in enumerate(reports) if not taken & {(e.label, e.column) for e in r.entries}]
        number = homes[0] if homes else len(reports)
        before = reports[number] if homes else Report("")
        together = [*before.entries, *entries]
        title = "; ".join(dict.fromkeys(entry.title for entry in together))
        experiments, yardsticks = (*before.experiments, runs.experiment), {**before.yardsticks, **runs.yardsticks}
        reports[number : number + 1] = [Report(title, together, experiments, yardsticks)]
    return reports


def _told_apart(groups: Sequence[list[Entry]]) -> list[list[Entry]]:
    """Cells of several experiments that have one label and column get a label that says in what they differ."""
    places = Counter((entry.label, entry.column) for entries in groups for entry in entries)
    alike = [entry for entries in groups for entry in entries if places[entry.label, entry.column] > 1]
    labels = {
        id(entry): _label(entry.cell, different)
        for entry, different in zip(alike, distinctions([entry.cell for entry in alike]), strict=True)
    }
    return [[replace(e, label=labels.get(id(e), e.label)) for e in entries] for entries in groups]


def _label(cell: Cell, different: Mapping[str, Any]) -> str:
    return " ".join([method_name(cell), *(f"{name}={value}" for name, value in different.items())])


def asked_for(report: Report) -> Report:
    """Without the methods and columns of which nothing was asked for, as `--only` leaves many."""
    planned = [entry for entry in report.entries if entry.num_planned]
    labels, columns = {entry.label for entry in planned}, {entry.column for entry in planned}
    return replace(report, entries=[e for e in report.entries if e.label in labels and e.column in columns])


def _entries(runs: Runs) -> list[Entry]:
    experiment = runs.experiment
    planned: dict[str, list[RunSpec]] = {}
    for run in sorted(runs.planned, key=lambda run: run.seed):
        planned.setdefault(run.cell_name, []).append(run)
    differences = distinctions(experiment.cells)
    differing: dict[tuple[str, str, int], dict[str, None]] = {}  # by method, data set and number of clients
    for cell, different in zip(experiment.cells, differences, strict=True):
        differing.setdefault((method_name(cell), cell.dataset, cell.clients), {}).update(dict.fromkeys(different))
    entries = []
    for name, cell, different in zip(cell_names(experiment.cells), experiment.cells, differences, strict=True):
        mine, method = planned.get(name, []), method_name(cell)
        results = _by_seed(mine, runs.results)
        first = next(iter(results.values()), None)
        # What a cell leaves at its default, and others of its kind do not, is in its label too.
        values = different if first is None else {**first.settings, **different}
        shown = differing[method, cell.dataset, cell.clients]
        names = [*_by_seed(mine, runs.client_names).values()]
        names += [result.clients.names for result in results.values() if result.clients and result.clients.names]
        published = experiment.published
        losses = [loss for found in _by_seed(mine, runs.losses).values() for loss in found]
        entries.append(
            Entry(
                _label(cell, {key: values[key] for key in shown if values.get(key) is not None}),
                cell,
                results,
                _by_seed(mine, runs.curves),
                num_planned=len(mine),
                published=published.get(f"{method}/{cell.dataset}/{cell.clients}")
                or published.get(f"{method}/{cell.clients}"),
                steps_before=0 if cell.pretrain is None else pretraining_cell(experiment, cell).steps,
                title=experiment.title or experiment.name,
                histories=_by_seed(mine, runs.histories),
                client_names=next(iter(names), None),
                # A file of results does not name the loss. An experiment has no other than the squared error; a run by
                # `pfedhn.train`, which has no partition, may have any.
                is_squared=all(loss == SQUARED_ERROR for loss in losses) if losses else bool(cell.partition),
                running=frozenset(run.seed for run in mine if run.name in runs.running),
                diverged=frozenset(run.seed for run in mine if run.name in runs.diverged),
            )
        )
    return entries


def _by_seed(runs: Iterable[RunSpec], found: Mapping[str, Value]) -> dict[int, Value]:
    return {run.seed: found[run.name] for run in runs if run.name in found}


def is_squared(entries: Iterable[Entry]) -> bool:
    """Whether those that have begun are measured by the squared error."""
    begun = [entry for entry in entries if entry.has_begun]
    return not all(entry.has_accuracy for entry in begun) and all(entry.is_squared for entry in begun)


def _place(environment: Environment) -> str:
    """The device and what else decides the numbers: the threads of a processor, the precision of a GPU."""
    if not environment.device.startswith("cuda"):
        return f"{environment.device}, {counted(environment.threads, 'thread')}"
    kind = ", deterministic" if environment.deterministic else ""
    return f"{environment.device.removeprefix('cuda: ')}, {environment.precision}{kind}"


def loss_digits(entries: Iterable[Entry]) -> int:
    """How many digits a loss gets after the point: four for small ones, none from 1,000 on, alike for all."""
    found = [abs(value.mean) for entry in entries if not entry.has_accuracy and (value := entry.test()) is not None]
    largest = max((value for value in found if 0 < value < math.inf), default=1.0)
    return min(4, max(0, 3 - math.floor(math.log10(largest))))


def column_text(column: Column) -> str:
    return f"{column[0]}, {column[1]} clients"


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def display_name(label: str) -> str:
    """A label as the method's paper writes it; a method that is not registered keeps its name."""
    method, _, rest = label.partition(" ")
    known = ALGORITHMS.get(method)
    return f"{method if known is None else known.name} {rest}".strip()


class Comparison(NamedTuple):
    """How many clients do better, the same and worse than with another method; all seeds together.

    Clients of a cross-validation count once, with the test examples of all folds, and `num_seeds` is 1.
    """

    better: int
    same: int
    worse: int
    num_seeds: int


def compare(entry: Entry, other: Entry) -> Comparison | None:
    """Compare client by client over the seeds in which both have the same split."""
    seeds = seeds_alike(entry, other)
    if not seeds:
        return None
    groups = [seeds] if entry.cell.folds is not None else [[seed] for seed in seeds]
    differences = numpy.concatenate([entry.pooled_scores(group) - other.pooled_scores(group) for group in groups])
    better = differences > 0 if entry.has_accuracy else differences < 0
    worse = differences < 0 if entry.has_accuracy else differences > 0
    return Comparison(int(better.sum()), int((differences == 0).sum()), int(worse.sum()), len(groups))


def seeds_alike(entry: Entry, other: Entry) -> list[int]:
    """The seeds in which both have the same split."""
    splits = {seed: result.partition_sha256 for seed, result in other.results.items()}
    return [seed for seed, result in entry.results.items() if splits.get(seed) == result.partition_sha256]
