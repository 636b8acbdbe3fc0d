"""Experiments: named sets of cells from names, files and command lines; a cell as data, network and method."""

import hashlib
import inspect
import json
import os
import re
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_type_hints

import numpy
import torch

import pfedhn.models as models
from pfedhn import datasets, partition
from pfedhn.algorithm import Factory
from pfedhn.algorithms import ALGORITHMS
from pfedhn.checkpoint import one_at_a_time, write_atomically
from pfedhn.federation import Federation, share_out
from pfedhn.params import Params
from pfedhn.run import (
    AnyAlgorithm,
    RunError,
    build_algorithm,
    build_model,
)
from pfedhn.settings import (
    SettingError,
    build,
    checked,
    closest,
    describe,
    fits,
    parse_assignments,
    parse_value,
    to_toml,
)
from pfedhn.simulate import Schedule, Simulation

PARTITIONS: dict[str, Callable[..., partition.Partition]] = {
    "by_classes": partition.by_classes,
    "dirichlet": partition.dirichlet,
    "by_group": partition.by_group,
    "by_coarse_class": partition.by_coarse_class,
}
LENET_SIZES = {"lenet": 16, "lenet-s": 8, "lenet-m": 16, "lenet-l": 32}
TABLE_ENDINGS = (".csv", ".tsv", ".parquet")
COUNTS = ("local_steps", "outer_steps", "inner_steps", "embedding_dim", "hidden_dim")
"""Settings of methods of which there must be one; of all other numbers, none may be negative."""
FEDERATION_FIELDS = ("dataset", "clients", "partition", "split", "stratify", "data_seed", "labels", "columns")


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
    settings = checked(kind, cell.settings, cell.method)
    for name, value in settings.items():
        least = 1 if name in COUNTS else 0
        if isinstance(value, int | float) and value < least:
            raise SettingError(f"{cell.method}: {name} = {value} does not fit; it must be at least {least}.")
    return build_algorithm(cell.method, settings)


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
    file.parent.mkdir(parents=True, exist_ok=True)
    with one_at_a_time(file.parent):
        table = read_rates(file) if file.exists() else {}
        table[experiment] = {**table.get(experiment, {}), **rates}
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


CELL_TABLES = ("partition", "settings", "columns")  # fields that are tables, which "partition.alpha" reaches into


def _with_values(cell: Cell, values: Mapping[str, Any]) -> Cell:
    """A cell with some fields or method settings changed; "partition.alpha" reaches into a table."""
    names = [item.name for item in fields(Cell)]
    table = asdict(cell)
    for name, value in values.items():
        head, _, rest = name.partition(".")
        if name in names:
            table[name] = _joined(name, table[name], value) if isinstance(value, Mapping) else value
        elif rest and head in CELL_TABLES:
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
    # A new partition rule first: it clears the settings of the old one, not those given beside it.
    for name, value in sorted(values.items(), key=lambda item: not item[0].endswith("partition.rule")):
        if not any(_aim(name, cell) for cell in cells):
            if name == "seeds":
                raise SettingError("--set changes fields of cells; the seeds are given as --seeds 0,1,2.")
            raise SettingError(f"--set: no cell has a field {name!r}; {closest(name, _names_to_set(cells))}")
        for number, cell in enumerate(cells):
            if (target := _aim(name, cell)) is not None:
                if target == "dataset" and isinstance(value, str):
                    value = _absolute(value, Path.cwd())
                cells[number] = _with_values(cell, {target: value})
    return replace(experiment, cells=_distinct(cells))


def assignments_for(texts: Iterable[str], cells: Collection[Cell]) -> list[str]:
    """Those of the texts given to `--set` that change one of the cells."""
    return [text for text in texts if any(_aim(name, cell) for name in parse_assignments([text]) for cell in cells)]


