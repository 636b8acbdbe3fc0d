"""A cell's data as a federation."""

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

import torch

from pfedhn import models
from pfedhn.data import catalogue as datasets
from pfedhn.data import partition
from pfedhn.data.dealing import share_out
from pfedhn.data.describe import LARGE, large_labels
from pfedhn.data.federation import Federation
from pfedhn.data.files import read_federation
from pfedhn.data.folders import is_client_folder
from pfedhn.data.notes import note
from pfedhn.data.tables import MIN_EXAMPLES, count_clients, earlier_task, table_task
from pfedhn.errors import UserError, closest, short
from pfedhn.experiments.spec import TABLE_ENDINGS, Cell, is_made, is_own_data
from pfedhn.settings import describe, fits, whole_number
from pfedhn.system.files import given_path, reading
from pfedhn.system.reference import find_code

PARTITIONS: dict[str, Callable[..., partition.Partition]] = {
    "by_classes": partition.by_classes,
    "dirichlet": partition.dirichlet,
    "by_group": partition.by_group,
    "by_coarse_class": partition.by_coarse_class,
}


OLD_SPELLINGS = {"normalise": "normalize", "pools": "apart"}
"""What files and stored results of earlier versions call a partition's settings and their values."""


def build_partition(cell: Cell) -> partition.Partition:
    settings = {
        OLD_SPELLINGS.get(name, name): OLD_SPELLINGS.get(value, value) if isinstance(value, str) else value
        for name, value in cell.partition.items()
    }
    settings = {name: None if value == "none" else value for name, value in settings.items()}
    rule = settings.pop("rule", None)
    if not isinstance(rule, str) or rule not in PARTITIONS:
        raise UserError(f"partition: there is no rule {rule!r}; {closest(str(rule), PARTITIONS)}")
    known = inspect.signature(PARTITIONS[rule]).parameters
    if "num_clients" in settings:
        raise UserError(
            "partition: num_clients is not given here; the field `clients` says how many clients there are."
        )
    if "num_clients" in known:
        settings["num_clients"] = cell.clients
    hints = get_type_hints(PARTITIONS[rule])
    _refuse_unknown(settings, known, f"partition {rule}")
    for name, value in settings.items():
        if not fits(value, hints[name]):
            raise UserError(f"partition {rule}: {name} = {value!r} does not fit; it must be {describe(hints[name])}.")
    missing = [n for n, p in known.items() if p.default is p.empty and n not in settings]
    if missing:
        raise UserError(f"partition {rule} needs {', '.join(missing)}.")
    return PARTITIONS[rule](**settings)


def _refuse_unknown(names: Iterable[str], known: Collection[str], what: str) -> None:
    for name in names:
        if name not in known:
            raise UserError(f"{what} has no setting {name!r}; {closest(name, known)}")


