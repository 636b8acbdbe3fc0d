"""Learning rates from the paper's grids, chosen on validation examples: every point briefly, then the best few in full.

Both stages are experiments whose cells are the points, so they run, stop and go on as any other. There is no search
library (Optuna was considered): a grid of 16 points is a list of cells, and the run directories are its storage.
"""

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, TypeAlias

from rich import box
from rich.table import Table

from pfedhn.algorithms import ALGORITHMS
from pfedhn.algorithms.find import build_algorithm
from pfedhn.errors import UserError, closest
from pfedhn.experiments.directory import Directory
from pfedhn.experiments.grid import select
from pfedhn.experiments.queue import Outcome
from pfedhn.experiments.rates import Rates
from pfedhn.experiments.spec import Cell, Experiment, RunSpec, distinct, is_own_data, method_name
from pfedhn.settings import values_in_short
from pfedhn.storage.files import DamagedError, sealed_json, unsealed_json
from pfedhn.storage.schema import Result, to_json
from pfedhn.system.files import is_empty, read_bytes, write_atomically

CLIENTS = 50  # the paper tunes with 50 clients and keeps the rates for 10 and 100
FRACTION = 0.2  # of a cell's steps in the first stage: 1,000 of the paper's 5,000
FINALISTS = 3


Grid: TypeAlias = Mapping[str, tuple[Any, ...]]
"""Settings of a method and the values that are tried."""


Stage: TypeAlias = Literal["first", "finals"]


@dataclass(frozen=True)
class Point:
    """One point of a method's grid, as the cell that is run in full."""

    method: str
    rates: Mapping[str, Any]
    cell: Cell


@dataclass(frozen=True)
class Tuning:
    """The points to try for an experiment, and the rule that chooses one for each method."""

    experiment: Experiment
    points: tuple[Point, ...]  # of every method that has a grid; those not tuned this time are never run
    methods: tuple[str, ...]  # that are tuned
    grids: Mapping[str, Grid]
    seeds: tuple[int, ...] = (0,)
    fraction: float = FRACTION
    finalists: int = FINALISTS

    @cached_property
    def stages(self) -> dict[Stage, Experiment]:
        """Every point as a cell; of the finals only the best few are ever run.

        All points are in both, so that other methods can be tuned in the same directory later.
        """
        name = self.experiment.name
        titles: dict[Stage, str] = {
            "first": f"Tuning {name}: every point for {self.fraction:g} of the steps",
            "finals": f"Tuning {name}: the best points in full",
        }
        return {
            stage: Experiment(f"{name}-{stage}", tuple(self.cell(stage, point) for point in self.points), (0,), title)
            for stage, title in titles.items()
        }

    def points_of(self, method: str) -> list[Point]:
        return [point for point in self.points if point.method == method]

    def usual_first(self, method: str) -> list[Point]:
        """The points of a method, first those nearest to its present settings: time may end before all were tried."""
        (cell, *_) = (cell for cell in self.experiment.cells if cell.method == method)
        now = values_in_short(build_algorithm(method, cell.settings))
        return sorted(
            self.points_of(method),
            key=lambda point: sum(now.get(name) != value for name, value in point.rates.items()),
        )

    def runs(self, stage: Stage, points: Iterable[Point]) -> list[RunSpec]:
        """The runs of some points."""
        return [self.stages[stage].run_of(self.cell(stage, point), seed) for point in points for seed in self.seeds]

    def cell(self, stage: Stage, point: Point) -> Cell:
        """What is run for a point: in the first stage for a fraction of its steps."""
        if stage == "finals":
            return point.cell
        return replace(point.cell, steps=max(1, round(self.fraction * point.cell.steps)))


