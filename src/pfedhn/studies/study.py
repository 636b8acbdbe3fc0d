"""A study: cells of an experiment, what is computed from each finished run, and what is drawn from that.

compute(finished)   on the machine that has the run: its models and its clients' data -> plain numbers
draw(found)         anywhere, from results and those numbers alone -> a sentence, tables and figures
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from pfedhn.algorithms import ALGORITHMS
from pfedhn.experiments.build import cell_algorithm
from pfedhn.experiments.registry import experiments
from pfedhn.experiments.spec import Cell, Experiment, cell_digest, distinct, method_name
from pfedhn.report.entries import Entry, display_name
from pfedhn.report.findings import Finding
from pfedhn.report.results import Runs
from pfedhn.settings import value_of, values_of
from pfedhn.storage.schema import Curve, Result
from pfedhn.studies.finished import Finished

SMALL = "-small"
SMALL_NETWORKS = {"lenet": "mlp-16", "lenet-s": "mlp-8", "lenet-m": "mlp-16", "lenet-l": "mlp-32"}


@dataclass(frozen=True)
class Study:
    """One question, asked of finished runs.

    Args:
        name: What `pfedhn run` calls it.
        title: A heading for tables and figures.
        cells: What is run. Cells that an experiment of the package has too are not run again, but read from its
            results, unless something is computed from the runs themselves.
        draw: What the results show.
        compute: What is computed from each run where it was made; plain numbers by name.
        small: A cell at reduced size, for a processor and seconds.
        seeds: Of every cell.
        norms: Whether its runs note the norms of what the server keeps at every evaluation: `moment.norms`.
    """

    name: str
    title: str
    cells: tuple[Cell, ...]
    draw: Callable[["Found"], Finding]
    compute: Callable[[Finished], Mapping[str, Any]] | None = None
    small: Callable[[Cell], Cell] = field(default_factory=lambda: on_digits)
    seeds: tuple[int, ...] = (0, 1, 2)
    norms: bool = False

    def experiment(self, small: bool = False) -> Experiment:
        """What is run; at reduced size, all cells and one seed."""
        if small:
            cells = distinct(self.small(cell) for cell in self.cells)
            return Experiment(self.name + SMALL, cells, self.seeds[:1], f"{self.title}; at reduced size")
        cells = tuple(cell for cell in self.cells if cell not in self.borrowed)
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
    """What is known of one experiment of a study: what `draw` is given."""

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
        known = [cell for cell in self.study.cells if not self.is_small and (cell in mine or self._results(cell))]
        return known + [cell for cell in mine if cell not in known]

    @cached_property
    def entries(self) -> list[Entry]:
        """Those of the cells that have a result."""
        return [entry for entry in map(self.entry, self.cells) if entry.results]

    def entry(self, cell: Cell) -> Entry:
        """A cell and what its runs found, whichever experiment ran it."""
        curves: dict[int, Curve] = {}
        for runs, name, result in self._stored(cell):
            if name in runs.curves:
                curves.setdefault(result.seed, runs.curves[name])
        results = self._results(cell)
        return Entry(display_name(method_name(cell)), cell, results, curves, len(results), title=self.title)

    def analyses(self, cell: Cell) -> dict[int, Mapping[str, Any]]:
        """What was computed from the runs of a cell, by seed."""
        found: dict[int, Mapping[str, Any]] = {}
        for runs, name, result in self._stored(cell):
            if (analysis := runs.analyses.get(name)) is not None and analysis.study == self.study.name:
                found.setdefault(result.seed, analysis.values)
        return dict(sorted(found.items()))

    def _results(self, cell: Cell) -> dict[int, Result]:
        found: dict[int, Result] = {}
        for _, _, result in self._stored(cell):
            found.setdefault(result.seed, result)
        return dict(sorted(found.items()))

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


def known(*methods: str) -> list[str]:
    """Those of the methods that there are; where a stronger recipe has a name, it is run beside the paper's."""
    return [method for method in methods if method in ALGORITHMS]


def varied(cell: Cell, **settings: Any) -> Cell:
    """A cell with other settings of its method; one that is the default is left out, so that equal cells are equal."""
    usual = cell_algorithm(cell)
    changed = {name: value for name, value in settings.items() if value_of(usual, name) != value}
    return replace(cell, settings={**cell.settings, **changed})


def setting(cell: Cell, name: str) -> Any:
    """A setting of a cell's method, also one that is left at its default."""
    return value_of(cell_algorithm(cell), name)


def on_digits(cell: Cell) -> Cell:
    """A cell on the embedded digits, with a dozen clients and a few steps."""
    sizes = None if cell.sizes is None else tuple(SMALL_NETWORKS.get(name, name) for name in cell.sizes)
    partition: dict[str, Any] = dict(cell.partition)
    if partition.get("rule") == "dirichlet":
        partition["alpha"] = 1.0
        if "novel_clients" in partition:
            partition["novel_clients"] = 3
    else:
        partition = {"rule": "by_classes", "classes_per_client": 3}
    return replace(
        cell,
        dataset="digits",
        clients=12,
        partition=partition,
        split=(0.5, 0.25, 0.25),
        model=SMALL_NETWORKS.get(cell.model, cell.model),
        sizes=sizes,
        part=None if cell.part is None else SMALL_NETWORKS.get(cell.part, cell.part),
        resize_every=None if cell.resize_every is None else 20,
        steps=60,
        cohort_size=None if cell.cohort_size is None else min(cell.cohort_size, 12),
        batch_size=16,
        evaluate_every=12,
        settings=fewer_steps(cell),
    )


def fewer_steps(cell: Cell) -> dict[str, Any]:
    """A method's settings with a fifth of its local steps."""
    known = values_of(cell_algorithm(cell))
    names = [name for name in ("local_steps", "outer_steps") if name in known]
    return {**cell.settings, **{name: max(1, setting(cell, name) // 5) for name in names}}
