"""An experiment as a value: a named set of cells, each run with every seed; a run is a cell, a seed and a name."""

import hashlib
import json
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

from pfedhn.data import catalogue as datasets
from pfedhn.data.silo_catalogue import SILOS
from pfedhn.errors import UserError

TABLE_ENDINGS = (".csv", ".tsv", ".parquet", ".xlsx")
OTHER_TABLES = (".xls", ".xlsm", ".xlsb", ".ods", ".sav", ".dta", ".sas7bdat", ".rds", ".feather", ".arff")
NAMED = (*datasets.DATASETS, *SILOS)  # data that the package knows by name


@dataclass(frozen=True)
class Cell:
    """One method on one federation; with a seed it is a run. The fields of an experiment file are these."""

    method: str = "pfedhn"  # or "mine.py:FedProx", your own class
    dataset: str = "digits"  # or a natural federation; or a path: a folder with a folder per client, or a table
    clients: int = 50
    partition: Mapping[str, Any] = field(default_factory=lambda: {"rule": "by_classes", "classes_per_client": 5})
    split: tuple[float, float, float] = (0.7, 0.15, 0.15)
    stratify: bool = False
    folds: int | None = None  # of a cross-validation instead of `split`; a run's seed chooses its fold
    data_seed: int | None = None  # of the split; the run's seed by default, and 0 with folds
    labels: Literal["global", "within-group"] = "global"
    columns: Mapping[str, Any] = field(default_factory=dict)  # of a table: `client`, `label`, and which to `ignore`
    read: Mapping[str, Any] = field(default_factory=dict)  # how your own images and tables are read, e.g. resize
    task: Literal["auto", "classification", "regression"] = "auto"  # "auto": whole numbers and texts are classes
    model: str = "mlp-32"  # or "module:function" or "file.py:function", which makes it
    network: Mapping[str, Any] = field(default_factory=dict)  # arguments of that function
    sizes: tuple[str, ...] | None = None  # networks instead of `model`: as many clients of each, one after another
    part: str | None = None  # of clients of several sizes, only those of this one take part
    resize_every: int | None = None  # steps after which every client goes on to the next of the sizes
    descriptors: Literal["client", "class"] = "client"  # of a fixed embedding: shares of its examples, or of each class
    steps: int = 5_000
    cohort_size: int | None = None
    batch_size: int = 64
    evaluate_every: int = 30
    select: Literal["metric", "loss"] = "metric"  # what chooses the round on validation
    patience: int | None = None  # steps without a better validation score after which training stops
    upload: str = "full"  # what is done to updates on their way: full, half or 8-bit
    download: str = "full"  # and to the weights on their way down
    in_flight: int | None = None  # clients that train at the same time in an asynchronous run; synchronous if none
    privacy: Mapping[str, Any] = field(default_factory=dict)  # how clients keep their data private (`Privacy`)
    robust: str | Mapping[str, Any] | None = (
        None  # the server's defense against hostile updates, or its `rule` and more
    )
    attack: Mapping[str, Any] = field(default_factory=dict)  # what hostile clients send (`Attack`)
    pretrain: str | None = None  # the method whose last model every client starts from
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the method


@dataclass(frozen=True)
class RunSpec:
    """One run: a cell, a seed, and the name that all seeds of the cell share."""

    cell: Cell
    seed: int
    cell_name: str

    @property
    def name(self) -> str:
        """The name of its folder."""
        return f"{self.cell_name}-seed{self.seed}"


@dataclass(frozen=True)
class Experiment:
    """A named set of cells, each run with every seed."""

    name: str
    cells: tuple[Cell, ...]
    seeds: tuple[int, ...] = (0, 1, 2)
    title: str = ""
    published: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # "method/clients" -> mean, deviation

    @cached_property
    def _cell_of(self) -> dict[str, Cell]:
        return dict(zip(cell_names(self.cells), self.cells, strict=True))

    @cached_property
    def _name_of(self) -> dict[str, str]:
        """The name of a cell by its digest."""
        return {cell_digest(cell): name for name, cell in self._cell_of.items()}

    def runs(self, seeds: Sequence[int] | None = None) -> list[RunSpec]:
        """Every run, cell by cell, with the seeds given or else the experiment's."""
        return [
            RunSpec(cell, seed, name)
            for name, cell in self._cell_of.items()
            for seed in (self.seeds if seeds is None else seeds)
        ]

    def run_of(self, cell: Cell, seed: int) -> RunSpec:
        """The run of one of its cells."""
        return RunSpec(cell, seed, self._name_of[cell_digest(cell)])

    def find(self, name: str) -> RunSpec:
        """The run of a folder or line with this name, also of a seed that was given on the command line."""
        head, separator, seed = name.rpartition("-seed")
        cell = self._cell_of.get(head) if separator and re.fullmatch(r"0|-?[1-9]\d{0,18}", seed) else None
        if cell is None:
            raise UserError(f"{self.name!r} has no run {name!r}.")
        return RunSpec(cell, int(seed), head)


def method_name(cell: Cell) -> str:
    """The method's name; for a person's class, "mine.py:FedProx", the name of the class."""
    return cell.method.rpartition(":")[2]


def dataset_name(cell: Cell) -> str:
    """The data set's name: the last part of a path, or the name of the function that makes it."""
    if is_made(cell.dataset):
        return cell.dataset.rpartition(":")[2]
    return Path(cell.dataset).stem if is_own_data(cell.dataset) else cell.dataset


