"""Your own table: a CSV, TSV, parquet or XLSX file with a column that names the client."""

import hashlib
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import NamedTuple

import numpy
from numpy.typing import NDArray

from pfedhn.data.arrays import Array, check_choice
from pfedhn.data.cells import Columns, check_columns, is_empty, is_table, read_columns
from pfedhn.data.columns import PLAIN, USUAL, Encoding, encoded, fitted
from pfedhn.data.dealing import Split
from pfedhn.data.federation import Federation
from pfedhn.data.labels import Resolved, Task, as_identifiers, as_labels, as_numbers, labelled, refuse_marks, task_of
from pfedhn.data.notes import note
from pfedhn.data.reading import Column, TableReading
from pfedhn.data.selection import refuse_variants, selected
from pfedhn.errors import UserError, short, some
from pfedhn.settings import whole_number
from pfedhn.system.files import given_path, reading

MIN_EXAMPLES = 10  # of a client that trains, where a person says nothing


class Table(NamedTuple):
    """A table of numbers with a client and a label for each example."""

    x: NDArray[numpy.float32]  # [examples, features]
    y: Array  # class numbers int64, or float32 where the labels have fractions
    groups: NDArray[numpy.int64]  # the client of each example
    client_names: tuple[str, ...]
    feature_names: tuple[str, ...]
    class_names: tuple[str, ...] | None  # of classes 0, 1, ... where the labels were text
    columns: tuple[Column, ...] = ()  # what the features were made of

    @property
    def clients(self) -> dict[str, tuple[Array, Array]]:
        """The examples (x, y) of each client by its name, as `Federation.from_clients` takes them."""
        owned = [self.groups == client for client in range(len(self.client_names))]
        return {name: (self.x[own], self.y[own]) for name, own in zip(self.client_names, owned, strict=True)}


def from_table(
    path: str | Path | Columns,
    client_column: str,
    label_column: str,
    task: Task = "auto",
    encoding: Encoding = PLAIN,
    ignore_columns: Sequence[str] = (),
) -> Table:
    """Your own data: a CSV, TSV, parquet or XLSX file with an example in each line.

    One column names the client, one the label; all others are numeric features. Text labels become class numbers
    0, 1, ... in sorted order; so do clients (whole numbers in their own order). Features are not scaled.

    Args:
        path: The file, or columns that were read. Cells of a .csv file are separated by commas; or by semicolons, where
            its first line has these and no commas, and then numbers may have decimal commas.
        client_column: The column that names the client.
        label_column: The column that holds the label.
        task: "classification" where labels are class numbers or names, "regression" where they are numbers to predict.
            With "auto" it is regression if some label has a fraction.
        encoding: How columns become numbers; texts and empty cells are refused by default. `read_federation` fills
            empty cells in, and here they are NaN.
        ignore_columns: Columns that are no features.

    Examples:
        >>> import pathlib, tempfile
        >>> from pfedhn.datasets import from_table
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "visits.csv"
        >>> _ = path.write_text("clinic,age,dose,outcome\\nlyon,61,0.5,well\\nparis,47,1.5,ill\\nlyon,55,1.0,ill\\n")
        >>> table = from_table(path, client_column="clinic", label_column="outcome")
        >>> table.client_names, table.groups, table.y
        (('lyon', 'paris'), array([0, 1, 0]), array([1, 0, 0]))

    To federate it: `Federation.from_clients(table.clients, class_names=table.class_names)`.
    """
    columns = used_columns(path, ignore_columns)
    return from_columns(columns, client_column, label_column, task, encoding, ignore_columns)


def used_columns(table: str | Path | Columns, ignore_columns: Sequence[str]) -> Columns:
    """The columns of a table that is a file, or that was read already; those that are ignored may hold anything."""
    if not isinstance(ignore_columns, Sequence) or isinstance(ignore_columns, str):
        raise UserError(f"ignore_columns is {short(ignore_columns)}; give a list of columns.")
    if isinstance(table, Columns):
        return table
    file = given_path(table)
    with reading(file):
        if not file.is_file():
            raise UserError(f"{file} is not a file; give a .csv, .tsv, .parquet or .xlsx file.")
    return read_columns(file, lambda name: name in ignore_columns)


