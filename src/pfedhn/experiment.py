"""Experiments: named sets of cells; each cell and seed is a run with a directory of its own.

A directory holds one experiment: `experiment.toml`, and a sub-folder per run with `spec.toml`, `metrics.jsonl`,
checkpoints and `result.json`. The same command on the same directory goes on where it stopped.
"""

import errno
import hashlib
import inspect
import json
import multiprocessing
import os
import platform
import re
import shlex
import signal
import subprocess
import threading
import time
import tomllib
import traceback
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from functools import lru_cache
from multiprocessing import connection as pipes
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any, Literal, NamedTuple, TypeAlias, get_type_hints

import numpy
import torch

import pfedhn.models as models
from pfedhn import datasets, partition
from pfedhn.algorithm import Factory
from pfedhn.algorithms import ALGORITHMS
from pfedhn.capture import set_up_gpu
from pfedhn.checkpoint import CheckpointError, load_state, write_atomically
from pfedhn.executors import EXECUTORS
from pfedhn.federation import Federation, share_out
from pfedhn.params import Params
from pfedhn.progress import Event, Failed, Finished, Said, Update, Watch, watch_run
from pfedhn.run import (
    AnyAlgorithm,
    Run,
    RunError,
    build_algorithm,
    build_model,
    drain,
    executing,
    partition_digest,
    stop_on_signal,
)
from pfedhn.settings import SettingError, build, checked, closest, describe, fits, parse_value, to_toml
from pfedhn.simulate import Diverged, Schedule, Simulation

PARTITIONS: dict[str, Callable[..., partition.Partition]] = {
    "by_classes": partition.by_classes,
    "dirichlet": partition.dirichlet,
    "by_group": partition.by_group,
    "by_coarse_class": partition.by_coarse_class,
}
LENET_SIZES = {"lenet": 16, "lenet-s": 8, "lenet-m": 16, "lenet-l": 32}
TABLE_ENDINGS = (".csv", ".tsv", ".parquet")
FEDERATION_FIELDS = ("dataset", "clients", "partition", "split", "stratify", "data_seed", "labels", "columns")
SECONDS_FOR_A_LOCK = 5.0  # a worker whose parent was killed needs a round to notice


@dataclass(frozen=True)
class Cell:
    """One method on one federation; with a seed it is a run. The fields of an experiment file are these."""

    method: str = "pfedhn"
    dataset: str = "digits"  # or a path: a folder with a folder per client, or a table (.csv, .tsv, .parquet)
    clients: int = 50
    partition: Mapping[str, Any] = field(default_factory=lambda: {"rule": "by_classes", "classes_per_client": 5})
    split: tuple[float, float, float] = (0.7, 0.15, 0.15)
    stratify: bool = False
    data_seed: int | None = None  # of the split; the run's seed by default
    labels: Literal["global", "within-group"] = "global"
    columns: Mapping[str, str] = field(default_factory=dict)  # of a table: which one names the client, which the label
    model: str = "mlp-32"
    steps: int = 5_000
    cohort_size: int | None = None
    batch_size: int = 64
    evaluate_every: int = 30
    pretrain: str | None = None  # the method whose last model every client starts from
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the method


@dataclass(frozen=True)
class Experiment:
    """A named set of cells, each run with every seed."""

    name: str
    cells: tuple[Cell, ...]
    seeds: tuple[int, ...] = (0, 1, 2)
    title: str = ""
    published: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # "method/clients" -> mean, deviation

    def runs(self) -> dict[str, tuple[Cell, int]]:
        """Every run by the name of its folder."""
        names = cell_names(self.cells)
        return {
            f"{name}-seed{seed}": (cell, seed)
            for name, cell in zip(names, self.cells, strict=True)
            for seed in self.seeds
        }


def dataset_name(cell: Cell) -> str:
    """The data set's name; of one given by its path, the last part."""
    return Path(cell.dataset).stem if is_own_data(cell.dataset) else cell.dataset


