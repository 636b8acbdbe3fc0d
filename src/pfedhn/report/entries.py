"""What is known of the cells of experiments: what every table and figure is made of."""

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy
from numpy.typing import NDArray

from pfedhn.algorithms import ALGORITHMS
from pfedhn.experiments.spec import Cell, Experiment, RunSpec, dataset_name, distinctions, method_name, pretraining_cell
from pfedhn.models import squared_error
from pfedhn.report.results import Runs, read
from pfedhn.storage.schema import Curve, Moment, Result
from pfedhn.system.environment import Environment
from pfedhn.system.reference import name_of

Average: TypeAlias = Literal["clients", "samples"]


Cost: TypeAlias = Literal["steps", "bytes_up", "bytes_down", "seconds"]

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
    is_squared: bool = False  # where there is no accuracy: whether the loss is the squared error
    running: frozenset[int] = frozenset()  # the seeds that a process is at work on
    diverged: frozenset[int] = frozenset()  # the seeds whose runs ended so

    @property
    def column(self) -> Column:
        return dataset_name(self.cell), self.cell.clients

    @property
    def has_accuracy(self) -> bool:
        if self.results:
            return all(result.test.has_accuracy for result in self.results.values())
        return all(curve.test.client_mean is not None for curve in self.curves.values())

    def test(self, average: Average = "clients") -> Summary | None:
        """Test accuracy in percent at the chosen round; of a task without accuracy, the loss."""
        if not self.has_accuracy:
            return summarize(result.test.loss for result in self.results.values())
        return summarize(100 * getattr(result.test, MEANS[average]) for result in self.results.values())

    def loss_over_clients(self) -> Summary | None:
        """The mean of the clients' own test losses, each client counting the same, of a task without accuracy."""
        found = [self._client_means(seed) for seed in self.results]
        return summarize(float(means[~numpy.isnan(means)].mean()) for means in found if not numpy.isnan(means).all())

    def root(self) -> Summary | None:
        """The root of a regression's mean squared error over all test examples, in the unit of the labels."""
        return summarize(math.sqrt(result.test.loss) for result in self.results.values())

    @property
    def num_test_examples(self) -> int:
        """How many test examples all seeds have together."""
        return sum(result.test.examples for result in self.results.values())

    def total(self, cost: Cost) -> Summary | None:
        """Steps, bytes or seconds of a run, with those of the run it starts from."""
        parts = [[result, *([result.pretrain] if result.pretrain else [])] for result in self.results.values()]
        return summarize(sum(getattr(part, cost) for part in both) for both in parts)

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
        """Whether clients of its finished runs took steps of their own at the chosen round, which no curve shows."""
        return bool(self.results) and all(result.unadapted is not None for result in self.results.values())

    def client_accuracy(self, seed: int) -> NDArray[numpy.float64]:
        """[clients]: each one's own test accuracy in percent; NaN where it has no test examples."""
        return 100 * self._client_means(seed)

    def client_scores(self, seed: int) -> NDArray[numpy.float64]:
        """[clients]: each one's own test accuracy in percent; of a task without accuracy, its loss."""
        return self.client_accuracy(seed) if self.has_accuracy else self._client_means(seed)

    def _client_means(self, seed: int) -> NDArray[numpy.float64]:
        test = self.results[seed].test
        examples = numpy.array(test.client_examples, dtype=numpy.float64)
        sums = numpy.array(test.clients, dtype=numpy.float64)
        return numpy.divide(sums, examples, out=numpy.full_like(examples, numpy.nan), where=examples > 0)

    def curve(self, seed: int, average: Average = "clients") -> dict[int, float]:
        """Communication steps -> test accuracy in percent (or loss); empty where there are no test examples."""
        curve = self.curves[seed]
        means: Sequence[float] | None = getattr(curve.test, MEANS[average])
        values = [100 * mean for mean in means] if means is not None else curve.test.loss or ()
        pairs = zip(curve.step, values, strict=True)
        return {self.steps_before + step: value for step, value in pairs if not math.isnan(value)}


@dataclass(frozen=True)
class Report:
    """Entries that stand in one table: no two of one method, data set and number of clients."""

    title: str
    entries: list[Entry] = field(default_factory=list)
    experiments: tuple[Experiment, ...] = ()  # that its entries are of

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
    found: list[tuple[Experiment, list[Runs]]] = []
    for runs in sources:
        same = next((parts for experiment, parts in found if experiment == runs.experiment), None)
        if same is None:
            found.append((runs.experiment, [runs]))
        else:
            same.append(runs)
    reports: list[Report] = []
    told_apart = _told_apart([_entries(experiment, parts) for experiment, parts in found])
    for (experiment, _), entries in zip(found, told_apart, strict=True):
        taken = {(entry.label, entry.column) for entry in entries}
        home = next((r for r in reports if not taken & {(e.label, e.column) for e in r.entries}), None)
        if home is None:
            reports.append(Report(_joined_titles(entries), entries, (experiment,)))
        else:
            together = [*home.entries, *entries]
            experiments = (*home.experiments, experiment)
            reports[reports.index(home)] = Report(_joined_titles(together), together, experiments)
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