@dataclass(frozen=True)
class TuningResults:
    """The results of the stages of a tuning so far."""

    tuning: Tuning
    first: Outcome
    finals: Outcome = field(default_factory=Outcome)

    def score(self, stage: Stage, point: Point) -> float | None:
        """By validation, the mean over seeds; None if a run of the point diverged."""
        runs, results = self.tuning.runs(stage, [point]), self._results(stage)
        found = [_validation_score(results[run.name]) for run in runs if run.name in results]
        return fmean(found) if len(found) == len(runs) else None

    def finalists(self, method: str) -> list[Point]:
        """The points that are run in full; none if time was left for fewer than two, which is no choice."""
        points = self.tuning.points_of(method)
        ranked = self._ranked("first", points)
        if len(ranked) < 2 and any(self._is_left_out("first", point) for point in points):
            return []
        return ranked[: self.tuning.finalists]

    def winner(self, method: str) -> Point | None:
        """The best finalist; the best of the first stage if no time was left for others, and None if all diverged."""
        finalists = self.finalists(method)
        left_out = [point for point in finalists if self._is_left_out("finals", point)]
        return next(iter([*self._ranked("finals", finalists), *left_out]), None)

    def has_diverged(self, method: str) -> bool:
        """Whether every point of a method diverged, so that no rate was chosen."""
        left_out = (self._is_left_out("first", point) for point in self.tuning.points_of(method))
        return self.winner(method) is None and not any(left_out)

    def num_left_out(self) -> int:
        """The points that no time was left for, in both stages."""
        methods = self.tuning.methods
        first = [point for method in methods for point in self.tuning.points_of(method)]
        finals = [point for method in methods for point in self.finalists(method)]
        stages: list[tuple[Stage, list[Point]]] = [("first", first), ("finals", finals)]
        return sum(self._is_left_out(stage, point) for stage, points in stages for point in points)

    def _is_left_out(self, stage: Stage, point: Point) -> bool:
        """Whether a run of a point has neither finished nor failed."""
        outcome = self.first if stage == "first" else self.finals
        runs = self.tuning.runs(stage, [point])
        return any(run.name not in outcome.results and run.name not in outcome.failures for run in runs)

    def rates(self) -> Rates:
        """The rates of each method's winner, and of the methods that take them over."""
        found = {method: self.winner(method) for method in self.tuning.methods}
        rates: Rates = {method: dict(point.rates) for method, point in found.items() if point is not None}
        present = {cell.method for cell in self.tuning.experiment.cells}
        taken = {method: rates[known.rates_from] for method, known in ALGORITHMS.items() if known.rates_from in rates}
        return rates | {method: dict(part) for method, part in taken.items() if method in present}

    def _ranked(self, stage: Stage, points: Sequence[Point]) -> list[Point]:
        scored = [(score, point) for point in points if (score := self.score(stage, point)) is not None]
        # Stable: of equals, the one that stands first in the grid.
        return [point for _, point in sorted(scored, key=lambda pair: -pair[0])]

    def _results(self, stage: Stage) -> Mapping[str, Result]:
        return (self.first if stage == "first" else self.finals).results

    def tables(self) -> Iterator[Table]:
        """Every point with its validation scores, a table for each method."""
        for method in self.tuning.methods:
            points, finalists, winner = self.tuning.points_of(method), self.finalists(method), self.winner(method)
            title = f"{method_name(points[0].cell)}, {points[0].cell.clients} clients: validation score"
            table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
            table.min_width = len(title)  # else a narrow table breaks its own heading
            for name in self.tuning.grids[method]:
                table.add_column(name, justify="right")
            for stage in self.tuning.stages:
                table.add_column(f"after {self.tuning.cell(stage, points[0]).steps:,} steps", justify="right")
            table.add_column("")
            for point in points:
                table.add_row(
                    *(f"{rate:g}" if isinstance(rate, float) else str(rate) for rate in point.rates.values()),
                    self._text("first", point),
                    self._text("finals", point) if point in finalists else "",
                    "chosen" if point == winner else "",
                    style="bold" if point == winner else None,
                )
            yield table

    def _text(self, stage: Stage, point: Point) -> str:
        score = self.score(stage, point)
        if score is None:
            return "left out" if self._is_left_out(stage, point) else "diverged"
        return f"{100 * score:.2f} %" if score >= 0 else f"loss {-score:.4f}"

    def record(self, command: str) -> dict[str, Any]:
        """What `tuning.json` says of each method that was tuned by a command."""
        tuning = self.tuning
        methods: dict[str, Any] = {}
        for method in tuning.methods:
            points, finalists, winner = tuning.points_of(method), self.finalists(method), self.winner(method)
            base = points[0].cell
            fixed = {name: value for name, value in base.settings.items() if name not in tuning.grids[method]}
            done = self.first.results | self.finals.results
            names = [] if winner is None else [tuning.runs(stage, [winner])[0].name for stage in ("finals", "first")]
            best = next((done[name] for name in names if name in done), None)
            methods[method] = {
                "chosen": None if winner is None else dict(winner.rates),
                "points": [
                    {
                        "rates": dict(point.rates),
                        "first": self._stage_record("first", point),
                        "finals": self._stage_record("finals", point) if point in finalists else None,
                        "chosen": point == winner,
                    }
                    for point in points
                ],
                "cell": asdict(replace(base, settings=fixed)),
                "seeds": list(tuning.seeds),
                "fraction": tuning.fraction,
                "finalists": tuning.finalists,
                "command": command,
                "environment": None if best is None else to_json(best.environment),  # it may have run elsewhere
            }
        return methods

    def _stage_record(self, stage: Stage, point: Point) -> dict[str, Any]:
        results = self._results(stage)
        names = [run.name for run in self.tuning.runs(stage, [point])]
        failures = (self.first if stage == "first" else self.finals).failures
        lost = {name: "diverged" if name in failures else "left out" for name in names}
        return {
            "runs": {name: _validation_score(results[name]) if name in results else lost[name] for name in names},
            "score": self.score(stage, point),
            "steps": self.tuning.cell(stage, point).steps,
            "seconds": round(sum(results[name].seconds for name in names if name in results), 3),
        }