def is_own_data(dataset: str) -> bool:
    return dataset not in datasets.DATASETS and (
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
    """What tells each cell from the others of its method, data set and number of clients."""

    def group(cell: Cell) -> tuple[str, str, int]:
        return cell.method, cell.dataset, cell.clients

    values = [flat_fields(cell) for cell in cells]
    groups: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
    for cell, mine in zip(cells, values, strict=True):
        groups.setdefault(group(cell), []).append(mine)
    return [
        {
            name: value
            for name, value in mine.items()
            if any(other.get(name) != value for other in groups[group(cell)]) and value is not None
        }
        for cell, mine in zip(cells, values, strict=True)
    ]


def cell_names(cells: Sequence[Cell]) -> list[str]:
    """A folder's name for each cell: what a person would call it, and a digest only where that is not enough."""
    names = []
    for cell, different in zip(cells, distinctions(cells), strict=True):
        words = [cell.method, dataset_name(cell), str(cell.clients)]
        words += [f"{key.removeprefix('partition.')}={value}" for key, value in different.items()]
        names.append(re.sub(r"[^A-Za-z0-9._=-]+", "_", "-".join(words)))
    return [
        f"{name[:80]}-{cell_digest(cell)[:8]}" if len(name) > 100 or names.count(name) > 1 else name
        for name, cell in zip(names, cells, strict=True)
    ]


def cell_digest(cell: Cell) -> str:
    return hashlib.sha256(json.dumps(asdict(cell), sort_keys=True).encode()).hexdigest()


def check(experiment: Experiment) -> None:
    """Refuse what could not run before anything is written."""
    if not experiment.cells:
        raise SettingError(f"the experiment {experiment.name!r} has no cells.")
    if not re.fullmatch(r"[\w.=+-]+", experiment.name) or set(experiment.name) == {"."}:
        raise SettingError(
            f"name = {experiment.name!r} does not fit; it names a folder, so use letters, digits, - and _."
        )
    for cell in experiment.cells:
        cell_algorithm(cell)
        if cell.dataset not in datasets.DATASETS and not is_own_data(cell.dataset):
            raise SettingError(f"there is no data set {cell.dataset!r}; {closest(cell.dataset, datasets.DATASETS)}")
        for name in ("steps", "batch_size", "evaluate_every", "clients", "cohort_size"):
            if (value := getattr(cell, name)) is not None and value < 1:
                raise SettingError(f"{name} = {value} does not fit; it must be at least 1.")
        build_partition(cell)
        check_model_name(cell.model)
        if cell.pretrain is not None:
            if cell.pretrain not in ALGORITHMS:
                raise SettingError(f"pretrain names no method: {cell.pretrain!r}; {closest(cell.pretrain, ALGORITHMS)}")
            pretraining_cell(experiment, cell)


def cell_algorithm(cell: Cell) -> AnyAlgorithm:
    kind = type(build_algorithm(cell.method))
    return build_algorithm(cell.method, checked(kind, cell.settings, cell.method))


def from_toml(path: Path) -> Experiment:
    """A user's own experiment; lists in scalar fields make a grid, `[methods.NAME]` holds what differs by method.

    The rates that `pfedhn tune` chose for it are read from the file beside it: `mine.rates.toml` for `mine.toml`.
    """
    try:
        table = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingError(f"{path} is not valid TOML: {error}.") from None
    experiment = from_table(table, path.stem)
    cells = [replace(cell, dataset=_absolute(cell.dataset, path.parent)) for cell in experiment.cells]
    experiment = replace(experiment, cells=tuple(cells))
    chosen = rates_file(path)
    return with_rates(experiment, rates_for(experiment.name, chosen)) if chosen.exists() else experiment


def _absolute(dataset: str, base: Path) -> str:
    """A path is meant from where its file lies, or from here; made absolute, a run can be resumed from anywhere."""
    is_path = is_own_data(dataset) or (dataset not in datasets.DATASETS and (base / dataset).is_dir())
    return str((base / dataset).resolve()) if is_path else dataset


Rates: TypeAlias = dict[str, dict[str, Any]]
"""Settings by method, as `pfedhn tune` chooses them."""

RATES_HEADING = """\
# Learning rates that `pfedhn tune` chose on validation rows: a heading for each experiment and method.
# It writes this file anew and keeps the headings that it did not tune; comments are lost.
"""


def rates_file(experiment_file: Path) -> Path:
    """Where the rates that were chosen for a user's experiment are kept."""
    return experiment_file.with_suffix(".rates.toml")


def read_rates(file: Path) -> dict[str, Rates]:
    """The rates of a file by experiment, every method and setting checked."""
    try:
        table = tomllib.loads(file.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingError(f"{file} is damaged ({error}); mend or remove it.") from None
    for experiment, by_method in table.items():
        if not isinstance(by_method, Mapping) or not all(isinstance(part, Mapping) for part in by_method.values()):
            raise SettingError(f"{file}: {experiment!r} does not fit; write rates under headings [EXPERIMENT.METHOD].")
        for method, settings in by_method.items():
            if method not in ALGORITHMS:
                raise SettingError(f"{file}: [{experiment}.{method}] names no method; {closest(method, ALGORITHMS)}")
            checked(type(build_algorithm(method)), settings, f"{file}: [{experiment}.{method}]")
    return table


def rates_for(experiment: str, file: Path, stand_in: str | None = None) -> Rates:
    """The rates of one experiment, or of the one whose rates it takes if it has none of its own."""
    table = read_rates(file)
    for name in (experiment, stand_in):
        if name in table:
            return table[name]
    held = f"it holds {', '.join(map(repr, table))}" if table else "it is empty"
    raise SettingError(f"{file} has no rates for {experiment!r}; {held}.")


def with_rates(experiment: Experiment, rates: Rates) -> Experiment:
    """The cells of the methods named with these settings; a method that is not named keeps its own."""
    cells = [
        replace(cell, settings={**cell.settings, **rates[cell.method]}) if cell.method in rates else cell
        for cell in experiment.cells
    ]
    return replace(experiment, cells=_distinct(cells))


def save_rates(file: Path, experiment: str, rates: Rates) -> None:
    """Put the rates of some methods of an experiment into a file, and keep what else it holds."""
    table = read_rates(file) if file.exists() else {}
    table[experiment] = {**table.get(experiment, {}), **rates}
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, f"{RATES_HEADING}\n{to_toml(table)}".encode())


def from_table(table: Mapping[str, Any], name: str) -> Experiment:
    """An experiment from the content of a TOML file: a grid, or the list of cells that a run directory keeps."""
    table = {key: value for key, value in table.items() if key not in ("planned", "options")}  # a directory's own
    heading = {key: table.pop(key, default) for key, default in (("name", name), ("title", ""))}
    for key, value in heading.items():
        if not isinstance(value, str):
            raise SettingError(f"{key} = {value!r} does not fit; it must be a text.")
    seeds = table.pop("seeds", [0, 1, 2])
    if not isinstance(seeds, list) or not seeds or not all(fits(seed, int) for seed in seeds):
        raise SettingError(f"seeds = {seeds!r} does not fit; it must be a list of whole numbers.")
    published = _published(table.pop("published", {}))
    if "cells" in table:
        listed = table.pop("cells")
        if not isinstance(listed, list) or not all(isinstance(cell, Mapping) for cell in listed):
            raise SettingError("cells does not fit; write each cell under a heading [[cells]].")
        cells = [build(Cell, cell, f"cell {number}") for number, cell in enumerate(listed)]
        if table:
            raise SettingError(f"beside `cells` stands {next(iter(table))!r}; a file has either cells or a grid.")
    else:
        cells = list(_cells_of_grid(table, heading["name"]))
    return Experiment(heading["name"], _distinct(cells), tuple(dict.fromkeys(seeds)), heading["title"], published)


def _published(table: Any) -> dict[str, tuple[float, float]]:
    pairs: dict[str, tuple[Any, ...]] = {}
    if isinstance(table, Mapping):
        pairs = {name: tuple(value) for name, value in table.items() if isinstance(value, list)}
    if not isinstance(table, Mapping) or len(pairs) != len(table) or not all(map(_is_pair, pairs.values())):
        raise SettingError('published does not fit; write lines such as "pfedhn/50" = [88.38, 0.29].')
    return {name: (mean, deviation) for name, (mean, deviation) in pairs.items()}


def _is_pair(value: Any) -> bool:
    return fits(value, tuple[float, float])


def _cells_of_grid(table: dict[str, Any], name: str) -> Iterator[Cell]:
    by_method = table.pop("methods", {})
    if not isinstance(by_method, Mapping) or not all(isinstance(part, Mapping) for part in by_method.values()):
        raise SettingError(
            "methods does not fit; write what differs by method under headings such as [methods.pfedhn]."
        )
    methods = table.pop("method", list(by_method) or ["pfedhn"])
    methods = methods if isinstance(methods, list) else [methods]
    for method in by_method:
        if method not in ALGORITHMS:
            raise SettingError(f"[methods.{method}] names no method; {closest(method, ALGORITHMS)}")
        if method not in methods:
            raise SettingError(f"[methods.{method}] has no cell to change; add it to method = {methods!r}.")
    for method in methods:
        for point in _grid({"method": method} | table, {item.name: None for item in fields(Cell)}):
            cell = build(Cell, point, name)
            hints = get_type_hints(type(build_algorithm(method)))
            for values in _grid(by_method.get(method, {}), hints):
                for settings in _grid(cell.settings, hints):
                    yield _with_values(replace(cell, settings=settings), values)


def _grid(table: Mapping[str, Any], hints: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Every combination of the values of the lists that stand where one value is meant."""
    cell_hints = get_type_hints(Cell)
    for key, value in table.items():
        hint = hints.get(key) or cell_hints.get(key)
        if isinstance(value, list) and hint is not None and not _takes_list(hint):
            if not value:
                raise SettingError(f"{key} = [] does not fit; a list here stands for several runs, so name some.")
            for entry in value:
                yield from _grid({**table, key: entry}, hints)
            return
    yield dict(table)


def _takes_list(hint: Any) -> bool:
    return fits((), hint) or fits((0.0, 0.0, 0.0), hint)  # names of layers; the split


def _distinct(cells: Iterable[Cell]) -> tuple[Cell, ...]:
    return tuple({cell_digest(cell): cell for cell in cells}.values())


def _with_values(cell: Cell, values: Mapping[str, Any]) -> Cell:
    """A cell with some fields or method settings changed; "partition.alpha" reaches into a table."""
    names = [item.name for item in fields(Cell)]
    table = asdict(cell)
    for name, value in values.items():
        head, _, rest = name.partition(".")
        if name in names:
            table[name] = _joined(name, table[name], value) if isinstance(value, Mapping) else value
        elif rest and head in ("partition", "settings", "columns"):
            table[head] = _joined(head, table[head], {rest: value})
        else:
            table["settings"] = {**table["settings"], name: value}
    return build(Cell, table, f"the {cell.method} cell")


def _joined(name: str, before: Any, change: Mapping[str, Any]) -> dict[str, Any]:
    """A table with some entries changed; the settings of one partition rule mean nothing to another."""
    other_rule = name == "partition" and change.get("rule", before.get("rule")) != before.get("rule")
    return dict(change) if other_rule else {**before, **change}


def with_assignments(experiment: Experiment, values: Mapping[str, Any]) -> Experiment:
    """`--set`: a field of every cell, a setting of every method that has it, or "method.setting" for one method."""
    cells = list(experiment.cells)
    names = {item.name for item in fields(Cell)}
    # A new partition rule first: it clears the settings of the old one, not those given beside it.
    for name, value in sorted(values.items(), key=lambda item: not item[0].endswith("partition.rule")):
        head, _, rest = name.partition(".")
        target = rest if head in ALGORITHMS and rest else name
        reached = False
        for number, cell in enumerate(cells):
            if target != name and head != cell.method:
                continue
            is_field = target in names or target.partition(".")[0] in ("partition", "settings", "columns")
            if target == "dataset" and isinstance(value, str):
                value = _absolute(value, Path.cwd())
            if is_field or target in _setting_names(cell.method):
                cells[number] = _with_values(cell, {target: value})
                reached = True
        if not reached:
            known = sorted(names.union(*(_setting_names(cell.method) for cell in cells)))
            raise SettingError(f"--set: no cell has a field {name!r}; {closest(name, known)}")
    return replace(experiment, cells=_distinct(cells))


def _setting_names(method: str) -> set[str]:
    return {item.name for item in fields(type(build_algorithm(method)))}  # type: ignore[arg-type]


def select(experiment: Experiment, only: Sequence[str], seeds: Sequence[int] | None) -> list[str]:
    """`--only`: the names of the runs that match every field; a field given several times takes any of its values.

    `name` is the run's folder without its seed.
    """
    wanted: dict[str, list[str]] = {}
    known = list(dict.fromkeys(["name", *(key for cell in experiment.cells for key in flat_fields(cell))]))
    for text in (part for entry in only for part in entry.split(",")):
        name, separator, value = text.strip().partition("=")
        if not separator:
            raise SettingError(f"--only takes field=value, not {text!r}.")
        if name not in known:
            raise SettingError(f"--only: there is no field {name!r}; {closest(name, known)}")
        wanted.setdefault(name, []).append(value)

    def matches(run: str, cell: Cell) -> bool:
        values = {"name": run.rpartition("-seed")[0], **flat_fields(cell)}
        return all(
            any(str(values.get(name)) == text or values.get(name) == parse_value(text) for text in texts)
            for name, texts in wanted.items()
        )

    all_runs = replace(experiment, seeds=tuple(seeds or experiment.seeds)).runs()
    chosen = [run for run, (cell, _) in all_runs.items() if matches(run, cell)]
    if not chosen:
        raise SettingError(f"--only {' '.join(only)} leaves no run of {experiment.name!r}.")
    return chosen


def build_partition(cell: Cell) -> partition.Partition:
    settings = {name: None if value == "none" else value for name, value in cell.partition.items()}
    rule = settings.pop("rule", None)
    if rule not in PARTITIONS:
        raise SettingError(f"partition: there is no rule {rule!r}; {closest(str(rule), PARTITIONS)}")
    known = inspect.signature(PARTITIONS[rule]).parameters
    if "num_clients" in known:
        settings.setdefault("num_clients", cell.clients)
    hints = get_type_hints(PARTITIONS[rule])
    for name, value in settings.items():
        if name not in known:
            raise SettingError(f"partition {rule} has no setting {name!r}; {closest(name, known)}")
        if not fits(value, hints[name]):
            raise SettingError(
                f"partition {rule}: {name} = {value!r} does not fit; it must be {describe(hints[name])}."
            )
    missing = [n for n, p in known.items() if p.default is p.empty and n not in settings]
    if missing:
        raise SettingError(f"partition {rule} needs {', '.join(missing)}.")
    return PARTITIONS[rule](**settings)


@lru_cache(maxsize=2)
def _dataset(name: str, data_dir: Path | None) -> datasets.Dataset:
    return datasets.load(name, data_dir)


@lru_cache(maxsize=2)
def _rows_on(name: str, data_dir: Path | None, device: str) -> torch.Tensor:
    """All rows of a data set, test rows last, on a device: runs side by side share them."""
    data = _dataset(name, data_dir)
    x = data.x if data.test_x is None else torch.cat([data.x, data.test_x])
    x = x.to(device)
    return x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x


def build_federation(cell: Cell, seed: int, data_dir: Path | None = None, device: str = "cpu") -> Federation:
    seed = seed if cell.data_seed is None else cell.data_seed
    own = is_own_data(cell.dataset)
    federation = _own_federation(cell, seed) if own else _known_federation(cell, seed, data_dir, device)
    fixed = own or cell.partition["rule"] in ("by_group", "by_coarse_class")
    if fixed and federation.num_clients != cell.clients:
        number = federation.num_clients
        raise SettingError(
            f"clients = {cell.clients}, but {cell.dataset} has {number} clients; set clients = {number}."
        )
    return federation


def _own_federation(cell: Cell, seed: int) -> Federation:
    if not cell.dataset.lower().endswith(TABLE_ENDINGS):
        _, clients = datasets.from_folders(cell.dataset)
        return Federation.from_clients(clients, split=cell.split, seed=seed)
    if missing := [name for name in ("client", "label") if name not in cell.columns]:
        raise SettingError(
            f'{cell.dataset} is a table; say which column is the {missing[0]}: columns.{missing[0]} = "...".'
        )
    table = datasets.from_table(cell.dataset, cell.columns["client"], cell.columns["label"])
    return Federation.from_arrays(
        table.x,
        table.y,
        partition.by_group(),
        split=cell.split,
        seed=seed,
        groups=table.groups,
        stratify=cell.stratify,
    )


def _known_federation(cell: Cell, seed: int, data_dir: Path | None, device: str) -> Federation:
    data = _dataset(cell.dataset, data_dir)
    labels = data.y
    if cell.labels == "within-group":
        if data.within is None:
            raise SettingError(f"{cell.dataset} has no groups to number labels within; use labels = 'global'.")
        labels = data.within
    pools, unused = share_out(
        data.y,
        build_partition(cell),
        split=cell.split,
        seed=seed,
        test_labels=data.test_y,
        groups=None if data.groups is None else data.groups.numpy(),
        coarse=None if data.coarse is None else data.coarse.numpy(),
        test_coarse=None if data.test_coarse is None else data.test_coarse.numpy(),
        stratify=cell.stratify,
    )
    y = labels if data.test_y is None else torch.cat([labels, data.test_y])
    rows = Federation(_rows_on(cell.dataset, data_dir, device), y, pools, unused)
    return rows.with_training_rows()


def check_model_name(name: str) -> None:
    """A target network by name: lenet-s, lenet (m), lenet-l, omniglot, or mlp-32-16 for hidden layers of 32 and 16."""
    if name not in LENET_SIZES and name != "omniglot" and not re.fullmatch(r"mlp(-[1-9]\d*)*", name):
        raise SettingError(
            f"there is no target network {name!r}; {closest(name, [*LENET_SIZES, 'omniglot', 'mlp-32'])}"
        )


def build_factory(cell: Cell, federation: Federation) -> Factory:
    check_model_name(cell.model)
    num_classes, shape = federation.num_classes or 1, federation.x.shape[1:]
    if cell.model in LENET_SIZES:
        return lambda: models.LeNet(num_classes, LENET_SIZES[cell.model], shape[0])
    if cell.model == "omniglot":
        return lambda: models.OmniglotNet(num_classes)
    hidden = [int(width) for width in cell.model.split("-")[1:]]
    return lambda: models.MLP(int(numpy.prod(shape)), *hidden, num_classes)


def build_simulation(
    cell: Cell,
    seed: int,
    *,
    data_dir: Path | None = None,
    device: str = "cpu",
    executor: str = "auto",
    starts: Mapping[str, Params] | None = None,
) -> Simulation:
    federation = build_federation(cell, seed, data_dir, device).to(device)
    model = build_model(cell.model, build_factory(cell, federation), federation)
    algorithm = cell_algorithm(cell).for_clients(federation.num_clients, federation.descriptor_dim)
    size = min(algorithm.usual_cohort_size, federation.num_clients) if cell.cohort_size is None else cell.cohort_size
    schedule = Schedule(cell.steps, size, cell.batch_size, cell.evaluate_every)
    return Simulation(algorithm, {model.name: model}, federation, schedule, seed, executor, starts)


@dataclass(frozen=True)
class Options:
    """How to run, where that is no part of the experiment itself; a directory keeps them for `--resume`."""

    source: str = ""  # the experiment's name, or its file
    assignments: tuple[str, ...] = ()  # as given to --set
    data_dir: Path | None = None
    device: str = "cpu"
    executor: str = "auto"
    checkpoint_every: int | None = None
    threads: int | None = None  # of each run: with another number its sums round otherwise, and the bits differ
    precision: str = "tf32"  # of products on a GPU, or fp32
    deterministic: bool = False  # the same bits from the same GPU and versions
    rates: Path | None = None  # as given to --rates

    def check(self) -> None:
        if self.executor not in (known := ["auto", *EXECUTORS, "captured"]):
            raise SettingError(f"there is no executor {self.executor!r}; {closest(self.executor, known)}")
        if self.precision not in ("tf32", "fp32"):
            raise SettingError(f"--precision is {self.precision!r}; it must be tf32 or fp32.")
        for name in ("checkpoint_every", "threads"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise SettingError(f"--{name.replace('_', '-')} is {value}; it must be at least 1.")

    def with_threads(self, num_runs: int, jobs: int | None) -> "Options":
        """Share the cores among the runs side by side, unless it was said how many threads each has."""
        if self.threads is not None or self.device != "cpu":
            return self
        return replace(self, threads=max(1, num_cores() // num_jobs(num_runs, jobs)))

    def engine(self) -> dict[str, Any]:
        return {"data_dir": self.data_dir, "device": self.device, "executor": self.executor}


@dataclass(frozen=True)
class Directory:
    """The files of one experiment."""

    path: Path

    def refuse_other(self, experiment: Experiment) -> None:
        """Only an empty directory or one that holds this very experiment will do."""
        if (self.path / "experiment.toml").exists():
            stored, _ = self.read()
            if _plain(asdict(stored)) != _plain(asdict(experiment)):
                raise RunError(
                    f"{self.path} holds another experiment ({stored.name!r}, or other settings of it); "
                    "give another --out, or the command it was made with."
                )
        elif self.path.exists() and any(self.path.iterdir()):
            raise RunError(f"{self.path} is not empty and holds no experiment; give another --out.")

    def open(self, experiment: Experiment, planned: Sequence[str], options: Options | None = None) -> None:
        """Claim the directory for an experiment, or refuse one that holds another."""
        check(experiment)
        self.refuse_other(experiment)
        before = self.read()[1] if (self.path / "experiment.toml").exists() else []
        self.path.mkdir(parents=True, exist_ok=True)
        table = {**_plain(asdict(experiment)), "planned": list(dict.fromkeys([*before, *planned]))}
        if options is not None:
            table["options"] = {name: value for name, value in asdict(options).items() if value is not None}
            for name in ("data_dir", "rates"):
                if (place := getattr(options, name)) is not None:
                    table["options"][name] = str(place.resolve())
        write_atomically(self.path / "experiment.toml", to_toml(table).encode())

    def read(self) -> tuple[Experiment, list[str]]:
        """The stored experiment and the runs that were asked for so far."""
        table = self._table()
        try:
            experiment = from_table(table, self.path.name)
            planned = [str(name) for name in table["planned"]]
        except (KeyError, TypeError, ValueError) as error:
            raise RunError(f"{self.path / 'experiment.toml'} is damaged ({error}); give another --out.") from None
        return experiment, planned

    def options(self) -> Options:
        """How the runs were last started."""
        stored = dict(self._table().get("options", {}))
        for name in ("data_dir", "rates"):
            if name in stored:
                stored[name] = Path(stored[name])
        return build(Options, stored, "options")

    def results(self) -> dict[str, dict[str, Any]]:
        """What finished runs reported, by run name."""
        return {
            file.parent.name: result
            for file in sorted(self.path.glob("*/result.json"))
            if (result := read_result(file.parent)) is not None
        }

    def _table(self) -> dict[str, Any]:
        file = self.path / "experiment.toml"
        if not file.exists():
            raise RunError(
                f"{self.path} holds no experiment to go on with; `pfedhn run NAME --out {self.path}` starts one."
            )
        try:
            return tomllib.loads(file.read_text())
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise RunError(f"{file} is damaged ({error}); give another --out.") from None


def _plain(value: Any) -> Any:
    """Values as TOML gives them back: lists for tuples, "none" inside tables of settings."""
    if isinstance(value, Mapping):
        return {
            key: {k: "none" if v is None else _plain(v) for k, v in part.items()}
            if isinstance(part, Mapping)
            else _plain(part)
            for key, part in value.items()
            if part is not None
        }
    return [_plain(part) for part in value] if isinstance(value, list | tuple) else value


def read_result(folder: Path) -> dict[str, Any] | None:
    """What a finished run reported; None while it is not finished."""
    file = folder / "result.json"
    if not file.exists():
        return None
    try:
        result: dict[str, Any] = json.loads(file.read_text())
    except ValueError:
        raise RunError(f"{file} is damaged; remove it and run again: the run's checkpoint is still there.") from None
    return result


def run_one(directory: Path, experiment: Experiment, name: str, **options: Any) -> dict[str, Any]:
    """One run to its end in its folder, and what it found; a finished run is only read. Options as `running_one`."""
    with stop_on_signal() as stop:
        return drain(running_one(directory, experiment, name, stop, **options))


def running_one(
    directory: Path,
    experiment: Experiment,
    name: str,
    stop: threading.Event,
    *,
    data_dir: Path | None = None,
    device: str = "cpu",
    executor: str = "auto",
    watch: Callable[[str, Simulation], Watch] | None = None,
    say: Callable[[str], None] = print,
    checkpoint_every: int | None = None,
    threads: int | None = None,
    command: str = "",
) -> Generator[None, None, dict[str, Any]]:
    """`run_one`, pausing after every round so that several runs can take turns on one device."""
    cell, seed = find_run(experiment, name)
    folder = directory / name
    if stored := read_result(folder):
        return stored
    folder.mkdir(parents=True, exist_ok=True)
    engine: dict[str, Any] = {"data_dir": data_dir, "device": device, "executor": executor}
    with _claimed(folder), _computing_with(_stored_threads(folder) or threads):
        before: dict[str, Any] = {}
        starts = None
        if cell.pretrain is not None:
            before, starts = _pretrained(
                directory, experiment, cell, seed, engine, watch, say, checkpoint_every, threads
            )
        simulation = build_simulation(cell, seed, **engine, starts=starts)
        spec = {"name": name, "seed": seed, "threads": torch.get_num_threads(), **asdict(cell)}
        write_atomically(folder / "spec.toml", to_toml(_plain(spec)).encode())
        watcher = watch(name, simulation) if watch else None
        run = yield from executing(simulation, folder, stop, watcher, say, checkpoint_every)
        result = {
            "name": name,
            "experiment": experiment.name,
            "cell": asdict(cell),
            "seed": seed,
            **run.summary(),
            **({"pretrain": before} if before else {}),
            "unused_rows": dict(simulation.federation.unused),
            "partition_sha256": partition_digest(simulation.federation),
            "command": command,
            "environment": environment(device),
        }
        write_atomically(folder / "result.json", json.dumps(result, indent=1).encode())
    return result


def find_run(experiment: Experiment, name: str) -> tuple[Cell, int]:
    """The cell and the seed of a run, also of a seed that was given on the command line."""
    _, separator, seed = name.rpartition("-seed")
    runs = replace(experiment, seeds=(int(seed),)).runs() if separator and re.fullmatch(r"-?\d+", seed) else {}
    if name not in runs:
        raise RunError(f"{experiment.name!r} has no run {name!r}.")
    return runs[name]


@contextmanager
def _claimed(folder: Path) -> Iterator[None]:
    """Keep a second process out of a run's folder; the system lets go of the lock however this one ends."""
    try:
        import fcntl
    except ImportError:  # not on this system
        yield
        return
    deadline = time.monotonic() + SECONDS_FOR_A_LOCK
    with (folder / ".lock").open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    break  # a file system without locks
                if time.monotonic() > deadline:
                    raise RunError(f"{folder} is being run by another process; wait for it or stop it.") from None
                time.sleep(0.1)
        yield


def _stored_threads(folder: Path) -> int | None:
    """How many threads the run began with: with another number its sums would round otherwise."""
    try:
        threads = tomllib.loads((folder / "spec.toml").read_text())["threads"]
    except (OSError, ValueError, KeyError):
        return None
    return threads if fits(threads, int) else None


@contextmanager
def _computing_with(threads: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def pretraining_cell(experiment: Experiment, cell: Cell) -> Cell:
    """The cell whose last model `cell` starts from: its `pretrain` method on the same federation and network."""
    fitting = [
        other
        for other in experiment.cells
        if other.method == cell.pretrain
        and all(getattr(other, name) == getattr(cell, name) for name in (*FEDERATION_FIELDS, "model"))
    ]
    if not fitting:
        raise RunError(
            f"{cell.method} starts from a {cell.pretrain} run, which {experiment.name!r} does not have on the same "
            "data and network; add that cell."
        )
    mine = flat_fields(cell)
    return max(fitting, key=lambda other: sum(mine.get(key) == value for key, value in flat_fields(other).items()))


def pretraining_run(experiment: Experiment, name: str) -> str | None:
    """The run that has to be finished before the one named can start."""
    cell, seed = find_run(experiment, name)
    if cell.pretrain is None:
        return None
    earlier = pretraining_cell(experiment, cell)
    return next(n for n, value in replace(experiment, seeds=(seed,)).runs().items() if value == (earlier, seed))


def with_pretraining(experiment: Experiment, names: Iterable[str]) -> list[str]:
    """The runs and those they start from, these first."""
    ordered: dict[str, None] = {}
    for name in names:
        chain = [name]
        while (earlier := pretraining_run(experiment, chain[0])) is not None:
            if earlier in chain:
                raise SettingError(f"{name} would start from itself; mend its pretrain.")
            chain.insert(0, earlier)
        ordered |= dict.fromkeys(chain)
    return list(ordered)


def _pretrained(
    directory: Path,
    experiment: Experiment,
    cell: Cell,
    seed: int,
    engine: Mapping[str, Any],
    watch: Callable[[str, Simulation], Watch] | None,
    say: Callable[[str], None],
    checkpoint_every: int | None,
    threads: int | None,
) -> tuple[dict[str, Any], dict[str, Params]]:
    """The earlier stage of a method such as LG-FedAvg: its cost, and the model of its last round."""
    earlier = pretraining_cell(experiment, cell)
    name = next(n for n, value in replace(experiment, seeds=(seed,)).runs().items() if value == (earlier, seed))
    result = run_one(
        directory,
        experiment,
        name,
        **engine,
        watch=watch,
        say=say,
        checkpoint_every=checkpoint_every,
        threads=threads,
    )
    simulation = build_simulation(earlier, seed, **engine)
    state, _ = load_state(directory / name, simulation)
    if state is None:
        raise CheckpointError(f"{directory / name} has lost its checkpoint; remove the folder and run again.")
    weights = Run(simulation, state).personal_weights(0, last=True)
    cost = {key: result[key] for key in ("name", "steps", "bytes_down", "bytes_up", "seconds")}
    return cost, {cell.model: weights}


def prepare(directory: Path, experiment: Experiment, names: Sequence[str], options: Options) -> None:
    """Build each cell once, so that data or settings that cannot work are refused before anything is written."""
    seen: list[Cell] = []
    for name in names:
        cell, seed = find_run(experiment, name)
        if cell not in seen and not (directory / name / "result.json").exists():
            seen.append(cell)
            build_simulation(cell, seed, **options.engine())
    if options.device == "cpu":  # worker processes read their own
        _dataset.cache_clear()
        _rows_on.cache_clear()


class Failure(NamedTuple):
    """Why a run did not finish."""

    sentence: str
    is_bad_input: bool  # else something happened on the way: divergence, a full disk
    has_diverged: bool = False


@dataclass
class Outcome:
    """What came of several runs."""

    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    failures: dict[str, Failure] = field(default_factory=dict)


Listener: TypeAlias = Callable[[Event], None]

MAX_RUNS_ON_DEVICE = 24  # a card is busy long before; more only wait longer for their first result


def num_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def num_jobs(num_runs: int, wanted: int | None) -> int:
    return max(1, min(num_runs, wanted or num_cores()))


def run_many(
    directory: Path,
    experiment: Experiment,
    names: Sequence[str],
    *,
    jobs: int | None = None,
    options: Options | None = None,
    listen: Listener = lambda event: None,
) -> Outcome:
    """Runs side by side, each in a process of its own; with one job, one after the other in this process.

    A run that fails does not stop the others. Ctrl-C lets every run write a checkpoint, then raises KeyboardInterrupt.

    jobs: by default as many as there are runs or cores, whichever is less; on a GPU one.
    """
    names = with_pretraining(experiment, names)
    options = (options or Options()).with_threads(
        len(names), jobs
    )  # as if none were finished: the bits must not change
    outcome = Outcome()
    waiting = []
    for name in names:
        if (result := read_result(directory / name)) is not None:
            outcome.results[name] = result
        else:
            waiting.append(name)
    queue = _Queue(experiment, waiting, outcome, listen)
    if options.device != "cpu":
        set_up_gpu(options.precision, options.deterministic)
        _take_turns(queue, directory, jobs, options)
        return outcome
    jobs = num_jobs(len(waiting), jobs)
    if jobs == 1:
        while (next_run := queue.take()) is not None:
            queue.end(next_run, _attempt(directory, experiment, next_run, options, listen))
    else:
        # Those of most rounds take longest; started last, they would leave the other cores idle at the end.
        queue.waiting.sort(key=lambda name: -_num_rounds(experiment, name))
        _run_side_by_side(queue, directory, jobs, options)
    return outcome


def _num_rounds(experiment: Experiment, name: str) -> float:
    cell, _ = find_run(experiment, name)
    algorithm = cell_algorithm(cell)
    size = cell.cohort_size or algorithm.usual_cohort_size
    return cell.steps / (size if algorithm.communicates else cell.clients)


@dataclass
class _Queue:
    """Runs that wait for a turn, or for the run they start from."""

    experiment: Experiment
    waiting: list[str]
    outcome: Outcome
    listen: Listener

    def take(self) -> str | None:
        """A run that can start now; None if there is none."""
        for name in list(self.waiting):
            earlier = pretraining_run(self.experiment, name)
            if earlier in self.outcome.failures:
                self.waiting.remove(name)
                self.end(name, Failure(f"the run it starts from, {earlier}, failed.", False))
            elif earlier is None or earlier in self.outcome.results:
                self.waiting.remove(name)
                return name
        return None

    def end(self, name: str, ending: dict[str, Any] | Failure) -> None:
        if isinstance(ending, Failure):
            self.outcome.failures[name] = ending
            self.listen(Failed(name, ending.sentence))
        else:
            self.outcome.results[name] = ending
            self.listen(Finished(name, ending))


def _attempt(
    directory: Path, experiment: Experiment, name: str, options: Options, listen: Listener
) -> dict[str, Any] | Failure:
    try:
        with stop_on_signal() as stop:
            return drain(_running(directory, experiment, name, options, listen, stop))
    except Exception as error:
        return _failure(error, directory / name)


def _running(
    directory: Path, experiment: Experiment, name: str, options: Options, listen: Listener, stop: threading.Event
) -> Generator[None, None, dict[str, Any]]:
    cell, seed = find_run(experiment, name)
    return running_one(
        directory,
        experiment,
        name,
        stop,
        **options.engine(),
        watch=lambda run, simulation: watch_run(run, simulation, listen),
        say=lambda sentence: listen(Said(name, sentence)),
        checkpoint_every=options.checkpoint_every,
        threads=options.threads,
        command=rerun_command(experiment, cell, seed, options),
    )


def _failure(error: Exception, folder: Path) -> Failure:
    failure = failure_from(error)
    if failure is None:
        log = folder / "error.txt"
        failure = Failure(f"{first_line(error)} (an error inside pfedhn; the details are in {log}).", False)
        try:
            log.write_text("".join(traceback.format_exception(error)))
        except OSError:  # the disk may be what failed
            failure = Failure(f"{first_line(error)} (an error inside pfedhn).", False)
    return failure


def _take_turns(queue: _Queue, directory: Path, jobs: int | None, options: Options) -> None:
    """Runs side by side on one device, in this process: each queues a round on a stream of its own, then the next."""
    going: dict[str, Generator[None, None, dict[str, Any]]] = {}
    with stop_on_signal() as stop:
        while True:
            while len(going) < (jobs or MAX_RUNS_ON_DEVICE) and (jobs or not going or _has_room(options.device)):
                if (name := queue.take()) is None:
                    break
                going[name] = _running(directory, queue.experiment, name, options, queue.listen, stop)
                _advance(queue, going, name, directory)  # its first round shows how much room it takes
            if not going:
                return
            is_stopped = False
            for name in list(going):
                try:
                    _advance(queue, going, name, directory)
                except KeyboardInterrupt:  # it wrote its checkpoint; the others write theirs
                    is_stopped = True
            if is_stopped:
                raise KeyboardInterrupt


def _advance(
    queue: _Queue, going: dict[str, Generator[None, None, dict[str, Any]]], name: str, directory: Path
) -> None:
    try:
        next(going[name])
        return
    except StopIteration as end:
        queue.end(name, end.value)
    except Exception as error:
        queue.end(name, _failure(error, directory / name))
    del going[name]


def _has_room(device: str) -> bool:
    """Whether one more run fits on the device."""
    if not device.startswith("cuda"):
        return True
    free, total = torch.cuda.mem_get_info(device)
    return free > total / 8


def failure_from(error: BaseException) -> Failure | None:
    """An error that a person can do something about, in one sentence; None for one that only we can."""
    if isinstance(error, Diverged | CheckpointError):
        return Failure(str(error), False, isinstance(error, Diverged))
    if isinstance(error, OSError) and error.strerror is not None:
        where = f"{error.filename}: " if error.filename is not None else ""
        return Failure(f"{where}{error.strerror[:1].lower()}{error.strerror[1:]}{_way_out(error.errno)}.", False)
    if isinstance(error, RunError | ValueError) and not isinstance(error, UnicodeError):
        return Failure(str(error), True)
    return None


def _way_out(number: int | None) -> str:
    if number in (errno.ENOSPC, errno.EDQUOT):
        return "; make room, and the same command goes on from the last checkpoint"
    if number in (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST):
        return "; give a folder that can be written as --out"
    return ""


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip()}".splitlines()[0].rstrip(".: ")[:200]


class _Stopped(NamedTuple):
    """A worker's answer to a request to stop: the run stands in its checkpoint."""

    run: str


@dataclass
class _Worker:
    process: BaseProcess
    pipe: Connection
    run: str | None = None


def _run_side_by_side(queue: _Queue, directory: Path, jobs: int, options: Options) -> None:
    """Hand runs to worker processes over a pipe each; no lock is shared, so a killed worker cannot block the others."""
    workers: list[_Worker] = []
    told_to_stop = False
    with _stop_requests() as requests:
        try:
            while True:
                if requests and not told_to_stop:
                    told_to_stop = True
                    for worker in workers:
                        with suppress(OSError):  # it may just have ended; `_hear` will find out
                            worker.pipe.send(None)
                if len(requests) > 1:
                    raise KeyboardInterrupt
                if not requests:
                    _hand_out(queue, workers, directory, jobs, options)
                busy = [worker for worker in workers if worker.run is not None]
                if not busy:
                    break
                pipes.wait([worker.pipe for worker in busy], timeout=0.1)
                for worker in busy:
                    if not _hear(queue, worker):
                        workers.remove(worker)
        finally:
            for worker in workers:  # what they had to write is written
                worker.pipe.close()
                worker.process.kill()
            for worker in workers:
                worker.process.join()
    if requests:
        raise KeyboardInterrupt


def _hand_out(queue: _Queue, workers: list[_Worker], directory: Path, jobs: int, options: Options) -> None:
    while any(worker.run is None for worker in workers) or len(workers) < jobs:
        name = queue.take()
        if name is None:
            return
        idle = next((worker for worker in workers if worker.run is None), None)
        if idle is None:
            idle = _start_worker(directory, queue.experiment, options)
            workers.append(idle)
        idle.run = name
        idle.pipe.send(name)


def _start_worker(directory: Path, experiment: Experiment, options: Options) -> _Worker:
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=_work, args=(theirs, directory, experiment, options), daemon=True)
    # A terminal sends Ctrl-C to every process of a group, and a second one means "at once". A worker therefore never
    # hears a signal, only its parent. Blocked before it starts, since libraries start threads while they are imported.
    if hasattr(signal, "pthread_sigmask"):
        resource_tracker.ensure_running()  # starting it later would lift the block
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    else:
        process.start()
    theirs.close()
    return _Worker(process, mine)


def _hear(queue: _Queue, worker: _Worker) -> bool:
    """Take in what a worker said; False once it is gone."""
    name = worker.run
    assert name is not None
    try:
        while worker.run is not None and worker.pipe.poll():
            match worker.pipe.recv():
                case Update() | Said() as event:
                    queue.listen(event)
                case _Stopped():
                    worker.run = None
                case ending:
                    worker.run = None
                    queue.end(name, ending)
    except (EOFError, OSError):
        worker.run = None
        worker.pipe.close()
        worker.process.join()
        queue.end(name, _failure_from_exit(worker.process.exitcode or 0))
        return False
    return True


def _failure_from_exit(code: int) -> Failure:
    cause = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
    hint = ", perhaps for want of memory (fewer --jobs need less)" if code == -signal.SIGKILL else ""
    return Failure(f"its process {cause}{hint}; the same command goes on from the last checkpoint.", False)


@contextmanager
def _stop_requests() -> Iterator[list[int]]:
    """Collect Ctrl-C and SIGTERM instead of being stopped by them."""
    requests: list[int] = []
    if threading.current_thread() is not threading.main_thread():  # signals go to the main thread alone
        yield requests
        return

    def handle(number: int, frame: FrameType | None) -> None:
        requests.append(number)

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield requests
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _work(pipe: Connection, directory: Path, experiment: Experiment, options: Options) -> None:
    """A worker process: runs what its parent names, one after the other, and reports how they go."""
    stop = threading.Event()

    def listen(event: Event) -> None:
        try:
            pipe.send(event)
            if not stop.is_set() and pipe.poll() and pipe.recv() is None:
                stop.set()
        except (EOFError, OSError):  # the parent is gone
            stop.set()

    with suppress(EOFError, OSError):
        while (name := pipe.recv()) is not None:
            try:
                ending: dict[str, Any] | Failure = drain(_running(directory, experiment, name, options, listen, stop))
            except KeyboardInterrupt:
                pipe.send(_Stopped(name))
                return
            except Exception as error:
                ending = _failure(error, directory / name)
            pipe.send(ending)


def environment(device: str) -> dict[str, Any]:
    """Where and with what a result was made."""
    import pfedhn

    on_gpu = device.startswith("cuda")
    return {
        "device": f"cuda: {torch.cuda.get_device_name(device)}" if on_gpu else f"cpu: {processor_name()}",
        "threads": torch.get_num_threads(),
        "precision": "tf32" if on_gpu and torch.get_float32_matmul_precision() != "highest" else "fp32",
        "deterministic": torch.are_deterministic_algorithms_enabled() if on_gpu else True,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "cuda": torch.version.cuda if on_gpu else None,
        "pfedhn": pfedhn.__version__,
        "commit": commit(),
        "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


@lru_cache
def processor_name() -> str:
    """The processor as its maker calls it, where the system says."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return " ".join(found[1].split()) if found else platform.processor() or platform.machine()


@lru_cache
def commit() -> str | None:
    """The commit of the source, if it is known; PFEDHN_COMMIT says it where there is no repository."""
    if known := os.environ.get("PFEDHN_COMMIT"):
        return known

    def ask(*words: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()

    try:
        # A result of source that was changed since must not pass for the commit's own.
        return ask("rev-parse", "HEAD") + ("+changes" if ask("status", "--porcelain", "--", ".") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def rerun_command(experiment: Experiment, cell: Cell, seed: int, options: Options) -> str:
    """The command that repeats just this run."""
    words = [
        "pfedhn",
        "run",
        options.source or experiment.name,
        "--only",
        only_this(experiment, cell),
        "--seeds",
        str(seed),
    ]
    for text in options.assignments:
        words += ["--set", text]
    if options.rates is not None:
        words += ["--rates", str(options.rates)]
    words += ["--device", options.device]
    if options.executor != "auto":
        words += ["--executor", options.executor]
    if options.threads is not None:
        words += ["--threads", str(options.threads)]
    if options.precision != Options.precision:
        words += ["--precision", options.precision]
    if options.deterministic:
        words += ["--deterministic"]
    if options.data_dir is not None:
        words += ["--data-dir", str(options.data_dir)]
    return shlex.join(words)


def only_this(experiment: Experiment, cell: Cell) -> str:
    """What `--only` takes to leave one cell: the fewest of method, data set and clients, or else its name."""
    alike: Collection[Cell] = [other for other in experiment.cells if other.method == cell.method]
    chosen = [f"method={cell.method}"]
    for name in ("dataset", "clients"):
        if len({getattr(other, name) for other in alike}) > 1:
            chosen.append(f"{name}={getattr(cell, name)}")
    fitting = [other for other in alike if (other.dataset, other.clients) == (cell.dataset, cell.clients)]
    if len(fitting) == 1 and "," not in cell.dataset:
        return ",".join(chosen)
    place = next(number for number, other in enumerate(experiment.cells) if other == cell)
    return f"name={cell_names(experiment.cells)[place]}"