def _joined_titles(entries: Sequence[Entry]) -> str:
    return "; ".join(dict.fromkeys(entry.title for entry in entries))


def _label(cell: Cell, different: Mapping[str, Any]) -> str:
    return " ".join([method_name(cell), *(f"{name}={value}" for name, value in different.items())])


def asked_for(report: Report) -> Report:
    """Without the methods and columns of which nothing was asked for, as `--only` leaves many."""
    planned = [entry for entry in report.entries if entry.num_planned]
    labels, columns = {entry.label for entry in planned}, {entry.column for entry in planned}
    return replace(report, entries=[e for e in report.entries if e.label in labels and e.column in columns])


def _entries(experiment: Experiment, parts: Sequence[Runs]) -> list[Entry]:
    entries = []
    planned: dict[str, dict[str, RunSpec]] = {}
    for run in (run for part in parts for run in part.planned):
        planned.setdefault(run.cell_name, {})[run.name] = run
    title = experiment.title or experiment.name
    names = [run.cell_name for run in experiment.runs([0])]
    differences = distinctions(experiment.cells)
    differing: dict[tuple[str, str, int], dict[str, None]] = {}  # by method, data set and number of clients
    for cell, different in zip(experiment.cells, differences, strict=True):
        differing.setdefault((method_name(cell), cell.dataset, cell.clients), {}).update(dict.fromkeys(different))
    for name, cell, different in zip(names, experiment.cells, differences, strict=True):
        results: dict[int, Result] = {}
        curves: dict[int, Curve] = {}
        runs = list(planned.get(name, {}).values())
        for run in sorted(runs, key=lambda run: run.seed):
            for part in parts:
                if run.name in part.results:
                    results.setdefault(run.seed, part.results[run.name])
                if run.name in part.curves:
                    curves.setdefault(run.seed, part.curves[run.name])
        # A run that one directory has finished counts as finished, whatever became of it in another.
        running = {r.seed for r in runs for part in parts if r.name in part.running} - results.keys()
        diverged = {r.seed for r in runs for part in parts if r.name in part.diverged} - results.keys() - running
        histories = {r.seed: part.histories[r.name] for r in runs for part in parts if r.name in part.histories}
        own_names = (part.client_names[r.name] for r in runs for part in parts if r.name in part.client_names)
        described = (result.clients.names for result in results.values() if result.clients is not None)
        # What a cell leaves at its default, and others of its kind do not, is in its name too.
        chosen = dict(next(iter(results.values())).settings) | different if results else different
        mine = differing[method_name(cell), cell.dataset, cell.clients]
        label = _label(cell, {name: chosen[name] for name in mine if chosen.get(name) is not None})
        published = experiment.published
        known = published.get(f"{method_name(cell)}/{cell.dataset}/{cell.clients}") or published.get(
            f"{method_name(cell)}/{cell.clients}"
        )
        before = pretraining_cell(experiment, cell).steps if cell.pretrain is not None else 0
        entries.append(
            Entry(
                label,
                cell,
                results,
                curves,
                len(runs),
                known,
                before,
                title,
                histories,
                next(filter(None, itertools.chain(own_names, described)), None),
                _is_squared(cell, [name for r in runs for part in parts for name in part.losses.get(r.name, ())]),
                frozenset(running),
                frozenset(diverged),
            )
        )
    return entries


def is_squared(entries: Iterable[Entry]) -> bool:
    """Whether those that have begun are measured by the squared error."""
    begun = [entry for entry in entries if entry.results or entry.curves]
    return not all(entry.has_accuracy for entry in begun) and all(entry.is_squared for entry in begun)


def _is_squared(cell: Cell, losses: Sequence[str]) -> bool:
    """Whether the loss is the squared error; a file of results does not say, but experiments have no other.

    Args:
        cell: Of an experiment, or of a run by `pfedhn.train`, which has no partition.
        losses: The names of the functions, where they are known.
    """
    return all(name == SQUARED_ERROR for name in losses) if losses else bool(cell.partition)


def _place(environment: Environment) -> str:
    """The device and what else of it decides the numbers: of a processor the threads, of a GPU how it multiplies."""
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


def seeds_count(number: int) -> str:
    return counted(number, "seed")


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def display_name(label: str) -> str:
    """A label as the method's paper writes it; a method that is not registered keeps its name."""
    method, _, rest = label.partition(" ")
    known = ALGORITHMS.get(method)
    return f"{method if known is None else known.name} {rest}".strip()


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
    """Client by client on the same examples; seeds in which the two had different splits are left out."""
    better = same = worse = num_seeds = 0
    for seed in entry.results.keys() & other.results.keys():
        mine, theirs = entry.results[seed], other.results[seed]
        if mine.partition_sha256 != theirs.partition_sha256:
            continue
        num_seeds += 1
        difference = entry.client_scores(seed) - other.client_scores(seed)
        if not entry.has_accuracy:  # the less loss, the better
            difference = -difference
        better += int((difference > 0).sum())
        same += int((difference == 0).sum())
        worse += int((difference < 0).sum())
    return Comparison(better, same, worse, num_seeds) if num_seeds else None