def build_federation(cell: Cell, seed: int, data_dir: Path | None = None, device: str = "cpu") -> Federation:
    seed = seed if cell.data_seed is None else cell.data_seed
    own = is_made(cell.dataset) or is_own_data(cell.dataset)
    if is_made(cell.dataset):
        federation = made(cell)(seed=seed)  # type: ignore[call-arg]
        if not isinstance(federation, Federation):
            raise UserError(f"{cell.dataset} makes a {type(federation).__name__}; it must return a pfedhn.Federation.")
    else:
        federation = _own_federation(cell, seed) if own else _known_federation(cell, seed, data_dir, device)
    fixed = own or cell.partition["rule"] in ("by_group", "by_coarse_class")
    if fixed and federation.num_clients != cell.clients:
        number = federation.num_clients
        raise UserError(f"clients = {cell.clients}, but {cell.dataset} has {number} clients; set clients = {number}.")
    if cell.descriptors == "class":
        federation = federation.with_descriptors(shares_of_classes(federation))
    if cell.sizes is None:
        return federation
    everybody = federation.num_clients + federation.num_joining
    names = [models.network_name(name) for name in cell.sizes]
    runs = [names[min(i, federation.num_clients - 1) * len(cell.sizes) // cell.clients] for i in range(everybody)]
    if cell.part is None:
        return federation.with_architectures(runs)
    return federation.only(
        [client for client in range(federation.num_clients) if runs[client] == models.network_name(cell.part)]
    )


def shares_of_classes(federation: Federation) -> torch.Tensor:
    """[N, classes]: the fraction of each class's training examples that a client has; those that join later last."""
    everybody = [federation, *([] if federation.joining is None else [federation.joining])]
    counts = torch.cat([part.class_shares * part.splits["train"].size[:, None] for part in everybody])
    return counts / counts.sum(0).clamp(min=1)


def made(cell: Cell) -> Callable[[], Federation]:
    """The function that makes the data of a cell, with its arguments, which `partition` holds."""
    function = find_code(cell.dataset)
    known = inspect.signature(function).parameters
    given = {} if cell.partition == Cell().partition else dict(cell.partition)
    _refuse_unknown(given, known, cell.dataset)
    try:
        inspect.signature(function).bind(cell.clients, seed=0, **given)
    except TypeError as error:
        form = f"def {function.__name__}(clients, seed)"
        raise UserError(f"{cell.dataset} cannot be called ({error}); it must begin with {form}.") from None
    return partial(function, cell.clients, **given)


def _own_federation(cell: Cell, seed: int) -> Federation:
    columns = table_columns(cell)
    for name in ("client", "label"):
        if is_table(cell) and f"{name}_column" not in columns:
            raise UserError(f'{cell.dataset} is a table; say which column is the {name}: columns.{name} = "...".')
    task: str = cell.task
    if task == "auto" and is_table(cell):
        task = earlier_task(cell.dataset, columns["label_column"])
    how: dict[str, Any] = {**columns, "task": task, **EARLIER_READ, **reading_options(cell)}
    how |= {"split": cell.split, "stratify": cell.stratify, "seed": seed}
    federation = read_federation(cell.dataset, **how)
    unscaled = [name for name in network_names(cell) if name.startswith(("mlp", "linear"))]
    if is_table(cell) and how["scale"] == "none" and unscaled:
        _warn_of_scales(Path(cell.dataset), unscaled[0], federation)
    _warn_of_labels(Path(cell.dataset), columns.get("label_column"), cell.task, federation)
    return federation


def is_table(cell: Cell) -> bool:
    """Whether a cell's data are a person's own table."""
    return not is_made(cell.dataset) and cell.dataset.lower().endswith(TABLE_ENDINGS)


def with_table_defaults(cell: Cell) -> Cell:
    """A cell of a person's own table with `TABLE_READ` and its task written down; any other cell as it is.

    The task stays "auto" while there is no such file or column.
    """
    if not is_table(cell):
        return cell
    cell, place, columns = (
        replace(cell, read={**TABLE_READ, **cell.read}),
        given_path(cell.dataset),
        table_columns(cell),
    )
    with reading(place):
        is_there = place.is_file() and "label_column" in columns
    if cell.task != "auto" or not is_there:
        return cell
    return replace(cell, task=table_task(place, columns["label_column"]))


def with_own_clients(cell: Cell) -> Cell:
    """A cell of a person's own data with their number of clients; the same cell if that is not known yet.

    Only the column of clients is read: `--set` may still change how the others are read.
    """
    place, columns = given_path(cell.dataset), table_columns(cell)
    if is_made(cell.dataset) or not is_own_data(cell.dataset):
        return cell
    with reading(place):
        has_column = place.is_file() and "client_column" in columns
        is_folder = place.is_dir()
        folders = [part for part in place.iterdir() if is_client_folder(part)] if is_folder else []
    least = whole_number("read.min_examples", {**EARLIER_READ, **cell.read}["min_examples"])
    number = count_clients(place, columns["client_column"], least) if has_column else len(folders)
    return replace(cell, clients=number) if number else cell


MANY = 100  # classes that a person seldom means
STANDARDIZE = "Standardize them (subtract that mean, divide by that deviation), and undo it in predictions."
SCALE = 'Set read = {scale = "all"}, which scales them, and undoes it in predictions.'


def _warn_of_labels(file: Path, column: str | None, task: str, federation: Federation) -> None:
    """Warn of labels as large as prices, which make training diverge, and of a quantity that is taken for classes."""
    labels = "the labels" if column is None else repr(column)
    key = f"{file.resolve()}: {labels}"
    if (scale := large_labels(federation)) is not None:
        note(
            key,
            "%s: the numbers to predict, %s, have mean %.4g and standard deviation %.4g, so that training learns badly "
            "or diverges. %s",
            *(file.name, labels, *scale, STANDARDIZE if federation.reading is None else SCALE),
        )
    if task != "auto" or federation.class_names is not None or federation.num_classes is None:
        return
    different = len(federation.y.unique())
    if different > MANY and 10 * different > len(federation.y):
        note(
            key,
            "%s: %s: %s different whole numbers, which are taken for classes; the network tells %s apart. For a "
            'quantity, set task = "regression"; for classes, task = "classification".',
            *(file.name, labels, f"{different:,}", f"{federation.num_classes:,}"),
        )


def _warn_of_scales(file: Path, model: str, federation: Federation) -> None:
    """Warn of columns as large as ages or prices, which hide the others: only a low accuracy would show it."""
    values = federation.x.double()
    mean, deviation = values.mean(0), values.std(0, correction=0)
    (large,) = torch.nonzero(torch.maximum(mean.abs(), deviation) > LARGE, as_tuple=True)
    if len(large):
        assert federation.reading is not None
        assert federation.reading.table is not None
        number = int(large[0])
        note(
            str(file.resolve()),
            "%s is not scaled: its column %r has mean %.4g and standard deviation %.4g, which %s learns badly from. "
            'Set read = {scale = "all"}, which scales columns over all clients\' training examples.',
            *(file.name, federation.reading.table.features[number], mean[number], deviation[number], model),
        )


COLUMNS = {"client": "client_column", "label": "label_column", "ignore": "ignore_columns"}


def table_columns(cell: Cell) -> dict[str, Any]:
    """The columns of a cell's table, as arguments of `read_federation`."""
    named: dict[str, Any] = {}
    _refuse_unknown(cell.columns, COLUMNS, "columns")
    for name, value in cell.columns.items():
        listed = [value] if name != "ignore" or isinstance(value, str) else value
        if not isinstance(listed, list | tuple) or not all(isinstance(part, str) for part in listed):
            form = 'a list of columns, as in ["visit_date"]' if name == "ignore" else "a column's name"
            raise UserError(f"columns.{name} = {short(value)} does not fit; give {form}.")
        named[COLUMNS[name]] = tuple(listed) if name == "ignore" else value
    return named


READ = ("resize", "channels", "corrupt", "encode", "missing", "fitted", "scale", "select", "min_examples")
TABLE_READ: Mapping[str, Any] = {
    **{"encode": "one-hot", "missing": "flag", "fitted": "all", "scale": "all", "select": "auto"},
    "min_examples": MIN_EXAMPLES,
}
"""How a table is read where an experiment file does not say it."""

EARLIER_READ: Mapping[str, Any] = {
    **{"encode": "refuse", "missing": "refuse", "fitted": "client", "scale": "none", "select": "all"},
    "min_examples": 1,
}
"""The same of a cell that does not say it: in runs of earlier versions, this is what was done."""


def reading_options(cell: Cell) -> dict[str, Any]:
    """How a cell's own data are read; `read_federation` checks the values."""
    _refuse_unknown(cell.read, READ, "read")
    return {name: tuple(value) if isinstance(value, list) else value for name, value in cell.read.items()}


def _known_federation(cell: Cell, seed: int, data_dir: Path | None, device: str) -> Federation:
    data = datasets.loaded(cell.dataset, data_dir)
    labels = data.y
    if cell.labels == "within-group":
        if data.within is None:
            raise UserError(f"{cell.dataset} has no groups to number labels within; use labels = 'global'.")
        labels = data.within
    assignment = share_out(
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
    x, palette = datasets.examples_on(cell.dataset, data_dir, device)
    return Federation.from_assignment(x, y, assignment, palette=palette).with_training_examples()


def preprocessing(cell: Cell) -> dict[str, Any] | None:
    """What the pixels of a known data set went through: divided by scale, less mean, divided by std."""
    source = datasets.DATASETS.get(cell.dataset)
    if source is None:
        return None
    return {"scale": 16.0 if cell.dataset == "digits" else 255.0, "mean": source.mean, "std": source.std}


def network_names(cell: Cell) -> Sequence[str]:
    """The target networks of a cell."""
    return [cell.part or cell.model] if cell.sizes is None or cell.part is not None else cell.sizes
