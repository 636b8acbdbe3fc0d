"""A study: cells of an experiment, what is computed from each finished run, and what is drawn from that.

compute(finished)   on the machine that has the run: its models and its clients' data -> plain numbers
draw(found)         anywhere, from results and those numbers alone -> a sentence, tables and figures
"""

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from pfedhn.experiments.build import cell_algorithm
from pfedhn.experiments.finished import Finished
from pfedhn.experiments.registry import experiments
from pfedhn.experiments.spec import Cell, Experiment, cell_digest, distinct, method_name
from pfedhn.report.entries import Entry, display_name
from pfedhn.report.findings import Finding, Lines
from pfedhn.report.results import Runs
from pfedhn.settings import value_of, values_of
from pfedhn.storage.schema import Curve, Result

PAPER = "pfedhn.paper.studies"
SMALL = "-small"
SMALL_NETWORKS = {"lenet": "mlp-16", "lenet-s": "mlp-8", "lenet-m": "mlp-16", "lenet-l": "mlp-32"}


@dataclass(frozen=True)
class Study:
    """One question, asked of finished runs.

    Args:
        name: The name that `pfedhn run` takes.
        title: A heading for tables and figures.
        cells: The cells to run. Those that an experiment of the package has too are read from its results instead,
            unless the study computes something from the runs themselves.
        draw: Makes the finding from the results.
        compute: Computes plain numbers by name from each run, on the machine that made it.
        small: Reduces a cell to seconds on a CPU.
        seeds: The seeds of every cell.
        norms: Whether its runs log weight norms at every evaluation: `moment.norms`.
        cells_for: Makes the cells for the data in a folder, if these decide them.
    """

    name: str
    title: str
    cells: tuple[Cell, ...]
    draw: Callable[["Found"], Finding]
    compute: Callable[[Finished], Mapping[str, Any]] | None = None
    small: Callable[[Cell], Cell] = field(default_factory=lambda: on_digits)
    seeds: tuple[int, ...] = (0, 1, 2)
    norms: bool = False
    cells_for: Callable[[Path | None], tuple[Cell, ...]] | None = None

    def experiment(self, small: bool = False, data_dir: Path | None = None) -> Experiment:
        """The experiment to run; at reduced size, all cells and one seed."""
        if small:
            cells = distinct(self.small(cell) for cell in self.cells)
            return Experiment(self.name + SMALL, cells, self.seeds[:1], f"{self.title}; at reduced size")
        planned = self.cells if self.cells_for is None else self.cells_for(data_dir)
        cells = tuple(cell for cell in planned if cell not in self.borrowed)
        return Experiment(self.name, cells, self.seeds, self.title)

    @cached_property
    def borrowed(self) -> list[Cell]:
        """Cells whose results are those of another experiment."""
        if self.compute is not None:
            return []
        known = {cell_digest(cell) for experiment in experiments().values() for cell in experiment.cells}
        return [cell for cell in self.cells if cell_digest(cell) in known]