def _validation_score(result: Result) -> float:
    if not result.validation.examples or math.isnan(result.score):
        raise UserError(
            f"{result.name} has no score on validation examples, so that nothing can be chosen by it; {LEAVE_SOME}."
        )
    return result.score


LEAVE_SOME = "leave some examples for validation, e.g. split = [0.7, 0.15, 0.15]"


def plan(
    experiment: Experiment,
    only: Sequence[str] = (),
    seeds: Sequence[int] | None = None,
    *,
    fraction: float = FRACTION,
    finalists: int = FINALISTS,
    assigned: Iterable[str] = (),
    own_grids: Mapping[str, Grid] | None = None,
    tunes_all: bool = False,
) -> Tuning:
    """The points to try for an experiment, at 50 clients, or at the middle one of its numbers of clients.

    Args:
        experiment: What is tuned.
        only: As for runs; a method whose authors chose its rates is tuned if it is named here.
        seeds: Scores are means over these; 0 by default.
        fraction: Of a cell's steps that every point gets first.
        finalists: How many points of each method then get all steps.
        assigned: Names that `--set` changes; none of them may be what is to be chosen.
        own_grids: By method, from the experiment's file, instead of those that methods come with.
        tunes_all: Whether methods whose authors chose their rates are tuned like all others.
    """
    if not 0 < fraction < 1:
        raise UserError(f"--fraction is {fraction:g}; it must be between 0 and 1.")
    if finalists < 1:
        raise UserError(f"--finalists is {finalists}; it must be at least 1.")
    parts = [part.strip() for entry in only for part in entry.split(",")]
    named = [part.partition("=")[2].strip() for part in parts if part.startswith("method=")]
    others = [part for part in parts if not part.startswith("method=")]
    cells = [run.cell for run in select(experiment, others, [0])]
    own = {method_name(cell): cell.method for cell in cells}
    named = [own.get(name, name) for name in named]
    known = {name: method.grid for name, method in ALGORITHMS.items()} | dict(own_grids or {})
    grids = {name: grid for name, grid in known.items() if grid}
    numbers = sorted({cell.clients for cell in cells if cell.method in grids})
    if numbers:
        clients = CLIENTS if CLIENTS in numbers else numbers[len(numbers) // 2]
        cells = [cell for cell in cells if cell.clients == clients]
    methods = _methods_to_tune(
        experiment, [cell.method for cell in cells], named, grids, grids if tunes_all else own_grids or {}
    )
    for name in assigned:
        head, _, rest = name.removeprefix("settings.").rpartition(".")
        if any(rest in grids[method] for method in methods if head in ("", method)):
            raise UserError(f"--set {name} cannot be given: it is what is to be chosen.")
    points: list[Point] = []
    for method in dict.fromkeys(cell.method for cell in cells if cell.method in grids):
        tried = [dict(zip(grids[method], rates, strict=True)) for rates in itertools.product(*grids[method].values())]
        alike = [replace(cell, settings={**cell.settings, **tried[0]}) for cell in cells if cell.method == method]
        bases = distinct(alike)  # which differ in more than what is tuned
        if method in methods and len(bases) > 1:
            raise UserError(
                f"{experiment.name!r} has {len(bases)} cells of {method} with {bases[0].clients} clients, which might "
                "need different rates; choose one with --only."
            )
        if method in methods and not is_own_data(bases[0].dataset) and bases[0].split[1] == 0:
            raise UserError(f"{method} would be tuned on validation examples, and there are none; {LEAVE_SOME}.")
        if method in methods and bases[0].pretrain is not None:
            raise UserError(f"{method} starts from {bases[0].pretrain} here; only methods with no pretrain are tuned.")
        points += [
            Point(method, rates, replace(base, settings={**base.settings, **rates}))
            for base in bases
            if base.pretrain is None
            for rates in tried
        ]
    return Tuning(experiment, tuple(points), tuple(methods), grids, tuple(seeds or (0,)), fraction, finalists)


def _methods_to_tune(
    experiment: Experiment,
    present: Collection[str],
    named: Sequence[str],
    grids: Mapping[str, Grid],
    own: Mapping[str, Grid],
) -> list[str]:
    """The methods in the order of their table: those named, or those whose authors did not choose their rates."""
    for method in named:
        known = ALGORITHMS.get(method)
        if known is not None and known.rates_from is not None:
            raise UserError(f"{method} takes the rates of {known.rates_from}; tune that instead.")
        if method not in grids:
            raise UserError(f"there is no grid for the method {method!r}; {closest(method, grids)}")
        if method not in present:
            raise UserError(f"{experiment.name!r} has no such cell of {method} to tune.")
    wanted = named or [method for method in grids if method in own or ALGORITHMS[method].is_tuned]
    methods = [method for method in grids if method in wanted and method in present]
    if not methods:
        others = [method for method in grids if method in present]
        hint = f"; --only method={others[0]} tunes {others[0]}" if others else ""
        raise UserError(f"{experiment.name!r} has no method that is tuned unless it is named{hint}.")
    return methods


def write_record(file: Path, experiment: Experiment, methods: Mapping[str, Any]) -> None:
    """Write `tuning.json`; methods that were tuned there before stay in it."""
    before = read_record(file)
    table = {"experiment": experiment.name, "methods": {**before.get("methods", {}), **methods}}
    write_atomically(file, sealed_json(table, indent=1))


def read_record(file: Path) -> dict[str, Any]:
    if not file.exists():
        return {}
    try:
        return unsealed_json(read_bytes(file))
    except DamagedError as error:
        raise UserError(f"{file} {error}; remove it and tune again: the runs are still there.") from None


def refuse_other(directory: Path, tuning: Tuning) -> None:
    """Only a new or empty directory, or one of an earlier tuning of the same experiment, will do."""
    if is_empty(directory):
        return
    if not (directory / "first" / "experiment.toml").exists():
        raise UserError(f"{directory} is not empty and holds no tuning; give another --out.")
    for stage, experiment in tuning.stages.items():
        Directory(directory / stage).refuse_other(experiment, named=directory)