def from_columns(
    columns: Columns,
    client_column: str,
    label_column: str,
    task: Task = "auto",
    encoding: Encoding = PLAIN,
    ignore_columns: Sequence[str] = (),
) -> Table:
    """A table from its columns; arguments as `from_table`."""
    features = _features(columns, client_column, label_column, ignore_columns)
    if encoding.select == "auto":
        features = selected(columns, features)
        refuse_variants(columns, label_column)
    x, described = encoded(columns, features, encoding)
    where = f"column {label_column!r} of {columns.file.name}"
    (y,), class_names = as_labels([as_numbers(columns[label_column])], task, where)
    clients, groups = numpy.unique(as_identifiers(columns[client_column]), return_inverse=True)
    client_names = tuple(map(str, clients.tolist()))
    names = tuple(feature for column in described for feature in column.features)
    return Table(x, y, groups.astype(numpy.int64), client_names, names, class_names, described)


def _features(columns: Columns, client_column: str, label_column: str, ignore_columns: Sequence[str]) -> list[str]:
    """The names of the columns that are neither client nor label nor ignored, in a table that is whole."""
    file, needed = columns.file, (client_column, label_column)  # nothing fills in their empty cells
    check_columns(file.name, columns, (*needed, *ignore_columns))
    if client_column == label_column:
        raise UserError(f"{label_column!r} cannot be both the client and the label; name two columns.")
    for name in needed:
        if name in ignore_columns:
            raise UserError(f"{name!r} cannot be ignored, since it is the client or the label; take it off that list.")
    features = [name for name in columns if name not in (*needed, *ignore_columns)]
    if not features:
        raise UserError(f"{file.name} has no feature columns; give it at least one besides client and label.")
    if not len(columns[label_column]):
        raise UserError(f"{file.name} has no examples, only the names of its columns; give it at least one per client.")
    for name in needed:
        cells = columns[name].tolist()
        empty = next((place for place, cell in enumerate(cells) if is_empty(cell)), None)
        if empty is not None:
            raise UserError(f"{columns.where(empty)} has no {name!r}; fill the cell or drop the example.")
        wrong = [cell for cell in cells if not isinstance(cell, str | int | float | Decimal)]
        if wrong:
            raise UserError(f"column {name!r} of {file.name} holds {short(wrong[0])}; give numbers or texts.")
    refuse_marks(columns, label_column)
    return features


def table_federation(
    columns: Columns,
    client_column: str,
    label_column: str,
    *,
    ignore_columns: Sequence[str] = (),
    task: Task = "auto",
    split: Split = (0.7, 0.15, 0.15),
    stratify: bool = False,
    seed: int = 0,
    encoding: Encoding = USUAL,
    min_examples: int = MIN_EXAMPLES,
) -> Federation:
    """The federation of a table; its `reading` tells how other examples are read alike.

    Args:
        columns: Of the table.
        client_column: As for `read_federation`, and so all others but `encoding`.
        label_column: The column that holds the label.
        ignore_columns: Columns that are no features.
        task: What the labels are.
        split: The fractions of a client's examples for training, validation and test, or a `Fold`.
        stratify: Draw each client's split within each of its classes.
        seed: The seed of the split.
        encoding: How columns become numbers.
        min_examples: The fewest examples of a client that trains.
    """
    whole_number("min_examples", min_examples)
    check_choice("task", task, Task)
    sha256 = file_digest(columns.file) if is_table(columns.file) else columns_digest(columns)
    if client_column != label_column and label_column not in ignore_columns:  # which is refused below
        columns = labelled(columns, label_column)
    if task == "auto":
        _features(columns, client_column, label_column, ignore_columns)  # which refuses what has no task
        task = task_of(columns, label_column)
    table = from_columns(columns, client_column, label_column, task, encoding, ignore_columns)
    table = _with_enough(table, columns.file, client_column, min_examples)
    if table.y.min() == table.y.max():
        label = table.class_names[int(table.y[0])] if table.class_names else table.y[0]
        raise UserError(
            f"every label in column {label_column!r} of {columns.file.name} is {str(label)!r}, so there is nothing to "
            "learn; name another column."
        )
    # It is split first: the numbers to fill in and to scale by come from training examples.
    rows = table._replace(x=numpy.arange(len(table.y))[:, None])  # type: ignore[arg-type]
    federation = Federation.from_clients(
        rows.clients, split=split, stratify=stratify, seed=seed, class_names=table.class_names
    )
    how = TableReading(client_column, label_column, table.columns, encoding.missing, encoding.fitted, sha256=sha256)
    return fitted(federation, table.x, how, encoding.scale)