@dataclass(frozen=True)
class Found:
    """The results of one experiment of a study: what `draw` is given."""

    study: Study
    runs: Sequence[Runs]  # of the experiment
    others: Sequence[Runs] = ()  # what else was given; experiments of the package lend cells that the study borrows

    @property
    def title(self) -> str:
        return self.runs[0].experiment.title

    @property
    def is_small(self) -> bool:
        """Whether it was run at reduced size, where the paper's numbers mean nothing."""
        return self.runs[0].experiment.name.endswith(SMALL)

    @cached_property
    def cells(self) -> list[Cell]:
        """The cells that were run or can be borrowed, as the study orders them."""
        mine = list(self.runs[0].experiment.cells)
        known = [cell for cell in self.study.cells if not self.is_small and (cell in mine or any(self._stored(cell)))]
        return known + [cell for cell in mine if cell not in known]

    @cached_property
    def entries(self) -> list[Entry]:
        """The cells that have a result."""
        return [entry for entry in map(self.entry, self.cells) if entry.results]

    @cached_property
    def computed(self) -> list[tuple[Entry, dict[int, Mapping[str, Any]]]]:
        """The cells from whose runs something was computed, with these numbers by seed."""
        return [(entry, numbers) for entry in self.entries if (numbers := self.analyses(entry.cell))]

    def entry(self, cell: Cell) -> Entry:
        """A cell and its results, whichever experiment ran it."""
        results: dict[int, Result] = {}
        curves: dict[int, Curve] = {}
        for runs, name, result in sorted(self._stored(cell), key=lambda stored: stored[2].seed):
            results.setdefault(result.seed, result)
            if name in runs.curves:
                curves.setdefault(result.seed, runs.curves[name])
        return Entry(display_name(method_name(cell)), cell, results, curves, len(results), title=self.title)

    def analyses(self, cell: Cell) -> dict[int, Mapping[str, Any]]:
        """What was computed from the runs of a cell, by seed."""
        found: dict[int, Mapping[str, Any]] = {}
        for runs, name, result in self._stored(cell):
            if (analysis := runs.analyses.get(name)) is not None and analysis.study == self.study.name:
                found.setdefault(result.seed, analysis.values)
        return dict(sorted(found.items()))

    def finding(
        self, sentence: str, tables: Sequence[tuple[Lines, str]], figures: Mapping[str, Callable[[], Any]] | None = None
    ) -> Finding:
        """A finding with the study's name and title."""
        return Finding(self.study.name, self.title, sentence, tables, figures or {})

    @cached_property
    def _lenders(self) -> list[Runs]:
        """The package's experiments in their order, Table 1 first: another study may have run the same cell as well."""
        order = {name: number for number, name in enumerate(experiments())}
        known = [runs for runs in self.others if runs.experiment.name in order]
        return sorted(known, key=lambda runs: order[runs.experiment.name])

    def _stored(self, cell: Cell) -> Iterable[tuple[Runs, str, Result]]:
        lenders = self._lenders if cell in self.study.borrowed else []
        for runs, is_mine in [*((runs, True) for runs in self.runs), *((runs, False) for runs in lenders)]:
            if cell in runs.experiment.cells:
                for run in runs.planned:
                    result = runs.results.get(run.name)
                    is_wanted = is_mine or run.seed in self.study.seeds  # as many as its other cells have
                    if result is not None and is_wanted and run.cell == cell:
                        yield runs, run.name, result


def studies() -> Mapping[str, Study]:
    """Every named study of the package."""
    found: Mapping[str, Study] = importlib.import_module(PAPER).STUDIES
    return found


def findings(runs: Sequence[Runs], own: Sequence[Study] = ()) -> list[Finding]:
    """Draw the findings of the package's studies, found by the experiment's name, and of the user's own."""
    drawn: Mapping[str, Study] = importlib.import_module(PAPER).DRAWN
    known = {**studies(), **drawn, **{study.name: study for study in own}}
    found: list[Finding] = []
    for name in dict.fromkeys(part.experiment.name for part in runs):
        study = known.get(name.removesuffix(SMALL))
        mine = [part for part in runs if part.experiment.name == name]
        if study is not None and any(part.results for part in mine):
            found.append(study.draw(Found(study, mine, [part for part in runs if part.experiment.name != name])))
    return found


def varied(cell: Cell, **settings: Any) -> Cell:
    """A cell with other settings of its method; one that is the default is left out, so that equal cells are equal."""
    usual = cell_algorithm(cell)
    changed = {name: value for name, value in settings.items() if value_of(usual, name) != value}
    return replace(cell, settings={**cell.settings, **changed})


def setting(cell: Cell, name: str) -> Any:
    """A setting of a cell's method, also one that is left at its default."""
    return value_of(cell_algorithm(cell), name)


def on_digits(cell: Cell, **changes: Any) -> Cell:
    """A cell on the embedded digits, with a dozen clients, a few steps and a fifth of the local steps."""
    partition: dict[str, Any] = {"rule": "by_classes", "classes_per_client": 3}
    if cell.partition.get("rule") == "dirichlet":
        partition = {**cell.partition, "alpha": 1.0}
        if "novel_clients" in partition:
            partition["novel_clients"] = 3
    local = values_of(cell_algorithm(cell)).keys() & {"local_steps", "outer_steps"}
    reduced = replace(
        cell,
        dataset="digits",
        clients=12,
        partition=partition,
        split=(0.5, 0.25, 0.25),
        model=_small_network(cell.model),
        sizes=None if cell.sizes is None else tuple(map(_small_network, cell.sizes)),
        part=None if cell.part is None else _small_network(cell.part),
        resize_every=None if cell.resize_every is None else 20,
        steps=60,
        cohort_size=None if cell.cohort_size is None else min(cell.cohort_size, 12),
        batch_size=16,
        evaluate_every=12,
        settings={**cell.settings, **{name: max(1, setting(cell, name) // 5) for name in sorted(local)}},
    )
    return replace(reduced, **changes)


def _small_network(name: str) -> str:
    return SMALL_NETWORKS.get(name, name)