def refuse_without_effect(texts: Sequence[str], cells: Collection[Cell]) -> None:
    """What was given to `--set` must be a field or setting of a run that was chosen, or nobody would notice a slip."""
    for text in texts:
        if not assignments_for([text], cells):
            methods = ", ".join(dict.fromkeys(cell.method for cell in cells))
            name = text.partition("=")[0].strip()
            raise SettingError(
                f"--set {text} changes none of the chosen runs ({methods}); {closest(name, _names_to_set(cells))}"
            )


def _aim(name: str, cell: Cell) -> str | None:
    """What an assignment changes in a cell: a field, or a setting of its method; None if it is not meant."""
    head, _, rest = name.partition(".")
    if head in ALGORITHMS and rest:
        if head != cell.method:
            return None
        name = rest
    is_field = name in {item.name for item in fields(Cell)} or name.partition(".")[0] in CELL_TABLES
    return name if is_field or name in _setting_names(cell.method) else None


def _names_to_set(cells: Iterable[Cell]) -> list[str]:
    return sorted({item.name for item in fields(Cell)}.union(*(_setting_names(cell.method) for cell in cells)))


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
        there = [f"{name} is {_values_of(name, all_runs)}" for name in wanted]
        raise SettingError(f"--only {' '.join(only)} leaves no run of {experiment.name!r}, where {'; '.join(there)}.")
    return chosen


def _values_of(field: str, runs: Mapping[str, tuple[Cell, int]]) -> str:
    """Every value that a field of an experiment has; "pfedhn, local or fedavg"."""
    values = [{"name": run.rpartition("-seed")[0], **flat_fields(cell)}.get(field) for run, (cell, _) in runs.items()]
    words = list(dict.fromkeys("none" if value is None else str(value) for value in values))
    return " or ".join([*([", ".join(words[:-1])] if words[:-1] else []), words[-1]])


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


def forget_datasets() -> None:
    """Let go of the data sets that were read; worker processes read their own."""
    _dataset.cache_clear()
    _rows_on.cache_clear()


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
    if cell.dataset.lower().endswith(TABLE_ENDINGS):
        table = _table(cell)
        rows = [numpy.flatnonzero(table.groups == client) for client in range(len(table.client_names))]
        clients = [(table.x[own], table.y[own]) for own in rows]
    else:
        _, clients = datasets.from_folders(cell.dataset)
    return Federation.from_clients(clients, split=cell.split, stratify=cell.stratify, seed=seed)


def _table(cell: Cell) -> datasets.Table:
    if missing := [name for name in ("client", "label") if name not in cell.columns]:
        raise SettingError(
            f'{cell.dataset} is a table; say which column is the {missing[0]}: columns.{missing[0]} = "...".'
        )
    return datasets.from_table(cell.dataset, cell.columns["client"], cell.columns["label"])


def names_in_data(cell: Cell) -> tuple[list[str], list[str]]:
    """What a person's own data call the clients and the classes; nothing where they have numbers only."""
    if not is_own_data(cell.dataset):
        return [], []
    if not cell.dataset.lower().endswith(TABLE_ENDINGS):
        return datasets.from_folders(cell.dataset)[0], []
    table = _table(cell)
    return table.client_names, table.label_names


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
    return _factory(cell.model, federation.num_classes or 1, tuple(federation.x.shape[1:]))


@lru_cache
def _factory(name: str, num_classes: int, shape: tuple[int, ...]) -> Factory:
    """The same object for the same network: runs whose models are equal share what was traced and compiled."""
    if name in LENET_SIZES:
        return lambda: models.LeNet(num_classes, LENET_SIZES[name], shape[0])
    if name == "omniglot":
        return lambda: models.OmniglotNet(num_classes)
    hidden = [int(width) for width in name.split("-")[1:]]
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


def find_run(experiment: Experiment, name: str) -> tuple[Cell, int]:
    """The cell and the seed of a run, also of a seed that was given on the command line."""
    _, separator, seed = name.rpartition("-seed")
    runs = replace(experiment, seeds=(int(seed),)).runs() if separator and re.fullmatch(r"-?\d+", seed) else {}
    if name not in runs:
        raise RunError(f"{experiment.name!r} has no run {name!r}.")
    return runs[name]


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