def _with_enough(table: Table, file: Path, client_column: str, least: int) -> Table:
    """The table without the clients that have too few examples, who are named in a note."""
    counts = numpy.bincount(table.groups)
    number, large = len(counts), numpy.flatnonzero(counts >= least)
    if number == 1:
        raise UserError(
            f"all examples of {file.name} are of one client, {table.client_names[0]!r} in column {client_column!r}; a "
            "federation needs at least 2."
        )
    way_out = f"read = {{min_examples = N}} (in Python, min_examples=N) sets another number than {least}"
    if len(large) < 2:
        raise UserError(
            f"{len(large)} of the {number:,} clients of {file.name} have at least {least} examples, and a federation "
            f"needs at least 2 such clients; {way_out}."
        )
    if len(large) == number:
        return table
    small = [table.client_names[client] for client in numpy.flatnonzero(counts < least)]
    note(
        f"{file.resolve()}: clients with fewer than {least} examples",
        "%s: %s of %s clients have fewer than %s examples and do not train: %s. With some examples they can join later "
        "by `pfedhn add-client`; %s.",
        *(file.name, f"{len(small):,}", f"{number:,}", least, some(small), way_out),
    )
    kept = numpy.flatnonzero(counts[table.groups] >= least)
    return table._replace(
        x=table.x[kept],
        y=table.y[kept],
        groups=numpy.searchsorted(large, table.groups[kept]),
        client_names=tuple(table.client_names[client] for client in large),
    )


def file_digest(file: Path) -> str:
    """The SHA-256 of a file."""
    with reading(file), file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def columns_digest(columns: Columns) -> str:
    """The SHA-256 of a table's cells and their columns' names."""
    digest = hashlib.sha256()
    for name, cells in columns.items():
        digest.update("\0".join([name, *map(str, cells.tolist()), ""]).encode())
    return digest.hexdigest()


def table_task(table: str | Path | Columns, label_column: str) -> Resolved:
    """What `task = "auto"` means for a table, whatever its other columns hold: see `task_of`."""
    columns = table if isinstance(table, Columns) else _only(given_path(table), label_column)
    return task_of(labelled(columns, label_column), label_column)


def earlier_task(path: str | Path, label_column: str) -> Resolved:
    """What `task = "auto"` meant in earlier versions: numbers are a quantity only if some has a fraction."""
    labels = as_numbers(_only(given_path(path), label_column)[label_column])
    return "regression" if labels.dtype.kind == "f" else "classification"


def _only(file: Path, column: str) -> Columns:
    """A table of which one column is read."""
    columns = read_columns(file, lambda name: name != column)
    check_columns(file.name, columns, [column])
    return columns


def client_sizes(
    table: str | Path | Columns, client_column: str, min_examples: int = 1, label_column: str | None = None
) -> list[int]:
    """The number of examples of each client of a table that trains; [] if there is no such column.

    Args:
        table: The file, or its columns.
        client_column: The column that names the client.
        min_examples: The fewest examples of such a client.
        label_column: The column of the label, without which a row is no example.
    """
    columns = table
    if not isinstance(columns, Columns):
        columns = read_columns(given_path(columns), lambda name: name not in (client_column, label_column))
    if label_column is not None and label_column != client_column:
        columns = labelled(columns, label_column)
    cells = as_identifiers(columns[client_column]) if client_column in columns else numpy.empty(0)
    sizes: list[int] = numpy.unique(cells, return_counts=True)[1].tolist()
    return [size for size in sizes if size >= min_examples]
