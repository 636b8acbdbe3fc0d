"""A cell's data as a federation."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

import torch

from pfedhn import models
from pfedhn.data import catalogue as datasets
from pfedhn.data import partition
from pfedhn.data.dealing import Fold, Split, check_folds, share_out
from pfedhn.data.describe import LARGE, large_labels
from pfedhn.data.federation import Federation
from pfedhn.data.files import read_federation
from pfedhn.data.notes import note
from pfedhn.data.silos import SILOS, read_table
from pfedhn.data.tables import earlier_task
from pfedhn.errors import UserError, closest
from pfedhn.experiments.spec import Cell, is_made, is_own_data, is_table
from pfedhn.experiments.tables import EARLIER_READ, reading_options, refuse_unknown, table_columns
from pfedhn.settings import describe, fits
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
    refuse_unknown(settings, known, f"partition {rule}")
    for name, value in settings.items():
        if not fits(value, hints[name]):
            raise UserError(f"partition {rule}: {name} = {value!r} does not fit; it must be {describe(hints[name])}.")
    missing = [n for n, p in known.items() if p.default is p.empty and n not in settings]
    if missing:
        raise UserError(f"partition {rule} needs {', '.join(missing)}.")
    return PARTITIONS[rule](**settings)


def build_federation(cell: Cell, seed: int, data_dir: Path | None = None, device: str = "cpu") -> Federation:
    dealt = dealing(cell, seed)
    own = is_made(cell.dataset) or is_table(cell.dataset) or is_own_data(cell.dataset)
    if is_made(cell.dataset):
        if cell.folds is not None:
            raise UserError(
                f"{cell.dataset} splits what it makes, so `folds` = {cell.folds} has no effect; leave it out."
            )
        federation = made(cell)(seed=dealt["seed"])  # type: ignore[call-arg]
        if not isinstance(federation, Federation):
            raise UserError(f"{cell.dataset} makes a {type(federation).__name__}; it must return a pfedhn.Federation.")
    else:
        federation = _own_federation(cell, dealt, data_dir) if own else _known_federation(cell, dealt, data_dir, device)
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


def dealing(cell: Cell, seed: int) -> dict[str, Any]:
    """How a run divides each client's examples: `split`, `stratify` and `seed`, as a federation is made with."""
    split: Split = cell.split
    if cell.folds is not None:
        check_folds(cell.folds)
        split = Fold(seed % cell.folds, cell.folds)
        seed = 0  # one partition for all folds
    return {"split": split, "stratify": cell.stratify, "seed": seed if cell.data_seed is None else cell.data_seed}


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
    refuse_unknown(given, known, cell.dataset)
    try:
        inspect.signature(function).bind(cell.clients, seed=0, **given)
    except TypeError as error:
        form = f"def {function.__name__}(clients, seed)"
        raise UserError(f"{cell.dataset} cannot be called ({error}); it must begin with {form}.") from None
    return partial(function, cell.clients, **given)


def _own_federation(cell: Cell, dealt: Mapping[str, Any], data_dir: Path | None) -> Federation:
    columns, has_table = table_columns(cell), is_table(cell.dataset)
    for name in ("client", "label"):
        if has_table and f"{name}_column" not in columns:
            raise UserError(f'{cell.dataset} is a table; say which column is the {name}: columns.{name} = "...".')
    task: str = cell.task
    if task == "auto" and has_table:
        silo = SILOS.get(cell.dataset)
        task = earlier_task(cell.dataset, columns["label_column"]) if silo is None else silo.task
    how: dict[str, Any] = {**columns, "task": task, **EARLIER_READ, **reading_options(cell), **dealt}
    federation = read_federation(read_table(cell.dataset, data_dir), **how)
    unscaled = [name for name in network_names(cell) if name.startswith(("mlp", "linear"))]
    if has_table and how["scale"] == "none" and unscaled:
        _warn_of_scales(Path(cell.dataset), unscaled[0], federation)
    _warn_of_labels(Path(cell.dataset), columns.get("label_column"), cell.task, federation)
    return federation


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


def _known_federation(cell: Cell, dealt: Mapping[str, Any], data_dir: Path | None, device: str) -> Federation:
    data = datasets.loaded(cell.dataset, data_dir)
    labels = data.y
    if cell.labels == "within-group":
        if data.within is None:
            raise UserError(f"{cell.dataset} has no groups to number labels within; use labels = 'global'.")
        labels = data.within
    assignment = share_out(
        data.y,
        build_partition(cell),
        test_labels=data.test_y,
        groups=None if data.groups is None else data.groups.numpy(),
        coarse=None if data.coarse is None else data.coarse.numpy(),
        test_coarse=None if data.test_coarse is None else data.test_coarse.numpy(),
        **dealt,
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