def is_made(dataset: str) -> bool:
    """Whether a function makes the data: "module:function", or "file.py:function"."""
    return re.fullmatch(r"([\w.]+|.*\.py):[A-Za-z_]\w*", dataset) is not None


def is_table(dataset: str) -> bool:
    """Whether it is read as a table: a natural federation, or a person's own file."""
    return dataset in SILOS or dataset.lower().endswith(TABLE_ENDINGS)


def is_own_data(dataset: str) -> bool:
    return dataset not in NAMED and (
        os.sep in dataset or dataset.lower().endswith(TABLE_ENDINGS) or Path(dataset).is_dir()
    )


def flat_fields(cell: Cell) -> dict[str, Any]:
    """Every value of a cell by the name that --set and --only take: `steps`, `partition.alpha`, the method's `lr`."""
    values: dict[str, Any] = {}
    for name, value in asdict(cell).items():
        if name == "settings":
            values |= value
        elif isinstance(value, Mapping):
            values |= {f"{name}.{key}": part for key, part in value.items()}
        else:
            values[name] = value
    return values


def distinctions(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """The values in which each cell differs from others of its method, data set and number of clients."""

    def group(cell: Cell) -> tuple[str, str, int]:
        return method_name(cell), cell.dataset, cell.clients

    values = [flat_fields(cell) for cell in cells]
    # Of every group, one cell's values and the names of those in which another one differs.
    firsts: dict[Any, dict[str, Any]] = {}
    differing: defaultdict[Any, set[str]] = defaultdict(set)
    for cell, mine in zip(cells, values, strict=True):
        first = firsts.setdefault(group(cell), mine)
        differing[group(cell)] |= {name for name in {*first, *mine} if first.get(name) != mine.get(name)}
    return [
        {name: value for name, value in mine.items() if name in differing[group(cell)] and value is not None}
        for cell, mine in zip(cells, values, strict=True)
    ]


def cell_names(cells: Sequence[Cell]) -> list[str]:
    """A folder's name for each cell: words that a person would use, and a digest only if these are not enough."""
    names = []
    for cell, different in zip(cells, distinctions(cells), strict=True):
        words = [method_name(cell), dataset_name(cell), str(cell.clients)]
        words += [f"{key.removeprefix('partition.')}={value}" for key, value in different.items()]
        names.append(re.sub(r"[^A-Za-z0-9._=-]+", "_", "-".join(words)))
    counts = Counter(names)
    return [
        f"{name[:80]}-{cell_digest(cell)[:8]}" if len(name) > 100 or counts[name] > 1 else name
        for name, cell in zip(names, cells, strict=True)
    ]


# Names with a digest must stay what they were before there were these fields, which stored runs do not have.
YOUNGER_FIELDS = (
    *("task", "upload", "download", "sizes", "part", "resize_every", "descriptors", "network", "read", "privacy"),
    *("in_flight", "select", "patience", "folds", "robust", "attack"),
)


def cell_digest(cell: Cell) -> str:
    usual = asdict(Cell())
    table = {name: v for name, v in asdict(cell).items() if name not in YOUNGER_FIELDS or v != usual[name]}
    return hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()


def distinct(cells: Iterable[Cell]) -> tuple[Cell, ...]:
    return tuple({cell_digest(cell): cell for cell in cells}.values())


# Fields that are tables, which "partition.alpha" reaches into.
CELL_TABLES = ("partition", "settings", "columns", "network", "read", "privacy", "robust", "attack")


# What the data of a run and its network are made from.
ORIGIN_FIELDS = (
    *(
        "dataset",
        "clients",
        "partition",
        "split",
        "folds",
        "stratify",
        "data_seed",
        "labels",
        "columns",
        "read",
        "task",
    ),
    *("sizes", "part", "model", "network"),
)


def pretraining_cell(experiment: Experiment, cell: Cell) -> Cell:
    """The cell whose last model `cell` starts from: its `pretrain` method on the same federation and network."""
    origin, mine = attrgetter(*ORIGIN_FIELDS), flat_fields(cell)
    fitting = [other for other in experiment.cells if other.method == cell.pretrain and origin(other) == origin(cell)]
    if not fitting:
        raise UserError(
            f"{method_name(cell)} starts from a {cell.pretrain} run, which {experiment.name!r} does not have on the "
            "same data and network; add that cell."
        )
    return max(fitting, key=lambda other: sum(mine.get(key) == value for key, value in flat_fields(other).items()))


def pretraining_run(experiment: Experiment, run: RunSpec) -> RunSpec | None:
    """The run that has to be finished before this one can start."""
    if run.cell.pretrain is None:
        return None
    return experiment.run_of(pretraining_cell(experiment, run.cell), run.seed)


def with_pretraining(experiment: Experiment, runs: Iterable[RunSpec]) -> list[RunSpec]:
    """The runs and those they start from, these first."""
    ordered: dict[str, RunSpec] = {}
    for run in runs:
        chain = [run]
        while (earlier := pretraining_run(experiment, chain[0])) is not None:
            if earlier in chain:
                raise UserError(f"{run.name} would start from itself; fix its pretrain.")
            chain.insert(0, earlier)
        ordered |= {part.name: part for part in chain}
    return list(ordered.values())
